# SPDX-License-Identifier: Apache-2.0
"""What a source calls its nodes, on the disk in their order; and the different ids that edges have, in ascending order.

Ids are whole numbers, int64, or texts, which are UTF-8 in arrays of objects. More than memory holds are sorted in runs,
which are merged as they are read.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray, flush

MOST_BYTES = 1024
"""Of a text: stores keep ids at the width of the longest."""
_LENGTH = np.dtype("<u2")
_BLOCK_BYTES = 1 << 20
_NUMBER_BYTES = 4 * 8
"""Of memory for each number: merging holds the two runs, both in one, sorted, and what of it is distinct."""
_TEXT_BYTES = 100
"""Of memory for each text while runs are merged, besides its own bytes."""
_MOST_RUNS = 64
_SPAN = 8


class IdFile:
    """The ids that :meth:`write` put to ``path``. ``rows``: how many; ``width``: bytes of the longest text, 0 where
    they are numbers. Texts lie end to end, their lengths in a file beside."""

    def __init__(self, path: Path, *, rows: int, width: int) -> None:
        self.path, self.rows, self.width = path, rows, width

    @classmethod
    def write(cls, path: Path, blocks: Iterable[AnyArray]) -> "IdFile":
        """Write all ``blocks`` of ids, of one kind; the files appear when they are whole."""
        partial, rows, width = path.with_name(path.name + ".partial"), 0, 0
        with partial.open("wb") as file, _lengths(partial).open("wb") as lengths:
            for ids in blocks:
                rows += len(ids)
                if ids.dtype == np.object_:
                    sizes = np.fromiter(map(len, ids), dtype=_LENGTH, count=len(ids))
                    width = max(width, int(sizes.max(initial=0)))
                    lengths.write(sizes.tobytes())
                    file.write(b"".join(ids.tolist()))
                else:
                    file.write(ids.astype("<i8", copy=False).tobytes())
        for written, name in ((_lengths(partial), _lengths(path)), (partial, path)):
            flush(written)
            written.rename(name)
        return cls(path, rows=rows, width=width)

    def blocks(self, size: int) -> Iterator[AnyArray]:
        """The ids in order, at most ``size`` at a time."""
        with self.path.open("rb") as file, _lengths(self.path).open("rb") as lengths:
            if not self.width:
                while data := file.read(8 * size):
                    yield np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)
                return
            while sizes := np.frombuffer(lengths.read(size * _LENGTH.itemsize), dtype=_LENGTH).tolist():
                data, start, texts = file.read(sum(sizes)), 0, np.empty(len(sizes), dtype=np.object_)
                for at, length in enumerate(sizes):
                    texts[at] = data[start : start + length]
                    start += length
                yield texts

    def stored(self, size: int) -> Iterator[AnyArray]:
        """The ids as stores have them, int64 [n] or bytes [n, ``width``] with zeros after texts' ends, at most ``size``
        at a time."""
        if not self.width:
            yield from self.blocks(size)
            return
        for texts in self.blocks(max(1, min(size, _BLOCK_BYTES // self.width))):
            yield np.array(texts.tolist(), dtype=f"S{self.width}").view(np.uint8).reshape(len(texts), self.width)

    def texts_of(self, rows: Iterable[int]) -> list[str]:
        """The ids of some ``rows``, for messages, since it reads from the start."""
        found: dict[int, Any] = {}
        first = 0
        for ids in self.blocks(1 << 14):
            found |= {row: ids[row - first] for row in rows if first <= row < first + len(ids)}
            first += len(ids)
        return [found[row].decode() if self.width else str(found[row]) for row in rows]

    def are_rows(self) -> bool:
        """Whether the ids are 0, 1, 2, …"""
        done = 0
        for ids in () if self.width else self.blocks(_BLOCK_BYTES // 8):
            if not np.array_equal(ids, np.arange(done, done + len(ids))):
                return False
            done += len(ids)
        return not self.width


def encoded(texts: Iterable[str], where: str) -> AnyArray:
    """Texts as they are compared and kept, in UTF-8. SourceError, saying ``where``, for one that cannot be kept."""
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
    return np.array(found, dtype=np.object_)


def collect(blocks: Iterable[AnyArray], path: Path, *, limit_bytes: int) -> IdFile:
    """Write the different ids in ``blocks``, ascending (texts by their bytes), to the file ``path``.

    Takes about ``limit_bytes`` of memory, and beside ``path`` as much of the disk as the ids take twice.
    """
    folder, runs, written = path.with_name(path.name + ".runs"), list[IdFile](), 0
    rmtree(folder, ignore_errors=True)
    held: AnyArray | None = None
    waiting: list[AnyArray] = []
    taken = 0

    def spill(ids: Iterable[AnyArray]) -> IdFile:
        nonlocal written
        written += 1
        (folder / str(written)).mkdir(parents=True)
        return IdFile.write(folder / str(written) / "run", ids)

    for ids in map(different, filter(len, blocks)):
        waiting.append(ids)
        taken += _held_bytes(ids)
        # As many wait as are held, so that every id is merged few times.
        if held is None or sum(map(len, waiting)) > len(held):
            held, waiting = different(np.concatenate([*waiting, *([] if held is None else [held])])), []
            taken = _held_bytes(held)
        if taken > limit_bytes:
            runs.append(spill([different(np.concatenate([held, *waiting]))]))
            held, waiting, taken = None, [], 0
        if len(runs) == _MOST_RUNS:
            old, runs = runs, [spill(_merged(runs, limit_bytes))]
            for run in old:
                rmtree(run.path.parent)
    last = [] if held is None else [different(np.concatenate([held, *waiting]))]
    if runs and last:
        runs.append(spill(last))
    found = IdFile.write(path, _merged(runs, limit_bytes) if runs else last)
    rmtree(folder, ignore_errors=True)
    return found


def different(ids: AnyArray) -> AnyArray:
    """Ascending and each once. (``np.unique`` hashes, which is many times slower for millions.)"""
    if ids.dtype == np.object_:
        return np.array(sorted(set(ids.tolist())), dtype=np.object_)
    if len(ids) and (span := int(ids.max()) - (least := int(ids.min()))) < _SPAN * len(ids):  # Many times as fast.
        seen = np.zeros(span + 1, dtype=np.bool_)
        seen[ids - least] = True
        return np.flatnonzero(seen) + least
    ids = np.sort(ids)
    keep = np.ones(len(ids), dtype=np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=keep[1:])
    return ids[keep]


def _merged(runs: list[IdFile], limit_bytes: int) -> Iterator[AnyArray]:
    """All ids of ``runs``, each of which has them ascending."""
    size = max(16, limit_bytes // (_MOST_RUNS * 2 * _TEXT_BYTES))
    streams = [run.blocks(size) for run in runs]
    heads = [next(stream) for stream in streams]
    while heads:
        # Up to there nothing can come any more that is not in the blocks at hand.
        stop = np.sort(np.concatenate([head[-1:] for head in heads]))[:1]
        places = [int(np.searchsorted(head, stop, side="right")[0]) for head in heads]
        yield different(np.concatenate([head[:at] for head, at in zip(heads, places, strict=True)]))
        rest = zip(heads, places, streams, strict=True)
        left = [(head[at:] if at < len(head) else next(stream, None), stream) for head, at, stream in rest]
        heads = [head for head, _ in left if head is not None]
        streams = [stream for head, stream in left if head is not None]


def _held_bytes(ids: AnyArray) -> int:
    return sum(map(len, ids)) + _TEXT_BYTES * len(ids) if ids.dtype == np.object_ else _NUMBER_BYTES * len(ids)


def _lengths(path: Path) -> Path:
    return path.with_name(path.name + ".lengths")
