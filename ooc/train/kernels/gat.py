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
needed.

All that an edge needs of a row lies side by side, head after head, so that any group of whole heads is a slab:

    sources   z (C), a_src
    targets   dZ (C), a_dst, lse, D
    results   Z (C), lse, Z' (C), A' forward; dz (C), da_src backward

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, H heads of the slab, C channels of a head,
K columns of a head with its scalars.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.plan.workload import Direction
from ooc.train.kernels.edge_dropout import EdgeDropout
from ooc.train.kernels.edges import Piece, TileEdges, pieces
from ooc.train.kernels.softmax import RunningSoftmax

_INT32_MAX = 2**31 - 1

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
    columns = source_NS.shape[1] // heads
    z_RHK = source_NS.new_zeros(rows, heads, columns)
    slope_z_RHK = torch.zeros_like(z_RHK) if keep else None
    slope_sum_RH = torch.zeros_like(a_dst_RH) if keep else None
    totals = [total for total in (z_RHK, slope_z_RHK, slope_sum_RH) if total is not None]
    softmax = RunningSoftmax(rows, heads, a_dst_RH, totals)
    for piece in pieces(tile, len(source_NS)):
        here = piece.rows
        neighbours = _Neighbours(piece, heads, source_NS)
        score_EH = neighbours.scalars(-1).add_(a_dst_RH[here].index_select(0, piece.row_E))
        slope_EH = _slopes(score_EH, gat.negative_slope) if keep else None
        weight_EH = softmax.weigh(piece, F.leaky_relu_(score_EH, gat.negative_slope))
        if slope_EH is not None and slope_sum_RH is not None:
            slope_sum_RH[here] += piece.sums(weight_EH * slope_EH)
        if gat.dropout is not None:
            weight_EH *= gat.dropout.scale(piece, Direction.IN, gat.heads, weight_EH.dtype)
        z_RHK[here] += neighbours.sum(weight_EH)
        if slope_EH is not None and slope_z_RHK is not None:
            slope_z_RHK[here] += neighbours.sum(weight_EH.mul_(slope_EH))
    lse_RH = softmax.finish()
    z_RHC = z_RHK[:, :, :-1]
    if slope_z_RHK is None or slope_sum_RH is None:
        return z_RHC.reshape(rows, -1)
    kept = (z_RHC, lse_RH[:, :, None], slope_z_RHK[:, :, :-1], slope_sum_RH[:, :, None])
    return torch.cat(kept, dim=2).view(rows, -1)


def upstream(dz_RW: Tensor, kept_RK: Tensor, a_dst_RH: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient of Z and what the forward pass kept: what sources pull [R, H·(C+3)], and da_dst [R, H]."""
    rows, heads = a_dst_RH.shape
    dz_RHC = dz_RW.view(rows, heads, -1)
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
    a_src_RH = source_RHK[:, :, channels]
    out_RHK, slope_out_RHK = source_RS.new_zeros(2, rows, heads, channels + TARGET_SCALARS)
    slope_d_RH = source_RS.new_zeros(rows, heads)
    for piece in pieces(tile, len(target_NS)):
        here = piece.rows
        neighbours = _Neighbours(piece, heads, target_NS)
        a_dst_EH, lse_EH, d_EH = (neighbours.scalars(k) for k in range(-TARGET_SCALARS, 0))
        score_EH = a_dst_EH.add_(a_src_RH[here].index_select(0, piece.row_E))
        slope_EH = _slopes(score_EH, gat.negative_slope)
        weight_EH = F.leaky_relu_(score_EH, gat.negative_slope).sub_(lse_EH).exp_()
        slope_d_RH[here] += piece.sums((weight_EH * slope_EH).mul_(d_EH))
        if gat.dropout is not None:
            weight_EH *= gat.dropout.scale(piece, Direction.OUT, gat.heads, weight_EH.dtype)
        out_RHK[here] += neighbours.sum(weight_EH)
        slope_out_RHK[here] += neighbours.sum(weight_EH.mul_(slope_EH))
    da_src_RH = (slope_out_RHK[:, :, :channels] * source_RHK[:, :, :channels]).sum(2).sub_(slope_d_RH)
    return torch.cat((out_RHK[:, :, :channels], da_src_RH[:, :, None]), dim=2).view(rows, -1)


def scratch_bytes(*, heads: int, channels: int, itemsize: int, dropout: bool) -> tuple[int, int]:
    """Bounds on what one call allocates at a time, results included: for every edge of a piece and every row of the
    tile, and for every row beside that.

    An edge of a piece has its neighbour, row and position (16 bytes at most each, the added self-loop's copy
    included), up to nine numbers a head and, several at a time, its place in the slab for every head; dropout adds
    four counters of 8 bytes, twice. A row has five matrices of the slab's width at most and eight numbers a head.
    """
    per_edge = 48 + heads * (9 * itemsize + 32) + (96 + heads * (1 + itemsize) if dropout else 0)
    per_row = heads * (5 * (channels + TARGET_SCALARS) + 8) * itemsize + 24 + heads * 8
    return per_edge, per_row


class _Neighbours:
    """A piece's neighbours in a slab of heads with their scalars [N, H·K], read as one row a node and head."""

    def __init__(self, piece: Piece, heads: int, slab_NS: Tensor) -> None:
        assert slab_NS.is_contiguous() and slab_NS.shape[1] % heads == 0
        self.matrix_XK = slab_NS.view(-1, slab_NS.shape[1] // heads)
        self.heads, self.rows = heads, piece.stop - piece.start
        index = piece.neighbours_E
        if slab_NS.numel() > _INT32_MAX or piece.edges * heads > _INT32_MAX:
            index = index.long()
        numbers = torch.arange(heads, dtype=index.dtype)
        self.rows_EH = index[:, None] * heads + numbers
        starts = piece.offsets_R1[:-1].to(index.dtype) + (numbers * piece.edges)[:, None]
        self.offsets = torch.cat((starts.view(-1), index.new_tensor([piece.edges * heads])))
        self._rows_by_head: Tensor | None = None

    def scalars(self, column: int) -> Tensor:
        """One of the columns of every head [E, H]."""
        columns = self.matrix_XK.shape[1]
        places = (self.rows_EH * columns).add_(column % columns)
        return self.matrix_XK.view(-1).index_select(0, places.view(-1)).view_as(self.rows_EH)

    def sum(self, weight_EH: Tensor) -> Tensor:
        """Σ weight · row → [rows, H, K], a view: every head with weights of its own, in one pass of ``embedding_bag``
        whose bags are rows of the tile, head after head."""
        if self._rows_by_head is None:
            self._rows_by_head = self.rows_EH.t().reshape(-1)
        sums = F.embedding_bag(
            self._rows_by_head,
            self.matrix_XK,
            self.offsets,
            mode="sum",
            include_last_offset=True,
            per_sample_weights=weight_EH.t().reshape(-1),
        )
        return sums.view(self.heads, self.rows, -1).transpose(0, 1)


def _slopes(score_EH: Tensor, negative_slope: float) -> Tensor:
    """Derivative of the leaky rectifier: 1 above zero, the slope elsewhere, as torch has it."""
    return torch.where(score_EH > 0, score_EH.new_tensor(1.0), score_EH.new_tensor(negative_slope))
