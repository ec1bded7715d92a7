# SPDX-License-Identifier: Apache-2.0
"""Matrices as the plan has placed them: rows in memory, rows on the SSD, and how to ask for a block of them."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ooc.plan.grid import Grid, align_up
from ooc.plan.plan import MatrixPlan
from ooc.prefetch.arena import Bytes
from ooc.prefetch.engine import ChunkFile, OpenFile, Span
from ooc.prefetch.stream import Request
from ooc.storage.array import Array


def as_matrix(memory: Bytes, dtype: torch.dtype, rows: int, columns: int, *, start: int = 0) -> Tensor:
    """[rows, columns] over the bytes of ``memory`` from ``start``; no copy."""
    nbytes = rows * columns * dtype.itemsize
    return torch.from_numpy(memory[start : start + nbytes]).view(dtype).view(rows, columns)


@dataclass(slots=True)
class TieredMatrix:
    """One matrix at run time. ``resident`` holds its first rows, by program (``""``: all programs).

    ``file`` is its spill file; a matrix of the store has ``array`` instead.
    """

    name: str
    planned: MatrixPlan
    dtype: torch.dtype
    array: Array | None = None
    file: OpenFile | None = None
    resident: dict[str, Tensor] = field(default_factory=dict)

    @property
    def grid(self) -> Grid:
        return self.planned.grid

    def resident_rows(self, program: str) -> Tensor | None:
        """The rows in memory while ``program`` runs, [resident_rows, columns]."""
        return self.resident.get("", self.resident.get(program))

    def in_memory(self, block: int) -> bool:
        """Whether row block ``block`` is among the resident rows."""
        return block * self.grid.block_rows < self.planned.resident_rows

    def request(self, block: int) -> Request:
        """Row block ``block``, all slabs, each at the place in a slot that ``pieces`` expects."""
        if self.array is not None:
            start = block * self.grid.block_rows
            return _request(self.array_spans(start, start + self.grid.height(block)))
        spans, places, at = [], [], 0
        for slab in range(self.grid.slabs):
            span = self.block_span(slab, block)
            spans.append(span)
            places.append((at, at + span.nbytes))
            at += self.piece_stride(slab, block)
        return Request(tuple(spans), tuple(places))

    def piece_stride(self, slab: int, block: int) -> int:
        return align_up(self.grid.block_nbytes(slab, block))

    def block_span(self, slab: int, block: int) -> Span:
        assert self.file is not None
        return Span(self.file, self.grid.block_offset(slab, block), self.grid.block_nbytes(slab, block), self.name)

    def slab_request(self, slab: int) -> Request:
        """A whole slab, contiguous."""
        assert self.file is not None
        nbytes = self.grid.slab_nbytes(slab)
        return Request((Span(self.file, self.grid.slab_offset(slab), nbytes, self.name),), ((0, nbytes),))

    def array_spans(self, start: int, stop: int) -> list[Span]:
        """Rows of the store's array, chunk by chunk."""
        assert self.array is not None
        return spans_of(self.array, start, stop)

    def pieces(self, slot: Bytes, block: int) -> list[Tensor]:
        """The slabs of row block ``block`` lying in ``slot``, each [height, width]."""
        found, at = [], 0
        height = self.grid.height(block)
        for slab in range(self.grid.slabs):
            found.append(as_matrix(slot, self.dtype, height, self.grid.width(slab), start=at))
            at += self.piece_stride(slab, block)
        return found

    def close(self) -> None:
        self.resident.clear()
        if self.file is not None:
            self.file.close()
            self.file = None


def spans_of(array: Array, start: int, stop: int) -> list[Span]:
    """The spans of rows ``start:stop`` of a store's array."""
    return [Span(ChunkFile(e.path), e.offset, e.nbytes, array.name) for e in array.extents(start, stop)]


def _request(spans: list[Span]) -> Request:
    """Spans laid one behind the other."""
    ends = np.cumsum([0, *(span.nbytes for span in spans)]).tolist()
    return Request(tuple(spans), tuple(itertools.pairwise(ends)))


def index_request(array: Array, start: int, stop: int) -> tuple[Request, int]:
    """Elements ``start:stop`` of an index array, widened to whole pages → (request, bytes before the first element)."""
    first = start * array.itemsize // 4096 * 4096 // array.itemsize
    last = min(align_up(stop * array.itemsize) // array.itemsize, array.padded_rows)
    if stop <= start:
        return Request((), ()), 0
    return _request(spans_of(array, first, last)), (start - first) * array.itemsize
