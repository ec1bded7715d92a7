# SPDX-License-Identifier: Apache-2.0
"""``TransformerAttention``, attention by scaled dot products, as compiled loops, with features of edges or without.

A term is the same linear map of every edge's features, t = Σ_k f_k W_k, a bias being a feature that is 1. So a target's
row is multiplied by the map first, and the map by sums of features, in place of what every edge has:

    q · (k_j + t_j) = q · k_j + Σ_k f_jk (q · W_k)      Σ_j w_j (v_j + t_j) = Σ_j w_j v_j + Σ_k (Σ_j w_j f_jk) W_k

and so is the map's gradient made. Only a source, every edge of which has another target, makes terms.

``ooc.kernels.edge_function`` has the formulas and shapes, of which here

    s_ij = q_i · k_j / √C      dv_j = Σ_i α_ij m_ij dZ_i      dk_j = Σ_i ds_ij q_i / √C      dq_i = Σ_j ds_ij k_j / √C

with m dropout's scale; a row's edges are weighted as ``gat`` beside this module has it. K features of an edge, the bias
among them.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ooc.kernels import edge_function
from ooc.kernels.compiled.lanes import (
    NBYTES,
    TOGETHER,
    dots,
    exp,
    fma,
    larger,
    largest,
    load,
    spread,
    store,
    total,
)
from ooc.kernels.compiled.loops import (
    AHEAD,
    EDGES,
    array,
    check_order,
    compiled,
    draw,
    fetch,
    gather,
    lists_of,
    masks_of,
    scratch,
)
from ooc.kernels.edge_function import Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import TileEdges
from ooc.kernels.functions import TransformerAttention
from ooc.plan.workload import Direction


class Terms(NamedTuple):
    """Features of the tile's edges and of its added self-loops, and the map of them, behind it the bias [K, H·C]; and
    what a loop writes: the features of a row's edges, and for every head so many numbers for each."""

    stored_EK: Any
    loop_RK: Any
    weight_KT: Any
    features_KE: Any
    of_heads: Any


@torch.no_grad()
def pull_messages(
    function: TransformerAttention,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    columns: int,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_messages``."""
    if heads is None or not _is_written(tile, terms):
        return edge_function.pull_messages(
            function, tile, source_NW=source_NW, target_RV=target_RV, columns=columns, terms=terms, heads=heads
        )
    count = len(heads.heads)
    out, lse = source_NW.new_empty(tile.rows, columns), source_NW.new_empty(tile.rows, count)
    lists, masks = lists_of(tile, len(source_NW)), masks_of(heads.dropout, Direction.IN)
    source, query = array(source_NW), array(target_RV)
    numbers = count, columns // count, heads.heads.start, 1 / math.sqrt(columns // count)
    given = scratch(count, 3, query.dtype)
    check_order(
        _attend(
            lists, masks, _terms(tile, terms, source_NW, count), source, query, numbers, given, array(out), array(lse)
        )
    )
    return out, lse


@torch.no_grad()
def pull_target_gradients(
    function: TransformerAttention,
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
    if heads is None or upstream_R.statistics is None or not _is_written(tile, terms):
        return edge_function.pull_target_gradients(
            function, tile, source_NW=source_NW, target_RV=target_RV, upstream_R=upstream_R, with_map=with_map,
            terms=terms, heads=heads,
        )  # fmt: skip
    count, channels = len(heads.heads), target_RV.shape[1] // len(heads.heads)
    map_columns = terms.map_columns if terms is not None and with_map else 0
    out, of_map = target_RV.new_empty(target_RV.shape), target_RV.new_empty(len(target_RV), map_columns)
    lists, masks = lists_of(tile, len(source_NW)), masks_of(heads.dropout, Direction.IN)
    source, query, gradient = array(source_NW), array(target_RV), array(upstream_R.gradient)
    numbers = count, channels, heads.heads.start, 1 / math.sqrt(channels)
    given = scratch(count, 3, query.dtype)
    rows = query, gradient, array(upstream_R.statistics)
    found = array(out), array(of_map)
    check_order(_targets(lists, masks, _terms(tile, terms, source_NW, count), source, rows, numbers, given, found))
    return out, of_map if terms is not None and with_map else None


@torch.no_grad()
def pull_source_gradients(
    function: TransformerAttention,
    tile: TileEdges,
    *,
    source_RW: Tensor,
    target_NP: Tensor,
    layout: TargetLayout,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> Tensor:
    """As ``edge_function.pull_source_gradients``; all is computed again."""
    if heads is None or not _is_written(tile, terms):
        return edge_function.pull_source_gradients(
            function, tile, source_RW=source_RW, target_NP=target_NP, layout=layout, terms=terms, heads=heads,
        )  # fmt: skip
    count = len(heads.heads)
    out = source_RW.new_empty(source_RW.shape)
    lists, masks = lists_of(tile, len(target_NP)), masks_of(heads.dropout, Direction.OUT)
    target, source = array(target_NP), array(source_RW)
    numbers = count, layout.message, layout.columns // count, heads.heads.start, 1 / math.sqrt(layout.message)
    given = scratch(count, 5, source.dtype)
    check_order(
        _sources(lists, masks, _terms(tile, terms, target_NP, count), target, source, numbers, given, array(out))
    )
    return out


def _is_written(tile: TileEdges, terms: EdgeTerms | None) -> bool:
    """Whether there is a loop for it: features are mapped, and of a type that it reads."""
    if terms is None:
        return True
    stored = None if tile.features_EK is None else tile.features_EK.dtype
    return terms.weight_KT is not None and stored in (torch.float32, torch.float64)


def _terms(tile: TileEdges, terms: EdgeTerms | None, pulled: Tensor, heads: int) -> Terms:
    none = pulled.new_empty(0, 0)
    stored, loops, weight = none.float(), none, none
    if terms is not None and terms.weight_KT is not None and tile.features_EK is not None:
        stored, weight = tile.features_EK, terms.weight_KT
        loops = none if terms.loop_RK is None else terms.loop_RK
        if terms.bias_T is not None:
            weight = torch.cat((weight, terms.bias_T[None]))
    dtype, features = array(none).dtype, len(weight)
    of_heads = tuple(np.empty((heads, features), dtype) for _ in range(4))
    return Terms(array(stored), array(loops), array(weight), np.empty((features, EDGES), dtype), of_heads)


@compiled
def _attend(lists, masks, terms, source_NW, query_RV, numbers, given, out_RO, lse_RH):
    heads, channels, first_head, scale = numbers
    dtype, lanes, features = query_RV.dtype, NBYTES // query_RV.itemsize, len(terms.weight_KT)
    (near_E, places_E, before), (weight_HE, scale_HE, softmax_H3) = given
    along_HK, sum_HK = terms.of_heads[0], terms.of_heads[1]
    for row in range(len(query_RV)):
        for column in range(out_RO.shape[1]):
            out_RO[row, column] = 0
        for head in range(heads):
            softmax_H3[head, 0], softmax_H3[head, 1] = -np.inf, 0
            _times_map(query_RV, row, head, channels, terms.weight_KT, dtype.type(scale), along_HK)
            for feature in range(features):
                sum_HK[head, feature] = 0
        before[0] = -1
        cursor, stop, is_first = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops, True
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if masks.drops and not draw(masks, lists, row, near_E, count, first_head, scale_HE, before):
                return False
            if count == 0:
                continue
            _fill(near_E, count)
            for edge in range(0, count, TOGETHER):
                for ahead in range(AHEAD, AHEAD + TOGETHER):
                    fetch(lists, source_NW, begun + edge + ahead)
                columns, keys = (0, channels), (0, 2 * channels)
                dots(query_RV, row, source_NW, near_E, edge, heads, columns, keys, channels, scale, weight_HE)
            if features:
                _read_features(lists, row, terms, places_E, count)
                for head in range(heads):
                    _add_features(terms, along_HK, head, count, weight_HE)
            _weigh(weight_HE, heads, count, softmax_H3)
            if not is_first:
                for head in range(heads):
                    _scale(out_RO, row, head * channels, channels, softmax_H3[head, 2])
            is_first = False
            if masks.drops:
                for head in range(heads):
                    for edge in range(0, count, lanes):
                        weight = load(weight_HE, head, edge, count) * load(scale_HE, head, edge, count)
                        store(weight_HE, head, edge, count, weight)
            if features:
                for head in range(heads):
                    _sum_features(terms, weight_HE, head, count, softmax_H3[head, 2], sum_HK)
            values = channels, 2 * channels
            _add_rows(source_NW, near_E, count, heads, values, channels, weight_HE, out_RO, row, (0, channels))
        for head in range(heads):
            if features:
                _add_map(terms.weight_KT, sum_HK, head, channels, out_RO, row, head * channels)
            weights, lse_RH[row, head] = softmax_H3[head, 1], 0
            if weights != 0:
                _scale(out_RO, row, head * channels, channels, 1 / weights)
                lse_RH[row, head] = softmax_H3[head, 0] + np.log(weights)
    return True


@compiled
def _targets(lists, masks, terms, source_NW, rows, numbers, given, found):
    heads, channels, first_head, scale = numbers
    (query_RV, gradient_RO, statistics), (out_RV, map_RM) = rows, found
    dtype, lanes, features = query_RV.dtype, NBYTES // query_RV.itemsize, len(terms.weight_KT)
    (near_E, places_E, before), (kept_HE, ds_HE, scale_HE) = given
    along_HK, above_HK, ds_HK, kept_HK = terms.of_heads
    one = dtype.type(1)
    for row in range(len(query_RV)):
        for column in range(out_RV.shape[1]):
            out_RV[row, column] = 0
        for head in range(heads):
            _times_map(query_RV, row, head, channels, terms.weight_KT, dtype.type(scale), along_HK)
            _times_map(gradient_RO, row, head, channels, terms.weight_KT, one, above_HK)
            for feature in range(features):
                ds_HK[head, feature], kept_HK[head, feature] = 0, 0
        before[0] = -1
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if masks.drops and not draw(masks, lists, row, near_E, count, first_head, scale_HE, before):
                return False
            if count == 0:
                continue
            _fill(near_E, count)
            for edge in range(0, count, TOGETHER):
                for ahead in range(AHEAD, AHEAD + TOGETHER):
                    fetch(lists, source_NW, begun + edge + ahead)
                columns, keys, values = (0, channels), (0, 2 * channels), (channels, 2 * channels)
                dots(query_RV, row, source_NW, near_E, edge, heads, columns, keys, channels, scale, kept_HE)
                dots(gradient_RO, row, source_NW, near_E, edge, heads, columns, values, channels, one, ds_HE)
            if features:
                _read_features(lists, row, terms, places_E, count)
                for head in range(heads):
                    _add_features(terms, along_HK, head, count, kept_HE)
                    _add_features(terms, above_HK, head, count, ds_HE)
            for head in range(heads):
                lse, d = spread(statistics[row, 2 * head]), spread(statistics[row, 2 * head + 1])
                for edge in range(0, count, lanes):
                    share = kept = exp(load(kept_HE, head, edge, count) - lse)
                    above = load(ds_HE, head, edge, count)
                    if masks.drops:
                        drawn = load(scale_HE, head, edge, count)
                        above, kept = above * drawn, kept * drawn
                    store(ds_HE, head, edge, count, (above - d) * share)
                    store(kept_HE, head, edge, count, kept)
            if features:
                for head in range(heads):
                    _sum_features(terms, ds_HE, head, count, one, ds_HK)
                    _sum_features(terms, kept_HE, head, count, one, kept_HK)
            columns, keys = (0, channels), (0, 2 * channels)
            _add_rows(source_NW, near_E, count, heads, keys, channels, ds_HE, out_RV, row, columns)
        for head in range(heads):
            if features:
                _add_map(terms.weight_KT, ds_HK, head, channels, out_RV, row, head * channels)
            _scale(out_RV, row, head * channels, channels, dtype.type(scale))
            if map_RM.shape[1]:
                for feature in range(features):
                    of_query, of_gradient = ds_HK[head, feature] * dtype.type(scale), kept_HK[head, feature]
                    at = (head * features + feature) * channels
                    for channel in range(0, channels, lanes):
                        place, end = head * channels + channel, (head + 1) * channels
                        query, gradient = load(query_RV, row, place, end), load(gradient_RO, row, place, end)
                        value = fma(spread(of_query), query, gradient * of_gradient)
                        store(map_RM, row, at + channel, at + channels, value)
    return True


@compiled
def _sources(lists, masks, terms, target_NP, source_RW, numbers, given, out_RW):
    heads, channels, pulled, first_head, scale = numbers
    dtype, lanes = source_RW.dtype, NBYTES // source_RW.itemsize
    (near_E, places_E, before), (kept_HE, ds_HE, scale_HE, lse_HE, d_HE) = given
    features = len(terms.weight_KT)
    one = dtype.type(1)
    for row in range(len(source_RW)):
        for column in range(out_RW.shape[1]):
            out_RW[row, column] = 0
        before[0] = -1
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if masks.drops and not draw(masks, lists, row, near_E, count, first_head, scale_HE, before):
                return False
            if count == 0:
                continue
            _fill(near_E, count)
            for edge in range(0, count, TOGETHER):
                for ahead in range(AHEAD, AHEAD + TOGETHER):
                    fetch(lists, target_NP, begun + edge + ahead)
                keys, queries = (0, 2 * channels), (0, pulled)
                dots(source_RW, row, target_NP, near_E, edge, heads, keys, queries, channels, scale, kept_HE)
                values, gradients = (channels, 2 * channels), (channels, pulled)
                dots(source_RW, row, target_NP, near_E, edge, heads, values, gradients, channels, one, ds_HE)
                for of_edge in range(edge, min(edge + TOGETHER, count)):
                    for head in range(heads):
                        at = head * pulled + 2 * channels
                        lse_HE[head, of_edge] = target_NP[near_E[of_edge], at]
                        d_HE[head, of_edge] = target_NP[near_E[of_edge], at + 1]
            if features:
                _read_features(lists, row, terms, places_E, count)
                for head in range(heads):
                    _add_terms(
                        terms,
                        target_NP,
                        near_E,
                        count,
                        head,
                        head * pulled,
                        channels,
                        dtype.type(scale),
                        kept_HE,
                        ds_HE,
                    )
            for head in range(heads):
                for edge in range(0, count, lanes):
                    share = kept = exp(load(kept_HE, head, edge, count) - load(lse_HE, head, edge, count))
                    above = load(ds_HE, head, edge, count)
                    if masks.drops:
                        drawn = load(scale_HE, head, edge, count)
                        above, kept = above * drawn, kept * drawn
                    store(ds_HE, head, edge, count, (above - load(d_HE, head, edge, count)) * share)
                    store(kept_HE, head, edge, count, kept)
            keys, queries = (0, 2 * channels), (0, pulled)
            _add_rows(target_NP, near_E, count, heads, queries, channels, ds_HE, out_RW, row, keys)
            values, gradients = (channels, 2 * channels), (channels, pulled)
            _add_rows(target_NP, near_E, count, heads, gradients, channels, kept_HE, out_RW, row, values)
        for head in range(heads):
            _scale(out_RW, row, 2 * head * channels, channels, dtype.type(scale))
    return True


@compiled
def _fill(near_E, count):
    """Name the last of these neighbours once more where ``dots`` takes more than there are."""
    for edge in range(count, -(-count // TOGETHER) * TOGETHER):
        near_E[edge] = near_E[count - 1]


@compiled
def _weigh(weight_HE, heads, count, softmax_H3):
    """Weights of a row's next edges, written over their scores, and what is known of all so far: of every head the
    highest score, the sum of weights, and by what other sums so far shrink, as there is a higher score."""
    dtype, lanes = weight_HE.dtype, NBYTES // weight_HE.itemsize
    for head in range(heads):
        before = softmax_H3[head, 0]
        for edge in range(count, -(-count // lanes) * lanes):
            weight_HE[head, edge] = -np.inf
        highest = spread(before)
        for edge in range(0, count, lanes):
            highest = larger(highest, load(weight_HE, head, edge, EDGES))
        softmax_H3[head, 0] = largest(highest)
        shrink = dtype.type(0)
        if softmax_H3[head, 1] != 0:
            shrink = np.exp(before - softmax_H3[head, 0])
        highest, sums = spread(softmax_H3[head, 0]), spread(dtype.type(0))
        for edge in range(0, count, lanes):
            weight = exp(load(weight_HE, head, edge, EDGES) - highest)
            store(weight_HE, head, edge, EDGES, weight)
            sums = sums + weight
        softmax_H3[head, 1] = softmax_H3[head, 1] * shrink + total(sums)
        softmax_H3[head, 2] = shrink


@compiled
def _add_rows(matrix, near_E, count, heads, columns, channels, weight_HE, out, row, out_columns):
    """Add to every head's columns of a row of ``out`` the weighted sum of those of rows of ``matrix``; where those of
    the first head begin, and how many further on those of the next."""
    lanes = NBYTES // out.itemsize
    for head in range(heads):
        begin, at = columns[0] + head * columns[1], out_columns[0] + head * out_columns[1]
        end, out_end = begin + channels, at + channels
        for channel in range(0, channels, 2 * lanes):
            other = channel + lanes
            first, second = load(out, row, at + channel, out_end), load(out, row, at + other, out_end)
            for edge in range(count):
                weight, near = spread(weight_HE[head, edge]), near_E[edge]
                first = fma(weight, load(matrix, near, begin + channel, end), first)
                second = fma(weight, load(matrix, near, begin + other, end), second)
            store(out, row, at + channel, out_end, first)
            store(out, row, at + other, out_end, second)


@compiled
def _scale(out, row, begin, channels, by):
    for channel in range(begin, begin + channels, NBYTES // out.itemsize):
        store(out, row, channel, begin + channels, load(out, row, channel, begin + channels) * by)


@compiled
def _read_features(lists, row, terms, places_E, count):
    """The features of these edges, feature by feature."""
    stored = terms.stored_EK.shape[1]
    for edge in range(count):
        place, loop = places_E[edge], places_E[edge] - len(lists.indices_E)
        for feature in range(len(terms.weight_KT)):
            if feature >= stored:
                terms.features_KE[feature, edge] = 1
            elif loop < 0:
                terms.features_KE[feature, edge] = terms.stored_EK[place, feature]
            else:
                terms.features_KE[feature, edge] = terms.loop_RK[loop, feature]


@compiled
def _times_map(rows, row, head, channels, weight_KT, scale, into_HK):
    """``scale`` times a head's columns of a row times the map."""
    lanes = NBYTES // rows.itemsize
    end = (head + 1) * channels
    for feature in range(len(weight_KT)):
        sums = spread(rows.dtype.type(0))
        for column in range(head * channels, end, lanes):
            sums = fma(load(rows, row, column, end), load(weight_KT, feature, column, end), sums)
        into_HK[head, feature] = total(sums) * scale


@compiled
def _add_features(terms, along_HK, head, count, into_HE):
    """Add what features add to a product of the head with every edge."""
    lanes = NBYTES // into_HE.itemsize
    for feature in range(len(terms.weight_KT)):
        by = spread(along_HK[head, feature])
        for edge in range(0, count, lanes):
            added = load(terms.features_KE, feature, edge, count)
            store(into_HE, head, edge, count, fma(by, added, load(into_HE, head, edge, count)))


@compiled
def _sum_features(terms, weight_HE, head, count, shrink, into_HK):
    """Make of a head's sums of features ``shrink`` times what they were and those of these edges, weighted."""
    lanes = NBYTES // weight_HE.itemsize
    for feature in range(len(terms.weight_KT)):
        sums = spread(weight_HE.dtype.type(0))
        for edge in range(0, count, lanes):
            sums = fma(load(weight_HE, head, edge, count), load(terms.features_KE, feature, edge, count), sums)
        into_HK[head, feature] = into_HK[head, feature] * shrink + total(sums)


@compiled
def _add_map(weight_KT, sum_HK, head, channels, out, row, at):
    """Add the map of a head's sums of features to its columns."""
    lanes = NBYTES // out.itemsize
    for channel in range(0, channels, lanes):
        sums = load(out, row, at + channel, at + channels)
        for feature in range(len(weight_KT)):
            weight = load(weight_KT, feature, head * channels + channel, (head + 1) * channels)
            sums = fma(spread(sum_HK[head, feature]), weight, sums)
        store(out, row, at + channel, at + channels, sums)


@compiled
def _add_terms(terms, target_NP, near_E, count, head, begin, channels, scale, kept_HE, ds_HE):
    """Add the products of edges' terms with their targets' query and gradient to those of the source's rows."""
    lanes, end = NBYTES // kept_HE.itemsize, (head + 1) * channels
    zero = kept_HE.dtype.type(0)
    for edge in range(count):
        along, above, other = spread(zero), spread(zero), near_E[edge]
        for channel in range(0, channels, lanes):
            term = spread(zero)
            for feature in range(len(terms.weight_KT)):
                weight = load(terms.weight_KT, feature, head * channels + channel, end)
                term = fma(spread(terms.features_KE[feature, edge]), weight, term)
            along = fma(term, load(target_NP, other, begin + channel, begin + channels), along)
            at = begin + channels
            above = fma(term, load(target_NP, other, at + channel, at + channels), above)
        kept_HE[head, edge] += total(along) * scale
        ds_HE[head, edge] += total(above)
