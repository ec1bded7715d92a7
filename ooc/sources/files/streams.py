# SPDX-License-Identifier: Apache-2.0
"""Bytes of files and of what is in archives, read forwards in small memory, never beyond what is declared.

They are Python's own files: ``open``'s, ``zipfile``'s, ``gzip``'s. What those raise becomes one line.
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
"""Read at once: pieces that stay in the processor's caches."""
_RAISED = (
    *(OSError, EOFError, ValueError, RuntimeError, OverflowError, MemoryError),
    *(struct.error, zlib.error, zipfile.BadZipFile),
)


class Seekable(io.RawIOBase):
    """A file of ``size`` bytes that is read at any place: where ``at`` is."""

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
    """The file at ``path``, opened anew at each read, which costs microseconds for pieces of this size: nothing is left
    to close in generators that nobody reads to their end."""

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
    """``size`` bytes that can be opened as often as one likes, by ``opening``; ``name`` for messages.

    ``inside``: of a member of an archive, opens the same to look around in, anywhere and unchecked, where ``opening``
    gives what is read from first to last and then compared with its checksum.
    """

    name: str
    size: int
    opening: Callable[[], IO[bytes]]
    inside: Callable[[], IO[bytes]] | None = None

    @classmethod
    def of_file(cls, path: Path) -> "Blob":
        """All of the file at ``path``."""
        size = size_of(path)
        return cls(str(path), size, lambda: io.BufferedReader(_Reopened(path, size), READ_BYTES))

    def open(self) -> IO[bytes]:
        """Its bytes from the first on."""
        with told(self.name):
            return self.opening()


def size_of(path: Path) -> int:
    """Bytes of a file that can be read more than once; SourceError of one that is missing, and of pipes and devices."""
    with told(str(path)):
        found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise SourceError(f"{path} is no file that can be read more than once, but a pipe or a device")
    return found.st_size


def gunzipped(blob: Blob) -> IO[bytes]:
    """What ``blob`` holds in one or more gzip members, whose checksums are checked when their last bytes are read."""
    if not blob.size:  # gzip takes it for what is empty
        raise damaged(blob.name, "it ends too early")
    return cast(IO[bytes], gzip.GzipFile(fileobj=blob.open()))


@contextmanager
def told(name: str) -> Iterator[None]:
    """SourceError that says ``name`` for whatever reading it raises."""
    try:
        yield
    except _RAISED as error:
        if isinstance(error, OSError) and error.strerror:
            raise SourceError(f"{name} cannot be read: {error.strerror}") from error
        raise damaged(name, str(error) or "it ends too early") from error


def read_exactly(stream: IO[bytes], size: int, name: str) -> bytes:
    """``size`` bytes, few enough to be held."""
    return b"".join(_pieces(stream, size, name))


def skip(stream: IO[bytes], size: int, name: str) -> None:
    """Go on by ``size`` bytes, which are read."""
    for _ in _pieces(stream, size, name):
        pass


def read_values(stream: IO[bytes], count: int, dtype: np.dtype[np.generic], name: str) -> AnyArray:
    """``count`` values as a new array [count]."""
    values: AnyArray = np.empty(count, dtype=dtype)
    target = values.view(np.uint8).data
    done = 0
    for data in _pieces(stream, len(target), name):
        target[done : done + len(data)] = data
        done += len(data)
    check_truth_values(values, name)
    return values


def _pieces(stream: IO[bytes], size: int, name: str) -> Iterator[bytes]:
    """The next ``size`` bytes as they come; SourceError where there are fewer."""
    while size:
        with told(name):
            data = stream.read(min(size, READ_BYTES))
        if not data:
            raise damaged(name, f"{size} bytes are missing")
        yield data
        size -= len(data)


def check_truth_values(values: AnyArray, name: str) -> None:
    """SourceError for booleans that are neither: of their eight bits only one may be set, which numpy takes as given.

    Computing with others is undefined, and copying them would put what no reader expects into the store.
    """
    if values.dtype.kind == "b" and (np.ascontiguousarray(values).view(np.uint8) > 1).any():
        raise damaged(name, "it holds truth values that are neither 0 nor 1")


def damaged(name: str, reason: str) -> SourceError:
    """The error for bytes that are not as they must be."""
    return SourceError(f"{name} cannot be read, it is damaged or incomplete: {' '.join(reason.split())}")
