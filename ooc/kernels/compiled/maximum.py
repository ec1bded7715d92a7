# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.maximum``'s pulls as compiled loops. Shapes as there."""

import numpy as np
import torch
from torch import Tensor

from ooc.kernels.compiled.lanes import NBYTES, evens, larger, load, odds, spread, store, where_equal
from ooc.kernels.compiled.loops import TAKEN, Walk, array, clear, compiled, computed, gather, pull
from ooc.kernels.edges import TileEdges
from ooc.kernels.tensors import typed


def pull_maxima(tile: TileEdges, source_NW: Tensor, *, keep: bool) -> Tensor:
    """As ``maximum.pull_maxima``."""
    columns = source_NW.shape[1]
    out = torch.empty(tile.rows, columns * (1 + keep), dtype=computed(source_NW))
    found = np.empty((2, columns), array(out).dtype)
    _pull_maxima(Walk.over(tile, source_NW), array(source_NW), found, keep, array(out))
    return out


def pull_sources(tile: TileEdges, *, target_NK: Tensor, source_RW: Tensor) -> Tensor:
    """As ``maximum.pull_sources``."""
    own = typed(source_RW, computed(target_NK))
    out = torch.empty_like(own, memory_format=torch.contiguous_format)
    _pull_sources(Walk.over(tile, target_NK), array(target_NK), array(own), array(out))
    return out


@compiled
def _pull_maxima(walk, source_NW, found_2W, keep, out_RK):
    dtype, lanes, width = out_RK.dtype, NBYTES // out_RK.itemsize, source_NW.shape[1]
    near_E, zero, one = walk.near_E, spread(dtype.type(0)), spread(dtype.type(1))
    for row in range(len(out_RK)):
        for column in range(width):
            found_2W[0, column], found_2W[1, column] = -np.inf, 0
        edges = 0
        while gather(walk, row):
            count = walk.at[TAKEN]
            edges += count
            for column in range(0, width, lanes):
                before = highest = load(found_2W, 0, column, width)
                for edge in range(count):
                    highest = larger(highest, pull(walk, source_NW, edge, column, width))
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
def _pull_sources(walk, target_NK, source_RW, out_RW):
    lanes, width = NBYTES // source_RW.itemsize, source_RW.shape[1]
    zero = spread(source_RW.dtype.type(0))
    for row in range(len(source_RW)):
        clear(out_RW, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            for column in range(0, width, lanes):
                own, sums = load(source_RW, row, column, width), load(out_RW, row, column, width)
                for edge in range(count):
                    first = pull(walk, target_NK, edge, 2 * column, 2 * width)
                    second = pull(walk, target_NK, edge, 2 * column + lanes, 2 * width)
                    sums = sums + where_equal(own, evens(first, second), odds(first, second), zero)
                store(out_RW, row, column, width, sums)
