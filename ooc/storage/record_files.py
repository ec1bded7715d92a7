# SPDX-License-Identifier: Apache-2.0
"""Records in files, of which more are sorted or joined than memory holds: spread over some, each by a number that it is
given, and read again in blocks.

Records are rows of an array: numbers [n], rows of numbers [n, k], or numpy's own [n], of several fields.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ooc.storage.array import AnyArray

_BUFFER_BYTES = 1 << 9
"""Of each file: pieces are larger where memory is not short, and there are many files where it is."""


@dataclass(frozen=True)
class Records:
    """``count`` records of the type ``dtype`` in the file at ``path``, which need not be there for none."""

    path: Path
    count: int
    dtype: np.dtype[Any]

    def blocks(self, size: int) -> Iterator[AnyArray]:
        """All of them in order, at most ``size`` at a time. OSError where the file has fewer."""
        if not self.count:
            return
        with self.path.open("rb") as file:
            for start in range(0, self.count, size):
                block = np.empty(min(size, self.count - start), dtype=self.dtype)
                self._fill(block, file)
                yield block

    def read(self, out: AnyArray) -> None:
        """All of them, to ``out`` [count]. OSError where the file has fewer."""
        with self.path.open("rb") as file:
            self._fill(out, file)

    def _fill(self, out: AnyArray, file: BinaryIO) -> None:
        begun = file.tell()
        got = file.readinto(out.view(np.uint8).data)  # type: ignore[attr-defined]
        if got != out.nbytes:
            raise OSError(f"{self.path} has {begun + got} bytes of {begun + out.nbytes} or more")


class RecordFiles:
    """Spreads records over ``parts`` files in ``folder``, 256 at most, whose names are ``prefix`` and their numbers."""

    def __init__(self, folder: Path, parts: int, prefix: str = "") -> None:
        self._folder, self._prefix = folder, prefix
        self.counts = [0] * parts
        self._files: dict[int, BinaryIO] = {}

    def path(self, part: int) -> Path:
        """That of a part's file."""
        return self._folder / f"{self._prefix}{part}.records"

    def add(self, records: AnyArray, part_of: npt.NDArray[np.uint8]) -> list[tuple[int, AnyArray]]:
        """Write ``records``, each to its part, behind those before; what each part gets of them, in one piece."""
        records = taken(records, np.argsort(part_of, kind="stable"))  # A radix sort: of bytes, in one pass.
        cuts = [0, *np.cumsum(np.bincount(part_of, minlength=len(self.counts))).tolist()]
        pieces = [(part, records[start:stop]) for part, (start, stop) in enumerate(pairwise(cuts)) if start < stop]
        for part, piece in pieces:
            if part not in self._files:
                self._files[part] = self.path(part).open("wb", buffering=_BUFFER_BYTES)
            self._files[part].write(piece.data)
            self.counts[part] += len(piece)
        return pieces

    def close(self) -> None:
        """Close the files: all of them, even when one has no room to flush."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
        self._files = {}


def taken(records: AnyArray, places: npt.NDArray[np.int64]) -> AnyArray:
    """``records[places]``, each moved as a whole: of several fields that is several times faster than one by one."""
    if records.dtype.names is None:
        return records.take(places, axis=0)
    found: AnyArray = records.view(f"V{records.dtype.itemsize}").take(places).view(records.dtype)
    return found
