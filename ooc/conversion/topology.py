# SPDX-License-Identifier: Apache-2.0
"""A source's edges → ``in/`` and ``out/`` of the store, sorted on disk.

Stages: the edges are spread over buckets of keys, both directions at once; the buckets of each direction, in
turn, are sorted and written; the directions are compared. Each leaves a mark, and one within for every few buckets.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from ooc.conversion.ahead import ahead
from ooc.conversion.budget import Shares
from ooc.conversion.csr import CsrWriter, KeyForm, SelfLoops, cut, distinct
from ooc.conversion.edge_sort import Bucket, Keys, Sorter, Spreader, parts_for
from ooc.conversion.journal import Journal, flush_all
from ooc.conversion.source import EdgeBlock, Source
from ooc.errors import SourceError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted
from ooc.storage.array import Array, open_array

_COMPARED_ROWS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Edges:
    """What is done to the edges: their reverse added, repetitions dropped, missing self-loops added."""

    symmetrize: bool
    drop_duplicates: bool
    self_loops: bool


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
    edges: Edges,
    shares: Shares,
    journal: Journal,
    listener: Listener,
) -> Topology:
    """Write the topology of ``source`` to the store at ``store``; scratch files go to ``scratch``.

    SourceError for an edge that leaves the graph.
    """
    form = KeyForm(source.num_nodes)
    directions = ("in",) if edges.symmetrize else ("in", "out")
    most = source.num_edges * (2 if edges.symmetrize else 1)
    if (spread := journal.result("edges")) is None:
        spread = _spread(
            source, form, directions, scratch=scratch, most=most, shares=shares, journal=journal, listener=listener
        )
    for direction in directions:
        write_direction(
            store,
            direction,
            form,
            [Bucket(**bucket) for bucket in spread[direction]],
            scratch=scratch / direction,
            drop_duplicates=edges.drop_duplicates,
            self_loops=edges.self_loops,
            shares=shares,
            stage=f"{direction}-edges",
            journal=journal,
            listener=listener,
        )
    written = journal.result("in-edges")
    if (compared := journal.result("directions")) is None:
        undirected = edges.symmetrize or _same(store)
        compared = journal.finish("directions", {"undirected": undirected}, lambda: None)
    # Removed as often as this is reached: a process may have been killed between the mark and here.
    if "out" in directions:
        rmtree(store / "out" if compared["undirected"] else store / "out" / "self_loops", ignore_errors=True)
    if not written["self_loops"]:
        rmtree(store / "in" / "self_loops", ignore_errors=True)
    return Topology(num_edges=written["edges"], num_self_loops=written["self_loops"], undirected=compared["undirected"])


def _spread(
    source: Source,
    form: KeyForm,
    directions: tuple[str, ...],
    *,
    scratch: Path,
    most: int,
    shares: Shares,
    journal: Journal,
    listener: Listener,
) -> dict[str, Any]:
    """The buckets of each direction, on the disk."""
    spreaders = {}
    for direction in directions:
        rmtree(scratch / direction, ignore_errors=True)
        parts = parts_for(most, shares.sort_keys)
        spreaders[direction] = Spreader(scratch / direction, low=0, high=form.largest, parts=parts)
    task, done = "reading edges", 0
    listener(TaskStarted(task, source.num_edges, "edges"))
    try:
        with ahead(source.edges(shares.edges)) as blocks:
            for block in blocks:
                _check(block, done, source.num_nodes)
                done += len(block.sources)
                if done > source.num_edges:
                    raise SourceError(f"{source.name} has more edges than the {source.num_edges} it says")
                if source.drop_self_loops:
                    kept = block.sources != block.targets
                    block = EdgeBlock(block.sources[kept], block.targets[kept])
                spreaders["in"].add(form.pack(block.targets, block.sources))
                # By the reverse edge's target when symmetrising, which has no "out"; by source otherwise.
                spreaders.get("out", spreaders["in"]).add(form.pack(block.sources, block.targets))
                listener(TaskAdvanced(task, done))
    finally:
        buckets = {direction: spreader.close() for direction, spreader in spreaders.items()}
    if done != source.num_edges:
        raise SourceError(f"{source.name} has {done} edges, not the {source.num_edges} it says")
    found = {direction: [asdict(bucket) for bucket in some] for direction, some in buckets.items()}
    spread = journal.finish("edges", found, lambda: flush_all([scratch / direction for direction in directions]))
    listener(TaskFinished(task))
    return spread


def _check(block: EdgeBlock, before: int, nodes: int) -> None:
    for ids in block:
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= nodes):
            outside = [(ends < 0) | (ends >= nodes) for ends in block]
            bad = int(np.flatnonzero(outside[0] | outside[1])[0])
            edge = f"{block.sources[bad]} → {block.targets[bad]}"
            raise SourceError(f"edge {before + bad} ({edge}) leaves the graph: its nodes are 0 to {nodes - 1}")


def write_direction(
    store: Path,
    direction: str,
    form: KeyForm,
    buckets: list[Bucket],
    *,
    scratch: Path,
    drop_duplicates: bool,
    self_loops: bool,
    shares: Shares,
    stage: str,
    journal: Journal,
    listener: Listener,
) -> None:
    """Sort ``buckets``, files in ``scratch``, into the arrays of ``direction``; removes ``scratch`` when done.

    The result of ``stage``: ``edges`` and ``self_loops``, how many there are.
    """
    if journal.result(stage) is not None:
        rmtree(scratch, ignore_errors=True)
        return
    most = sum(bucket.count for bucket in buckets) + (form.nodes if self_loops else 0)
    progress = journal.progress(stage)
    if progress is None:
        rmtree(store / direction, ignore_errors=True)
    else:
        buckets = [Bucket(**bucket) for bucket in progress["buckets"]]
    csr = CsrWriter(store, direction, form, most_edges=most, progress=progress and progress["csr"])
    loops = SelfLoops(form, progress["loops_to"] if progress else 0) if self_loops else None
    sorter = Sorter(scratch, buckets, capacity=shares.sort_keys, block=shares.edges, workers=shares.sort_workers)
    task = f"writing {stage}"
    listener(TaskStarted(task, most, "edges"))
    spent: list[Path] = []
    try:
        for step in sorter.steps():
            for keys in _derived(step.blocks, loops, drop_duplicates=drop_duplicates, size=shares.edges):
                csr.append(keys)
                listener(TaskAdvanced(task, csr.appended))
            spent.append(step.spent)
            flushing = partial(_flush, csr, scratch, refined=step.refined)
            state = partial(_state, csr, loops, step.rest)
            if journal.advance(stage, flushing, state, now=step.refined):
                _unlink(spent)
        for keys in loops.remaining() if loops is not None else ():
            csr.append(keys)
            listener(TaskAdvanced(task, csr.appended))
        csr.close()
    finally:
        csr.abandon()
    journal.finish(stage, {"edges": csr.edges, "self_loops": csr.self_loops}, csr.flush)
    rmtree(scratch, ignore_errors=True)
    listener(TaskFinished(task))


def _derived(blocks: Iterable[Keys], loops: SelfLoops | None, *, drop_duplicates: bool, size: int) -> Iterator[Keys]:
    blocks = cut(blocks, size)
    if drop_duplicates:
        blocks = distinct(blocks)
    return iter(blocks) if loops is None else loops.among(blocks)


def _state(csr: CsrWriter, loops: SelfLoops | None, rest: tuple[Bucket, ...]) -> dict[str, Any]:
    return {
        "csr": csr.progress(),
        "loops_to": loops.node if loops is not None else 0,
        "buckets": [asdict(bucket) for bucket in rest],
    }


def _flush(csr: CsrWriter, scratch: Path, *, refined: bool) -> None:
    csr.flush()
    if refined:
        flush_all([scratch])


def _unlink(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
    files.clear()


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
