# SPDX-License-Identifier: Apache-2.0
"""PyG's convolutions as values: what each computes, depending on its options.

    GCNConv     A (X Wᵀ) + b                            SGConv    (A^K X) Wᵀ + b
    SAGEConv    (A X) Wlᵀ + b + X Wrᵀ                    TAGConv   Σ_k A^k X W_kᵀ + b
    GINConv     nn(A X + (1 + ε) X)                     GraphConv   (A X) W₁ᵀ + b + X W₂ᵀ
    GINEConv    nn(Σ_j relu(x_j + lin(e_ij)) + (1 + ε) X)
    GENConv     mlp(softmax-weighted Σ_j of relu(x_j + lin(e_ij)) + ε, + X)
    ClusterGCNConv    D⁻¹ (A + I) X Wᵀ + X Vᵀ + b       LEConv            A X W₁ᵀ - D X W₂ᵀ + X W₃ᵀ + b
    GeneralConv       A (X W₁ᵀ + c) + X W₂ᵀ + b         WLConvContinuous  (X + D⁻¹ A X) / 2
    MFConv      A X W_dᵀ + X V_dᵀ + b_d, d the in-degree, or the largest with weights

    AGNNConv, GATConv, GATv2Conv, ResGatedGraphConv, TransformerConv                        see attention.py
    HGTConv, HANConv, RGCNConv, FastRGCNConv, RGATConv     over edges of several types: see relational.py
    ARMAConv, ChebConv, EGConv, HypergraphConv, SSGConv                                     see several_hops.py
    PNAConv                                                                                 see principal.py
    any other, and SAGEConv, GraphConv and GINConv with other aggregations, are opened: they call sums, as APPNP,
    GCN2Conv, GatedGraphConv, LGConv, MixHopConv and SimpleConv do, or else run as they are, as far as they look at
    edges: see lowering/opened.py, propagation.py and opaque.py
    SAGEConv, GraphConv and GINConv with aggr="max"    the largest over in-neighbours in the place of A X

If a model's W is something else, such as a subclass of Linear, it is traced like modules between convolutions. If its
weights must be known, as in attention, the convolution runs as it is; so does one whose own functions are replaced.

A is the sum, the mean or the GCN-normalised sum over in-neighbours, weighted if GCNConv and similar layers are given
edge weights. Without these, PyG's ``improved=True`` changes nothing: the weight of added self-loops is only used beside
other weights. D is the in-degree, or the sum of the edges' weights.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.nn.models.linkx import SparseLinear

from ooc.errors import ModelError
from ooc.kernels.functions import Rectified
from ooc.model.graph import Scaling
from ooc.model.layers import attention, principal, several_hops
from ooc.model.layers.attention import edge_term, linear_weights
from ooc.model.layers.edge_functions import EdgeTerm, FunctionSum
from ooc.model.layers.layer import Call, Graph, NoFormulaError
from ooc.model.layers.relational import lower_han, lower_hgt, lower_rgat, lower_rgcn
from ooc.model.layers.sums import (
    ALL_KNOWN,
    SUMS,
    VARIANCE_PRESERVING,
    aggregated,
    bias_of,
    check_sum,
    gcn_scaling,
    linear_of_rows,
    linear_of_sum,
    softmax_of,
    sum_and_degree,
    sum_of_maps,
    total,
)
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.symbolic import is_linear, replaced_functions
from ooc.model.lowering.values import Value
from ooc.plan.workload import EdgeData


def lower_convolution(
    conv: gnn.MessagePassing,
    where: str,
    args: list[Any],
    kwargs: dict[str, Any],
    assembly: Assembly,
    *,
    trace: Callable[[nn.Module, Value], Value],
    as_it_is: Callable[[str, list[Any], dict[str, Any]], Value],
) -> Any:
    """Return what ``conv`` gives for these arguments, rows or rows by node type; without a formula, the result of
    ``as_it_is``. Raises ModelError for an unsupported option or argument."""
    lower, types = _LOWERINGS.get(type(conv)), assembly.setting.types
    if lower is not None and (replaced := replaced_part(conv)):
        lower, where = None, f"{where}, run as it is because of its {replaced}"
    if type(conv) in _ALL_TYPES_CONVS and (lower is None or types is None):
        raise ModelError(f"{where} is for graphs with types of nodes or edges, and as PyG has it")
    if types is not None and type(conv) in _ANY_AGGREGATION_CONVS and conv.aggr not in ALL_KNOWN:
        lower = None
    if isinstance(conv, SparseLinear):
        raise ModelError(
            f"{where} has a row of weights for every node, which is an embedding: sum one over neighbours by "
            "SimpleConv, and give Trainer(embedding=…)"
        )
    if lower is None:
        return as_it_is(where, args, kwargs)
    arguments = _bind_arguments(conv, args, kwargs)
    if type(conv) in _ALL_TYPES_CONVS:
        return lower(conv, Call(where, arguments, assembly, trace))
    graph = arguments["edge_index"]
    if not isinstance(graph, Graph):
        raise ModelError(f"{where}: edge_index must be the model's own edges")
    if types is not None and graph.relation is None:
        raise ModelError(f"{where} takes edges of one type; of a graph with edge_type it would take all alike")
    if arguments.get("size") is not None:
        raise ModelError(f"{where}: size is not supported")
    if conv.flow == "target_to_source":
        arguments["edge_index"] = replace(graph, flipped=not graph.flipped)
    call = Call(where, arguments, assembly, trace)
    try:
        with assembly.attempt():
            if types is None:
                assembly.convolved.append(call.matrix("x"))
            return lower(conv, call)
    except NoFormulaError:
        return as_it_is(where, args, kwargs)


def _bind_arguments(conv: gnn.MessagePassing, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults. Hyperedges count as edges."""
    bound = inspect.signature(type(conv).forward).bind(conv, *args, **kwargs)
    bound.apply_defaults()
    return {name.removeprefix("hyper") if name == "hyperedge_index" else name: v for name, v in bound.arguments.items()}


def replaced_part(conv: Any) -> str:
    """Return the reason why ``conv`` is not what its class's formula says, or ""."""
    functions = replaced_functions(conv)
    if functions:
        return f"own {functions[0]}"
    if conv.explain:
        return "explain"
    aggregation = _AGGREGATIONS.get(conv.aggr) if isinstance(conv.aggr, str) else None
    if aggregation is not None and (type(conv.aggr_module) is not aggregation or replaced_functions(conv.aggr_module)):
        return f"aggr_module {type(conv.aggr_module).__name__}"
    return ""


def _gcn(conv: Any, call: Call) -> Value:
    scaling = gcn_scaling(conv, call)
    x = call.matrix("x")
    if is_linear(conv.lin) and conv.lin.bias is None:
        product = call.aggregate_product(x, conv.lin.weight, scaling)
    else:
        product = call.aggregate(call.apply(conv.lin, x), scaling)
    return call.assembly.sum([(1.0, product)], bias_of(conv))


def _gen(conv: Any, call: Call) -> Value:
    """Return mlp(out + lin_dst(x_i)), where out is made of relu(lin_src(x_j) + t_ij) + ε."""
    assembly, x, eps = call.assembly, call.matrix("x"), float(conv.eps)
    source = sum_of_maps(call, [conv.lin_src], [x]) if hasattr(conv, "lin_src") else x
    if call.takes("edge_attr", EdgeData.FEATURES):
        out = softmax_of(conv, call, source, _edge_term(call, getattr(conv, "lin_edge", None), source), eps)
    else:
        out = aggregated(call, assembly.rowwise(call.where, lambda rows: rows.relu() + eps, [source]), conv.aggr, conv)
    if hasattr(conv, "lin_aggr_out"):
        out = sum_of_maps(call, [conv.lin_aggr_out], [out])
    if hasattr(conv, "msg_norm"):
        out = assembly.rowwise(call.where, conv.msg_norm, [x, out], tuple(conv.msg_norm.parameters()))
    own = sum_of_maps(call, [conv.lin_dst], [x]) if hasattr(conv, "lin_dst") else x
    return call.apply(conv.mlp, assembly.sum([(1.0, out), (1.0, own)]))


def _sage(conv: Any, call: Call) -> Value:
    assembly = call.assembly
    source, x = call.ends("x")
    if conv.project:
        source = assembly.rectified(sum_of_maps(call, [conv.lin], [source]))
    found = _add_root(conv, call, (source, x), conv.lin_l, conv.lin_r if conv.root_weight else None)
    if conv.normalize:
        found = assembly.rowwise(call.where, lambda rows: F.normalize(rows, p=2.0, dim=-1), [found])
    return found


def _graph(conv: Any, call: Call) -> Value:
    source, x = call.ends("x")
    weighted = call.takes("edge_weight", EdgeData.WEIGHT)
    call.needs(conv.aggr in SUMS or not weighted)
    return _add_root(conv, call, (source, x), conv.lin_rel, conv.lin_root, weighted)


def _add_root(
    conv: Any, call: Call, ends: tuple[Value, Value], linear: Any, root: Any, weighted: bool = False
) -> Value:
    """Return a linear map of the aggregated neighbours, plus one of the row itself if there is a ``root``."""
    source, x = ends
    if conv.aggr not in (*SUMS, "mean"):
        parts = [linear_of_rows(call, linear, aggregated(call, source, conv.aggr, conv))]
    else:
        scaling = Scaling.MEAN if conv.aggr == "mean" else Scaling.WEIGHTED_SUM if weighted else Scaling.SUM
        parts = [linear_of_sum(call, linear, source, scaling)]
    return total(call, parts if root is None else [*parts, linear_of_rows(call, root, x)])


def _gin(conv: Any, call: Call) -> Value:
    source, x = call.ends("x")
    return _gin_update(conv, call, aggregated(call, source, conv.aggr, conv), x)


def _gin_update(conv: Any, call: Call, aggregated: Value, x: Value) -> Value:
    """Return nn(aggregated + (1 + ε) x)."""
    assembly = call.assembly
    eps = conv.eps
    if isinstance(eps, nn.Parameter):
        own = 1.0, assembly.rowwise(call.where, lambda rows: (1 + eps) * rows, [x], (eps,))
    else:
        own = 1.0 + float(eps), x
    return call.apply(conv.nn, assembly.sum([(1.0, aggregated), own]))


def _gine(conv: Any, call: Call) -> Value:
    check_sum(conv, call)
    source, x = call.ends("x")
    if not call.takes("edge_attr", EdgeData.FEATURES):
        raise call.refuse("it is not given the features of edges; let the model's forward take edge_attr")
    term = _edge_term(call, conv.lin, source)
    rectified = partial(FunctionSum, channels=1, functions=lambda groups: Rectified(), term=term)
    return _gin_update(conv, call, call.per_edge(rectified, source), x)


def _edge_term(call: Call, linear: Any, source: Value) -> EdgeTerm:
    """Return what edge features add to rows of ``source``, through ``linear`` if there is one."""
    if linear is None:
        into = call.num_edge_features
        if into != source.columns:
            raise call.refuse(f"nodes have {source.columns} features here, edges {into}; give edge_dim={into}")
        return EdgeTerm(into, 1)
    weights = linear_weights(call, linear)
    call.needs(linear.weight.shape[0] == source.columns)
    return edge_term(call, *weights, columns=1)


def _sg(conv: Any, call: Call) -> Value:
    scaling = gcn_scaling(conv, call)
    if conv.K < 1:
        raise call.refuse(f"K={conv.K} sums over no neighbours, which is not supported; use a linear map")
    if conv.cached and not call.assembly.is_constant(call.matrix("x")):
        raise call.refuse("cached=True keeps the first epoch's aggregation of an input that changes; it is not exact")
    return total(call, [linear_of_sum(call, conv.lin, call.matrix("x"), scaling, hops=conv.K)])


def _tag(conv: Any, call: Call) -> Value:
    """Return Σ_k A^k X W_kᵀ, by powers of A on X, or, if the output is narrower and X changes from epoch to epoch, by
    Horner's rule: X W₀ᵀ + A (X W₁ᵀ + A (…))."""
    assembly = call.assembly
    scaling = gcn_scaling(conv, call)
    x = call.matrix("x")
    biases = bias_of(conv)
    commutes = all(is_linear(lin) and lin.bias is None for lin in conv.lins)
    sums_once = assembly.setting.aggregate_once and assembly.is_constant(x)
    if not commutes or sums_once or x.columns <= conv.out_channels:
        powers = accumulate(range(conv.K), lambda power, _: call.aggregate(power, scaling), initial=x)
        return sum_of_maps(call, conv.lins, powers, biases)
    weights = [lin.weight for lin in conv.lins]
    found = assembly.linear(x, weights[-1])
    for k in range(conv.K - 1, -1, -1):
        terms = [(1.0, assembly.linear(x, weights[k])), (1.0, call.aggregate(found, scaling))]
        found = assembly.sum(terms, biases if k == 0 else ())
    return found if conv.K else assembly.sum([(1.0, found)], biases)


def _wl(conv: Any, call: Call) -> Value:
    call.needs(conv.aggr in SUMS)
    x = call.matrix("x")
    if call.takes("edge_weight", EdgeData.WEIGHT):
        mean = call.assembly.rowwise(call.where, _mean, [sum_and_degree(call, x, weighted=True)])
    else:
        mean = call.aggregate(x, Scaling.MEAN)
    return call.assembly.sum([(0.5, x), (0.5, mean)])


def _mean(total_RC: Tensor) -> Tensor:
    degree_R1 = total_RC[:, -1:]
    return total_RC[:, :-1] * (1.0 / degree_R1).masked_fill(degree_R1 == 0, 0.0)


def _cluster_gcn(conv: Any, call: Call) -> Value:
    call.needs(conv.aggr in SUMS and conv.add_self_loops and not conv.diag_lambda)
    x = call.matrix("x")
    return total(
        call, [linear_of_sum(call, conv.lin_out, x, Scaling.MEAN_OF_ALL), linear_of_rows(call, conv.lin_root, x)]
    )


def _le(conv: Any, call: Call) -> Value:
    call.needs(conv.aggr in SUMS)
    x, weighted = call.matrix("x"), call.takes("edge_weight", EdgeData.WEIGHT)
    of_neighbours, of_own = sum_of_maps(call, [conv.lin1], [x]), sum_of_maps(call, [conv.lin2], [x])
    summed = sum_and_degree(call, of_neighbours, weighted=weighted)

    def difference(total_RC: Tensor, own_RO: Tensor) -> Tensor:
        return total_RC[:, :-1] - total_RC[:, -1:] * own_RO

    found = call.assembly.rowwise(call.where, difference, [summed, of_own])
    return total(call, [(found, []), linear_of_rows(call, conv.lin3, x)])


def _general(conv: Any, call: Call) -> Value:
    call.needs(conv.aggr in SUMS and conv.directed_msg and not conv.attention and conv.in_edge_channels is None)
    source, x = call.ends("x")
    found = call.aggregate(sum_of_maps(call, [conv.lin_msg], [source]), Scaling.SUM)
    if conv.heads > 1:
        found = call.assembly.rowwise(call.where, lambda s: s.view(len(s), conv.heads, -1).mean(dim=1), [found])
    found = call.assembly.sum([(1.0, found), (1.0, call.apply(conv.lin_self, x))])
    if conv.normalize_l2:
        found = call.assembly.rowwise(call.where, lambda rows: F.normalize(rows, p=2.0, dim=-1), [found])
    return found


def _mf(conv: Any, call: Call) -> Value:
    """Lower MFConv, whose weights depend on a row's in-degree."""
    linear = all(map(is_linear, (*conv.lins_l, *conv.lins_r))) and not any(one.bias is not None for one in conv.lins_r)
    call.needs(conv.aggr in SUMS and linear)
    x, pairs = call.matrix("x"), list(zip(conv.lins_l, conv.lins_r, strict=True))

    def mapped(total_RC: Tensor, own_RC: Tensor) -> Tensor:
        degree_R = total_RC[:, -1].detach().clamp(min=0, max=conv.max_degree).round().long()
        order_R, counts = degree_R.argsort(stable=True), degree_R.bincount(minlength=len(pairs)).tolist()
        sorted_RC = (torch.split(rows.index_select(0, order_R), counts) for rows in (total_RC[:, :-1], own_RC))
        parts = zip(pairs, *sorted_RC, strict=True)
        of_sums = ((F.linear(total, of_sum.weight, of_sum.bias), of_own, own) for (of_sum, of_own), total, own in parts)
        found = torch.cat([torch.addmm(of_sum, own, of_own.weight.t()) for of_sum, of_own, own in of_sums])
        return torch.empty_like(found).index_copy(0, order_R, found)

    parameters = [*conv.lins_l.parameters(), *conv.lins_r.parameters()]
    return call.assembly.rowwise(call.where, mapped, [sum_and_degree(call, x), x], parameters, heavy=True)


_AGGREGATIONS: dict[str, type[nn.Module]] = {
    "add": gnn.SumAggregation,
    "sum": gnn.SumAggregation,
    "mean": gnn.MeanAggregation,
    "max": gnn.MaxAggregation,
    "softmax": gnn.SoftmaxAggregation,
    VARIANCE_PRESERVING: gnn.VariancePreservingAggregation,
}
_ALL_TYPES_CONVS = (gnn.HGTConv, gnn.HANConv, gnn.RGCNConv, gnn.FastRGCNConv, gnn.RGATConv)
"""Convolutions that are given edges of all types at once."""
_ANY_AGGREGATION_CONVS = (gnn.SAGEConv, gnn.GraphConv, gnn.GINConv)
_LOWERINGS: dict[type[nn.Module], Callable[[Any, Call], Any]] = {
    gnn.ClusterGCNConv: _cluster_gcn,
    gnn.GCNConv: _gcn,
    gnn.SAGEConv: _sage,
    gnn.GraphConv: _graph,
    gnn.LEConv: _le,
    gnn.GeneralConv: _general,
    gnn.MFConv: _mf,
    gnn.WLConvContinuous: _wl,
    gnn.GENConv: _gen,
    gnn.GINConv: _gin,
    gnn.GINEConv: _gine,
    gnn.ARMAConv: several_hops.lower_arma,
    gnn.ChebConv: several_hops.lower_cheb,
    gnn.EGConv: several_hops.lower_eg,
    gnn.HypergraphConv: several_hops.lower_hypergraph,
    gnn.SSGConv: several_hops.lower_ssg,
    gnn.SGConv: _sg,
    gnn.TAGConv: _tag,
    gnn.AGNNConv: attention.lower_agnn,
    gnn.GATConv: attention.lower_gat,
    gnn.GATv2Conv: attention.lower_gatv2,
    gnn.FAConv: attention.lower_fa,
    gnn.PNAConv: principal.lower_pna,
    gnn.ResGatedGraphConv: attention.lower_res_gated,
    gnn.TransformerConv: attention.lower_transformer,
    gnn.HGTConv: lower_hgt,
    gnn.HANConv: lower_han,
    gnn.RGCNConv: lower_rgcn,
    gnn.FastRGCNConv: lower_rgcn,
    gnn.RGATConv: lower_rgat,
}
