# SPDX-License-Identifier: Apache-2.0
"""The few kinds of pickle that Planetoid's files are, read without running anything they name.

Whatever the pickle says, only the inert stand-ins below are made; arrays come from their raw bytes. Any
other name in it is an error. Python 2 wrote them: strings of bytes arrive decoded as latin-1.
"""

import io
import pickle
import pickletools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from ooc.conversion.source import Ids
from ooc.errors import SourceError
from ooc.storage.array import AnyArray

_NUMBERS = re.compile(r"[|<>=]?[biuf][1248]")


class _Dtype:
    """Stands in for ``numpy.dtype``."""

    def __init__(self, text: Any, align: Any = False, copy: Any = False) -> None:
        if not isinstance(text, str) or not _NUMBERS.fullmatch(text):
            raise pickle.UnpicklingError(f"it holds an array of {text!r}")
        self.code = text.lstrip("|<>=")
        self.order = "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


class _Array:
    """Stands in for ``numpy.ndarray``: filled from shape, dtype and raw bytes."""

    value: AnyArray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        data = raw.encode("latin-1") if isinstance(raw, str) else raw
        flat = np.frombuffer(data, dtype=np.dtype(dtype.order + dtype.code))
        self.value = flat.reshape(shape, order="F" if fortran else "C")


class _Csr:
    """Stands in for ``scipy.sparse.csr_matrix``: its attributes, nothing else."""

    state: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    return _Array()


def _mapping(kind: Any = None) -> defaultdict[Any, list[Any]]:
    return defaultdict(list)


NUMPY_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}
"""What arrays of numbers name in a pickle, by numpy 1 and 2, and what is made instead; see :func:`array_of`."""


def array_of(loaded: object) -> AnyArray | None:
    """The array that a stand-in was filled with; None for anything else."""
    return loaded.value if isinstance(loaded, _Array) and hasattr(loaded, "value") else None


_ALLOWED: dict[tuple[str, str], Any] = {
    **NUMPY_STAND_INS,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): _mapping,
    ("__builtin__", "list"): list,
}


class _Whitelist(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed") from None


def read_array(path: Path) -> AnyArray:
    """A pickled array of numbers."""
    found = _load(path)
    if not isinstance(found, _Array) or not hasattr(found, "value"):
        raise SourceError(f"{path} holds no array")
    return found.value


def read_csr(path: Path) -> tuple[AnyArray, AnyArray, AnyArray, tuple[int, int]]:
    """A pickled CSR matrix: ``(data, indices, indptr, shape)``."""
    found = _load(path)
    try:
        parts = [found.state[part].value for part in ("data", "indices", "indptr")]
        rows, columns = found.state["_shape"] if "_shape" in found.state else found.state["shape"]
        return parts[0], parts[1], parts[2], (int(rows), int(columns))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path} holds no sparse matrix") from error


def read_neighbours(path: Path) -> tuple[Ids, Ids]:
    """A pickled ``{node: [neighbours]}``: ``(nodes, neighbours)``, an entry for each edge."""
    found = _load(path)
    try:
        nodes = np.array(list(found), dtype=np.int64)
        lengths = [len(neighbours) for neighbours in found.values()]
        flat = [node for neighbours in found.values() for node in neighbours]
        if any(type(node) is not int for node in (*found, *flat)):
            raise TypeError("not all of them are whole numbers")
        return np.repeat(nodes, lengths), np.array(flat, dtype=np.int64)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise SourceError(f"{path} holds no lists of neighbours: {error}") from error


def check_pickle(data: bytes) -> None:
    """Go through the instructions of a pickle without following them; raises nearly anything where it is damaged.

    Each says how many bytes come with it: a number of them past the end would be allocated, and where that fails for
    mutable ones (which no array or list needs) the interpreter prints an error besides raising it.
    """
    for instruction, _, _ in pickletools.genops(data):
        if instruction.name == "BYTEARRAY8":
            raise pickle.UnpicklingError("it holds mutable bytes")


def _load(path: Path) -> Any:
    try:
        data = path.read_bytes()
        check_pickle(data)
        return _Whitelist(io.BytesIO(data), encoding="latin1").load()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # A damaged pickle raises nearly anything.
        raise SourceError(
            f"{path} cannot be read, it is damaged or not Planetoid's: {' '.join(str(error).split())}"
        ) from error
