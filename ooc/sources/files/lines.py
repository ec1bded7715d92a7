# SPDX-License-Identifier: Apache-2.0
"""Text files, plain or compressed, as blocks of whole lines, and rows of numbers in them.

numpy's parser reads the numbers; cutting the text into blocks is ours. pyarrow's streaming CSV reader takes about half
the time on two columns of ids, but is an optional package, and takes what is no plain number (``+1``, blanks).

A compressed file's checksum is checked by reading it to its end; one that stops early is an error. Memory is
a few times ``block_bytes`` whatever the file holds.
"""

import io
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from ooc.errors import SourceError
from ooc.sources.files.streams import Blob, damaged, gunzipped, told
from ooc.storage.array import AnyArray

COMMENTS = (b"#", b"%")
_MOST_BLOCK_BYTES = 1 << 20
_LEAST_BLOCK_BYTES = 1 << 16
_PACKED = 4  # Bytes of text that a compressed one is, for estimates.
_PARSING_BYTES = 24  # A byte of text takes that many while it is parsed.
# A zstd block is at least 4 bytes and becomes at most 128 KiB: what so many bytes in give is at most 32 MiB.
_ZSTD_BYTES = 1 << 10
_ZSTD_WINDOW_BYTES = 128 << 20
_MOST_DIGITS = 18
_MOST_REAL_ID = 2**53  # From there on float64 holds no more every whole number.
_IDS = 2
_SIGNED_ID = re.compile(rb"^[ \t]*(?:\d+[ \t]+)?\+", re.MULTILINE)


class Kind(Enum):
    """What the numbers of a file may be, by the characters they are written in.

    Between blanks: all of them ids, or two ids a line and then values. Between commas, with no empty or comment line:
    whole numbers, or values, not-a-number and infinity included.
    """

    WHOLE = b"0123456789"
    REAL = b"0123456789+-.eE"
    CSV_WHOLE = b"0123456789+-,"
    CSV_REAL = b"0123456789+-.eEnaNiIfFtTyY,"


_CSV_TYPES = {Kind.CSV_WHOLE: np.int64, Kind.CSV_REAL: np.float64}


def optional(module: str, path: Path) -> Any:
    """The ``module``, to read ``path``; SourceError with the remedy where its package is not installed."""
    try:
        return import_module(module)
    except ImportError:
        package = {"yaml": "pyyaml"}.get(module, module.partition(".")[0])
        raise SourceError(f"{path} needs the package {package} to be read; pip install {package}") from None


def text_block_bytes(budget_bytes: int) -> int:
    """How much text to parse at a time so that it takes no more than an eighth of the budget."""
    return max(_LEAST_BLOCK_BYTES, min(_MOST_BLOCK_BYTES, budget_bytes // 8 // _PARSING_BYTES))


def plain_suffix(path: Path) -> str:
    """The suffix below that of a compression: ``".csv"`` of ``a.csv.gz``."""
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def line_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """The text of a file, compressed or not, in blocks; see :func:`stream_lines`."""
    if path.suffix == ".zst":
        return _whole_lines(_zstd(path), block_bytes, str(path))
    blob = Blob.of_file(path)
    return stream_lines(gunzipped(blob) if path.suffix == ".gz" else blob.open(), str(path), block_bytes)


def stream_lines(stream: IO[bytes], name: str, block_bytes: int = _MOST_BLOCK_BYTES) -> Iterator[bytes]:
    """The text in blocks of whole lines of about ``block_bytes``, each with a newline at its end.

    SourceError for one that is damaged or truncated and for a line longer than a block.
    """

    def read() -> bytes:
        with told(name):
            return stream.read(block_bytes)

    return _whole_lines(iter(read, b""), block_bytes, name)


class LineTable:
    """A table in the text file ``path``, a row a line; how many ``rows`` it has only reading it all tells."""

    rows: int | None = None

    def __init__(self, path: Path, block_bytes: int) -> None:
        self.path, self._block_bytes = path, block_bytes

    @cached_property
    def rows_about(self) -> int:
        """An estimate of how many rows there are, for disk and time; a third more than what the first ones tell."""
        first = next(line_blocks(self.path, self._block_bytes), b"\n")
        packed = _PACKED if self.path.suffix in (".gz", ".zst") else 1
        return max(1, 4 * packed * self.path.stat().st_size * first.count(b"\n") // (3 * len(first)))


def leading_comments(path: Path) -> tuple[list[str], str]:
    """The comment lines before the first line of another kind, without their mark, and that line ("" if none)."""
    found: list[str] = []
    for line in next(line_blocks(path, _LEAST_BLOCK_BYTES), b"").split(b"\n"):
        text = line.decode("utf-8", "replace").strip()
        if text and not line.startswith(COMMENTS):
            return found, text
        found.append(text[1:].strip())
    return found, ""


def rows_of_numbers(
    blocks: Iterator[bytes], name: str, *, columns: tuple[int, ...], kind: Kind, skip: int = 0
) -> Iterator[AnyArray]:
    """The rows of numbers in ``blocks`` of lines, int64 or float64 [n, c], without empty and comment lines.

    c is one of ``columns``, the same for the whole text. ``skip``: lines at the start that are something else.
    SourceError, saying ``name`` and the line, for anything that is no such row.
    """
    line = 1
    for block in blocks:
        text = block
        if skip:
            lines = text.split(b"\n")
            skipped = min(skip, len(lines) - 1)
            text = b"\n" * skipped + b"\n".join(lines[skipped:])
            skip -= skipped
        if any(mark in text for mark in COMMENTS):
            text = b"\n".join(b"" if part.startswith(COMMENTS) else part for part in text.split(b"\n"))
        rows = _rows(text, columns, kind)
        if rows is None:
            raise _wrong(name, line, text, columns, kind)
        if len(rows):
            columns = (rows.shape[1],)
            yield rows
        line += block.count(b"\n")


def whole_ids(column: AnyArray, path: Path) -> AnyArray:
    """The ids in ``column`` as int64; SourceError where one is not 0 or more, or no whole number."""
    if column.dtype.kind == "f":
        large = column >= _MOST_REAL_ID
        if large.any():
            raise SourceError(f"{path}: {column[int(large.argmax())]:.0f} is too large an id: they are below 2^53 here")
        wrong = (column != np.trunc(column)) | (column < 0)
    else:
        wrong = column < 0
    if wrong.any():
        raise SourceError(f"{path}: {column[int(wrong.argmax())]} is no id: ids are whole numbers, 0 or more")
    return column.astype(np.int64)


def _rows(text: bytes, columns: tuple[int, ...], kind: Kind) -> AnyArray | None:
    """The rows of ``text``, whose lines are all ended; None where one is not as wanted."""
    if text.translate(None, kind.value + b" \t\r\n"):
        return None
    if kind in _CSV_TYPES:
        rows = _parsed(text, _CSV_TYPES[kind], delimiter=",") if text.strip() else None
        return None if rows is None or rows.shape != (text.count(b"\n"), *columns) else rows
    text = text.lstrip()
    width = len(text.partition(b"\n")[0].split())
    if not width:
        return np.empty((0, columns[0]), dtype=np.int64)
    if width not in columns:
        return None
    if kind is Kind.WHOLE or width <= _IDS:
        rows = _parsed(text, np.int64)
        if rows is None or rows.shape[1] != width or int(rows.max()) >= 10**_MOST_DIGITS:
            return None
        return rows if kind is Kind.WHOLE else rows.astype(np.float64)
    # Ids are parsed as such: a digit that became a dot or an e would make another one of it.
    found = _parsed(text, [("ids", np.int64, (_IDS,)), ("values", np.float64, (width - _IDS,))])
    if found is None or (found["ids"] < 0).any() or (b"+" in text and _SIGNED_ID.search(text)):
        return None
    return np.concatenate([found["ids"], found["values"]], axis=1).reshape(-1, width)


def _parsed(text: bytes, dtype: npt.DTypeLike, delimiter: str | None = None) -> AnyArray | None:
    """The numbers in ``text``, which is not empty, [rows, columns]; [rows] for records; None where it is wrong."""
    axes: Literal[1, 2] = 2 if isinstance(dtype, type) else 1
    try:
        found: AnyArray = np.loadtxt(io.BytesIO(text), dtype, delimiter=delimiter, comments=None, ndmin=axes)
    except (ValueError, OverflowError):
        return None
    return found


def _wrong(name: str, line: int, text: bytes, columns: tuple[int, ...], kind: Kind) -> SourceError:
    """The error that names the first line that is no row; looked for one by one, since it is the last thing done."""
    for number, part in enumerate(text.split(b"\n"), start=line):
        rows = _rows(part + b"\n", columns, kind)
        if rows is None:
            shown = part[:60].decode("utf-8", "replace").strip()
            long = next((word for word in part.split() if len(word) > _MOST_DIGITS), b"")
            if kind is Kind.WHOLE and long.isdigit():
                digits = f"{long[:30].decode()}{'…' * (len(long) > 30)}"
                most = f"ids have at most {_MOST_DIGITS} digits"
                return SourceError(f"{name}, line {number}: {digits} is too large: {most}")
            numbers = {Kind.REAL: "numbers, the first two whole,", Kind.CSV_REAL: "numbers"}.get(kind, "whole numbers")
            wanted = str(columns[0]) if len(columns) == 1 else f"{columns[0]} to {columns[-1]}"
            return SourceError(f"{name}, line {number}: {shown!r} where {wanted} {numbers} are wanted")
        if len(rows):
            columns = (rows.shape[1],)
    raise AssertionError("a block that is wrong has a line that is")


def _whole_lines(pieces: Iterable[bytes], block_bytes: int, name: str) -> Iterator[bytes]:
    """The ``pieces`` of a text cut anew where lines end; a newline is added to the last where it has none."""
    held: list[bytes] = []
    whole = begun = 0  # Bytes of what is held: lines that are ended, and one that is not.
    for piece in pieces:
        held.append(piece)
        if cut := piece.rfind(b"\n") + 1:
            whole, begun = whole + begun + cut, len(piece) - cut
        else:
            begun += len(piece)
        if begun > block_bytes:
            raise SourceError(f"{name} has a line of more than {block_bytes} bytes: it is no text of rows")
        if whole >= block_bytes // 2:
            text = b"".join(held)
            yield text[:whole]
            held, whole = [text[whole:]], 0
    if whole or begun:
        yield b"".join(held) + b"\n" * (begun > 0)


def _zstd(path: Path) -> Iterator[bytes]:
    """All frames of the file. A stream reader would take a file that stops early for one that ends there."""
    zstandard = optional("zstandard", path)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    stream, frame = Blob.of_file(path).open(), None
    try:
        while piece := stream.read(_ZSTD_BYTES):
            while piece:
                frame = decompressor.decompressobj() if frame is None else frame
                if text := frame.decompress(piece):
                    yield text
                piece = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise damaged(str(path), str(error)) from error
    if frame is not None:
        raise damaged(str(path), "it stops within a zstd frame")
