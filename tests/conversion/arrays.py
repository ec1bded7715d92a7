# SPDX-License-Identifier: Apache-2.0
"""Small graphs as dictionaries of arrays, and what a store holds as plain arrays."""

from pathlib import Path
from typing import Any

import numpy as np

from ooc.storage.store import Store

Arrays = dict[str, np.ndarray[Any, Any]]


def random_arrays(*, nodes: int = 60, edges: int = 300, features: int = 5, classes: int = 3, seed: int = 0) -> Arrays:
    """A directed graph with self-loops and duplicates in the generic form."""
    rng = np.random.default_rng(seed)
    place = rng.permutation(nodes)
    return {
        "edge_index": rng.integers(0, nodes, (2, edges)),
        "x": rng.standard_normal((nodes, features)).astype(np.float32),
        "y": rng.integers(0, classes, nodes),
        "num_classes": np.array(classes),
        "train_mask": place < nodes // 2 + 1,
        "val_mask": (place > nodes // 2) & (place % 2 == 0),
        "test_mask": (place > nodes // 2) & (place % 2 == 1),
    }


def edges_of(store: Store, side: str = "in") -> np.ndarray[Any, Any]:
    """[2, E] sources and targets, in the order stored."""
    indptr, indices = (array.read() for array in store.topology(side))
    rows = np.repeat(np.arange(store.num_nodes), np.diff(indptr))
    return np.stack([indices, rows] if side == "in" else [rows, indices]).astype(np.int64)


def in_order(edge_index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same edges by target, then source."""
    return edge_index[:, np.lexsort((edge_index[0], edge_index[1]))]


def files_of(folder: Path) -> dict[str, bytes]:
    """Contents of all files but the group's metadata, which has the time in it."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / "zarr.json")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def open_descriptors() -> int:
    """How many files this process has open. Fewer than before is no fault: an earlier test's may be closed late."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
