# SPDX-License-Identifier: Apache-2.0
"""Tables of text: CSV, plain, ``.gz`` or ``.zst``; tab-separated in ``.tsv``; numbers separated by blanks.

numpy's parser reads the numbers; dividing the text into blocks is ours. pyarrow's streaming CSV reader takes about a
third of the time on two columns of ids. However, it is an optional package, takes 40 MB for itself, and accepts
irregular numbers (``+1``, blanks).
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import (
    LOOKED_AT_ROWS,
    MOST_EXACT,
    WHOLE_NUMBER,
    Block,
    Cells,
    ColumnKind,
    NoWholeNumber,
    Rounded,
    cell_value,
    is_number,
    kind_of,
    of_texts,
)
from ooc.sources.files.lines import COMMENTS, LineTable, line_blocks, plain_suffix
from ooc.storage.array import AnyArray

CSV_SUFFIXES = (".csv", ".tsv")
_NO_TEXT = bytes([*range(9), 11, 12, *range(14, 32), 127])
"""Control characters, some of which count as spaces: one in place of a digit would change a number."""
_NAMES = re.compile(r"\s*\d*\s*")
"""Names of numbered columns; an empty one is pandas' index."""
_COMMENT = re.compile(rf"^[{''.join(mark.decode() for mark in COMMENTS)}].*", re.MULTILINE)
_TYPES = {Cells.WHOLE: np.int64, Cells.REAL: np.float64, Cells.TEXT: np.object_, Cells.MEMBER: np.bool_}


class TextTable(LineTable):
    """The table in blocks of ``lines``; messages call it ``path``.

    ``delimiter``: between cells; None: blanks, and lines that begin with # or % are comments. ``skip``: lines at the
    start that belong to something else. ``columns``: their number, with the names ``0``, ``1``, …; None: as many as in
    the first line, which holds their names unless all its cells are numbers.
    """

    def __init__(
        self,
        path: Path,
        lines: Callable[[], Iterator[bytes]],
        *,
        delimiter: str | None = ",",
        columns: int | None = None,
        skip: int = 0,
    ) -> None:
        super().__init__(path, lines)
        self._delimiter, self._skip = delimiter, skip
        names = [*map(str, range(columns or 0))]
        if columns is None:
            cells = self._cells([self._text(next(lines(), b"").split(b"\n", 1)[0])])
            if not cells or not cells[0]:
                raise SourceError(f"{path} is empty")
            named = not all(map(is_number, cells[0]))
            if named and (data := [cell for cell in cells[0] if is_number(cell) and not _NAMES.fullmatch(cell)]):
                what = f"{path}: the first line names the columns, and {data[0]!r} is hardly the name of one"
                raise SourceError(f"{what}; put a line of names above the data")
            self._skip += named
            names = [cell.strip() if named else str(at) for at, cell in enumerate(cells[0])]
        if len(set(names)) < len(names):
            raise SourceError(f"{path} has two columns of one name: {', '.join(names)}")
        self.columns: tuple[str, ...] = tuple(names)

    @classmethod
    def of_file(cls, path: Path, block_bytes: int) -> "TextTable":
        """Return the CSV in the file ``path``, whose first line tells the delimiter."""
        lines = partial(line_blocks, path, block_bytes)
        usual = "\t" if plain_suffix(path) == ".tsv" else ","
        first = next(lines(), b"").split(b"\n", 1)[0]
        return cls(path, lines, delimiter=next((one for one in (usual, "\t", ";") if one.encode() in first), usual))

    def count(self) -> int:
        """Return the number of rows."""
        column = self.columns[0]
        return sum(len(block[column]) for block in self.blocks({column: Cells.TEXT}, 1 << 18))

    def blocks(self, wanted: Mapping[str, Cells], size: int) -> Iterator[Block]:
        """Yield the ``wanted`` columns, at most ``size`` rows at a time; raise SourceError, with the place, for a wrong
        cell."""
        line = 1
        for raw in self.lines():
            text = self._rows(raw, line)
            block = self._parse_block(text, wanted)
            if block is None:
                block = self._parse_cells(text, wanted, line)
            line += raw.count(b"\n")
            rows = len(next(iter(block.values())))
            for start in range(0, rows, size):
                yield {name: column[start : start + size] for name, column in block.items()}

    def rows_of(self, cells: Cells, size: int) -> Iterator[AnyArray]:
        """Yield all columns side by side [n, columns], as numbers."""
        for block in self.blocks(dict.fromkeys(self.columns, cells), size):
            yield np.column_stack([*block.values()])

    def _rows(self, raw: bytes, line: int) -> str:
        """Yield the text of the rows from that ``line`` on; other lines become empty."""
        text = self._text(raw)
        if self._delimiter is None and any(mark in raw for mark in COMMENTS):
            text = _COMMENT.sub("", text)
        if (skipped := min(self._skip + 1 - line, text.count("\n"))) > 0:
            text = "\n" * skipped + text.split("\n", skipped)[-1]
        return text

    def _parse_block(self, text: str, wanted: Mapping[str, Cells]) -> Block | None:
        """Return the block parsed by numpy; None where the text is too irregular for it, or wrong."""
        if '"' in text or not text.strip() or (Cells.WHOLE in wanted.values() and _is_odd(text)):
            return None
        columns, numbers = len(self.columns), (Cells.WHOLE, Cells.REAL)
        found: Block = {}
        try:
            if self._delimiter is None and not {*wanted.values()} - {*numbers}:  # The number of columns must be known.
                kinds = [(name, _TYPES[wanted.get(name, Cells.REAL)]) for name in self.columns]
                rows: AnyArray = np.loadtxt(io.StringIO(text), kinds, comments=None, ndmin=1)
                found = {name: rows[name] for name in wanted}
            for kind in Cells if not found else ():
                names = [name for name, cells in wanted.items() if cells is kind]
                places = [self.columns.index(name) for name in names]
                if names and kind in numbers:
                    rows = np.loadtxt(io.StringIO(text), _TYPES[kind], None, self._delimiter, usecols=places, ndmin=2)
                    found |= {name: rows[:, at] for at, name in enumerate(names)}
                elif names:
                    cells = [line.split(self._delimiter) for line in text.split("\n") if line.strip()]
                    if any(len(row) != columns for row in cells):
                        return None
                    for name, at in zip(names, places, strict=True):
                        found[name] = of_texts([row[at].lstrip(" ") for row in cells], kind)
        except (ValueError, OverflowError):
            return None
        # An integer beyond this may have been rounded.
        if any((np.abs(found[name]) >= MOST_EXACT).any() for name, cells in wanted.items() if cells is Cells.REAL):
            return None
        if not self._is_regular(text, len(next(iter(found.values()))), wanted):
            return None
        return {name: found[name] for name in wanted}

    def _is_regular(self, text: str, rows: int, wanted: Mapping[str, Cells]) -> bool:
        """Return whether each of the ``rows``, whose ``wanted`` cells are there, has a cell for each column."""
        between, inside = self._delimiter, len(self.columns) - 1
        if between is None or text.count(between) != rows * inside:
            return between is None
        # No row has too few where all have the last one. Otherwise one may have too few and another too many.
        return self.columns[-1] in wanted or all(
            line.count(between) == inside for line in text.split("\n") if line.strip()
        )

    def _parse_cells(self, text: str, wanted: Mapping[str, Cells], line: int) -> Block:
        """Return the block parsed cell by cell, which handles empty and quoted cells; raise SourceError for a wrong
        one."""
        found: dict[str, list[int | float | str]] = {name: [] for name in wanted}
        for number, row in enumerate(self._cells(text.split("\n"), line), start=line):
            if not row:
                continue
            if len(row) != len(self.columns):
                raise SourceError(f"{self.path}, line {number}: {len(row)} cells for {len(self.columns)} columns")
            for name, cells in wanted.items():
                cell = row[self.columns.index(name)]
                try:
                    found[name].append(cell_value(cell, cells))
                except (ValueError, OverflowError) as error:
                    kind = NoWholeNumber if cells is Cells.WHOLE else SourceError
                    why = str(error) if isinstance(error, Rounded) else f"not {cells.value}"
                    where = f"{self.path}, line {number}: the column {name}"
                    raise kind(f"{where} holds {cell[:60]!r}, {why}") from None
        return {name: np.array(column, dtype=_TYPES[wanted[name]]) for name, column in found.items()}

    @cached_property
    def _first_cells(self) -> dict[str, list[str]]:
        """Return the first cells of each column."""
        rows = self._cells(self._rows(next(self.lines(), b""), 1).split("\n")[: LOOKED_AT_ROWS + self._skip])
        columns = zip(*(row for row in rows if len(row) == len(self.columns)), strict=True)
        found = dict(zip(self.columns, map(list, columns), strict=False))
        return {name: found.get(name, []) for name in self.columns}

    def kinds(self) -> dict[str, ColumnKind]:
        """Return the kind of each column, by its first rows."""
        return {name: kind_of(cells) for name, cells in self._first_cells.items()}

    def text_ids(self, column: str) -> bool:
        """Return whether the column holds ids that are no integers, judging by its first rows."""
        return not all(WHOLE_NUMBER.fullmatch(cell.strip()) for cell in self._first_cells[column])

    def _cells(self, lines: list[str], first: int = 1) -> list[list[str]]:
        """Yield the cells of ``lines`` from that number on; raise SourceError for a cell of several lines, which blocks
        would cut."""
        if self._delimiter is None:
            return [line.split() for line in lines]
        rows = list[list[str]]()
        try:
            reader = csv.reader(lines, delimiter=self._delimiter, skipinitialspace=True, strict=True)
            for row in reader:
                rows.append(row)
                if reader.line_num > len(rows):
                    number = first + len(rows) - 1
                    raise SourceError(f"{self.path}, line {number}: a cell in quotes goes on in the next line")
        except csv.Error as error:
            raise SourceError(f"{self.path} is no CSV: {error}") from error
        return rows

    def _text(self, raw: bytes) -> str:
        if len(plain := raw.translate(None, _NO_TEXT)) < len(raw):
            found = next(byte for byte in raw if byte in _NO_TEXT)
            raise SourceError(f"{self.path} is no CSV: it holds the control character {found:#04x}")
        try:
            text = plain.decode("utf-8-sig")
            return text.replace("\r\n", "\n") if "\r" in text else text
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path} is no text in UTF-8: {error.reason}") from error


def _is_odd(text: str) -> bool:
    """Return whether an integer may be written in an irregular form, ``+7`` or ``07``."""
    codes = np.frombuffer(f"\n{text}".encode(), dtype=np.uint8)
    digits = codes - ord("0") < 10  # In eight bits, all other characters wrap to larger numbers.
    leading = ~digits[:-2] & (codes[:-2] != ord(".")) & (codes[1:-1] == ord("0")) & digits[2:]
    return "+" in text or bool(leading.any())
