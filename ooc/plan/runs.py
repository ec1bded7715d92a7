# SPDX-License-Identifier: Apache-2.0
"""Sums that are not in memory whole: what tiles hand to rows anywhere waits on the SSD, and is added up when read.

What a tile hands out (``Pull.scattered``) is a *run* of entries, each a row's number with its values, sorted by row.
Rows are cut into *buckets*, and so are runs; every bucket gathers its pieces of them, in the order of the tiles, in a
*chunk* of memory, and a full chunk is appended to one file. A pass that reads the rows of a bucket has its chunks read
in the order in which they were written and adds them up, entry after entry. So every row's sum has the terms, and the
order of additions, that it has in memory. It is how external sorts distribute what does not fit (D. E. Knuth, The Art
of Computer Programming 3, 5.4.9), but that nothing needs sorting within a bucket.

How many entries go to which rows depends on nothing but the graph and its tiles, and is counted beforehand: the size of
the file and the bytes moved are known. Memory is a chunk a bucket while runs are written, and two buckets' sums while
they are read: it grows with the root of the matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ooc.plan.grid import align_up

CHUNKS_LEAVING = 8
"""Chunks that are being written while others are filled."""
CHUNKS_ARRIVING = 16
"""Chunks that are read ahead."""
_CHUNK_BYTES = tuple(1 << power for power in range(18, 11, -1))
"""Sizes of a chunk, the largest first: from what a disk moves at nearly its full rate down to a page."""
_SHARE = 8
"""A chunk is as large as leaves all that runs take in memory below this part of the matrix."""


@dataclass(frozen=True, slots=True)
class Runs:
    """How the sums of ``rows`` × ``columns`` values of ``itemsize`` bytes are spilled. ``entries``: by bucket of
    ``bucket_rows`` rows, how many entries it gets in all. An entry's number is an integer of ``itemsize`` bytes."""

    rows: int
    columns: int
    itemsize: int
    bucket_rows: int
    chunk_bytes: int
    entries: tuple[int, ...]

    @property
    def buckets(self) -> int:
        return len(self.entries)

    @property
    def chunk_entries(self) -> int:
        """Entries of a full chunk."""
        return self.chunk_bytes // _entry_bytes(self.columns, self.itemsize)

    def chunk_nbytes(self, entries: int) -> int:
        """Bytes that a chunk of so many entries takes in the file: whole pages."""
        return align_up(entries * _entry_bytes(self.columns, self.itemsize))

    def bucket_nbytes(self, bucket: int) -> int:
        """Bytes of a bucket's chunks in the file: all full but the last."""
        full, rest = divmod(self.entries[bucket], self.chunk_entries)
        return full * self.chunk_nbytes(self.chunk_entries) + self.chunk_nbytes(rest)

    def height(self, bucket: int) -> int:
        """Rows of a bucket; the last one may be shorter."""
        return min(self.bucket_rows, self.rows - bucket * self.bucket_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the file: written once, and read once."""
        return sum(self.bucket_nbytes(bucket) for bucket in range(self.buckets))

    @property
    def sums_nbytes(self) -> int:
        """Memory of one bucket's sums."""
        return _sums_nbytes(self.rows, self.columns, self.itemsize, self.bucket_rows)

    @property
    def writing_nbytes(self) -> int:
        """Memory while runs are written: a chunk a bucket, and those that are leaving."""
        return _writing_nbytes(self.buckets, self.chunk_bytes)

    @property
    def reading_nbytes(self) -> int:
        """Memory while they are read: two buckets' sums, chunks that arrive, and the numbers of one's entries."""
        return _reading_nbytes(self.buckets, self.chunk_bytes, self.sums_nbytes)


def cut_runs(*, rows: int, columns: int, itemsize: int, step_rows: int, tile_rows: int, handed: Sequence[int]) -> Runs:
    """The buckets and chunks of a matrix that is read in steps of ``step_rows`` rows, whole ones of which make a
    bucket. ``handed[i]``: how many entries its tiles 0…i-1 of ``tile_rows`` rows get."""
    entry, whole = _entry_bytes(columns, itemsize), rows * columns * itemsize

    def memory(height: int, chunk: int) -> int:
        buckets = -(-rows // height)
        reading = _reading_nbytes(buckets, chunk, _sums_nbytes(rows, columns, itemsize, height))
        return max(_writing_nbytes(buckets, chunk), reading)

    heights = [step_rows]
    while heights[-1] < rows:
        heights.append(2 * heights[-1])
    for wanted in _CHUNK_BYTES:
        chunk = align_up(max(1, wanted // entry) * entry)
        height = min(heights, key=lambda height: memory(height, chunk))
        if _SHARE * memory(height, chunk) <= whole:
            break
    tiles = -(-rows // tile_rows)
    starts = [handed[min(tiles, start // tile_rows)] for start in range(0, rows, height)]
    stops = [*starts[1:], handed[tiles]]
    entries = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Runs(rows, columns, itemsize, height, chunk, entries)


def _entry_bytes(columns: int, itemsize: int) -> int:
    return (columns + 1) * itemsize


def _sums_nbytes(rows: int, columns: int, itemsize: int, bucket_rows: int) -> int:
    return align_up(min(rows, bucket_rows) * columns * itemsize)


def _writing_nbytes(buckets: int, chunk_bytes: int) -> int:
    return (buckets + CHUNKS_LEAVING) * chunk_bytes


def _reading_nbytes(buckets: int, chunk_bytes: int, sums_nbytes: int) -> int:
    return min(2, buckets) * sums_nbytes + (CHUNKS_ARRIVING + 1) * chunk_bytes
