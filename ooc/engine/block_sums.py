# SPDX-License-Identifier: Apache-2.0
"""Checksums of blocks, which verify at every read that the SSD returns the bytes that were stored.

A block that the run has written has the 64-bit sum of its bytes. The store has CRC-32Cs of whole chunks, while blocks
come in any order. Chunks and blocks divide each other into pieces. The CRCs of the pieces are kept, and when those of a
chunk are all known they are combined and compared with the chunk's (``ooc.storage.checksums``). From then on each piece
has its sum, too. Trained rows have a CRC-32C for each version, combined from those of its blocks when it is written. 14
bytes per piece are kept. Summing runs at 30 GB/s on one core, and at 13 GB/s at the first reading.
"""

import google_crc32c
import numpy as np
import numpy.typing as npt

from ooc.errors import SpillError
from ooc.plan.layout.grid import Grid
from ooc.storage.array import Array
from ooc.storage.checksums import combined, of_zeros, quick_sum

Memory = npt.NDArray[np.uint8]


class BlockSums:
    """Checksums of a matrix's blocks, by slab and number; those of ``array`` where the store has them. Used by one
    thread.

    A file without known checksums is trusted at its first reading.
    """

    def __init__(self, name: str, grid: Grid, array: Array | None = None, *, keeps_crcs: bool = False) -> None:
        """``keeps_crcs``: also keep CRCs of what is written, for ``written``."""
        self._name, self._grid, self._keeps_crcs = name, grid, keeps_crcs
        self._array = array if array is not None and array.has_checksums else None
        self._stored = np.zeros(0, dtype=np.uint32) if self._array is None else self._array.checksums()
        pieces = grid.slabs * grid.blocks + len(self._stored)
        self._sums, self._summed = np.zeros(pieces, dtype=np.uint64), np.zeros(pieces, dtype=bool)
        stored = pieces if keeps_crcs or self._array is not None else 0
        self._crcs, self._known = np.zeros(stored, dtype=np.uint32), np.zeros(stored, dtype=bool)
        self._compared = np.zeros(len(self._stored), dtype=bool)

    def write(self, slab: int, block: int, memory: Memory) -> None:
        """Note the bytes in ``memory`` of a block that is about to be written."""
        index = slab * self._grid.blocks + block
        self._sums[index], self._summed[index] = quick_sum(memory), True
        self._array = None  # the array's content is being replaced
        if self._keeps_crcs:
            self._crcs[index], self._known[index] = google_crc32c.extend(0, memory), True

    def written(self, rows: range) -> int | None:
        """Return the CRC-32C of the written ``rows``; None where the bytes of one block were not seen."""
        grid, checksum = self._grid, 0
        blocks = grid.blocks_with(rows)
        seen = slice(blocks.start, blocks.stop)
        if not (self._keeps_crcs and self._summed[seen].all() and self._known[seen].all()):
            return None
        for block in blocks:
            nbytes = len(grid.part(block, rows)) * grid.row_bytes(0)
            checksum = combined(checksum, int(self._crcs[block]), nbytes)
        return checksum

    def forget(self, slab: int, block: int) -> None:
        """Note that the block is about to be written from memory that cannot be seen, so that its sum is unknown."""
        self._summed[slab * self._grid.blocks + block] = False

    def read(self, slab: int, block: int, memory: Memory) -> None:
        """Check the block that was read to ``memory``; raise SpillError or StoreError where its bytes differ from those
        stored."""
        if self._array is None:
            if not self._agrees(slab * self._grid.blocks + block, memory):
                raise SpillError(f"{self._name}: the SSD returns other bytes of block {block} than were written there")
            return
        height, row_bytes = self._array.chunks[0], self._array.row_bytes
        start = block * self._grid.block_rows
        for chunk in range(start // height, -(-(start + self._grid.height(block)) // height)):
            rows = self._grid.part(block, _rows_of(self._array, chunk))
            agrees = self._agrees(block + chunk, memory[rows.start * row_bytes : rows.stop * row_bytes])
            if not agrees or not (self._compared[chunk] or self._compare(self._array, chunk)):
                raise self._array.damaged(chunk)

    def finish(self) -> None:
        """Check the chunks of which only a part was read; the rest of each is read for that."""
        if self._array is None:
            return
        height, row_bytes = self._array.chunks[0], self._array.row_bytes
        for chunk in np.flatnonzero(~self._compared).tolist():
            blocks = self._grid.blocks_with(_rows_of(self._array, chunk))
            if not blocks or not any(self._known[block + chunk] for block in blocks):
                continue
            for block in blocks:
                if not self._known[block + chunk]:
                    rows = self._grid.part(block, _rows_of(self._array, chunk))
                    offset = (block * self._grid.block_rows + rows.start - chunk * height) * row_bytes
                    self._crcs[block + chunk] = self._array.checksum(chunk, offset, len(rows) * row_bytes)
                    self._known[block + chunk] = True
            if not self._compare(self._array, chunk):
                raise self._array.damaged(chunk)

    def _agrees(self, index: int, memory: Memory) -> bool:
        """Return whether the bytes match the known sum; an unknown sum is noted."""
        total = quick_sum(memory)
        if self._summed[index]:
            return bool(self._sums[index] == total)
        if self._array is not None:
            checksum = google_crc32c.extend(0, memory)
            if self._known[index] and self._crcs[index] != checksum:
                return False
            self._crcs[index], self._known[index] = checksum, True
        self._sums[index], self._summed[index] = total, True
        return True

    def _compare(self, array: Array, chunk: int) -> bool:
        """Return False if all pieces of a chunk are known and their combined checksum is not the chunk's."""
        rows = _rows_of(array, chunk)
        blocks = self._grid.blocks_with(rows)
        if not self._known[blocks[0] + chunk : blocks[-1] + chunk + 1].all():
            return True
        checksum = 0
        for block in blocks:
            nbytes = len(self._grid.part(block, rows)) * array.row_bytes
            checksum = combined(checksum, int(self._crcs[block + chunk]), nbytes)
        if (beyond := (rows.stop - self._grid.rows) * array.row_bytes) > 0:
            padded = self._grid.rows == array.shape[0]
            tail = of_zeros(beyond) if padded else array.checksum(chunk, array.chunk_bytes - beyond, beyond)
            checksum = combined(checksum, tail, beyond)
        self._compared[chunk] = checksum == self._stored[chunk]
        return bool(self._compared[chunk])


def _rows_of(array: Array, chunk: int) -> range:
    """Return the rows of a chunk, which may extend beyond the matrix. Block b's piece of chunk c has the number b +
    c."""
    return range(chunk * array.chunks[0], (chunk + 1) * array.chunks[0])
