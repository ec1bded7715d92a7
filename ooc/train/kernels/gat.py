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

Z' and A' come from the forward pass at the price of one more matrix kept, or from a second pull over in-edges.

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, H heads of the slab, C channels of a
head. Matrices are head after head, [N, H·C] and [N, H], so that any group of whole heads is a slab.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.plan.workload import Direction
from ooc.train.kernels.edge_dropout import EdgeDropout
from ooc.train.kernels.edges import EDGES_PER_PIECE, Piece, TileEdges, pieces
from ooc.train.kernels.softmax import RunningSoftmax

_INT32_MAX = 2**31 - 1

STATISTICS = 3
"""Numbers a row and head that sources pull in the backward pass, in this order: a_dst, lse, D."""


@dataclass(frozen=True, slots=True)
class GatHeads:
    """What the kernels know of a layer's heads: those of the slab, ``heads``, by their numbers among all of them."""

    heads: range
    negative_slope: float
    dropout: EdgeDropout | None = None


@dataclass(frozen=True, slots=True)
class Attended:
    """What the forward pull gives for a tile: ``z_RW`` [R, H·C] and ``lse_RH``, 0 where a row has no edges.

    ``slope_z_RW`` [R, H·C] and ``slope_sum_RH``: Z' and A', where they were asked for.
    """

    z_RW: Tensor
    lse_RH: Tensor
    slope_z_RW: Tensor | None
    slope_sum_RH: Tensor | None


def attend(
    gat: GatHeads, tile: TileEdges, *, source_NW: Tensor, a_src_NH: Tensor, a_dst_RH: Tensor, keep_slopes: bool
) -> Attended:
    """Forward: targets pull z and a_src over in-edges. With ``keep_slopes``, Z' and A' as well."""
    rows, heads = a_dst_RH.shape
    source_XC = _by_head(source_NW, heads)
    z_RHC = source_NW.new_zeros(rows, heads, source_XC.shape[1])
    slope_z_RHC = torch.zeros_like(z_RHC) if keep_slopes else None
    slope_sum_RH = torch.zeros_like(a_dst_RH) if keep_slopes else None
    totals = [total for total in (z_RHC, slope_z_RHC, slope_sum_RH) if total is not None]
    softmax = RunningSoftmax(rows, heads, a_dst_RH, totals)
    for piece in pieces(tile, len(source_NW)):
        here = piece.rows
        score_EH = _scores(piece, a_src_NH, a_dst_RH)
        slope_EH = _slopes(score_EH, gat.negative_slope) if keep_slopes else None
        weight_EH = softmax.weigh(piece, F.leaky_relu_(score_EH, gat.negative_slope))
        if slope_EH is not None and slope_sum_RH is not None:
            slope_sum_RH[here] += piece.sums(weight_EH * slope_EH)
        if gat.dropout is not None:
            weight_EH *= gat.dropout.scale(piece, Direction.IN, gat.heads, weight_EH.dtype)
        bags = _Bags(piece, heads, source_XC)
        z_RHC[here] += bags.sum(weight_EH)
        if slope_EH is not None and slope_z_RHC is not None:
            slope_z_RHC[here] += bags.sum(weight_EH.mul_(slope_EH))
    lse_RH = softmax.finish()
    slope_z_RW = None if slope_z_RHC is None else slope_z_RHC.view(rows, -1)
    return Attended(z_RHC.view(rows, -1), lse_RH, slope_z_RW, slope_sum_RH)


def statistics(a_dst_RH: Tensor, lse_RH: Tensor, dz_RW: Tensor, z_RW: Tensor) -> Tensor:
    """a_dst, lse and D = rowsum(dZ ∘ Z) of every head → [R, H·3], what ``pull_sources`` reads beside dZ."""
    d_RH = (dz_RW * z_RW).view(*lse_RH.shape, -1).sum(-1)
    return torch.stack((a_dst_RH, lse_RH, d_RH), dim=2).view(len(lse_RH), -1)


def pull_sources(
    gat: GatHeads, tile: TileEdges, *, dz_NW: Tensor, statistics_NS: Tensor, source_RW: Tensor, a_src_RH: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward: sources pull dZ and the statistics over out-edges → (dz of the messages [R, H·C], da_src [R, H]).

    What reaches z through a_src = z · att is not in dz: scores are row-wise functions of their own.
    """
    rows, heads = a_src_RH.shape
    dz_XC = _by_head(dz_NW, heads)
    out_RHC, slope_out_RHC = source_RW.new_zeros(2, rows, heads, dz_XC.shape[1])
    slope_d_RH = a_src_RH.new_zeros(rows, heads)
    for piece in pieces(tile, len(dz_NW)):
        here = piece.rows
        statistics_EHS = statistics_NS.index_select(0, piece.neighbours_E).view(piece.edges, heads, STATISTICS)
        a_dst_EH, lse_EH, d_EH = statistics_EHS.unbind(2)
        score_EH = a_src_RH[here].index_select(0, piece.row_E).add_(a_dst_EH)
        slope_EH = _slopes(score_EH, gat.negative_slope)
        weight_EH = F.leaky_relu_(score_EH, gat.negative_slope).sub_(lse_EH).exp_()
        slope_d_RH[here] += piece.sums((weight_EH * slope_EH).mul_(d_EH))
        if gat.dropout is not None:
            weight_EH *= gat.dropout.scale(piece, Direction.OUT, gat.heads, weight_EH.dtype)
        bags = _Bags(piece, heads, dz_XC)
        out_RHC[here] += bags.sum(weight_EH)
        slope_out_RHC[here] += bags.sum(weight_EH.mul_(slope_EH))
    da_src_RH = slope_out_RHC.mul_(source_RW.view_as(slope_out_RHC)).sum(-1).sub_(slope_d_RH)
    return out_RHC.view(rows, -1), da_src_RH


def pull_targets(
    gat: GatHeads,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    a_src_NH: Tensor,
    dz_RW: Tensor,
    statistics_RS: Tensor,
) -> Tensor:
    """Backward, where the forward pass kept no slopes: targets pull z and a_src again → da_dst [R, H]."""
    rows, heads = len(dz_RW), a_src_NH.shape[1]
    source_XC = _by_head(source_NW, heads)
    a_dst_RH, lse_RH, _ = statistics_RS.view(rows, heads, STATISTICS).unbind(2)
    slope_z_RHC = source_NW.new_zeros(rows, heads, source_XC.shape[1])
    slope_sum_RH = source_NW.new_zeros(rows, heads)
    for piece in pieces(tile, len(source_NW)):
        here = piece.rows
        score_EH = _scores(piece, a_src_NH, a_dst_RH)
        slope_EH = _slopes(score_EH, gat.negative_slope)
        weight_EH = F.leaky_relu_(score_EH, gat.negative_slope).sub_(lse_RH[here].index_select(0, piece.row_E)).exp_()
        weight_EH *= slope_EH
        slope_sum_RH[here] += piece.sums(weight_EH)
        if gat.dropout is not None:
            weight_EH *= gat.dropout.scale(piece, Direction.IN, gat.heads, weight_EH.dtype)
        slope_z_RHC[here] += _Bags(piece, heads, source_XC).sum(weight_EH)
    return target_gradient(dz_RW, statistics_RS, slope_z_RHC.view(rows, -1), slope_sum_RH)


def target_gradient(dz_RW: Tensor, statistics_RS: Tensor, slope_z_RW: Tensor, slope_sum_RH: Tensor) -> Tensor:
    """da_dst [R, H] from what the forward pass kept: dZ · Z' - D A'."""
    rows, heads = slope_sum_RH.shape
    d_RH = statistics_RS.view(rows, heads, STATISTICS)[:, :, 2]
    return (dz_RW * slope_z_RW).view(rows, heads, -1).sum(-1).sub_(slope_sum_RH.mul(d_RH))


def scratch_bytes(*, edges: int, rows: int, heads: int, channels: int, itemsize: int, dropout: bool) -> int:
    """Bound on what one call allocates at a time for a tile, results included, whatever its lists look like.

    An edge of a piece has its neighbour, row and position (16 bytes at most each, the added self-loop's copy
    included), up to eight numbers a head and its index into heads; dropout adds four counters of 8 bytes, twice.
    A row has three matrices of the slab's width at most and eight numbers a head.
    """
    in_piece = min(edges + rows, EDGES_PER_PIECE + rows)
    per_edge = 48 + heads * (8 * itemsize + 8) + (96 + heads * (1 + itemsize) if dropout else 0)
    per_row = heads * (3 * channels + 8) * itemsize + 24 + heads * 8
    return in_piece * per_edge + rows * per_row


class _Bags:
    """Weighted sums over a piece's edges, every head with weights of its own, in one pass of ``embedding_bag``.

    The matrix is read as one row a node and head; bags are rows of the tile, head after head.
    """

    def __init__(self, piece: Piece, heads: int, matrix_XC: Tensor) -> None:
        self.matrix_XC, self.heads, self.rows = matrix_XC, heads, piece.stop - piece.start
        index = piece.neighbours_E
        if len(matrix_XC) > _INT32_MAX or piece.edges * heads > _INT32_MAX:
            index = index.long()
        numbers = torch.arange(heads, dtype=index.dtype)
        self.indices = (index * heads + numbers[:, None]).view(-1)
        starts = piece.offsets_R1[:-1].to(index.dtype) + (numbers * piece.edges)[:, None]
        self.offsets = torch.cat((starts.view(-1), index.new_tensor([piece.edges * heads])))

    def sum(self, weight_EH: Tensor) -> Tensor:
        """Σ weight · matrix → [rows, H, C], a view."""
        sums = F.embedding_bag(
            self.indices,
            self.matrix_XC,
            self.offsets,
            mode="sum",
            include_last_offset=True,
            per_sample_weights=weight_EH.t().reshape(-1),
        )
        return sums.view(self.heads, self.rows, -1).transpose(0, 1)


def _by_head(matrix_NW: Tensor, heads: int) -> Tensor:
    """[N·H, C] view of a slab of whole heads; it must be contiguous, for a strided one would be copied whole."""
    assert matrix_NW.is_contiguous() and matrix_NW.shape[1] % heads == 0
    return matrix_NW.view(-1, matrix_NW.shape[1] // heads)


def _scores(piece: Piece, a_src_NH: Tensor, a_dst_RH: Tensor) -> Tensor:
    """s [E, H] of edges into the tile's rows, before the leaky rectifier."""
    score_EH = a_src_NH.index_select(0, piece.neighbours_E)
    return score_EH.add_(a_dst_RH[piece.rows].index_select(0, piece.row_E))


def _slopes(score_EH: Tensor, negative_slope: float) -> Tensor:
    """Derivative of the leaky rectifier: 1 above zero, the slope elsewhere, as torch has it."""
    return torch.where(score_EH > 0, score_EH.new_tensor(1.0), score_EH.new_tensor(negative_slope))
