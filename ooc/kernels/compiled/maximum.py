# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.maximum``'s pulls as compiled loops. Shapes as there."""

import numpy as np
import torch
from torch import Tensor

from ooc.kernels import maximum
from ooc.kernels.compiled.lanes import NBYTES, evens, larger, load, odds, spread, store, where_equal
from ooc.kernels.compiled.loops import AHEAD, array, compiled, fetch, gather, lists_of, scratch
from ooc.kernels.edges import TileEdges


def pull_maxima(tile: TileEdges, source_NW: Tensor, *, keep: bool) -> Tensor:
    """As ``maximum.pull_maxima``."""
    if source_NW.dtype == torch.bfloat16:
        return maximum.pull_maxima(tile, source_NW, keep=keep)
    out = source_NW.new_empty(tile.rows, source_NW.shape[1] * (1 + keep))
    source = array(source_NW)
    given = scratch(0, 0, source.dtype)[0], np.empty((2, source.shape[1]), source.dtype)
    _pull_maxima(lists_of(tile, len(source)), source, given, keep, array(out))
    return out


def pull_sources(tile: TileEdges, *, target_NK: Tensor, source_RW: Tensor) -> Tensor:
    """As ``maximum.pull_sources``."""
    if source_RW.dtype == torch.bfloat16:
        return maximum.pull_sources(tile, target_NK=target_NK, source_RW=source_RW)
    out, target = torch.empty_like(source_RW, memory_format=torch.contiguous_format), array(target_NK)
    given = scratch(0, 0, target.dtype)[0]
    _pull_sources(lists_of(tile, len(target)), target, array(source_RW), given, array(out))
    return out


@compiled
def _pull_maxima(lists, source_NW, given, keep, out_RK):
    (near_E, places_E, _), found_2W = given
    dtype, lanes, width = source_NW.dtype, NBYTES // source_NW.itemsize, source_NW.shape[1]
    zero, one = spread(dtype.type(0)), spread(dtype.type(1))
    for row in range(len(out_RK)):
        for column in range(width):
            found_2W[0, column], found_2W[1, column] = -np.inf, 0
        cursor, stop, edges = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops, 0
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            edges += count
            for edge in range(count):
                fetch(lists, source_NW, begun + edge + AHEAD)
            for column in range(0, width, lanes):
                before = highest = load(found_2W, 0, column, width)
                for edge in range(count):
                    highest = larger(highest, load(source_NW, near_E[edge], column, width))
                store(found_2W, 0, column, width, highest)
                if keep:
                    ties = where_equal(before, highest, load(found_2W, 1, column, width), zero)
                    for edge in range(count):
                        ties = ties + where_equal(load(source_NW, near_E[edge], column, width), highest, one, zero)
                    store(found_2W, 1, column, width, ties)
        for column in range(width):
            value, ties = found_2W[0, column] if edges else 0, found_2W[1, column]
            out_RK[row, column * (1 + keep)] = value
            if keep:
                out_RK[row, 2 * column + 1] = ties + (value == 0) if edges else 1


@compiled
def _pull_sources(lists, target_NK, source_RW, given, out_RW):
    near_E, places_E, _ = given
    dtype, lanes, width = source_RW.dtype, NBYTES // source_RW.itemsize, source_RW.shape[1]
    zero = spread(dtype.type(0))
    for row in range(len(source_RW)):
        for column in range(width):
            out_RW[row, column] = 0
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            for edge in range(count):
                fetch(lists, target_NK, begun + edge + AHEAD)
            for column in range(0, width, lanes):
                own, sums = load(source_RW, row, column, width), load(out_RW, row, column, width)
                for edge in range(count):
                    first = load(target_NK, near_E[edge], 2 * column, 2 * width)
                    second = load(target_NK, near_E[edge], 2 * column + lanes, 2 * width)
                    sums = sums + where_equal(own, evens(first, second), odds(first, second), zero)
                store(out_RW, row, column, width, sums)
