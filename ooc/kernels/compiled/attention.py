# SPDX-License-Identifier: Apache-2.0
"""Attention by GATv2's scores and by GAT's with features of edges as compiled loops, in all three pulls.

The two differ in how an edge comes by its score, a sum over a head's channels of what is leaky, or what is leaky of a
sum of scalars, and in what flows back through it; all else is alike. What ``functions`` and ``edge_function`` say of an
edge is computed here for some dozens of a row at a time, head after head. Nothing is kept for another pull: to compute
it again takes no longer than to read it.

Terms are made of features by a linear map, feature after feature. Shapes as in ``edge_function``, and H heads of C
channels, K features.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.kernels import edge_function
from ooc.kernels.compiled.gat import weigh
from ooc.kernels.compiled.lanes import NBYTES, exp, fma, load, spread, store, totals, where_positive
from ooc.kernels.compiled.loops import (
    AHEAD,
    EDGES,
    array,
    check_order,
    compiled,
    draw,
    fetch,
    gather,
    inlined,
    lists_of,
    masks_of,
    scratch,
)
from ooc.kernels.compiled.sums import FEATURES, Terms
from ooc.kernels.edge_function import Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import Gatv2, GatWithFeatures
from ooc.plan.workload import Direction

_AT_ONCE = 4
"""Edges whose dot products are summed together: ``totals``."""

Function = Gatv2 | GatWithFeatures


class Scores(NamedTuple):
    """What makes scores, of an ``EdgeFunction``. ``att_HC`` has no rows where they are sums of scalars, of which a
    target has ``of`` and brings that in ``place``."""

    att_HC: npt.NDArray[Any]
    slope: float
    place: int
    of: int


class Scratch(NamedTuple):
    """What the loops write to: of a row's edges at a time, numbers of every head, those of a head's channels and
    features; and which edges these are (``loops.scratch``)."""

    of_edges: Any
    of_heads: Any
    hidden_EC: npt.NDArray[Any]
    feature_EK: npt.NDArray[Any]


def pull_messages(
    function: Function,
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
        given: dict[str, Any] = {"source_NW": source_NW, "target_RV": target_RV, "columns": columns}
        return edge_function.pull_messages(function, tile, **given, terms=terms, heads=heads)
    count, made = len(heads.heads), Terms.of(terms, tile, source_NW.dtype)
    out_RO, lse_RH = source_NW.new_empty(tile.rows, columns), source_NW.new_empty(tile.rows, count)
    is_ordered = _attend(
        lists_of(tile, len(source_NW)),
        masks_of(heads.dropout, Direction.IN),
        heads.heads.start,
        _scores(function, source_NW),
        made,
        _scratch(count, columns // count, made, source_NW),
        array(source_NW),
        array(target_RV),
        array(out_RO),
        array(lse_RH),
    )
    check_order(is_ordered)
    return out_RO, lse_RH


def pull_source_gradients(
    function: Function,
    tile: TileEdges,
    *,
    source_RW: Tensor,
    target_NP: Tensor,
    layout: TargetLayout,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> Tensor:
    """As ``edge_function.pull_source_gradients``."""
    if heads is None or not _is_written(tile, terms):
        given: dict[str, Any] = {"source_RW": source_RW, "target_NP": target_NP, "layout": layout}
        return edge_function.pull_source_gradients(function, tile, **given, terms=terms, heads=heads)
    count, made = len(heads.heads), Terms.of(terms, tile, source_RW.dtype)
    out_RW = torch.empty_like(source_RW, memory_format=torch.contiguous_format)
    is_ordered = _pull_sources(
        lists_of(tile, len(target_NP)),
        masks_of(heads.dropout, Direction.OUT),
        heads.heads.start,
        _scores(function, source_RW),
        made,
        _scratch(count, layout.message, made, source_RW),
        layout.target,
        array(source_RW),
        array(target_NP),
        array(out_RW),
    )
    check_order(is_ordered)
    return out_RW


def pull_target_gradients(
    function: Function,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    upstream_R: Upstream,
    with_map: bool = False,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_target_gradients``."""
    if heads is None or upstream_R.statistics is None or not _is_written(tile, terms):
        given: dict[str, Any] = {"source_NW": source_NW, "target_RV": target_RV, "upstream_R": upstream_R}
        return edge_function.pull_target_gradients(function, tile, **given, with_map=with_map, terms=terms, heads=heads)
    count, rows, made = len(heads.heads), tile.rows, Terms.of(terms, tile, source_NW.dtype)
    out_RV = torch.empty_like(target_RV, memory_format=torch.contiguous_format)
    map_RM = target_RV.new_empty(rows, 0 if terms is None or not with_map else terms.map_columns)
    is_ordered = _pull_targets(
        lists_of(tile, len(source_NW)),
        masks_of(heads.dropout, Direction.IN),
        heads.heads.start,
        _scores(function, source_NW),
        made,
        _scratch(count, upstream_R.gradient.shape[1] // count, made, source_NW),
        array(source_NW),
        array(target_RV),
        array(upstream_R.gradient),
        array(upstream_R.statistics.reshape(rows, 2 * count)),
        array(out_RV),
        array(map_RM),
    )
    check_order(is_ordered)
    return out_RV, map_RM if map_RM.shape[1] else None


def _is_written(tile: TileEdges, terms: EdgeTerms | None) -> bool:
    """Whether there are loops for such terms: not for features as they are, which none of these functions has, nor for
    those stored in a type that would have to be converted, all of the tile's."""
    if terms is None:
        return True
    is_known = tile.self_loops is not SelfLoops.EXACTLY_ONE or terms.loop_RK is not None
    stored_EK = tile.features_EK
    return terms.weight_KT is not None and is_known and stored_EK is not None and stored_EK.dtype in FEATURES


def _scores(function: Function, like: Tensor) -> Scores:
    if isinstance(function, Gatv2):
        return Scores(array(function.att_HC.detach()), function.negative_slope, 0, 1)
    return Scores(array(like.new_empty(0, 0)), function.negative_slope, function.place, function.of)


def _scratch(heads: int, channels: int, terms: Terms, like: Tensor) -> Scratch:
    of_edges, of_heads = scratch(heads, 8, array(like).dtype)
    features = -(-len(terms.weight_KT) // _AT_ONCE) * _AT_ONCE
    hidden_EC, feature_EK = (np.zeros((EDGES, width), array(like).dtype) for width in (channels, features))
    return Scratch(of_edges, of_heads, hidden_EC, feature_EK)


@compiled
def _attend(lists, masks, first_head, scores, terms, given, source_NW, target_RV, out_RO, lse_RH):
    heads, lanes, by_vectors = lse_RH.shape[1], NBYTES // out_RO.itemsize, len(scores.att_HC) > 0
    channels, brought, own = out_RO.shape[1] // heads, source_NW.shape[1] // heads, target_RV.shape[1] // heads
    score_HE, weight_HE, sloped_HE, scale_HE, softmax_HE, _, _, _ = given.of_heads
    near_E, places_E, before = given.of_edges
    slope = 1.0 if by_vectors else scores.slope
    for row in range(len(out_RO)):
        for column in range(out_RO.shape[1]):
            out_RO[row, column] = 0
        for head in range(heads):
            softmax_HE[head, 0], softmax_HE[head, 1], softmax_HE[head, 2] = -np.inf, 0, 0
        before[0] = -1
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if masks.drops and not draw(masks, lists, row, near_E, count, first_head, scale_HE, before):
                return False
            if count == 0:
                continue
            _fill(terms, near_E, places_E, count, given.feature_EK)
            if not by_vectors:
                ends = brought, channels, own, scores.place
                _add_scalars(lists, begun, source_NW, target_RV, row, ends, terms, given, count, score_HE)
            for head in range(heads):
                if by_vectors:
                    ends = head * brought, head * own
                    _add_channels(
                        lists, begun, source_NW, target_RV, row, ends, scores, terms, given, head, count, False
                    )
                shrink = weigh(score_HE, weight_HE, sloped_HE, head, count, slope, softmax_HE)
                if masks.drops:
                    for edge in range(0, count, lanes):
                        scale = load(scale_HE, head, edge, count)
                        store(weight_HE, head, edge, count, load(weight_HE, head, edge, count) * scale)
                ends = head * brought, head * channels
                _weighted(source_NW, near_E, ends, channels, weight_HE, head, count, out_RO, row, shrink)
        for head in range(heads):
            weights, first = softmax_HE[head, 1], head * channels
            if weights == 0:
                lse_RH[row, head] = 0
                continue
            inverse = 1 / weights
            for channel in range(first, first + channels, lanes):
                store(out_RO, row, channel, first + channels, load(out_RO, row, channel, first + channels) * inverse)
            lse_RH[row, head] = softmax_HE[head, 0] + np.log(weights)
    return True


@compiled
def _pull_sources(lists, masks, first_head, scores, terms, given, target, source_RW, target_NP, out_RW):
    score_HE, along_HE, lse_HE, d_HE, scale_HE, share_HE, _, _ = given.of_heads
    heads, by_vectors, channels = len(score_HE), len(scores.att_HC) > 0, given.hidden_EC.shape[1]
    brought, packed = source_RW.shape[1] // heads, target_NP.shape[1] // heads
    near_E, places_E, before = given.of_edges
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
            _fill(terms, near_E, places_E, count, given.feature_EK)
            if not by_vectors:
                ends = packed, scores.place, brought, channels
                _add_scalars(lists, begun, target_NP, source_RW, row, ends, terms, given, count, score_HE)
            for head in range(heads):
                first, above = head * brought, head * packed + target
                if by_vectors:
                    ends = head * packed, first
                    _add_channels(
                        lists, begun, target_NP, source_RW, row, ends, scores, terms, given, head, count, True
                    )
                _dots(target_NP, near_E, above, source_RW, row, first, channels, along_HE, head, count)
                for edge in range(count):
                    lse_HE[head, edge] = target_NP[near_E[edge], above + channels]
                    d_HE[head, edge] = target_NP[near_E[edge], above + channels + 1]
                _differentiate(masks, scores, given, head, count)
                _weighted(target_NP, near_E, (above, first), channels, share_HE, head, count, out_RW, row, 1)
                if by_vectors:
                    _back_to_channels(scores, given, head, count, out_RW, row, first, -1, False)
                else:
                    out_RW[row, first + channels] += _sum(given, head, count)
    return True


@compiled
def _pull_targets(
    lists, masks, first_head, scores, terms, given, source_NW, target_RV, gradient_RO, statistics_RS, out_RV, map_RM
):
    score_HE, along_HE, lse_HE, d_HE, scale_HE, _, _, _ = given.of_heads
    heads, by_vectors, channels = len(score_HE), len(scores.att_HC) > 0, given.hidden_EC.shape[1]
    brought, own = source_NW.shape[1] // heads, target_RV.shape[1] // heads
    near_E, places_E, before = given.of_edges
    with_map = map_RM.shape[1] > 0
    for row in range(len(target_RV)):
        for column in range(out_RV.shape[1]):
            out_RV[row, column] = 0
        for column in range(map_RM.shape[1]):
            map_RM[row, column] = 0
        before[0] = -1
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if masks.drops and not draw(masks, lists, row, near_E, count, first_head, scale_HE, before):
                return False
            if count == 0:
                continue
            _fill(terms, near_E, places_E, count, given.feature_EK)
            if not by_vectors:
                ends = brought, channels, own, scores.place
                _add_scalars(lists, begun, source_NW, target_RV, row, ends, terms, given, count, score_HE)
            for head in range(heads):
                first = head * own
                if by_vectors:
                    ends = head * brought, first
                    _add_channels(
                        lists, begun, source_NW, target_RV, row, ends, scores, terms, given, head, count, True
                    )
                _dots(
                    source_NW,
                    near_E,
                    head * brought,
                    gradient_RO,
                    row,
                    head * channels,
                    channels,
                    along_HE,
                    head,
                    count,
                )
                for edge in range(count):
                    lse_HE[head, edge], d_HE[head, edge] = (
                        statistics_RS[row, 2 * head],
                        statistics_RS[row, 2 * head + 1],
                    )
                _differentiate(masks, scores, given, head, count)
                if by_vectors:
                    vectors = first + channels if own > channels else -1
                    _back_to_channels(scores, given, head, count, out_RV, row, first, vectors, with_map)
                    if with_map:
                        _add_to_map(scores, terms, given, head, count, map_RM, row)
                else:
                    out_RV[row, first + scores.place] += _sum(given, head, count)
                    if with_map:
                        _add_scalars_to_map(terms, given, head, count, map_RM, row)
    return True


@inlined
def _fill(terms, near_E, places_E, count, feature_EK):
    """The features of some edges, and behind them 1 for a bias; and neighbours until there are whole fours of them."""
    for edge in range(count, -(-count // _AT_ONCE) * _AT_ONCE):
        near_E[edge] = near_E[count - 1]
    if not terms.are_made:
        return
    stored, features = terms.features_EK.shape
    for edge in range(count):
        place = places_E[edge]
        for column in range(features):
            if place < stored:
                feature_EK[edge, column] = terms.features_EK[place, column]
            else:
                feature_EK[edge, column] = terms.loop_RK[place - stored, column]
        if features < len(terms.weight_KT):
            feature_EK[edge, features] = 1


@inlined
def _add_scalars(lists, begun, near_RW, own_RW, row, ends, terms, given, count, score_HE):
    """What is leaky in GAT's scores, of all heads. ``ends``: columns of a head and which of them is added, of
    neighbours and of the row."""
    near_columns, near_column, own_columns, own_column = ends
    near_E, feature_EK = given.of_edges[0], given.feature_EK
    for edge in range(count):
        fetch(lists, near_RW, begun + edge + AHEAD)
        for head in range(len(score_HE)):
            score = near_RW[near_E[edge], head * near_columns + near_column]
            score += own_RW[row, head * own_columns + own_column]
            for column in range(len(terms.weight_KT)):
                score += feature_EK[edge, column] * terms.weight_KT[column, head]
            score_HE[head, edge] = score


@inlined
def _add_channels(lists, begun, near_RW, own_RW, row, ends, scores, terms, given, head, count, keeps):
    """GATv2's scores of a head, and where ``keeps`` what is leaky in them. ``ends``: the head's first columns of
    neighbours and of the row."""
    near_first, own_first = ends
    score_HE, att_HC, near_E = given.of_heads[0], scores.att_HC, given.of_edges[0]
    hidden_EC, feature_EK = given.hidden_EC, given.feature_EK
    lanes, channels = NBYTES // score_HE.itemsize, att_HC.shape[1]
    near_end, own_end, zero = near_first + channels, own_first + channels, score_HE.dtype.type(0)
    term_first, term_end = head * channels, (head + 1) * channels
    for edge in range(0, count, _AT_ONCE):
        if head == 0:
            for ahead in range(begun + edge + AHEAD, begun + edge + AHEAD + _AT_ONCE):
                fetch(lists, near_RW, ahead)
        near_0, near_1, near_2, near_3 = near_E[edge], near_E[edge + 1], near_E[edge + 2], near_E[edge + 3]
        score_0, score_1, score_2, score_3 = spread(zero), spread(zero), spread(zero), spread(zero)
        for channel in range(0, channels, lanes):
            own, near, term = (
                load(own_RW, row, own_first + channel, own_end),
                near_first + channel,
                term_first + channel,
            )
            hidden_0, hidden_1 = (
                own + load(near_RW, near_0, near, near_end),
                own + load(near_RW, near_1, near, near_end),
            )
            hidden_2, hidden_3 = (
                own + load(near_RW, near_2, near, near_end),
                own + load(near_RW, near_3, near, near_end),
            )
            for column in range(len(terms.weight_KT)):
                weight = load(terms.weight_KT, column, term, term_end)
                hidden_0 = fma(spread(feature_EK[edge, column]), weight, hidden_0)
                hidden_1 = fma(spread(feature_EK[edge + 1, column]), weight, hidden_1)
                hidden_2 = fma(spread(feature_EK[edge + 2, column]), weight, hidden_2)
                hidden_3 = fma(spread(feature_EK[edge + 3, column]), weight, hidden_3)
            att = load(att_HC, head, channel, channels)
            sloped = att * scores.slope
            score_0 = fma(where_positive(hidden_0, att, sloped), hidden_0, score_0)
            score_1 = fma(where_positive(hidden_1, att, sloped), hidden_1, score_1)
            score_2 = fma(where_positive(hidden_2, att, sloped), hidden_2, score_2)
            score_3 = fma(where_positive(hidden_3, att, sloped), hidden_3, score_3)
            if keeps:
                store(hidden_EC, edge, channel, channels, hidden_0)
                store(hidden_EC, edge + 1, channel, channels, hidden_1)
                store(hidden_EC, edge + 2, channel, channels, hidden_2)
                store(hidden_EC, edge + 3, channel, channels, hidden_3)
        store(score_HE, head, edge, edge + _AT_ONCE, totals(score_0, score_1, score_2, score_3))


@inlined
def _dots(near_RW, near_E, near_first, own_RW, row, own_first, channels, into_HE, head, count):
    """Dot products of a head's channels of neighbours and of the row, from those first columns on."""
    lanes, zero = NBYTES // into_HE.itemsize, into_HE.dtype.type(0)
    near_end, own_end = near_first + channels, own_first + channels
    for edge in range(0, count, _AT_ONCE):
        near_0, near_1, near_2, near_3 = near_E[edge], near_E[edge + 1], near_E[edge + 2], near_E[edge + 3]
        sum_0, sum_1, sum_2, sum_3 = spread(zero), spread(zero), spread(zero), spread(zero)
        for channel in range(0, channels, lanes):
            own, near = load(own_RW, row, own_first + channel, own_end), near_first + channel
            sum_0 = fma(own, load(near_RW, near_0, near, near_end), sum_0)
            sum_1 = fma(own, load(near_RW, near_1, near, near_end), sum_1)
            sum_2 = fma(own, load(near_RW, near_2, near, near_end), sum_2)
            sum_3 = fma(own, load(near_RW, near_3, near, near_end), sum_3)
        store(into_HE, head, edge, edge + _AT_ONCE, totals(sum_0, sum_1, sum_2, sum_3))


@inlined
def _weighted(near_RW, near_E, ends, channels, weight_HE, head, count, out_RW, row, shrink):
    """Add a head's channels of neighbours, weighted, to those of the row, which shrink before. ``ends``: the first
    columns of both."""
    near_first, first = ends
    lanes, near_end, end = NBYTES // out_RW.itemsize, near_first + channels, first + channels
    for channel in range(0, channels, lanes):
        sums = load(out_RW, row, first + channel, end) * shrink
        for edge in range(count):
            near = load(near_RW, near_E[edge], near_first + channel, near_end)
            sums = fma(spread(weight_HE[head, edge]), near, sums)
        store(out_RW, row, first + channel, end, sums)


@inlined
def _differentiate(masks, scores, given, head, count):
    """From a head's scores, products with what flows back, lse and D to the weights of what flows back to messages,
    what flows back to scores, and that times the slope."""
    score_HE, along_HE, lse_HE, d_HE, scale_HE, share_HE, d_score_HE, sloped_HE = given.of_heads
    lanes, slope = NBYTES // score_HE.itemsize, 1.0 if len(scores.att_HC) > 0 else scores.slope
    for edge in range(0, count, lanes):
        score, along = load(score_HE, head, edge, count), load(along_HE, head, edge, count)
        share = exp(where_positive(score, score, score * slope) - load(lse_HE, head, edge, count))
        if masks.drops:
            scale = load(scale_HE, head, edge, count)
            along = along * scale
            store(share_HE, head, edge, count, share * scale)
        else:
            store(share_HE, head, edge, count, share)
        d_score = (along - load(d_HE, head, edge, count)) * share
        d_score = where_positive(score, d_score, d_score * slope)
        store(d_score_HE, head, edge, count, d_score)
        store(sloped_HE, head, edge, count, d_score * scores.slope)


@inlined
def _back_to_channels(scores, given, head, count, out_RW, row, first, vectors, keeps):
    """Add what flows back through GATv2's scores of a head to the row's channels from ``first`` on; and to the
    attention vector's from ``vectors`` on, unless that is negative. Where ``keeps``, what is leaky in them is
    overwritten by what flows back to it, but for the vector."""
    att_HC, hidden_EC, d_score_HE, sloped_HE = scores.att_HC, given.hidden_EC, given.of_heads[6], given.of_heads[7]
    lanes, channels, zero = NBYTES // out_RW.itemsize, att_HC.shape[1], out_RW.dtype.type(0)
    for channel in range(0, channels, lanes):
        sums, vector_sums = spread(zero), spread(zero)
        if vectors >= 0 or keeps:
            for edge in range(count):
                hidden = load(hidden_EC, edge, channel, channels)
                slope = where_positive(hidden, spread(d_score_HE[head, edge]), spread(sloped_HE[head, edge]))
                sums, vector_sums = sums + slope, fma(slope, hidden, vector_sums)
                if keeps:
                    store(hidden_EC, edge, channel, channels, slope)
        else:
            for edge in range(count):
                hidden = load(hidden_EC, edge, channel, channels)
                sums = sums + where_positive(hidden, spread(d_score_HE[head, edge]), spread(sloped_HE[head, edge]))
        at, end = first + channel, first + channels
        _add(out_RW, row, at, end, load(att_HC, head, channel, channels), sums)
        if vectors >= 0:
            at, end = vectors + channel, vectors + channels
            store(out_RW, row, at, end, load(out_RW, row, at, end) + vector_sums)


@inlined
def _add_to_map(scores, terms, given, head, count, map_RM, row):
    """Add what flows back through the terms of a head's channels to their map, of some features at a time."""
    att_HC, hidden_EC, feature_EK = scores.att_HC, given.hidden_EC, given.feature_EK
    lanes, channels, zero = NBYTES // map_RM.itemsize, att_HC.shape[1], map_RM.dtype.type(0)
    features = len(terms.weight_KT)
    for channel in range(0, channels, lanes):
        att = load(att_HC, head, channel, channels)
        for feature in range(0, features, _AT_ONCE):
            sums_0, sums_1, sums_2, sums_3 = spread(zero), spread(zero), spread(zero), spread(zero)
            for edge in range(count):
                slope = load(hidden_EC, edge, channel, channels)
                sums_0 = fma(spread(feature_EK[edge, feature]), slope, sums_0)
                sums_1 = fma(spread(feature_EK[edge, feature + 1]), slope, sums_1)
                sums_2 = fma(spread(feature_EK[edge, feature + 2]), slope, sums_2)
                sums_3 = fma(spread(feature_EK[edge, feature + 3]), slope, sums_3)
            at = (head * features + feature) * channels + channel
            end = at - channel + channels
            _add(map_RM, row, at, end, att, sums_0)
            if feature + 1 < features:
                _add(map_RM, row, at + channels, end + channels, att, sums_1)
            if feature + 2 < features:
                _add(map_RM, row, at + 2 * channels, end + 2 * channels, att, sums_2)
            if feature + 3 < features:
                _add(map_RM, row, at + 3 * channels, end + 3 * channels, att, sums_3)


@inlined
def _add(out_RW, row, at, end, factor, sums):
    """Add sums, times a factor, to columns of a row."""
    store(out_RW, row, at, end, fma(factor, sums, load(out_RW, row, at, end)))


@inlined
def _sum(given, head, count):
    """Of what flows back to a head's scores."""
    d_score_HE = given.of_heads[6]
    sum_ = d_score_HE.dtype.type(0)
    for edge in range(count):
        sum_ += d_score_HE[head, edge]
    return sum_


@inlined
def _add_scalars_to_map(terms, given, head, count, map_RM, row):
    """Add what flows back through the terms of a head's scores to their map."""
    d_score_HE, features = given.of_heads[6], len(terms.weight_KT)
    for edge in range(count):
        for feature in range(features):
            map_RM[row, head * features + feature] += d_score_HE[head, edge] * given.feature_EK[edge, feature]
