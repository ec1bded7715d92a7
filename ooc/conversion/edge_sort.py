# SPDX-License-Identifier: Apache-2.0
"""Sort more edges than fit memory: packed into 64-bit keys, spread over bucket files by key range,
and each bucket sorted in memory.

A key is ``row << bits | column``, so key order is CSR order. A bucket that is too large is spread again
over the range its keys really have: that splits hub rows too, whose keys differ in the column only. A
bucket of one repeated key needs no sorting at all. So any multiset of keys sorts within the capacity.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]

KEY_BYTES = 8
_FAN_OUT = 128


class _Buckets:
    """Files of keys, by equal ranges of [low, high]; in each its keys' number, least and largest."""

    def __init__(self, folder: Path, *, low: int, high: int, parts: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        width = (high - low) // parts + 1
        self.inner: Keys = np.array([low + width * i for i in range(1, parts)], dtype=np.uint64)
        self.counts = [0] * parts
        self.least = [high] * parts
        self.largest = [low] * parts
        self._files: dict[int, BinaryIO] = {}

    def path(self, part: int) -> Path:
        return self.folder / f"{part}.keys"

    def add(self, keys: Keys) -> None:
        """Spread ``keys``, sorting them in place on the way: each file then gets one contiguous piece."""
        keys.sort()
        cuts = [0, *np.searchsorted(keys, self.inner).tolist(), len(keys)]
        for part, (start, stop) in enumerate(pairwise(cuts)):
            if start == stop:
                continue
            if part not in self._files:
                self._files[part] = self.path(part).open("wb")
            self._files[part].write(keys[start:stop].data)
            self.counts[part] += stop - start
            self.least[part] = min(self.least[part], int(keys[start]))
            self.largest[part] = max(self.largest[part], int(keys[stop - 1]))

    def close(self) -> None:
        """Close the files (they stay)."""
        with ExitStack() as stack:  # Closes all of them, even when one has no room to flush.
            for file in self._files.values():
                stack.callback(file.close)
        self._files = {}


class EdgeSorter:
    """Takes keys in any order by ``add``, gives them back ascending by ``sorted_blocks``, once.

    Holds at most ``capacity`` keys in memory, besides a block of ``block`` while spreading. Its files lie
    in ``folder``, which must not exist; each is removed as soon as it has been read.
    """

    def __init__(
        self, folder: Path, *, largest: int, expected: int, capacity: int, block: int, fan_out: int = _FAN_OUT
    ) -> None:
        self._capacity = max(2, capacity)
        self._block = max(1, block)
        self._fan_out = max(2, fan_out)
        self._buckets = _Buckets(folder, low=0, high=largest, parts=self._parts(expected))
        self._buffer: Keys = np.empty(0, dtype=np.uint64)

    def add(self, keys: Keys) -> None:
        """Take ``keys``; their order is changed in place."""
        self._buckets.add(keys)

    def sorted_blocks(self) -> Iterator[Keys]:
        """All keys ascending. A block is a view that the next one overwrites."""
        self._buckets.close()
        # Taken once: a consumer may still hold a view of a buffer that was let go of.
        self._buffer = np.empty(min(self._capacity, max(self._buckets.counts)), dtype=np.uint64)
        yield from self._drain(self._buckets)
        self._buffer = np.empty(0, dtype=np.uint64)

    def close(self) -> None:
        """Close what is open; the files stay for whoever removes the folder."""
        self._buckets.close()

    def _parts(self, keys: int) -> int:
        # Twice as many as needed when spread evenly: real graphs are not.
        return 1 if keys <= self._capacity else min(self._fan_out, 2 * -(-keys // self._capacity))

    def _drain(self, buckets: _Buckets) -> Iterator[Keys]:
        for part, count in enumerate(buckets.counts):
            if count == 0:
                continue
            path = buckets.path(part)
            if buckets.least[part] == buckets.largest[part]:
                path.unlink()
                yield from self._repeated(buckets.least[part], count)
            elif count <= self._capacity:
                keys = self._buffer[:count]
                with path.open("rb") as file:
                    file.readinto(keys.view(np.uint8).data)
                path.unlink()
                keys.sort()
                yield keys
            else:
                finer = self._spread_again(path, buckets.least[part], buckets.largest[part], count)
                path.unlink()
                yield from self._drain(finer)
        buckets.folder.rmdir()

    def _repeated(self, key: int, count: int) -> Iterator[Keys]:
        while count:
            take = min(count, len(self._buffer))
            self._buffer[:take] = key
            yield self._buffer[:take]
            count -= take

    def _spread_again(self, path: Path, low: int, high: int, count: int) -> _Buckets:
        parts = max(2, min(self._parts(count), high - low + 1))
        finer = _Buckets(path.with_suffix(".finer"), low=low, high=high, parts=parts)
        try:
            with path.open("rb") as file:
                while data := file.read(min(self._block, self._capacity) * KEY_BYTES):
                    finer.add(np.frombuffer(bytearray(data), dtype=np.uint64))
        finally:
            finer.close()
        return finer
