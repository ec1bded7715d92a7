# SPDX-License-Identifier: Apache-2.0
"""Programs for GINE's sum of relu(x_j + t) over neighbours, and for its gradients.

A program takes ROWS segments and COLUMNS columns. With a map an edge's term is f W + b; without, it is the edge's own
FEATURES from ``first_column`` on. Parts of long rows are plain sums, which ``sum_slots`` adds up.
"""

import triton
import triton.language as tl

from ooc.kernels.cuda.programs.edge_attention import edge_terms, some_features
from ooc.kernels.cuda.programs.segments import narrow, open_segments


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most", "first_column"])
def rectified_segments(
    pulled, own_rows, features, loops, weight, bias, indices, offsets, parts, out, workspace,
    slots, rows, nodes, tile_start, most, first_column,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, BACKWARD: tl.constexpr, HAS_MAP: tl.constexpr,
    FEATURES: tl.constexpr, FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SELF_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Forward: write relu(x + t) of sources x, summed over every segment, to ``out`` or to the segment's slot.
    BACKWARD: sum the gradients of targets where the segment's own x of ``own_rows`` plus the edge's t is above 0."""
    program = tl.program_id(0)
    column = (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_column = column < WIDTH
    slot, row, first, edges, steps = open_segments(
        program // BLOCKS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    mine = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    if BACKWARD:
        mine += tl.load(own_rows + row * WIDTH + column, mask=(row < rows) & is_column, other=0.0).to(ACCUMULATOR)

    total = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            is_edge = edge < edges
            neighbour = tl.load(indices + first + edge, mask=is_edge, other=0).to(tl.int64)
            is_edge = is_edge & (neighbour >= 0) & (neighbour < nodes)
            value = tl.load(pulled + neighbour * STRIDE + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
            place = first + edge
            if HAS_MAP:
                term = edge_terms(
                    features, loops, weight, bias, place, row, is_edge, is_edge, column, is_column,
                    FEATURES, FEATURE_STRIDE, LOOP_STRIDE, WIDTH, False, HAS_BIAS, ACCUMULATOR, ROWS, COLUMNS,
                )  # fmt: skip
            else:
                term_of = features + place * FEATURE_STRIDE + first_column
                term = tl.load(term_of + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
            if BACKWARD:
                total += tl.where(mine + term > 0, value, 0.0)
            else:
                hidden = value + term
                total += tl.where(is_edge & (hidden > 0), hidden, 0.0)

    is_whole = (row < rows) & (slot < 0)
    tl.store(out + row * WIDTH + column, narrow(total, out.dtype.element_ty), mask=is_whole & is_column)
    tl.store(workspace + slot * WIDTH + column, total, mask=(slot >= 0) & is_column)


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most"])
def rectified_map(
    source, upstream, features, loops, weight, bias, indices, offsets, parts, out, workspace,
    slots, rows, nodes, tile_start, most,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, COLUMN_BLOCKS: tl.constexpr, MAPPED: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, FEATURES: tl.constexpr, FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr, SELF_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the map over every segment, MAPPED numbers of a column side by side, to ``out`` or to the
    slot: the segment's own row of ``upstream`` where a source's x plus the edge's t is above 0, times the edge's
    features."""
    program = tl.program_id(0)
    number = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column = (program // BLOCKS % COLUMN_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_column = column < WIDTH
    slot, row, first, edges, steps = open_segments(
        program // BLOCKS // COLUMN_BLOCKS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    above = tl.load(upstream + row * WIDTH + column, mask=(row < rows) & is_column, other=0.0).to(ACCUMULATOR)

    d_map = tl.full([ROWS, BLOCK, COLUMNS], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            is_edge = edge < edges
            neighbour = tl.load(indices + first + edge, mask=is_edge, other=0).to(tl.int64)
            is_edge = is_edge & (neighbour >= 0) & (neighbour < nodes)
            value = tl.load(source + neighbour * STRIDE + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
            term = edge_terms(
                features, loops, weight, bias, first + edge, row, is_edge, is_edge, column, is_column,
                FEATURES, FEATURE_STRIDE, LOOP_STRIDE, WIDTH, False, HAS_BIAS, ACCUMULATOR, ROWS, COLUMNS,
            )  # fmt: skip
            d_term = tl.where(is_edge & (value + term > 0), above, 0.0)
            feature = some_features(
                features, loops, first + edge, row, is_edge, is_edge, number, FEATURES, FEATURE_STRIDE, LOOP_STRIDE,
                False, ACCUMULATOR,
            )  # fmt: skip
            d_map += feature[:, :, None] * d_term[:, None, :]

    is_whole = (row < rows) & (slot < 0)
    begin = column[:, None, :] * MAPPED + number[:, :, None]
    is_part = is_column[:, None, :] & (number < MAPPED)[:, :, None]
    place = row[:, :, None] * (WIDTH * MAPPED) + begin
    tl.store(out + place, narrow(d_map, out.dtype.element_ty), mask=is_whole[:, :, None] & is_part)
    place = slot[:, :, None] * (WIDTH * MAPPED) + begin
    tl.store(workspace + place, d_map, mask=(slot >= 0)[:, :, None] & is_part)
