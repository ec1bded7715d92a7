# SPDX-License-Identifier: Apache-2.0
"""Attention by scaled dot products of keys and queries, where edges carry nothing, pulled in both directions.

    s_ij = q_i · k_j / √C      α_ij = exp(s_ij - lse_i)      Z_i = Σ_j α_ij m_ij v_j      D_i = dZ_i · Z_i

for an edge from source j to target i and every head; m_ij is dropout's scale. With ds_ij = α_ij (m_ij dZ_i · v_j - D_i)

    dv_j = Σ_i α_ij m_ij dZ_i      dk_j = Σ_i ds_ij q_i / √C      dq_i = Σ_j ds_ij k_j / √C

An edge's scores are products of two rows, which ``sampled_addmm`` takes where the rows lie, and all else are weighted
sums of rows: nothing as wide as a row is computed for an edge, and no row is copied. What is next to the part of a row
that counts is multiplied by 0.

Sources bring key and value, head after head, and are pulled so; targets are pulled with query, dZ, lse and D.

Shapes: N rows of a pulled matrix, R rows of the tile, H heads of C channels, X edges of bags, K columns of a head.
"""

import math
import warnings

import torch
from torch import Tensor

from ooc.kernels.bags import Bags, RunningSoftmax
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import TileEdges
from ooc.plan.workload import Direction

with warnings.catch_warnings():  # torch says once that these are in beta
    warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
    _NONE = torch.zeros(0, dtype=torch.int32)
    torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int32), _NONE, torch.zeros(0), (0, 1), check_invariants=False)


def attend(
    tile: TileEdges, heads: range, dropout: EdgeDropout | None, *, source_NS: Tensor, query_RV: Tensor
) -> tuple[Tensor, Tensor]:
    """Forward: targets pull keys and values over in-edges → Z [R, H·C] and lse [R, H], 0 where there are no edges."""
    count, rows = len(heads), tile.rows
    query_RHC, scale = _by_head(query_RV, count)
    channels = query_RHC.shape[2]
    own_RHK = torch.cat((query_RHC * scale, torch.zeros_like(query_RHC)), dim=2)
    out_RHC = source_NS.new_zeros(rows, count, channels)
    softmax = RunningSoftmax(rows, count, source_NS, [out_RHC])
    for piece, bags in Bags.of(tile, count, source_NS):
        weight_X = softmax.weigh(bags, bags.dots(own_RHK[piece.rows]))
        if dropout is not None:
            weight_X *= bags.by_bag(dropout.scale(piece, Direction.IN, heads, weight_X.dtype))
        out_RHC[piece.rows] += bags.weighted(weight_X)[:, :, channels:]
    return out_RHC.view(rows, -1), softmax.finish()


def pull_sources(
    tile: TileEdges, heads: range, dropout: EdgeDropout | None, *, target_NP: Tensor, source_RS: Tensor
) -> Tensor:
    """Backward: sources pull queries, dZ, lse and D over out-edges → dk and dv of every head [R, H·2C]."""
    count = len(heads)
    source_RHK, _ = _by_head(source_RS, count)
    channels = source_RHK.shape[2] // 2
    scale = 1.0 / math.sqrt(channels)
    above = source_RHK.new_zeros(2, len(source_RHK), count, 2 * channels + 2)
    above[0, ..., :channels] = source_RHK[..., :channels] * scale
    above[0, ..., -2] = -1.0  # lse is taken off
    above[1, ..., channels:-2] = source_RHK[..., channels:]
    if dropout is None:
        above[1, ..., -1] = -1.0  # and so is D
    out_RHK = torch.zeros_like(source_RHK, memory_format=torch.contiguous_format)
    for piece, bags in Bags.of(tile, count, target_NP):
        here = piece.rows
        share_X, ds_X = bags.dots(above[0, here]).exp_(), bags.dots(above[1, here])
        kept_X = share_X
        if dropout is not None:
            keep_X = bags.by_bag(dropout.scale(piece, Direction.OUT, heads, share_X.dtype))
            ds_X.mul_(keep_X).sub_(bags.columns(-1)[0])
            kept_X = share_X * keep_X
        ds_X *= share_X
        out_RHK[here, :, :channels] += bags.weighted(ds_X)[:, :, :channels] * scale
        out_RHK[here, :, channels:] += bags.weighted(kept_X)[:, :, channels:-2]
    return out_RHK.view(len(source_RS), -1)


def pull_targets(
    tile: TileEdges,
    heads: range,
    dropout: EdgeDropout | None,
    source_NS: Tensor,
    query_RV: Tensor,
    gradient_RO: Tensor,
    statistics: Tensor | None,
) -> Tensor:
    """Backward: targets pull keys and values again → dq [R, H·C]. ``statistics``: lse and D of every head."""
    assert statistics is not None
    count = len(heads)
    query_RHC, scale = _by_head(query_RV, count)
    channels = query_RHC.shape[2]
    zeros = torch.zeros_like(query_RHC)
    own_RHK = torch.cat((query_RHC * scale, zeros), dim=2)
    above_RHK = torch.cat((zeros, gradient_RO.view_as(query_RHC)), dim=2)
    lse_RH, d_RH = statistics.view(len(statistics), count, 2).unbind(2)
    out_RHC = zeros
    for piece, bags in Bags.of(tile, count, source_NS):
        here = piece.rows
        share_X = bags.dots(own_RHK[here]).sub_(bags.spread(lse_RH[here])).exp_()
        ds_X = bags.dots(above_RHK[here])
        if dropout is not None:
            ds_X *= bags.by_bag(dropout.scale(piece, Direction.IN, heads, share_X.dtype))
        ds_X.sub_(bags.spread(d_RH[here])).mul_(share_X)
        out_RHC[here] += bags.weighted(ds_X)[:, :, :channels] * scale
    return out_RHC.view(len(query_RV), -1)


def scratch_bytes(*, heads: int, channels: int, itemsize: int, dropout: bool) -> tuple[int, int]:
    """Bounds on what one call allocates at a time, results included: for every edge of a piece and every row of the
    tile, and for every row beside that.

    An edge has what ``gat.scratch_bytes`` lists, and its bag's matrix: its neighbour's row, and what is there before
    and after. A row has six matrices of the pulled width at most.
    """
    per_edge = 48 + heads * (5 * itemsize + 60) + (96 + heads * (2 + 2 * itemsize) if dropout else 0)
    per_row = heads * (6 * (2 * channels + 2) * itemsize + 64) + 24
    return per_edge, per_row


def _by_head(rows_RW: Tensor, heads: int) -> tuple[Tensor, float]:
    """Rows head by head, and what scales the scores of such heads."""
    by_head = rows_RW.view(len(rows_RW), heads, -1)
    return by_head, 1.0 / math.sqrt(by_head.shape[2])
