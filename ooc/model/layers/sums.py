# SPDX-License-Identifier: Apache-2.0
"""What convolutions that sum over neighbours have in common: scalings, maps of rows and of sums, biases."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch_geometric.nn.aggr import AttentionalAggregation, DeepSetsAggregation, Set2Set, SoftmaxAggregation

from ooc.kernels.functions import Rectified
from ooc.model.graph import Scaling
from ooc.model.layers.attention import is_rowwise, lower_attentional, lower_set2set
from ooc.model.layers.edge_functions import NO_TERM, EdgeTerm, FunctionAttention
from ooc.model.layers.layer import Call
from ooc.model.layers.per_edge import AttentionOptions, Maximum
from ooc.model.layers.principal import aggregators_of, lower_aggregation
from ooc.model.lowering.symbolic import is_linear, replaced_functions
from ooc.model.lowering.values import Value
from ooc.plan.workload import EdgeData

SUMS = ("add", "sum")
VARIANCE_PRESERVING = "VariancePreservingAggregation()"
ALL_KNOWN = (*SUMS, "mean", "max", VARIANCE_PRESERVING)
"""The aggregations that there is a formula for."""


Mapped = tuple[Value, list[nn.Parameter]]
"""A product of rows, with a bias that is still to be added."""


def total(call: Call, parts: Iterable[Mapped], biases: Sequence[nn.Parameter] = ()) -> Value:
    """Return the sum of maps with ``biases`` and their own."""
    products, of_maps = zip(*parts, strict=True)
    return call.assembly.sum([(1.0, one) for one in products], [*biases, *chain(*of_maps)])


def linear_of_rows(call: Call, linear: Any, rows: Value) -> Mapped:
    """Return a linear map of rows, or of what replaces it, with a bias that is still to be added."""
    if not is_linear(linear):
        return call.apply(linear, rows), []
    return call.assembly.linear(rows, linear.weight), bias_of(linear)


def sum_of_maps(
    call: Call, linears: Iterable[Any], rows: Iterable[Value], biases: Sequence[nn.Parameter] = ()
) -> Value:
    """Return the sum of linear maps of rows, or of what replaces them, with ``biases``."""
    return total(call, [linear_of_rows(call, *pair) for pair in zip(linears, rows, strict=True)], biases)


def aggregated(call: Call, x: Value, aggr: Any, conv: Any) -> Value:
    """Return A x with ``aggr``, an aggregation of ``conv``. Raises NoFormulaError if there is no formula for it."""
    if aggr == "max":
        return call.per_edge(Maximum, x)
    if aggr == VARIANCE_PRESERVING:
        summed = sum_and_degree(call, x)
        return call.assembly.rowwise(call.where, lambda s: s[:, :-1] / s[:, -1:].sqrt().clamp(min=1.0), [summed])
    if aggr in (*SUMS, "mean"):
        return call.aggregate(x, Scaling.MEAN if aggr == "mean" else Scaling.SUM)
    module: Any = conv.aggr_module
    if aggregators_of(module):
        return lower_aggregation(module, call, x)
    lower = _LOWERINGS.get(type(module))
    if lower is None:
        return softmax_of(conv, call, x)
    call.needs(not replaced_functions(module))
    return lower(module, call, x)


def _lower_deep_sets(aggregation: Any, call: Call, x: Value) -> Value:
    """Lower DeepSetsAggregation: a network of the sum over in-neighbours of another network, which must be known to
    work row by row."""
    call.needs(aggregation.local_mlp is None is aggregation.global_mlp)  # PyG computes these for the edges
    call.needs(aggregation.local_nn is None or is_rowwise(aggregation.local_nn))
    rows = x if aggregation.local_nn is None else call.apply(aggregation.local_nn, x)
    summed = call.aggregate(rows, Scaling.SUM)
    return summed if aggregation.global_nn is None else call.apply(aggregation.global_nn, summed)


_LOWERINGS: dict[type[nn.Module], Callable[[Any, Call, Value], Value]] = {
    AttentionalAggregation: lower_attentional,
    DeepSetsAggregation: _lower_deep_sets,
    Set2Set: lower_set2set,
}


def softmax_of(conv: Any, call: Call, x: Value, term: EdgeTerm = NO_TERM, eps: float = 0.0) -> Value:
    """Return the messages that ``Rectified`` makes of x and a ``term`` of edges, weighted by a softmax over themselves.
    Raises NoFormulaError if ``conv`` sums them in another way, or there is no program."""
    softmax: Any = conv.aggr_module
    is_plain = type(softmax) is SoftmaxAggregation and not (softmax.learn or softmax.semi_grad)
    call.needs(is_plain and not replaced_functions(softmax) and call.assembly.setting.on_cpu)
    function, options = Rectified(softmax.t, eps), AttentionOptions(x.columns, 1)
    make = partial(FunctionAttention, options=options, functions=lambda groups: function, term=term)
    return call.per_edge(make, x)


def sum_and_degree(call: Call, x: Value, *, weighted: bool = False) -> Value:
    """Return the sum over neighbours, followed by their number, or by the sum of their edges' weights."""
    with_ones = call.assembly.rowwise(call.where, lambda rows: F.pad(rows, (0, 1), value=1.0), [x])
    return call.aggregate(with_ones, Scaling.WEIGHTED_SUM if weighted else Scaling.SUM)


def linear_of_sum(call: Call, linear: Any, rows: Value, scaling: Scaling, hops: int = 1) -> Mapped:
    """Return the linear map of A^hops(rows), in the cheaper order."""
    if is_linear(linear):
        return call.aggregate_product(rows, linear.weight, scaling, hops), bias_of(linear)
    for _ in range(hops):
        rows = call.aggregate(rows, scaling)
    return call.apply(linear, rows), []


def bias_of(module: Any) -> list[nn.Parameter]:
    return [] if module.bias is None else [module.bias]


def gcn_scaling(conv: Any, call: Call) -> Scaling:
    """Return GCN's normalisation with this convolution's options."""
    check_sum(conv, call)
    weighted = call.takes("edge_weight", EdgeData.WEIGHT)
    if not getattr(conv, "normalize", True):
        return Scaling.WEIGHTED_SUM if weighted else Scaling.SUM
    return normalization_of(conv, weighted=weighted)


def normalization_of(conv: Any, *, weighted: bool) -> Scaling:
    """Return the normalisation of a convolution by its options."""
    loops = getattr(conv, "add_self_loops", False)  # TAGConv has none
    return normalization(weighted=weighted, loops=loops, improved=getattr(conv, "improved", False))


def normalization(*, weighted: bool, loops: bool, improved: bool) -> Scaling:
    """Return the normalisation of ``gcn_norm`` by its arguments."""
    if not loops:
        return Scaling.WEIGHTED_GCN_NO_LOOPS if weighted else Scaling.GCN_NO_LOOPS
    if not weighted:
        return Scaling.GCN
    return Scaling.WEIGHTED_GCN_IMPROVED if improved else Scaling.WEIGHTED_GCN


def check_sum(conv: Any, call: Call) -> None:
    if conv.aggr not in SUMS:
        raise call.refuse(f"aggr={conv.aggr!r} is not supported; {type(conv).__name__} sums")
