# SPDX-License-Identifier: Apache-2.0
"""The run of one of a plan's programs: its passes one after another, and the kinds of passes.

A row pass computes rows with all their columns, a column pass pulls one slab of columns after another, and a shuffle
distributes rows to buckets.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ooc.engine.exchange import part_of
from ooc.engine.operands import Input, Output
from ooc.engine.program_run import PassRun, ProgramRun
from ooc.engine.pull_run import (
    EdgeSweep,
    FeatureSweep,
    PullRun,
    ShardedSlabs,
    SlabBuffers,
    SlabPull,
    groups_of,
)
from ooc.engine.record import PassRecord
from ooc.engine.recording import EpochRecorder
from ooc.engine.runtime import Runtime
from ooc.engine.shuffle import RowsReader, RowsWriter
from ooc.errors import BudgetError
from ooc.kernels.edges import TileEdges, highest_row
from ooc.plan.layout.grid import Grid
from ooc.plan.layout.passes import ColumnPass, RowPass, ShufflePass, direct_slabs, loaded_slabs, pulled_by, stored_slabs
from ooc.plan.layout.shuffle import BucketedRows
from ooc.plan.program.received import sent_parts_of, sharded_by
from ooc.plan.program.sequence import Step
from ooc.plan.workload import Kind
from ooc.prefetch.engine import Event
from ooc.sizes import format_size
from ooc.stages import Inputs, PanelSums, Tile, nowhere
from ooc.stages import Step as StageStep

Operand = TypeVar("Operand", Input, Output)


def run_program(
    runtime: Runtime,
    program: str,
    steps: list[StageStep],
    sums: PanelSums,
    progress: Callable[[int], None],
    recorder: EpochRecorder | None = None,
) -> tuple[PassRecord, ...]:
    """Run ``program`` with the functions of ``steps`` and return what each pass took.

    ``sums`` gets every tile's results, in order; ``progress`` is told how many passes are done; ``recorder`` watches.
    """
    run = ProgramRun(runtime, program, steps, sums, recorder)
    passes: list[PassRecord] = []
    slabs: SlabBuffers | None = None
    for checks in runtime.checks.values():
        checks.begin(program)
    try:
        if recorder is not None:
            recorder.start(runtime)
        run.warm_up()
        before = runtime.taken()
        for done, item in enumerate(runtime.plan.programs[program], start=1):
            run.enter(item.index)
            running: PassRun
            match item:
                case ShufflePass():
                    running = ShufflePassRun(run, item)
                case RowPass():
                    running = RowPassRun(run, item, slabs)
                case ColumnPass() if item.processes > 1:
                    slabs = sharded = ShardedSlabs(run, item)
                    running = ShardedPassRun(run, item, sharded)
                case ColumnPass():
                    slabs = SlabBuffers(run, item)
                    running = ColumnPassRun(run, item, slabs)
            running.run()
            now = runtime.taken()
            passes.append(PassRecord(program, item.title, *now.since(before)[:6]))
            before = now
            progress(done)
        run.finish()
        runtime.compare_rest()
        if recorder is not None:
            recorder.finish(passes)
        runtime.refuse_faults()
    except BaseException as error:
        if runtime.exchange is not None:
            runtime.exchange.abandon()
        if slabs is not None:
            slabs.settle()
        runtime.settle()
        if recorder is not None:
            recorder.stop()
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        raise BudgetError(
            f"the device's memory is used up, within its budget of {format_size(runtime.plan.device_limit_bytes)}: "
            f"{' '.join(str(error).split())[:200]}; give a larger gpu_budget="
        ) from None
    return tuple(passes)


# ---- the kinds of passes ------------------------------------------------------------------------------------------


class RowPassRun(PassRun):
    """One execution of a row pass: steps in order, and tiles within steps; both in reverse order where the stage says
    so.

    ``buffers``: those of the column pass before, whose last slab this pass may pull.
    """

    def __init__(self, run: ProgramRun, item: RowPass, buffers: SlabBuffers | None) -> None:
        super().__init__(run, item)
        self.item, self.buffers = item, buffers
        self.compute_tile = run.functions[item.stage.name]
        self.inputs = {name: run.summed_rows(name, item) or self._operand(name, self._input) for name in item.loads}
        self.features = FeatureSweep(run.runtime) if item.stage.entry_bytes else None
        self.outputs = {name: self._operand(name, self._output) for name in item.stage.stores if name in item.stores}
        self.pulled_before = item.pulled
        self.pull: PullRun | None = None
        self.sent = self._sent_outputs()
        self.parts = sent_parts_of(item, run.passes, run.plan.matrices) if self.sent else 0
        self.sending: list[Future[Event | None]] = []

    def begin_sweep(self, step: Step) -> None:
        run, item = self.program, self.item
        if item.pull is None:
            return
        pull, kernel = item.pull, run.kernels[item.pull]
        if item.sweeps is not None:
            assert self.buffers is not None, "the pass before this one has left the last slab"
            self.pull = SlabPull(run, item.sweeps, self.buffers, item.sweeps.slabs, kernel)
            return
        planned, groups = run.plan.matrices[pull.source], range(pull.per_edge.groups if pull.per_edge else 0)
        source: Tensor | RowsReader | None = run.bucketed_rows(item)
        if source is None:
            source = run.whole_rows(pull.source, item.index)[: run.written_rows(pull.source, item.index)]
        self.pull = PullRun(run, pull, kernel, source, groups, planned.grid.columns if planned.spare_columns else 0)

    def _operand(self, name: str, make: Callable[[str], Operand]) -> Operand:
        """Return matrix ``name`` as this pass loads or stores it, the same in every run of the program."""
        operands = self.runtime.operands
        key = self.program.name, self.item.index, make.__name__, name
        found: Operand | None = operands.get(key)
        if found is None:
            operands[key] = found = make(name)
        found.forget()
        return found

    def _input(self, name: str) -> Input:
        run, item = self.program, self.item
        matrix = self.runtime.matrices[name]
        slabs = loaded_slabs(name, item, matrix.grid)
        return Input(
            matrix,
            self.workspace,
            whole=run.whole(name, item.index),
            dtype=self.runtime.dtype if run.plan.matrices[name].matrix.kind is Kind.SCRATCH else None,
            columns=range(min(matrix.grid.columns, len(slabs) * matrix.grid.slab_columns)),
        )

    def _output(self, name: str) -> Output:
        run, item = self.program, self.item
        direct: list[Tensor] = []
        first_row = 0
        for reader in run.passes[item.index + 1 :]:
            if isinstance(reader, ColumnPass) and reader.pull.source == name and direct_slabs(run.passes, reader):
                buffers = ShardedSlabs(run, reader) if reader.processes > 1 else SlabBuffers(run, reader)
                direct, first_row = buffers.buffers, buffers.first_row
        return Output(
            self.runtime.matrices[name],
            self.workspace,
            whole=run.whole(name, item.index),
            direct=direct,
            framed=stored_slabs(name, item.index, run.plan.matrices, run.passes),
            first_row=first_row,
        )

    def open(self, number: int, step: Step) -> Iterator[Tile]:
        """Yield the tiles of a step in the order of the pass, without their inputs."""
        if self.pull is not None:
            self.pull.open(number, step)
        if self.features is not None:
            self.features.open(step)
        for operand in (*self.inputs.values(), *self.outputs.values()):
            operand.open(step.start, step.stop)
        height = min(self.runtime.plan.tile_rows, self.item.stage.rows_at_once)
        firsts = range(step.start, step.stop, height)
        for start in reversed(firsts) if self.item.stage.reverse else firsts:
            yield Tile(start, min(step.stop, start + height), {})

    def compute(self, task: Tile) -> Tile:
        """Compute one tile: pull, compute, and store its rows."""
        start, stop = task.start, task.stop  # the closure must not refer to the tile
        inputs: dict[str, Any] = Inputs(lambda name: self.inputs[name].tile(start, stop))
        task.inputs = inputs
        if self.features is not None:
            inputs["x"] = self.features.tile(task.start, task.stop)
        task.place = lambda name: self._place(name, start, stop)
        pull = self.item.stage.pull
        if pull is not None:
            inputs[pull.output] = self._pulled(task)
        for name, rows in self.compute_tile(task).items():
            if name in self.outputs:
                self.outputs[name].put(task.start, task.stop, rows)
        inputs.clear()  # free what was pulled before the tile is reduced
        task.place = nowhere
        return task

    def _place(self, name: str, start: int, stop: int) -> Tensor | None:
        """Return the memory in which a tile's rows of matrix ``name`` may be computed, or None."""
        output = self.outputs.get(name)
        return None if output is None else output.place(start, stop, self.runtime.dtype)

    def _sent_outputs(self) -> list[Callable[[range], Future[Event | None]]]:
        """Return functions that begin to send a part of what later passes pull, for matrices in memory or sharded."""
        found: list[Callable[[range], Future[Event | None]]] = []
        exchange, passes = self.runtime.exchange, self.program.passes
        if exchange is None:
            return found
        for name in self.outputs:
            whole = self.program.whole(name, self.item.index)
            directions = pulled_by(name, passes[self.item.index + 1 :])
            if whole is not None and directions:
                of_one = directions[0] if len(directions) == 1 else None
                found.append(partial(exchange.begin, whole[: self.item.rows], self.item.space, of_one))
        for sharded in (ShardedSlabs(self.program, one) for one in sharded_by(self.item, passes)):
            found += [partial(sharded.send, slab) for slab in sharded.direct]
        return found

    def reduce(self, result: Tile) -> None:
        """Reduce a tile, and send the parts of this process's rows that are complete."""
        start, stop = result.start, result.stop
        super().reduce(result)
        self._send_parts(range(start, stop))

    def finish(self) -> None:
        """Finish the pass: wait for other processes' rows of the matrices that later passes pull."""
        self._send_parts(None)
        super().finish()
        if self.runtime.exchange is not None:
            self.runtime.exchange.wait(*self.sending)

    def _send_parts(self, last: range | None) -> None:
        """Send the parts that are complete after the ``last`` tile; None: all."""
        exchange, reverse = self.runtime.exchange, self.item.stage.reverse
        while exchange is not None and self.sent and (done := len(self.sending) // len(self.sent)) < self.parts:
            part = range(self.parts - 1 - done if reverse else done, self.parts)
            rows = part_of(exchange.share.own(self.item.space, self.item.rows), part)
            if last is not None and (last.start > rows.start if reverse else rows.stop > last.stop):
                return
            self.sending += [begin(part) for begin in self.sent]

    def _pulled(self, tile: Tile) -> Tensor:
        """Return all columns that the stage pulls: those that the pass before has pulled, and those pulled now."""
        found, before = list[Tensor](), self.pulled_before
        tile.pulled_is_own = self.pull is not None
        if before is not None:
            source = self.inputs[before]
            tile.pulled_is_own |= isinstance(source, Input) and source.makes_rows
            found.append(tile.inputs[before])
        if self.pull is not None and self.item.pull is not None:
            found.append(self.runtime.rounded(self.pull.rows(tile), self.item.pull.source))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class ColumnPassRun(PassRun):
    """One execution of a column pass: slab after slab, the topology streamed once for each; ``buffers`` hold the
    slabs."""

    pull: SlabPull

    def __init__(self, run: ProgramRun, item: ColumnPass, buffers: SlabBuffers) -> None:
        super().__init__(run, item)
        self.item, self.buffers = item, buffers
        self.target = self.runtime.matrices[item.output]
        self.out: dict[int, Tensor] = {}
        self.slab = 0

    def begin_sweep(self, step: Step) -> None:
        self.out.clear()
        self.slab = step.slab
        self.pull = SlabPull(self.program, self.item, self.buffers, step.slab, self.program.kernels[self.item.pull])

    def open(self, number: int, step: Step) -> Iterator[Tile]:
        """Yield the rows of a step, divided among the threads."""
        self.pull.open(number, step)
        for block in self.target.grid.blocks_with(range(step.start, step.stop)):
            self.out[block] = self.target.rows(self.workspace, step.slab, block)
        yield from self.pull.tiles(step, self.item.rows_at_once)

    def reduce(self, result: Tile | None) -> None:
        """Reduce a tile; meanwhile send rows of the next slab that have arrived in memory."""
        super().reduce(result)
        self.buffers.send_ahead(self.slab + 1)

    def compute(self, task: Tile) -> Tile | None:
        """Pull some rows of the slab; return the tile where it has something to add to a matrix."""
        rows, grid = range(task.start, task.stop), self.target.grid
        block, *others = grid.blocks_with(rows)
        part = grid.part(block, rows)
        out = None if others else self.out[block][part.start : part.stop]
        pulled = self.pull.rows(task, out)
        if pulled is not out:
            put_rows(pulled, task.start, grid, self.out)
        return task if task.scattered is not None else None


class ShardedPassRun(PassRun):
    """One execution of a column pass whose slabs are sharded among processes.

    In each turn this process pulls one slab, for the rows of one process after another. Pulled rows are sent part by
    part while the next ones are pulled, alternating with parts of the next turn's slabs. This process's own rows come
    last; with them, what the others have pulled of their slabs is stored.
    """

    pull: PullRun
    arrived: dict[str, Tensor]
    """All rows of the slab that is pulled, and of the other matrices that the pull reads, by matrix."""

    def __init__(self, run: ProgramRun, item: ColumnPass, buffers: ShardedSlabs) -> None:
        super().__init__(run, item)
        assert run.runtime.exchange is not None
        self.item, self.buffers, self.exchange = item, buffers, run.runtime.exchange
        self.target = self.runtime.matrices[item.output]
        self.in_turn = self.exchange.share.in_turn(item.space, item.rows)
        self.others = len(self.in_turn) - 1
        self.at = self.slab = -1
        self.turn_begins = False
        self.sending: list[Future[Event | None]] = []
        self.out: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)

    def _place_in_turn(self, step: Step) -> int:
        """Return the place, in the order of this turn, of the process for whose rows this step pulls."""
        return next((at for at, rows in enumerate(self.in_turn) if step.start in rows), self.others)

    def begins_sweep(self, number: int) -> bool:
        before, step = self.program.program.steps[number - 1 : number + 1]
        return self._place_in_turn(before) != self._place_in_turn(step) or super().begins_sweep(number)

    def begin_sweep(self, step: Step) -> None:
        if step.slab != self.slab:  # the buffers of the turn before are free once all is sent
            self.exchange.wait(*self.sending)
            self.sending.clear()
            self.slab, self.turn_begins = step.slab, True
        self.out.clear()
        run, pull = self.program, self.item.pull
        self.arrived = self.buffers.arrived(self.slab)
        groups = groups_of(run, self.item, self.slab)
        self.pull = PullRun(run, pull, run.kernels[pull], self.arrived[pull.source], groups)

    def open(self, number: int, step: Step) -> Iterator[Tile]:
        """Yield the rows of a step, divided among the threads."""
        if self.turn_begins:
            self.buffers.fill(number)
            self.turn_begins = False
        self.at = self._place_in_turn(step)
        rows = self.in_turn[self.at]
        self._send(rows.start)
        self.pull.open(number, step)
        if self.at == self.others:
            for block in self.target.grid.blocks_with(range(step.start, step.stop)):
                for slab in self.item.turn(self.slab):
                    self.out[slab][block] = self.target.rows(self.workspace, slab, block)
        for start in range(step.start, step.stop, self.item.rows_at_once):
            stop = min(step.stop, start + self.item.rows_at_once)
            self._await(stop - rows.start)
            yield Tile(start, stop, {name: self.arrived[name][start:stop] for name in self.item.pull.own})

    def _await(self, rows: int) -> None:
        """Wait for the memory for that many rows pulled for another process, from which earlier rows must have been
        sent.

        For this process's own rows, wait for what others have pulled for them.
        """
        before = self.in_turn[self.others if self.at == self.others else self.at - 1]
        parts, first = self.buffers.parts, (self.at - 1) * self.buffers.parts
        needed = sum(part_of(range(len(before)), range(part, parts)).start < rows for part in range(parts))
        if self.at and needed:
            self.exchange.wait(self.sending[first + needed - 1])

    def _send(self, stop: int) -> None:
        """Begin to send what was pulled for earlier processes, and complete parts of this sweep's rows up to
        ``stop``."""
        parts = self.buffers.parts
        while (begun := len(self.sending)) < self.others * parts:
            at, part = begun // parts, range(begun % parts, parts)
            if at > self.at or (at == self.at and part_of(self.in_turn[at], part).stop > stop):
                return
            self.sending.append(self.buffers.give_back(self.slab, at + 1, part))
            if begun % self.others == 0:  # all processes must begin the same exchanges in the same order
                self.buffers.send_next(self.slab, range(begun // self.others, parts))

    def reduce(self, result: Tile) -> None:
        """Send the rows up to this tile's end."""
        self._send(result.stop)

    def compute(self, task: Tile) -> Tile:
        """Pull some rows of the slab."""
        if self.at < self.others:
            rows = self.in_turn[self.at]
            out = self.buffers.pulled(self.slab, rows)[task.start - rows.start : task.stop - rows.start]
            pulled = self.pull.rows(task, out)
            if pulled is not out:
                out.copy_(pulled)
            return task
        for slab in self.item.turn(self.slab):
            is_own = slab == self.slab
            pulled = self.pull.rows(task) if is_own else self.buffers.returned(slab, range(task.start, task.stop))
            put_rows(pulled, task.start, self.target.grid, self.out[slab])
        return task

    def finish(self) -> None:
        self.exchange.wait(*self.sending)
        super().finish()


class ShufflePassRun(PassRun):
    """One execution of a shuffle: every row of a matrix goes to all buckets of targets that gather it.

    It runs from the first row to the last, so that every bucket gets its rows in ascending order.
    """

    def __init__(self, run: ProgramRun, item: ShufflePass) -> None:
        assert item.pull is not None
        super().__init__(run, item)
        self.file = file = self.runtime.bucketed_rows[item.pull.output]
        self.memory = run.streaming_memory(item.pull.output, item.index, file.plan.writing_nbytes)
        self.source = Input(self.runtime.matrices[item.pull.source], run.workspace, whole=None, dtype=file.dtype)
        self.edges = EdgeSweep(self.runtime, item.pull)

    def begin_sweep(self, step: Step) -> None:
        self.writer = RowsWriter(self.file, self.memory)

    def open(self, number: int, step: Step) -> Iterator[tuple[int, int]]:
        """Yield the tiles of a step."""
        self.source.open(step.start, step.stop)
        self.edges.open(step)
        height = self.runtime.plan.tile_rows
        for start in range(step.start, step.stop, height):
            yield start, min(step.stop, start + height)

    def compute(self, task: tuple[int, int]) -> tuple[int, Tensor, list[tuple[int, Tensor]]]:
        """Return the first row of a tile, its rows of the source, and which of them each bucket gets."""
        edges = self.edges.take(*task)
        return task[0], self.source.tile(*task), rows_by_bucket(self.file.plan, edges)

    def reduce(self, result: tuple[int, Tensor, list[tuple[int, Tensor]]]) -> None:
        self.writer.add(*result)

    def finish(self) -> None:
        self.writer.finish()


def put_rows(rows_RC: Tensor, start: int, grid: Grid, blocks: Mapping[int, Tensor]) -> None:
    """Copy rows from ``start`` on to the ``blocks`` that contain them."""
    rows = range(start, start + len(rows_RC))
    for block in grid.blocks_with(rows):
        part, first = grid.part(block, rows), block * grid.block_rows - start
        blocks[block][part.start : part.stop].copy_(rows_RC[first + part.start : first + part.stop])


def rows_by_bucket(plan: BucketedRows, edges: TileEdges) -> list[tuple[int, Tensor]]:
    """Return which rows of a tile each bucket gets; ``edges`` are those out of them.

    A bucket gets the rows that one of its targets gathers, and its targets' own rows if they are of the same type.
    """
    targets_E = edges.indices_E.long()
    if len(targets_E):
        highest_row(edges, targets_E)
    row_E = torch.repeat_interleave(torch.arange(edges.rows), edges.offsets_R1.diff().long())
    own = torch.arange(edges.rows if plan.gathers_own else 0)
    targets, rows = torch.cat((targets_E, own + edges.start)), torch.cat((row_E, own))
    is_target = targets < plan.targets
    places = torch.unique(targets[is_target] // plan.bucket_rows * edges.rows + rows[is_target])  # by bucket, then row
    buckets, counts = torch.unique_consecutive(places // edges.rows, return_counts=True)
    parts = (places % edges.rows).split(counts.tolist())
    return [*zip(buckets.tolist(), parts, strict=True)]
