# SPDX-License-Identifier: Apache-2.0
"""The pull of a pass: the edges of its rows, what tiles gather from, wherever that lies, and the kernel that
does it."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.engine.exchange import Shift, part_of
from ooc.engine.operands import Input, as_matrix
from ooc.engine.program_run import ProgramRun
from ooc.engine.runtime import Runtime
from ooc.engine.shuffle import RowsReader
from ooc.kernels.cuda.carried import Carried
from ooc.kernels.cuda.segments import EDGES_PER_SEGMENT
from ooc.kernels.edges import TileEdges
from ooc.kernels.sparse_rows import SparseRows
from ooc.kernels.tensors import typed
from ooc.model.graph import AnyScaling, damaged
from ooc.plan.layout.passes import (
    ColumnPass,
    ShardedMemory,
    direct_slabs,
    edges_name,
    matching_columns,
    sharded_memory,
    sharded_rows,
    slabs_nbytes,
)
from ooc.plan.program.received import returned_parts
from ooc.plan.program.sequence import Step
from ooc.plan.workload import Direction, EdgeData, Pull
from ooc.prefetch.engine import Event
from ooc.stages import Kernel, Tile

CPU = torch.device("cpu")
_OWN_MATRICES = -1
"""In the place of a slab: what rows bring to its pull."""
_NUMPY_TYPES = {torch.int32: np.int32, torch.int64: np.int64}


def relative_offsets(
    offsets: npt.NDArray[np.signedinteger],
    start: int,
    stop: int,
    dtype: torch.dtype,
    place: torch.device = CPU,
    first: int | None = None,
) -> Tensor:
    """Where the edges of rows ``start:stop`` begin, counted from the ``first`` of them; one more than rows."""
    part = offsets[start : stop + 1]
    first = int(part[0]) if first is None else first
    if place.type == "cpu":  # NumPy takes a third of the time of torch's operators
        return torch.from_numpy((part - first).astype(_NUMPY_TYPES[dtype], copy=False))
    # Copied from pinned memory as they are; a copy of a new tensor would make the host wait.
    absolute = torch.from_numpy(part).to(place, non_blocking=True)
    if absolute.dtype == dtype:
        return absolute.sub_(first)
    return torch.sub(absolute, first, out=absolute.new_empty(len(part), dtype=dtype))


def place_of_cut(offsets: npt.NDArray[np.signedinteger], rows: range, edge: int) -> tuple[int, int]:
    """Where the edges of ``rows`` are cut for pieces that end with ``edge``: the row, and the edge, fewer than a part's
    before. Of a long row it is the first of a part, of others their own first."""
    if edge <= offsets[rows.start]:
        return rows.start, int(offsets[rows.start])
    if edge >= offsets[rows.stop]:
        return rows.stop, int(offsets[rows.stop])
    row = rows.start + int(np.searchsorted(offsets[rows.start : rows.stop], edge, side="right")) - 1
    first, stop = int(offsets[row]), int(offsets[row + 1])
    is_long = stop - first > EDGES_PER_SEGMENT
    return row, first + is_long * ((edge - first) // EDGES_PER_SEGMENT * EDGES_PER_SEGMENT)


class EdgeSweep:
    """The edges of a pull's direction with what they carry for it, for one sweep over the rows."""

    def __init__(self, runtime: Runtime, pull: Pull) -> None:
        self._offsets = runtime.rows.offsets[pull.direction]
        self._parts_P2 = runtime.rows.parts.get(pull.direction)
        self._nodes = runtime.store.neighbours(pull.direction.value)
        self._checks = runtime.checks.get(pull.direction)
        self._retained = runtime.retained.get(pull.direction)
        self._arrays: dict[EdgeData | None, Input] = {
            data: Input(runtime.matrices[edges_name(pull.direction, data)], runtime.workspace, whole=None, dtype=None)
            for data in (None, *pull.edge_data)
        }
        self._carried: Carried | None = None

    def open(self, step: Step) -> tuple[range, range | None]:
        """The edges of a step's rows are about to be taken. Of which rows, and where it takes but a piece of the edges,
        of which."""
        rows, piece = range(step.start, step.stop), None
        first, last = int(self._offsets[rows.start]), int(self._offsets[rows.stop])
        if step.edges is not None:
            begin, first = place_of_cut(self._offsets, rows, step.edges.start)
            end, last = place_of_cut(self._offsets, rows, step.edges.stop)
            rows, piece = range(begin, end + (end < step.stop and last > self._offsets[end])), range(first, last)
        for array in self._arrays.values():
            array.open(first, last)
        return rows, piece

    def take(self, start: int, stop: int, edges: range | None = None) -> TileEdges:
        """The edges of rows ``start:stop``, on any thread; or those among ``edges``, piece after piece, on one."""
        first, last = int(self._offsets[start]), int(self._offsets[stop])
        begun, ended = first, last
        if edges is not None:
            first, last = max(first, edges.start), min(last, edges.stop)
        taken = {data: array.tile(first, last) for data, array in self._arrays.items()}
        indices, weight = taken[None][:, 0], taken.get(EdgeData.WEIGHT)
        if self._checks is not None:
            self._checks.check_range(indices)
        dtype = indices.dtype
        if edges is not None:
            # A row may have more edges than the index dtype can count.
            dtype = torch.from_numpy(self._offsets[:0]).dtype
            self._carried = self._carried or Carried()
            left_open = last - max(first, int(self._offsets[stop - 1])) if last < ended else 0
            self._carried.begin(indices, goes_on=first > begun, left_open=left_open)
        return TileEdges(
            indices,
            relative_offsets(self._offsets, start, stop, dtype, indices.device, first),
            start,
            self._nodes,
            weight_E=None if weight is None else weight[:, 0],
            features_EK=taken.get(EdgeData.FEATURES),
            checks=self._checks,
            parts_P2=self._parts(range(start, stop), range(first, last), indices.device),
            retained=self._retained,
            carried=None if edges is None else self._carried,
        )

    def _parts(self, rows: range, edges: range, place: torch.device) -> Tensor | None:
        """Those of the long ones among ``rows`` that have some of ``edges``, where there are kernels that want them."""
        if self._parts_P2 is None:
            return None
        first, last = (bisect_left(self._parts_P2[:, 0], row) for row in (rows.start, rows.stop))
        if first < last:  # skip the parts outside of the edges
            first += (edges.start - int(self._offsets[rows.start])) // EDGES_PER_SEGMENT
            last -= -(-(int(self._offsets[rows.stop]) - edges.stop) // EDGES_PER_SEGMENT)
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
    """A pull for one sweep over the rows, of ``groups`` of its source's columns, all rows of which ``source`` has in
    memory, or bucket by bucket as it has been shuffled. ``columns``: those in front of spare ones (0: there are none).
    """

    def __init__(
        self,
        run: ProgramRun,
        pull: Pull,
        kernel: Kernel | AnyScaling,
        source: Tensor | RowsReader,
        groups: range,
        columns: int = 0,
    ) -> None:
        self._runtime, self._pull, self._kernel, self._groups = run.runtime, pull, kernel, groups
        self._source, self._columns, self._edges = source, columns, EdgeSweep(run.runtime, pull)
        self._taken: tuple[range, range | None] = range(0), None

    def open(self, number: int, step: Step) -> None:
        """The rows of ``step``, which is step ``number`` of the program, are about to be pulled."""
        self._taken = self._edges.open(step)
        if isinstance(self._source, RowsReader):
            self._source.open(step.start, step.stop)

    def tiles(self, step: Step, height: int) -> Iterator[Tile]:
        """The rows of the step that has been opened, ``height`` at a time, and a piece of their edges if it has one."""
        rows, edges = self._taken
        for start in range(step.start, step.stop, height):
            first, stop = max(start, rows.start), min(start + height, rows.stop)
            if first < stop:
                yield Tile(first, stop, {}, edges=edges)

    def own(self, tile: Tile) -> Sequence[Tensor]:
        """A tile's rows of the pull's own matrices."""
        return [typed(tile.inputs[name], self._runtime.dtype) for name in self._pull.own]

    def _by_group(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Own rows side by side in every group; None where the source stands for them."""
        if len(parts) < 2:
            return parts[0] if parts else None
        rows, groups = len(parts[0]), len(self._groups)
        return torch.cat([part.reshape(rows, groups, -1) for part in parts], dim=2).view(rows, -1)

    def rows(self, tile: Tile, out: Tensor | None = None) -> Tensor:
        """What is pulled into the rows of ``tile``, on any thread; what is scattered on the way is the tile's. In
        ``out``, if they can be summed right into it."""
        edges = self._edges.take(tile.start, tile.stop, tile.edges)
        source = self._source.tile(tile.start) if isinstance(self._source, RowsReader) else self._source
        if isinstance(self._kernel, AnyScaling):
            assert isinstance(source, Tensor), "sums are of what is in memory"
            out = source.new_empty(tile.stop - tile.start, self._columns) if self._columns else out
            sums = self._runtime.pull_rows(source, edges, self._pull.direction, self._kernel, out)
            return sums[:, : self._columns].contiguous() if self._columns else sums
        own = self._by_group(self.own(tile))
        source = cast(Tensor, source)  # only opaque layers get shuffled rows, and they accept both
        own = source[tile.start : tile.start + edges.rows] if own is None else own
        return tile.take(self._kernel(edges, source, own, self._groups))


class SlabBuffers:
    """The buffers of a column pass, and of the row pass behind it that pulls the last slab."""

    def __init__(self, run: ProgramRun, item: ColumnPass) -> None:
        self._run, self._item = run, item
        self._workspace = run.workspace
        self._source, self._planned = run.runtime.matrices[item.pull.source], run.plan.matrices[item.pull.source]
        nbytes = slabs_nbytes(item, run.passes, run.plan.matrices, run.plan.share)
        self._memory = run.streaming_memory(item.pull.source, item.index, nbytes)
        stride, grid = self._planned.slab_stride(), self._source.grid
        held = range(item.slab_buffers if item.processes == 1 else 0)
        self.first_row, self.buffers = 0, [self._matrix(k * stride, grid.rows, grid.width(k)) for k in held]
        self._filling: dict[int, list[tuple[Any, partial[None], Tensor, Tensor | None]]] = {}
        self._exchange, self._direction = run.runtime.exchange, item.pull.direction
        self._space = self._planned.matrix.space
        self._rows = run.written_rows(item.pull.source, item.index)
        self._sent: dict[int, Future[Event | None]] = {}

    def _matrix(self, at: int, rows: int, columns: int) -> Tensor:
        return as_matrix(self._memory[at:], self._source.region_dtype, rows, columns)

    def slab(self, slab: int) -> Tensor:
        """The memory of ``slab`` [N, columns]; the last slab may be narrower."""
        buffer, width = self.buffers[slab % len(self.buffers)], self._source.grid.width(slab)
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
        workspace = self._workspace
        for block, in_frame in self._run.program.fill.get(number, ()):
            name, slab, row_block = self._run.plan.blocks.where(block)
            matrix, grid = self._run.runtime.matrices[name], self._run.plan.matrices[name].grid
            nbytes, start = grid.block_nbytes(slab, row_block), row_block * grid.block_rows
            rows = self._place(name, slab, range(start, start + grid.height(row_block)))
            if in_frame:
                workspace.await_read(block)
                rows.copy_(matrix.rows(workspace, slab, row_block))
            else:
                memory = rows.reshape(-1).view(torch.uint8)[-nbytes:]  # narrower values go to the upper half
                narrow = memory.view(matrix.dtype).view(rows.shape) if len(memory) < rows.nbytes else None
                check = partial(workspace.filled, block, memory)
                key = slab if name == self._item.pull.source else _OWN_MATRICES
                self._filling.setdefault(key, []).append((workspace.fill(block, memory), check, rows, narrow))

    def _place(self, name: str, slab: int, rows: range) -> Tensor:
        """Where some rows are read to."""
        return self.slab(slab)[rows.start : rows.stop]

    def send_ahead(self, slab: int) -> None:
        """While the slab before ``slab`` is pulled: begin to send its rows, once they are in a buffer."""
        if self._exchange is None or len(self.buffers) == 1 or slab in self._sent or slab >= self._source.grid.slabs:
            return
        if all(transfer.happened for transfer, *_ in self._filling.get(slab, [])):
            self._take(slab)
            self._sent[slab] = self._exchange.begin(self.written(slab), self._space, self._direction)

    def _take(self, slab: int) -> None:
        """Wait until the own rows of ``slab`` are there."""
        arriving = self._filling.get(slab, [])
        while arriving:  # after a failure, the others can still be settled
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


class ShardedRows:
    """Of a matrix that goes into the pull of slabs that are sharded: own rows of some slabs, and of all rows the
    columns that go with this process's slab of each turn at once. ``rows``: of all processes."""

    def __init__(self, run: ProgramRun, item: ColumnPass, name: str, memory: Tensor, sizes: ShardedMemory) -> None:
        planned, share, place = run.plan.matrices[name], run.plan.share, sizes.places[name]
        assert share is not None, "columns are sharded among several processes"
        self._item, self._grid, self._source = item, planned.grid, run.plan.matrices[item.pull.source].grid
        self._memory, self._dtype, self._place = memory, run.runtime.matrices[name].region_dtype, place
        self._whole, is_source = run.whole(name, item.index), name == item.pull.source
        self._count = run.written_rows(name, item.index) if is_source else item.rows
        self.rows = [share.of(rank, planned.matrix.space, self._count) for rank in range(share.count)]
        own = sharded_rows(item, run.passes, planned, share, share.rank)
        self.first_row, widths = own.start, (self._grid.width(k) for k in range(place.slabs))
        self.slabs = [self._matrix(place.own_at + k * place.own, len(own), width) for k, width in enumerate(widths)]
        self.row_bytes = len(matching_columns(self._grid, self._source, 0)) * self._dtype.itemsize
        """Of what goes with the widest slab."""

    def _matrix(self, at: int, rows: int, columns: int) -> Tensor:
        return as_matrix(self._memory[at:], self._dtype, rows, columns)

    def own(self, rows: range, slab: int) -> Tensor:
        """Own rows of a slab of this matrix, whose memory may have been another one's."""
        memory, width = self.slabs[slab % len(self.slabs)], self._grid.width(slab)
        return memory.view(-1)[: len(memory) * width].view(-1, width)[
            rows.start - self.first_row : rows.stop - self.first_row
        ]

    def beside(self, rows: range, slab: int) -> Tensor:
        """Of own rows the columns that go with a slab of the source."""
        columns, found, width = (
            matching_columns(self._grid, self._source, slab),
            list[Tensor](),
            self._grid.slab_columns,
        )
        if self._whole is not None:
            return self._whole[rows.start : rows.stop, columns.start : columns.stop]
        for number in range(columns.start // width, -(-columns.stop // width)):
            first = number * width
            found.append(self.own(rows, number)[:, max(0, columns.start - first) : columns.stop - first])
        if len(found) == 1:
            return found[0]
        place, rows_of = self._place, len(self.slabs[0])
        at = place.own_at + place.slabs * place.own + columns.start * rows_of * self._dtype.itemsize
        first = rows.start - self.first_row
        return torch.cat(found, dim=1, out=self._matrix(at, rows_of, len(columns))[first : first + len(rows)])

    def arrived(self, slab: int) -> Tensor:
        """Of all rows there are, for a slab of this process."""
        at = self._place.begin + slab // self._item.processes % self._item.turns_at_once * self._place.rows
        return self._matrix(at, self._count, len(matching_columns(self._grid, self._source, slab)))


class ShardedSlabs(SlabBuffers):
    """The buffers of a column pass whose slabs are sharded among processes: turn after turn, as many as there are.
    Each has its own rows of all slabs of a turn; they are sent to those that pull them, and then there is what these
    have pulled for them. Where there are buffers for two turns, they come for the next one while one is pulled."""

    def __init__(self, run: ProgramRun, item: ColumnPass) -> None:
        super().__init__(run, item)
        share, matrices = run.plan.share, run.plan.matrices
        assert run.runtime.exchange is not None and share is not None, "columns are sharded among several processes"
        self._link, self._share, self._target = run.runtime.exchange, share, matrices[item.output].grid
        self._sizes = sizes = sharded_memory(item, run.passes, matrices, share)
        self._rows_of = {name: ShardedRows(run, item, name, self._memory, sizes) for name in sizes.places}
        source = self._rows_of[item.pull.source]
        self.first_row, self.buffers, self._targets = source.first_row, source.slabs, share.own(item.space, item.rows)
        self.direct = range(share.rank, direct_slabs(run.passes, item), item.processes)
        """Slabs of this process that are computed right into these buffers."""
        self._sending: list[Future[Event | None]] = []
        self.parts = returned_parts(item, self._planned, share)

    def arrived(self, slab: int) -> dict[str, Tensor]:
        """Those rows of a slab of this process that the program has written, of all; and what all rows bring to its
        pull."""
        return {name: rows.arrived(slab) for name, rows in self._rows_of.items()}

    def pulled(self, slab: int, rows: range) -> Tensor:
        """Memory for what is pulled of it for another process."""
        return self._matrix(self._sizes.pulled_at, len(rows), self._target.width(slab))

    def returned(self, slab: int, rows: range) -> Tensor:
        """What another process has pulled of its slab of the turn for ``rows`` of this one."""
        place, first = self._sizes.places[self._item.pull.source], self._targets.start
        at = place.own_at + slab % place.slabs * place.own
        return self._matrix(at, len(self._targets), self._target.width(slab))[rows.start - first : rows.stop - first]

    def _place(self, name: str, slab: int, rows: range) -> Tensor:
        return self._rows_of[name].own(rows, slab)

    def send(self, slab: int, part: range, names: Sequence[str] = ()) -> Future[Event | None]:
        """Begin to have ``part`` of all rows of ``slab``, and to send the others theirs of the same turn; of the
        source, or of ``names``."""
        turn, rank, shifts = self._item.turn(slab), self._share.rank, list[Shift]()
        for one in (self._rows_of[name] for name in names or [self._item.pull.source]):
            rows, arrived = [part_of(some, part) for some in one.rows], one.arrived(slab)
            sent = [one.beside(rows[rank], each) for each in turn]
            arrived[rows[rank].start : rows[rank].stop].copy_(sent[rank])
            for by in range(1, len(turn)):
                come, given = rows[(rank - by) % len(turn)], sent[(rank + by) % len(turn)]
                shifts.append(Shift(by, arrived[come.start : come.stop], given, max(map(len, rows)), one.row_bytes))
        return self._link.begin_shifts(shifts)

    def give_back(self, slab: int, by: int, part: range) -> Future[Event | None]:
        """Begin to send ``part`` of what is pulled of ``slab`` for the process ``by`` numbers behind this one, and to
        have what is pulled for this one by that as many before it."""
        share, turn = self._share, self._item.turn(slab)
        targets = [share.of(rank, self._item.space, self._item.rows) for rank in range(share.count)]
        theirs = targets[(share.rank + by) % share.count]
        sent = part_of(range(len(theirs)), part)
        received = self.returned(turn[(share.rank - by) % len(turn)], part_of(self._targets, part))
        given = self.pulled(slab, theirs)[sent.start : sent.stop]
        most, row_bytes = max(len(part_of(some, part)) for some in targets), self._target.width(0) * given.itemsize
        return self._link.begin_shifts([Shift(by, received, given, most, row_bytes)])

    def fill(self, number: int) -> None:
        """Before the first step of a turn: have all rows of this process's slab. Own rows of the next turn begin to
        come, where there are buffers for them."""
        self._read(number)
        slab = self._run.program.steps[number].slab
        if not self._sending:
            self._send_read(slab, range(1))
        self._link.wait(*self._sending)
        self._sending.clear()

    def send_next(self, slab: int, part: range) -> None:
        """While ``slab`` is pulled: the same as ``send`` of the next turn, where there are buffers for it."""
        if self._item.turns_at_once > 1 and slab + self._item.processes < self._item.slabs:
            self._send_read(slab + self._item.processes, part)

    def _send_read(self, slab: int, part: range) -> None:
        """Send what is read into the buffers."""
        read = [name for name in self._rows_of if slab not in self.direct or name != self._item.pull.source]
        for each in (*self._item.turn(slab), _OWN_MATRICES) if read else ():
            self._take(each)
        if read:
            self._sending.append(self.send(slab, part, read))


class SlabPull(PullRun):
    """From one slab of the source, in its buffer."""

    def __init__(
        self, run: ProgramRun, item: ColumnPass, buffers: SlabBuffers, slab: int, kernel: Kernel | AnyScaling
    ) -> None:
        kind, groups = item.pull.per_edge, groups_of(run, item, slab)
        super().__init__(run, item.pull, kernel, buffers.written(slab), groups)
        self._buffers = buffers
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
        super().open(number, step)
        for part in self._own:
            part.open(step.start, step.stop)

    def own(self, tile: Tile) -> Sequence[Tensor]:
        return [part.tile(tile.start, tile.stop) for part in self._own]


def groups_of(run: ProgramRun, item: ColumnPass, slab: int) -> range:
    """Those in a slab of its source; none of a plain sum."""
    kind, grid = item.pull.per_edge, run.runtime.matrices[item.pull.source].grid
    if kind is None:
        return range(0)
    unit = grid.columns // kind.groups
    first = slab * grid.slab_columns // unit
    return range(first, first + grid.width(slab) // unit)
