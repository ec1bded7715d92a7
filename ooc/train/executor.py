# SPDX-License-Identifier: Apache-2.0
"""Runs a plan's programs, instruction by instruction. Decides nothing.

Where a block goes from the SSD to the kernel: ``Frames`` (ooc.prefetch.frames) reads it into the frame that the
program gives it, steps ahead; ``Input.tile`` (ooc.train.operands) views rows of that frame; the stage's function, or
``pull``, takes that view as its operand.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.plan.plan import ColumnPass, Plan, Region, RowPass, edges_name
from ooc.plan.program import Program
from ooc.plan.schedule import direct_slabs, pull_tile_rows, stored_slabs
from ooc.plan.sequence import Step as PlannedStep
from ooc.plan.sequence import Use
from ooc.plan.workload import Direction, EdgeData, Fate, Kind, Pull
from ooc.prefetch.arena import Arena
from ooc.prefetch.engine import Counters, Ticket, choose_engine
from ooc.prefetch.frames import Frames
from ooc.prefetch.spill import create_spill
from ooc.storage.array import Array
from ooc.storage.store import Store
from ooc.train.aggregate import pull, with_self, within, without_self
from ooc.train.graph import GraphRows, damaged
from ooc.train.kernels.edges import TileEdges
from ooc.train.lowering.general import Scattered
from ooc.train.operands import Edges, Input, Output, Sums
from ooc.train.record import PassRecord
from ooc.train.residency import BlockedMatrix, as_matrix
from ooc.train.stages import Kernel, Step, Tile
from ooc.train.stopwatch import Stopwatch
from ooc.train.team import Flow, Team
from ooc.train.workload import edge_array

_TORCH = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}

Progress = Callable[[int], None]
"""Told how many passes are done."""


class Executor:
    """Owns the arena, spill files and I/O threads of one trainer. ``close`` gives everything back."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        arrays: Mapping[str, Array],
        rows: GraphRows,
        dtype: torch.dtype,
        spill_dir: Path,
        *,
        spill_dtype: torch.dtype | None = None,
        threads: int,
    ) -> None:
        self.plan = plan
        self.store = store
        self.rows = rows
        self.dtype = dtype
        self.spill_dtype = spill_dtype or dtype
        self.passes: list[PassRecord] = []
        """What the passes of the program that ran last have taken."""
        self._resources = ExitStack()
        with ExitStack() as opening:
            self.engine, _ = choose_engine(spill_dir, store.path)
            opening.callback(self.engine.close)
            self.team = Team(threads)
            opening.callback(self.team.close)
            self._arena = Arena(plan.arena_bytes)
            opening.callback(self._arena.close)
            self.frames = Frames(self._arena, plan.frame_bytes, self.engine)
            opening.callback(self.frames.settle)
            self.matrices: dict[str, BlockedMatrix] = {}
            for name, base, grid in zip(plan.blocks.names, plan.blocks.bases, plan.blocks.grids, strict=True):
                array = self._array(name, arrays)
                dtype = self._dtype(name, array)
                region_dtype = self._region_dtype(name, dtype)
                self.matrices[name] = matrix = BlockedMatrix(name, grid, dtype, region_dtype, base, array)
                opening.callback(matrix.close)
                if name in plan.spilled:
                    matrix.file = create_spill(spill_dir, name, grid.file_nbytes)
            self._resources = opening.pop_all()

    def _array(self, name: str, arrays: Mapping[str, Array]) -> Array | None:
        """The store's array behind a matrix or an index array; None for what is the run's own."""
        for direction, topology in self.plan.topologies.items():
            if name == edges_name(direction):
                return self.store.topology(direction.value)[1]
            for data in topology.data:
                if name == edges_name(direction, data):
                    return edge_array(self.store, direction, data)
        return arrays[name] if self.plan.matrices[name].matrix.kind is Kind.STORE else None

    def _dtype(self, name: str, array: Array | None) -> torch.dtype:
        if array is not None:
            return _TORCH[array.dtype.name]
        matrix = self.plan.matrices[name].matrix
        if matrix.kind is Kind.BITS:
            return torch.uint8
        return self.dtype if matrix.itemsize == self.dtype.itemsize else self.spill_dtype

    def _region_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type of a matrix in a region, whose blocks hold ``dtype``."""
        planned = self.plan.matrices.get(name)
        return dtype if planned is None or planned.region_itemsize == dtype.itemsize else self.dtype

    def rounded(self, values: Tensor, source: str) -> Tensor:
        """What was pulled of ``source``, as it would be had it been kept in between: a pass that keeps nothing gives
        the same results."""
        kept_as = self.matrices[source].dtype
        return values if kept_as == self.dtype else values.to(kept_as).to(self.dtype)

    @property
    def counters(self) -> Counters:
        return self.engine.counters

    def peak_bytes(self, tier: Fate) -> int:
        """What has been used of a budget so far: the arena's high-water mark, and what is admitted beside it."""
        plan, used = self.plan, self._arena.used_bytes
        if tier is Fate.DEVICE:
            return plan.device_peak_bytes - plan.device_arena_bytes + min(used, plan.device_arena_bytes)
        return plan.fixed_host_bytes + max(0, used - plan.device_arena_bytes)

    def close(self) -> None:
        """End the threads, free the arena and the spill files. May be called twice."""
        self._resources.close()

    def run(self, program: str, steps: list[Step], commit: Callable[[Tile], None], progress: Progress) -> None:
        """Run one of the plan's programs with the functions of ``steps``; ``commit`` gets every tile, in order."""
        functions = {step.spec.name: step.compute for step in steps}
        kernels = {step.spec.pull: step.kernel for step in steps if step.spec.pull is not None}
        run = ProgramRun(self, program)
        self.passes = []
        try:
            run.warm_up()
            watch = Stopwatch(self.counters, self.team)
            for done, item in enumerate(self.plan.programs[program], start=1):
                run.enter(item.index)
                if isinstance(item, RowPass):
                    kernel = None if item.pull is None else kernels[item.pull]
                    _RowPassRun(run, item, functions[item.stage.name], kernel, commit).run()
                else:
                    _ColumnPassRun(run, item, kernels[item.pull], commit).run()
                self.passes.append(watch.lap(program, item.title))
                progress(done)
            run.finish()
        except BaseException:
            self.frames.settle()
            raise

    def pull_rows(self, source: Tensor, edges: TileEdges, direction: Direction) -> Tensor:
        """The tile's rows of the sum over neighbours, with the self term.

        ``source`` may have fewer rows than the graph: the others are zero. Where it is narrower than what is computed
        in, so is the result: a sum in float32, rounded once, which is why the self term is one of the summands.
        """
        own = min(edges.start + edges.rows, len(source))
        is_narrow = source.dtype != self.dtype
        indices, offsets, weight = edges.indices_E, edges.offsets_R1, edges.weight_E
        if weight is not None:
            assert not is_narrow, "weights would be rounded to the source's type"
            weight = weight.to(source.dtype)
        if len(source) < self.plan.rows:
            indices, offsets, weight = within(indices, offsets, len(source), weight)
        if is_narrow and self.rows.self_term:
            if self.rows.self_N1 is not None:
                indices, offsets = without_self(indices, offsets, edges.start)
            indices, offsets = with_self(indices, offsets, edges.start, own)
        try:
            pulled = pull(source, indices, offsets, weight)
        except RuntimeError:
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.plan.rows:
                raise damaged(self.store, f"{direction.value}/indices") from None
            raise
        if not is_narrow:
            self.rows.add_self(pulled, source, edges.start, own)
        return pulled

    def run_kernel(
        self, kernel: Kernel, source: Tensor, own: Tensor | None, edges: TileEdges, groups: range
    ) -> Tensor | Scattered:
        """The tile's rows of what ``kernel`` makes of the neighbours' rows of ``source``; ``own`` are these rows of
        the pull's own matrix, None where the source stands for it."""
        return kernel(edges, source, source[edges.start : edges.start + edges.rows] if own is None else own, groups)

    def read_rows(self, name: str) -> Iterator[Tensor]:
        """A constant matrix, row block by row block, for those who want a copy of it. No program may be running."""
        matrix = self.matrices[name]
        grid = matrix.grid
        for block in range(grid.blocks):
            self.frames.await_written(matrix.number(0, block))
            memory = np.empty(grid.block_nbytes(0, block), dtype=np.uint8)
            self.engine.read(matrix.spans(0, block), memory).wait()
            yield matrix.rows(memory, 0, block)


class ProgramRun:
    """One run of a program: what happens between the steps of its passes."""

    def __init__(self, executor: Executor, name: str) -> None:
        self.executor = executor
        self.plan = executor.plan
        self.name = name
        self.program: Program = self.plan.unrolled[name]
        self.passes = self.plan.programs[name]
        self._arrivals: list[list[int]] = [[] for _ in self.program.steps]
        self._filled: list[list[int]] = [[] for _ in self.program.steps]
        for span in self.program.uses.spans:
            if span.use is Use.READ:
                self._arrivals[span.first].append(span.block)
            elif span.use is Use.WRITE:
                self._filled[span.first].append(span.block)

    def warm_up(self) -> None:
        """Have in their frames the blocks that the epoch before has left there; the first epoch reads them."""
        frames = self.executor.frames
        for block, frame in self.program.warm:
            if not frames.holds(block, frame):
                frames.acquire(block, frame)
                self._read(block)

    def enter(self, index: int) -> None:
        """Before pass ``index``: blocks move out of the way of regions."""
        self._move(index)
        for region in self.plan.regions[self.name]:
            if region.first == index:
                self.executor.frames.clear(region.frame, region.count)

    def finish(self) -> None:
        """After the last pass: carried blocks lie where the next epoch looks for them."""
        self._move(len(self.passes))

    def begin(self, step: int) -> None:
        """Send off the reads due before ``step``, then wait for those it needs and for the frames it fills."""
        frames = self.executor.frames
        frames.advance()
        for block, frame, load in self.program.acquire[step]:
            frames.acquire(block, frame)
            if load:
                self._read(block)
        for block in self._arrivals[step]:
            frames.await_read(block)
        for block in self._filled[step]:
            frames.await_frame(block)

    def end(self, step: int) -> None:
        """Send off the writes due after ``step``."""
        for block in self.program.store[step]:
            matrix, slab, number = self._where(block)
            nbytes = matrix.grid.block_nbytes(slab, number)
            self.executor.frames.write(block, matrix.spans(slab, number), nbytes)

    def region(self, name: str, index: int) -> Region:
        """The region of matrix ``name`` during pass ``index``."""
        return next(r for r in self.plan.regions[self.name] if r.matrix == name and r.first <= index <= r.last)

    def is_scratch(self, name: str) -> bool:
        """Whether matrix ``name`` is written and read again within the program, in the spill's type."""
        return self.plan.matrices[name].matrix.kind is Kind.SCRATCH

    def whole(self, name: str, index: int) -> Tensor | None:
        """A matrix that is in memory whole; None if it is not."""
        if name not in self.plan.matrices or not self.plan.matrices[name].whole:
            return None
        matrix = self.executor.matrices[name]
        memory = self.executor.frames.region(self.region(name, index).frame, self.plan.matrices[name].region_nbytes)
        return as_matrix(memory, matrix.region_dtype, matrix.grid.rows, matrix.grid.columns)

    def sums(self, pull: Pull | None, index: int) -> Sums | None:
        """The matrix that pass ``index`` scatters to, if its pull does."""
        if pull is None or pull.scattered is None:
            return None
        whole = self.whole(pull.scattered, index)
        assert whole is not None, "what is scattered to is in memory whole"
        return Sums(whole)

    def written_rows(self, name: str, index: int) -> int:
        """How many rows of matrix ``name``, which pass ``index`` pulls, this program has written.

        A program that computes fewer rows than another one leaves the last ones as they are, and what lies in memory
        there is no number: of neighbours among them nothing is pulled.
        """
        return max(item.rows for item in self.passes[:index] if name in item.stores)

    def slab_buffers(self, item: ColumnPass) -> list[Tensor]:
        """The slab buffers of a column pass, each of the width of its first slab."""
        planned = self.plan.matrices[item.pull.source]
        grid = planned.grid
        region = self.region(item.pull.source, item.index)
        stride = planned.slab_stride()
        dtype = self.executor.matrices[item.pull.source].region_dtype
        memory = self.executor.frames.region(region.frame, item.slab_buffers * stride)
        return [as_matrix(memory[k * stride :], dtype, grid.rows, grid.width(k)) for k in range(item.slab_buffers)]

    def _where(self, block: int) -> tuple[BlockedMatrix, int, int]:
        name, slab, number = self.plan.blocks.where(block)
        return self.executor.matrices[name], slab, number

    def _read(self, block: int) -> None:
        matrix, slab, number = self._where(block)
        self.executor.frames.read(block, matrix.spans(slab, number), matrix.grid.block_nbytes(slab, number))

    def _move(self, index: int) -> None:
        for block, _, target in self.program.moves.get(index, ()):
            matrix, slab, number = self._where(block)
            self.executor.frames.move(block, target, matrix.grid.block_nbytes(slab, number))


def relative_offsets(offsets: npt.NDArray[np.signedinteger], start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Where the edges of rows ``start:stop`` begin, counted from the first of them; one more than rows."""
    part = torch.from_numpy(offsets[start : stop + 1])
    return (part - part[0]).to(dtype)


class EdgeSweep:
    """The edges of a pull's direction with what they carry for it, for one sweep over the rows."""

    def __init__(self, executor: Executor, pull: Pull) -> None:
        self._offsets = executor.rows.offsets[pull.direction]
        self._nodes = executor.plan.rows
        self._arrays: dict[EdgeData | None, Edges] = {
            data: Edges(executor.matrices[edges_name(pull.direction, data)], executor.frames)
            for data in (None, *pull.edge_data)
        }

    def open(self, start: int, stop: int) -> None:
        """The edges of rows ``start:stop`` are about to be taken."""
        for array in self._arrays.values():
            array.open(int(self._offsets[start]), int(self._offsets[stop]))

    def take(self, start: int, stop: int) -> TileEdges:
        """The edges of rows ``start:stop``, on any thread."""
        first, last = int(self._offsets[start]), int(self._offsets[stop])
        taken = {data: array.take(first, last) for data, array in self._arrays.items()}
        indices, weight = taken[None][:, 0], taken.get(EdgeData.WEIGHT)
        return TileEdges(
            indices,
            relative_offsets(self._offsets, start, stop, indices.dtype),
            start,
            self._nodes,
            weight_E=None if weight is None else weight[:, 0],
            features_EK=taken.get(EdgeData.FEATURES),
        )


class _Committing:
    """Hands tiles on in their order, and adds what they scatter before that."""

    def __init__(self, sums: Sums | None, commit: Callable[[Tile], None]) -> None:
        self._sums, self._commit = sums, commit

    def __call__(self, tile: Tile | None) -> None:
        if tile is None:
            return
        found = tile.scattered
        if self._sums is not None and found is not None:
            for rows_S, values_SC in found.others:
                self._sums.add(rows_S, values_SC)
        tile.scattered = None
        self._commit(tile)


class _RowPassRun:
    """One execution of a row pass: steps in order, tiles within steps, both downwards where the stage says so."""

    def __init__(
        self,
        run: ProgramRun,
        item: RowPass,
        compute: Callable[[Tile], dict[str, Tensor]],
        kernel: Kernel | None,
        commit: Callable[[Tile], None],
    ) -> None:
        self.program, self.item, self.compute, self.kernel = run, item, compute, kernel
        self.commit = _Committing(run.sums(item.pull, item.index), commit)
        executor = self.executor = run.executor
        self.inputs = {
            name: Input(
                executor.matrices[name],
                executor.frames,
                whole=run.whole(name, item.index),
                dtype=executor.dtype if run.is_scratch(name) else None,
            )
            for name in item.loads
        }
        self.outputs = {name: self._output(name) for name in item.stage.stores}
        self.source: Tensor | None = None
        self.edges: EdgeSweep | None = None
        if item.pull is not None:
            source = run.whole(item.pull.source, item.index)
            assert source is not None
            self.source = source[: run.written_rows(item.pull.source, item.index)]
            self.edges = EdgeSweep(executor, item.pull)

    def _output(self, name: str) -> Output:
        run, item = self.program, self.item
        direct: list[Tensor] = []
        for reader in run.passes[item.index + 1 :]:
            if isinstance(reader, ColumnPass) and reader.pull.source == name and direct_slabs(run.passes, reader):
                direct = run.slab_buffers(reader)
        return Output(
            self.executor.matrices[name],
            self.executor.frames,
            whole=run.whole(name, item.index),
            direct=direct,
            framed=stored_slabs(name, item.index, run.plan.matrices, run.passes),
        )

    def run(self) -> None:
        first, stop = self.program.program.bounds[self.item.index]
        with Flow(self.executor.team, self._compute, self.commit) as flow:
            for step in range(first, stop):
                if step - 2 >= first:
                    flow.finish(step - 2)
                    self.program.end(step - 2)
                self.program.begin(step)
                for tile in self._open(self.program.program.steps[step]):
                    flow.put(step, tile)
            flow.drain()
        for step in range(max(first, stop - 2), stop):
            self.program.end(step)

    def _open(self, step: PlannedStep) -> Iterator[Tile]:
        """The tiles of a step in the order of the pass, their inputs still to be filled in."""
        for source in self.inputs.values():
            source.open(step.start, step.stop)
        for target in self.outputs.values():
            target.open(step.start, step.stop)
        if self.edges is not None:
            self.edges.open(step.start, step.stop)
        height = self.executor.plan.tile_rows
        firsts = range(step.start, step.stop, height)
        for start in reversed(firsts) if self.item.stage.reverse else firsts:
            yield Tile(start, min(step.stop, start + height), {})

    def _compute(self, tile: Tile) -> Tile:
        """One tile, on any thread: pull, compute, put the rows where they belong."""
        inputs = tile.inputs
        for name, matrix in self.inputs.items():
            inputs[name] = matrix.tile(tile.start, tile.stop)
        if self.item.pull is not None:
            inputs[self.item.pull.output] = self._pull(self.item.pull, tile)
        for name, rows in self.compute(tile).items():
            self.outputs[name].put(tile.start, tile.stop, rows)
        inputs.clear()  # what was pulled need not wait until the tile is committed
        return tile

    def _pull(self, pull: Pull, tile: Tile) -> Tensor:
        assert self.source is not None and self.edges is not None
        edges = self.edges.take(tile.start, tile.stop)
        if self.kernel is None or pull.per_edge is None:
            return self.executor.rounded(self.executor.pull_rows(self.source, edges, pull.direction), pull.source)
        own = next((tile.inputs[name] for name in pull.own), None)
        groups = range(pull.per_edge.groups)
        pulled = self.executor.run_kernel(self.kernel, self.source, own, edges, groups)
        return self.executor.rounded(tile.take(pulled), pull.source)


class _ColumnPassRun:
    """One execution of a column pass: slab after slab, the topology streamed once for each."""

    def __init__(
        self, run: ProgramRun, item: ColumnPass, kernel: Kernel | None, commit: Callable[[Tile], None]
    ) -> None:
        self.program, self.item, self.kernel = run, item, kernel
        self.commit = _Committing(run.sums(item.pull, item.index), commit)
        self.executor = run.executor
        self.source = self.executor.matrices[item.pull.source]
        self.target = self.executor.matrices[item.pull.output]
        self.buffers = run.slab_buffers(item)
        self.filling: dict[int, list[tuple[Ticket, Tensor, Tensor | None]]] = {}
        self.slab = self.buffers[0]
        self.edges: EdgeSweep | None = None
        self.own: Input | None = None
        self.groups = range(0)
        self.out: dict[int, Tensor] = {}

    def run(self) -> None:
        first, stop = self.program.program.bounds[self.item.index]
        steps = self.program.program.steps
        try:
            with Flow(self.executor.team, self._pull, self.commit) as flow:
                for step in range(first, stop):
                    if step == first or steps[step].slab != steps[step - 1].slab:
                        flow.drain()
                        self._sweep(steps[step].slab)
                    if step - 2 >= first:
                        flow.finish(step - 2)
                        self.program.end(step - 2)
                    self.program.begin(step)
                    self._fill(step)
                    for task in self._open(steps[step]):
                        flow.put(step, task)
                flow.drain()
        finally:
            for reads in self.filling.values():
                for ticket, _, _ in reads:
                    ticket.settle()
        for step in range(max(first, stop - 2), stop):
            self.program.end(step)

    def _sweep(self, slab: int) -> None:
        """Make ``slab`` the one that is pulled."""
        grid = self.source.grid
        self.edges = EdgeSweep(self.executor, self.item.pull)
        rows = self.program.written_rows(self.item.pull.source, self.item.index)
        self.slab = self._buffer(slab)[:rows]
        self.out.clear()
        kind = self.item.pull.per_edge
        if kind is None:
            return
        unit = grid.columns // kind.groups
        first = slab * grid.slab_columns // unit
        self.groups = range(first, first + grid.width(slab) // unit)
        for name in self.item.pull.own:
            matrix = self.executor.matrices[name]
            columns = matrix.grid.columns // kind.groups
            self.own = Input(
                matrix,
                self.executor.frames,
                whole=self.program.whole(name, self.item.index),
                dtype=self.executor.dtype,
                columns=range(self.groups.start * columns, self.groups.stop * columns),
            )

    def _buffer(self, slab: int) -> Tensor:
        """The slab buffer of ``slab``; the last slab may be narrower."""
        buffer, width = self.buffers[slab % len(self.buffers)], self.source.grid.width(slab)
        return buffer if buffer.shape[1] == width else buffer.reshape(-1)[: len(buffer) * width].view(-1, width)

    def _fill(self, step: int) -> None:
        """Start filling slab buffers that are free now; wait for the slab that this step begins with."""
        frames, grid = self.executor.frames, self.source.grid
        for block, in_frame in self.program.program.fill.get(step, ()):
            _, slab, number = self.program.plan.blocks.where(block)
            nbytes = grid.block_nbytes(slab, number)
            start = number * grid.block_rows
            rows = self._buffer(slab)[start : start + grid.height(number)]
            if in_frame:
                frames.await_read(block)
                rows.copy_(self.source.rows(frames.view(block, nbytes), slab, number))
            else:
                frames.await_written(block)
                memory = rows.reshape(-1).view(torch.uint8)[-nbytes:]  # narrower values: into the upper half
                ticket = self.executor.engine.read(self.source.spans(slab, number), memory.numpy(), bulk=True)
                narrow = memory.view(self.source.dtype).view(rows.shape) if len(memory) < rows.nbytes else None
                self.filling.setdefault(slab, []).append((ticket, rows, narrow))
        for ticket, rows, narrow in self.filling.pop(self.program.program.steps[step].slab, ()):
            ticket.wait()
            if narrow is not None:
                rows.copy_(narrow.clone())

    def _open(self, step: PlannedStep) -> Iterator[tuple[int, int]]:
        """The rows of a step, cut for the threads."""
        assert self.edges is not None
        grid = self.target.grid
        self.edges.open(step.start, step.stop)
        if self.own is not None:
            self.own.open(step.start, step.stop)
        block = step.start // grid.block_rows
        memory = self.executor.frames.view(self.target.number(step.slab, block), grid.block_nbytes(step.slab, block))
        self.out[block] = self.target.rows(memory, step.slab, block)
        height = pull_tile_rows(self.item.pull, self.program.plan.tile_rows)
        for start in range(step.start, step.stop, height):
            yield start, min(step.stop, start + height)

    def _pull(self, rows: tuple[int, int]) -> Tile | None:
        """Pull some rows of the slab, on any thread; a tile where there is something to commit."""
        start, stop = rows
        assert self.edges is not None
        edges = self.edges.take(start, stop)
        tile = Tile(start, stop, {})
        if self.kernel is None:
            pulled = self.executor.pull_rows(self.slab, edges, self.item.pull.direction)
        else:
            own = None if self.own is None else self.own.tile(start, stop)
            pulled = tile.take(self.executor.run_kernel(self.kernel, self.slab, own, edges, self.groups))
        block, first = divmod(start, self.target.grid.block_rows)
        self.out[block][first : first + stop - start].copy_(pulled)
        return tile if tile.scattered is not None else None
