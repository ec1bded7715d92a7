# SPDX-License-Identifier: Apache-2.0
"""Rows dealt out to the buckets that gather them, on their way through a file: ``ooc.plan.deals`` says how, and why.

One thread deals and reads; what has been read is gathered from on any. Everything lies in memory that the plan has set
aside. Of the file, every bucket has a part of its own, which is written chunk by chunk and read whole.

Shapes: R rows of a tile, n rows of it that a bucket gets, M rows of a bucket, C columns.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.errors import StoreError
from ooc.plan.deals import CHUNKS_LEAVING, Deal
from ooc.plan.grid import align_up
from ooc.prefetch.engine import Engine, OpenFile, Span, Ticket
from ooc.train.kernels.dealt import DealtRows
from ooc.train.operands import OpenBlocks
from ooc.train.residency import as_matrix

_NUMBERS = {4: torch.int32, 8: torch.int64}
"""The type of a row's number, by its bytes."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """Rows of a tile that a bucket gets, counted from the tile's first, ascending."""

    bucket: int
    rows_n: Tensor


class DealtFile:
    """The file of one matrix's rows as they are dealt out. ``dtype``: of its values."""

    def __init__(self, name: str, deal: Deal, dtype: torch.dtype, file: OpenFile, engine: Engine) -> None:
        assert dtype.itemsize == deal.itemsize, "rows are dealt as they are computed with"
        self.deal = deal
        self.dtype = dtype
        self._name = name
        self._file = file
        self._engine = engine
        self._offsets = deal.offsets()
        self._under_way: set[Ticket] = set()

    def dealer(self, memory: Tensor) -> "Dealer":
        """Deals anew. ``memory``: ``deal.writing_nbytes`` bytes, until the dealer has finished."""
        return Dealer(self, memory)

    def reader(self, memory: Tensor, *, targets: int, reverse: bool) -> "DealtSource":
        """What was dealt, for one sweep over ``targets`` rows, downwards with ``reverse``. ``memory``:
        ``deal.reading_nbytes`` bytes."""
        return DealtSource(self, memory, targets=targets, reverse=reverse)

    def write(self, bucket: int, at: int, memory: Tensor) -> Ticket:
        """Start writing to a bucket's part, from byte ``at`` of it on."""
        span = Span(self._file, self._offsets[bucket] + at, len(memory), self._name)
        return self._sent(self._engine.write([span], memory.numpy()))

    def fetch(self, bucket: int, memory: Tensor) -> Ticket:
        """Start reading a bucket's part."""
        nbytes = self.deal.bucket_nbytes(bucket)
        span = Span(self._file, self._offsets[bucket], nbytes, self._name)
        return self._sent(self._engine.read([span], memory[:nbytes].numpy()))

    def _sent(self, ticket: Ticket) -> Ticket:
        self._under_way.add(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Return when it has ended; raises SpillError where it failed."""
        ticket.wait()
        self._under_way.discard(ticket)

    def entries(self, rows_n: Tensor, numbers_n: Tensor, values_RC: Tensor) -> Tensor:
        """Rows with their numbers as they lie in the file: bytes."""
        entries = torch.empty(len(rows_n), self.deal.columns + 1, dtype=self.dtype)
        entries.view(_NUMBERS[self.deal.itemsize])[:, 0] = numbers_n
        entries[:, 1:] = values_RC.index_select(0, rows_n)
        return entries.view(torch.uint8).view(-1)

    def rows(self, bucket: int, part: Tensor, places: Tensor) -> DealtRows:
        """The rows of a bucket whose part is in memory. ``places``: memory for their numbers."""
        count, columns = self.deal.entries[bucket], self.deal.columns + 1
        numbers = as_matrix(places, torch.int64, count, 1)[:, 0]
        numbers.copy_(as_matrix(part, _NUMBERS[self.deal.itemsize], count, columns)[:, 0])
        return DealtRows(self.deal.rows, numbers, as_matrix(part, self.dtype, count, columns)[:, 1:])

    def settle(self) -> None:
        """Let everything under way end, whatever its result."""
        for ticket in self._under_way:
            ticket.settle()
        self._under_way.clear()

    def close(self) -> None:
        """Give the disk back. May be called twice."""
        self.settle()
        self._file.close()


class Dealer:
    """Takes rows, tile after tile, and appends them to the parts of those who gather them."""

    def __init__(self, dealt: DealtFile, memory: Tensor) -> None:
        deal = self._deal = dealt.deal
        self._dealt = dealt
        self._memory = list(memory[: deal.writing_nbytes].view(-1, deal.chunk_bytes))
        self._chunk = list(range(deal.buckets))
        self._free = list(range(deal.buckets, deal.buckets + CHUNKS_LEAVING))
        self._filled = [0] * deal.buckets
        self._written = [0] * deal.buckets
        self._left = list(deal.entries)
        self._leaving: deque[tuple[Ticket, int]] = deque()

    def add(self, start: int, values_RC: Tensor, dealt: list[Dealt]) -> None:
        """Rows ``start``… of the source; StoreError where a bucket gets more of them than have been counted."""
        for one in dealt:
            self._left[one.bucket] -= len(one.rows_n)
            if self._left[one.bucket] < 0:
                raise _unlike()
            self._put(one.bucket, self._dealt.entries(one.rows_n, one.rows_n + start, values_RC))

    def _put(self, bucket: int, entries: Tensor) -> None:
        while len(entries):
            filled = self._filled[bucket]
            count = min(len(entries), self._deal.chunk_bytes - filled)
            self._memory[self._chunk[bucket]][filled : filled + count].copy_(entries[:count])
            entries = entries[count:]
            self._filled[bucket] += count
            if self._filled[bucket] == self._deal.chunk_bytes:
                self._write(bucket)

    def _write(self, bucket: int) -> None:
        """Send a bucket's chunk off and give it another."""
        number, nbytes = self._chunk[bucket], align_up(self._filled[bucket])
        ticket = self._dealt.write(bucket, self._written[bucket], self._memory[number][:nbytes])
        self._written[bucket] += nbytes
        self._leaving.append((ticket, number))
        if not self._free:
            first, free = self._leaving.popleft()
            self._dealt.wait(first)
            self._free.append(free)
        self._chunk[bucket] = self._free.pop()
        self._filled[bucket] = 0

    def finish(self) -> None:
        """All rows have been added: return when the file holds them. StoreError where a bucket has got fewer than have
        been counted."""
        if any(self._left):
            raise _unlike()
        for bucket, filled in enumerate(self._filled):
            if filled:
                self._write(bucket)
        while self._leaving:
            self._dealt.wait(self._leaving.popleft()[0])


class DealtSource:
    """The source as steps gather from it, bucket after bucket, the next one being read."""

    def __init__(self, dealt: DealtFile, memory: Tensor, *, targets: int, reverse: bool) -> None:
        deal = self._deal = dealt.deal
        self._dealt = dealt
        self._count = -(-targets // deal.bucket_rows)
        self._step = -1 if reverse else 1
        size = deal.part_nbytes + deal.places_nbytes
        self._memory = list(memory[: deal.reading_nbytes].view(-1, size))
        self._bucket = -1
        self._arriving: dict[int, Ticket] = {}
        self._rows: OpenBlocks[DealtRows] = OpenBlocks()

    def open(self, start: int, stop: int) -> None:
        """Rows ``start:stop``, all of one bucket, are about to be computed, those of the bucket before the last never
        again; those of the step before the last have been."""
        bucket = start // self._deal.bucket_rows
        if bucket == self._bucket:  # no step of the bucket before this one is computed any more
            self._send(bucket + self._step)
        else:
            self._send(bucket)
            self._dealt.wait(self._arriving.pop(bucket))
            self._bucket = bucket
        self._rows.open(range(bucket, bucket + 1), self._view)

    def tile(self, start: int) -> DealtRows:
        """The source as the tile that begins with row ``start`` gathers from it."""
        return self._rows[start // self._deal.bucket_rows]

    def _view(self, bucket: int) -> DealtRows:
        """The rows of a bucket that has been read."""
        return self._dealt.rows(bucket, *self._slot(bucket))

    def _slot(self, bucket: int) -> tuple[Tensor, Tensor]:
        """The memory of a bucket's part, and of its rows' numbers."""
        memory = self._memory[bucket % len(self._memory)]
        return memory[: self._deal.part_nbytes], memory[self._deal.part_nbytes :]

    def _send(self, bucket: int) -> None:
        if 0 <= bucket < self._count and bucket not in self._arriving:
            self._arriving[bucket] = self._dealt.fetch(bucket, self._slot(bucket)[0])


def _unlike() -> StoreError:
    return StoreError(
        "rows have other edges out of them than into others: the edges of both directions are not alike; ooc verify "
        "tells where; convert again"
    )
