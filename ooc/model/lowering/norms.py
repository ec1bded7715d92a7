# SPDX-License-Identifier: Apache-2.0
"""Norms as values. Norms of a row are functions of rows; the others are functions of rows and of the moments over all
rows.

All of torch's and PyG's norms over nodes follow from two statistics of every column, the mean and the biased variance.
The statistics over all numbers, for PairNorm and LayerNorm(mode="graph"), are sums of these over columns.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as gnn

from ooc.errors import ModelError
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Codes, Value


def lower_norm(norm: nn.Module, where: str, source: Value, assembly: Assembly, *, has_batch: bool) -> Value:
    """Return ``norm`` of all rows of ``source`` as one graph. ``has_batch``: it is given a batch, with which PyG's
    LayerNorm has another ε."""
    if type(norm) is gnn.LayerNorm:
        return _layer_norm(norm, where, source, assembly, has_batch=has_batch)
    lower = _LOWERINGS.get(type(norm))
    if lower is None:
        raise ModelError(f"norm {where} is not supported")
    found = lower(norm, where, source, assembly)
    for moments in assembly.observed:
        moments.of = moments.of or where
    return found


def _batch_norm(norm: Any, where: str, source: Value, assembly: Assembly) -> Value:
    inner: Any = getattr(norm, "module", norm)  # PyG's layer wraps a BatchNorm1d
    kind = type(inner)
    if kind is not nn.BatchNorm1d:
        raise ModelError(f"norm {where}: a {kind.__name__} in it is not supported")
    tracked = inner.running_mean is not None
    alone = getattr(norm, "allow_single_element", False) and assembly.num_rows(source) <= 1
    if alone or (tracked and not inner.training):
        return _by_running_statistics(inner, where, source, assembly)

    def share() -> float:
        inner.num_batches_tracked.add_(1)
        return 1.0 / float(inner.num_batches_tracked) if inner.momentum is None else float(inner.momentum)

    tracks = tracked and inner.training and inner.track_running_stats
    return _standardise(inner, where, source, assembly, share if tracks else None)


def _instance_norm(norm: Any, where: str, source: Value, assembly: Assembly) -> Value:
    if not (norm.training or not norm.track_running_stats):
        return _by_running_statistics(norm, where, source, assembly)
    tracks = norm.training and norm.running_mean is not None
    return _standardise(norm, where, source, assembly, (lambda: float(norm.momentum)) if tracks else None)


def _by_running_statistics(norm: Any, where: str, source: Value, assembly: Assembly) -> Value:
    def function(x: Tensor) -> Tensor:
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)

    found = assembly.rowwise(where, function, [source], tuple(norm.parameters()))
    found.running = norm.running_mean
    return found


def _standardise(norm: Any, where: str, source: Value, assembly: Assembly, share: Callable[[], float] | None) -> Value:
    """Return (x - mean) / √(variance + ε), followed by the affine map, if there is one. Running statistics move by
    ``share`` towards an epoch's, whose variance is unbiased, as in torch; None: there are none."""
    if assembly.num_rows(source) <= 1:
        raise ModelError(f"norm {where} needs more than one node to train on")

    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return _affine((x - mean) * torch.rsqrt(variance + norm.eps), norm.weight, norm.bias)

    def update(mean: Tensor, variance: Tensor, count: int) -> None:
        assert share is not None
        part = share()
        for running, now in ((norm.running_mean, mean), (norm.running_var, variance * (count / (count - 1)))):
            running.mul_(1 - part).add_(now.to(running.dtype), alpha=part)

    found = assembly.normalized(source, function, tuple(norm.parameters()), None if share is None else update)
    if share is not None:
        assembly.observed[-1].running = norm.running_mean
    return found


def _layer_norm(norm: Any, where: str, source: Value, assembly: Assembly, *, has_batch: bool) -> Value:
    if norm.mode == "node":
        return assembly.rowwise(where, lambda x: norm(x), [source], tuple(norm.parameters()))
    if norm.mode != "graph":
        raise ModelError(f"norm {where}: mode={norm.mode!r} is not supported")

    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        centre = mean.mean()
        spread = (variance + (mean - centre).square()).mean()
        if has_batch:
            return _affine((x - centre) / (spread + norm.eps).sqrt(), norm.weight, norm.bias)
        # Without variance there is no gradient, as in torch's std.
        deviation = spread.clamp(min=torch.finfo(x.dtype).tiny).sqrt()
        return _affine((x - centre) / (deviation + norm.eps), norm.weight, norm.bias)

    return assembly.normalized(source, function, tuple(norm.parameters()))


def _graph_norm(norm: Any, where: str, source: Value, assembly: Assembly) -> Value:
    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        centred = x - mean * norm.mean_scale
        spread = variance + (mean - mean * norm.mean_scale).square()
        return _affine(centred / (spread + norm.eps).sqrt(), norm.weight, norm.bias)

    return assembly.normalized(source, function, tuple(norm.parameters()))


def lower_hetero_batch_norm(norm: Any, where: str, source: Value, codes: Codes, assembly: Assembly) -> Value:
    """Return PyG's norm of each type's rows by itself, from the moments of one column for each type and each column of
    rows, which is zero in rows of other types. No gradient goes through its statistics."""
    types, tiny = norm.num_types, torch.finfo(assembly.setting.dtype).tiny

    def normalised(x: Tensor, kind: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        out = (x - mean[kind]) / variance.clamp(norm.eps).sqrt()[kind]
        return out * norm.weight[kind] + norm.bias[kind] if norm.affine else out

    def of_types(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the fractions of rows of each type [T], and means [T, C] and biased variances, from the moments of the
        matrix with separate columns."""
        share, first = mean[:types], mean[types:].view(types, -1)
        second, part = variance[types:].view(types, -1) + first.square(), share[:, None].clamp(min=tiny)
        return share, first / part, second / part - (first / part).square()

    def separate_columns(x: Tensor, rows: Tensor) -> Tensor:
        """Return rows with separate columns for types [R, T + T C]."""
        is_of_type = F.one_hot(codes.of(rows), types).to(x.dtype)
        return torch.cat((is_of_type, (is_of_type[:, :, None] * x[:, None]).flatten(1)), dim=1)

    def update(mean: Tensor, variance: Tensor, count: int) -> None:
        share, *found = of_types(mean, variance)
        if norm.momentum is None:
            norm.num_batches_tracked.add_(1)
        part = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        for running, now in zip((norm.running_mean, norm.running_var), found, strict=True):
            running[share > 0] += part * (now.to(running.dtype) - running)[share > 0]

    inputs, parameters = [source, codes.rows], tuple(norm.parameters())
    if norm.track_running_stats and not norm.training:
        return assembly.rowwise(
            where,
            lambda x, rows: normalised(x, codes.of(rows), norm.running_mean, norm.running_var),
            inputs,
            parameters,
        )
    apart = assembly.detached(where, separate_columns, inputs)
    moments = assembly.moments(apart, update if norm.track_running_stats else None)
    assembly.observed += [moments] if norm.track_running_stats else []

    def by_moments(x: Tensor, rows: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return normalised(x, codes.of(rows), *of_types(mean, variance)[1:])

    return assembly.rowwise(where, by_moments, inputs, parameters, moments=[moments])


def _pair_norm(norm: Any, where: str, source: Value, assembly: Assembly) -> Value:
    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        centred = x - mean
        length = centred.norm(2, -1, keepdim=True) + eps if individually else (variance.sum() + eps).sqrt()
        return scale * centred / length

    scale, eps, individually = float(norm.scale), float(norm.eps), bool(norm.scale_individually)
    return assembly.normalized(source, function, ())


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


_LOWERINGS: dict[type[nn.Module], Callable[[Any, str, Value, Assembly], Value]] = {
    gnn.BatchNorm: _batch_norm,
    nn.BatchNorm1d: _batch_norm,
    gnn.InstanceNorm: _instance_norm,
    gnn.GraphNorm: _graph_norm,
    gnn.PairNorm: _pair_norm,
    gnn.MeanSubtractionNorm: lambda norm, where, x, assembly: assembly.normalized(x, lambda x, mean, _: x - mean, ()),
    gnn.GraphSizeNorm: lambda norm, where, x, assembly: assembly.sum([(assembly.num_rows(x) ** -0.5, x)]),
}
OF_TYPES = (gnn.HeteroBatchNorm, gnn.HeteroLayerNorm)
"""The norms that are given each row's type."""
NORMS: tuple[type[nn.Module], ...] = (*_LOWERINGS, gnn.LayerNorm, gnn.MessageNorm, *OF_TYPES)
"""Norms that are lowered as a whole. DiffGroupNorm is traced instead: it is made of a linear map, a softmax and a
BatchNorm."""
