# SPDX-License-Identifier: Apache-2.0
"""Programs for the gradients of attention by an edge function, pulled by sources and by targets.

With α = exp(s - lse), dropout's scale k, D of a target and its gradient dZ, an edge gives

    dm = α k dZ        ds = α (k dZ · m - D)

and ds gives the gradient of the argument of the rectifier or product, ``hidden`` (``edge_attention``). Parts of long
rows are plain sums, which ``sum_slots`` adds up.
"""

import triton
import triton.language as tl

from ooc.kernels.cuda.programs.dropout import is_kept
from ooc.kernels.cuda.programs.edge_attention import (
    DOT,
    GATV2,
    SCALAR,
    edge_terms,
    score_edges,
    some_features,
    source_of_edge,
)
from ooc.kernels.cuda.programs.segments import narrow, next_edge, open_repeats, open_segments


@triton.jit
def hidden_gradient(d_score, hidden, query, att, SLOPE: tl.constexpr, ROOT: tl.constexpr, KIND: tl.constexpr):
    """The gradient of ``hidden`` from that of the score."""
    if KIND == DOT:
        gradient = d_score * ROOT * query
    elif KIND == GATV2:
        gradient = d_score * tl.where(hidden > 0, att, att * SLOPE)
    else:
        gradient = tl.where(hidden > 0, d_score, d_score * SLOPE)
    return gradient


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most", "first_head", "seed", "threshold"])
def message_sources(
    target, source, att, features, loops, weight, bias, indices, offsets, parts, out, workspace,
    slots, rows, nodes, tile_start, most, first_head, seed, threshold,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr, BROUGHT: tl.constexpr,
    QUERY: tl.constexpr, PACKED: tl.constexpr, SOURCE_STRIDE: tl.constexpr, SLICES: tl.constexpr, SLOPE: tl.constexpr,
    ROOT: tl.constexpr, SCALE: tl.constexpr, FEATURES: tl.constexpr, FEATURE_STRIDE: tl.constexpr,
    LOOP_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, SELF_LOOPS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of every segment's own row of ``source``, from the targets it goes to (query, gradient, lse
    and D, PACKED columns a head), to ``out`` or to the segment's slot."""
    program = tl.program_id(0)
    head = program % HEADS
    column = tl.arange(0, COLUMNS)[None, :]
    is_column = column < CHANNELS
    wide = tl.arange(0, WIDE)[None, :]
    is_wide = wide < QUERY
    slot, row, first, edges, steps = open_segments(
        program // HEADS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    own = row + tile_start
    previous, repeats = own, slot
    if HAS_DROPOUT:
        previous, repeats = open_repeats(indices, offsets, parts, slots, row, rows, first, edges)
    mine = source + row * SOURCE_STRIDE + head * BROUGHT
    value = tl.load(mine + (CHANNELS if KIND == DOT else 0) + column, mask=(row < rows) & is_column, other=0.0)
    value = value.to(ACCUMULATOR)
    key = value
    if KIND == DOT:
        key = tl.load(mine + column, mask=(row < rows) & is_column, other=0.0).to(ACCUMULATOR)
    elif KIND == SCALAR:
        key = tl.load(mine + CHANNELS, mask=row < rows, other=0.0).to(ACCUMULATOR)
    vector = value
    if KIND == GATV2:
        vector = tl.load(att + head * CHANNELS + column, mask=is_column, other=0.0).to(ACCUMULATOR)

    d_value = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    d_key = tl.full([ROWS, WIDE], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            neighbour, is_edge, is_stored, is_added, previous, repeats = next_edge(
                indices, edge, first, edges, steps, own, nodes, previous, repeats, SELF_LOOPS, HAS_DROPOUT
            )
            place = target + neighbour * STRIDE + head * PACKED
            query = tl.load(place + wide, mask=is_edge & is_wide, other=0.0).to(ACCUMULATOR)
            above = tl.load(place + QUERY + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
            lse = tl.load(place + QUERY + CHANNELS, mask=is_edge, other=0.0).to(ACCUMULATOR)
            d = tl.load(place + QUERY + CHANNELS + 1, mask=is_edge, other=0.0).to(ACCUMULATOR)
            message, scored = value, key
            if FEATURES > 0:
                term = edge_terms(
                    features, loops, weight, bias, first + edge, row, is_stored, is_added,
                    head * QUERY + wide, is_wide, FEATURES, FEATURE_STRIDE, LOOP_STRIDE, HEADS * QUERY, SELF_LOOPS,
                    HAS_BIAS, ACCUMULATOR, ROWS, WIDE,
                )  # fmt: skip
                scored = key + term
                if KIND == DOT:
                    message = value + term
            hidden, score = score_edges(scored, query, vector, SLOPE, ROOT, KIND)
            share = tl.exp(tl.where(is_edge, score - lse, float("-inf")))
            kept_share = share
            if HAS_DROPOUT:
                kept = is_kept(neighbour, own, repeats, (first_head + head) // SLICES, seed, threshold)
                kept_share = tl.where(kept, share * SCALE, 0.0)
            d_score = kept_share * tl.sum(above * message, axis=1, keep_dims=True) - share * d
            d_value += kept_share * above
            d_key += hidden_gradient(d_score, hidden, query, vector, SLOPE, ROOT, KIND)

    is_whole = (row < rows) & (slot < 0)
    place = out + (row * HEADS + head) * BROUGHT
    TYPE: tl.constexpr = out.dtype.element_ty
    if KIND == GATV2:
        d_value += d_key
    elif KIND == DOT:
        tl.store(place + column, narrow(d_key, TYPE), mask=is_whole & is_column)
        place += CHANNELS
    else:
        tl.store(place + CHANNELS, narrow(d_key, TYPE), mask=is_whole)
    tl.store(place + column, narrow(d_value, TYPE), mask=is_whole & is_column)
    place = workspace + (slot * HEADS + head) * BROUGHT
    if KIND == DOT:
        tl.store(place + column, d_key, mask=(slot >= 0) & is_column)
        place += CHANNELS
    elif KIND == SCALAR:
        tl.store(place + CHANNELS, d_key, mask=slot >= 0)
    tl.store(place + column, d_value, mask=(slot >= 0) & is_column)


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most", "first_head", "seed", "threshold"])
def message_targets(
    source, target, upstream, statistics, att, features, loops, weight, bias, indices, offsets, parts, out, workspace,
    slots, rows, nodes, tile_start, most, first_head, seed, threshold,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr, BROUGHT: tl.constexpr,
    QUERY: tl.constexpr, RESULT: tl.constexpr, MAPPED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    SLICES: tl.constexpr, SLOPE: tl.constexpr, ROOT: tl.constexpr, SCALE: tl.constexpr, FEATURES: tl.constexpr,
    FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    SELF_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of every segment's own row of ``target``, RESULT columns a head, followed by MAPPED rows of
    the map that makes terms, to ``out`` or to the segment's slot.

    RESULT is QUERY, or for GATV2 twice that: the gradient of ``att`` comes row by row beside the query's. BLOCKS
    programs side by side share the rows of the map, BLOCK each; the first of them has the row's own gradient.
    """
    program = tl.program_id(0)
    block = program % BLOCKS
    head = program // BLOCKS % HEADS
    column = tl.arange(0, COLUMNS)[None, :]
    is_column = column < CHANNELS
    wide = tl.arange(0, WIDE)[None, :]
    is_wide = wide < QUERY
    number = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot, row, first, edges, steps = open_segments(
        program // BLOCKS // HEADS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    own = row + tile_start
    previous, repeats = own, slot
    if HAS_DROPOUT:
        previous, repeats = open_repeats(indices, offsets, parts, slots, row, rows, first, edges)
    mine = row * HEADS + head
    is_row = row < rows
    # Beside the query a target may bring its copy of ``att``, which is read from there only by the processor.
    query = tl.load(target + mine * RESULT + wide, mask=is_row & is_wide, other=0.0).to(ACCUMULATOR)
    above = tl.load(upstream + mine * CHANNELS + column, mask=is_row & is_column, other=0.0).to(ACCUMULATOR)
    lse = tl.load(statistics + 2 * mine, mask=is_row, other=0.0).to(ACCUMULATOR)
    d = tl.load(statistics + 2 * mine + 1, mask=is_row, other=0.0).to(ACCUMULATOR)
    vector = query
    if KIND == GATV2:
        vector = tl.load(att + head * CHANNELS + column, mask=is_column, other=0.0).to(ACCUMULATOR)

    d_query = tl.full([ROWS, WIDE], 0.0, ACCUMULATOR)
    d_att = tl.full([ROWS, WIDE], 0.0, ACCUMULATOR)
    d_map = tl.full([ROWS, BLOCK, WIDE], 0.0, ACCUMULATOR)
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
            share = tl.exp(tl.where(is_edge, score - lse, float("-inf")))
            kept_share = share
            if HAS_DROPOUT:
                kept = is_kept(own, neighbour, repeats, (first_head + head) // SLICES, seed, threshold)
                kept_share = tl.where(kept, share * SCALE, 0.0)
            d_score = kept_share * tl.sum(above * value, axis=1, keep_dims=True) - share * d
            d_hidden = hidden_gradient(d_score, hidden, query, vector, SLOPE, ROOT, KIND)
            if KIND == DOT:
                d_query += d_score * ROOT * hidden
            else:
                d_query += d_hidden
            if RESULT > QUERY:
                d_att += d_score * tl.where(hidden > 0, hidden, hidden * SLOPE)
            if MAPPED > 0:
                if KIND == DOT:
                    d_hidden += kept_share * above
                feature = some_features(
                    features, loops, first + edge, row, is_stored, is_added, number,
                    FEATURES, FEATURE_STRIDE, LOOP_STRIDE, SELF_LOOPS, ACCUMULATOR,
                )  # fmt: skip
                d_map += feature[:, :, None] * d_hidden[:, None, :]

    is_whole = is_row & (slot < 0)
    WIDTH: tl.constexpr = HEADS * (RESULT + MAPPED * QUERY)
    TYPE: tl.constexpr = out.dtype.element_ty
    begin = head * RESULT + wide
    is_first = wide + block * QUERY < QUERY
    tl.store(out + row * WIDTH + begin, narrow(d_query, TYPE), mask=is_whole & is_first)
    if RESULT > QUERY:
        tl.store(out + row * WIDTH + QUERY + begin, narrow(d_att, TYPE), mask=is_whole & is_first)
    tl.store(workspace + slot * WIDTH + begin, d_query, mask=(slot >= 0) & is_first)
    if RESULT > QUERY:
        tl.store(workspace + slot * WIDTH + QUERY + begin, d_att, mask=(slot >= 0) & is_first)
    if MAPPED > 0:
        begin = HEADS * RESULT + (head * MAPPED + number[:, :, None]) * QUERY + wide[:, None, :]
        is_part = (number < MAPPED)[:, :, None] & is_wide[:, None, :]
        tl.store(out + row[:, :, None] * WIDTH + begin, narrow(d_map, TYPE), mask=is_whole[:, :, None] & is_part)
        tl.store(workspace + slot[:, :, None] * WIDTH + begin, d_map, mask=(slot >= 0)[:, :, None] & is_part)


@triton.jit(do_not_specialize=["rows"])
def pack_upstream(
    gradient, kept, a_dst, out, d_target, rows,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write what sources pull of ROWS rows and a group of GAT (a_dst, dZ, lse and D) to ``out``, and da_dst to
    ``d_target``, from what the forward pass kept."""
    program = tl.program_id(0)
    group = program % GROUPS
    column = tl.arange(0, COLUMNS)[None, :]
    row = (program // GROUPS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < rows
    is_column = is_row & (column < CHANNELS)
    number = row * GROUPS + group
    mine = kept + number * (2 * CHANNELS + 2)
    dz = tl.load(gradient + number * CHANNELS + column, mask=is_column, other=0.0).to(ACCUMULATOR)
    z = tl.load(mine + column, mask=is_column, other=0.0).to(ACCUMULATOR)
    bent_z = tl.load(mine + CHANNELS + 1 + column, mask=is_column, other=0.0).to(ACCUMULATOR)
    lse = tl.load(mine + CHANNELS, mask=is_row, other=0.0)
    bents = tl.load(mine + 2 * CHANNELS + 1, mask=is_row, other=0.0).to(ACCUMULATOR)
    score = tl.load(a_dst + number, mask=is_row, other=0.0)
    d = tl.sum(dz * z, axis=1, keep_dims=True)
    da_dst = tl.sum(dz * bent_z, axis=1, keep_dims=True) - d * bents
    TYPE: tl.constexpr = out.dtype.element_ty
    place = out + number * (CHANNELS + 3)
    tl.store(place, narrow(score, TYPE), mask=is_row)
    tl.store(place + 1 + column, narrow(dz, TYPE), mask=is_column)
    tl.store(place + CHANNELS + 1, narrow(lse, TYPE), mask=is_row)
    tl.store(place + CHANNELS + 2, narrow(d, TYPE), mask=is_row)
    tl.store(d_target + number, narrow(da_dst, TYPE), mask=is_row)
