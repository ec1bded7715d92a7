# SPDX-License-Identifier: Apache-2.0
"""PyG's attention layers as values.

What an edge needs of its source is one matrix, what it needs of its target another; each is made of x row by row,
mostly by one dense product:

    GATConv            z, a_src = z · att_src of every head      a_dst = z · att_dst
    GATv2Conv          lin_l(x)                                  lin_r(x)
    TransformerConv    lin_key(x), lin_value(x) of every head    lin_query(x)
    AGNNConv           x / |x|, x                                β x / |x|
    FAConv             x / √d, att_l(x): signed coefficients     att_r(x)
    ResGatedGraphConv  lin_query(x), lin_value(x)                lin_key(x): gates, not scores

A wide head of GATConv is cut into slices of its channels, each with the head's scores beside it, so that it need not be
pulled whole.

Features of edges add to that one linear map of theirs: GATConv's to the score (``lin_edge`` and ``att_edge`` together),
GATv2Conv's before the score, TransformerConv's to key and value.

Shapes: I columns of x, H heads of C channels.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.kernels.edge_terms import LoopFeatures
from ooc.kernels.edges import SelfLoops
from ooc.kernels.functions import Gatv2, GatWithFeatures, gated
from ooc.kernels.gat import TARGET_SCALARS
from ooc.model.layers.edge_functions import NO_TERM, EdgeTerm, FunctionAttention, FunctionSum, dot_product_attention
from ooc.model.layers.layer import Call
from ooc.model.layers.per_edge import AttentionOptions, GatAttention
from ooc.model.lowering.calls.rowwise import ROWWISE_MODULES
from ooc.model.lowering.projection import Repeated, Weights
from ooc.model.lowering.symbolic import LINEAR, is_linear, replaced_functions
from ooc.model.lowering.values import Ones, RowFunction, Value
from ooc.plan.workload import EdgeData

_SLICE_NBYTES = 16e9
"""The most bytes of a slab of one slice, if possible: this much of a GPU of 24 GB, beside the memory it works in."""
_WIDEST_SLICE = 32
"""Channels of the widest slice. Two of these took the CPU's pulls 1.02 to 1.05 times as long as a head of 64; on a GPU
nothing was measured. Narrower slices have more scalars for as many channels."""
_NARROWEST_SLICE = 16
"""Channels of the narrowest slice, for graphs where wider ones take too much. Rows of even narrower ones would be
fetched in parts of cache lines."""

GATED_TOGETHER = 8
"""Columns of a group of gated sums, if that divides them: as narrow as a slab may be, and no slower than 64."""
_SUMS = ("add", "sum")
_WEIGHTS_REFUSAL = "return_attention_weights is not supported: nothing is kept for an edge"
_SATURATED_SCORE = 50.0
"""A score whose tanh is 1 whatever is added from 0 on, for signed coefficients."""
_WHOLE_NBYTES = 256e6
"""The most bytes for keys and values of a whole head if the layer can run without them. It does not depend on
budgets."""


def slices_of_head(channels: int, *, nodes: int, itemsize: int) -> int:
    """Return into how many slices a head of ``channels`` channels is cut: as few as are narrow enough for a graph of
    this many nodes, or fewer that are even and at most half as wide again. It does not depend on budgets, since sums
    over slices round as slices are cut."""
    fits = nodes * (_WIDEST_SLICE + TARGET_SCALARS) * itemsize <= _SLICE_NBYTES
    widest = _WIDEST_SLICE if fits else _NARROWEST_SLICE
    fewest = math.ceil(channels / widest)
    even = [slices for slices in range(2, fewest + 1) if channels % slices == 0 and 2 * channels <= 3 * slices * widest]
    return even[-1] if even else fewest


def slice_heads(call: Call, source: Value, options: AttentionOptions) -> AttentionOptions:
    """Return options with heads of rows like ``source`` cut into slices of equal width; the last slice may be
    padded."""
    nodes, itemsize = call.assembly.num_rows(source), call.assembly.setting.dtype.itemsize
    slices = slices_of_head(options.channels, nodes=nodes, itemsize=itemsize)
    return replace(options, slices=slices, channels=slices * math.ceil(options.channels / slices))


def attend_in_slices(
    call: Call, source: Value, target: Value, options: AttentionOptions, channels: int, negative_slope: float | None
) -> Value:
    """Return the result of attention in slices: ``channels`` of each head, without the padding of the last slice."""
    attended = call.per_edge(partial(GatAttention, options=options, negative_slope=negative_slope), source, target)
    if options.channels == channels:
        return attended

    def drop_padding(rows: Tensor) -> Tensor:
        return rows.view(len(rows), options.heads, -1)[..., :channels].flatten(1)

    return call.assembly.rowwise(call.where, drop_padding, [attended])


def lower_gat(conv: Any, call: Call) -> Value:
    """Lower GATConv."""
    options = _attention_options(conv, call)
    apart = conv.lin is None
    if apart and call.relation is None:
        raise call.refuse("in_channels of sources and targets apart are not supported")
    x_source, x_target = call.ends("x")
    has_features = takes_features(conv, call)  # edge functions compute each group's message separately
    cut = options if has_features else slice_heads(call, x_source, options)
    source = map_with_scores(call, x_source, conv.lin_src if apart else conv.lin, conv.att_src, cut)
    target = map_with_scores(call, x_target, conv.lin_dst if apart else conv.lin, conv.att_dst, cut, alone=True)
    slope = float(conv.negative_slope)
    if not has_features:
        attended = attend_in_slices(call, source, target, cut, options.channels, slope)
    else:
        edge_weight, att_edge = _weight_without_bias(call, conv.lin_edge), conv.att_edge

        def make_edge_weight() -> tuple[Tensor, None]:
            by_head = edge_weight.view(conv.heads, conv.out_channels, -1)
            return torch.einsum("hc,hck->hk", att_edge[0], by_head), None

        term = _with_loop_features(edge_term(call, make_edge_weight, (edge_weight, att_edge), columns=1), conv, call)
        with_features = partial(
            FunctionAttention, options=options, functions=lambda groups: GatWithFeatures(len(groups), slope), term=term
        )
        attended = call.per_edge(with_features, source, target)
    return _add_residual_and_bias(conv, call, join_heads(conv, call, attended))


def map_with_scores(
    call: Call, x: Value, linear: Any, att: nn.Parameter, options: AttentionOptions, *, alone: bool = False
) -> Value:
    """Return a linear map of x, with each head's score by ``att`` [1, H, C] after each of its slices and the last slice
    padded with zeros; ``alone``: only the scores."""
    call.needs(is_linear(linear))
    _, heads, channels = att.shape
    weight, bias, slices = linear.weight, linear.bias, options.slices

    def mapped(part: Tensor) -> Tensor:
        by_head = part.view(heads, channels, *part.shape[1:])
        score = torch.einsum("hc,hc...->h...", att[0], by_head).repeat_interleave(slices, dim=0)
        if alone:
            return score
        filled = F.pad(by_head, [0, 0] * (part.dim() - 1) + [0, options.channels - channels])
        by_slice = filled.view(heads * slices, -1, *part.shape[1:])
        return torch.cat((by_slice, score[:, None]), dim=1).flatten(0, 1)

    def weights() -> tuple[Tensor, Tensor | None]:
        return mapped(weight), None if bias is None else mapped(bias)

    repeated = Repeated(slices, 1 if alone else options.channels // slices + 1)
    parameters = (weight, att) if bias is None else (weight, att, bias)
    return call.assembly.projection(x, weights, parameters, repeated)


def lower_gatv2(conv: Any, call: Call) -> Value:
    """Lower GATv2Conv."""
    options = _attention_options(conv, call)
    x_source, x_target = call.ends("x")
    source = call.assembly.projection(x_source, *linear_weights(call, conv.lin_l))
    target = source
    if conv.lin_r is not conv.lin_l or x_target is not x_source:
        target = call.assembly.projection(x_target, *linear_weights(call, conv.lin_r))
    if call.arguments.get("edge_attr") is not None and conv.lin_edge is None:
        raise call.refuse("it is given edge_attr without edge_dim")
    term = NO_TERM
    if takes_features(conv, call):
        term = _with_loop_features(
            edge_term(call, *linear_weights(call, conv.lin_edge), columns=conv.out_channels), conv, call
        )
    slope, att = float(conv.negative_slope), conv.att

    def functions(groups: range) -> Gatv2:
        return Gatv2(att.detach()[0, groups.start : groups.stop], slope)

    gatv2 = partial(FunctionAttention, options=options, functions=functions, att=att, term=term)
    return _add_residual_and_bias(conv, call, join_heads(conv, call, call.per_edge(gatv2, source, target)))


def lower_transformer(conv: Any, call: Call) -> Value:
    """Lower TransformerConv."""
    options = _attention_options(conv, call)
    key, value = conv.lin_key, conv.lin_value
    call.needs(all(map(is_linear, (key, value))) and (conv.lin_beta is None or is_linear(conv.lin_beta)))
    call.needs((key.bias is None) == (value.bias is None))
    weights = (key.weight, value.weight)
    biases = () if key.bias is None else (key.bias, value.bias)

    def sources() -> tuple[Tensor, Tensor | None]:
        channels = conv.out_channels
        return _interleave(channels, *weights), _interleave(channels, *biases) if biases else None

    x_source, x_target = call.ends("x")
    source = call.assembly.projection(x_source, sources, (*weights, *biases))
    target = call.assembly.projection(x_target, *linear_weights(call, conv.lin_query))
    if (call.arguments.get("edge_attr") is None) != (conv.lin_edge is None):
        given = "without edge_attr" if conv.lin_edge is not None else "with edge_attr and no edge_dim"
        raise call.refuse(f"it is called {given}")
    term = NO_TERM
    if takes_features(conv, call):
        term = edge_term(call, *linear_weights(call, conv.lin_edge), columns=conv.out_channels)
    dot = partial(dot_product_attention, options=options, term=term)
    out = join_heads(conv, call, call.per_edge(dot, source, target))
    if not conv.root_weight:
        return out
    skip = call.apply(conv.lin_skip, x_target)
    if conv.lin_beta is None:
        return call.assembly.sum([(1.0, out), (1.0, skip)])
    lin_beta = conv.lin_beta

    def gated(out: Tensor, skip: Tensor) -> Tensor:
        beta: Tensor = lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        return beta * skip + (1 - beta) * out

    return call.assembly.rowwise(call.where, gated, [out, skip], tuple(lin_beta.parameters()))


def lower_agnn(conv: Any, call: Call) -> Value:
    """Lower AGNNConv, attention by the cosine of two rows, times β. Keys and values are pulled whole."""
    x, beta = call.matrix("x"), conv.beta
    call.needs(conv.aggr in _SUMS)
    _check_fits_whole(call, x)
    loops = SelfLoops.EXACTLY_ONE if conv.add_self_loops else SelfLoops.AS_STORED
    options = AttentionOptions(1, x.columns, loops)
    unscaled = math.sqrt(x.columns)

    def query(rows: Tensor) -> Tensor:
        scaled: Tensor = F.normalize(rows, p=2.0, dim=-1) * (beta * unscaled)
        return scaled

    def key_and_value(rows: Tensor) -> Tensor:
        return torch.cat((F.normalize(rows, p=2.0, dim=-1), rows), dim=1)

    source = call.assembly.rowwise(call.where, key_and_value, [x])
    target = call.assembly.rowwise(call.where, query, [x], (beta,) if conv.requires_grad else ())
    return call.per_edge(partial(dot_product_attention, options=options), source, target)


def _check_fits_whole(call: Call, x: Value) -> None:
    """Raise NoFormulaError if keys and values as wide as ``x`` would take much memory, and the layer can run without
    them."""
    setting = call.assembly.setting
    fits = 2 * setting.num_nodes * x.columns * setting.dtype.itemsize <= _WHOLE_NBYTES
    call.needs(fits or setting.types is not None)


def lower_fa(conv: Any, call: Call) -> Value:
    """Lower FAConv with normalisation by d, a row's in-degree, counting itself if the convolution says so."""
    linear = all(map(is_linear, (conv.att_l, conv.att_r)))
    call.needs(conv.aggr in _SUMS and bool(conv.normalize) and linear and call.assembly.setting.on_cpu)
    call.needs(call.relation is None)
    if call.arguments["edge_weight"] is not None:
        raise call.refuse("it takes edge_weight with normalize=False only")
    if call.arguments["return_attention_weights"] is not None:
        raise call.refuse(_WEIGHTS_REFUSAL)
    x, start, assembly = call.matrix("x"), call.matrix("x_0"), call.assembly
    loops = SelfLoops.EXACTLY_ONE if conv.add_self_loops else SelfLoops.AS_STORED
    options, p = AttentionOptions(1, 1, loops), float(conv.dropout) if conv.training else 0.0
    if loops not in assembly.degrees:
        ones = Ones(assembly.next_index(), x)
        certain = assembly.rowwise(call.where, lambda rows: F.pad(rows, (0, 1), value=_SATURATED_SCORE), [ones])
        count = partial(GatAttention, options=options, negative_slope=None)
        assembly.degrees[loops] = call.per_edge(count, certain, ones)
    degree = assembly.degrees[loops]

    def updated(sum_RC: Tensor, degree_R1: Tensor, start_RC: Tensor) -> Tensor:
        return sum_RC * inverse_root(degree_R1) + float(conv.eps) * start_RC

    of_source, of_target = (assembly.linear(x, linear.weight) for linear in (conv.att_l, conv.att_r))
    options = replace(options, channels=x.columns, p=p, site=assembly.site(p))
    given = [x, degree], lambda rows, degree: rows * inverse_root(degree)
    found = attend_by_scores(call, *given, of_source, of_target, options=options, negative_slope=None)
    return assembly.rowwise(call.where, updated, [found, degree, start])


def inverse_root(degree_R1: Tensor) -> Tensor:
    """Return d^-1/2, and 0 for a row without edges."""
    return degree_R1.pow(-0.5).masked_fill(degree_R1 == 0, 0.0)


def attend_by_scores(
    call: Call,
    inputs: Sequence[Value],
    message: RowFunction,
    of_source: Value,
    of_target: Value,
    options: AttentionOptions,
    negative_slope: float | None,
) -> Value:
    """Return the sum of the messages of ``inputs`` at sources, with coefficients by scores [R, 1] at both ends; it is
    cut into slices like a head of GATConv."""
    assembly, columns, cut = call.assembly, options.channels, slice_heads(call, of_source, options)

    def side_by_side(score_R1: Tensor, *inputs: Tensor) -> Tensor:
        by_slice = F.pad(message(*inputs), (0, cut.channels - columns)).view(len(score_R1), cut.slices, -1)
        return torch.cat((by_slice, score_R1[:, None].expand(-1, cut.slices, 1)), dim=2).flatten(1)

    source, target = assembly.rowwise(call.where, side_by_side, [of_source, *inputs]), of_target
    if cut.slices > 1:
        target = assembly.rowwise(call.where, lambda score_R1: score_R1.repeat(1, cut.slices), [of_target])
    return attend_in_slices(call, source, target, cut, columns, negative_slope)


def lower_attentional(aggregation: Any, call: Call, x: Value) -> Value:
    """Lower AttentionalAggregation: a softmax over in-edges of a network's score of the rows there. The networks must
    be known to work row by row, with one score a row."""
    scoring = [part for part in getattr(aggregation.gate_nn, "modules", list)() if type(part) in LINEAR]
    call.needs(all(map(is_rowwise, aggregation.children())))
    call.needs(bool(scoring) and scoring[-1].weight.shape[0] == 1)
    rows = x if aggregation.nn is None else call.apply(aggregation.nn, x)
    options = AttentionOptions(1, rows.columns)
    score, same = call.apply(aggregation.gate_nn, x), Ones(call.assembly.next_index(), x)
    return attend_by_scores(call, [rows], lambda rows: rows, score, same, options, 1.0)


def is_rowwise(network: nn.Module) -> bool:
    """Whether a module is made of parts known to work row by row, so that each neighbour's row may be passed once."""
    known = (nn.Sequential, *LINEAR, *ROWWISE_MODULES)
    return all(type(part) in known and not replaced_functions(part) for part in network.modules())


def lower_set2set(aggregation: Any, call: Call, x: Value) -> Value:
    """Lower Set2Set: attention by dot products, with a query that an LSTM makes of previous results. It needs at least
    one step, and an LSTM with usual options except for its layers."""
    assembly, columns, lstm = call.assembly, x.columns, aggregation.lstm
    call.needs(type(lstm) is nn.LSTM and aggregation.processing_steps > 0 and not replaced_functions(lstm))
    call.needs(not (lstm.bidirectional or lstm.proj_size or lstm.batch_first or lstm.dropout))
    _check_fits_whole(call, x)
    options = AttentionOptions(1, columns)
    source = assembly.rowwise(call.where, lambda rows: torch.cat((rows, rows), dim=1), [x])
    query = slice((lstm.num_layers - 1) * columns, lstm.num_layers * columns)

    def state(*before: Tensor) -> Tensor:
        """Return the state of the LSTM's layers, the last of which gives the query: [R, 2 · layers · C]."""
        rows = len(before[0])
        if len(before) == 1:
            query_star, memory = before[0].new_zeros(rows, 2 * columns), before[0].new_zeros(rows, 2 * query.stop)
        else:
            query_star, memory = torch.cat((before[0][:, query], before[1]), dim=1), before[0]
        given, remembered = memory.view(rows, 2, lstm.num_layers, columns).permute(1, 2, 0, 3).contiguous()
        _, after = lstm(query_star[None], (given, remembered))
        return torch.stack(after).permute(2, 0, 1, 3).reshape(rows, -1)

    found: list[Value] = [Ones(assembly.next_index(), x)]
    for _ in range(aggregation.processing_steps):
        made = assembly.rowwise(call.where, state, found, tuple(lstm.parameters()), heavy=True)
        scaled = assembly.rowwise(call.where, lambda s: s[:, query] * math.sqrt(columns), [made])
        found = [made, call.per_edge(partial(dot_product_attention, options=options), source, scaled)]
    return assembly.rowwise(call.where, lambda s, r: torch.cat((s[:, query], r), dim=1), found)


def lower_res_gated(conv: Any, call: Call) -> Value:
    """Lower ResGatedGraphConv. Its maps take the features of edges after those of rows: key and query add to the gate,
    and value to the value."""
    linear = all(map(is_linear, (conv.lin_key, conv.lin_query, conv.lin_value)))
    call.needs(conv.aggr in _SUMS and linear and type(conv.act) is nn.Sigmoid and call.assembly.setting.on_cpu)
    x_source, x_target = call.ends("x")
    key, query, value = conv.lin_key, conv.lin_query, conv.lin_value
    of_source, of_target = slice(x_source.columns), slice(x_target.columns)
    columns = conv.out_channels
    channels = next(c for c in range(min(GATED_TOGETHER, columns), columns + 1) if columns % c == 0)

    def sources() -> tuple[Tensor, Tensor]:
        weights = (linear.weight[:, of_source] for linear in (query, value))
        return _interleave(channels, *weights), _interleave(channels, query.bias, value.bias)

    def edges() -> tuple[Tensor, None]:
        of_query, of_value = (linear.weight[:, x_source.columns :] for linear in (query, value))
        return _interleave(channels, key.weight[:, x_target.columns :] + of_query, of_value), None

    parameters = (query.weight, value.weight, query.bias, value.bias)
    source = call.assembly.projection(x_source, sources, parameters)
    target = call.assembly.projection(x_target, lambda: (key.weight[:, of_target], key.bias), (key.weight, key.bias))
    term = NO_TERM
    if conv.edge_dim is not None:
        if not call.takes("edge_attr", EdgeData.FEATURES):
            raise call.refuse("it is not given the features of edges; let the model's forward take edge_attr")
        term = EdgeTerm(call.num_edge_features, 2 * channels, edges, (key.weight, query.weight, value.weight))
    make = partial(FunctionSum, channels=channels, functions=lambda groups: gated(len(groups)), term=term)
    terms = [(1.0, call.per_edge(make, source, target))]
    if conv.lin_skip is not None:
        terms.append((1.0, call.assembly.linear(x_target, _weight_without_bias(call, conv.lin_skip))))
    return call.assembly.sum(terms, () if conv.bias is None else (conv.bias,))


def _attention_options(conv: Any, call: Call) -> AttentionOptions:
    if conv.aggr not in _SUMS:
        raise call.refuse(f"aggr={conv.aggr!r} is not supported; attention sums")
    if call.arguments.get("return_attention_weights") is not None:
        raise call.refuse(_WEIGHTS_REFUSAL)
    p = float(conv.dropout) if conv.training else 0.0
    loops = SelfLoops.EXACTLY_ONE if getattr(conv, "add_self_loops", False) else SelfLoops.AS_STORED
    if loops is SelfLoops.EXACTLY_ONE and call.relation is not None and call.relation.source != call.relation.target:
        raise call.refuse("nodes of two types have no self-loops; give add_self_loops=False")
    return AttentionOptions(conv.heads, conv.out_channels, loops, p, call.assembly.site(p))


def takes_features(conv: Any, call: Call) -> bool:
    """Whether the convolution has a part for edge features and is given them."""
    return conv.lin_edge is not None and call.takes("edge_attr", EdgeData.FEATURES)


def edge_term(call: Call, weights: Weights, parameters: tuple[nn.Parameter, ...], *, columns: int) -> EdgeTerm:
    """Return the term that a linear map of edge features adds, ``columns`` numbers a group."""
    features = call.num_edge_features
    if parameters[0].shape[1] != features:
        raise call.refuse(f"it takes {parameters[0].shape[1]} features of edges, the store has {features}")
    return EdgeTerm(features, columns, weights, parameters)


def _with_loop_features(term: EdgeTerm, conv: Any, call: Call) -> EdgeTerm:
    """Return ``term`` with the features of added self-loops by the convolution's ``fill_value``, if it adds any."""
    fill = conv.fill_value
    if not conv.add_self_loops:
        return term
    if isinstance(fill, str):
        call.needs(fill in ("mean", "add", "sum"))
        return replace(term, loops=LoopFeatures(is_mean=fill == "mean"))
    constant_K = torch.as_tensor(fill, dtype=torch.float64).detach().reshape(-1)
    return replace(term, loops=LoopFeatures(constant_K))


def _interleave(channels: int, *parts: Tensor) -> Tensor:
    """Return weights or biases of several maps interleaved, this many channels of each in turn."""
    return torch.stack([part.view(-1, channels, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)


def linear_weights(call: Call, linear: Any) -> tuple[Weights, tuple[nn.Parameter, ...]]:
    """Return a linear layer. Raises NoFormulaError if it is something else."""
    call.needs(is_linear(linear))
    weight, bias = linear.weight, linear.bias
    return lambda: (weight, bias), (weight,) if bias is None else (weight, bias)


def _weight_without_bias(call: Call, linear: Any) -> nn.Parameter:
    """Return the weight of a linear layer without a bias. Raises NoFormulaError if it is something else."""
    call.needs(is_linear(linear) and linear.bias is None)
    weight: nn.Parameter = linear.weight
    return weight


def join_heads(conv: Any, call: Call, attended: Value) -> Value:
    """Return heads side by side, or their mean."""
    if conv.concat:
        return attended
    heads, channels = conv.heads, conv.out_channels
    return call.assembly.rowwise(call.where, lambda rows: rows.reshape(-1, heads, channels).mean(dim=1), [attended])


def _add_residual_and_bias(conv: Any, call: Call, out: Value) -> Value:
    terms = [(1.0, out)]
    if conv.res is not None:
        terms.append((1.0, call.assembly.linear(call.ends("x")[1], _weight_without_bias(call, conv.res))))
    return call.assembly.sum(terms, () if conv.bias is None else (conv.bias,))
