# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.edge_function``'s pulls of ``Product`` and ``Rectified`` as compiled loops, in which columns are
independent.

Some dozens of a row's edges are taken at a time, and for these one register of columns after the other: first the terms
of all of them, then messages or gradients, which are summed in registers. Columns of small groups, such as keys with
gradients between them, are loaded as halves of a register (``lanes.load_halves``).

Shapes as there; L numbers of a register.
"""

from typing import Any, NamedTuple

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
    log_of_more,
    prefetch_line,
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
from ooc.kernels.compiled.loops import EDGES, TAKEN, clear, compiled, fetch_halves, gather, part, pull, pull_halves
from ooc.kernels.compiled.softmax import tanh
from ooc.kernels.compiled.terms import read
from ooc.kernels.functions import Activation, Product, gated

Matrix = npt.NDArray[Any]

IDENTITY, RELU, LEAKY_RELU, ELU, SIGMOID, TANH, SILU, SOFTPLUS = (one.value for one in Activation)
_LINEAR_FROM = 20.0
"""Above this, torch's softplus is the identity."""


class Factors(NamedTuple):
    """The factors of a ``Product``: how many there are, which columns of a group sources and targets bring for each,
    and, for either factor, activation, constant and the columns of the two ends (-1: none); whose are added, and the
    activation of the whole. ``is_gate``: they are those of ``gated``, for which loops need no questions for each edge,
    which saves a tenth of the time. ``is_more``: something is added, or the whole has an activation."""

    is_gate: bool
    is_more: bool
    number: int
    by_sources: int
    by_targets: int
    activation: int
    constant: float
    source: int
    target: int
    other_activation: int
    other_constant: float
    other_source: int
    other_target: int
    added_source: int
    added_target: int
    outer_activation: int
    outer_constant: float

    @classmethod
    def of(cls, product: Product) -> "Factors":
        numbers, sources, targets = list[Any](), 0, 0
        for factor in product.factors:
            numbers += factor.activation.value, float(factor.constant)
            numbers += sources if factor.of_source else -1, targets if factor.of_target else -1
            sources, targets = sources + factor.of_source, targets + factor.of_target
        if len(product.factors) == 1:
            numbers += IDENTITY, 0.0, -1, -1
        added, outer = product.added, product.outer
        numbers += sources if added and added.of_source else -1, targets if added and added.of_target else -1
        numbers += outer.activation.value, float(outer.constant)
        is_more = added is not None or outer.activation is not Activation.IDENTITY
        is_gate = not is_more and product.factors == gated(1).factors
        count = len(product.factors), product.by_sources, product.by_targets
        return cls(is_gate, is_more, *count, *numbers)


def registers(out: Matrix) -> Matrix:
    """Return buffers of two registers for every edge taken at a time: for terms, messages or gradients."""
    return np.empty((2 * EDGES, NBYTES // out.itemsize), out.dtype)


@compiled
def product(walk, terms, factors, source_NW, target_RV, groups, term_EL, out_RO):
    lanes, channels = NBYTES // out_RO.itemsize, out_RO.shape[1] // groups
    blocks = _count_blocks(groups, channels, lanes)
    zero, one = spread(out_RO.dtype.type(0)), spread(out_RO.dtype.type(1))
    of_source, of_target = factors.by_sources * channels, factors.by_targets * channels
    for row in range(len(out_RO)):
        clear(out_RO, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for number in range(blocks):
                block = _block(number, groups, channels, lanes)
                at = _block_columns(block, channels, 0)
                source_at = _part_columns(block, of_source, factors.source, channels)
                other_at = _part_columns(block, of_source, factors.other_source, channels)
                if terms.are_there:
                    term_at, other_term_at = _term_columns(block, factors.number * channels, factors.number, channels)
                    _make_terms(walk, terms, count, term_at, other_term_at, term_EL)
                target = other_target = zero
                if factors.target >= 0:
                    target_at = _part_columns(block, of_target, factors.target, channels)
                    target = load_halves(target_RV, row, target_at, out_RO)
                if factors.other_target >= 0:
                    other_target_at = _part_columns(block, of_target, factors.other_target, channels)
                    other_target = load_halves(target_RV, row, other_target_at, out_RO)
                added_at, added_target = _part_columns(block, of_source, factors.added_source, channels), zero
                if factors.added_target >= 0:
                    added_target_at = _part_columns(block, of_target, factors.added_target, channels)
                    added_target = load_halves(target_RV, row, added_target_at, out_RO)
                sums = load_halves(out_RO, row, at, out_RO)
                for edge in range(count if factors.is_gate else 0):
                    query = pull_halves(walk, source_NW, edge, source_at, out_RO)
                    value = pull_halves(walk, source_NW, edge, other_at, out_RO)
                    if terms.are_there:
                        query = query + load(term_EL, edge, 0, lanes)
                        value = value + load(term_EL, EDGES + edge, 0, lanes)
                    sums = fma(_logistic(target + query, one), value, sums)
                for edge in range(0 if factors.is_gate else count):
                    value = other = zero
                    if factors.source >= 0:
                        value = pull_halves(walk, source_NW, edge, source_at, out_RO)
                    if factors.other_source >= 0:
                        other = pull_halves(walk, source_NW, edge, other_at, out_RO)
                    if terms.are_there:
                        value = value + load(term_EL, edge, 0, lanes)
                        other = other + load(term_EL, EDGES + edge, 0, lanes)
                    value = _activate(factors.activation, factors.constant, target + value, one)
                    if factors.number == 2:
                        other = _activate(factors.other_activation, factors.other_constant, other_target + other, one)
                        if not factors.is_more:
                            sums = fma(value, other, sums)
                            continue
                        value = value * other
                    if factors.is_more:
                        value = value + added_target
                        if factors.added_source >= 0:
                            value = value + pull_halves(walk, source_NW, edge, added_at, out_RO)
                        value = _activate(factors.outer_activation, factors.outer_constant, value, one)
                    sums = sums + value
                store_halves(out_RO, row, at, sums)


@compiled
def product_gradients(walk, terms, factors, source_XW, target_XV, above_XO, numbers, term_EL, out_RX, map_RM):
    """Gradients of the rows as targets or as sources; the others are the pulled rows. The arguments give the widths of
    groups' targets and gradients, and the first column of the latter."""
    are_targets, groups, target_width, above_width, above_first = numbers
    near_E, lanes = walk.near_E, NBYTES // out_RX.itemsize
    of_source = source_XW.shape[1] // groups if factors.by_sources else 0
    channels = of_source // factors.by_sources if factors.by_sources else target_width // factors.by_targets
    blocks = _count_blocks(groups, channels, lanes)
    zero, one = spread(out_RX.dtype.type(0)), spread(out_RX.dtype.type(1))
    own, other_own = (factors.target, factors.other_target) if are_targets else (factors.source, factors.other_source)
    added_own = factors.added_target if are_targets else factors.added_source
    width = out_RX.shape[1] // groups
    with_map = map_RM.shape[1] > 0
    for row in range(len(out_RX)):
        clear(out_RX, row)
        is_first = True
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for number in range(blocks):
                block = _block(number, groups, channels, lanes)
                source_at = _part_columns(block, of_source, factors.source, channels)
                other_source_at = _part_columns(block, of_source, factors.other_source, channels)
                target_at = _part_columns(block, target_width, factors.target, channels)
                other_target_at = _part_columns(block, target_width, factors.other_target, channels)
                above_at = _block_columns(block, above_width, above_first)
                own_at, other_own_at = (
                    _part_columns(block, width, own, channels),
                    _part_columns(block, width, other_own, channels),
                )
                added_own_at = _part_columns(block, width, added_own, channels)
                added_at = _part_columns(block, of_source, factors.added_source, channels)
                added_target_at = _part_columns(block, target_width, factors.added_target, channels)
                if terms.are_there:
                    term_at, other_term_at = _term_columns(block, factors.number * channels, factors.number, channels)
                    _make_terms(walk, terms, count, term_at, other_term_at, term_EL)
                sums = load_halves(out_RX, row, own_at, out_RX)
                other_sums = load_halves(out_RX, row, other_own_at, out_RX)
                added_sums = load_halves(out_RX, row, added_own_at, out_RX)
                for edge in range(count if factors.is_gate else 0):
                    source, target = (near_E[edge], row) if are_targets else (row, near_E[edge])
                    if are_targets:
                        _fetch_both(walk, edge, source_XW, source_at, source_XW, other_source_at)
                    else:
                        _fetch_both(walk, edge, target_XV, target_at, above_XO, above_at)
                    query = load_halves(source_XW, source, source_at, out_RX)
                    value = load_halves(source_XW, source, other_source_at, out_RX)
                    if terms.are_there:
                        query = query + load(term_EL, edge, 0, lanes)
                        value = value + load(term_EL, EDGES + edge, 0, lanes)
                    gate = _logistic(load_halves(target_XV, target, target_at, out_RX) + query, one)
                    d_value = load_halves(above_XO, target, above_at, out_RX) * gate
                    d_sum = d_value * value * (one - gate)
                    if with_map:
                        store(term_EL, edge, 0, lanes, d_sum)
                        store(term_EL, EDGES + edge, 0, lanes, d_value)
                    sums, other_sums = sums + d_sum, other_sums + d_value
                for edge in range(0 if factors.is_gate else count):
                    source, target = (near_E[edge], row) if are_targets else (row, near_E[edge])
                    if are_targets:
                        _fetch_both(walk, edge, source_XW, source_at, source_XW, other_source_at)
                    else:
                        _fetch_both(walk, edge, target_XV, target_at, above_XO, above_at)
                    before = other_before = zero  # a load of no lanes takes as long as any
                    if factors.source >= 0:
                        before = load_halves(source_XW, source, source_at, out_RX)
                    if factors.other_source >= 0:
                        other_before = load_halves(source_XW, source, other_source_at, out_RX)
                    if terms.are_there:
                        before = before + load(term_EL, edge, 0, lanes)
                        other_before = other_before + load(term_EL, EDGES + edge, 0, lanes)
                    if factors.target >= 0:
                        before = load_halves(target_XV, target, target_at, out_RX) + before
                    if factors.other_target >= 0:
                        other_before = load_halves(target_XV, target, other_target_at, out_RX) + other_before
                    value = _activate(factors.activation, factors.constant, before, one)
                    above = load_halves(above_XO, target, above_at, out_RX)
                    other = one
                    if factors.number == 2:
                        code, constant = factors.other_activation, factors.other_constant
                        other = _activate(code, constant, other_before, one)
                    if factors.is_more:
                        whole = value * other
                        if factors.added_target >= 0:
                            whole = whole + load_halves(target_XV, target, added_target_at, out_RX)
                        if factors.added_source >= 0:
                            whole = whole + load_halves(source_XW, source, added_at, out_RX)
                        if factors.outer_activation != IDENTITY:
                            code, constant = factors.outer_activation, factors.outer_constant
                            above = above * _derivative(
                                code, constant, whole, _activate(code, constant, whole, one), one
                            )
                        added_sums = added_sums + above
                    d_before, d_other = above, zero
                    if factors.number == 2:
                        code, constant = factors.other_activation, factors.other_constant
                        d_other = above * value
                        if code != IDENTITY:
                            d_other = d_other * _derivative(code, constant, other_before, other, one)
                        d_before = above * other
                    if factors.activation != IDENTITY:
                        d_before = d_before * _derivative(factors.activation, factors.constant, before, value, one)
                    if with_map:
                        store(term_EL, edge, 0, lanes, d_before)
                        store(term_EL, EDGES + edge, 0, lanes, d_other)
                    sums, other_sums = sums + d_before, other_sums + d_other
                store_halves(out_RX, row, own_at, sums)
                store_halves(out_RX, row, other_own_at, other_sums)
                store_halves(out_RX, row, added_own_at, added_sums)
                if with_map:
                    map_width = len(terms.weight_KT) * factors.number * channels
                    first, other_first = _term_columns(block, map_width, factors.number, channels)
                    columns = factors.number * channels
                    _add_map_gradient(terms, term_EL, count, first, other_first, columns, is_first, map_RM, row)
            is_first = False
        if is_first:
            clear(map_RM, row)


@part
def _activate(code, constant, lanes, one):
    """``Activation``'s function of a number, selected by its number. ``one``: 1 in all lanes."""
    if code == IDENTITY:
        return lanes
    if code == SIGMOID:
        return _logistic(lanes, one)
    if code == SILU:
        return _logistic(lanes, one) * lanes
    zero = one - one
    if code == RELU:
        return larger(lanes, zero)
    if code == LEAKY_RELU:
        return where_positive(lanes, lanes, lanes * constant)
    if code == TANH:
        return tanh(lanes, one)
    power = exp(0.0 - where_positive(lanes, lanes, 0.0 - lanes))
    if code == ELU:
        return where_positive(lanes, lanes, (power - one) * constant)
    return where_positive(lanes - _LINEAR_FROM, lanes, larger(lanes, zero) + log_of_more(power))


@part
def _logistic(lanes, one):
    """1 / (1 + e^-x), without the exponential of a positive number, which may overflow. ``one``: 1 in all lanes."""
    power = exp(where_positive(lanes, 0.0 - lanes, lanes))
    return where_positive(lanes, one, power) / (one + power)


@part
def _fetch_both(walk, edge, matrix, halves, other, other_halves):
    """Prefetch two registers of what a later edge pulls."""
    fetch_halves(walk, matrix, edge, halves)
    fetch_halves(walk, other, edge, other_halves)


@part
def _derivative(code, constant, lanes, value, one):
    """The derivative of the function of ``lanes`` whose value is ``value``; not needed for the identity."""
    if code == SIGMOID:
        return value * (one - value)
    zero = one - one
    if code == RELU:
        return where_positive(lanes, one, zero)
    if code == LEAKY_RELU:
        return where_positive(lanes, one, zero + constant)
    if code == ELU:
        return where_positive(lanes, one, value + constant)
    if code == TANH:
        return one - value * value
    share = _logistic(lanes, one)
    if code == SILU:
        return share + value * (one - share)
    return where_positive(lanes - _LINEAR_FROM, one, share)


@compiled
def rectified(walk, terms, source_NW, eps, term_EL, out_RO):
    dtype, lanes, columns = out_RO.dtype, NBYTES // out_RO.itemsize, out_RO.shape[1]
    zero, added, registers = spread(dtype.type(0)), spread(dtype.type(eps)), -(-columns // lanes)
    for row in range(len(out_RO)):
        clear(out_RO, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for number in range(0, registers, 2):
                at, other_at = _register_columns(number, columns, lanes), _register_columns(number + 1, columns, lanes)
                if terms.are_there:
                    _make_terms(walk, terms, count, at, other_at, term_EL)
                for half in range(min(2, registers - number)):
                    begin, first = (number + half) * lanes, half * EDGES
                    sums = load(out_RO, row, begin, columns)
                    for edge in range(count):
                        message = pull(walk, source_NW, edge, begin, columns)
                        if terms.are_there:
                            message = larger(message + load(term_EL, first + edge, 0, lanes), zero) + added
                        sums = sums + message
                    store(out_RO, row, begin, columns, sums)


@compiled
def softmax(walk, terms, source_NW, numbers, term_EL, softmax_2O, out_RO, lse_RO):
    """As ``rectified``, weighted column by column by a softmax, whose highest score and sum of weights so far are in
    ``softmax_2O``."""
    eps, temperature = numbers
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
                at, other_at = _register_columns(number, columns, lanes), _register_columns(number + 1, columns, lanes)
                if terms.are_there:
                    _make_terms(walk, terms, count, at, other_at, term_EL)
                for half in range(min(2, registers - number)):
                    begin, first = (number + half) * lanes, half * EDGES
                    before = load(softmax_2O, 0, begin, columns)
                    highest = before
                    for edge in range(count):
                        message = pull(walk, source_NW, edge, begin, columns)
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
def rectified_gradients(walk, terms, source_XW, above_XP, numbers, term_EL, map_1M, out_RX, map_RM):
    """Gradients of the rows as sources, or, for rows as targets, of the map that makes terms; the others are the pulled
    rows. Targets bring the gradient of every column, with lse and D for a softmax."""
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
                at, other_at = _register_columns(number, columns, lanes), _register_columns(number + 1, columns, lanes)
                if terms.are_there:
                    _make_terms(walk, terms, count, at, other_at, term_EL)
                for half in range(min(2, registers - number)):
                    begin, first = (number + half) * lanes, half * EDGES
                    sums = zero if are_targets else load(out_RX, row, begin, columns)
                    for edge in range(count):
                        source, target = (near_E[edge], row) if are_targets else (row, near_E[edge])
                        if are_targets:
                            prefetch_line(source_XW, walk.ahead_E[edge], begin)
                        else:
                            prefetch_line(above_XP, walk.ahead_E[edge], 3 * begin if weighted else begin)
                            if weighted:
                                prefetch_line(above_XP, walk.ahead_E[edge], 3 * begin + lanes)
                                prefetch_line(above_XP, walk.ahead_E[edge], 3 * begin + 2 * lanes)
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
                    _add_map_gradient(terms, term_EL, count, at, other_at, columns, is_first, map_1M, 0)
            is_first = False
        if is_first:
            clear(map_RM, row)
        elif are_targets:
            _store_map_gradient(map_1M, rows, terms.groups, map_RM, row)


@part
def _store_map_gradient(map_1M, rows, groups, map_RM, row):
    """Write the gradient of a row's map, feature after feature, group after group."""
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
def _count_blocks(groups, channels, lanes):
    """Return how many registers hold the columns of all groups, by halves."""
    return (groups * -(-channels // (lanes // 2)) + 1) // 2


@part
def _block(number, groups, channels, lanes):
    """Return what the halves of a register hold: group, first channel and how many there are, 0 beyond the last
    group."""
    half = lanes // 2
    stretches = -(-channels // half)
    first_group, first_channel = 2 * number // stretches, 2 * number % stretches * half
    other_group, other_channel = (2 * number + 1) // stretches, (2 * number + 1) % stretches * half
    others = min(half, channels - other_channel) if other_group < groups else 0
    return (first_group, first_channel, min(half, channels - first_channel)), (other_group, other_channel, others)


@part
def _block_columns(block, width, first):
    """Return where a block lies in rows with this many columns for a group, the block's from the first on."""
    (group, channel, count), (other_group, other_channel, others) = block
    return group * width + first + channel, other_group * width + first + other_channel, count, others


@part
def _register_columns(number, columns, lanes):
    """Return where the halves of a register lie among consecutive columns."""
    begin, half = number * lanes, lanes // 2
    return begin, begin + half, columns - begin, columns - begin - half


@part
def _part_columns(block, width, part, channels):
    """Return where the ``part``-th columns of a group lie, in groups of ``width``; nothing for part -1."""
    first, other, count, others = _block_columns(block, width, max(part, 0) * channels)
    return (first, other, count, others) if part >= 0 else (first, other, 0, 0)


@part
def _term_columns(block, width, factors, channels):
    """Return where a block's terms lie, for one factor and the other, if there is one."""
    at, other = _block_columns(block, width, 0), _block_columns(block, width, channels)
    if factors == 1:
        other = other[0], other[1], 0, 0
    return at, other


@part
def _make_terms(walk, terms, count, at, other_at, term_EL):
    """Make two registers of these edges' terms: the first of all edges, then, from row ``EDGES`` on, the other."""
    lanes, zero = term_EL.shape[1], term_EL.dtype.type(0)
    if len(terms.weight_KT) == 0:
        for edge in range(count):
            _copy_features(terms, walk.place_E[edge], _shift_columns(at, terms.first), term_EL, edge)
            _copy_features(terms, walk.place_E[edge], _shift_columns(other_at, terms.first), term_EL, EDGES + edge)
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
def _copy_features(terms, place, at, term_EL, edge):
    """Copy a register of an edge's features."""
    edges, lanes = len(terms.stored_EK), term_EL.shape[1]
    if place < edges:
        store(term_EL, edge, 0, lanes, load_halves(terms.stored_EK, place, at, term_EL))
    else:
        store(term_EL, edge, 0, lanes, load_halves(terms.loop_RK, place - edges, at, term_EL))


@part
def _add_map_gradient(terms, d_term_EL, count, at, other_at, width, is_first, map_XM, row):
    """Add these edges' part of the map's gradient in two registers of columns; the first time, write it. The map's
    first row is in these places, each further row so many columns behind."""
    lanes, rows, zero = d_term_EL.shape[1], len(terms.weight_KT), map_XM.dtype.type(0)
    for k in range(0, rows, TOGETHER):
        sums = others = spread_rows(zero)
        for edge in range(count):
            features = down(terms.feature_KE, k, edge)
            sums = fma(features, load(d_term_EL, edge, 0, lanes), sums)
            others = fma(features, load(d_term_EL, EDGES + edge, 0, lanes), others)
        for one in range(min(TOGETHER, rows - k)):
            here, other = _shift_columns(at, (k + one) * width), _shift_columns(other_at, (k + one) * width)
            added, others_added = row_of(sums, one), row_of(others, one)
            if not is_first:
                added = load_halves(map_XM, row, here, map_XM) + added
                others_added = load_halves(map_XM, row, other, map_XM) + others_added
            store_halves(map_XM, row, here, added)
            store_halves(map_XM, row, other, others_added)


@part
def _shift_columns(at, columns):
    return at[0] + columns, at[1] + columns, at[2], at[3]
