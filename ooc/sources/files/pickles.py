# SPDX-License-Identifier: Apache-2.0
"""The kinds of pickle that published datasets use, read without running anything they name: Planetoid's files, and
dictionaries of arrays and numbers from ``torch.save``.

In Planetoid's files, only the names of numpy's arrays and of inert stand-ins are allowed; any other is an error.
Torch's files are read by ``torch.load(weights_only=True)``, which is as strict.
"""

import io
import pickle
import pickletools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import SourceError, as_error
from ooc.sources.files.streams import Blob, damaged, read_exactly
from ooc.sources.source import Ids
from ooc.storage.array import AnyArray

_MOST_TORCH_BYTES = 1 << 28
_NOT_ALLOWED = re.compile(r"GLOBAL (\S+)")


class _Csr:
    """A stand-in for ``scipy.sparse.csr_matrix`` that only holds its attributes."""

    state: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    **dict.fromkeys(((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")), _RECONSTRUCT),
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): lambda kind=None: defaultdict(list),
    ("__builtin__", "list"): list,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that resolves only allowed names."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed") from None


def _is_numbers(found: object) -> bool:
    return isinstance(found, np.ndarray) and found.dtype.kind in "biuf"


def read_array(path: Path) -> AnyArray:
    """Return a pickled array of numbers."""
    found = _load(path)
    if not _is_numbers(found):
        raise SourceError(f"{path} holds no array")
    return np.asarray(found)


def read_csr(path: Path) -> tuple[AnyArray, AnyArray, AnyArray, tuple[int, int]]:
    """Return a pickled CSR matrix: ``(data, indices, indptr, shape)``."""
    found = _load(path)
    try:
        parts = [found.state[part] for part in ("data", "indices", "indptr")]
        if not all(map(_is_numbers, parts)):
            raise TypeError("its parts are no arrays")
        rows, columns = found.state["_shape"] if "_shape" in found.state else found.state["shape"]
        return parts[0], parts[1], parts[2], (int(rows), int(columns))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path} holds no sparse matrix") from error


def read_neighbours(path: Path) -> tuple[Ids, Ids]:
    """Return a pickled ``{node: [neighbours]}`` as ``(nodes, neighbours)``, one entry per edge."""
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
    """Walk through the opcodes of a pickle without executing them; raises almost any exception for a damaged one.

    Opcodes declare the length of their data. An unpickler allocates a length past the end of the file. Where that fails
    for mutable data (which no array or list needs), the interpreter prints an error besides raising it.
    """
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name == "BYTEARRAY8":
            raise pickle.UnpicklingError("it holds mutable bytes")
        if "PUT" in instruction.name and int(argument or 0) > len(data):  # a list as long as that would be made
            raise pickle.UnpicklingError("it counts more objects than it has bytes")


def _load(path: Path) -> Any:
    with as_error(SourceError, f"{path} cannot be read"):
        text = path.read_bytes()
    try:
        _check_pickle(text)
        return _Unpickler(io.BytesIO(text), encoding="latin1").load()  # Python 2's strings of bytes.
    except Exception as error:  # A damaged pickle raises nearly anything.
        raise damaged(str(path), str(error)) from error


def read_torch_dict(blob: Blob) -> dict[str, AnyArray | int]:
    """Return the tensors, numpy arrays and integers of a saved dictionary, by name.

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
        if type(value) is not int and not _is_numbers(value):
            raise SourceError(f"{blob.name}: {name} is neither an array nor a whole number")
    return plain


def _numpy_globals() -> list[Any]:
    """Return the names that a pickled array of numbers refers to, as numpy 1 or 2 writes it."""
    names = [(_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [*names, np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefd"}]
