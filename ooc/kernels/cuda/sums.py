# SPDX-License-Identifier: Apache-2.0
"""The plain sum over neighbours on a GPU, as ``ooc.kernels.aggregate``.

Shapes: N rows of the source, W width of the slab, R rows of the tile, E edges of these rows.
"""

from typing import Any

from torch import Tensor

from ooc.kernels.aggregate import Own, add_own
from ooc.kernels.cuda.choice import Kernel
from ooc.kernels.cuda.launch import Pulling
from ooc.kernels.cuda.programs.sums import PLAIN, WEIGHTED, sum_segments
from ooc.kernels.edges import SelfLoops, TileEdges, rows_in_line


def pull_tile(
    tile: TileEdges, source_NW: Tensor, *, has_loops: bool = True, own: Own = None, out: Tensor | None = None
) -> Tensor:
    """Return the sum over every row's edges, with the tile's weights if it has them [R, W].

    The result has the source's type; it is summed in float32 (float64 if the source is) in the order of the list, and
    rounded once. Indices outside 0 … N are not followed and add nothing: damage is found where lists are read. With
    self-loops, each row that the source has comes last among its own neighbours; stored ones do not count, and knowing
    that ``has_loops`` is false would save nothing. ``out`` [R, W] receives the rows if it is given and has contiguous
    rows.
    """
    assert tile.weight_E is None or tile.self_loops is SelfLoops.AS_STORED, "an added self-loop has no weight"
    source_NW = rows_in_line(source_NW)
    width = source_NW.shape[1]
    fits = out is not None and out.is_contiguous() and out.dtype == source_NW.dtype
    out_RW = out if fits and out is not None else source_NW.new_empty(tile.rows, width)
    pulling = Pulling(Kernel.SUM, tile, source_NW, out_RW, width=width, slot=width)
    weight, summed = (tile.indices_E, PLAIN) if tile.weight_E is None else (tile.weight_E, WEIGHTED)
    columns: dict[str, Any] = {"WIDTH": width, "BLOCKS": pulling.across, "OTHER_STRIDE": 0}
    pulling.over_segments(sum_segments, weight, SUMMED=summed.value, **columns)
    pulling.add_sums()
    add_own(out_RW, source_NW, tile.start, own)
    return out_RW
