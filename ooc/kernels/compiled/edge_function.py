# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.edge_function``'s pulls as compiled loops. Shapes as there."""

import math

import numpy as np
import torch
from torch import Tensor

from ooc.kernels.compiled import attention, dots, gat, sums
from ooc.kernels.compiled.loops import Walk, array, computed, matrices
from ooc.kernels.compiled.terms import Terms, readable
from ooc.kernels.edge_function import EdgeMessages, TargetLayout, Upstream
from ooc.kernels.functions import Gatv2, GatWithFeatures, Product, Rectified, TransformerAttention
from ooc.kernels.tensors import typed
from ooc.plan.workload import Direction

Function = Gatv2 | GatWithFeatures | Product | Rectified | TransformerAttention
"""The functions for which there are loops."""


def _prepare(edges: EdgeMessages, pulled: Tensor, direction: Direction) -> tuple[Function, Walk, Terms]:
    """Return what is computed of edges, a walk over the edges that pull these rows, and the edges' terms."""
    tile, heads = readable(edges.tile, pulled), edges.heads
    given = () if heads is None else (heads.heads, heads.dropout, direction)
    assert isinstance(edges.function, Function), "it has no loop"
    return edges.function, Walk.over(tile, pulled, *given), Terms.of(edges.terms, tile, pulled)


def _softmax_constants(function: Rectified) -> tuple[bool, float, float]:
    """Return whether there is a softmax, ε and the temperature."""
    return function.temperature is not None, float(function.eps), float(function.temperature or 0.0)


@torch.no_grad()
def pull_messages(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, columns: int
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_messages``."""
    rows, heads, dtype = edges.tile.rows, edges.heads, computed(source_NW)
    out_RO = torch.empty(rows, columns, dtype=dtype)
    lse_RH = torch.empty(rows, 0 if heads is None else len(heads.heads), dtype=dtype)
    source, target, out, lse = array(source_NW), array(typed(target_RV, dtype)), array(out_RO), array(lse_RH)
    function, walk, terms = _prepare(edges, source_NW, Direction.IN)
    match function:
        case Gatv2() | GatWithFeatures():
            scores = attention.Scores.of(function, walk, columns // lse.shape[1], 2)
            attention.attend(walk, terms, scores, source, target, out, lse)
        case TransformerAttention():
            scale, edge_buffers = 1 / math.sqrt(columns // function.heads), matrices(walk, 2)
            dots.attend(
                walk, terms, scale, source, target, edge_buffers, dots.feature_buffers(walk, terms, 2), out, lse
            )
        case Product():
            factors = sums.Factors.of(function)
            sums.product(walk, terms, factors, source, target, function.groups, sums.registers(out), out)
        case Rectified(temperature=None):
            sums.rectified(walk, terms, source, float(function.eps), sums.registers(out), out)
        case Rectified():
            constants, softmax = _softmax_constants(function)[1:], np.empty((2, columns), out.dtype)
            sums.softmax(walk, terms, source, constants, sums.registers(out), softmax, out, lse)
    return out_RO, None if heads is None else lse_RH


@torch.no_grad()
def pull_source_gradients(edges: EdgeMessages, *, source_RW: Tensor, target_NP: Tensor, layout: TargetLayout) -> Tensor:
    """As ``edge_function.pull_source_gradients``; everything is computed again."""
    own_RW = typed(source_RW, computed(target_NP))
    out_RW = torch.empty_like(own_RW, memory_format=torch.contiguous_format)
    own, target, out = array(own_RW), array(target_NP), array(out_RW)
    nothing = np.empty((0, 0), out.dtype)
    function, walk, terms = _prepare(edges, target_NP, Direction.OUT)
    match function:
        case Gatv2():
            scores = attention.Scores.of(function, walk, layout.message, 6)
            attention.pull_sources(walk, terms, scores, layout.target, own, target, out)
        case GatWithFeatures():
            columns = function.place, layout.target
            gat.pull_rows(walk, terms, target, own, (layout.groups, 1, False, function.negative_slope, *columns), out)
        case TransformerAttention():
            scale = 1 / math.sqrt(layout.message)
            dots.pull_sources(walk, terms, scale, layout.message, own, target, matrices(walk, 4), out)
        case Product():
            factors, width = sums.Factors.of(function), layout.columns // layout.groups
            numbers, ends = (False, layout.groups, width, width, layout.target), (own, target, target)
            sums.product_gradients(walk, terms, factors, *ends, numbers, sums.registers(out), out, nothing)
        case Rectified():
            assert not layout.loop, "added self-loops have no terms here"
            constants = False, *_softmax_constants(function)
            sums.rectified_gradients(walk, terms, own, target, constants, sums.registers(out), nothing, out, nothing)
    return out_RW


@torch.no_grad()
def pull_target_gradients(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, upstream_R: Upstream, with_map: bool = False
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_target_gradients``; nothing is kept."""
    rows, dtype, of_map = edges.tile.rows, computed(source_NW), edges.terms if with_map else None
    gradient_RO, statistics = typed(upstream_R.gradient, dtype), upstream_R.statistics
    statistics = gradient_RO.new_empty(rows, 0) if statistics is None else typed(statistics, dtype)
    own_RV = typed(target_RV, dtype)
    out_RV = torch.empty_like(own_RV, memory_format=torch.contiguous_format)
    map_RM = out_RV.new_empty(rows, 0 if of_map is None else of_map.map_columns)
    given = source_NW, own_RV, gradient_RO, statistics.reshape(rows, -1), out_RV, map_RM
    source, own, gradient, kept, out, found = map(array, given)
    function, walk, terms = _prepare(edges, source_NW, Direction.IN)
    match function:
        case Gatv2() | GatWithFeatures():
            scores = attention.Scores.of(function, walk, gradient.shape[1] // len(walk.scale_HE), 6)
            attention.pull_targets(walk, terms, scores, source, own, gradient, kept, out, found)
        case TransformerAttention():
            scale, features = 1 / math.sqrt(own.shape[1] // function.heads), dots.feature_buffers(walk, terms, 4)
            dots.pull_targets(
                walk, terms, scale, source, (own, gradient, kept), matrices(walk, 4), features, out, found
            )
        case Product():
            widths = own.shape[1] // function.groups, gradient.shape[1] // function.groups
            factors, numbers = sums.Factors.of(function), (True, function.groups, *widths, 0)
            ends = source, own, gradient
            sums.product_gradients(walk, terms, factors, *ends, numbers, sums.registers(out), out, found)
        case Rectified() if found.shape[1]:
            if kept.shape[1]:
                parts = gradient[:, :, None], kept.reshape(*gradient.shape, 2)
                gradient = np.concatenate(parts, axis=2).reshape(len(gradient), -1)
            constants, map_1M = (True, *_softmax_constants(function)), np.empty((1, found.shape[1]), found.dtype)
            sums.rectified_gradients(
                walk, terms, source, gradient, constants, sums.registers(found), map_1M, out, found
            )
    return out_RV, None if of_map is None else map_RM
