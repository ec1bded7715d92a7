# SPDX-License-Identifier: Apache-2.0
"""How many rows layers of unknown insides hand gradients to, tile by tile, counted before anything is planned.

A tile hands something to each of its in-neighbours outside of it, once for every run of its rows
(``kernels.neighbourhood``). That is the graph's affair alone, so one sweep over the in-edges, a tile's at a time,
tells the bytes of all runs of an epoch (``ooc.plan.runs``).
"""

from collections.abc import Sequence

import numpy as np
import torch

from ooc.plan.workload import Direction
from ooc.storage.store import Store
from ooc.train.edge_sweep import relative_offsets
from ooc.train.graph import damaged
from ooc.train.kernels.edges import TileEdges
from ooc.train.kernels.neighbourhood import other_neighbours, runs
from ooc.train.workload import HandedRows
from ooc.train.workload import TileEdges as CountedEdges

_CHUNK_TILES = 64
"""Tiles whose offsets are read at a time."""


def counted_rows(store: Store) -> HandedRows:
    """Those of a store that is there, each read from it when it is first asked for."""
    known: dict[tuple[int, int, int], Sequence[int]] = {}

    def handed(rows: int, others: int, tile_rows: int) -> Sequence[int]:
        key = rows, others, tile_rows
        if key not in known:
            known[key] = _count(store, *key)
        return known[key]

    return handed


def most_rows(tile_edges: CountedEdges) -> HandedRows:
    """Those of a graph of which only degrees are known: an entry for each edge out of the rows, which is the most."""
    return lambda rows, others, tile_rows: tile_edges(Direction.OUT, tile_rows)


def _count(store: Store, rows: int, others: int, tile_rows: int) -> Sequence[int]:
    indptr, indices = store.topology(Direction.IN.value)
    handed = np.zeros(-(-others // tile_rows) + 1, dtype=np.int64)
    for first in range(0, rows, _CHUNK_TILES * tile_rows):
        last = min(rows, first + _CHUNK_TILES * tile_rows)
        offsets = indptr.read(first, last + 1)
        if offsets[0] < 0 or offsets[-1] > store.num_edges or (np.diff(offsets) < 0).any():
            raise damaged(store, "in/indptr")
        for start in range(first, last, tile_rows):
            begin, end = start - first, min(last, start + tile_rows) - first
            neighbours = torch.from_numpy(indices.read(int(offsets[begin]), int(offsets[end])))
            tile = TileEdges(neighbours, relative_offsets(offsets, begin, end, torch.int64), start, store.num_nodes)
            for run in runs(tile):
                np.add.at(handed, other_neighbours(run, others).numpy() // tile_rows + 1, 1)
    return [int(count) for count in np.cumsum(handed)]
