# SPDX-License-Identifier: Apache-2.0
"""Running a column pass: a pull, one slab of columns after the other."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ooc.plan.passes import ColumnPass
from ooc.plan.sequence import Step as PlannedStep
from ooc.plan.temporaries import pull_tile_rows
from ooc.train.committing import Committing
from ooc.train.edge_sweep import EdgeSweep
from ooc.train.graph import Scaling
from ooc.train.kernels.edges import Apart
from ooc.train.operands import Input
from ooc.train.program_run import ProgramRun
from ooc.train.stages import Kernel, Tile
from ooc.train.team import Flow
from ooc.train.workspace import Filling


class ColumnPassRun:
    """One execution of a column pass: slab after slab, the topology streamed once for each."""

    def __init__(
        self, run: ProgramRun, item: ColumnPass, kernel: Kernel | Scaling, commit: Callable[[Tile], None]
    ) -> None:
        self.program, self.item, self.kernel = run, item, kernel
        self.commit = Committing(run.sums(item.pull, item.index), commit)
        self.executor = run.executor
        self.source = self.executor.matrices[item.pull.source]
        self.target = self.executor.matrices[item.pull.output]
        self.buffers = run.slab_buffers(item)
        self.filling: dict[int, list[tuple[Filling, Tensor, Tensor | None]]] = {}
        self.slab = self.buffers[0]
        self.edges: EdgeSweep | None = None
        self.own: Input | None = None
        self.groups = range(0)
        self.apart: Apart | None = None
        self.out: dict[int, Tensor] = {}

    def run(self) -> None:
        first, stop = self.program.program.bounds[self.item.index]
        steps = self.program.program.steps
        try:
            with Flow(self.executor.team, self._pull, self.commit) as flow:
                for step in range(first, stop):
                    begins = step == first or steps[step].slab != steps[step - 1].slab
                    if begins:
                        flow.drain()
                        self._sweep(steps[step].slab)
                    if step - 2 >= first:
                        flow.finish(step - 2)
                        self.program.end(step - 2)
                    self.program.begin(step)
                    self._fill(step)
                    if begins and (kind := self.item.pull.per_edge) is not None:
                        self.apart = Apart.of(self.slab, len(self.groups), kind.apart)
                    for task in self._open(steps[step]):
                        flow.put(step, task)
                    self.executor.workspace.launched(step)
                flow.drain()
            self.commit.finish()
        finally:
            for reads in self.filling.values():
                for block, _, _ in reads:
                    block.settle()
        for step in range(max(first, stop - 2), stop):
            self.program.end(step)

    def _sweep(self, slab: int) -> None:
        """Make ``slab`` the one that is pulled."""
        grid = self.source.grid
        self.edges = EdgeSweep(self.executor, self.item.pull)
        rows = self.program.written_rows(self.item.pull.source, self.item.index)
        self.slab = self._buffer(slab)[:rows]
        self.apart = None
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
                self.executor.workspace,
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
        workspace, grid = self.executor.workspace, self.source.grid
        for block, in_frame in self.program.program.fill.get(step, ()):
            _, slab, number = self.program.plan.blocks.where(block)
            nbytes = grid.block_nbytes(slab, number)
            start = number * grid.block_rows
            rows = self._buffer(slab)[start : start + grid.height(number)]
            if in_frame:
                workspace.await_read(block)
                rows.copy_(self.source.rows(workspace.view(block, nbytes), slab, number))
            else:
                memory = rows.reshape(-1).view(torch.uint8)[-nbytes:]  # narrower values: into the upper half
                narrow = memory.view(self.source.dtype).view(rows.shape) if len(memory) < rows.nbytes else None
                self.filling.setdefault(slab, []).append((workspace.fill(block, memory), rows, narrow))
        for arriving, rows, narrow in self.filling.pop(self.program.program.steps[step].slab, ()):
            arriving.wait()
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
        memory = self.executor.workspace.view(self.target.number(step.slab, block), grid.block_nbytes(step.slab, block))
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
        if isinstance(self.kernel, Scaling):
            pulled = self.executor.pull_rows(self.slab, edges, self.item.pull.direction, self.kernel)
        else:
            own = None if self.own is None else self.own.tile(start, stop)
            edges = replace(edges, apart=self.apart)
            pulled = tile.take(self.executor.run_kernel(self.kernel, self.slab, own, edges, self.groups))
        block, first = divmod(start, self.target.grid.block_rows)
        self.out[block][first : first + stop - start].copy_(pulled)
        return tile if tile.scattered is not None else None
