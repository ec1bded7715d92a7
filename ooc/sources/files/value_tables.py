# SPDX-License-Identifier: Apache-2.0
"""Tables of values that have types of their own: JSON lines in a file, and columns that a Python program holds.

A column of pandas or polars, of a networkx graph, or of JSON objects is lists of ``None``, ``bool``, ``int``,
``float``, ``str``, dates or lists of numbers; those of one type may come as arrays of numpy.
"""

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import (
    LOOKED_AT_ROWS,
    Block,
    Cells,
    ColumnKind,
    NoWholeNumber,
    cell_value,
    kind_of,
)
from ooc.sources.files.lines import LineTable, line_blocks
from ooc.storage.array import AnyArray

_ROWS_WITH_KEYS = 1000
"""In which all keys must come: so many, whatever the budget, that which columns there are does not depend on it."""
JSON_SUFFIXES = (".jsonl", ".ndjson")
_TIMES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64)
Values = Sequence[Any] | AnyArray


@dataclass(frozen=True)
class Column:
    """``values(start, stop)`` of a column that is held; ``kind``: what it is, where its own type says so."""

    values: Callable[[int, int], Values]
    kind: ColumnKind | None = None


class HeldTable:
    """Columns that are in memory, the caller's; ``path`` is what messages call the table."""

    def __init__(self, path: Path, columns: Mapping[str, Column], rows: int) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.rows: int | None = rows
        self.rows_about = rows
        self._held = columns
        if len(columns) < 1 or not rows:
            raise SourceError(f"{path} is empty")

    def count(self) -> int:
        """How many rows there are."""
        return self.rows_about

    def blocks(self, wanted: Mapping[str, Cells], size: int) -> Iterator[Block]:
        """The ``wanted`` columns, at most ``size`` rows at a time. SourceError, with the row, for a wrong value."""
        for start in range(0, self.rows_about, size):
            stop = min(start + size, self.rows_about)
            yield {
                name: as_cells(self._held[name].values(start, stop), cells, f"{self.path}: the column {name}", start)
                for name, cells in wanted.items()
            }

    def kinds(self) -> dict[str, ColumnKind]:
        """What each of the columns is."""
        return {name: column.kind or kind_of_values(self._head(name)) for name, column in self._held.items()}

    def text_ids(self, column: str) -> bool:
        """Whether the column holds ids that are no whole numbers, as far as its first rows tell."""
        return not all(map(_is_whole, self._head(column)))

    def _head(self, name: str) -> list[Any]:
        return _list(self._held[name].values(0, min(LOOKED_AT_ROWS, self.rows_about)))


class JsonTable(LineTable):
    """A JSON object a line; its columns are the keys in the first 1,000. Keys may be missing: an empty cell."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        super().__init__(path, partial(line_blocks, path, block_bytes))
        self._first: list[dict[str, Any]] = []
        keys: dict[str, None] = {}
        seen = 0
        for text in self.lines():
            rows = self._objects(text, seen + 1)[: _ROWS_WITH_KEYS - seen]
            keys |= dict.fromkeys(key for row in rows for key in row)
            self._first += rows[: LOOKED_AT_ROWS - len(self._first)]
            seen += len(rows)
            if seen == _ROWS_WITH_KEYS:
                break
        if not self._first:
            raise SourceError(f"{path} is empty")
        self.columns = tuple(keys)

    def count(self) -> int:
        """How many rows there are."""
        return sum(len(self._objects(text, 1)) for text in self.lines())

    def blocks(self, wanted: Mapping[str, Cells], size: int) -> Iterator[Block]:
        """The ``wanted`` columns, at most ``size`` rows at a time. SourceError, with the row, for a wrong value."""
        known, row, line = set(self.columns), 0, 1
        for text in self.lines():
            rows = self._objects(text, line)
            for number, found in enumerate(rows, start=line):
                if not known.issuperset(found):
                    new = next(key for key in found if key not in known)
                    raise SourceError(
                        f"{self.path}, line {number}: none of the first {_ROWS_WITH_KEYS:,} lines has the key {new!r}; "
                        "give the first line all keys, null where there is nothing"
                    )
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                yield {
                    name: as_cells(
                        [found.get(name) for found in part], cells, f"{self.path}: the column {name}", row + start
                    )
                    for name, cells in wanted.items()
                }
            row += len(rows)
            line += text.count(b"\n")

    def kinds(self) -> dict[str, ColumnKind]:
        """What each of the columns looks like."""
        return {name: kind_of_values([row.get(name) for row in self._first]) for name in self.columns}

    def text_ids(self, column: str) -> bool:
        """Whether the column holds ids that are no whole numbers, as far as its first rows tell."""
        return not all(_is_whole(row.get(column)) for row in self._first)

    def _objects(self, text: bytes, line: int) -> list[dict[str, Any]]:
        found = []
        for number, part in enumerate(text.split(b"\n"), start=line):
            if not part.strip():
                continue
            try:
                value = json.loads(part)
            except (ValueError, RecursionError) as error:
                raise SourceError(f"{self.path}, line {number}: no JSON: {error}") from error
            if not isinstance(value, dict):
                raise SourceError(f"{self.path}, line {number}: an object in braces is wanted, one a line")
            found.append(value)
        return found


def kind_of_values(values: list[Any]) -> ColumnKind:
    """What a column with these first ``values`` is."""
    there = [value for value in values if not _is_nothing(value)]
    if there and all(isinstance(value, _TIMES) for value in there):
        return ColumnKind.TIMES
    if there and all(isinstance(value, bool | np.bool_) for value in there):
        return ColumnKind.TRUTH
    if any(isinstance(value, list | tuple | np.ndarray) for value in there):
        return ColumnKind.NUMBERS  # What else it may be is refused where it is read.
    return kind_of([str(value) for value in there])


def as_cells(values: Values, cells: Cells, where: str, row: int) -> AnyArray:
    """``values`` as ``cells``. SourceError, saying ``where``, for one of the rows from ``row`` on that is none."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and (values.ndim == 1 or cells is Cells.REAL):
        if cells is Cells.REAL:
            return values if values.dtype.kind == "f" else values.astype(np.float64)
        if cells is Cells.WHOLE and values.dtype.kind in "iu" and values.dtype != np.uint64:
            return values.astype(np.int64)
    found = _list(values)
    if cells is Cells.REAL and any(isinstance(value, list | tuple | np.ndarray) for value in found):
        return _matrix(found, where)
    take, dtype = _TAKEN_BY[cells]
    out: AnyArray = np.empty(len(found), dtype=dtype)
    for at, value in enumerate(found):
        try:
            out[at] = take(value)
        except (TypeError, ValueError, OverflowError):
            kind = NoWholeNumber if cells is Cells.WHOLE else SourceError
            raise kind(f"{where} holds {str(value)[:60]!r} in row {row + at}, not {cells.value}") from None
    return out


def _list(values: Values) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _is_nothing(value: Any) -> bool:
    """``None``, not-a-number, and what pandas has in their place."""
    nan = isinstance(value, float) and value != value
    return nan or value is None or value == "" or type(value).__name__ in ("NAType", "NaTType")


def _is_whole(value: Any) -> bool:
    try:
        _whole(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _whole(value: Any) -> int:
    if isinstance(value, bool | str) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("no whole number")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError("past 64 bits")
    return number


def _real(value: Any) -> float:
    if isinstance(value, str) and value:
        raise ValueError("a text")
    return float("nan") if _is_nothing(value) else float(value)


def _text(value: Any) -> str:
    if _is_nothing(value):
        return ""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, str | int | float | np.integer | np.floating):
        return str(value)
    raise TypeError("neither a text nor a number")


_TAKEN_BY: dict[Cells, tuple[Callable[[Any], object], type[np.generic]]] = {
    Cells.WHOLE: (_whole, np.int64),
    Cells.REAL: (_real, np.float64),
    Cells.TEXT: (_text, np.object_),
    Cells.MEMBER: (lambda value: cell_value(_text(value), Cells.MEMBER), np.bool_),
}


def _matrix(values: list[Any], where: str) -> AnyArray:
    try:
        found: AnyArray = np.array([*map(_list, values)])
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2 or found.dtype.kind not in "biuf":
        raise SourceError(f"{where} holds lists that are not of as many numbers each")
    return found.astype(np.float64, copy=False) if found.dtype.kind != "f" else found
