# SPDX-License-Identifier: Apache-2.0
"""Sort more edges than fit memory: packed into 64-bit keys, spread over bucket files by key range,
and each bucket sorted in memory. What edges carry goes with them, in a file beside each bucket's.

A key is ``row << bits | column``, so key order is CSR order. A bucket that is too large is spread again
over the range its keys really have: that splits hub rows too, whose keys differ in the column only. A
bucket of one repeated key needs no sorting at all. So any multiset of keys sorts within the capacity. Edges that carry
something keep the order they came in where their keys are equal; without, equal keys are all the same.

Buckets that are done spreading are data (:class:`Bucket`): a process that finds a list of them, in ascending order,
and their files, can sort them, and does not change them by that.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ooc.conversion.edges import Keys, Run, Values, taken
from ooc.threads import Threads

KEY_BYTES = 8
_FAN_OUT = 128  # A part's number must fit a byte.
_ORDER_BYTES = 16  # Of memory for each key that is sorted with what it carries: its old place, and numpy's workspace.


@dataclass(frozen=True)
class Bucket:
    """``count`` keys from ``least`` to ``largest`` in a file, in any order; no other bucket has keys between.

    What they carry is in the file's :func:`values_path`, in the same order.
    """

    file: str
    count: int
    least: int
    largest: int


def values_path(path: Path) -> Path:
    """The file of what the edges carry whose keys are in the file ``path``."""
    return path.with_suffix(".values")


def sort_bytes(value_bytes: int) -> int:
    """Of memory for each key of a buffer of the sort, where each carries ``value_bytes``."""
    return KEY_BYTES + (value_bytes + _ORDER_BYTES if value_bytes else 0)


class Spreader:
    """Spreads keys over files in ``folder``, which must not exist, by equal ranges of [``low``, ``high``].

    What they carry (``with_values``) goes to files beside those.
    """

    def __init__(
        self, folder: Path, *, low: int, high: int, parts: int, prefix: str = "", with_values: bool = False
    ) -> None:
        self._folder, self._prefix, self._low = folder, prefix, low
        self._with_values = with_values
        # Ranges are powers of two wide, so that a key's part is a shift away.
        self._shift = max(0, (high - low) // parts).bit_length()
        self._parts = ((high - low) >> self._shift) + 1
        self._counts = [0] * self._parts
        self._least = [high] * self._parts
        self._largest = [low] * self._parts
        self._files: dict[Path, BinaryIO] = {}
        folder.mkdir(parents=True, exist_ok=bool(prefix))

    def add(self, keys: Keys, values: Values | None = None) -> None:
        """Take ``keys`` and what they carry: each file gets one contiguous piece of them."""
        assert (values is not None) == self._with_values, "all edges carry something, or none does"
        part_of = ((keys - np.uint64(self._low)) >> np.uint64(self._shift)).astype(np.uint8)
        order = np.argsort(part_of, kind="stable")  # A radix sort: of bytes, in one pass.
        keys = keys[order]
        carried = taken(values, order).view(np.uint8).reshape(len(keys), -1) if values is not None else None
        cuts = [0, *np.cumsum(np.bincount(part_of, minlength=self._parts)).tolist()]
        for part, (start, stop) in enumerate(pairwise(cuts)):
            if start == stop:
                continue
            piece = keys[start:stop]
            self._file(self._path(part)).write(piece.data)
            if carried is not None:
                self._file(values_path(self._path(part))).write(carried[start:stop].data)
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

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = path.open("wb")
        return self._files[path]

    def _path(self, part: int) -> Path:
        return self._folder / f"{self._prefix}{part}.keys"


def parts_for(keys: int, capacity: int) -> int:
    """Into how many buckets to spread ``keys``: twice as many as needed if even, real graphs are not."""
    return 1 if keys <= capacity else max(2, min(_FAN_OUT, 2 * -(-keys // capacity)))


class _Buffer:
    """Room for the keys of a bucket and what they carry, and the order that they were found to have."""

    def __init__(self, size: int, values: np.dtype[np.void] | None) -> None:
        self._keys = np.empty(size, dtype=np.uint64)
        self._values = np.empty(size, dtype=values) if values is not None else None
        self._order: npt.NDArray[np.int64] | None = None
        self._count = 0

    def fill(self, path: Path, count: int) -> None:
        """Read ``count`` edges of the bucket in the file ``path``, and sort them."""
        self._count = count
        keys = self._keys[:count]
        with path.open("rb") as file:
            _read_from(file, keys)
        if self._values is None:
            keys.sort()
            return
        with values_path(path).open("rb") as file:
            _read_from(file, self._values[:count])
        self._order = np.argsort(keys, kind="stable")

    def runs(self, block: int) -> Iterator[Run]:
        """The edges in order: all at once where they carry nothing, else put together ``block`` at a time."""
        if self._values is None or self._order is None:
            yield Run(self._keys[: self._count])
            return
        for start in range(0, self._count, block):
            order = self._order[start : start + block]
            yield Run(self._keys.take(order), taken(self._values[: self._count], order))
        self._order = None


def _read_from(file: BinaryIO, array: npt.NDArray[Any]) -> None:
    begun = file.tell()
    got = file.readinto(array.view(np.uint8).data)  # type: ignore[attr-defined]
    if got != array.nbytes:
        raise OSError(f"{file.name} has {begun + got} bytes of {begun + array.nbytes} or more")


class Sorter:
    """Sorts ``buckets`` in ``folder``, which stay there, with at most ``capacity`` keys a buffer, ``workers`` + 1
    buffers.

    ``values``: the records that the keys carry. While spreading again it holds a few times ``block`` keys besides.
    """

    def __init__(
        self,
        folder: Path,
        buckets: Sequence[Bucket],
        *,
        capacity: int,
        block: int,
        workers: int,
        values: np.dtype[np.void] | None = None,
    ) -> None:
        self._folder = folder
        self._waiting = deque(buckets)
        self._capacity = max(2, capacity)
        self._block = max(1, block)
        self._workers = workers
        self._values = values
        self._finer: set[str] = set()
        self._buffers: list[_Buffer] = []
        self._reading: dict[Bucket, tuple[Future[None], _Buffer]] = {}

    def steps(self) -> Generator[Iterator[Run]]:
        """All edges ascending, in runs, a bucket a step. A run may be a view that a later step overwrites."""
        size = min(self._capacity, max((bucket.count for bucket in self._waiting), default=0))
        # Taken once, and used in turn: memory does not depend on when freed buffers are given back.
        self._buffers = [_Buffer(size, self._values) for _ in range(self._workers + 1)]
        pool = Threads(self._workers, "ooc-sort")
        try:
            while self._waiting:
                bucket = self._waiting[0]
                if bucket.count > self._capacity and bucket.least != bucket.largest:
                    finer = self._spread_again(bucket)
                    self._waiting.popleft()
                    self._waiting.extendleft(reversed(finer))
                else:
                    self._read_ahead(pool)
                    self._waiting.popleft()
                    if bucket.least == bucket.largest:
                        keys = np.full(min(bucket.count, self._block), bucket.least, dtype=np.uint64)
                        yield (Run(keys[:count], values) for count, values in self._carried(bucket, len(keys)))
                    else:
                        future, buffer = self._reading.pop(bucket)
                        pool.result(future)
                        yield buffer.runs(self._block)
                        self._buffers.append(buffer)
                if bucket.file in self._finer:
                    path = self._folder / bucket.file
                    path.unlink()
                    values_path(path).unlink(missing_ok=True)
        finally:
            pool.shutdown(cancel_futures=True)
            self._buffers, self._reading = [], {}

    def _read_ahead(self, pool: Threads) -> None:
        """Have the next buckets read and sorted, as many as there are buffers for."""
        for bucket in self._waiting:
            if not self._buffers or bucket.count > self._capacity:
                break
            if bucket not in self._reading and bucket.least != bucket.largest:
                buffer = self._buffers.pop()
                self._reading[bucket] = pool.submit(buffer.fill, self._folder / bucket.file, bucket.count), buffer

    def _carried(self, bucket: Bucket, size: int) -> Iterator[tuple[int, Values | None]]:
        """What the keys of ``bucket`` carry, if they do, in the order they came in: of how many, ``size`` at most."""
        counts = [min(size, bucket.count - start) for start in range(0, bucket.count, size)]
        if self._values is None:
            yield from ((count, None) for count in counts)
            return
        path = values_path(self._folder / bucket.file)
        with path.open("rb") as file:
            for count in counts:
                values: Values = np.empty(count, dtype=self._values)
                _read_from(file, values)
                yield count, values

    def _spread_again(self, bucket: Bucket) -> list[Bucket]:
        parts = min(parts_for(bucket.count, self._capacity), bucket.largest - bucket.least + 1)
        path = self._folder / bucket.file
        finer = Spreader(
            self._folder,
            low=bucket.least,
            high=bucket.largest,
            parts=max(2, parts),
            prefix=f"{path.stem}-",
            with_values=self._values is not None,
        )
        size = min(self._block, self._capacity)
        try:
            with path.open("rb") as file:
                for count, values in self._carried(bucket, size):
                    keys = np.empty(count, dtype=np.uint64)
                    _read_from(file, keys)
                    finer.add(keys, values)
        finally:
            buckets = finer.close()
        self._finer |= {one.file for one in buckets}
        return buckets
