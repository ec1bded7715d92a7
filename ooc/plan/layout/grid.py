# SPDX-License-Identifier: Apache-2.0
"""How a matrix is cut into blocks, and where each block lies in its file.

A matrix of ``rows`` × ``columns`` is cut into slabs of ``slab_columns`` columns. A slab lies contiguously in the file,
row block after row block, so reading a slab, or a block of it, is one sequential read. Slabs start on 4 KiB boundaries.
A block is one slab's part of ``block_rows`` rows: the unit of I/O, of caching and of fate. Matrices have blocks of
different heights, so that each block is about one frame in size.
"""

from dataclasses import dataclass
from functools import cache
from math import isqrt

ALIGNMENT_BYTES = 4096


def align_up(nbytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the least multiple of ``alignment_bytes`` that is at least ``nbytes``."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True, slots=True)
class Grid:
    """The block grid of one matrix: sizes in rows and columns, offsets in bytes."""

    rows: int
    columns: int
    itemsize: int
    block_rows: int
    slab_columns: int

    @property
    def blocks(self) -> int:
        """The number of row blocks."""
        return -(-self.rows // self.block_rows)

    @property
    def slabs(self) -> int:
        return -(-self.columns // self.slab_columns)

    def height(self, block: int) -> int:
        """Return the rows of row block ``block``; the last one may be shorter."""
        return min(self.block_rows, self.rows - block * self.block_rows)

    def width(self, slab: int) -> int:
        """Return the columns of slab ``slab``; the last one may be narrower."""
        return min(self.slab_columns, self.columns - slab * self.slab_columns)

    def row_bytes(self, slab: int) -> int:
        """Return the bytes of a row of slab ``slab``."""
        return self.width(slab) * self.itemsize

    def blocks_with(self, rows: range) -> range:
        """Return the row blocks that contain some of ``rows``, which may extend beyond the last row."""
        stop = min(rows.stop, self.rows)
        return range(rows.start // self.block_rows, -(-stop // self.block_rows)) if stop > rows.start else range(0)

    def part(self, block: int, rows: range) -> range:
        """Return which rows of row block ``block``, counted from its first, are in ``rows``."""
        start = block * self.block_rows
        return range(self.height(block))[max(0, rows.start - start) : max(0, rows.stop - start)]

    def slab_nbytes(self, slab: int) -> int:
        return self.rows * self.width(slab) * self.itemsize

    def slab_offset(self, slab: int) -> int:
        """Return the byte offset of slab ``slab`` in the file."""
        return slab * align_up(self.rows * self.slab_columns * self.itemsize)

    def block_nbytes(self, slab: int, block: int) -> int:
        return self.height(block) * self.width(slab) * self.itemsize

    def block_offset(self, slab: int, block: int) -> int:
        """Return the byte offset in the file of row block ``block`` of slab ``slab``."""
        return self.slab_offset(slab) + block * self.block_rows * self.width(slab) * self.itemsize

    @property
    def file_nbytes(self) -> int:
        """Bytes of the file, with the last slab rounded up to the alignment."""
        last = self.slabs - 1
        return self.slab_offset(last) + align_up(self.slab_nbytes(last))

    def parts(self, rows: range | None) -> list[tuple[int, int]]:
        """Return the offset and bytes of each stretch of the file with blocks that contain some of ``rows`` (None: all
        rows)."""
        if rows is None:
            return [(0, self.file_nbytes)]
        blocks = self.blocks_with(rows)
        nbytes = self.block_rows * self.itemsize * len(blocks)
        return [
            (self.block_offset(slab, blocks.start), nbytes * self.width(slab)) for slab in range(self.slabs) if blocks
        ]


def block_height(*, step_rows: int, row_bytes: int, frame_bytes: int) -> int:
    """Return the most rows of ``row_bytes`` that fit a frame and are ``step_rows`` times a power of two, or a divisor
    of it."""
    fitting = frame_bytes // row_bytes
    if fitting < step_rows:
        return divisor_below(step_rows, fitting)
    return step_rows << (fitting // step_rows).bit_length() - 1


@cache
def divisor_below(rows: int, most: int) -> int:
    """Return the largest divisor of ``rows`` that is at most ``most``, or 1."""
    return max([1, *(one for one in divisors(rows) if one <= most)])


@cache
def divisors(rows: int) -> tuple[int, ...]:
    """Return all divisors of ``rows``, ascending."""
    small = [number for number in range(1, isqrt(rows) + 1) if rows % number == 0]
    return tuple(sorted({one for number in small for one in (number, rows // number)}))
