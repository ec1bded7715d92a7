# SPDX-License-Identifier: Apache-2.0
"""Programs of GAT's attention: the running softmax over segments, what merges the parts of long rows, and its gradient.

A program takes ROWS segments and one group, all CHANNELS of it (COLUMNS, rounded up). Programs of the same segments run
side by side, group after group. ``ooc.kernels.gat`` has the formulas; names here are of there.
"""

import triton
import triton.language as tl

from ooc.kernels.cuda.programs.dropout import is_kept
from ooc.kernels.cuda.programs.segments import narrow, open_long_row, open_segments


@triton.jit
def finish_attention(
    out, row, group, column, z, bent_z, highest, weights, bents, is_row,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Sums over a row's edges, divided by the sum of weights, into ``out``; zeros in a row without edges."""
    is_empty = weights == 0
    divisor = tl.where(is_empty, 1.0, weights)
    is_column = is_row & (column < CHANNELS)
    TYPE: tl.constexpr = out.dtype.element_ty
    if KEEP:
        place = out + (row * GROUPS + group) * (2 * CHANNELS + 2)
        tl.store(place + column, narrow(z / divisor, TYPE), mask=is_column)
        lse = tl.where(is_empty, 0.0, tl.log(divisor) + highest)
        tl.store(place + CHANNELS, narrow(lse, TYPE), mask=is_row)
        tl.store(place + CHANNELS + 1 + column, narrow(bent_z / divisor, TYPE), mask=is_column)
        tl.store(place + 2 * CHANNELS + 1, narrow(bents / divisor, TYPE), mask=is_row)
    else:
        tl.store(out + (row * GROUPS + group) * CHANNELS + column, narrow(z / divisor, TYPE), mask=is_column)


@triton.jit
def open_repeats(indices, offsets, parts, slots, row, rows, first, edges):
    """Each segment's first neighbour, and how many edges of its row before that one equal it, less one: the first edge
    finds its like in the former and is counted again. Rows are in ascending order. Of a row that has begun before these
    ``indices`` the last neighbour before them, and how many edges of it, stand behind the ``slots`` parts."""
    row_start = tl.load(offsets + row, mask=row < rows, other=0)
    begun = tl.maximum(row_start, 0)
    neighbour = tl.load(indices + first, mask=edges > 0, other=0)
    repeats = tl.full(first.shape, -1, tl.int32)
    place = first - 1
    is_equal = (edges > 0) & (place >= begun)
    is_equal = is_equal & (tl.load(indices + place, mask=is_equal, other=0) == neighbour)
    while tl.max(is_equal.to(tl.int32)) > 0:
        repeats += is_equal.to(tl.int32)
        place -= 1
        is_equal = is_equal & (place >= begun)
        is_equal = is_equal & (tl.load(indices + place, mask=is_equal, other=0) == neighbour)
    goes_on = (edges > 0) & (row_start < 0) & (first == repeats + 1)  # all here are equal up to the first one
    before = parts + 2 * (slots + tl.full(first.shape, 0, tl.int64))
    goes_on = goes_on & (tl.load(before, mask=goes_on, other=0) == neighbour)
    repeats += tl.load(before + 1, mask=goes_on, other=0).to(tl.int32)
    return neighbour.to(tl.int64), repeats


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most", "first_group", "seed", "threshold"])
def attend_segments(
    source, a_dst, indices, offsets, parts, out, workspace,
    slots, rows, nodes, tile_start, most, first_group, seed, threshold,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, STRIDE: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SLICES: tl.constexpr, KEEP: tl.constexpr, SELF_LOOPS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Z over every segment with what the backward pass needs, into ``out`` or the segment's slot."""
    program = tl.program_id(0)
    group = program % GROUPS
    column = tl.arange(0, COLUMNS)[None, :]
    slot, row, first, edges, steps = open_segments(
        program // GROUPS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    own = row + tile_start
    if HAS_DROPOUT:
        previous, repeats = open_repeats(indices, offsets, parts, slots, row, rows, first, edges)
    mine = tl.load(a_dst + row * GROUPS + group, mask=row < rows, other=0.0).to(ACCUMULATOR)

    highest = tl.full([ROWS, 1], -3.4e38, ACCUMULATOR)
    weights = tl.full([ROWS, 1], 0.0, ACCUMULATOR)
    bents = tl.full([ROWS, 1], 0.0, ACCUMULATOR)
    z = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    bent_z = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            is_edge = edge < edges
            neighbour = tl.load(indices + first + edge, mask=is_edge, other=0).to(tl.int64)
            if HAS_DROPOUT:
                repeats = tl.where(is_edge & (neighbour == previous), repeats + 1, 0)
                previous = neighbour
            if SELF_LOOPS:
                is_edge = is_edge & (neighbour != own)
                is_added = (edge >= edges) & (edge < steps)
                neighbour = tl.where(is_added, own, neighbour)
                is_edge = is_edge | is_added
            is_edge = is_edge & (neighbour >= 0) & (neighbour < nodes)
            place = source + neighbour * STRIDE + group * (CHANNELS + 1)
            value = tl.load(place + column, mask=is_edge & (column < CHANNELS), other=0.0).to(ACCUMULATOR)
            score = tl.load(place + CHANNELS, mask=is_edge, other=0.0).to(ACCUMULATOR) + mine
            raised = tl.where(score > 0, score, score * SLOPE)
            higher = tl.where(is_edge & (raised > highest), raised, highest)
            shrink = tl.exp(highest - higher)
            weight = tl.exp(tl.where(is_edge, raised - higher, float("-inf")))
            bent = tl.where(score > 0, weight, weight * SLOPE)
            highest = higher
            weights = weights * shrink + weight
            if KEEP:
                bents = bents * shrink + bent
            if HAS_DROPOUT:
                kept = is_kept(own, neighbour, repeats, (first_group + group) // SLICES, seed, threshold)
                weight = tl.where(kept, weight * SCALE, 0.0)
                bent = tl.where(kept, bent * SCALE, 0.0)
            z = z * shrink + weight * value
            if KEEP:
                bent_z = bent_z * shrink + bent * value

    is_whole = (row < rows) & (slot < 0)
    finish_attention(out, row, group, column, z, bent_z, highest, weights, bents, is_whole, CHANNELS, GROUPS, KEEP)
    place = workspace + (slot * GROUPS + group) * (2 * CHANNELS + 3)
    is_part = (slot >= 0) & (column < CHANNELS)
    tl.store(place + column, z, mask=is_part)
    tl.store(place + CHANNELS + column, bent_z, mask=is_part)
    tl.store(place + 2 * CHANNELS, highest, mask=slot >= 0)
    tl.store(place + 2 * CHANNELS + 1, weights, mask=slot >= 0)
    tl.store(place + 2 * CHANNELS + 2, bents, mask=slot >= 0)


@triton.jit(do_not_specialize=["slots", "rows", "tile_start", "most"])
def attend_slots(
    workspace, before, after, offsets, parts, out, slots, rows, tile_start, most,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, ACCUMULATOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The slots of every long row merged in order with what there is ``before``, into ``out``, or ``after`` if more are
    to come."""
    program = tl.program_id(0)
    group = program % GROUPS
    column = tl.arange(0, COLUMNS)[None, :]
    row, first, count, goes_on, is_open = open_long_row(
        program // GROUPS, offsets, parts, slots, rows, tile_start, most
    )
    begun = before + group * (2 * CHANNELS + 3)
    highest = tl.load(begun + 2 * CHANNELS + 0 * row, mask=goes_on, other=-3.4e38)
    weights = tl.load(begun + 2 * CHANNELS + 1 + 0 * row, mask=goes_on, other=0.0)
    bents = tl.load(begun + 2 * CHANNELS + 2 + 0 * row, mask=goes_on, other=0.0)
    z = tl.load(begun + column, mask=goes_on & (column < CHANNELS), other=0.0)
    bent_z = tl.load(begun + CHANNELS + column, mask=goes_on & (column < CHANNELS), other=0.0)
    for slot in range(0, count):
        place = workspace + ((first + slot) * GROUPS + group) * (2 * CHANNELS + 3)
        part = tl.load(place + 2 * CHANNELS)
        higher = tl.where(part > highest, part, highest)
        shrink = tl.exp(highest - higher)
        grown = tl.exp(part - higher)
        highest = higher
        weights = weights * shrink + grown * tl.load(place + 2 * CHANNELS + 1)
        bents = bents * shrink + grown * tl.load(place + 2 * CHANNELS + 2)
        z = z * shrink + grown * tl.load(place + column, mask=column < CHANNELS, other=0.0)
        bent_z = bent_z * shrink + grown * tl.load(place + CHANNELS + column, mask=column < CHANNELS, other=0.0)
    is_row = (row < rows) & (is_open == 0)
    finish_attention(out, row, group, column, z, bent_z, highest, weights, bents, is_row, CHANNELS, GROUPS, KEEP)
    ended = after + group * (2 * CHANNELS + 3)
    tl.store(ended + column, z, mask=is_open & (column < CHANNELS))
    tl.store(ended + CHANNELS + column, bent_z, mask=is_open & (column < CHANNELS))
    tl.store(ended + 2 * CHANNELS + 0 * row, highest, mask=is_open)
    tl.store(ended + 2 * CHANNELS + 1 + 0 * row, weights, mask=is_open)
    tl.store(ended + 2 * CHANNELS + 2 + 0 * row, bents, mask=is_open)


@triton.jit(do_not_specialize=["rows"])
def pack_upstream(
    gradient, kept, a_dst, out, d_target, rows,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows and a group what sources pull, dZ, a_dst, lse and d, into ``out``, and da_dst into ``d_target``."""
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
    tl.store(place + column, narrow(dz, TYPE), mask=is_column)
    tl.store(place + CHANNELS, narrow(score, TYPE), mask=is_row)
    tl.store(place + CHANNELS + 1, narrow(lse, TYPE), mask=is_row)
    tl.store(place + CHANNELS + 2, narrow(d, TYPE), mask=is_row)
    tl.store(d_target + number, narrow(da_dst, TYPE), mask=is_row)


@triton.jit
def finish_sources(
    out, source, row, group, column, total, bent_total, bent_d, is_row,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, STRIDE: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """dz of the messages and da_src from the sums over a row's edges into ``out``."""
    is_column = is_row & (column < CHANNELS)
    z = tl.load(source + row * STRIDE + group * (CHANNELS + 1) + column, mask=is_column, other=0.0).to(ACCUMULATOR)
    da_src = tl.sum(bent_total * z, axis=1, keep_dims=True) - bent_d
    TYPE: tl.constexpr = out.dtype.element_ty
    place = out + (row * GROUPS + group) * (CHANNELS + 1)
    tl.store(place + column, narrow(total, TYPE), mask=is_column)
    tl.store(place + CHANNELS, narrow(da_src, TYPE), mask=is_row)


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most", "first_group", "seed", "threshold"])
def sources_segments(
    target, source, indices, offsets, parts, out, workspace,
    slots, rows, nodes, tile_start, most, first_group, seed, threshold,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, STRIDE: tl.constexpr, SOURCE_STRIDE: tl.constexpr,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, HAS_DROPOUT: tl.constexpr, SLICES: tl.constexpr,
    SELF_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dz and da_src of every segment's own row, into ``out``, or their sums into the segment's slot."""
    program = tl.program_id(0)
    group = program % GROUPS
    column = tl.arange(0, COLUMNS)[None, :]
    slot, row, first, edges, steps = open_segments(
        program // GROUPS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    own = row + tile_start
    if HAS_DROPOUT:
        previous, repeats = open_repeats(indices, offsets, parts, slots, row, rows, first, edges)
    mine = source + row * SOURCE_STRIDE + group * (CHANNELS + 1) + CHANNELS
    a_src = tl.load(mine, mask=row < rows, other=0.0).to(ACCUMULATOR)

    bent_d = tl.full([ROWS, 1], 0.0, ACCUMULATOR)
    total = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    bent_total = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            is_edge = edge < edges
            neighbour = tl.load(indices + first + edge, mask=is_edge, other=0).to(tl.int64)
            if HAS_DROPOUT:
                repeats = tl.where(is_edge & (neighbour == previous), repeats + 1, 0)
                previous = neighbour
            if SELF_LOOPS:
                is_edge = is_edge & (neighbour != own)
                is_added = (edge >= edges) & (edge < steps)
                neighbour = tl.where(is_added, own, neighbour)
                is_edge = is_edge | is_added
            is_edge = is_edge & (neighbour >= 0) & (neighbour < nodes)
            place = target + neighbour * STRIDE + group * (CHANNELS + 3)
            value = tl.load(place + column, mask=is_edge & (column < CHANNELS), other=0.0).to(ACCUMULATOR)
            score = tl.load(place + CHANNELS, mask=is_edge, other=0.0).to(ACCUMULATOR) + a_src
            lse = tl.load(place + CHANNELS + 1, mask=is_edge, other=0.0).to(ACCUMULATOR)
            d = tl.load(place + CHANNELS + 2, mask=is_edge, other=0.0).to(ACCUMULATOR)
            raised = tl.where(score > 0, score, score * SLOPE)
            weight = tl.exp(tl.where(is_edge, raised - lse, float("-inf")))
            bent = tl.where(score > 0, weight, weight * SLOPE)
            bent_d += bent * d
            if HAS_DROPOUT:
                kept = is_kept(neighbour, own, repeats, (first_group + group) // SLICES, seed, threshold)
                weight = tl.where(kept, weight * SCALE, 0.0)
                bent = tl.where(kept, bent * SCALE, 0.0)
            total += weight * value
            bent_total += bent * value

    is_whole = (row < rows) & (slot < 0)
    finish_sources(
        out, source, row, group, column, total, bent_total, bent_d, is_whole, CHANNELS, GROUPS, SOURCE_STRIDE,
        ACCUMULATOR,
    )  # fmt: skip
    place = workspace + (slot * GROUPS + group) * (2 * CHANNELS + 1)
    is_part = (slot >= 0) & (column < CHANNELS)
    tl.store(place + column, total, mask=is_part)
    tl.store(place + CHANNELS + column, bent_total, mask=is_part)
    tl.store(place + 2 * CHANNELS, bent_d, mask=slot >= 0)


@triton.jit(do_not_specialize=["slots", "rows", "tile_start", "most"])
def sources_slots(
    workspace, before, after, source, offsets, parts, out, slots, rows, tile_start, most,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, SOURCE_STRIDE: tl.constexpr, ACCUMULATOR: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The slots of every long row added in order to what there is ``before``, and dz and da_src from them into
    ``out``; or the sums ``after`` if more are to come."""
    program = tl.program_id(0)
    group = program % GROUPS
    column = tl.arange(0, COLUMNS)[None, :]
    row, first, count, goes_on, is_open = open_long_row(
        program // GROUPS, offsets, parts, slots, rows, tile_start, most
    )
    is_column = column < CHANNELS
    begun = before + group * (2 * CHANNELS + 1)
    bent_d = tl.load(begun + 2 * CHANNELS + 0 * row, mask=goes_on, other=0.0)
    total = tl.load(begun + column, mask=goes_on & is_column, other=0.0)
    bent_total = tl.load(begun + CHANNELS + column, mask=goes_on & is_column, other=0.0)
    for slot in range(0, count):
        place = workspace + ((first + slot) * GROUPS + group) * (2 * CHANNELS + 1)
        total += tl.load(place + column, mask=is_column, other=0.0)
        bent_total += tl.load(place + CHANNELS + column, mask=is_column, other=0.0)
        bent_d += tl.load(place + 2 * CHANNELS)
    is_row = (row < rows) & (is_open == 0)
    finish_sources(
        out, source, row, group, column, total, bent_total, bent_d, is_row, CHANNELS, GROUPS, SOURCE_STRIDE,
        ACCUMULATOR,
    )  # fmt: skip
    ended = after + group * (2 * CHANNELS + 1)
    tl.store(ended + column, total, mask=is_open & is_column)
    tl.store(ended + CHANNELS + column, bent_total, mask=is_open & is_column)
    tl.store(ended + 2 * CHANNELS + 0 * row, bent_d, mask=is_open)
