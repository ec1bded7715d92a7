# SPDX-License-Identifier: Apache-2.0
"""Tables in files and in memory: the kind of each, the interface of all, and tables of typed values.

Typed values come from Parquet, for which the package ``pyarrow`` is needed, from JSON lines, and from columns held by a
Python program. A column of pandas or polars, of a networkx graph, or of JSON objects is a list of ``None``, ``bool``,
``int``, ``float``, ``str``, dates or lists of numbers; columns of a single type may be numpy arrays.
"""

import base64
import contextlib
import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import (
    LOOKED_AT_ROWS,
    MOST_EXACT,
    Block,
    Cells,
    ColumnKind,
    NoWholeNumber,
    Rounded,
    cell_value,
    exact,
    kind_of,
)
from ooc.sources.files.lines import LineTable, line_blocks, optional, plain_suffix, text_block_bytes
from ooc.sources.files.streams import size_of
from ooc.sources.files.text_table import CSV_SUFFIXES, TextTable
from ooc.storage.array import AnyArray, whole_numbers_rounded

PARQUET_SUFFIXES = (".parquet", ".pq")
_PARQUET_BUFFER_BYTES = 1 << 20
_ROWS_WITH_KEYS = 1000
"""Rows within which every key of a JSON table must appear; fixed, so that the columns do not depend on the budget."""
JSON_SUFFIXES = (".jsonl", ".ndjson")
_TIME_TYPES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64)
Values = Sequence[Any] | AnyArray


class ValueTable(ABC):
    """A table of typed values; messages call it ``path``. ``rows``: None until it is read; ``rows_about``: an
    estimate."""

    path: Path
    columns: tuple[str, ...]
    rows: int | None
    rows_about: int

    @abstractmethod
    def _value_blocks(self, names: Sequence[str], size: int) -> Iterator[Mapping[str, Values]]:
        """Yield the values of some columns, at most ``size`` rows at a time."""

    def _first_values(self, column: str) -> list[Any]:
        """Return the first values of a column; used only where types do not tell a column's kind."""
        raise NotImplementedError

    def blocks(self, wanted: Mapping[str, Cells], size: int) -> Iterator[Block]:
        """Yield the ``wanted`` columns, at most ``size`` rows at a time; raise SourceError, with the row, for a wrong
        value."""
        row = 0
        for part in self._value_blocks([*wanted], size):
            yield {
                name: as_cells(part[name], cells, f"{self.path}: the column {name}", row)
                for name, cells in wanted.items()
            }
            row += len(next(iter(part.values())))

    def count(self) -> int:
        """Return the number of rows."""
        return self.rows_about

    def kinds(self) -> dict[str, ColumnKind]:
        """Return the kind of each column, by its type or its first values."""
        return {name: kind_of_values(self._first_values(name)) for name in self.columns}

    def text_ids(self, column: str) -> bool:
        """Return whether the column holds ids that are no integers, judging by its first rows."""
        return not all(map(_is_whole, self._first_values(column)))


@dataclass(frozen=True)
class Column:
    """A column in memory, read by ``values(start, stop)``; ``kind``: its kind, if its type tells."""

    values: Callable[[int, int], Values]
    kind: ColumnKind | None = None


class HeldTable(ValueTable):
    """A table of columns that the caller holds in memory."""

    def __init__(self, path: Path, columns: Mapping[str, Column], rows: int) -> None:
        self.path, self.columns, self._held = path, tuple(columns), columns
        self.rows = self.rows_about = rows
        if len(columns) < 1 or not rows:
            raise SourceError(f"{path} is empty")

    def _value_blocks(self, names: Sequence[str], size: int) -> Iterator[Mapping[str, Values]]:
        for start in range(0, self.rows_about, size):
            stop = min(start + size, self.rows_about)
            yield {name: self._held[name].values(start, stop) for name in names}

    def _first_values(self, column: str) -> list[Any]:
        return _to_list(self._held[column].values(0, min(LOOKED_AT_ROWS, self.rows_about)))

    def kinds(self) -> dict[str, ColumnKind]:
        return super().kinds() | {name: one.kind for name, one in self._held.items() if one.kind is not None}


class JsonTable(LineTable, ValueTable):  # type: ignore[override]  # of an estimate that is read
    """A table with a JSON object per line; its columns are the keys of the first 1,000. A missing key is an empty
    cell."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        super().__init__(path, partial(line_blocks, path, block_bytes))
        self._first_rows: list[dict[str, Any]] = []
        keys: dict[str, None] = {}
        seen = 0
        for text in self.lines():
            rows = self._objects(text, seen + 1)[: _ROWS_WITH_KEYS - seen]
            keys |= dict.fromkeys(key for row in rows for key in row)
            self._first_rows += rows[: LOOKED_AT_ROWS - len(self._first_rows)]
            seen += len(rows)
            if seen == _ROWS_WITH_KEYS:
                break
        if not self._first_rows:
            raise SourceError(f"{path} is empty")
        self.columns = tuple(keys)

    def count(self) -> int:
        return sum(len(self._objects(text, 1)) for text in self.lines())

    def _value_blocks(self, names: Sequence[str], size: int) -> Iterator[Mapping[str, Values]]:
        known, line = set(self.columns), 1
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
                yield {name: [found.get(name) for found in rows[start : start + size]] for name in names}
            line += text.count(b"\n")

    def _first_values(self, column: str) -> list[Any]:
        return [row.get(column) for row in self._first_rows]

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


class ParquetTable(ValueTable):
    """A Parquet table, read page by page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading() as file:
            self._schema, self._metadata = file.schema_arrow, file.metadata.metadata or {}
            self.columns = tuple(self._schema.names)
            if len(set(self.columns)) < len(self.columns):
                raise ValueError("two of its columns have the same name")
            self.rows = self.rows_about = int(file.metadata.num_rows)

    def _value_blocks(self, names: Sequence[str], size: int) -> Iterator[Mapping[str, Values]]:
        done = 0
        with self._reading() as file:
            # One row group after the other: over all of them pyarrow keeps several times as much in memory.
            for group in range(file.metadata.num_row_groups):
                for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=names, use_threads=False):
                    yield {name: self._values(batch.column(name)) for name in names}
                    done += batch.num_rows
        if done != self.rows:
            raise SourceError(f"{self.path} holds {done} rows, {self.rows} by its own count")

    def _values(self, column: Any) -> Values:
        """Yield numbers as numpy arrays, lists of equal length as matrices, and everything else as lists."""
        types = optional("pyarrow.types", self.path)
        column = column.dictionary_decode() if types.is_dictionary(column.type) else column
        kind = column.type
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            values = np.asarray(column.flatten().to_numpy(zero_copy_only=False))
            width = len(values) // max(1, len(column))
            even = not column.null_count and {len(cell) for cell in column} <= {width}
            return values.reshape(len(column), width) if even else list(column.to_pylist())
        whole = (types.is_integer(kind) or types.is_boolean(kind)) and not column.null_count
        plain = whole or types.is_floating(kind)
        found: Values = column.to_numpy(zero_copy_only=False) if plain else column.to_pylist()
        return found

    def text_ids(self, column: str) -> bool:
        """Return whether the column holds ids that are no integers, by its type."""
        types, kind = optional("pyarrow.types", self.path), self._schema.field(column).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        return _is_text(types, value) or types.is_uint64(value)

    def kinds(self) -> dict[str, ColumnKind]:
        types = optional("pyarrow.types", self.path)
        columns = dict(zip(self._schema.names, self._schema.types, strict=True))
        flat = [name for name, kind in columns.items() if types.is_integer(kind) or types.is_floating(kind)]
        with self._reading() as file:
            categories = self._categories()
            head = next(file.iter_batches(batch_size=LOOKED_AT_ROWS, columns=flat, use_threads=False), None)
        found = {}
        for name, kind in columns.items():
            if name in categories or types.is_dictionary(kind):
                found[name] = ColumnKind.CATEGORIES
            elif types.is_temporal(kind):
                found[name] = ColumnKind.TIMES
            elif types.is_boolean(kind):
                found[name] = ColumnKind.TRUTH
            elif _is_text(types, kind):
                found[name] = ColumnKind.TEXTS
            elif name in flat and head is not None:
                found[name] = kind_of(["" if cell is None else str(cell) for cell in head.column(name).to_pylist()])
            else:  # Lists of numbers; anything else is refused when it is read.
                found[name] = ColumnKind.NUMBERS
        return found

    def _categories(self) -> set[str]:
        """Return the columns that were categories when they were written; Parquet stores categories of numbers as
        numbers."""
        arrow, types = optional("pyarrow", self.path), optional("pyarrow.types", self.path)
        if (written := self._metadata.get(b"ARROW:schema")) is None:
            return set()
        schema = arrow.ipc.read_schema(arrow.BufferReader(base64.b64decode(written)))
        return {field.name for field in schema if types.is_dictionary(field.type)}

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Any]:
        """Open the file for a while; an exception for a damaged one becomes one SourceError."""
        parquet, arrow = optional("pyarrow.parquet", self.path), optional("pyarrow", self.path)
        size_of(self.path)
        try:
            with parquet.ParquetFile(
                self.path, buffer_size=_PARQUET_BUFFER_BYTES, page_checksum_verification=True
            ) as file:
                yield file
        except (OSError, ValueError, KeyError, MemoryError, arrow.ArrowException) as error:
            if isinstance(error, OSError) and error.strerror:
                raise SourceError(f"{self.path} cannot be read: {error.strerror}") from error
            what = " ".join(str(error).split())[:200] or type(error).__name__
            raise SourceError(f"{self.path} cannot be read, it is damaged or no Parquet: {what}") from error


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def kind_of_values(values: list[Any]) -> ColumnKind:
    """Return the kind of a column with these first ``values``."""
    there = [value for value in values if not _is_missing(value)]
    if there and all(isinstance(value, _TIME_TYPES) for value in there):
        return ColumnKind.TIMES
    if there and all(isinstance(value, bool | np.bool_) for value in there):
        return ColumnKind.TRUTH
    if any(isinstance(value, list | tuple | np.ndarray) for value in there):
        return ColumnKind.NUMBERS  # Anything else is refused when it is read.
    kind = kind_of([str(value) for value in there])
    numbers = kind in (ColumnKind.NUMBERS, ColumnKind.LARGE, ColumnKind.COUNTED)
    return ColumnKind.TEXTS if numbers and there and all(isinstance(value, str) for value in there) else kind


def as_cells(values: Values, cells: Cells, where: str, row: int) -> AnyArray:
    """Return ``values`` as ``cells``; raise SourceError, with ``where``, for an invalid one of the rows from ``row``
    on."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and (values.ndim == 1 or cells is Cells.REAL):
        if cells is Cells.REAL:
            return _to_float_array(values, where, row)
        if cells is Cells.WHOLE and values.dtype.kind in "iu" and values.dtype != np.uint64:
            return values.astype(np.int64)
    found = _to_list(values)
    if cells is Cells.REAL and any(isinstance(value, list | tuple | np.ndarray) for value in found):
        return _to_float_array(_to_matrix(found, where), where, row)
    take, dtype = _CONVERTERS[cells]
    out: AnyArray = np.empty(len(found), dtype=dtype)
    for at, value in enumerate(found):
        try:
            out[at] = take(value)
        except (TypeError, ValueError, OverflowError) as error:
            rounded = isinstance(error, Rounded)
            kind = NoWholeNumber if cells is Cells.WHOLE and not rounded else SourceError
            why = str(error) if rounded else f"not {cells.value}"
            raise kind(f"{where} holds {str(value)[:60]!r} in row {row + at}, {why}") from None
    return out


def _to_float_array(values: AnyArray, where: str, row: int) -> AnyArray:
    """Return numbers as floating point; raise SourceError for an integer that would be rounded."""
    if values.dtype.kind == "f":
        return values
    found = values.astype(np.float64)
    if (rounded := whole_numbers_rounded(found, values)) is not None:
        at = tuple(np.argwhere(rounded)[0])
        raise SourceError(f"{where} holds {values[at]} in row {row + at[0]}, {Rounded.MEANING}")
    return found


def _to_list(values: Values) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _is_missing(value: Any) -> bool:
    """Return whether the value is missing: ``None``, NaN, or pandas' equivalents."""
    nan = isinstance(value, float) and value != value
    return nan or type(value).__name__ in ("NoneType", "NAType", "NaTType") or (isinstance(value, str) and not value)


def _is_whole(value: Any) -> bool:
    try:
        _to_int(value)
    except Rounded:
        return True
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _to_int(value: Any) -> int:
    if isinstance(value, bool | str) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("no whole number")
    if isinstance(value, float) and abs(value) >= MOST_EXACT:  # It may have been another one.
        raise Rounded
    number = int(value)
    if number != value:  # for instance of a decimal
        raise ValueError("no whole number")
    if not -(2**63) <= number < 2**63:
        raise ValueError("past 64 bits")
    return number


def _to_float(value: Any) -> float:
    if isinstance(value, str) and value:
        raise ValueError("a text")
    return float("nan") if _is_missing(value) else exact(value) if type(value) is int else float(value)


def _to_text(value: Any) -> str:
    if _is_missing(value):
        return ""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, str | int | float | np.integer | np.floating | UUID):
        return str(value)
    raise TypeError("neither a text nor a number")


_CONVERTERS: dict[Cells, tuple[Callable[[Any], object], type[np.generic]]] = {
    Cells.WHOLE: (_to_int, np.int64),
    Cells.REAL: (_to_float, np.float64),
    Cells.TEXT: (_to_text, np.object_),
    Cells.MEMBER: (lambda value: cell_value(_to_text(value), Cells.MEMBER), np.bool_),
}


def _to_matrix(values: list[Any], where: str) -> AnyArray:
    try:
        found: AnyArray = np.array([*map(_to_list, values)])
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2 or found.dtype.kind not in "biuf":
        raise SourceError(f"{where} holds lists that are not of as many numbers each")
    return found


# ---- which kind one is ----------------------------------------------------------------------------------------------


TABLE_SUFFIXES = (*CSV_SUFFIXES, *PARQUET_SUFFIXES, *JSON_SUFFIXES)
Table = TextTable | ValueTable


def is_table(path: Path) -> bool:
    """Return whether the file's name is a table's."""
    return plain_suffix(path) in (*CSV_SUFFIXES, *JSON_SUFFIXES) or path.suffix in PARQUET_SUFFIXES


def open_table(path: Path, budget_bytes: int) -> Table:
    """Return the table in the file ``path``; raise SourceError where it is none, or cannot be read."""
    if plain_suffix(path) in CSV_SUFFIXES:
        return TextTable.of_file(path, text_block_bytes(budget_bytes))
    if plain_suffix(path) in JSON_SUFFIXES:
        return JsonTable(path, text_block_bytes(budget_bytes))
    if path.suffix in PARQUET_SUFFIXES:
        return ParquetTable(path)
    raise SourceError(f"{path} is no table: {', '.join(TABLE_SUFFIXES)} are")


def side_by_side(block: Block, names: tuple[str, ...]) -> AnyArray:
    """Return the columns ``names`` as one array [n, c]; a column of lists takes several columns."""
    return np.column_stack([block[name] for name in names])


def width(table: Table, names: tuple[str, ...]) -> int:
    """Return how many numbers the columns ``names`` have, judging by the first row; 0 without rows."""
    first = next(table.blocks(dict.fromkeys(names, Cells.REAL), 1), None) if names else None
    return side_by_side(first, names).shape[1] if first is not None else 0
