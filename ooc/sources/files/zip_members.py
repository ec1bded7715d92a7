# SPDX-License-Identifier: Apache-2.0
"""Members of a zip archive, read without unpacking it; the archive may itself be a member of another one.

Members are read by ``zipfile``. An archive deflated in another one is inflated as far as needed. Names are only looked
up and never used as paths, so nothing can escape.
"""

import io
import struct
import zlib
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import IO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from ooc.errors import SourceError
from ooc.sources.files.streams import READ_BYTES, Blob, Seekable, read_exactly, reading_errors

_HEADER_BYTES, _LENGTHS_AT = 30, 26
"""The fixed part of a member's header, which ends with the lengths of the name and the extra field that follow it."""
_END_OF_DIRECTORY = b"PK\x05\x06"
_TAIL_BYTES = 22 + 0xFFFF  # That record and the longest comment after it.
_RAW, _ENCRYPTED = -15, 1
_MOST_CHECKPOINTS = 32


class Archive:
    """The members of the archive ``blob`` by name. SourceError where it is damaged, or no archive."""

    def __init__(self, blob: Blob) -> None:
        self._blob, self._open_blob = blob, blob.inside or blob.opening
        with reading_errors(blob.name):
            file = self._open_blob()
            counted = _declared(file, blob)  # Read first: the inflated end stays cached, with the directory.
            self._zip = ZipFile(file)
            names = self._zip.namelist()
            if counted not in (None, len(names)):
                raise BadZipFile(f"its directory has {len(names)} files of {counted}")
            if len(set(names)) != len(names):
                raise BadZipFile("it has two members of one name")

    def names(self) -> list[str]:
        """Return all names."""
        return self._zip.namelist()

    def member(self, name: str) -> Blob | None:
        """Return the member ``name``; None where there is none."""
        info = self._zip.NameToInfo.get(name)
        if info is None:
            return None
        where = f"{self._blob.name}: {name}"
        if info.flag_bits & _ENCRYPTED:
            raise SourceError(f"{where} is encrypted")
        if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise SourceError(
                f"{where} is compressed by method {info.compress_type}, only deflate can be read; "
                f"unzip {self._blob.name} and convert that"
            )
        found = Blob(where, info.file_size, partial(self._zip.open, info), partial(self._inside, info))
        found.open().close()  # Compares its header with the directory.
        return found

    def _inside(self, info: ZipInfo) -> IO[bytes]:
        return io.BufferedReader(_MemberFile(self._open_blob(), info), READ_BYTES)


class _MemberFile(Seekable):
    """A member of the archive ``file`` as a file that can be read at any position.

    Deflate cannot seek. Therefore the inflater's states (32 KiB of history) are kept at some positions, and where
    reading began and stopped. Going back to such a position, or on from there, does not start at the beginning.
    """

    def __init__(self, file: IO[bytes], info: ZipInfo) -> None:
        super().__init__(info.file_size)
        file.seek(info.header_offset + _LENGTHS_AT)
        start = info.header_offset + _HEADER_BYTES + sum(struct.unpack("<2H", file.read(4)))
        self._file, self._start = file, start
        self._stored = info.compress_type == ZIP_STORED
        self._inflater = _Inflater(0, start, zlib.decompressobj(_RAW))
        self._checkpoints = [self._inflater.copy()]
        self._recent_inflaters: deque[_Inflater] = deque(maxlen=_MOST_CHECKPOINTS)
        self._step = max(READ_BYTES, self.size // _MOST_CHECKPOINTS)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        wanted = max(0, min(len(buffer), self.size - self.at))
        if self._stored:
            self._file.seek(self._start + self.at)
            data = self._file.read(wanted)
        elif wanted:
            if self.at != self._inflater.at:
                self._move_inflater()
            data = self._inflated(wanted)
        else:
            data = b""
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def _move_inflater(self) -> None:
        self._recent_inflaters.append(self._inflater)
        known = (*self._checkpoints, *self._recent_inflaters)
        self._inflater = max((one for one in known if one.at <= self.at), key=lambda one: one.at).copy()
        while self._inflater.at < self.at:
            self._inflated(min(READ_BYTES, self.at - self._inflater.at))
        self._recent_inflaters.append(self._inflater.copy())

    def _inflated(self, size: int) -> bytes:
        """Return at least one byte, at most ``size``; raise EOFError at the end."""
        inflater = self._inflater
        while not inflater.engine.eof:
            data = inflater.engine.unconsumed_tail
            if not data:
                self._file.seek(inflater.packed_at)
                data = self._file.read(READ_BYTES)
                inflater.packed_at += len(data)
            if found := inflater.engine.decompress(data, size):
                inflater.at += len(found)
                if inflater.at >= self._checkpoints[-1].at + self._step:
                    self._checkpoints.append(inflater.copy())
                return found
            if not data:
                break
        raise EOFError("it ends too early")


@dataclass
class _Inflater:
    """An inflater at byte ``at`` of its output and at ``packed_at`` of the file."""

    at: int
    packed_at: int
    engine: "zlib._Decompress"

    def copy(self) -> "_Inflater":
        return replace(self, engine=self.engine.copy())


def _declared(file: IO[bytes], blob: Blob) -> int | None:
    """Return how many members the archive declares, which zipfile does not verify; None past 65,534."""
    tail_bytes = min(blob.size, _TAIL_BYTES)
    file.seek(blob.size - tail_bytes)
    tail = read_exactly(file, tail_bytes, blob.name)
    at = tail.rfind(_END_OF_DIRECTORY)
    counted = int.from_bytes(tail[at + 10 : at + 12], "little")
    return None if at < 0 or counted == 0xFFFF else counted
