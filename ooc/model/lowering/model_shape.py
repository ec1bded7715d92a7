# SPDX-License-Identifier: Apache-2.0
"""Models by their shapes alone, for whoever plans one and does not run it.

What ``trace`` makes of PyG's GCN, GraphSAGE and GIN is written down here, so that planning them takes neither PyG,
whose import costs more than most plans do, nor a trace. Tests hold the two equal, value by value.
"""

from itertools import pairwise

import torch
from torch import nn

from ooc.model.graph import Scaling
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Value


class Gcn(nn.Module):
    """GCNConv: A (X Wᵀ) + b. As the others, its parameters in PyG's order and, instead of a forward, its values."""

    def __init__(self, in_columns: int, out_columns: int) -> None:
        super().__init__()
        self.bias = _parameter(out_columns)
        self.weight = _parameter(out_columns, in_columns)

    def values(self, x: Value, assembly: Assembly) -> Value:
        return assembly.sum([(1.0, assembly.aggregate_product(x, self.weight, Scaling.GCN))], (self.bias,))


class Sage(nn.Module):
    """SAGEConv with means: (A X) Wlᵀ + b + X Wrᵀ."""

    def __init__(self, in_columns: int, out_columns: int) -> None:
        super().__init__()
        self.weight_left = _parameter(out_columns, in_columns)
        self.bias = _parameter(out_columns)
        self.weight_right = _parameter(out_columns, in_columns)

    def values(self, x: Value, assembly: Assembly) -> Value:
        product = assembly.aggregate_product(x, self.weight_left, Scaling.MEAN)
        return assembly.sum([(1.0, product), (1.0, assembly.linear(x, self.weight_right))], (self.bias,))


class Gin(nn.Module):
    """GINConv: relu((A X + X) W₁ᵀ + b₁) W₂ᵀ + b₂."""

    def __init__(self, in_columns: int, out_columns: int) -> None:
        super().__init__()
        self.weight1 = _parameter(out_columns, in_columns)
        self.bias1 = _parameter(out_columns)
        self.weight2 = _parameter(out_columns, out_columns)
        self.bias2 = _parameter(out_columns)

    def values(self, x: Value, assembly: Assembly) -> Value:
        total = assembly.sum([(1.0, assembly.aggregate(x, Scaling.SUM)), (1.0, x)])
        hidden = assembly.sum([(1.0, assembly.linear(total, self.weight1))], (self.bias1,))
        return assembly.sum([(1.0, assembly.linear(assembly.rectified(hidden), self.weight2))], (self.bias2,))


class ModelShape(nn.Module):
    """``layers`` convolutions one behind the other, ReLU and dropout ``dropout`` between them: PyG's ``BasicGNN``
    without norm and jumping knowledge."""

    def __init__(
        self,
        kind: type[Gcn | Sage | Gin],
        features: int,
        hidden: int,
        outputs: int,
        *,
        layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self._dropout = dropout
        self._layers = [kind(*columns) for columns in pairwise((features, *[hidden] * (layers - 1), outputs))]
        self.convolutions = nn.ModuleList(self._layers)  # by which torch finds their parameters

    def values(self, assembly: Assembly) -> Value:
        """The output, in the mode that ``assembly`` is for."""
        x = assembly.features()
        for at, convolution in enumerate(self._layers):
            if at:
                x = assembly.rectified(x)
                x = assembly.dropout(x, self._dropout) if assembly.setting.training else x
            assembly.convolved.append(x)
            x = convolution.values(x, assembly)
        return x


def _parameter(*shape: int) -> nn.Parameter:
    """Of this shape; nobody asks what is in it."""
    return nn.Parameter(torch.empty(shape))
