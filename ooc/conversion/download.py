# SPDX-License-Identifier: Apache-2.0
"""Files from the web: in parallel ranges, resumed after any interruption, checked against size and checksum.

Beside ``FILE.part``, which is as long as the file from the start, ``FILE.part.json`` says which server file it is
of (by size, ETag and date) and how far each range has come. A range is only counted when it has been flushed, so
what is counted is there. A server without ranges is read from the beginning each time.
"""

import fcntl
import hashlib
import http.client
import json
import os
import queue
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ooc.errors import BudgetError, SourceError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted
from ooc.sizes import format_size

Result = TypeVar("Result")

CONNECTIONS = 4
_RANGE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_FLUSH_BYTES = 16 << 20
_TIMEOUT_S = 30.0
_FAREWELL_S = 1.0
_TRIES = 6
_FIRST_PAUSE_S = 0.5
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_FAULTS = (OSError, http.client.HTTPException)  # urllib's own errors are among the first.


class _Response(Protocol):
    status: int

    def read(self, size: int) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server says of a file: ``size`` in bytes, whether it gives ``ranges``, and what changes with it."""

    size: int
    ranges: bool
    version: str


class _Changed(Exception):
    """The server's file is another one than when the download began."""


def probe(url: str) -> Served:
    """Ask for the first byte of ``url``. SourceError where there is no such file, or no way to it."""

    def ask() -> Served:
        with _get(url, 0, 0) as response:
            headers = response.headers
            version = f"{headers.get('ETag', '')} {headers.get('Last-Modified', '')}"
            total = str(headers.get("Content-Range", "")).rpartition("/")[2]
            ranged = response.status == 206 and total.isdecimal()
            length = total if ranged else str(headers.get("Content-Length", ""))
            if not length.isdecimal():
                raise SourceError(f"{url} cannot be downloaded: the server does not say how large it is")
            return Served(size=int(length), ranges=ranged, version=version)

    return _tried(url, ask)


def download(
    url: str, target: Path, *, md5: str | None, served: Served, listener: Listener, connections: int = CONNECTIONS
) -> None:
    """Fetch ``url``, of which ``served`` was said, to ``target``; goes on with what an earlier call left.

    ``md5``: the published checksum, if there is one. SourceError when the server fails for good or the file is not
    the published one, BudgetError when the disk has no room; what was fetched stays for the next call.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(target.parent):
        part = _Part(target, url, served)
        missing = served.size - part.done
        if missing > (free := shutil.disk_usage(target.parent).free):
            need = f"{target} needs {format_size(missing)} more of disk"
            raise BudgetError(f"{need}, {format_size(free)} are free in {target.parent}")
        task = f"downloading {target.name}"
        listener(TaskStarted(task, served.size, "bytes"))
        part.on_progress = lambda done: listener(TaskAdvanced(task, done))
        try:
            _fetch_all(url, part, served, connections)
        except _Changed:
            part.forget()
            raise SourceError(f"{url} has changed on the server while it was downloaded; try again") from None
        listener(TaskFinished(task))
        if md5 is not None and (found := _md5(part.path, listener)) != md5:
            part.forget()
            raise SourceError(f"{url} has the MD5 checksum {found}, published is {md5}; it was removed, try again")
        part.finish()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep any other process from downloading into ``folder``: two would write one file."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SourceError(f"another download to {folder} is under way") from None
        yield
    finally:
        os.close(descriptor)


@dataclass(kw_only=True)
class _Range:
    """The bytes ``start`` to ``stop`` of the file; the first ``done`` of them are there."""

    start: int
    stop: int
    done: int = 0


class _Part:
    """The file that is being downloaded, and the record of what is there of it."""

    def __init__(self, target: Path, url: str, served: Served) -> None:
        self.path = target.with_name(target.name + ".part")
        self._target, self._record = target, target.with_name(target.name + ".part.json")
        self._key = {"url": url, **asdict(served)}
        self._lock = threading.Lock()
        self.on_progress: Callable[[int], None] = lambda done: None
        step = _RANGE_BYTES if served.ranges else max(1, served.size)
        fresh = [_Range(start=at, stop=min(at + step, served.size)) for at in range(0, served.size, step)]
        self.ranges = self._left_before(served) or fresh
        if self.ranges is fresh:
            self._record.unlink(missing_ok=True)  # First: the record never speaks of a file that is not there.
            with self.path.open("wb") as file:
                file.truncate(served.size)
            self._write_record()

    @property
    def done(self) -> int:
        """Bytes that are there."""
        return sum(piece.done for piece in self.ranges)

    def _left_before(self, served: Served) -> list[_Range] | None:
        """The ranges of an earlier download of the same file, if it can go on."""
        try:
            record = json.loads(self._record.read_text())
            whole = self.path.stat().st_size == served.size
            if not served.ranges or not whole or record["file"] != self._key:
                return None
            found = [_Range(**piece) for piece in record["ranges"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        joined = all(a.stop == b.start for a, b in pairwise(found))
        sound = all(0 <= piece.done <= piece.stop - piece.start for piece in found)
        return found if joined and sound and found and (found[0].start, found[-1].stop) == (0, served.size) else None

    def advanced(self, piece: _Range, size: int) -> None:
        """``size`` more bytes of ``piece`` are on the disk."""
        with self._lock:
            piece.done += size
            self._write_record()
            self.on_progress(self.done)

    def restart(self, piece: _Range) -> None:
        """Nothing of ``piece`` counts any more."""
        with self._lock:
            piece.done = 0
            self._write_record()

    def forget(self) -> None:
        """Remove what is there."""
        self._record.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def finish(self) -> None:
        """All is there: give the file its name."""
        self.path.replace(self._target)
        self._record.unlink(missing_ok=True)

    def _write_record(self) -> None:
        record = {"file": self._key, "ranges": [asdict(piece) for piece in self.ranges]}
        partial = self._record.with_name(self._record.name + ".new")
        partial.write_text(json.dumps(record))
        partial.replace(self._record)


def _fetch_all(url: str, part: _Part, served: Served, connections: int) -> None:
    """Fetch what is missing, a range a connection; raises the first error once all connections are closed."""
    waiting: queue.SimpleQueue[_Range] = queue.SimpleQueue()
    for piece in part.ranges:
        if piece.done < piece.stop - piece.start:
            waiting.put(piece)
    connections = min(connections, waiting.qsize())
    stopped = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not stopped.is_set():
                _fetch_range(url, part, waiting.get_nowait(), served, stopped)
        except queue.Empty:
            return
        except BaseException as error:
            errors.append(error)
            stopped.set()

    threads = [threading.Thread(target=work, name="ooc-download", daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Interrupted. A connection that waits for the server notices when its timeout is over.
        stopped.set()
        for thread in threads:
            thread.join(timeout=_FAREWELL_S)
        raise
    if errors:
        raise errors[0]


def _fetch_range(url: str, part: _Part, piece: _Range, served: Served, stopped: threading.Event) -> None:
    def go_on() -> None:
        if not served.ranges:
            part.restart(piece)
        start = piece.start + piece.done
        with _get(url, start, piece.stop - 1, ranged=served.ranges) as response:
            _check_answer(response, start, served)
            _write(response, part, piece, stopped)
        if not stopped.is_set() and piece.done < piece.stop - piece.start:
            raise http.client.IncompleteRead(b"")

    _tried(url, go_on, progress=lambda: piece.done)


def _check_answer(response: Any, start: int, served: Served) -> None:
    if not served.ranges:
        if response.status != 200 or response.headers.get("Content-Length") != str(served.size):
            raise _Changed
        return
    version = f"{response.headers.get('ETag', '')} {response.headers.get('Last-Modified', '')}"
    expected = (f"bytes {start}-", f"/{served.size}")
    given = str(response.headers.get("Content-Range", ""))
    if response.status != 206 or version != served.version:
        raise _Changed
    if not (given.startswith(expected[0]) and given.endswith(expected[1])):
        raise _Changed


def _write(response: _Response, part: _Part, piece: _Range, stopped: threading.Event) -> None:
    """The rest of ``piece`` from ``response``; counts what has been flushed, whatever happens then."""
    descriptor = os.open(part.path, os.O_WRONLY)
    unflushed = 0
    try:
        while not stopped.is_set():
            left = piece.stop - piece.start - piece.done - unflushed
            data = response.read(min(_PIECE_BYTES, left)) if left else b""
            if not data:
                return
            at = piece.start + piece.done + unflushed
            _put(descriptor, data, at, part.path)
            unflushed += len(data)
            if unflushed >= _FLUSH_BYTES:
                os.fdatasync(descriptor)
                part.advanced(piece, unflushed)
                unflushed = 0
    finally:
        if unflushed:
            os.fdatasync(descriptor)
            part.advanced(piece, unflushed)
        os.close(descriptor)


def _put(descriptor: int, data: bytes, at: int, path: Path) -> None:
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written
    except OSError as error:  # Not the network's: no use in trying again.
        raise BudgetError(f"{path} cannot be written: {error.strerror}") from error


def _get(url: str, start: int, last: int, *, ranged: bool = True) -> Any:
    headers = {"User-Agent": "ooc", "Accept-Encoding": "identity"}
    if ranged:
        headers["Range"] = f"bytes={start}-{last}"
    if not url.startswith(("http://", "https://")):
        raise SourceError(f"{url} is no address on the web")
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)


def _tried(url: str, action: Callable[[], Result], *, progress: Callable[[], int] = lambda: 0) -> Result:
    """``action()``, again after a pause while it fails in a way that may pass; tries count from the last progress."""
    tries, pause_s, before = _TRIES, _FIRST_PAUSE_S, progress()
    while True:
        try:
            return action()
        except urllib.error.HTTPError as error:
            reason, passing = f"the server says {error.code} {error.reason}", error.code in _PASSING
            error.close()
        except _FAULTS as error:
            reason, passing = _reason(error), not _no_way(error)
        if progress() > before:
            tries, pause_s, before = _TRIES, _FIRST_PAUSE_S, progress()
        tries -= 1
        if not passing or tries == 0:
            raise SourceError(f"{url} cannot be downloaded: {reason}")
        time.sleep(pause_s)
        pause_s *= 2


def _no_way(error: BaseException) -> bool:
    """Whether trying again is of no use: the name is not known, or nobody listens."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(cause, socket.gaierror | ConnectionRefusedError)


def _reason(error: BaseException) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, OSError):
        return cause.strerror or str(cause) or type(cause).__name__
    if isinstance(cause, http.client.IncompleteRead):
        return "the connection was closed too early"
    return str(cause) or type(cause).__name__


def _md5(path: Path, listener: Listener) -> str:
    task = f"checking {path.name}"
    total, done = path.stat().st_size, 0
    listener(TaskStarted(task, total, "bytes"))
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            digest.update(data)
            done += len(data)
            listener(TaskAdvanced(task, done))
    listener(TaskFinished(task))
    return digest.hexdigest()
