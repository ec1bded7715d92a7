# SPDX-License-Identifier: Apache-2.0
"""Running a column pass: a pull, one slab of columns after the other."""

from collections.abc import Callable, Iterator

from torch import Tensor

from ooc.plan.passes import ColumnPass
from ooc.plan.sequence import Step as PlannedStep
from ooc.train.committing import Committing
from ooc.train.graph import Scaling
from ooc.train.program_run import ProgramRun
from ooc.train.slabs import SlabBuffers, SlabPull
from ooc.train.stages import Kernel, Tile
from ooc.train.team import Flow


class ColumnPassRun:
    """One execution of a column pass: slab after slab, the topology streamed once for each. ``buffers`` hold them."""

    def __init__(
        self,
        run: ProgramRun,
        item: ColumnPass,
        buffers: SlabBuffers,
        kernel: Kernel | Scaling,
        commit: Callable[[Tile], None],
    ) -> None:
        self.program, self.item, self.buffers, self.kernel = run, item, buffers, kernel
        self.commit = Committing(run.sums(item.pull, item.index), commit)
        self.executor = run.executor
        self.target = self.executor.matrices[item.output]
        self.pull: SlabPull | None = None
        self.out: dict[int, Tensor] = {}

    def run(self) -> None:
        first, stop = self.program.program.bounds[self.item.index]
        steps = self.program.program.steps
        with Flow(self.executor.team, self._compute, self.commit) as flow:
            for step in range(first, stop):
                begins = step == first or steps[step].slab != steps[step - 1].slab
                if begins:
                    flow.drain()
                    self.out.clear()
                    self.pull = SlabPull(self.program, self.item, self.buffers, steps[step].slab, self.kernel)
                if step - 2 >= first:
                    flow.finish(step - 2)
                    self.program.end(step - 2)
                self.program.begin(step)
                self.buffers.fill(step)
                if begins and self.pull is not None:
                    self.pull.arrived()
                for task in self._open(steps[step]):
                    flow.put(step, task)
                self.executor.workspace.launched(step)
            flow.drain()
        self.commit.finish()
        for step in range(max(first, stop - 2), stop):
            self.program.end(step)

    def _open(self, step: PlannedStep) -> Iterator[tuple[int, int]]:
        """The rows of a step, cut for the threads."""
        assert self.pull is not None
        grid = self.target.grid
        self.pull.open(step.start, step.stop)
        block = step.start // grid.block_rows
        self.out[block] = self.target.rows(self.executor.workspace, step.slab, block)
        height = self.item.rows_at_once
        for start in range(step.start, step.stop, height):
            yield start, min(step.stop, start + height)

    def _compute(self, rows: tuple[int, int]) -> Tile | None:
        """Pull some rows of the slab, on any thread; a tile where there is something to commit."""
        start, stop = rows
        assert self.pull is not None
        tile = Tile(start, stop, {})
        block, first = divmod(start, self.target.grid.block_rows)
        out = self.out[block][first : first + stop - start]
        pulled = self.pull.rows(start, stop, tile, out)
        if pulled is not out:
            out.copy_(pulled)
        return tile if tile.scattered is not None else None
