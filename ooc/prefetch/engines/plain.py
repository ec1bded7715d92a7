# SPDX-License-Identifier: Apache-2.0
"""The engine of plain system calls on a few threads, continued when short and retried when interrupted.

Every other engine hands over to it what it cannot do itself, so errors get their names here.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from errno import EINVAL
from functools import partial
from itertools import accumulate
from typing import cast

from ooc.errors import SpillError
from ooc.prefetch.arena import Bytes
from ooc.prefetch.engine import PAGE_BYTES, Counters, Span, Ticket

CLOSED = "the engine is closed"


class SystemCalls:
    """The two calls that move bytes, as a class so that tests can make them fail. They raise the system's OSErrors."""

    def read_at(self, descriptor: int, memory: memoryview, offset: int) -> int:
        """Return the bytes read, possibly fewer than requested; 0 at the end of the file."""
        return os.preadv(descriptor, [memory], offset)

    def write_at(self, descriptor: int, memory: memoryview, offset: int) -> int:
        """Return the bytes written, possibly fewer than requested."""
        return os.pwritev(descriptor, [memory], offset)


class Call:
    """One call's request: ``spans``, each from or to where it ``starts`` in the memory.

    It is moved in parts, given by their start in the memory and their length, each within one span. ``ticket`` belongs
    to all of them, once they have been counted.
    """

    __slots__ = ("address", "memory", "spans", "starts", "ticket", "writing")

    ticket: Ticket

    def __init__(self, spans: Sequence[Span], memory: Bytes, *, writing: bool) -> None:
        self.memory, self.address = _operand(memory)
        self.writing = writing
        self.spans, self.starts = spans, [*accumulate((span.nbytes for span in spans), initial=0)]
        assert self.starts[-1] <= memory.nbytes

    def place(self, start: int) -> tuple[Span, int]:
        """Return the span of the byte at ``start`` in the memory, and its offset in the file."""
        number = bisect_right(self.starts, start, hi=len(self.spans)) - 1
        span = self.spans[number]
        return span, span.offset + start - self.starts[number]

    def fail(self, reason: str, start: int, *, parts: int = 1) -> None:
        """End one or several parts with an error that names matrix, file and offset of the byte at ``start``."""
        (span, offset), verb = self.place(start), "writing" if self.writing else "reading"
        line = f"{span.label}: {verb} {span.file.path} at byte {offset} failed: {reason}"
        self.ticket.part_done(SpillError(line), parts=parts)

    def fail_short(self, start: int, missing: int) -> None:
        """End a part of which nothing can be moved from ``start`` on: the file ends there, or accepts no more."""
        span, offset = self.place(start)
        if self.writing:
            self.fail("nothing more is accepted", start)
        else:
            line = f"{span.label}: {span.file.path} ends at byte {offset}, {missing} bytes are missing"
            self.ticket.part_done(SpillError(line))


def cut(start: int, nbytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """Yield start and length of parts of at most ``piece_bytes``."""
    if 0 < nbytes <= piece_bytes:  # a fast path for small requests
        return [(start, nbytes)]
    end = start + nbytes
    return [(at, min(piece_bytes, end - at)) for at in range(start, end, piece_bytes)]


def _operand(memory: Bytes) -> tuple[memoryview, int]:
    """Return the object that is passed to the calls, and its address. Device arrays are sliced as they are."""
    on_device = getattr(memory, "__cuda_array_interface__", None)
    if on_device is not None:
        return cast(memoryview, memory), int(on_device["data"][0])
    return memory.data, memory.ctypes.data


class Lane:
    """Threads that move one part at a time each, in the order of submission. They start with the first request."""

    def __init__(self, *, threads: int, name: str, calls: SystemCalls, direct: bool, counters: Counters) -> None:
        self._counters = counters
        self._move = partial(move, calls=calls, direct=direct, counters=counters)
        self._threads = ThreadPoolExecutor(threads, name)

    def submit(self, call: Call, parts: Sequence[tuple[int, int]]) -> None:
        """Move these ``parts`` of a call soon; after ``close`` they fail at once."""
        for start, nbytes in parts:
            try:
                moved = self._threads.submit(self._move, call, start, nbytes)
                moved.add_done_callback(partial(_fail_cancelled, call, start))
            except RuntimeError:  # the pool has been shut down
                call.fail(CLOSED, start)

    def close(self) -> None:
        """Fail what has not begun, finish what has, and end the threads, except those that an unresponsive disk
        blocks."""
        self._threads.shutdown(wait=not self._counters.unanswered, cancel_futures=True)


def _fail_cancelled(call: Call, start: int, moved: Future[None]) -> None:
    if moved.cancelled():
        call.fail(CLOSED, start)


def move(call: Call, start: int, nbytes: int, *, calls: SystemCalls, direct: bool, counters: Counters) -> None:
    """Move one part completely on this thread and complete its ticket, whatever happens.

    With O_DIRECT as far as there are whole pages, the rest without.
    """
    at, stop, (span, offset) = start, start + nbytes, call.place(start)
    beyond = offset - start
    try:
        with span.opened() as file:
            while at < stop:
                whole, descriptor = (stop - at) & -PAGE_BYTES, file.buffered
                if direct and file.direct >= 0 and whole and not (beyond + at | call.address + at) % PAGE_BYTES:
                    descriptor = file.direct
                part = call.memory[at : stop if descriptor == file.buffered else at + whole]
                try:
                    count = (calls.write_at if call.writing else calls.read_at)(descriptor, part, beyond + at)
                except InterruptedError:
                    continue
                except OSError as error:
                    if error.errno == EINVAL and descriptor != file.buffered:
                        direct = False  # accepted at opening, refused now: the disk needs a coarser alignment
                        continue
                    raise
                if count <= 0:
                    call.fail_short(at, stop - at)
                    return
                at += count
    except OSError as error:
        call.fail(error.strerror or str(error), at)
        return
    except Exception as error:
        # Otherwise the ticket's holder would wait for ever.
        call.fail(f"{type(error).__name__}: {error}", at)
        return
    counters.add(**{"write_bytes" if call.writing else "read_bytes": nbytes})
    call.ticket.part_done()
