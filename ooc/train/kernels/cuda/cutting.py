# SPDX-License-Identifier: Apache-2.0
"""Cuts a tile's rows into segments where the offsets are: three launches, and nothing is read back.

A pull cuts its tile anew, so that what a cut costs the host is a part of every pull: the same lists made of torch's
operators would be forty launches. Running sums are torch's, over one row of numbers, which it adds up on the whole GPU.
"""

import torch
from torch import Tensor

from ooc.train.kernels.cuda.cutting_programs import count_parts, fill_lists
from ooc.train.kernels.cuda.launch import ceil_div, on_device_of
from ooc.train.kernels.cuda.segments import EDGES_PER_SEGMENT, Segments, bounds

_PLACES, _WARPS = 256, 4
"""Rows whose parts a program counts, and places of lists that one fills. Never tried otherwise."""
_ALIGNED = 4
"""Lists lie in one piece of memory: so many numbers of 4 bytes are 16, by which programs may count on each to begin."""


def cut(offsets_R1: Tensor, edges: int, most: int = EDGES_PER_SEGMENT) -> Segments:
    """The segments of ``most`` edges at most of rows with ``edges`` edges together; ``offsets_R1`` begin at 0."""
    rows = offsets_R1.numel() - 1
    slots, long_rows = bounds(edges, most) if rows else (0, 0)
    count = rows + edges // most if rows else 0
    lists = _unfilled(offsets_R1, _aligned(count), _aligned(long_rows))
    segments = Segments(rows, slots, count, long_rows, *lists)
    if rows:
        _fill(segments, lists, offsets_R1, most)
    return segments


def _unfilled(beside: Tensor, segments: int, long_rows: int) -> tuple[Tensor, ...]:
    """The lists of ``Segments``, in its order, where ``beside`` is."""
    wide = beside.new_empty(3 * segments + 2 * long_rows, dtype=torch.int64)
    narrow = beside.new_empty(segments + long_rows, dtype=torch.int32)
    row_S, first_S, slot_S, row_L, slot_L = wide.split_with_sizes((segments,) * 3 + (long_rows,) * 2)
    edges_S, slots_L = narrow.split_with_sizes((segments, long_rows))
    return row_S, first_S, edges_S, slot_S, row_L, slot_L, slots_L


def _fill(of: Segments, lists: tuple[Tensor, ...], offsets_R1: Tensor, most: int) -> None:
    rows, segments, long_rows = of.rows, len(of.row_S), len(of.row_L)
    counts_2R = offsets_R1.new_empty(2 * rows, dtype=torch.int64)
    span = 1 << (rows.bit_length() - 1)
    programs = ceil_div(segments, _PLACES) + ceil_div(long_rows, _PLACES)
    with on_device_of(offsets_R1):
        count_parts[(ceil_div(rows, _PLACES),)](offsets_R1, counts_2R, rows, most, BLOCK=_PLACES, num_warps=_WARPS)
        fill_lists[(programs,)](
            *(offsets_R1, counts_2R.cumsum(0), *lists, rows, most, span, segments, long_rows),
            BLOCK=_PLACES,
            num_warps=_WARPS,
        )


def _aligned(count: int) -> int:
    return ceil_div(count, _ALIGNED) * _ALIGNED
