# SPDX-License-Identifier: Apache-2.0
"""Running a column pass: a pull, one slab of columns after the other."""

from collections.abc import Callable, Iterator

from torch import Tensor

from ooc.engine.pass_run import TilePassRun
from ooc.engine.program_run import ProgramRun
from ooc.engine.pull_run import SlabBuffers, SlabPull
from ooc.model.graph import Scaling
from ooc.model.stages import Kernel, Tile
from ooc.plan.layout.passes import ColumnPass
from ooc.plan.program.sequence import Step


class ColumnPassRun(TilePassRun):
    """One execution of a column pass: slab after slab, the topology streamed once for each. ``buffers`` hold them."""

    pull: SlabPull

    def __init__(
        self,
        run: ProgramRun,
        item: ColumnPass,
        buffers: SlabBuffers,
        kernel: Kernel | Scaling,
        commit: Callable[[Tile], None],
    ) -> None:
        super().__init__(run, item, commit)
        self.item, self.buffers, self.kernel = item, buffers, kernel
        self.target = self.runtime.matrices[item.output]
        self.out: dict[int, Tensor] = {}

    def begin_sweep(self, step: Step) -> None:
        self.out.clear()
        self.pull = SlabPull(self.program, self.item, self.buffers, step.slab, self.kernel)

    def open(self, number: int, step: Step) -> Iterator[Tile]:
        """The rows of a step, cut for the threads."""
        self.pull.open(number, step)
        block = step.start // self.target.grid.block_rows
        self.out[block] = self.target.rows(self.workspace, step.slab, block)
        for start in range(step.start, step.stop, self.item.rows_at_once):
            yield Tile(start, min(step.stop, start + self.item.rows_at_once), {})

    def compute(self, task: Tile) -> Tile | None:
        """Pull some rows of the slab; a tile where there is something to add to a matrix."""
        block, first = divmod(task.start, self.target.grid.block_rows)
        out = self.out[block][first : first + task.stop - task.start]
        pulled = self.pull.rows(task, out)
        if pulled is not out:
            out.copy_(pulled)
        return task if task.scattered is not None else None
