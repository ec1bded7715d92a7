# SPDX-License-Identifier: Apache-2.0
"""Rows of numbers between commas, without a header, from a stream of text: ogb's csv files."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ooc.conversion.streams import Stream
from ooc.errors import SourceError
from ooc.storage.array import AnyArray

_TEXT_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 20
_COMMA, _NEWLINE = 44, 10
_AS_ONE_LIST = bytes.maketrans(b"\n", b",")


@dataclass(frozen=True, kw_only=True)
class CsvForm:
    """What a file must hold: ``rows`` rows (None: any number) of ``columns`` numbers of ``dtype``, float64 or int64."""

    rows: int | None
    columns: int
    dtype: type[np.float64] | type[np.int64]


def csv_rows(stream: Stream, form: CsvForm, name: str) -> Iterator[AnyArray]:
    """The rows in blocks [n, columns], each of about a mebibyte of text.

    SourceError for anything else than the numbers, columns and rows of ``form``; not read past the last row.
    """
    done = 0
    for text in _whole_lines(stream, name):
        rows = _parsed(text, form, name=name, line=done + 1)
        done += len(rows)
        if form.rows is not None and done > form.rows:
            raise SourceError(f"{name} has more than the {form.rows} rows it must have")
        yield rows
    if form.rows is not None and done != form.rows:
        raise SourceError(f"{name} has {done} rows, {form.rows} were expected")


def csv_columns(stream: Stream, name: str) -> int:
    """How many columns the first row has."""
    for text in _whole_lines(stream, name):
        return text[: text.index(b"\n")].count(b",") + 1
    raise SourceError(f"{name} is empty")


def _whole_lines(stream: Stream, name: str) -> Iterator[bytes]:
    """The text in pieces that end with a newline, carriage returns left out."""
    pieces: list[bytes] = []
    length = 0
    while data := stream.read(_TEXT_BYTES):
        cut = data.rfind(b"\n") + 1
        if cut == 0 and length + len(data) > _MOST_LINE_BYTES:
            raise SourceError(f"{name} has a line of more than {_MOST_LINE_BYTES} bytes")
        if cut and length + cut >= _TEXT_BYTES // 2:
            yield (b"".join(pieces) + data[:cut]).replace(b"\r", b"")
            pieces, length = [], 0
            data = data[cut:]
        pieces.append(data)
        length += len(data)
    rest = b"".join(pieces).replace(b"\r", b"")
    if rest:
        yield rest if rest.endswith(b"\n") else rest + b"\n"


def _parsed(text: bytes, form: CsvForm, *, name: str, line: int) -> AnyArray:
    marks = np.frombuffer(text, dtype=np.uint8)
    marks = marks[(marks == _COMMA) | (marks == _NEWLINE)]
    whole = len(marks) % form.columns == 0
    lines = marks.reshape(-1, form.columns) if whole else marks[:0].reshape(0, form.columns)
    if not whole or (lines[:, -1] != _NEWLINE).any() or (lines[:, :-1] != _COMMA).any():
        raise _wrong_line(text, form, name, line)
    try:
        values = np.fromstring(text.translate(_AS_ONE_LIST).decode("ascii"), dtype=form.dtype, sep=",")
    except (ValueError, UnicodeDecodeError, DeprecationWarning):
        raise _wrong_line(text, form, name, line) from None
    if len(values) != lines.size:  # numpy before 2.3 stops at what is no number, and warns.
        raise _wrong_line(text, form, name, line)
    return values.reshape(lines.shape)


def _wrong_line(text: bytes, form: CsvForm, name: str, line: int) -> SourceError:
    """The error for the first line of ``text`` that is not as ``form`` wants it."""
    parse = int if form.dtype is np.int64 else float
    for number, row in enumerate(text.split(b"\n"), start=line):
        fields = row.split(b",")
        if len(fields) != form.columns:
            return SourceError(f"{name}, line {number}: {len(fields)} columns, {form.columns} were expected")
        for field in fields:
            try:
                parse(field)
            except ValueError:
                shown = field[:40].decode("ascii", errors="replace")
                return SourceError(f"{name}, line {number}: {shown!r} is no {'whole ' * (parse is int)}number")
    return SourceError(f"{name}: there is something else than numbers between lines {line} and {number}")
