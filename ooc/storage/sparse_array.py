# SPDX-License-Identifier: Apache-2.0
"""A sparse matrix of a store, kept row by row (CSR) in three arrays.

Shapes: N rows, F columns, R rows at hand with E entries.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ooc.errors import StoreError
from ooc.storage.array import CHUNK_BYTES, AnyArray, Array
from ooc.storage.writer import ArrayWriter

PARTS = ("indptr", "indices", "values")
INDEX_DTYPE = np.dtype(np.int32)
_CHUNKS, _LEAST_CHUNK_BYTES = 256, 1 << 16


class Entries(NamedTuple):
    """The entries of R rows: their number in each [R], and row after row their columns [E], ascending, and values
    [E]."""

    counts: npt.NDArray[np.int64]
    columns: AnyArray
    values: AnyArray

    @classmethod
    def of_rows(cls, rows: AnyArray) -> "Entries":
        """Return the entries of dense ``rows`` [R, F]."""
        at, columns = np.nonzero(rows)
        return cls(np.bincount(at, minlength=len(rows)), columns, rows[at, columns])

    @classmethod
    def of_csr(cls, counts: AnyArray, columns: AnyArray, values: AnyArray, width: int) -> "Entries":
        """Return the entries of rows in any order: repeated ones are summed, zeros left out."""
        keys = np.repeat(np.arange(len(counts)), counts) * width + columns
        if (keys[1:] <= keys[:-1]).any():
            order = np.argsort(keys, kind="stable")
            keys, values = keys[order], values[order]
            firsts = np.flatnonzero(np.diff(keys, prepend=-1))
            keys, values = keys[firsts], np.add.reduceat(values, firsts)
        kept = values != 0
        keys = keys[kept]
        return cls(np.bincount(keys // width, minlength=len(counts)), keys % width, values[kept])

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The row of every entry [E]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def dense(self, columns: int) -> AnyArray:
        """Return the dense rows [R, F], ``columns`` being F."""
        out = np.zeros((len(self.counts), columns), dtype=self.values.dtype)
        out[self.rows, self.columns.view(f"u{self.columns.itemsize}")] = self.values  # a negative one is none
        return out


class SparseArray(Array):
    """A sparse matrix [N, F] of a store, read like any array, as dense rows; stored as ``indptr`` [N + 1], ``indices``
    and ``values`` [entries]."""

    def __init__(self, name: str, path: Path, columns: int, parts: dict[str, Array]) -> None:
        self.indptr, self.indices, self.values = (parts[f"{name}/{part}"] for part in PARTS)
        super().__init__(name, path, (self.indptr.shape[0] - 1, columns), (1, columns), self.values.dtype.str)

    @property
    def entries(self) -> int:
        """The number of stored entries."""
        return self.values.shape[0]

    def read_entries(self, start: int, stop: int) -> Entries:
        """Return the entries of the rows ``[start, stop)``."""
        ends = self.indptr.read(start, stop + 1)
        columns, values = (part.read(int(ends[0]), int(ends[-1])) for part in (self.indices, self.values))
        return Entries(np.diff(ends), columns, values)

    def read(self, start: int = 0, stop: int | None = None) -> AnyArray:
        try:
            return self.read_entries(start, self.shape[0] if stop is None else stop).dense(self.columns)
        except (ValueError, IndexError) as error:  # the store's numbers are inconsistent
            raise StoreError(f"{self.path} is damaged: {error} (ooc verify finds more)") from error

    def checksums(self) -> npt.NDArray[np.uint32]:
        """Return the checksums of its three arrays, concatenated."""
        return np.concatenate([part.checksums() for part in (self.indptr, self.indices, self.values)])


def most_entries(shape: tuple[int, int], dtype: npt.DTypeLike) -> int:
    """Return the number of entries with which a sparse matrix takes as much as a dense one."""
    itemsize = np.dtype(dtype).itemsize
    return max(1, shape[0] * shape[1] * itemsize // (4 + itemsize))


class EntriesWriter:
    """A writer of a sparse matrix of at most ``most_entries``, used like ``ArrayWriter``."""

    def __init__(self, path: Path, name: str, shape: tuple[int, int], dtype: npt.DTypeLike) -> None:
        most = most_entries(shape, dtype)
        # Few entries must not be padded to a large chunk.
        chunk_bytes = min(CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, most * INDEX_DTYPE.itemsize // _CHUNKS))
        shapes: list[tuple[int, npt.DTypeLike]] = [(shape[0] + 1, np.int64), (most, INDEX_DTYPE), (most, dtype)]
        self._writers = {
            part: ArrayWriter(path, f"{name}/{part}", (count,), kind, chunk_bytes=chunk_bytes)
            for part, (count, kind) in zip(PARTS, shapes, strict=True)
        }
        self._writers["indptr"].append(np.zeros(1, dtype=np.int64))

    @property
    def rows(self) -> int:
        return self._writers["indptr"].rows - 1

    @property
    def entries(self) -> int:
        return self._writers["values"].rows

    def append(self, block: Entries) -> None:
        """Add rows, whose values have the matrix's dtype."""
        self._writers["indptr"].append(self.entries + np.cumsum(block.counts))
        self._writers["indices"].append(block.columns.astype(INDEX_DTYPE))
        self._writers["values"].append(block.values)

    def __enter__(self) -> "EntriesWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        for part, writer in self._writers.items() if kind is None else ():
            writer.close(shrink=part != "indptr")
