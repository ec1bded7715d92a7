# SPDX-License-Identifier: Apache-2.0
"""Rows that are dealt out to those who gather them, where the matrix that they are of is not in memory whole.

A layer of unknown insides takes a tile's rows and all of their in-neighbours, which lie anywhere. Targets are cut into
*buckets*, and a pass over the source, once after it has been written, appends every row to the part of one file that
belongs to a bucket with an edge from it, or with the row itself. A pass that computes targets then reads the part of
its bucket, sequentially and whole, and finds in it all rows that it gathers, ascending by their number. That is
``ooc.plan.runs`` the other way round: what is written is as much as targets of different buckets share sources, the
edges' number of rows at most, and nothing is read or written at random.

How many rows a bucket gets depends on nothing but the graph, and is counted beforehand (``Dealing``): the size of the
file and the bytes moved are known. Memory is a chunk a bucket while rows are dealt, and two buckets' parts while they
are read: low buckets take less of it, and high ones share more rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ooc.plan.grid import align_up

CHUNKS_LEAVING = 8
"""Chunks that are being written while others are filled."""
_CHUNK_BYTES = tuple(1 << power for power in range(18, 11, -1))
"""Sizes of a chunk, the largest first: from what a disk moves at nearly its full rate down to a page."""
_PLACE_BYTES = 8
"""Of a row of a bucket that is read: its number, once more by itself, to be searched."""

GatheredRows = Callable[[int, int, int], Sequence[Sequence[int]]]
"""By targets, rows of the source, and a height: for every power of two k up to one bucket of all targets, how many rows
every bucket of height · 2^k targets gathers. Exact for a graph that is there, never less for one of which only degrees
are known."""


@dataclass(frozen=True, slots=True)
class Deal:
    """How the first ``rows`` rows of a source, ``columns`` values of ``itemsize`` bytes, are dealt to ``targets`` rows.
    ``entries``: by bucket of ``bucket_rows`` targets, how many rows it gets; each with its number, an integer of
    ``itemsize`` bytes. A bucket's part of the file is whole pages, and the next one's begins behind it."""

    rows: int
    targets: int
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
        return _entry_bytes(self.columns, self.itemsize)

    def bucket_nbytes(self, bucket: int) -> int:
        """Bytes of a bucket's part of the file."""
        return align_up(self.entries[bucket] * self.entry_bytes)

    def offsets(self) -> list[int]:
        """Where the part of every bucket begins."""
        return list(accumulate(map(self.bucket_nbytes, range(self.buckets)), initial=0))[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the file: written whenever the source is dealt."""
        return self.read_nbytes(self.targets)

    def read_nbytes(self, targets: int) -> int:
        """Bytes that are read by a pass over the first ``targets`` targets."""
        return sum(map(self.bucket_nbytes, range(-(-targets // self.bucket_rows))))

    @property
    def part_nbytes(self) -> int:
        """Memory of the largest part."""
        return _part_nbytes(self.entries, self.entry_bytes)

    @property
    def places_nbytes(self) -> int:
        """Memory of the numbers of its rows."""
        return _places_nbytes(self.entries)

    @property
    def writing_nbytes(self) -> int:
        """Memory while rows are dealt: a chunk a bucket, and those that are leaving."""
        return _writing_nbytes(self.buckets, self.chunk_bytes)

    @property
    def reading_nbytes(self) -> int:
        """Memory while parts are read: of two buckets, one computed and one arriving."""
        return _reading_nbytes(self.entries, self.entry_bytes)

    @property
    def memory_nbytes(self) -> int:
        """Memory of a pass that deals, or of one that reads what is dealt, whichever takes more."""
        return max(self.writing_nbytes, self.reading_nbytes)


def cut_deal(
    *,
    rows: int,
    targets: int,
    columns: int,
    itemsize: int,
    step_rows: int,
    tile_rows: int,
    memory_bytes: int,
    gathered: GatheredRows,
) -> Deal:
    """The buckets, whole steps each: the highest that take no more than ``memory_bytes``, or those that take least."""
    entry = _entry_bytes(columns, itemsize)
    best: Deal | None = None
    for height, entries in _heights(rows, targets, step_rows, tile_rows, gathered):
        reading = _reading_nbytes(entries, entry)
        chunk = next(
            (size for size in _CHUNK_BYTES if _writing_nbytes(len(entries), size) <= reading), min(_CHUNK_BYTES)
        )
        deal = Deal(rows, targets, columns, itemsize, height, chunk, tuple(entries))
        if best is None or deal.memory_nbytes <= max(memory_bytes, best.memory_nbytes - 1):
            best = deal
    assert best is not None, "there are targets"
    return best


def _heights(
    rows: int, targets: int, step_rows: int, tile_rows: int, gathered: GatheredRows
) -> list[tuple[int, Sequence[int]]]:
    """Heights of buckets and how many rows these gather: steps times powers of two. Steps of as many tiles are among
    what is counted for tiles."""
    tiles = step_rows // tile_rows
    unit, first = (tile_rows, tiles.bit_length() - 1) if tiles.bit_count() == 1 else (step_rows, 0)
    counted = gathered(targets, rows, unit)
    return [(unit << k, counted[min(k, len(counted) - 1)]) for k in range(first, max(first + 1, len(counted)))]


def _entry_bytes(columns: int, itemsize: int) -> int:
    return (columns + 1) * itemsize


def _part_nbytes(entries: Sequence[int], entry_bytes: int) -> int:
    return align_up(max(entries) * entry_bytes)


def _places_nbytes(entries: Sequence[int]) -> int:
    return align_up(max(entries) * _PLACE_BYTES)


def _writing_nbytes(buckets: int, chunk_bytes: int) -> int:
    return (buckets + CHUNKS_LEAVING) * chunk_bytes


def _reading_nbytes(entries: Sequence[int], entry_bytes: int) -> int:
    return min(2, len(entries)) * (_part_nbytes(entries, entry_bytes) + _places_nbytes(entries))
