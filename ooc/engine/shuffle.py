# SPDX-License-Identifier: Apache-2.0
"""An external shuffle of rows, through a file, to where they are needed; see ``ooc.plan.layout.shuffle`` for the
reason.

One thread writes, reads and adds up; its results may be taken on any thread. Everything is in memory that the plan has
reserved, and whole pages are written and read.

Shapes: R rows of a tile, n rows of it that a bucket gets, S rows that a tile adds to, C columns.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.engine.operands import OpenBlocks, as_matrix
from ooc.errors import SpillError, StoreError
from ooc.kernels.neighbourhood import BucketRows
from ooc.plan.layout.grid import align_up
from ooc.plan.layout.shuffle import CHUNKS_ARRIVING, CHUNKS_LEAVING, BucketedRows, PartialSums, Shuffle
from ooc.prefetch.engine import Engine, OpenFile, Span, Ticket
from ooc.storage.checksums import quick_sum

_NUMBER_DTYPES = {4: torch.int32, 8: torch.int64}
"""The dtype of an entry's number, by its bytes."""

P = TypeVar("P", bound=Shuffle)


class ShuffleFile(Generic[P]):
    """The file of one shuffle. ``dtype``: of its values; ``written``: bytes of entries by bucket."""

    def __init__(self, name: str, plan: P, dtype: torch.dtype, file: OpenFile, engine: Engine) -> None:
        assert dtype.itemsize == plan.itemsize, "rows are shuffled as they are computed"
        self.plan = plan
        self.dtype = dtype
        self.written = [0] * plan.buckets
        self._name = name
        self._file = file
        self._engine = engine
        self._offsets = plan.offsets()
        self._sums = np.zeros(plan.nbytes // plan.chunk_bytes + plan.buckets + 1, dtype=np.uint64)
        self._under_way: dict[Ticket, tuple[int, int, Tensor] | None] = {}

    def write(self, bucket: int, at: int, memory: Tensor) -> Ticket:
        """Start writing to a bucket's part, from byte ``at`` of it on."""
        assert at + len(memory) <= self.plan.bucket_nbytes(bucket), "a bucket gets more than has been counted"
        self._sums[self._chunk(bucket, at)] = quick_sum(memory.numpy())
        ticket = self._engine.write([self._span(bucket, at, len(memory))], memory.numpy())
        self._under_way[ticket] = None
        return ticket

    def read(self, bucket: int, at: int, memory: Tensor) -> Ticket:
        """Start reading a bucket's part, from byte ``at`` of it on."""
        ticket = self._engine.read([self._span(bucket, at, len(memory))], memory.numpy())
        self._under_way[ticket] = bucket, at, memory
        return ticket

    def _span(self, bucket: int, at: int, nbytes: int) -> Span:
        return Span(self._file, self._offsets[bucket] + at, nbytes, self._name)

    def _chunk(self, bucket: int, at: int) -> int:
        """Return the number, among all chunks, of the chunk at byte ``at`` of a bucket's part."""
        return (self._offsets[bucket] + at) // self.plan.chunk_bytes + bucket

    def wait(self, ticket: Ticket) -> None:
        """Wait for a request; raise SpillError where it failed, or the bytes read differ from those written."""
        ticket.wait()
        came = self._under_way.pop(ticket)
        if came is None:
            return
        bucket, at, memory = came
        came_bytes, size = memory.numpy(), self.plan.chunk_bytes
        for chunk, start in enumerate(range(0, len(came_bytes), size), start=self._chunk(bucket, at)):
            if self._sums[chunk] != quick_sum(came_bytes[start : start + size]):
                raise SpillError(f"{self._name}: the SSD returns other bytes of bucket {bucket} than were written")

    def entries(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers [n] and values [n, C] of the entries in ``memory``, bytes, as views."""
        count, columns = len(memory) // self.plan.entry_bytes, self.plan.columns + 1
        numbers = as_matrix(memory, _NUMBER_DTYPES[self.plan.itemsize], count, columns)[:, 0]
        return numbers, as_matrix(memory, self.dtype, count, columns)[:, 1:]

    def settle(self) -> None:
        """Wait for all pending requests, whatever their result."""
        for ticket in self._under_way:
            ticket.settle()
        self._under_way.clear()

    def close(self) -> None:
        """Release the disk space. May be called twice."""
        self.settle()
        self._file.close()


class _Writer(Generic[P]):
    """A writer of entries, which fills a chunk of memory for each bucket; the file's earlier content is discarded.

    ``memory``: ``writing_nbytes`` bytes, in use until ``finish``. Pieces are small and many; NumPy slices them faster
    than torch.
    """

    def __init__(self, file: ShuffleFile[P], memory: Tensor) -> None:
        plan = self._plan = file.plan
        self._file = file
        self._memory: list[Tensor] = list(memory[: plan.writing_nbytes].view(-1, plan.chunk_bytes))
        self._chunk = list(range(plan.buckets))
        self._free = list(range(plan.buckets, plan.buckets + CHUNKS_LEAVING))
        self._filled = [0] * plan.buckets
        self._at = [0] * plan.buckets
        self._leaving: deque[tuple[Ticket, int]] = deque()
        file.written = [0] * plan.buckets

        self._bytes = [chunk[: plan.filled_bytes].numpy() for chunk in self._memory]

    def _room(self, bucket: int) -> npt.NDArray[np.uint8]:
        """Return the free part of a bucket's chunk, which is never empty."""
        return self._bytes[self._chunk[bucket]][self._filled[bucket] :]

    def _put(self, bucket: int, nbytes: int) -> None:
        """Count bytes that were put into a bucket's chunk, and write it when it is full."""
        self._filled[bucket] += nbytes
        self._file.written[bucket] += nbytes
        if self._filled[bucket] == self._plan.filled_bytes:
            self._write(bucket)

    def _write(self, bucket: int) -> None:
        """Start writing a bucket's chunk, and give the bucket another one."""
        number, nbytes = self._chunk[bucket], align_up(self._filled[bucket])
        ticket = self._file.write(bucket, self._at[bucket], self._memory[number][:nbytes])
        self._at[bucket] += nbytes
        self._leaving.append((ticket, number))
        if not self._free:
            first, free = self._leaving.popleft()
            self._file.wait(first)
            self._free.append(free)
        self._chunk[bucket] = self._free.pop()
        self._filled[bucket] = 0

    def finish(self) -> None:
        """Write everything; return when the file holds it."""
        for bucket, filled in enumerate(self._filled):
            if filled:
                self._write(bucket)
        while self._leaving:
            self._file.wait(self._leaving.popleft()[0])


# ---- partial sums ------------------------------------------------------------------------------------------


class SumsWriter(_Writer[PartialSums]):
    """A writer of what tiles add to rows, in the order of the tiles."""

    def add(self, rows_S: Tensor, values_SC: Tensor) -> None:
        """Write ascending distinct rows and what is to be added to each; rows beyond the matrix's end are ignored."""
        plan, number = self._plan, np.dtype(f"i{self._plan.itemsize}")
        rows, values = rows_S.numpy(), values_SC.contiguous().view(_NUMBER_DTYPES[plan.itemsize]).numpy()
        rows = rows[: np.searchsorted(rows, plan.rows)]
        of_row = rows // plan.bucket_rows
        borders = [0, *(np.flatnonzero(np.diff(of_row)) + 1).tolist(), len(rows)]
        numbers = (rows - of_row * plan.bucket_rows).astype(number)
        for start, stop in pairwise(borders) if len(rows) else ():
            bucket = int(of_row[start])
            while start < stop:
                into = self._room(bucket).view(number).reshape(-1, plan.columns + 1)
                count = min(stop - start, len(into))
                into[:count, 0] = numbers[start : start + count]
                into[:count, 1:] = values[start : start + count]
                start += count
                self._put(bucket, count * plan.entry_bytes)


class SummedRows:
    """The summed rows, for one sweep over them, taken like those of an ``Input``.

    The entries of one bucket after another are added up, while the next bucket is read. ``memory``: ``reading_nbytes``
    bytes.
    """

    def __init__(self, file: ShuffleFile[PartialSums], memory: Tensor, *, reverse: bool) -> None:
        plan = self._plan = file.plan
        self._file = file
        self._chunks = list(self._chunks_in_order(reverse))
        sums = min(2, plan.buckets)
        self._sums = [memory[i * plan.sums_nbytes : (i + 1) * plan.sums_nbytes] for i in range(sums)]
        rest = memory[sums * plan.sums_nbytes : plan.reading_nbytes].view(-1, plan.chunk_bytes)
        self._memory, self._numbers = list(rest[:-1]), as_matrix(rest[-1], torch.int64, plan.chunk_bytes // 8, 1)[:, 0]
        self._arriving: deque[Ticket] = deque()
        self._added = 0
        self._bucket = -1

    def _chunks_in_order(self, reverse: bool) -> Iterator[tuple[int, int, int]]:
        """Yield (bucket, offset in its part, bytes of entries) of each chunk."""
        plan = self._plan
        for bucket in reversed(range(plan.buckets)) if reverse else range(plan.buckets):
            starts = range(0, self._file.written[bucket], plan.filled_bytes)
            for number, start in enumerate(starts):
                nbytes = min(plan.filled_bytes, self._file.written[bucket] - start)
                yield bucket, number * plan.chunk_bytes, nbytes

    def open(self, start: int, stop: int) -> None:
        """Prepare to take rows ``start:stop``, all of one bucket; those of the bucket before the last are not taken
        again."""
        bucket = start // self._plan.bucket_rows
        if bucket != self._bucket and start < self._plan.rows:
            self._bucket = bucket
            self._add_up(bucket)

    def tile(self, start: int, stop: int) -> Tensor:
        """Return rows ``start:stop``, or as many as the matrix has."""
        if start >= self._plan.rows:
            return torch.empty(0, self._plan.columns, dtype=self._file.dtype)
        bucket, first = divmod(start, self._plan.bucket_rows)
        return self._rows(bucket)[first : first + stop - start]

    def _rows(self, bucket: int) -> Tensor:
        memory = self._sums[bucket % len(self._sums)]
        return as_matrix(memory, self._file.dtype, self._plan.height(bucket), self._plan.columns)

    def _add_up(self, bucket: int) -> None:
        sums = self._rows(bucket).zero_()
        self._send()
        while self._arriving and self._chunks[self._added][0] == bucket:
            self._file.wait(self._arriving.popleft())
            memory = self._memory[self._added % CHUNKS_ARRIVING]
            numbers, values = self._file.entries(memory[: self._chunks[self._added][2]])
            sums.index_add_(0, self._numbers[: len(numbers)].copy_(numbers), values)
            self._added += 1
            self._send()

    def _send(self) -> None:
        """Start as many reads of chunks as there is memory for."""
        while len(self._arriving) < CHUNKS_ARRIVING:
            number = self._added + len(self._arriving)
            if number == len(self._chunks):
                return
            bucket, at, nbytes = self._chunks[number]
            memory = self._memory[number % CHUNKS_ARRIVING][: align_up(nbytes)]
            self._arriving.append(self._file.read(bucket, at, memory))


# ---- rows by the buckets that gather them ------------------------------------------------------------------


class RowsWriter(_Writer[BucketedRows]):
    """A writer of rows, tile after tile, to the parts of the buckets that gather them.

    Raises StoreError where a bucket gets more rows than counted, or fewer where the count is exact.
    """

    def add(self, start: int, values_RC: Tensor, found: list[tuple[int, Tensor]]) -> None:
        """Write rows of the source from ``start`` on; ``found``: the numbers, counted from there, that each bucket
        gets."""
        first = many = 0
        for number, (_, rows_n) in enumerate(found):
            if many + len(rows_n) > len(values_RC):
                self._add(start, values_RC, found[first:number])
                first, many = number, 0
            many += len(rows_n)
        if many:
            self._add(start, values_RC, found[first:])

    def _add(self, start: int, values_RC: Tensor, found: list[tuple[int, Tensor]]) -> None:
        """Write some buckets' rows, together at most as many as ``values_RC`` has, since they are copied."""
        rows_n = torch.cat([rows for _, rows in found])
        memory = torch.empty(len(rows_n) * self._plan.entry_bytes, dtype=torch.uint8)
        numbers, values = self._file.entries(memory)
        numbers.copy_(rows_n + start)
        values.copy_(values_RC.index_select(0, rows_n))
        entries = memory.numpy()
        for bucket, rows in found:
            nbytes = len(rows) * self._plan.entry_bytes
            if self._file.written[bucket] + nbytes > self._wanted(bucket):
                raise _mismatch_error()
            part, entries = entries[:nbytes], entries[nbytes:]
            while len(part):
                room = self._room(bucket)[: len(part)]
                room[:] = part[: len(room)]
                part = part[len(room) :]
                self._put(bucket, len(room))

    def _wanted(self, bucket: int) -> int:
        return self._plan.entries[bucket] * self._plan.entry_bytes

    def finish(self) -> None:
        if self._plan.exact and any(
            written < self._wanted(bucket) for bucket, written in enumerate(self._file.written)
        ):
            raise _mismatch_error()
        super().finish()


class RowsReader:
    """A reader of the rows that steps gather, for one sweep over ``targets`` rows.

    One bucket's rows are in memory while the next bucket's are read. ``memory``: ``reading_nbytes`` bytes.
    """

    def __init__(self, file: ShuffleFile[BucketedRows], memory: Tensor, *, targets: int, reverse: bool) -> None:
        plan = self._plan = file.plan
        self._file = file
        self._count = -(-targets // plan.bucket_rows)
        self._step = -1 if reverse else 1
        part_nbytes = plan.part_nbytes + plan.places_nbytes  # 0 without edges
        self._memory = list(memory[: plan.reading_nbytes].view(min(2, plan.buckets), part_nbytes))
        self._bucket = -1
        self._arriving: dict[int, Ticket] = {}
        self._rows: OpenBlocks[BucketRows] = OpenBlocks()

    def open(self, start: int, stop: int) -> None:
        """Prepare to compute rows ``start:stop``, all of one bucket.

        Rows of the bucket before the last are not computed again, and those of the step before the last are complete.
        """
        bucket = start // self._plan.bucket_rows
        if bucket == self._bucket:  # all steps of the bucket before are complete
            self._send(bucket + self._step)
        else:
            self._send(bucket)
            self._file.wait(self._arriving.pop(bucket))
            self._bucket = bucket
        self._rows.open(range(bucket, bucket + 1), self._view)

    def tile(self, start: int) -> BucketRows:
        """Return the source for the tile that begins with row ``start``."""
        return self._rows[start // self._plan.bucket_rows]

    def _view(self, bucket: int) -> BucketRows:
        """Return the rows of a bucket that has been read."""
        memory, plan = self._memory[bucket % len(self._memory)], self._plan
        stored, values = self._file.entries(memory[: self._file.written[bucket]])
        numbers = as_matrix(memory[plan.part_nbytes :], torch.int64, len(stored), 1)[:, 0]
        return BucketRows(plan.rows, numbers.copy_(stored), values)

    def _send(self, bucket: int) -> None:
        if 0 <= bucket < self._count and bucket not in self._arriving:
            memory = self._memory[bucket % len(self._memory)]
            self._arriving[bucket] = self._file.read(bucket, 0, memory[: align_up(self._file.written[bucket])])


def _mismatch_error() -> StoreError:
    return StoreError(
        "rows have other edges out of them than into others: the edges of both directions are not alike; ooc verify "
        "tells where; convert again"
    )
