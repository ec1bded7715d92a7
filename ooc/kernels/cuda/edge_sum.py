# SPDX-License-Identifier: Apache-2.0
"""GINE's sum of relu(x_j + t) on a GPU, and its gradients; t an edge's features or a linear map of them.

Shapes: N rows of a pulled matrix, R rows of the tile, W columns, K features of an edge, M = W·K columns of the map's
gradient, W more with a bias.
"""

from typing import Any

import torch
from torch import Tensor

from ooc.kernels.cuda.choice import Kernel, shape_for
from ooc.kernels.cuda.edge_terms import Terms, map_block
from ooc.kernels.cuda.launch import Pulling, add_sums, ceil_div, rows_in_line, sums_dtype
from ooc.kernels.cuda.programs.edge_sums import rectified_map, rectified_segments
from ooc.kernels.cuda.segments import Segments
from ooc.kernels.cuda.shapes import Shape
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import TileEdges


def pull_messages(
    tile: TileEdges, source_NW: Tensor, terms: EdgeTerms, segments: Segments, shape: Shape | None = None
) -> Tensor:
    """Forward: targets pull relu(x + t) over in-edges → [R, W]."""
    out_RW = source_NW.new_empty(tile.rows, source_NW.shape[1])
    _pull(tile, source_NW, source_NW, terms, segments, shape, out_RW=out_RW, backward=False)
    return out_RW


def pull_sources(
    tile: TileEdges, source_RW: Tensor, target_NW: Tensor, terms: EdgeTerms, segments: Segments, shape: Shape | None
) -> Tensor:
    """Backward: sources pull the gradients of targets over out-edges, where relu let their x + t through → [R, W]."""
    source_RW = source_RW.contiguous()
    out_RW = torch.empty_like(source_RW)
    _pull(tile, target_NW, source_RW, terms, segments, shape, out_RW=out_RW, backward=True)
    return out_RW


def pull_map(
    tile: TileEdges,
    source_NW: Tensor,
    gradient_RW: Tensor,
    terms: EdgeTerms,
    segments: Segments,
    shape: Shape | None = None,
) -> Tensor:
    """Backward: the gradient of the terms' map, row by row over in-edges → [R, M], a column's numbers side by side."""
    source_NW, gradient_RW = rows_in_line(source_NW), gradient_RW.contiguous()
    made, width = Terms.of(terms, tile, source_NW), source_NW.shape[1]
    out_RM = source_NW.new_empty(tile.rows, width * made.mapped)
    if out_RM.numel() == 0:
        return out_RM
    workspace = source_NW.new_empty(segments.slots, width * made.mapped, dtype=sums_dtype(source_NW.dtype))
    shape = shape or shape_for(Kernel.RECTIFIED_MAP, source_NW)
    block = map_block(made.mapped, shape, shape.columns)
    blocks, column_blocks = ceil_div(made.mapped, block), ceil_div(width, shape.columns)
    pulling = Pulling(tile, segments, source_NW, out_RM, workspace, shape, across=blocks * column_blocks)
    sizes: dict[str, Any] = {"WIDTH": width, "COLUMN_BLOCKS": column_blocks, "BLOCKS": blocks, "BLOCK": block}
    pulling.over_segments(
        rectified_map, gradient_RW, *made.stored_operands, MAPPED=made.mapped, **sizes, **made.stored_constants
    )
    add_sums(segments, workspace, out_RM)
    return out_RM


def _pull(
    tile: TileEdges,
    pulled_NW: Tensor,
    own_RW: Tensor,
    terms: EdgeTerms,
    segments: Segments,
    shape: Shape | None,
    *,
    out_RW: Tensor,
    backward: bool,
) -> None:
    if out_RW.numel() == 0:
        return
    pulled_NW, width = rows_in_line(pulled_NW), out_RW.shape[1]
    workspace = pulled_NW.new_empty(segments.slots, width, dtype=sums_dtype(pulled_NW.dtype))
    shape = shape or shape_for(Kernel.RECTIFIED, pulled_NW, width)
    blocks, made = ceil_div(width, shape.columns), Terms.of(terms, tile, pulled_NW)
    pulling = Pulling(tile, segments, pulled_NW, out_RW, workspace, shape, across=blocks)
    pulling.over_segments(
        rectified_segments,
        own_RW,
        *made.stored_operands,
        numbers=(terms.groups.start,),
        WIDTH=width,
        BLOCKS=blocks,
        BACKWARD=backward,
        HAS_MAP=terms.weight_KT is not None,
        **made.stored_constants,
    )
    add_sums(segments, workspace, out_RW)
