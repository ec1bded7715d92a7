# SPDX-License-Identifier: Apache-2.0
"""The largest of the neighbours' rows, column by column, and its gradient shared among ties as PyG shares it.

PyG takes maxima by ``scatter_reduce_`` into zeros, without counting those zeros among the values. Its gradient
goes in equal parts to all values that equal the maximum, but there the zeros do count: where a maximum is exactly
0, which rectified values often give, one part more is made and lost. Ties are counted so here.

Backward, a source pulls the maxima of the rows it points to and the gradient of each, already divided by its
ties, and takes it wherever its own value is the maximum. Values must therefore be kept as they were compared.

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, W columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.train.kernels.edges import Piece, TileEdges, pieces

EDGES_PER_PIECE = 4096
"""Rows of a whole slab are gathered for every edge: fewer edges than where only scalars are."""


@dataclass(frozen=True, slots=True)
class Maxima:
    """``value_RW``: largest over a row's edges, 0 where there are none; ``ties_RW``: into how many parts its gradient
    goes, at least 1."""

    value_RW: Tensor
    ties_RW: Tensor

    def share(self, gradient_RW: Tensor) -> Tensor:
        """What each of the tied values gets of ``gradient_RW``: what ``pull_sources`` reads."""
        return gradient_RW / self.ties_RW


class RunningMaximum:
    """Maxima and ties of a tile's rows, added to piece after piece."""

    def __init__(self, rows: int, columns: int, like: Tensor) -> None:
        self._value_RW = like.new_full((rows, columns), -torch.inf)
        self._ties_RW = like.new_zeros(rows, columns)
        self._has_edges_R1 = torch.zeros(rows, 1, dtype=torch.bool)

    def add(self, piece: Piece, value_EW: Tensor) -> None:
        """Count the piece's edges; ``value_EW`` is written over."""
        here = piece.rows
        highest = piece.maxima(value_EW)
        if piece.continues:
            highest = torch.maximum(highest, self._value_RW[here])
            self._ties_RW[here] *= self._value_RW[here] == highest
        self._value_RW[here] = highest
        # Compared in place, which gives 0 and 1 in the values' own type: several times as fast as by way of bool.
        self._ties_RW[here] += piece.sums(value_EW.eq_(highest.index_select(0, piece.row_E)))
        self._has_edges_R1[here] |= piece.offsets_R1.diff()[:, None] > 0

    def finish(self) -> Maxima:
        empty_R1 = ~self._has_edges_R1
        value_RW = self._value_RW.masked_fill_(empty_R1, 0.0)
        ties_RW = self._ties_RW.add_(value_RW == 0).masked_fill_(empty_R1, 1.0)
        return Maxima(value_RW, ties_RW)


def pull_maxima(tile: TileEdges, source_NW: Tensor) -> Maxima:
    """Forward: targets pull the largest value of every column over in-edges."""
    running = RunningMaximum(tile.rows, source_NW.shape[1], source_NW)
    for piece in pieces(tile, len(source_NW), EDGES_PER_PIECE):
        running.add(piece, source_NW.index_select(0, piece.neighbours_E))
    return running.finish()


def pull_sources(tile: TileEdges, *, value_NW: Tensor, share_NW: Tensor, source_RW: Tensor) -> Tensor:
    """Backward: sources pull the shares of the maxima they equal over out-edges → [R, W]."""
    out_RW = torch.zeros_like(source_RW)
    for piece in pieces(tile, len(value_NW), EDGES_PER_PIECE):
        here = piece.rows
        is_highest_EW = value_NW.index_select(0, piece.neighbours_E).eq_(source_RW[here].index_select(0, piece.row_E))
        out_RW[here] += piece.sums(is_highest_EW.mul_(share_NW.index_select(0, piece.neighbours_E)))
    return out_RW


def scratch_bytes(*, edges: int, rows: int, columns: int, itemsize: int) -> int:
    """Bound on what one call allocates at a time for a tile, results included: three matrices of the slab's width
    for the edges of a piece, and four for rows."""
    in_piece = min(edges, EDGES_PER_PIECE) + rows
    return in_piece * (3 * columns * itemsize + 48) + rows * (4 * columns * itemsize + columns + 32)
