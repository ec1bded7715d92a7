# SPDX-License-Identifier: Apache-2.0
"""Sums of what tiles hand to rows anywhere, on their way through a file: ``ooc.plan.runs`` says how, and why.

One thread writes runs and adds them up; tiles of summed rows are taken on any. Everything lies in memory that the plan
has set aside, and nothing is read or written but whole chunks, each at the end of what the file holds.

Shapes: S rows that a run hands something to, C columns, n entries of a chunk.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ooc.plan.runs import CHUNKS_ARRIVING, CHUNKS_LEAVING, Runs
from ooc.prefetch.engine import Engine, OpenFile, Span, Ticket
from ooc.train.residency import as_matrix

_NUMBERS = {4: torch.int32, 8: torch.int64}
"""The type of an entry's number, by its bytes."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """``entries`` of ``bucket`` at byte ``offset`` of the file."""

    bucket: int
    offset: int
    entries: int


class SpilledSums:
    """The file of one matrix's runs, and what lies where in it since the last ``writer``. ``dtype``: of the sums."""

    def __init__(self, name: str, runs: Runs, dtype: torch.dtype, file: OpenFile, engine: Engine) -> None:
        assert dtype.itemsize == runs.itemsize, "sums are spilled as they are computed"
        self.runs = runs
        self.dtype = dtype
        self._name = name
        self._file = file
        self._engine = engine
        self._chunks: list[list[_Chunk]] = []
        self._end = 0
        self._nbytes = runs.nbytes
        self._under_way: set[Ticket] = set()

    def writer(self, memory: Tensor) -> "RunWriter":
        """Forget what the file holds. ``memory``: ``runs.writing_nbytes`` bytes, until the writer has finished."""
        self._chunks = [[] for _ in range(self.runs.buckets)]
        self._end = 0
        return RunWriter(self, memory)

    def reader(self, memory: Tensor, *, reverse: bool) -> "SummedRows":
        """The sums of what was written, for one sweep over the rows, downwards with ``reverse``. ``memory``:
        ``runs.reading_nbytes`` bytes."""
        order = reversed(self._chunks) if reverse else self._chunks
        return SummedRows(self, memory, [chunk for chunks in order for chunk in chunks])

    def append(self, bucket: int, memory: Tensor, entries: int) -> Ticket:
        """Start writing a chunk."""
        nbytes = self.runs.chunk_nbytes(entries)
        self._chunks[bucket].append(_Chunk(bucket, self._end, entries))
        span = Span(self._file, self._end, nbytes, self._name)
        self._end += nbytes
        assert self._end <= self._nbytes, "more is handed out than has been counted"
        return self._sent(self._engine.write([span], memory[:nbytes].numpy()))

    def fetch(self, chunk: _Chunk, memory: Tensor) -> Ticket:
        """Start reading a chunk."""
        nbytes = self.runs.chunk_nbytes(chunk.entries)
        span = Span(self._file, chunk.offset, nbytes, self._name)
        return self._sent(self._engine.read([span], memory[:nbytes].numpy()))

    def _sent(self, ticket: Ticket) -> Ticket:
        self._under_way.add(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Return when it has ended; raises SpillError where it failed."""
        ticket.wait()
        self._under_way.discard(ticket)

    def entries(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers [n] and values [n, C] of a chunk's memory; no copy."""
        count, columns = self.runs.chunk_entries, self.runs.columns + 1
        numbers = as_matrix(memory, _NUMBERS[self.runs.itemsize], count, columns)[:, 0]
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


class RunWriter:
    """Takes runs, in the order of the tiles, apart by bucket and spills them."""

    def __init__(self, spilled: SpilledSums, memory: Tensor) -> None:
        runs = self._runs = spilled.runs
        self._spilled = spilled
        self._memory = _cut(memory, runs.chunk_bytes, runs.buckets + CHUNKS_LEAVING)
        self._entries = [spilled.entries(chunk) for chunk in self._memory]
        self._chunk = list(range(runs.buckets))
        self._filled = [0] * runs.buckets
        self._free = list(range(runs.buckets, len(self._memory)))
        self._leaving: deque[tuple[Ticket, int]] = deque()

    def add(self, rows_S: Tensor, values_SC: Tensor) -> None:
        """A run: ascending rows, none of them twice, and what is to be added to each. Those beyond the matrix's end
        are of no use to anybody."""
        rows_S = rows_S[: int(torch.searchsorted(rows_S, self._runs.rows))]
        buckets, counts = torch.unique_consecutive(rows_S // self._runs.bucket_rows, return_counts=True)
        borders = [0, *counts.cumsum(0).tolist()]
        for bucket, (start, stop) in zip(buckets.tolist(), pairwise(borders), strict=True):
            self._put(bucket, rows_S[start:stop] - bucket * self._runs.bucket_rows, values_SC[start:stop])

    def _put(self, bucket: int, numbers: Tensor, values: Tensor) -> None:
        while len(numbers):
            filled = self._filled[bucket]
            count = min(len(numbers), self._runs.chunk_entries - filled)
            into_numbers, into_values = self._entries[self._chunk[bucket]]
            into_numbers[filled : filled + count].copy_(numbers[:count])
            into_values[filled : filled + count].copy_(values[:count])
            numbers, values = numbers[count:], values[count:]
            self._filled[bucket] += count
            if self._filled[bucket] == self._runs.chunk_entries:
                self._write(bucket)

    def _write(self, bucket: int) -> None:
        """Send a bucket's chunk off and give it another."""
        number = self._chunk[bucket]
        ticket = self._spilled.append(bucket, self._memory[number], self._filled[bucket])
        self._leaving.append((ticket, number))
        if not self._free:
            first, free = self._leaving.popleft()
            self._spilled.wait(first)
            self._free.append(free)
        self._chunk[bucket] = self._free.pop()
        self._filled[bucket] = 0

    def finish(self) -> None:
        """All runs have been added: return when the file holds them."""
        for bucket, filled in enumerate(self._filled):
            if filled:
                self._write(bucket)
        while self._leaving:
            self._spilled.wait(self._leaving.popleft()[0])


class SummedRows:
    """The rows of the sums, taken like an ``Input``'s: bucket after bucket is added up, the next one being read."""

    def __init__(self, spilled: SpilledSums, memory: Tensor, order: Sequence[_Chunk]) -> None:
        runs = self._runs = spilled.runs
        self._spilled = spilled
        self._order = order
        sums = min(2, runs.buckets)
        self._sums = _cut(memory, runs.sums_nbytes, sums)
        chunks = _cut(memory[sums * runs.sums_nbytes :], runs.chunk_bytes, CHUNKS_ARRIVING + 1)
        self._memory = chunks[:-1]
        self._entries = [spilled.entries(chunk) for chunk in self._memory]
        self._numbers = as_matrix(chunks[-1], torch.int64, runs.chunk_entries, 1)[:, 0]
        self._arriving: deque[Ticket] = deque()
        self._added = 0
        self._bucket = -1

    def open(self, start: int, stop: int) -> None:
        """Rows ``start:stop``, all of one bucket, are about to be taken, those of the bucket before the last never
        again."""
        bucket = start // self._runs.bucket_rows
        if bucket != self._bucket and start < self._runs.rows:
            self._bucket = bucket
            self._add_up(bucket)

    def tile(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``, or as many of them as the matrix has."""
        if start >= self._runs.rows:
            return torch.empty(0, self._runs.columns, dtype=self._spilled.dtype)
        bucket, first = divmod(start, self._runs.bucket_rows)
        return self._rows(bucket)[first : first + stop - start]

    def _rows(self, bucket: int) -> Tensor:
        memory = self._sums[bucket % len(self._sums)]
        return as_matrix(memory, self._spilled.dtype, self._runs.height(bucket), self._runs.columns)

    def _add_up(self, bucket: int) -> None:
        sums = self._rows(bucket).zero_()
        self._send()
        while self._arriving and self._order[self._added].bucket == bucket:
            self._spilled.wait(self._arriving.popleft())
            count = self._order[self._added].entries
            numbers, values = self._entries[self._added % CHUNKS_ARRIVING]
            sums.index_add_(0, self._numbers[:count].copy_(numbers[:count]), values[:count])
            self._added += 1
            self._send()

    def _send(self) -> None:
        """Have as many chunks on their way as there is memory for."""
        while len(self._arriving) < CHUNKS_ARRIVING:
            number = self._added + len(self._arriving)
            if number == len(self._order):
                return
            self._arriving.append(self._spilled.fetch(self._order[number], self._memory[number % CHUNKS_ARRIVING]))


def _cut(memory: Tensor, nbytes: int, count: int) -> list[Tensor]:
    """``count`` pieces of ``nbytes`` each."""
    return [memory[start : start + nbytes] for start in range(0, count * nbytes, nbytes)]
