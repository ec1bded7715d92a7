# SPDX-License-Identifier: Apache-2.0
"""Writers of an array's rows directly to its chunk files, in order or to any places, without holding rows in memory.

An array becomes readable when its writer is closed, since its metadata is written last. Errors of the disk are
StoreErrors.
"""

import math
import os
from pathlib import Path
from typing import Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from ooc.errors import StoreError, as_error
from ooc.storage.array import CHECKSUM_FILE, CHUNK_BYTES, DTYPES, AnyArray, Array, chunk_rows, runs, write_at
from ooc.storage.zarr_json import METADATA_FILE, array_document


class _Writer:
    """A new array ``name`` (``"x"``, ``"in/indices"``) of the group at ``group_path``. Holds no file open."""

    def __init__(
        self,
        group_path: Path,
        name: str,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        kind = np.dtype(dtype)
        if kind.name not in DTYPES or len(shape) not in (1, 2) or min(shape) < 0 or 0 in shape[1:]:
            raise ValueError(f"{name}: no array of shape {shape} and dtype {kind} can be made")
        height = chunk_rows(shape[0], math.prod(shape[1:]) * kind.itemsize, chunk_bytes=chunk_bytes)
        chunks = (height, *shape[1:])
        self.array = Array(name, group_path / name, shape, chunks, kind.newbyteorder("<").str)
        self._checksums = [0] * self.array.num_chunks
        with as_error(StoreError, f"{self.array.path} cannot be written"):
            self.array.path.mkdir(parents=True)

    def _write(self, chunk: int, offset: int, data: npt.NDArray[np.uint8]) -> None:
        path = self.array.chunk_path(chunk)
        with as_error(StoreError, f"{path} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                write_at(descriptor, data, offset)
            finally:
                os.close(descriptor)

    def _complete(self) -> Array:
        """Write checksums and metadata."""
        array = self.array
        with as_error(StoreError, f"{array.path} cannot be written"):
            (array.path / CHECKSUM_FILE).write_bytes(np.array(self._checksums, dtype="<u4").tobytes())
            (array.path / METADATA_FILE).write_bytes(array_document(array.shape, array.chunks, array.dtype))
        return array

    def _bytes_of(self, rows: AnyArray) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of ``rows`` [n, columns] (or [n]), which must have the array's dtype."""
        array = self.array
        if rows.dtype != array.dtype or rows.shape[1:] != array.shape[1:]:
            raise ValueError(f"{array.name}: {rows.dtype}{rows.shape} written to {array!r}")
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


class ArrayWriter(_Writer):
    """A writer of rows in order: ``append`` any number of them, then ``close``, or use it as a context manager.

    ``rows``: their number so far.
    """

    rows = 0

    def append(self, rows: AnyArray) -> None:
        """Add ``rows`` ``[n, columns]`` (or ``[n]``), which must have the array's dtype."""
        array = self.array
        if self.rows + len(rows) > array.shape[0]:
            raise ValueError(f"{array.name}: more than {array.shape[0]} rows appended")
        data = self._bytes_of(rows)
        height, done = array.chunks[0], 0
        while done < len(rows):
            take = min(height - self.rows % height, len(rows) - done)
            self._write_next(data[done * array.row_bytes : (done + take) * array.row_bytes])
            self.rows += take
            done += take

    def close(self, *, shrink: bool = False) -> Array:
        """Pad the last chunk with zeros, write checksums and metadata.

        All rows must have been added; with ``shrink`` there may be fewer, and the array is shortened.
        """
        array = self.array
        if shrink:
            shape = (self.rows, *array.shape[1:])
            self.array = array = Array(array.name, array.path, shape, array.chunks, array.dtype.str)
            del self._checksums[array.num_chunks :]
        if self.rows != array.shape[0]:
            raise ValueError(f"{array.name}: {self.rows} rows appended of {array.shape[0]}")
        if missing := array.padded_rows - self.rows:
            self._write_next(np.zeros(missing * array.row_bytes, dtype=np.uint8))
        return self._complete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self.close()

    def _write_next(self, data: npt.NDArray[np.uint8]) -> None:
        """Write the next bytes of a chunk."""
        chunk, row = divmod(self.rows, self.array.chunks[0])
        self._write(chunk, row * self.array.row_bytes, data)
        self._checksums[chunk] = google_crc32c.extend(self._checksums[chunk], data)


class RowScatter(_Writer):
    """A writer of rows in any order, each once: ``put`` them, then ``close``.

    Long runs of rows are written in long pieces. So a stable partition of an array into few groups takes one sequential
    read and as many sequential writes as there are groups.
    """

    def __init__(self, group_path: Path, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        super().__init__(group_path, name, shape, dtype)
        height = self.array.chunks[0]
        self._missing = [min(height, shape[0] - start) for start in range(0, shape[0], height)]

    def put(self, places: npt.NDArray[np.int64], rows: AnyArray) -> None:
        """Write ``rows`` ``[n, columns]`` (or ``[n]``), of the array's dtype, to the ascending ``places`` ``[n]``."""
        if len(places) != len(rows):
            raise ValueError(f"{self.array.name}: {len(rows)} rows put to {len(places)} places")
        data, row_bytes, height = self._bytes_of(rows), self.array.row_bytes, self.array.chunks[0]
        for start, stop in runs(places, border=height):
            chunk, first = divmod(int(places[start]), height)
            self._write(chunk, first * row_bytes, data[start * row_bytes : stop * row_bytes])
            self._missing[chunk] -= stop - start
            if not self._missing[chunk]:
                self._finish_chunk(chunk)

    def close(self) -> Array:
        """Write checksums and metadata. All rows must have been put."""
        if any(self._missing):
            raise ValueError(f"{self.array.name}: {sum(self._missing)} rows were not put of {self.array.shape[0]}")
        return self._complete()

    def _finish_chunk(self, chunk: int) -> None:
        """Pad a chunk that has all its rows, and read it for its checksum while the system has it cached."""
        path = self.array.chunk_path(chunk)
        with as_error(StoreError, f"{path} cannot be written"):
            os.truncate(path, self.array.chunk_bytes)
        self._checksums[chunk] = self.array.checksum(chunk)
