# SPDX-License-Identifier: Apache-2.0
"""One allocation per tier, made once, in which the plan has assigned a place to every buffer."""

import mmap

import numpy as np
import numpy.typing as npt

from ooc.errors import BudgetError

Bytes = npt.NDArray[np.uint8]


class Arena:
    """``nbytes`` of anonymous memory on huge pages; its views are the buffers of a run.

    The first touch of 4 KiB pages is an order of magnitude slower than that of 2 MiB pages, hence the advice. Memory
    that is never written to costs nothing. ``used_bytes`` is the end of the highest view so far.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used_bytes = 0
        self._map: mmap.mmap | None = None
        if nbytes == 0:
            return
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise BudgetError(f"the system refuses an arena of {nbytes} bytes: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return a view of ``nbytes`` from ``offset``, a multiple of 4 KiB."""
        if offset < 0 or offset + nbytes > self.nbytes or self._map is None:
            raise BudgetError(f"{nbytes} bytes at {offset} asked of an arena of {self.nbytes} bytes")
        self.used_bytes = max(self.used_bytes, offset + nbytes)
        return np.frombuffer(self._map, dtype=np.uint8, count=nbytes, offset=offset)

    def close(self) -> None:
        """Release the memory; the system takes it back when the last view is gone."""
        self._map = None
