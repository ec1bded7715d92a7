# SPDX-License-Identifier: Apache-2.0
"""Programs of attention by an edge function: the running softmax over segments, and what merges the parts of long rows.

``ooc.kernels.edge_function`` has the formulas, ``ooc.kernels.functions`` what a source brings, KEY and
value, and a target, QUERY:

    GATV2    key and value are the same C columns    s = att · leaky(query + key + t)    message value
    DOT      C columns each                          s = query · (key + t) / √C          message value + t
    SCALAR   key and query are one number            s = leaky(query + key + t)          message value

A program takes ROWS segments and one head, all CHANNELS of it (COLUMNS, rounded up). Nothing of a head's width is ever
stored for an edge: either direction computes what it needs again from the two rows and the edge's features. So a term
is FEATURES products, of numbers that all segments of a program share, against a fetch of as many columns. Features of
stored edges and of added self-loops lie in matrices of their own, which may be of different types.
"""

import triton
import triton.language as tl

from ooc.kernels.cuda.programs.dropout import is_kept
from ooc.kernels.cuda.programs.gat import open_repeats
from ooc.kernels.cuda.programs.segments import narrow, open_long_row, open_segments

GATV2 = tl.constexpr(0)
DOT = tl.constexpr(1)
SCALAR = tl.constexpr(2)


@triton.jit
def edge_terms(
    features, loops, weight, bias, place, row, is_stored, is_added, column, is_column,
    FEATURES: tl.constexpr, FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr, TERMS: tl.constexpr,
    HAS_LOOPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """f W + b of one edge a segment, in columns ``column`` of ``weight`` [FEATURES, TERMS], feature after feature.

    ``place``: the edges among the tile's, where ``is_stored``; ``row``: those of the tile, where a self-loop
    ``is_added``.
    """
    term = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for k in range(FEATURES):
        feature = tl.load(features + place * FEATURE_STRIDE + k, mask=is_stored, other=0.0).to(ACCUMULATOR)
        if HAS_LOOPS:
            feature += tl.load(loops + row * LOOP_STRIDE + k, mask=is_added, other=0.0).to(ACCUMULATOR)
        term += feature * tl.load(weight + k * TERMS + column, mask=is_column, other=0.0).to(ACCUMULATOR)
    if HAS_BIAS:
        term += tl.load(bias + column, mask=is_column, other=0.0).to(ACCUMULATOR)
    return term


@triton.jit
def some_features(
    features, loops, place, row, is_stored, is_added, number,
    FEATURES: tl.constexpr, FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr,
    HAS_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Features ``number`` [1, ·] of one edge a segment. Behind the last one comes 1, by which a bias is multiplied."""
    is_feature = number < FEATURES
    found = tl.load(features + place * FEATURE_STRIDE + number, mask=is_stored & is_feature, other=0.0).to(ACCUMULATOR)
    if HAS_LOOPS:
        found += tl.load(loops + row * LOOP_STRIDE + number, mask=is_added & is_feature, other=0.0).to(ACCUMULATOR)
    return tl.where(number == FEATURES, 1.0, found)


@triton.jit
def score_edges(key, query, term, att, SLOPE: tl.constexpr, ROOT: tl.constexpr, KIND: tl.constexpr):
    """Of one edge a segment what is bent or multiplied, and the score made of it."""
    if KIND == DOT:
        hidden = key + term
        score = tl.sum(hidden * query, axis=1, keep_dims=True) * ROOT
    else:
        hidden = query + key + term
        score = tl.where(hidden > 0, hidden, hidden * SLOPE)
        if KIND == GATV2:
            score = tl.sum(score * att, axis=1, keep_dims=True)
    return hidden, score


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most", "first_head", "seed", "threshold"])
def message_segments(
    source, target, att, features, loops, weight, bias, lse, indices, offsets, parts, out, workspace,
    slots, rows, nodes, tile_start, most, first_head, seed, threshold,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr, BROUGHT: tl.constexpr,
    QUERY: tl.constexpr, SLOPE: tl.constexpr, ROOT: tl.constexpr, SCALE: tl.constexpr, FEATURES: tl.constexpr,
    FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SELF_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Messages weighted by the softmax of their scores over every segment, into ``out`` and ``lse`` or the segment's
    slot: the sum, the highest score and the sum of weights."""
    program = tl.program_id(0)
    head = program % HEADS
    column = tl.arange(0, COLUMNS)[None, :]
    is_column = column < CHANNELS
    wide = tl.arange(0, WIDE)[None, :]  # columns of key, query and term: a head's, or one
    is_wide = wide < QUERY
    slot, row, first, edges, steps = open_segments(
        program // HEADS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    own = row + tile_start
    if HAS_DROPOUT:
        previous, repeats = open_repeats(indices, offsets, parts, slots, row, rows, first, edges)
    queries = target + (row * HEADS + head) * QUERY
    query = tl.load(queries + wide, mask=(row < rows) & is_wide, other=0.0).to(ACCUMULATOR)
    vector = query
    if KIND == GATV2:
        vector = tl.load(att + head * CHANNELS + column, mask=is_column, other=0.0).to(ACCUMULATOR)

    highest = tl.full([ROWS, 1], -3.4e38, ACCUMULATOR)
    weights = tl.full([ROWS, 1], 0.0, ACCUMULATOR)
    z = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            is_edge = edge < edges
            neighbour = tl.load(indices + first + edge, mask=is_edge, other=0).to(tl.int64)
            if HAS_DROPOUT:
                repeats = tl.where(is_edge & (neighbour == previous), repeats + 1, 0)
                previous = neighbour
            is_stored, is_added = is_edge, is_edge
            if SELF_LOOPS:
                is_stored = is_edge & (neighbour != own)
                is_added = (edge >= edges) & (edge < steps)
                neighbour = tl.where(is_added, own, neighbour)
                is_edge = is_stored | is_added
            is_edge = is_edge & (neighbour >= 0) & (neighbour < nodes)
            place = source + neighbour * STRIDE + head * BROUGHT
            if KIND == DOT:
                key = tl.load(place + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
                value = tl.load(place + CHANNELS + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
            else:
                value = tl.load(place + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
                key = value
                if KIND == SCALAR:
                    key = tl.load(place + CHANNELS, mask=is_edge, other=0.0).to(ACCUMULATOR)
            term = 0.0
            if FEATURES > 0:
                term = edge_terms(
                    features, loops, weight, bias, first + edge, row, is_stored & is_edge, is_added & is_edge,
                    head * QUERY + wide, is_wide, FEATURES, FEATURE_STRIDE, LOOP_STRIDE, HEADS * QUERY, SELF_LOOPS,
                    HAS_BIAS, ACCUMULATOR, ROWS, WIDE,
                )  # fmt: skip
                if KIND == DOT:
                    value += term
            _, score = score_edges(key, query, term, vector, SLOPE, ROOT, KIND)
            higher = tl.where(is_edge & (score > highest), score, highest)
            shrink = tl.exp(highest - higher)
            share = tl.exp(tl.where(is_edge, score - higher, float("-inf")))
            highest = higher
            weights = weights * shrink + share
            if HAS_DROPOUT:
                kept = is_kept(own, neighbour, repeats, first_head + head, seed, threshold)
                share = tl.where(kept, share * SCALE, 0.0)
            z = z * shrink + share * value

    is_whole = (row < rows) & (slot < 0)
    finish_messages(out, lse, row, head, column, z, highest, weights, is_whole, CHANNELS, HEADS)
    place = workspace + (slot * HEADS + head) * (CHANNELS + 2)
    tl.store(place + column, z, mask=(slot >= 0) & is_column)
    tl.store(place + CHANNELS, highest, mask=slot >= 0)
    tl.store(place + CHANNELS + 1, weights, mask=slot >= 0)


@triton.jit
def finish_messages(
    out, lse, row, head, column, z, highest, weights, is_row, CHANNELS: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """A row's sum divided by the sum of its weights, and its lse; zeros in a row without edges."""
    is_empty = weights == 0
    divisor = tl.where(is_empty, 1.0, weights)
    place = row * HEADS + head
    value = narrow(z / divisor, out.dtype.element_ty)
    tl.store(out + place * CHANNELS + column, value, mask=is_row & (column < CHANNELS))
    tl.store(lse + place, tl.where(is_empty, 0.0, tl.log(divisor) + highest), mask=is_row)


@triton.jit(do_not_specialize=["slots", "rows", "tile_start", "most"])
def message_slots(
    workspace, before, after, lse, offsets, parts, out, slots, rows, tile_start, most,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, ACCUMULATOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The slots of every long row merged in order with what there is ``before``, into ``out`` and ``lse``, or ``after``
    if more are to come."""
    program = tl.program_id(0)
    head = program % HEADS
    column = tl.arange(0, COLUMNS)[None, :]
    row, first, count, goes_on, is_open = open_long_row(program // HEADS, offsets, parts, slots, rows, tile_start, most)
    begun = before + head * (CHANNELS + 2)
    highest = tl.load(begun + CHANNELS + 0 * row, mask=goes_on, other=-3.4e38)
    weights = tl.load(begun + CHANNELS + 1 + 0 * row, mask=goes_on, other=0.0)
    z = tl.load(begun + column, mask=goes_on & (column < CHANNELS), other=0.0)
    for slot in range(0, count):
        place = workspace + ((first + slot) * HEADS + head) * (CHANNELS + 2)
        part = tl.load(place + CHANNELS)
        higher = tl.where(part > highest, part, highest)
        shrink = tl.exp(highest - higher)
        grown = tl.exp(part - higher)
        highest = higher
        weights = weights * shrink + grown * tl.load(place + CHANNELS + 1)
        z = z * shrink + grown * tl.load(place + column, mask=column < CHANNELS, other=0.0)
    is_row = (row < rows) & (is_open == 0)
    finish_messages(out, lse, row, head, column, z, highest, weights, is_row, CHANNELS, HEADS)
    ended = after + head * (CHANNELS + 2)
    tl.store(ended + column, z, mask=is_open & (column < CHANNELS))
    tl.store(ended + CHANNELS + 0 * row, highest, mask=is_open)
    tl.store(ended + CHANNELS + 1 + 0 * row, weights, mask=is_open)
