# SPDX-License-Identifier: Apache-2.0
"""Programs that cut rows into segments: counts of every row, and from their running sums every list at once.

What a list has at a place follows from the running sums by binary search, so that all places are found side by side.
Edges, parts and places are counted in int64. No number that changes from tile to tile is known when a program is
compiled.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "most"])
def count_parts(offsets, counts, rows, most, BLOCK: tl.constexpr):
    """Into ``counts`` [2 · rows] how many parts of ``most`` edges every row has, and behind them all whether it is
    long."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    first = tl.load(offsets + row, mask=is_row, other=0).to(tl.int64)
    stop = tl.load(offsets + row + 1, mask=is_row, other=0).to(tl.int64)
    parts = tl.maximum((stop - first + most - 1) // most, 1)
    tl.store(counts + row, parts, mask=is_row)
    tl.store(counts + rows + row, (parts > 1).to(tl.int64), mask=is_row)


@triton.jit(do_not_specialize=["rows", "most", "span", "segments", "long_rows"])
def fill_lists(
    offsets, stops, row_of, first_of, edges_of, slot_of, long_row_of, long_slot_of, slots_of,
    rows, most, span, segments, long_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK places of the lists of segments, or, by the programs behind those, of the lists of long rows.

    ``stops`` [2 · rows]: the running sums of parts, and of long rows on top of all parts. The slot of a long row's part
    is its place less the short rows before it. ``span``: the largest power of two that is not above ``rows``. Places
    beyond the last segment, and beyond the last long row, get the row number ``rows`` and no edges or slots.
    """
    all_parts = tl.load(stops + rows - 1)
    block = tl.program_id(0).to(tl.int64)
    blocks = (segments + BLOCK - 1) // BLOCK
    if block < blocks:
        place = block * BLOCK + tl.arange(0, BLOCK)
        is_place = place < segments
        row = rows_done(stops, place, rows, span, BLOCK)
        known = tl.minimum(row, rows - 1)
        parts_before = stop_of(stops, known - 1)
        long_before = stop_of(stops, rows + known - 1) - all_parts
        is_part = (row < rows) & (stop_of(stops, known) - parts_before > 1)
        part = place - parts_before
        first = tl.load(offsets + known).to(tl.int64) + part * most
        edges = tl.minimum(tl.load(offsets + known + 1).to(tl.int64) - first, most)
        tl.store(row_of + place, row, mask=is_place)
        tl.store(first_of + place, first, mask=is_place)
        tl.store(edges_of + place, tl.where(row < rows, edges, 0).to(tl.int32), mask=is_place)
        tl.store(slot_of + place, tl.where(is_part, place - known + long_before, -1), mask=is_place)
    else:
        place = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
        is_place = place < long_rows
        row = rows_done(stops + rows, all_parts + place, rows, span, BLOCK)
        known = tl.minimum(row, rows - 1)
        parts_before = stop_of(stops, known - 1)
        slots = stop_of(stops, known) - parts_before
        tl.store(long_row_of + place, row, mask=is_place)
        tl.store(long_slot_of + place, tl.where(row < rows, parts_before - known + place, 0), mask=is_place)
        tl.store(slots_of + place, tl.where(row < rows, slots, 0).to(tl.int32), mask=is_place)


@triton.jit
def rows_done(stops, number, rows, span, BLOCK: tl.constexpr):
    """How many of the running sums ``stops`` [rows] are at most ``number``: the row that ``number`` falls into, counted
    from 0, or ``rows``."""
    done = tl.full([BLOCK], 0, tl.int64)
    while span > 0:
        ahead = done + span
        stop = tl.load(stops + ahead - 1, mask=ahead <= rows, other=0)
        done = tl.where((ahead <= rows) & (stop <= number), ahead, done)
        span = span // 2
    return done


@triton.jit
def stop_of(stops, row):
    """The running sum up to ``row`` and with it; none of the rows: 0."""
    return tl.load(stops + row, mask=row >= 0, other=0)
