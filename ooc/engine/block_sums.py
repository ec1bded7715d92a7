# SPDX-License-Identifier: Apache-2.0
"""Whether the SSD returns the bytes that were stored: checksums of every block, whenever it is read or written.

A block of the run's own has the 64-bit sum of what was written. The store has CRC-32Cs of whole chunks, and blocks come
in any order: those of the pieces that blocks and chunks cut each other into are kept, and when a chunk's are all known
they are combined and compared with the chunk's (``ooc.storage.checksums``). From then on each piece has its sum, too.
Learnt rows have a CRC-32C of each version, which its blocks' are combined to when it is written.
14 bytes a piece are kept; 30 GB/s are summed on one core, and 13 GB/s at the first reading.
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
    """Checksums of a matrix's blocks, by slab and number; of ``array`` where the store has it. One thread uses them.

    A file whose checksums nobody has kept is believed at its first reading.
    """

    def __init__(self, name: str, grid: Grid, array: Array | None = None, *, keeps_crcs: bool = False) -> None:
        """``keeps_crcs``: of what is written, too, for ``written``."""
        self._name, self._grid, self._keeps_crcs = name, grid, keeps_crcs
        self._array = array if array is not None and array.has_checksums else None
        self._stored = np.zeros(0, dtype=np.uint32) if self._array is None else self._array.checksums()
        pieces = grid.slabs * grid.blocks + len(self._stored)
        self._sums, self._summed = np.zeros(pieces, dtype=np.uint64), np.zeros(pieces, dtype=bool)
        stored = pieces if keeps_crcs or self._array is not None else 0
        self._crcs, self._known = np.zeros(stored, dtype=np.uint32), np.zeros(stored, dtype=bool)
        self._compared = np.zeros(len(self._stored), dtype=bool)

    def write(self, slab: int, block: int, memory: Memory) -> None:
        """The block is about to be written as it is in ``memory``."""
        index = slab * self._grid.blocks + block
        self._sums[index], self._summed[index] = quick_sum(memory), True
        self._array = None  # what the array had is gone
        if self._keeps_crcs:
            self._crcs[index], self._known[index] = google_crc32c.extend(0, memory), True

    def written(self, rows: range) -> int | None:
        """The CRC-32C of ``rows``, which blocks were written with; None where one was not seen."""
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
        """The block is about to be written out of memory that cannot be seen."""
        self._summed[slab * self._grid.blocks + block] = False

    def read(self, slab: int, block: int, memory: Memory) -> None:
        """The block has come to ``memory``. SpillError or StoreError where it is another than was stored."""
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
        """Compare what has been read of chunks that are not read whole; the rest of each is read for that."""
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
        """Whether it is what is known; it is from now on."""
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
        """False where all pieces of a chunk are known and come to another checksum than it has."""
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
    """Those of a chunk, which may go on behind the last. The piece that a block has of it is number block + chunk."""
    return range(chunk * array.chunks[0], (chunk + 1) * array.chunks[0])
