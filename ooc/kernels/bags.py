# SPDX-License-Identifier: Apache-2.0
"""The edges of a piece once for every head, so that each head has weights of its own in one pass of ``embedding_bag``.

They lie bag by bag, a bag being one head of one row: the row's edges for its first head, for its second, …, then
those of the next row. So the heads of a neighbour, side by side in memory, are fetched soon after one another, and
whatever is computed of an edge for a head is one flat array.

Shapes: E edges and R rows of the piece, H heads, B = R·H bags, X = E·H edges of bags, V = N·H rows of T slices of K
columns each; mostly one.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.kernels.edges import ColumnCopy, Piece, TileEdges, pieces
from ooc.kernels.tensors import pull

_INT32_MAX = 2**31 - 1


class BagLists:
    """What a piece's bags hold, and in which order, of ``heads``: the same in every epoch. ``dtype``: of numbers."""

    def __init__(self, piece: Piece, heads: int, dtype: torch.dtype) -> None:
        self.shape = (piece.stop - piece.start, heads)
        self.edges = piece.edges * heads
        offsets_R1 = piece.offsets_R1.to(dtype)
        counts_R, first_R = offsets_R1.diff(), offsets_R1[:-1, None] * heads
        numbers_H = torch.arange(heads, dtype=dtype)
        start_RH = first_R + counts_R[:, None] * numbers_H
        self.counts_B = counts_R[:, None].expand(self.shape).reshape(-1).numpy().astype(np.intp)
        self.offsets_B1 = torch.cat((start_RH.view(-1), offsets_R1.new_tensor([self.edges])))
        # Number n of a bag is edge n of its row. Where a head's edges follow one another, as they do nowhere but here,
        # x = start + n is at place head · E + (the row's first edge) + n.
        ahead_RH = offsets_R1[:-1, None] + numbers_H * piece.edges - start_RH
        self._place_X = None  # of one head, they are in order
        if heads > 1:
            self._place_X = self.spread(ahead_RH).add_(torch.arange(self.edges, dtype=dtype))
        self.row_X = self.in_order(piece.neighbours_E.to(dtype) * heads + numbers_H[:, None])

    @classmethod
    def of(cls, tile: TileEdges, number: int, piece: Piece, heads: int, slab_NS: Tensor) -> "BagLists":
        """Those of the tile's piece ``number``, retained where there is memory."""
        rows, edges = (piece.stop - piece.start) * heads, piece.edges * heads
        dtype = torch.int32 if max(slab_NS.numel(), edges * heads) <= _INT32_MAX else torch.int64
        retained = tile.retained
        if retained is None:
            return cls(piece, heads, dtype)
        name = cls, heads, dtype, tile.start, tile.rows, len(slab_NS), number, tile.edges_per_piece, tile.self_loops
        found: BagLists | None = retained.get(name)
        if found is None:
            nbytes = (edges * (1 + (heads > 1)) + rows + 1) * dtype.itemsize + 3 * rows * np.dtype(np.intp).itemsize
            found = retained.keep(name, nbytes, lambda: cls(piece, heads, dtype))
        return cls(piece, heads, dtype) if found is None else found

    def in_order(self, values_HE: Tensor) -> Tensor:
        """Values of every head and edge, bag by bag [X]."""
        values_X = values_HE.reshape(-1)
        return values_X if self._place_X is None else values_X.index_select(0, self._place_X)

    def spread(self, values_RH: Tensor) -> Tensor:
        """Values of every row and head at each edge of their bag [X]."""
        return torch.from_numpy(np.repeat(values_RH.reshape(-1).numpy(), self.counts_B))

    @cached_property
    def filled(self) -> tuple[npt.NDArray[np.intp] | None, npt.NDArray[np.intp]]:
        """Which bags have edges (``None``: all), and where those begin."""
        counts, starts = self.counts_B, self.offsets_B1[:-1].numpy().astype(np.intp)
        if counts.all():
            return None, starts
        filled = np.flatnonzero(counts)
        return filled, starts[filled]


class Bags:
    """The bags of a piece whose neighbours are rows of ``slab_NS``: heads side by side, ``slices`` of K columns each.

    ``rows`` and ``continues`` are the piece's. ``apart``: where some of the columns are found by themselves, too.
    """

    def __init__(
        self, piece: Piece, lists: BagLists, slab_NS: Tensor, apart: ColumnCopy | None = None, *, slices: int = 1
    ) -> None:
        heads = lists.shape[1]
        assert slab_NS.is_contiguous() and slab_NS.shape[1] % (heads * slices) == 0
        self.rows, self.continues = piece.rows, piece.continues
        self._apart = apart
        self.slices = slices
        self.matrix_VK = slab_NS.view(-1, slab_NS.shape[1] // heads)
        self._lists = lists
        self._shape, self._edges = lists.shape, lists.edges
        self._offsets_B1, self._row_X = lists.offsets_B1, lists.row_X
        self.spread = lists.spread

    @classmethod
    def of(cls, tile: TileEdges, heads: int, slab_NS: Tensor, *, slices: int = 1) -> Iterator[tuple[Piece, "Bags"]]:
        """Those of a tile, piece by piece."""
        for number, piece in enumerate(pieces(tile, len(slab_NS))):
            lists = BagLists.of(tile, number, piece, heads, slab_NS)
            yield piece, cls(piece, lists, slab_NS, tile.apart, slices=slices)

    def by_bag(self, values_EH: Tensor) -> Tensor:
        """Values of every edge and head, bag by bag [X]."""
        return self._lists.in_order(values_EH.t())

    def columns(self, *columns: int, slice_number: int = 0) -> tuple[Tensor, ...]:
        """Some columns of a slice of the neighbours' rows [X], counted from its end where negative."""
        return tuple(self._column_V(column, slice_number).index_select(0, self._row_X) for column in columns)

    def _column_V(self, column: int, slice_number: int) -> Tensor:
        slices, apart = self.slices, self._apart
        if apart is not None and column in apart.columns:
            count, place, numbers = len(apart.columns), apart.columns.index(column), apart.numbers_NGS
        else:
            count, numbers = self.matrix_VK.shape[1] // slices, self.matrix_VK
            place = column % count
        return numbers.view(-1)[slice_number * count + place :: slices * count]

    def maxima(self, values_X: Tensor) -> Tensor:
        """Largest of every bag [R, H]; −∞ where there are no edges."""
        return self._reduce(np.maximum, values_X, -torch.inf)

    def sums(self, values_X: Tensor) -> Tensor:
        """Sum of every bag [R, H]."""
        return self._reduce(np.add, values_X, 0.0)

    def dots(self, own_RHK: Tensor) -> Tensor:
        """The product of every neighbour's row with the bag's own [X]."""
        own_BK, offsets = own_RHK.reshape(-1, own_RHK.shape[2]), self._offsets_B1
        empty = -(-self._edges // len(self.matrix_VK)) - len(own_BK)
        if empty > 0:  # torch takes no more edges than there are pairs, which repeated ones may be
            own_BK, offsets = F.pad(own_BK, (0, 0, 0, empty)), F.pad(offsets, (0, empty), value=self._edges)
        size, nothing_X = (len(own_BK), len(self.matrix_VK)), own_BK.new_zeros(self._edges)
        bags_BV = torch.sparse_csr_tensor(offsets, self._row_X, nothing_X, size, check_invariants=False)
        found: Tensor = torch.sparse.sampled_addmm(bags_BV, own_BK, self.matrix_VK.t(), beta=0.0).values()
        return found

    def weighted(self, weight_X: Tensor) -> Tensor:
        """Σ weight · neighbour's row over every bag [R, H, K]."""
        return pull(self.matrix_VK, self._row_X, self._offsets_B1, weight_X).view(*self._shape, -1)

    def sums_apart(self, weight_X: Tensor, is_first_X: Tensor, is_kept_X: Tensor | None = None) -> Tensor:
        """Σ weight · neighbour's row, over those edges of every bag that are ``is_first_X`` and over the others, apart
        → [2, R, H, T, K]. No row is fetched twice, nor for an edge that is not kept."""
        is_first = is_first_X.numpy()
        parts = [is_first, ~is_first]
        offsets_B1 = self._offsets_B1.numpy()
        if is_kept_X is not None:
            parts = [part & is_kept_X.numpy() for part in parts]
            offsets_B1 = _counts_before(is_kept_X.numpy(), offsets_B1)
        chosen_Y = torch.from_numpy(np.concatenate([np.flatnonzero(part) for part in parts]))
        if chosen_Y.numel() == 0:
            return weight_X.new_zeros(2, *self._shape, self.slices, self.matrix_VK.shape[1] // self.slices)
        first_B1 = _counts_before(parts[0], self._offsets_B1.numpy())
        offsets = torch.from_numpy(np.concatenate((first_B1[:-1], offsets_B1 - first_B1 + first_B1[-1])))
        rows_Y, weight_Y = (values_X.index_select(0, chosen_Y) for values_X in (self._row_X, weight_X))
        sums = pull(self.matrix_VK, rows_Y, offsets, weight_Y)
        return sums.view(2, *self._shape, self.slices, -1)

    def _reduce(self, operator: Any, values_X: Tensor, empty: float) -> Tensor:
        filled, starts = self._lists.filled
        reduced: Any = operator.reduceat(values_X.numpy(), starts)
        if filled is not None:
            of_filled, reduced = reduced, np.full(len(self._lists.counts_B), empty, dtype=reduced.dtype)
            reduced[filled] = of_filled
        return torch.from_numpy(reduced).view(self._shape)


def _counts_before(is_counted: npt.NDArray[np.bool_], places: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """How many there are before each of some places, in the type of those."""
    before = np.zeros(len(is_counted) + 1, dtype=places.dtype)
    np.cumsum(is_counted, out=before[1:])
    counts: npt.NDArray[Any] = before[places]
    return counts


class RunningSoftmax:
    """Weights of edges, for every head, in a tile of R rows, and the sums that were made with them: "online softmax"
    (Milakov and Gimelshein, 2018).

    Where a row's edges come in several pieces, what was summed with the highest score so far is scaled down whenever a
    higher one appears. Rows within one piece, which is nearly all of them, take no part in that.

    ``totals`` are matrices [R, H, …], zero at first, to which the caller adds sums weighted by what ``weigh``
    returns; ``finish`` divides them by the sum of weights. A row without edges keeps its zeros.
    """

    def __init__(self, rows: int, heads: int, like: Tensor, totals: Sequence[Tensor]) -> None:
        self._highest_RH = like.new_full((rows, heads), -torch.inf)
        self._sum_RH = like.new_zeros(rows, heads)
        self._totals = totals

    def weigh(self, edges: Piece | Bags, score: Tensor) -> Tensor:
        """exp(score - highest so far), written over ``score``."""
        here = edges.rows
        highest = edges.maxima(score)
        if edges.continues:
            highest = torch.maximum(highest, self._highest_RH[here])
            shrink = (self._highest_RH[here] - highest).exp_()
            self._sum_RH[here] *= shrink
            for total in self._totals:
                total[here] *= shrink.view(*shrink.shape, *[1] * (total.dim() - 2))
        self._highest_RH[here] = highest
        weight = score.sub_(edges.spread(highest)).exp_()
        self._sum_RH[here] += edges.sums(weight)
        return weight

    def finish(self) -> Tensor:
        """Normalise the totals; the logarithm of the sum of exponentials [R, H], 0 for a row without edges."""
        empty_RH = self._sum_RH == 0
        share_RH = self._sum_RH.masked_fill(empty_RH, 1.0).reciprocal_()
        for total in self._totals:
            total *= share_RH.view(*share_RH.shape, *[1] * (total.dim() - 2))
        return self._sum_RH.log_().add_(self._highest_RH).masked_fill_(empty_RH, 0.0)
