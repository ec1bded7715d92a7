# SPDX-License-Identifier: Apache-2.0
"""PyG's convolutions that are edge functions: what they compute per edge, in PyG's own order of operators.

The rows of each side are stored head after head, and within a head in the order named here, so any group of whole heads
is a slab of columns. A term made of edge features has as many columns as what it is added to, head after head. All
functions are elementwise except for sums over a head, so an edge has the same bits whatever edges are computed with it.
(Torch's operators that multiply and add at once, and sigmoid, are different: they round the last entries of a tensor,
which do not fill a register, in another way.)

H heads of C channels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch.nn.functional as F
from torch import Tensor

Computed = tuple[Tensor, Tensor | None]
"""The messages [E, O] or [E, H, C], and the scores [E, H] if messages are weighted by a softmax."""

EdgeFunction = Callable[[Tensor, Tensor, Tensor | None], Computed]
"""A function of rows of sources [E, W] and targets [E, V], and of terms [E, T]. Edges are independent of one another,
and nothing is random. Autograd differentiates it.

An edge's message must have the same bits however many edges are computed with it. Elementwise operators guarantee that,
dense products do not.
"""


_FILLED = 64
"""Entries that fill registers: at least as many as torch processes at a time, for any type."""


@dataclass(frozen=True, slots=True)
class Gatv2:
    """GATv2 (Brody et al., "How Attentive are Graph Attention Networks?", ICLR 2022), as ``GATv2Conv``.

    Sources bring ``lin_l(x)``, targets ``lin_r(x)``, C columns a head. ``att_HC``: the heads' attention vectors, rows
    of the convolution's ``att[0]``. Targets may bring these, too, C columns after their own in every head, so that
    gradients of the vectors come row by row. An edge's term is ``lin_edge`` of its features.
    """

    att_HC: Tensor
    negative_slope: float

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        target_EHC, att = _by_head(target_EV, len(self.att_HC)), self.att_HC
        if target_EV.shape[1] > source_EW.shape[1]:
            target_EHC, att = target_EHC.chunk(2, dim=2)
        hidden_EHC = target_EHC + _by_head(source_EW, len(self.att_HC))
        if term_ET is not None:
            hidden_EHC = hidden_EHC + term_ET.view_as(hidden_EHC)
        return source_EW, (F.leaky_relu(hidden_EHC, self.negative_slope) * att).sum(-1)


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
            source_EH2C = source_EH2C + _by_head(term_ET, self.heads)[:, :, None]
        key_EHC, value_EHC = source_EH2C.unbind(2)
        score_EH = (target_EV.view_as(key_EHC) * key_EHC).sum(-1)
        return value_EHC, score_EH / math.sqrt(key_EHC.shape[2])


@dataclass(frozen=True, slots=True)
class GatWithFeatures:
    """GAT with features of edges, as ``GATConv`` has it: a score is the leaky sum of three scalars, or of two without
    features.

    Sources bring z and a_src, C + 1 columns a head. Targets bring a_dst, one column, or the one in ``place`` of ``of``.
    An edge's term is its share of the score, one column.
    """

    heads: int
    negative_slope: float
    place: int = 0
    of: int = 1

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        source_EHC = _by_head(source_EW, self.heads)
        sum_EH = target_EV[:, self.place :: self.of] + source_EHC[:, :, -1]
        if term_ET is not None:
            sum_EH = sum_EH + term_ET
        return source_EHC[:, :, :-1], F.leaky_relu(sum_EH, self.negative_slope)


@dataclass(frozen=True, slots=True)
class Rectified:
    """relu(x_j + t) + ε with a term t of the edge. In ``GINEConv`` (Hu et al., 2020), t are the edge's features,
    through ``lin`` if there is one; ``GENConv`` (Li et al., "DeeperGCN", 2020) is alike; without terms it is x_j, as
    for ``SoftmaxAggregation``. For the latter two, ``temperature`` times the messages are their scores, column by
    column.

    Targets bring nothing: no columns.
    """

    temperature: float | None = None
    eps: float = 0.0

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        message_EW = source_EW if term_ET is None else (source_EW + term_ET).relu() + self.eps
        return message_EW, None if self.temperature is None else message_EW * self.temperature


class Activation(Enum):
    """The function applied to each number of a factor, as in torch.nn.functional."""

    IDENTITY, RELU, LEAKY_RELU, ELU, SIGMOID, TANH, SILU, SOFTPLUS = range(8)


@dataclass(frozen=True, slots=True)
class Factor:
    """f(s_j + t_i) with an activation f, whose ``constant`` is the slope below 0 or ELU's α. Sources or targets may
    bring nothing to it."""

    activation: Activation = Activation.IDENTITY
    constant: float = 0.0
    of_source: bool = True
    of_target: bool = True

    def __call__(self, values: Tensor) -> Tensor:
        """Apply the activation to values so that every entry is rounded like those that fill a register."""
        match self.activation:
            case Activation.IDENTITY:
                return values
            case Activation.RELU:
                return values.relu()
            case Activation.LEAKY_RELU:
                return F.leaky_relu(values, self.constant)
            case Activation.ELU:
                activate: Callable[[Tensor], Tensor] = partial(F.elu, alpha=self.constant)
            case _:
                activate = getattr(F, self.activation.name.lower())
        filled = activate(F.pad(values.reshape(-1), (0, -values.numel() % _FILLED)))
        return filled[: values.numel()].view_as(values)


@dataclass(frozen=True, slots=True)
class Product:
    """One factor, or the product of two, column by column: σ(k_i + q_j) ⊙ v_j, as in ``ResGatedGraphConv`` (Bresson and
    Laurent, "Residual Gated Graph ConvNets", 2017) and in messages of users' own layers. A sum without an activation
    may be ``added``, and an activation ``outer`` applied to the whole: relu(γ_i ⊙ x_j + β_i), as in ``FiLMConv``
    (Brockschmidt, "GNN-FiLM", 2020).

    For everything that they have a part in, sources bring C columns a group, in order, and so do targets. An edge's
    term is added to each factor's argument, C columns a group for each; there is none if something is ``added``.
    """

    groups: int
    factors: tuple[Factor, ...]
    added: Factor | None = None
    outer: Factor = Factor()

    @property
    def brought(self) -> tuple[Factor, ...]:
        """The factors, followed by what is added."""
        return self.factors if self.added is None else (*self.factors, self.added)

    @property
    def by_sources(self) -> int:
        """The factors and the added sum that sources have a part in."""
        return sum(factor.of_source for factor in self.brought)

    @property
    def by_targets(self) -> int:
        return sum(factor.of_target for factor in self.brought)

    def __call__(self, source_EW: Tensor, target_EV: Tensor, term_ET: Tensor | None) -> Computed:
        shape = len(source_EW), self.groups
        sources, targets = (
            iter(rows.reshape(*shape, count, -1).unbind(2) if count else ())
            for rows, count in ((source_EW, self.by_sources), (target_EV, self.by_targets))
        )
        terms = None if term_ET is None else term_ET.view(*shape, len(self.factors), -1).unbind(2)
        found: Tensor | None = None
        for number, factor in enumerate(self.brought):
            parts = [next(sources)] if factor.of_source else []
            parts += [] if terms is None else [terms[number]]
            parts = [sum(parts[1:], parts[0])] if parts else []
            if factor.of_target:
                parts.insert(0, next(targets))
            one = factor(sum(parts[1:], parts[0]))
            found = one if found is None else found + one if factor is self.added else found * one
        assert found is not None
        return self.outer(found).flatten(1), None


def gated(groups: int) -> Product:
    """The product of ``ResGatedGraphConv``, to which sources bring query and value, and targets the key."""
    return Product(groups, (Factor(Activation.SIGMOID), Factor(of_target=False)))


def _by_head(matrix_EW: Tensor, heads: int) -> Tensor:
    return matrix_EW.view(len(matrix_EW), heads, -1)
