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
    number, row_of, first_of, edges_of, offsets, segments, rows, SELF_LOOPS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The ``number``-th ROWS segments, one below the other: their numbers, rows, first edges, edges and steps.

    With self-loops a row's last segment has one step more than edges. Beyond the last segment are none of either.
    """
    segment = number.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_segment = segment < segments
    edges = tl.load(edges_of + segment, mask=is_segment, other=0)
    first = tl.load(first_of + segment, mask=is_segment, other=0)
    row = tl.load(row_of + segment, mask=is_segment, other=rows)
    steps = edges
    if SELF_LOOPS:
        row_stop = tl.load(offsets + row + 1, mask=row < rows, other=-1)
        steps = edges + ((first + edges == row_stop) & (row < rows)).to(tl.int32)
    return segment, row, first, edges, steps


@triton.jit
def open_long_row(number, row_of, slot_of, slots_of):
    """The ``number``-th long row: its number, its first slot and how many it has; the first two [1, 1]."""
    place = number.to(tl.int64) + tl.full([1, 1], 0, tl.int64)
    return tl.load(row_of + place), tl.load(slot_of + place), tl.max(tl.load(slots_of + place))
