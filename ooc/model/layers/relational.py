# SPDX-License-Identifier: Apache-2.0
"""PyG's layers that take edges of all types at once, as values.

    HGTConv     every head attends to the edges of all types into a node together
    HANConv     GAT's attention over each type of edges; then Σ_r β_r relu(Z_r), β = softmax of q · mean tanh(k_lin(…))
    RGCNConv    Σ_r (A_r X) W_r + X W + b, as FastRGCNConv
    RGATConv    GAT's attention with a map W_r for each type of edges, over all edges together or over each type's

HGTConv's key, value and query are linear in x, with its matrices by edge type multiplied in: an edge's source has a
product of its own for each type. A softmax over edges of all types continues from type to type, joined with the result
so far by the logarithms of the sums of exponentials (``FunctionAttention``).

Shapes: R rows, H heads of C channels, I columns of x.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ooc.kernels.functions import EdgeFunction, GatWithFeatures
from ooc.model.graph import RelationScaling, Scaling
from ooc.model.layers.attention import attend_in_slices, join_heads, map_with_scores, slice_heads
from ooc.model.layers.edge_functions import FunctionAttention, dot_product_attention
from ooc.model.layers.layer import Call, EdgeKinds, Graph
from ooc.model.layers.per_edge import AttentionOptions, Maximum
from ooc.model.layers.sums import ALL_KNOWN, SUMS, bias_of, check_sum, sum_of_maps
from ooc.model.lowering.projection import Weights
from ooc.model.lowering.symbolic import is_linear
from ooc.model.lowering.values import Value
from ooc.storage.types import EdgeType

ByType = dict[str, Value | None]
"""Rows by node type; None for types without in-edges."""
_METADATA_ADVICE = "; make it with that of the graph, data.metadata()"


def lower_hgt(conv: Any, call: Call) -> ByType:
    """Lower HGTConv."""
    check_sum(conv, call)
    rows, graphs = _rows_by_type(call), _edges_by_type(call)
    _check_linears(call, {"kqv_lin": conv.kqv_lin.lins, "out_lin": conv.out_lin.lins}, rows)
    numbers = [conv.edge_types_map.get(tuple(relation)) for relation in graphs]
    if None in numbers or numbers != sorted(numbers, key=lambda number: number or 0):
        raise call.refuse(
            f"its metadata has other types of edges, or in another order, than the graph{_METADATA_ADVICE}"
        )
    heads, width = conv.heads, conv.out_channels
    options = AttentionOptions(heads, width // heads)

    def query(lin: Any) -> Weights:
        return lambda: (lin.weight[width : 2 * width], lin.bias[width : 2 * width])

    def sources(lin: Any, number: int, p_rel: nn.Parameter) -> Weights:
        """Return key and value of every head [H · 2C, I]."""

        def mapped(part: Tensor) -> Tensor:
            key, _, value = part.view(3, heads, width // heads, *part.shape[1:])
            of_relation = slice(number, None, len(conv.edge_types))
            key = torch.einsum("hde,hd...->he...", conv.k_rel.weight[of_relation] * p_rel[0, :, None, None], key)
            value = torch.einsum("hde,hd...->he...", conv.v_rel.weight[of_relation], value)
            return torch.stack((key, value), dim=1).flatten(0, 2)

        return lambda: (mapped(lin.weight), mapped(lin.bias))

    found: ByType = {}
    for target in (name for name in rows if name in conv.dst_node_types):
        into = {one: graph for one, graph in graphs.items() if one.target == target}
        if not into:
            raise call.refuse(f"no edges lead to {target!r}, which its metadata has{_METADATA_ADVICE}")
        lin = conv.kqv_lin.lins[target]
        queries = call.assembly.projection(rows[target], query(lin), (lin.weight, lin.bias))
        attended: list[Value] = []
        for relation, graph in into.items():
            lin, p_rel = conv.kqv_lin.lins[relation.source], conv.p_rel[relation.folder]
            weights = sources(lin, conv.edge_types_map[tuple(relation)], p_rel)
            parameters = lin.weight, lin.bias, conv.k_rel.weight, conv.v_rel.weight, p_rel
            keys = call.assembly.projection(rows[relation.source], weights, parameters)
            joint = relation != [*into][-1]
            attention = partial(dot_product_attention, options=options, joint=joint)
            attended = [call.over(graph).per_edge(attention, keys, queries, *attended)]
        own = call.assembly.rowwise(call.where, nn.functional.gelu, attended)
        out = sum_of_maps(call, [conv.out_lin.lins[target]], [own])
        found[target] = _mix_skip(call, out, rows[target], conv.skip[target])
    return found


def _mix_skip(call: Call, out: Value, x: Value, skip: nn.Parameter) -> Value:
    """Return the layer's rows mixed with its input's by a learnt share, if they are as wide."""
    if out.columns != x.columns:
        return out

    def function(out: Tensor, x: Tensor) -> Tensor:
        alpha = skip.sigmoid()
        return alpha * out + (1 - alpha) * x

    return call.assembly.rowwise(call.where, function, [out, x], (skip,))


def lower_han(conv: Any, call: Call) -> ByType:
    """Lower HANConv."""
    check_sum(conv, call)
    rows, graphs, assembly = _rows_by_type(call), _edges_by_type(call), call.assembly
    _check_linears(call, {"proj": conv.proj}, rows)
    if not is_linear(conv.k_lin):
        raise call.refuse("k_lin is not supported as another module than a linear map")
    channels = conv.out_channels // conv.heads
    found: dict[str, list[Value]] = {name: [] for name in rows}
    for relation, graph in graphs.items():
        x_source, x_target, folder = rows[relation.source], rows[relation.target], relation.folder
        p = float(conv.dropout) if conv.training else 0.0
        options = AttentionOptions(conv.heads, channels, p=p, site=assembly.site(p))
        cut = slice_heads(call, x_source, options)
        source = map_with_scores(call, x_source, conv.proj[relation.source], conv.lin_src[folder], cut)
        target = map_with_scores(call, x_target, conv.proj[relation.target], conv.lin_dst[folder], cut, alone=True)
        slope = float(conv.negative_slope)
        attended = attend_in_slices(call.over(graph), source, target, cut, channels, slope)
        found[relation.target].append(assembly.rectified(attended))
    return {name: _semantic_attention(conv, call, parts) if parts else None for name, parts in found.items()}


def _semantic_attention(conv: Any, call: Call, parts: list[Value]) -> Value:
    """Return the rows over each edge type, combined with weights that depend on their averages over all rows."""
    assembly, q, count = call.assembly, conv.q, len(parts)
    moments = []
    for part in parts:
        hidden = sum_of_maps(call, [conv.k_lin], [part])
        moments.append(assembly.moments(assembly.sigmoidal(hidden)))

    def function(*given: Tensor) -> Tensor:
        share_P = torch.stack([(q * mean_C).sum() for mean_C in given[count::2]]).softmax(dim=0)
        total = share_P[0] * given[0]
        for share, rows_RC in zip(share_P[1:], given[1:count], strict=True):
            total = total + share * rows_RC
        return total

    return assembly.rowwise(call.where, function, parts, (q,), moments=moments)


def lower_rgcn(conv: Any, call: Call) -> Value:
    """Lower RGCNConv and FastRGCNConv."""
    assembly, x = call.assembly, call.matrix("x")
    if conv.aggr not in ALL_KNOWN:
        raise call.refuse(f"aggr={conv.aggr!r} is not supported; use {', '.join(ALL_KNOWN)}")
    terms: list[tuple[float, Value]] = []
    for number, relation in _numbered_relations(conv, call).items():
        matrix, parameters = _relation_matrix(conv, number, conv.weight, conv.comp)

        def weights(matrix: Matrix = matrix) -> tuple[Tensor, None]:
            return matrix(), None

        multiply = partial(assembly.projection, weights=weights, parameters=parameters)
        shape = conv.out_channels, conv.in_channels_l
        if conv.aggr == "max":
            product = multiply(assembly.per_edge(Maximum, x, relation=relation))
        else:
            scaling = RelationScaling(Scaling.SUM if conv.aggr in SUMS else Scaling.MEAN, relation)
            product = assembly.aggregate_map(x, multiply, shape, scaling)
        terms.append((1.0, product))
    if conv.root is not None:
        root = conv.root
        terms.append((1.0, assembly.projection(x, lambda: (root.T, None), (root,))))
    return assembly.sum(terms, bias_of(conv))


def lower_rgat(conv: Any, call: Call) -> Value:
    """Lower RGATConv."""
    check_sum(conv, call)
    if conv.mod is not None or conv.attention_mode != "additive-self-attention":
        raise call.refuse("mod and attention_mode='multiplicative-self-attention' are not supported")
    if any(call.arguments[name] is not None for name in ("edge_attr", "size", "return_attention_weights")):
        raise call.refuse("edge_attr, size and return_attention_weights are not supported")
    x, heads, channels, q, k = call.matrix("x"), conv.heads, conv.out_channels, conv.q, conv.k
    relations, slope = _numbered_relations(conv, call), float(conv.negative_slope)
    p = float(conv.dropout) if conv.training else 0.0
    together = conv.attention_mechanism == "across-relation"
    given = (conv.weight, None) if conv.num_bases is None else (conv.basis, conv.att)
    made = {number: _relation_matrix(conv, number, *given) for number in relations}

    def scores(numbers: Sequence[int]) -> Value:
        """Return the targets' scores, for each head and edge type."""

        def weights() -> tuple[Tensor, None]:
            return torch.stack([q.T @ made[number][0]() for number in numbers], dim=1).flatten(0, 1), None

        parameters = dict.fromkeys(one for number in numbers for one in made[number][1])
        return call.assembly.projection(x, weights, (*parameters, q))

    parts: list[Value] = []
    target = scores([*relations]) if together else x
    for place, (number, relation) in enumerate(relations.items()):
        matrix, parameters = made[number]

        def sources(matrix: Matrix = matrix) -> tuple[Tensor, None]:
            weight = matrix()
            return torch.cat((weight.view(heads, channels, -1), (k.T @ weight)[:, None]), dim=1).flatten(0, 1), None

        def functions(groups: range, place: int = place) -> EdgeFunction:
            among = (place, len(relations)) if together else (0, 1)
            return GatWithFeatures(len(groups), slope, *among)

        attention = partial(
            FunctionAttention,
            options=AttentionOptions(heads, channels, p=p, site=call.assembly.site(p)),
            functions=functions,
            joint=together and place < len(relations) - 1,
        )
        source = call.assembly.projection(x, sources, (*parameters, k))
        inputs = [source, target, *parts] if together else [source, scores([number])]
        found = call.assembly.per_edge(attention, *inputs, relation=relation)
        parts = [found] if together else [*parts, found]
    attended = call.assembly.sum([(1.0, part) for part in parts])
    return call.assembly.sum([(1.0, join_heads(conv, call, attended))], bias_of(conv))


Matrix = Callable[[], Tensor]
"""A function that makes W_r [O, I] from parameters."""


def _numbered_relations(conv: Any, call: Call) -> dict[int, EdgeType]:
    """Return the edge types by the layer's numbers, without those that have no edges."""
    if call.arguments["edge_index"] != Graph() or call.arguments["edge_type"] != EdgeKinds():
        raise call.refuse("it must be given the model's own edge_index and edge_type")
    types = call.assembly.setting.types
    assert types is not None
    if len(types.edges) > conv.num_relations:
        raise call.refuse(f"it has num_relations={conv.num_relations}, the graph {len(types.edges)} types of edges")
    return {number: one for number, (one, edges) in enumerate(types.edges.items()) if edges}


def _relation_matrix(
    conv: Any, number: int, weight: nn.Parameter, comp: nn.Parameter | None
) -> tuple[Matrix, tuple[nn.Parameter, ...]]:
    """Return W_r and its parameters: a matrix of its own, a mixture of bases with ``comp``, or blocks."""
    if comp is not None:
        return lambda: torch.einsum("b,bio->oi", comp[number], weight), (weight, comp)
    if conv.num_blocks is not None:
        block_diagonal: Any = torch.block_diag  # torch has no types for it
        return lambda: block_diagonal(*weight[number]).T, (weight,)
    return lambda: weight[number].T, (weight,)


# ---- arguments by type ------------------------------------------------------------------------------------


def _rows_by_type(call: Call) -> dict[str, Value]:
    given = call.arguments["x_dict"]
    named = isinstance(given, Mapping) and all(isinstance(x, Value) and x.space == name for name, x in given.items())
    if not named:
        raise call.refuse("x_dict must have rows by their type of nodes")
    return dict(given)


def _edges_by_type(call: Call) -> dict[EdgeType, Graph]:
    given = call.arguments["edge_index_dict"]
    named = isinstance(given, Mapping) and all(graph == Graph(relation=EdgeType(*one)) for one, graph in given.items())
    if not named:
        raise call.refuse("edge_index_dict must have the model's own edges by their type")
    found = {EdgeType(*one): graph for one, graph in given.items()}
    rows = call.arguments["x_dict"]
    if missing := [end for one in found for end in (one.source, one.target) if end not in rows]:
        raise call.refuse(f"x_dict has no rows of {missing[0]!r}, which edges lead to or from")
    return found


def _check_linears(call: Call, maps: Mapping[str, Any], rows: Mapping[str, Value]) -> None:
    for name, by_type in maps.items():
        for kind in rows:
            if kind not in by_type or not is_linear(by_type[kind]) or by_type[kind].bias is None:
                raise call.refuse(f"{name} has no linear map with a bias for {kind!r}")
