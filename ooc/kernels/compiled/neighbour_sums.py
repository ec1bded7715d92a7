# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.aggregate``'s sum over neighbours as a compiled loop. Some columns of a row stay in registers while its
neighbours are added; the row's own summand comes last.

Shapes as there. All sums have the order of torch's ``embedding_bag``, and the same bits.
"""

import torch
from torch import Tensor

from ooc.kernels import aggregate
from ooc.kernels.aggregate import Own
from ooc.kernels.compiled.lanes import (
    NBYTES,
    TOGETHER,
    fma,
    load_side_by_side,
    prefetch_side_by_side,
    spread_rows,
    store_side_by_side,
)
from ooc.kernels.compiled.loops import array, compiled, computed
from ooc.kernels.edges import SelfLoops, TileEdges

_LEAST_COLUMNS = {torch.float32: (128, 32), torch.float64: (1, 1), torch.bfloat16: (1 << 30, 32)}
"""The fewest columns for which the loop takes less time than ``embedding_bag``, for any rows, and for rows that are
half cache lines. With self-loops it takes 0.67 times as long for 128 columns of float32, 0.6 to 1.0 times for multiples
of 8 from 32 to 120, up to 1.1 times for other widths, and as long for 16; 0.2 to 0.4 times for float64; for bfloat16
0.6 to 0.85 times for 64 to 128 columns in whole lines (0.5 to 0.75 with self-loops), and 0.7 times for 32 columns."""
_AHEAD = 32
"""How many edges ahead neighbours' rows are prefetched."""
_NOTHING_01 = torch.empty(0, 1)


def pull_tile(
    tile: TileEdges, source_NW: Tensor, *, has_loops: bool = True, own: Own = None, out: Tensor | None = None
) -> Tensor:
    """As ``aggregate.pull_tile``. The result is in ``out`` if that is given and has contiguous rows, or has as many of
    the first columns."""
    width = source_NW.shape[1]
    of_any, of_lines = _LEAST_COLUMNS.get(source_NW.dtype, (width + 1, width + 1))
    least = of_any if width * source_NW.itemsize % (NBYTES // 2) else of_lines
    is_wide = source_NW.is_contiguous() and width >= least
    adds = tile.self_loops is SelfLoops.EXACTLY_ONE
    # Rounded before the row's own term is added.
    twice = own is not None and (adds or source_NW.dtype == torch.bfloat16)
    if not is_wide or twice or (adds and has_loops):
        return aggregate.pull_tile(tile, source_NW, has_loops=has_loops, own=own, out=out)
    fits = out is not None and out.is_contiguous() and out.dtype == source_NW.dtype
    out_RW = out if fits and out is not None else source_NW.new_empty(tile.rows, width)
    nothing_01 = _NOTHING_01.to(computed(source_NW))
    weight_E = nothing_01[:, 0] if tile.weight_E is None else tile.weight_E.contiguous()
    own_R1 = own if isinstance(own, Tensor) else nothing_01
    numbers = tile.start, tile.nodes, own if isinstance(own, float) else float(adds)
    edges = tile.indices_E.numpy(), tile.offsets_R1.numpy(), weight_E.numpy()
    if not _sums(edges, numbers, own_R1.numpy(), array(source_NW), array(out_RW)):
        raise RuntimeError("a neighbour is none of the graph's rows")
    return out_RW


@compiled
def _sums(edges, numbers, own_R1, source_NW, out_RW):
    """Return whether all neighbours are rows of the graph."""
    (indices_E, offsets_R1, weight_E), (start, nodes, factor) = edges, numbers
    width, last, one = source_NW.shape[1], len(indices_E) - 1, own_R1.dtype.type(1)
    zero = spread_rows(own_R1.dtype.type(0))
    wide, pulled, are_rows = TOGETHER * (NBYTES // own_R1.itemsize), len(source_NW), True
    for place in range(len(indices_E)):
        are_rows &= 0 <= indices_E[place] < nodes
    if not are_rows:
        return False
    is_plain = len(weight_E) == 0 and pulled >= nodes
    for row in range(len(out_RW)):
        first, stop = offsets_R1[row], offsets_R1[row + 1]
        own = start + row if (factor or len(own_R1)) and start + row < pulled else -1
        own_weight = spread_rows(own_R1[row, 0] if len(own_R1) else own_R1.dtype.type(factor))
        for column in range(0, width, 2 * wide):
            sums, others, other = zero, zero, column + wide
            if is_plain and width - column >= 2 * wide:  # without masks
                for edge in range(first, stop):
                    near, ahead = indices_E[edge], indices_E[min(edge + _AHEAD, last)]
                    prefetch_side_by_side(source_NW, ahead, column)
                    prefetch_side_by_side(source_NW, ahead, other)
                    sums = sums + load_side_by_side(source_NW, near, column, None)
                    others = others + load_side_by_side(source_NW, near, other, None)
            else:
                for edge in range(first, stop):
                    near, ahead = indices_E[edge], indices_E[min(edge + _AHEAD, last)]
                    if ahead < pulled:
                        prefetch_side_by_side(source_NW, ahead, column)
                    if near < pulled:
                        weight = spread_rows(weight_E[edge] if len(weight_E) else one)
                        sums = fma(load_side_by_side(source_NW, near, column, width), weight, sums)
                        if other < width:
                            prefetch_side_by_side(source_NW, ahead, other)
                            others = fma(load_side_by_side(source_NW, near, other, width), weight, others)
            if own >= 0:
                sums = fma(load_side_by_side(source_NW, own, column, width), own_weight, sums)
                others = fma(load_side_by_side(source_NW, own, other, width), own_weight, others)
            store_side_by_side(out_RW, row, column, out_RW.shape[1], sums)
            store_side_by_side(out_RW, row, other, out_RW.shape[1], others)
    return True
