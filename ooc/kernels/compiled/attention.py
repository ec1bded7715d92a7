# SPDX-License-Identifier: Apache-2.0
"""Attention by GATv2's scores, and by GAT's with features of edges, as compiled loops in all three pulls.

The two differ in an edge's score (a sum over a head's channels after the leaky rectifier, or the leaky rectifier of a
sum of scalars), and in how its gradient flows back. Everything else is alike, except that sources pull GAT's in
``gat``'s loop, where no edge needs a product of its own. Nothing is kept for another pull, as computing it again takes
no longer than reading it.

Terms are made of features by a linear map, feature after feature. Shapes as in ``edge_function``, and H heads of C
channels, E edges at a time, K features.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ooc.kernels.compiled.gat import add_scalars
from ooc.kernels.compiled.lanes import (
    NBYTES,
    TOGETHER,
    along,
    down,
    fma,
    load,
    number,
    row_of,
    spread,
    spread_rows,
    store,
    totals,
    where_positive,
)
from ooc.kernels.compiled.loops import (
    EDGES,
    TAKEN,
    Walk,
    array,
    clear,
    compiled,
    gather,
    matrices,
    part,
    pull_number,
    pull_rows,
)
from ooc.kernels.compiled.softmax import add_weighted, begin, differentiate, drop, fill, finish, leaky, product, weigh
from ooc.kernels.compiled.terms import read
from ooc.kernels.functions import Gatv2, GatWithFeatures

Matrix = npt.NDArray[Any]


class Scores(NamedTuple):
    """How an ``EdgeFunction`` makes scores, and buffers for the loops. ``att_HC`` has no rows if scores are sums of
    scalars, of which a target brings the one in ``place``. The buffers hold a head's leaky arguments, and numbers of
    every head, its scores first."""

    att_HC: Matrix
    slope: float
    place: int
    hidden_EC: Matrix
    head_buffers: tuple[Matrix, ...]

    @classmethod
    def of(cls, function: Gatv2 | GatWithFeatures, walk: Walk, channels: int, head_buffers: int) -> "Scores":
        dtype = walk.scale_HE.dtype
        given = np.zeros((EDGES, channels), dtype), matrices(walk, head_buffers)
        if isinstance(function, Gatv2):
            return cls(array(function.att_HC.detach()), function.negative_slope, 0, *given)
        return cls(np.empty((0, 0), dtype), function.negative_slope, function.place, *given)


@compiled
def attend(walk, terms, scores, source_NW, target_RV, out_RO, lse_RH):
    heads, by_vectors = lse_RH.shape[1], len(scores.att_HC) > 0
    channels, brought, own = out_RO.shape[1] // heads, source_NW.shape[1] // heads, target_RV.shape[1] // heads
    weight_HE, softmax_HE = scores.head_buffers
    for row in range(len(out_RO)):
        clear(out_RO, row)
        begin(softmax_HE)
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            if not by_vectors:
                columns = brought, channels, own, scores.place
                add_scalars(walk, terms, source_NW, target_RV, row, columns, weight_HE, count)
            for head in range(heads):
                if by_vectors:
                    begins = head * brought, head * own
                    _score_channels(walk, terms, scores, source_NW, target_RV, row, begins, head, count, False)
                else:
                    leaky(weight_HE, weight_HE, head, count, scores.slope)
                shrink = weigh(weight_HE, head, count, softmax_HE)
                drop(walk, weight_HE, head, count)
                first, at = head * brought, head * channels
                add_weighted(walk, source_NW, first, channels, weight_HE, head, count, out_RO, row, at, shrink)
        for head in range(heads):
            lse_RH[row, head] = finish(softmax_HE, head, out_RO, row, head * channels, channels)


@compiled
def pull_sources(walk, terms, scores, target, source_RW, target_NP, out_RW):
    lse_HE, d_HE, share_HE = scores.head_buffers[2:5]
    heads, channels = len(lse_HE), scores.hidden_EC.shape[1]
    packed, near_E, one = target_NP.shape[1] // heads, walk.near_E, source_RW.dtype.type(1)
    for row in range(len(source_RW)):
        clear(out_RW, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            for head in range(heads):
                first, above = head * channels, head * packed + target
                begins = head * packed, first
                _score_channels(walk, terms, scores, target_NP, source_RW, row, begins, head, count, True)
                for edge in range(count):
                    lse_HE[head, edge] = pull_number(walk, target_NP, edge, above + channels)
                    d_HE[head, edge] = number(target_NP, near_E[edge], above + channels + 1)
                _differentiate_scores(walk, scores, source_RW, row, first, target_NP, above, head, count)
                add_weighted(walk, target_NP, above, channels, share_HE, head, count, out_RW, row, first, one)
                _differentiate_channels(scores, head, count, out_RW, row, first, -1, False)


@compiled
def pull_targets(walk, terms, scores, source_NW, target_RV, gradient_RO, statistics_RS, out_RV, map_RM):
    score_HE, d_score_HE, lse_HE, d_HE, _, _ = scores.head_buffers
    heads, by_vectors, channels = len(score_HE), len(scores.att_HC) > 0, scores.hidden_EC.shape[1]
    brought, own, with_map = source_NW.shape[1] // heads, target_RV.shape[1] // heads, map_RM.shape[1] > 0
    for row in range(len(target_RV)):
        clear(out_RV, row)
        clear(map_RM, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            if not by_vectors:
                columns = brought, channels, own, scores.place
                add_scalars(walk, terms, source_NW, target_RV, row, columns, score_HE, count)
            for head in range(heads):
                first, message = head * own, head * brought
                if by_vectors:
                    begins = message, first
                    _score_channels(walk, terms, scores, source_NW, target_RV, row, begins, head, count, True)
                fill(lse_HE, head, count, statistics_RS[row, 2 * head])
                fill(d_HE, head, count, statistics_RS[row, 2 * head + 1])
                _differentiate_scores(walk, scores, gradient_RO, row, head * channels, source_NW, message, head, count)
                if by_vectors:
                    vectors = first + channels if own > channels else -1
                    _differentiate_channels(scores, head, count, out_RV, row, first, vectors, with_map)
                    if with_map:
                        _add_channel_map_gradient(terms, scores, head, count, map_RM, row)
                else:
                    out_RV[row, first + scores.place] += _sum_score_gradients(d_score_HE, head, count)
                    if with_map:
                        _add_scalar_map_gradient(terms, d_score_HE, head, count, map_RM, row)


@part
def _score_channels(walk, terms, scores, near_RW, own_RW, row, begins, head, count, keeps):
    """GATv2's scores of a head; with ``keeps``, also their leaky arguments. ``begins``: the head's first columns in the
    neighbours' rows and in the row."""
    near_first, own_first = begins
    score_HE, att_HC = scores.head_buffers[0], scores.att_HC
    channels, first, zero = att_HC.shape[1], head * att_HC.shape[1], score_HE.dtype.type(0)
    for edge in range(0, count, TOGETHER):
        sums = spread_rows(zero)
        for channel in range(0, channels, NBYTES // score_HE.itemsize):
            own = load(own_RW, row, own_first + channel, own_first + channels)
            hidden = own + pull_rows(walk, near_RW, edge, near_first + channel, near_first + channels)
            for feature in range(len(terms.weight_KT)):
                weight = load(terms.weight_KT, feature, first + channel, first + channels)
                hidden = fma(along(terms.feature_KE, feature, edge), weight, hidden)
            att = load(att_HC, head, channel, channels)
            sums = fma(where_positive(hidden, att, att * scores.slope), hidden, sums)
            if keeps:
                store(scores.hidden_EC, edge, channel, channels, hidden)
        store(score_HE, head, edge, edge + TOGETHER, totals(sums))


@part
def _differentiate_scores(walk, scores, above_RW, row, above, near_RW, first, head, count):
    """From a head's scores, lse and D, compute the weights of message gradients, the gradients of scores, and these
    times the slope. The arguments say where the columns of gradients and of messages begin."""
    score_HE, d_score_HE, lse_HE, d_HE, share_HE, sloped_HE = scores.head_buffers
    by_vectors, slope = len(scores.att_HC) > 0, scores.slope
    for edge in range(0, count, TOGETHER):
        channels = scores.hidden_EC.shape[1]
        along_4 = product(walk, above_RW, row, above, near_RW, edge, first, channels)
        store(d_score_HE, head, edge, edge + TOGETHER, along_4)
    leaky(score_HE, share_HE, head, count, 1.0 if by_vectors else slope)
    differentiate(walk, share_HE, d_score_HE, lse_HE, d_HE, head, count)
    for edge in range(0, count, NBYTES // score_HE.itemsize):
        d_score = load(d_score_HE, head, edge, count)
        if by_vectors:
            store(sloped_HE, head, edge, count, d_score * slope)
        else:
            score = load(score_HE, head, edge, count)
            store(d_score_HE, head, edge, count, where_positive(score, d_score, d_score * slope))


@part
def _differentiate_channels(scores, head, count, out_RW, row, first, vectors, keeps):
    """Add the gradients through GATv2's scores of a head to the row's channels from ``first`` on, and to the attention
    vector from ``vectors`` on, unless that is negative. With ``keeps``, the leaky arguments are overwritten by their
    gradients, without the vector."""
    att_HC, hidden_EC = scores.att_HC, scores.hidden_EC
    d_score_HE, sloped_HE = scores.head_buffers[1], scores.head_buffers[5]
    channels, zero = att_HC.shape[1], out_RW.dtype.type(0)
    for channel in range(0, channels, NBYTES // out_RW.itemsize):
        sums, vector_sums = spread(zero), spread(zero)
        for edge in range(count):
            hidden = load(hidden_EC, edge, channel, channels)
            slope = where_positive(hidden, spread(d_score_HE[head, edge]), spread(sloped_HE[head, edge]))
            sums, vector_sums = sums + slope, fma(slope, hidden, vector_sums)
            if keeps:
                store(hidden_EC, edge, channel, channels, slope)
        _add_to_columns(out_RW, row, first + channel, first + channels, load(att_HC, head, channel, channels), sums)
        if vectors >= 0:
            at, end = vectors + channel, vectors + channels
            store(out_RW, row, at, end, load(out_RW, row, at, end) + vector_sums)


@part
def _add_channel_map_gradient(terms, scores, head, count, map_RM, row):
    """Add the gradient of the terms of a head's channels to their map, some features at a time."""
    channels, features, zero = scores.att_HC.shape[1], len(terms.weight_KT), map_RM.dtype.type(0)
    for channel in range(0, channels, NBYTES // map_RM.itemsize):
        att = load(scores.att_HC, head, channel, channels)
        for feature in range(0, features, TOGETHER):
            sums = spread_rows(zero)
            for edge in range(count):
                slope = load(scores.hidden_EC, edge, channel, channels)
                sums = fma(down(terms.feature_KE, feature, edge), slope, sums)
            for one in range(min(TOGETHER, features - feature)):
                at = (head * features + feature + one) * channels
                _add_to_columns(map_RM, row, at + channel, at + channels, att, row_of(sums, one))


@part
def _add_to_columns(out_RW, row, at, end, factor, sums):
    """Add sums, times a factor, to columns of a row."""
    store(out_RW, row, at, end, fma(factor, sums, load(out_RW, row, at, end)))


@part
def _sum_score_gradients(d_score_HE, head, count):
    """Sum the gradients of a head's scores."""
    found = d_score_HE.dtype.type(0)
    for edge in range(count):
        found += d_score_HE[head, edge]
    return found


@part
def _add_scalar_map_gradient(terms, d_score_HE, head, count, map_RM, row):
    """Add the gradient of the terms of a head's scores to their map."""
    features = len(terms.weight_KT)
    for feature in range(features):
        found = map_RM[row, head * features + feature]
        for edge in range(count):
            found += d_score_HE[head, edge] * terms.feature_KE[feature, edge]
        map_RM[row, head * features + feature] = found
