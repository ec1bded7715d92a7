# SPDX-License-Identifier: Apache-2.0
"""Arrays of links beside a store's own: in files without a name, which end with the process, and written over again;
and links by their tails instead of by their heads."""

import os
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from ooc.errors import OocError, SpillError
from ooc.plan.workload import Direction
from ooc.prefetch.spill import open_nameless
from ooc.sizes import format_size
from ooc.storage.array import PAGE_BYTES, Array, Extent
from ooc.storage.checksums import combined, of_zeros


class LinkArray(Array):
    """``rows`` zeros in a file of ``folder``, as the part ``part`` of a topology. SpillError where there is no room.

    What is put there from the first row to the last has a checksum, and is compared with it when it is read so.
    """

    def __init__(self, folder: Path, side: Direction, part: str, rows: int, dtype: npt.DTypeLike) -> None:
        kind = np.dtype(dtype).newbyteorder("<")
        nbytes = -(-max(1, rows) * kind.itemsize // PAGE_BYTES) * PAGE_BYTES
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_nameless(folder)
            self.close = weakref.finalize(self, os.close, self._descriptor)
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            raise SpillError(
                f"{folder}: no room for links, {format_size(nbytes)}: {error.strerror or error}"
            ) from error
        path = Path(f"/proc/self/fd/{self._descriptor}")
        super().__init__(f"{side.value}/{part}", path, (rows,), (nbytes // kind.itemsize,), kind.str)
        self._put_bytes, self._crc = 0, 0

    def extents(self, start_row: int, stop_row: int) -> list[Extent]:
        """Where rows ``[start_row, stop_row)`` lie."""
        return [Extent(self.path, start_row * self.row_bytes, (stop_row - start_row) * self.row_bytes)]

    def chunk_path(self, index: int) -> Path:
        """The file, which is one chunk."""
        return self.path

    @property
    def has_checksums(self) -> bool:
        """Whether all was put there one after the other."""
        return 0 < self._put_bytes == self.shape[0] * self.row_bytes

    def checksums(self) -> npt.NDArray[np.uint32]:
        """The CRC-32C of the file, with the zeros at its end, [1]."""
        zeros = self.chunk_bytes - self._put_bytes
        return np.array([combined(self._crc, of_zeros(zeros), zeros)], dtype=np.uint32)

    def damaged(self, chunk: int) -> OocError:
        """The error that says that the bytes of links are not those that were written."""
        return SpillError(f"{self.name}: the SSD returns other bytes of links than were written")

    def put(self, start: int, values: npt.NDArray[Any]) -> None:
        """Write ``values`` over the entries from ``start`` on."""
        data, done = np.ascontiguousarray(values, dtype=self.dtype).view(np.uint8), 0
        follows = start * self.row_bytes == (self._put_bytes if start else 0)
        self._crc = google_crc32c.extend(self._crc if start else 0, data) if follows else 0
        self._put_bytes = start * self.row_bytes + len(data) if follows else -1
        self._seen = 0, 0, 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:].data, start * self.row_bytes + done)
        except OSError as error:
            raise SpillError(f"links cannot be written: {error.strerror or error}") from error


_LINKS_AT_ONCE = 1 << 17
"""That are put in order together."""
_BYTES_PER_LINK = 48
"""Of each of them: both ends, which bucket, and their order."""


class ReversedLinks:
    """Links by their tails, as a topology of ``side``, from those by their heads, whose ``tails`` are written already:
    cut into buckets of tails, each of which is put in order by itself.

    Making it takes 8 bytes a node, ``fill`` ``nbytes``.
    """

    def __init__(self, folder: Path, side: Direction, tails: LinkArray, nodes: int) -> None:
        self._by_heads, total, index = tails, tails.shape[0], tails.dtype
        counts = np.zeros(nodes, dtype=np.int64)
        for first in range(0, total, _LINKS_AT_ONCE):
            np.add.at(counts, tails.read(first, min(total, first + _LINKS_AT_ONCE)), 1)
        ends = np.concatenate(([0], np.cumsum(counts)))
        self._nodes = [0]
        while self._nodes[-1] < nodes:  # a bucket has as many links as are taken at once, or a single tail
            node = self._nodes[-1]
            stop = int(np.searchsorted(ends, ends[node] + _LINKS_AT_ONCE, side="right")) - 1
            self._nodes.append(max(stop, node + 1))
        self._starts = ends[self._nodes].tolist()
        self._offsets, self._heads = (
            LinkArray(folder, side, "indptr", nodes + 1, np.int64),
            LinkArray(folder, side, "indices", total, index),
        )
        self._tails = LinkArray(folder, side, "tails", total, index)
        self._offsets.put(0, ends)
        self._is_filled = False
        self.arrays = {array.name: array for array in (self._offsets, self._heads)}
        self.nbytes = 16 * len(self._nodes) + _BYTES_PER_LINK * min(total, _LINKS_AT_ONCE)

    def fill(self, offsets: npt.NDArray[np.signedinteger]) -> None:
        """Write the heads, once; ``offsets`` [N + 1]: where links of every head begin."""
        if self._is_filled:
            return
        total, at = self._by_heads.shape[0], list(self._starts)
        for first in range(0, total, _LINKS_AT_ONCE):
            last = min(total, first + _LINKS_AT_ONCE)
            heads = np.searchsorted(offsets, np.arange(first, last, dtype=offsets.dtype), side="right") - 1
            tails = self._by_heads.read(first, last)
            bucket = np.searchsorted(self._nodes, tails, side="right") - 1
            order = np.argsort(bucket, kind="stable")
            found, counts = np.unique(bucket, return_counts=True)
            done = 0
            for number, count in zip(found.tolist(), counts.tolist(), strict=True):
                mine = order[done : done + count]
                self._heads.put(at[number], heads[mine])
                self._tails.put(at[number], tails[mine])
                done, at[number] = done + count, at[number] + count
        for number, (start, stop) in enumerate(pairwise(self._starts)):
            if self._nodes[number + 1] - self._nodes[number] > 1:
                order = np.argsort(self._tails.read(start, stop), kind="stable")
                self._heads.put(start, self._heads.read(start, stop)[order])
        self._is_filled = True
