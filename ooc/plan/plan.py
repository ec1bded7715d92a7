# SPDX-License-Identifier: Apache-2.0
"""The plan: which passes run, what memory each of them works in, and the programs that this unrolls to.

All memory of a run is one arena of equal frames. A *region* is a row of frames that holds a pulled matrix, or
slabs of one, contiguous; every other frame holds one block at a time. ``ooc.plan.program`` says which, when.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ooc.plan.grid import Grid, align_up
from ooc.plan.program import Program, found_in_memory
from ooc.plan.sequence import BlockTable, Use
from ooc.plan.workload import Direction, Fate, Kind, Matrix, Pull, Stage, Topology


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How one matrix is cut, and whether it waits whole in a region, never touching the SSD.

    Regions hold values of ``region_itemsize`` bytes, those the kernels compute with; blocks may hold narrower ones.
    """

    matrix: Matrix
    grid: Grid
    region_itemsize: int
    whole: bool = False

    @property
    def region_nbytes(self) -> int:
        """Bytes of the matrix whole in a region."""
        return self.matrix.rows * self.matrix.columns * self.region_itemsize

    def slab_stride(self) -> int:
        """Bytes from one slab buffer to the next."""
        return align_up(self.grid.rows * self.grid.width(0) * self.region_itemsize)


@dataclass(frozen=True, slots=True)
class RowPass:
    """Run ``stage`` step by step. With ``pull``, its source is in memory whole and pulled as the step is computed.

    ``loads`` are the stage's, and what the pull or the pass before it adds.
    """

    index: int
    stage: Stage
    loads: tuple[str, ...]
    pull: Pull | None

    @property
    def rows(self) -> int:
        """Rows that this pass computes."""
        return self.stage.rows

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.loads, self.pull.source) if self.pull else self.loads

    @property
    def stores(self) -> tuple[str, ...]:
        return self.stage.stores


@dataclass(frozen=True, slots=True)
class ColumnPass:
    """Pull ``pull.source`` into the ``rows`` rows of ``pull.output``, one slab of columns after the other.

    ``slab_buffers`` slabs of the source are in memory at a time; the first ones were computed right into them.
    """

    index: int
    rows: int
    pull: Pull
    slab_buffers: int

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.pull.source, *self.pull.own)

    @property
    def stores(self) -> tuple[str, ...]:
        return (self.pull.output,)


Pass = RowPass | ColumnPass


@dataclass(frozen=True, slots=True)
class Region:
    """``count`` frames from ``frame`` on that hold ``matrix`` from pass ``first`` to pass ``last``, both included."""

    matrix: str
    frame: int
    count: int
    first: int
    last: int

    @property
    def stop(self) -> int:
        return self.frame + self.count


@dataclass(frozen=True)
class Plan:
    """Plain data. ``regions`` and ``unrolled`` are by program; passes are counted within their program.

    ``recomputed`` matrices are never kept. ``scratch_bytes`` bounds the computation's temporaries, which lie beside
    the arena and count like it. The arena's first ``device_arena_bytes`` count as the device's, the rest as the
    host's: on the CPU both are the same memory, and no block is ever copied from one to the other.
    """

    rows: int
    tile_rows: int
    step_rows: int
    frame_bytes: int
    frames: int
    matrices: dict[str, MatrixPlan]
    recomputed: tuple[Matrix, ...]
    topologies: dict[Direction, Topology]
    blocks: BlockTable
    programs: dict[str, tuple[Pass, ...]]
    regions: dict[str, tuple[Region, ...]]
    unrolled: dict[str, Program]
    scratch_bytes: int
    fixed_device_bytes: int
    fixed_host_bytes: int
    device_limit_bytes: int
    host_limit_bytes: int

    @property
    def arena_bytes(self) -> int:
        return self.frames * self.frame_bytes

    @property
    def device_arena_bytes(self) -> int:
        """The arena's share of the device budget: all that fits it."""
        return min(self.arena_bytes, self.device_limit_bytes - self.fixed_device_bytes - self.scratch_bytes)

    @property
    def device_peak_bytes(self) -> int:
        return self.fixed_device_bytes + self.scratch_bytes + self.device_arena_bytes

    @property
    def host_peak_bytes(self) -> int:
        return self.fixed_host_bytes + self.arena_bytes - self.device_arena_bytes

    @property
    def spill_bytes(self) -> int:
        """Free disk the run needs."""
        return sum(self.matrices[name].grid.file_nbytes for name in self.spilled)

    @cached_property
    def spilled(self) -> frozenset[str]:
        """The matrices of which some program writes a block to the SSD."""
        stored = (block for program in self.unrolled.values() for blocks in program.store for block in blocks)
        return frozenset(self.blocks.where(block)[0] for block in stored)

    @property
    def ssd_read_bytes(self) -> int:
        """Bytes read from the SSD in one training epoch, once the first has filled the memory."""
        return self.unrolled["train"].read_bytes

    @property
    def ssd_write_bytes(self) -> int:
        """Bytes written to the SSD in one training epoch."""
        return self.unrolled["train"].write_bytes

    @cached_property
    def hit_rate(self) -> float:
        """The part of a training epoch's reads of blocks that find them in memory."""
        program = self.unrolled["train"]
        found = found_in_memory(program.uses, program.kept)
        reads = [hit for hit, span in zip(found, program.uses.spans, strict=True) if span.use is not Use.WRITE]
        return sum(reads) / len(reads) if reads else 1.0

    @property
    def ssd_bytes(self) -> int:
        """Bytes moved to and from the SSD in one training epoch."""
        return self.ssd_read_bytes + self.ssd_write_bytes

    def summary(self) -> list[dict[str, str | int]]:
        """One row a matrix, for a table: matrix, rows, columns, bytes, fate, resident (per cent), slabs.

        ``resident`` is the share of what an epoch reads of the matrix that is in memory already.
        """
        table: list[dict[str, str | int]] = []
        shares = self.unrolled["train"].shares_in_memory(self.blocks)
        for name, planned in self.matrices.items():
            share = 100 if planned.whole else shares.get(name, 0)
            table.append(_line(planned.matrix, planned.matrix.rows, share, planned.grid.slabs))
        for matrix in self.recomputed:
            table.append({**_line(matrix, matrix.rows, 0, 1), "fate": Fate.RECOMPUTE.value})
        for direction, topology in self.topologies.items():
            name = edges_name(direction)
            matrix = Matrix(name, topology.edges, 1, topology.index_itemsize, Kind.STORE)
            table.append(_line(matrix, topology.edges, shares.get(name, 0), 1))
        return table


def _line(matrix: Matrix, rows: int, share: int, slabs: int) -> dict[str, str | int]:
    fate = Fate.HOST.value if share == 100 else Fate.SSD.value if share == 0 else f"{Fate.HOST.value} + ssd"
    return {
        "matrix": matrix.name,
        "rows": rows,
        "columns": matrix.columns,
        "bytes": matrix.nbytes,
        "fate": fate,
        "resident": share,
        "slabs": slabs,
    }


def edges_name(direction: Direction) -> str:
    """What the topology of ``direction`` is called among the matrices: ``in-edges``, ``out-edges``."""
    return f"{direction.value}-edges"


def passes_using(passes: Sequence[Pass], name: str) -> list[int]:
    """The passes that read or write matrix ``name``, by their index."""
    return [step.index for step in passes if name in step.reads or name in step.stores]
