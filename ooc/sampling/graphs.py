# SPDX-License-Identifier: Apache-2.0
"""Mini-batches of whole graphs from a store of many graphs, in place of PyG's ``DataLoader``: read from the SSD ahead.

A graph's rows are adjacent, so a batch is a few ranges of rows of every array. The graphs' numbers alone tell what
later batches need; the pages read are cached as those of sampled batches are. A thread reads one batch while the one
before is in use. G graphs, N nodes and E edges of the store; of a batch g graphs, n nodes, e edges, P paths and H pairs
of near nodes.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ooc.errors import OptionError
from ooc.events import Listener, ignore
from ooc.model.graph import damaged
from ooc.sampling.budget import BATCHES_ALIVE, BatchPlan, Division
from ooc.sampling.loader import BatchLoader, Loop, OpenArrays, read_ahead, rows_of, shuffled_order, with_foresight
from ooc.sampling.pages import MOST_BATCHES, pages_of, resident_bytes
from ooc.sampling.paths import (
    check_lengths,
    count_paths,
    count_walks,
    find_near,
    find_paths,
    walks_by_edge,
    workspace_bytes,
)
from ooc.sampling.runs import Ints, expand_ranges, pieces
from ooc.storage.array import AnyArray, Array
from ooc.storage.store import EDGE_FEATURES, EDGE_WEIGHT, Store, Task
from ooc.threads import ahead

if TYPE_CHECKING:
    from torch_geometric.data import Batch

_MOST_LOOKAHEAD, _LOOKAHEAD_SHARE = 256, 4
"""The most batches known ahead, and the share of the memory left for the pages that knowing them takes."""
_BOUND = {"graphs": "batch_size", "nodes": "batch_nodes", "edges": "batch_edges", "paths": "batch_paths"}
_COUNTED_EDGES = 1 << 16
_GRAPH_BYTES = 104
"""Bytes for every graph: where its rows and edges begin, its paths and pairs, its place in the order, and sorting to
bound batches."""
_ROW_BYTES = 112
"""Bytes for every row and edge of a batch while it is made: its number, its place, and its values."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a batch, or the largest possible one; ``near``: pairs of near nodes; ``largest``: nodes of its
    largest graph."""

    graphs: int
    nodes: int
    edges: int
    paths: int
    largest: int
    near: int = 0

    def __str__(self) -> str:
        paths = f", {self.paths:,} paths" if self.paths else ""
        near = f", {self.near:,} pairs of near nodes" if self.near else ""
        return f"{self.graphs:,} graphs, {self.nodes:,} nodes, {self.edges:,} edges{paths}{near}"


class GraphSizes:
    """The sizes of every graph of a store: where its ``nodes`` and ``edges`` begin [G + 1], how many ``paths`` it has
    [G].

    ``near`` [G] bounds its pairs of nodes that are at most ``hops`` apart. StoreError for a store whose graphs overlap
    or leave nodes out.
    """

    def __init__(self, store: Store, paths: int, hops: int = 0) -> None:
        if not store.num_graphs:
            raise OptionError(f"{store.path} is one graph; ooc.NeighborLoader makes batches of its nodes")
        check_lengths(paths=paths, hops=hops)
        self.path_edges, self.hops, self.walks = paths, hops, 0
        self.nodes: Ints = store.array("graphs/indptr").read()
        self.edges = np.zeros_like(self.nodes)
        self.paths, self.near = np.zeros((2, store.num_graphs), dtype=np.int64)
        indptr, _ = store.topology("in")
        if self.nodes[0] or self.nodes[-1] != store.num_nodes or (np.diff(self.nodes) <= 0).any():
            raise damaged(store, "graphs/indptr")
        for start, ends in indptr.blocks(_COUNTED_EDGES):
            low, high = np.searchsorted(self.nodes, (start, start + len(ends)))
            self.edges[low:high] = ends[self.nodes[low:high] - start]
        if self.edges[0] or self.edges[-1] != store.num_edges or (np.diff(self.edges) < 0).any():
            raise damaged(store, "in/indptr")
        for first, stop in pieces((self.edges[1:], _COUNTED_EDGES)) if paths or hops else ():
            self._count(store, first, stop)

    def _count(self, store: Store, first: int, stop: int) -> None:
        """Return the numbers of paths and of pairs of near nodes in the graphs ``first:stop``."""
        indptr, indices = store.topology("in")
        low, high = int(self.nodes[first]), int(self.nodes[stop])
        degrees = np.diff(indptr.read(low, high + 1))
        sources = indices.read(int(self.edges[first]), int(self.edges[stop])).astype(np.int64) - low
        if (degrees < 0).any() or degrees.sum() != len(sources) or not _within(sources, 0, high - low):
            raise damaged(store, "in/indices")
        if self.path_edges:
            targets = np.repeat(np.arange(high - low), degrees)
            counts = count_paths(sources, targets, high - low, self.path_edges)
            ends = np.concatenate([[0], np.cumsum(counts)])[self.edges[first : stop + 1] - self.edges[first]]
            self.paths[first:stop] = np.diff(ends)
            self.walks = int(walks_by_edge(sources, degrees, self.path_edges).max(initial=self.walks))
        if self.hops:
            walks = count_walks(sources, degrees, self.hops)
            nodes = np.diff(self.nodes[first : stop + 1])
            near = np.minimum(walks, np.repeat(nodes, nodes)) - 1
            self.near[first:stop] = np.add.reduceat(near, self.nodes[first:stop] - low)
            self.walks = int(walks.max(initial=self.walks))

    def of(self, graphs: AnyArray) -> dict[str, Ints]:
        """Return the sizes of these graphs [g], by what is counted."""
        nodes, edges = (first[graphs + 1] - first[graphs] for first in (self.nodes, self.edges))
        return {
            "graphs": np.ones(len(graphs), dtype=np.int64),
            "nodes": nodes,
            "edges": edges,
            "paths": self.paths[graphs],
            "near": self.near[graphs],
        }


class Bounds:
    """The limits of a batch: any of ``graphs``, ``nodes``, ``edges`` and ``paths``. OptionError for a limit below 1,
    and for a graph that alone exceeds a limit."""

    def __init__(self, sizes: GraphSizes, graphs: Ints, most: Mapping[str, int | None]) -> None:
        self._sizes, self.most = sizes, {name: bound for name, bound in most.items() if bound is not None}
        for name, bound in self.most.items():
            if bound < 1:
                raise OptionError(f"{_BOUND[name]} must be positive, not {bound}")
            if name == "paths" and not sizes.path_edges:
                raise OptionError("batch_paths bounds paths, of which there are none; give paths=3 as well")
            counts = sizes.of(graphs)[name]
            if counts.max() > bound:
                raise OptionError(
                    f"graph {graphs[counts.argmax()]} alone has {counts.max():,} {name}, batches at most "
                    f"{_BOUND[name]}={bound}"
                )

    def cut(self, graphs: Ints) -> list[Ints]:
        """Divide these graphs in their order into batches, each as large as the limits allow."""
        sizes = self._sizes.of(graphs)
        bounds = [(np.cumsum(sizes[name]), bound) for name, bound in self.most.items()]
        return [graphs[first:stop] for first, stop in pieces(*bounds)]

    def largest(self, graphs: Ints) -> Size:
        """Return a size that no batch of any of these graphs exceeds, whatever their order."""
        sizes = self._sizes.of(graphs)
        found = {}
        for counted, counts in sizes.items():
            found[counted] = min(
                [int(counts.sum()), *(_upper_bound(counts, sizes[by], bound) for by, bound in self.most.items())]
            )
        return Size(**found, largest=int(sizes["nodes"].max()))


class GraphLoader(BatchLoader):
    """Batches of whole graphs, as PyG's ``DataLoader`` makes them.

    A batch is PyG's ``Batch`` with ``x`` [n, F], ``edge_index`` [2, e] (by target), ``batch`` [n], ``ptr`` [g + 1],
    ``graph_id`` [g], and ``edge_weight`` and ``edge_attr`` where the store's edges have them. ``y`` is [g] for classes,
    and [g, L] for several labels or values (one column is [g, 1]; floating-point labels are NaN where they are
    missing).

    A batch has at most ``batch_size`` graphs, ``batch_nodes`` nodes, ``batch_edges`` edges or ``batch_paths`` paths, as
    many graphs in their order as all limits allow. With a limit of nodes, edges or paths, batches take similar memory
    however the sizes of graphs differ. With ``paths`` of 2 or 3 edges, ``path_index`` [3 or 4, P] has all of them (see
    ``ooc.sampling.paths``), made for the batch and stored nowhere. With ``hops`` of 2 or 3, ``hop_index`` [2, H] has
    all pairs of different nodes that are connected by a walk of at most so many edges, each once (for 2: the edges of
    PyG's ``TwoHop`` without self-loops).

    ``input_graphs``: all (None), a split by name, a mask [G] or numbers; ``shuffle``: in a new order each epoch, which
    depends on ``seed`` and the epoch alone. ``memory`` bounds all that is held, including three batches: ``"64M"`` or
    bytes, by default half of what is free. It changes no batch.

    An iteration is an epoch; ``epoch`` is the number of the next one and may be set. Pages stay in memory until
    ``close``. Only one iteration may run at a time. BudgetError with the least memory that would suffice; StoreError
    for a damaged store.
    """

    def __init__(
        self,
        store: Store | str | Path,
        batch_size: int | None = None,
        *,
        batch_nodes: int | None = None,
        batch_edges: int | None = None,
        batch_paths: int | None = None,
        paths: int = 0,
        hops: int = 0,
        input_graphs: npt.ArrayLike | str | None = None,
        shuffle: bool = False,
        seed: int = 0,
        memory: str | int | None = None,
        _others: npt.ArrayLike | None = None,
        _beside: Callable[[Size, int], int] = lambda most, left: 0,
        _is_own: Callable[[int], bool] = lambda number: True,
        _processes: int = 1,
        _listener: Listener = ignore,
        **of_pyg: Any,
    ) -> None:
        """Make the loader; the arguments with an underscore are for the trainer.

        ``_others``: further graphs that ``read`` may be asked for. ``_beside``: from the largest batch and the bytes
        left, the bytes that the trainer takes. ``_is_own``: whether this process makes the batch of that number; each
        of ``_processes`` has this memory.
        """
        super().__init__(store, _listener, of_pyg)
        self.sizes = sizes = GraphSizes(self.store, paths, hops)
        self.graphs = rows_of(self.store, input_graphs, "input_graphs")
        every = self.graphs if _others is None else np.union1d(self.graphs, np.asarray(_others))
        if batch_size is batch_nodes is batch_edges is batch_paths is None:
            batch_size = 1
        bounds = (batch_size, batch_nodes, batch_edges, batch_paths)
        self.bounds = Bounds(sizes, every, dict(zip(_BOUND, bounds, strict=True)))
        self.seed, self.epoch, self._shuffle, self._is_own = seed, 0, shuffle, _is_own
        self._made: tuple[int, list[Ints]] = -1, []
        self.most = self.bounds.largest(every)
        self.plan = self._planned(self._memory_bytes(memory), partial(_beside, self.most), _processes)

    def _planned(self, memory_bytes: int, beside: Callable[[int], int], processes: int) -> BatchPlan:
        """Return the division of memory: first what every batch needs, then whole arrays, smallest first, while they
        fit.

        The rest is for pages of the other arrays, in proportion to their sizes.
        """
        store, sizes, most, arrays = self.store, self.sizes, self.most, self._arrays()
        batch_bytes = batch_nbytes(store, most, sizes.path_edges)
        rows = 2 * most.nodes + most.edges + 2 * most.graphs
        seen = [min(pages_of(array), rows * -(-array.row_bytes // 4096) + 2 * most.graphs) for array in arrays]
        one_ahead = 12 * sum(seen)  # pages of a batch with their next uses, and the search for these
        fixed = _GRAPH_BYTES * store.num_graphs + BATCHES_ALIVE * batch_bytes + _ROW_BYTES * rows + 2 * one_ahead
        fixed += 8 * most.near + (workspace_bytes(sizes.walks) if sizes.path_edges or sizes.hops else 0)
        smaller = "or smaller batches, more of them a step; those by nodes, edges or paths are all alike"
        given = arrays, batch_bytes, fixed, beside, memory_bytes, processes
        division = Division(*given, what=f"batches come to {most}", remedy=smaller)
        for array in sorted(arrays, key=resident_bytes):
            division.hold(array.name)
        outside = [array for array in arrays if array.name not in division.resident]
        lookahead = 2
        if outside:
            further = division.left // _LOOKAHEAD_SHARE // max(1, 2 * one_ahead)
            lookahead = min(MOST_BATCHES, _MOST_LOOKAHEAD, 2 + 2 * further)
            division.left -= (lookahead - 2) * one_ahead
        pages = sum(map(pages_of, outside))
        return division.plan(lookahead, {array.name: division.left * pages_of(array) // pages for array in outside})

    def __len__(self) -> int:
        """Return the number of batches of the next epoch; with a limit of nodes, edges or paths it differs by epoch."""
        return len(self.batches_of(self.epoch))

    def batches_of(self, epoch: int) -> list[Ints]:
        """Return the graphs of every batch of an epoch."""
        if self._made[0] != epoch:
            graphs = self.graphs
            graphs = graphs[shuffled_order(len(graphs), self.seed, epoch)] if self._shuffle else graphs
            self._made = epoch, self.bounds.cut(graphs)
        return self._made[1]

    def __iter__(self) -> Loop:
        epoch, self.epoch = self.epoch, self.epoch + 1
        batches = self.batches_of(epoch)
        return self.read([graphs for number, graphs in enumerate(batches) if self._is_own(number)])

    def read(self, batches: Sequence[Ints]) -> Loop:
        """Return batches of these graphs; none may exceed the limits."""
        sight = max(1, self.plan.lookahead // 2)
        groups = [[*batches[first : first + sight]] for first in range(0, len(batches), sight)]

        def made(held: OpenArrays) -> Generator["Batch"]:
            known = with_foresight(held, groups, partial(_wanted, self, held))
            return ahead(read_ahead(held, known, partial(_batch, self, held)), name="ooc-graphs")

        return self._start_loop(made)

    def _arrays(self) -> list[Array]:
        store = self.store
        return [store.array("x"), *store.topology("in"), store.array("y"), *store.edge_data("in")]


def _wanted(loader: GraphLoader, held: OpenArrays, graphs: Ints) -> dict[str, AnyArray]:
    """Return the rows that a batch needs, by array; of ``in/indptr`` one more per graph than it has nodes."""
    sizes, counts = loader.sizes, loader.sizes.of(graphs)
    first, edges = sizes.nodes[graphs], expand_ranges(sizes.edges[graphs], counts["edges"])
    others = {
        "x": expand_ranges(first, counts["nodes"]),
        "in/indptr": expand_ranges(first, counts["nodes"] + 1),
        "y": graphs,
    }
    return {name: others.get(name, edges) for name in held.rows}


def _batch(loader: GraphLoader, held: OpenArrays, graphs: Ints, uses: Mapping[str, Any]) -> "Batch":
    from torch_geometric.data import Batch

    store, wanted, counts = loader.store, _wanted(loader, held, graphs), loader.sizes.of(graphs)

    def take(name: str) -> AnyArray:
        return held.rows[name].take(wanted[name], uses.get(name))

    nodes, edges = counts["nodes"], counts["edges"]
    ptr = np.concatenate([[0], np.cumsum(nodes)])
    last = ptr[1:] + np.arange(len(graphs))  # of each graph among the offsets, of which it has one more than nodes
    degrees = np.delete(np.diff(take("in/indptr"), append=0), last)
    moved = np.repeat(ptr[:-1] - loader.sizes.nodes[graphs], edges)
    sources = take("in/indices").astype(np.int64) + moved
    if (degrees < 0).any() or not np.array_equal(np.add.reduceat(degrees, ptr[:-1]), edges):
        raise damaged(store, "in/indptr")
    if not _within(sources, np.repeat(ptr[:-1], edges), np.repeat(ptr[1:], edges)):
        raise damaged(store, "in/indices")
    edge_index = np.empty((2, len(sources)), dtype=np.int64)
    edge_index[0], edge_index[1] = sources, np.repeat(np.arange(len(degrees)), degrees)
    y = take("y")
    if store.task is Task.MULTILABEL:
        y = np.where(y < 0, np.float32(np.nan), y.astype(np.float32))
    made = {
        "x": take("x"),
        "edge_index": edge_index,
        "y": y,
        "batch": np.repeat(np.arange(len(graphs)), nodes),
        "ptr": ptr,
        "graph_id": graphs,
    }
    for name, called in ((EDGE_WEIGHT, "edge_weight"), (EDGE_FEATURES, "edge_attr")):
        if f"in/{name}" in held.rows:
            made[called] = take(f"in/{name}")
    try:
        if of_edges := loader.sizes.path_edges:
            made["path_index"] = find_paths(sources, degrees, of_edges, int(counts["paths"].sum()))
        if hops := loader.sizes.hops:
            made["hop_index"] = find_near(sources, degrees, hops, int(counts["near"].sum()))
    except ValueError as error:
        raise damaged(store, "in/indices") from error
    batch = Batch(**{name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in made.items()})
    batch._num_graphs = len(graphs)
    return batch


# ---- memory ---------------------------------------------------------------------------------------------------------


def batch_nbytes(store: Store, most: Size, path_edges: int) -> int:
    """Return the bytes that a batch of that size takes."""
    node = store.array("x").row_bytes + 8
    edge = 16 + sum(array.row_bytes for array in store.edge_data("in"))
    graph = 24 + max(4, store.array("y").itemsize) * store.array("y").columns
    made = most.paths * 8 * (path_edges + 1) + most.near * 16
    return most.nodes * node + most.edges * edge + most.graphs * graph + made


def _upper_bound(counts: Ints, costs: Ints, bound: int) -> int:
    """Return an upper bound of the total of ``counts`` [G] over graphs whose ``costs`` [G] total at most ``bound``.

    Fractions of a graph are allowed, so sorting finds the bound (G. Dantzig's bound of the knapsack problem).
    """
    free = costs == 0
    order = np.argsort(-(counts[~free] / costs[~free]), kind="stable")
    counts_in, costs_in = counts[~free][order], costs[~free][order]
    whole = int(np.searchsorted(np.cumsum(costs_in), bound, side="right"))
    total = int(counts[free].sum() + counts_in[:whole].sum())
    if whole < len(costs_in):
        rest = bound - int(costs_in[:whole].sum())
        total += int(-(-rest * int(counts_in[whole]) // int(costs_in[whole])))
    return total


def _within(values: Ints, low: Ints | int, high: Ints | int) -> bool:
    return bool(((values >= low) & (values < high)).all())
