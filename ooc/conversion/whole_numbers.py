# SPDX-License-Identifier: Apache-2.0
"""Whole numbers that float32 would round, where they come as float64: as tables and sparse matrices give what was whole
in them. Among fractions a number is as near as float32 comes; in a column of whole numbers alone it is another one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray
from ooc.storage.sparse_array import Entries

_LOOKED_AT_VALUES = 1 << 16
_MOST_WHOLE = 2**53
"""Above, every number of float64 is whole."""


class WholeColumns:
    """Columns of float64 in which there are whole numbers alone, and the first number in each that float32 would round.
    ``described``: what an error calls the number in a row and column."""

    def __init__(self, columns: int, described: Callable[[int, int], str]) -> None:
        self._whole_F = np.ones(columns, dtype=np.bool_)
        self._described = described
        self._rounded: dict[int, tuple[int, Any]] = {}

    def look_at(self, rows: AnyArray | Entries, start: int) -> None:
        """``rows`` [n, F] begin with row ``start``."""
        if isinstance(rows, Entries):
            self._look(rows, start, rows.columns)
            return
        height = max(1, _LOOKED_AT_VALUES // len(self._whole_F))
        for first in range(0, len(rows), height):
            if not self._whole_F.any():
                return
            some = rows[first : first + height]
            self._look(some, start + first, np.broadcast_to(np.arange(len(self._whole_F)), some.shape))

    def _look(self, rows: AnyArray | Entries, start: int, columns: AnyArray) -> None:
        values = values_of(rows)
        is_whole = values == np.trunc(values)
        self._whole_F[columns[~is_whole]] = False
        with np.errstate(over="ignore"):
            rounded = is_whole & (np.abs(values) < _MOST_WHOLE) & (values.astype(np.float32) != values)
        for column in set(columns[rounded].tolist()) - {*self._rounded}:
            row, _, value = first_of(rows, start, rounded & (columns == column))
            self._rounded[column] = row, value

    def check(self) -> None:
        """SourceError for the first that would be rounded, when all rows have been looked at."""
        for column, (row, value) in sorted(self._rounded.items()):
            if self._whole_F[column]:
                raise rounded_by("float32", self._described(row, column), value)


def values_of(rows: AnyArray | Entries) -> AnyArray:
    """The numbers in ``rows``, those that there are."""
    return rows.values if isinstance(rows, Entries) else rows


def first_of(rows: AnyArray | Entries, start: int, wrong: AnyArray) -> tuple[int, int, Any]:
    """Row, column and value of the first that is ``wrong`` among the values of ``rows``, which begin with row
    ``start``."""
    at = tuple(np.argwhere(wrong)[0])
    row, column = (rows.rows[at], rows.columns[at]) if isinstance(rows, Entries) else at
    return start + int(row), int(column), values_of(rows)[at]


def rounded_by(kind: str, what: str, value: Any) -> SourceError:
    """The error for a whole number that the type ``kind`` would round; ``what`` it is."""
    wider = "dtype float64, or " if kind == "float32" else ""
    return SourceError(f"{what} is {int(value)}, which {kind} would round; give {wider}smaller numbers")
