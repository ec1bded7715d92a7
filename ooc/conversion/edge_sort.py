# SPDX-License-Identifier: Apache-2.0
"""Sort more edges than fit memory: packed into 64-bit keys, spread over bucket files by key range,
and each bucket sorted in memory.

A key is ``row << bits | column``, so key order is CSR order. A bucket that is too large is spread again
over the range its keys really have: that splits hub rows too, whose keys differ in the column only. A
bucket of one repeated key needs no sorting at all. So any multiset of keys sorts within the capacity.

Buckets that are done spreading are data (:class:`Bucket`): a list of them, in ascending order, is all that
remains to be sorted, and a process that finds the list and the files goes on with it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]

KEY_BYTES = 8
_FAN_OUT = 128  # A part's number must fit a byte.


@dataclass(frozen=True)
class Bucket:
    """``count`` keys from ``least`` to ``largest`` in a file, in any order; no other bucket has keys between."""

    file: str
    count: int
    least: int
    largest: int


@dataclass(frozen=True)
class Step:
    """A step of sorting: ``blocks`` of ascending keys, then ``rest`` remains. ``spent``: the file to remove when
    the blocks, or that the bucket was replaced by finer ones (``refined``), are safe."""

    blocks: Iterator[Keys]
    rest: tuple[Bucket, ...]
    spent: Path
    refined: bool = False


class Spreader:
    """Spreads keys over files in ``folder``, which must not exist, by equal ranges of [``low``, ``high``]."""

    def __init__(self, folder: Path, *, low: int, high: int, parts: int, prefix: str = "") -> None:
        self._folder, self._prefix, self._low = folder, prefix, low
        # Ranges are powers of two wide, so that a key's part is a shift away.
        self._shift = max(0, (high - low) // parts).bit_length()
        self._parts = ((high - low) >> self._shift) + 1
        self._counts = [0] * self._parts
        self._least = [high] * self._parts
        self._largest = [low] * self._parts
        self._files: dict[int, BinaryIO] = {}
        folder.mkdir(parents=True, exist_ok=bool(prefix))

    def add(self, keys: Keys) -> None:
        """Take ``keys``: each file gets one contiguous piece of them."""
        part_of = ((keys - np.uint64(self._low)) >> np.uint64(self._shift)).astype(np.uint8)
        keys = keys[np.argsort(part_of, kind="stable")]  # A radix sort: of bytes, in one pass.
        cuts = [0, *np.cumsum(np.bincount(part_of, minlength=self._parts)).tolist()]
        for part, (start, stop) in enumerate(pairwise(cuts)):
            if start == stop:
                continue
            if part not in self._files:
                self._files[part] = self._path(part).open("wb")
            piece = keys[start:stop]
            self._files[part].write(piece.data)
            self._counts[part] += stop - start
            self._least[part] = min(self._least[part], int(piece.min()))
            self._largest[part] = max(self._largest[part], int(piece.max()))

    def close(self) -> list[Bucket]:
        """Close the files; what they hold, ascending."""
        with ExitStack() as stack:  # Closes all of them, even when one has no room to flush.
            for file in self._files.values():
                stack.callback(file.close)
        self._files = {}
        return [
            Bucket(self._path(part).name, self._counts[part], self._least[part], self._largest[part])
            for part in range(self._parts)
            if self._counts[part]
        ]

    def _path(self, part: int) -> Path:
        return self._folder / f"{self._prefix}{part}.keys"


def parts_for(keys: int, capacity: int, fan_out: int = _FAN_OUT) -> int:
    """Into how many buckets to spread ``keys``: twice as many as needed if even, real graphs are not."""
    return 1 if keys <= capacity else max(2, min(fan_out, 2 * -(-keys // capacity)))


class Sorter:
    """Sorts ``buckets`` that lie in ``folder``, with at most ``capacity`` keys a buffer, ``workers`` + 1 buffers.

    While spreading again it holds a few times ``block`` keys besides.
    """

    def __init__(
        self,
        folder: Path,
        buckets: Sequence[Bucket],
        *,
        capacity: int,
        block: int,
        workers: int,
        fan_out: int = _FAN_OUT,
    ) -> None:
        self._folder = folder
        self._waiting = deque(buckets)
        self._capacity = max(2, capacity)
        self._block = max(1, block)
        self._workers = workers
        self._fan_out = fan_out
        self._buffers: list[Keys] = []
        self._reading: dict[Bucket, tuple[Future[Keys], Keys]] = {}

    def steps(self) -> Iterator[Step]:
        """All keys ascending, a bucket a step. A block is a view that a later step overwrites.

        When the next step is asked for, ``rest`` of the one before must be on record if it was ``refined``.
        """
        size = min(self._capacity, max((bucket.count for bucket in self._waiting), default=0))
        # Taken once, and used in turn: memory does not depend on when freed buffers are given back.
        self._buffers = [np.empty(size, dtype=np.uint64) for _ in range(self._workers + 1)]
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ooc-sort")
        try:
            while self._waiting:
                bucket = self._waiting[0]
                path = self._folder / bucket.file
                if bucket.count > self._capacity and bucket.least != bucket.largest:
                    finer = self._spread_again(bucket)
                    self._waiting.popleft()
                    self._waiting.extendleft(reversed(finer))
                    yield Step(iter(()), tuple(self._waiting), path, refined=True)
                    continue
                self._read_ahead(pool)
                self._waiting.popleft()
                if bucket.least == bucket.largest:
                    yield Step(self._repeated(bucket), tuple(self._waiting), path)
                    continue
                future, buffer = self._reading.pop(bucket)
                yield Step(iter((future.result(),)), tuple(self._waiting), path)
                self._buffers.append(buffer)
        finally:
            pool.shutdown(cancel_futures=True)
            self._buffers, self._reading = [], {}

    def _read_ahead(self, pool: ThreadPoolExecutor) -> None:
        """Have the next buckets read and sorted, as many as there are buffers for."""
        for bucket in self._waiting:
            if not self._buffers or bucket.count > self._capacity:
                break
            if bucket not in self._reading and bucket.least != bucket.largest:
                buffer = self._buffers.pop()
                self._reading[bucket] = pool.submit(self._read, bucket, buffer), buffer

    def _read(self, bucket: Bucket, buffer: Keys) -> Keys:
        keys = buffer[: bucket.count]
        with (self._folder / bucket.file).open("rb") as file:
            got = file.readinto(keys.view(np.uint8).data)
        if got != keys.nbytes:
            raise OSError(f"{self._folder / bucket.file} has {got} bytes of {keys.nbytes}")
        keys.sort()
        return keys

    def _repeated(self, bucket: Bucket) -> Iterator[Keys]:
        keys = np.full(min(bucket.count, self._block), bucket.least, dtype=np.uint64)
        for start in range(0, bucket.count, len(keys)):
            yield keys[: bucket.count - start]

    def _spread_again(self, bucket: Bucket) -> list[Bucket]:
        parts = min(parts_for(bucket.count, self._capacity, self._fan_out), bucket.largest - bucket.least + 1)
        path = self._folder / bucket.file
        finer = Spreader(
            self._folder, low=bucket.least, high=bucket.largest, parts=max(2, parts), prefix=f"{path.stem}-"
        )
        try:
            with path.open("rb") as file:
                while data := file.read(min(self._block, self._capacity) * KEY_BYTES):
                    finer.add(np.frombuffer(data, dtype=np.uint64))
        finally:
            buckets = finer.close()
        return buckets
