# SPDX-License-Identifier: Apache-2.0
"""PNAConv as values, if its message is one linear map of both ends; and PNA's aggregations for other layers.

Such a message is m_e = a_i + c_j, the row's own share plus the neighbour's. So every aggregation that PNA names is one
of c_j alone, with a_i added afterwards: sums and means, maxima, minima as maxima of -c_j; and the variance is that of
c_j. A row pulls Σ c_j, Σ c_j² and its number of neighbours, and the largest c_j and -c_j; everything else is computed
row by row.

Shapes: R rows, T towers of F columns, K = T·F.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr

from ooc.kernels.tensors import gradients_of
from ooc.model.graph import Scaling
from ooc.model.layers.conformance import Watch
from ooc.model.layers.layer import Call
from ooc.model.layers.per_edge import Maximum
from ooc.model.lowering.symbolic import is_linear, replaced_functions
from ooc.model.lowering.values import RowFunction, Value

_FROM_SQUARES = (aggr.VarAggregation, aggr.StdAggregation)
_EXTREMES = {aggr.MaxAggregation: 1.0, aggr.MinAggregation: -1.0}
_KNOWN_AGGREGATIONS = (aggr.SumAggregation, aggr.MeanAggregation, *_EXTREMES, *_FROM_SQUARES)
_SCALES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "identity": lambda scaled, degree: torch.ones_like(degree),
    "amplification": lambda scaled, degree: torch.log(degree + 1) / scaled.avg_deg_log,
    "attenuation": lambda scaled, degree: scaled.avg_deg_log / torch.log(degree.clamp(min=1) + 1),
    "linear": lambda scaled, degree: degree / scaled.avg_deg_lin,
    "inverse_linear": lambda scaled, degree: scaled.avg_deg_lin / degree.clamp(min=1),
}
"""The factors of DegreeScalerAggregation."""
_ROWS_TRIED = 320, 64
_MARGIN = 1.25
"""A margin for the temporaries of operators."""
_LEAST_VARIANCE = 1e-5
"""The smallest variance of which StdAggregation takes the root; below it the result is 0."""


def aggregators_of(aggregation: Any) -> list[nn.Module]:
    """Return the aggregations that it puts side by side, each scaled by degrees if asked; none if there is no formula
    for it."""
    is_scaled = type(aggregation) is aggr.DegreeScalerAggregation
    several = aggregation.aggr if is_scaled else aggregation
    if is_scaled and not set(aggregation.scaler) <= set(_SCALES):
        return []
    if type(several) is aggr.MultiAggregation and several.mode != "cat":
        return []
    found = [*several.aggrs] if type(several) is aggr.MultiAggregation else [several]
    if replaced_functions(aggregation) or replaced_functions(several):
        return []
    for one in found:
        variance = getattr(one, "var_aggr", one)
        if type(one) not in _KNOWN_AGGREGATIONS or replaced_functions(one) or getattr(variance, "semi_grad", False):
            return []
    return found


def lower_aggregation(aggregation: Any, call: Call, source: Value) -> Value:
    """Return its result over in-neighbours, if ``aggregators_of`` gives some."""
    aggregators, assembly, columns = aggregators_of(aggregation), call.assembly, source.columns
    if type(aggregation) is aggr.MinAggregation:
        return assembly.sum([(-1.0, call.per_edge(Maximum, assembly.sum([(-1.0, source)])))])

    def found(total_RW: Tensor, *largest_RW: Tensor) -> Tensor:
        together = torch.cat(_finish_aggregations(aggregators, 0.0, columns, total_RW, *largest_RW), dim=1)
        return _scale_by_degree(aggregation, together, total_RW[:, -1:])

    inputs, parameters = _pull_moments(call, source, aggregators), [*aggregation.parameters()]
    inner = _count_live_columns(found, [value.tail for value in inputs], parameters, assembly.setting.dtype)
    return assembly.rowwise(call.where, found, inputs, parameters, inner_columns=inner)


def lower_pna(conv: Any, call: Call) -> Value:
    """Lower PNAConv, if maps after the aggregation draw no random numbers and those before it are linear."""
    is_scaled, drawn = type(conv.aggr_module) is aggr.DegreeScalerAggregation, (nn.RReLU, nn.Dropout, nn.AlphaDropout)
    linear = conv.edge_dim is None and all(len(net) == 1 and is_linear(net[0]) for net in conv.pre_nns)
    draws = any(isinstance(part, drawn) for part in conv.post_nns.modules())
    call.needs(is_scaled and linear and not draws and bool(aggregators_of(conv.aggr_module)))
    x, assembly = call.matrix("x"), call.assembly
    towers, columns = conv.towers, conv.towers * conv.F_in
    aggregators = aggregators_of(conv.aggr_module)
    firsts = [net[0] for net in conv.pre_nns]
    matrices, biases = [one.weight for one in firsts], [one.bias for one in firsts if one.bias is not None]

    def part_of(side: int) -> Tensor:
        parts = [matrix[:, side * conv.F_in : (side + 1) * conv.F_in] for matrix in matrices]
        joined: Tensor = torch.block_diag(*parts) if conv.divide_input else torch.cat(parts)  # type: ignore[no-untyped-call]
        return joined

    def of_own() -> tuple[Tensor, Tensor | None]:
        return part_of(0), torch.cat(biases) if biases else None

    own = assembly.projection(x, of_own, (*matrices, *biases))
    source = assembly.projection(x, lambda: (part_of(1), None), matrices)
    inputs = [x, own, *_pull_moments(call, source, aggregators)]

    def updated(x_RC: Tensor, own_RK: Tensor, total_RW: Tensor, *largest_RW: Tensor) -> Tensor:
        found = _finish_aggregations(aggregators, own_RK, columns, total_RW, *largest_RW)
        by_tower = torch.cat([one.view(-1, towers, conv.F_in) for one in found], dim=2)
        own_RTF = x_RC.view(-1, towers, conv.F_in) if conv.divide_input else x_RC[:, None].expand(-1, towers, -1)
        joined = torch.cat([own_RTF, _scale_by_degree(conv.aggr_module, by_tower, total_RW[:, -1:, None])], dim=2)
        return torch.cat([net(joined[:, tower]) for tower, net in enumerate(conv.post_nns)], dim=1)

    parameters = [*conv.post_nns.parameters(), *conv.aggr_module.parameters()]
    inner = _count_live_columns(updated, [value.tail for value in inputs], parameters, assembly.setting.dtype)
    rows = assembly.rowwise(call.where, updated, inputs, parameters, heavy=True, inner_columns=inner)
    return call.apply(conv.lin, rows)


def _pull_moments(call: Call, source: Value, aggregators: Sequence[nn.Module]) -> list[Value]:
    """Return what rows pull for these aggregations: Σ c_j and Σ c_j², if needed, and their number; and the largest c_j
    or -c_j, or both, for extremes."""
    are_extremes, squared = (
        [isinstance(one, kind) for one in aggregators] for kind in (tuple(_EXTREMES), _FROM_SQUARES)
    )

    def summands(rows: Tensor) -> Tensor:
        powers = [rows] * (not all(are_extremes)) + [rows * rows] * any(squared)
        return torch.cat((*powers, torch.ones_like(rows[:, :1])), dim=1)

    found: list[Value] = [call.aggregate(call.assembly.rowwise(call.where, summands, [source]), Scaling.SUM)]
    signs = [sign for kind, sign in _EXTREMES.items() if any(type(one) is kind for one in aggregators)]
    if signs:
        both = call.assembly.rowwise(call.where, lambda r: torch.cat([sign * r for sign in signs], dim=1), [source])
        found.append(call.per_edge(Maximum, both))
    return found


def _finish_aggregations(
    aggregators: Sequence[nn.Module], own: Tensor | float, columns: int, total_RW: Tensor, *largest_RW: Tensor
) -> list[Tensor]:
    """Return the result of each aggregation of messages a_i + c_j, where ``own`` is a, with this many columns."""
    degree_R1 = total_RW[:, -1:]
    count_R1, sum_RK = degree_R1.clamp(min=1), total_RW[:, :columns]
    mean_RK = sum_RK / count_R1

    def of(one: nn.Module) -> Tensor:
        match one:
            case aggr.SumAggregation():
                return sum_RK + degree_R1 * own
            case aggr.MeanAggregation():
                return (mean_RK + own).masked_fill(degree_R1 == 0, 0.0)
            case aggr.MaxAggregation():
                return (own + largest_RW[0][:, :columns]).masked_fill(degree_R1 == 0, 0.0)
            case aggr.MinAggregation():
                return (own - largest_RW[0][:, -columns:]).masked_fill(degree_R1 == 0, 0.0)
            case _:
                variance_RK = total_RW[:, columns:-1] / count_R1 - mean_RK * mean_RK
                if isinstance(one, aggr.VarAggregation):
                    return variance_RK
                root_RK = variance_RK.clamp(min=_LEAST_VARIANCE).sqrt()
                return root_RK.masked_fill(root_RK <= math.sqrt(_LEAST_VARIANCE), 0.0)

    return [of(one) for one in aggregators]


def _scale_by_degree(aggregation: Any, rows: Tensor, degree: Tensor) -> Tensor:
    """Return rows times the factors of a DegreeScalerAggregation, side by side; unscaled for other aggregations."""
    if type(aggregation) is not aggr.DegreeScalerAggregation:
        return rows
    return torch.cat([rows * _SCALES[name](aggregation, degree) for name in aggregation.scaler], dim=-1)


def _count_live_columns(
    function: RowFunction, tails: Sequence[Sequence[int]], parameters: Sequence[Tensor], dtype: torch.dtype
) -> int:
    """Return the numbers a row that ``function`` and its gradient have alive at once, measured by adding rows."""

    def peak_bytes(rows: int) -> int:
        given = [torch.ones(rows, *tail, dtype=dtype, requires_grad=True) for tail in tails]

        def run() -> None:
            with torch.enable_grad():
                made = function(*given)
            gradients_of([made], [*given, *parameters], [torch.ones_like(made)])

        return Watch.of(run, given).peak_bytes

    more, few = (peak_bytes(rows) for rows in _ROWS_TRIED)
    return math.ceil(_MARGIN * (more - few) / (_ROWS_TRIED[0] - _ROWS_TRIED[1]) / dtype.itemsize)
