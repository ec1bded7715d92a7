# SPDX-License-Identifier: Apache-2.0
"""Matrices in the blocks of the plan, and the rows of them that a tile reads and writes, wherever the plan has put
them.

Blocks are in frames, or a whole matrix is in a region; in both cases a tile's rows are a view of that memory. ``open``
is called when a step begins, on the thread that moves blocks; ``tile``, ``put`` and ``take`` on any thread.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ooc.engine.block_sums import BlockSums
from ooc.engine.exchange import Exchange
from ooc.kernels.tensors import first_rows, typed
from ooc.plan.layout.grid import Grid
from ooc.prefetch.engine import ChunkFile, OpenFile, Span, open_file
from ooc.prefetch.frames import Workspace
from ooc.storage.array import Array
from ooc.storage.versioned_array import VersionedArray

T = TypeVar("T")
_ALIGNMENT = 64
"""The alignment of memory that torch allocates for a tensor, in bytes."""


def as_matrix(memory: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Return [rows, columns] as a view of the first bytes of ``memory``, uint8."""
    return memory[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)


@dataclass(slots=True)
class BlockedMatrix:
    """A matrix at run time. Its blocks of ``dtype`` are numbered from ``base``; in a region it has ``region_dtype``.

    ``file`` is its spill file; a matrix of the store has ``array`` instead. A trained matrix has an array of several
    versions. Then ``versions`` has a file for each version that was written to, by path, and ``checksums`` are by path,
    too. ``own``: the rows that this process reads and writes in files shared by several processes (None: all).
    """

    name: str
    grid: Grid
    dtype: torch.dtype
    region_dtype: torch.dtype
    base: int
    array: Array | None = None
    file: OpenFile | None = None
    own: range | None = None
    versions: dict[Path, OpenFile] = field(default_factory=dict)
    checksums: dict[Path | None, BlockSums] = field(default_factory=dict)

    def number(self, slab: int, block: int) -> int:
        """Return the number of a block in the plan."""
        return self.base + slab * self.grid.blocks + block

    def spans(self, slab: int, block: int, *, writing: bool = False) -> Sequence[Span]:
        """Return where a block is on the SSD, or is to be written."""
        grid, rows = self.grid, self._rows(block)
        if isinstance(self.array, VersionedArray) and writing:
            path = self.array.next_path
            if path not in self.versions:
                self.versions[path] = open_file(path, os.O_RDWR | os.O_CLOEXEC)
            place = self.array.extent(path, rows.start, len(rows))
            return [Span(self.versions[path], place.offset, place.nbytes, self.name)]
        if self.array is not None:
            extents = self.array.extents(rows.start, rows.stop)
            return [Span(ChunkFile(e.path), e.offset, e.nbytes, self.array.name) for e in extents]
        assert self.file is not None
        return [Span(self.file, grid.block_offset(slab, block), grid.block_nbytes(slab, block), self.name)]

    def part(self, slab: int, block: int) -> slice:
        """Return which bytes of a block in memory are stored on the SSD."""
        row_bytes, rows = self.grid.row_bytes(slab), self._part(block)
        return slice(rows.start * row_bytes, rows.stop * row_bytes)

    def _part(self, block: int) -> range:
        return range(self.grid.height(block)) if self.own is None else self.grid.part(block, self.own)

    def _rows(self, block: int) -> range:
        start, part = block * self.grid.block_rows, self._part(block)
        return range(start + part.start, start + part.stop)

    def sums(self, *, written: bool = False) -> BlockSums:
        """Return the checksums of the blocks that are read, or of those that are ``written``."""
        path, learnt = None, isinstance(self.array, VersionedArray)
        if isinstance(self.array, VersionedArray):
            path = self.array.next_path if written else self.array.current_path
        if path not in self.checksums:
            stored = None if learnt and (written or self.own is not None) else self.array
            self.checksums[path] = BlockSums(self.name, self.grid, stored, keeps_crcs=learnt)
        return self.checksums[path]

    def rows(self, workspace: Workspace, slab: int, block: int) -> Tensor:
        """Return the block in ``workspace``, [height, width]."""
        grid = self.grid
        return workspace.matrix(self.number(slab, block), self.dtype, grid.height(block), grid.width(slab))

    def close(self) -> None:
        for file in (self.file, *self.versions.values()):
            if file is not None:
                file.close()
        self.file = None
        self.versions.clear()


class _Operand:
    """Some slabs of a matrix, in frames; or the ``whole`` matrix in memory."""

    def __init__(self, matrix: BlockedMatrix, workspace: Workspace, slabs: range, whole: Tensor | None) -> None:
        self._matrix = matrix
        self._workspace = workspace
        self._slabs = slabs
        self._whole = whole
        self._rows_of_block = matrix.grid.block_rows if len(slabs) == 1 and whole is None else 0
        self._blocks: OpenBlocks[list[Tensor]] = OpenBlocks()

    def open(self, start: int, stop: int) -> None:
        """Prepare to take or put rows ``start:stop``."""
        if self._whole is None:
            self._blocks.open(self._matrix.grid.blocks_with(range(start, stop)), self._rows)

    def _rows(self, block: int) -> list[Tensor]:
        return [self._matrix.rows(self._workspace, k, block) for k in self._slabs]

    def _in_one(self, start: int, stop: int) -> Tensor | None:
        """Return rows ``start:stop`` if they are in one block of the only slab, as those of most tiles are."""
        height, rows = self._rows_of_block, self._matrix.grid.rows
        if not height or stop > rows:
            return None
        block = start // height
        first, last = start - block * height, stop - block * height
        if last > height:
            return None
        piece = self._blocks[block][0]
        return piece[first:last] if first or (last < height and stop < rows) else piece

    def _of_tile(self, start: int, stop: int) -> list[list[Tensor]]:
        """Return rows ``start:stop`` by block and slab."""
        grid, found = self._matrix.grid, []
        height, rows = grid.block_rows, grid.rows
        for block in grid.blocks_with(range(start, stop)):
            pieces, first, last = self._blocks[block], start - block * height, stop - block * height
            if first > 0 or (last < height and stop < rows):
                pieces = [piece[max(0, first) : last] for piece in pieces]
            found.append(pieces)
        return found

    def forget(self) -> None:
        """Forget the blocks that were opened: no rows of them are taken or put any more."""
        self._blocks = OpenBlocks()


class Input(_Operand):
    """A matrix whose rows a pass loads, as values of ``dtype`` (None: unchanged): all ``columns`` or some of them."""

    def __init__(
        self,
        matrix: BlockedMatrix,
        workspace: Workspace,
        *,
        whole: Tensor | None,
        dtype: torch.dtype | None,
        columns: range | None = None,
    ) -> None:
        grid = matrix.grid
        columns = range(grid.columns) if columns is None else columns
        slabs = range(columns.start // grid.slab_columns, -(-columns.stop // grid.slab_columns))
        super().__init__(matrix, workspace, slabs, whole)
        skipped = slabs.start * grid.slab_columns
        self._taken = slice(columns.start - skipped, columns.stop - skipped)
        self._all = len(columns) == grid.columns
        self._columns = columns
        self._dtype = dtype or matrix.dtype
        self._none = torch.empty(0, len(columns), dtype=self._dtype, device=workspace.place)

    @property
    def makes_rows(self) -> bool:
        """Whether the rows of a tile are always a new tensor, joined from several slabs with all of their columns."""
        return self._whole is None and self._all and len(self._slabs) > 1

    def tile(self, start: int, stop: int) -> Tensor:
        """Return rows ``start:stop``, or as many as the matrix has; copied only where they are in several frames."""
        if start >= min(stop, self._matrix.grid.rows):
            return self._none
        piece = self._in_one(start, stop)
        if piece is not None:
            piece = typed(piece, self._dtype)
            return piece if self._all else piece[:, self._taken]
        if self._whole is not None:
            rows = typed(self._whole[start:stop], self._dtype)
            # Bits of what is computed may depend on how rows lie, which is the plan's affair where some are spare.
            return rows.contiguous() if self._all else rows[:, self._columns.start : self._columns.stop]
        blocks = self._of_tile(start, stop)
        if len(blocks) == 1:
            pieces = blocks[0]
            rows = typed(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1), self._dtype)
        else:  # concatenate
            heights, widths = [len(pieces[0]) for pieces in blocks], [piece.shape[1] for piece in blocks[0]]
            rows = torch.empty(sum(heights), sum(widths), dtype=self._dtype, device=self._workspace.place)
            for part, pieces in zip(torch.split(rows, heights), blocks, strict=True):
                for target, piece in zip(torch.split(part, widths, dim=1), pieces, strict=True):
                    target.copy_(piece)
        return rows if self._all else rows[:, self._taken]


class Output(_Operand):
    """A matrix whose rows a row pass stores: slabs in a region, slabs in frames, or both.

    Values are rounded to the matrix's dtype wherever they are kept, so that their place makes no difference.
    """

    def __init__(
        self,
        matrix: BlockedMatrix,
        workspace: Workspace,
        *,
        whole: Tensor | None,
        direct: Sequence[Tensor],
        framed: range,
        first_row: int = 0,
    ) -> None:
        """``first_row``: the first row of the ``direct`` slabs."""
        super().__init__(matrix, workspace, framed, whole)
        self._direct, self._first_row = direct, first_row
        self._is_framed = not direct and whole is None and matrix.grid.slabs == len(framed) == 1
        regions = direct if whole is None else [whole]
        self._rounds_first = any(region.dtype != matrix.dtype for region in regions)
        """Whether a region has a wider dtype than the matrix. Otherwise the copy itself rounds, in half the time."""
        has_one = matrix.grid.slabs == 1 and regions and not self._rounds_first and regions[0].is_contiguous()
        self._region = regions[0] if has_one else None

    def place(self, start: int, stop: int, dtype: torch.dtype) -> Tensor | None:
        """Return the memory of rows ``start:stop`` in ``dtype``, if results may be computed directly there.

        All columns must be in one place, aligned as torch's own allocations are. None: compute elsewhere and ``put``.
        """
        found: Tensor | None = None
        if stop > self._matrix.grid.rows:
            return None
        if self._region is not None:
            found = self._region[start - self._first_row : stop - self._first_row]
        elif self._is_framed:
            found = self._in_one(start, stop)
        return found if found is not None and found.dtype == dtype and found.data_ptr() % _ALIGNMENT == 0 else None

    def put(self, start: int, stop: int, rows: Tensor) -> None:
        """Store ``rows`` as rows ``start:stop``, as far as the matrix has them."""
        piece = self._in_one(start, stop) if self._is_framed else None
        if piece is not None and piece.shape[0] == rows.shape[0]:
            piece.copy_(rows)
            return
        grid = self._matrix.grid
        stop = min(stop, grid.rows)
        if start >= stop:
            return
        rows = first_rows(rows, stop - start)
        if self._rounds_first:
            rows = typed(rows, self._matrix.dtype)
        if self._whole is not None:
            self._whole[start:stop].copy_(rows)
            return
        slabs = (rows,) if grid.slabs == 1 else torch.split(rows, grid.slab_columns, dim=1)
        for region, slab in zip(self._direct, slabs, strict=False):
            region[start - self._first_row : stop - self._first_row].copy_(slab)
        blocks, at = self._of_tile(start, stop), 0
        for pieces in blocks:
            for k, piece in zip(self._slabs, pieces, strict=True):
                piece.copy_(slabs[k] if len(blocks) == 1 else slabs[k][at : at + len(piece)])
            at += len(pieces[0]) if pieces else 0


class Sums:
    """A whole matrix in memory that tiles scatter to: zeros at first, then added to in the order of the tiles, by one
    process after another."""

    def __init__(self, whole: Tensor, exchange: Exchange | None = None) -> None:
        self._whole = whole.zero_()
        self._exchange = exchange
        self._hand_on: Callable[[], None] | None = None

    def add(self, rows_S: Tensor, values_SC: Tensor) -> None:
        """Add to some rows, each at most once; rows beyond the matrix's end are ignored."""
        self._take()
        if rows_S.shape[0] and int(rows_S.max()) >= self._whole.shape[0]:
            inside_S = rows_S < self._whole.shape[0]
            rows_S, values_SC = rows_S[inside_S], values_SC[inside_S]
        self._whole.index_add_(0, rows_S, values_SC)

    def _take(self) -> None:
        """Continue from the sums of the processes before this one.

        This may not happen before the first tile, since those processes must first be sent what they pull.
        """
        if self._exchange is not None and self._hand_on is None:
            self._hand_on = self._exchange.in_turn(self._whole)

    def finish(self) -> None:
        """Finish the sums, and pass them on to the next process."""
        self._take()
        if self._hand_on is not None:
            self._hand_on()


class OpenBlocks(Generic[T]):
    """Views of the blocks of this step and of the one before it, whose tiles may still be computed.

    Older views are released: small objects that outlive many tiles fragment the heap. Views of the step before remain
    available while the next one opens.
    """

    def __init__(self) -> None:
        self._now: dict[int, T] = {}
        self._before: dict[int, T] = {}

    def open(self, blocks: range, view: Callable[[int], T]) -> None:
        now = {}
        for block in blocks:
            known = self._now.get(block)
            now[block] = view(block) if known is None else known
        self._before = self._now  # in this order, so that readers find every block in one of both
        self._now = now

    def __getitem__(self, block: int) -> T:
        found = self._now.get(block)
        return self._before[block] if found is None else found
