# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.edge_function``'s pulls of ``Gated`` and ``Rectified`` as compiled loops: what is done to a column has
nothing to do with the others.

Of a row's edges some dozens are taken at a time, and of these one register of columns after the other: the terms of
all of them, then messages or gradients, which are summed in registers. Columns of small groups, such as keys' that have
gradients between them, come as halves of a register (``lanes.load_halves``).

Shapes as there; L numbers of a register.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.kernels.compiled.lanes import (
    NBYTES,
    TOGETHER,
    along,
    down,
    exp,
    firsts,
    fma,
    larger,
    load,
    load_halves,
    row_of,
    seconds,
    spread,
    spread_rows,
    store,
    store_halves,
    thirds,
    where_equal,
    where_positive,
)
from ooc.kernels.compiled.loops import EDGES, TAKEN, Walk, clear, compiled, fetch, gather, part
from ooc.kernels.compiled.terms import Terms, read
from ooc.kernels.edge_function import TargetLayout
from ooc.kernels.functions import Gated, Rectified

Function = Gated | Rectified
Matrix = npt.NDArray[Any]


def messages(
    function: Function, walk: Walk, terms: Terms, source_NW: Matrix, target_RV: Matrix, out_RO: Matrix, lse_RO: Matrix
) -> None:
    """Forward."""
    if isinstance(function, Gated):
        _gated(walk, terms, source_NW, target_RV, function.groups, _registers(out_RO), out_RO)
    elif function.temperature is None:
        _rectified(walk, terms, source_NW, float(function.eps), _registers(out_RO), out_RO)
    else:
        constants, softmax = (
            (float(function.eps), float(function.temperature)),
            np.empty((2, out_RO.shape[1]), out_RO.dtype),
        )
        _softmax(walk, terms, source_NW, constants, _registers(out_RO), softmax, out_RO, lse_RO)


def source_gradients(
    function: Function, walk: Walk, terms: Terms, layout: TargetLayout, source_RW: Matrix, target_NP: Matrix,
    out_RW: Matrix,
) -> None:  # fmt: skip
    """Backward, of sources."""
    nothing = np.empty((0, 0), out_RW.dtype)
    if isinstance(function, Gated):
        width = layout.columns // layout.groups
        numbers, rows = (False, layout.groups, width, width, layout.target), (source_RW, target_NP, target_NP)
        _gated_gradients(walk, terms, *rows, numbers, _registers(out_RW), out_RW, nothing)
    else:
        constants, given = (False, *_constants(function)), (_registers(out_RW), nothing, out_RW, nothing)
        _rectified_gradients(walk, terms, source_RW, target_NP, constants, *given)


def target_gradients(
    function: Function, walk: Walk, terms: Terms, source_NW: Matrix, target_RV: Matrix, gradient_RO: Matrix,
    statistics_RS: Matrix, out_RV: Matrix, map_RM: Matrix,
) -> None:  # fmt: skip
    """Backward, of targets and the map of terms."""
    if isinstance(function, Gated):
        channels = target_RV.shape[1] // function.groups
        numbers, rows = (True, function.groups, channels, channels, 0), (source_NW, target_RV, gradient_RO)
        _gated_gradients(walk, terms, *rows, numbers, _registers(out_RV), out_RV, map_RM)
    elif map_RM.shape[1]:
        if statistics_RS.shape[1]:
            parts = gradient_RO[:, :, None], statistics_RS.reshape(*gradient_RO.shape, 2)
            gradient_RO = np.concatenate(parts, axis=2).reshape(len(gradient_RO), -1)
        constants = True, *_constants(function)
        given = _registers(map_RM), np.empty((1, map_RM.shape[1]), map_RM.dtype), out_RV, map_RM
        _rectified_gradients(walk, terms, source_NW, gradient_RO, constants, *given)


def _constants(function: Rectified) -> tuple[bool, float, float]:
    """Whether there is a softmax, ε and the temperature."""
    temperature = function.temperature
    return temperature is not None, float(function.eps), 0.0 if temperature is None else float(temperature)


def _registers(out: Matrix) -> Matrix:
    """For two registers of every edge that there is at a time: of terms, messages or gradients."""
    return np.empty((2 * EDGES, NBYTES // out.itemsize), out.dtype)


@compiled
def _gated(walk, terms, source_NW, target_RV, groups, term_EL, out_RO):
    near_E, lanes, channels = walk.near_E, NBYTES // out_RO.itemsize, out_RO.shape[1] // groups
    blocks, one = _blocks(groups, channels, lanes), spread(out_RO.dtype.type(1))
    for row in range(len(out_RO)):
        clear(out_RO, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for number in range(blocks):
                fetch(walk, source_NW, blocks - number)
                block = _block(number, groups, channels, lanes)
                at = _at(block, channels, 0)
                query_at, value_at = _at(block, 2 * channels, 0), _at(block, 2 * channels, channels)
                if terms.are_there:
                    _make(walk, terms, count, query_at, value_at, term_EL)
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
def _gated_gradients(walk, terms, source_XW, target_XV, above_XO, numbers, term_EL, out_RX, map_RM):
    """Of the rows as targets or as sources; the others are those pulled. Groups' keys and gradients are so wide apart,
    these from a column on."""
    are_targets, groups, key_width, above_width, above_first = numbers
    near_E, lanes, channels = walk.near_E, NBYTES // out_RX.itemsize, source_XW.shape[1] // groups // 2
    blocks, one = _blocks(groups, channels, lanes), spread(out_RX.dtype.type(1))
    with_map = map_RM.shape[1] > 0
    for row in range(len(out_RX)):
        clear(out_RX, row)
        is_first = True
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for number in range(blocks):
                if are_targets:
                    fetch(walk, source_XW, blocks - number)
                else:
                    fetch(walk, target_XV, blocks - number)
                block = _block(number, groups, channels, lanes)
                query_at, value_at = _at(block, 2 * channels, 0), _at(block, 2 * channels, channels)
                key_at, above_at = _at(block, key_width, 0), _at(block, above_width, above_first)
                sum_at = key_at if are_targets else query_at
                if terms.are_there:
                    _make(walk, terms, count, query_at, value_at, term_EL)
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
                    _add(terms, term_EL, count, query_at, value_at, 2 * channels, is_first, map_RM, row)
            is_first = False
        if is_first:
            clear(map_RM, row)


@compiled
def _rectified(walk, terms, source_NW, eps, term_EL, out_RO):
    near_E = walk.near_E
    dtype, lanes, columns = out_RO.dtype, NBYTES // out_RO.itemsize, out_RO.shape[1]
    zero, added, registers = spread(dtype.type(0)), spread(dtype.type(eps)), -(-columns // lanes)
    for row in range(len(out_RO)):
        clear(out_RO, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for number in range(0, registers, 2):
                fetch(walk, source_NW, (registers + 1 - number) // 2)
                at, other_at = _register(number, columns, lanes), _register(number + 1, columns, lanes)
                if terms.are_there:
                    _make(walk, terms, count, at, other_at, term_EL)
                for half in range(min(2, registers - number)):
                    begin, first = (number + half) * lanes, half * EDGES
                    sums = load(out_RO, row, begin, columns)
                    for edge in range(count):
                        message = load(source_NW, near_E[edge], begin, columns)
                        if terms.are_there:
                            message = larger(message + load(term_EL, first + edge, 0, lanes), zero) + added
                        sums = sums + message
                    store(out_RO, row, begin, columns, sums)


@compiled
def _softmax(walk, terms, source_NW, numbers, term_EL, softmax_2O, out_RO, lse_RO):
    """As ``_rectified``, weighted column by column by a softmax, whose highest score so far and sum of weights are in
    ``softmax_2O``."""
    eps, temperature = numbers
    near_E = walk.near_E
    dtype, lanes, columns = out_RO.dtype, NBYTES // out_RO.itemsize, out_RO.shape[1]
    zero, added, factor = spread(dtype.type(0)), spread(dtype.type(eps)), spread(dtype.type(temperature))
    registers = -(-columns // lanes)
    for row in range(len(out_RO)):
        for column in range(columns):
            out_RO[row, column], softmax_2O[0, column], softmax_2O[1, column] = 0, -np.inf, 0
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for number in range(0, registers, 2):
                fetch(walk, source_NW, (registers + 1 - number) // 2)
                at, other_at = _register(number, columns, lanes), _register(number + 1, columns, lanes)
                if terms.are_there:
                    _make(walk, terms, count, at, other_at, term_EL)
                for half in range(min(2, registers - number)):
                    begin, first = (number + half) * lanes, half * EDGES
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
def _rectified_gradients(walk, terms, source_XW, above_XP, numbers, term_EL, map_1M, out_RX, map_RM):
    """Of the rows as sources, or of the map that makes terms of the edges to rows as targets; the others are those
    pulled. Targets bring for every column its gradient, for a softmax with lse and D."""
    are_targets, weighted, eps, temperature = numbers
    near_E = walk.near_E
    dtype, lanes, columns = out_RX.dtype, NBYTES // out_RX.itemsize, source_XW.shape[1]
    zero, added, factor = spread(dtype.type(0)), spread(dtype.type(eps)), spread(dtype.type(temperature))
    registers, rows = -(-columns // lanes), len(terms.weight_KT)
    for row in range(len(above_XP) if are_targets else len(out_RX)):
        for column in range(0 if are_targets else columns):
            out_RX[row, column] = 0
        is_first = True
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for number in range(0, registers, 2):
                if are_targets:
                    fetch(walk, source_XW, (registers + 1 - number) // 2)
                else:
                    fetch(walk, above_XP, (registers + 1 - number) // 2)
                at, other_at = _register(number, columns, lanes), _register(number + 1, columns, lanes)
                if terms.are_there:
                    _make(walk, terms, count, at, other_at, term_EL)
                for half in range(min(2, registers - number)):
                    begin, first = (number + half) * lanes, half * EDGES
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
                            above = gradient * message - thirds(*parts)
                            gradient = fma(factor * above, share, gradient * share)
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
                    _add(terms, term_EL, count, at, other_at, columns, is_first, map_1M, 0)
            is_first = False
        if is_first:
            clear(map_RM, row)
        elif are_targets:
            _lay_out(map_1M, rows, terms.groups, map_RM, row)


@part
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


@part
def _logistic(lanes, one):
    """1 / (1 + e^-x), without powers of what is positive, which may be too large. ``one``: of all lanes."""
    power = exp(where_positive(lanes, 0.0 - lanes, lanes))
    return where_positive(lanes, one, power) / (one + power)


@part
def _blocks(groups, channels, lanes):
    """How many registers hold the columns of all groups, by halves."""
    return (groups * -(-channels // (lanes // 2)) + 1) // 2


@part
def _block(number, groups, channels, lanes):
    """What is in the halves of a register: group, first channel and how many there are, 0 behind the last group."""
    half = lanes // 2
    stretches = -(-channels // half)
    first_group, first_channel = 2 * number // stretches, 2 * number % stretches * half
    other_group, other_channel = (2 * number + 1) // stretches, (2 * number + 1) % stretches * half
    others = min(half, channels - other_channel) if other_group < groups else 0
    return (first_group, first_channel, min(half, channels - first_channel)), (other_group, other_channel, others)


@part
def _at(block, width, first):
    """Where that is in rows which have so many columns a group, the block's from the first on."""
    (group, channel, count), (other_group, other_channel, others) = block
    return group * width + first + channel, other_group * width + first + other_channel, count, others


@part
def _register(number, columns, lanes):
    """Where the halves of a register are among columns that lie side by side."""
    begin, half = number * lanes, lanes // 2
    return begin, begin + half, columns - begin, columns - begin - half


@part
def _make(walk, terms, count, at, other_at, term_EL):
    """Two registers of these edges' terms: the first of all edges, then, from row ``EDGES`` on, the other."""
    lanes, zero = term_EL.shape[1], term_EL.dtype.type(0)
    if len(terms.weight_KT) == 0:
        for edge in range(count):
            _copy(terms, walk.place_E[edge], _further(at, terms.first), term_EL, edge)
            _copy(terms, walk.place_E[edge], _further(other_at, terms.first), term_EL, EDGES + edge)
        return
    for edge in range(0, count, TOGETHER):
        term = other = spread_rows(zero)
        for k in range(len(terms.weight_KT)):
            features = along(terms.feature_KE, k, edge)
            term = fma(features, load_halves(terms.weight_KT, k, at, term_EL), term)
            other = fma(features, load_halves(terms.weight_KT, k, other_at, term_EL), other)
        store(term_EL, edge, 0, lanes, term)
        store(term_EL, EDGES + edge, 0, lanes, other)


@part
def _copy(terms, place, at, term_EL, edge):
    """A register of an edge's features themselves."""
    edges, lanes = len(terms.stored_EK), term_EL.shape[1]
    if place < edges:
        store(term_EL, edge, 0, lanes, load_halves(terms.stored_EK, place, at, term_EL))
    else:
        store(term_EL, edge, 0, lanes, load_halves(terms.loop_RK, place - edges, at, term_EL))


@part
def _add(terms, d_term_EL, count, at, other_at, width, is_first, map_XM, row):
    """Add what these edges add to the map's gradient in two registers of columns, to what there is but at first: of the
    map's first row they are in these places, and of the next ones so many columns further on each."""
    lanes, rows, zero = d_term_EL.shape[1], len(terms.weight_KT), map_XM.dtype.type(0)
    for k in range(0, rows, TOGETHER):
        sums = others = spread_rows(zero)
        for edge in range(count):
            features = down(terms.feature_KE, k, edge)
            sums = fma(features, load(d_term_EL, edge, 0, lanes), sums)
            others = fma(features, load(d_term_EL, EDGES + edge, 0, lanes), others)
        for one in range(min(TOGETHER, rows - k)):
            here, other = _further(at, (k + one) * width), _further(other_at, (k + one) * width)
            added, others_added = row_of(sums, one), row_of(others, one)
            if not is_first:
                added = load_halves(map_XM, row, here, map_XM) + added
                others_added = load_halves(map_XM, row, other, map_XM) + others_added
            store_halves(map_XM, row, here, added)
            store_halves(map_XM, row, other, others_added)


@part
def _further(at, columns):
    return at[0] + columns, at[1] + columns, at[2], at[3]
