# SPDX-License-Identifier: Apache-2.0
"""The convolutions of PyG that are edge functions: what they compute per edge, in PyG's own order of operators.

Rows of a side are head after head, and within a head in the order named here, so that any group of whole heads is
a slab of columns. What features of edges add comes as a term of as many columns as it is added to, head after head.
All of these are elementwise but for sums over a head, so they give the same bits whatever edges are computed together.
(Not those of torch that multiply and add at once, or sigmoid: the last entries of a tensor, which do not fill a
register, they round in another way.)
Each is differentiated by hand, in few passes over what it has of an edge: with autograd GATv2's gradients took twice
the time. What they are given of an edge they may write over.

H heads of C channels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class EdgeGradients(NamedTuple):
    """Of what edges were computed from: rows of sources, of targets (None: they bring none) and terms, which may be one
    and the same; and of parameters, by edge [E, V]."""

    source_EW: Tensor
    target_EV: Tensor | None = None
    term_ET: Tensor | None = None
    parameters_EV: Tensor | None = None


Computed = tuple[Tensor, Tensor | None, Callable[[Tensor, Tensor], EdgeGradients]]
"""Messages [E, O] or [E, H, C], scores [E, H] where messages are weighted by a softmax, and what takes the gradients of
both back, writing over them; it is called once at most."""

EdgeFunction = Callable[[Tensor, Tensor, Tensor | None], Computed]
"""Of rows of sources [E, W] and targets [E, V], which it may write over, and terms [E, T]: rows independent of one
another, nothing drawn at random. What differentiates them holds of edges nothing beside these two matrices: their
memory alone is counted where it is retained.

An edge's message has the same bits however many edges are computed with it, which elementwise operators promise and
dense products do not."""


_FILLED = 64
"""Entries that fill registers: as many or more as torch takes at a time of any type."""


@dataclass(frozen=True, slots=True)
class Gatv2:
    """GATv2 (Brody et al., "How Attentive are Graph Attention Networks?", ICLR 2022), as ``GATv2Conv``.

    Sources bring ``lin_l(x)``, targets ``lin_r(x)``: C columns a head. ``att_HC`` are the heads' attention vectors,
    rows of the convolution's ``att[0]``; an edge's term is ``lin_edge`` of its features. Every edge has a gradient of
    the vectors, so that rows can be summed in one order however they were computed.
    """

    att_HC: Tensor
    negative_slope: float

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        hidden_EW = target_EV.add_(source_EW)
        if term_ET is not None:
            hidden_EW.add_(term_ET)
        # What comes out tells the sign of what went in, but for slopes below 0.
        tells = self.negative_slope >= 0
        scored_EHC = _by_head(F.leaky_relu(hidden_EW, self.negative_slope, inplace=tells), len(self.att_HC))
        score_EH = (scored_EHC * self.att_HC).sum(-1)

        def backward(d_message_EO: Tensor, d_score_EH: Tensor) -> EdgeGradients:
            leaky_EW = hidden_EW if tells else F.leaky_relu(hidden_EW, self.negative_slope)
            d_score_EH1 = d_score_EH[:, :, None]
            d_hidden_EW = (d_score_EH1 * self.att_HC).view_as(hidden_EW)
            _through_leaky(d_hidden_EW, hidden_EW, self.negative_slope)
            _by_head(leaky_EW, len(self.att_HC)).mul_(d_score_EH1)
            return EdgeGradients(d_message_EO.add_(d_hidden_EW), d_hidden_EW, d_hidden_EW, leaky_EW)

        return source_EW, score_EH, backward


@dataclass(frozen=True, slots=True)
class TransformerAttention:
    """Scaled dot products of keys and queries, as ``TransformerConv`` (Shi et al., "Masked Label Prediction", 2020).

    Sources bring key and value, 2 C columns a head; targets the query, C columns a head. An edge's term is ``lin_edge``
    of its features, added to both key and value.
    """

    heads: int

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        source_EH2C = source_EW.view(len(source_EW), self.heads, 2, -1)
        if term_ET is not None:
            source_EH2C.add_(_by_head(term_ET, self.heads)[:, :, None])
        key_EHC, value_EHC = source_EH2C.unbind(2)
        query_EHC = target_EV.view_as(key_EHC)
        root = math.sqrt(query_EHC.shape[2])

        def backward(d_message_EO: Tensor, d_score_EH: Tensor) -> EdgeGradients:
            d_score_EH1, d_value_EHC = (d_score_EH / root)[:, :, None], d_message_EO.view_as(key_EHC)
            d_key_EHC, d_query_EHC = query_EHC * d_score_EH1, key_EHC * d_score_EH1
            d_source_EW = torch.stack((d_key_EHC, d_value_EHC), dim=2).flatten(1)
            return EdgeGradients(d_source_EW, d_query_EHC.flatten(1), d_key_EHC.add_(d_value_EHC).flatten(1))

        return value_EHC, (query_EHC * key_EHC).sum(-1).div_(root), backward


@dataclass(frozen=True, slots=True)
class GatWithFeatures:
    """GAT as ``GATConv`` has it with features of edges: a score is the leaky sum of three scalars, or without of two.

    Sources bring z and a_src, C + 1 columns a head; targets a_dst, one, or the one in ``place`` of ``of`` in all; an
    edge's term is its share of the score, one.
    """

    heads: int
    negative_slope: float
    place: int = 0
    of: int = 1

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        source_EHC = _by_head(source_EW, self.heads)
        sum_EH = target_EV[:, self.place :: self.of].add_(source_EHC[:, :, -1])
        if term_ET is not None:
            sum_EH.add_(term_ET)

        def backward(d_message_EO: Tensor, d_score_EH: Tensor) -> EdgeGradients:
            _through_leaky(d_score_EH, sum_EH, self.negative_slope, of_result=False)
            d_source_EHC = torch.cat((_by_head(d_message_EO, self.heads), d_score_EH[:, :, None]), dim=2)
            d_target_EV = d_score_EH
            if self.of > 1:
                d_target_EV = torch.zeros_like(target_EV)
                d_target_EV[:, self.place :: self.of] = d_score_EH
            return EdgeGradients(d_source_EHC.flatten(1), d_target_EV, d_score_EH)

        return source_EHC[:, :, :-1], F.leaky_relu(sum_EH, self.negative_slope), backward


@dataclass(frozen=True, slots=True)
class Rectified:
    """relu(x_j + t) + ε with t a term of the edge, as ``GINEConv`` (Hu et al., 2020), whose t are the edge's features,
    through ``lin`` if there is one, and ``GENConv`` (Li et al., "DeeperGCN", 2020); without terms x_j, as
    ``SoftmaxAggregation``. For the latter two ``temperature`` times these are their scores, column by column.

    Targets bring nothing: no columns.
    """

    temperature: float | None = None
    eps: float = 0.0

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        rectifies = term_ET is not None  # backward holds this alone, not the terms
        rectified_EW = source_EW if term_ET is None else source_EW.add_(term_ET).relu_()
        message_EW = rectified_EW + self.eps if self.eps and rectifies else rectified_EW

        def backward(d_message_EW: Tensor, d_score_EW: Tensor) -> EdgeGradients:
            if self.temperature is not None:
                d_message_EW.add_(d_score_EW.mul_(self.temperature))
            if rectifies:
                _through_leaky(d_message_EW, rectified_EW, 0.0)
            return EdgeGradients(d_message_EW, term_ET=d_message_EW)

        return message_EW, None if self.temperature is None else message_EW * self.temperature, backward


@dataclass(frozen=True, slots=True)
class Gated:
    """σ(k_i + q_j) ⊙ v_j, as ``ResGatedGraphConv`` (Bresson and Laurent, "Residual Gated Graph ConvNets", 2017).

    Sources bring query and value, 2 C columns a group; targets the key, C columns a group. An edge's term is added to
    query and value.
    """

    groups: int

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        if term_ET is not None:
            source_EW.add_(term_ET)
        query_EGC, value_EGC = source_EW.view(len(source_EW), self.groups, 2, -1).unbind(2)
        gate_EGC = target_EV.contiguous().view_as(query_EGC).add_(query_EGC)
        _logistic(gate_EGC)

        def backward(d_message_EO: Tensor, d_score_EH: Tensor) -> EdgeGradients:
            d_value_EGC = d_message_EO.view_as(gate_EGC).mul_(gate_EGC)
            d_sum_EGC = (d_value_EGC * value_EGC).mul_(gate_EGC.neg_().add_(1.0))
            d_source_EW = torch.stack((d_sum_EGC, d_value_EGC), dim=2).flatten(1)
            return EdgeGradients(d_source_EW, d_sum_EGC.flatten(1), d_source_EW)

        return (gate_EGC * value_EGC).flatten(1), None, backward


def _by_head(matrix_EW: Tensor, heads: int) -> Tensor:
    return matrix_EW.view(len(matrix_EW), heads, -1)


def _logistic(values: Tensor) -> None:
    """σ, written over ``values``, so that every entry is rounded as those are that fill a register."""
    flat = values.view(-1)
    whole = len(flat) - len(flat) % _FILLED
    flat[:whole].sigmoid_()
    if whole < len(flat):
        flat[whole:] = F.pad(flat[whole:], (0, _FILLED + whole - len(flat))).sigmoid_()[: len(flat) - whole]


def _through_leaky(gradient: Tensor, known: Tensor, slope: float, *, of_result: bool = True) -> None:
    """Take ``gradient``, written over, through a leaky relu, of which what came out or, where that does not tell its
    sign, went in is ``known``."""
    of_result = of_result and slope >= 0
    torch.ops.aten.leaky_relu_backward.grad_input(gradient, known, slope, of_result, grad_input=gradient)
