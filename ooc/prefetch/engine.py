# SPDX-License-Identifier: Apache-2.0
"""The seam between memory and files: read or write a byte range, later, and know that it worked.

``DirectEngine`` moves aligned ranges with O_DIRECT from a few threads, so that neither the page cache nor a
copy stands between disk and buffer; what is not aligned (tails, tiny matrices) and filesystems that refuse
O_DIRECT go through the page cache instead. Every result is checked: a short read, a full disk or an I/O error
surfaces from ``Ticket.wait`` as one line naming matrix, file and offset.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ooc.errors import SpillError
from ooc.prefetch.arena import Bytes

PIECE_BYTES = 4 << 20
"""Largest single request: enough for the disk's full rate, small enough that several run side by side."""
_PAGE = 4096


class OpenFile:
    """A file open twice: ``direct`` with O_DIRECT (-1 where refused) and ``buffered`` without."""

    def __init__(self, path: Path, direct: int, buffered: int) -> None:
        self.path = path
        self.direct = direct
        self.buffered = buffered

    def __enter__(self) -> "OpenFile":
        """Stays open until ``close``: entering is for files that open at each use."""
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        for descriptor in (self.direct, self.buffered):
            if descriptor >= 0:
                os.close(descriptor)
        self.direct = self.buffered = -1


class ChunkFile:
    """A file of the store, open only while it is read: a store has more chunks than a process descriptors."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def _open(self) -> Iterator[OpenFile]:
        file = open_file(self.path)
        try:
            yield file
        finally:
            file.close()

    def opened(self) -> contextlib.AbstractContextManager[OpenFile]:
        """The file, open for the length of a ``with`` block."""
        return self._open()


@dataclass(frozen=True, slots=True)
class Span:
    """``nbytes`` at ``offset`` of a file, belonging to the matrix ``label``."""

    file: OpenFile | ChunkFile
    offset: int
    nbytes: int
    label: str

    def opened(self) -> contextlib.AbstractContextManager[OpenFile]:
        return self.file.opened() if isinstance(self.file, ChunkFile) else self.file


def open_file(path: Path) -> OpenFile:
    """Open ``path`` for reading with and, where the filesystem takes it, without the page cache."""
    buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            os.close(buffered)
            raise
        direct = -1
    return OpenFile(path, direct, buffered)


@dataclass(slots=True)
class Counters:
    """Bytes moved since the start, by direction. ``wait_s`` is added to by whoever waits."""

    read_bytes: int = 0
    write_bytes: int = 0
    wait_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, read_bytes: int = 0, write_bytes: int = 0) -> None:
        with self.lock:
            self.read_bytes += read_bytes
            self.write_bytes += write_bytes


_Move = Callable[[Span, int, memoryview, bool, Counters], None]


class Ticket:
    """A promise that some ranges have been moved."""

    def __init__(self, parts: Sequence[Future[None]], counters: Counters) -> None:
        self._parts = parts
        self._counters = counters

    def wait(self) -> None:
        """Block until everything is moved; raises SpillError if any part failed. Later calls cost nothing."""
        if not self._parts:
            return
        start = time.perf_counter()
        try:
            for part in self._parts:
                part.result()
        finally:
            self._parts = ()
            self._counters.wait_s += time.perf_counter() - start

    def settle(self) -> None:
        """Wait like ``wait`` but swallow failures: for cleaning up after another error."""
        for part in self._parts:
            part.exception()
        self._parts = ()


class DirectEngine:
    """Two lanes of threads: ``bulk`` for whole slabs, the other for what the computation needs next.

    Thread-safe. Buffers must stay untouched until their ticket has been waited for.
    """

    def __init__(self, *, threads: int = 4, bulk_threads: int = 2) -> None:
        self.counters = Counters()
        self._near = ThreadPoolExecutor(threads, thread_name_prefix="ooc-io")
        self._bulk = ThreadPoolExecutor(bulk_threads, thread_name_prefix="ooc-bulk")

    def read(self, spans: Sequence[Span], into: Bytes, *, bulk: bool = False) -> Ticket:
        """Fill ``into`` with the bytes of ``spans``, one after the other."""
        return self._submit(_read, spans, into, bulk)

    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        """Write the bytes of ``source`` to ``spans``, one after the other."""
        return self._submit(_write, spans, source, False)

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        self._near.shutdown(wait=True, cancel_futures=True)
        self._bulk.shutdown(wait=True, cancel_futures=True)

    def _submit(self, move: _Move, spans: Sequence[Span], memory: Bytes, bulk: bool) -> Ticket:
        lane = self._bulk if bulk else self._near
        view = memory.data
        address = memory.ctypes.data
        parts = []
        at = 0
        for span in spans:
            for start in range(0, span.nbytes, PIECE_BYTES):
                nbytes = min(PIECE_BYTES, span.nbytes - start)
                piece = view[at : at + nbytes]
                aligned = (address + at) % _PAGE == 0
                parts.append(lane.submit(move, span, span.offset + start, piece, aligned, self.counters))
                at += nbytes
        return Ticket(parts, self.counters)


def _read(span: Span, offset: int, piece: memoryview, aligned: bool, counters: Counters) -> None:
    try:
        with span.opened() as file:
            for descriptor, start, part in _split(file, offset, piece, aligned):
                _read_part(span, descriptor, start, part)
    except OSError as error:
        raise _failure("reading", span, offset, error) from None
    counters.add(read_bytes=len(piece))


def _read_part(span: Span, descriptor: int, start: int, part: memoryview) -> None:
    done = 0
    while done < len(part):
        count = os.preadv(descriptor, [part[done:]], start + done)
        if count == 0:
            raise SpillError(
                f"{span.label}: {span.file.path} ends at byte {start + done}, {len(part) - done} bytes are missing"
            )
        done += count


def _write(span: Span, offset: int, piece: memoryview, aligned: bool, counters: Counters) -> None:
    try:
        with span.opened() as file:
            for descriptor, start, part in _split(file, offset, piece, aligned):
                done = 0
                while done < len(part):
                    done += os.pwritev(descriptor, [part[done:]], start + done)
    except OSError as error:
        raise _failure("writing", span, offset, error) from None
    counters.add(write_bytes=len(piece))


def _split(file: OpenFile, offset: int, piece: memoryview, aligned: bool) -> list[tuple[int, int, memoryview]]:
    """The part that O_DIRECT takes, and the tail that it does not."""
    whole = len(piece) // _PAGE * _PAGE
    if file.direct < 0 or not aligned or offset % _PAGE or not whole:
        return [(file.buffered, offset, piece)]
    parts = [(file.direct, offset, piece[:whole])]
    if whole < len(piece):
        parts.append((file.buffered, offset + whole, piece[whole:]))
    return parts


def _failure(verb: str, span: Span, offset: int, error: OSError) -> SpillError:
    return SpillError(f"{span.label}: {verb} {span.file.path} at byte {offset} failed: {error.strerror}")
