# SPDX-License-Identifier: Apache-2.0
"""The plain sum over neighbours on a GPU: as ``ooc.kernels.aggregate``.

Shapes: N rows of the source, W width of the slab, R rows of the tile, E edges of these rows.
"""

from torch import Tensor

from ooc.kernels.cuda.choice import Kernel, shape_for
from ooc.kernels.cuda.launch import Pulling, ceil_div, rows_in_line, sums_dtype
from ooc.kernels.cuda.programs.sums import sum_segments, sum_slots
from ooc.kernels.cuda.segments import Segments, cut
from ooc.kernels.cuda.shapes import Shape
from ooc.kernels.edges import SelfLoops, TileEdges


def pull(source_NW: Tensor, indices_E: Tensor, offsets_R1: Tensor, weight_E: Tensor | None = None) -> Tensor:
    """Sum of ``source_NW[indices_E[offsets[i]:offsets[i+1]]]`` for each of R rows, each times its weight → [R, W];
    offsets are counted from 0."""
    return pull_tile(TileEdges(indices_E, offsets_R1, 0, len(source_NW), weight_E=weight_E), source_NW)


def pull_tile(
    tile: TileEdges,
    source_NW: Tensor,
    *,
    has_loops: bool = True,
    out: Tensor | None = None,
    segments: Segments | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """The sum over every row's edges, by the tile's weights where it has them → [R, W].

    The result is of the source's type, summed in float32 (float64 where the source is) in the order of the list,
    rounded once. Indices outside 0 … N are not followed and add nothing: damage is to be found where lists are read.
    With self-loops, each row that the source has comes last among its own neighbours; those in its list do not count,
    and to know that ``has_loops`` is false would save nothing. ``out`` [R, W] gets the rows, if it is given and holds
    them one right behind the other. ``segments``: the tile's, if it has been cut before; one cut serves all slabs.
    """
    assert tile.weight_E is None or tile.self_loops is SelfLoops.AS_STORED, "an added self-loop has no weight"
    source_NW = rows_in_line(source_NW)
    width = source_NW.shape[1]
    segments = segments or cut(tile)
    fits = out is not None and out.is_contiguous() and out.dtype == source_NW.dtype
    out_RW = out if fits and out is not None else source_NW.new_empty(tile.rows, width)
    if out_RW.numel() == 0:
        return out_RW
    workspace = source_NW.new_empty(segments.slots, width, dtype=sums_dtype(source_NW.dtype))
    shape = shape or shape_for(Kernel.SUM, source_NW)
    blocks = ceil_div(width, shape.columns)
    pulling = Pulling(tile, segments, source_NW, out_RW, workspace, shape, across=blocks)
    weight = tile.indices_E if tile.weight_E is None else tile.weight_E
    pulling.over_segments(sum_segments, weight, WIDTH=width, BLOCKS=blocks, HAS_WEIGHT=tile.weight_E is not None)
    pulling.over_long_rows(sum_slots, WIDTH=width, BLOCKS=blocks)
    return out_RW
