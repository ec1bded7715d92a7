# SPDX-License-Identifier: Apache-2.0
"""A matrix of a store of which only the entries that are not zero are kept, row by row (CSR), in three arrays.

Shapes: N rows, F columns, R rows at hand with E entries.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ooc.errors import StoreError
from ooc.storage.array import AnyArray, Array, Extent

PARTS = ("indptr", "indices", "values")
INDEX_DTYPE = np.dtype(np.int32)


class Entries(NamedTuple):
    """Entries of R rows: how many each has [R], and row after row their columns [E], ascending, and values [E]."""

    counts: npt.NDArray[np.int64]
    columns: AnyArray
    values: AnyArray

    @classmethod
    def of_rows(cls, rows: AnyArray) -> "Entries":
        """Those of the dense ``rows`` [R, F]."""
        at, columns = np.nonzero(rows)
        return cls(np.bincount(at, minlength=len(rows)), columns, rows[at, columns])

    def dense(self, columns: int) -> AnyArray:
        """The rows [R, F], ``columns`` being F."""
        out = np.zeros((len(self.counts), columns), dtype=self.values.dtype)
        out[np.repeat(np.arange(len(out)), self.counts), self.columns] = self.values
        return out


class SparseArray(Array):
    """A matrix [N, F] of a store, read like any array: its rows come dense. ``indptr`` [N + 1], ``indices`` and
    ``values`` [entries] are what is kept of it."""

    def __init__(self, name: str, path: Path, columns: int, parts: dict[str, Array]) -> None:
        self.indptr, self.indices, self.values = (parts[f"{name}/{part}"] for part in PARTS)
        shape = (self.indptr.shape[0] - 1, columns)
        super().__init__(name, path, shape, (1, columns), self.values.dtype.str)

    @property
    def entries(self) -> int:
        """How many are kept."""
        return self.values.shape[0]

    def read_entries(self, start: int, stop: int) -> Entries:
        """Those of the rows ``[start, stop)``; StoreError where they cannot be read."""
        ends = self.indptr.read(start, stop + 1)
        counts, first, last = np.diff(ends), int(ends[0]), int(ends[-1])
        if (counts < 0).any() or not 0 <= first <= last <= self.entries:
            raise StoreError(f"{self.indptr.name}: it does not rise from 0 to {self.entries} (ooc verify finds more)")
        columns = self.indices.read(first, last)
        if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < self.columns:
            raise StoreError(f"{self.indices.name}: there are columns outside 0 to {self.columns - 1}")
        return Entries(counts, columns, self.values.read(first, last))

    def read(self, start: int = 0, stop: int | None = None) -> AnyArray:
        return self.read_entries(start, self.shape[0] if stop is None else stop).dense(self.columns)

    def extents(self, start_row: int, stop_row: int) -> list[Extent]:
        raise TypeError(f"{self.name} has no rows on the disk, only entries")

    def checksums(self) -> npt.NDArray[np.uint32]:
        """Those of its three arrays, one behind the other."""
        return np.concatenate([part.checksums() for part in (self.indptr, self.indices, self.values)])
