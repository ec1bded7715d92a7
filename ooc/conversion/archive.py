# SPDX-License-Identifier: Apache-2.0
"""Arrays in files: npz archives (read whole, counted against the budget) and folders of npy (mapped).

Never with pickles: an array of objects is an error.
"""

import mmap
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from ooc.errors import BudgetError, SourceError
from ooc.sizes import format_size
from ooc.storage.array import AnyArray

_BROKEN = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)
_MAPPED_BYTES = 1 << 16


def npz_names(path: Path) -> list[str]:
    """The arrays in the npz file at ``path``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except _BROKEN as error:
        raise _unreadable(path, error) from error


def read_npz(path: Path, wanted: Iterable[str], *, budget_bytes: int) -> tuple[dict[str, AnyArray], int]:
    """Those arrays of the file that are ``wanted``, and the bytes they take.

    Raises SourceError for a damaged file and BudgetError when they would not fit the budget unpacked.
    """
    names = [name for name in npz_names(path) if name in set(wanted)]
    arrays: dict[str, AnyArray] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(archive.getinfo(f"{name}.npy").file_size for name in names)
            if size > budget_bytes:
                raise BudgetError(
                    f"{path} unpacks to {format_size(size)}, the host budget is {format_size(budget_bytes)}; "
                    f"unzip it to a folder and convert that: its npy files are read in pieces"
                )
        with np.load(path, allow_pickle=False) as archive:
            for name in names:
                arrays[name] = archive[name]
    except _BROKEN as error:
        raise _unreadable(path, error) from error
    return arrays, sum(array.nbytes for array in arrays.values())


def map_npy_folder(folder: Path, wanted: Iterable[str]) -> tuple[dict[str, AnyArray], Callable[[], None]]:
    """The ``wanted`` arrays that ``folder`` has as NAME.npy, mapped, and a function that lets go of their
    pages read so far, so that reading in blocks takes no more memory than a block."""
    arrays: dict[str, AnyArray] = {}
    maps: list[mmap.mmap] = []
    for name in wanted:
        path = folder / f"{name}.npy"
        if not path.is_file():
            continue
        try:
            small = path.stat().st_size < _MAPPED_BYTES
            array = np.load(path, mmap_mode=None if small else "r", allow_pickle=False)
        except _BROKEN as error:
            raise _unreadable(path, error) from error
        if isinstance(array.base, mmap.mmap):
            maps.append(array.base)
        arrays[name] = np.asarray(array)

    def release() -> None:
        for mapped in maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    return arrays, release


def _unreadable(path: Path, error: Exception) -> SourceError:
    if isinstance(error, OSError) and error.strerror:
        return SourceError(f"{path} cannot be read: {error.strerror}")
    if "allow_pickle" in str(error) or "Object arrays" in str(error):
        return SourceError(f"{path} holds an array of Python objects, which are never loaded")
    reason = " ".join(str(error).split()) or type(error).__name__
    return SourceError(f"{path} cannot be read, it is damaged or incomplete: {reason}")
