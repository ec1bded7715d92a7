# SPDX-License-Identifier: Apache-2.0
"""What programs over segments have in common: which rows, edges and slots they take, and rounding.

These are called once a program, except for ``next_edge``. Programs of sums and maxima, which do little else, have it
inlined by hand: a call for every edge would make the interpreter several times as slow.
"""

import triton
import triton.language as tl


@triton.jit
def narrow(value, TYPE: tl.constexpr):
    """Return ``value`` as TYPE, rounded to nearest, ties to even.

    For bfloat16 this is done on the bits: a cast does the same on a GPU, but truncates in the interpreter.
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
    """Return the ``number``-th ROWS segments, one below the other: their slots, rows, first edges, edges and steps.

    The first ``slots`` segments are the parts of long rows; for the others, which are whole rows, the slot is −1.
    Beyond the last segment, and for a whole row that is long, the row is ``rows`` and there are no edges. With
    self-loops a row's last segment has one step more than edges. A launch has fewer than 2³¹ segments: 64-bit numbers
    would take registers that attention does not have.
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
    """Return the row of the ``number``-th of ``slots`` parts, its first slot and how many it has here, if it is the
    first of the row's parts that are here; otherwise ``rows`` and none. Also whether parts before these have been added
    up, and whether others are to come. All but the number of slots are [1, 1]."""
    slot = number.to(tl.int64) + tl.full([1, 1], 0, tl.int64)
    row = tl.load(parts + 2 * slot).to(tl.int64) - tile_start
    part = tl.load(parts + 2 * slot + 1).to(tl.int64)
    is_first = (part == 0) | (slot == 0)
    edges = tl.load(offsets + row + 1).to(tl.int64) - tl.load(offsets + row).to(tl.int64)
    left = (edges + most - 1) // most - part
    here = tl.where(is_first, tl.minimum(left, slots - slot), 0)
    row = tl.where(is_first, row, rows)
    return row, slot, tl.max(here).to(tl.int32), is_first & (part > 0), is_first & (here < left)


@triton.jit
def open_repeats(indices, offsets, parts, slots, row, rows, first, edges):
    """Return each segment's first neighbour, and one less than the number of edges of its row before that equal it,
    since the first edge equals it and is counted again. Neighbours of a row ascend. For a row that has begun before
    these ``indices``, the last neighbour before them and its number of edges follow the ``slots`` parts."""
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


@triton.jit
def next_edge(
    indices, edge, first, edges, steps, own, nodes, previous, repeats,
    SELF_LOOPS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return each segment's ``edge``-th edge: its neighbour, whether there is such an edge to a row below ``nodes``,
    and whether it is a stored edge or an added self-loop, which comes last; and with dropout, the neighbour before it
    and the ``repeats`` for the next call."""
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
    return neighbour, is_edge, is_stored & is_edge, is_added & is_edge, previous, repeats
