# SPDX-License-Identifier: Apache-2.0
"""The kernel's queue of requests (``io_submit(2)``): many in progress at once, submitted in one call.

With O_DIRECT these requests are truly asynchronous. One thread then keeps a disk busy that would otherwise take a
dozen, and the interpreter runs once per batch instead of a few times per request. The four system calls need no
library; their numbers and the two structures (linux/aio_abi.h) never change.

The queue is kept full with few interpreter steps: a call's requests are listed once, submitted in portions as there is
room, and collected many at a time. Steps cost more than they seem to. Both threads have just woken up when they run,
and the interpreter's code has been evicted from the caches by then, so it takes a multiple of the time it takes in a
loop.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import platform
import struct
import threading
from array import array
from collections import deque
from collections.abc import Iterable

from ooc.prefetch.engine import READ_ONLY, ChunkFile, Counters, OpenFile, open_direct
from ooc.prefetch.engines.plain import CLOSED, Call, Lane, cut

_READ, _WRITE = 0, 1
_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = range(4)
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
_WORD_BYTES = 8
_BLOCK = struct.Struct("<Q8xQQQQ16x")
"""A control block: tag, (key, flags), operation and file (u16 operation, i16 priority, u32 descriptor), address, bytes,
offset, (two unused)."""
_EVENT = struct.Struct("<Q8xq8x")  # tag, (control block), result, (second result)

_KEPT_QUEUES = 4
"""The most unused queues that are kept for later use with the same depth. Destroying one took the kernel 31 ms (it
waits for a grace period), longer than all else in closing a small trainer."""
_idle: dict[int, list[int]] = {}  # by depth
os.register_at_fork(after_in_child=_idle.clear)  # they belong to the parent process

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 6

WAKE_BYTES = 512 << 10
"""The collecting thread sleeps until this many bytes have been moved, so that small requests wake it for several at
once."""
_WAKE_SHARE = 8
"""… but at most one in so many of those in progress, so that the disk never runs dry."""
_FIRST_REQUESTS = 2
"""How many requests are submitted at once when none is in progress. The kernel holds back larger groups until it has
processed all of them (AIO_PLUG_THRESHOLD in fs/aio.c), while the disk waits. A virtual disk reports completions only
when it has done everything, so there this is common. 32 requests of 64 KiB at once read 4 to 13 % slower than 4 at once
(a program in C, virtio)."""
_GROWTH = 3
"""… and at most so many times as are in progress: while the disk is busy with these, the others are submitted."""
_TAG_BITS = 32
"""Bits of a request's tag that number it within its batch; the other bits number the batch."""
_INDEX = (1 << _TAG_BITS) - 1
_LOOK_S = 1.0
"""How often the collecting thread looks without being notified, since an interrupted notification wakes no thread."""


class Batch:
    """The requests of one call for one file, submitted in order, in any portions.

    ``wanted``: address, bytes and offset of each. A chunk file is opened with the first request and closed with the
    last. Results come back with tags: ``first_tag`` for the first, one more for each that follows, all below 2⁶⁴.
    ``sent``: requests submitted; ``left``: requests that have not ended.
    """

    __slots__ = ("bulk", "call", "descriptor", "file", "first_tag", "left", "number", "sent", "wanted", "writing")

    _numbers = itertools.count()

    def __init__(self, call: Call, file: OpenFile | ChunkFile, *, bulk: bool) -> None:
        self.number = next(self._numbers)
        self.first_tag = self.number << _TAG_BITS
        self.descriptor = -1
        self.writing = call.writing
        self.wanted: list[tuple[int, int, int]] = []
        self.file = file
        self.bulk = bulk
        self.sent = 0
        self.left = 0
        self.call = call

    def add(self, offset: int, start: int, nbytes: int, piece_bytes: int) -> None:
        """Request whole pages from ``offset`` on, to or from ``start`` in the call's memory."""
        address = self.call.address
        self.wanted += [(address + at, size, offset + at - start) for at, size in cut(start, nbytes, piece_bytes)]
        self.left = len(self.wanted)

    @property
    def waiting(self) -> int:
        """The number of requests not yet submitted."""
        return len(self.wanted) - self.sent

    def opened(self) -> bool:
        """Open the file before the first request; return whether O_DIRECT is available for it."""
        if self.sent:
            return True
        if isinstance(self.file, OpenFile):
            self.descriptor = self.file.direct
        elif self.descriptor < 0:
            with contextlib.suppress(OSError):  # the threads will get the same error, and name it
                self.descriptor = open_direct(self.file.path, READ_ONLY)
        return self.descriptor >= 0

    def gone(self, count: int) -> None:
        """Count requests that have ended or were handed to threads."""
        self.left -= count
        if self.left == 0 and self.descriptor >= 0 and isinstance(self.file, ChunkFile):
            os.close(self.descriptor)
            self.descriptor = -1

    def divert(self, index: int, plain: Lane, *, done: int = 0) -> None:
        """Hand one request, after ``done`` bytes, to the threads."""
        plain.submit(self.call, [(self._start(index) + done, self.wanted[index][1] - done)])

    def fail_waiting(self, reason: str) -> None:
        """Fail the requests that were not submitted."""
        waiting = self.waiting
        if waiting:
            self.call.fail(reason, self._start(self.sent), parts=waiting)
            self.sent += waiting
            self.gone(waiting)

    def fail(self, reason: str) -> None:
        """Fail all requests that have not ended."""
        if self.left:
            self.call.fail(reason, self._start(0), parts=self.left)
            self.gone(self.left)

    def _start(self, index: int) -> int:
        """Return where a request starts in the call's memory."""
        return self.wanted[index][0] - self.call.address


class KernelQueue:
    """A kernel queue with at most ``depth`` requests in progress.

    Raises OSError where the system has no such queue (ENOSYS), forbids it (EPERM), or has none left (EAGAIN:
    fs.aio-max-nr). Not thread-safe, except that one thread may ``reap`` while another submits.
    """

    def __init__(self, depth: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or ctypes.sizeof(ctypes.c_void_p) != _WORD_BYTES:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._numbers = numbers
        self._depth = depth
        self._process = os.getpid()
        self._events, self._events_at = _fixed(depth * _EVENT.size)
        self._blocks, blocks_at = _fixed(depth * _BLOCK.size)
        self._places = range(0, depth * _BLOCK.size, _BLOCK.size)
        self._pointers = array("Q", [blocks_at + place for place in self._places])
        self._pointers_at = self._pointers.buffer_info()[0]
        kept = _idle.get(depth)
        if kept:
            self._context = kept.pop()
        else:
            context = ctypes.c_ulong(0)
            self._call(_SETUP, depth, ctypes.addressof(context))
            self._context = context.value

    def submit(self, requests: Batch, first: int, count: int) -> int:
        """Submit ``count`` requests from the ``first`` on and return how many were accepted; OSError if the first one
        was not.

        The kernel copies their descriptions, so all are written to the same place.
        """
        pack, blocks = _BLOCK.pack_into, self._blocks
        aim = requests.descriptor << 32 | (_WRITE if requests.writing else _READ)
        tag = requests.first_tag + first
        wanted = requests.wanted[first : first + count]
        for place, (address, nbytes, offset) in zip(self._places, wanted, strict=False):
            pack(blocks, place, tag, aim, address, nbytes, offset)
            tag += 1
        return self._call(_SUBMIT, self._context, count, self._pointers_at)

    def reap(self, minimum: int, maximum: int) -> list[tuple[int, int]]:
        """Wait until ``minimum`` requests have ended; return (tag, bytes moved or minus the error number) of at most
        ``maximum``.

        At least ``minimum`` must be in progress. A signal may end the wait early, with fewer results or none.
        """
        most = min(maximum, self._depth)
        try:
            count = self._call(_GETEVENTS, self._context, min(minimum, most), most, self._events_at)
        except InterruptedError:
            return []
        return list(_EVENT.iter_unpack(memoryview(self._events)[: count * _EVENT.size]))

    def close(self, *, is_idle: bool) -> None:
        """Wait for requests in progress and destroy the queue; if ``is_idle``, none are, and no result is unread."""
        context, self._context = self._context, 0
        if not context or os.getpid() != self._process:  # a queue belongs to one process
            return
        kept = _idle.setdefault(self._depth, [])
        if is_idle and len(kept) < _KEPT_QUEUES:
            kept.append(context)
        else:
            self._call(_DESTROY, context)

    def _call(self, which: int, first: int, second: int = 0, third: int = 0, fourth: int = 0) -> int:
        result: int = _syscall(self._numbers[which], first, second, third, fourth, 0)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def _fixed(nbytes: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Return memory that does not move, and its address."""
    memory = ctypes.create_string_buffer(nbytes)
    return memory, ctypes.addressof(memory)


class QueueLane:
    """A thread that keeps the kernel's queue full from two waiting lines and collects ended requests."""

    def __init__(self, queue: KernelQueue, *, depth: int, bulk_depth: int, plain: Lane, counters: Counters) -> None:
        self._queue = queue
        self._plain = plain
        self._counters = counters
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._near: deque[Batch] = deque()
        self._bulk: deque[Batch] = deque()
        self._depth = depth
        self._under_way = 0
        self._bulk_room = bulk_depth
        self._flying: dict[int, Batch] = {}  # by number: those of which the kernel has had something and more is left
        self._closed = False
        self._thread = threading.Thread(target=self._collect, name="ooc-aio", daemon=True)
        self._thread.start()

    def submit(self, batches: Iterable[Batch], *, bulk: bool) -> None:
        """Submit ``batches`` as there is room, in order; after ``close`` they fail at once."""
        with self._lock:
            if not self._closed:
                (self._bulk if bulk else self._near).extend(batches)
                was_idle = self._under_way == 0
                self._send()
                if was_idle:
                    self._changed.notify()
                return
        for batch in batches:
            batch.fail_waiting(CLOSED)

    def close(self) -> None:
        """Fail what was not submitted, wait for the rest and release the queue, unless the disk does not answer."""
        with self._lock:
            self._closed = True
            self._fail_waiting(CLOSED)
            self._changed.notify()
        if self._counters.unanswered:
            return  # destroying the queue would wait for the disk
        self._thread.join()
        self._queue.close(is_idle=self._under_way == 0)

    # ---- with the lock held ------------------------------------------------------------------------------

    def _send(self) -> None:
        """Fill the queue from the waiting lines, the near line first."""
        while (room := self._depth - self._under_way) > 0:
            if self._near:
                line = self._near
            elif self._bulk and self._bulk_room:
                line, room = self._bulk, min(room, self._bulk_room)
            else:
                return
            batch = line[0]
            if batch.opened():
                if not self._send_portion(batch, room):
                    return
            else:
                for _ in range(batch.waiting):
                    self._divert_next(batch)
            if not batch.waiting:
                line.popleft()

    def _send_portion(self, batch: Batch, room: int) -> bool:
        """Submit a portion of a batch; return False if the kernel accepts nothing until requests of ours have ended."""
        self._flying[batch.number] = batch  # before its requests can end
        count = min(room, batch.waiting, max(_FIRST_REQUESTS, _GROWTH * self._under_way))
        try:
            taken = self._queue.submit(batch, batch.sent, count)
        except InterruptedError:
            return True
        except OSError as error:
            if error.errno == errno.EAGAIN and self._under_way:
                return False  # _collect sends again
            self._divert_next(batch)
            return True
        batch.sent += taken
        self._under_way += taken
        self._bulk_room -= batch.bulk * taken
        return True

    def _divert_next(self, batch: Batch) -> None:
        """Hand the next request of a batch to the threads."""
        batch.divert(batch.sent, self._plain)
        batch.sent += 1
        self._gone(batch, 1)

    def _landed(self, batch: Batch, count: int) -> None:
        self._bulk_room += batch.bulk * count
        self._gone(batch, count)

    def _gone(self, batch: Batch, count: int) -> None:
        batch.gone(count)
        if batch.left == 0:
            self._flying.pop(batch.number, None)

    def _fail_waiting(self, reason: str) -> None:
        for line in (self._near, self._bulk):
            while line:
                line.popleft().fail_waiting(reason)

    # ---- the collecting thread ---------------------------------------------------------------------------

    def _collect(self) -> None:
        enough = 1
        try:
            while enough:
                enough = self._collect_some(enough)
        except Exception as error:
            # Complete every ticket, or its holder would wait for ever.
            with self._lock, contextlib.suppress(OSError):
                self._closed = True
                reason = f"the kernel's queue broke: {error}"
                self._fail_waiting(reason)
                for batch in self._flying.values():
                    batch.fail(reason)
                self._flying.clear()

    def _collect_some(self, enough: int) -> int:
        """Wait for requests to end, submit others in their place, and complete their tickets.

        Returns how many to wait for next, 0 when all is done and closed.
        """
        with self._lock:
            while self._under_way <= 0:  # negative if an interruption came before some were counted
                if self._closed:
                    return 0
                self._changed.wait(_LOOK_S)
            enough = max(1, min(enough, self._under_way // _WAKE_SHARE))
        ended = self._queue.reap(enough, self._depth)
        if not ended:
            return enough
        flying = self._flying
        whole: dict[Batch, int] = {}
        misfortunes: list[tuple[Batch, int, int]] = []
        moved = [0, 0]
        for tag, result in ended:
            batch, index = flying[tag >> _TAG_BITS], tag & _INDEX
            if result == batch.wanted[index][1]:
                whole[batch] = whole.get(batch, 0) + 1
            else:
                result = max(0, result)
                misfortunes.append((batch, index, result))
            moved[batch.writing] += result
        with self._lock:
            self._under_way -= len(ended)
            for batch, count in whole.items():
                self._landed(batch, count)
            for batch, _, _ in misfortunes:
                self._landed(batch, 1)
            self._send()
        self._counters.add(read_bytes=moved[False], write_bytes=moved[True])
        for batch, count in whole.items():
            batch.call.ticket.part_done(parts=count)
        for batch, index, done in misfortunes:
            batch.divert(index, self._plain, done=done)
        return max(1, WAKE_BYTES * len(ended) // max(1, sum(moved)))
