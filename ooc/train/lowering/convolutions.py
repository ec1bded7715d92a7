# SPDX-License-Identifier: Apache-2.0
"""PyG's convolutions as values: what each computes, by its own options.

    GCNConv     A (X Wᵀ) + b                            APPNP     K times: (1 - α) A X + α X₀
    SAGEConv    (A X) Wlᵀ + b + X Wrᵀ                    SGConv    (A^K X) Wᵀ + b
    GINConv     nn(A X + (1 + ε) X)                     GCN2Conv  (1 - β) U + β U W₁, U = (1 - α) A X + α X₀

A is the sum, the mean or the GCN-normalised sum over in-neighbours. With no weights on the edges PyG's
``improved=True`` changes nothing: the value of added self-loops is only used where there are weights.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import APPNP, GCN2Conv, GCNConv, GINConv, MessagePassing, SAGEConv, SGConv

from ooc.errors import ModelError
from ooc.train.graph import Scaling
from ooc.train.lowering.assembly import Assembly
from ooc.train.lowering.values import Value

_SUMS = ("add", "sum")


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a convolution: its arguments by name, what refusals call it, and how to apply a module to rows."""

    where: str
    arguments: dict[str, Any]
    assembly: Assembly
    apply: Callable[[nn.Module, Value], Value]

    def matrix(self, name: str) -> Value:
        """The argument ``name``, which must be a matrix of rows."""
        value = self.arguments[name]
        if not isinstance(value, Value):
            raise ModelError(f"{self.where}: {name} must be one matrix of rows")
        return value

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}")

    def weight(self, linear: Any) -> nn.Parameter:
        """The weight of a linear layer; one that is computed from others is refused."""
        if not isinstance(linear.weight, nn.Parameter):
            raise self.refuse("a weight that is computed from others is not supported")
        return linear.weight


def lower_convolution(
    conv: MessagePassing,
    where: str,
    args: list[Any],
    kwargs: dict[str, Any],
    assembly: Assembly,
    *,
    is_graph: Callable[[Any], bool],
    apply: Callable[[nn.Module, Value], Value],
) -> Value:
    """What ``conv`` gives for these arguments; ModelError for an option or an argument that is not supported."""
    lower = _LOWERINGS.get(type(conv))
    if lower is None:
        names = ", ".join(kind.__name__ for kind in _LOWERINGS)
        raise ModelError(f"{where} is not supported; supported convolutions are {names}")
    bound = inspect.signature(type(conv).forward).bind(conv, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    if not is_graph(arguments["edge_index"]):
        raise ModelError(f"{where}: edge_index must be the model's own edges")
    for name in ("edge_weight", "edge_attr", "size"):
        if arguments.get(name) is not None:
            raise ModelError(f"{where}: {name} is not supported")
    if conv.flow != "source_to_target":
        raise ModelError(f"{where}: flow={conv.flow!r} is not supported")
    call = _Call(where, arguments, assembly, apply)
    assembly.convolved.append(call.matrix("x"))
    return lower(conv, call)


def _gcn_scaling(conv: Any, call: _Call) -> Scaling:
    """GCN's normalisation, as this convolution is told to apply it."""
    _check_sum(conv, call)
    if not getattr(conv, "normalize", True):
        return Scaling.SUM
    return Scaling.GCN if conv.add_self_loops else Scaling.GCN_NO_LOOPS


def _check_sum(conv: Any, call: _Call) -> None:
    if conv.aggr not in _SUMS:
        raise call.refuse(f"aggr={conv.aggr!r} is not supported; {type(conv).__name__} sums")


def _gcn(conv: Any, call: _Call) -> Value:
    scaling = _gcn_scaling(conv, call)
    product = call.assembly.aggregate_product(call.matrix("x"), call.weight(conv.lin), scaling)
    return call.assembly.sum([(1.0, product)], () if conv.bias is None else (conv.bias,))


def _sage(conv: Any, call: _Call) -> Value:
    assembly = call.assembly
    match conv.aggr:
        case "mean":
            scaling = Scaling.MEAN
        case "sum" | "add":
            scaling = Scaling.SUM
        case other:
            raise call.refuse(f"aggr={other!r} is not supported; use 'mean' or 'sum'")
    x = source = call.matrix("x")
    if conv.project:
        linear = assembly.linear(x, call.weight(conv.lin))
        source = assembly.rowwise(call.where, F.relu, [assembly.sum([(1.0, linear)], (conv.lin.bias,))])
    terms = [(1.0, assembly.aggregate_product(source, call.weight(conv.lin_l), scaling))]
    if conv.root_weight:
        terms.append((1.0, assembly.linear(x, call.weight(conv.lin_r))))
    bias = conv.lin_l.bias
    total = assembly.sum(terms, () if bias is None else (bias,))
    if conv.normalize:
        total = assembly.rowwise(call.where, lambda rows: F.normalize(rows, p=2.0, dim=-1), [total])
    return total


def _gin(conv: Any, call: _Call) -> Value:
    assembly = call.assembly
    x = call.matrix("x")
    _check_sum(conv, call)
    aggregated = assembly.aggregate(x, Scaling.SUM)
    if isinstance(conv.eps, nn.Parameter):
        eps = conv.eps
        own = assembly.rowwise(call.where, lambda rows: (1 + eps) * rows, [x], (eps,))
        total = assembly.sum([(1.0, aggregated), (1.0, own)])
    else:
        total = assembly.sum([(1.0, aggregated), (1.0 + float(conv.eps), x)])
    return call.apply(conv.nn, total)


def _appnp(conv: Any, call: _Call) -> Value:
    scaling = _gcn_scaling(conv, call)
    if conv.dropout:
        raise call.refuse(f"dropout={conv.dropout} drops edges, which is not supported")
    start = value = call.matrix("x")
    alpha = float(conv.alpha)
    for _ in range(conv.K):
        terms = [(1.0 - alpha, call.assembly.aggregate(value, scaling)), (alpha, start)]
        value = call.assembly.sum([(factor, term) for factor, term in terms if factor])
    return value


def _sg(conv: Any, call: _Call) -> Value:
    _check_sum(conv, call)
    if conv.cached and not call.assembly.is_constant(call.matrix("x")):
        raise call.refuse("cached=True keeps the first epoch's aggregation of an input that changes; it is not exact")
    scaling = Scaling.GCN if conv.add_self_loops else Scaling.GCN_NO_LOOPS
    product = call.assembly.aggregate_product(call.matrix("x"), call.weight(conv.lin), scaling, hops=conv.K)
    return call.assembly.sum([(1.0, product)], () if conv.lin.bias is None else (conv.lin.bias,))


def _gcn2(conv: Any, call: _Call) -> Value:
    assembly = call.assembly
    scaling = _gcn_scaling(conv, call)
    alpha, beta = float(conv.alpha), float(conv.beta)
    aggregated = assembly.aggregate(call.matrix("x"), scaling)
    start = call.matrix("x_0")
    weight1, weight2 = conv.weight1, conv.weight2

    def mixed(rows: Tensor, weight: Tensor) -> Tensor:
        return torch.addmm(rows, rows, weight, beta=1.0 - beta, alpha=beta)

    if weight2 is None:
        total = assembly.sum([(1.0 - alpha, aggregated), (alpha, start)])
        return assembly.rowwise(call.where, lambda rows: mixed(rows, weight1), [total], (weight1,), heavy=True)
    own = assembly.sum([(1.0 - alpha, aggregated)])
    first = assembly.rowwise(call.where, lambda rows: mixed(rows, weight1), [own], (weight1,), heavy=True)
    second = assembly.rowwise(call.where, lambda rows: mixed(alpha * rows, weight2), [start], (weight2,), heavy=True)
    return assembly.sum([(1.0, first), (1.0, second)])


_LOWERINGS: dict[type[nn.Module], Callable[[Any, _Call], Value]] = {
    GCNConv: _gcn,
    SAGEConv: _sage,
    GINConv: _gin,
    GCN2Conv: _gcn2,
    APPNP: _appnp,
    SGConv: _sg,
}
