# SPDX-License-Identifier: Apache-2.0
"""The interface of all I/O engines: byte ranges are moved asynchronously, and failures raise an error with a name.

``read`` and ``write`` return at once with a ``Ticket``; the memory must not be touched until the ticket has been waited
for. A result that is not exactly what was requested, whether short, failed or late, is never accepted: ``Ticket.wait``
raises one SpillError that names matrix, file and offset. A disk that no longer answers is not waited for: if nothing at
all has been moved for ``PATIENCE_S``, all waiting threads get the error. Engines are thread-safe.
"""

import contextlib
import os
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from errno import EINVAL, EISDIR, EOPNOTSUPP
from pathlib import Path
from typing import Any, NamedTuple

from ooc.errors import SpillError
from ooc.prefetch.arena import Bytes

PAGE_BYTES = 4096
"""The alignment that O_DIRECT requires of offsets, lengths and addresses, on any disk of today."""
PATIENCE_S = 300.0
"""Long enough for a disk that is reset and for a server that restarts."""
_LOOK_S = 5.0
READ_ONLY = os.O_RDONLY | os.O_CLOEXEC


@dataclass(eq=False, slots=True)
class OpenFile:
    """A file opened twice: ``direct`` with O_DIRECT (-1 where refused) and ``buffered`` without."""

    path: Path
    direct: int
    buffered: int

    def close(self) -> None:
        """Close the file. May be called twice. Later requests fail; requests in progress must have ended before."""
        for descriptor in (self.direct, self.buffered):
            if descriptor >= 0:
                os.close(descriptor)
        self.direct = self.buffered = -1


@dataclass(eq=False, slots=True)
class ChunkFile:
    """A file of the store, open only while it is read: a store has more chunks than a process may have descriptors."""

    path: Path


class Span(NamedTuple):
    """``nbytes`` at ``offset`` of a file, belonging to the matrix ``label``."""

    file: OpenFile | ChunkFile
    offset: int
    nbytes: int
    label: str

    def opened(self) -> contextlib.AbstractContextManager[OpenFile]:
        """Yield the span's file, open during a ``with`` block; an OpenFile remains open."""
        if isinstance(self.file, ChunkFile):
            return contextlib.closing(open_file(self.file.path))
        return contextlib.nullcontext(self.file)


def open_file(path: Path, flags: int = READ_ONLY) -> OpenFile:
    """Open ``path`` with and, where the filesystem supports it, without the page cache; by default for reading."""
    direct = open_direct(path, flags)
    try:
        return OpenFile(path, direct, os.open(path, flags))
    except OSError:
        if direct >= 0:
            os.close(direct)
        raise


def open_direct(path: Path, flags: int) -> int:
    """Return a descriptor of ``path`` with O_DIRECT; -1 where the filesystem refuses that.

    OSError where it is not a regular file: opening a pipe would block.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise IsADirectoryError(EISDIR, "it is no file")
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (EINVAL, EOPNOTSUPP):
            raise
        return -1


@dataclass(slots=True)
class Counters:
    """Bytes moved since the start, by direction.

    ``wait_s``: time that ``Ticket.wait`` has spent, so that computing waited for the SSD. ``busy_s``: how long some
    request was in progress; for the rest, the SSD waited for computing. ``unanswered``: a thread has waited too long
    while nothing was moved.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    unanswered: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    _under_way: int = 0
    _since: float = 0.0
    _moved: float = 0.0

    def begin(self) -> None:
        """Count the start of a request; from any thread."""
        with self.lock:
            if self._under_way == 0:
                self._since = self._moved = time.perf_counter()
            self._under_way += 1

    def busy_seconds(self) -> float:
        """Return ``busy_s`` including the requests in progress."""
        with self.lock:
            return self.busy_s + (time.perf_counter() - self._since if self._under_way else 0.0)

    def end(self) -> None:
        """Count the end of a request; from any thread."""
        with self.lock:
            self._under_way -= 1
            self._moved = time.perf_counter()
            if self._under_way == 0:
                self.busy_s += self._moved - self._since

    def give_up(self) -> bool:
        """Return whether nothing has been moved for so long that the disk counts as unresponsive."""
        with self.lock:
            self.unanswered |= time.perf_counter() - self._moved > PATIENCE_S
            return self.unanswered

    def add(self, *, read_bytes: int = 0, write_bytes: int = 0, wait_s: float = 0.0) -> None:
        """Add to the counters; from any thread."""
        with self.lock:
            if read_bytes or write_bytes:
                self._moved = time.perf_counter()
            self.read_bytes += read_bytes
            self.write_bytes += write_bytes
            self.wait_s += wait_s


class Event(ABC):
    """A moment: in a device's stream, the end of all that was enqueued before; or the end of a request of the SSD.

    Unless ``of_stream``, kernels and copies cannot wait for it: only the host can.
    """

    __slots__ = ()
    of_stream = True

    @property
    @abstractmethod
    def happened(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until it has happened."""

    def settle(self) -> None:
        """Block the host until it has happened, ignoring failures."""
        self.wait()

    def seconds_since(self, earlier: Any) -> float:
        """Return the time between two ``timed`` events that have happened, by a device's clock."""
        raise NotImplementedError


class Ticket(Event):
    """A pending request of ``parts`` pieces, of ``span`` and maybe further ones. The engine completes it; its holder
    waits."""

    __slots__ = ("_counters", "_error", "_gate", "_left", "_lock", "_span", "ended_s", "happened")
    of_stream = False
    happened: bool
    ended_s: float
    """When it ended, by ``time.perf_counter``; once it has ``happened``."""

    def __init__(self, counters: Counters, parts: int, span: Span | None = None) -> None:
        self._counters, self._span = counters, span
        self._left = parts
        self._error: SpillError | None = None
        self.happened = not parts
        self.ended_s = 0.0
        self._lock = threading.Lock()
        self._gate = threading.Lock()  # held until the last part has ended; an Event would cost as much as a request
        if parts:
            self._gate.acquire()
            counters.begin()

    def part_done(self, error: SpillError | None = None, *, parts: int = 1) -> None:
        """Count one or several pieces as ended, successfully or not; the first error is kept."""
        with self._lock:
            self._error = self._error or error
            self._left -= parts
            last = self._left == 0
        if last:
            self._counters.end()
            self.ended_s = time.perf_counter()
            self.happened = True
            self._gate.release()

    def wait(self) -> None:
        """Block until every piece has ended; raise SpillError if any failed, or the disk does not answer.

        Later calls raise the same.
        """
        if not self.happened:
            start = time.perf_counter()
            try:
                self.settle()
            finally:
                self._counters.add(wait_s=time.perf_counter() - start)
        if self._error is not None:
            raise self._error
        if not self.happened:
            what = "" if self._span is None else f"{self._span.label}: {self._span.file.path}: "
            raise SpillError(f"{what}the disk has not answered for {PATIENCE_S:.0f} s", is_unanswered=True)

    def settle(self) -> None:
        """Wait like ``wait``, but ignore failures, for cleaning up after another error.

        The engine keeps the memory of a request that is given up.
        """
        while not self._gate.acquire(timeout=min(_LOOK_S, PATIENCE_S)):
            if self._counters.give_up():
                return
        self._gate.release()


class Engine(ABC):
    """An engine that reads and writes byte ranges in the background. ``name`` identifies it; ``counters`` count what it
    moves.

    ``watch`` is called for each read, or write (True), on the thread that requested it.
    """

    name: str
    counters: Counters
    watch: Callable[[Sequence[Span], bool, Ticket], None] | None = None

    @abstractmethod
    def read(self, spans: Sequence[Span], into: Bytes, *, bulk: bool = False) -> Ticket:
        """Fill ``into`` with the bytes of ``spans``, one after another. ``bulk`` requests give way to others."""

    @abstractmethod
    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        """Write the bytes of ``source`` to ``spans``, one after another."""

    @abstractmethod
    def close(self) -> None:
        """Finish requests in progress and end the threads; requests that have not begun fail. May be called twice."""
