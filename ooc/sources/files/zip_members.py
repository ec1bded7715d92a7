# SPDX-License-Identifier: Apache-2.0
"""What is in a zip archive, without unpacking it; the archive may itself be a member of another one.

In a file, or stored in another archive, the archive is read by its directory, which lies at its end. Deflated in
another archive it can only be read forwards: then the headers before each member are followed, and the
directory, which repeats them, is left alone. Names are looked up, never used as paths: nothing can escape.
"""

import io
import struct
import zipfile
from pathlib import Path
from zipfile import ZipInfo

from ooc.errors import SourceError
from ooc.sources.files.streams import (
    Blob,
    Checked,
    FileBlob,
    ForwardBlob,
    Inflated,
    Limited,
    MemoryBlob,
    Stream,
    damaged,
    read_exactly,
)

# Signature, version, flags, method, time, date, CRC, packed size, size, lengths of the name and of what follows it.
_HEADER = struct.Struct("<4s5H3L2H")
_SIGNATURE = b"PK\x03\x04"
_ENDS = (b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x08")  # Of the directory that follows the members.
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1, 8, 1 << 11
_STORED, _DEFLATED = 0, 8
_IN_ZIP64 = 0xFFFFFFFF
_MOST_MEMBERS = 1 << 16
_END_OF_DIRECTORY = b"PK\x05\x06"
_TAIL_BYTES = 22 + 0xFFFF  # That record and the longest comment after it.


class Member:
    """One member: ``size`` bytes once unpacked, which begin at ``start`` in the archive."""

    def __init__(self, archive: Blob, info: ZipInfo, start: int) -> None:
        self.name = f"{archive.name}: {info.filename}"
        self.size = info.file_size
        if info.flag_bits & _ENCRYPTED:
            raise SourceError(f"{self.name} is encrypted")
        if info.compress_type not in (_STORED, _DEFLATED):
            raise SourceError(
                f"{self.name} is compressed by method {info.compress_type}, only deflate can be read; "
                f"unzip {archive.name} and convert that"
            )
        if info.compress_type == _STORED and info.compress_size != self.size:
            raise damaged(self.name, f"it is stored, yet {info.compress_size} bytes make {self.size}")
        if not 0 <= start <= archive.size - info.compress_size:
            raise damaged(self.name, "it reaches beyond the archive")
        self._archive, self._info, self._start = archive, info, start

    def open(self) -> Stream:
        """Its bytes from the first on. Length and checksum are checked when the last is read."""
        return Checked(self._raw(), self.name, size=self.size, crc=self._info.CRC)

    def blob(self) -> Blob:
        """Its bytes to look around in, unchecked: for archives in archives, whose members have checksums."""
        if self._info.compress_type == _STORED and isinstance(self._archive, FileBlob):
            return self._archive.part(self._start, self.size, self.name)
        return ForwardBlob(self._raw(), self.size, self.name)

    def held(self, most: int) -> MemoryBlob:
        """Its bytes in memory, checked; SourceError where that is more than ``most`` of them."""
        if self.size > most:
            raise damaged(self.name, "it is larger than such a file can be")
        return MemoryBlob(read_exactly(self.open(), self.size, self.name), self.name)

    def _raw(self) -> Stream:
        packed = Limited(self._archive.at(self._start), self._info.compress_size)
        return packed if self._info.compress_type == _STORED else Inflated(packed, self.name)


class Archive:
    """The members of the archive ``blob`` by name."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._known: dict[str, tuple[ZipInfo, int]] = {}
        self._next: int | None = None if blob.seekable else 0  # Where the next header is, going forwards.
        self._listed: dict[str, ZipInfo] = _directory(blob) if blob.seekable else {}

    def names(self) -> list[str]:
        """All names; in an archive that can only be read forwards this goes through all of it."""
        if self._next is not None:
            self._search(None)
        return list(self._listed or self._known)

    def member(self, name: str) -> Member | None:
        """The member ``name``; None where there is none."""
        if name in self._listed:
            info = self._listed[name]
            found = _header_at(self._blob, info.header_offset, sizes=False)
            if found is None or found[0].filename != name:
                raise damaged(self._blob.name, f"its directory says that {name} is where it is not")
            return Member(self._blob, info, found[1])
        if name not in self._known:
            self._search(name)
        return Member(self._blob, *self._known[name]) if name in self._known else None

    def _search(self, name: str | None) -> None:
        """Go forwards to the member ``name``, or to the end."""
        while self._next is not None and name not in self._known:
            found = _header_at(self._blob, self._next)
            if found is None:
                self._next = None
                return
            info, start = found
            if info.flag_bits & _SIZES_FOLLOW:
                raise SourceError(
                    f"{self._blob.name} was written without the sizes of its members, and is compressed in "
                    f"another archive; unzip that one and convert the result"
                )
            if len(self._known) >= _MOST_MEMBERS or info.filename in self._known:
                raise damaged(self._blob.name, f"it has {info.filename} twice, or more members than can be")
            self._known[info.filename] = found
            self._next = start + info.compress_size


def _header_at(blob: Blob, offset: int, *, sizes: bool = True) -> tuple[ZipInfo, int] | None:
    """The header that begins at ``offset``, and where its member's bytes do; None where the directory begins.

    Without ``sizes`` those may be absent.
    """
    if not 0 <= offset <= blob.size - _HEADER.size:
        return None
    stream = blob.at(offset)
    fixed = _HEADER.unpack(read_exactly(stream, _HEADER.size, blob.name))
    signature, _, flags, method, _, _, crc, packed_bytes, size, name_bytes, extra_bytes = fixed
    if signature in _ENDS:
        return None
    if signature != _SIGNATURE:
        raise damaged(blob.name, f"no member begins at byte {offset}, where one should")
    name = read_exactly(stream, name_bytes, blob.name)
    extra = read_exactly(stream, extra_bytes, blob.name)
    if sizes and _IN_ZIP64 in (packed_bytes, size):
        size, packed_bytes = _zip64_sizes(extra, size=size, packed_bytes=packed_bytes, name=blob.name)
    info = ZipInfo(name.decode("utf-8" if flags & _UTF8 else "cp437", errors="replace"))
    info.flag_bits, info.compress_type, info.CRC = flags, method, crc
    info.compress_size, info.file_size = packed_bytes, size
    return info, offset + _HEADER.size + name_bytes + extra_bytes


def _zip64_sizes(extra: bytes, *, size: int, packed_bytes: int, name: str) -> tuple[int, int]:
    """``(size, packed_bytes)``, those that did not fit 32 bits from the extra field 1."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        body, extra = extra[4 : 4 + length], extra[4 + length :]
        if kind != 1:
            continue
        long = list(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
        sizes = [long.pop(0) if value == _IN_ZIP64 and long else value for value in (size, packed_bytes)]
        return sizes[0], sizes[1]
    if _IN_ZIP64 in (size, packed_bytes):
        raise damaged(name, "a member's size is missing")
    return size, packed_bytes


class _File(io.RawIOBase):
    """A seekable blob as the file that ``zipfile`` wants."""

    def __init__(self, blob: Blob) -> None:
        self._blob, self._at = blob, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._blob.size}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._blob.at(self._at).read(len(buffer)) if self._at < self._blob.size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def names_in_zip(path: Path) -> list[str]:
    """The names in the zip at ``path``; SourceError for a file that is damaged or none."""
    return list(_directory(FileBlob(path)))


def _directory(blob: Blob) -> dict[str, ZipInfo]:
    try:
        with zipfile.ZipFile(io.BufferedReader(_File(blob))) as archive:
            infos = archive.infolist()
            if (counted := _counted(blob)) not in (None, len(infos)):
                raise zipfile.BadZipFile(f"its directory has {len(infos)} files of {counted}")
    except (OSError, ValueError, EOFError, struct.error, NotImplementedError, zipfile.BadZipFile) as error:
        raise damaged(blob.name, str(error) or type(error).__name__) from error
    found = {info.filename: info for info in infos}
    if len(found) != len(infos):
        raise damaged(blob.name, "it has two members of one name")
    return found


def _counted(blob: Blob) -> int | None:
    """How many members the archive says it has, which zipfile does not compare; None past 65,534."""
    start = max(0, blob.size - _TAIL_BYTES)
    tail = read_exactly(blob.at(start), blob.size - start, blob.name)
    at = tail.rfind(_END_OF_DIRECTORY)
    counted = int.from_bytes(tail[at + 10 : at + 12], "little")
    return None if at < 0 or counted == 0xFFFF else counted
