# SPDX-License-Identifier: Apache-2.0
"""Programs for the plain sum and the maximum over neighbours, and for adding up or merging the parts of long rows.

A program takes ROWS segments and COLUMNS columns. BLOCKS programs side by side cover the columns: those of the same
segments run at about the same time and find each other's indices in the cache. Widths are known when a program is
compiled, so that it can load as many numbers at a time as their alignment allows. Whatever counts elements of a matrix
is int64.

Values are compared in ACCUMULATOR, which holds every value of a narrower type exactly; ties are counted in it. Maximum
and ties, or maximum and share, lie side by side, column after column.
"""

import triton
import triton.language as tl

from ooc.kernels.cuda.programs.segments import narrow, open_long_row, open_segments

PLAIN = tl.constexpr(0)
WEIGHTED = tl.constexpr(1)
SHARES = tl.constexpr(2)
"""What is summed."""


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most"])
def sum_segments(
    source, other, indices, offsets, parts, out, workspace, slots, rows, nodes, tile_start, most,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, OTHER_STRIDE: tl.constexpr, BLOCKS: tl.constexpr, SUMMED: tl.constexpr,
    SELF_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the rows of ``source`` [nodes, WIDTH], summed over every segment, to ``out`` or to the segment's slot; if
    WEIGHTED, each times the edge's weight in ``other``. With SHARES, the source [nodes, 2 · WIDTH] holds maxima and
    shares: the shares are summed where the maximum equals the value in the segment's own row of ``other``.

    With self-loops, rows of the tile are those of the source from ``tile_start`` on, and each comes last.
    """
    program = tl.program_id(0)
    column = (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_column = column < WIDTH
    slot, row, first, edges, steps = open_segments(
        program // BLOCKS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    own = row + tile_start
    mine = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    if SUMMED == SHARES:
        mine += tl.load(other + row * OTHER_STRIDE + column, mask=(row < rows) & is_column, other=0.0).to(ACCUMULATOR)

    total = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            is_edge = edge < edges
            neighbour = tl.load(indices + first + edge, mask=is_edge, other=0).to(tl.int64)
            if SELF_LOOPS:
                is_edge = is_edge & (neighbour != own)
                is_added = (edge >= edges) & (edge < steps)
                neighbour = tl.where(is_added, own, neighbour)
                is_edge = is_edge | is_added
            is_edge = is_edge & (neighbour >= 0) & (neighbour < nodes)
            place = source + neighbour * STRIDE + column * (2 if SUMMED == SHARES else 1)
            value = tl.load(place, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
            if SUMMED == WEIGHTED:
                value = value * tl.load(other + first + edge, mask=is_edge, other=0.0).to(ACCUMULATOR)
            elif SUMMED == SHARES:
                share = tl.load(place + 1, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
                value = tl.where(value == mine, share, 0.0)
            total += value

    is_whole = (row < rows) & (slot < 0)
    tl.store(out + row * WIDTH + column, narrow(total, out.dtype.element_ty), mask=is_whole & is_column)
    tl.store(workspace + slot * WIDTH + column, total, mask=(slot >= 0) & is_column)


@triton.jit(do_not_specialize=["slots", "rows", "tile_start", "most"])
def sum_slots(
    workspace, before, after, offsets, parts, out, slots, rows, tile_start, most,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, ACCUMULATOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the slots of every long row, in order, to the sum ``before``, into ``out``, or into ``after`` if more are to
    come."""
    program = tl.program_id(0)
    column = (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row, first, count, goes_on, is_open = open_long_row(
        program // BLOCKS, offsets, parts, slots, rows, tile_start, most
    )
    is_column = (column < WIDTH) & (row < rows)
    total = tl.load(before + column, mask=is_column & goes_on, other=0.0)
    for slot in range(0, count):
        total += tl.load(workspace + (first + slot) * WIDTH + column, mask=is_column, other=0.0)
    tl.store(out + row * WIDTH + column, narrow(total, out.dtype.element_ty), mask=is_column & (is_open == 0))
    tl.store(after + column, total, mask=is_column & is_open)


@triton.jit
def finish_maxima(out, place, highest, ties, is_stored, KEEP: tl.constexpr):
    """Return maxima, 0 in rows without edges, and the number of parts of their gradients, one more where the maximum is
    0."""
    is_empty = ties == 0
    highest = tl.where(is_empty, 0.0, highest)
    if KEEP:
        ties = tl.where(is_empty, 1.0, tl.where(highest == 0, ties + 1.0, ties))
        tl.store(out + 2 * place, highest.to(out.dtype.element_ty), mask=is_stored)
        tl.store(out + 2 * place + 1, ties.to(out.dtype.element_ty), mask=is_stored)
    else:
        tl.store(out + place, narrow(highest, out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most"])
def maxima_segments(
    source, indices, offsets, parts, out, workspace, slots, rows, nodes, tile_start, most,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr, SELF_LOOPS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the largest value of every column over every segment, and how many equal it, to ``out`` or to the segment's
    slot."""
    program = tl.program_id(0)
    column = (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_column = column < WIDTH
    slot, row, first, edges, steps = open_segments(
        program // BLOCKS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    own = row + tile_start

    highest = tl.full([ROWS, COLUMNS], float("-inf"), ACCUMULATOR)
    ties = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for start in range(0, tl.max(steps), UNROLL):
        for ahead in tl.static_range(UNROLL):
            edge = start + ahead
            is_edge = edge < edges
            neighbour = tl.load(indices + first + edge, mask=is_edge, other=0).to(tl.int64)
            if SELF_LOOPS:
                is_edge = is_edge & (neighbour != own)
                is_added = (edge >= edges) & (edge < steps)
                neighbour = tl.where(is_added, own, neighbour)
                is_edge = is_edge | is_added
            is_edge = is_edge & (neighbour >= 0) & (neighbour < nodes)
            value = tl.load(source + neighbour * STRIDE + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
            is_equal = is_edge & (value == highest)
            is_higher = is_edge & ((value > highest) | (value != value))
            ties = tl.where(is_higher, 1.0, tl.where(is_equal, ties + 1.0, ties))
            highest = tl.where(is_higher, value, highest)

    is_whole = (row < rows) & (slot < 0)
    finish_maxima(out, row * WIDTH + column, highest, ties, is_whole & is_column, KEEP)
    place = 2 * (slot * WIDTH + column)
    tl.store(workspace + place, highest, mask=(slot >= 0) & is_column)
    tl.store(workspace + place + 1, ties, mask=(slot >= 0) & is_column)


@triton.jit(do_not_specialize=["slots", "rows", "tile_start", "most"])
def maxima_slots(
    workspace, before, after, offsets, parts, out, slots, rows, tile_start, most,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr, ACCUMULATOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the slots of every long row with the maxima ``before``, into ``out``, or into ``after`` if more are to
    come."""
    program = tl.program_id(0)
    column = (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row, first, count, goes_on, is_open = open_long_row(
        program // BLOCKS, offsets, parts, slots, rows, tile_start, most
    )
    is_column = (column < WIDTH) & (row < rows)
    highest = tl.load(before + 2 * column, mask=is_column & goes_on, other=float("-inf"))
    ties = tl.load(before + 2 * column + 1, mask=is_column & goes_on, other=0.0)
    for slot in range(0, count):
        place = 2 * ((first + slot) * WIDTH + column)
        value = tl.load(workspace + place, mask=is_column, other=0.0)
        equal = tl.load(workspace + place + 1, mask=is_column, other=0.0)
        is_higher = (value > highest) | (value != value)
        ties = tl.where(is_higher, equal, tl.where(value == highest, ties + equal, ties))
        highest = tl.where(is_higher, value, highest)
    finish_maxima(out, row * WIDTH + column, highest, ties, is_column & (is_open == 0), KEEP)
    tl.store(after + 2 * column, highest, mask=is_column & is_open)
    tl.store(after + 2 * column + 1, ties, mask=is_column & is_open)
