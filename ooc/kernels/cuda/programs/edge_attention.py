# SPDX-License-Identifier: Apache-2.0
"""Programs for attention by an edge function: the running softmax over segments, and the merging of long rows' parts.

``ooc.kernels.edge_function`` has the formulas, ``ooc.kernels.functions`` what a source brings (KEY and value) and a
target (QUERY):

    GATV2    key and value are the same C columns    s = att · leaky(query + key + t)    message value
    DOT      C columns each                          s = query · (key + t) / √C          message value + t
    SCALAR   key and query are one number            s = leaky(query + key + t)          message value

SCALAR is GAT, with or without features of edges. Without them, ``KEEP`` also sums what ``ooc.kernels.gat`` keeps for
the backward pass: the messages times weights times the slope of their scores (``bent``), and these weights. A head may
then be cut into SLICES of its channels, each a head of its own here, for which dropout draws the same masks.

A program takes ROWS segments and one head, all CHANNELS of it (COLUMNS, rounded up). Nothing as wide as a head is ever
stored for an edge: both directions compute what they need again from the two rows and the edge's features. A term is
FEATURES products, with numbers that all segments of a program share, against a fetch of as many columns. Features of
stored edges and of added self-loops lie in separate matrices, which may be of different types.
"""

import triton
import triton.language as tl

from ooc.kernels.cuda.programs.dropout import is_kept
from ooc.kernels.cuda.programs.segments import narrow, next_edge, open_long_row, open_repeats, open_segments

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
    """f W + b of one edge for each segment, in columns ``column`` of ``weight`` [FEATURES, TERMS], feature after
    feature.

    ``place``: the edges' positions in the tile, where ``is_stored``; ``row``: the rows of the tile, where a self-loop
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
    """Features ``number`` [1, ·] of one edge for each segment. The last one is followed by 1, which is multiplied by a
    bias."""
    is_feature = number < FEATURES
    found = tl.load(features + place * FEATURE_STRIDE + number, mask=is_stored & is_feature, other=0.0).to(ACCUMULATOR)
    if HAS_LOOPS:
        found += tl.load(loops + row * LOOP_STRIDE + number, mask=is_added & is_feature, other=0.0).to(ACCUMULATOR)
    return tl.where(number == FEATURES, 1.0, found)


@triton.jit
def score_edges(key, query, att, SLOPE: tl.constexpr, ROOT: tl.constexpr, KIND: tl.constexpr):
    """For one edge of each segment, the argument of the rectifier or product, and the score; ``key`` includes the
    edge's term."""
    if KIND == DOT:
        hidden = key
        score = tl.sum(hidden * query, axis=1, keep_dims=True) * ROOT
    else:
        hidden = query + key
        score = tl.where(hidden > 0, hidden, hidden * SLOPE)
        if KIND == GATV2:
            score = tl.sum(score * att, axis=1, keep_dims=True)
    return hidden, score


@triton.jit
def source_of_edge(
    place, features, loops, weight, bias, feature_place, row, is_edge, is_stored, is_added, head,
    column, is_column, wide, is_wide,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, QUERY: tl.constexpr, FEATURES: tl.constexpr,
    FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, SELF_LOOPS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """For one edge of each segment, the key and the message at ``place``, including the edge's term."""
    value = tl.load(place + (CHANNELS if KIND == DOT else 0) + column, mask=is_edge & is_column, other=0.0)
    value = value.to(ACCUMULATOR)
    key = value
    if KIND == DOT:
        key = tl.load(place + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
    elif KIND == SCALAR:
        key = tl.load(place + CHANNELS, mask=is_edge, other=0.0).to(ACCUMULATOR)
    if FEATURES > 0:
        term = edge_terms(
            features, loops, weight, bias, feature_place, row, is_stored, is_added, head * QUERY + wide, is_wide,
            FEATURES, FEATURE_STRIDE, LOOP_STRIDE, HEADS * QUERY, SELF_LOOPS, HAS_BIAS, ACCUMULATOR, ROWS, WIDE,
        )  # fmt: skip
        key = key + term
        if KIND == DOT:
            value = value + term
    return key, value


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most", "first_head", "seed", "threshold"])
def message_segments(
    source, target, att, features, loops, weight, bias, lse, indices, offsets, parts, out, workspace,
    slots, rows, nodes, tile_start, most, first_head, seed, threshold,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr, BROUGHT: tl.constexpr,
    QUERY: tl.constexpr, KEEP: tl.constexpr, SLICES: tl.constexpr, SLOPE: tl.constexpr, ROOT: tl.constexpr,
    SCALE: tl.constexpr, FEATURES: tl.constexpr, FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, SELF_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write messages weighted by the softmax of their scores over every segment, to ``out`` and ``lse`` or to the
    segment's slot (``store_sums``)."""
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
    previous, repeats = own, slot
    if HAS_DROPOUT:
        previous, repeats = open_repeats(indices, offsets, parts, slots, row, rows, first, edges)
    queries = target + (row * HEADS + head) * QUERY
    query = tl.load(queries + wide, mask=(row < rows) & is_wide, other=0.0).to(ACCUMULATOR)
    vector = query
    if KIND == GATV2:
        vector = tl.load(att + head * CHANNELS + column, mask=is_column, other=0.0).to(ACCUMULATOR)

    highest = tl.full([ROWS, 1], -3.4e38, ACCUMULATOR)
    weights = tl.full([ROWS, 1], 0.0, ACCUMULATOR)
    bents = tl.full([ROWS, 1], 0.0, ACCUMULATOR)
    z = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    bent_z = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            neighbour, is_edge, is_stored, is_added, previous, repeats = next_edge(
                indices, edge, first, edges, steps, own, nodes, previous, repeats, SELF_LOOPS, HAS_DROPOUT
            )
            key, value = source_of_edge(
                source + neighbour * STRIDE + head * BROUGHT, features, loops, weight, bias, first + edge, row,
                is_edge, is_stored, is_added, head, column, is_column, wide, is_wide, KIND, CHANNELS, HEADS, QUERY,
                FEATURES, FEATURE_STRIDE, LOOP_STRIDE, HAS_BIAS, SELF_LOOPS, ACCUMULATOR, ROWS, WIDE,
            )  # fmt: skip
            hidden, score = score_edges(key, query, vector, SLOPE, ROOT, KIND)
            higher = tl.where(is_edge & (score > highest), score, highest)
            shrink = tl.exp(highest - higher)
            share = tl.exp(tl.where(is_edge, score - higher, float("-inf")))
            highest = higher
            weights = weights * shrink + share
            if KEEP:
                bent = tl.where(hidden > 0, share, share * SLOPE)
                bents = bents * shrink + bent
            if HAS_DROPOUT:
                kept = is_kept(own, neighbour, repeats, (first_head + head) // SLICES, seed, threshold)
                share = tl.where(kept, share * SCALE, 0.0)
                if KEEP:
                    bent = tl.where(kept, bent * SCALE, 0.0)
            z = z * shrink + share * value
            if KEEP:
                bent_z = bent_z * shrink + bent * value

    is_whole = (row < rows) & (slot < 0)
    finish_messages(
        out, lse, row, head, column, highest, weights, z, bents, bent_z, is_whole, CHANNELS, HEADS, KEEP
    )  # fmt: skip
    SLOT: tl.constexpr = (CHANNELS + 1) * (1 + KEEP) + 1
    place = workspace + (slot * HEADS + head) * SLOT
    store_sums(place, column, highest, weights, z, bents, bent_z, slot >= 0, CHANNELS, KEEP)


@triton.jit
def finish_messages(
    out, lse, row, head, column, highest, weights, z, bents, bent_z, is_row,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Write a row's sums divided by the sum of its weights, and its lse; zeros in a row without edges. With KEEP all
    lie side by side in ``out``, the bent sums last."""
    is_empty = weights == 0
    divisor = tl.where(is_empty, 1.0, weights)
    place = row * HEADS + head
    is_column = is_row & (column < CHANNELS)
    TYPE: tl.constexpr = out.dtype.element_ty
    value = narrow(z / divisor, TYPE)
    log_of_sum = tl.where(is_empty, 0.0, tl.log(divisor) + highest)
    if KEEP:
        begin = out + place * (2 * CHANNELS + 2)
        tl.store(begin + column, value, mask=is_column)
        tl.store(begin + CHANNELS, log_of_sum.to(TYPE), mask=is_row)
        tl.store(begin + CHANNELS + 1 + column, narrow(bent_z / divisor, TYPE), mask=is_column)
        tl.store(begin + 2 * CHANNELS + 1, narrow(bents / divisor, TYPE), mask=is_row)
    else:
        tl.store(out + place * CHANNELS + column, value, mask=is_column)
        tl.store(lse + place, log_of_sum, mask=is_row)


@triton.jit
def store_sums(
    place, column, highest, weights, z, bents, bent_z, is_part, CHANNELS: tl.constexpr, KEEP: tl.constexpr
):  # fmt: skip
    """Store a row's state so far: its sum, the highest score and the sum of weights; with KEEP also the bent sums."""
    is_column = is_part & (column < CHANNELS)
    scores = place + CHANNELS * (1 + KEEP)
    tl.store(place + column, z, mask=is_column)
    tl.store(scores, highest, mask=is_part)
    tl.store(scores + 1, weights, mask=is_part)
    if KEEP:
        tl.store(place + CHANNELS + column, bent_z, mask=is_column)
        tl.store(scores + 2, bents, mask=is_part)


@triton.jit
def load_sums(place, column, is_part, CHANNELS: tl.constexpr, KEEP: tl.constexpr):
    """Load what ``store_sums`` has stored, or the state of a row without edges so far."""
    is_column = is_part & (column < CHANNELS)
    scores = place + CHANNELS * (1 + KEEP)
    z = tl.load(place + column, mask=is_column, other=0.0)
    highest = tl.load(scores, mask=is_part, other=-3.4e38)
    weights = tl.load(scores + 1, mask=is_part, other=0.0)
    bents, bent_z = weights, z
    if KEEP:
        bent_z = tl.load(place + CHANNELS + column, mask=is_column, other=0.0)
        bents = tl.load(scores + 2, mask=is_part, other=0.0)
    return highest, weights, z, bents, bent_z


@triton.jit(do_not_specialize=["slots", "rows", "tile_start", "most"])
def message_slots(
    workspace, before, after, lse, offsets, parts, out, slots, rows, tile_start, most,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, KEEP: tl.constexpr, ACCUMULATOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the slots of every long row in order with the state ``before``, into ``out`` and ``lse``, or into ``after``
    if more slots are to come."""
    program = tl.program_id(0)
    head = program % HEADS
    column = tl.arange(0, COLUMNS)[None, :]
    row, first, count, goes_on, is_open = open_long_row(program // HEADS, offsets, parts, slots, rows, tile_start, most)
    SLOT: tl.constexpr = (CHANNELS + 1) * (1 + KEEP) + 1
    begun = before + head * SLOT + 0 * row
    highest, weights, z, bents, bent_z = load_sums(begun, column, goes_on, CHANNELS, KEEP)
    for slot in range(0, count):
        place = workspace + ((first + slot) * HEADS + head) * SLOT
        part, more, added, more_bents, bent = load_sums(place, column, first >= 0, CHANNELS, KEEP)
        higher = tl.where(part > highest, part, highest)
        shrink = tl.exp(highest - higher)
        grown = tl.exp(part - higher)
        highest = higher
        weights = weights * shrink + grown * more
        z = z * shrink + grown * added
        if KEEP:
            bents = bents * shrink + grown * more_bents
            bent_z = bent_z * shrink + grown * bent
    is_row = (row < rows) & (is_open == 0)
    finish_messages(out, lse, row, head, column, highest, weights, z, bents, bent_z, is_row, CHANNELS, HEADS, KEEP)
    store_sums(after + head * SLOT + 0 * row, column, highest, weights, z, bents, bent_z, is_open, CHANNELS, KEEP)
