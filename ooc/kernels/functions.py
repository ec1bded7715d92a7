# SPDX-License-Identifier: Apache-2.0
"""The convolutions of PyG that are edge functions: what they compute per edge, in PyG's own order of operators.

Rows of a side are head after head, and within a head in the order named here, so that any group of whole heads is
a slab of columns. What features of edges add comes as a term of as many columns as it is added to, head after head.
All of these are elementwise but for sums over a head, so they give the same bits whatever edges are computed together.

H heads of C channels.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gatv2:
    """GATv2 (Brody et al., "How Attentive are Graph Attention Networks?", ICLR 2022), as ``GATv2Conv``.

    Sources bring ``lin_l(x)``, targets ``lin_r(x)``: C columns a head. ``att_HC`` are the heads' attention vectors,
    rows of the convolution's ``att[0]``; an edge's term is ``lin_edge`` of its features.
    Targets may bring the vectors too, C columns more a head: then every row has a gradient of them of its own, and
    rows can be summed in one order however they were computed.
    """

    att_HC: Tensor
    negative_slope: float

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> tuple[Tensor, Tensor | None]:
        att_HC: Tensor = self.att_HC
        if target_EV.shape[1] != source_EW.shape[1]:
            target_EHC, att_HC = target_EV.view(len(target_EV), len(att_HC), -1).chunk(2, dim=2)
            target_EV = target_EHC.reshape(source_EW.shape)
        hidden_EW = target_EV + source_EW
        if term_ET is not None:
            hidden_EW = hidden_EW + term_ET
        hidden_EHC = F.leaky_relu(hidden_EW, self.negative_slope).view(-1, *self.att_HC.shape)
        return source_EW, (hidden_EHC * att_HC).sum(-1)


@dataclass(frozen=True, slots=True)
class TransformerAttention:
    """Scaled dot products of keys and queries, as ``TransformerConv`` (Shi et al., "Masked Label Prediction", 2020).

    Sources bring key and value, 2 C columns a head; targets the query, C columns a head. An edge's term is ``lin_edge``
    of its features, added to both key and value.
    """

    heads: int

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> tuple[Tensor, Tensor | None]:
        key_EHC, value_EHC = source_EW.view(len(source_EW), self.heads, 2, -1).unbind(2)
        query_EHC = target_EV.view_as(key_EHC)
        if term_ET is not None:
            term_EHC = term_ET.view_as(key_EHC)
            key_EHC, value_EHC = key_EHC + term_EHC, value_EHC + term_EHC
        score_EH = (query_EHC * key_EHC).sum(-1) / math.sqrt(query_EHC.shape[2])
        return value_EHC.reshape(len(source_EW), -1), score_EH


@dataclass(frozen=True, slots=True)
class GatWithFeatures:
    """GAT as ``GATConv`` has it with features of edges: a score is the leaky sum of three scalars, or without of two.

    Sources bring z and a_src, C + 1 columns a head; targets a_dst, one; an edge's term is its share of the score, one.
    """

    heads: int
    negative_slope: float

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> tuple[Tensor, Tensor | None]:
        source_EHC = source_EW.view(len(source_EW), self.heads, -1)
        score_EH = source_EHC[:, :, -1] + target_EV
        if term_ET is not None:
            score_EH = score_EH + term_ET
        return source_EHC[:, :, :-1].reshape(len(source_EW), -1), F.leaky_relu(score_EH, self.negative_slope)


@dataclass(frozen=True, slots=True)
class Gine:
    """relu(x_j + t) with t the edge's features, through ``lin`` if there is one, as ``GINEConv`` (Hu et al., 2020).

    Targets bring nothing: no columns.
    """

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert term_ET is not None
        return torch.relu(source_EW + term_ET), None


@dataclass(frozen=True, slots=True)
class Tempered:
    """Messages and, as their scores, ``temperature`` times these, column by column, as ``SoftmaxAggregation`` has it of
    x_j, and ``GENConv`` of relu(x_j + t) + ε, t a term of the edge (Li et al., "DeeperGCN", 2020).

    Targets bring nothing: no columns.
    """

    temperature: float
    eps: float = 0.0

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> tuple[Tensor, Tensor | None]:
        message_EW = source_EW if term_ET is None else torch.relu(source_EW + term_ET) + self.eps
        return message_EW, message_EW * self.temperature


@dataclass(frozen=True, slots=True)
class Gated:
    """σ(k_i + q_j) ⊙ v_j, as ``ResGatedGraphConv`` (Bresson and Laurent, "Residual Gated Graph ConvNets", 2017).

    Sources bring query and value, 2 C columns a group; targets the key, C columns a group.
    """

    groups: int

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> tuple[Tensor, Tensor | None]:
        query_EGC, value_EGC = source_EW.view(len(source_EW), self.groups, 2, -1).unbind(2)
        message_EGC: Tensor = _gate(target_EV.view_as(query_EGC), query_EGC, value_EGC)
        return message_EGC.reshape(len(source_EW), -1), None


class _Gate(torch.autograd.Function):
    """σ(k + q) ⊙ v. Not by ``torch.sigmoid``, which rounds the last entries of a tensor, those that do not fill a
    register, in another way than the others."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, query: Tensor, value: Tensor) -> Tensor:
        gate = (key + query).neg_().exp_().add_(1.0).reciprocal_()
        ctx.save_for_backward(gate, value)
        return gate * value

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        of_value = above * gate
        of_sum = (1.0 - gate).mul_(of_value).mul_(value)
        return of_sum, of_sum, of_value


_gate: Any = _Gate.apply
