# SPDX-License-Identifier: Apache-2.0
"""How many entries an external shuffle has (``ooc.plan.layout.shuffle``), counted beforehand in one sweep over the
in-edges.

Of partial sums: a tile adds to each of its in-neighbours outside of it, once for every run of its rows
(``kernels.neighbourhood``). That is the graph's affair, and the layer's, which says how many edges a run has.

Of bucketed rows: a bucket gathers its own rows, unless these are of another type, and all in-neighbours of these, each
once, however many of its targets have it. They are counted for the lowest buckets, and the rows of two neighbours
joined for a bucket twice as high, and so on: as when sorted runs are merged, of every height at most one bucket waits
for the one beside it. A large set of rows is kept as a byte for each row of the source, so all that wait take a byte a
row for each of the few heights whose buckets gather most of the source, and little beside that.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from ooc.engine.pull_run import relative_offsets
from ooc.kernels.edges import TileEdges, highest_row
from ooc.kernels.neighbourhood import neighbourhood, runs
from ooc.model.graph import are_between_types, damaged
from ooc.plan.layout.shuffle import GatheredRows
from ooc.plan.workload import EdgesKey
from ooc.stages.workload import TileEdges as CountedEdges
from ooc.storage.store import Store

_CHUNK_BYTES = 1 << 20
"""Of offsets that are read at a time, at least those of one tile or bucket."""
_MOST_EDGES = 1 << 20
"""Edges of a bucket that are looked at together."""


def most_gathers(tile_edges: CountedEdges, direction: EdgesKey) -> GatheredRows:
    """Rows gathered in a graph, or of links, of which only degrees are known: a row for each target and for each edge
    into it, or all rows, which is the most."""

    @cache
    def gathered(targets: int, rows: int, height: int) -> Sequence[Sequence[int]]:
        edges = tile_edges(direction, height)
        counts: list[list[int]] = []
        while not counts or len(counts[-1]) > 1:
            tiles = 1 << len(counts)
            starts = range(0, -(-targets // height), tiles)
            ends = [min(start + tiles, len(edges) - 1) for start in starts]
            counts.append(
                [min(rows, tiles * height + edges[end] - edges[start]) for start, end in zip(starts, ends, strict=True)]
            )
        return counts

    return gathered


def _sweep(
    store: Store, direction: EdgesKey, rows: int, height: int
) -> Iterator[tuple[int, int, npt.NDArray[np.signedinteger]]]:
    """Every ``height`` of the first ``rows`` rows: where they start and stop, and where their in-edges begin, one more
    than rows."""
    indptr, indices = store.topology(direction.value)
    at_once = max(1, _CHUNK_BYTES // (8 * height)) * height
    for first in range(0, rows, at_once):
        last = min(rows, first + at_once)
        offsets = indptr.read(first, last + 1)
        if offsets[0] < 0 or offsets[-1] > indices.shape[0] or (np.diff(offsets) < 0).any():
            raise damaged(store, indptr.name)
        for start in range(first, last, height):
            stop = min(last, start + height)
            yield start, stop, offsets[start - first : stop - first + 1]


def count_sums(
    store: Store,
    direction: EdgesKey,
    rows: int,
    others: int,
    tile_rows: int,
    edges_at_once: int,
    pads: bool,
    apart: bool,
) -> Sequence[int]:
    """Entries of partial sums (``stages.workload.ScatterCounts``), read from the store."""
    (_, indices), nodes = store.topology(direction.value), store.neighbours(direction.value)
    behind = nodes if apart or are_between_types(store, direction) else 0  # so that no neighbour is a row of the tile
    added = np.zeros(-(-others // tile_rows) + 1, dtype=np.int64)
    for start, stop, offsets in _sweep(store, direction, rows, tile_rows):
        neighbours = torch.from_numpy(indices.read(int(offsets[0]), int(offsets[-1])))
        relative = relative_offsets(offsets, 0, stop - start, torch.int64)
        for run in runs(TileEdges(neighbours, relative, behind + start, nodes), edges_at_once, pads=pads):
            near = neighbourhood(run, others)
            if not near.stands_in:
                np.add.at(added, near.others_S.numpy() // tile_rows + 1, 1)
    return [int(count) for count in np.cumsum(added)]


def count_gathers(store: Store, direction: EdgesKey, targets: int, rows: int, height: int) -> Sequence[Sequence[int]]:
    """Rows gathered (``plan.layout.shuffle.GatheredRows``), read from the store."""
    (_, indices), nodes = store.topology(direction.value), store.neighbours(direction.value)
    joined, gathers_own = _Joined(), not are_between_types(store, direction)
    for start, stop, offsets in _sweep(store, direction, targets, height):
        gathered = _Rows(np.arange(start, min(stop, rows) if gathers_own else start), rows)
        end = int(offsets[-1])
        for edge in range(int(offsets[0]), end, _MOST_EDGES):
            neighbours = torch.from_numpy(indices.read(edge, min(end, edge + _MOST_EDGES)))
            everything = relative_offsets(np.array([0, len(neighbours)]), 0, 1, torch.int64)
            highest_row(TileEdges(neighbours, everything, start, nodes), neighbours)
            inside = neighbours.numpy()
            gathered = gathered.joined(_Rows(np.unique(inside[inside < rows]).astype(np.int64), rows))
        joined.add(gathered)
    return joined.finish()


class _Rows:
    """Some rows below ``rows``: ascending numbers, or where these would take more, whether each is one of them."""

    def __init__(self, numbers: npt.NDArray[np.int64], rows: int) -> None:
        self._rows = rows
        self._found: npt.NDArray[np.int64] | npt.NDArray[np.bool_] = numbers
        if numbers.nbytes > rows:
            self._found = np.zeros(rows, dtype=np.bool_)
            self._found[numbers] = True

    @property
    def _is_marked(self) -> bool:
        return self._found.dtype == np.bool_

    def __len__(self) -> int:
        return int(np.count_nonzero(self._found)) if self._is_marked else len(self._found)

    def joined(self, other: "_Rows") -> "_Rows":
        """With those of ``other``. Neither is used after that."""
        if not self._is_marked and not other._is_marked:
            return _Rows(np.union1d(self._found, other._found), self._rows)
        large, small = (self, other) if self._is_marked else (other, self)
        if small._is_marked:
            large._found |= small._found
        else:
            large._found[small._found] = True
        return large


class _Joined:
    """Buckets taken one after the other, and those of twice as many rows that they make, and so on."""

    def __init__(self) -> None:
        self._counts: list[list[int]] = []
        self._waiting: list[_Rows | None] = []

    def add(self, rows: _Rows, level: int = 0) -> None:
        """The next bucket of a level, the lowest ones being of level 0."""
        if level == len(self._counts):
            self._counts.append([])
            self._waiting.append(None)
        self._counts[level].append(len(rows))
        first, self._waiting[level] = self._waiting[level], rows
        if first is not None:
            self._waiting[level] = None
            self.add(first.joined(rows), level + 1)

    def finish(self) -> Sequence[Sequence[int]]:
        """The counts, from the lowest buckets to one of all. Those that have no other beside them are the last of their
        height, and of the next."""
        level = 0
        while len(self._counts[level]) > 1:
            last = self._waiting[level]
            if last is not None:
                self._waiting[level] = None
                self.add(last, level + 1)
            level += 1
        return self._counts[: level + 1]
