# SPDX-License-Identifier: Apache-2.0
"""The few kinds of pickle that published datasets are, read without running anything they name: Planetoid's files, and
the dictionaries of arrays and numbers that ``torch.save`` wrote.

Of Planetoid's only the inert stand-ins below are made; arrays come from their raw bytes, and any other name is an
error. Torch's are read by ``torch.load(weights_only=True)``, which is as strict.
"""

import io
import pickle
import pickletools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.streams import Blob, damaged, read_exactly
from ooc.sources.source import Ids
from ooc.storage.array import AnyArray

_MOST_TORCH_BYTES = 1 << 28
_NOT_ALLOWED = re.compile(r"GLOBAL (\S+)")
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


_ALLOWED: dict[tuple[str, str], Any] = {
    **dict.fromkeys(((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")), _reconstruct),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): lambda kind=None: defaultdict(list),
    ("__builtin__", "list"): list,
}


class _Unpickler(pickle.Unpickler):
    """Makes what is allowed of names."""

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


def _check_pickle(data: bytes) -> None:
    """Go through the instructions of a pickle without following them; raises nearly anything where it is damaged.

    Each says how many bytes come with it: a number of them past the end would be allocated, and where that fails for
    mutable ones (which no array or list needs) the interpreter prints an error besides raising it.
    """
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name == "BYTEARRAY8":
            raise pickle.UnpicklingError("it holds mutable bytes")
        if "PUT" in instruction.name and int(argument or 0) > len(data):  # a list as long as that would be made
            raise pickle.UnpicklingError("it counts more objects than it has bytes")


def _load(path: Path) -> Any:
    try:
        text = path.read_bytes()
        _check_pickle(text)
        return _Unpickler(io.BytesIO(text), encoding="latin1").load()  # Python 2's strings of bytes.
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # A damaged pickle raises nearly anything.
        raise damaged(str(path), str(error)) from error


def read_torch_dict(blob: Blob) -> dict[str, AnyArray | int]:
    """The tensors, numpy arrays and whole numbers of a saved dictionary, by their names.

    SourceError for a damaged file, for one from before torch 1.6, and for one that holds something else.
    """
    import torch  # Some 200 MB, for the few formats that have such files.

    if read_exactly(blob.open(), min(2, blob.size), blob.name) != b"PK":
        raise SourceError(f"{blob.name} is no file of torch 1.6 or later; write it again with torch.save")
    if blob.size > _MOST_TORCH_BYTES:
        raise damaged(blob.name, "it is larger than such a file can be")
    data = io.BytesIO(read_exactly(blob.open(), blob.size, blob.name))
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            found = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # A damaged file raises nearly anything.
        named = _NOT_ALLOWED.search(str(error))
        what = f"it names {named[1]}, which is not allowed" if named else str(error).partition("\n")[0]
        raise damaged(blob.name, what or type(error).__name__) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise SourceError(f"{blob.name} holds no dictionary of arrays")
    plain = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
    for name, value in plain.items():
        if type(value) is not int and not (isinstance(value, np.ndarray) and value.dtype.kind in "biuf"):
            raise SourceError(f"{blob.name}: {name} is neither an array nor a whole number")
    return plain


def _numpy_globals() -> list[Any]:
    """What a pickle of an array of numbers refers to, written by numpy 1 or 2."""
    reconstruct = np.empty(0).__reduce__()[0]
    names = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [*names, np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefd"}]
