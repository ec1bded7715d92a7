# SPDX-License-Identifier: Apache-2.0
"""Bytes of files and of what is deflated in them, read forwards in small memory, never beyond what is declared.

A :class:`Stream` reads on from where it is; its ``fork`` is another one at the same place. A fork of an inflating
stream carries the inflater's state (32 KiB of history), so that a place in a deflated file, once reached, can be
returned to: deflate itself cannot seek. A :class:`Blob` is some bytes that streams can be opened in.

Streams hold no open file: each read opens it anew, which costs microseconds for pieces of this size and leaves
nothing to close in generators that nobody reads to their end.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray

READ_BYTES = 1 << 18
"""Read from a file at once, and inflated from that: pieces that stay in the processor's caches."""
_RAW, _GZIP = -15, 31
_MOST_PLACES = 32


class Stream(Protocol):
    """Bytes in order."""

    def read(self, size: int) -> bytes:
        """At least one byte, at most ``size``; none at the end."""

    def fork(self) -> "Stream":
        """A stream of its own at the same place."""


class Blob(Protocol):
    """Bytes that streams can be opened in. ``name`` for messages; ``seekable``: anywhere at no cost."""

    name: str
    size: int
    seekable: bool

    def at(self, offset: int) -> Stream:
        """A stream from ``offset`` to the end."""


class FileStream:
    """The bytes ``start`` to ``stop`` of the file at ``path``."""

    def __init__(self, path: Path, start: int, stop: int, name: str) -> None:
        self._path, self._at, self._stop, self._name = path, start, stop, name

    def read(self, size: int) -> bytes:
        wanted = min(size, self._stop - self._at)
        if wanted <= 0:
            return b""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                data = os.pread(descriptor, wanted, self._at)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SourceError(f"{self._path} cannot be read: {error.strerror}") from error
        if not data:
            raise damaged(self._name, "the file ends too early")
        self._at += len(data)
        return data

    def fork(self) -> "FileStream":
        return FileStream(self._path, self._at, self._stop, self._name)


class FileBlob:
    """``size`` bytes of the file at ``path`` from ``start``; all of it by default."""

    seekable = True

    def __init__(self, path: Path, *, start: int = 0, size: int | None = None, name: str | None = None) -> None:
        self.path, self.start = path, start
        self.name = name or str(path)
        try:
            self.size = path.stat().st_size if size is None else size
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error

    def at(self, offset: int) -> FileStream:
        return FileStream(self.path, self.start + offset, self.start + self.size, self.name)

    def part(self, offset: int, size: int, name: str) -> "FileBlob":
        """``size`` bytes of this from ``offset``."""
        return FileBlob(self.path, start=self.start + offset, size=size, name=name)


class MemoryStream:
    """What is left of some bytes in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read(self, size: int) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        return bytes(piece)

    def fork(self) -> "MemoryStream":
        return MemoryStream(self._data)


class MemoryBlob:
    """``data``, held."""

    seekable = True

    def __init__(self, data: bytes, name: str) -> None:
        self.name, self.size, self._data = name, len(data), data

    def at(self, offset: int) -> MemoryStream:
        return MemoryStream(memoryview(self._data)[offset:])


class Inflated:
    """What ``source`` holds deflated: raw, or with ``gzip`` in one or more gzip members with checksums."""

    def __init__(self, source: Stream, name: str, *, gzip: bool = False) -> None:
        self._source, self._name, self._gzip = source, name, gzip
        self._engine = zlib.decompressobj(_GZIP if gzip else _RAW)
        self._pending = b""

    def read(self, size: int) -> bytes:
        while not self._engine.eof or self._another_member():
            data = self._pending or self._source.read(READ_BYTES)
            try:
                out = self._engine.decompress(data, size)
            except zlib.error as error:
                raise damaged(self._name, str(error)) from error
            self._pending = self._engine.unconsumed_tail
            if out:
                return out
            if not data and not self._engine.eof:
                raise damaged(self._name, "it ends too early")
        return b""

    def fork(self) -> "Inflated":
        twin = Inflated(self._source.fork(), self._name, gzip=self._gzip)
        twin._engine, twin._pending = self._engine.copy(), self._pending
        return twin

    def _another_member(self) -> bool:
        """Begin the next gzip member, if there is one; zeros that fill up a tape's block are none."""
        if not self._gzip:
            return False
        rest = self._engine.unused_data or self._source.read(READ_BYTES)
        while rest and not (rest := rest.lstrip(b"\0")):
            rest = self._source.read(READ_BYTES)
        if not rest:
            return False
        self._engine, self._pending = zlib.decompressobj(_GZIP), rest
        return True


class Checked:
    """``source``, which must be ``size`` bytes long and have the CRC-32 ``crc``; not read any further."""

    def __init__(self, source: Stream, name: str, *, size: int, crc: int) -> None:
        self._source, self._name = source, name
        self._left, self._crc, self._seen = size, crc, 0
        self._whole = False

    def read(self, size: int) -> bytes:
        if not self._left:
            self._check_end()
            return b""
        data = self._source.read(min(size, self._left))
        if not data:
            raise damaged(self._name, f"{self._left} bytes are missing")
        self._seen = zlib.crc32(data, self._seen)
        self._left -= len(data)
        if not self._left:
            self._check_end()
        return data

    def fork(self) -> "Checked":
        twin = Checked(self._source.fork(), self._name, size=self._left, crc=self._crc)
        twin._seen, twin._whole = self._seen, self._whole
        return twin

    def _check_end(self) -> None:
        if self._whole:
            return
        if self._seen != self._crc:
            raise damaged(self._name, "its checksum is wrong")
        if self._source.read(1):
            raise damaged(self._name, "it is longer than it says")
        self._whole = True


class Limited:
    """The next ``size`` bytes of ``source``."""

    def __init__(self, source: Stream, size: int) -> None:
        self._source, self._left = source, size

    def read(self, size: int) -> bytes:
        data = self._source.read(min(size, self._left)) if self._left else b""
        self._left -= len(data)
        return data

    def fork(self) -> "Limited":
        return Limited(self._source.fork(), self._left)


class ForwardBlob:
    """A blob of ``size`` bytes that can only be read forwards from its ``beginning``.

    Places that :meth:`at` was asked for are kept, so that going to one of them again, or on from it, does not
    begin at the beginning.
    """

    seekable = False

    def __init__(self, beginning: Stream, size: int, name: str) -> None:
        self.name, self.size = name, size
        self._places: dict[int, Stream] = {0: beginning}

    def at(self, offset: int) -> Stream:
        nearest = max(place for place in self._places if place <= offset)
        stream = self._places[nearest].fork()
        skip(stream, offset - nearest, self.name)
        self._places[offset] = stream.fork()
        if len(self._places) > _MOST_PLACES:  # Each keeps an inflater's history.
            del self._places[sorted(self._places)[1]]
        return stream


def skip(stream: Stream, size: int, name: str) -> None:
    """Read ``size`` bytes and forget them."""
    for _ in _pieces(stream, size, name):
        pass


def read_exactly(stream: Stream, size: int, name: str) -> bytes:
    """``size`` bytes, few enough to be held."""
    return b"".join(_pieces(stream, size, name))


def read_values(stream: Stream, count: int, dtype: np.dtype[np.generic], name: str) -> AnyArray:
    """``count`` values as a new array [count]."""
    values: AnyArray = np.empty(count, dtype=dtype)
    target = values.view(np.uint8).data
    done = 0
    for data in _pieces(stream, len(target), name):
        target[done : done + len(data)] = data
        done += len(data)
    check_truth_values(values, name)
    return values


def _pieces(stream: Stream, size: int, name: str) -> Iterator[bytes]:
    """The next ``size`` bytes as they come; SourceError where there are fewer."""
    while size:
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


def read_whole(stream: Stream, most: int, name: str) -> bytes:
    """All that is left; SourceError where that is more than ``most`` bytes."""
    pieces: list[bytes] = []
    while data := stream.read(READ_BYTES):
        most -= len(data)
        if most < 0:
            raise damaged(name, "it is larger than such a file can be")
        pieces.append(data)
    return b"".join(pieces)


def damaged(name: str, reason: str) -> SourceError:
    """The error for bytes that are not as they must be."""
    return SourceError(f"{name} cannot be read, it is damaged or incomplete: {' '.join(reason.split())}")
