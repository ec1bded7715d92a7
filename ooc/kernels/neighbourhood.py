# SPDX-License-Identifier: Apache-2.0
"""The graph of some rows and their in-neighbours, small enough to run an opaque layer on it as on a graph of its own.

The rows are a tile's, or a run of them if the tile has many edges. Nodes are these rows, 0…R-1, followed by their other
in-neighbours in ascending order. Edges are those into the rows, in the store's order. Nodes from R on have no edges
into them, and what a layer gives for them is ignored. If rows have no edges at all, on which some layers fail, there is
one more node with an edge.

Shapes: N rows of the pulled matrix, R rows at hand, S other nodes, E edges, K features of an edge.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels.edges import TileEdges, highest_row

EDGES_AT_ONCE = 32768
"""The most edges of a run, unless a single row has more: layers keep several messages for every edge."""
EDGES_AT_ONCE_ON_DEVICE = 4 * EDGES_AT_ONCE
"""The most edges of a run on a device with memory of its own, where every operator has to be launched."""
PADDED_EDGE, PADDED_ROW = 2, 4
"""How many places for edges a run may have for each of its edges, and for each of its rows, if rows are padded."""


@dataclass(frozen=True, slots=True)
class BucketRows:
    """Some rows of a matrix, which are all that a bucket of targets gathers from it, with the interface of the matrix.

    It has the rows ``numbers_M``, ascending, int64, of a matrix of ``height`` rows: ``values_MC``, whose rows may be
    strided.
    """

    height: int
    numbers_M: Tensor
    values_MC: Tensor

    def __len__(self) -> int:
        """The rows of the matrix."""
        return self.height

    def __getitem__(self, rows: slice) -> Tensor:
        """Return consecutive rows, all of which must be there."""
        start, stop, _ = rows.indices(self.height)
        first = int(torch.searchsorted(self.numbers_M, start))
        self._check(self.numbers_M[first : first + stop - start], torch.arange(start, stop))
        return self.values_MC[first : first + stop - start]

    def index_select(self, dim: int, rows_S: Tensor) -> Tensor:
        """Return any rows, which must be there, as a tensor does."""
        assert dim == 0
        places_S = torch.searchsorted(self.numbers_M, rows_S)
        if rows_S.shape[0]:
            self._check(self.numbers_M[places_S.clamp(max=len(self.numbers_M) - 1)], rows_S)
        return self.values_MC.index_select(0, places_S)

    @staticmethod
    def _check(found: Tensor, wanted: Tensor) -> None:
        if not torch.equal(found, wanted):
            raise StoreError(
                "rows that have an edge into others have not been shuffled to them: the edges of both directions are "
                "not alike; ooc verify tells where; convert again"
            )


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """The graph of a run. ``others_S``: the other nodes as rows of the pulled matrix; ``edge_index_2E``: int64 node
    numbers of this graph, sources above targets; ``weight_E``, ``features_EK``: as the tile has them, in the store's
    types. ``stands_in``: the rows have no edges, and the other node is not a real in-neighbour. ``repeats_before``: for
    a stretch of a row's edges, how many edges before it equal its first one."""

    start: int
    rows: int
    others_S: Tensor
    edge_index_2E: Tensor
    weight_E: Tensor | None
    features_EK: Tensor | None
    stands_in: bool = False
    repeats_before: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes without the data of the edges."""
        return self.others_S.nbytes + self.edge_index_2E.nbytes

    def with_copies(self) -> "Neighbourhood":
        """Return the graph with copies of the data of the edges, whose memory may be reused."""
        weight_E, features_EK = self.weight_E, self.features_EK
        if weight_E is None and features_EK is None:
            return self
        weight_E, features_EK = (None if part is None else part.clone() for part in (weight_E, features_EK))
        return replace(self, weight_E=weight_E, features_EK=features_EK)

    def gather(self, source_NC: Tensor | BucketRows) -> Tensor:
        """Return the rows of the pulled matrix that are nodes of this graph [R + S, C]."""
        own_RC = source_NC[self.start : self.start + self.rows]
        if not isinstance(source_NC, Tensor):
            return torch.cat((own_RC, source_NC.index_select(0, self.others_S)))
        near_SC = source_NC.new_empty(self.rows + self.others_S.shape[0], *source_NC.shape[1:])
        near_SC[: self.rows] = own_RC
        torch.index_select(source_NC, 0, self.others_S, out=near_SC[self.rows :])
        return near_SC


def edges_at_once(place: torch.device) -> int:
    """Return the most edges of a run where tensors are on ``place``."""
    return EDGES_AT_ONCE if place.type == "cpu" else EDGES_AT_ONCE_ON_DEVICE


def runs(tile: TileEdges, most: int | None = None, *, pads: bool = False) -> Iterator[TileEdges]:
    """Yield the tile's rows in order, as many together as have up to ``most`` edges, or one row that has more. Where a
    tile is cut depends only on the tile and the kind of device. ``pads``: every row has room for as many edges as the
    longest one, so a run has at most ``PADDED_EDGE`` places for every edge and ``PADDED_ROW`` for every row."""
    cut = _runs(tile, most)
    yield from chain.from_iterable(map(_split_evenly, cut)) if pads else cut


def _runs(tile: TileEdges, most: int | None) -> Iterator[TileEdges]:
    most = min(most or EDGES_AT_ONCE_ON_DEVICE, edges_at_once(tile.indices_E.device))
    if tile.indices_E.shape[0] <= most:  # without waiting for a device
        yield tile
        return
    offsets = tile.offsets_R1.cpu().numpy()
    start = 0
    while start < tile.rows:
        first, stop = int(offsets[start]), tile.rows
        count = -(-(int(offsets[-1]) - first) // most)
        if count > 1:  # as even as rows allow
            stop = int(np.searchsorted(offsets, first + (int(offsets[-1]) - first) // count))
            stop = max(start + 1, stop - (int(offsets[stop]) - first > most))
        yield _cut_rows(tile, start, stop, slice(first, int(offsets[stop])))
        start = stop


def _split_evenly(tile: TileEdges) -> Iterator[TileEdges]:
    """Yield runs of rows with about as many edges each."""
    offsets = tile.offsets_R1.tolist()
    start = most = 0
    for row, (first, stop) in enumerate(pairwise(offsets)):
        widest, rows = max(most, stop - first), row + 1 - start
        if rows * widest > PADDED_EDGE * (stop - offsets[start]) + PADDED_ROW * rows:
            yield _cut_rows(tile, start, row, slice(offsets[start], first))
            start, widest = row, stop - first
        most = widest
    yield _cut_rows(tile, start, tile.rows, slice(offsets[start], offsets[-1]))


def _cut_rows(tile: TileEdges, start: int, stop: int, edges: slice) -> TileEdges:
    """Return some of the tile's rows, which have these edges."""
    return _select_edges(tile, edges, tile.offsets_R1[start : stop + 1] - edges.start, start)


def _select_edges(
    tile: TileEdges, edges: slice | Tensor, offsets_R1: Tensor | None = None, start: int = 0
) -> TileEdges:
    """Return some of the tile's edges, for its rows from ``start`` on."""
    return replace(
        tile,
        indices_E=tile.indices_E[edges],
        offsets_R1=tile.offsets_R1 if offsets_R1 is None else offsets_R1,
        start=tile.start + start,
        weight_E=None if tile.weight_E is None else tile.weight_E[edges],
        features_EK=None if tile.features_EK is None else tile.features_EK[edges],
    )


def present(row: TileEdges, rows: int) -> TileEdges:
    """Return a tile of one row without its neighbours at or beyond ``rows``, which are the last ones. Raises StoreError
    if neighbours do not ascend."""
    if bool((row.indices_E[1:] < row.indices_E[:-1]).any()):
        raise StoreError("neighbours of a row are not in ascending order; convert again")
    count = int(torch.searchsorted(row.indices_E, rows))
    return _select_edges(row, slice(count), row.offsets_R1.clamp(max=count))


def stretches(row: TileEdges, most: int) -> Iterator[tuple[TileEdges, int]]:
    """Yield a tile of one row in stretches of ``most`` of its edges, each with the number of edges before that equal
    its first."""
    edges = row.indices_E.shape[0]
    for first in range(0, edges, most):
        last = min(edges, first + most)
        before = first - int(torch.searchsorted(row.indices_E[:first], row.indices_E[first]))
        offsets_R1 = row.offsets_R1.new_tensor([0, last - first])
        yield _select_edges(row, slice(first, last), offsets_R1), before


def neighbourhood(tile: TileEdges, rows: int) -> Neighbourhood:
    """Return the graph of a tile, or of a run of its rows. Neighbours at or beyond ``rows``, the height of the pulled
    matrix, are absent."""
    neighbours_E = tile.indices_E.long()
    counts_R = tile.offsets_R1.diff().long()
    rows_R = torch.arange(tile.rows, device=neighbours_E.device)
    target_E = torch.repeat_interleave(rows_R, counts_R, output_size=neighbours_E.shape[0])
    if neighbours_E.shape[0] and highest_row(tile, neighbours_E) >= rows:
        present_E = neighbours_E < rows
        neighbours_E, target_E, tile = neighbours_E[present_E], target_E[present_E], _select_edges(tile, present_E)
    if not neighbours_E.shape[0]:
        return _without_edges(tile)
    is_own_E = (neighbours_E >= tile.start) & (neighbours_E < tile.start + tile.rows)
    outer = (~is_own_E).nonzero()[:, 0]
    others_S, place = torch.unique(neighbours_E[outer], sorted=True, return_inverse=True)
    source_E = (neighbours_E - tile.start).index_copy_(0, outer, place + tile.rows)
    edge_index_2E = torch.stack((source_E, target_E))
    return Neighbourhood(tile.start, tile.rows, others_S, edge_index_2E, tile.weight_E, tile.features_EK)


def _without_edges(tile: TileEdges) -> Neighbourhood:
    """Return the graph of rows that have no edges. It has one more node, a copy of the first row, with an edge from the
    second row: a difference of 0 between equal rows would have no gradient in some layers."""
    weight_E, features_EK, place = tile.weight_E, tile.features_EK, tile.indices_E.device
    edge_index_2E = torch.full((2, 1), tile.rows, device=place)
    if tile.rows > 1:
        edge_index_2E[0] = 1
    return Neighbourhood(
        tile.start,
        tile.rows,
        torch.full((1,), tile.start, device=place),
        edge_index_2E,
        None if weight_E is None else weight_E.new_ones(1),
        None if features_EK is None else features_EK.new_ones(1, features_EK.shape[1]),
        stands_in=True,
    )
