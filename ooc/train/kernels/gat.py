# SPDX-License-Identifier: Apache-2.0
"""GAT's attention (Veličković et al., "Graph Attention Networks", ICLR 2018), pulled in both directions.

    s_ij = a_src_j + a_dst_i       e_ij = leaky(s_ij)       α_ij = exp(e_ij - lse_i)       Z_i = Σ_j α_ij m_ij z_j

for an edge from source j to target i, for every head; m_ij is dropout's scale. As FlashAttention does (Dao et al.,
NeurIPS 2022), the backward pass recomputes α from lse, the logarithm of the sum of exponentials, and needs one
more number a row, D_i = dZ_i · Z_i:

    dz_j     = Σ_i α_ij m_ij dZ_i
    da_src_j = Σ_i l_ij α_ij (m_ij dZ_i · z_j - D_i)        l_ij = leaky'(s_ij), 1 or the slope
    da_dst_i = Σ_j l_ij α_ij (m_ij dZ_i · z_j - D_i)

The product with z_j leaves the sum over i, and that with dZ_i the sum over j, because a score is a sum of two
scalars. So nothing of the width of a head is ever computed per edge: with weights α m l beside α m,

    da_src_j = z_j · Σ_i l_ij α_ij m_ij dZ_i - Σ_i l_ij α_ij D_i
    da_dst_i = dZ_i · Z'_i - D_i A'_i        Z'_i = Σ_j l_ij α_ij m_ij z_j,  A'_i = Σ_j l_ij α_ij

Z' and A' come from the forward pass at the price of one more matrix kept, so that no second pull over in-edges is
needed. Nor is a neighbour fetched twice, with either weight: l has two values, so the edges with a score above zero are
summed apart from the others, and Z = Z⁺ + Z⁻, Z' = Z⁺ + slope · Z⁻. Fetching is most of what an edge costs.

All that an edge needs of a row lies side by side, head after head, so that any group of whole heads is a slab:

    sources   z (C), a_src
    targets   dZ (C), a_dst, lse, D
    results   Z (C), lse, Z' (C), A' forward; dz (C), da_src backward

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, H heads of the slab, C channels of a head,
K columns of a head with its scalars.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.plan.workload import Direction
from ooc.train.kernels.bags import Bags
from ooc.train.kernels.edge_dropout import EdgeDropout
from ooc.train.kernels.edges import Piece, TileEdges, pieces
from ooc.train.kernels.softmax import RunningSoftmax

SOURCE_SCALARS = 1
"""Scalars of a head beside its channels, in what targets pull: a_src."""
TARGET_SCALARS = 3
"""And in what sources pull: a_dst, lse, D."""


def result_columns(channels: int, *, keep: bool) -> int:
    """Columns of a head in what ``attend`` gives."""
    return 2 * channels + 2 if keep else channels


@dataclass(frozen=True, slots=True)
class GatHeads:
    """What the kernels know of a layer's heads: those of the slab, ``heads``, by their numbers among all of them."""

    heads: range
    negative_slope: float
    dropout: EdgeDropout | None = None


def attend(gat: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RH: Tensor, keep: bool) -> Tensor:
    """Forward: targets pull z and a_src over in-edges → Z [R, H·C]; with ``keep`` what the backward pass needs beside
    it, [R, H·(2C+2)]. lse is 0 where a row has no edges."""
    rows, heads = a_dst_RH.shape
    channels = source_NS.shape[1] // heads - SOURCE_SCALARS
    out_RHK = source_NS.new_empty(rows, heads, result_columns(channels, keep=keep))
    z_RHC, slope_z_RHC, slope_sum_RH = out_RHK[:, :, :channels], out_RHK[:, :, channels + 1 : -1], out_RHK[:, :, -1]
    totals = [z_RHC, out_RHK[:, :, channels + 1 :]] if keep else [out_RHK]
    softmax = RunningSoftmax(rows, heads, a_dst_RH, totals)
    for piece in _begun(pieces(tile, len(source_NS)), out_RHK):
        bags, here = Bags(piece, heads, source_NS, tile.apart), piece.rows
        score_X = bags.columns(-1)[0].add_(bags.spread(a_dst_RH[here]))
        weight_X = softmax.weigh(bags, F.leaky_relu(score_X, gat.negative_slope))
        if keep:
            _put(piece, slope_sum_RH, bags.sums(_sloped(gat, weight_X, score_X)))
        apart_2RHK = _sums_apart(gat, piece, Direction.IN, bags, weight_X, score_X)
        above_RHC, below_RHC = apart_2RHK[:, :, :, :channels].unbind(0)
        _put(piece, z_RHC, above_RHC, below_RHC)
        if keep:
            _put(piece, slope_z_RHC, above_RHC, below_RHC, alpha=gat.negative_slope)
    lse_RH = softmax.finish()
    if keep:
        out_RHK[:, :, channels] = lse_RH
    return out_RHK.view(rows, -1)


def upstream(dz_RW: Tensor, kept_RK: Tensor, a_dst_RH: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient of Z and what the forward pass kept: what sources pull [R, H·(C+3)], and da_dst [R, H]."""
    rows, heads = a_dst_RH.shape
    dz_RHC = dz_RW.reshape(rows, heads, -1)
    channels = dz_RHC.shape[2]
    kept_RHK = kept_RK.view(rows, heads, -1)
    z_RHC, lse_RH1 = kept_RHK[:, :, :channels], kept_RHK[:, :, channels : channels + 1]
    slope_z_RHC, slope_sum_RH1 = kept_RHK[:, :, channels + 1 : -1], kept_RHK[:, :, -1:]
    d_RH1 = (dz_RHC * z_RHC).sum(2, keepdim=True)
    da_dst_RH = (dz_RHC * slope_z_RHC).sum(2).sub_((d_RH1 * slope_sum_RH1)[:, :, 0])
    return torch.cat((dz_RHC, a_dst_RH[:, :, None], lse_RH1, d_RH1), dim=2).view(rows, -1), da_dst_RH


def pull_sources(gat: GatHeads, tile: TileEdges, *, target_NS: Tensor, source_RS: Tensor) -> Tensor:
    """Backward: sources pull dZ with its scalars over out-edges → dz of the messages and da_src [R, H·(C+1)].

    What reaches z through a_src = z · att is not in dz: scores are row-wise functions of their own.
    """
    rows, heads = len(source_RS), len(gat.heads)
    source_RHK = source_RS.view(rows, heads, -1)
    channels = source_RHK.shape[2] - SOURCE_SCALARS
    z_RHC, a_src_RH = source_RHK[:, :, :channels], source_RHK[:, :, channels]
    out_RHK = torch.empty_like(source_RHK, memory_format=torch.contiguous_format)
    for piece in _begun(pieces(tile, len(target_NS)), out_RHK):
        bags, here = Bags(piece, heads, target_NS, tile.apart), piece.rows
        score_X, lse_X = bags.columns(-3, -2)
        score_X += bags.spread(a_src_RH[here])
        weight_X = F.leaky_relu(score_X, gat.negative_slope).sub_(lse_X).exp_()
        slope_d_RH = None
        if gat.dropout is not None:
            (d_X,) = bags.columns(-1)
            slope_d_RH = bags.sums(_sloped(gat, d_X.mul_(weight_X), score_X))
        apart_2RHK = _sums_apart(gat, piece, Direction.OUT, bags, weight_X, score_X)
        above_RHC, below_RHC = apart_2RHK[:, :, :, :channels].unbind(0)
        _put(piece, out_RHK[:, :, :channels], above_RHC, below_RHC)
        above_RHK, below_RHK = apart_2RHK.unbind(0)
        slope_RHK = above_RHK.add_(below_RHK, alpha=gat.negative_slope)
        if slope_d_RH is None:
            slope_d_RH = slope_RHK[:, :, -1]
        da_src_RH = (slope_RHK[:, :, :channels] * z_RHC[here]).sum(2)
        _put(piece, out_RHK[:, :, channels], da_src_RH, slope_d_RH, alpha=-1.0)
    return out_RHK.view(rows, -1)


def scratch_bytes(*, heads: int, channels: int, itemsize: int, dropout: bool) -> tuple[int, int]:
    """Bounds on what one call allocates at a time, results included: for every edge of a piece and every row of the
    tile, and for every row beside that.

    An edge of a piece has its neighbour, row and position (16 bytes at most each, the added self-loop's copy
    included). For every head it has up to four numbers, and of 8 bytes each at most its place, its neighbour's row,
    that again in the order of summing, what was counted before it and, twice while it is put together, that order;
    dropout adds four counters of 8 bytes, twice. A row has four matrices of the slab's width at most, and eight
    numbers and as many places a head.
    """
    per_edge = 48 + heads * (4 * itemsize + 52) + (96 + heads * (2 + 2 * itemsize) if dropout else 0)
    per_row = heads * ((4 * (channels + TARGET_SCALARS) + 8) * itemsize + 64) + 24
    return per_edge, per_row


def _begun(pieces: Iterable[Piece], out_RHK: Tensor) -> Iterator[Piece]:
    """The pieces in order; rows of ``out`` that no piece begins are 0."""
    stop = 0
    for piece in pieces:
        out_RHK[stop : piece.start + piece.continues] = 0.0
        yield piece
        stop = piece.stop
    out_RHK[stop:] = 0.0


def _put(piece: Piece, total: Tensor, one: Tensor, other: Tensor | None = None, *, alpha: float = 1.0) -> None:
    """Make the rows of a piece ``one + alpha · other``, or add that where the piece continues a row."""
    own = total[piece.rows]
    if piece.continues:
        own += one
        if other is not None:
            own.add_(other, alpha=alpha)
    elif other is None:
        own.copy_(one)
    else:
        torch.add(one, other, alpha=alpha, out=own)


def _sums_apart(
    gat: GatHeads, piece: Piece, direction: Direction, bags: Bags, weight_X: Tensor, score_X: Tensor
) -> Tensor:
    """Sums of neighbours by edges with a score above zero, and by the others; what dropout leaves of them. Writes over
    the weights."""
    if gat.dropout is None:
        return bags.sums_apart(weight_X, score_X > 0)
    scale_X = bags.by_bag(gat.dropout.scale(piece, direction, gat.heads, weight_X.dtype))
    return bags.sums_apart(weight_X.mul_(scale_X), score_X > 0, scale_X != 0)


def _sloped(gat: GatHeads, values_X: Tensor, score_X: Tensor) -> Tensor:
    """Values times the derivative of the leaky rectifier: 1 above zero, the slope elsewhere, as torch has it."""
    sloped_X: Tensor = torch.ops.aten.leaky_relu_backward.default(values_X, score_X, gat.negative_slope, False)
    return sloped_X
