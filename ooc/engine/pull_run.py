# SPDX-License-Identifier: Apache-2.0
"""The pull of a pass: the edges of its rows, what tiles gather from, wherever that lies, and the kernel that
does it."""

from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.engine.exchange import part_of
from ooc.engine.operands import Edges, Input, as_matrix
from ooc.engine.program_run import ProgramRun
from ooc.engine.runtime import Runtime
from ooc.engine.shuffle import RowsReader
from ooc.kernels.edges import ColumnCopy, TileEdges
from ooc.kernels.neighbourhood import BucketRows
from ooc.kernels.sparse_rows import SparseRows
from ooc.model.graph import AnyScaling, damaged
from ooc.model.stages import Kernel, Tile
from ooc.plan.layout.passes import ColumnPass, RowPass, direct_slabs, edges_name
from ooc.plan.program.received import returned_parts
from ooc.plan.program.sequence import Step
from ooc.plan.workload import Direction, EdgeData, Pull

CPU = torch.device("cpu")
_NUMPY_TYPES = {torch.int32: np.int32, torch.int64: np.int64}


def relative_offsets(
    offsets: npt.NDArray[np.signedinteger],
    start: int,
    stop: int,
    dtype: torch.dtype,
    place: torch.device = CPU,
) -> Tensor:
    """Where the edges of rows ``start:stop`` begin, counted from the first of them; one more than rows."""
    part = offsets[start : stop + 1]
    if place.type == "cpu":  # by NumPy, in a third of the time that torch's operators take
        return torch.from_numpy((part - part[0]).astype(_NUMPY_TYPES[dtype], copy=False))
    # Brought as they lie in memory that the device knows: for a new tensor the host would wait.
    absolute = torch.from_numpy(part).to(place, non_blocking=True)
    if absolute.dtype == dtype:
        return absolute.sub_(int(part[0]))
    return torch.sub(absolute, int(part[0]), out=absolute.new_empty(len(part), dtype=dtype))


class EdgeSweep:
    """The edges of a pull's direction with what they carry for it, for one sweep over the rows."""

    def __init__(self, runtime: Runtime, pull: Pull) -> None:
        self._offsets = runtime.rows.offsets[pull.direction]
        self._parts_P2 = runtime.rows.parts.get(pull.direction)
        self._nodes = runtime.store.neighbours(pull.direction.value)
        self._checks = runtime.checks.get(pull.direction)
        self._arrays: dict[EdgeData | None, Edges] = {
            data: Edges(runtime.matrices[edges_name(pull.direction, data)], runtime.workspace)
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
        if self._checks is not None:
            self._checks.check_range(indices)
        return TileEdges(
            indices,
            relative_offsets(self._offsets, start, stop, indices.dtype, indices.device),
            start,
            self._nodes,
            weight_E=None if weight is None else weight[:, 0],
            features_EK=taken.get(EdgeData.FEATURES),
            checks=self._checks,
            parts_P2=self._parts(start, stop, indices.device),
        )

    def _parts(self, start: int, stop: int, place: torch.device) -> Tensor | None:
        """Those of the long rows among ``start:stop``, where there are kernels that want them."""
        if self._parts_P2 is None:
            return None
        first, last = (bisect_left(self._parts_P2[:, 0], row) for row in (start, stop))
        parts_P2 = torch.from_numpy(self._parts_P2[first:last])
        return parts_P2.to(place, non_blocking=True) if first < last else torch.empty_like(parts_P2, device=place)


class FeatureSweep(EdgeSweep):
    """The features, where they are kept without their zeros, for one sweep over the rows."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, Pull("x", "x", Direction.FEATURES, edge_data=(EdgeData.WEIGHT,)))
        self._store = runtime.store

    def tile(self, start: int, stop: int) -> SparseRows:
        """Rows ``start:stop``, on any thread; StoreError where a column is none of the matrix."""
        edges, width = self.take(start, stop), self._store.num_features
        columns_E = edges.indices_E
        if edges.checks is None and len(columns_E) and not 0 <= int(columns_E.min()) <= int(columns_E.max()) < width:
            raise damaged(self._store, f"{Direction.FEATURES.value}/indices")
        assert edges.weight_E is not None
        return SparseRows(edges.offsets_R1, columns_E, edges.weight_E, width)


class PullRun:
    """A pull for one sweep over the rows, from memory that holds ``groups`` of its source's columns, of all rows."""

    def __init__(
        self,
        run: ProgramRun,
        pull: Pull,
        kernel: Kernel | AnyScaling,
        source: Tensor | None = None,
        groups: range = range(0),
    ) -> None:
        self._runtime, self._pull, self._kernel, self._groups = run.runtime, pull, kernel, groups
        self._source, self._edges = source, EdgeSweep(run.runtime, pull)
        self._apart: ColumnCopy | None = None

    def open(self, number: int, step: Step) -> None:
        """The rows of ``step``, which is step ``number`` of the program, are about to be pulled."""
        self._edges.open(step.start, step.stop)

    def source(self, tile: Tile) -> Tensor | BucketRows:
        """What a tile gathers from."""
        assert self._source is not None, "what is pulled is in memory whole, or read as it has been shuffled"
        return self._source

    def own(self, tile: Tile) -> Tensor | None:
        """A tile's rows of the pull's own matrices; None where the source stands for them."""
        return self._by_group([tile.inputs[name] for name in self._pull.own])

    def _by_group(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Own rows side by side in every group."""
        if len(parts) < 2:
            return parts[0] if parts else None
        rows, groups = len(parts[0]), len(self._groups)
        return torch.cat([part.reshape(rows, groups, -1) for part in parts], dim=2).view(rows, -1)

    def rows(self, tile: Tile, out: Tensor | None = None) -> Tensor:
        """What is pulled into the rows of ``tile``, on any thread; what is scattered on the way is the tile's. In
        ``out``, if they can be summed right into it."""
        edges = self._edges.take(tile.start, tile.stop)
        source = self.source(tile)
        if isinstance(self._kernel, AnyScaling):
            assert isinstance(source, Tensor)
            return self._runtime.pull_rows(source, edges, self._pull.direction, self._kernel, out)
        own = self.own(tile)
        source = cast(Tensor, source)  # shuffled rows only go to opaque layers, which take both
        own = source[tile.start : tile.start + edges.rows] if own is None else own
        return tile.take(self._kernel(replace(edges, apart=self._apart), source, own, self._groups))


class WholePull(PullRun):
    """From a source that is in memory whole."""

    def __init__(self, run: ProgramRun, item: RowPass, pull: Pull, kernel: Kernel | AnyScaling) -> None:
        kind, source = pull.per_edge, run.whole(pull.source, item.index)
        assert source is not None, "what is pulled is in memory whole, or read as it has been shuffled"
        source = source[: run.written_rows(pull.source, item.index)]
        super().__init__(run, pull, kernel, source, range(kind.groups if kind else 0))
        if kind is not None:
            self._apart = ColumnCopy.of(source, kind.groups, kind.copied_columns)


class BucketedPull(PullRun):
    """From a source that is read bucket by bucket as it has been shuffled."""

    def __init__(self, run: ProgramRun, pull: Pull, kernel: Kernel | AnyScaling, source: RowsReader) -> None:
        assert pull.per_edge is not None
        super().__init__(run, pull, kernel, groups=range(pull.per_edge.groups))
        self._rows = source

    def open(self, number: int, step: Step) -> None:
        super().open(number, step)
        self._rows.open(step.start, step.stop)

    def source(self, tile: Tile) -> BucketRows:
        return self._rows.tile(tile.start)


class SlabBuffers:
    """The buffers of a column pass, and of the row pass behind it that pulls the last slab."""

    def __init__(self, run: ProgramRun, item: ColumnPass) -> None:
        self._run = run
        self._workspace = run.workspace
        self._source = run.runtime.matrices[item.pull.source]
        self._buffers = run.slab_buffers(item)
        self._filling: dict[int, list[tuple[Any, partial[None], Tensor, Tensor | None]]] = {}
        self._exchange, self._direction = run.runtime.exchange, item.pull.direction
        self._space = run.plan.matrices[item.pull.source].matrix.space
        self._rows = run.written_rows(item.pull.source, item.index)
        self._first_row = run.buffered_rows(item).start
        self._sent: dict[int, Future[None]] = {}

    def slab(self, slab: int) -> Tensor:
        """The memory of ``slab`` [N, columns]; the last slab may be narrower."""
        buffer, width = self._buffers[slab % len(self._buffers)], self._source.grid.width(slab)
        return buffer if buffer.shape[1] == width else buffer.reshape(-1)[: len(buffer) * width].view(-1, width)

    def written(self, slab: int) -> Tensor:
        """Those of its rows that the program has written."""
        return self.slab(slab)[: self._rows]

    def fill(self, number: int) -> None:
        """Start filling the buffers that are free before step ``number``; wait for the slab that it pulls. Of several
        processes the others' rows are part of it."""
        self._read(number)
        slab = self._run.program.steps[number].slab
        self._take(slab)
        if self._exchange is None:
            return
        if slab not in self._sent:
            self._sent[slab] = self._exchange.begin(self.written(slab), self._space, self._direction)
        self._exchange.wait(self._sent[slab])
        self.send_ahead(slab + 1)

    def _read(self, number: int) -> None:
        """Start filling the buffers that are free before step ``number``."""
        workspace, grid, program = self._workspace, self._source.grid, self._run.program
        for block, in_frame in program.fill.get(number, ()):
            _, slab, row_block = self._run.plan.blocks.where(block)
            nbytes = grid.block_nbytes(slab, row_block)
            start = row_block * grid.block_rows - self._first_row
            rows = self.slab(slab)[start : start + grid.height(row_block)]
            if in_frame:
                workspace.await_read(block)
                rows.copy_(self._source.rows(workspace, slab, row_block))
            else:
                memory = rows.reshape(-1).view(torch.uint8)[-nbytes:]  # narrower values: into the upper half
                narrow = memory.view(self._source.dtype).view(rows.shape) if len(memory) < rows.nbytes else None
                check = partial(workspace.filled, block, memory)
                self._filling.setdefault(slab, []).append((workspace.fill(block, memory), check, rows, narrow))

    def send_ahead(self, slab: int) -> None:
        """While the slab before ``slab`` is pulled: begin to send its rows, once they are in a buffer."""
        if self._exchange is None or len(self._buffers) == 1 or slab in self._sent or slab >= self._source.grid.slabs:
            return
        if all(transfer.happened for transfer, *_ in self._filling.get(slab, [])):
            self._take(slab)
            self._sent[slab] = self._exchange.begin(self.written(slab), self._space, self._direction)

    def _take(self, slab: int) -> None:
        """Wait until the own rows of ``slab`` are there."""
        arriving = self._filling.get(slab, [])
        while arriving:  # if one fails, it and those behind it are still there to be settled
            transfer, check, rows, narrow = arriving[0]
            self._workspace.hold(transfer)
            check()
            if narrow is not None:
                rows.copy_(narrow.clone())
            del arriving[0]

    def settle(self) -> None:
        """Return when nothing is written to the buffers any more, whatever the result."""
        for blocks in self._filling.values():
            for transfer, *_ in blocks:
                transfer.settle()
        self._filling.clear()


class DealtSlabs(SlabBuffers):
    """The buffers of a column pass whose slabs are dealt out among processes: turn after turn, as many as there are.
    ``slab`` has this process's own rows of one; they are sent to those that pull it, and then there is what these have
    pulled for them. Where there are buffers for two turns, they come for the next one while one is pulled."""

    def __init__(self, run: ProgramRun, item: ColumnPass) -> None:
        super().__init__(run, item)
        assert run.runtime.exchange is not None
        self._link, self._item = run.runtime.exchange, item
        self._share = share = self._link.share
        self._memory, self._sizes = run.slabs_memory(item), run.dealt_memory(item)
        self._own, self._targets = share.own(self._space, self._rows), share.own(item.space, item.rows)
        self.direct = range(share.rank, direct_slabs(run.passes, item), item.processes)
        """Slabs of this process that are computed right into these buffers."""
        self._dealing: list[Future[None]] = []
        self.parts = returned_parts(item, run.plan.matrices[item.pull.source], share)

    def _matrix(self, at: int, rows: int, slab: int) -> Tensor:
        return as_matrix(self._memory[at:], self._source.region_dtype, rows, self._source.grid.width(slab))

    def arrived(self, slab: int) -> Tensor:
        """Those rows of a slab of this process that the program has written, of all."""
        at = slab // self._item.processes % self._sizes.turns
        return self._matrix(at * self._sizes.slab, self._rows, slab)

    def pulled(self, slab: int, rows: range) -> Tensor:
        """Memory for what is pulled of it for another process."""
        return self._matrix(self._sizes.pulled_at, len(rows), slab)

    def returned(self, slab: int, rows: range) -> Tensor:
        """What another process has pulled of its slab of the turn for ``rows`` of this one."""
        at = self._sizes.own_at + slab % self._sizes.slabs * self._sizes.own
        first = self._targets.start
        return self._matrix(at, len(self._targets), slab)[rows.start - first : rows.stop - first]

    def deal(self, slab: int, part: range) -> Future[None]:
        """Begin to have ``part`` of all rows of ``slab``, and to send the others theirs of the same turn."""
        turn, arrived, rank = self._item.turn(slab), self.arrived(slab), self._share.rank
        own = part_of(self._own, part)
        sent = [self.slab(each)[own.start - self._first_row : own.stop - self._first_row] for each in turn]
        arrived[own.start : own.stop].copy_(sent[rank])
        shifts = []
        for by in range(1, len(turn)):
            rows = part_of(self._share.of(rank - by, self._space, self._rows), part)
            shifts.append((by, arrived[rows.start : rows.stop], sent[(rank + by) % len(turn)]))
        return self._link.begin_shifts(shifts)

    def give_back(self, slab: int, by: int, part: range) -> Future[None]:
        """Begin to send ``part`` of what is pulled of ``slab`` for the process ``by`` numbers behind this one, and to
        have what is pulled for this one by that as many before it."""
        theirs = self._share.of(self._share.rank + by, self._item.space, self._item.rows)
        sent = part_of(range(len(theirs)), part)
        turn = self._item.turn(slab)
        received = self.returned(turn[(self._share.rank - by) % len(turn)], part_of(self._targets, part))
        return self._link.begin_shifts([(by, received, self.pulled(slab, theirs)[sent.start : sent.stop])])

    def fill(self, number: int) -> None:
        """Before the first step of a turn: have all rows of this process's slab. Own rows of the next turn begin to
        come, where there are buffers for them."""
        self._read(number)
        slab = self._run.program.steps[number].slab
        if not self._dealing:
            self._deal_read(slab, range(1))
        self._link.wait(*self._dealing)
        self._dealing.clear()

    def deal_next(self, slab: int, part: range) -> None:
        """While ``slab`` is pulled: the same as ``deal`` of the next turn, where there are buffers for it."""
        if self._sizes.turns > 1 and slab + self._item.processes < self._item.slabs:
            self._deal_read(slab + self._item.processes, part)

    def _deal_read(self, slab: int, part: range) -> None:
        """Deal out what is read into the buffers."""
        if slab not in self.direct:
            for each in self._item.turn(slab):
                self._take(each)
            self._dealing.append(self.deal(slab, part))


class SlabPull(PullRun):
    """From one slab of the source, in its buffer."""

    def __init__(
        self, run: ProgramRun, item: ColumnPass, buffers: SlabBuffers, slab: int, kernel: Kernel | AnyScaling
    ) -> None:
        kind, grid = item.pull.per_edge, run.runtime.matrices[item.pull.source].grid
        groups = range(0)
        if kind is not None:
            unit = grid.columns // kind.groups
            first = slab * grid.slab_columns // unit
            groups = range(first, first + grid.width(slab) // unit)
        super().__init__(run, item.pull, kernel, buffers.written(slab), groups)
        self._buffers = buffers
        self._arrived = False
        self._own: list[Input] = []
        if kind is None:
            return
        for name in item.pull.own:
            matrix = run.runtime.matrices[name]
            columns = matrix.grid.columns // kind.groups
            part = Input(
                matrix,
                run.workspace,
                whole=run.whole(name, item.index),
                dtype=run.runtime.dtype,
                columns=range(groups.start * columns, groups.stop * columns),
            )
            self._own.append(part)

    def open(self, number: int, step: Step) -> None:
        self._buffers.fill(number)
        kind = self._pull.per_edge
        if not self._arrived and kind is not None and self._source is not None:
            self._apart = ColumnCopy.of(self._source, len(self._groups), kind.copied_columns)
        self._arrived = True
        super().open(number, step)
        for part in self._own:
            part.open(step.start, step.stop)

    def own(self, tile: Tile) -> Tensor | None:
        return self._by_group([part.tile(tile.start, tile.stop) for part in self._own])
