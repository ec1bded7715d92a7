# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.aggregate``'s sum over neighbours as a compiled loop: some columns of a row are in registers while its
neighbours are added, and what it adds of itself comes last.

Shapes as there. The order of all sums is that of torch's ``embedding_bag``, and so are the bits.
"""

import torch
from torch import Tensor

from ooc.kernels import aggregate
from ooc.kernels.aggregate import Own
from ooc.kernels.compiled.lanes import (
    NBYTES,
    TOGETHER,
    fma,
    load,
    load_side_by_side,
    prefetch,
    spread,
    spread_rows,
    store,
    store_side_by_side,
)
from ooc.kernels.compiled.loops import EDGES, compiled
from ooc.kernels.edges import SelfLoops, TileEdges

_LEAST_COLUMNS = {torch.float32: 64, torch.float64: 1}
"""With which the loop takes less time than ``embedding_bag``: of 64 or 128 columns of float32 0.9 times as long, of
float64 0.1 to 0.5 times, of narrower rows up to 1.8 times."""
_NOTHING_01 = torch.empty(0, 1)


def pull_tile(
    tile: TileEdges, source_NW: Tensor, *, has_loops: bool = True, own: Own = None, out: Tensor | None = None
) -> Tensor:
    """As ``aggregate.pull_tile``; in ``out``, if it is given and holds the rows one right behind the other."""
    width = source_NW.shape[1]
    is_wide = source_NW.is_contiguous() and width >= _LEAST_COLUMNS.get(source_NW.dtype, width + 1)
    if not is_wide or tile.self_loops is not SelfLoops.AS_STORED:
        return aggregate.pull_tile(tile, source_NW, has_loops=has_loops, own=own, out=out)
    fits = out is not None and out.is_contiguous() and out.dtype == source_NW.dtype
    out_RW = out if fits and out is not None else source_NW.new_empty(tile.rows, width)
    nothing_01 = _NOTHING_01.to(source_NW.dtype)
    weight_E = nothing_01[:, 0] if tile.weight_E is None else tile.weight_E.contiguous()
    own_R1 = own if isinstance(own, Tensor) else nothing_01
    numbers = tile.start, tile.nodes, 0.0 if not isinstance(own, float) else own
    edges = tile.indices_E.numpy(), tile.offsets_R1.numpy(), weight_E.numpy()
    if not _sums(edges, numbers, own_R1.numpy(), source_NW.numpy(), out_RW.numpy()):
        raise RuntimeError("a neighbour is none of the graph's rows")
    return out_RW


@compiled
def _sums(edges, numbers, own_R1, source_NW, out_RW):
    """→ whether all neighbours are rows of the graph."""
    (indices_E, offsets_R1, weight_E), (start, nodes, factor) = edges, numbers
    lanes, width, one = NBYTES // out_RW.itemsize, source_NW.shape[1], out_RW.dtype.type(1)
    wide, pulled, fetched, are_rows = TOGETHER * lanes, len(source_NW), 0, True
    for place in range(len(indices_E)):
        are_rows &= 0 <= indices_E[place] < nodes
    if not are_rows:
        return False
    for row in range(len(out_RW)):
        first, stop = offsets_R1[row], offsets_R1[row + 1]
        for place in range(fetched, min(stop + EDGES, len(indices_E))):
            if indices_E[place] < pulled:
                prefetch(source_NW, indices_E[place])
            fetched = place + 1
        own = start + row if (factor or len(own_R1)) and start + row < pulled else -1
        own_weight = own_R1[row, 0] if len(own_R1) else out_RW.dtype.type(factor)
        column = 0
        while column < width:
            if width - column <= lanes:
                sums = spread(out_RW.dtype.type(0))
                for edge in range(first, stop):
                    near = indices_E[edge]
                    if near < pulled:
                        found = load(source_NW, near, column, width)
                        sums = fma(found, spread(weight_E[edge]), sums) if len(weight_E) else sums + found
                if own >= 0:
                    sums = fma(load(source_NW, own, column, width), spread(own_weight), sums)
                store(out_RW, row, column, width, sums)
                column += lanes
            else:
                several = spread_rows(out_RW.dtype.type(0))
                others, has_others = several, width - column > wide
                for edge in range(first, stop):
                    near = indices_E[edge]
                    if near < pulled:
                        weight = weight_E[edge] if len(weight_E) else one
                        found = load_side_by_side(source_NW, near, column, width)
                        several = fma(found, spread_rows(weight), several) if len(weight_E) else several + found
                        if has_others:
                            found = load_side_by_side(source_NW, near, column + wide, width)
                            others = fma(found, spread_rows(weight), others) if len(weight_E) else others + found
                if own >= 0:
                    found = load_side_by_side(source_NW, own, column, width)
                    several = fma(found, spread_rows(own_weight), several)
                    if has_others:
                        found = load_side_by_side(source_NW, own, column + wide, width)
                        others = fma(found, spread_rows(own_weight), others)
                store_side_by_side(out_RW, row, column, width, several)
                if has_others:
                    store_side_by_side(out_RW, row, column + wide, width, others)
                column += 2 * wide
    return True
