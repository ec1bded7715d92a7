# SPDX-License-Identifier: Apache-2.0
"""Programs of the plain sum, and those that add up the parts of long rows.

A program takes ROWS segments and COLUMNS columns. BLOCKS programs side by side cover the columns: those of the same
segments run at about the same time and find each other's indices in the cache. Widths are known when a program is
compiled, so that it can load as many numbers at a time as their alignment allows. Whatever counts elements of a matrix
is int64.
"""

import triton
import triton.language as tl

from ooc.kernels.cuda.programs.segments import narrow, open_long_row, open_segments


@triton.jit(do_not_specialize=["slots", "rows", "nodes", "tile_start", "most"])
def sum_segments(
    source, weight, indices, offsets, parts, out, workspace, slots, rows, nodes, tile_start, most,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, HAS_WEIGHT: tl.constexpr, SELF_LOOPS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Rows of ``source`` [nodes, WIDTH] summed over every segment, into ``out`` or the segment's slot.

    With self-loops, rows of the tile are those of the source from ``tile_start`` on, and each comes last.
    """
    program = tl.program_id(0)
    column = (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_column = column < WIDTH
    slot, row, first, edges, steps = open_segments(
        program // BLOCKS, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    own = row + tile_start

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
            value = tl.load(source + neighbour * STRIDE + column, mask=is_edge & is_column, other=0.0).to(ACCUMULATOR)
            if HAS_WEIGHT:
                value = value * tl.load(weight + first + edge, mask=is_edge, other=0.0).to(ACCUMULATOR)
            total += value

    is_whole = (row < rows) & (slot < 0)
    tl.store(out + row * WIDTH + column, narrow(total, out.dtype.element_ty), mask=is_whole & is_column)
    tl.store(workspace + slot * WIDTH + column, total, mask=(slot >= 0) & is_column)


@triton.jit(do_not_specialize=["rows", "tile_start", "most"])
def sum_slots(
    workspace, offsets, parts, out, rows, tile_start, most,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, ACCUMULATOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The slots of every long row, added in order into ``out``."""
    program = tl.program_id(0)
    column = (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row, first, slots = open_long_row(program // BLOCKS, offsets, parts, rows, tile_start, most)
    is_column = (column < WIDTH) & (row < rows)
    total = tl.full([1, COLUMNS], 0.0, ACCUMULATOR)
    for slot in range(0, slots):
        total += tl.load(workspace + (first + slot) * WIDTH + column, mask=is_column, other=0.0)
    tl.store(out + row * WIDTH + column, narrow(total, out.dtype.element_ty), mask=is_column)
