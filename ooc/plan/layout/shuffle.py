# SPDX-License-Identifier: Apache-2.0
"""External shuffles: rows go through a file from where they are made to the rows that need them, without random I/O.

The rows that need others are divided into *buckets*. Whoever makes a row appends it, with its number, to a *chunk* of
memory for every bucket that needs it. A full chunk is written to the bucket's part of one file, and the part is read
from beginning to end when the bucket is computed. External sorts distribute data in the same way (D. E. Knuth, The Art
of Computer Programming 3, 5.4.9), but nothing needs sorting within a bucket here. There are two kinds:

- ``PartialSums``: what tiles add to rows anywhere (``Pull.scattered``), ascending within a tile. A bucket's entries are
  added up in the order in which they were written, tile after tile. So every sum has the same terms in the same order
  as it has in memory.
- ``BucketedRows``: the rows that an opaque layer gathers. A row goes to each bucket that has an edge from it, or, if
  sources and targets are of one type, that has it as a target. Entries of a bucket ascend. The bytes written grow with
  the number of sources that targets of different buckets share; at most, one row is written for each edge.

The number of entries of each bucket depends only on the graph and its tiles. It is counted beforehand, so the size of
the file and the bytes moved are known. (For links, which are drawn anew for every step, it is an upper bound.) Writing
needs memory for one chunk a bucket; reading needs memory for two buckets' sums or rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from ooc.plan.layout.grid import align_up

CHUNKS_LEAVING = 8
"""Chunks that are being written while others are filled."""
CHUNKS_ARRIVING = 16
"""Chunks of partial sums that are read ahead."""
_CHUNK_BYTES = tuple(1 << power for power in range(18, 11, -1))
"""Sizes of a chunk in bytes, the largest first: from what a disk moves at almost its full rate down to a page."""
_CHUNK_SHARE = 8
"""Chunks are as large as possible while partial sums take less than this fraction (1/8) of the matrix's memory."""
_PLACE_BYTES = 8
"""Bytes for each row of a bucket that is read: its number, stored once more to be searched."""

GatheredRows = Callable[[int, int, int], Sequence[Sequence[int]]]
"""A function of the number of targets, the number of source rows, and a height. It returns, for every power of two k up
to one bucket of all targets, how many rows each bucket of height · 2^k targets gathers. Exact for a graph that is
there; an upper bound for one of which only degrees are known."""


@dataclass(frozen=True, slots=True)
class Shuffle(ABC):
    """A shuffle of ``rows`` rows of ``columns`` values of ``itemsize`` bytes. ``entries``: the number of entries of
    each bucket of ``bucket_rows`` rows; each entry includes its row's number, an integer of ``itemsize`` bytes. A
    bucket's part of the file has whole pages, and the next one's follows it."""

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
    def entry_bytes(self) -> int:
        return (self.columns + 1) * self.itemsize

    @property
    def filled_bytes(self) -> int:
        """Bytes of a full chunk that hold entries."""
        return self.chunk_bytes

    def bucket_nbytes(self, bucket: int) -> int:
        """Return the bytes of a bucket's part of the file: full chunks and the remainder."""
        full, rest = divmod(self.entries[bucket] * self.entry_bytes, self.filled_bytes)
        return full * self.chunk_bytes + align_up(rest)

    def offsets(self) -> list[int]:
        """Return the offset of every bucket's part of the file."""
        return list(accumulate(map(self.bucket_nbytes, range(self.buckets)), initial=0))[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the file, all of which are written."""
        return sum(map(self.bucket_nbytes, range(self.buckets)))

    @abstractmethod
    def rows_read(self, rows: int) -> int:
        """Return how many rows have their buckets read by a pass over ``rows`` rows."""

    def read_nbytes(self, rows: int) -> int:
        """Return the bytes that a pass over ``rows`` rows reads."""
        return sum(map(self.bucket_nbytes, range(-(-self.rows_read(rows) // self.bucket_rows))))

    @property
    def writing_nbytes(self) -> int:
        """Bytes of memory while it is written: one chunk for each bucket, and the chunks being written out."""
        return (self.buckets + CHUNKS_LEAVING) * self.chunk_bytes

    @property
    @abstractmethod
    def reading_nbytes(self) -> int:
        """Bytes of memory while it is read."""

    @property
    def memory_nbytes(self) -> int:
        """Bytes of memory of a pass that writes or reads it, whichever takes more."""
        return max(self.writing_nbytes, self.reading_nbytes)


@dataclass(frozen=True, slots=True)
class PartialSums(Shuffle):
    """How sums of ``rows`` rows are spilled. No entry is split between two chunks, since chunks are added up one by
    one."""

    @property
    def filled_bytes(self) -> int:
        return self.chunk_bytes // self.entry_bytes * self.entry_bytes

    def rows_read(self, rows: int) -> int:
        return self.rows

    def height(self, bucket: int) -> int:
        """Return the rows of a bucket; the last one may be shorter."""
        return min(self.bucket_rows, self.rows - bucket * self.bucket_rows)

    @property
    def sums_nbytes(self) -> int:
        """Bytes of one bucket's sums in memory."""
        return align_up(min(self.rows, self.bucket_rows) * self.columns * self.itemsize)

    @property
    def reading_nbytes(self) -> int:
        """Bytes for two buckets' sums, arriving chunks, and the row numbers of one chunk's entries."""
        return min(2, self.buckets) * self.sums_nbytes + (CHUNKS_ARRIVING + 1) * self.chunk_bytes


@dataclass(frozen=True, slots=True)
class BucketedRows(Shuffle):
    """How the first ``rows`` rows of a source go to the buckets of ``targets`` rows that gather them. ``exact``: a
    bucket gets exactly its ``entries``, not fewer. ``gathers_own``: targets are rows of the source and also gather
    their own rows."""

    targets: int
    exact: bool = True
    gathers_own: bool = True

    def rows_read(self, rows: int) -> int:
        return rows

    @property
    def part_nbytes(self) -> int:
        """Bytes of the largest bucket in memory."""
        return align_up(max(self.entries) * self.entry_bytes)

    @property
    def places_nbytes(self) -> int:
        """Bytes of the row numbers of the largest bucket."""
        return align_up(max(self.entries) * _PLACE_BYTES)

    @property
    def reading_nbytes(self) -> int:
        """Bytes for two buckets: one being computed and one arriving."""
        return min(2, self.buckets) * (self.part_nbytes + self.places_nbytes)


def plan_partial_sums(
    *, rows: int, columns: int, itemsize: int, step_rows: int, tile_rows: int, scatter_counts: Sequence[int]
) -> PartialSums:
    """Return the buckets and chunks for the sums of a matrix that is read in steps of ``step_rows`` rows; a bucket has
    whole steps. ``scatter_counts[i]``: the number of entries of tiles 0…i-1 of ``tile_rows`` rows."""
    best = _empty_sums(rows, columns, itemsize, step_rows)
    tiles = -(-rows // tile_rows)
    bounds = [scatter_counts[min(tiles, start // tile_rows)] for start in range(0, rows, best.bucket_rows)] + [
        scatter_counts[tiles]
    ]
    return replace(best, entries=tuple(stop - start for start, stop in pairwise(bounds)))


@lru_cache(maxsize=1024)
def _empty_sums(rows: int, columns: int, itemsize: int, step_rows: int) -> PartialSums:
    """Return such a plan without entries. It is cached, since a search asks for the same matrices at every move."""
    entry, heights = (columns + 1) * itemsize, [step_rows]
    while heights[-1] < rows:
        heights.append(2 * heights[-1])
    for wanted in _CHUNK_BYTES:
        chunk = align_up(max(1, wanted // entry) * entry)
        sums = (PartialSums(rows, columns, itemsize, height, chunk, (0,) * -(-rows // height)) for height in heights)
        best = min(sums, key=lambda one: one.memory_nbytes)
        if _CHUNK_SHARE * best.memory_nbytes <= rows * columns * itemsize:
            break
    return best


def plan_bucketed_rows(
    *,
    rows: int,
    targets: int,
    columns: int,
    itemsize: int,
    step_rows: int,
    tile_rows: int,
    memory_bytes: int,
    gathered: GatheredRows,
    exact: bool = True,
    gathers_own: bool = True,
) -> BucketedRows:
    """Return the buckets, of whole steps: the tallest that take at most ``memory_bytes``, or those that take the
    least."""
    best: BucketedRows | None = None
    for height, entries in _bucket_heights(rows, targets, step_rows, tile_rows, gathered):
        for chunk in _CHUNK_BYTES:
            numbers = rows, columns, itemsize, height, chunk, tuple(entries), targets
            shuffle = BucketedRows(*numbers, exact, gathers_own)
            if shuffle.writing_nbytes <= shuffle.reading_nbytes:
                break
        if best is None or shuffle.memory_nbytes <= max(memory_bytes, best.memory_nbytes - 1):
            best = shuffle
    assert best is not None, "there are targets"
    return best


def _bucket_heights(
    rows: int, targets: int, step_rows: int, tile_rows: int, gathered: GatheredRows
) -> Iterable[tuple[int, Sequence[int]]]:
    """Return heights of buckets, a step times powers of two, each with how many rows its buckets gather. If a step is a
    power of two of tiles, the counts for tiles are used."""
    tiles = step_rows // tile_rows
    unit, first = (tile_rows, tiles.bit_length() - 1) if tiles.bit_count() == 1 else (step_rows, 0)
    counted = gathered(targets, rows, unit)
    return [(unit << k, counted[min(k, len(counted) - 1)]) for k in range(first, max(first + 1, len(counted)))]
