# SPDX-License-Identifier: Apache-2.0
"""A CSR matrix of which some rows at a time are made dense."""

import numpy as np

from ooc.errors import SourceError
from ooc.sources.source import Ids
from ooc.storage.array import AnyArray


class SparseRows:
    """CSR ``data`` [nnz], ``indices`` [nnz], ``indptr`` [rows + 1], ``shape`` (rows, columns), checked."""

    def __init__(self, data: AnyArray, indices: AnyArray, indptr: AnyArray, shape: AnyArray, *, name: str) -> None:
        if shape.shape != (2,) or any(array.ndim != 1 for array in (data, indices, indptr)):
            raise SourceError(f"{name} is no CSR matrix: data, indices, indptr or shape has wrong dimensions")
        if any(array.dtype.kind not in "iu" and array.size for array in (indices, indptr, shape)):
            raise SourceError(f"{name} is no CSR matrix: indices, indptr and shape must be whole numbers")
        self.shape = (int(shape[0]), int(shape[1]))
        self._data, self._indices = data, indices
        self._indptr = np.array(indptr).astype(np.int64, copy=False)
        if min(self.shape) < 0 or len(self._indptr) != self.shape[0] + 1 or len(data) != len(indices):
            raise SourceError(f"{name} is no CSR matrix of the shape {self.shape}: its parts have other lengths")
        if self._indptr[0] != 0 or self._indptr[-1] != len(data) or (np.diff(self._indptr) < 0).any():
            raise SourceError(f"{name} is no CSR matrix: indptr does not rise from 0 to {len(data)}")
        self._name = name
        self.nbytes = data.nbytes + indices.nbytes + self._indptr.nbytes

    def dense(self, rows: Ids) -> AnyArray:
        """Rows ``rows`` [n] (-1: a row of zeros) as [n, columns]; repeated entries are summed."""
        starts = np.where(rows < 0, 0, self._indptr[rows])
        lengths = np.where(rows < 0, 0, self._indptr[rows + 1] - starts)
        ends = np.cumsum(lengths)
        # Entry k of the result is entry `k - (its row's first k) + (its row's start)` of the matrix.
        at = np.arange(int(ends[-1])) + np.repeat(starts - ends + lengths, lengths)
        columns = self._indices[at].astype(np.int64)
        if len(columns) and not (columns.min() >= 0 and columns.max() < self.shape[1]):
            raise SourceError(f"{self._name} has a column index outside its {self.shape[1]} columns")
        kind = self._data.dtype if self._data.dtype.kind == "f" else np.dtype(np.float64)
        out = np.zeros((len(rows), self.shape[1]), dtype=kind)
        np.add.at(out, (np.repeat(np.arange(len(rows)), lengths), columns), self._data[at])
        return out
