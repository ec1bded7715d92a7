# SPDX-License-Identifier: Apache-2.0
"""Arrays in the npy format (numpy.lib.format) that are larger than memory, read in blocks.

Arrays in files are read by position; those in archives are inflated, from the first value on. Nothing is memory-mapped:
every block is read into its own memory, so that the process's memory is known. (Pages of a mapped file count as its
memory while they are in use.)

In an edge list [2, E] all sources lie before the first target. Each end is read by its own stream. In an archive, where
deflate cannot seek, the stream of the targets inflates the sources once more.
"""

import io
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.streams import Blob, damaged, read_exactly, read_values, skip
from ooc.sources.files.zip_members import Archive
from ooc.sources.source import EdgeBlock, ranges
from ooc.storage.array import AnyArray

MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 1 << 12  # numpy's of a plain array: 128
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_BLOCK_BYTES = 4 << 20


class NpyArray:
    """The array in an npy file, readable at any position, or in an archive's member, readable from the first value on.

    With ``raw``, the values of that shape and dtype that fill a file without header.
    """

    def __init__(self, where: Path | Blob, *, raw: tuple[tuple[int, ...], np.dtype[np.generic]] | None = None) -> None:
        """Raise SourceError where the file is missing, damaged, or does not have the size of its shape."""
        if isinstance(where, Path) and not where.is_file():
            raise SourceError(f"{where} is missing")
        self._blob = Blob.of_file(where) if isinstance(where, Path) else where
        self.name = self._blob.name
        if raw is None:
            self.shape, self._column_major, self.dtype, self._begin = self._header()
        else:
            (self.shape, self.dtype), self._column_major, self._begin = raw, False, 0
        self.count = prod(self.shape)
        if min(self.shape, default=0) < 0 or self._begin + self.count * self.dtype.itemsize != self._blob.size:
            raise damaged(self.name, f"{self._blob.size} bytes are no array {list(self.shape)} of {self.dtype}")

    def _header(self) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
        """Return shape, whether it is in Fortran order, dtype, and the offset of the values; raise SourceError for
        non-numbers."""
        with self._blob.open() as stream:
            begin = io.BytesIO(read_exactly(stream, min(self._blob.size, _MOST_HEADER_BYTES), self.name))
        try:
            shape, column_major, dtype = _HEADERS[np.lib.format.read_magic(begin)](begin)
        except Exception as error:  # The header is evaluated as a literal, which may raise almost anything.
            what = f"it is no npy file of version 1 or 2, or its header is not numpy's ({type(error).__name__})"
            raise damaged(self.name, what) from error
        if dtype.hasobject:
            raise SourceError(f"{self.name} holds an array of Python objects, which are never loaded")
        if dtype.kind not in "biuf" or dtype.names is not None:
            raise SourceError(f"{self.name} holds {dtype} values, not plain numbers")
        return tuple(shape), bool(column_major), dtype, begin.tell()

    @classmethod
    def find(cls, archive: Archive, name: str, where: str) -> "NpyArray":
        """Return the array in the member ``name``.npy; raise SourceError, with ``where``, if it is missing."""
        member = archive.member(f"{name}.npy")
        if member is None:
            raise SourceError(f"{where} has no array {name}")
        return cls(member)

    @property
    def path(self) -> Path:
        """The path of an array in a file."""
        return Path(self.name)

    def matrix(self, wanted: str) -> tuple[int, int]:
        """Return its rows and columns; raise SourceError where it is not the ``wanted`` matrix."""
        if len(self.shape) != 2 or not 0 < self.shape[0] <= 2**32 or self.shape[1] < 1:
            raise SourceError(f"{self.name} has the shape {list(self.shape)}, not {wanted}")
        self._check_rows()
        return self.shape[0], self.shape[1]

    def check_column(self, nodes: int) -> None:
        """Raise SourceError unless it has one value for each of ``nodes``, [N] or [N, 1]."""
        if self.shape not in ((nodes,), (nodes, 1)):
            raise SourceError(
                f"{self.name} has the shape {list(self.shape)}, an entry for each of {nodes} nodes wanted"
            )

    def values(self, size: int, first: int = 0, count: int | None = None) -> Iterator[AnyArray]:
        """Yield all values in file order, at most ``size`` at a time, or ``count`` values from ``first`` on.

        After the last value, the end of the file is checked.
        """
        stop = self.count if count is None else first + count
        with self._blob.open() as stream:
            self._seek(stream, first)
            for start, end in ranges(stop - first, size):
                yield read_values(stream, end - start, self.dtype, self.name)
            if stop == self.count and stream.read(1):
                raise damaged(self.name, "it is longer than it says")

    def whole(self) -> AnyArray:
        """Return the whole array."""
        flat = np.concatenate([np.empty(0, dtype=self.dtype), *self.values(max(1, self.count))])
        return flat.reshape(self.shape, order="F" if self._column_major else "C")

    def rows(self, start: int, stop: int) -> AnyArray:
        """Return the rows ``start:stop`` of an array in a file in C order."""
        width = prod(self.shape[1:])
        with self._blob.open() as stream:
            self._seek(stream, start * width)
            values = read_values(stream, (stop - start) * width, self.dtype, self.name)
        return values.reshape(stop - start, *self.shape[1:])

    def row_blocks(self, size: int) -> Iterator[AnyArray]:
        """Yield all rows, at most ``size`` at a time."""
        self._check_rows()
        width = prod(self.shape[1:])
        rows_at_once = max(1, min(size, _BLOCK_BYTES // max(1, width * self.dtype.itemsize)))
        for values in self.values(rows_at_once * width):
            yield values.reshape(-1, *self.shape[1:])

    def num_edges(self, preferred: int = 0) -> int:
        """Return the number of edges in [2, E] or [E, 2]; ``preferred``: the axis of the ends where both could be."""
        return self.shape[1 - self._axis_of_ends(preferred)]

    def edge_blocks(self, size: int, *, preferred: int = 0) -> Iterator[EdgeBlock]:
        """Yield the edges in order, at most ``size`` at a time."""
        total, size = self.num_edges(preferred), min(size, _BLOCK_BYTES // self.dtype.itemsize)
        if (self._axis_of_ends(preferred) == 1) == self._column_major:  # The ends do not lie side by side.
            yield from edges_between(*(self.values(size, first, total) for first in (0, total)))
            return
        for ends in self.values(2 * size):
            pairs = ends.reshape(-1, 2).astype(np.int64)
            yield EdgeBlock(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))

    def _axis_of_ends(self, preferred: int) -> int:
        axis = preferred if len(self.shape) == 2 and self.shape[preferred] == 2 else 1 - preferred
        if len(self.shape) != 2 or self.shape[axis] != 2 or self.dtype.kind not in "iu":
            wanted = "[2, edges]" if preferred == 0 else "[edges, 2]"
            raise SourceError(f"{self.name} is {self.dtype} {list(self.shape)}, not node ids {wanted}")
        return axis

    def _check_rows(self) -> None:
        if self._column_major and min(self.shape) > 1:
            raise SourceError(f"{self.name} lies column by column; write it again with numpy.ascontiguousarray")

    def _seek(self, stream: IO[bytes], first: int) -> None:
        """Move the stream to the value ``first``."""
        place = self._begin + first * self.dtype.itemsize
        if self._blob.inside is None:
            stream.seek(place)
        else:  # zipfile stops verifying a member's checksum after a seek
            skip(stream, place, self.name)


def edges_between(sources: Iterator[AnyArray], targets: Iterator[AnyArray]) -> Iterator[EdgeBlock]:
    """Yield edges from two streams of blocks of the same sizes, sources and targets."""
    for first, second in zip(sources, targets, strict=True):
        yield EdgeBlock(first.astype(np.int64), second.astype(np.int64))
