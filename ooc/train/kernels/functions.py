# SPDX-License-Identifier: Apache-2.0
"""The convolutions of PyG that are edge functions: what they compute per edge, in PyG's own order of operators.

Rows of a side are head after head, and within a head in the order named here, so that any group of whole heads is
a slab of columns. H heads of C channels.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.train.kernels.edge_function import Reduction


@dataclass(frozen=True, slots=True)
class Gatv2:
    """GATv2 (Brody et al., "How Attentive are Graph Attention Networks?", ICLR 2022), as ``GATv2Conv``.

    Sources bring ``lin_l(x)``, targets ``lin_r(x)``: C columns a head. ``att_HC`` are the heads' attention vectors,
    rows of the convolution's ``att[0]``; ``edge_WK`` their rows of ``lin_edge.weight``, where edges have features.
    Targets may bring the vectors too, C columns more a head: then every row has a gradient of them of its own, and
    rows can be summed in one order however they were computed.
    """

    att_HC: Tensor
    negative_slope: float
    edge_WK: Tensor | None = None
    reduction: Reduction = Reduction.SOFTMAX

    @property
    def same_bits(self) -> bool:
        return self.edge_WK is None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.att_HC,) if self.edge_WK is None else (self.att_HC, self.edge_WK)

    def __call__(self, source_EW: Tensor, target_EV: Tensor, edge_EK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        att_HC: Tensor = self.att_HC
        if target_EV.shape[1] != source_EW.shape[1]:
            target_EHC, att_HC = target_EV.view(len(target_EV), len(att_HC), -1).chunk(2, dim=2)
            target_EV = target_EHC.reshape(source_EW.shape)
        hidden_EW = target_EV + source_EW
        if self.edge_WK is not None:
            assert edge_EK is not None
            hidden_EW = hidden_EW + F.linear(edge_EK, self.edge_WK)
        hidden_EHC = F.leaky_relu(hidden_EW, self.negative_slope).view(-1, *self.att_HC.shape)
        return source_EW, (hidden_EHC * att_HC).sum(-1)


@dataclass(frozen=True, slots=True)
class TransformerAttention:
    """Scaled dot products of keys and queries, as ``TransformerConv`` (Shi et al., "Masked Label Prediction", 2020).

    Sources bring key and value, 2 C columns a head; targets the query, C columns a head. ``edge_WK`` are the heads'
    rows of ``lin_edge.weight``, where edges have features.
    """

    heads: int
    edge_WK: Tensor | None = None
    reduction: Reduction = Reduction.SOFTMAX

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return () if self.edge_WK is None else (self.edge_WK,)

    @property
    def same_bits(self) -> bool:
        return self.edge_WK is None

    def __call__(self, source_EW: Tensor, target_EV: Tensor, edge_EK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        key_EHC, value_EHC = source_EW.view(len(source_EW), self.heads, 2, -1).unbind(2)
        query_EHC = target_EV.view_as(key_EHC)
        if self.edge_WK is not None:
            assert edge_EK is not None
            edge_EHC = F.linear(edge_EK, self.edge_WK).view_as(key_EHC)
            key_EHC, value_EHC = key_EHC + edge_EHC, value_EHC + edge_EHC
        score_EH = (query_EHC * key_EHC).sum(-1) / math.sqrt(query_EHC.shape[2])
        return value_EHC.reshape(len(source_EW), -1), score_EH


@dataclass(frozen=True, slots=True)
class Gine:
    """relu(x_j + e) with e the edge's features, through ``lin`` if there is one, as ``GINEConv`` (Hu et al., 2020).

    Targets bring nothing: no columns.
    """

    lin: nn.Linear | None
    reduction: Reduction = Reduction.SUM

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return () if self.lin is None else tuple(self.lin.parameters())

    @property
    def same_bits(self) -> bool:
        return self.lin is None

    def __call__(self, source_EW: Tensor, target_EV: Tensor, edge_EK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert edge_EK is not None
        edge_EW = edge_EK if self.lin is None else self.lin(edge_EK)
        return torch.relu(source_EW + edge_EW), None
