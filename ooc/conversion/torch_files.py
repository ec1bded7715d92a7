# SPDX-License-Identifier: Apache-2.0
"""Arrays and numbers in dictionaries that ``torch.save`` wrote, read without torch and without running anything.

Such a file is a zip archive, with a pickle beside the raw bytes of each tensor. Whatever the pickle names, only
the inert stand-ins here and in ``pickles`` are made; any other name in it is an error.
"""

import io
import pickle
from collections import OrderedDict
from typing import Any

import numpy as np

from ooc.conversion.pickles import NUMPY_STAND_INS, array_of, check_pickle
from ooc.conversion.streams import Blob, damaged, read_whole
from ooc.conversion.zip_members import Archive
from ooc.errors import SourceError
from ooc.storage.array import AnyArray

MOST_BYTES = 1 << 28
"""Of a file of splits or counts: so many may be held to look around in it."""
_MOST_PICKLE_BYTES = 1 << 26
_MOST_TENSOR_BYTES = 1 << 28
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


def read_torch_dict(blob: Blob) -> dict[str, AnyArray | int]:
    """The tensors, numpy arrays and whole numbers of a saved dictionary, by their names.

    SourceError for a damaged file, for one from before torch 1.6, and for one that holds something else.
    """
    if blob.at(0).read(2) != b"PK":
        raise SourceError(f"{blob.name} is no file of torch 1.6 or later; write it again with torch.save")
    archive = Archive(blob)
    names = archive.names()
    main = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(main) != 1:
        raise damaged(blob.name, "it holds no data.pkl, or several")
    member = archive.member(main[0])
    assert member is not None, "it is one of the names"
    text = read_whole(member.open(), _MOST_PICKLE_BYTES, member.name)
    folder = main[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in names:
        _check_byte_order(archive, f"{folder}byteorder", blob.name)
    try:
        check_pickle(text)
        found = _Unpickler(text, archive, folder, blob.name).load()
    except SourceError:
        raise
    except Exception as error:  # A damaged pickle raises nearly anything.
        raise damaged(blob.name, str(error) or type(error).__name__) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise SourceError(f"{blob.name} holds no dictionary of arrays")
    return {name: _plain(value, name, blob.name) for name, value in found.items()}


def _check_byte_order(archive: Archive, name: str, file: str) -> None:
    member = archive.member(name)
    assert member is not None, "it is one of the names"
    if read_whole(member.open(), 16, member.name) != b"little":
        raise SourceError(f"{file} was written on a machine of the other byte order; write it again on a usual one")


def _plain(value: Any, name: str, file: str) -> AnyArray | int:
    if isinstance(value, np.ndarray) or type(value) is int:
        return value
    array = array_of(value)
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


_ALLOWED: dict[tuple[str, str], Any] = {
    **NUMPY_STAND_INS,
    **{("torch", name): _Storage(code) for name, code in _STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, text: bytes, archive: Archive, folder: str, name: str) -> None:
        super().__init__(io.BytesIO(text))
        self._archive, self._folder, self._name = archive, folder, name

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed") from None

    def persistent_load(self, reference: Any) -> AnyArray:
        """A tensor's storage: ``("storage", its class, its key, where it was, how many numbers)``."""
        what, storage, key, _, count = reference
        if what != "storage" or not isinstance(storage, _Storage) or not isinstance(key, str) or type(count) is not int:
            raise pickle.UnpicklingError("it refers to something else than a tensor's numbers")
        member = self._archive.member(f"{self._folder}data/{key}")
        if member is None or member.size != count * storage.dtype.itemsize or member.size > _MOST_TENSOR_BYTES:
            raise damaged(self._name, f"the {count} numbers of a tensor are not there")
        return np.frombuffer(read_whole(member.open(), member.size, member.name), dtype=storage.dtype)
