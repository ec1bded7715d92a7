# SPDX-License-Identifier: Apache-2.0
"""Neighbours sampled hop by hop as PyG's ``NeighborLoader`` does: without replacement, from the in-edges.

Of a node with more in-edges than a hop's fanout, every subset of that size is equally likely (R. Floyd's algorithm, in
J. Bentley, "Programming Pearls", CACM 30(9), 1987, for all nodes of a hop at once). The random numbers come from a
counter-based generator whose key is (seed, epoch, batch, hop) and whose counter is the node. So a sample does not
depend on where, when, or with which other samples it is drawn.

N nodes and E edges of the store; of a batch n nodes and e edges.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ooc.kernels.dropout.edges import HEADS_PER_COUNT, key_of, philox
from ooc.sampling.runs import Ints, expand_ranges
from ooc.storage.array import AnyArray

Take = Callable[[Ints], AnyArray]
"""A function from places among the store's in-edges [e] to the sources of these edges [e]."""

_WORD_BITS = np.uint64(32)
_CHUNK_ROWS = 1 << 20


@dataclass(slots=True)
class SampledBatch:
    """The sampled subgraph of one batch.

    ``rows`` [n]: its nodes as rows of the store: the seeds, then by hop the new nodes, ascending. ``edges`` [e]: places
    among the store's in-edges, by hop and target. ``sources`` [e]: the edges' sources, as places in ``rows``.
    ``counts`` [targets]: the sampled in-edges of each expanded node. ``nodes_by_hop`` and ``edges_by_hop``: PyG's
    ``num_sampled_nodes`` and ``num_sampled_edges``.
    """

    number: int
    rows: AnyArray
    edges: AnyArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    sources: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    counts: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    nodes_by_hop: list[int] = field(default_factory=list)
    edges_by_hop: list[int] = field(default_factory=list)


class Sampler:
    """A sampler of batches' subgraphs. ``offsets`` [N + 1]: where every row's in-edges begin.

    ``fanouts``: the most in-edges sampled of a node, by hop, -1 for all. Holds four bytes a node: its place in a batch.
    """

    def __init__(self, offsets: AnyArray, fanouts: Sequence[int], *, seed: int) -> None:
        self._offsets = offsets
        self._fanouts = tuple(fanouts)
        self._seed = seed
        self._places = np.full(len(offsets) - 1, -1, dtype=np.int32)

    def sample(
        self, seeds: Sequence[AnyArray], take: Take, *, epoch: int, numbers: Sequence[int]
    ) -> list[SampledBatch]:
        """Return the batches around ``seeds``, each a set of distinct rows, with these ``numbers``.

        All batches are extended hop by hop together, so that ``take`` is called once a hop.
        """
        narrow = np.int32 if len(self._places) < 2**31 else np.int64
        seeds = [rows.astype(narrow, copy=False) for rows in seeds]
        batches = [SampledBatch(k, rows, nodes_by_hop=[len(rows)]) for k, rows in zip(numbers, seeds, strict=True)]
        for hop, fanout in enumerate(self._fanouts):
            drawn = [self._draw(batch, epoch, hop, fanout) for batch in batches]
            found = take(np.concatenate([edges for edges, _ in drawn]))
            start = 0
            for batch, (edges, counts) in zip(batches, drawn, strict=True):
                self._extend(batch, edges, counts, found[start : start + len(edges)])
                start += len(edges)
        return batches

    def _draw(self, batch: SampledBatch, epoch: int, hop: int, fanout: int) -> tuple[Ints, Ints]:
        """Return at most ``fanout`` (-1: all) in-edges [e] of each node added last, ascending by node, and their number
        by node."""
        nodes = batch.rows[len(batch.rows) - batch.nodes_by_hop[-1] :].astype(np.int64, copy=False)
        starts = self._offsets[nodes].astype(np.int64, copy=False)
        degrees = self._offsets[nodes + 1] - starts
        counts = degrees if fanout < 0 else np.minimum(degrees, fanout)
        edges = expand_ranges(starts, counts)
        chosen = np.flatnonzero(degrees > counts)
        if fanout > 0 and len(chosen):
            begins, key = np.cumsum(counts) - counts, key_of(self._seed, epoch, batch.number, hop)
            subsets = draw_subsets(nodes[chosen], degrees[chosen], fanout, key)
            edges[begins[chosen, None] + np.arange(fanout)] = starts[chosen, None] + subsets
        return edges, counts

    def _extend(self, batch: SampledBatch, edges: Ints, counts: Ints, found: AnyArray) -> None:
        """Add a hop with these ``edges``, whose sources are the rows ``found`` [e]."""
        places = self._places
        places[batch.rows] = np.arange(len(batch.rows), dtype=np.int32)
        new = np.sort(found[places[found] < 0])
        new = new[np.diff(new, prepend=-1) > 0]
        places[new] = np.arange(len(batch.rows), len(batch.rows) + len(new), dtype=np.int32)
        batch.rows = np.concatenate([batch.rows, new.astype(batch.rows.dtype, copy=False)])
        batch.edges = np.concatenate([batch.edges, edges.astype(self._offsets.dtype, copy=False)])
        batch.sources = np.concatenate([batch.sources, places[found]])
        batch.counts = np.concatenate([batch.counts, counts.astype(np.int32)])
        batch.nodes_by_hop.append(len(new))
        batch.edges_by_hop.append(len(edges))
        places[batch.rows] = -1


def draw_subsets(nodes: Ints, degrees: Ints, size: int, key: tuple[int, int]) -> Ints:
    """Return a subset of ``size`` of the numbers 0 … ``degrees`` - 1 for each node [n, size], ascending.

    All subsets are equally likely. ``size`` is less than each of ``degrees``.
    """
    chosen = np.empty((size, len(nodes)), dtype=np.int64)
    low, high = nodes.astype(np.uint32), (nodes >> 32).astype(np.uint32)
    for step in range(size):
        if step % HEADS_PER_COUNT == 0:  # random numbers of 32 bits of each node, others for each count
            words = philox((low, high, np.full_like(low, step // HEADS_PER_COUNT), np.zeros_like(low)), key)
        last = degrees - size + step
        number = words[step % HEADS_PER_COUNT].astype(np.uint64) * (last + 1).astype(np.uint64)
        drawn = (number >> _WORD_BITS).astype(np.int64)
        taken = (chosen[:step] == drawn).any(axis=0)
        chosen[step] = np.where(taken, last, drawn)
    return np.sort(chosen.T, axis=1)


def most_by_hop(offsets: AnyArray, fanouts: Sequence[int], batch_size: int) -> list[tuple[int, int]]:
    """Return the most nodes and edges a batch can have after no hop, after one, and so on.

    A node is expanded once. So no hop samples more edges than the largest set of so many nodes has, nor do all hops
    together sample more than all nodes have at the largest fanout.
    """
    degrees = _degree_counts(offsets)
    total = len(offsets) - 1
    nodes = frontier = min(batch_size, total)
    edges, found = 0, [(nodes, 0)]
    for hop, fanout in enumerate(fanouts, start=1):
        of_hop = _most_edges(degrees, frontier, fanout)
        frontier = min(of_hop, total)
        nodes = min(nodes + frontier, total)
        so_far = fanouts[:hop]
        edges = min(edges + of_hop, _most_edges(degrees, total, -1 if min(so_far) < 0 else max(so_far)))
        found.append((nodes, edges))
    return found


def _degree_counts(offsets: AnyArray) -> Ints:
    """Return the number of nodes of each in-degree."""
    counts = np.zeros(1, dtype=np.int64)
    for start in range(0, len(offsets) - 1, _CHUNK_ROWS):
        found = np.bincount(np.diff(offsets[start : start + _CHUNK_ROWS + 1]), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def _most_edges(degrees: Ints, nodes: int, fanout: int) -> int:
    """Return the most in-edges that ``nodes`` nodes can have, at most ``fanout`` of each."""
    falling = degrees[::-1]
    of_each = np.minimum(np.clip(nodes - (np.cumsum(falling) - falling), 0, None), falling)
    drawn = np.arange(len(degrees))[::-1]
    return int(of_each @ (drawn if fanout < 0 else np.minimum(drawn, fanout)))
