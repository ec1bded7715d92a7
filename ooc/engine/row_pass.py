# SPDX-License-Identifier: Apache-2.0
"""Running a row pass: tiles of all columns, computed one by one from what the plan has put where."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ooc.engine.operands import Input, Output
from ooc.engine.pass_run import TilePassRun
from ooc.engine.program_run import ProgramRun
from ooc.engine.pull_run import BucketedPull, PullRun, SlabBuffers, SlabPull, WholePull
from ooc.model.graph import Scaling
from ooc.model.stages import Kernel, Tile
from ooc.plan.layout.passes import ColumnPass, RowPass, direct_slabs, loaded_slabs, stored_slabs
from ooc.plan.program.sequence import Step


class RowPassRun(TilePassRun):
    """One execution of a row pass: steps in order, tiles within steps, both downwards where the stage says so."""

    def __init__(
        self,
        run: ProgramRun,
        item: RowPass,
        compute: Callable[[Tile], dict[str, Tensor]],
        kernel: Kernel | Scaling,
        commit: Callable[[Tile], None],
        buffers: SlabBuffers | None,
    ) -> None:
        super().__init__(run, item, commit)
        self.item, self.compute_tile = item, compute
        self.inputs = {name: run.summed_rows(name, item) or self._input(name) for name in item.loads}
        self.outputs = {name: self._output(name) for name in item.stage.stores if name in item.stores}
        self.pulled_before = item.pulled
        self.kernel, self.buffers = kernel, buffers
        self.pull: PullRun | None = None

    def begin_sweep(self, step: Step) -> None:
        self.pull = self._pull(self.kernel, self.buffers)

    def _pull(self, kernel: Kernel | Scaling, buffers: SlabBuffers | None) -> PullRun | None:
        run, item = self.program, self.item
        if item.rest is not None:
            assert buffers is not None, "the pass before this one has left the last slab"
            return SlabPull(run, item.rest, buffers, item.rest.slabs, kernel)
        if item.pull is None:
            return None
        rows = run.bucketed_rows(item)
        if rows is not None:
            return BucketedPull(run, item.pull, kernel, rows)
        return WholePull(run, item, item.pull, kernel)

    def _input(self, name: str) -> Input:
        run, item = self.program, self.item
        matrix = self.runtime.matrices[name]
        slabs = loaded_slabs(name, item, matrix.grid)
        return Input(
            matrix,
            self.workspace,
            whole=run.whole(name, item.index),
            dtype=self.runtime.dtype if run.is_scratch(name) else None,
            columns=range(min(matrix.grid.columns, len(slabs) * matrix.grid.slab_columns)),
        )

    def _output(self, name: str) -> Output:
        run, item = self.program, self.item
        direct: list[Tensor] = []
        for reader in run.passes[item.index + 1 :]:
            if isinstance(reader, ColumnPass) and reader.pull.source == name and direct_slabs(run.passes, reader):
                direct = run.slab_buffers(reader)
        return Output(
            self.runtime.matrices[name],
            self.workspace,
            whole=run.whole(name, item.index),
            direct=direct,
            framed=stored_slabs(name, item.index, run.plan.matrices, run.passes),
        )

    def open(self, number: int, step: Step) -> Iterator[Tile]:
        """The tiles of a step in the order of the pass, their inputs still to be filled in."""
        if self.pull is not None:
            self.pull.open(number, step)
        for source in self.inputs.values():
            source.open(step.start, step.stop)
        for target in self.outputs.values():
            target.open(step.start, step.stop)
        height = self.runtime.plan.tile_rows
        firsts = range(step.start, step.stop, height)
        for start in reversed(firsts) if self.item.stage.reverse else firsts:
            yield Tile(start, min(step.stop, start + height), {})

    def compute(self, task: Tile) -> Tile:
        """One tile: pull, compute, put the rows where they belong."""
        inputs = task.inputs
        for name, matrix in self.inputs.items():
            inputs[name] = matrix.tile(task.start, task.stop)
        pull = self.item.stage.pull
        if pull is not None:
            inputs[pull.output] = self._pulled(task)
        for name, rows in self.compute_tile(task).items():
            if name in self.outputs:
                self.outputs[name].put(task.start, task.stop, rows)
        inputs.clear()  # what was pulled need not wait until the tile is reduced
        return task

    def _pulled(self, tile: Tile) -> Tensor:
        """All columns that the stage pulls: those that the pass before has, and what there is to pull now."""
        found = [] if self.pulled_before is None else [tile.inputs.pop(self.pulled_before)]
        if self.pull is not None and self.item.pull is not None:
            found.append(self.runtime.rounded(self.pull.rows(tile), self.item.pull.source))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)
