# SPDX-License-Identifier: Apache-2.0
"""Bytes of files and of archives' members, read forwards in little memory, never beyond their declared size.

They are Python's own file objects: of ``open``, ``zipfile``, ``gzip``. Their exceptions become one line.
"""

import gzip
import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray

READ_BYTES = 1 << 18
"""Bytes to read at once: pieces that stay in the processor's caches."""
_RAISED = (
    *(OSError, EOFError, ValueError, RuntimeError, OverflowError, MemoryError),
    *(struct.error, zlib.error, zipfile.BadZipFile),
)


class Seekable(io.RawIOBase):
    """A file of ``size`` bytes that is read from any position ``at``."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence] + offset
        if place < 0:
            raise OSError("a place before the beginning")
        self.at = place
        return place


class _Reopened(Seekable):
    """The file at ``path``, opened anew for each read, so that abandoned generators leave no file open.

    Opening costs microseconds for pieces of this size.
    """

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(size)
        self._path = path

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        with self._path.open("rb", buffering=0) as file:
            file.seek(self.at)
            got = file.readinto(buffer) or 0
        self.at += got
        return got


@dataclass(frozen=True)
class Blob:
    """``size`` bytes that ``opening`` opens any number of times; ``name`` for messages.

    ``inside``: for an archive's member, opens the same bytes for reading at any position without a checksum, whereas
    ``opening`` reads from first to last and then verifies the checksum.
    """

    name: str
    size: int
    opening: Callable[[], IO[bytes]]
    inside: Callable[[], IO[bytes]] | None = None

    @classmethod
    def of_file(cls, path: Path) -> "Blob":
        """Return all bytes of the file at ``path``."""
        size = size_of(path)
        return cls(str(path), size, lambda: io.BufferedReader(_Reopened(path, size), READ_BYTES))

    def open(self) -> IO[bytes]:
        """Open the bytes for reading from the first on."""
        with reading_errors(self.name):
            return self.opening()


def size_of(path: Path) -> int:
    """Return the size of a regular file; raise SourceError for a missing file, and for pipes and devices."""
    with reading_errors(str(path)):
        found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise SourceError(f"{path} is no file that can be read more than once, but a pipe or a device")
    return found.st_size


def gunzipped(blob: Blob) -> IO[bytes]:
    """Open the content of ``blob``, one or more gzip members, whose checksums are verified at their last bytes."""
    if not blob.size:  # gzip would treat it as empty
        raise damaged(blob.name, "it ends too early")
    return cast(IO[bytes], gzip.GzipFile(fileobj=blob.open()))


@contextmanager
def reading_errors(name: str) -> Iterator[None]:
    """Turn any exception of reading into a SourceError with ``name``."""
    try:
        yield
    except _RAISED as error:
        if isinstance(error, OSError) and error.strerror:
            raise SourceError(f"{name} cannot be read: {error.strerror}") from error
        raise damaged(name, str(error) or "it ends too early") from error


def read_exactly(stream: IO[bytes], size: int, name: str) -> bytes:
    """Return exactly ``size`` bytes, held in memory."""
    return b"".join(_pieces(stream, size, name))


def skip(stream: IO[bytes], size: int, name: str) -> None:
    """Read and discard ``size`` bytes."""
    for _ in _pieces(stream, size, name):
        pass


def read_values(stream: IO[bytes], count: int, dtype: np.dtype[np.generic], name: str) -> AnyArray:
    """Return ``count`` values as a new array [count]."""
    values: AnyArray = np.empty(count, dtype=dtype)
    target = values.view(np.uint8).data
    done = 0
    for data in _pieces(stream, len(target), name):
        target[done : done + len(data)] = data
        done += len(data)
    check_truth_values(values, name)
    return values


def _pieces(stream: IO[bytes], size: int, name: str) -> Iterator[bytes]:
    """Yield the next ``size`` bytes in pieces; raise SourceError where there are fewer."""
    while size:
        with reading_errors(name):
            data = stream.read(min(size, READ_BYTES))
        if not data:
            raise damaged(name, f"{size} bytes are missing")
        yield data
        size -= len(data)


def check_truth_values(values: AnyArray, name: str) -> None:
    """Raise SourceError for booleans whose byte is neither 0 nor 1, which numpy accepts.

    Computing with them is undefined, and copying them would store values that no reader expects.
    """
    if values.dtype.kind == "b" and (np.ascontiguousarray(values).view(np.uint8) > 1).any():
        raise damaged(name, "it holds truth values that are neither 0 nor 1")


def damaged(name: str, reason: str) -> SourceError:
    """Return the error for damaged bytes."""
    return SourceError(f"{name} cannot be read, it is damaged or incomplete: {' '.join(reason.split())}")
