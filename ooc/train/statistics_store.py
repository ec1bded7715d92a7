# SPDX-License-Identifier: Apache-2.0
"""A graph that is not here, as far as planning needs one: a store of counts and shapes, without a file.

Models are taken apart for it, and stages are described, by the same code as for a store that is there.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ooc.model.workload import TileEdges
from ooc.plan.graphs import GraphStatistics, reach, spread_edges
from ooc.storage.array import Array, chunk_rows
from ooc.storage.store import Store, Task, array_shapes


def store_of_statistics(graph: GraphStatistics) -> Store:
    """A store with the counts of ``graph``, whose arrays have shapes and nothing to read.

    Rows are in hop order; each of the ``labelled`` ones counts as one to train on, and all splits reach as far.
    """
    reached = reach(graph)
    attributes: dict[str, Any] = {
        "name": graph.name,
        "num_nodes": graph.nodes,
        "num_edges": graph.edges,
        "num_features": graph.features,
        "num_classes": graph.classes,
        "num_self_loops": 0,
        "undirected": graph.undirected,
        "task": Task.CLASSES.value,
        "split_sizes": {"train": graph.labelled, "valid": 0, "test": 0},
        "order": "hop",
        "hops": reached,
        "train_hops": reached,
        "source": {"statistics": graph.source},
    }
    path = Path(f"graph {graph.name}")  # where nothing is, and nothing is looked for
    arrays = {name: _array(name, path, shape, graph) for name, shape in array_shapes(attributes).items()}
    return Store(path, attributes, arrays)


def spread(graph: GraphStatistics) -> TileEdges:
    """The edges of its tiles, as ``ooc.plan.graphs`` assumes them; alike in both directions."""

    @lru_cache(maxsize=1)
    def counted(tile_rows: int) -> Sequence[int]:
        return spread_edges(graph, tile_rows)

    return lambda direction, tile_rows: counted(tile_rows)


def _array(name: str, path: Path, shape: tuple[int, ...], graph: GraphStatistics) -> Array:
    """An array of the store, as ``ooc convert`` would write it but for its content."""
    dtype = _dtype(name, graph)
    columns = shape[1] if len(shape) == 2 else 1
    chunks = (chunk_rows(shape[0], columns * np.dtype(dtype).itemsize), *shape[1:])
    return Array(name, path / name, shape, chunks, dtype)


def _dtype(name: str, graph: GraphStatistics) -> str:
    if name == "x":
        return graph.feature_dtype
    if name.startswith("split/"):
        return "bool"
    if name.endswith("/indices"):
        return "int32" if graph.nodes <= 2**31 else "int64"
    return "int64"
