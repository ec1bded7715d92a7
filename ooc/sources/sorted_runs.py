# SPDX-License-Identifier: Apache-2.0
"""Different ids in ascending order, more than memory holds: sorted runs of them in files, merged as they are read."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import BinaryIO, Generic, Literal, Self, TypeVar

import numpy as np

from ooc.sources.files.text_file import TextFile
from ooc.sources.source import Ids
from ooc.storage.array import flush

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
