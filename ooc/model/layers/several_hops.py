# SPDX-License-Identifier: Apache-2.0
"""Convolutions that reach further than one hop, or combine rows of one hop by rules of their own, as values.

    SSGConv         (α X + (1 - α)/K Σ_k A^k X) Wᵀ + b
    ChebConv        Σ_k T_k Wᵀ_k + b, T_0 = X, T_1 = L X, T_k = 2 L T_{k-1} - T_{k-2}
    ARMAConv        mean over stacks of act(A H W + dropout(X) V + b), H = X, then the result of that, T times
    EGConv          weights of each row, X Wᵀ + c, times A of its bases, head by head
    HypergraphConv  B (A X Wᵀ) + b, A the mean over in-neighbours and B that over out-neighbours; with attention both of
                    messages times a softmax over either

A is GCN's normalised sum; in ChebConv the Laplacian's, without self-loops. HypergraphConv takes each edge as a node's
part in a hyperedge, of which there are as many as nodes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.aggr import MinAggregation, VarAggregation
from torch_geometric.utils import scatter

from ooc.model.graph import Scaling
from ooc.model.layers.attention import join_heads
from ooc.model.layers.layer import Call, Graph
from ooc.model.layers.opaque import lower_opaque
from ooc.model.layers.principal import lower_aggregation
from ooc.model.layers.sums import aggregated, bias_of, check_sum, gcn_scaling, sum_of_maps
from ooc.model.lowering.symbolic import is_linear
from ooc.model.lowering.values import Ones, Value
from ooc.plan.workload import EdgeData

_EG_AGGREGATIONS = {"min": MinAggregation, "var": VarAggregation}
"""Aggregations by EGConv's names."""


def lower_ssg(conv: Any, call: Call) -> Value:
    """Lower SSGConv. The sum is over the input's columns, or, if the output is narrower and the input changes, over the
    output's."""
    assembly, x, scaling = call.assembly, call.matrix("x"), gcn_scaling(conv, call)
    if conv.cached and not assembly.is_constant(x):
        raise call.refuse("cached=True keeps the first epoch's aggregation of an input that changes; it is not exact")
    linear_first = is_linear(conv.lin) and not assembly.is_constant(x) and conv.lin.weight.shape[0] < x.columns
    power = assembly.linear(x, conv.lin.weight) if linear_first else x
    terms = [(float(conv.alpha), power)]
    for _ in range(conv.K):
        power = call.aggregate(power, scaling)
        terms.append(((1.0 - float(conv.alpha)) / conv.K, power))
    total = assembly.sum([(factor, term) for factor, term in terms if factor] or terms[:1])
    if linear_first:
        return assembly.sum([(1.0, total)], bias_of(conv.lin))
    return sum_of_maps(call, [conv.lin], [total])


_LAPLACIANS = {
    "sym": (Scaling.LAPLACIAN, Scaling.WEIGHTED_LAPLACIAN),
    "rw": (Scaling.RANDOM_WALK, Scaling.WEIGHTED_RANDOM_WALK),
    None: (Scaling.SUM, Scaling.WEIGHTED_SUM),
}


def lower_cheb(conv: Any, call: Call) -> Value:
    """Lower ChebConv. The scaled Laplacian is c (D - A) - I with c = 2/λ. If it is normalised, D = I, and PyG's λ is 2
    if not given, twice the largest entry. Otherwise D is the out-degrees, with self-loops counted as in A."""
    check_sum(conv, call)
    weighted, plain = call.takes("edge_weight", EdgeData.WEIGHT), conv.normalization is None
    scaling = _LAPLACIANS[conv.normalization][weighted]
    largest = call.arguments.get("lambda_max")
    if plain and (weighted or largest is None):
        raise call.refuse("normalization=None is supported without edge_weight, and with a number as lambda_max")
    assembly, factor = call.assembly, 1.0 if largest is None else 2.0 / float(largest)
    x = call.matrix("x")
    degree: Value | None = None
    if plain:
        back = call.over(Graph(flipped=not call.flipped))
        degree = back.aggregate(Ones(assembly.next_index(), x), Scaling.SUM)

    def hop(rows: Value, times: float, less: Value | None = None) -> Value:
        terms = [(-times * factor, call.aggregate(rows, scaling))]
        if degree is None:
            terms.append((times * (factor - 1.0), rows))
        else:
            by_degree = assembly.rowwise(call.where, torch.mul, [rows, degree])
            terms += [(times * factor, by_degree), (-times, rows)]
        terms += [] if less is None else [(-1.0, less)]
        return assembly.sum([(number, term) for number, term in terms if number])

    powers = [x]
    for number in range(1, len(conv.lins)):
        powers.append(hop(powers[-1], 1.0) if number == 1 else hop(powers[-1], 2.0, powers[-2]))
    return sum_of_maps(call, conv.lins, powers, bias_of(conv))


def lower_arma(conv: Any, call: Call) -> Value:
    """Lower ARMAConv, with the stacks side by side."""
    assembly, x, scaling = call.assembly, call.matrix("x"), gcn_scaling(conv, call)
    stacks, bias, out = conv.num_stacks, conv.bias, x

    def of_stacks(rows_RC: Tensor) -> Tensor:
        """Apply the activation to [K, R, O], as PyG does: it may look across columns, or write in place."""
        activated: Tensor = conv.act(rows_RC.view(len(rows_RC), stacks, -1).movedim(1, 0).clone())
        return activated.movedim(0, 1).flatten(1)

    for layer in range(conv.num_layers):
        place = 0 if conv.shared_weights else layer
        if layer == 0:
            out = _multiply_stacks(call, x, conv.init_weight, None, spread=True)
        else:
            out = _multiply_stacks(call, out, conv.weight, 0 if conv.shared_weights else layer - 1, spread=False)
        root = assembly.dropout(x, float(conv.dropout)) if conv.training and conv.dropout else x
        root = _multiply_stacks(call, root, conv.root_weight, place, spread=True)
        total = assembly.sum([(1.0, call.aggregate(out, scaling)), (1.0, root)])
        if bias is not None:
            total = assembly.rowwise(call.where, lambda rows, k=place: rows + bias[k].flatten(), [total], (bias,))
        if type(conv.act) is nn.ReLU:
            total = call.apply(conv.act, total)
        elif conv.act is not None:
            parameters = tuple(conv.act.parameters()) if isinstance(conv.act, nn.Module) else ()
            total = assembly.rowwise(call.where, of_stacks, [total], parameters)
        out = total
    if stacks == 1:
        return out
    return assembly.rowwise(call.where, lambda rows: rows.view(len(rows), stacks, -1).mean(dim=1), [out])


def _multiply_stacks(call: Call, rows: Value, weight: nn.Parameter, place: int | None, *, spread: bool) -> Value:
    """Return every stack's product with its weight [K, I, O], the one at ``place`` if there are several; ``spread``: of
    all columns instead of the stack's own."""

    def product(rows_RC: Tensor) -> Tensor:
        weight_KIO = weight if place is None else weight[place]
        if spread:
            return torch.cat([rows_RC @ weight_IO for weight_IO in weight_KIO], dim=-1)
        parts = rows_RC.chunk(len(weight_KIO), dim=-1)
        return torch.cat([part @ weight_IO for part, weight_IO in zip(parts, weight_KIO, strict=True)], dim=-1)

    return call.assembly.rowwise(call.where, product, [rows], (weight,), heavy=True)


def lower_eg(conv: Any, call: Call) -> Value:
    """Lower EGConv: bases are summed first, and weighted by each row afterwards."""
    known = {"symnorm"} if conv.add_self_loops else {"symnorm", "sum", "mean", "max", "std", *_EG_AGGREGATIONS}
    call.needs(known.issuperset(conv.aggregators) and len(set(conv.aggregators)) == len(conv.aggregators))
    assembly, x, heads = call.assembly, call.matrix("x"), conv.num_heads
    bases, weights = sum_of_maps(call, [conv.bases_lin], [x]), sum_of_maps(call, [conv.comb_lin], [x])
    normalised = Scaling.GCN if conv.add_self_loops else Scaling.GCN_NO_LOOPS

    def summed(aggr: str) -> Value:
        if aggr == "symnorm":
            return call.aggregate(bases, normalised)
        if aggr == "std":
            return assembly.rowwise(call.where, lambda rows: rows.clamp(min=1e-5).sqrt(), [summed("var")])
        if aggr in _EG_AGGREGATIONS:
            return lower_aggregation(_EG_AGGREGATIONS[aggr](), call, bases)
        return aggregated(call, bases, aggr, conv)

    sums = [*map(summed, conv.aggregators)]
    width = conv.out_channels // heads

    def combined(weights_RW: Tensor, *sums_RB: Tensor) -> Tensor:
        weights_RHB = weights_RW.view(len(weights_RW), heads, -1)
        bases_RBO = torch.cat(sums_RB, dim=-1).view(len(weights_RW), -1, width)
        return torch.matmul(weights_RHB, bases_RBO).view(len(weights_RW), heads * width)

    total = assembly.rowwise(call.where, combined, [weights, *sums])
    return assembly.sum([(1.0, total)], bias_of(conv))


def lower_hypergraph(conv: Any, call: Call) -> Value:
    check_sum(conv, call)
    if call.arguments.get("hyperedge_weight") is not None:
        raise call.refuse("weights of hyperedges are not supported")
    if conv.flow != "source_to_target":
        raise call.refuse(f"flow={conv.flow!r} is not supported")
    if conv.use_attention:
        return _attending_hypergraph(conv, call)
    x, back = call.matrix("x"), call.over(Graph(flipped=not call.flipped))
    if is_linear(conv.lin) and conv.lin.bias is None:
        of_hyperedges = call.aggregate_product(x, conv.lin.weight, Scaling.MEAN)
    else:
        of_hyperedges = call.aggregate(sum_of_maps(call, [conv.lin], [x]), Scaling.MEAN)
    return call.assembly.sum([(1.0, back.aggregate(of_hyperedges, Scaling.MEAN))], bias_of(conv))


def _attending_hypergraph(conv: Any, call: Call) -> Value:
    """Lower HypergraphConv's attention: α_e = exp(s_e - l), with the score s_e of a node and a hyperedge, and l the
    logarithm of the sum over the nodes of a hyperedge or the hyperedges of a node. l is found once and passed to both
    sums, which run as they are, the second one against the edges."""
    assembly, edges, back = call.assembly, Graph(flipped=call.flipped), Graph(flipped=not call.flipped)
    x, of_hyperedges = call.matrix("x"), call.matrix("hyperedge_attr")
    if conv.training and conv.dropout:
        raise call.refuse(f"dropout={conv.dropout} drops alike from two sums in opposite directions; set it to 0")

    def scored(rows: Value, part: slice) -> Value:
        def scores(rows_RC: Tensor) -> Tensor:
            by_head: Tensor = rows_RC.view(len(rows_RC), conv.heads, -1) * conv.att[..., part]
            return by_head.sum(dim=-1)

        return assembly.rowwise(call.where, scores, [rows], (conv.att,))

    x, mapped = (sum_of_maps(call, [conv.lin], [rows]) for rows in (x, of_hyperedges))
    node, edge = scored(x, slice(conv.out_channels)), scored(mapped, slice(conv.out_channels, None))
    known = assembly.setting.traced
    softmax, mean = known.setdefault(
        (conv, "hypergraph"), (_Normaliser(conv.negative_slope), _AttendingMean(conv.negative_slope))
    )
    by_hyperedge = conv.attention_mode == "node"
    given = len(assembly.convolved)
    own, other = (edge, node) if by_hyperedge else (node, edge)
    lse = lower_opaque(softmax, call.where, [own, other, edges if by_hyperedge else back], {}, assembly)
    found = x
    for own, other, graph, is_own in ((edge, node, edges, by_hyperedge), (node, edge, back, not by_hyperedge)):
        found = lower_opaque(mean, call.where, [found, own, other, lse, graph, is_own], {}, assembly)
    del assembly.convolved[given:]
    return assembly.sum([(1.0, join_heads(conv, call, found))], bias_of(conv))


class _Normaliser(nn.Module):
    """log Σ exp(s) over the edges into each row, head by head, with scores of both ends [S, H]."""

    def __init__(self, negative_slope: float) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def scores(self, own: Tensor, other: Tensor, edge_index: Tensor) -> Tensor:
        return F.leaky_relu(own[edge_index[1]] + other[edge_index[0]], self.negative_slope)

    def forward(self, own: Tensor, other: Tensor, edge_index: Tensor) -> Tensor:
        scores_EH, into = self.scores(own, other, edge_index), edge_index[1]
        highest = scatter(scores_EH.detach(), into, dim_size=len(own), reduce="max")
        total = scatter((scores_EH - highest[into]).exp(), into, dim_size=len(own), reduce="sum")
        lse_SH: Tensor = highest + total.clamp(min=1e-16).log()
        return lse_SH


class _AttendingMean(_Normaliser):
    """Σ exp(s - l) v over the edges into each row, divided by their number; ``lse`` is the row's own or its
    neighbour's."""

    def forward(  # type: ignore[override]
        self, values: Tensor, own: Tensor, other: Tensor, lse: Tensor, edge_index: Tensor, lse_is_own: bool
    ) -> Tensor:
        source, into = edge_index
        alpha_EH = (self.scores(own, other, edge_index) - lse[into if lse_is_own else source]).exp()
        values_EHC = values.view(len(values), alpha_EH.shape[1], -1)[source]
        messages = (alpha_EH[:, :, None] * values_EHC).flatten(1)
        mean_SO: Tensor = scatter(messages, into, dim_size=len(values), reduce="mean")
        return mean_SO
