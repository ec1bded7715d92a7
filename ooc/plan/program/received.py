# SPDX-License-Identifier: Apache-2.0
"""What a process is sent by others while it computes a pass, part by part, and what of it computing does not hide."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ooc.plan.layout.passes import ColumnPass, MatrixPlan, Pass, RowPass, direct_slabs, pulled_by, sweeps_of
from ooc.plan.workload import EdgesKey, Pull, Share, Topology, sharded_widths

_MOST_PARTS = 8
_PART_BYTES = 1 << 18
"""By links of 20 MB a second 0.3 s of an epoch of slabs of 2 MB were waited for with these, 0.7 s with four times as
large ones, of which a slab was but one or two."""


class Received(NamedTuple):
    """Bytes that come in so many equal parts: a slab while the one before it is pulled, rows as others have them."""

    nbytes: int
    parts: int


def sent_parts(nbytes: int) -> int:
    """In how many parts matrices of so many bytes together are sent while they are computed."""
    return max(1, min(_MOST_PARTS, nbytes // _PART_BYTES))


def exposed_s(received: Sequence[Received], computed_s: float, bytes_per_s: float) -> float:
    """How much longer than ``computed_s`` a pass takes for what it receives. One part of what comes in n is computed,
    or pulled, while nothing is sent, and one is sent while nothing else is done; the others may be hidden."""
    alone_s = sum(one.nbytes / one.parts for one in received) / bytes_per_s
    beside_s = sum(one.nbytes for one in received) / bytes_per_s - alone_s
    most = max((one.parts for one in received), default=1)
    return alone_s + max(0.0, beside_s - computed_s * (1 - 1 / most))


class Forms(NamedTuple):
    """Bytes that a process is sent for a pull of ``source``: rows of others, or columns of all rows and back (None:
    these cannot be sharded); and whether they are."""

    source: str
    halo_bytes: int
    columns_bytes: int | None
    is_sharded: bool


@dataclass(frozen=True, slots=True)
class Receiver:
    """The process with ``share``, which computes the ``passes`` of a program."""

    passes: Sequence[Pass]
    matrices: Mapping[str, MatrixPlan]
    topologies: Mapping[EdgesKey, Topology]
    share: Share

    def received(self) -> list[list[Received]]:
        """What it is sent in each pass: rows of what is pulled, as they are computed, or slab by slab as it is pulled,
        or slabs that are sharded, and what is pulled of these; and sums of what is scattered, from one process to the
        next."""
        passes, share, matrices = self.passes, self.share, self.matrices
        found: list[list[Received]] = [[] for _ in passes]
        for item in passes:
            sweeps = sweeps_of(item)
            if isinstance(item, ColumnPass) and item.processes > 1:
                for at, received in self._of_sharded(item):
                    found[at].append(received)
            elif sweeps is not None:
                planned, rows = matrices[sweeps.pull.source], written_rows(sweeps.pull, passes[: item.index])
                grid = planned.grid
                ahead = sweeps.slab_buffers > 1  # then the last slab is sent while the one before it is pulled
                every = range(grid.slabs if ahead else sweeps.slabs)
                slabs = every if sweeps is item else range(sweeps.slabs, grid.slabs)
                if sweeps is item or not ahead:
                    row_bytes = sum(map(grid.width, slabs)) * planned.region_itemsize
                    wanted = self._wanted_rows(planned, rows, [sweeps.pull.direction])
                    found[item.index].append(Received(wanted * row_bytes, len(slabs) if ahead else 1))
            if isinstance(item, RowPass):
                parts = sent_parts_of(item, passes, matrices)
                for name in item.stage.stores:
                    planned, directions = matrices[name], pulled_by(name, passes[item.index + 1 :])
                    if planned.whole and directions:
                        row_bytes = planned.grid.columns * planned.region_itemsize
                        wanted = self._wanted_rows(planned, item.rows, directions)
                        found[item.index].append(Received(wanted * row_bytes, parts))
            for name in item.pull.added_to if item.pull is not None else ():
                hands = (share.rank > 0) + (share.rank < share.count - 1)
                found[item.index].append(Received(hands * matrices[name].region_nbytes, 1))
        return found

    def forms(self) -> list[Forms]:
        """Both forms of every pull, with slabs as wide as they can be."""
        found = []
        for item in self.passes:
            if item.pull is None or item.sweeps is not None:
                continue
            planned, rows = self.matrices[item.pull.source], written_rows(item.pull, self.passes[: item.index])
            columns, nbytes = planned.matrix.columns, planned.region_itemsize
            halo = self._wanted_rows(planned, rows, [item.pull.direction])
            sharded, kind = None, item.pull.per_edge
            groups, slices = (columns, 1) if kind is None else (kind.groups, kind.slices)
            if not item.pull.is_opaque and (widths := sharded_widths(groups, self.share.count, slices)):
                width = columns // groups * max(0, min(widths[0], groups - self.share.rank * widths[0]))
                others = self._others_rows(planned.matrix.space, rows)
                own, pulled = (
                    len(self.share.own(item.space, item.rows)),
                    item.pull.output_columns(columns - width, columns),
                )
                sharded = (others * width + own * pulled) * nbytes + self._brought(item, width, columns)
            is_sharded = isinstance(item, ColumnPass) and item.processes > 1
            found.append(Forms(item.pull.source, halo * columns * nbytes, sharded, is_sharded))
        return found

    def _others_rows(self, space: str, rows: int) -> int:
        """How many of the first ``rows`` rows are of others."""
        return rows - len(self.share.own(space, rows))

    def _wanted_rows(self, planned: MatrixPlan, rows: int, directions: Sequence[EdgesKey]) -> int:
        """Of the first ``rows`` rows of a matrix, those of others that are wanted for pulls in these directions."""
        topology, space, rows = self.topologies[directions[0]], planned.matrix.space, min(rows, planned.grid.rows)
        if len(directions) == 1 and topology.halo is not None:
            return bisect_left(topology.halo, rows)
        if len(directions) == 1 and topology.halo_rows is not None:
            return topology.halo_rows * rows // self.share.every[space][-1].stop
        return self._others_rows(space, rows)

    def _brought(self, item: Pass, width: int, columns: int) -> int:
        """Bytes that are received of what other rows bring to ``width`` of a source's ``columns``."""
        assert item.pull is not None
        own = (self.matrices[name] for name in item.pull.own)
        row_bytes = sum(one.matrix.columns * width // columns * one.region_itemsize for one in own)
        return self._others_rows(item.space, item.rows) * row_bytes

    def _of_sharded(self, item: ColumnPass) -> Iterator[tuple[int, Received]]:
        """By pass: what comes of slabs that are sharded, and of what others have pulled of theirs."""
        planned, rows = self.matrices[item.pull.source], written_rows(item.pull, self.passes[: item.index])
        grid, nbytes, direct = planned.grid, planned.region_itemsize, direct_slabs(self.passes, item)
        others, returned, returns = (
            self._others_rows(planned.matrix.space, rows),
            0,
            returned_parts(item, planned, self.share),
        )
        for slab in range(self.share.rank, item.slabs, item.processes):
            ahead = returns if item.turns_at_once > 1 and slab >= item.processes else 1
            at, parts = item.index, ahead
            if slab < direct:
                writer = next(one for one in self.passes if item.pull.source in one.stores)
                assert isinstance(writer, RowPass), "what is sharded is computed by a stage"
                at, parts = writer.index, sent_parts_of(writer, self.passes, self.matrices)
            yield at, Received(others * grid.width(slab) * nbytes, parts)
            yield item.index, Received(self._brought(item, grid.width(slab), grid.columns), ahead)
            returned += sum(grid.width(each) for each in item.turn(slab) if each != slab)
        back = len(self.share.own(item.space, item.rows)) * item.pull.output_columns(returned, grid.columns) * nbytes
        yield item.index, Received(back, (item.processes - 1) * returns)


def written_rows(pull: Pull, passes: Sequence[Pass]) -> int:
    """How many rows of what is pulled ``passes`` have written."""
    return max(one.rows for one in passes if pull.source in one.stores)


def sharded_by(item: Pass, passes: Sequence[Pass]) -> list[ColumnPass]:
    """The column passes whose slabs are sharded as ``item`` computes them right into their buffers."""
    found = (one for one in passes[item.index + 1 :] if isinstance(one, ColumnPass) and one.processes > 1)
    return [one for one in found if one.pull.source in item.stores and direct_slabs(passes, one)]


def sent_parts_of(item: RowPass, passes: Sequence[Pass], matrices: Mapping[str, MatrixPlan]) -> int:
    """In how many parts all processes send what a row pass computes while it does: what is in memory whole, and slabs
    that are sharded, of each of which one process gets one."""
    nbytes = 0
    for name in item.stage.stores:
        planned = matrices[name]
        if planned.whole and pulled_by(name, passes[item.index + 1 :]):
            nbytes += min(item.rows, planned.grid.rows) * planned.grid.columns * planned.region_itemsize
    for one in sharded_by(item, passes):
        grid = matrices[one.pull.source].grid
        nbytes += item.rows * one.turns_at_once * grid.width(0) * matrices[one.pull.source].region_itemsize
    return sent_parts(nbytes)


def returned_parts(item: ColumnPass, planned: MatrixPlan, share: Share) -> int:
    """In how many parts what is pulled of a slab that is sharded is sent to each of the others."""
    most = max(len(share.of(rank, item.space, item.rows)) for rank in range(share.count))
    pulled = item.pull.output_columns(planned.grid.width(0), planned.grid.columns)
    return sent_parts(most * pulled * planned.region_itemsize)
