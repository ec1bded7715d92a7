# SPDX-License-Identifier: Apache-2.0
"""The plan: which passes run, where every matrix waits, where every buffer lies, what it all costs in bytes."""

from dataclasses import dataclass

from ooc.plan.grid import Grid, Stretch
from ooc.plan.placement import Buffer
from ooc.plan.workload import Direction, Fate, Kind, Matrix, Pull, Stage


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Where one matrix waits: its first ``resident_rows`` rows in ``tier``, the rest on the SSD."""

    matrix: Matrix
    grid: Grid
    tier: Fate
    resident_rows: int

    @property
    def resident(self) -> bool:
        return self.resident_rows >= self.matrix.rows

    @property
    def spill_nbytes(self) -> int:
        """Bytes of the scratch file this matrix needs on the SSD."""
        return 0 if self.resident or self.matrix.kind is Kind.STORE else self.grid.file_nbytes


@dataclass(frozen=True, slots=True)
class RowPass:
    """Run ``stage`` block by block. With ``pull``, its source is resident and pulled as the block is computed."""

    index: int
    stage: Stage
    loads: tuple[str, ...]
    pull: Pull | None


@dataclass(frozen=True, slots=True)
class ColumnPass:
    """Pull ``pull.source`` into the ``rows`` rows of ``pull.output``, one slab of columns after the other."""

    index: int
    rows: int
    pull: Pull
    slab_buffers: int


Pass = RowPass | ColumnPass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes one run of a program moves between memory and SSD, by matrix and in all."""

    read_bytes: int
    write_bytes: int


READ_SLOTS = 3
"""Row blocks in memory per streamed input: one being computed on, two being read."""
WRITE_SLOTS = 2
"""Row blocks in memory per streamed output: one being computed, one being written."""
TOPOLOGY_SLOTS = 3
"""Stretches of topology in memory: one in use, two being read."""


COLUMN_TILE_ROWS = 2048
"""Rows of a slab that one thread pulls at a time; sums of different rows are independent, so any number would do."""


@dataclass(frozen=True)
class Plan:
    """Plain data. ``buffers`` maps ``pass/purpose/matrix`` or ``resident/matrix/program`` to a place in an arena.

    ``recomputed`` matrices are never kept. ``scratch_bytes`` bounds the computation's temporaries, which lie beside
    the device arena and count like it.
    """

    rows: int
    tile_rows: int
    block_rows: int
    matrices: dict[str, MatrixPlan]
    recomputed: tuple[Matrix, ...]
    topologies: dict[Direction, Fate]
    stretches: dict[Direction, list[Stretch]]
    programs: dict[str, tuple[Pass, ...]]
    buffers: dict[str, Buffer]
    traffic: dict[str, Traffic]
    device_arena_bytes: int
    host_arena_bytes: int
    scratch_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    device_limit_bytes: int
    host_limit_bytes: int

    @property
    def spill_bytes(self) -> int:
        """Free disk the run needs."""
        return sum(m.spill_nbytes for m in self.matrices.values())

    @property
    def ssd_read_bytes(self) -> int:
        """Bytes read from the SSD in one training epoch."""
        return self.traffic["train"].read_bytes

    @property
    def ssd_write_bytes(self) -> int:
        """Bytes written to the SSD in one training epoch."""
        return self.traffic["train"].write_bytes

    @property
    def ssd_bytes(self) -> int:
        """Bytes moved to and from the SSD in one training epoch."""
        return self.ssd_read_bytes + self.ssd_write_bytes

    def summary(self) -> list[dict[str, str | int]]:
        """One row a matrix, for a table: matrix, rows, columns, bytes, fate, resident (per cent), slabs."""
        table: list[dict[str, str | int]] = []
        for name, planned in self.matrices.items():
            matrix = planned.matrix
            share = 100 * planned.resident_rows // max(1, matrix.rows)
            in_memory = f"{planned.tier.value}"
            fate = in_memory if share == 100 else "ssd" if share == 0 else f"{in_memory} + ssd"
            table.append(
                {
                    "matrix": name,
                    "rows": matrix.rows,
                    "columns": matrix.columns,
                    "bytes": matrix.nbytes,
                    "fate": fate,
                    "resident": share,
                    "slabs": planned.grid.slabs,
                }
            )
        for recomputed in self.recomputed:
            table.append(
                {
                    "matrix": recomputed.name,
                    "rows": recomputed.rows,
                    "columns": recomputed.columns,
                    "bytes": recomputed.nbytes,
                    "fate": "recompute",
                    "resident": 0,
                    "slabs": 1,
                }
            )
        for direction, tier in self.topologies.items():
            edges = self.stretches[direction][-1].edge_stop if self.stretches[direction] else 0
            table.append(
                {
                    "matrix": f"{direction.value}-edges",
                    "rows": edges,
                    "columns": 1,
                    "bytes": edges * 4,
                    "fate": tier.value,
                    "resident": 0 if tier is Fate.SSD else 100,
                    "slabs": 1,
                }
            )
        return table
