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
summed apart from the others, and Z = Z⁺ + Z⁻, Z' = Z⁺ + slope · Z⁻. Fetching is most of what an edge costs. With a
slope of 1 both are one.

Signed coefficients (Bo et al., "Beyond Low-frequency Information in Graph Convolutional Networks", AAAI 2021) are of no
softmax, so that nothing is taken off for D_i: α_ij = tanh(s_ij), l_ij α_ij = 1 - α_ij².

All that an edge needs of a row lies side by side, head after head, so that any group of whole heads is a slab:

    sources   z (C), a_src
    targets   dZ (C), a_dst, lse, D
    results   Z (C), lse, Z' (C), A' forward; dz (C), da_src backward

A wide head is cut into slices of its channels, each a group of columns with scalars of its own, so that a slab may be
narrower than a head. A score needs no channel: slices of a head have the same a_src, a_dst and lse. The products with D
and with z_j are sums over channels, so every slice has its part of them, da_src and da_dst of its own, and what the
head's are is the sum of its slices'. Each is computed in one way, whichever slices are in the slab beside it; but
what is computed of an edge is computed once for the slices of a head that are.

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, G groups of the slab: of H heads, T slices
of each; C channels of a slice, K columns of a slice with its scalars.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.kernels.bags import Bags, RunningSoftmax
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import Piece, TileEdges
from ooc.plan.workload import Direction

SOURCE_SCALARS = 1
"""Scalars of a group beside its channels, in what targets pull: a_src."""
TARGET_SCALARS = 3
"""And in what sources pull: a_dst, lse, D."""


def result_columns(channels: int, *, keep: bool) -> int:
    """Columns of a group in what ``attend`` gives."""
    return 2 * channels + 2 if keep else channels


@dataclass(frozen=True, slots=True)
class GatHeads:
    """What the kernels know of a layer's heads: the groups of the slab, by their numbers among all of them. They are
    heads, or ``slices`` of each. ``negative_slope``: None where coefficients are signed, of no softmax."""

    groups: range
    negative_slope: float | None
    dropout: EdgeDropout | None = None
    slices: int = 1

    @property
    def together(self) -> int:
        """How many groups of the slab, one set after the other, are slices of the same head."""
        return gcd(self.groups.start, len(self.groups), self.slices)

    def scale(self, dropout: EdgeDropout, piece: Piece, direction: Direction, dtype: torch.dtype) -> Tensor:
        """What dropout multiplies coefficients by [E, H]."""
        heads = [group // self.slices for group in self.groups[:: self.together]]
        scale = dropout.scale(piece, direction, range(heads[0], heads[-1] + 1), dtype)
        if scale.shape[1] == len(heads):
            return scale
        return scale[:, [head - heads[0] for head in heads]]


def attend(gat: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RG: Tensor, keep: bool) -> Tensor:
    """Forward: targets pull z and a_src over in-edges → Z [R, G·C]; with ``keep`` what the backward pass needs beside
    it, [R, G·(2C+2)]. lse is 0 where a row has no edges."""
    rows, slices = len(a_dst_RG), gat.together
    heads = len(gat.groups) // slices
    channels = source_NS.shape[1] // len(gat.groups) - SOURCE_SCALARS
    out_RHTK = source_NS.new_empty(rows, heads, slices, result_columns(channels, keep=keep))
    z_RHTC, slope_z_RHTC, slope_sum_RHT = out_RHTK[..., :channels], out_RHTK[..., channels + 1 : -1], out_RHTK[..., -1]
    totals = [z_RHTC, out_RHTK[..., channels + 1 :]] if keep else [out_RHTK]
    a_dst_RH = a_dst_RG[:, ::slices]
    softmax = RunningSoftmax(rows, heads, a_dst_RG, totals)
    for piece, bags in _begun(Bags.of(tile, heads, source_NS, slices=slices), out_RHTK):
        here = piece.rows
        score_X = bags.columns(-1)[0].add_(bags.spread(a_dst_RH[here]))
        if gat.negative_slope is None:
            weight_X = score_X.tanh()
        else:
            weight_X = softmax.weigh(bags, F.leaky_relu(score_X, gat.negative_slope))
        if keep:
            of_signed = gat.negative_slope is None
            slope_sum = score_X.new_zeros(()) if of_signed else bags.sums(_sloped(gat, weight_X, score_X))[..., None]
            _put(piece, slope_sum_RHT, slope_sum)
        sums, slope_sums = _sums(gat, piece, Direction.IN, bags, weight_X, score_X)
        _put(piece, z_RHTC, *(one[..., :channels] for one in sums))
        if keep:
            alpha = 1.0 if gat.negative_slope is None else gat.negative_slope
            _put(piece, slope_z_RHTC, *(one[..., :channels] for one in slope_sums), alpha=alpha)
    lse_RH = softmax.finish()
    if keep:
        out_RHTK[..., channels] = lse_RH[..., None]
    return out_RHTK.view(rows, -1)


def upstream(dz_RW: Tensor, kept_RK: Tensor, a_dst_RG: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient of Z and what the forward pass kept: what sources pull [R, G·(C+3)], and da_dst [R, G]."""
    rows, groups = a_dst_RG.shape
    dz_RGC = dz_RW.reshape(rows, groups, -1)
    channels = dz_RGC.shape[2]
    kept_RGK = kept_RK.view(rows, groups, -1)
    z_RGC, lse_RG1 = kept_RGK[:, :, :channels], kept_RGK[:, :, channels : channels + 1]
    slope_z_RGC, slope_sum_RG1 = kept_RGK[:, :, channels + 1 : -1], kept_RGK[:, :, -1:]
    d_RG1 = (dz_RGC * z_RGC).sum(2, keepdim=True)
    da_dst_RG = (dz_RGC * slope_z_RGC).sum(2).sub_((d_RG1 * slope_sum_RG1)[:, :, 0])
    return torch.cat((dz_RGC, a_dst_RG[:, :, None], lse_RG1, d_RG1), dim=2).view(rows, -1), da_dst_RG


def pull_sources(gat: GatHeads, tile: TileEdges, *, target_NS: Tensor, source_RS: Tensor) -> Tensor:
    """Backward: sources pull dZ with its scalars over out-edges → dz of the messages and da_src [R, G·(C+1)].

    What reaches z through a_src = z · att is not in dz: scores are row-wise functions of their own.
    """
    rows, slices = len(source_RS), gat.together
    heads = len(gat.groups) // slices
    source_RHTK = source_RS.view(rows, heads, slices, -1)
    channels = source_RHTK.shape[3] - SOURCE_SCALARS
    z_RHTC, a_src_RH = source_RHTK[..., :channels], source_RHTK[:, :, 0, channels]
    out_RHTK = torch.empty_like(source_RHTK, memory_format=torch.contiguous_format)
    for piece, bags in _begun(Bags.of(tile, heads, target_NS, slices=slices), out_RHTK):
        here = piece.rows
        score_X, lse_X = bags.columns(-3, -2)
        score_X += bags.spread(a_src_RH[here])
        slope_d_RHT = None
        if gat.negative_slope is None:
            weight_X, slope_d_RHT = score_X.tanh(), score_X.new_zeros(())
        else:
            weight_X = F.leaky_relu(score_X, gat.negative_slope).sub_(lse_X).exp_()
            if gat.dropout is not None:
                slope_d_RHT = _slope_d(gat, bags, weight_X, score_X, slices)
        sums, (slope_RHTK, *below) = _sums(gat, piece, Direction.OUT, bags, weight_X, score_X)
        _put(piece, out_RHTK[..., :channels], *(one[..., :channels] for one in sums))
        for below_RHTK in below:
            slope_RHTK.add_(below_RHTK, alpha=gat.negative_slope)
        if slope_d_RHT is None:
            slope_d_RHT = slope_RHTK[..., -1]
        da_src_RHT = (slope_RHTK[..., :channels] * z_RHTC[here]).sum(3)
        _put(piece, out_RHTK[..., channels], da_src_RHT, slope_d_RHT, alpha=-1.0)
    return out_RHTK.view(rows, -1)


def scratch_bytes(*, heads: int, slices: int, channels: int, itemsize: int, dropout: bool) -> tuple[int, int]:
    """Bounds on what one call allocates at a time, results included: for every edge of a piece and every row of the
    tile, and for every row beside that. ``channels``: of each of a head's ``slices``.

    An edge of a piece has its neighbour, row and position (16 bytes at most each, the added self-loop's copy
    included). For every head it has up to four numbers, and of 8 bytes each at most its place, its neighbour's row,
    that again in the order of summing, what was counted before it and, twice while it is put together, that order;
    dropout adds four counters of 8 bytes, twice. A row has four matrices of the slab's width at most, and eight
    numbers and as many places a group.
    """
    per_edge = 48 + heads * (4 * itemsize + 52) + (96 + heads * (2 + 2 * itemsize) if dropout else 0)
    per_row = heads * slices * ((4 * (channels + TARGET_SCALARS) + 8) * itemsize + 64) + 24
    return per_edge, per_row


def _begun(pieces: Iterable[tuple[Piece, Bags]], out: Tensor) -> Iterator[tuple[Piece, Bags]]:
    """The pieces in order; rows of ``out`` that no piece begins are 0."""
    stop = 0
    for piece, bags in pieces:
        out[stop : piece.start + piece.continues] = 0.0
        yield piece, bags
        stop = piece.stop
    out[stop:] = 0.0


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


def _sums(
    gat: GatHeads, piece: Piece, direction: Direction, bags: Bags, weight_X: Tensor, score_X: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Sums of neighbours by their weights, and with l beside these; of what dropout leaves of them [R, H, T, K]. Each
    is one sum, or two, by edges with a score above zero and by the others, the latter still to be multiplied by the
    slope in the second. Writes over the weights."""
    scale_X = None if gat.dropout is None else bags.by_bag(gat.scale(gat.dropout, piece, direction, weight_X.dtype))
    if gat.negative_slope in (None, 1.0):
        weights = [weight_X] if gat.negative_slope else [weight_X, _sloped(gat, weight_X, score_X)]
        scaled = weights if scale_X is None else [one.mul_(scale_X) for one in weights]
        sums = [one.view(*one.shape[:2], bags.slices, -1) for one in map(bags.weighted, scaled)]
        return sums[:1], sums[-1:]
    if scale_X is not None:
        weight_X *= scale_X
    apart = [*bags.sums_apart(weight_X, score_X > 0, None if scale_X is None else scale_X != 0).unbind(0)]
    return apart, apart


def _slope_d(gat: GatHeads, bags: Bags, weight_X: Tensor, score_X: Tensor, slices: int) -> Tensor:
    """Σ l α D of every bag and slice [R, H, T]; dropout leaves all of it."""
    parts = []
    for number in range(slices):
        (d_X,) = bags.columns(-1, slice_number=number)
        parts.append(bags.sums(_sloped(gat, d_X.mul_(weight_X), score_X)))
    return torch.stack(parts, dim=2)


def _sloped(gat: GatHeads, values_X: Tensor, score_X: Tensor) -> Tensor:
    """Values times the derivative of the leaky rectifier: 1 above zero, the slope elsewhere, as torch has it; l α of
    signed coefficients, which the values are."""
    if gat.negative_slope is None:
        return torch.addcmul(torch.ones_like(values_X), values_X, values_X, value=-1.0)
    sloped_X: Tensor = torch.ops.aten.leaky_relu_backward.default(values_X, score_X, gat.negative_slope, False)
    return sloped_X
