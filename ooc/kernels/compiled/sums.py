# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.edge_function``'s pulls of ``Gated`` and ``Rectified`` as compiled loops: what is done to a column has
nothing to do with the others.

Of a row's edges some dozens are taken at a time, and of these one register of columns after the other: the terms of
all of them, then messages or gradients, which are summed in registers. Columns of small groups, such as keys' that have
gradients between them, come as halves of a register (``lanes.load_halves``).

Shapes as there; L numbers of a register.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.kernels import edge_function
from ooc.kernels.compiled.lanes import (
    NBYTES,
    exp,
    firsts,
    fma,
    larger,
    load,
    load_halves,
    seconds,
    spread,
    store,
    store_halves,
    thirds,
    where_equal,
    where_positive,
)
from ooc.kernels.compiled.loops import EDGES, array, compiled, fetch, gather, lists_of
from ooc.kernels.edge_function import Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import TileEdges
from ooc.kernels.functions import EdgeFunction, Gated, Rectified

FEATURES = (torch.float32, torch.float64)
"""Types of edges' features that loops read; with others torch's operators compute."""
_TOGETHER = 4
"""Edges, or features, that are multiplied by what has been loaded once."""


class Terms(NamedTuple):
    """``EdgeTerms`` as the loops take them. ``are_made``: of features by a map, whose bias is the last row of
    ``weight_KT``; otherwise they are the features from ``first`` on. ``are_there``: of ``features_EK``, those of the
    tile's edges, and ``loop_RK``, of added self-loops."""

    are_there: bool
    are_made: bool
    first: int
    features_EK: Any
    loop_RK: Any
    weight_KT: Any

    @classmethod
    def of(cls, terms: EdgeTerms | None, tile: TileEdges, dtype: torch.dtype) -> "Terms":
        nothing = array(torch.empty(0, 0, dtype=dtype))
        if terms is None:
            return cls(False, False, 0, nothing, nothing, nothing)
        assert tile.features_EK is not None
        features, weight = tile.features_EK, terms.weight_KT
        if weight is not None and terms.bias_T is not None:
            weight = torch.cat((weight, terms.bias_T[None]))
        loops, weights = (nothing if one is None else array(one) for one in (terms.loop_RK, weight))
        return cls(True, weight is not None, terms.groups.start, array(features), loops, weights)

    def scratch(self, dtype: npt.DTypeLike) -> tuple[Any, Any]:
        """What a loop writes to: neighbours and places of a row's edges; their features, and two registers of terms or
        their gradients."""
        numbers = np.empty(EDGES, np.int64), np.empty(EDGES, np.int64)
        width = max(self.features_EK.shape[1] + 1, len(self.weight_KT)) if self.are_made else 0
        features = np.zeros((EDGES, width + -width % _TOGETHER), dtype)
        return numbers, (features, np.empty((2 * EDGES, NBYTES // features.itemsize), dtype))


def _is_written(tile: TileEdges, terms: EdgeTerms | None, heads: Heads | None) -> bool:
    """Whether there are loops for what these give and for such features."""
    if heads is not None and heads.dropout is not None:
        return False
    return terms is None or (tile.features_EK is not None and tile.features_EK.dtype in FEATURES)


def pull_messages(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    columns: int,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_messages``."""
    if not _is_written(tile, terms, heads):
        options: dict[str, Any] = {"columns": columns, "terms": terms, "heads": heads}
        return edge_function.pull_messages(function, tile, source_NW=source_NW, target_RV=target_RV, **options)
    source, out_RO = array(source_NW), source_NW.new_empty(tile.rows, columns)
    lists, given, out = lists_of(tile, len(source)), Terms.of(terms, tile, source_NW.dtype), array(out_RO)
    numbers, scratch = given.scratch(source.dtype)
    if isinstance(function, Gated):
        _gated(lists, given, source, array(target_RV), function.groups, (numbers, scratch), out)
        return out_RO, None
    assert isinstance(function, Rectified)
    if function.temperature is None:
        _rectified(lists, given, source, float(function.eps), (numbers, scratch), out)
        return out_RO, None
    lse_RH, constants = torch.empty_like(out_RO), (float(function.eps), float(function.temperature))
    softmax = np.empty((2, columns), source.dtype)
    _softmax(lists, given, source, constants, (numbers, (*scratch, softmax)), out, array(lse_RH))
    return out_RO, lse_RH


def pull_source_gradients(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_RW: Tensor,
    target_NP: Tensor,
    layout: TargetLayout,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> Tensor:
    """As ``edge_function.pull_source_gradients``."""
    is_rectified, columns = isinstance(function, Rectified), source_RW.shape[1]
    in_order = not layout.loop and layout.columns == columns * (1 if heads is None else 3)
    if not _is_written(tile, terms, heads) or (is_rectified and not in_order):
        options: dict[str, Any] = {"layout": layout, "terms": terms, "heads": heads}
        return edge_function.pull_source_gradients(function, tile, source_RW=source_RW, target_NP=target_NP, **options)
    source, targets, nothing = array(source_RW), array(target_NP), array(target_NP.new_empty(0, 0))
    out_RW = torch.empty_like(source_RW, memory_format=torch.contiguous_format)
    lists, given = lists_of(tile, len(targets)), Terms.of(terms, tile, target_NP.dtype)
    numbers, scratch = given.scratch(targets.dtype)
    if isinstance(function, Gated):
        width = layout.columns // layout.groups
        widths = False, layout.groups, width, width, layout.target
        _gated_gradients(lists, given, source, targets, targets, widths, (numbers, scratch), array(out_RW), nothing)
    else:
        constants = False, *_constants(function), 1
        given_here = lists, given, source, targets, constants, (numbers, (*scratch, nothing))
        _rectified_gradients(*given_here, array(out_RW), nothing)
    return out_RW


def pull_target_gradients(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    upstream_R: Upstream,
    with_map: bool = False,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_target_gradients``; nothing is kept."""
    if not _is_written(tile, terms, heads):
        options: dict[str, Any] = {"with_map": with_map, "terms": terms, "heads": heads}
        return edge_function.pull_target_gradients(
            function, tile, source_NW=source_NW, target_RV=target_RV, upstream_R=upstream_R, **options
        )
    source, own, above = array(source_NW), array(target_RV), upstream_R.gradient
    lists, given = lists_of(tile, len(source)), Terms.of(terms, tile, source_NW.dtype)
    out_RV = torch.empty_like(target_RV, memory_format=torch.contiguous_format)
    map_RM = target_RV.new_empty(tile.rows, 0 if terms is None or not with_map else terms.map_columns)
    numbers, scratch = given.scratch(source.dtype)
    if isinstance(function, Gated):
        channels = target_RV.shape[1] // function.groups
        widths, gradients = (True, function.groups, channels, channels, 0), (array(out_RV), array(map_RM))
        _gated_gradients(lists, given, source, own, array(above), widths, (numbers, scratch), *gradients)
    elif terms is not None and map_RM.shape[1]:
        if upstream_R.statistics is not None:
            above = torch.cat((above[:, :, None], upstream_R.statistics.reshape(*above.shape, 2)), dim=2).flatten(1)
        row_map = np.empty((1, map_RM.shape[1]), source.dtype)
        constants = True, *_constants(function), len(terms.groups)
        given_here = lists, given, source, array(above), constants, (numbers, (*scratch, row_map))
        _rectified_gradients(*given_here, row_map, array(map_RM))
    return out_RV, map_RM if terms is not None and with_map else None


def _constants(function: EdgeFunction) -> tuple[bool, float, float]:
    """Whether there is a softmax, ε and the temperature."""
    assert isinstance(function, Rectified)
    temperature = function.temperature
    return temperature is not None, float(function.eps), 0.0 if temperature is None else float(temperature)


@compiled
def _gated(lists, terms, source_NW, target_RV, groups, scratch, out_RO):
    (near_E, places_E), (feature_EK, term_EL) = scratch
    lanes, channels = NBYTES // out_RO.itemsize, out_RO.shape[1] // groups
    blocks, one = _blocks(groups, channels, lanes), spread(out_RO.dtype.type(1))
    for row in range(len(out_RO)):
        for column in range(out_RO.shape[1]):
            out_RO[row, column] = 0
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if terms.are_made:
                _read(terms, places_E, count, feature_EK)
            for number in range(blocks):
                _fetch_next(lists, source_NW, cursor, count, number, blocks)
                block = _block(number, groups, channels, lanes)
                at = _at(block, channels, 0)
                query_at, value_at = _at(block, 2 * channels, 0), _at(block, 2 * channels, channels)
                if terms.are_there:
                    _make(terms, places_E, feature_EK, count, query_at, value_at, term_EL)
                key, sums = load_halves(target_RV, row, at, out_RO), load_halves(out_RO, row, at, out_RO)
                for edge in range(count):
                    query = load_halves(source_NW, near_E[edge], query_at, out_RO)
                    value = load_halves(source_NW, near_E[edge], value_at, out_RO)
                    if terms.are_there:
                        query = query + load(term_EL, edge, 0, lanes)
                        value = value + load(term_EL, EDGES + edge, 0, lanes)
                    sums = fma(_logistic(key + query, one), value, sums)
                store_halves(out_RO, row, at, sums)


@compiled
def _gated_gradients(lists, terms, source_XW, target_XV, above_XO, numbers, scratch, out_RX, map_RM):
    """Of the rows as targets or as sources; the others are those pulled. Groups' keys and gradients are so wide apart,
    these from a column on."""
    are_targets, groups, key_width, above_width, above_first = numbers
    (near_E, places_E), (feature_EK, term_EL) = scratch
    lanes, channels = NBYTES // out_RX.itemsize, source_XW.shape[1] // groups // 2
    blocks, one = _blocks(groups, channels, lanes), spread(out_RX.dtype.type(1))
    with_map = map_RM.shape[1] > 0
    for row in range(len(out_RX)):
        for column in range(out_RX.shape[1]):
            out_RX[row, column] = 0
        is_first = True
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        if cursor == stop:
            for column in range(map_RM.shape[1]):
                map_RM[row, column] = 0
        while cursor < stop:
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if terms.are_made:
                _read(terms, places_E, count, feature_EK)
            for number in range(blocks):
                if are_targets:
                    _fetch_next(lists, source_XW, cursor, count, number, blocks)
                else:
                    _fetch_next(lists, target_XV, cursor, count, number, blocks)
                block = _block(number, groups, channels, lanes)
                query_at, value_at = _at(block, 2 * channels, 0), _at(block, 2 * channels, channels)
                key_at, above_at = _at(block, key_width, 0), _at(block, above_width, above_first)
                sum_at = key_at if are_targets else query_at
                if terms.are_there:
                    _make(terms, places_E, feature_EK, count, query_at, value_at, term_EL)
                sums, value_sums = load_halves(out_RX, row, sum_at, out_RX), spread(out_RX.dtype.type(0))
                if not are_targets:
                    value_sums = load_halves(out_RX, row, value_at, out_RX)
                for edge in range(count):
                    source, target = (near_E[edge], row) if are_targets else (row, near_E[edge])
                    query = load_halves(source_XW, source, query_at, out_RX)
                    value = load_halves(source_XW, source, value_at, out_RX)
                    if terms.are_there:
                        query = query + load(term_EL, edge, 0, lanes)
                        value = value + load(term_EL, EDGES + edge, 0, lanes)
                    gate = _logistic(load_halves(target_XV, target, key_at, out_RX) + query, one)
                    d_value = load_halves(above_XO, target, above_at, out_RX) * gate
                    d_sum = d_value * value * (one - gate)
                    if with_map:
                        store(term_EL, edge, 0, lanes, d_sum)
                        store(term_EL, EDGES + edge, 0, lanes, d_value)
                    sums, value_sums = sums + d_sum, value_sums + d_value
                store_halves(out_RX, row, sum_at, sums)
                if not are_targets:
                    store_halves(out_RX, row, value_at, value_sums)
                if with_map:
                    map_width = len(terms.weight_KT) * 2 * channels
                    query_at, value_at = _at(block, map_width, 0), _at(block, map_width, channels)
                    _add(
                        feature_EK, term_EL, count, query_at, value_at, 2 * channels, len(terms.weight_KT), is_first,
                        map_RM, row,
                    )  # fmt: skip
            is_first = False


@compiled
def _rectified(lists, terms, source_NW, eps, scratch, out_RO):
    (near_E, places_E), (feature_EK, term_EL) = scratch
    dtype, lanes, columns = out_RO.dtype, NBYTES // out_RO.itemsize, out_RO.shape[1]
    zero, added, registers = spread(dtype.type(0)), spread(dtype.type(eps)), -(-columns // lanes)
    for row in range(len(out_RO)):
        for column in range(columns):
            out_RO[row, column] = 0
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if terms.are_made:
                _read(terms, places_E, count, feature_EK)
            for number in range(0, registers, 2):
                _fetch_next(lists, source_NW, cursor, count, number // 2, (registers + 1) // 2)
                at, other_at = _register(number, columns, lanes), _register(number + 1, columns, lanes)
                if terms.are_there:
                    _make(terms, places_E, feature_EK, count, at, other_at, term_EL)
                for part in range(min(2, registers - number)):
                    begin, first = (number + part) * lanes, part * EDGES
                    sums = load(out_RO, row, begin, columns)
                    for edge in range(count):
                        message = load(source_NW, near_E[edge], begin, columns)
                        if terms.are_there:
                            message = larger(message + load(term_EL, first + edge, 0, lanes), zero) + added
                        sums = sums + message
                    store(out_RO, row, begin, columns, sums)


@compiled
def _softmax(lists, terms, source_NW, numbers, scratch, out_RO, lse_RO):
    """As ``_rectified``, weighted column by column by a softmax, whose highest score so far and sum of weights are in
    ``softmax_2O``."""
    eps, temperature = numbers
    (near_E, places_E), (feature_EK, term_EL, softmax_2O) = scratch
    dtype, lanes, columns = out_RO.dtype, NBYTES // out_RO.itemsize, out_RO.shape[1]
    zero, added, factor = spread(dtype.type(0)), spread(dtype.type(eps)), spread(dtype.type(temperature))
    registers = -(-columns // lanes)
    for row in range(len(out_RO)):
        for column in range(columns):
            out_RO[row, column], softmax_2O[0, column], softmax_2O[1, column] = 0, -np.inf, 0
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if count == 0:
                continue
            if terms.are_made:
                _read(terms, places_E, count, feature_EK)
            for number in range(0, registers, 2):
                _fetch_next(lists, source_NW, cursor, count, number // 2, (registers + 1) // 2)
                at, other_at = _register(number, columns, lanes), _register(number + 1, columns, lanes)
                if terms.are_there:
                    _make(terms, places_E, feature_EK, count, at, other_at, term_EL)
                for part in range(min(2, registers - number)):
                    begin, first = (number + part) * lanes, part * EDGES
                    before = load(softmax_2O, 0, begin, columns)
                    highest = before
                    for edge in range(count):
                        message = load(source_NW, near_E[edge], begin, columns)
                        if terms.are_there:
                            message = larger(message + load(term_EL, first + edge, 0, lanes), zero) + added
                        store(term_EL, first + edge, 0, lanes, message)
                        highest = larger(highest, message * factor)
                    shrink = exp(before - highest)
                    weights = load(softmax_2O, 1, begin, columns) * shrink
                    sums = load(out_RO, row, begin, columns) * shrink
                    for edge in range(count):
                        message = load(term_EL, first + edge, 0, lanes)
                        weight = exp(message * factor - highest)
                        weights, sums = weights + weight, fma(weight, message, sums)
                    store(softmax_2O, 0, begin, columns, highest)
                    store(softmax_2O, 1, begin, columns, weights)
                    store(out_RO, row, begin, columns, sums)
        for begin in range(0, columns, lanes):
            weights = load(softmax_2O, 1, begin, columns)
            shares = where_equal(weights, zero, zero, load(out_RO, row, begin, columns) / weights)
            store(out_RO, row, begin, columns, shares)
        for column in range(columns):
            weights = softmax_2O[1, column]
            lse_RO[row, column] = softmax_2O[0, column] + np.log(weights) if weights != 0 else 0


@compiled
def _rectified_gradients(lists, terms, source_XW, above_XP, numbers, scratch, out_RX, map_RM):
    """Of the rows as sources, or of the map that makes terms of the edges to rows as targets; the others are those
    pulled. Targets bring for every column its gradient, for a softmax with lse and D."""
    are_targets, weighted, eps, temperature, groups = numbers
    (near_E, places_E), (feature_EK, term_EL, map_1M) = scratch
    dtype, lanes, columns = out_RX.dtype, NBYTES // out_RX.itemsize, source_XW.shape[1]
    zero, added, factor = spread(dtype.type(0)), spread(dtype.type(eps)), spread(dtype.type(temperature))
    registers, rows = -(-columns // lanes), len(terms.weight_KT)
    for row in range(len(above_XP) if are_targets else len(out_RX)):
        for column in range(0 if are_targets else columns):
            out_RX[row, column] = 0
        is_first = True
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        if cursor == stop:
            for column in range(map_RM.shape[1]):
                map_RM[row, column] = 0
            continue
        while cursor < stop:
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if terms.are_made:
                _read(terms, places_E, count, feature_EK)
            for number in range(0, registers, 2):
                if are_targets:
                    _fetch_next(lists, source_XW, cursor, count, number // 2, (registers + 1) // 2)
                else:
                    _fetch_next(lists, above_XP, cursor, count, number // 2, (registers + 1) // 2)
                at, other_at = _register(number, columns, lanes), _register(number + 1, columns, lanes)
                if terms.are_there:
                    _make(terms, places_E, feature_EK, count, at, other_at, term_EL)
                for part in range(min(2, registers - number)):
                    begin, first = (number + part) * lanes, part * EDGES
                    sums = zero if are_targets else load(out_RX, row, begin, columns)
                    for edge in range(count):
                        source, target = (near_E[edge], row) if are_targets else (row, near_E[edge])
                        rectified = load(source_XW, source, begin, columns)
                        if terms.are_there:
                            rectified = larger(rectified + load(term_EL, first + edge, 0, lanes), zero)
                        if weighted:
                            parts = (
                                load(above_XP, target, 3 * begin, 3 * columns),
                                load(above_XP, target, 3 * begin + lanes, 3 * columns),
                                load(above_XP, target, 3 * begin + 2 * lanes, 3 * columns),
                            )
                            message = rectified + added if terms.are_there else rectified
                            gradient = firsts(*parts)
                            share = exp(message * factor - seconds(*parts))
                            along = gradient * message - thirds(*parts)
                            gradient = fma(factor * along, share, gradient * share)
                        else:
                            gradient = load(above_XP, target, begin, columns)
                        if terms.are_there:
                            gradient = where_equal(rectified, zero, zero, gradient)
                        if are_targets:
                            store(term_EL, first + edge, 0, lanes, gradient)
                        sums = sums + gradient
                    if not are_targets:
                        store(out_RX, row, begin, columns, sums)
                if are_targets:
                    _add(feature_EK, term_EL, count, at, other_at, columns, rows, is_first, map_1M, 0)
            is_first = False
        if are_targets:
            _lay_out(map_1M, rows, groups, map_RM, row)


@compiled
def _lay_out(map_1M, rows, groups, map_RM, row):
    """The gradient of a row's map, feature after feature, group after group."""
    columns = map_1M.shape[1] // rows
    width, place = columns // groups, 0
    if width == 1:
        for column in range(columns):
            for k in range(rows):
                map_RM[row, column * rows + k] = map_1M[0, k * columns + column]
        return
    for begin in range(0, columns, width):
        for k in range(rows):
            for column in range(begin, begin + width):
                map_RM[row, place] = map_1M[0, k * columns + column]
                place += 1


@compiled
def _logistic(lanes, one):
    """1 / (1 + e^-x), without powers of what is positive, which may be too large. ``one``: of all lanes."""
    power = exp(where_positive(lanes, 0.0 - lanes, lanes))
    return where_positive(lanes, one, power) / (one + power)


@compiled
def _blocks(groups, channels, lanes):
    """How many registers hold the columns of all groups, by halves."""
    return (groups * -(-channels // (lanes // 2)) + 1) // 2


@compiled
def _block(number, groups, channels, lanes):
    """What is in the halves of a register: group, first channel and how many there are, 0 behind the last group."""
    half = lanes // 2
    stretches = -(-channels // half)
    first_group, first_channel = 2 * number // stretches, 2 * number % stretches * half
    other_group, other_channel = (2 * number + 1) // stretches, (2 * number + 1) % stretches * half
    others = min(half, channels - other_channel) if other_group < groups else 0
    return (first_group, first_channel, min(half, channels - first_channel)), (other_group, other_channel, others)


@compiled
def _at(block, width, first):
    """Where that is in rows which have so many columns a group, the block's from the first on."""
    (group, channel, count), (other_group, other_channel, others) = block
    return group * width + first + channel, other_group * width + first + other_channel, count, others


@compiled
def _register(number, columns, lanes):
    """Where the halves of a register are among columns that lie side by side."""
    begin, half = number * lanes, lanes // 2
    return begin, begin + half, columns - begin, columns - begin - half


@compiled
def _fetch_next(lists, matrix, cursor, count, number, blocks):
    """While a row's edges are computed with, have rows fetched that those behind ``cursor`` pull: as many, of every
    block of columns its share."""
    for edge in range(number * count // blocks, (number + 1) * count // blocks):
        fetch(lists, matrix, cursor - lists.adds_loops + edge)


@compiled
def _read(terms, places_E, count, feature_EK):
    """Features of these edges, and behind them 1, as the bias has."""
    edges, columns = terms.features_EK.shape
    lanes = NBYTES // feature_EK.itemsize
    for edge in range(count):
        place = places_E[edge]
        for column in range(0, columns, lanes):
            at = _register(column // lanes, columns, lanes)
            if place < edges:
                features = load_halves(terms.features_EK, place, at, feature_EK)
            else:
                features = load_halves(terms.loop_RK, place - edges, at, feature_EK)
            store_halves(feature_EK, edge, at, features)
        feature_EK[edge, columns] = 1


@compiled
def _make(terms, places_E, feature_EK, count, at, other_at, term_EL):
    """Two registers of these edges' terms: the first of all edges, then, from row ``EDGES`` on, the other."""
    width = terms.first
    if not terms.are_made:
        for edge in range(count):
            _copy(terms, places_E[edge], (at[0] + width, at[1] + width, at[2], at[3]), term_EL, edge)
            other = other_at[0] + width, other_at[1] + width, other_at[2], other_at[3]
            _copy(terms, places_E[edge], other, term_EL, EDGES + edge)
        return
    zero = spread(term_EL.dtype.type(0))
    for edge in range(0, count, _TOGETHER):
        term_0, term_1, term_2, term_3, other_0, other_1, other_2, other_3 = (
            zero,
            zero,
            zero,
            zero,
            zero,
            zero,
            zero,
            zero,
        )
        for k in range(len(terms.weight_KT)):
            weight = load_halves(terms.weight_KT, k, at, term_EL)
            other = load_halves(terms.weight_KT, k, other_at, term_EL)
            feature_0, feature_1 = spread(feature_EK[edge, k]), spread(feature_EK[edge + 1, k])
            feature_2, feature_3 = spread(feature_EK[edge + 2, k]), spread(feature_EK[edge + 3, k])
            term_0, other_0 = fma(feature_0, weight, term_0), fma(feature_0, other, other_0)
            term_1, other_1 = fma(feature_1, weight, term_1), fma(feature_1, other, other_1)
            term_2, other_2 = fma(feature_2, weight, term_2), fma(feature_2, other, other_2)
            term_3, other_3 = fma(feature_3, weight, term_3), fma(feature_3, other, other_3)
        _put(term_EL, edge, term_0, term_1, term_2, term_3)
        _put(term_EL, EDGES + edge, other_0, other_1, other_2, other_3)


@compiled
def _copy(terms, place, at, term_EL, edge):
    """A register of an edge's features themselves."""
    edges, lanes = len(terms.features_EK), term_EL.shape[1]
    if place < edges:
        store(term_EL, edge, 0, lanes, load_halves(terms.features_EK, place, at, term_EL))
    else:
        store(term_EL, edge, 0, lanes, load_halves(terms.loop_RK, place - edges, at, term_EL))


@compiled
def _put(into_EL, edge, first, second, third, fourth):
    """Write those of four edges."""
    lanes = into_EL.shape[1]
    store(into_EL, edge, 0, lanes, first)
    store(into_EL, edge + 1, 0, lanes, second)
    store(into_EL, edge + 2, 0, lanes, third)
    store(into_EL, edge + 3, 0, lanes, fourth)


@compiled
def _add(feature_EK, d_term_EL, count, at, other_at, width, rows, is_first, map_XM, row):
    """Add what these edges add to the map's gradient in two registers of columns, to what there is but at first: of the
    map's first row they are in these places, and of the next ones so many columns further on each."""
    lanes, zero = d_term_EL.shape[1], spread(map_XM.dtype.type(0))
    for k in range(0, rows, _TOGETHER):
        sum_0, sum_1, sum_2, sum_3 = zero, zero, zero, zero
        other_0, other_1, other_2, other_3 = zero, zero, zero, zero
        for edge in range(count):
            d_term, other = load(d_term_EL, edge, 0, lanes), load(d_term_EL, EDGES + edge, 0, lanes)
            feature_0, feature_1 = spread(feature_EK[edge, k]), spread(feature_EK[edge, k + 1])
            feature_2, feature_3 = spread(feature_EK[edge, k + 2]), spread(feature_EK[edge, k + 3])
            sum_0, other_0 = fma(feature_0, d_term, sum_0), fma(feature_0, other, other_0)
            sum_1, other_1 = fma(feature_1, d_term, sum_1), fma(feature_1, other, other_1)
            sum_2, other_2 = fma(feature_2, d_term, sum_2), fma(feature_2, other, other_2)
            sum_3, other_3 = fma(feature_3, d_term, sum_3), fma(feature_3, other, other_3)
        _add_row(map_XM, row, at, other_at, k * width, is_first, sum_0, other_0)
        if k + 1 < rows:
            _add_row(map_XM, row, at, other_at, (k + 1) * width, is_first, sum_1, other_1)
        if k + 2 < rows:
            _add_row(map_XM, row, at, other_at, (k + 2) * width, is_first, sum_2, other_2)
        if k + 3 < rows:
            _add_row(map_XM, row, at, other_at, (k + 3) * width, is_first, sum_3, other_3)


@compiled
def _add_row(map_XM, row, at, other_at, further, is_first, sums, others):
    at = at[0] + further, at[1] + further, at[2], at[3]
    other_at = other_at[0] + further, other_at[1] + further, other_at[2], other_at[3]
    if not is_first:
        sums = load_halves(map_XM, row, at, map_XM) + sums
        others = load_halves(map_XM, row, other_at, map_XM) + others
    store_halves(map_XM, row, at, sums)
    store_halves(map_XM, row, other_at, others)
