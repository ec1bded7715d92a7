# SPDX-License-Identifier: Apache-2.0
"""Arrays in files far larger than memory, npy or headerless, read in blocks by position.

Nothing is mapped and no file stays open: every block is read into memory of its own, so that what a process
holds is what it was given. (Pages of a mapped file count as its memory while they are in use.)
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ooc.conversion.npy_stream import NpyHeader, read_header
from ooc.conversion.source import EdgeBlock, ranges
from ooc.conversion.streams import FileBlob, read_values
from ooc.errors import SourceError
from ooc.storage.array import AnyArray

_BLOCK_BYTES = 4 << 20


class NpyFile:
    """The array in an npy file, or with ``raw`` the values of that shape and type that fill a file without header."""

    def __init__(self, path: Path, *, raw: tuple[tuple[int, ...], np.dtype[np.generic]] | None = None) -> None:
        """SourceError where the file is missing, damaged, or of another size than its shape takes."""
        if not path.is_file():
            raise SourceError(f"{path} is missing")
        self.path, self.name = path, str(path)
        self._blob = FileBlob(path)
        if raw is None:
            header = read_header(self._blob.at(0), size=self._blob.size, name=self.name)
        else:
            header = NpyHeader(shape=raw[0], dtype=raw[1], column_major=False, bytes=0)
            if header.count * header.dtype.itemsize != self._blob.size:
                raise SourceError(f"{path} has {self._blob.size} bytes, which are no {raw[1]} {list(raw[0])}")
        self._header = header
        self.shape, self.dtype = header.shape, header.dtype

    def matrix(self, wanted: str) -> tuple[int, int]:
        """Rows and columns; SourceError where it is no matrix of rows, ``wanted``, that can be converted."""
        if len(self.shape) != 2 or not 0 < self.shape[0] <= 2**32 or self.shape[1] < 1:
            raise SourceError(f"{self.name} has the shape {list(self.shape)}, not {wanted}")
        if self._header.column_major and min(self.shape) > 1:
            raise SourceError(f"{self.name} lies column by column; write it again with numpy.ascontiguousarray")
        return self.shape[0], self.shape[1]

    def rows(self, start: int, stop: int) -> AnyArray:
        """The rows ``start:stop`` of an array whose rows lie one after another."""
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        return self._values(start * width, (stop - start) * width).reshape(stop - start, *self.shape[1:])

    def row_blocks(self, size: int, first: int = 0) -> Iterator[AnyArray]:
        """All rows from ``first`` on, at most ``size`` at a time."""
        row_bytes = max(1, int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize)
        for start, stop in ranges(self.shape[0], max(1, min(size, _BLOCK_BYTES // row_bytes)), first):
            yield self.rows(start, stop)

    def num_edges(self, preferred: int = 0) -> int:
        """How many edges there are in [2, E] or [E, 2]; ``preferred``: the axis of the two where both could be."""
        self._two = preferred if len(self.shape) == 2 and self.shape[preferred] == 2 else 1 - preferred
        if len(self.shape) != 2 or self.shape[self._two] != 2 or self.dtype.kind not in "iu":
            wanted = "[2, edges]" if preferred == 0 else "[edges, 2]"
            raise SourceError(f"{self.name} is {self.dtype} {list(self.shape)}, not node ids {wanted}")
        return self.shape[1 - self._two]

    def edge_blocks(self, size: int, *, preferred: int = 0) -> Iterator[EdgeBlock]:
        """The edges in order, at most ``size`` at a time."""
        total = self.num_edges(preferred)
        one_by_one = (self._two == 1) != self._header.column_major
        for start, stop in ranges(total, min(size, _BLOCK_BYTES // self.dtype.itemsize)):
            if one_by_one:  # Each edge's two ends lie side by side.
                pairs = self._values(2 * start, 2 * (stop - start)).reshape(-1, 2).astype(np.int64)
                yield EdgeBlock(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))
            else:
                ends = (self._values(offset + start, stop - start) for offset in (0, total))
                first, second = (ids.astype(np.int64) for ids in ends)
                yield EdgeBlock(first, second)

    def _values(self, first: int, count: int) -> AnyArray:
        stream = self._blob.at(self._header.bytes + first * self.dtype.itemsize)
        return read_values(stream, count, self.dtype, self.name)
