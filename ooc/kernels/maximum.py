# SPDX-License-Identifier: Apache-2.0
"""The largest of the neighbours' rows, column by column, and its gradient shared among ties as PyG shares it.

PyG takes maxima by ``scatter_reduce_`` into zeros, without counting those zeros among the values. Its gradient goes in
equal parts to all values that equal the maximum, but there the zeros do count. So if a maximum is exactly 0, as is
common for rectified values, there is one more part, which is lost. Ties are counted in the same way here.

Backward, a source pulls the maxima of the rows it points to, and the gradient of each, already divided by its ties; it
takes this share wherever its own value is the maximum. Values must therefore be kept as they were compared. A column's
numbers lie side by side (maximum and ties, or maximum and share), so any columns are a slab.

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, W columns.
"""

import torch
from torch import Tensor

from ooc.kernels.edges import TileEdges, pieces


def pull_maxima(tile: TileEdges, source_NW: Tensor, *, keep: bool) -> Tensor:
    """Forward: targets pull the largest value of every column over in-edges. Return [R, W], 0 in rows without edges;
    with ``keep``, each followed by its number of ties, at least 1, among which the gradient is divided [R, W·2]."""
    value_RW = source_NW.new_full((tile.rows, source_NW.shape[1]), -torch.inf)
    ties_RW = torch.zeros_like(value_RW)
    is_empty_R1 = torch.ones(tile.rows, 1, dtype=torch.bool)
    for piece in pieces(tile, len(source_NW)):
        here, value_EW = piece.rows, piece.gather(source_NW)
        highest = piece.maxima(value_EW)
        if piece.continues:
            highest = torch.maximum(highest, value_RW[here])
            ties_RW[here] *= value_RW[here] == highest
        value_RW[here] = highest
        # An in-place comparison gives 0 and 1 in the values' dtype, several times faster than through bool.
        ties_RW[here] += piece.sums(value_EW.eq_(piece.spread(highest)))
        is_empty_R1[here] &= piece.offsets_R1.diff()[:, None] == 0
    value_RW.masked_fill_(is_empty_R1, 0.0)
    if not keep:
        return value_RW
    ties_RW.add_(value_RW == 0).masked_fill_(is_empty_R1, 1.0)
    return torch.stack((value_RW, ties_RW), dim=2).view(tile.rows, -1)


def upstream(gradient_RW: Tensor, kept_RK: Tensor) -> Tensor:
    """Return maximum and share of every column [R, W·2], from the gradient of the maxima and what the forward pass
    kept."""
    value_RW, ties_RW = kept_RK.view(*gradient_RW.shape, 2).unbind(2)
    return torch.stack((value_RW, gradient_RW / ties_RW), dim=2).view(len(gradient_RW), -1)


def pull_sources(tile: TileEdges, *, target_NK: Tensor, source_RW: Tensor) -> Tensor:
    """Backward: sources pull the shares of the maxima they equal over out-edges. Return [R, W]."""
    out_RW = torch.zeros_like(source_RW)
    for piece in pieces(tile, len(target_NK)):
        here = piece.rows
        value_EW, share_EW = piece.gather(target_NK).view(piece.edges, -1, 2).unbind(2)
        own_EW = piece.spread(source_RW[here])
        out_RW[here] += piece.sums(own_EW.eq_(value_EW).mul_(share_EW))
    return out_RW
