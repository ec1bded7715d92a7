# SPDX-License-Identifier: Apache-2.0
"""Arrays of links beside a store's own: in files without a name, which end with the process, and written over again."""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.errors import SpillError
from ooc.plan.workload import Direction
from ooc.prefetch.spill import open_nameless
from ooc.sizes import format_size
from ooc.storage.array import PAGE_BYTES, Array, Extent


class LinkArray(Array):
    """``rows`` zeros in a file of ``folder``, as the part ``part`` of a topology. SpillError where there is no room."""

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
        super().__init__(f"{side.value}/{part}", path, (rows,), (max(1, rows),), kind.str)

    def extents(self, start_row: int, stop_row: int) -> list[Extent]:
        """Where rows ``[start_row, stop_row)`` lie."""
        return [Extent(self.path, start_row * self.row_bytes, (stop_row - start_row) * self.row_bytes)]

    def put(self, start: int, values: npt.NDArray[Any]) -> None:
        """Write ``values`` over the entries from ``start`` on."""
        data, done = np.ascontiguousarray(values, dtype=self.dtype).view(np.uint8), 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:].data, start * self.row_bytes + done)
        except OSError as error:
            raise SpillError(f"links cannot be written: {error.strerror or error}") from error
