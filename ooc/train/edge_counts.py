# SPDX-License-Identifier: Apache-2.0
"""How edges are spread over rows: of a store, of links that are drawn, and of a graph that is not here, of which no
more is known than its statistics.
"""

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ooc.engine.shuffle_counts import count_gathers, count_sums, most_gathers
from ooc.model.graph import reverse_of
from ooc.plan.graphs import GraphStatistics, reach, spread_edges
from ooc.plan.layout.shuffle import GatheredRows
from ooc.plan.workload import Direction, EdgesKey
from ooc.stages.workload import EdgeCounts, TileEdges, stored
from ooc.storage.array import Array, chunk_rows
from ooc.storage.store import Store, Task, array_shapes


def edge_counts(graph: Store | GraphStatistics) -> EdgeCounts:
    """How edges are spread over rows: counted in a store when they are asked for, of statistics, and of links, what may
    be at most."""
    store = graph if isinstance(graph, Store) else None
    edges = spread(graph) if isinstance(graph, GraphStatistics) else stored(graph)

    @cache
    def scattered(direction: EdgesKey, rows: int, others: int, tile_rows: int, *run: Any) -> Sequence[int]:
        if store is not None and direction.of_edges:
            return count_sums(store, direction, rows, others, tile_rows, *run)
        # Only degrees are known: an entry for each edge out of the rows is the most.
        reverse = None if store is None else reverse_of(store, direction)
        return edges(reverse or Direction.OUT, tile_rows)

    @cache
    def gathered(direction: EdgesKey) -> GatheredRows:
        if store is not None and direction.of_edges:
            return cache(partial(count_gathers, store, direction))
        return most_gathers(edges, direction)

    return EdgeCounts(edges, scattered, gathered)


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
    path, arrays = Path(f"graph {graph.name}"), {}  # where nothing is, and nothing is looked for
    for name, shape in array_shapes(attributes).items():  # as ``ooc convert`` would write them but for their content
        dtype = graph.feature_dtype if name == "x" else "bool" if name.startswith("split/") else "int64"
        if name.endswith("/indices") and graph.nodes <= 2**31:
            dtype = "int32"
        columns = shape[1] if len(shape) == 2 else 1
        chunks = (chunk_rows(shape[0], columns * np.dtype(dtype).itemsize), *shape[1:])
        arrays[name] = Array(name, path / name, shape, chunks, dtype)
    return Store(path, attributes, arrays)


def spread(graph: GraphStatistics) -> TileEdges:
    """The edges of its tiles, as ``ooc.plan.graphs`` assumes them; alike in both directions."""

    @lru_cache(maxsize=1)
    def counted(tile_rows: int) -> Sequence[int]:
        return spread_edges(graph, tile_rows)

    return lambda direction, tile_rows: counted(tile_rows)
