# SPDX-License-Identifier: Apache-2.0
"""Text files, plain or compressed, as blocks of whole lines.

A compressed file's checksum is verified by reading it to its end; a truncated file is an error. Memory is a few times
``block_bytes`` whatever the file holds.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from ooc.errors import SourceError
from ooc.sources.files.streams import Blob, damaged, gunzipped, reading_errors

COMMENTS = (b"#", b"%")
_MOST_BLOCK_BYTES = 1 << 20
_LEAST_BLOCK_BYTES = 1 << 16
_PACKED = 4  # Bytes of text that a compressed one is, for estimates.
_PARSING_BYTES = 24  # A byte of text takes that many while it is parsed.
# A zstd block takes at least 4 bytes and gives at most 128 KiB, so this input gives at most 32 MiB.
_ZSTD_BYTES = 1 << 10
_ZSTD_WINDOW_BYTES = 128 << 20


def optional(module: str, path: Path) -> Any:
    """Return ``module``, which is needed to read ``path``; raise SourceError with the remedy where it is not
    installed."""
    try:
        return import_module(module)
    except ImportError:
        package = {"yaml": "pyyaml"}.get(module, module.partition(".")[0])
        raise SourceError(f"{path} needs the package {package} to be read; pip install {package}") from None


def text_block_bytes(budget_bytes: int) -> int:
    """Return how much text to parse at a time so that parsing takes at most an eighth of the budget."""
    return max(_LEAST_BLOCK_BYTES, min(_MOST_BLOCK_BYTES, budget_bytes // 8 // _PARSING_BYTES))


def plain_suffix(path: Path) -> str:
    """Return the suffix without that of a compression: ``".csv"`` of ``a.csv.gz``."""
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def line_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Yield the text of a file, compressed or not, in blocks; see :func:`text_lines`."""
    if path.suffix == ".zst":
        return _whole_lines(_zstd(path), block_bytes, str(path))
    return text_lines(Blob.of_file(path), block_bytes)


def text_lines(blob: Blob, block_bytes: int) -> Iterator[bytes]:
    """Yield the text, compressed if its name ends in ``.gz``, in blocks of whole lines of about ``block_bytes``.

    Every line ends with a newline. SourceError for a damaged or truncated text, and for a line longer than a block.
    """
    stream = gunzipped(blob) if blob.name.endswith(".gz") else blob.open()

    def read() -> bytes:
        with reading_errors(blob.name):
            return stream.read(block_bytes)

    return _whole_lines(iter(read, b""), block_bytes, blob.name)


class LineTable:
    """A table in the text file ``path``, one row per line; its number of ``rows`` is unknown until it is read.

    ``lines`` yields its blocks of lines, afresh on each call.
    """

    rows: int | None = None

    def __init__(self, path: Path, lines: Callable[[], Iterator[bytes]]) -> None:
        self.path, self.lines = path, lines

    @cached_property
    def rows_about(self) -> int:
        """The estimated number of rows, for disk and time: a third more than the first rows suggest."""
        first = next(self.lines(), b"\n")
        packed = _PACKED if self.path.suffix in (".gz", ".zst") else 1
        return max(1, 4 * packed * self.path.stat().st_size * first.count(b"\n") // (3 * len(first)))


def leading_comments(path: Path) -> tuple[list[str], str]:
    """Return the comment lines at the start, without their mark, and the first other line ("" if there is none)."""
    found: list[str] = []
    for line in next(line_blocks(path, _LEAST_BLOCK_BYTES), b"").split(b"\n"):
        text = line.decode("utf-8", "replace").strip()
        if text and not line.startswith(COMMENTS):
            return found, text
        found.append(text[1:].strip())
    return found, ""


def _whole_lines(pieces: Iterable[bytes], block_bytes: int, name: str) -> Iterator[bytes]:
    """Yield the ``pieces`` of a text cut at ends of lines; the last line gets a newline if it has none."""
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
    """Yield all frames of the file; a stream reader would accept a truncated file as a complete one."""
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
