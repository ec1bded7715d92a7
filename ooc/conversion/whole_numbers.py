# SPDX-License-Identifier: Apache-2.0
"""A check for integers that float32 would round, in float64 data as tables and sparse matrices give it.

Among fractions float32's rounding is acceptable. In a column of integers only, a rounded number is another one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray
from ooc.storage.sparse_array import Entries

_BLOCK_VALUES = 1 << 16
_MOST_WHOLE = 2**53
"""The magnitude above which all float64 numbers are integers."""


class WholeColumns:
    """The columns of float64 data that contain integers only, and the first number in each that float32 would round.

    ``describe``: returns an error's name for the number in a row and column.
    """

    def __init__(self, columns: int, describe: Callable[[int, int], str]) -> None:
        self._whole_F = np.ones(columns, dtype=np.bool_)
        self._describe = describe
        self._rounded: dict[int, tuple[int, Any]] = {}

    def examine(self, rows: AnyArray | Entries, start: int) -> None:
        """Examine ``rows`` [n, F], which begin with row ``start``."""
        if isinstance(rows, Entries):
            self._examine(rows, start, rows.columns)
            return
        height = max(1, _BLOCK_VALUES // len(self._whole_F))
        for first in range(0, len(rows), height):
            if not self._whole_F.any():
                return
            some = rows[first : first + height]
            self._examine(some, start + first, np.broadcast_to(np.arange(len(self._whole_F)), some.shape))

    def _examine(self, rows: AnyArray | Entries, start: int, columns: AnyArray) -> None:
        values = values_of(rows)
        is_whole = values == np.trunc(values)
        self._whole_F[columns[~is_whole]] = False
        with np.errstate(over="ignore"):
            rounded = is_whole & (np.abs(values) < _MOST_WHOLE) & (values.astype(np.float32) != values)
        for column in set(columns[rounded].tolist()) - {*self._rounded}:
            row, _, value = first_of(rows, start, rounded & (columns == column))
            self._rounded[column] = row, value

    def check(self) -> None:
        """Raise SourceError for the first number that would be rounded, after all rows have been examined."""
        for column, (row, value) in sorted(self._rounded.items()):
            if self._whole_F[column]:
                raise rounded_by("float32", self._describe(row, column), value)


def values_of(rows: AnyArray | Entries) -> AnyArray:
    """Return the numbers in ``rows``; of sparse rows, the stored ones."""
    return rows.values if isinstance(rows, Entries) else rows


def first_of(rows: AnyArray | Entries, start: int, wrong: AnyArray) -> tuple[int, int, Any]:
    """Return row, column and value of the first that is ``wrong`` among ``rows``, which begin with row ``start``."""
    at = tuple(np.argwhere(wrong)[0])
    row, column = (rows.rows[at], rows.columns[at]) if isinstance(rows, Entries) else at
    return start + int(row), int(column), values_of(rows)[at]


def rounded_by(kind: str, what: str, value: Any) -> SourceError:
    """Return the error for an integer, ``what``, that the dtype ``kind`` would round."""
    wider = "dtype float64, or " if kind == "float32" else ""
    return SourceError(f"{what} is {int(value)}, which {kind} would round; give {wider}smaller numbers")
