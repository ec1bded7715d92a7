# SPDX-License-Identifier: Apache-2.0
"""Counts of edges by tile and of the entries of external shuffles (``ooc.plan.layout.shuffle``), for the planner.

They come from a store, from bounds on links that are drawn, or from statistics of a graph that is not present. Entries
are counted in one sweep over the in-edges.

Partial sums: a tile adds to each in-neighbour outside of it, once for every run of its rows
(``kernels.neighbourhood``). The count depends on the graph, and on the layer, which decides how many edges a run has.

Bucketed rows: a bucket gathers its own rows, unless these are of another type, and all in-neighbours of these, each
once however many of its targets have it. They are counted for the lowest buckets; then the rows of two neighbouring
buckets are joined for a bucket twice as high, and so on. As in a merge of sorted runs, at most one bucket of each
height waits for its neighbour. A large set of rows is stored as one byte per row of the source. So all waiting buckets
take a byte per row for each of the few heights whose buckets gather most of the source, and little more.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ooc.kernels.edges import TileEdges, highest_row
from ooc.kernels.neighbourhood import neighbourhood, runs
from ooc.model.graph import GraphRows, are_between_types, damaged, reverse_of
from ooc.plan.graphs import GraphStatistics, spread_edges
from ooc.plan.workload import Direction, EdgesKey
from ooc.storage.store import Store

T = TypeVar("T")
_CHUNK_TILES = 1 << 10
"""Tiles whose offsets are read at a time."""
_CHUNK_BYTES = 1 << 20
"""Bytes of offsets read at a time, at least those of one tile or bucket."""
_MOST_EDGES = 1 << 20
"""Edges of a bucket that are processed together."""


class EdgeCounts:
    """The numbers of edges by tile, of gradients scattered to tiles, and of rows gathered by them.

    For a store they are counted once, when they are needed. For links, which differ in every step, they are upper
    bounds. Otherwise they come from statistics. ``rows``: the known data of every row, once it has been read.
    """

    def __init__(self, graph: Store | GraphStatistics) -> None:
        self.store, self.rows = graph if isinstance(graph, Store) else None, GraphRows()
        self._spread = None if isinstance(graph, Store) else lru_cache(maxsize=1)(partial(spread_edges, graph))
        self._known: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, count: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = count()
        found: T = self._known[key]
        return found

    def of_tiles(self, direction: EdgesKey, tile_rows: int) -> Sequence[int]:
        """Return the number of edges of tiles 0…i-1, for i from 0 to the number of tiles.

        A store's offsets are read a few at a time.
        """
        offsets = self.rows.offsets.get(direction)
        if offsets is not None:
            return [*offsets[:-1:tile_rows].tolist(), int(offsets[-1])]
        if self.store is None:
            assert self._spread is not None
            return self._spread(tile_rows)  # the same in both directions
        indptr, indices = self.store.topology(direction.value)

        def read() -> Sequence[int]:
            rows, at_once = indptr.shape[0] - 1, _CHUNK_TILES * tile_rows
            parts = (indptr.read(at, min(at + at_once, rows))[::tile_rows] for at in range(0, rows, at_once))
            return [*(int(edges) for offsets in parts for edges in offsets), indices.shape[0]]

        return self._once((indptr.name, tile_rows), read)

    def scattered(
        self, direction: EdgesKey, rows: int, others: int, tile_rows: int, edges_at_once: int, pads: bool, apart: bool
    ) -> Sequence[int]:
        """Return how many gradients are scattered to tiles 0…i-1 of the ``others`` rows, for every i.

        They come from ``rows`` computed rows, in runs of a tile's edges, which may be padded
        (``kernels.neighbourhood.runs``) and be scattered to another matrix (``apart``).
        """
        given, store = (direction, rows, others, tile_rows, edges_at_once, pads, apart), self.store
        if store is not None and direction.of_edges:
            return self._once(given, lambda: count_sums(store, *given))
        # Only degrees are known: an entry per out-edge is an upper bound.
        reverse = None if store is None else reverse_of(store, direction)
        return self.of_tiles(reverse or Direction.OUT, tile_rows)

    def gathered(self, direction: EdgesKey, targets: int, rows: int, height: int) -> Sequence[Sequence[int]]:
        """Return how many rows buckets of targets gather (``plan.layout.shuffle.GatheredRows``)."""
        given, store = (direction, targets, rows, height), self.store
        if store is not None and direction.of_edges:
            return self._once(given, lambda: count_gathers(store, *given))
        return self._once(given, lambda: self.most_gathered(*given))

    def most_gathered(self, direction: EdgesKey, targets: int, rows: int, height: int) -> Sequence[Sequence[int]]:
        """Return an upper bound where only degrees are known: a row per target and per edge into it, or all rows."""
        edges, counts = self.of_tiles(direction, height), list[list[int]]()
        while not counts or len(counts[-1]) > 1:
            tiles = 1 << len(counts)
            starts = range(0, -(-targets // height), tiles)
            ends = [min(start + tiles, len(edges) - 1) for start in starts]
            both = zip(starts, ends, strict=True)
            counts.append([min(rows, tiles * height + edges[end] - edges[start]) for start, end in both])
        return counts


def _sweep(
    store: Store, direction: EdgesKey, rows: int, height: int
) -> Iterator[tuple[int, int, npt.NDArray[np.signedinteger]]]:
    """Yield, for every ``height`` of the first ``rows`` rows, their range, and where their in-edges begin (one more
    than rows)."""
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
    """Return the entries of partial sums, as ``EdgeCounts.scattered``, read from the store."""
    (_, indices), nodes = store.topology(direction.value), store.neighbours(direction.value)
    behind = nodes if apart or are_between_types(store, direction) else 0  # then no neighbour is a row of the tile
    added = np.zeros(-(-others // tile_rows) + 1, dtype=np.int64)
    for start, _, offsets in _sweep(store, direction, rows, tile_rows):
        neighbours = torch.from_numpy(indices.read(int(offsets[0]), int(offsets[-1])))
        relative = torch.from_numpy((offsets - offsets[0]).astype(np.int64, copy=False))
        for run in runs(TileEdges(neighbours, relative, behind + start, nodes), edges_at_once, pads=pads):
            near = neighbourhood(run, others)
            if not near.stands_in:
                np.add.at(added, near.others_S.numpy() // tile_rows + 1, 1)
    return [int(count) for count in np.cumsum(added)]


def count_gathers(store: Store, direction: EdgesKey, targets: int, rows: int, height: int) -> Sequence[Sequence[int]]:
    """Return the rows gathered (``plan.layout.shuffle.GatheredRows``), read from the store."""
    (_, indices), nodes = store.topology(direction.value), store.neighbours(direction.value)
    joined, gathers_own = _Joined(), not are_between_types(store, direction)
    for start, stop, offsets in _sweep(store, direction, targets, height):
        gathered = _Rows(np.arange(start, min(stop, rows) if gathers_own else start), rows)
        end = int(offsets[-1])
        for edge in range(int(offsets[0]), end, _MOST_EDGES):
            neighbours = torch.from_numpy(indices.read(edge, min(end, edge + _MOST_EDGES)))
            highest_row(TileEdges(neighbours, torch.tensor([0, len(neighbours)]), start, nodes), neighbours)
            inside = neighbours.numpy()
            gathered = gathered.joined(_Rows(np.unique(inside[inside < rows]).astype(np.int64), rows))
        joined.add(gathered)
    return joined.finish()


class _Rows:
    """A set of rows below ``rows``: ascending numbers or, where those would take more, a boolean per row."""

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
        """Return the union with ``other``; neither may be used afterwards."""
        if not self._is_marked and not other._is_marked:
            return _Rows(np.union1d(self._found, other._found), self._rows)
        large, small = (self, other) if self._is_marked else (other, self)
        if small._is_marked:
            large._found |= small._found
        else:
            large._found[small._found] = True
        return large


class _Joined:
    """The buckets of one level after another, each joined from two of the level below."""

    def __init__(self) -> None:
        self._counts: list[list[int]] = []
        self._waiting: list[_Rows | None] = []

    def add(self, rows: _Rows, level: int = 0) -> None:
        """Add the next bucket of a level; the lowest buckets have level 0."""
        if level == len(self._counts):
            self._counts.append([])
            self._waiting.append(None)
        self._counts[level].append(len(rows))
        first, self._waiting[level] = self._waiting[level], rows
        if first is not None:
            self._waiting[level] = None
            self.add(first.joined(rows), level + 1)

    def finish(self) -> Sequence[Sequence[int]]:
        """Return the counts, from the lowest buckets to one of all rows.

        A bucket without a neighbour is the last one of its height, and of the next height.
        """
        level = 0
        while len(self._counts[level]) > 1:
            last = self._waiting[level]
            if last is not None:
                self._waiting[level] = None
                self.add(last, level + 1)
            level += 1
        return self._counts[: level + 1]
