# SPDX-License-Identifier: Apache-2.0
"""The largest of the neighbours' rows and its gradient on a GPU, as ``ooc.kernels.maximum``, whose ``upstream`` is used
here, too.

Maxima have the source's type. What is kept for the backward pass has the summing type, float32 unless the source is
float64: it holds the maximum exactly, and numbers of ties that narrower types would round.

Shapes: N rows of a pulled matrix, R rows of the tile, W columns.
"""

from typing import Any

from torch import Tensor

from ooc.kernels.cuda.choice import Kernel
from ooc.kernels.cuda.launch import Pulling, sums_dtype
from ooc.kernels.cuda.programs.sums import SHARES, maxima_segments, maxima_slots, sum_segments
from ooc.kernels.edges import TileEdges, rows_in_line


def pull_maxima(tile: TileEdges, source_NW: Tensor, *, keep: bool) -> Tensor:
    """Forward: targets pull the largest value of every column over in-edges. Return [R, W]; with ``keep``, each
    followed by its ties, [R, W·2]."""
    source_NW = rows_in_line(source_NW)
    width = source_NW.shape[1]
    dtype = sums_dtype(source_NW.dtype) if keep else source_NW.dtype
    out = source_NW.new_empty(tile.rows, 2 * width if keep else width, dtype=dtype)
    pulling = Pulling(Kernel.MAXIMUM, tile, source_NW, out, width=width, slot=2 * width)
    constants: dict[str, Any] = {"WIDTH": width, "BLOCKS": pulling.across, "KEEP": keep}
    pulling.over_segments(maxima_segments, **constants)
    pulling.over_long_rows(maxima_slots, **constants)
    return out


def pull_sources(tile: TileEdges, *, target_NK: Tensor, source_RW: Tensor) -> Tensor:
    """Backward: sources pull the shares of the maxima they equal over out-edges. Return [R, W] in the sources' type.

    ``target_NK``: maximum and share of every column, as ``upstream`` returns them.
    """
    assert len(source_RW) == tile.rows, "a program reads every row's own"
    target_NK, source_RW = rows_in_line(target_NK), rows_in_line(source_RW)
    width = source_RW.shape[1]
    out_RW = source_RW.new_empty(tile.rows, width)
    pulling = Pulling(Kernel.MAXIMUM_SOURCES, tile, target_NK, out_RW, width=width, slot=width)
    columns: dict[str, Any] = {"WIDTH": width, "BLOCKS": pulling.across, "OTHER_STRIDE": source_RW.stride(0)}
    pulling.over_segments(sum_segments, source_RW, SUMMED=SHARES.value, **columns)
    pulling.add_sums()
    return out_RW
