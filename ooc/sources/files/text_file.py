# SPDX-License-Identifier: Apache-2.0
"""Texts of any length in order, a row each, on the disk: their bytes end to end in one file, their lengths in another.

It holds what a source calls its nodes, where that is text, while a conversion numbers them.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray, flush

MOST_BYTES = 1024
"""Of an id: stores keep ids at the width of the longest."""
_LENGTH = np.dtype("<u2")
_BLOCK_BYTES = 1 << 20


class TextFile:
    """The texts that :meth:`write` put to ``path``. ``rows``: how many; ``width``: bytes of the longest."""

    def __init__(self, path: Path, *, rows: int, width: int) -> None:
        self.path, self.rows, self.width = path, rows, width

    @classmethod
    def write(cls, path: Path, blocks: Iterable[list[bytes]]) -> "TextFile":
        """Write all ``blocks`` of texts, each of at most ``MOST_BYTES`` bytes; the files appear when they are whole."""
        partial, rows, width = path.with_name(path.name + ".partial"), 0, 0
        with partial.open("wb") as file, _lengths(partial).open("wb") as lengths:
            for texts in blocks:
                sizes = np.fromiter(map(len, texts), dtype=_LENGTH, count=len(texts))
                rows, width = rows + len(texts), max(width, int(sizes.max(initial=0)))
                lengths.write(sizes.tobytes())
                file.write(b"".join(texts))
        for written, name in ((_lengths(partial), _lengths(path)), (partial, path)):
            flush(written)
            written.rename(name)
        return cls(path, rows=rows, width=width)

    def blocks(self, size: int) -> Iterator[list[bytes]]:
        """The texts in order, at most ``size`` at a time."""
        with self.path.open("rb") as file, _lengths(self.path).open("rb") as lengths:
            while sizes := np.frombuffer(lengths.read(size * _LENGTH.itemsize), dtype=_LENGTH).tolist():
                data, start, texts = file.read(sum(sizes)), 0, []
                for length in sizes:
                    texts.append(data[start : start + length])
                    start += length
                yield texts

    def padded(self, size: int) -> Iterator[AnyArray]:
        """The texts as rows of bytes [n, ``width``], zeros after their ends, at most ``size`` at a time."""
        for texts in self.blocks(max(1, min(size, _BLOCK_BYTES // max(1, self.width)))):
            yield np.array(texts, dtype=f"S{self.width}").view(np.uint8).reshape(len(texts), self.width)

    def texts_of(self, rows: Iterable[int]) -> list[bytes]:
        """The texts of some ascending ``rows``; for messages, since it reads from the start."""
        wanted, found, first = set(rows), [], 0
        for texts in self.blocks(1 << 14):
            found += [texts[row - first] for row in sorted(wanted) if first <= row < first + len(texts)]
            first += len(texts)
        return found


def encoded(texts: Iterable[str], where: str) -> list[bytes]:
    """Ids as they are compared and kept, in UTF-8. SourceError, saying ``where``, for one that cannot be kept."""
    try:
        found = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise SourceError(f"{where} holds a text that is none in Unicode: {error.reason}") from error
    for text in found:
        if len(text) > MOST_BYTES:
            shown = text[:40].decode("utf-8", "replace")
            raise SourceError(f"{where} holds the id {shown}…, {len(text)} bytes long: {MOST_BYTES} are the most")
    if b"\0" in b"".join(found):
        raise SourceError(f"{where} holds an id with a NUL character in it")
    return found


def _lengths(path: Path) -> Path:
    return path.with_name(path.name + ".lengths")
