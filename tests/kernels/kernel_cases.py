# SPDX-License-Identifier: Apache-2.0
"""Random graphs for the kernels: with repeated edges, self-loops, rows without edges and one row with many."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from ooc.engine.workers import OrderedPipeline, WorkerPool
from ooc.kernels import edges
from ooc.kernels.edge_function import EdgeMessages, Heads
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import EdgeFunction
from ooc.plan.workload import Direction

HEIGHTS = st.sampled_from([1, 3, 12])
"""Rows of a tile."""

PIECES = st.sampled_from([1, 2, 5, 16])
"""Edges of a piece: rows with more are cut."""

Cut = tuple[slice, slice, TileEdges]


@dataclass(frozen=True)
class KernelGraph:
    """``edge_index`` [2, E] over ``nodes`` rows."""

    nodes: int
    edge_index: Tensor
    self_loops: SelfLoops = SelfLoops.AS_STORED

    def order(self, direction: Direction) -> Tensor:
        """The edges in the order of one direction's lists: stable, so that equal edges keep theirs."""
        row = 1 if direction is Direction.IN else 0
        keys = self.edge_index[row] * self.nodes + self.edge_index[1 - row]
        return torch.argsort(keys, stable=True)

    def tiles(self, direction: Direction, height: int, rows: int | None = None) -> Iterator[Cut]:
        """Row range, edge range and edges of every tile of the first ``rows`` rows."""
        row = 1 if direction is Direction.IN else 0
        neighbours = self.edge_index[1 - row, self.order(direction)].int()
        offsets = torch.zeros(self.nodes + 1, dtype=torch.int32)
        offsets[1:] = torch.bincount(self.edge_index[row], minlength=self.nodes).cumsum(0)
        end = self.nodes if rows is None else rows
        for start in range(0, end, height):
            stop = min(end, start + height)
            first, last = int(offsets[start]), int(offsets[stop])
            part = offsets[start : stop + 1] - offsets[start]
            tile = TileEdges(neighbours[first:last], part, start, self.nodes, self.self_loops)
            yield slice(start, stop), slice(first, last), tile


@st.composite
def graphs(draw: st.DrawFn, self_loops: SelfLoops | None = None) -> KernelGraph:
    nodes = draw(st.integers(1, 12))
    ends = st.integers(0, nodes - 1)
    edge_list = draw(st.lists(st.tuples(ends, ends), max_size=40))
    hub = draw(ends)
    for spoke in draw(st.lists(ends, max_size=30)):
        edge_list.append((spoke, hub) if draw(st.booleans()) else (hub, spoke))
    edge_index = torch.tensor(edge_list, dtype=torch.int64).view(-1, 2).t().contiguous()
    return KernelGraph(nodes, edge_index, self_loops or draw(st.sampled_from(SelfLoops)))


@contextmanager
def small_pieces(edges_per_piece: int) -> Iterator[None]:
    """Cut tiles into pieces of so few edges that rows are cut too."""
    with mock.patch.object(edges, "EDGES_PER_PIECE", edges_per_piece):
        yield


def by_tiles(tiles: Iterator[Cut], compute: Callable[..., tuple[Tensor, ...]], *, workers: int = 1) -> Any:
    """Results of ``compute(rows, edges, tile)`` for all tiles, one below the other, computed by so many threads."""
    parts: list[tuple[Tensor, ...]] = []
    pool = WorkerPool(workers)
    try:
        with torch.no_grad(), OrderedPipeline(pool, lambda tile: compute(*tile), parts.append) as flow:
            for tile in tiles:
                flow.put(0, tile)
            flow.drain()
    finally:
        pool.close()
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def over_edges(
    pull: Callable[..., Any],
    function: EdgeFunction,
    tile: TileEdges,
    *,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
    **given: Any,
) -> Any:
    """What a pull of ``ooc.kernels.edge_function``, or its like, gives for them."""
    return pull(EdgeMessages(function, tile, terms, heads), **given)
