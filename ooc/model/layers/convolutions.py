# SPDX-License-Identifier: Apache-2.0
"""PyG's convolutions as values: what each computes, by its own options.

    GCNConv     A (X Wᵀ) + b                            SGConv    (A^K X) Wᵀ + b
    SAGEConv    (A X) Wlᵀ + b + X Wrᵀ                    TAGConv   Σ_k A^k X W_kᵀ + b
    GINConv     nn(A X + (1 + ε) X)                     GraphConv   (A X) W₁ᵀ + b + X W₂ᵀ
    GINEConv    nn(Σ_j relu(x_j + lin(e_ij)) + (1 + ε) X)
    GENConv     mlp(softmax-weighted Σ_j of relu(x_j + lin(e_ij)) + ε, + X)

    AGNNConv, GATConv, GATv2Conv, ResGatedGraphConv, TransformerConv                        see attention.py
    HGTConv, HANConv, RGCNConv, FastRGCNConv, RGATConv     over edges of several types: see relational.py
    ARMAConv, ChebConv, EGConv, HypergraphConv, SSGConv                                     see several_hops.py
    ClusterGCNConv, GeneralConv, LEConv, MFConv, WLConvContinuous                           see simple_sums.py
    PNAConv                                 see principal.py
    any other, and those of any other aggregation of SAGEConv, GraphConv and GINConv, are opened: they call sums, as
    APPNP, GCN2Conv, GatedGraphConv, LGConv, MixHopConv and SimpleConv do, or else run as they are, as far as they look
    at edges: see lowering/opened.py, propagation.py and opaque.py
    SAGEConv, GraphConv and GINConv with aggr="max"    the largest over in-neighbours in the place of A X

A W that is something else in a model, a subclass of Linear for one, is traced as modules between convolutions are.
Where its weights have to be known, as in attention, the convolution runs as it is; so it does where its own functions
are replaced.

A is the sum, the mean or the GCN-normalised sum over in-neighbours, weighted where GCNConv and its like are given the
edges' weights. Without these PyG's ``improved=True`` changes nothing: the weight of added self-loops is only used where
there are others.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as gnn
from torch_geometric.nn.aggr import (
    MaxAggregation,
    MeanAggregation,
    SoftmaxAggregation,
    SumAggregation,
    VariancePreservingAggregation,
)
from torch_geometric.nn.models.linkx import SparseLinear

from ooc.errors import ModelError
from ooc.kernels.functions import Rectified
from ooc.model.graph import Scaling
from ooc.model.layers import attention, principal, several_hops, simple_sums
from ooc.model.layers.attention import edge_term, of_linear
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
    sum_of_maps,
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
    """What ``conv`` gives for these arguments, rows or rows by type of nodes, without a formula what ``as_it_is`` makes
    of them; ModelError for an option or an argument that is not supported."""
    lower, types = _LOWERINGS.get(type(conv)), assembly.setting.types
    if lower is not None and (replaced := replaced_part(conv)):
        lower, where = None, f"{where}, run as it is because of its {replaced}"
    if type(conv) in _OF_ALL_TYPES and (lower is None or types is None):
        raise ModelError(f"{where} is for graphs with types of nodes or edges, and as PyG has it")
    if types is not None and not _takes_relations(conv):
        lower = None
    if isinstance(conv, SparseLinear):
        raise ModelError(
            f"{where} has a row of weights for every node, which is an embedding: sum one over neighbours by "
            "SimpleConv, and give Trainer(embedding=…)"
        )
    if lower is None:
        return as_it_is(where, args, kwargs)
    arguments = _bound(conv, args, kwargs)
    if type(conv) in _OF_ALL_TYPES:
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


def _bound(conv: gnn.MessagePassing, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, with those that are left out. Hyperedges are edges."""
    bound = inspect.signature(type(conv).forward).bind(conv, *args, **kwargs)
    bound.apply_defaults()
    return {name.removeprefix("hyper") if name == "hyperedge_index" else name: v for name, v in bound.arguments.items()}


def _takes_relations(conv: gnn.MessagePassing) -> bool:
    """Whether it can be run over the edges of one type, or of all."""
    return type(conv) not in _OF_ANY_AGGREGATION or conv.aggr in ALL_KNOWN


def replaced_part(conv: Any) -> str:
    """What keeps ``conv`` from being what its class's formula says; empty where nothing does."""
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
    """mlp(out + lin_dst(x_i)), out being made of relu(lin_src(x_j) + t_ij) + ε."""
    assembly, x, eps = call.assembly, call.matrix("x"), float(conv.eps)
    source = sum_of_maps(call, [conv.lin_src], [x]) if hasattr(conv, "lin_src") else x
    if call.takes("edge_attr", EdgeData.FEATURES):
        out = softmax_of(conv, call, source, _term(call, getattr(conv, "lin_edge", None), source), eps)
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
    total = _with_root(call, conv, (conv.lin_l, source), (conv.lin_r, x) if conv.root_weight else None)
    if conv.normalize:
        total = assembly.rowwise(call.where, lambda rows: F.normalize(rows, p=2.0, dim=-1), [total])
    return total


def _graph(conv: Any, call: Call) -> Value:
    source, x = call.ends("x")
    weighted = call.takes("edge_weight", EdgeData.WEIGHT)
    call.needs(conv.aggr in SUMS or not weighted)
    return _with_root(call, conv, (conv.lin_rel, source), (conv.lin_root, x), weighted=weighted)


def _with_root(
    call: Call,
    conv: Any,
    neighbours: tuple[Any, Value],
    root: tuple[Any, Value] | None,
    *,
    weighted: bool = False,
) -> Value:
    """A linear map of the neighbours' rows, aggregated, and one of a row itself, added up."""
    linear, source = neighbours
    if conv.aggr not in (*SUMS, "mean"):
        product, biases = linear_of_rows(call, linear, aggregated(call, source, conv.aggr, conv))
    else:
        scaling = Scaling.MEAN if conv.aggr == "mean" else Scaling.WEIGHTED_SUM if weighted else Scaling.SUM
        product, biases = linear_of_sum(call, linear, source, scaling)
    terms = [(1.0, product)]
    if root is not None:
        own, of_root = linear_of_rows(call, *root)
        terms.append((1.0, own))
        biases = biases + of_root
    return call.assembly.sum(terms, biases)


def _gin(conv: Any, call: Call) -> Value:
    source, x = call.ends("x")
    return _gin_update(conv, call, aggregated(call, source, conv.aggr, conv), x)


def _gin_update(conv: Any, call: Call, aggregated: Value, x: Value) -> Value:
    """nn(aggregated + (1 + ε) x)."""
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
    term = _term(call, conv.lin, source)
    rectified = partial(FunctionSum, channels=1, functions=lambda groups: Rectified(), term=term)
    return _gin_update(conv, call, call.per_edge(rectified, source, trains=term.trains), x)


def _term(call: Call, linear: Any, source: Value) -> EdgeTerm:
    """What the features of edges add to rows of ``source``, through ``linear`` if there is one."""
    if linear is None:
        term, into = EdgeTerm(call.num_edge_features, 1), call.num_edge_features
    else:
        term, into = edge_term(call, *of_linear(call, linear), columns=1), linear.weight.shape[0]
    if into != source.columns and linear is None:
        raise call.refuse(f"nodes have {source.columns} features here, edges {into}; give edge_dim={into}")
    if into != source.columns:
        raise call.refuse(f"its edges add {into} columns to {source.columns}")
    return term


def _sg(conv: Any, call: Call) -> Value:
    scaling = gcn_scaling(conv, call)
    if conv.K < 1:
        raise call.refuse(f"K={conv.K} sums over no neighbours, which is not supported; use a linear map")
    if conv.cached and not call.assembly.is_constant(call.matrix("x")):
        raise call.refuse("cached=True keeps the first epoch's aggregation of an input that changes; it is not exact")
    product, biases = linear_of_sum(call, conv.lin, call.matrix("x"), scaling, hops=conv.K)
    return call.assembly.sum([(1.0, product)], biases)


def _tag(conv: Any, call: Call) -> Value:
    """Σ_k A^k X W_kᵀ, by powers of A on X or, where the output is narrower and X changes from epoch to epoch, by
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
    total = assembly.linear(x, weights[-1])
    for k in range(conv.K - 1, -1, -1):
        terms = [(1.0, assembly.linear(x, weights[k])), (1.0, call.aggregate(total, scaling))]
        total = assembly.sum(terms, biases if k == 0 else ())
    return total if conv.K else assembly.sum([(1.0, total)], biases)


_AGGREGATIONS: dict[str, type[nn.Module]] = {
    "add": SumAggregation,
    "sum": SumAggregation,
    "mean": MeanAggregation,
    "max": MaxAggregation,
    "softmax": SoftmaxAggregation,
    VARIANCE_PRESERVING: VariancePreservingAggregation,
}
_OF_ALL_TYPES = (gnn.HGTConv, gnn.HANConv, gnn.RGCNConv, gnn.FastRGCNConv, gnn.RGATConv)
"""Those that are given edges of all types at once."""
_OF_ANY_AGGREGATION = (gnn.SAGEConv, gnn.GraphConv, gnn.GINConv)
_LOWERINGS: dict[type[nn.Module], Callable[[Any, Call], Any]] = {
    gnn.ClusterGCNConv: simple_sums.lower_cluster_gcn,
    gnn.GCNConv: _gcn,
    gnn.SAGEConv: _sage,
    gnn.GraphConv: _graph,
    gnn.LEConv: simple_sums.lower_le,
    gnn.GeneralConv: simple_sums.lower_general,
    gnn.MFConv: simple_sums.lower_mf,
    gnn.WLConvContinuous: simple_sums.lower_wl,
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
