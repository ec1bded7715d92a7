# SPDX-License-Identifier: Apache-2.0
"""The documents ``zarr.json`` of a store's groups and arrays, as version 3 of Zarr has them. Arrays' chunk files are
their numbers, little endian, and nothing else."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import StoreError, as_error

METADATA_FILE = "zarr.json"
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64")
_MOST_BYTES = 64 << 20
"""More is no document of a store; it would be read and taken apart in memory."""
_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """StoreError where what the document at ``path`` says makes no sense within."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise StoreError(f"{path / METADATA_FILE} is damaged: {' '.join(str(error).split())}") from error


def read_group(path: Path) -> dict[str, Any]:
    """The attributes of the group at the folder ``path``. FileNotFoundError where there is none, StoreError where it
    cannot be read or is damaged."""
    with understood(path):
        return dict(_document(path, "group").get("attributes", {}))


def read_array(path: Path) -> tuple[tuple[int, ...], tuple[int, ...], str] | None:
    """Shape, shape of a chunk and type of the array at the folder ``path``; None where it is stored in another form.
    Errors as of :func:`read_group`."""
    with understood(path):
        found = _document(path, "array")
        sizes = found["shape"], found["chunk_grid"]["configuration"]["chunk_shape"]
        shape, chunks = (tuple(map(index, one)) for one in sizes)
        if len(shape) != len(chunks) or min(*shape, *chunks) < 0:
            raise ValueError(f"there are no chunks {list(chunks)} of an array {list(shape)}")
        if (kind := found["data_type"]) not in DTYPES:
            return None
        form = _array(shape, chunks, np.dtype(kind))
        little = found["codecs"] in (form["codecs"], [_LITTLE])  # of single bytes, too, in versions before
        parts = ("chunk_grid", "chunk_key_encoding", "storage_transformers")
        plain = little and all(found.get(part, form[part]) == form[part] for part in parts)
        return (shape, chunks, np.dtype(kind).newbyteorder("<").str) if plain else None


def _document(path: Path, node_type: str) -> dict[str, Any]:
    if not (file := path / METADATA_FILE).is_file():  # a pipe would be waited for
        raise FileNotFoundError(file)
    with as_error(StoreError, f"{file} cannot be read"):
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = file.read_bytes()
    document = json.loads(content)
    if not isinstance(document, dict) or (document.get("zarr_format"), document.get("node_type")) != (3, node_type):
        raise ValueError(f"it is no document of Zarr's version 3 of a {node_type}")
    return document


def of_group(attributes: dict[str, Any]) -> bytes:
    """The document of a group."""
    return _bytes({"attributes": attributes, "zarr_format": 3, "node_type": "group"})


def of_array(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The document of an array."""
    return _bytes(_array(shape, chunks, dtype))


def _array(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": np.zeros((), dtype).item(),
        "codecs": [_LITTLE if dtype.itemsize > 1 else {"name": "bytes"}],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()
