# SPDX-License-Identifier: Apache-2.0
"""GAT's attention (Veličković et al., "Graph Attention Networks", ICLR 2018), pulled in both directions.

    s_ij = a_src_j + a_dst_i       e_ij = leaky(s_ij)       α_ij = exp(e_ij - lse_i)       Z_i = Σ_j α_ij m_ij z_j

for an edge from source j to target i, for every head; m_ij is dropout's scale. As FlashAttention does (Dao et al.,
NeurIPS 2022), the backward pass recomputes α from lse, the logarithm of the sum of exponentials, and needs one more
number a row, D_i = dZ_i · Z_i:

    dz_j     = Σ_i α_ij m_ij dZ_i
    da_src_j = Σ_i l_ij α_ij (m_ij dZ_i · z_j - D_i)        l_ij = leaky'(s_ij), 1 or the slope
    da_dst_i = Σ_j l_ij α_ij (m_ij dZ_i · z_j - D_i)

The product with z_j leaves the sum over i, and that with dZ_i the sum over j, because a score is a sum of two scalars.
So with weights α m l beside α m,

    da_src_j = z_j · Σ_i l_ij α_ij m_ij dZ_i - Σ_i l_ij α_ij D_i
    da_dst_i = dZ_i · Z'_i - D_i A'_i        Z'_i = Σ_j l_ij α_ij m_ij z_j,  A'_i = Σ_j l_ij α_ij

Z' and A' come from the forward pass, which keeps one more matrix for them, so no second pull over in-edges is needed.

Signed coefficients (Bo et al., "Beyond Low-frequency Information in Graph Convolutional Networks", AAAI 2021) have no
softmax, so there is no D_i to subtract: α_ij = tanh(s_ij), l_ij α_ij = 1 - α_ij².

Everything an edge needs of a row lies side by side, head after head, so any group of whole heads is a slab:

    sources   z (C), a_src
    targets   a_dst, dZ (C), lse, D
    results   Z (C), lse, Z' (C), A' forward; dz (C), da_src backward

A wide head is cut into slices of its channels. Each slice is a group of columns with scalars of its own, so a slab may
be narrower than a head. A score needs no channel: the slices of a head have the same a_src, a_dst and lse. The products
with D and with z_j are sums over channels, so every slice has its own part of them, da_src and da_dst; the head's are
the sums over its slices. Each slice is computed in the same way whatever slices share its slab, but an edge's weight is
computed once for all slices of a head in the slab.

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, G groups of the slab: of H heads, T slices of
each; C channels of a slice, K columns of a slice with its scalars.
"""

from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import Piece, RunningSoftmax, TileEdges, pieces
from ooc.kernels.tensors import pull
from ooc.plan.workload import Direction

SOURCE_SCALARS = 1
"""Scalars of a group beside its channels in what targets pull: a_src."""
TARGET_SCALARS = 3
"""Scalars of a group in what sources pull: a_dst, which comes first, lse and D."""


def result_columns(channels: int, *, keep: bool) -> int:
    """Return the columns of a group in the result of ``attend``."""
    return 2 * channels + 2 if keep else channels


@dataclass(frozen=True, slots=True)
class GatHeads:
    """What the kernels know of a layer's heads: the slab's groups, by their numbers among all groups. These are heads,
    or ``slices`` of each. ``negative_slope``: None for signed coefficients, which have one head and no softmax."""

    groups: range
    negative_slope: float | None
    dropout: EdgeDropout | None = None
    slices: int = 1

    @property
    def together(self) -> int:
        """How many successive groups of the slab are slices of the same head."""
        return gcd(self.groups.start, len(self.groups), self.slices)

    def dropped(self, piece: Piece, direction: Direction, weights_EH: list[Tensor]) -> list[Tensor]:
        """Apply dropout to the coefficients of edges."""
        if self.dropout is None:
            return weights_EH
        heads = [group // self.slices for group in self.groups[:: self.together]]
        scale_EH = self.dropout.scale(piece, direction, range(heads[0], heads[-1] + 1), weights_EH[0].dtype)
        scale_EH = scale_EH[:, [head - heads[0] for head in heads]]
        return [weight_EH.mul_(scale_EH) for weight_EH in weights_EH]


def attend(gat: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RG: Tensor, keep: bool) -> Tensor:
    """Forward: targets pull z and a_src over in-edges. Return Z [R, G·C]; with ``keep``, also what the backward pass
    needs, [R, G·(2C+2)]. lse is 0 for a row without edges."""
    rows, slices = len(a_dst_RG), gat.together
    heads = len(gat.groups) // slices
    source_NHTK = source_NS.view(len(source_NS), heads, slices, -1)
    channels = source_NHTK.shape[3] - SOURCE_SCALARS
    out_RHTK = source_NS.new_zeros(rows, heads, slices, result_columns(channels, keep=keep))
    totals = [out_RHTK[..., :channels], out_RHTK[..., channels + 1 :]] if keep else [out_RHTK]
    softmax = RunningSoftmax(rows, heads, a_dst_RG, totals)
    for piece in pieces(tile, len(source_NS)):
        here = piece.rows
        score_EH = source_NHTK[:, :, 0, -1][piece.neighbours_E].add_(piece.spread(a_dst_RG[here, ::slices]))
        if gat.negative_slope is None:
            weight_EH = score_EH.tanh()
        else:
            weight_EH = softmax.weigh(piece, F.leaky_relu(score_EH, gat.negative_slope))
        sloped_EH = _times_slope(gat, weight_EH, score_EH)
        if keep and gat.negative_slope is not None:
            out_RHTK[here, ..., -1] += piece.sums(sloped_EH)[:, :, None]
        weights = gat.dropped(piece, Direction.IN, [weight_EH, sloped_EH][: 1 + keep])
        for total, sums in zip(totals, _weighted_sums(gat, piece, source_NHTK, weights), strict=True):
            total[here, ..., :channels] += sums[..., :channels]
    lse_RH = softmax.finish()
    if keep:
        out_RHTK[..., channels] = lse_RH[..., None]
    return out_RHTK.view(rows, -1)


def upstream(dz_RW: Tensor, kept_RK: Tensor, a_dst_RG: Tensor) -> tuple[Tensor, Tensor]:
    """Return what sources pull [R, G·(C+3)], and da_dst [R, G], from the gradient of Z and what the forward pass
    kept."""
    rows, groups = a_dst_RG.shape
    dz_RGC = dz_RW.reshape(rows, groups, -1)
    channels = dz_RGC.shape[2]
    kept_RGK = kept_RK.view(rows, groups, -1)
    z_RGC, lse_RG1 = kept_RGK[:, :, :channels], kept_RGK[:, :, channels : channels + 1]
    slope_z_RGC, slope_sum_RG1 = kept_RGK[:, :, channels + 1 : -1], kept_RGK[:, :, -1:]
    d_RG1 = (dz_RGC * z_RGC).sum(2, keepdim=True)
    da_dst_RG = (dz_RGC * slope_z_RGC).sum(2).sub_((d_RG1 * slope_sum_RG1)[:, :, 0])
    return torch.cat((a_dst_RG[:, :, None], dz_RGC, lse_RG1, d_RG1), dim=2).view(rows, -1), da_dst_RG


def pull_sources(gat: GatHeads, tile: TileEdges, *, target_NS: Tensor, source_RS: Tensor) -> Tensor:
    """Backward: sources pull dZ with its scalars over out-edges. Return dz of the messages and da_src [R, G·(C+1)].

    The gradient that reaches z through a_src = z · att is not in dz: scores are row-wise functions of their own.
    """
    rows, slices = len(source_RS), gat.together
    heads = len(gat.groups) // slices
    source_RHTK = source_RS.view(rows, heads, slices, -1)
    target_NHTK = target_NS.view(len(target_NS), heads, slices, -1)
    z_RHTC, a_src_RH = source_RHTK[..., :-SOURCE_SCALARS], source_RHTK[:, :, 0, -1]
    out_RHTK = torch.zeros_like(source_RHTK, memory_format=torch.contiguous_format)
    for piece in pieces(tile, len(target_NS)):
        here = piece.rows
        score_EH = target_NHTK[:, :, 0, 0][piece.neighbours_E].add_(piece.spread(a_src_RH[here]))
        if gat.negative_slope is None:
            weight_EH = score_EH.tanh()
        else:
            leaky_EH = F.leaky_relu(score_EH, gat.negative_slope)
            weight_EH = leaky_EH.sub_(target_NHTK[:, :, 0, -2][piece.neighbours_E]).exp_()
        sloped_EH = _times_slope(gat, weight_EH, score_EH)
        if gat.negative_slope is not None:
            of_d_EHT = target_NHTK[..., -1][piece.neighbours_E].mul_(sloped_EH[:, :, None])
            out_RHTK[here, ..., -1] -= piece.sums(of_d_EHT.flatten(1)).view(-1, heads, slices)
        weights = gat.dropped(piece, Direction.OUT, [weight_EH, sloped_EH])
        sums, sloped_sums = _weighted_sums(gat, piece, target_NHTK, weights)
        out_RHTK[here, ..., :-1] += sums[..., 1:-2]
        out_RHTK[here, ..., -1] += (sloped_sums[..., 1:-2] * z_RHTC[here]).sum(3)
    return out_RHTK.view(rows, -1)


def _weighted_sums(gat: GatHeads, piece: Piece, matrix_NHTK: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Return Σ weight · neighbour's row over every row's edges, head by head [R, H, T, K], for each of several weights
    [E, H]."""
    if gat.negative_slope is None:  # one head at a time, so that no row is copied
        one_head_NS = matrix_NHTK.view(len(matrix_NHTK), -1)
        sums = [pull(one_head_NS, piece.neighbours_E, piece.offsets_R1, weight_E1[:, 0]) for weight_E1 in weights]
    else:
        rows_EHTK = piece.gather(matrix_NHTK)
        sums = [piece.sums((rows_EHTK * weight_EH[:, :, None, None]).flatten(1)) for weight_EH in weights]
    return [one.view(-1, *matrix_NHTK.shape[1:]) for one in sums]


def _times_slope(gat: GatHeads, values_EH: Tensor, score_EH: Tensor) -> Tensor:
    """Return values times the derivative of the leaky rectifier (1 above zero, the slope elsewhere, as torch defines
    it); or l α for signed coefficients, which the values are."""
    if gat.negative_slope is None:
        return torch.addcmul(torch.ones_like(values_EH), values_EH, values_EH, value=-1.0)
    sloped_EH: Tensor = torch.ops.aten.leaky_relu_backward.default(values_EH, score_EH, gat.negative_slope, False)
    return sloped_EH
