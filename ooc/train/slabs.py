# SPDX-License-Identifier: Apache-2.0
"""Slabs of a matrix in their buffers: what fills them, and what is pulled of one."""

from dataclasses import replace

import torch
from torch import Tensor

from ooc.plan.passes import ColumnPass
from ooc.train.edge_sweep import EdgeSweep
from ooc.train.graph import Scaling
from ooc.train.kernels.edges import Apart
from ooc.train.operands import Input
from ooc.train.program_run import ProgramRun
from ooc.train.stages import Kernel, Tile
from ooc.train.workspace import Filling


class SlabBuffers:
    """The buffers of a column pass, and of the row pass behind it that pulls the last slab."""

    def __init__(self, run: ProgramRun, item: ColumnPass) -> None:
        self._run = run
        self._workspace = run.executor.workspace
        self._source = run.executor.matrices[item.pull.source]
        self._buffers = run.slab_buffers(item)
        self._filling: dict[int, list[tuple[Filling, Tensor, Tensor | None]]] = {}

    def slab(self, slab: int) -> Tensor:
        """The memory of ``slab`` [N, columns]; the last slab may be narrower."""
        buffer, width = self._buffers[slab % len(self._buffers)], self._source.grid.width(slab)
        return buffer if buffer.shape[1] == width else buffer.reshape(-1)[: len(buffer) * width].view(-1, width)

    def fill(self, step: int) -> None:
        """Start filling the buffers that are free before ``step``; wait for the slab that it pulls."""
        workspace, grid, program = self._workspace, self._source.grid, self._run.program
        for block, in_frame in program.fill.get(step, ()):
            _, slab, number = self._run.plan.blocks.where(block)
            nbytes = grid.block_nbytes(slab, number)
            start = number * grid.block_rows
            rows = self.slab(slab)[start : start + grid.height(number)]
            if in_frame:
                workspace.await_read(block)
                rows.copy_(self._source.rows(workspace, slab, number))
            else:
                memory = rows.reshape(-1).view(torch.uint8)[-nbytes:]  # narrower values: into the upper half
                narrow = memory.view(self._source.dtype).view(rows.shape) if len(memory) < rows.nbytes else None
                self._filling.setdefault(slab, []).append((workspace.fill(block, memory), rows, narrow))
        arriving = self._filling.get(program.steps[step].slab, [])
        while arriving:  # if one fails, it and those behind it are still there to be settled
            reading, rows, narrow = arriving[0]
            reading.wait()
            if narrow is not None:
                rows.copy_(narrow.clone())
            del arriving[0]

    def settle(self) -> None:
        """Return when nothing is written to the buffers any more, whatever the result."""
        for blocks in self._filling.values():
            for block, _, _ in blocks:
                block.settle()
        self._filling.clear()


class SlabPull:
    """The pull of one slab, for one sweep over the rows."""

    def __init__(
        self, run: ProgramRun, item: ColumnPass, buffers: SlabBuffers, slab: int, kernel: Kernel | Scaling
    ) -> None:
        self._executor, self._pull, self._kernel = run.executor, item.pull, kernel
        self._slab = buffers.slab(slab)[: run.written_rows(item.pull.source, item.index)]
        self._edges = EdgeSweep(run.executor, item.pull)
        self._own: Input | None = None
        self._groups = range(0)
        self._apart: Apart | None = None
        kind = item.pull.per_edge
        if kind is None:
            return
        grid = self._executor.matrices[item.pull.source].grid
        unit = grid.columns // kind.groups
        first = slab * grid.slab_columns // unit
        self._groups = range(first, first + grid.width(slab) // unit)
        for name in item.pull.own:
            matrix = self._executor.matrices[name]
            columns = matrix.grid.columns // kind.groups
            self._own = Input(
                matrix,
                self._executor.workspace,
                whole=run.whole(name, item.index),
                dtype=self._executor.dtype,
                columns=range(self._groups.start * columns, self._groups.stop * columns),
            )

    def arrived(self) -> None:
        """The slab is in its buffer."""
        if self._pull.per_edge is not None:
            self._apart = Apart.of(self._slab, len(self._groups), self._pull.per_edge.apart)

    def open(self, start: int, stop: int) -> None:
        """Rows ``start:stop`` are about to be pulled."""
        self._edges.open(start, stop)
        if self._own is not None:
            self._own.open(start, stop)

    def rows(self, start: int, stop: int, tile: Tile, out: Tensor | None = None) -> Tensor:
        """What is pulled into rows ``start:stop``, on any thread; what is scattered on the way is ``tile``'s. In
        ``out``, if they can be summed right into it."""
        edges = self._edges.take(start, stop)
        if isinstance(self._kernel, Scaling):
            return self._executor.pull_rows(self._slab, edges, self._pull.direction, self._kernel, out)
        own = None if self._own is None else self._own.tile(start, stop)
        edges = replace(edges, apart=self._apart)
        return tile.take(self._executor.run_kernel(self._kernel, self._slab, own, edges, self._groups))
