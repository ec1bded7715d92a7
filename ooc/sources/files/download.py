# SPDX-License-Identifier: Apache-2.0
"""Downloads in parallel ranges, resumed after any interruption, and checked against size and checksum. Tar archives are
unpacked.

Connections, redirects and proxies are those of ``requests``. Parallel ranges that survive the process are ours, since
no package that torch-geometric depends on has them.

``FILE.part`` is as long as the file from the start. ``FILE.part.json`` beside it identifies the server's file (by size,
ETag and date) and lists the ranges that are complete. A range is recorded only after it has been flushed, so a recorded
range is on the disk. From a server without ranges, the file is read from the beginning each time.
"""

import hashlib
import json
import os
import shutil
import socket
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar

import requests
from urllib3.exceptions import HTTPError  # Raised by a connection that breaks while its response is read.

from ooc.errors import BudgetError, SourceError, as_error
from ooc.events import Listener, reported
from ooc.sizes import format_size
from ooc.sources.source import ranges
from ooc.storage.array import lock_folder, replace_file
from ooc.threads import Threads

Result = TypeVar("Result")

_CONNECTIONS = 4
_RANGE_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_TRIES = 6
_FIRST_PAUSE_S = 0.5
_TEMPORARY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_HEADERS = {"User-Agent": "ooc", "Accept-Encoding": "identity"}
_BROKEN_TAR = (EOFError, ValueError, zlib.error, tarfile.TarError)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server says about a file: ``size`` in bytes, whether it supports ``ranges``, and a ``version`` that
    changes with the file."""

    size: int
    ranges: bool
    version: str


class _Changed(Exception):
    """The server's file differs from the one when the download began."""


def probe(url: str) -> Served:
    """Ask for the first byte of ``url``; raise SourceError where the file or the server cannot be reached."""

    def ask() -> Served:
        with requests.Session() as session, _get(session, url, (0, 1)) as response:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            ranged = response.status_code == 206 and total.isdecimal()
            length = total if ranged else response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise SourceError(f"{url} cannot be downloaded: the server does not say how large it is")
            return Served(size=int(length), ranges=ranged, version=_version(response))

    return _retry(url, ask)


def download(url: str, target: Path, *, md5: str | None, served: Served, listener: Listener) -> None:
    """Download ``url``, which the server described as ``served``, to ``target``, resuming an earlier call.

    ``md5``: the published checksum, if there is one. SourceError when the server fails permanently or the file has
    another checksum, BudgetError when the disk has no room. Downloaded ranges stay for the next call.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock_downloads(target.parent):
        with reported(listener, f"downloading {target.name}", served.size, "bytes") as advance:
            part = _Part(target, url, served, advance)
            missing = served.size - part.received
            if missing > (free := shutil.disk_usage(target.parent).free):
                need = f"{target} needs {format_size(missing)} more of disk"
                raise BudgetError(f"{need}, {format_size(free)} are free in {target.parent}")
            try:
                _fetch_all(part)
            except _Changed:
                part.forget()
                raise SourceError(f"{url} has changed on the server while it was downloaded; try again") from None
        if md5 is not None:
            with part.path.open("rb") as file, reported(listener, f"checking {part.path.name}", 0, "bytes"):
                found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if found != md5:
                part.forget()
                raise SourceError(f"{url} has the MD5 checksum {found}, published is {md5}; it was removed, try again")
        part.finish()


@contextmanager
def _lock_downloads(folder: Path) -> Iterator[None]:
    """Keep other processes from downloading into ``folder``: two would write one file."""
    try:
        descriptor = lock_folder(folder)
    except BlockingIOError:
        raise SourceError(f"another download to {folder} is under way") from None
    try:
        yield
    finally:
        os.close(descriptor)


class _Part:
    """The partially downloaded file, and the record of its complete ranges by where they start."""

    def __init__(self, target: Path, url: str, served: Served, on_progress: Callable[[int], None]) -> None:
        self.path = target.with_name(target.name + ".part")
        self.url, self.served = url, served
        self._target, self._record = target, target.with_name(target.name + ".part.json")
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._step = _RANGE_BYTES if served.ranges else max(1, served.size)
        self._ranges = [*ranges(served.size, self._step)]
        self._key = {"url": url, **asdict(served), "step": self._step}
        self._complete_ranges = self._recorded_ranges()
        if not self._complete_ranges:
            self._record.unlink(missing_ok=True)  # Removed first: the record must never describe a missing file.
            with self.path.open("wb") as file:
                file.truncate(served.size)
        self.received = sum(stop - start for start, stop in self._ranges if start in self._complete_ranges)

    def missing(self) -> list[tuple[int, int]]:
        """Return the ``(start, stop)`` of the ranges still to be fetched."""
        return [(start, stop) for start, stop in self._ranges if start not in self._complete_ranges]

    def _recorded_ranges(self) -> set[int]:
        """Return the ranges that an earlier download of the same file recorded, if this one can resume it."""
        try:
            record = json.loads(self._record.read_text())
            whole = self.path.stat().st_size == self.served.size
            return set(record["there"]) if whole and self.served.ranges and record["file"] == self._key else set()
        except (OSError, ValueError, KeyError, TypeError):
            return set()

    def advance(self, size: int) -> None:
        """Add ``size`` received bytes; a negative number for bytes that are fetched again."""
        with self._lock:
            self.received += size
            self._on_progress(self.received)

    def complete(self, start: int) -> None:
        """Record that the range from ``start`` on is on the disk."""
        with self._lock:
            self._complete_ranges.add(start)
            replace_file(self._record, json.dumps({"file": self._key, "there": sorted(self._complete_ranges)}).encode())

    def forget(self) -> None:
        """Remove the partial file and its record."""
        self._record.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Give the complete file its name."""
        self.path.replace(self._target)
        self._record.unlink(missing_ok=True)


def _fetch_all(part: _Part) -> None:
    """Fetch the missing ranges, one per connection; raise the first error once all connections are closed."""
    stopped = threading.Event()
    pool = Threads(_CONNECTIONS, "ooc-download")
    with requests.Session() as session:
        try:
            fetches = [pool.submit(_fetch_range, session, part, *missing, stopped) for missing in part.missing()]
            for fetched in pool.completed(fetches):
                fetched.result()
            pool.shutdown()
        except BaseException as error:
            stopped.set()
            # A waiting connection notices only after its timeout; an interrupt does not wait for that.
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            raise


def _fetch_range(session: requests.Session, part: _Part, start: int, stop: int, stopped: threading.Event) -> None:
    """Fetch the bytes ``start:stop``; after a broken connection, continue from the last received byte."""
    at, in_ranges = start, part.served.ranges

    def fetch_rest(file: IO[bytes]) -> None:
        nonlocal at
        if not in_ranges:
            part.advance(start - at)
            at = start
        with _get(session, part.url, (at, stop) if in_ranges else None) as response:
            _check_answer(response, at, part.served)
            while at < stop and not stopped.is_set() and (data := response.raw.read(min(_PIECE_BYTES, stop - at))):
                with as_error(BudgetError, f"{part.path} cannot be written"):  # Retrying would not help.
                    file.seek(at)
                    file.write(data)
                at += len(data)
                part.advance(len(data))
        if at < stop and not stopped.is_set():
            raise requests.ConnectionError("the connection was closed too early")

    with part.path.open("r+b", buffering=0) as file:
        _retry(part.url, lambda: fetch_rest(file), progress=lambda: at)
        if at == stop:
            os.fdatasync(file.fileno())
            part.complete(start)


def _check_answer(response: requests.Response, start: int, served: Served) -> None:
    if served.ranges:
        given = response.headers.get("Content-Range", "")
        fits = given.startswith(f"bytes {start}-") and given.endswith(f"/{served.size}")
        same = response.status_code == 206 and fits and _version(response) == served.version
    else:
        same = response.status_code == 200 and response.headers.get("Content-Length") == str(served.size)
    if not same:
        raise _Changed


def _version(response: requests.Response) -> str:
    return f"{response.headers.get('ETag', '')} {response.headers.get('Last-Modified', '')}"


def _get(session: requests.Session, url: str, span: tuple[int, int] | None) -> requests.Response:
    if not url.startswith(("http://", "https://")):
        raise SourceError(f"{url} is no address on the web")
    headers = _HEADERS | ({"Range": f"bytes={span[0]}-{span[1] - 1}"} if span is not None else {})
    response = session.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S)
    response.raise_for_status()
    return response


def _retry(url: str, action: Callable[[], Result], *, progress: Callable[[], int] = lambda: 0) -> Result:
    """Call ``action``, again after a pause while it fails with a temporary error; the number of tries counts from the
    last progress."""
    tries, pause_s, before = _TRIES, _FIRST_PAUSE_S, progress()
    while True:
        try:
            return action()
        except (requests.RequestException, HTTPError, OSError) as error:
            reason, passing = _failure_reason(error)
        if progress() > before:
            tries, pause_s, before = _TRIES, _FIRST_PAUSE_S, progress()
        tries -= 1
        if not passing or tries == 0:
            raise SourceError(f"{url} cannot be downloaded: {reason}")
        time.sleep(pause_s)
        pause_s *= 2


def _failure_reason(error: BaseException) -> tuple[str, bool]:
    """Return what went wrong in a few words, and whether it may be temporary: an unknown host or a refused connection
    is not."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        answer = error.response
        answer.close()
        return f"the server says {answer.status_code} {answer.reason}", answer.status_code in _TEMPORARY_STATUSES
    text, passing = str(error) or type(error).__name__, True
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            text = cause.strerror
        passing = passing and not isinstance(cause, socket.gaierror | ConnectionRefusedError)
        cause = cause.__cause__ or cause.__context__
    return " ".join(text.split()), passing


def unpack(archive: Path, folder: Path, *, listener: Listener) -> None:
    """Unpack the tar ``archive``, compressed or not, to ``folder``, which must not exist.

    A folder in the archive with the name of ``folder`` becomes ``folder`` itself. SourceError for a damaged archive,
    for links, and for names that lead outside; BudgetError when the disk has no room. Then nothing is left.
    """
    partial = folder.with_name(folder.name + ".unpacking")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with as_error(SourceError, f"{archive} cannot be unpacked"):
            _unpack(archive, partial, folder.name, listener)
        partial.replace(folder)
    except _BROKEN_TAR as error:
        raise SourceError(f"{archive} cannot be unpacked, it is damaged or incomplete: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack(archive: Path, partial: Path, top: str, listener: Listener) -> None:
    with (
        archive.open("rb") as raw,
        tarfile.open(fileobj=raw, mode="r|*") as stream,
        reported(listener, f"unpacking {archive.name}", archive.stat().st_size, "bytes") as advance,
    ):
        for member in stream:
            if member.isdir():
                continue
            content = stream.extractfile(member) if member.isreg() else None
            if content is None:
                raise SourceError(f"{archive} holds {member.name}, which is no plain file")
            target = partial.joinpath(*_checked_path(member.name, archive, top))
            target.parent.mkdir(parents=True, exist_ok=True)
            if member.size > (free := shutil.disk_usage(target.parent).free):
                need = format_size(member.size)
                raise BudgetError(f"{target} needs {need} of disk, {format_size(free)} are free")
            with content, target.open("xb") as file:
                shutil.copyfileobj(content, file, _PIECE_BYTES)
            advance(raw.tell())


def _checked_path(name: str, archive: Path, top: str) -> tuple[str, ...]:
    """Return ``name`` as parts of a path below the target, without the folder ``top`` at its start."""
    path = PurePosixPath(name.replace("\\", "/"))
    parts = tuple(part for part in path.parts if part != ".")
    if path.is_absolute() or not parts or ".." in parts or "\0" in name:
        raise SourceError(f"{archive} holds {name!r}, which leads out of its folder")
    return parts[1:] if parts[0] == top and len(parts) > 1 else parts
