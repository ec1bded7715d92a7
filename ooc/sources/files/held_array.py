# SPDX-License-Identifier: Apache-2.0
"""Arrays that a Python program holds, numpy's, torch's or sparse ones of scipy, read in blocks as npy files are."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.streams import check_truth_values
from ooc.sources.source import ranges
from ooc.storage.array import AnyArray
from ooc.storage.sparse_array import Entries


class HeldArray:
    """``given`` as rows of plain numbers; ``name`` for messages. SourceError where it is something else."""

    def __init__(self, given: Any, name: str) -> None:
        self.name = name
        self._sparse = hasattr(given, "tocsr")
        if self._sparse:
            given = given.tocsr()
        elif hasattr(given, "detach"):  # A tensor.
            given = given.detach().cpu().numpy()
        self._array: Any = given if self._sparse else np.asarray(given)
        self.shape: tuple[int, ...] = tuple(self._array.shape)
        self.dtype: np.dtype[Any] = self._array.dtype
        if self.dtype.kind not in "biuf" or not self.shape or 0 in self.shape:
            raise SourceError(f"{name} are {self.dtype}{list(self.shape)}, not numbers for each node")

    @property
    def entries(self) -> int | None:
        """How many there are, where rows come without their zeros."""
        return int(self._array.nnz) if self._sparse else None

    def rows(self, start: int, stop: int) -> AnyArray:
        """The rows ``start:stop``, a copy."""
        part = self._array[start:stop]
        found: AnyArray = part.toarray() if self._sparse else np.array(part)
        check_truth_values(found, self.name)
        return found

    def _without_zeros(self, start: int, stop: int) -> Entries:
        part = self._array[start:stop]
        values = part.data.astype(self.dtype if self.dtype.kind == "f" else np.float64)
        return Entries.of_csr(np.diff(part.indptr), part.indices.astype(np.int64), values, part.shape[1])

    def row_blocks(self, size: int) -> Iterator[AnyArray | Entries]:
        """All rows, at most ``size`` at a time."""
        rows = self._without_zeros if self._sparse else self.rows
        return (rows(start, stop) for start, stop in ranges(self.shape[0], size))

    def matrix(self, meaning: str) -> tuple[int, int]:
        """Its two extents; SourceError, saying what they mean, where there are not two."""
        if len(self.shape) != 2:
            raise SourceError(f"{self.name} have the shape {list(self.shape)}, not {meaning}")
        return self.shape[0], self.shape[1]
