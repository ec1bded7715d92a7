# SPDX-License-Identifier: Apache-2.0
"""What attentions have in common: a softmax over a row's edges as they come, head by head, and its gradient.

Some dozens of edges are weighted at a time, by the exponential of their score minus the highest so far; the sums so far
are scaled down when a higher score comes ("online softmax"; Milakov and Gimelshein, 2018). ``softmax_HE`` holds the
highest score and the sum of weights of every head.

H heads of C channels, E edges at a time.
"""

import numpy as np

from ooc.kernels.compiled.lanes import (
    NBYTES,
    exp,
    fma,
    higher,
    largest,
    load,
    spread,
    spread_rows,
    store,
    total,
    totals,
    where_positive,
)
from ooc.kernels.compiled.loops import EDGES, part, pull, pull_rows


@part
def begin(softmax_HE):
    """Set the state of a row without edges."""
    for head in range(len(softmax_HE)):
        softmax_HE[head, 0], softmax_HE[head, 1] = -np.inf, 0


@part
def weigh(weight_HE, head, count, softmax_HE):
    """Write weights over scores, and return the factor of the sums so far. NaN stays NaN and is never the highest
    score."""
    dtype, lanes = weight_HE.dtype, NBYTES // weight_HE.itemsize
    before = softmax_HE[head, 0]
    for edge in range(count, -(-count // lanes) * lanes):
        weight_HE[head, edge] = -np.inf
    highest = spread(before)
    for edge in range(0, count, lanes):
        highest = higher(load(weight_HE, head, edge, EDGES), highest)
    softmax_HE[head, 0] = largest(highest)
    shrink = np.exp(before - softmax_HE[head, 0])
    highest, sums = spread(softmax_HE[head, 0]), spread(dtype.type(0))
    for edge in range(0, count, lanes):
        weight = exp(load(weight_HE, head, edge, EDGES) - highest)
        store(weight_HE, head, edge, EDGES, weight)
        sums = sums + weight
    softmax_HE[head, 1] = softmax_HE[head, 1] * shrink + total(sums)
    return shrink


@part
def drop(walk, weight_HE, head, count):
    """Multiply weights by their dropout factors."""
    for edge in range(0, count if walk.masks.drops else 0, NBYTES // weight_HE.itemsize):
        weight = load(weight_HE, head, edge, count) * load(walk.scale_HE, head, edge, count)
        store(weight_HE, head, edge, count, weight)


@part
def finish(softmax_HE, head, out, row, begin, channels):
    """Divide a head's weighted sum by the sum of weights. Return the logarithm of the sum of exponentials, 0 without
    edges."""
    weights = softmax_HE[head, 1]
    if weights == 0:
        return weights
    multiply(out, row, begin, channels, 1 / weights)
    return softmax_HE[head, 0] + np.log(weights)


@part
def fill(matrix_HE, head, count, value):
    """Set the same number for all edges of a head."""
    for edge in range(0, count, NBYTES // matrix_HE.itemsize):
        store(matrix_HE, head, edge, count, spread(value))


@part
def differentiate(walk, score_HE, above_HE, lse_HE, d_HE, head, count):
    """From a head's scores, the products of messages with their gradients, lse and D, compute the weights of message
    gradients, written over scores, and the gradients of scores, written over products."""
    for edge in range(0, count, NBYTES // score_HE.itemsize):
        share = kept = exp(load(score_HE, head, edge, count) - load(lse_HE, head, edge, count))
        above = load(above_HE, head, edge, count)
        if walk.masks.drops:
            scale = load(walk.scale_HE, head, edge, count)
            above, kept = above * scale, kept * scale
        store(score_HE, head, edge, count, kept)
        store(above_HE, head, edge, count, (above - load(d_HE, head, edge, count)) * share)


@part
def leaky(score_HE, into_HE, head, count, slope):
    """Multiply scores by the slope where they are not positive."""
    for edge in range(0, count, NBYTES // score_HE.itemsize):
        score = load(score_HE, head, edge, count)
        store(into_HE, head, edge, count, where_positive(score, score, score * slope))


@part
def tanh(lanes, one):
    """The hyperbolic tangent of numbers of either sign. ``one``: 1 in all lanes."""
    power = exp(-2.0 * where_positive(lanes, lanes, 0.0 - lanes))
    found = (one - power) / (one + power)
    return where_positive(lanes, found, 0.0 - found)


@part
def product(walk, own, row, own_at, matrix, edge, at, channels):
    """The product of columns of a row of ``own`` with those of ``TOGETHER`` neighbours from ``edge`` on."""
    sums = spread_rows(own.dtype.type(0))
    for channel in range(0, channels, NBYTES // own.itemsize):
        near = pull_rows(walk, matrix, edge, at + channel, at + channels)
        sums = fma(load(own, row, own_at + channel, own_at + channels), near, sums)
    return totals(sums)


@part
def add_weighted(walk, matrix, at, channels, weight_HE, head, count, out, row, out_at, shrink):
    """Add weighted columns of neighbours to those of a row of ``out``, which are first multiplied by ``shrink``."""
    lanes, end, out_end, whole = NBYTES // out.itemsize, at + channels, out_at + channels, 0
    for channel in range(0, channels - lanes, 2 * lanes):
        whole, here, other = channel + 2 * lanes, out_at + channel, out_at + channel + lanes
        sums, others = load(out, row, here, out_end) * shrink, load(out, row, other, out_end) * shrink
        for edge in range(count):
            weight = spread(weight_HE[head, edge])
            sums = fma(weight, pull(walk, matrix, edge, at + channel, end), sums)
            others = fma(weight, pull(walk, matrix, edge, at + channel + lanes, end), others)
        store(out, row, here, out_end, sums)
        store(out, row, other, out_end, others)
    if whole < channels:  # one register more
        sums = load(out, row, out_at + whole, out_end) * shrink
        for edge in range(count):
            sums = fma(spread(weight_HE[head, edge]), pull(walk, matrix, edge, at + whole, end), sums)
        store(out, row, out_at + whole, out_end, sums)


@part
def multiply(out, row, begin, channels, by):
    """Multiply columns of a row."""
    for channel in range(begin, begin + channels, NBYTES // out.itemsize):
        store(out, row, channel, begin + channels, load(out, row, channel, begin + channels) * by)
