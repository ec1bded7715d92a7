# SPDX-License-Identifier: Apache-2.0
"""Matrices and index arrays as the plan has cut them: where each block lies on the SSD, and as what it is seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.plan.layout.grid import Grid
from ooc.prefetch.engine import ChunkFile, OpenFile, Span
from ooc.prefetch.frames import Workspace
from ooc.storage.array import Array


def as_matrix(memory: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """[rows, columns] over the first bytes of ``memory``, uint8; no copy."""
    return memory[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)


@dataclass(slots=True)
class BlockedMatrix:
    """One matrix at run time; its blocks are numbered from ``base``, of ``dtype``; in a region it is ``region_dtype``.

    ``file`` is its spill file; a matrix of the store has ``array`` instead.
    """

    name: str
    grid: Grid
    dtype: torch.dtype
    region_dtype: torch.dtype
    base: int
    array: Array | None = None
    file: OpenFile | None = None

    def number(self, slab: int, block: int) -> int:
        """The number of a block throughout the plan."""
        return self.base + slab * self.grid.blocks + block

    def spans(self, slab: int, block: int) -> Sequence[Span]:
        """Where a block lies on the SSD."""
        grid = self.grid
        if self.array is not None:
            start = block * grid.block_rows
            return spans_of(self.array, start, start + grid.height(block))
        assert self.file is not None
        return [Span(self.file, grid.block_offset(slab, block), grid.block_nbytes(slab, block), self.name)]

    def rows(self, workspace: Workspace[Any], slab: int, block: int) -> Tensor:
        """The block where ``workspace`` has it, [height, width]."""
        grid = self.grid
        return workspace.matrix(self.number(slab, block), self.dtype, grid.height(block), grid.width(slab))

    def rows_of(self, memory: Tensor, slab: int, block: int) -> Tensor:
        """The block that lies in ``memory``, uint8, [height, width]."""
        return as_matrix(memory, self.dtype, self.grid.height(block), self.grid.width(slab))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def spans_of(array: Array, start: int, stop: int) -> Sequence[Span]:
    """The spans of rows ``start:stop`` of a store's array."""
    return [Span(ChunkFile(e.path), e.offset, e.nbytes, array.name) for e in array.extents(start, stop)]
