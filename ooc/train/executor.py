# SPDX-License-Identifier: Apache-2.0
"""Runs a plan: row passes and column passes, with blocks streaming under the computation. Decides nothing.

Where a block goes from the SSD to the kernel: ``ReadStream`` (ooc.prefetch.stream) fills a ring slot in the
device arena ahead of time; ``_Input.tile`` views rows of that slot; the stage's function, or ``pull``, takes
that view as its operand. A resident matrix is viewed where it lies.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.plan.grid import Stretch
from ooc.plan.plan import COLUMN_TILE_ROWS, ColumnPass, Plan, RowPass
from ooc.plan.schedule import row_block_nbytes
from ooc.plan.workload import Direction, Fate, Kind
from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.engine import Counters, choose_engine
from ooc.prefetch.spill import create_spill
from ooc.prefetch.stream import ReadStream, Request, WriteStream
from ooc.storage.array import Array
from ooc.storage.store import Store
from ooc.train.aggregate import pull, within
from ooc.train.graph import GraphRows, damaged
from ooc.train.residency import TieredMatrix, as_matrix, index_request
from ooc.train.stages import Step, Tile
from ooc.train.team import Team

_TORCH = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "bool": torch.bool,
}

Progress = Callable[[int], None]
"""Told how many passes are done."""


class Executor:
    """Owns arenas, spill files and I/O threads of one trainer. ``close`` gives everything back."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        arrays: Mapping[str, Array],
        rows: GraphRows,
        dtype: torch.dtype,
        spill_dir: Path,
        *,
        threads: int,
    ) -> None:
        self.plan = plan
        self.arrays = arrays
        self.store = store
        self.rows = rows
        self.dtype = dtype
        self._resources = ExitStack()
        with ExitStack() as opening:
            self.engine, _ = choose_engine(spill_dir, store.path)
            opening.callback(self.engine.close)
            self.team = Team(threads)
            opening.callback(self.team.close)
            self._arenas = {
                Fate.DEVICE: Arena(plan.device_arena_bytes),
                Fate.HOST: Arena(plan.host_arena_bytes),
            }
            for arena in self._arenas.values():
                opening.callback(arena.close)
            self.matrices: dict[str, TieredMatrix] = {}
            for name in plan.matrices:
                self.matrices[name] = self._matrix(name, spill_dir)
                opening.callback(self.matrices[name].close)
            self._topology = {d: self._resident_topology(d) for d in plan.topologies}
            opening.callback(self._topology.clear)
            self._load_resident()
            self._resources = opening.pop_all()

    @property
    def counters(self) -> Counters:
        return self.engine.counters

    def peak_bytes(self, tier: Fate) -> int:
        """What has been used of a budget so far: the arena's high-water mark, and what is admitted beside it."""
        plan = self.plan
        planned, arena = {
            Fate.DEVICE: (plan.device_peak_bytes, plan.device_arena_bytes),
            Fate.HOST: (plan.host_peak_bytes, plan.host_arena_bytes),
        }[tier]
        return planned - arena + self._arenas[tier].used_bytes

    def close(self) -> None:
        """End the threads, free the arenas and the spill files. May be called twice."""
        self._resources.close()

    def run(self, program: str, steps: list[Step], commit: Callable[[Tile], None], progress: Progress) -> None:
        """Run one of the plan's programs with the functions of ``steps``; ``commit`` gets every tile, in order."""
        functions = {step.spec.name: step.compute for step in steps}
        passes = self.plan.programs[program]
        for done, item in enumerate(passes, start=1):
            if isinstance(item, RowPass):
                _RowPassRun(self, item, program, functions[item.stage.name], commit).run()
            else:
                _ColumnPassRun(self, item, program).run()
            progress(done)

    # ---- set-up ------------------------------------------------------------------------------------------

    def _matrix(self, name: str, spill_dir: Path) -> TieredMatrix:
        planned = self.plan.matrices[name]
        array = self.arrays[name] if planned.matrix.kind is Kind.STORE else None
        dtype = _TORCH[array.dtype.name] if array is not None else self.dtype
        matrix = TieredMatrix(name, planned, dtype, array)
        for buffer in self.plan.buffers.values():
            kind, _, rest = buffer.name.partition("/")
            if kind != "resident":
                continue
            owner, program = (rest, "") if planned.matrix.kind is not Kind.SCRATCH else _owner(rest)
            if owner == name:
                memory = self._arenas[buffer.tier].view(buffer.offset, buffer.nbytes)
                matrix.resident[program] = as_matrix(memory, dtype, planned.resident_rows, planned.matrix.columns)
        if planned.spill_nbytes:
            matrix.file = create_spill(spill_dir, name, planned.spill_nbytes)
        return matrix

    def view(self, name: str) -> Bytes:
        """The memory of one of the plan's buffers."""
        buffer = self.plan.buffers[name]
        return self._arenas[buffer.tier].view(buffer.offset, buffer.nbytes)

    def ring(self, index: int, purpose: str) -> list[Bytes]:
        """The slots ``index/purpose/0``, ``…/1``, … of pass ``index``."""
        slots: list[Bytes] = []
        while f"{index}/{purpose}/{len(slots)}" in self.plan.buffers:
            slots.append(self.view(f"{index}/{purpose}/{len(slots)}"))
        return slots

    def _load_resident(self) -> None:
        """Read what stays in memory of the store's matrices, once."""
        for matrix in self.matrices.values():
            rows = matrix.resident_rows("")
            if matrix.array is None or rows is None:
                continue
            memory = rows.numpy().reshape(-1).view(np.uint8)
            self.engine.read(matrix.array_spans(0, len(rows)), memory).wait()

    def _resident_topology(self, direction: Direction) -> Bytes | None:
        name = f"topology/{direction.value}"
        if name not in self.plan.buffers:
            return None
        memory = self.view(name)
        _, indices = self.store.topology(direction.value)
        request, skipped = index_request(indices, 0, indices.shape[0])
        assert skipped == 0
        total = sum(span.nbytes for span in request.spans)
        self.engine.read(request.spans, memory[:total]).wait()
        return memory

    def read_rows(self, name: str) -> Iterator[Tensor]:
        """A constant matrix, row block by row block, for those who want a copy of it. No pass may be running."""
        matrix = self.matrices[name]
        grid = matrix.grid
        resident = matrix.resident_rows("")
        memory = np.empty(row_block_nbytes(grid), dtype=np.uint8)
        for block in range(grid.blocks):
            start = block * grid.block_rows
            if matrix.in_memory(block):
                assert resident is not None
                yield resident[start : start + grid.height(block)]
                continue
            request = matrix.request(block)
            for span, (first, last) in zip(request.spans, request.places, strict=True):
                self.engine.read([span], memory[first:last]).wait()
            yield torch.cat(matrix.pieces(memory, block), dim=1)

    def stretches(self, direction: Direction, rows: int) -> list[Stretch]:
        """The stretches of topology that the first ``rows`` rows lie in."""
        return [stretch for stretch in self.plan.stretches[direction] if stretch.row_start < rows]

    def pull_rows(self, source: Tensor, indices: Tensor, direction: Direction, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of the sum over neighbours, with the self term; ``indices`` are these rows' edges.

        ``source`` may have fewer rows than the graph: the others are zero.
        """
        offsets = relative_offsets(self.rows.offsets[direction], start, stop, indices.dtype)
        if len(source) < self.plan.rows:
            indices, offsets = within(indices, offsets, len(source))
        try:
            pulled = pull(source, indices, offsets)
        except RuntimeError:
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.plan.rows:
                raise damaged(self.store, f"{direction.value}/indices") from None
            raise
        self.rows.add_self(pulled, source, start, min(stop, len(source)))
        return pulled

    # ---- topology ------------------------------------------------------------------------------------------

    def edges(self, index: int, direction: Direction, order: list[Stretch]) -> "EdgeStream":
        """The indices of ``order``'s stretches, one after the other."""
        return EdgeStream(self, index, direction, order)

    def resident_edges(self, direction: Direction) -> Bytes | None:
        return self._topology[direction]


class EdgeStream:
    """Stretches of topology in a given order, from memory or read ahead."""

    def __init__(self, executor: Executor, index: int, direction: Direction, order: list[Stretch]) -> None:
        _, self._indices = executor.store.topology(direction.value)
        self._resident = executor.resident_edges(direction)
        self._order = order
        self._next = 0
        self._stream: ReadStream | None = None
        self._skips: list[int] = []
        if self._resident is None:
            requests = []
            for stretch in order:
                request, skip = index_request(self._indices, stretch.edge_start, stretch.edge_stop)
                requests.append(request)
                self._skips.append(skip)
            self._stream = ReadStream(executor.engine, requests, executor.ring(index, "topology"))

    def take(self) -> Tensor:
        """Neighbour indices of the next stretch; good until the next call."""
        stretch = self._order[self._next]
        itemsize = self._indices.itemsize
        count = stretch.edge_stop - stretch.edge_start
        if self._stream is None:
            assert self._resident is not None
            memory, start = self._resident, stretch.edge_start * itemsize
        else:
            memory, start = self._stream.take(), self._skips[self._next]
        self._next += 1
        dtype = torch.int32 if itemsize == 4 else torch.int64
        return torch.from_numpy(memory[start : start + count * itemsize]).view(dtype)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.settle()


def relative_offsets(offsets: npt.NDArray[np.signedinteger], start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Where the edges of rows ``start:stop`` begin, counted from the first of them; one more than rows."""
    part = torch.from_numpy(offsets[start : stop + 1])
    return (part - part[0]).to(dtype)


def _owner(rest: str) -> tuple[str, str]:
    owner, _, program = rest.rpartition("/")
    return owner, program


class _Input:
    """One loaded matrix of a row pass: resident rows viewed in place, the others from a ring."""

    def __init__(self, executor: Executor, item: RowPass, program: str, name: str, order: list[int]) -> None:
        self.matrix = executor.matrices[name]
        self._resident = self.matrix.resident_rows(program)
        blocks = self.matrix.grid.blocks
        spilled = [block for block in order if block < blocks and not self.matrix.in_memory(block)]
        self._stream = (
            ReadStream(
                executor.engine,
                [self.matrix.request(block) for block in spilled],
                executor.ring(item.index, f"read/{name}"),
            )
            if spilled
            else None
        )
        self._pieces: list[Tensor] = []
        self._base = 0

    def advance(self, block: int) -> None:
        """Make row block ``block`` the one that ``tile`` takes rows from."""
        grid = self.matrix.grid
        self._base = block * grid.block_rows
        if block >= grid.blocks:
            self._pieces = [torch.empty(0, grid.columns, dtype=self.matrix.dtype)]
        elif self.matrix.in_memory(block):
            assert self._resident is not None
            self._pieces = [self._resident[self._base : self._base + grid.height(block)]]
        else:
            assert self._stream is not None
            self._pieces = self.matrix.pieces(self._stream.take(), block)

    def tile(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``, or as many of them as the matrix has."""
        rows = [piece[start - self._base : stop - self._base] for piece in self._pieces]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.settle()


class _Output:
    """One stored matrix of a row pass: resident rows written in place, the others through a ring."""

    def __init__(self, executor: Executor, item: RowPass, program: str, name: str) -> None:
        self.matrix = executor.matrices[name]
        self._resident = self.matrix.resident_rows(program)
        slots = executor.ring(item.index, f"write/{name}")
        self._stream = WriteStream(executor.engine, slots) if slots else None
        self._pieces: list[Tensor] = []
        self._base = 0

    def advance(self, block: int) -> None:
        """Make row block ``block`` the one that ``put`` fills."""
        grid = self.matrix.grid
        self._base = block * grid.block_rows
        if self.matrix.in_memory(block):
            assert self._resident is not None
            self._pieces = [self._resident[self._base : self._base + grid.height(block)]]
        else:
            assert self._stream is not None
            self._pieces = self.matrix.pieces(self._stream.slot(), block)

    def put(self, start: int, stop: int, rows: Tensor) -> None:
        at = 0
        for piece in self._pieces:
            width = piece.shape[1]
            piece[start - self._base : stop - self._base].copy_(rows[:, at : at + width])
            at += width

    def finish(self, block: int) -> None:
        """Row block ``block`` is complete."""
        if not self.matrix.in_memory(block):
            assert self._stream is not None
            self._stream.put(self.matrix.request(block))

    def drain(self) -> None:
        if self._stream is not None:
            self._stream.drain()

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.settle()


class _RowPassRun:
    """One execution of a row pass: blocks in order, tiles within blocks, both downwards where the stage says so."""

    def __init__(
        self,
        executor: Executor,
        item: RowPass,
        program: str,
        compute: Callable[[Tile], dict[str, Tensor]],
        commit: Callable[[Tile], None],
    ) -> None:
        self.executor, self.item, self.compute, self.commit = executor, item, compute, commit
        self.plan = plan = executor.plan
        self.reverse = item.stage.reverse
        self.rows = item.stage.rows
        self.blocks = list(range(-(-self.rows // plan.block_rows)))
        if self.reverse:
            self.blocks.reverse()
        self.inputs = {name: _Input(executor, item, program, name, self.blocks) for name in item.loads}
        self.outputs = {name: _Output(executor, item, program, name) for name in item.stage.stores}
        self.stretches: dict[int, list[Stretch]] = {block: [] for block in self.blocks}
        self.source: Tensor | None = None
        self.edges: EdgeStream | None = None
        self.stretch: Stretch | None = None
        self.indices = torch.empty(0, dtype=torch.int32)
        if item.pull is not None:
            self.source = executor.matrices[item.pull.source].resident_rows(program)
            for stretch in executor.stretches(item.pull.direction, self.rows):
                self.stretches[stretch.row_start // plan.block_rows].append(stretch)
            if self.reverse:
                for stretches in self.stretches.values():
                    stretches.reverse()
            order = [stretch for block in self.blocks for stretch in self.stretches[block]]
            self.edges = executor.edges(item.index, item.pull.direction, order)

    def run(self) -> None:
        streams: list[_Input | _Output | EdgeStream] = [*self.inputs.values(), *self.outputs.values()]
        if self.edges is not None:
            streams.append(self.edges)
        try:
            for block in self.blocks:
                self._run_block(block)
            for output in self.outputs.values():
                output.drain()
        finally:
            for stream in streams:
                stream.settle()

    def _run_block(self, block: int) -> None:
        for source in self.inputs.values():
            source.advance(block)
        for target in self.outputs.values():
            target.advance(block)
        team = self.executor.team
        if self.item.pull is None:
            rows = range(block * self.plan.block_rows, min(self.rows, (block + 1) * self.plan.block_rows))
            team.run(self._cut(rows.start, rows.stop), self._compute, self.commit)
        else:
            assert self.edges is not None
            for stretch in self.stretches[block]:
                self.stretch, self.indices = stretch, self.edges.take()
                stop = min(self.rows, stretch.row_stop)
                team.run(self._cut(stretch.row_start, stop), self._compute, self.commit)
        for output in self.outputs.values():
            output.finish(block)

    def _compute(self, tile: Tile) -> Tile:
        """One tile, on any thread: pull, compute, put the rows where they belong."""
        inputs = tile.inputs
        for name, matrix in self.inputs.items():
            inputs[name] = matrix.tile(tile.start, tile.stop)
        if self.item.pull is not None:
            inputs[self.item.pull.output] = self._pull(self.item.pull.direction, tile.start, tile.stop)
        for name, rows in self.compute(tile).items():
            self.outputs[name].put(tile.start, tile.stop, rows)
        return tile

    def _pull(self, direction: Direction, start: int, stop: int) -> Tensor:
        assert self.source is not None and self.stretch is not None
        rows = self.executor.rows
        offsets = rows.offsets[direction]
        first = self.stretch.edge_start
        indices = self.indices[offsets[start] - first : offsets[stop] - first]
        return self.executor.pull_rows(self.source, indices, direction, start, stop)

    def _cut(self, start: int, stop: int) -> Iterator[Tile]:
        """The tiles of rows ``start:stop`` in the order of the pass, their inputs still to be filled in."""
        height = self.plan.tile_rows
        firsts = range(start, stop, height)
        for first in reversed(firsts) if self.reverse else firsts:
            yield Tile(first, min(stop, first + height), {})


class _ColumnPassRun:
    """One execution of a column pass: slab after slab, the topology streamed once for each."""

    def __init__(self, executor: Executor, item: ColumnPass, program: str) -> None:
        self.executor, self.item = executor, item
        self.source = executor.matrices[item.pull.source]
        self.target = executor.matrices[item.pull.output]
        self.resident = self.target.resident_rows(program)
        self.order = executor.stretches(item.pull.direction, item.rows)
        grid = self.source.grid
        self.slabs = ReadStream(
            executor.engine,
            [self.source.slab_request(k) for k in range(grid.slabs)],
            executor.ring(item.index, f"slab/{item.pull.source}"),
            bulk=True,
        )
        self.edges = executor.edges(item.index, item.pull.direction, self.order * grid.slabs)
        slots = executor.ring(item.index, f"write/{item.pull.output}")
        self.writes = WriteStream(executor.engine, slots) if slots else None

    def run(self) -> None:
        grid = self.source.grid
        try:
            for slab in range(grid.slabs):
                memory = self.slabs.take()
                self._run_slab(slab, as_matrix(memory, self.source.dtype, grid.rows, grid.width(slab)))
            if self.writes is not None:
                self.writes.drain()
        finally:
            self.slabs.settle()
            self.edges.settle()
            if self.writes is not None:
                self.writes.settle()

    def _run_slab(self, slab: int, source: Tensor) -> None:
        grid = self.target.grid
        source_grid = self.source.grid
        columns = slice(slab * source_grid.slab_columns, slab * source_grid.slab_columns + source_grid.width(slab))
        out = source  # replaced at the first stretch of every block
        for stretch in self.order:
            start, stop = stretch.row_start, min(self.item.rows, stretch.row_stop)
            block, first = divmod(start, grid.block_rows)
            if self.resident is not None:
                out, first = self.resident[:, columns], start
            elif first == 0:
                assert self.writes is not None
                out = as_matrix(self.writes.slot(), self.target.dtype, grid.height(block), grid.width(slab))
            self._pull_stretch(stretch, stop, source, out[first : first + stop - start])
            if self.writes is not None and stop == min(self.item.rows, (block + 1) * grid.block_rows):
                span = self.target.block_span(slab, block)
                self.writes.put(Request((span,), ((0, span.nbytes),)))

    def _pull_stretch(self, stretch: Stretch, row_stop: int, source: Tensor, out: Tensor) -> None:
        """Pull the rows of one stretch, up to ``row_stop``, into ``out``, tile by tile."""
        indices = self.edges.take()
        direction = self.item.pull.direction
        offsets = self.executor.rows.offsets[direction]

        def compute(start: int) -> None:
            stop = min(row_stop, start + COLUMN_TILE_ROWS)
            part = indices[offsets[start] - stretch.edge_start : offsets[stop] - stretch.edge_start]
            pulled = self.executor.pull_rows(source, part, direction, start, stop)
            out[start - stretch.row_start : stop - stretch.row_start].copy_(pulled)

        starts = range(stretch.row_start, row_stop, COLUMN_TILE_ROWS)
        self.executor.team.run(starts, compute, lambda _: None)
