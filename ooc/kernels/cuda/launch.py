# SPDX-License-Identifier: Apache-2.0
"""What all launches have in common: types, numbers of programs, the device, and how segments are gone through."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ooc.errors import ModelError
from ooc.kernels.cuda.choice import Case, Kernel, shape_for
from ooc.kernels.cuda.programs.sums import sum_slots
from ooc.kernels.cuda.segments import EDGES_PER_SEGMENT, cut
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import SelfLoops, TileEdges

on_device_of: Any = torch.cuda.device_of  # the module is untyped
"""Return a context in which launches go to the GPU a tensor is on; the interpreter has none."""
_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The types of rows that Triton sums."""


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which rows of type ``dtype`` are summed. Raises :class:`ModelError` if there is no kernel."""
    if dtype not in _TYPES:
        raise ModelError(f"rows of {dtype} cannot be summed on a GPU; float64, float32, bfloat16 and float16 can")
    return tl.float64 if dtype == torch.float64 else tl.float32


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return that type as a type of torch: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def signed(word: int) -> int:
    """Return 64 bits as the signed number that a program sees."""
    return word - (word >> 63 << 64)


def dropped_below(dropout: EdgeDropout | None) -> tuple[int, int]:
    """Return the generator's key as one number, and the number below which a coefficient is dropped."""
    if dropout is None:
        return 0, 0
    low, high = dropout.key
    return signed(high << 32 | low), dropout.threshold


class Pulling:
    """A pull of a tile's rows from ``matrix_NW`` into ``out``: launches of one program, or several side by side
    (``across``), for the same segments.

    A program takes ``width`` columns, all those of a head, if their number is ``across``; otherwise blocks of columns.
    Parts of long rows go to a workspace, with ``slot`` numbers each in the summing type.
    """

    def __init__(
        self,
        kernel: Kernel,
        tile: TileEdges,
        matrix_NW: Tensor,
        out: Tensor,
        *,
        width: int,
        slot: int,
        across: int | None = None,
    ) -> None:
        self._tile, self._matrix_NW, self._out = tile, matrix_NW, out
        self._parts_P2, self._slots = cut(tile, EDGES_PER_SEGMENT)
        self.shape = shape_for(kernel, matrix_NW, width)
        self.across = ceil_div(width, self.shape.columns) if across is None else across
        self._workspace = matrix_NW.new_empty(self._slots, slot, dtype=sums_dtype(matrix_NW.dtype))

    def over_segments(self, program: Any, *operands: Tensor, numbers: tuple[int, ...] = (), **constants: Any) -> None:
        """Launch every segment into its row of ``out`` or its slot. ``operands`` follow the matrix among the arguments,
        ``numbers`` follow the most edges of a segment."""
        tile, shape, matrix = self._tile, self.shape, self._matrix_NW
        if self._out.numel() == 0:
            return
        with on_device_of(matrix):
            program[(ceil_div(self._slots + tile.rows, shape.rows) * self.across,)](
                matrix,
                *operands,
                tile.indices_E,
                tile.offsets_R1,
                self._parts_P2,
                self._out,
                self._workspace,
                self._slots,
                tile.rows,
                matrix.shape[0],
                tile.start,
                EDGES_PER_SEGMENT,
                *numbers,
                STRIDE=matrix.stride(0),
                SELF_LOOPS=tile.self_loops is SelfLoops.EXACTLY_ONE,
                ACCUMULATOR=accumulator(matrix.dtype),
                ROWS=shape.rows,
                COLUMNS=shape.columns,
                UNROLL=shape.unroll,
                num_warps=shape.warps,
                **constants,
            )

    def over_long_rows(self, program: Any, *operands: Tensor, **constants: Any) -> None:
        """Launch the slots of every long row into its row of ``out``. ``operands`` follow the workspace among the
        arguments."""
        self._add_up(program, *operands, across=self.across, COLUMNS=self.shape.columns, **constants)

    def add_sums(self) -> None:
        """Launch the same for slots that are plain sums, as wide as a row of ``out``."""
        width = self._out.shape[1]
        columns = Case(Kernel.SUM, width, self._workspace.itemsize).usual.columns
        blocks = ceil_div(width, columns)
        self._add_up(sum_slots, across=blocks, WIDTH=width, BLOCKS=blocks, COLUMNS=columns)

    def _add_up(self, program: Any, *operands: Tensor, across: int, **constants: Any) -> None:
        tile, carried = self._tile, self._tile.carried
        if not self._slots or self._out.numel() == 0:
            return
        before, after = (self._workspace,) * 2 if carried is None else carried.sums(self._workspace)
        with on_device_of(self._workspace):
            program[(self._slots * across,)](
                self._workspace,
                before,
                after,
                *operands,
                tile.offsets_R1,
                self._parts_P2,
                self._out,
                self._slots,
                tile.rows,
                tile.start,
                EDGES_PER_SEGMENT,
                ACCUMULATOR=accumulator(self._workspace.dtype),
                **constants,
            )
