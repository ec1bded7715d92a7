# SPDX-License-Identifier: Apache-2.0
"""The documents ``zarr.json`` of a store's groups and arrays: written here, interpreted by zarr.

Zarr opens and creates arrays on its own thread, for which callers wait without a limit, even if it is dead or short of
memory. So zarr interprets the documents, while their bytes are read and written like those of any other file.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ooc.errors import StoreError, as_error

if TYPE_CHECKING:
    import zarr

METADATA_FILE = "zarr.json"
_MOST_BYTES = 64 << 20
"""The largest document of a store; larger ones would be read and parsed in memory."""


def read_group(path: Path) -> dict[str, Any]:
    """Return the attributes of the group at the folder ``path``; raises any error of :func:`_document` or of zarr's."""
    import zarr
    from zarr.storage import MemoryStore, StorePath

    return dict(zarr.AsyncGroup.from_dict(StorePath(MemoryStore()), _document(path)).attrs)


def read_array(path: Path) -> "zarr.Array[Any]":
    """Return the array at the folder ``path``, of which only the metadata can be used; errors as in
    :func:`read_group`."""
    import zarr
    from zarr.storage import MemoryStore, StorePath

    return zarr.Array.from_dict(StorePath(MemoryStore()), _document(path))


def _document(path: Path) -> dict[str, Any]:
    """Return the document of the group or array at ``path``.

    Raises FileNotFoundError where there is none, StoreError where it cannot be read, ValueError where it is another
    one.
    """
    if not (file := path / METADATA_FILE).is_file():  # opening a pipe would block
        raise FileNotFoundError(file)
    with as_error(StoreError, f"{file} cannot be read"):
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = file.read_bytes()
    document = json.loads(content)
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        raise ValueError("it is no document of Zarr's version 3")
    return document


def group_document(attributes: dict[str, Any]) -> bytes:
    """Return the document of a group."""
    return _as_bytes({"attributes": attributes, "zarr_format": 3, "node_type": "group"})


def array_document(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return the document of an array whose chunk files are its numbers, little endian, and nothing else."""
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    return _as_bytes(
        {
            "shape": shape,
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": np.zeros((), dtype).item(),
            "codecs": [{"name": "bytes", **endian}],
            "attributes": {},
            "zarr_format": 3,
            "node_type": "array",
            "storage_transformers": [],
        }
    )


def _as_bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()
