# SPDX-License-Identifier: Apache-2.0
"""Text files, plain or compressed, as blocks of whole lines, and rows of numbers in them.

A compressed file's checksum is checked by reading it to its end; one that stops early is an error. Memory is
a few times ``block_bytes`` whatever the file holds.
"""

import gzip
import zlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import BinaryIO, assert_never

import numpy as np

from ooc.conversion.optional import optional
from ooc.errors import SourceError
from ooc.storage.array import AnyArray

COMMENTS = (b"#", b"%")
_MOST_BLOCK_BYTES = 1 << 20
_LEAST_BLOCK_BYTES = 1 << 16
_PARSING_BYTES = 24  # A byte of text takes that many while it is parsed, masks and positions included.
# A zstd block is at least 4 bytes and becomes at most 128 KiB: what so many bytes in give is at most 32 MiB.
_ZSTD_BYTES = 1 << 10
_ZSTD_WINDOW_BYTES = 128 << 20
_MOST_DIGITS = 18


class Kind(Enum):
    """What the numbers of a file may be, by the characters they are written in: all of them ids, or two ids a line
    and then values."""

    WHOLE = b"0123456789"
    REAL = b"0123456789+-.eE"


_IDS = 2
_DIGITS = np.zeros(256, dtype=np.bool_)
_DIGITS[list(Kind.WHOLE.value)] = True


def text_block_bytes(budget_bytes: int) -> int:
    """How much text to parse at a time so that it takes no more than an eighth of the budget."""
    return max(_LEAST_BLOCK_BYTES, min(_MOST_BLOCK_BYTES, budget_bytes // 8 // _PARSING_BYTES))


def plain_suffix(path: Path) -> str:
    """The suffix below that of a compression: ``".csv"`` of ``a.csv.gz``."""
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def line_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """The file's text in blocks of whole lines of about ``block_bytes``, each with a newline at its end.

    SourceError for a damaged or truncated file and for a line longer than a block.
    """
    rest = b""
    for piece in _pieces(path, block_bytes):
        end = piece.rfind(b"\n") + 1
        if end:
            yield rest + piece[:end]
            rest = piece[end:]
        else:
            rest += piece
        if len(rest) > block_bytes:
            raise SourceError(f"{path} has a line of more than {block_bytes} bytes: it is no text of rows")
    if rest:
        yield rest + b"\n"


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
    path: Path, *, columns: tuple[int, ...], kind: Kind, block_bytes: int, skip: int = 0
) -> Iterator[AnyArray]:
    """The file's rows of numbers, int64 or float64 [n, c], without empty and comment lines.

    c is one of ``columns``, the same for the whole file. ``skip``: lines at the start that are something else.
    SourceError, with the line, for anything that is no such row.
    """
    line = 1
    for block in line_blocks(path, block_bytes):
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
            raise _wrong(path, line, text, columns, kind)
        if len(rows):
            columns = (rows.shape[1],)
            yield rows
        line += block.count(b"\n")


def _rows(text: bytes, columns: tuple[int, ...], kind: Kind) -> AnyArray | None:
    """The rows of ``text``, whose lines are all ended; None where one is not as wanted."""
    if text.translate(None, kind.value + b" \t\r\n"):
        return None
    raw = np.frombuffer(text, dtype=np.uint8)
    written = raw > 32
    begins = written.copy()
    begins[1:] &= ~written[:-1]
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.empty((0, columns[0]), dtype=np.int64)
    width = _width(starts, np.flatnonzero(raw == 10), columns)
    if width is None:
        return None
    try:
        match kind:
            case Kind.WHOLE:
                if _longest(starts, written) > _MOST_DIGITS:
                    return None
                values = np.fromstring(text.decode("ascii"), dtype=np.int64, sep=" ")
            case Kind.REAL:
                # A digit that became a dot or an e would make another id of one.
                places = np.flatnonzero(written & ~_DIGITS[raw])
                if ((np.searchsorted(starts, places, side="right") - 1) % width < _IDS).any():
                    return None
                values = np.fromstring(text.decode("ascii"), dtype=np.float64, sep=" ")
            case _:
                assert_never(kind)
    except ValueError:
        return None
    return values.reshape(-1, width) if len(values) == len(starts) else None


def _width(starts: AnyArray, ends: AnyArray, columns: tuple[int, ...]) -> int | None:
    """How many of the numbers that begin at ``starts`` are in each line, which end at ``ends``; None if not one of
    ``columns`` throughout. Empty lines do not count."""
    width = len(starts) // len(ends)
    # The usual case, no line empty: the first and the last number of each line are within it.
    even = width in columns and len(starts) == width * len(ends)
    if even and (starts[width - 1 :: width] < ends).all() and (starts[width::width] > ends[:-1]).all():
        return width
    counts = np.diff(np.searchsorted(starts, ends), prepend=0)
    width = int(counts.max())
    return width if width in columns and ((counts == width) | (counts == 0)).all() else None


def _longest(starts: AnyArray, written: AnyArray) -> int:
    gaps = np.diff(starts, append=len(written))
    if int(gaps.max()) - 1 <= _MOST_DIGITS:
        return int(gaps.max()) - 1
    return max(int(written[start : start + gap].sum()) for start, gap in zip(starts, gaps, strict=True) if gap > 18)


def _wrong(path: Path, line: int, text: bytes, columns: tuple[int, ...], kind: Kind) -> SourceError:
    """The error that names the first line that is no row; looked for one by one, since it is the last thing done."""
    for number, part in enumerate(text.split(b"\n"), start=line):
        rows = _rows(part + b"\n", columns, kind)
        if rows is None:
            shown = part[:60].decode("utf-8", "replace").strip()
            long = next((word for word in part.split() if len(word) > _MOST_DIGITS), b"")
            if kind is Kind.WHOLE and long.isdigit():
                digits = f"{long[:30].decode()}{'…' * (len(long) > 30)}"
                most = f"ids have at most {_MOST_DIGITS} digits"
                return SourceError(f"{path}, line {number}: {digits} is too large: {most}")
            numbers = "whole numbers" if kind is Kind.WHOLE else "numbers, the first two whole,"
            wanted = str(columns[0]) if len(columns) == 1 else f"{columns[0]} to {columns[-1]}"
            return SourceError(f"{path}, line {number}: {shown!r} where {wanted} {numbers} are wanted")
        if len(rows):
            columns = (rows.shape[1],)
    raise AssertionError("a block that is wrong has a line that is")


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            match path.suffix:
                case ".gz":
                    with gzip.GzipFile(fileobj=file) as inflated:
                        while piece := inflated.read(size):
                            yield piece
                case ".zst":
                    yield from _zstd(path, file)
                case _:
                    while piece := file.read(size):
                        yield piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"{path} cannot be read, it is damaged or incomplete: {error}") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def _zstd(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """All frames of the file. A stream reader would take a file that stops early for one that ends there."""
    zstandard = optional("zstandard", path)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = None
    try:
        while piece := file.read(_ZSTD_BYTES):
            while piece:
                frame = decompressor.decompressobj() if frame is None else frame
                if text := frame.decompress(piece):
                    yield text
                piece = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise SourceError(f"{path} cannot be read, it is damaged or incomplete: {error}") from error
    if frame is not None:
        raise SourceError(f"{path} cannot be read, it is damaged or incomplete: it stops within a zstd frame")
