# SPDX-License-Identifier: Apache-2.0
"""Running a row pass: tiles of all columns, computed one by one from what the plan has put where."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ooc.plan.passes import ColumnPass, RowPass, direct_slabs, loaded_slabs, stored_slabs
from ooc.plan.sequence import Step as PlannedStep
from ooc.plan.workload import Pull
from ooc.train.committing import Committing
from ooc.train.edge_sweep import EdgeSweep
from ooc.train.graph import Scaling
from ooc.train.kernels.edges import Apart
from ooc.train.operands import Input, Output
from ooc.train.program_run import ProgramRun
from ooc.train.slabs import SlabBuffers, SlabPull
from ooc.train.stages import Kernel, Tile
from ooc.train.team import Flow


class RowPassRun:
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
        self.program, self.item, self.compute, self.kernel = run, item, compute, kernel
        self.commit = Committing(run.sums(item.pull, item.index), commit)
        executor = self.executor = run.executor
        self.inputs = {name: run.summed_rows(name, item) or self._input(name) for name in item.loads}
        self.outputs = {name: self._output(name) for name in item.stage.stores if name in item.stores}
        self.pulled_before = item.pulled
        self.source: Tensor | None = None
        self.dealt = run.dealt_source(item)
        self.edges: EdgeSweep | None = None
        self.apart: Apart | None = None
        self.buffers = buffers
        self.last_slab: SlabPull | None = None
        if item.rest is not None:
            assert buffers is not None, "the pass before this one has left the last slab"
            self.last_slab = SlabPull(run, item.rest, buffers, item.rest.slabs, kernel)
        elif item.pull is not None:
            source = run.whole(item.pull.source, item.index)
            assert (source is None) == (self.dealt is not None), "what is pulled is in memory whole, or dealt out"
            if source is not None:
                self.source = source[: run.written_rows(item.pull.source, item.index)]
                if item.pull.per_edge is not None:
                    self.apart = Apart.of(self.source, item.pull.per_edge.groups, item.pull.per_edge.apart)
            self.edges = EdgeSweep(executor, item.pull)

    def _input(self, name: str) -> Input:
        run, item = self.program, self.item
        matrix = self.executor.matrices[name]
        slabs = loaded_slabs(name, item, matrix.grid)
        return Input(
            matrix,
            self.executor.workspace,
            whole=run.whole(name, item.index),
            dtype=self.executor.dtype if run.is_scratch(name) else None,
            columns=range(min(matrix.grid.columns, len(slabs) * matrix.grid.slab_columns)),
        )

    def _output(self, name: str) -> Output:
        run, item = self.program, self.item
        direct: list[Tensor] = []
        for reader in run.passes[item.index + 1 :]:
            if isinstance(reader, ColumnPass) and reader.pull.source == name and direct_slabs(run.passes, reader):
                direct = run.slab_buffers(reader)
        return Output(
            self.executor.matrices[name],
            self.executor.workspace,
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
                self._await_slab(step, first)
                for tile in self._open(self.program.program.steps[step]):
                    flow.put(step, tile)
                self.executor.workspace.launched(step)
            flow.drain()
        self.commit.finish()
        for step in range(max(first, stop - 2), stop):
            self.program.end(step)

    def _await_slab(self, step: int, first: int) -> None:
        """The last slab, if this pass pulls it, comes before the first step."""
        if self.last_slab is not None and self.buffers is not None and step == first:
            self.buffers.fill(step)
            self.last_slab.arrived()

    def _open(self, step: PlannedStep) -> Iterator[Tile]:
        """The tiles of a step in the order of the pass, their inputs still to be filled in."""
        for source in self.inputs.values():
            source.open(step.start, step.stop)
        for target in self.outputs.values():
            target.open(step.start, step.stop)
        if self.edges is not None:
            self.edges.open(step.start, step.stop)
        if self.last_slab is not None:
            self.last_slab.open(step.start, step.stop)
        if self.dealt is not None:
            self.dealt.open(step.start, step.stop)
        height = self.executor.plan.tile_rows
        firsts = range(step.start, step.stop, height)
        for start in reversed(firsts) if self.item.stage.reverse else firsts:
            yield Tile(start, min(step.stop, start + height), {})

    def _compute(self, tile: Tile) -> Tile:
        """One tile, on any thread: pull, compute, put the rows where they belong."""
        inputs = tile.inputs
        for name, matrix in self.inputs.items():
            inputs[name] = matrix.tile(tile.start, tile.stop)
        pull = self.item.stage.pull
        if pull is not None:
            inputs[pull.output] = self._pulled(tile)
        for name, rows in self.compute(tile).items():
            if name in self.outputs:
                self.outputs[name].put(tile.start, tile.stop, rows)
        inputs.clear()  # what was pulled need not wait until the tile is committed
        return tile

    def _pulled(self, tile: Tile) -> Tensor:
        """All columns that the stage pulls: those that the pass before has, and what there is to pull now."""
        found = [] if self.pulled_before is None else [tile.inputs.pop(self.pulled_before)]
        if self.item.pull is not None:
            found.append(self._pull(self.item.pull, tile))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _pull(self, pull: Pull, tile: Tile) -> Tensor:
        if self.last_slab is not None:
            return self.executor.rounded(self.last_slab.rows(tile.start, tile.stop, tile), pull.source)
        source = self.source if self.dealt is None else self.dealt.tile(tile.start)
        assert source is not None and self.edges is not None
        edges = self.edges.take(tile.start, tile.stop)
        if isinstance(self.kernel, Scaling):
            assert isinstance(source, Tensor)
            pulled = self.executor.pull_rows(source, edges, pull.direction, self.kernel)
            return self.executor.rounded(pulled, pull.source)
        assert pull.per_edge is not None
        own = next((tile.inputs[name] for name in pull.own), None)
        groups = range(pull.per_edge.groups)
        found = self.executor.run_kernel(self.kernel, source, own, replace(edges, apart=self.apart), groups)
        return self.executor.rounded(tile.take(found), pull.source)
