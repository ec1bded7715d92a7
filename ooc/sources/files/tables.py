# SPDX-License-Identifier: Apache-2.0
"""Tables in files: CSV (plain, ``.gz``, ``.zst``; tabs in ``.tsv``) and Parquet, read in blocks of rows.

The first line of a CSV file names the columns unless all of it is numbers; they are then called ``0``, ``1``, ….
Parquet needs the package ``pyarrow``.
"""

import base64
import contextlib
import csv
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.lines import line_blocks, optional, plain_suffix, text_block_bytes
from ooc.storage.array import AnyArray

_CSV = (".csv", ".tsv")
_PARQUET = (".parquet", ".pq")
TABLE_SUFFIXES = (*_CSV, *_PARQUET)
_FIRST_LINE_BYTES = 1 << 20
_PACKED = 4  # Bytes of such text that a compressed one is, for estimates.
_NO_TEXT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Control characters, some of which count as spaces: one in place of a digit would make another number."""
_PARQUET_BUFFER_BYTES = 1 << 20
_LOOKED_AT_ROWS = 100
_TRUTH = {"": False, **dict.fromkeys(("0", "0.0", "false"), False), **dict.fromkeys(("1", "1.0", "true"), True)}
_TIME = re.compile(
    r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{4}/\d\d?/\d\d?( .*)?|\d\d?[/.]\d\d?[/.]\d{2,4}( .*)?|\d\d?:\d\d(:\d\d.*)?"
)
_WHOLE = re.compile(r"-?(0|[1-9]\d*)")
"""An id in another form, 007 say, is a text: as a number it would come back as another one."""
_ODD_NUMBER = re.compile(r"(?:^|[,\t])[ \t]*(?:[+]|[+-]?0\d)", re.MULTILINE)
_LARGE = 100_000_000
"""Seconds since 1970 are more since 1973; dates written as one number are near."""


class Cells(Enum):
    """What a column is read as: whole numbers int64 [n]; floating-point numbers [n] (a Parquet column of lists:
    [n, k]) with NaN for an empty cell; texts [n], empty ones included; membership of a split bool [n], an empty cell
    being no member."""

    WHOLE = "whole numbers"
    REAL = "numbers"
    TEXT = "texts"
    MEMBER = "true or false (1 or 0) as a split does; if it is a feature, name all features with feature_columns="


class NoWholeNumber(SourceError):
    """A cell of a column of ids is no whole number, or not written as one: the ids are texts."""


class ColumnKind(Enum):
    """What a column looks like, by its type and first rows."""

    NUMBERS = "numbers"
    LARGE = "whole numbers as large as times and ids are"
    TRUTH = "true and false"
    TIMES = "dates or times"
    CATEGORIES = "categories"
    TEXTS = "texts"


Block = dict[str, AnyArray]


def is_table(path: Path) -> bool:
    """Whether the file's name is a table's."""
    return plain_suffix(path) in _CSV or path.suffix in _PARQUET


def open_table(path: Path, budget_bytes: int) -> "Table":
    """The table in the file ``path``; SourceError where it is none, or cannot be read."""
    if plain_suffix(path) in _CSV:
        return CsvTable(path, text_block_bytes(budget_bytes))
    if path.suffix in _PARQUET:
        return ParquetTable(path)
    raise SourceError(f"{path} is no table: {', '.join(TABLE_SUFFIXES)} are")


def side_by_side(block: Block, names: tuple[str, ...]) -> AnyArray:
    """The columns ``names`` as one array [n, c]; a column of lists is several."""
    return np.column_stack([block[name] for name in names])


def width(table: "Table", names: tuple[str, ...]) -> int:
    """How many numbers the columns ``names`` are, as the first row tells; 0 without one."""
    first = next(table.blocks(dict.fromkeys(names, Cells.REAL), 1), None) if names else None
    return side_by_side(first, names).shape[1] if first is not None else 0


class CsvTable:
    """A table of text. How many ``rows`` it has only reading it all tells."""

    rows: int | None = None

    def __init__(self, path: Path, block_bytes: int) -> None:
        self.path = path
        self._block_bytes = block_bytes
        self._delimiter = "\t" if plain_suffix(path) == ".tsv" else ","
        first = next(line_blocks(path, min(block_bytes, _FIRST_LINE_BYTES)), b"").split(b"\n", 1)[0]
        cells = self._cells([self._text(first)])
        if not cells or not cells[0]:
            raise SourceError(f"{path} is empty")
        self._named = not all(_is_number(cell) for cell in cells[0])
        names = [cell.strip() if self._named else str(at) for at, cell in enumerate(cells[0])]
        if len(set(names)) < len(names):
            raise SourceError(f"{path} has two columns of one name: {', '.join(names)}")
        self.columns: tuple[str, ...] = tuple(names)

    @cached_property
    def rows_about(self) -> int:
        """An estimate of how many rows there are, for disk and time; a third more than what the first ones tell."""
        first = next(line_blocks(self.path, min(self._block_bytes, _FIRST_LINE_BYTES)))
        packed = 1 if self.path.suffix in _CSV else _PACKED
        return max(1, 4 * packed * self.path.stat().st_size * first.count(b"\n") // (3 * len(first)))

    def blocks(self, wanted: Mapping[str, Cells], size: int) -> Iterator[Block]:
        """The ``wanted`` columns, about ``size`` rows at a time. SourceError, with the place, for a wrong cell."""
        line = 1
        for raw in line_blocks(self.path, self._block_bytes):
            text = self._text(raw)
            if line == 1 and self._named:
                text = "\n" + text.split("\n", 1)[1]
            block = self._quickly(text, wanted)
            if block is None:
                block = self._slowly(text, wanted, line)
            line += raw.count(b"\n")
            rows = len(next(iter(block.values())))
            for start in range(0, rows, size):
                yield {name: column[start : start + size] for name, column in block.items()}

    def _quickly(self, text: str, wanted: Mapping[str, Cells]) -> Block | None:
        """With numpy's parser; None where the text is not plain enough for it, or wrong."""
        lines = [line for line in text.split("\n") if line.strip()]
        if Cells.WHOLE in wanted.values() and _ODD_NUMBER.search(text):
            return None
        if '"' in text or text.count(self._delimiter) != len(lines) * (len(self.columns) - 1) or not lines:
            return None
        found: Block = {}
        rows: list[list[str]] = []
        try:
            for kind in Cells:
                names = [name for name, cells in wanted.items() if cells is kind]
                places = [self.columns.index(name) for name in names]
                if names and kind in (Cells.WHOLE, Cells.REAL):
                    columns: AnyArray = np.loadtxt(
                        lines,
                        dtype=np.int64 if kind is Cells.WHOLE else np.float64,
                        delimiter=self._delimiter,
                        comments=None,
                        usecols=places,
                        ndmin=2,
                    )
                    found |= {name: columns[:, at] for at, name in enumerate(names)}
                elif names:
                    rows = rows or [line.split(self._delimiter) for line in lines]
                    texts = {name: [row[at].strip() for row in rows] for name, at in zip(names, places, strict=True)}
                    found |= {name: of_texts(cells, kind) for name, cells in texts.items()}
        except (ValueError, OverflowError):
            return None
        return {name: found[name] for name in wanted}

    def _slowly(self, text: str, wanted: Mapping[str, Cells], line: int) -> Block:
        """Cell by cell: empty ones, quoted ones, and the message for a wrong one."""
        found: dict[str, list[int | float | str]] = {name: [] for name in wanted}
        for number, row in enumerate(self._cells(text.split("\n")), start=line):
            if not row:
                continue
            if len(row) != len(self.columns):
                raise SourceError(f"{self.path}, line {number}: {len(row)} cells for {len(self.columns)} columns")
            for name, cells in wanted.items():
                cell = row[self.columns.index(name)].strip()
                try:
                    found[name].append(_value(cell, cells))
                except (ValueError, OverflowError):
                    kind = NoWholeNumber if cells is Cells.WHOLE else SourceError
                    raise kind(
                        f"{self.path}, line {number}: the column {name} holds {cell[:60]!r}, not {cells.value}"
                    ) from None
        types = {Cells.WHOLE: np.int64, Cells.REAL: np.float64, Cells.TEXT: np.object_, Cells.MEMBER: np.bool_}
        return {name: np.array(column, dtype=types[wanted[name]]) for name, column in found.items()}

    @cached_property
    def _head(self) -> dict[str, list[str]]:
        """The first cells of each column."""
        text = self._text(next(line_blocks(self.path, min(self._block_bytes, _FIRST_LINE_BYTES))))
        rows = self._cells(text.split("\n")[self._named : _LOOKED_AT_ROWS])
        columns = zip(*(row for row in rows if len(row) == len(self.columns)), strict=True)
        found = dict(zip(self.columns, ([cell.strip() for cell in cells] for cells in columns), strict=False))
        return {name: found.get(name, []) for name in self.columns}

    def kinds(self) -> dict[str, ColumnKind]:
        """What each of the columns looks like."""
        return {name: _kind(cells) for name, cells in self._head.items()}

    def text_ids(self, column: str) -> bool:
        """Whether the column holds ids that are no whole numbers, as far as its first rows tell."""
        return not all(map(_WHOLE.fullmatch, self._head[column]))

    def _cells(self, lines: list[str]) -> list[list[str]]:
        try:
            return list(csv.reader(lines, delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            raise SourceError(f"{self.path} is no CSV: {error}") from error

    def _text(self, raw: bytes) -> str:
        if found := _NO_TEXT.search(raw):
            raise SourceError(f"{self.path} is no CSV: it holds the control character {found[0][0]:#04x}")
        try:
            return raw.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path} is no text in UTF-8: {error.reason}") from error


def _is_number(cell: str) -> bool:
    try:
        _value(cell.strip() or "empty", Cells.REAL)
    except ValueError:
        return False
    return True


def of_texts(texts: list[str], cells: Cells) -> AnyArray:
    """``texts`` as they are, or as membership of a split, [n]; ValueError where one says neither true nor false."""
    if cells is Cells.TEXT:
        return np.array(texts, dtype=np.object_)
    meaning = {text: _value(text, Cells.MEMBER) for text in dict.fromkeys(texts)}
    return np.array([meaning[text] for text in texts], dtype=np.bool_)


def _kind(cells: list[str]) -> ColumnKind:
    """What the first ``cells`` of a column look like. Where only some are numbers the others are taken for mistakes,
    which reading them tells the place of."""
    cells = [cell for cell in cells if cell]
    numbers = [float(cell) for cell in cells if _is_number(cell)]
    if numbers:
        large = all(value.is_integer() and abs(value) >= _LARGE for value in numbers)
        return ColumnKind.LARGE if large else ColumnKind.NUMBERS
    for kind, fits in (
        (ColumnKind.TRUTH, lambda cell: cell.lower() in _TRUTH),
        (ColumnKind.TIMES, _TIME.fullmatch),
    ):
        if cells and all(map(fits, cells)):
            return kind
    return ColumnKind.TEXTS if cells else ColumnKind.NUMBERS


def _value(cell: str, cells: Cells) -> int | float | str:
    """ValueError for what is none, numbers as Python alone writes them (``1_0``, digits of other scripts) included."""
    if cells is not Cells.TEXT and ("_" in cell or not cell.isascii()):
        raise ValueError("no number in a file")
    match cells:
        case Cells.WHOLE:
            if not _WHOLE.fullmatch(cell):
                raise ValueError("no plain whole number")
            value = int(cell)
            if not -(2**63) <= value < 2**63:
                raise ValueError("past 64 bits")
            return value
        case Cells.REAL:
            return float(cell) if cell else float("nan")
        case Cells.TEXT:
            return cell
        case Cells.MEMBER:
            if cell.lower() not in _TRUTH:
                raise ValueError("neither true nor false")
            return _TRUTH[cell.lower()]
        case _:
            assert_never(cells)


class ParquetTable:
    """A table of typed columns, read page by page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading() as file:
            self.columns: tuple[str, ...] = tuple(file.schema_arrow.names)
            self.rows: int | None = int(file.metadata.num_rows)
            self.rows_about = int(file.metadata.num_rows)

    def blocks(self, wanted: Mapping[str, Cells], size: int) -> Iterator[Block]:
        done = 0
        with self._reading() as file:
            for batch in file.iter_batches(batch_size=size, columns=list(wanted), use_threads=False):
                yield {name: self._column(batch, name, cells) for name, cells in wanted.items()}
                done += batch.num_rows
        if done != self.rows:
            raise SourceError(f"{self.path} holds {done} rows, {self.rows} by its own count")

    def _column(self, batch: Any, name: str, cells: Cells) -> AnyArray:
        types = optional("pyarrow.types", self.path)
        column, kind = batch.column(name), batch.column(name).type
        if types.is_dictionary(kind):
            column, kind = column.dictionary_decode(), kind.value_type
        lists = types.is_list(kind) or types.is_large_list(kind)
        if cells is Cells.REAL and (lists or types.is_fixed_size_list(kind)):
            return self._lists(column, name)
        text = _is_text(types, kind)
        number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        match cells:
            case Cells.TEXT if text or number:
                texts = column if text else column.cast("string")
                return of_texts(["" if cell is None else cell for cell in texts.to_pylist()], cells)
            case Cells.WHOLE if (types.is_integer(kind) or types.is_floating(kind)) and not column.null_count:
                return self._cast(column, name, "int64")
            case Cells.REAL if number:
                return self._cast(column, name, kind if types.is_floating(kind) else "float64")
            case Cells.MEMBER if number or text:
                with contextlib.suppress(ValueError):
                    return of_texts(["" if cell is None else str(cell) for cell in column.to_pylist()], cells)
        empty = " with empty cells" if column.null_count else ""
        raise SourceError(f"{self.path}: the column {name} holds {kind}{empty}, not {cells.value}")

    def text_ids(self, column: str) -> bool:
        """Whether the column holds ids that are no whole numbers, by its type."""
        types = optional("pyarrow.types", self.path)
        with self._reading() as file:
            kind = file.schema_arrow.field(column).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        return _is_text(types, value) or types.is_uint64(value)

    def kinds(self) -> dict[str, ColumnKind]:
        return self._kinds

    @cached_property
    def _kinds(self) -> dict[str, ColumnKind]:
        types = optional("pyarrow.types", self.path)
        with self._reading() as file:
            columns = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
            categories = self._categories(file)
            flat = [name for name, kind in columns.items() if types.is_integer(kind) or types.is_floating(kind)]
            head = next(file.iter_batches(batch_size=_LOOKED_AT_ROWS, columns=flat, use_threads=False), None)
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
                found[name] = _kind(["" if cell is None else str(cell) for cell in head.column(name).to_pylist()])
            else:  # Lists of numbers; what else it may be is refused where it is read.
                found[name] = ColumnKind.NUMBERS
        return found

    def _categories(self, file: Any) -> set[str]:
        """The columns that were categories when they were written; Parquet itself knows those of numbers as numbers."""
        arrow, types = optional("pyarrow", self.path), optional("pyarrow.types", self.path)
        written = (file.metadata.metadata or {}).get(b"ARROW:schema")
        if written is None:
            return set()
        schema = arrow.ipc.read_schema(arrow.BufferReader(base64.b64decode(written)))
        return {field.name for field in schema if types.is_dictionary(field.type)}

    def _lists(self, column: Any, name: str) -> AnyArray:
        values = np.asarray(column.flatten().to_numpy(zero_copy_only=False))
        width = len(values) // max(1, len(column))
        if column.null_count or values.dtype.kind not in "biuf" or {len(cell) for cell in column} - {width}:
            raise SourceError(f"{self.path}: the lists in the column {name} are not of as many numbers each")
        return values.reshape(len(column), width)

    def _cast(self, column: Any, name: str, kind: Any) -> AnyArray:
        try:
            return np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))
        except optional("pyarrow", self.path).ArrowInvalid as error:
            raise SourceError(f"{self.path}: the column {name} does not fit: {_one_line(error)}") from error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Any]:
        """The file, open for a while; what a damaged one raises meanwhile is one SourceError."""
        parquet, arrow = optional("pyarrow.parquet", self.path), optional("pyarrow", self.path)
        try:
            with parquet.ParquetFile(
                self.path, buffer_size=_PARQUET_BUFFER_BYTES, page_checksum_verification=True
            ) as file:
                yield file
        except (OSError, ValueError, KeyError, MemoryError, arrow.ArrowException) as error:
            if isinstance(error, OSError) and error.strerror:
                raise SourceError(f"{self.path} cannot be read: {error.strerror}") from error
            raise SourceError(f"{self.path} cannot be read, it is damaged or no Parquet: {_one_line(error)}") from error


Table = CsvTable | ParquetTable


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
