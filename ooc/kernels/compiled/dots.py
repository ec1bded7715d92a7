# SPDX-License-Identifier: Apache-2.0
"""``TransformerAttention``, attention by scaled dot products, as compiled loops, with or without features of edges.

A term is the same linear map of every edge's features, t = Σ_k f_k W_k, where a bias is a feature that is 1. So instead
of making every edge's term, a target's row is multiplied by the map first, and the map by sums of features afterwards:

    q · (k_j + t_j) = q · k_j + Σ_k f_jk (q · W_k)      Σ_j w_j (v_j + t_j) = Σ_j w_j v_j + Σ_k (Σ_j w_j f_jk) W_k

The map's gradient is made likewise. Only a source, whose edges all have different targets, makes terms.

``ooc.kernels.edge_function`` has the formulas and shapes; here these are

    s_ij = q_i · k_j / √C      dv_j = Σ_i α_ij m_ij dZ_i      dk_j = Σ_i ds_ij q_i / √C      dq_i = Σ_j ds_ij k_j / √C

with m dropout's scale. K features of an edge, the bias among them, E edges at a time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.kernels.compiled.lanes import NBYTES, TOGETHER, fma, load, number, spread, store, total
from ooc.kernels.compiled.loops import TAKEN, Walk, clear, compiled, gather, part, pull_number
from ooc.kernels.compiled.softmax import (
    add_weighted,
    begin,
    differentiate,
    drop,
    fill,
    finish,
    multiply,
    product,
    weigh,
)
from ooc.kernels.compiled.terms import Terms, read

Matrix = npt.NDArray[Any]


def feature_buffers(walk: Walk, terms: Terms, count: int) -> tuple[Matrix, ...]:
    """Return buffers with this many numbers for every head and feature."""
    shape = len(walk.scale_HE), len(terms.weight_KT)
    return tuple(np.empty(shape, walk.scale_HE.dtype) for _ in range(count))


@compiled
def attend(walk, terms, scale, source_NW, query_RV, edge_buffers, feature_buffers, out_RO, lse_RH):
    heads, (weight_HE, softmax_HE), (along_HK, sum_HK) = lse_RH.shape[1], edge_buffers, feature_buffers
    channels = out_RO.shape[1] // heads
    for row in range(len(query_RV)):
        clear(out_RO, row)
        begin(softmax_HE)
        for head in range(heads):
            _apply_map_transposed(query_RV, row, head, channels, terms.weight_KT, scale, along_HK)
            clear(sum_HK, head)
        while gather(walk, row):
            count = walk.at[TAKEN]
            for edge in range(0, count, TOGETHER):
                for head in range(heads):
                    at, key = head * channels, 2 * head * channels
                    score = product(walk, query_RV, row, at, source_NW, edge, key, channels) * scale
                    store(weight_HE, head, edge, edge + TOGETHER, score)
            read(terms, walk, count)
            for head in range(heads):
                _add_features(terms, along_HK, head, count, weight_HE)
                shrink = weigh(weight_HE, head, count, softmax_HE)
                drop(walk, weight_HE, head, count)
                _sum_features(terms, weight_HE, head, count, shrink, sum_HK)
                at, value = head * channels, (2 * head + 1) * channels
                add_weighted(walk, source_NW, value, channels, weight_HE, head, count, out_RO, row, at, shrink)
        for head in range(heads):
            _add_mapped_features(terms.weight_KT, sum_HK, head, channels, out_RO, row)
            lse_RH[row, head] = finish(softmax_HE, head, out_RO, row, head * channels, channels)


@compiled
def pull_targets(walk, terms, scale, source_NW, rows, edge_buffers, feature_buffers, out_RV, map_RM):
    query_RV, gradient_RO, statistics_RS = rows
    heads, (kept_HE, ds_HE, lse_HE, d_HE) = len(walk.scale_HE), edge_buffers
    channels, features = query_RV.shape[1] // heads, len(terms.weight_KT)
    one, (along_HK, above_HK, ds_HK, kept_HK) = query_RV.dtype.type(1), feature_buffers
    for row in range(len(query_RV)):
        clear(out_RV, row)
        for head in range(heads):
            _apply_map_transposed(query_RV, row, head, channels, terms.weight_KT, scale, along_HK)
            _apply_map_transposed(gradient_RO, row, head, channels, terms.weight_KT, 1.0, above_HK)
            clear(ds_HK, head)
            clear(kept_HK, head)
        while gather(walk, row):
            count = walk.at[TAKEN]
            for edge in range(0, count, TOGETHER):
                for head in range(heads):
                    at, key = head * channels, 2 * head * channels
                    score = product(walk, query_RV, row, at, source_NW, edge, key, channels) * scale
                    store(kept_HE, head, edge, edge + TOGETHER, score)
                    above = product(walk, gradient_RO, row, at, source_NW, edge, key + channels, channels)
                    store(ds_HE, head, edge, edge + TOGETHER, above)
            read(terms, walk, count)
            for head in range(heads):
                _add_features(terms, along_HK, head, count, kept_HE)
                _add_features(terms, above_HK, head, count, ds_HE)
                fill(lse_HE, head, count, statistics_RS[row, 2 * head])
                fill(d_HE, head, count, statistics_RS[row, 2 * head + 1])
                differentiate(walk, kept_HE, ds_HE, lse_HE, d_HE, head, count)
                _sum_features(terms, ds_HE, head, count, one, ds_HK)
                _sum_features(terms, kept_HE, head, count, one, kept_HK)
                at, key = head * channels, 2 * head * channels
                add_weighted(walk, source_NW, key, channels, ds_HE, head, count, out_RV, row, at, one)
        for head in range(heads):
            _add_mapped_features(terms.weight_KT, ds_HK, head, channels, out_RV, row)
            multiply(out_RV, row, head * channels, channels, scale)
            for feature in range(features if map_RM.shape[1] else 0):
                weights = ds_HK[head, feature] * query_RV.dtype.type(scale), kept_HK[head, feature]
                _store_map_gradient(
                    query_RV, gradient_RO, row, head, channels, weights, map_RM, head * features + feature
                )


@compiled
def pull_sources(walk, terms, scale, channels, source_RW, target_NP, edge_buffers, out_RW):
    near_E, (kept_HE, ds_HE, lse_HE, d_HE) = walk.near_E, edge_buffers
    heads, one = len(walk.scale_HE), source_RW.dtype.type(1)
    pulled = target_NP.shape[1] // heads
    for row in range(len(source_RW)):
        clear(out_RW, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            for edge in range(0, count, TOGETHER):
                for head in range(heads):
                    key, query = 2 * head * channels, head * pulled
                    value, gradient = key + channels, query + channels
                    score = product(walk, source_RW, row, key, target_NP, edge, query, channels) * scale
                    store(kept_HE, head, edge, edge + TOGETHER, score)
                    above = product(walk, source_RW, row, value, target_NP, edge, gradient, channels)
                    store(ds_HE, head, edge, edge + TOGETHER, above)
                    for at in range(edge, min(edge + TOGETHER, count)):
                        lse_HE[head, at] = pull_number(walk, target_NP, at, gradient + channels)
                        d_HE[head, at] = number(target_NP, near_E[at], gradient + channels + 1)
            read(terms, walk, count)
            for head in range(heads):
                key, query = 2 * head * channels, head * pulled
                value, gradient = key + channels, query + channels
                if len(terms.weight_KT):
                    _add_term_products(terms, target_NP, near_E, count, head, query, channels, scale, kept_HE, ds_HE)
                differentiate(walk, kept_HE, ds_HE, lse_HE, d_HE, head, count)
                add_weighted(walk, target_NP, query, channels, ds_HE, head, count, out_RW, row, key, one)
                add_weighted(walk, target_NP, gradient, channels, kept_HE, head, count, out_RW, row, value, one)
        for head in range(heads):
            multiply(out_RW, row, 2 * head * channels, channels, scale)


@part
def _apply_map_transposed(rows, row, head, channels, weight_KT, scale, into_HK):
    """``scale`` times a head's columns of a row, times the map."""
    end = (head + 1) * channels
    for feature in range(len(weight_KT)):
        sums = spread(rows.dtype.type(0))
        for column in range(head * channels, end, NBYTES // rows.itemsize):
            sums = fma(load(rows, row, column, end), load(weight_KT, feature, column, end), sums)
        into_HK[head, feature] = total(sums) * rows.dtype.type(scale)


@part
def _add_features(terms, along_HK, head, count, into_HE):
    """Add the contribution of features to a head's product for every edge."""
    for feature in range(len(terms.weight_KT)):
        by = spread(along_HK[head, feature])
        for edge in range(0, count, NBYTES // into_HE.itemsize):
            added = load(terms.feature_KE, feature, edge, count)
            store(into_HE, head, edge, count, fma(by, added, load(into_HE, head, edge, count)))


@part
def _sum_features(terms, weight_HE, head, count, shrink, into_HK):
    """Multiply a head's sums of features by ``shrink``, and add those of these edges, weighted."""
    for feature in range(len(terms.weight_KT)):
        sums = spread(weight_HE.dtype.type(0))
        for edge in range(0, count, NBYTES // weight_HE.itemsize):
            sums = fma(load(weight_HE, head, edge, count), load(terms.feature_KE, feature, edge, count), sums)
        into_HK[head, feature] = into_HK[head, feature] * shrink + total(sums)


@part
def _add_mapped_features(weight_KT, sum_HK, head, channels, out, row):
    """Add the map of a head's sums of features to its columns."""
    end = (head + 1) * channels
    for channel in range(head * channels, end if len(weight_KT) else 0, NBYTES // out.itemsize):
        sums = load(out, row, channel, end)
        for feature in range(len(weight_KT)):
            sums = fma(spread(sum_HK[head, feature]), load(weight_KT, feature, channel, end), sums)
        store(out, row, channel, end, sums)


@part
def _store_map_gradient(query_RV, gradient_RO, row, head, channels, weights, map_RM, place):
    """Put the map's gradient of a head and feature into its place: of query and gradient, weighted."""
    end, place_end = (head + 1) * channels, (place + 1) * channels
    for channel in range(0, channels, NBYTES // map_RM.itemsize):
        at = head * channels + channel
        of_gradient = load(gradient_RO, row, at, end) * weights[1]
        value = fma(spread(weights[0]), load(query_RV, row, at, end), of_gradient)
        store(map_RM, row, place * channels + channel, place_end, value)


@part
def _add_term_products(terms, target_NP, near_E, count, head, begin, channels, scale, kept_HE, ds_HE):
    """Add the products of edges' terms with their targets' query and gradient to those of the source's rows."""
    first, end, zero = head * channels, (head + 1) * channels, kept_HE.dtype.type(0)
    for edge in range(count):
        along, above, other = spread(zero), spread(zero), near_E[edge]
        for channel in range(0, channels, NBYTES // kept_HE.itemsize):
            term = spread(zero)
            for feature in range(len(terms.weight_KT)):
                weight = load(terms.weight_KT, feature, first + channel, end)
                term = fma(spread(terms.feature_KE[feature, edge]), weight, term)
            along = fma(term, load(target_NP, other, begin + channel, begin + channels), along)
            at = begin + channels
            above = fma(term, load(target_NP, other, at + channel, at + channels), above)
        kept_HE[head, edge] += total(along) * kept_HE.dtype.type(scale)
        ds_HE[head, edge] += total(above)
