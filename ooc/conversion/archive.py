# SPDX-License-Identifier: Apache-2.0
"""Arrays in files: npz archives (read whole, counted against the budget) and folders of npy (mapped).

Never with pickles: an array of objects is an error.
"""

import mmap
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from tokenize import TokenError

import numpy as np

from ooc.errors import BudgetError, SourceError
from ooc.sizes import format_size
from ooc.storage.array import AnyArray

# An npy header is a Python literal, parsed as such: damage to it raises what damaged Python does.
_BROKEN_HEADER = (ValueError, TypeError, KeyError, SyntaxError, TokenError, MemoryError, OverflowError)
_BROKEN = (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, *_BROKEN_HEADER)
_MAPPED_BYTES = 1 << 16
_END_OF_DIRECTORY = b"PK\5\6"
_TAIL_BYTES = 22 + 0xFFFF  # That record and the longest comment after it.


def npz_names(path: Path) -> list[str]:
    """The arrays in the npz file at ``path``."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                # Compares its two names. With one damaged in the directory, an array would seem not to be there.
                archive.open(member).close()
            if (counted := _counted(path)) not in (None, len(archive.infolist())):
                raise zipfile.BadZipFile(f"its directory has {len(archive.infolist())} files of {counted}")
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except _BROKEN as error:
        raise _unreadable(path, error) from error


def _counted(path: Path) -> int | None:
    """How many files the zip at ``path`` says it has, which zipfile does not compare; None past 65,534."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        tail = file.read()
    at = tail.rfind(_END_OF_DIRECTORY)
    counted = int.from_bytes(tail[at + 10 : at + 12], "little")
    return None if at < 0 or counted == 0xFFFF else counted


def read_npz(path: Path, wanted: Iterable[str], *, budget_bytes: int) -> tuple[dict[str, AnyArray], int]:
    """Those arrays of the file that are ``wanted``, and the bytes they take.

    Raises SourceError for a damaged file and BudgetError when they would not fit the budget unpacked.
    """
    names = [name for name in npz_names(path) if name in set(wanted)]
    arrays: dict[str, AnyArray] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                # Compares name and flags with what is written before the member: a changed name in the directory
                # would make an array look absent.
                archive.open(member).close()
            if (counted := _counted(path)) not in (None, len(archive.infolist())):
                raise zipfile.BadZipFile(f"its directory has {len(archive.infolist())} files of {counted}")
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
