# SPDX-License-Identifier: Apache-2.0
"""An array that is replaced as a whole, over and over: one file per version, of which one is read while the next is
written.

A file is an ``.npy`` whose header takes a page, so that numpy reads it, and its rows are aligned for direct I/O.
"""

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ooc.errors import OocError, SpillError
from ooc.storage.array import PAGE_BYTES, Array, Extent


class VersionedArray(Array):
    """Rows of ``shape`` in the files ``paths``; ``current`` is the version that is read, ``following`` the one to be
    written.

    The owner decides which version is which. ``crcs``: the CRC-32C of each version's rows, as far as known.
    """

    def __init__(self, name: str, paths: list[Path], shape: tuple[int, int], dtype: npt.DTypeLike) -> None:
        super().__init__(name, paths[0].parent, shape, shape, np.dtype(dtype).newbyteorder("<").str)
        self.paths = paths
        self.current, self.following = 0, 1
        self.start_bytes = PAGE_BYTES
        self.crcs: dict[int, int] = {}

    @property
    def current_path(self) -> Path:
        """The file of the version that is read."""
        return self.paths[self.current]

    @property
    def next_path(self) -> Path:
        """The file of the version that is to be written."""
        return self.paths[self.following]

    @property
    def has_checksums(self) -> bool:
        """Whether the checksum of the current version is known."""
        return self.current in self.crcs

    def checksums(self) -> npt.NDArray[np.uint32]:
        """Return the CRC-32C of the current version's rows, [1]."""
        return np.array([self.crcs[self.current]], dtype=np.uint32)

    def note(self, crc: int | None) -> None:
        """Note that the next version has been written, with its CRC-32C, or None if it is unknown."""
        self.crcs.pop(self.following, None)
        if crc is not None:
            self.crcs[self.following] = crc

    def chunk_path(self, index: int) -> Path:
        """Return the file of the current version, which is one chunk."""
        return self.current_path

    def damaged(self, chunk: int) -> OocError:
        """Return the error for a current version whose bytes are not those that were written."""
        return SpillError(f"{self.name}: the SSD returns other bytes of {self.current_path} than were written there")

    @property
    def file_nbytes(self) -> int:
        """The bytes of a version's file: whole pages."""
        return PAGE_BYTES + -(-self.shape[0] * self.row_bytes // PAGE_BYTES) * PAGE_BYTES

    def extent(self, path: Path, start_row: int, rows: int) -> Extent:
        """Return the extent of ``count`` rows in the file ``path``."""
        return Extent(path, PAGE_BYTES + start_row * self.row_bytes, rows * self.row_bytes)

    def header(self) -> bytes:
        """Return the page that a file begins with."""
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": self.shape}
        written = io.BytesIO()
        np.lib.format.write_array_header_1_0(written, described)
        fields = written.getvalue()[10:].rstrip()
        return b"\x93NUMPY\x01\x00" + (PAGE_BYTES - 10).to_bytes(2, "little") + fields.ljust(PAGE_BYTES - 11) + b"\n"
