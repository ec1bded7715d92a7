# SPDX-License-Identifier: Apache-2.0
"""The plain sum over neighbours: ``ooc.train.aggregate.pull`` for a GPU."""

from torch import Tensor

from ooc.train.kernels.cuda.choice import Kernel, shape_for
from ooc.train.kernels.cuda.cutting import cut
from ooc.train.kernels.cuda.launch import accumulator, add_up, ceil_div, on_device_of, rows_in_line, sums_dtype
from ooc.train.kernels.cuda.segments import Segments
from ooc.train.kernels.cuda.shapes import Shape
from ooc.train.kernels.cuda.sum_programs import sum_segments, sum_slots


def pull(source_NW: Tensor, indices_E: Tensor, offsets_R1: Tensor, weight_E: Tensor | None = None) -> Tensor:
    """Sum of ``source_NW[indices_E[offsets[i]:offsets[i+1]]]`` for each of R rows, each times its weight → [R, W].

    N nodes, W width of the slab, E edges of these rows, R rows, offsets from 0. The result is of the source's type,
    summed in float32 (float64 where the source is) in the order of the list, rounded once. Indices outside 0 … N
    are not followed and add nothing: damage is to be found where lists are read.
    """
    return pull_segments(source_NW, indices_E, cut(offsets_R1, indices_E.numel()), weight_E)


def pull_segments(
    source_NW: Tensor,
    indices_E: Tensor,
    segments: Segments,
    weight_E: Tensor | None = None,
    *,
    shape: Shape | None = None,
) -> Tensor:
    """The same for rows that have been cut before: one cut serves all slabs of a tile."""
    source_NW = rows_in_line(source_NW)
    width, dtype = source_NW.shape[1], source_NW.dtype
    sums = accumulator(dtype)
    out_RW = source_NW.new_empty(segments.rows, width)
    if out_RW.numel() == 0:
        return out_RW
    shape = shape or shape_for(Kernel.SUM, source_NW)
    workspace = source_NW.new_empty(segments.slots, width, dtype=sums_dtype(dtype))
    blocks = ceil_div(width, shape.columns)
    with on_device_of(source_NW):
        sum_segments[(ceil_div(segments.count, shape.rows) * blocks,)](
            source_NW,
            indices_E,
            indices_E if weight_E is None else weight_E,
            segments.row_S,
            segments.first_S,
            segments.edges_S,
            segments.slot_S,
            out_RW,
            workspace,
            segments.count,
            segments.rows,
            source_NW.shape[0],
            WIDTH=width,
            STRIDE=source_NW.stride(0),
            BLOCKS=blocks,
            HAS_WEIGHT=weight_E is not None,
            HAS_SLOTS=segments.slots > 0,
            ACCUMULATOR=sums,
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            UNROLL=shape.unroll,
            num_warps=shape.warps,
        )
    add_up(sum_slots, segments, workspace, out=out_RW, across=blocks, WIDTH=width, BLOCKS=blocks, COLUMNS=shape.columns)
    return out_RW
