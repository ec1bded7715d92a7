# SPDX-License-Identifier: Apache-2.0
"""Convolutions that weigh edges by the degrees of both ends, as GCN does, and then do more than sum.

FAConv, normalised, has a formula on the CPU (``attention``); this is for the others, and for it elsewhere.

They look at degrees of sources, which in-neighbours do not tell. So there are two layers, both run as they are: one
gives every row its degree, the sum of the weights of its in-edges, and the other is the convolution with
``normalize=False``, which is given the rows with the roots of their degrees, and weights of edges made of these:

    FAConv     tanh(l(x_i) + r(x_j)) of every edge times x_j       PDNConv    weights that a network makes of features
    DNAConv    attention over what the layers before gave a neighbour

Shapes: S nodes, E edges, C columns, K features of edges.
"""

import copy
from typing import Any

from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.utils import add_remaining_self_loops, scatter

from ooc.errors import ModelError
from ooc.model.layers.attention import has_signed_formula, inverse_root, lower_fa
from ooc.model.layers.layer import Call, Graph
from ooc.model.layers.opaque import lower_opaque
from ooc.model.lowering.values import Ones, Value

NORMALIZING: tuple[type[nn.Module], ...] = (gnn.DNAConv, gnn.FAConv, gnn.PDNConv)


def lower_normalizing(conv: Any, where: str, call: Call) -> Value:
    """What ``conv`` gives for the arguments of ``call``."""
    arguments, assembly = call.arguments, call.assembly
    x = arguments["x"]
    if not isinstance(x, Value):
        raise ModelError(f"{where}: x must be one matrix of rows")
    if conv.flow != "source_to_target":
        raise ModelError(f"{where}: flow={conv.flow!r} is not supported")
    if arguments.get("return_attention_weights") is not None:
        raise ModelError(f"{where}: return_attention_weights is not supported: nothing is kept for an edge")
    if isinstance(conv, gnn.FAConv) and conv.normalize and arguments["edge_weight"] is not None:
        raise ModelError(f"{where}: it takes edge_weight with normalize=False only")
    graph, on_cpu = arguments["edge_index"], assembly.setting.on_cpu
    if isinstance(conv, gnn.FAConv) and has_signed_formula(conv) and on_cpu and graph == Graph():
        assembly.convolved.append(x)
        return lower_fa(conv, call)
    known = assembly.setting.traced
    layers = known.setdefault((conv, "normalizing", x.tail), (_Degrees(conv), _ByDegrees(conv, x.tail)))
    for one in (*layers, layers[1].conv):  # their parts are the convolution's own
        one.training = conv.training
    carried: dict[str, Any] = {
        name: arguments[name] for name in ("edge_index", "edge_weight", "edge_attr") if name in arguments
    }
    rows = {"x": x, "x_0": arguments["x_0"]} if "x_0" in arguments else {"x": x}
    if len(x.tail) > 1:
        rows["x"] = assembly.rowwise(where, lambda rows: rows.flatten(1), [x])
    if conv.normalize:
        ones = Ones(assembly.next_index(), x)
        degree = lower_opaque(layers[0], where, [ones], carried, assembly)
        rows["scale"] = assembly.rowwise(where, inverse_root, [degree])
        assembly.convolved.pop()
    result = lower_opaque(layers[1], where, [], rows | carried, assembly)
    assembly.convolved[-1] = rows["x"]
    return result


class _Weighed(nn.Module):
    """With the edges that ``conv`` sums over, and what they weigh before they are normalised."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.flow = conv.flow
        self.mlp = getattr(conv, "mlp", None)
        self.adds_loops = conv.normalize and conv.add_self_loops

    def weighed(
        self, like_SC: Tensor, edge_index: Tensor, edge_weight: Tensor | None, edge_attr: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Edges [2, E] and weights [E]."""
        weight = edge_weight
        if edge_attr is not None:
            weight = edge_attr[:, 0] if self.mlp is None else self.mlp(edge_attr)[:, 0]
        if weight is None:
            weight = like_SC.new_ones(edge_index.shape[1])
        if self.adds_loops:
            edge_index, weight = add_remaining_self_loops(edge_index, weight, 1.0, len(like_SC))
        return edge_index, weight


class _Degrees(_Weighed):
    """Sums of the weights of in-edges [S, 1]."""

    def forward(
        self,
        ones_S1: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        edge_index, weight = self.weighed(ones_S1, edge_index, edge_weight, edge_attr)
        degree: Tensor = scatter(weight[:, None], edge_index[1], dim=0, dim_size=len(ones_S1), reduce="sum")
        return degree


class _ByDegrees(_Weighed):
    """``conv`` of edges that weigh what the ``scale`` of their ends makes of them; ``tail``: of its rows."""

    def __init__(self, conv: Any, tail: tuple[int, ...]) -> None:
        super().__init__(conv)
        self.tail = tail
        self.conv = copy.copy(conv)
        self.conv.normalize = False
        if self.mlp is not None:
            self.conv._modules = {**conv._modules, "mlp": nn.Identity()}

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        x_0: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        edge_index, weight = self.weighed(x, edge_index, edge_weight, edge_attr)
        if scale is not None:
            row, col = edge_index
            weight = scale[row, 0] * weight * scale[col, 0]
        given = {"edge_weight": weight} if self.mlp is None else {"edge_attr": weight[:, None]}
        rows = {"x": x.view(-1, *self.tail)} | ({} if x_0 is None else {"x_0": x_0})
        result: Tensor = self.conv(edge_index=edge_index, **rows, **given)
        return result
