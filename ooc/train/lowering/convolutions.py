# SPDX-License-Identifier: Apache-2.0
"""PyG's convolutions as values: what each computes, by its own options.

    GCNConv     A (X Wᵀ) + b                            APPNP     K times: (1 - α) A X + α X₀
    SAGEConv    (A X) Wlᵀ + b + X Wrᵀ                    SGConv    (A^K X) Wᵀ + b
    GINConv     nn(A X + (1 + ε) X)                     GCN2Conv  (1 - β) U + β U W₁, U = (1 - α) A X + α X₀
    GraphConv   (A X) W₁ᵀ + b + X W₂ᵀ                    TAGConv   Σ_k A^k X W_kᵀ + b
    GINEConv    nn(Σ_j relu(x_j + lin(e_ij)) + (1 + ε) X)

    GATConv, GATv2Conv, TransformerConv     attention: see attention.py
    any other, and those of any other aggregation of SAGEConv, GraphConv and GINConv, run as they are: see general.py
    SAGEConv, GraphConv and GINConv with aggr="max"    the largest over in-neighbours in the place of A X

A is the sum, the mean or the GCN-normalised sum over in-neighbours, weighted where GCNConv and its like are given the
edges' weights. Without these PyG's ``improved=True`` changes nothing: the weight of added self-loops is only used where
there are others.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
)

from ooc.errors import ModelError
from ooc.plan.workload import EdgeData
from ooc.train.graph import Scaling
from ooc.train.lowering.assembly import Assembly
from ooc.train.lowering.attention import edge_term, lower_gat, lower_gatv2, lower_transformer
from ooc.train.lowering.call import Call
from ooc.train.lowering.edge_functions import EdgeTerm
from ooc.train.lowering.general import lower_general
from ooc.train.lowering.values import Value

_SUMS = ("add", "sum")


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
        return lower_general(conv, where, args, kwargs, assembly, is_graph=is_graph)
    bound = inspect.signature(type(conv).forward).bind(conv, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    weighted = arguments.get("edge_weight") is not None
    if type(conv) in _OF_ANY_AGGREGATION and not _is_known(conv.aggr, weighted=weighted):
        return lower_general(conv, where, args, kwargs, assembly, is_graph=is_graph)
    if not is_graph(arguments["edge_index"]):
        raise ModelError(f"{where}: edge_index must be the model's own edges")
    if arguments.get("size") is not None:
        raise ModelError(f"{where}: size is not supported")
    if conv.flow != "source_to_target":
        raise ModelError(f"{where}: flow={conv.flow!r} is not supported")
    call = Call(where, arguments, assembly, apply)
    assembly.convolved.append(call.matrix("x"))
    return lower(conv, call)


def _is_known(aggr: Any, *, weighted: bool) -> bool:
    """Whether there is a formula for an aggregation, of edges with weights or without."""
    return aggr in _SUMS if weighted else aggr in (*_SUMS, "mean", "max")


def _gcn_scaling(conv: Any, call: Call) -> Scaling:
    """GCN's normalisation, as this convolution is told to apply it."""
    _check_sum(conv, call)
    weighted = call.takes("edge_weight", EdgeData.WEIGHT)
    if not getattr(conv, "normalize", True):
        return Scaling.WEIGHTED_SUM if weighted else Scaling.SUM
    if not conv.add_self_loops:
        return Scaling.WEIGHTED_GCN_NO_LOOPS if weighted else Scaling.GCN_NO_LOOPS
    if not weighted:
        return Scaling.GCN
    return Scaling.WEIGHTED_GCN_IMPROVED if getattr(conv, "improved", False) else Scaling.WEIGHTED_GCN


def _check_sum(conv: Any, call: Call) -> None:
    if conv.aggr not in _SUMS:
        raise call.refuse(f"aggr={conv.aggr!r} is not supported; {type(conv).__name__} sums")


def _gcn(conv: Any, call: Call) -> Value:
    scaling = _gcn_scaling(conv, call)
    product = call.assembly.aggregate_product(call.matrix("x"), call.weight(conv.lin), scaling)
    return call.assembly.sum([(1.0, product)], () if conv.bias is None else (conv.bias,))


def _sage(conv: Any, call: Call) -> Value:
    assembly = call.assembly
    scalings = {"mean": Scaling.MEAN, "sum": Scaling.SUM, "add": Scaling.SUM}
    x = source = call.matrix("x")
    if conv.project:
        linear = assembly.linear(x, call.weight(conv.lin))
        source = assembly.rectified(assembly.sum([(1.0, linear)], (conv.lin.bias,)))
    weight = call.weight(conv.lin_l)
    if conv.aggr == "max":
        product = assembly.linear(assembly.maximum(source), weight)
    else:
        product = assembly.aggregate_product(source, weight, scalings[conv.aggr])
    terms = [(1.0, product)]
    if conv.root_weight:
        terms.append((1.0, assembly.linear(x, call.weight(conv.lin_r))))
    bias = conv.lin_l.bias
    total = assembly.sum(terms, () if bias is None else (bias,))
    if conv.normalize:
        total = assembly.rowwise(call.where, lambda rows: F.normalize(rows, p=2.0, dim=-1), [total])
    return total


def _graph(conv: Any, call: Call) -> Value:
    assembly = call.assembly
    x = call.matrix("x")
    weighted = call.takes("edge_weight", EdgeData.WEIGHT)
    weight, bias = call.weight(conv.lin_rel), conv.lin_rel.bias
    if conv.aggr in _SUMS:
        product = assembly.aggregate_product(x, weight, Scaling.WEIGHTED_SUM if weighted else Scaling.SUM)
    elif conv.aggr == "max":
        product = assembly.linear(assembly.maximum(x), weight)
    else:
        product = assembly.aggregate_product(x, weight, Scaling.MEAN)
    root = assembly.linear(x, call.weight(conv.lin_root))
    return assembly.sum([(1.0, product), (1.0, root)], () if bias is None else (bias,))


def _gin(conv: Any, call: Call) -> Value:
    assembly = call.assembly
    x = call.matrix("x")
    if conv.aggr == "max":
        aggregated = assembly.maximum(x)
    elif conv.aggr == "mean":
        aggregated = assembly.aggregate(x, Scaling.MEAN)
    else:
        aggregated = assembly.aggregate(x, Scaling.SUM)
    return _gin_update(conv, call, aggregated, x)


def _gin_update(conv: Any, call: Call, aggregated: Value, x: Value) -> Value:
    """nn(aggregated + (1 + ε) x)."""
    assembly = call.assembly
    if isinstance(conv.eps, nn.Parameter):
        eps = conv.eps
        own = assembly.rowwise(call.where, lambda rows: (1 + eps) * rows, [x], (eps,))
        total = assembly.sum([(1.0, aggregated), (1.0, own)])
    else:
        total = assembly.sum([(1.0, aggregated), (1.0 + float(conv.eps), x)])
    return call.apply(conv.nn, total)


def _gine(conv: Any, call: Call) -> Value:
    assembly = call.assembly
    _check_sum(conv, call)
    x = call.matrix("x")
    if not call.takes("edge_attr", EdgeData.FEATURES):
        raise call.refuse("it is not given the features of edges; let the model's forward take edge_attr")
    if conv.lin is not None:
        weight, bias = call.weight(conv.lin), conv.lin.bias
        term = edge_term(call, lambda: (weight, bias), (weight, bias), columns=1)
    else:
        term = EdgeTerm(assembly.setting.num_edge_features, 1)
    into = x.columns if conv.lin is None else conv.lin.weight.shape[0]
    if term.weights is None and into != term.features:
        raise call.refuse(f"nodes have {into} features here, edges {term.features}; give edge_dim={term.features}")
    if into != x.columns:
        raise call.refuse(f"its edges add {into} columns to {x.columns}")
    return _gin_update(conv, call, assembly.edge_sum(x, term), x)


def _appnp(conv: Any, call: Call) -> Value:
    scaling = _gcn_scaling(conv, call)
    if conv.dropout:
        raise call.refuse(f"dropout={conv.dropout} drops edges, which is not supported")
    start = value = call.matrix("x")
    alpha = float(conv.alpha)
    for _ in range(conv.K):
        terms = [(1.0 - alpha, call.assembly.aggregate(value, scaling)), (alpha, start)]
        value = call.assembly.sum([(factor, term) for factor, term in terms if factor])
    return value


def _sg(conv: Any, call: Call) -> Value:
    scaling = _gcn_scaling(conv, call)
    if conv.cached and not call.assembly.is_constant(call.matrix("x")):
        raise call.refuse("cached=True keeps the first epoch's aggregation of an input that changes; it is not exact")
    product = call.assembly.aggregate_product(call.matrix("x"), call.weight(conv.lin), scaling, hops=conv.K)
    return call.assembly.sum([(1.0, product)], () if conv.lin.bias is None else (conv.lin.bias,))


def _tag(conv: Any, call: Call) -> Value:
    """Σ_k A^k X W_kᵀ, by powers of A on X or, where the output is narrower and X changes from epoch to epoch, by
    Horner's rule: X W₀ᵀ + A (X W₁ᵀ + A (…))."""
    assembly = call.assembly
    _check_sum(conv, call)
    weighted = call.takes("edge_weight", EdgeData.WEIGHT)
    if conv.normalize:
        scaling = Scaling.WEIGHTED_GCN_NO_LOOPS if weighted else Scaling.GCN_NO_LOOPS
    else:
        scaling = Scaling.WEIGHTED_SUM if weighted else Scaling.SUM
    x = call.matrix("x")
    weights = [call.weight(lin) for lin in conv.lins]
    biases = () if conv.bias is None else (conv.bias,)
    if x.columns <= conv.out_channels or (assembly.setting.aggregate_once and assembly.is_constant(x)):
        power, terms = x, [(1.0, assembly.linear(x, weights[0]))]
        for weight in weights[1:]:
            power = assembly.aggregate(power, scaling)
            terms.append((1.0, assembly.linear(power, weight)))
        return assembly.sum(terms, biases)
    total = assembly.linear(x, weights[-1])
    for k in range(conv.K - 1, -1, -1):
        terms = [(1.0, assembly.linear(x, weights[k])), (1.0, assembly.aggregate(total, scaling))]
        total = assembly.sum(terms, biases if k == 0 else ())
    return total if conv.K else assembly.sum([(1.0, total)], biases)


def _gcn2(conv: Any, call: Call) -> Value:
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


_OF_ANY_AGGREGATION = (SAGEConv, GraphConv, GINConv)
_LOWERINGS: dict[type[nn.Module], Callable[[Any, Call], Value]] = {
    GCNConv: _gcn,
    SAGEConv: _sage,
    GraphConv: _graph,
    GINConv: _gin,
    GINEConv: _gine,
    GCN2Conv: _gcn2,
    APPNP: _appnp,
    SGConv: _sg,
    TAGConv: _tag,
    GATConv: lower_gat,
    GATv2Conv: lower_gatv2,
    TransformerConv: lower_transformer,
}
