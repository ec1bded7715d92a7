# SPDX-License-Identifier: Apache-2.0
"""Tables of text: CSV, plain, ``.gz`` or ``.zst``; with tabs in ``.tsv``.

The first line names the columns unless all of it is numbers; they are then called ``0``, ``1``, ….
"""

import csv
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import (
    LOOKED_AT_ROWS,
    WHOLE_NUMBER,
    Block,
    Cells,
    ColumnKind,
    NoWholeNumber,
    cell_value,
    is_number,
    kind_of,
    of_texts,
)
from ooc.sources.files.lines import LineTable, line_blocks, plain_suffix
from ooc.storage.array import AnyArray

CSV_SUFFIXES = (".csv", ".tsv")
_FIRST_LINE_BYTES = 1 << 20
_NO_TEXT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Control characters, some of which count as spaces: one in place of a digit would make another number."""
_ODD_NUMBER = re.compile(r"(?:^|[,\t])[ \t]*(?:[+]|[+-]?0\d)", re.MULTILINE)


class CsvTable(LineTable):
    """A table of text."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        super().__init__(path, block_bytes)
        self._delimiter = "\t" if plain_suffix(path) == ".tsv" else ","
        first = next(line_blocks(path, min(block_bytes, _FIRST_LINE_BYTES)), b"").split(b"\n", 1)[0]
        cells = self._cells([self._text(first)])
        if not cells or not cells[0]:
            raise SourceError(f"{path} is empty")
        self._named = not all(is_number(cell) for cell in cells[0])
        names = [cell.strip() if self._named else str(at) for at, cell in enumerate(cells[0])]
        if len(set(names)) < len(names):
            raise SourceError(f"{path} has two columns of one name: {', '.join(names)}")
        self.columns: tuple[str, ...] = tuple(names)

    def count(self) -> int:
        """How many rows there are."""
        column = self.columns[0]
        return sum(len(block[column]) for block in self.blocks({column: Cells.TEXT}, 1 << 18))

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
                    found[name].append(cell_value(cell, cells))
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
        rows = self._cells(text.split("\n")[self._named : LOOKED_AT_ROWS])
        columns = zip(*(row for row in rows if len(row) == len(self.columns)), strict=True)
        found = dict(zip(self.columns, ([cell.strip() for cell in cells] for cells in columns), strict=False))
        return {name: found.get(name, []) for name in self.columns}

    def kinds(self) -> dict[str, ColumnKind]:
        """What each of the columns looks like."""
        return {name: kind_of(cells) for name, cells in self._head.items()}

    def text_ids(self, column: str) -> bool:
        """Whether the column holds ids that are no whole numbers, as far as its first rows tell."""
        return not all(map(WHOLE_NUMBER.fullmatch, self._head[column]))

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
