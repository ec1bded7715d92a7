# SPDX-License-Identifier: Apache-2.0
"""One array of a store: Zarr v3 metadata beside raw chunk files.

A chunk file is ``chunk_rows`` whole rows, little endian, uncompressed, and its size is a multiple of 4096 bytes. So
rows ``[a, b)`` of a chunk are the bytes ``[a * row_bytes, b * row_bytes)`` of its file: ``zarr.open`` reads them, and
so does a direct read without a decoder. The last chunk is stored at full size, its tail zero. A CRC-32C of each chunk
is in ``checksums.bin`` (uint32, in chunk order).
"""

import contextlib
import ctypes
import errno
import fcntl
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import google_crc32c
import numpy as np
import numpy.typing as npt

from ooc.errors import OocError, StoreError, as_error
from ooc.storage.checksums import combined, of_zeros
from ooc.storage.zarr_json import METADATA_FILE, read_array

if TYPE_CHECKING:
    import zarr

AnyArray = npt.NDArray[Any]

PAGE_BYTES = 4096
CHUNK_BYTES = 4 << 20
MIN_CHUNK_ROWS = 1024
_COMPARED_NUMBERS = 1 << 16
GAP_BYTES = 1 << 16  # Rows nearer than this are read in one go: about what a disk reads in the time of a request.
READ_BYTES = 4 << 20
CHECKSUM_FILE = "checksums.bin"
TEMPORARY_SUFFIX = ".ooc-tmp"
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64")

_CHECKED_BYTES = 1 << 18
_MOST_CHUNK_BYTES = 64 * CHUNK_BYTES
"""The largest chunk, except of wide rows; damaged metadata may declare far larger ones, whose pages would be
counted."""
_AT_FDCWD = -100  # AT_FDCWD: relative paths are from the current folder
_RENAME_EXCHANGE = 2  # RENAME_EXCHANGE
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
"""Errors of network file systems without locks; files there are only less protected."""


def write_at(descriptor: int, data: npt.NDArray[np.uint8], offset: int) -> None:
    """Write all of ``data`` from ``offset`` on; one system call may write less."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:].data, offset + done)


def whole_numbers_rounded(stored: AnyArray, given: AnyArray) -> npt.NDArray[np.bool_] | None:
    """Return which of the integers ``given`` were changed in ``stored``; None: none of them, or they are no integers.

    They are compared as integers, since as floating point both would be rounded.
    """
    if given.dtype.kind not in "iu" or given.itemsize <= 2:
        return None
    found, height = np.zeros(given.shape, dtype=np.bool_), max(1, _COMPARED_NUMBERS * len(given) // max(1, given.size))
    for start in range(0, len(given), height):
        some = slice(start, start + height)
        with np.errstate(invalid="ignore"):  # out of the dtype's range
            found[some] = stored[some].astype(given.dtype) != given[some]
    return found if found.any() else None


@dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` contiguous bytes of the file ``path``, from ``offset``."""

    path: Path
    offset: int
    nbytes: int


def chunk_rows(rows: int, row_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the rows of a chunk: the power of two closest to ``chunk_bytes``, not much taller than the array.

    It is at least 1024, and such that a chunk's size is a multiple of 4096 bytes.
    """
    least = max(MIN_CHUNK_ROWS, PAGE_BYTES // math.gcd(row_bytes, PAGE_BYTES))
    wanted = 1 << max(0, (chunk_bytes // row_bytes).bit_length() - 1)
    covering = 1 << max(0, (rows - 1).bit_length())
    return max(least, min(wanted, covering))


class Array:
    """A readable array of a store.

    Attributes: ``name`` within the store, ``path`` (its folder), ``shape``, ``chunks`` (shape of a chunk), ``dtype``,
    ``columns`` (1 for one-dimensional arrays), ``itemsize``, ``row_bytes``, ``padded_rows`` (rows covered by chunk
    files), ``start_bytes`` (of a file before its rows). Holds no open file.
    """

    def __init__(self, name: str, path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> None:
        self.name = name
        self.path = path
        self.shape = shape
        self.chunks = chunks
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.columns = shape[1] if len(shape) == 2 else 1
        self.itemsize = self.dtype.itemsize
        self.row_bytes = self.columns * self.itemsize
        self.num_chunks = -(-shape[0] // chunks[0])
        self.padded_rows = self.num_chunks * chunks[0]
        self.chunk_bytes = chunks[0] * self.row_bytes
        self.start_bytes = 0
        self._checked_part = 0, 0, 0  # chunk, bytes of it read from its beginning on, and their checksum

    def __repr__(self) -> str:
        return f"Array({self.name!r}, shape={self.shape}, dtype={self.dtype.name}, chunks={self.chunks})"

    def chunk_path(self, index: int) -> Path:
        """Return the file of chunk ``index`` (counted along the rows)."""
        return self.path / "c" / (f"{index}/0" if len(self.shape) == 2 else f"{index}")

    def extents(self, start_row: int, stop_row: int) -> list[Extent]:
        """Return where the bytes of rows ``[start_row, stop_row)`` are, in order, one extent per chunk.

        ``stop_row`` may extend into the zero padding of the last chunk, up to ``padded_rows``.
        """
        if not 0 <= start_row <= stop_row <= self.padded_rows:
            raise ValueError(f"{self.name}: rows {start_row}:{stop_row} of {self.padded_rows} asked for")
        found = []
        height, row = self.chunks[0], start_row
        while row < stop_row:
            index, first = divmod(row, height)
            rows = min(height - first, stop_row - row)
            offset = self.start_bytes + first * self.row_bytes
            found.append(Extent(self.chunk_path(index), offset, rows * self.row_bytes))
            row += rows
        return found

    def read(self, start: int = 0, stop: int | None = None) -> AnyArray:
        """Return rows ``[start, stop)`` as a new array ``[stop - start, columns]`` (or 1-D), by buffered reads.

        Raises StoreError naming array, file and offset where a chunk is missing or short, and where a chunk that has
        been read from its first row to its last, by one or several calls, has another checksum.
        """
        stop = self.shape[0] if stop is None else stop
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"{self.name}: rows {start}:{stop} of {self.shape[0]} asked for")
        out = np.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        view = out.reshape(-1).view(np.uint8)
        done = 0
        for extent in self.extents(start, stop):
            part = view[done : done + extent.nbytes]
            self._read_extent(extent, part)
            self._check_part((start + done // self.row_bytes) // self.chunks[0], extent.offset, part)
            done += extent.nbytes
        return out

    @property
    def has_checksums(self) -> bool:
        """Whether there are checksums; a file without is trusted."""
        return (self.path / CHECKSUM_FILE).exists()

    def _check_part(self, chunk: int, offset: int, part: npt.NDArray[np.uint8]) -> None:
        """Extend a chunk's checksum if ``part`` is the next one of it, and compare it at the end of the rows."""
        seen, at, checksum = self._checked_part if offset else (chunk, 0, 0)
        end = offset + len(part)
        if seen != chunk or not offset <= at < end or not self.has_checksums:
            return
        checksum = google_crc32c.extend(checksum, part[at - offset :])
        self._checked_part = chunk, end, checksum
        padding = max(0, (chunk + 1) * self.chunk_bytes - self.shape[0] * self.row_bytes)
        complete = end == self.chunk_bytes - padding
        if complete and combined(checksum, of_zeros(padding), padding) != self.checksums()[chunk]:
            raise self.damaged(chunk)

    def blocks(self, rows: int) -> Iterator[tuple[int, AnyArray]]:
        """Yield ``(first row, rows)`` over the whole array, at most ``rows`` at a time."""
        for start in range(0, self.shape[0], rows):
            yield start, self.read(start, min(start + rows, self.shape[0]))

    def damaged(self, chunk: int) -> OocError:
        """Return the error for a chunk whose bytes do not match the store's checksum."""
        return StoreError(
            f"{self.name}: the SSD returns other bytes of {self.chunk_path(chunk)} than the store's checksums tell; "
            "ooc verify tells whether the file is damaged"
        )

    def checksums(self) -> npt.NDArray[np.uint32]:
        """Return the CRC-32C of every chunk, ``[num_chunks]``."""
        path = self.path / CHECKSUM_FILE
        with as_error(StoreError, f"{self.name}: checksums cannot be read from {path}"):
            if not path.is_file() or path.stat().st_size != 4 * self.num_chunks:
                raise StoreError(f"{self.name}: {path} is no file of {self.num_chunks} checksums, one a chunk")
            return np.frombuffer(path.read_bytes(), dtype="<u4")

    def checksum(self, index: int, offset: int = 0, nbytes: int | None = None) -> int:
        """Return the CRC-32C of chunk ``index`` as it is on disk now, or of ``nbytes`` of it from ``offset`` on."""
        end = self.chunk_bytes if nbytes is None else offset + nbytes
        data, result = np.empty(min(_CHECKED_BYTES, end - offset), dtype=np.uint8), 0
        for start in range(offset, end, _CHECKED_BYTES):
            part = data[: end - start]
            self._read_extent(Extent(self.chunk_path(index), self.start_bytes + start, len(part)), part)
            result = google_crc32c.extend(result, part)
        return result

    def _read_extent(self, extent: Extent, out: npt.NDArray[np.uint8]) -> None:
        # Without blocking on a pipe in the file's place.
        opener = lambda path, flags: os.open(path, flags | os.O_NONBLOCK)  # noqa: E731
        done, chunk = 0, f"{self.name}: chunk {extent.path}"
        with (
            as_error(StoreError, f"{chunk} cannot be read at byte {extent.offset}"),
            open(extent.path, "rb", buffering=0, opener=opener) as file,
        ):
            while done < extent.nbytes:
                got = os.preadv(file.fileno(), [out[done:].data], extent.offset + done)
                if got == 0:
                    place, missing = extent.offset + done, extent.nbytes - done
                    raise StoreError(f"{chunk} ends at byte {place}, {missing} bytes too early")
                done += got


def read_rows(array: Array, rows: AnyArray, *, gap_bytes: int = GAP_BYTES, read_bytes: int = READ_BYTES) -> AnyArray:
    """Return ``rows`` [n] of ``array``, in that order, with repetitions.

    Rows at most ``gap_bytes`` apart are read together with what is between them, at most ``read_bytes`` at a time.
    """
    wanted, where = np.unique(rows, return_inverse=True)
    out = np.empty((len(wanted), *array.shape[1:]), dtype=array.dtype)
    gap, border = (max(1, size // array.row_bytes) for size in (gap_bytes, read_bytes))
    for first, last in runs(wanted, gap=gap, border=border):
        run = wanted[first:last]
        out[first:last] = array.read(int(run[0]), int(run[-1]) + 1)[run - run[0]]
    return out[where]


def rows_with(values: AnyArray, blocks: Iterable[tuple[int, AnyArray]]) -> npt.NDArray[np.int64]:
    """Return the row of each of the distinct ``values`` [n], by ``blocks`` of all rows' values; -1 if no row has it.

    Each block comes with its first row.
    """
    order = np.argsort(values, kind="stable")
    ascending, rows = values[order], np.full(len(values), -1, dtype=np.int64)
    for start, block in blocks:
        at = np.minimum(np.searchsorted(ascending, block), len(values) - 1)
        here = np.flatnonzero(ascending[at] == block)
        rows[order[at[here]]] = start + here
    return rows


def runs(places: npt.NDArray[np.integer[Any]], *, gap: int = 1, border: int | None = None) -> Iterator[tuple[int, int]]:
    """Divide the ascending ``places`` [n] where one is more than ``gap`` after the last, and at each multiple of
    ``border``.

    Returns the first place and the last + 1 of each piece, which has at least one place.
    """
    apart = np.diff(places) > gap
    if border is not None:
        apart |= np.diff(places // border) != 0
    for first, last in pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(places)]):
        if first < last:
            yield first, last


def open_array(group_path: Path, name: str) -> Array:
    """Return the array ``name`` of the group at ``group_path``, from its metadata alone."""
    path = group_path / name
    try:
        found = read_array(path)
        array = Array(name, path, found.shape, found.chunks, found.dtype.str)
        plain = _is_raw(found, array)
    except FileNotFoundError as error:
        raise StoreError(f"the store {group_path} has no array {name!r}") from error
    except (MemoryError, StoreError):
        raise
    except Exception as error:  # zarr may raise anything for an invalid document
        raise damaged(path, error) from error
    if not plain:
        raise StoreError(f"{path / METADATA_FILE} describes an array that is not stored as raw rows")
    return array


def _is_raw(found: "zarr.Array[Any]", array: Array) -> bool:
    """Return whether the chunk files of ``found`` are whole rows, little endian, and nothing else."""
    from zarr.codecs import BytesCodec

    chunk = array.chunk_path(1).relative_to(array.path)
    return (
        found.dtype.name in DTYPES
        and found.chunks[1:] == found.shape[1:]
        and found.metadata.encode_chunk_key((1, 0)[: found.ndim]) == str(chunk)
        and not (found.filters or found.compressors or found.shards)
        and found.serializer in (BytesCodec(endian="little"), BytesCodec(endian=None))
        and array.chunk_bytes % PAGE_BYTES == 0
        and array.chunks[0] <= max(PAGE_BYTES, _MOST_CHUNK_BYTES // array.row_bytes)
    )


def damaged(path: Path, error: Exception) -> StoreError:
    """Return the error for damaged metadata of the group or array at ``path``."""
    return StoreError(f"{path / METADATA_FILE} is damaged: {' '.join(str(error).split())}")


def flush(path: Path) -> None:
    """Flush the file or folder ``path`` to the disk, before a rename that promises its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(paths: Sequence[Path]) -> None:
    """Flush files or whole folders ``paths`` to the disk, those that exist."""
    for path in paths:
        if path.is_dir():
            for inner in path.rglob("*"):
                flush(inner)
        if path.exists():
            flush(path)


def make_folders(path: Path) -> Iterator[Path]:
    """Make the folder ``path``, and missing ones above it, such that they survive a power cut; yield them."""
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir()
            yield folder
            flush(folder.absolute().parent)


def replace_file(path: Path, data: bytes | memoryview | Callable[[BinaryIO], None]) -> None:
    """Replace the content of ``path`` by ``data``, or by what that writes: completely or, whatever happens, not at all.

    The result survives a power cut. The temporary file beside it that a killed process leaves is used by the next call.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with open_alone(temporary) as file:
        try:
            if isinstance(data, bytes | memoryview):
                file.write(data)
            else:
                data(file)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    flush(path.absolute().parent)


def open_alone(path: Path, *, wait: bool = True) -> BinaryIO:
    """Open the empty file ``path`` exclusively, to write and read; it is made, or was left by a killed process.

    Without ``wait``, BlockingIOError where another process has it.
    """
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            lock(file.fileno(), wait=wait)
            with contextlib.suppress(FileNotFoundError):
                if path.samefile(f"/proc/self/fd/{file.fileno()}"):  # and not a file that has been renamed since
                    file.truncate()
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Lock a file or folder as long as it is open; raise BlockingIOError where another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def lock_folder(path: Path) -> int:
    """Return an open, locked descriptor of the folder; closing it releases the lock.

    BlockingIOError where another process has locked it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def lock_holder(path: Path) -> str:
    """Return which process has locked the file or folder, to follow "another process"; empty where it is unknown."""
    with contextlib.suppress(OSError, ValueError):
        status = path.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == place and int(fields[4]) > 0:
                return f" ({fields[4]})"
    return ""


def exchanged(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders atomically.

    Returns False, with nothing changed, where the system or the file system does not support that (NFS, for one).
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)
