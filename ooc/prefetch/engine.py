# SPDX-License-Identifier: Apache-2.0
"""What every engine promises: byte ranges moved later, and an error with a name when they were not.

``read`` and ``write`` return at once with a ``Ticket``; memory must stay untouched until it has been waited for.
A result that is not exactly what was asked for, whether short, failed or late, never passes: ``Ticket.wait``
raises one SpillError that names matrix, file and offset. Nor is a disk waited for that has stopped to answer: where
nothing at all has been moved for ``PATIENCE_S``, all that wait are told. Engines are thread-safe.
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
"""What O_DIRECT wants offsets, lengths and addresses to be multiples of, on any disk of today."""
PATIENCE_S = 300.0
"""Long enough for a disk that is reset and for a server that starts again."""
_LOOK_S = 5.0
READ_ONLY = os.O_RDONLY | os.O_CLOEXEC


@dataclass(eq=False, slots=True)
class OpenFile:
    """A file open twice: ``direct`` with O_DIRECT (-1 where refused) and ``buffered`` without."""

    path: Path
    direct: int
    buffered: int

    def close(self) -> None:
        """May be called twice. Requests that come later fail; those under way must have ended before."""
        for descriptor in (self.direct, self.buffered):
            if descriptor >= 0:
                os.close(descriptor)
        self.direct = self.buffered = -1


@dataclass(eq=False, slots=True)
class ChunkFile:
    """A file of the store, open only while it is read: a store has more chunks than a process descriptors."""

    path: Path


class Span(NamedTuple):
    """``nbytes`` at ``offset`` of a file, belonging to the matrix ``label``."""

    file: OpenFile | ChunkFile
    offset: int
    nbytes: int
    label: str

    def opened(self) -> contextlib.AbstractContextManager[OpenFile]:
        """The span's file, open for the length of a ``with`` block, and an OpenFile after that too."""
        if isinstance(self.file, ChunkFile):
            return contextlib.closing(open_file(self.file.path))
        return contextlib.nullcontext(self.file)


def open_file(path: Path, flags: int = READ_ONLY) -> OpenFile:
    """Open ``path`` with and, where the filesystem takes it, without the page cache; by default for reading."""
    direct = open_direct(path, flags)
    try:
        return OpenFile(path, direct, os.open(path, flags))
    except OSError:
        if direct >= 0:
            os.close(direct)
        raise


def open_direct(path: Path, flags: int) -> int:
    """A descriptor of ``path`` with O_DIRECT; -1 where the filesystem refuses that. OSError where it is no file: a pipe
    would be waited for."""
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
    """Bytes moved since the start, by direction. ``wait_s`` is what ``Ticket.wait`` has spent: computing waited for
    the SSD. ``busy_s`` is how long some request was under way: for the rest, the SSD waited for computing.
    ``unanswered``: somebody has waited for too long while nothing was moved."""

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
        """A request sets off; from any thread."""
        with self.lock:
            if self._under_way == 0:
                self._since = self._moved = time.perf_counter()
            self._under_way += 1

    def busy_seconds(self) -> float:
        """``busy_s`` with what is under way now."""
        with self.lock:
            return self.busy_s + (time.perf_counter() - self._since if self._under_way else 0.0)

    def end(self) -> None:
        """A request has ended; from any thread."""
        with self.lock:
            self._under_way -= 1
            self._moved = time.perf_counter()
            if self._under_way == 0:
                self.busy_s += self._moved - self._since

    def give_up(self) -> bool:
        """Whether nothing has been moved for so long that nothing will be."""
        with self.lock:
            self.unanswered |= time.perf_counter() - self._moved > PATIENCE_S
            return self.unanswered

    def add(self, *, read_bytes: int = 0, write_bytes: int = 0, wait_s: float = 0.0) -> None:
        """Count; from any thread."""
        with self.lock:
            if read_bytes or write_bytes:
                self._moved = time.perf_counter()
            self.read_bytes += read_bytes
            self.write_bytes += write_bytes
            self.wait_s += wait_s


class Event(ABC):
    """A moment: in one of a device's streams, where all that was sent off there before it has ended, or at the end of a
    request of the SSD. Where not ``of_stream``, neither kernels nor copies can be held for it: only the host can wait.
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
        """The same, whatever comes of it."""
        self.wait()

    def seconds_since(self, earlier: Any) -> float:
        """By a device's clock: of two that were recorded ``timed``, and have happened."""
        raise NotImplementedError


class Ticket(Event):
    """A promise that ``parts`` pieces will be moved, of ``span`` and maybe others. Kept by the engine, waited for by
    its holder."""

    __slots__ = ("_counters", "_error", "_gate", "_left", "_lock", "_span", "ended_s", "happened")
    of_stream = False
    happened: bool
    ended_s: float
    """When it has ended, by ``time.perf_counter``; once it has ``happened``."""

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
        """A piece, or several, have ended, well or not. The first error is the one that is told."""
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
        """Block until every piece has ended; raises SpillError if any failed, or the disk does not answer. Later calls
        tell the same."""
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
        """Wait like ``wait`` but swallow failures: for cleaning up after another error. The memory of a request that is
        given up is kept by the engine."""
        while not self._gate.acquire(timeout=min(_LOOK_S, PATIENCE_S)):
            if self._counters.give_up():
                return
        self._gate.release()


class Engine(ABC):
    """Reads and writes byte ranges in the background. ``name`` says which one it is, ``counters`` what it moved.
    ``watch`` is told what is read, or written (True), on the thread that asked for it."""

    name: str
    counters: Counters
    watch: Callable[[Sequence[Span], bool, Ticket], None] | None = None

    @abstractmethod
    def read(self, spans: Sequence[Span], into: Bytes, *, bulk: bool = False) -> Ticket:
        """Fill ``into`` with the bytes of ``spans``, one after the other. ``bulk`` requests give way to others."""

    @abstractmethod
    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        """Write the bytes of ``source`` to ``spans``, one after the other."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and end the threads; what had not begun fails. May be called twice."""
