# SPDX-License-Identifier: Apache-2.0
"""Paths of two or three edges through graphs, and pairs of near nodes, made from the edges when they are needed.

A path of k edges is v0 → v1 → … → vk along edges, of which any three consecutive nodes are different: no edge is a
self-loop, and none leads straight back. So the two ends of three edges may be one node, as in a triangle. Of repeated
edges each makes its own paths. A pair of near nodes is two different nodes connected by a walk of at most so many edges
(hops). n nodes and e edges, by target and then by source; P paths, H pairs.
"""

from collections.abc import Iterator

import numpy as np

from ooc.errors import OptionError
from ooc.sampling.runs import Ints, expand_ranges, pieces

_WALKS = 1 << 16
"""Walks that are extended at a time."""
_WALK_BYTES = 128
"""Bytes for each of them: its nodes before and after, its edges' places, whether it stays."""


def check_lengths(**lengths: int) -> None:
    """Raise OptionError unless ``paths`` of so many edges, and pairs at most ``hops`` apart, can be made."""
    for name, edges in lengths.items():
        if edges not in (0, 2, 3):
            raise OptionError(f"{name}={edges} is neither 2 nor 3 (0: none)")


def count_paths(sources: Ints, targets: Ints, nodes: int, edges: int) -> Ints:
    """Return how many paths have each edge [e] as the last of two ``edges``, or as the second of three."""
    plain = sources != targets
    keys = targets * nodes + sources
    back = sources * nodes + targets
    there_and_back = np.searchsorted(keys, back, side="right") - np.searchsorted(keys, back)
    counts = np.bincount(targets[plain], minlength=nodes)[sources] - there_and_back
    if edges == 3:
        counts = counts * (np.bincount(sources[plain], minlength=nodes)[targets] - there_and_back)
    counts[~plain] = 0
    return counts.astype(np.int64, copy=False)


def count_walks(sources: Ints, degrees: Ints, hops: int) -> Ints:
    """Return how many walks of at most ``hops`` edges, including the empty one, end at each node [n]."""
    walks = np.ones_like(degrees)
    for _ in range(hops):
        walks = 1 + _count_through_in_edges(walks, sources, degrees)
    return walks


def workspace_bytes(walks: int) -> int:
    """Return the bytes that making paths or pairs takes beside them, where ``walks`` walks end with one edge or at one
    node."""
    return _WALK_BYTES * max(_WALKS, walks)


def find_paths(sources: Ints, degrees: Ints, edges: int, count: int) -> Ints:
    """Return all ``count`` paths of two or three ``edges`` as a matrix [edges + 1, P]: first node, …, last node.

    They are sorted by their last node, then by the last but one, and so on. ``sources`` [e] are by target, ``degrees``
    [n] are their numbers. ValueError where the count is wrong because edges are not sorted.
    """
    out = np.empty((edges + 1, count), dtype=np.int64)
    done = 0
    for walks in _extend_paths(sources, degrees, edges):
        found = len(walks[0])
        if done + found > count:
            break
        for place, nodes in enumerate(walks):
            out[place, done : done + found] = nodes
        done += found
    else:
        if done == count:
            return out
    raise ValueError(f"there are not {count} paths")


def find_near(sources: Ints, degrees: Ints, hops: int, most: int) -> Ints:
    """Return all pairs of nodes at most ``hops`` apart, ``most`` or fewer, as a matrix [2, H].

    They are sorted by the lower row, then by the upper one. ``sources`` [e] are by target, ``degrees`` [n] are their
    numbers. ValueError where there are more.
    """
    count, done, pairs = len(degrees), 0, np.empty(most, dtype=np.int64)
    starts = np.cumsum(degrees) - degrees
    for first, stop in pieces((np.cumsum(count_walks(sources, degrees, hops)), _WALKS)):
        found = np.arange(first, stop) * (count + 1)  # mark every node as near itself
        for _ in range(hops):
            targets, through = np.divmod(found, count)
            ways = degrees[through]
            further = np.repeat(targets * count, ways)
            further += sources[expand_ranges(starts[through], ways)]
            found = np.sort(np.concatenate([found, further]))
            found = found[np.diff(found, prepend=-1) > 0]
        found = found[found % (count + 1) != 0]
        if done + len(found) > most:
            raise ValueError(f"there are more than {most} pairs")
        pairs[done : done + len(found)] = found
        done += len(found)
    near = np.empty((2, done), dtype=np.int64)
    np.divmod(pairs[:done], count, out=(near[1], near[0]))
    return near


def walks_by_edge(sources: Ints, degrees: Ints, edges: int) -> Ints:
    """Return how many walks of ``edges`` edges, which may become paths, end with each edge [e]; ``degrees`` [n] of
    nodes."""
    ways = degrees
    for _ in range(edges - 2):
        ways = _count_through_in_edges(ways, sources, degrees)
    return ways[sources]


def _count_through_in_edges(ways: Ints, sources: Ints, degrees: Ints) -> Ints:
    """Return how many ways lead to each node [n] through its in-edges, from the ``ways`` [n] to their sources."""
    ends, total = np.cumsum(degrees), np.concatenate([[0], np.cumsum(ways[sources])])
    found: Ints = total[ends] - total[ends - degrees]
    return found


def _extend_paths(sources: Ints, degrees: Ints, edges: int) -> Iterator[list[Ints]]:
    """Yield paths as lists of their first nodes, …, last nodes, a few at a time."""
    starts = np.cumsum(degrees) - degrees
    targets = np.repeat(np.arange(len(degrees)), degrees)
    for first, stop in pieces((np.cumsum(walks_by_edge(sources, degrees, edges)), _WALKS)):
        nodes = [sources[first:stop], targets[first:stop]]
        plain = nodes[0] != nodes[1]
        nodes = [column[plain] for column in nodes]
        for _ in range(edges - 1):
            counts = degrees[nodes[0]]
            of_walk = np.repeat(np.arange(len(counts)), counts)
            came_from = sources[expand_ranges(starts[nodes[0]], counts)]
            kept = (came_from != nodes[0][of_walk]) & (came_from != nodes[1][of_walk])
            of_walk = of_walk[kept]
            nodes = [came_from[kept], *(column[of_walk] for column in nodes)]
        yield nodes
