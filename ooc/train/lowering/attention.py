# SPDX-License-Identifier: Apache-2.0
"""PyG's attentions as values.

What an edge needs of its source is one matrix, what it needs of its target another, each one dense product of x:

    GATConv            z, a_src = z · att_src of every head      a_dst = z · att_dst
    GATv2Conv          lin_l(x)                                  lin_r(x)
    TransformerConv    lin_key(x), lin_value(x) of every head    lin_query(x)

Shapes: I columns of x, H heads of C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ooc.train.kernels.edges import SelfLoops
from ooc.train.lowering.call import Call
from ooc.train.lowering.per_edge import AttentionOptions
from ooc.train.lowering.projection import Weights
from ooc.train.lowering.values import Value


def lower_gat(conv: Any, call: Call) -> Value:
    """GATConv."""
    options = _options(conv, call)
    if conv.lin is None:
        raise call.refuse("in_channels of sources and targets apart are not supported")
    weight = call.weight(conv.lin)

    def by_head() -> Tensor:
        return weight.view(conv.heads, conv.out_channels, -1)

    def sources() -> tuple[Tensor, None]:
        score_HI = torch.einsum("hc,hci->hi", conv.att_src[0], by_head())
        return torch.cat((by_head(), score_HI[:, None]), dim=1).flatten(0, 1), None

    def targets() -> tuple[Tensor, None]:
        return torch.einsum("hc,hci->hi", conv.att_dst[0], by_head()), None

    source = _projection(call, sources, (weight, conv.att_src), "GAT sources")
    target = _projection(call, targets, (weight, conv.att_dst), "GAT targets")
    attended = call.assembly.gat(source, target, options, negative_slope=float(conv.negative_slope))
    return _with_residual(conv, call, _heads(conv, call, attended))


def lower_gatv2(conv: Any, call: Call) -> Value:
    """GATv2Conv."""
    options = _options(conv, call)
    source = _projection(call, *_of_linear(conv.lin_l, call), "GATv2 sources")
    target = source
    if conv.lin_r is not conv.lin_l:
        target = _projection(call, *_of_linear(conv.lin_r, call), "GATv2 targets")
    attended = call.assembly.gatv2(source, target, options, att=conv.att, negative_slope=float(conv.negative_slope))
    return _with_residual(conv, call, _heads(conv, call, attended))


def lower_transformer(conv: Any, call: Call) -> Value:
    """TransformerConv."""
    options = _options(conv, call)
    key, value = conv.lin_key, conv.lin_value
    weights = (call.weight(key), call.weight(value))
    biases = () if key.bias is None else (key.bias, value.bias)

    def sources() -> tuple[Tensor, Tensor | None]:
        def interleaved(parts: tuple[Tensor, ...]) -> Tensor:
            by_head = [part.view(conv.heads, conv.out_channels, *part.shape[1:]) for part in parts]
            return torch.cat(by_head, dim=1).flatten(0, 1)

        return interleaved(weights), interleaved(biases) if biases else None

    source = _projection(call, sources, (*weights, *biases), "keys and values")
    target = _projection(call, *_of_linear(conv.lin_query, call), "queries")
    out = _heads(conv, call, call.assembly.dot_attention(source, target, options))
    if not conv.root_weight:
        return out
    skip = call.apply(conv.lin_skip, call.matrix("x"))
    if conv.lin_beta is None:
        return call.assembly.sum([(1.0, out), (1.0, skip)])
    lin_beta = conv.lin_beta

    def gated(out: Tensor, skip: Tensor) -> Tensor:
        beta: Tensor = lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        return beta * skip + (1 - beta) * out

    return call.assembly.rowwise(call.where, gated, [out, skip], tuple(lin_beta.parameters()), detail=" beta")


def _options(conv: Any, call: Call) -> AttentionOptions:
    if conv.aggr not in ("add", "sum"):
        raise call.refuse(f"aggr={conv.aggr!r} is not supported; attention sums")
    if conv.edge_dim is not None or call.arguments.get("edge_attr") is not None:
        raise call.refuse("edge_dim is not supported")
    if call.arguments.get("return_attention_weights") is not None:
        raise call.refuse("return_attention_weights is not supported: nothing is kept for an edge")
    p = float(conv.dropout) if conv.training else 0.0
    loops = SelfLoops.EXACTLY_ONE if getattr(conv, "add_self_loops", False) else SelfLoops.AS_STORED
    return AttentionOptions(conv.heads, conv.out_channels, loops, p, call.assembly.edge_site(p))


def _projection(call: Call, weights: Weights, parameters: tuple[nn.Parameter, ...], label: str) -> Value:
    x = call.matrix("x")
    return call.assembly.projection(
        x, weights, parameters, features=int(parameters[0].shape[1]), label=f"{call.where} {label}"
    )


def _of_linear(linear: Any, call: Call) -> tuple[Weights, tuple[nn.Parameter, ...]]:
    """A linear layer as it is."""
    weight, bias = call.weight(linear), linear.bias

    def made() -> tuple[Tensor, Tensor | None]:
        return weight, bias

    return made, (weight,) if bias is None else (weight, bias)


def _heads(conv: Any, call: Call, attended: Value) -> Value:
    """Heads side by side, or their mean."""
    if conv.concat:
        return attended
    heads, channels = conv.heads, conv.out_channels
    return call.assembly.rowwise(
        call.where, lambda rows: rows.reshape(-1, heads, channels).mean(dim=1), [attended], detail=" mean of heads"
    )


def _with_residual(conv: Any, call: Call, out: Value) -> Value:
    terms = [(1.0, out)]
    if conv.res is not None:
        terms.append((1.0, call.assembly.linear(call.matrix("x"), call.weight(conv.res))))
    return call.assembly.sum(terms, () if conv.bias is None else (conv.bias,))
