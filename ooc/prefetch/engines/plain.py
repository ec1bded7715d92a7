# SPDX-License-Identifier: Apache-2.0
"""The plain path: one system call after the other on a few threads, continued when short, retried when interrupted.

Every engine comes back to it for what it cannot do itself, so this is also where errors get their names.
"""

import ctypes
import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from errno import EINVAL
from functools import partial
from typing import cast

from ooc.prefetch.arena import Bytes
from ooc.prefetch.engine import PAGE_BYTES, Counters, Engine, Piece, Span, Ticket, join_adjacent

CLOSED = "the engine is closed"
_PLACE = ctypes.c_char * 0


class SystemCalls:
    """The two calls that move bytes, in a class so that tests can make them fail. OSErrors are the system's."""

    def read_at(self, descriptor: int, memory: memoryview, offset: int) -> int:
        """Bytes read, possibly fewer than asked for; 0 at the end of the file."""
        return os.preadv(descriptor, [memory], offset)

    def write_at(self, descriptor: int, memory: memoryview, offset: int) -> int:
        """Bytes written, possibly fewer than asked for."""
        return os.pwritev(descriptor, [memory], offset)


class Call:
    """What one call asks for: ``spans`` that are no neighbours, each from or to where it ``starts`` in the memory.

    It is moved in parts, which are known by where they start in the memory and how long they are; ``ticket`` is that of
    all of them, once they have been counted.
    """

    __slots__ = ("address", "memory", "spans", "starts", "ticket", "writing")

    ticket: Ticket

    def __init__(self, spans: Sequence[Span], memory: Bytes, *, writing: bool) -> None:
        self.memory, self.address = _operand(memory)
        self.writing = writing
        self.spans, self.starts = join_adjacent(spans)
        assert self.starts[-1] <= memory.nbytes

    def piece(self, start: int, nbytes: int) -> Piece:
        """One of the parts, to be moved by itself."""
        number = bisect_right(self.starts, start, hi=len(self.spans)) - 1
        span = self.spans[number]
        memory = self.memory[start : start + nbytes]
        offset = span.offset + start - self.starts[number]
        return Piece(span, offset, memory, self.address + start, self.writing, self.ticket)


def cut(start: int, nbytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """Start and length of parts of at most ``piece_bytes``."""
    if 0 < nbytes <= piece_bytes:  # what small requests have no time to loop over
        return [(start, nbytes)]
    end = start + nbytes
    return [(at, min(piece_bytes, end - at)) for at in range(start, end, piece_bytes)]


def _operand(memory: Bytes) -> tuple[memoryview, int]:
    """What is handed to the calls, and where it lies. Device arrays are sliced as they are."""
    on_device = getattr(memory, "__cuda_array_interface__", None)
    if on_device is not None:
        return cast(memoryview, memory), int(on_device["data"][0])
    view = memory.data
    if view.readonly:
        return view, memory.ctypes.data
    return view, ctypes.addressof(_PLACE.from_buffer(view))  # in half the time


class Lane:
    """Threads that move one piece at a time each, in the order they were given. Threads start with the first piece."""

    def __init__(self, *, threads: int, name: str, calls: SystemCalls, direct: bool, counters: Counters) -> None:
        self._counters = counters
        self._move = partial(move, calls=calls, direct=direct, counters=counters)
        self._threads = ThreadPoolExecutor(threads, name)

    def submit(self, pieces: Sequence[Piece]) -> None:
        """Move ``pieces`` soon; after ``close`` they fail at once."""
        for piece in pieces:
            try:
                self._threads.submit(self._move, piece).add_done_callback(partial(_fail_cancelled, piece))
            except RuntimeError:  # what a pool that is shut down raises
                piece.fail(CLOSED)

    def close(self) -> None:
        """Fail what has not begun, finish what has, end the threads; those that a disk does not answer are left."""
        self._threads.shutdown(wait=not self._counters.unanswered, cancel_futures=True)


def _fail_cancelled(piece: Piece, moved: Future[None]) -> None:
    if moved.cancelled():
        piece.fail(CLOSED)


def move(piece: Piece, *, calls: SystemCalls, direct: bool, counters: Counters) -> None:
    """Do one piece to its end on this thread and tell its ticket, whatever happens."""
    done = 0
    try:
        with piece.span.opened() as file:
            while done < len(piece.memory):
                descriptor, nbytes = _part(piece, done, file.direct if direct else -1, file.buffered)
                part, offset = piece.memory[done : done + nbytes], piece.offset + done
                try:
                    count = (calls.write_at if piece.writing else calls.read_at)(descriptor, part, offset)
                except InterruptedError:
                    continue
                except OSError as error:
                    if error.errno == EINVAL and descriptor != file.buffered:
                        direct = False  # taken when the file was opened, refused now: coarser than a page
                        continue
                    raise
                if count <= 0:
                    piece.fail_short(done)
                    return
                done += count
    except OSError as error:
        piece.fail(error.strerror or str(error), at=piece.offset + done)
        return
    except Exception as error:
        # Nobody else will tell the ticket's holder, who would wait for ever.
        piece.fail(f"{type(error).__name__}: {error}", at=piece.offset + done)
        return
    counters.add(**{"write_bytes" if piece.writing else "read_bytes": len(piece.memory)})
    piece.ticket.part_done()


def _part(piece: Piece, done: int, direct: int, buffered: int) -> tuple[int, int]:
    """Descriptor and length of the next call: with O_DIRECT as far as whole pages go, the rest without."""
    left = len(piece.memory) - done
    whole = left // PAGE_BYTES * PAGE_BYTES
    aligned = (piece.offset + done) % PAGE_BYTES == 0 and (piece.address + done) % PAGE_BYTES == 0
    if direct < 0 or not aligned or not whole:
        return buffered, left
    return direct, whole


BULK_THREADS = 2


class ThreadEngine(Engine):
    """An engine of two lanes of threads, one of them for bulk requests. ``direct``: with O_DIRECT where that goes.
    ``counters``: another engine's, where the two count together."""

    def __init__(
        self,
        *,
        calls: SystemCalls | None = None,
        threads: int = 4,
        piece_bytes: int = 4 << 20,
        direct: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        self._piece_bytes = piece_bytes
        calls = calls or SystemCalls()
        self._near = Lane(threads=threads, name="ooc-io", calls=calls, direct=direct, counters=self.counters)
        self._bulk = Lane(threads=BULK_THREADS, name="ooc-bulk", calls=calls, direct=direct, counters=self.counters)

    def read(self, spans: Sequence[Span], into: Bytes, *, bulk: bool = False) -> Ticket:
        ticket = self._submit(Call(spans, into, writing=False), bulk=bulk)
        if self.watch is not None:
            self.watch(spans, False, ticket)
        return ticket

    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        ticket = self._submit(Call(spans, source, writing=True), bulk=False)
        if self.watch is not None:
            self.watch(spans, True, ticket)
        return ticket

    def close(self) -> None:
        self._near.close()
        self._bulk.close()

    def _submit(self, call: Call, *, bulk: bool) -> Ticket:
        parts = [
            part
            for span, start in zip(call.spans, call.starts, strict=False)
            for part in cut(start, span.nbytes, self._piece_bytes)
        ]
        call.ticket = Ticket(self.counters, len(parts), call.spans[0] if call.spans else None)
        self._submit_to_threads(call, parts, bulk=bulk)
        return call.ticket

    def _submit_to_threads(self, call: Call, parts: Sequence[tuple[int, int]], *, bulk: bool) -> None:
        (self._bulk if bulk else self._near).submit([call.piece(*part) for part in parts])


class BufferedEngine(ThreadEngine):
    """What is written is done when the page cache has it; what is read may come from there.

    The page cache is outside any budget of ours: the kernel gives it up when memory runs short, except where the files
    are memory themselves (tmpfs).
    """

    name = "buffered"
