# SPDX-License-Identifier: Apache-2.0
"""The few kinds of pickle that published datasets are, read without running anything they name: Planetoid's files, and
the dictionaries of arrays and numbers that ``torch.save`` wrote.

Whatever a pickle says, only the inert stand-ins below are made; arrays come from their raw bytes. Any other name in it
is an error. ``torch.load(weights_only=True)`` is as strict, but takes torch, some 200 MB, into a process that converts
in as little as 34 MB, and reads archives in archives only unpacked.
"""

import io
import pickle
import pickletools
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.streams import Blob, damaged, read_exactly
from ooc.sources.files.zip_members import Archive
from ooc.sources.source import Ids
from ooc.storage.array import AnyArray

_MOST_PICKLE_BYTES = 1 << 26
_MOST_TENSOR_BYTES = 1 << 28
_NUMBERS = re.compile(r"[|<>=]?[biuf][1248]")
_STORAGES = {
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
}


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


_NUMPY_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}
"""What arrays of numbers name in a pickle, by numpy 1 and 2, and what is made instead; see :func:`_array_of`."""


def _array_of(loaded: object) -> AnyArray | None:
    """The array that a stand-in was filled with; None for anything else."""
    return loaded.value if isinstance(loaded, _Array) and hasattr(loaded, "value") else None


_OF_PLANETOID: dict[tuple[str, str], Any] = {
    **_NUMPY_STAND_INS,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): lambda kind=None: defaultdict(list),
    ("__builtin__", "list"): list,
}


class _Unpickler(pickle.Unpickler):
    """Makes what ``allowed`` says of names, and ``storage`` of references to what is beside the pickle."""

    def __init__(
        self, text: bytes, allowed: Mapping[tuple[str, str], Any], storage: Callable[[Any], AnyArray] | None = None
    ) -> None:
        _check_pickle(text)
        super().__init__(io.BytesIO(text), encoding="latin1")  # Python 2's strings of bytes.
        self._allowed, self._storage = allowed, storage

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed") from None

    def persistent_load(self, reference: Any) -> AnyArray:
        if self._storage is None:
            raise pickle.UnpicklingError("it refers to something beside it")
        return self._storage(reference)


def read_array(path: Path) -> AnyArray:
    """A pickled array of numbers."""
    found = _array_of(_load(path))
    if found is None:
        raise SourceError(f"{path} holds no array")
    return found


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
        return _Unpickler(path.read_bytes(), _OF_PLANETOID).load()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # A damaged pickle raises nearly anything.
        raise damaged(str(path), str(error)) from error


def read_torch_dict(blob: Blob) -> dict[str, AnyArray | int]:
    """The tensors, numpy arrays and whole numbers of a saved dictionary, by their names.

    SourceError for a damaged file, for one from before torch 1.6, and for one that holds something else.
    """
    if read_exactly(blob.open(), min(2, blob.size), blob.name) != b"PK":
        raise SourceError(f"{blob.name} is no file of torch 1.6 or later; write it again with torch.save")
    archive = Archive(blob)
    names = archive.names()
    main = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(main) != 1:
        raise damaged(blob.name, "it holds no data.pkl, or several")
    text = _member(archive, main[0], _MOST_PICKLE_BYTES)
    folder = main[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in names and _member(archive, f"{folder}byteorder", 16) != b"little":
        raise SourceError(
            f"{blob.name} was written on a machine of the other byte order; write it again on a usual one"
        )
    try:
        found = _Unpickler(text, _OF_TORCH, lambda reference: _storage(archive, folder, reference)).load()
    except SourceError:
        raise
    except Exception as error:  # A damaged pickle raises nearly anything.
        raise damaged(blob.name, str(error) or type(error).__name__) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise SourceError(f"{blob.name} holds no dictionary of arrays")
    return {name: _plain(value, name, blob.name) for name, value in found.items()}


def _member(archive: Archive, name: str, most: int) -> bytes:
    member = archive.member(name)
    assert member is not None, "it is one of the names"
    if member.size > most:
        raise damaged(member.name, "it is larger than such a file can be")
    return read_exactly(member.open(), member.size, member.name)


def _plain(value: Any, name: str, file: str) -> AnyArray | int:
    if isinstance(value, np.ndarray) or type(value) is int:
        return value
    array = _array_of(value)
    if array is None:
        raise SourceError(f"{file}: {name} is neither an array nor a whole number")
    return array


class _Storage:
    """Stands in for a class of torch's storages: a type of numbers."""

    def __init__(self, code: str) -> None:
        self.dtype = np.dtype(code)


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any = False, hooks: Any = None, extra: Any = None
) -> AnyArray:
    """Stands in for ``torch._utils._rebuild_tensor_v2``: contiguous tensors only."""
    if not isinstance(storage, np.ndarray) or not all(type(number) is int for number in (offset, *shape, *stride)):
        raise pickle.UnpicklingError("it holds no tensor of numbers")
    count, expected = 1, []
    for extent in reversed(shape):
        expected.append(count)
        count *= extent
    if any(a != b for a, b, extent in zip(reversed(stride), expected, reversed(shape), strict=True) if extent > 1):
        raise pickle.UnpicklingError("it holds a tensor that is a view of another one")
    if offset < 0 or min(shape, default=0) < 0 or offset + count > len(storage):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    return storage[offset : offset + count].reshape(shape)


def _encode(text: Any, encoding: Any) -> bytes:
    """Stands in for ``_codecs.encode``, which carries bytes in pickles of protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("it encodes something else than bytes")
    return text.encode("latin-1")


_OF_TORCH: dict[tuple[str, str], Any] = {
    **_NUMPY_STAND_INS,
    **{("torch", name): _Storage(code) for name, code in _STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _encode,
}


def _storage(archive: Archive, folder: str, reference: Any) -> AnyArray:
    """A tensor's storage: ``("storage", its class, its key, where it was, how many numbers)``."""
    what, storage, key, _, count = reference
    if what != "storage" or not isinstance(storage, _Storage) or not isinstance(key, str) or type(count) is not int:
        raise pickle.UnpicklingError("it refers to something else than a tensor's numbers")
    member = archive.member(f"{folder}data/{key}")
    if member is None or member.size != count * storage.dtype.itemsize or member.size > _MOST_TENSOR_BYTES:
        raise pickle.UnpicklingError(f"the {count} numbers of a tensor are not there")
    return np.frombuffer(read_exactly(member.open(), member.size, member.name), dtype=storage.dtype)
