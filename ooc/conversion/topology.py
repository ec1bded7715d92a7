# SPDX-License-Identifier: Apache-2.0
"""A source's edges → ``in/`` and ``out/`` of the store, sorted on disk."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

import numpy as np

from ooc.conversion.budget import Shares
from ooc.conversion.csr import CsrWriter, KeyForm, cut, distinct, with_self_loops
from ooc.conversion.edge_sort import EdgeSorter, Keys
from ooc.conversion.source import EdgeBlock, Source
from ooc.errors import SourceError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted
from ooc.storage.array import Array, open_array

_COMPARED_ROWS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What was written."""

    num_edges: int
    num_self_loops: int
    undirected: bool


def write_topology(
    source: Source,
    store: Path,
    *,
    scratch: Path,
    symmetrize: bool,
    self_loops: bool,
    shares: Shares,
    listener: Listener,
) -> Topology:
    """Write the topology of ``source`` to the store at ``store``; scratch files go to ``scratch``.

    ``symmetrize`` adds each edge's reverse and drops duplicates; otherwise duplicates stay.
    SourceError for an edge that leaves the graph.
    """
    form = KeyForm(source.num_nodes)
    directions = ("in",) if symmetrize else ("in", "out")
    keys = source.num_edges * (2 if symmetrize else 1)
    sorters = {
        direction: EdgeSorter(
            scratch / direction,
            largest=form.largest,
            expected=keys,
            capacity=shares.sort_keys,
            block=shares.edges,
        )
        for direction in directions
    }
    try:
        _spread(source, form, sorters, shares=shares, listener=listener)
        written = {}
        for direction, sorter in sorters.items():
            blocks: Iterable[Keys] = cut(sorter.sorted_blocks(), shares.edges)
            if symmetrize:
                blocks = distinct(blocks)
            if self_loops:
                blocks = with_self_loops(blocks, form)
            most = keys + (source.num_nodes if self_loops else 0)
            task = f"writing {direction}-edges"
            written[direction] = write_direction(
                store, direction, form, blocks, most=most, task=task, listener=listener
            )
    finally:
        for sorter in sorters.values():
            sorter.close()
    writer = written["in"]
    undirected = symmetrize or _same(store)
    if undirected and not symmetrize:
        rmtree(store / "out")
    elif not symmetrize:
        rmtree(store / "out" / "self_loops")
    if not writer.self_loops:
        rmtree(store / "in" / "self_loops")
    return Topology(num_edges=writer.edges, num_self_loops=writer.self_loops, undirected=undirected)


def _spread(
    source: Source, form: KeyForm, sorters: dict[str, EdgeSorter], *, shares: Shares, listener: Listener
) -> None:
    task, done = "reading edges", 0
    listener(TaskStarted(task, source.num_edges, "edges"))
    for block in source.edges(shares.edges):
        _check(block, done, source.num_nodes)
        done += len(block.sources)
        if source.drop_self_loops:
            kept = block.sources != block.targets
            block = EdgeBlock(block.sources[kept], block.targets[kept])
        sorters["in"].add(form.pack(block.targets, block.sources))
        # By the reverse edge's target when symmetrising, which has no "out"; by source otherwise.
        sorters.get("out", sorters["in"]).add(form.pack(block.sources, block.targets))
        listener(TaskAdvanced(task, done))
    listener(TaskFinished(task))


def _check(block: EdgeBlock, before: int, nodes: int) -> None:
    for ids in block:
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= nodes):
            bad = int(np.flatnonzero((ids < 0) | (ids >= nodes))[0])
            edge = f"{block.sources[bad]} → {block.targets[bad]}"
            raise SourceError(f"edge {before + bad} ({edge}) leaves the graph: its nodes are 0 to {nodes - 1}")


def write_direction(
    store: Path,
    direction: str,
    form: KeyForm,
    blocks: Iterable[Keys],
    *,
    most: int,
    task: str,
    listener: Listener,
) -> CsrWriter:
    """Write ascending ``blocks`` of at most ``most`` keys as the arrays of ``direction``; the closed writer."""
    writer = CsrWriter(store, direction, form, most_edges=most)
    done = 0
    listener(TaskStarted(task, most, "edges"))
    try:
        for keys in blocks:
            writer.append(keys)
            done += len(keys)
            listener(TaskAdvanced(task, done))
        writer.close()
    finally:
        writer.abandon()
    listener(TaskFinished(task))
    return writer


def _same(store: Path) -> bool:
    """Whether the in-edges are the out-edges: checksums tell at once in nearly every case, bytes for sure."""
    pairs = [tuple(open_array(store, f"{side}/{name}") for side in ("in", "out")) for name in ("indptr", "indices")]
    if any(not np.array_equal(first.checksums(), second.checksums()) for first, second in pairs):
        return False
    return all(_equal(first, second) for first, second in pairs)


def _equal(first: Array, second: Array) -> bool:
    return all(
        np.array_equal(rows, second.read(start, start + len(rows))) for start, rows in first.blocks(_COMPARED_ROWS)
    )
