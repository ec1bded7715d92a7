# SPDX-License-Identifier: Apache-2.0
"""A sort of more edges than fit in memory.

Edges are packed into 64-bit keys, distributed to bucket files by ranges of keys, and each bucket is sorted in memory.
Edge data is sorted with them, in records that begin with the key. A key is ``row << bits | column``, so key order is
CSR order. A bucket that is too large is distributed again over the range of its keys. That also divides hub rows, whose
keys differ in the column only. A bucket of one repeated key needs no sorting. So any multiset of keys sorts within the
capacity. Edges with data keep their order where keys are equal; without data, equal keys are indistinguishable.

Complete buckets are plain data (:class:`Bucket`): a process that finds a list of them, in ascending order, with their
files, can sort them, and does not change them by that.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.conversion.edges import Edges, keys_of
from ooc.storage.record_files import RecordFiles, Records, take_records
from ooc.threads import Threads

KEY_BYTES = 8
_FAN_OUT = 128  # A part's number must fit a byte.
_ORDER_BYTES = 24
"""Bytes of memory for each key that is sorted with data: the key by itself, its old place, numpy's workspace."""


@dataclass(frozen=True)
class Bucket:
    """``count`` edges with keys from ``least`` to ``largest`` in a file, in any order; no other bucket has keys
    between."""

    file: str
    count: int
    least: int
    largest: int


def sort_bytes(value_bytes: int) -> int:
    """Return the bytes of memory for each key in a sort buffer, with ``value_bytes`` of data."""
    return KEY_BYTES + (value_bytes + _ORDER_BYTES if value_bytes else 0)


class Spreader:
    """A writer that distributes edges to new files in ``folder``, by equal ranges of the keys in [``low``,
    ``high``]."""

    def __init__(self, folder: Path, *, low: int, high: int, parts: int, prefix: str = "") -> None:
        self._low = low
        # Ranges are powers of two wide, so that a key's part is a shift away.
        self._shift = max(0, (high - low) // parts).bit_length()
        parts = ((high - low) >> self._shift) + 1
        self._least, self._largest = [high] * parts, [low] * parts
        self._files = RecordFiles(folder, parts, prefix)
        folder.mkdir(parents=True, exist_ok=bool(prefix))

    def add(self, edges: Edges) -> None:
        """Add ``edges``, all with the same kind of data or none."""
        part_of = ((keys_of(edges) - np.uint64(self._low)) >> np.uint64(self._shift)).astype(np.uint8)
        for part, piece in self._files.add(edges, part_of):
            keys = keys_of(piece)
            self._least[part] = min(self._least[part], int(keys.min()))
            self._largest[part] = max(self._largest[part], int(keys.max()))

    def close(self) -> list[Bucket]:
        """Close the files; return their buckets in ascending order."""
        self._files.close()
        return [
            Bucket(self._files.path(part).name, count, self._least[part], self._largest[part])
            for part, count in enumerate(self._files.counts)
            if count
        ]


def parts_for(keys: int, capacity: int) -> int:
    """Return the number of buckets for ``keys``: twice as many as an even distribution needs, since graphs are
    uneven."""
    return 1 if keys <= capacity else max(2, min(_FAN_OUT, 2 * -(-keys // capacity)))


class _Buffer:
    """Memory for the edges of a bucket, and their order, where they are not sorted in place."""

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self._edges: Edges = np.empty(size, dtype=dtype)
        self._order: npt.NDArray[np.int64] | None = None
        self._count = 0

    def fill(self, bucket: Records) -> None:
        """Read the edges of ``bucket``, and sort them."""
        self._count = bucket.count
        edges = self._edges[: self._count]
        bucket.read(edges)
        if edges.dtype.names is None:
            edges.sort()
        else:
            self._order = np.argsort(keys_of(edges), kind="stable")

    def runs(self, block: int) -> Iterator[Edges]:
        """Yield the edges in order: all at once without data, else ``block`` at a time."""
        edges = self._edges[: self._count]
        if self._order is None:
            yield edges
            return
        for start in range(0, self._count, block):
            yield take_records(edges, self._order[start : start + block])
        self._order = None


class Sorter:
    """A sort of ``buckets`` of edges of type ``dtype`` in ``folder``, which are left there.

    It has ``workers`` + 1 buffers of at most ``capacity`` edges. While distributing again it holds a few times
    ``block`` edges besides.
    """

    def __init__(
        self,
        folder: Path,
        buckets: Sequence[Bucket],
        dtype: np.dtype[Any],
        *,
        capacity: int,
        block: int,
        workers: int,
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self._waiting = deque(buckets)
        self._capacity = max(2, capacity)
        self._block = max(1, block)
        self._workers = workers
        self._split_files: set[str] = set()
        self._buffers: list[_Buffer] = []
        self._reading: dict[Bucket, tuple[Future[None], _Buffer]] = {}

    def runs(self) -> Generator[Edges]:
        """Yield all edges in ascending order, in runs. A run may be a view that later ones overwrite."""
        size = min(self._capacity, max((bucket.count for bucket in self._waiting), default=0))
        # Taken once, and used in turn: memory does not depend on when freed buffers are given back.
        self._buffers = [_Buffer(size, self._dtype) for _ in range(self._workers + 1)]
        pool = Threads(self._workers, "ooc-sort")
        try:
            while self._waiting:
                bucket = self._waiting[0]
                if bucket.count > self._capacity and bucket.least != bucket.largest:
                    finer = self._split_bucket(bucket)
                    self._waiting.popleft()
                    self._waiting.extendleft(reversed(finer))
                else:
                    self._read_ahead(pool)
                    self._waiting.popleft()
                    if bucket.least == bucket.largest:
                        yield from self._records(bucket).blocks(self._block)
                    else:
                        future, buffer = self._reading.pop(bucket)
                        pool.result(future)
                        yield from buffer.runs(self._block)
                        self._buffers.append(buffer)
                if bucket.file in self._split_files:
                    self._records(bucket).path.unlink()
        finally:
            pool.shutdown(cancel_futures=True)
            self._buffers, self._reading = [], {}

    def _records(self, bucket: Bucket) -> Records:
        return Records(self._folder / bucket.file, bucket.count, self._dtype)

    def _read_ahead(self, pool: Threads) -> None:
        """Start reading and sorting the next buckets, as many as there are buffers for."""
        for bucket in self._waiting:
            if not self._buffers or bucket.count > self._capacity:
                break
            if bucket not in self._reading and bucket.least != bucket.largest:
                buffer = self._buffers.pop()
                self._reading[bucket] = pool.submit(buffer.fill, self._records(bucket)), buffer

    def _split_bucket(self, bucket: Bucket) -> list[Bucket]:
        parts = min(parts_for(bucket.count, self._capacity), bucket.largest - bucket.least + 1)
        prefix = f"{Path(bucket.file).stem}-"
        finer = Spreader(self._folder, low=bucket.least, high=bucket.largest, parts=max(2, parts), prefix=prefix)
        try:
            for edges in self._records(bucket).blocks(min(self._block, self._capacity)):
                finer.add(edges)
        finally:
            buckets = finer.close()
        self._split_files |= {one.file for one in buckets}
        return buckets
