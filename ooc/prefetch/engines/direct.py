# SPDX-License-Identifier: Apache-2.0
"""O_DIRECT I/O, without the page cache or a copy between disk and buffer.

Whole pages go through the kernel's queue, many at once, submitted by the requesting thread and collected by one thread.
Everything else goes through system calls on a few threads: tails, tiny matrices, files on filesystems that refuse
O_DIRECT, and whatever the queue did incompletely or not at all, so that errors are found and named in one place.
Without such a queue, those threads do all the work, also with O_DIRECT; where a filesystem refuses O_DIRECT, without
it.
"""

from collections.abc import Callable, Sequence

from ooc.prefetch.arena import Bytes
from ooc.prefetch.engine import PAGE_BYTES, ChunkFile, Counters, Engine, OpenFile, Span, Ticket
from ooc.prefetch.engines.kernel_queue import Batch, KernelQueue, QueueLane
from ooc.prefetch.engines.plain import Call, Lane, SystemCalls, cut

PIECE_BYTES = 1 << 20
"""The largest single request: enough for the disk's full rate, small enough that several run side by side."""
DEPTH = 64
"""Requests in progress at once. At 256 KiB to 4 MiB each, 16, 32 and 64 did equally well, reading and writing; at 64
KiB 64 were a seventh ahead of 32 (virtio NVMe; tools/bench_io measures another disk)."""
BULK_DEPTH = 16
"""How many of these may be bulk requests, so that what the computation needs next finds room."""
BULK_THREADS = 2


class ThreadEngine(Engine):
    """An engine of two groups of threads, one of them for bulk requests, and maybe the kernel's queue.

    ``direct``: use O_DIRECT where possible. ``counters``: those of another engine, if both count together.
    """

    _queued: QueueLane | None = None

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
        return self._submit(Call(spans, into, writing=False), bulk=bulk)

    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        return self._submit(Call(spans, source, writing=True), bulk=False)

    def close(self) -> None:
        if self._queued is not None:
            self._queued.close()
        self._near.close()
        self._bulk.close()

    def _submit(self, call: Call, *, bulk: bool) -> Ticket:
        batches, misfit = self._sorted(call, bulk=bulk)
        parts = len(misfit) + sum([batch.left for batch in batches])
        call.ticket = Ticket(self.counters, parts, call.spans[0] if call.spans else None)
        if misfit:
            (self._bulk if bulk else self._near).submit(call, misfit)
        if self._queued is not None and batches:
            self._queued.submit(batches, bulk=bulk)
        if self.watch is not None:
            self.watch(call.spans, call.writing, call.ticket)
        return call.ticket

    def _sorted(self, call: Call, *, bulk: bool) -> tuple[list[Batch], list[tuple[int, int]]]:
        """Return the batches for the kernel's queue, and the parts, as start and length, for the threads."""
        piece_bytes = self._piece_bytes
        misfit: list[tuple[int, int]] = []
        batches: dict[OpenFile | ChunkFile, Batch | None] = {}  # None: not for the queue
        file, batch = None, None
        for span, start in zip(call.spans, call.starts, strict=False):
            if span.file is not file:
                file = span.file
                if file not in batches:
                    # Decided without opening the file.
                    refused = file.direct < 0 if isinstance(file, OpenFile) else call.writing
                    batches[file] = None if self._queued is None or refused else Batch(call, file, bulk=bulk)
                batch = batches[file]
            whole_bytes = 0
            if batch is not None and not (span.offset | call.address + start) % PAGE_BYTES:
                whole_bytes = span.nbytes & -PAGE_BYTES
                if whole_bytes:
                    batch.add(span.offset, start, whole_bytes, piece_bytes)
            if whole_bytes != span.nbytes:
                misfit += cut(start + whole_bytes, span.nbytes - whole_bytes, piece_bytes)
        return [batch for batch in batches.values() if batch is not None and batch.left], misfit


class DirectEngine(ThreadEngine):
    """The engine with O_DIRECT. ``bulk`` is for whole slabs, the rest for what the computation needs next.

    ``queue`` makes the kernel's queue of a depth; if it is None or raises OSError, threads do the work. ``how``
    describes which it is.
    """

    name = "direct"

    def __init__(
        self,
        *,
        depth: int = DEPTH,
        bulk_depth: int = BULK_DEPTH,
        threads: int = 4,
        piece_bytes: int = PIECE_BYTES,
        calls: SystemCalls | None = None,
        queue: Callable[[int], KernelQueue] | None = KernelQueue,
    ) -> None:
        assert piece_bytes % PAGE_BYTES == 0
        super().__init__(calls=calls, threads=threads, piece_bytes=piece_bytes, direct=True)
        self.how = f"{threads} + {BULK_THREADS} threads"
        if queue is None:
            return
        try:
            made = queue(depth)
        except OSError as error:
            self.how += f", since io_submit is not to be had: {error.strerror}"
            return
        self._queued = QueueLane(made, depth=depth, bulk_depth=bulk_depth, plain=self._near, counters=self.counters)
        self.how = f"io_submit, up to {depth} requests at once"


class BufferedEngine(ThreadEngine):
    """The engine through the page cache: a write is complete when the page cache has it, and a read may come from
    there.

    The page cache is outside of the budgets: the kernel frees it when memory runs short, except where the files are
    memory themselves (tmpfs).
    """

    name = "buffered"
