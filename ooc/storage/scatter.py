# SPDX-License-Identifier: Apache-2.0
"""Writes an array's rows to any places of it: for rows that change their order on the way.

Rows that come in long runs are written in long pieces, so a stable partition of an array into few groups
is done in one sequential reading and as many sequential writings as there are groups.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.storage.array import AnyArray, Array, create_array, flush_within, refused, resume_array, write_metadata


class RowScatter:
    """A new array whose rows are ``put`` in any order, each once, and which ``close`` completes.

    Holds no row in memory and no file open. ``progress``: another process's to go on from; rows that were put
    after it are put again. Raises StoreError where the disk refuses.
    """

    def __init__(
        self,
        group_path: Path,
        name: str,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        progress: dict[str, Any] | None = None,
    ) -> None:
        self._unflushed: set[Path] = set()
        if progress is not None:
            nothing: dict[str, Any] = {"rows": 0, "checksums": [], "crc": 0}
            self.array = resume_array(group_path, name, shape, dtype, nothing).array
            self._missing = [int(rows) for rows in progress["missing"]]
            self._checksums = np.array(progress["checksums"], dtype=np.uint32)
            return
        self.array = array = create_array(group_path, name, shape, dtype).array
        self._missing = [min(array.chunks[0], shape[0] - start) for start in range(0, shape[0], array.chunks[0])]
        self._checksums = np.zeros(array.num_chunks, dtype=np.uint32)

    def progress(self) -> dict[str, Any]:
        """How far it has come, as JSON, once :meth:`flush` was called."""
        return {"missing": self._missing, "checksums": self._checksums.tolist()}

    def flush(self) -> None:
        """Have all rows so far on the disk, and the metadata once it is closed."""
        flush_within(self.array, self._unflushed)

    def put(self, places: npt.NDArray[np.int64], rows: AnyArray) -> None:
        """Write ``rows`` ``[n, columns]`` (or ``[n]``), of the array's dtype, to the ascending ``places`` ``[n]``."""
        array = self.array
        if rows.dtype != array.dtype or rows.shape != (len(places), *array.shape[1:]):
            raise ValueError(f"{array.name}: {rows.dtype}{rows.shape} put to {len(places)} places of {array!r}")
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        # Cut where places have a gap, and where a chunk begins.
        apart = (np.diff(places) != 1) | (places[1:] % array.chunks[0] == 0)
        borders = (np.flatnonzero(apart) + 1).tolist()
        for start, stop in pairwise([0, *borders, len(places)]):
            if start < stop:
                chunk, first = divmod(int(places[start]), array.chunks[0])
                self._write(chunk, first * array.row_bytes, data[start * array.row_bytes : stop * array.row_bytes])
                self._missing[chunk] -= stop - start
                if not self._missing[chunk]:
                    self._finish(chunk)

    def close(self) -> Array:
        """Write checksums and metadata. All rows must be there."""
        if any(self._missing):
            raise ValueError(f"{self.array.name}: {sum(self._missing)} rows were not put of {self.array.shape[0]}")
        self._unflushed |= write_metadata(self.array, self._checksums)
        return self.array

    def _write(self, chunk: int, offset: int, data: npt.NDArray[np.uint8]) -> None:
        path = self.array.chunk_path(chunk)
        self._unflushed.add(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:].data, offset + done)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise refused(path, error) from error

    def _finish(self, chunk: int) -> None:
        """Pad a chunk that has all its rows, and read it for its checksum while the system has it cached."""
        path = self.array.chunk_path(chunk)
        try:
            os.truncate(path, self.array.chunk_bytes)
        except OSError as error:
            raise refused(path, error) from error
        self._checksums[chunk] = self.array.checksum_of(chunk)
