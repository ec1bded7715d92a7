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
from ooc.prefetch.engine import PAGE_BYTES, Counters, Piece, Span, Ticket, join_adjacent

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
