# SPDX-License-Identifier: Apache-2.0
"""What programs over segments have in common: which rows and edges they take, which slots, and rounding.

Called once a program. What finds the next edge is written out in every program: a call for every edge would make the
interpreter several times as slow.
"""

import triton
import triton.language as tl


@triton.jit
def narrow(value, TYPE: tl.constexpr):
    """``value`` as TYPE, rounded to nearest, ties to even.

    For bfloat16 that is done on the bits: a cast does the same on a GPU, but cuts digits off in the interpreter.
    """
    if tl.bfloat16 == TYPE:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        narrowed = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrowed = value.to(TYPE)
    return narrowed


@triton.jit
def open_segments(
    number, offsets, parts, slots, rows, tile_start, most,
    SELF_LOOPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The ``number``-th ROWS segments, one below the other: their slots, rows, first edges, edges and steps.

    The first ``slots`` segments are the parts of long rows; of the others, which are whole rows, the slot is −1.
    Beyond the last segment, and where a whole row is long, the row is ``rows`` and there are no edges. With self-loops
    a row's last segment has one step more than edges. A launch has fewer than 2³¹ segments: in 64 bits their numbers
    would take registers that attention has no more of.
    """
    place = number * ROWS + tl.arange(0, ROWS)[:, None]
    is_part = place < slots
    part_row = tl.load(parts + 2 * place, mask=is_part, other=0) - tile_start
    part = tl.load(parts + 2 * place + 1, mask=is_part, other=0).to(tl.int64)
    row = tl.where(is_part, part_row.to(tl.int32), place - slots)
    is_row = row < rows
    row_start = tl.load(offsets + row, mask=is_row, other=0).to(tl.int64)
    row_stop = tl.load(offsets + row + 1, mask=is_row, other=0).to(tl.int64)
    row = tl.where(is_row & (is_part | (row_stop - row_start <= most)), row, rows)
    first = row_start + part * most
    edges = tl.where(row < rows, tl.minimum(row_stop - first, most), 0).to(tl.int32)
    steps = edges
    if SELF_LOOPS:
        steps = edges + ((row < rows) & (row_stop - first <= most)).to(tl.int32)
    return tl.where(is_part, place, -1).to(tl.int64), row.to(tl.int64), first, edges, steps


@triton.jit
def open_long_row(number, offsets, parts, slots, rows, tile_start, most):
    """The row of the ``number``-th of ``slots`` parts, its first slot and how many it has here, if it is the first of
    the row's parts that are here; otherwise ``rows`` and none. Whether parts before these have been added up, and
    whether others are to come. All but the number of slots [1, 1]."""
    slot = number.to(tl.int64) + tl.full([1, 1], 0, tl.int64)
    row = tl.load(parts + 2 * slot).to(tl.int64) - tile_start
    part = tl.load(parts + 2 * slot + 1).to(tl.int64)
    is_first = (part == 0) | (slot == 0)
    edges = tl.load(offsets + row + 1).to(tl.int64) - tl.load(offsets + row).to(tl.int64)
    left = (edges + most - 1) // most - part
    here = tl.where(is_first, tl.minimum(left, slots - slot), 0)
    row = tl.where(is_first, row, rows)
    return row, slot, tl.max(here).to(tl.int32), is_first & (part > 0), is_first & (here < left)
