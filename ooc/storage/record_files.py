# SPDX-License-Identifier: Apache-2.0
"""Records in files, for sorting or joining more than memory holds: distributed to several files, and read again in
blocks.

Records are rows of an array: numbers [n], rows of numbers [n, k], or numpy's structured records [n].
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
"""The write buffer of each file; with enough memory pieces are larger anyway, and with little there are many files."""


@dataclass(frozen=True)
class Records:
    """``count`` records of the dtype ``dtype`` in the file at ``path``, which need not exist if there are none."""

    path: Path
    count: int
    dtype: np.dtype[Any]

    def blocks(self, size: int) -> Iterator[AnyArray]:
        """Yield all records in order, at most ``size`` at a time; raise OSError where the file has fewer."""
        if not self.count:
            return
        with self.path.open("rb") as file:
            for start in range(0, self.count, size):
                block = np.empty(min(size, self.count - start), dtype=self.dtype)
                self._fill(block, file)
                yield block

    def read(self, out: AnyArray) -> None:
        """Read all records into ``out`` [count]; raise OSError where the file has fewer."""
        with self.path.open("rb") as file:
            self._fill(out, file)

    def _fill(self, out: AnyArray, file: BinaryIO) -> None:
        begun = file.tell()
        got = file.readinto(out.view(np.uint8).data)  # type: ignore[attr-defined]
        if got != out.nbytes:
            raise OSError(f"{self.path} has {begun + got} bytes of {begun + out.nbytes} or more")


class RecordFiles:
    """A writer that distributes records to ``parts`` files in ``folder``, 256 at most, named ``prefix`` with their
    numbers."""

    def __init__(self, folder: Path, parts: int, prefix: str = "") -> None:
        self._folder, self._prefix = folder, prefix
        self.counts = [0] * parts
        self._files: dict[int, BinaryIO] = {}

    def path(self, part: int) -> Path:
        """Return the path of a part's file."""
        return self._folder / f"{self._prefix}{part}.records"

    def add(self, records: AnyArray, part_of: npt.NDArray[np.uint8]) -> list[tuple[int, AnyArray]]:
        """Append each of ``records`` to its part's file; return what each part gets, in one piece."""
        records = take_records(records, np.argsort(part_of, kind="stable"))  # A radix sort: of bytes, in one pass.
        cuts = [0, *np.cumsum(np.bincount(part_of, minlength=len(self.counts))).tolist()]
        pieces = [(part, records[start:stop]) for part, (start, stop) in enumerate(pairwise(cuts)) if start < stop]
        for part, piece in pieces:
            if part not in self._files:
                self._files[part] = self.path(part).open("wb", buffering=_BUFFER_BYTES)
            self._files[part].write(piece.data)
            self.counts[part] += len(piece)
        return pieces

    def close(self) -> None:
        """Close all files, even when one has no room to flush."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
        self._files = {}


def take_records(records: AnyArray, places: npt.NDArray[np.int64]) -> AnyArray:
    """Return ``records[places]``; structured records are moved as a whole, which is several times faster than by
    field."""
    if records.dtype.names is None:
        return records.take(places, axis=0)
    found: AnyArray = records.view(f"V{records.dtype.itemsize}").take(places).view(records.dtype)
    return found
