# SPDX-License-Identifier: Apache-2.0
"""Softmaxes over the edges of rows, which may come in several pieces.

Shapes: E edges of a piece, R rows of the tile, H heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ooc.kernels.edges import Piece


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

    def weigh(self, piece: Piece, score_EH: Tensor) -> Tensor:
        """exp(score - highest so far), written over ``score_EH``."""
        here = piece.rows
        highest = piece.maxima(score_EH)
        if piece.continues:
            highest = torch.maximum(highest, self._highest_RH[here])
            shrink = (self._highest_RH[here] - highest).exp_()
            self._sum_RH[here] *= shrink
            for total in self._totals:
                total[here] *= shrink.view(*shrink.shape, *[1] * (total.dim() - 2))
        self._highest_RH[here] = highest
        weight = score_EH.sub_(piece.spread(highest)).exp_()
        self._sum_RH[here] += piece.sums(weight)
        return weight

    def finish(self) -> Tensor:
        """Normalise the totals; the logarithm of the sum of exponentials [R, H], 0 for a row without edges."""
        empty_RH = self._sum_RH == 0
        share_RH = self._sum_RH.masked_fill(empty_RH, 1.0).reciprocal_()
        for total in self._totals:
            total *= share_RH.view(*share_RH.shape, *[1] * (total.dim() - 2))
        return self._sum_RH.log_().add_(self._highest_RH).masked_fill_(empty_RH, 0.0)
