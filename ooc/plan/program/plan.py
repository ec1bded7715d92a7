# SPDX-License-Identifier: Apache-2.0
"""The plan: which passes run, what memory each of them works in, and the unrolled programs.

All memory that is computed in is one arena of equal frames. A *region* is a contiguous row of frames that holds a
pulled matrix, or slabs of one. Every other frame holds one block at a time; ``ooc.plan.program.program`` says which
block, and when. If the device has memory of its own, that arena is the device's, and a second arena of equally large
frames lies in host memory. Every block to or from the device goes through a host frame, and blocks that cannot wait
there go on to the SSD (``ooc.plan.program.staging``).
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

from ooc.plan.layout.layout import Layout
from ooc.plan.layout.passes import edges_name, pulled_columns, shuffles_in, streamed_read_bytes, streamed_write_bytes
from ooc.plan.layout.shuffle import BucketedRows, PartialSums, Shuffle
from ooc.plan.program.program import Program, found_in_memory
from ooc.plan.program.received import Forms, Received, Receiver
from ooc.plan.program.sequence import BlockTable, Use
from ooc.plan.program.staging import Staging
from ooc.plan.workload import EdgesKey, Fate, Kind, Matrix, Share, Topology
from ooc.sizes import format_size


class Shares(NamedTuple):
    """Where the bytes read of a matrix wait until then, or whether they are recomputed, in per cent; the sum is 100."""

    device: int
    host: int
    ssd: int
    recompute: int = 0

    def with_recomputed(self, nbytes: int, *, of: int) -> Self:
        """Return these shares, of ``of`` bytes, with ``nbytes`` more bytes that are recomputed."""
        recompute = 100 * nbytes // (of + nbytes)
        waiting = [share * (100 - recompute) // 100 for share in (self.device, self.host, self.ssd)]
        waiting[waiting.index(max(waiting))] += 100 - recompute - sum(waiting)
        device, host, ssd = waiting
        return self._replace(device=device, host=host, ssd=ssd, recompute=recompute)

    @property
    def fate(self) -> str:
        """The tiers that hold some of the matrix, as ``host`` or ``host + ssd``, and ``recompute``."""
        return " + ".join(fate.value for fate, share in zip(Fate, self, strict=True) if share)


@dataclass(frozen=True, repr=False, kw_only=True)
class Plan(Layout):
    """A layout, unrolled to programs. ``regions``, ``unrolled`` and ``staged`` are by program; passes are numbered
    within their program.

    ``share``: what this process computes, if there are several; regions hold the rows of all. ``state_bytes``:
    optimizer state that a step reads and writes. ``recomputed`` matrices are never kept. ``scratch_bytes`` bounds the
    temporaries, which lie beside the arena and count like it. ``retainable_bytes``: what could be retained for other
    passes, as far as the budgets have room.

    On the CPU both budgets are of the same memory, and no block is copied from one to the other. The first
    ``device_arena_bytes`` of the one arena count as the device's, the rest as the host's. If the device has memory of
    its own, ``staged`` holds the program of the ``host_frames`` below each of ``unrolled``; otherwise it is empty.
    """

    rows: int
    tile_rows: int
    frames: int
    recomputed: tuple[Matrix, ...]
    topologies: dict[EdgesKey, Topology]
    blocks: BlockTable
    unrolled: dict[str, Program]
    fixed_device_bytes: int
    fixed_host_bytes: int
    device_limit_bytes: int
    host_limit_bytes: int
    state_bytes: int = 0
    share: Share | None = None
    host_frames: int = 0
    staged: dict[str, Staging] = field(default_factory=dict)
    retainable_bytes: int = 0

    def __repr__(self) -> str:
        """One line, since an unrolled program has a hundred thousand steps."""
        peaks = f"device {format_size(self.device_peak_bytes)}, host {format_size(self.host_peak_bytes)}"
        moved = f"{format_size(self.ssd_read_bytes)} read, {format_size(self.ssd_write_bytes)} written"
        return f"<Plan of {len(self.matrices)} matrices: peaks {peaks}; SSD an epoch {moved}; table: .summary()>"

    @property
    def has_tiers(self) -> bool:
        """Whether the device has memory of its own, so that blocks go over PCIe."""
        return bool(self.staged)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that is computed in."""
        return self.frames * self.frame_bytes

    @property
    def device_arena_bytes(self) -> int:
        """The arena's share of the device budget: all of it, or on the CPU as much as fits."""
        if self.has_tiers:
            return self.arena_bytes
        return min(self.arena_bytes, self.device_limit_bytes - self.fixed_device_bytes - self.scratch_bytes)

    @property
    def host_arena_bytes(self) -> int:
        """Bytes that arenas take of the host budget."""
        return self.host_frames * self.frame_bytes + self.arena_bytes - self.device_arena_bytes

    @property
    def retained_bytes(self) -> int:
        """Bytes that may be retained for other passes."""
        return sum(self._retained_bytes)

    @property
    def _retained_bytes(self) -> tuple[int, int]:
        """Bytes that may be retained, of the device's budget and of the host's."""
        device = self.device_limit_bytes - self.fixed_device_bytes - self.scratch_bytes - self.device_arena_bytes
        host = self.host_limit_bytes - self.fixed_host_bytes - self.host_arena_bytes
        of_device = min(self.retainable_bytes, max(0, device))
        return of_device, min(self.retainable_bytes - of_device, max(0, host))

    @property
    def device_peak_bytes(self) -> int:
        beside = self.fixed_device_bytes + self.scratch_bytes
        return beside + self.device_arena_bytes + self._retained_bytes[0]

    @property
    def host_peak_bytes(self) -> int:
        return self.fixed_host_bytes + self.host_arena_bytes + self._retained_bytes[1]

    @property
    def spill_bytes(self) -> int:
        """Bytes of free disk that the run needs."""
        blocks = sum(nbytes for name in self.spilled for _, nbytes in self.spilled_parts(name))
        return blocks + sum(one.nbytes for one in self.shuffles.values())

    @property
    def learnt_bytes(self) -> int:
        """Bytes of one version of an embedding and its optimizer state; the disk holds two."""
        planned = (one.matrix for one in self.matrices.values())
        return sum(matrix.nbytes for matrix in planned if matrix.kind is Kind.LEARNT)

    @property
    def shuffles(self) -> dict[str, Shuffle]:
        """The matrices that are shuffled through a file and have no blocks."""
        return shuffles_in(self.matrices, self.matrices)

    @property
    def bucketed_rows(self) -> dict[str, BucketedRows]:
        """The shuffled matrices that are rows of other matrices, in the buckets that gather them."""
        return {name: one for name, one in self.shuffles.items() if isinstance(one, BucketedRows)}

    @property
    def partial_sums(self) -> dict[str, PartialSums]:
        """The shuffled matrices that are partial sums."""
        return {name: one for name, one in self.shuffles.items() if isinstance(one, PartialSums)}

    @cached_property
    def spilled(self) -> frozenset[str]:
        """The matrices of which some program writes a block to a spill file. Learnt rows have files of their own."""
        lowest = [self.lowest(name) for name in self.unrolled]
        stored = (block for program in lowest for blocks in program.store for block in blocks)
        names = frozenset(self.blocks.where(block)[0] for block in stored)
        return frozenset(name for name in names if self.matrices[name].matrix.kind is not Kind.LEARNT)

    def spilled_parts(self, name: str) -> list[tuple[int, int]]:
        """Return the offset and bytes of each part of a matrix's spill file that is written."""
        grid = self.matrices[name].grid
        return grid.parts(None if self.share is None else self.own(name, grid.rows))

    def own(self, name: str, rows: int) -> range:
        """Return the range that this process computes among the first ``rows`` rows of a matrix."""
        return range(rows) if self.share is None else self.share.own(self.matrices[name].matrix.space, rows)

    def lowest(self, name: str) -> Program:
        """Return the program ``name`` of the frames right above the SSD: the host's, if the device has memory of its
        own."""
        return self.staged[name].program if self.has_tiers else self.unrolled[name]

    @property
    def ssd_read_bytes(self) -> int:
        """Bytes read from the SSD in a training epoch, after the first one has filled the memory."""
        return self.bytes_read("train")

    @property
    def ssd_write_bytes(self) -> int:
        """Bytes written to the SSD in a training epoch."""
        return self.bytes_written("train")

    def bytes_read(self, name: str) -> int:
        """Return the bytes that program ``name`` reads from the SSD once the memory is filled, including shuffled
        matrices and the optimizer state for the step that follows."""
        streamed = sum(streamed_read_bytes(item, self.matrices) for item in self.programs[name])
        return self.lowest(name).read_bytes + streamed + self.stepped_bytes(name)

    def stepped_bytes(self, name: str) -> int:
        """Return the bytes that the optimizer reads, and also writes, after program ``name``."""
        return self.state_bytes if name.startswith("train") else 0

    def filling_bytes(self, name: str, *, after: str | None) -> int:
        """Return the bytes that program ``name`` reads beyond ``bytes_read`` if memory holds only what program
        ``after`` has left there (None: nothing)."""
        upper, lower = self.unrolled, {name: staging.program for name, staging in self.staged.items()}
        left = [frozenset(programs[after].leaves) if programs and after else frozenset() for programs in (upper, lower)]
        below = {block for block, _ in left[1]}
        missing = [block for block, frame in upper[name].warm if (block, frame) not in left[0] and block not in below]
        if lower:
            missing += [block for block, frame in lower[name].warm if (block, frame) not in left[1]]
        return sum(map(self.blocks.nbytes, missing))

    def bytes_written(self, name: str) -> int:
        """Return the bytes that program ``name`` writes to the SSD."""
        streamed = sum(streamed_write_bytes(item, self.matrices) for item in self.programs[name])
        return self.lowest(name).write_bytes + streamed + self.stepped_bytes(name)

    def received(self, name: str) -> list[list[Received]]:
        """Return what other processes send to this one in each pass of program ``name``."""
        if self.share is None:
            return [[] for _ in self.programs[name]]
        return Receiver(self.programs[name], self.matrices, self.topologies, self.share).received()

    def forms(self, name: str) -> list[Forms]:
        """Return, for each pull of program ``name``, what this process receives, and what it would receive in the other
        form."""
        assert self.share is not None, "alone nothing is received"
        return Receiver(self.programs[name], self.matrices, self.topologies, self.share).forms()

    def received_bytes(self, name: str) -> int:
        """Return the bytes that this process receives in program ``name``."""
        return sum(one.nbytes for received in self.received(name) for one in received)

    @property
    def to_device_bytes(self) -> int:
        """Bytes that go over PCIe to the device in a training epoch."""
        return self.unrolled["train"].read_bytes if self.has_tiers else 0

    @property
    def to_host_bytes(self) -> int:
        """Bytes that come back over PCIe in a training epoch."""
        return self.unrolled["train"].write_bytes if self.has_tiers else 0

    @cached_property
    def hit_rate(self) -> float:
        """The fraction of a training epoch's block reads that find their block in the arena that is computed in."""
        program = self.unrolled["train"]
        found = found_in_memory(program.uses, program.kept)
        reads = [hit for hit, span in zip(found, program.uses.spans, strict=True) if span.use is not Use.WRITE]
        return sum(reads) / len(reads) if reads else 1.0

    @property
    def ssd_bytes(self) -> int:
        """Bytes moved to and from the SSD in a training epoch."""
        return self.ssd_read_bytes + self.ssd_write_bytes

    def summary(self) -> list[dict[str, str | int]]:
        """Return a table with one row a matrix: name, rows, columns, bytes, fate, where it waits (per cent), slabs.

        On the CPU, ``resident`` is the share of an epoch's reads of the matrix that find it in memory. With tiers there
        are three columns instead, for the shares that wait on ``device``, ``host`` and ``ssd``. If anything is
        recomputed, ``recompute`` is that share.
        """
        hidden = [] if self.recomputed else ["recompute"]
        hidden += [] if self.has_tiers else ["device", "ssd"]
        shown = {} if self.has_tiers else {"host": "resident"}
        return [{shown.get(name, name): row[name] for name in row if name not in hidden} for row in self.fates()]

    def fates(self) -> list[dict[str, Any]]:
        """Return one entry a matrix: its shape and bytes, its ``fate``, its number of slabs, and the shares of an
        epoch's reads that wait on ``device``, ``host`` and ``ssd`` or are recomputed, in per cent."""
        shares = {matrix.name: Shares(0, 0, 0, 100) for matrix in self.recomputed if matrix.name not in self.matrices}
        shares |= self.shares()
        held = [(planned.matrix, planned.grid.slabs) for planned in self.matrices.values()]
        held += [(matrix, 1) for matrix in self.recomputed if matrix.name not in self.matrices]
        for direction, topology in self.topologies.items():
            for data, array in topology.arrays.items():
                name = edges_name(direction, data)
                held.append((Matrix(name, topology.edges, array.columns, array.itemsize, Kind.STORE), 1))
        found: list[dict[str, Any]] = []
        for matrix, slabs in held:
            waits = shares.get(matrix.name, Shares(0, 0, 100))
            shape = {"rows": matrix.rows, "columns": matrix.columns, "bytes": matrix.nbytes}
            found.append({"matrix": matrix.name} | shape | {"fate": waits.fate} | waits._asdict() | {"slabs": slabs})
        return found

    def shares(self) -> dict[str, Shares]:
        """Return, for each matrix that a training epoch reads, where the bytes read wait or whether they are
        recomputed, in per cent."""
        used = self.unrolled["train"].bytes_used(self.blocks)
        if self.has_tiers:
            shares = {}
            below, in_place = self.staged["train"].program.bytes_used(self.blocks), self._computed_in_place()
            for name in (*used, *(in_place.keys() - used.keys())):
                total, found = (nbytes + in_place.get(name, 0) for nbytes in used.get(name, (0, 0)))
                if total:
                    device = 100 * found // total
                    read, in_host = below.get(name, (0, 0))
                    ssd = 100 * (read - in_host) // total
                    shares[name] = Shares(device, 100 - device - ssd, ssd)
        else:
            resident = {name: 100 * found // total for name, (total, found) in used.items() if total}
            resident |= {name: 100 for name, planned in self.matrices.items() if planned.whole}
            shares = {name: Shares(0, share, 100 - share) for name, share in resident.items()}
        for matrix in self.recomputed:
            if matrix.name in shares:
                shares[matrix.name] = shares[matrix.name].with_recomputed(matrix.nbytes, of=used[matrix.name][0])
        return shares

    def _computed_in_place(self) -> dict[str, int]:
        """Return, for each pulled matrix, the bytes that passes of an epoch read in the region they were computed
        into."""
        copied: dict[str, int] = {}
        for span in self.unrolled["train"].uses.spans:
            if span.use is Use.COPY:
                name, _, _ = self.blocks.where(span.block)
                copied[name] = copied.get(name, 0) + self.blocks.nbytes(span.block)
        pulled: dict[str, int] = {}
        for item in self.programs["train"]:
            if item.pull is not None:
                name, planned = item.pull.source, self.matrices[item.pull.source]
                row_bytes = pulled_columns(item, planned.grid) * planned.matrix.itemsize
                pulled[name] = pulled.get(name, 0) + planned.matrix.rows * row_bytes
        return {name: max(0, nbytes - copied.get(name, 0)) for name, nbytes in pulled.items()}
