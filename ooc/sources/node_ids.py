# SPDX-License-Identifier: Apache-2.0
"""The ids that a source gives its nodes, sparse and of any size, and the node numbers 0 … N-1 they become.

Several ways each, for one result: whole numbers that are not far apart go through a table over their whole range,
others through sorted arrays, and those that memory cannot hold, and texts, through sorted runs in files, merged as they
are read, and ``id_join``.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import BinaryIO, Generic, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ooc.errors import SourceError
from ooc.sources.files.text_file import TextFile
from ooc.sources.source import Ids, Mask, ranges
from ooc.storage.array import flush

# ---- sorted runs ----------------------------------------------------------------------------------------------------


MERGE_BYTES = 4 * 8
"""Of memory for each number: merging holds the two runs, both in one, sorted, and what of it is distinct."""
TEXT_BYTES = 100
"""Of memory for each text in a set, and in the list that sorts it, besides its own bytes."""
_MOST_RUNS = 64
T = TypeVar("T")


def different(ids: Ids, kind: Literal["quicksort", "stable"] = "quicksort") -> Ids:
    """Ascending and each once; a ``stable`` sort of two ascending runs merges them.

    (``np.unique`` hashes, which is many times slower for millions.)
    """
    ids = np.sort(ids, kind=kind)
    keep = np.ones(len(ids), dtype=np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=keep[1:])
    return ids[keep]


def write_ids(path: Path, parts: Iterable[Ids]) -> int:
    """Write the ``parts`` as int64 to the file ``path``, which appears when it is whole; how many ids they are."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for part in parts:
            file.write(part.astype("<i8", copy=False).tobytes())
    flush(partial)
    partial.rename(path)
    return path.stat().st_size // 8


class SortedRuns(Generic[T]):
    """Runs in files of ``folder``, which goes away at the end. A T is a block of ids, ascending and each once.

    ``write`` puts the blocks of a run to a file, ``merge`` gives what is in several. ``count``: the runs that were
    written, those included that were merged into others meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        write: Callable[[Path, Iterable[T]], object],
        merge: Callable[[list[Path]], Iterator[T]],
    ) -> None:
        self._folder, self._write, self._merge = folder, write, merge
        self._paths: list[Path] = []
        self.count = 0

    def add(self, blocks: Iterable[T]) -> None:
        """Write a run."""
        self._paths.append(self._written(blocks))
        if len(self._paths) == _MOST_RUNS:
            old = self._paths
            self._paths = [self._written(self._merge(old))]
            for path in old:
                rmtree(path.parent)

    def merged(self) -> Iterator[T]:
        """All ids."""
        return self._merge(self._paths)

    def _written(self, blocks: Iterable[T]) -> Path:
        path = self._folder / str(self.count) / "run"
        path.parent.mkdir(parents=True)
        self._write(path, blocks)
        self.count += 1
        return path

    def __enter__(self) -> Self:
        rmtree(self._folder, ignore_errors=True)
        return self

    def __exit__(self, *raised: object) -> None:
        rmtree(self._folder, ignore_errors=True)


def runs_of_numbers(folder: Path, limit_bytes: int) -> SortedRuns[Ids]:
    """Runs of whole numbers, merged within ``limit_bytes``."""
    size = 8 * max(256, limit_bytes // (_MOST_RUNS * MERGE_BYTES))

    def merge(paths: list[Path]) -> Iterator[Ids]:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in paths]
            heads = [_next(file, size) for file in files]
            while any(map(len, heads)):
                # Up to there nothing can come any more that is not in the blocks at hand.
                stop = min(int(head[-1]) for head in heads if len(head))
                places = [int(np.searchsorted(head, stop, side="right")) for head in heads]
                yield different(np.concatenate([head[:at] for head, at in zip(heads, places, strict=True)]))
                heads = [
                    head[at:] if at < len(head) else _next(file, size)
                    for head, at, file in zip(heads, places, files, strict=True)
                ]

    return SortedRuns(folder, write_ids, merge)


def runs_of_texts(folder: Path, limit_bytes: int) -> SortedRuns[list[bytes]]:
    """Runs of texts, ascending by their bytes."""
    size = max(16, limit_bytes // (_MOST_RUNS * TEXT_BYTES * 2))

    def merge(paths: list[Path]) -> Iterator[list[bytes]]:
        last: bytes | None = None
        block: list[bytes] = []
        for text in heapq.merge(*(chain.from_iterable(TextFile(path, rows=0, width=0).blocks(size)) for path in paths)):
            if text != last:
                block.append(text)
                last = text
            if len(block) == _MOST_RUNS * size:
                yield block
                block = []
        yield block

    return SortedRuns(folder, TextFile.write, merge)


def _next(file: BinaryIO, size: int) -> Ids:
    return np.frombuffer(file.read(size), dtype="<i8").astype(np.int64, copy=False)


# ---- node numbers ---------------------------------------------------------------------------------------------------


_STEP = 1 << 20
_WORD_BITS = 64
_WORD_BYTES = 12  # Of a rank table: its bits and the count of those before it.


def collect(blocks: Iterable[Ids], path: Path, *, limit_bytes: int) -> int:
    """Write the different ids in ``blocks``, ascending, as int64 to the file ``path``; how many they are.

    Takes about ``limit_bytes`` of memory, and beside ``path`` as much of the disk as the ids take twice.
    """
    seen: Mask | None = np.zeros(0, dtype=np.bool_)
    held, waiting = np.empty(0, dtype=np.int64), [np.empty(0, dtype=np.int64)]
    with runs_of_numbers(path.with_name(path.name + ".runs"), limit_bytes) as spilled:
        for ids in filter(len, blocks):
            if seen is not None:
                span = int(ids.max()) + 1
                # Growing by half holds the old table beside the new.
                wanted = span + span // 2
                if wanted + len(seen) > limit_bytes or ids.min() < 0:
                    held, seen = np.flatnonzero(seen), None
                elif span > len(seen):
                    seen = np.concatenate([seen, np.zeros(wanted - len(seen), dtype=np.bool_)])
            if seen is not None:
                seen[ids] = True
                continue
            waiting.append(different(ids))
            # As many wait as are held, so that every id is merged few times.
            count = sum(map(len, waiting))
            if count > len(held):
                held, waiting = different(np.concatenate([held, *waiting]), kind="stable"), []
            if MERGE_BYTES * max(count, len(held)) > limit_bytes:
                spilled.add([different(np.concatenate([held, *waiting]))])
                held, waiting = held[:0].copy(), []
        if seen is not None:
            return write_ids(path, (np.flatnonzero(seen[a:b]) + a for a, b in ranges(len(seen), _STEP)))
        held = different(np.concatenate([held, *waiting]))
        if not spilled.count:
            return write_ids(path, [held])
        spilled.add([held])
        return write_ids(path, spilled.merged())


def collect_texts(blocks: Iterable[list[bytes]], path: Path, *, limit_bytes: int) -> TextFile:
    """Write the different texts in ``blocks``, by their bytes ascending, to the file ``path``; memory as above."""
    seen: set[bytes] = set()
    taken = 0
    with runs_of_texts(path.with_name(path.name + ".runs"), limit_bytes) as spilled:
        for texts in blocks:
            new = set(texts) - seen
            seen |= new
            taken += sum(map(len, new)) + TEXT_BYTES * len(new)
            if taken > limit_bytes:
                spilled.add([sorted(seen)])
                seen, taken = set(), 0
        if not spilled.count:
            return TextFile.write(path, [sorted(seen)])
        spilled.add([sorted(seen)])
        seen = set()
        return TextFile.write(path, spilled.merged())


def numbering(ids: Ids, *, rows: Ids | None = None) -> "Numbering":
    """By ascending, different ``ids`` [N]: the k-th is node k, or node ``rows[k]``."""
    span, negative = int(ids[-1]) + 1 if len(ids) else 0, bool(len(ids)) and ids[0] < 0
    if rows is None and span == len(ids) and not negative:
        return Same(span)
    if rows is None and not negative and _WORD_BYTES * -(-span // _WORD_BITS) <= 8 * len(ids):
        return RankTable(ids)
    return Sorted(ids, rows)


class Same:
    """The ids are the numbers. ``nbytes``, here and below: what is held in memory."""

    nbytes = 0

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def numbers(self, ids: Ids) -> Ids:
        """The node number of each of ``ids``; -1 for one that is no node's."""
        return np.where((ids >= 0) & (ids < self._nodes), ids, -1)


class Sorted:
    """By binary search."""

    def __init__(self, ids: Ids, rows: Ids | None = None) -> None:
        self._ids, self._rows = ids, rows
        self.nbytes = ids.nbytes + (0 if rows is None else rows.nbytes)

    def numbers(self, ids: Ids) -> Ids:
        if not len(self._ids):
            return np.full(len(ids), -1)
        order = np.argsort(ids)  # Neighbouring searches share their steps in the cache: ten times as fast.
        at = np.empty(len(ids), dtype=np.int64)
        at[order] = np.searchsorted(self._ids, ids[order])
        np.minimum(at, len(self._ids) - 1, out=at)
        found = at if self._rows is None else self._rows[at]
        return np.where(self._ids[at] == ids, found, -1)


class RankTable:
    """By a bit for each possible id and, for each word of bits, how many are set before it.

    (Jacobson, "Space-efficient static trees and graphs", FOCS 1989.)
    """

    def __init__(self, ids: Ids) -> None:
        self._span = int(ids[-1]) + 1
        words = -(-self._span // _WORD_BITS)
        bits = np.zeros(words, dtype=np.uint64)
        for start, stop in ranges(len(ids), _STEP):
            words_of, ones = self._places(ids[start:stop])
            first = np.flatnonzero(np.diff(words_of, prepend=-1))
            bits[words_of[first]] |= np.bitwise_or.reduceat(ones, first)
        self._bits = bits
        counts = np.bitwise_count(bits)
        self._before = (np.cumsum(counts, dtype=np.int64) - counts).astype(np.uint32)
        self.nbytes = self._bits.nbytes + self._before.nbytes

    def numbers(self, ids: Ids) -> Ids:
        inside = (ids >= 0) & (ids < self._span)
        words, ones = self._places(np.where(inside, ids, 0))
        bits = self._bits[words]
        rank = self._before[words].astype(np.int64) + np.bitwise_count(bits & (ones - np.uint64(1)))
        return np.where(inside & ((bits & ones) != 0), rank, -1)

    @staticmethod
    def _places(ids: Ids) -> tuple[Ids, npt.NDArray[np.uint64]]:
        """The word of each id and, as a word, its bit in that."""
        return ids >> 6, np.left_shift(np.uint64(1), (ids & (_WORD_BITS - 1)).astype(np.uint64))


Numbering = Same | Sorted | RankTable


def sorted_with_rows(ids: Ids, *, name: str, hint: str = "") -> tuple[Ids, Ids | None]:
    """The ids of rows 0 … N-1 ascending, and the row of each; None where they are ascending already.

    SourceError for an id that two rows have.
    """
    ascending = bool((ids[1:] > ids[:-1]).all())
    rows = None if ascending else np.argsort(ids, kind="stable")
    in_order = ids if rows is None else ids[rows]
    twice = np.flatnonzero(in_order[1:] == in_order[:-1])
    if len(twice):
        raise SourceError(f"{name} has the id {in_order[twice[0]]} twice{hint}")
    return in_order, rows
