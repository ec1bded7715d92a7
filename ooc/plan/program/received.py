# SPDX-License-Identifier: Apache-2.0
"""What other processes send to one while it computes a pass, part by part, and how much of that time computing does not
hide."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ooc.plan.layout.passes import ColumnPass, MatrixPlan, Pass, Passes, RowPass, direct_slabs, pulled_by, sweeps_of
from ooc.plan.workload import EdgesKey, Pull, Share, Topology, sharded_widths

_MOST_PARTS = 8
_PART_BYTES = 1 << 18
"""Bytes of a part. Over links of 20 MB a second, an epoch with slabs of 2 MB waited 0.3 s with this size, and 0.7 s
with parts four times as large, of which a slab was only one or two."""


class Received(NamedTuple):
    """Bytes that arrive in ``parts`` equal parts: a slab while the one before it is pulled, or rows as others have
    computed them."""

    nbytes: int
    parts: int


def sent_parts(nbytes: int) -> int:
    """Return in how many parts matrices of ``nbytes`` bytes in all are sent while they are computed."""
    return max(1, min(_MOST_PARTS, nbytes // _PART_BYTES))


def exposed_s(received: Sequence[Received], computed_s: float, bytes_per_s: float) -> float:
    """Return the seconds that a pass takes beyond ``computed_s`` for what it receives. Of n parts, one is computed or
    pulled while nothing is sent, and one is sent while nothing is computed; the others may be hidden."""
    alone_s = sum(one.nbytes / one.parts for one in received) / bytes_per_s
    beside_s = sum(one.nbytes for one in received) / bytes_per_s - alone_s
    most = max((one.parts for one in received), default=1)
    return alone_s + max(0.0, beside_s - computed_s * (1 - 1 / most))


class Forms(NamedTuple):
    """The bytes that a process receives for a pull of ``source`` in both forms: rows of other processes, or columns of
    all rows and back (None: columns cannot be sharded); and whether they are sharded."""

    source: str
    halo_bytes: int
    columns_bytes: int | None
    is_sharded: bool


@dataclass(frozen=True, slots=True)
class Receiver:
    """What the process with ``share`` receives while it computes ``passes``."""

    passes: Passes
    matrices: Mapping[str, MatrixPlan]
    topologies: Mapping[EdgesKey, Topology]
    share: Share

    def received(self) -> list[list[Received]]:
        """Return what is received in each pass: pulled rows as they are computed, slab by slab as they are pulled, or
        as sharded slabs with the pulled rows sent back; and scattered sums, from one process to the next."""
        passes, share, matrices = self.passes, self.share, self.matrices
        found: list[list[Received]] = [[] for _ in passes]
        for item in passes:
            sweeps = sweeps_of(item)
            if isinstance(item, ColumnPass) and item.processes > 1:
                for at, received in self._sharded_slab_bytes(item):
                    found[at].append(received)
            elif sweeps is not None:
                planned, rows = matrices[sweeps.pull.source], written_rows(sweeps.pull, passes[: item.index])
                grid = planned.grid
                ahead = sweeps.slab_buffers > 1  # then the last slab is sent while the one before it is pulled
                every = range(grid.slabs if ahead else sweeps.slabs)
                slabs = every if sweeps is item else range(sweeps.slabs, grid.slabs)
                if sweeps is item or not ahead:
                    row_bytes = sum(map(grid.width, slabs)) * planned.region_itemsize
                    wanted = self._count_wanted_rows(planned, rows, [sweeps.pull.direction])
                    found[item.index].append(Received(wanted * row_bytes, len(slabs) if ahead else 1))
            if isinstance(item, RowPass):
                parts = sent_parts_of(item, passes, matrices)
                for name in item.stage.stores:
                    planned, directions = matrices[name], pulled_by(name, passes[item.index + 1 :])
                    if planned.whole and directions:
                        row_bytes = planned.grid.columns * planned.region_itemsize
                        wanted = self._count_wanted_rows(planned, item.rows, directions)
                        found[item.index].append(Received(wanted * row_bytes, parts))
            for name in item.pull.added_to if item.pull is not None else ():
                hands = (share.rank > 0) + (share.rank < share.count - 1)
                found[item.index].append(Received(hands * matrices[name].region_nbytes, 1))
        return found

    def forms(self) -> list[Forms]:
        """Return both forms of every pull, with slabs as wide as possible."""
        found = []
        for item in self.passes:
            if item.pull is None or item.sweeps is not None:
                continue
            planned, rows = self.matrices[item.pull.source], written_rows(item.pull, self.passes[: item.index])
            columns, nbytes = planned.matrix.columns, planned.region_itemsize
            halo = self._count_wanted_rows(planned, rows, [item.pull.direction])
            sharded, kind = None, item.pull.per_edge
            groups, slices = (columns, 1) if kind is None else (kind.groups, kind.slices)
            if not item.pull.is_opaque and (widths := sharded_widths(groups, self.share.count, slices)):
                width = columns // groups * max(0, min(widths[0], groups - self.share.rank * widths[0]))
                others = self._count_others_rows(planned.matrix.space, rows)
                own, pulled = (
                    len(self.share.own(item.space, item.rows)),
                    item.pull.output_columns(columns - width, columns),
                )
                sharded = (others * width + own * pulled) * nbytes + self._own_rows_bytes(item, width, columns)
            is_sharded = isinstance(item, ColumnPass) and item.processes > 1
            found.append(Forms(item.pull.source, halo * columns * nbytes, sharded, is_sharded))
        return found

    def _count_others_rows(self, space: str, rows: int) -> int:
        """Return how many of the first ``rows`` rows belong to other processes."""
        return rows - len(self.share.own(space, rows))

    def _count_wanted_rows(self, planned: MatrixPlan, rows: int, directions: Sequence[EdgesKey]) -> int:
        """Return how many of the first ``rows`` rows of a matrix belong to others and are needed for pulls in these
        directions."""
        topology, space, rows = self.topologies[directions[0]], planned.matrix.space, min(rows, planned.grid.rows)
        if len(directions) == 1 and topology.halo is not None:
            return bisect_left(topology.halo, rows)
        if len(directions) == 1 and topology.halo_rows is not None:
            return topology.halo_rows * rows // self.share.every[space][-1].stop
        return self._count_others_rows(space, rows)

    def _own_rows_bytes(self, item: Pass, width: int, columns: int) -> int:
        """Return the bytes received of own rows of other processes, for ``width`` of a source's ``columns``."""
        assert item.pull is not None
        own = (self.matrices[name] for name in item.pull.own)
        row_bytes = sum(one.matrix.columns * width // columns * one.region_itemsize for one in own)
        return self._count_others_rows(item.space, item.rows) * row_bytes

    def _sharded_slab_bytes(self, item: ColumnPass) -> Iterator[tuple[int, Received]]:
        """Yield, with the index of its pass, what is received of sharded slabs, and of what others have pulled for this
        process."""
        planned, rows = self.matrices[item.pull.source], written_rows(item.pull, self.passes[: item.index])
        grid, nbytes, direct = planned.grid, planned.region_itemsize, direct_slabs(self.passes, item)
        others, returned, returns = (
            self._count_others_rows(planned.matrix.space, rows),
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
            yield item.index, Received(self._own_rows_bytes(item, grid.width(slab), grid.columns), ahead)
            returned += sum(grid.width(each) for each in item.turn(slab) if each != slab)
        back = len(self.share.own(item.space, item.rows)) * item.pull.output_columns(returned, grid.columns) * nbytes
        yield item.index, Received(back, (item.processes - 1) * returns)


def written_rows(pull: Pull, passes: Sequence[Pass]) -> int:
    """Return how many rows of the pulled matrix ``passes`` have written."""
    return max(one.rows for one in passes if pull.source in one.stores)


def sharded_by(item: Pass, passes: Passes) -> list[ColumnPass]:
    """Return the column passes with sharded slabs that ``item`` computes right into their buffers."""
    found = (one for one in passes[item.index + 1 :] if isinstance(one, ColumnPass) and one.processes > 1)
    return [one for one in found if one.pull.source in item.stores and direct_slabs(passes, one)]


def sent_parts_of(item: RowPass, passes: Passes, matrices: Mapping[str, MatrixPlan]) -> int:
    """Return in how many parts the processes send what a row pass computes while it runs: matrices whole in memory, and
    sharded slabs, of which each process receives one."""
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
    """Return in how many parts the pulled rows of a sharded slab are sent to each other process."""
    most = max(len(share.of(rank, item.space, item.rows)) for rank in range(share.count))
    pulled = item.pull.output_columns(planned.grid.width(0), planned.grid.columns)
    return sent_parts(most * pulled * planned.region_itemsize)
