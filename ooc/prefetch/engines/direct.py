# SPDX-License-Identifier: Apache-2.0
"""O_DIRECT: neither the page cache nor a copy stands between disk and buffer.

Whole pages go through the kernel's queue, many at once, handed over by whoever asks and collected by one thread.
Everything else goes the plain way on a few threads: tails, tiny matrices, files on filesystems that refuse
O_DIRECT, and whatever the queue did short or not at all, so that errors are found and named in one place. Where
there is no such queue, those threads do it all, with O_DIRECT too.
"""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ooc.prefetch.arena import Bytes
from ooc.prefetch.engines.kernel_queue import KernelQueue
from ooc.prefetch.engines.plain import Lane, SystemCalls, cut
from ooc.prefetch.engines.seam import (
    PAGE_BYTES,
    READ_ONLY,
    ChunkFile,
    Counters,
    Engine,
    OpenFile,
    Piece,
    Span,
    Ticket,
    open_direct,
)

PIECE_BYTES = 1 << 20
"""Largest single request: enough for the disk's full rate, small enough that several run side by side."""
DEPTH = 64
"""Requests under way at once. At 256 KiB to 4 MiB each, 16, 32 and 64 did equally well, reading and writing; at 64 KiB
64 were a seventh ahead of 32 (virtio NVMe; tools/bench_io measures another disk)."""
BULK_DEPTH = 16
"""Of these, how many may be bulk, so that what the computation needs next finds room."""
_REAP_SHARE = 4
"""At most one in so many of the queue's slots is collected before others are sent in their place: collecting all
that have ended would have the disk run dry meanwhile."""


class DirectEngine(Engine):
    """Two lanes: ``bulk`` for whole slabs, the other for what the computation needs next.

    ``queue`` makes the kernel's queue of a depth; None, or an OSError from it, leaves the work to the threads.
    ``how`` says which it is.
    """

    name = "direct"

    def __init__(
        self,
        *,
        depth: int = DEPTH,
        bulk_depth: int = BULK_DEPTH,
        threads: int = 4,
        bulk_threads: int = 2,
        piece_bytes: int = PIECE_BYTES,
        calls: SystemCalls | None = None,
        queue: Callable[[int], KernelQueue] | None = KernelQueue,
    ) -> None:
        self.counters = Counters()
        self._piece_bytes = piece_bytes
        calls = calls or SystemCalls()
        self._near = Lane(threads=threads, name="ooc-io", calls=calls, direct=True, counters=self.counters)
        self._bulk = Lane(threads=bulk_threads, name="ooc-bulk", calls=calls, direct=True, counters=self.counters)
        self._queued: _QueueLane | None = None
        self.how = f"{threads} + {bulk_threads} threads"
        if queue is None:
            return
        try:
            made = queue(depth)
        except OSError as error:
            self.how += f", since io_submit is not to be had: {error.strerror}"
            return
        self._queued = _QueueLane(made, depth=depth, bulk_depth=bulk_depth, plain=self._near, counters=self.counters)
        self.how = f"io_submit, up to {depth} requests at once"

    def read(self, spans: Sequence[Span], into: Bytes, *, bulk: bool = False) -> Ticket:
        """See Engine."""
        return self._submit(spans, into, bulk=bulk, writing=False)

    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        """See Engine."""
        return self._submit(spans, source, bulk=False, writing=True)

    def close(self) -> None:
        """See Engine."""
        if self._queued is not None:
            self._queued.close()
        self._near.close()
        self._bulk.close()

    def _submit(self, spans: Sequence[Span], memory: Bytes, *, bulk: bool, writing: bool) -> Ticket:
        ticket, pieces = cut(spans, memory, piece_bytes=self._piece_bytes, writing=writing, counters=self.counters)
        plain = self._bulk if bulk else self._near
        if self._queued is None:
            plain.submit(pieces)
            return ticket
        fit: list[Piece] = []
        misfit: list[Piece] = []
        for piece in pieces:
            (fit if _fits(piece) else misfit).append(piece)
        if misfit:
            plain.submit(misfit)
        if fit:
            self._queued.submit(fit, bulk=bulk)
        return ticket


def _fits(piece: Piece) -> bool:
    """Whether O_DIRECT takes at least a page of it."""
    file = piece.span.file
    refused = file.direct < 0 if not isinstance(file, ChunkFile) else piece.writing
    return (
        not refused
        and piece.offset % PAGE_BYTES == 0
        and piece.address % PAGE_BYTES == 0
        and len(piece.memory) >= PAGE_BYTES
    )


class _Group:
    """Queued pieces of one file. A chunk file is opened with the first of them and closed with the last."""

    __slots__ = ("bulk", "descriptor", "file", "left")

    def __init__(self, file: OpenFile | ChunkFile, *, bulk: bool) -> None:
        self.file = file
        self.bulk = bulk
        self.descriptor = -1
        self.left = 0

    def opened(self) -> int:
        """The descriptor to use, -1 where O_DIRECT is refused; OSError where the file is not to be had."""
        file = self.file
        if not isinstance(file, ChunkFile):
            return file.direct
        if self.descriptor < 0:
            self.descriptor = open_direct(file.path, READ_ONLY)
        return self.descriptor

    def one_less(self) -> None:
        """A piece has ended or left the queue."""
        self.left -= 1
        if self.left == 0 and self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_Entry = tuple[Piece, _Group]


class _QueueLane:
    """Keeps the kernel's queue full from two waiting lines, and collects what has ended on a thread of its own."""

    def __init__(self, queue: KernelQueue, *, depth: int, bulk_depth: int, plain: Lane, counters: Counters) -> None:
        self._queue = queue
        self._plain = plain
        self._counters = counters
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._near: deque[_Entry] = deque()
        self._bulk: deque[_Entry] = deque()
        self._free = list(range(depth))
        self._flying: dict[int, _Entry] = {}
        self._bulk_room = bulk_depth
        self._batch = max(1, depth // _REAP_SHARE)
        self._closed = False
        self._thread = threading.Thread(target=self._collect, name="ooc-aio", daemon=True)
        self._thread.start()

    def submit(self, pieces: Sequence[Piece], *, bulk: bool) -> None:
        """Send ``pieces`` as room allows, in order; after ``close`` they fail at once."""
        entries: list[_Entry] = []
        group: _Group | None = None
        for piece in pieces:
            if group is None or group.file is not piece.span.file:
                group = _Group(piece.span.file, bulk=bulk)
            group.left += 1
            entries.append((piece, group))
        with self._lock:
            if not self._closed:
                (self._bulk if bulk else self._near).extend(entries)
                self._send()
                self._changed.notify()
                return
        for piece in pieces:
            piece.fail("the engine is closed")

    def close(self) -> None:
        """Fail what has not been sent, let the rest end, give the queue back."""
        with self._lock:
            self._closed = True
            self._fail_waiting("the engine is closed")
            self._changed.notify()
        self._thread.join()
        self._queue.close()

    # ---- with the lock held ------------------------------------------------------------------------------

    def _send(self) -> None:
        """Fill the free slots from the waiting lines, those of the near line first."""
        slots = []
        while self._free:
            if self._near:
                entry = self._near.popleft()
            elif self._bulk and self._bulk_room:
                entry = self._bulk.popleft()
            else:
                break
            slot = self._free.pop()
            if self._prepare(slot, entry):
                slots.append(slot)
            else:
                self._free.append(slot)
                self._divert(entry)
        while slots:
            try:
                del slots[: self._queue.submit(slots)]
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EAGAIN and len(self._flying) > len(slots):
                    # The kernel is out of something until requests of ours have ended; _collect sends again.
                    for slot in reversed(slots):
                        entry = self._land(slot)
                        (self._bulk if entry[1].bulk else self._near).appendleft(entry)
                    return
                self._divert(self._land(slots.pop(0)))

    def _prepare(self, slot: int, entry: _Entry) -> bool:
        """Describe the whole pages of the piece to the kernel; False if its file is not to be had like this."""
        piece, group = entry
        try:
            descriptor = group.opened()
        except OSError:
            return False  # the plain way meets the same error, and names it
        if descriptor < 0:
            return False
        nbytes = len(piece.memory) // PAGE_BYTES * PAGE_BYTES
        self._queue.prepare(slot, descriptor, piece.address, nbytes, piece.offset, writing=piece.writing)
        self._flying[slot] = entry
        self._bulk_room -= group.bulk
        return True

    def _land(self, slot: int) -> _Entry:
        entry = self._flying.pop(slot)
        self._free.append(slot)
        self._bulk_room += entry[1].bulk
        return entry

    def _divert(self, entry: _Entry) -> None:
        """Leave a piece to the plain way."""
        piece, group = entry
        group.one_less()
        self._plain.submit([piece])

    def _fail_waiting(self, reason: str) -> None:
        for line in (self._near, self._bulk):
            while line:
                piece, group = line.popleft()
                group.one_less()
                piece.fail(reason)

    # ---- the collecting thread ---------------------------------------------------------------------------

    def _collect(self) -> None:
        try:
            while self._collect_some():
                pass
        except Exception as error:
            # Tell every holder of a ticket, or they would wait for ever.
            with self._lock, contextlib.suppress(OSError):
                self._closed = True
                reason = f"the kernel's queue broke: {error}"
                for slot in list(self._flying):
                    piece, group = self._land(slot)
                    group.one_less()
                    piece.fail(reason)
                self._fail_waiting(reason)

    def _collect_some(self) -> bool:
        """Wait for requests to end, send others in their place, tell the tickets. False when all is done and closed."""
        with self._changed:
            while not self._flying:
                if self._closed:
                    return False
                self._changed.wait()
        ended = self._queue.reap(self._batch)
        with self._lock:
            landed = [(self._land(slot), result) for slot, result in ended]
            for (_, group), _ in landed:
                group.one_less()
            self._send()
        moved = [0, 0]
        for (piece, _), result in landed:
            moved[piece.writing] += max(0, result)
        self._counters.add(read_bytes=moved[False], write_bytes=moved[True])
        whole: dict[Ticket, int] = {}
        for (piece, _), result in landed:
            if result == len(piece.memory):
                whole[piece.ticket] = whole.get(piece.ticket, 0) + 1
            else:
                self._plain.submit([piece.rest(max(0, result))])
        for ticket, parts in whole.items():
            ticket.part_done(parts=parts)
        return True
