# SPDX-License-Identifier: Apache-2.0
"""External shuffles: rows on their way through a file from where they are made to where they are needed, which is
anywhere, with nothing read or written at random.

Those who need rows are cut into *buckets*. Whoever makes rows appends each, with its number, to the *chunk* of memory
of every bucket that needs it; a full chunk is written to the bucket's part of one file, and whoever comes to a bucket
reads its part from beginning to end. It is how external sorts distribute what does not fit (D. E. Knuth, The Art of
Computer Programming 3, 5.4.9), but that nothing needs sorting within a bucket. There are two:

- ``PartialSums``: what tiles add to rows anywhere (``Pull.scattered``), ascending within a tile. A bucket's entries are
  added up in the order in which they were written, tile after tile, so every row's sum has the terms, and the order of
  additions, that it has in memory.
- ``BucketedRows``: what an opaque layer gathers. Every row goes to each bucket that has an edge from it, or, of nodes
  of one type, has it as a target itself; a bucket's entries are ascending. What is written is as much as targets of
  different buckets share sources, the edges' number of rows at most.

How many entries a bucket gets depends on nothing but the graph and its tiles, and is counted beforehand: the size of
the file and the bytes moved are known. (Of links, of which others are drawn for every step, it is the most that there
can be.) Memory is a chunk a bucket while it is written, and two buckets' sums or rows
while it is read.
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
"""Sizes of a chunk, the largest first: from what a disk moves at nearly its full rate down to a page."""
_SHARE = 8
"""A chunk is as large as leaves all that partial sums take in memory below this part of the matrix."""
_PLACE_BYTES = 8
"""Of a row of a bucket that is read: its number, once more by itself, to be searched."""

GatheredRows = Callable[[int, int, int], Sequence[Sequence[int]]]
"""By targets, rows of the source, and a height: for every power of two k up to one bucket of all targets, how many rows
every bucket of height · 2^k targets gathers. Exact for a graph that is there, never less for one of which only degrees
are known."""


@dataclass(frozen=True, slots=True)
class Shuffle(ABC):
    """Of ``rows`` rows of ``columns`` values of ``itemsize`` bytes. ``entries``: by bucket of ``bucket_rows`` rows, how
    many entries it gets in all, each with its number, an integer of ``itemsize`` bytes. A bucket's part of the file is
    whole pages, and the next one's begins behind it."""

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
        """Bytes of a bucket's part of the file: full chunks, and what is left."""
        full, rest = divmod(self.entries[bucket] * self.entry_bytes, self.filled_bytes)
        return full * self.chunk_bytes + align_up(rest)

    def offsets(self) -> list[int]:
        """Where the part of every bucket begins."""
        return list(accumulate(map(self.bucket_nbytes, range(self.buckets)), initial=0))[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the file, all of which are written."""
        return sum(map(self.bucket_nbytes, range(self.buckets)))

    @abstractmethod
    def rows_read(self, rows: int) -> int:
        """Rows whose buckets are read by a pass over ``rows`` rows."""

    def read_nbytes(self, rows: int) -> int:
        """Bytes that are read by a pass over ``rows`` rows."""
        return sum(map(self.bucket_nbytes, range(-(-self.rows_read(rows) // self.bucket_rows))))

    @property
    def writing_nbytes(self) -> int:
        """Memory while it is written: a chunk a bucket, and those that are leaving."""
        return (self.buckets + CHUNKS_LEAVING) * self.chunk_bytes

    @property
    @abstractmethod
    def reading_nbytes(self) -> int:
        """Memory while it is read."""

    @property
    def memory_nbytes(self) -> int:
        """Memory of a pass that writes, or of one that reads, whichever takes more."""
        return max(self.writing_nbytes, self.reading_nbytes)


@dataclass(frozen=True, slots=True)
class PartialSums(Shuffle):
    """How sums of ``rows`` rows are spilled. No entry lies in two chunks, as these are added up one by one."""

    @property
    def filled_bytes(self) -> int:
        return self.chunk_bytes // self.entry_bytes * self.entry_bytes

    def rows_read(self, rows: int) -> int:
        return self.rows

    def height(self, bucket: int) -> int:
        """Rows of a bucket; the last one may be shorter."""
        return min(self.bucket_rows, self.rows - bucket * self.bucket_rows)

    @property
    def sums_nbytes(self) -> int:
        """Memory of one bucket's sums."""
        return align_up(min(self.rows, self.bucket_rows) * self.columns * self.itemsize)

    @property
    def reading_nbytes(self) -> int:
        """Two buckets' sums, chunks that arrive, and the numbers of one's entries."""
        return min(2, self.buckets) * self.sums_nbytes + (CHUNKS_ARRIVING + 1) * self.chunk_bytes


@dataclass(frozen=True, slots=True)
class BucketedRows(Shuffle):
    """How the first ``rows`` rows of a source go to the buckets of ``targets`` rows that gather them. ``exact``: a
    bucket gets no fewer than its entries. ``gathers_own``: targets are rows of the source, and gather their own."""

    targets: int
    exact: bool = True
    gathers_own: bool = True

    def rows_read(self, rows: int) -> int:
        return rows

    @property
    def part_nbytes(self) -> int:
        """Memory of the largest part."""
        return align_up(max(self.entries) * self.entry_bytes)

    @property
    def places_nbytes(self) -> int:
        """Memory of the numbers of its rows."""
        return align_up(max(self.entries) * _PLACE_BYTES)

    @property
    def reading_nbytes(self) -> int:
        """Parts of two buckets, one computed and one arriving."""
        return min(2, self.buckets) * (self.part_nbytes + self.places_nbytes)


def plan_partial_sums(
    *, rows: int, columns: int, itemsize: int, step_rows: int, tile_rows: int, scatter_counts: Sequence[int]
) -> PartialSums:
    """The buckets and chunks of a matrix that is read in steps of ``step_rows`` rows, whole ones of which make a
    bucket. ``scatter_counts[i]``: how many entries its tiles 0…i-1 of ``tile_rows`` rows get."""
    best = _empty_sums(rows, columns, itemsize, step_rows)
    tiles = -(-rows // tile_rows)
    bounds = [scatter_counts[min(tiles, start // tile_rows)] for start in range(0, rows, best.bucket_rows)] + [
        scatter_counts[tiles]
    ]
    return replace(best, entries=tuple(stop - start for start, stop in pairwise(bounds)))


@lru_cache(maxsize=1024)
def _empty_sums(rows: int, columns: int, itemsize: int, step_rows: int) -> PartialSums:
    """The same, with no entries: a search asks for the same matrices at every step."""
    entry, heights = (columns + 1) * itemsize, [step_rows]
    while heights[-1] < rows:
        heights.append(2 * heights[-1])
    for wanted in _CHUNK_BYTES:
        chunk = align_up(max(1, wanted // entry) * entry)
        sums = (PartialSums(rows, columns, itemsize, height, chunk, (0,) * -(-rows // height)) for height in heights)
        best = min(sums, key=lambda one: one.memory_nbytes)
        if _SHARE * best.memory_nbytes <= rows * columns * itemsize:
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
    """The buckets, whole steps each: the highest that take no more than ``memory_bytes``, or those that take least."""
    best: BucketedRows | None = None
    for height, entries in _heights(rows, targets, step_rows, tile_rows, gathered):
        for chunk in _CHUNK_BYTES:
            numbers = rows, columns, itemsize, height, chunk, tuple(entries), targets
            shuffle = BucketedRows(*numbers, exact, gathers_own)
            if shuffle.writing_nbytes <= shuffle.reading_nbytes:
                break
        if best is None or shuffle.memory_nbytes <= max(memory_bytes, best.memory_nbytes - 1):
            best = shuffle
    assert best is not None, "there are targets"
    return best


def _heights(
    rows: int, targets: int, step_rows: int, tile_rows: int, gathered: GatheredRows
) -> Iterable[tuple[int, Sequence[int]]]:
    """Heights of buckets and how many rows these gather: steps times powers of two. Steps of as many tiles are among
    what is counted for tiles."""
    tiles = step_rows // tile_rows
    unit, first = (tile_rows, tiles.bit_length() - 1) if tiles.bit_count() == 1 else (step_rows, 0)
    counted = gathered(targets, rows, unit)
    return [(unit << k, counted[min(k, len(counted) - 1)]) for k in range(first, max(first + 1, len(counted)))]
