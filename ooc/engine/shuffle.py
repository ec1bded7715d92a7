# SPDX-License-Identifier: Apache-2.0
"""Rows on their way through a file to where they are needed: ``ooc.plan.layout.shuffle`` says how, and why.

One thread writes, reads and adds up; what has come is taken on any. Everything lies in memory that the plan has set
aside, and whole pages are written and read.

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

_NUMBERS = {4: torch.int32, 8: torch.int64}
"""The type of an entry's number, by its bytes."""

P = TypeVar("P", bound=Shuffle)


class ShuffleFile(Generic[P]):
    """The file of one shuffle. ``dtype``: of its values. ``written``: by bucket, bytes of entries."""

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
        """The number of the chunk that lies at byte ``at`` of a bucket's part, among those of all."""
        return (self._offsets[bucket] + at) // self.plan.chunk_bytes + bucket

    def wait(self, ticket: Ticket) -> None:
        """Return when it has ended; SpillError where it failed, or other bytes have come than were written."""
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
        """The numbers [n] and values [n, C] of the entries that ``memory``, bytes, holds or has room for."""
        count, columns = len(memory) // self.plan.entry_bytes, self.plan.columns + 1
        numbers = as_matrix(memory, _NUMBERS[self.plan.itemsize], count, columns)[:, 0]
        return numbers, as_matrix(memory, self.dtype, count, columns)[:, 1:]

    def settle(self) -> None:
        """Let everything under way end, whatever its result."""
        for ticket in self._under_way:
            ticket.settle()
        self._under_way.clear()

    def close(self) -> None:
        """Give the disk back. May be called twice."""
        self.settle()
        self._file.close()


class _Writer(Generic[P]):
    """Chunks of memory that entries are put into, bucket by bucket; what the file held is forgotten. ``memory``:
    ``writing_nbytes`` bytes, until the writer has finished. Pieces are small and many: NumPy cuts them faster than
    torch."""

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
        """What is left of a bucket's chunk, never nothing."""
        return self._bytes[self._chunk[bucket]][self._filled[bucket] :]

    def _put(self, bucket: int, nbytes: int) -> None:
        """So many bytes have been put there."""
        self._filled[bucket] += nbytes
        self._file.written[bucket] += nbytes
        if self._filled[bucket] == self._plan.filled_bytes:
            self._write(bucket)

    def _write(self, bucket: int) -> None:
        """Send a bucket's chunk off and give it another."""
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
        """Everything has been added: return when the file holds it."""
        for bucket, filled in enumerate(self._filled):
            if filled:
                self._write(bucket)
        while self._leaving:
            self._file.wait(self._leaving.popleft()[0])


# ---- partial sums ------------------------------------------------------------------------------------------


class SumsWriter(_Writer[PartialSums]):
    """Takes what tiles add to rows, in the order of the tiles."""

    def add(self, rows_S: Tensor, values_SC: Tensor) -> None:
        """Ascending rows, none of them twice, and what is to be added to each. Those beyond the matrix's end are of no
        use to anybody."""
        plan, number = self._plan, np.dtype(f"i{self._plan.itemsize}")
        rows, values = rows_S.numpy(), values_SC.contiguous().view(_NUMBERS[plan.itemsize]).numpy()
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
    """The rows of the sums, for one sweep over them, taken like an ``Input``'s: bucket after bucket is added up, the
    next one being read. ``memory``: ``reading_nbytes`` bytes."""

    def __init__(self, file: ShuffleFile[PartialSums], memory: Tensor, *, reverse: bool) -> None:
        plan = self._plan = file.plan
        self._file = file
        self._chunks = list(self._in_order(reverse))
        sums = min(2, plan.buckets)
        self._sums = [memory[i * plan.sums_nbytes : (i + 1) * plan.sums_nbytes] for i in range(sums)]
        rest = memory[sums * plan.sums_nbytes : plan.reading_nbytes].view(-1, plan.chunk_bytes)
        self._memory, self._numbers = list(rest[:-1]), as_matrix(rest[-1], torch.int64, plan.chunk_bytes // 8, 1)[:, 0]
        self._arriving: deque[Ticket] = deque()
        self._added = 0
        self._bucket = -1

    def _in_order(self, reverse: bool) -> Iterator[tuple[int, int, int]]:
        """(bucket, where in its part, bytes of entries) of each chunk."""
        plan = self._plan
        for bucket in reversed(range(plan.buckets)) if reverse else range(plan.buckets):
            starts = range(0, self._file.written[bucket], plan.filled_bytes)
            for number, start in enumerate(starts):
                nbytes = min(plan.filled_bytes, self._file.written[bucket] - start)
                yield bucket, number * plan.chunk_bytes, nbytes

    def open(self, start: int, stop: int) -> None:
        """Rows ``start:stop``, all of one bucket, are about to be taken, those of the bucket before the last never
        again."""
        bucket = start // self._plan.bucket_rows
        if bucket != self._bucket and start < self._plan.rows:
            self._bucket = bucket
            self._add_up(bucket)

    def tile(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``, or as many of them as the matrix has."""
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
        """Have as many chunks on their way as there is memory for."""
        while len(self._arriving) < CHUNKS_ARRIVING:
            number = self._added + len(self._arriving)
            if number == len(self._chunks):
                return
            bucket, at, nbytes = self._chunks[number]
            memory = self._memory[number % CHUNKS_ARRIVING][: align_up(nbytes)]
            self._arriving.append(self._file.read(bucket, at, memory))


# ---- rows by the buckets that gather them ------------------------------------------------------------------


class RowsWriter(_Writer[BucketedRows]):
    """Takes rows, tile after tile, and appends them to the parts of those who gather them. StoreError where a bucket
    gets more of them than have been counted, or fewer where the count is exact."""

    def add(self, start: int, values_RC: Tensor, found: list[tuple[int, Tensor]]) -> None:
        """Rows ``start``… of the source; those that a bucket gets, counted from there, ascending."""
        first = many = 0
        for number, (_, rows_n) in enumerate(found):
            if many + len(rows_n) > len(values_RC):
                self._add(start, values_RC, found[first:number])
                first, many = number, 0
            many += len(rows_n)
        if many:
            self._add(start, values_RC, found[first:])

    def _add(self, start: int, values_RC: Tensor, found: list[tuple[int, Tensor]]) -> None:
        """The same, no more rows than the source's at once: so much is copied."""
        rows_n = torch.cat([rows for _, rows in found])
        memory = torch.empty(len(rows_n) * self._plan.entry_bytes, dtype=torch.uint8)
        numbers, values = self._file.entries(memory)
        numbers.copy_(rows_n + start)
        values.copy_(values_RC.index_select(0, rows_n))
        entries = memory.numpy()
        for bucket, rows in found:
            nbytes = len(rows) * self._plan.entry_bytes
            if self._file.written[bucket] + nbytes > self._wanted(bucket):
                raise _unlike()
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
            raise _unlike()
        super().finish()


class RowsReader:
    """The source as steps gather from it, for one sweep over ``targets`` rows: bucket after bucket, the next one being
    read. ``memory``: ``reading_nbytes`` bytes."""

    def __init__(self, file: ShuffleFile[BucketedRows], memory: Tensor, *, targets: int, reverse: bool) -> None:
        plan = self._plan = file.plan
        self._file = file
        self._count = -(-targets // plan.bucket_rows)
        self._step = -1 if reverse else 1
        part_nbytes = plan.part_nbytes + plan.places_nbytes  # of no edges 0
        self._memory = list(memory[: plan.reading_nbytes].view(min(2, plan.buckets), part_nbytes))
        self._bucket = -1
        self._arriving: dict[int, Ticket] = {}
        self._rows: OpenBlocks[BucketRows] = OpenBlocks()

    def open(self, start: int, stop: int) -> None:
        """Rows ``start:stop``, all of one bucket, are about to be computed, those of the bucket before the last never
        again; those of the step before the last have been."""
        bucket = start // self._plan.bucket_rows
        if bucket == self._bucket:  # no step of the bucket before this one is computed any more
            self._send(bucket + self._step)
        else:
            self._send(bucket)
            self._file.wait(self._arriving.pop(bucket))
            self._bucket = bucket
        self._rows.open(range(bucket, bucket + 1), self._view)

    def tile(self, start: int) -> BucketRows:
        """The source as the tile that begins with row ``start`` gathers from it."""
        return self._rows[start // self._plan.bucket_rows]

    def _view(self, bucket: int) -> BucketRows:
        """The rows of a bucket that has been read."""
        memory, plan = self._memory[bucket % len(self._memory)], self._plan
        stored, values = self._file.entries(memory[: self._file.written[bucket]])
        numbers = as_matrix(memory[plan.part_nbytes :], torch.int64, len(stored), 1)[:, 0]
        return BucketRows(plan.rows, numbers.copy_(stored), values)

    def _send(self, bucket: int) -> None:
        if 0 <= bucket < self._count and bucket not in self._arriving:
            memory = self._memory[bucket % len(self._memory)]
            self._arriving[bucket] = self._file.read(bucket, 0, memory[: align_up(self._file.written[bucket])])


def _unlike() -> StoreError:
    return StoreError(
        "rows have other edges out of them than into others: the edges of both directions are not alike; ooc verify "
        "tells where; convert again"
    )
