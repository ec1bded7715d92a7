# SPDX-License-Identifier: Apache-2.0
"""What all launches have in common: types, numbers of programs, on which device, and how segments are gone through."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ooc.errors import ModelError
from ooc.kernels.cuda.programs.sums import sum_slots
from ooc.kernels.cuda.segments import Segments
from ooc.kernels.cuda.shapes import Shape, usual
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import SelfLoops, TileEdges

_device_of: Any = torch.cuda.device_of
"""It has no types."""
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float16: tl.float32,
}
"""In what Triton sums rows of a type."""
_SUMS = {torch.float64: torch.float64}


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """In what sums of rows of type ``dtype`` are made. Raises :class:`ModelError` where there is no kernel."""
    try:
        return _TYPES[dtype]
    except KeyError:
        raise ModelError(
            f"rows of {dtype} cannot be summed on a GPU; float64, float32, bfloat16 and float16 can"
        ) from None


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The same as a type of torch: float32, or float64 of float64."""
    return _SUMS.get(dtype, torch.float32)


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def signed(word: int) -> int:
    """64 bits as the signed number that they are to a program."""
    return word - (word >> 63 << 64)


def rows_in_line(matrix: Tensor) -> Tensor:
    """``matrix`` with the numbers of a row side by side; rows may lie apart."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] <= 1 else matrix.contiguous()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launches within go to the GPU where ``tensor`` is; in the interpreter there is none."""
    context: AbstractContextManager[object] = _device_of(tensor)
    return context


def add_up(
    program: Any, segments: Segments, workspace: Tensor, *operands: Tensor, out: Tensor, across: int, **constants: Any
) -> None:
    """The slots of every long row of ``segments``, in ``workspace``, into its row of ``out``, by ``across`` programs
    side by side."""
    if not segments.slots:
        return
    with on_device_of(workspace):
        program[(segments.slots * across,)](
            workspace,
            *operands,
            segments.offsets_R1,
            segments.parts_P2,
            out,
            segments.rows,
            segments.start,
            segments.most,
            ACCUMULATOR=accumulator(workspace.dtype),
            **constants,
        )


def add_sums(segments: Segments, workspace: Tensor, out_RW: Tensor) -> None:
    """Slots that are plain sums of a row's parts, W numbers each, into the rows of ``out_RW``."""
    width = out_RW.shape[1]
    columns = usual(width, workspace.itemsize).columns
    blocks = ceil_div(width, columns)
    add_up(sum_slots, segments, workspace, out=out_RW, across=blocks, WIDTH=width, BLOCKS=blocks, COLUMNS=columns)


def dropped_below(dropout: EdgeDropout | None) -> tuple[int, int, float]:
    """The generator's key as one number, below which of its numbers a coefficient is dropped, and what others are
    scaled by."""
    if dropout is None:
        return 0, 0, 1.0
    low, high = dropout.key
    return signed(high << 32 | low), dropout.threshold, dropout.kept_scale


@dataclass(frozen=True, slots=True)
class Pulling:
    """A tile's rows pulling from ``matrix_NW``, one or more columns of programs side by side (``across``).

    ``out`` gets the results, ``workspace`` [slots, …] in the summing type the parts of long rows.
    """

    tile: TileEdges
    segments: Segments
    matrix_NW: Tensor
    out: Tensor
    workspace: Tensor
    shape: Shape
    across: int

    def over_segments(self, program: Any, *operands: Tensor, numbers: tuple[int, ...] = (), **constants: Any) -> None:
        """Every segment into its row of ``out`` or into its slot. ``operands`` come behind the matrix, ``numbers``
        behind how many edges a segment has at most."""
        segments, shape, matrix = self.segments, self.shape, self.matrix_NW
        with on_device_of(matrix):
            program[(ceil_div(segments.count, shape.rows) * self.across,)](
                matrix,
                *operands,
                self.tile.indices_E,
                segments.offsets_R1,
                segments.parts_P2,
                self.out,
                self.workspace,
                segments.slots,
                segments.rows,
                matrix.shape[0],
                segments.start,
                segments.most,
                *numbers,
                STRIDE=matrix.stride(0),
                SELF_LOOPS=self.tile.self_loops is SelfLoops.EXACTLY_ONE,
                ACCUMULATOR=accumulator(matrix.dtype),
                ROWS=shape.rows,
                COLUMNS=shape.columns,
                UNROLL=shape.unroll,
                num_warps=shape.warps,
                **constants,
            )

    def over_long_rows(self, program: Any, *operands: Tensor, **constants: Any) -> None:
        """The slots of every long row into its row of ``out``. ``operands`` come behind the workspace."""
        columns = self.shape.columns
        add_up(
            program,
            self.segments,
            self.workspace,
            *operands,
            out=self.out,
            across=self.across,
            COLUMNS=columns,
            **constants,
        )
