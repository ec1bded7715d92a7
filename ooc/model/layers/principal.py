# SPDX-License-Identifier: Apache-2.0
"""PNAConv as values, where what it makes of an edge is one linear map of both ends.

Such a message is m_e = a_i + c_j, the row's own share and the neighbour's, so that every aggregation that PNA names is
one of c_j alone, with a_i put on afterwards: sums and means, maxima, minima as maxima of -c_j; and a variance is that
of c_j. So a row pulls Σ c_j, Σ c_j² and how many neighbours it has, and the largest c_j and -c_j; all else is computed
row by row.

Shapes: R rows, T towers of F columns, K = T·F.
"""

import math
from collections.abc import Sequence
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

_SQUARES = (aggr.VarAggregation, aggr.StdAggregation)
_EXTREMES = (aggr.MaxAggregation, aggr.MinAggregation)
_KNOWN = (aggr.SumAggregation, aggr.MeanAggregation, *_EXTREMES, *_SQUARES)
_ROWS_TRIED = 320, 64
_MARGIN = 1.25
"""For what operators need for themselves."""
_LEAST_VARIANCE = 1e-5
"""Of which StdAggregation takes the root; below it, 0."""


def has_formula(conv: Any) -> bool:
    """Whether its options are those that the formula here is for."""
    scaled = conv.aggr_module
    if type(scaled) is not aggr.DegreeScalerAggregation or replaced_functions(scaled):
        return False
    several = scaled.aggr
    if type(several) is not aggr.MultiAggregation or several.mode != "cat" or conv.edge_dim is not None:
        return False
    for one in several.aggrs:
        variance = getattr(one, "var_aggr", one)
        if type(one) not in _KNOWN or replaced_functions(one) or getattr(variance, "semi_grad", False):
            return False
    drawn = (nn.RReLU, nn.Dropout, nn.AlphaDropout)
    return all(len(net) == 1 and is_linear(net[0]) for net in conv.pre_nns) and not any(
        isinstance(part, drawn) for part in conv.post_nns.modules()
    )


def lower_pna(conv: Any, call: Call) -> Value:
    """PNAConv."""
    x, assembly = call.matrix("x"), call.assembly
    towers, columns = conv.towers, conv.towers * conv.F_in
    aggregators = list(conv.aggr_module.aggr.aggrs)
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
    with_squares = any(isinstance(one, _SQUARES) for one in aggregators)
    inputs = [x, own, _totals(call, source, with_squares=with_squares)]
    if any(isinstance(one, _EXTREMES) for one in aggregators):
        both = assembly.rowwise(call.where, lambda rows: torch.cat((rows, -rows), dim=1), [source])
        inputs.append(call.per_edge(Maximum, both))

    def updated(x_RC: Tensor, own_RK: Tensor, total_RW: Tensor, *largest_RW: Tensor) -> Tensor:
        degree_R1 = total_RW[:, -1:]
        count_R1, sum_RK = degree_R1.clamp(min=1), total_RW[:, :columns]
        mean_RK = sum_RK / count_R1

        def found(one: nn.Module) -> Tensor:
            match one:
                case aggr.SumAggregation():
                    return sum_RK + degree_R1 * own_RK
                case aggr.MeanAggregation():
                    return (mean_RK + own_RK).masked_fill(degree_R1 == 0, 0.0)
                case aggr.MaxAggregation():
                    return (own_RK + largest_RW[0][:, :columns]).masked_fill(degree_R1 == 0, 0.0)
                case aggr.MinAggregation():
                    return (own_RK - largest_RW[0][:, columns:]).masked_fill(degree_R1 == 0, 0.0)
                case _:
                    variance_RK = total_RW[:, columns:-1] / count_R1 - mean_RK * mean_RK
                    if isinstance(one, aggr.VarAggregation):
                        return variance_RK
                    root_RK = variance_RK.clamp(min=_LEAST_VARIANCE).sqrt()
                    return root_RK.masked_fill(root_RK <= math.sqrt(_LEAST_VARIANCE), 0.0)

        by_tower = torch.cat([found(one).view(-1, towers, conv.F_in) for one in aggregators], dim=2)
        scaled = [by_tower * _scale(conv.aggr_module, name, degree_R1[:, :, None]) for name in conv.aggr_module.scaler]
        own_RTF = x_RC.view(-1, towers, conv.F_in) if conv.divide_input else x_RC[:, None].expand(-1, towers, -1)
        joined = torch.cat([own_RTF, *scaled], dim=2)
        return torch.cat([net(joined[:, tower]) for tower, net in enumerate(conv.post_nns)], dim=1)

    parameters = [*conv.post_nns.parameters(), *conv.aggr_module.parameters()]
    inner = _columns_made(updated, [value.tail for value in inputs], parameters, assembly.setting.dtype)
    rows = assembly.rowwise(call.where, updated, inputs, parameters, heavy=True, inner_columns=inner)
    return call.apply(conv.lin, rows)


def _columns_made(
    function: RowFunction, tails: Sequence[Sequence[int]], parameters: Sequence[Tensor], dtype: torch.dtype
) -> int:
    """Numbers a row that ``function`` and its gradient have alive at once, by what they take on some more rows."""

    def peak_bytes(rows: int) -> int:
        given = [torch.ones(rows, *tail, dtype=dtype, requires_grad=True) for tail in tails]

        def run() -> None:
            with torch.enable_grad():
                made = function(*given)
            gradients_of([made], [*given, *parameters], [torch.ones_like(made)])

        return Watch.of(run, given).peak_bytes

    more, few = (peak_bytes(rows) for rows in _ROWS_TRIED)
    return math.ceil(_MARGIN * (more - few) / (_ROWS_TRIED[0] - _ROWS_TRIED[1]) / dtype.itemsize)


def _totals(call: Call, source: Value, *, with_squares: bool) -> Value:
    """Σ c_j, with Σ c_j² where that is asked for, and how many there are."""

    def summands(rows: Tensor) -> Tensor:
        squares = [rows * rows] if with_squares else []
        return torch.cat((rows, *squares, torch.ones_like(rows[:, :1])), dim=1)

    return call.aggregate(call.assembly.rowwise(call.where, summands, [source]), Scaling.SUM)


def _scale(scaled: Any, name: str, degree: Tensor) -> Tensor:
    """What DegreeScalerAggregation multiplies by."""
    linear: Tensor = scaled.avg_deg_lin
    logarithm: Tensor = scaled.avg_deg_log
    match name:
        case "amplification":
            return torch.log(degree + 1) / logarithm
        case "attenuation":
            return logarithm / torch.log(degree.clamp(min=1) + 1)
        case "linear":
            return degree / linear
        case "inverse_linear":
            return linear / degree.clamp(min=1)
        case _:
            return torch.ones_like(degree)
