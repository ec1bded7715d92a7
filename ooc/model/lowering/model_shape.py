# SPDX-License-Identifier: Apache-2.0
"""Models described by their shapes alone, for planning without running them.

The values that ``trace`` makes of PyG's GCN, GraphSAGE and GIN are written down here, so planning these needs neither a
trace nor PyG, whose import takes longer than most plans. Tests hold the two equal, value by value.
"""

from collections.abc import Callable
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import nn

from ooc.model.graph import Scaling
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Value


class Shape(NamedTuple):
    """A convolution: the shapes of its ``parameters`` for given columns in and out, in PyG's order, and its ``values``
    for rows and these parameters in place of a forward."""

    parameters: Callable[[int, int], list[tuple[int, ...]]]
    values: Callable[[Assembly, Value, list[nn.Parameter]], Value]


def _gcn(assembly: Assembly, x: Value, parameters: list[nn.Parameter]) -> Value:
    """GCNConv: A (X Wᵀ) + b."""
    bias, weight = parameters
    return assembly.sum([(1.0, assembly.aggregate_product(x, weight, Scaling.GCN))], (bias,))


def _sage(assembly: Assembly, x: Value, parameters: list[nn.Parameter]) -> Value:
    """SAGEConv with means: (A X) Wlᵀ + b + X Wrᵀ."""
    weight_left, bias, weight_right = parameters
    product = assembly.aggregate_product(x, weight_left, Scaling.MEAN)
    return assembly.sum([(1.0, product), (1.0, assembly.linear(x, weight_right))], (bias,))


def _gin(assembly: Assembly, x: Value, parameters: list[nn.Parameter]) -> Value:
    """GINConv: relu((A X + X) W₁ᵀ + b₁) W₂ᵀ + b₂."""
    weight1, bias1, weight2, bias2 = parameters
    total = assembly.sum([(1.0, assembly.aggregate(x, Scaling.SUM)), (1.0, x)])
    hidden = assembly.sum([(1.0, assembly.linear(total, weight1))], (bias1,))
    return assembly.sum([(1.0, assembly.linear(assembly.rectified(hidden), weight2))], (bias2,))


GCN = Shape(lambda columns, out: [(out,), (out, columns)], _gcn)
SAGE = Shape(lambda columns, out: [(out, columns), (out,), (out, columns)], _sage)
GIN = Shape(lambda columns, out: [(out, columns), (out,), (out, out), (out,)], _gin)


class ModelShape(nn.Module):
    """``layers`` convolutions in sequence, with ReLU and dropout ``dropout`` between them: PyG's ``BasicGNN`` without
    norm and jumping knowledge."""

    def __init__(
        self,
        kind: Shape,
        features: int,
        hidden: int,
        outputs: int,
        *,
        layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self._kind, self._dropout = kind, dropout
        columns = pairwise((features, *[hidden] * (layers - 1), outputs))
        self._layers = [
            [nn.Parameter(torch.empty(shape)) for shape in kind.parameters(*of_layer)] for of_layer in columns
        ]
        self.weights = nn.ParameterList(chain(*self._layers))  # so that torch finds them; their content is never read

    def values(self, assembly: Assembly) -> Value:
        """Return the output, in the mode of ``assembly``."""
        x = assembly.features()
        for at, parameters in enumerate(self._layers):
            if at:
                x = assembly.rectified(x)
                x = assembly.dropout(x, self._dropout) if assembly.setting.training else x
            assembly.convolved.append(x)
            x = self._kind.values(assembly, x, parameters)
        return x
