# SPDX-License-Identifier: Apache-2.0
"""Programs that write down which segments and long rows those of the pulls find."""

import triton
import triton.language as tl

from ooc.kernels.cuda.programs.segments import open_long_row, open_segments


@triton.jit(do_not_specialize=["slots", "rows", "tile_start", "most"])
def list_segments(
    offsets, parts, lists, slots, rows, tile_start, most,
    SELF_LOOPS: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Slots, rows, first edges, edges and steps into ``lists`` [5, PLACES]."""
    number = tl.program_id(0)
    slot, row, first, edges, steps = open_segments(
        number, offsets, parts, slots, rows, tile_start, most, SELF_LOOPS, ROWS
    )
    place = lists + number * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(place, slot)
    tl.store(place + PLACES, row)
    tl.store(place + 2 * PLACES, first)
    tl.store(place + 3 * PLACES, edges.to(tl.int64))
    tl.store(place + 4 * PLACES, steps.to(tl.int64))


@triton.jit(do_not_specialize=["slots", "rows", "tile_start", "most"])
def list_long_rows(offsets, parts, lists, slots, rows, tile_start, most, PLACES: tl.constexpr):
    """Rows, first slots, numbers of slots, and whether parts are before or behind these, into ``lists`` [5, PLACES]."""
    number = tl.program_id(0)
    row, first, here, goes_on, is_open = open_long_row(number, offsets, parts, slots, rows, tile_start, most)
    place = lists + number + tl.full([1, 1], 0, tl.int64)
    tl.store(place, row)
    tl.store(place + PLACES, first)
    tl.store(place + 2 * PLACES, tl.full([1, 1], 0, tl.int64) + here)
    tl.store(place + 3 * PLACES, goes_on.to(tl.int64))
    tl.store(place + 4 * PLACES, is_open.to(tl.int64))
