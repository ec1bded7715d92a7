# SPDX-License-Identifier: Apache-2.0
"""A source's edges, with what they carry → ``in/`` and ``out/`` of the store, sorted on disk.

Stages: the edges are spread over buckets of keys, both directions at once; the buckets of each direction, in
turn, are sorted and written; the directions are compared. Each leaves a mark, and one within for every few buckets.
"""

from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import numpy as np

from ooc.conversion.budget import Options, Shares
from ooc.conversion.csr import CsrWriter
from ooc.conversion.edge_sort import Bucket, Sorter, Spreader, parts_for
from ooc.conversion.edges import KeyForm, Keys, Run, SelfLoops, ValueForm, Values, cut, distinct, merged, taken
from ooc.conversion.output import Workplace
from ooc.errors import SourceError
from ooc.events import reported
from ooc.sources.files.prefetching import prefetched
from ooc.sources.source import EdgeBlock, Source
from ooc.storage.array import flush_all, open_array
from ooc.storage.store import EDGE_WEIGHT

_COMPARED_BYTES = 1 << 20


def write_topology(
    source: Source,
    store: Path,
    work: Workplace,
    *,
    options: Options,
    values: ValueForm | None,
    shares: Shares,
) -> dict[str, Any]:
    """Write the topology of ``source``, and ``values``, to the store at ``store``; files on the way go to ``work``.

    What the store's attributes say of them.

    SourceError for an edge that leaves the graph, and for one without its values.
    """
    form = KeyForm(source.num_nodes)
    directions = ("in",) if options.symmetrize else ("in", "out")
    folders = {direction: work.scratch / direction for direction in directions}
    most = source.num_edges * (2 if options.symmetrize else 1)
    edges = EdgeStream("edges", "reading edges", _packed(source, form, options, values, shares.edges), source.num_edges)
    buckets = spread(work, edges, folders, form, parts_for(most, shares.sort_keys), values)
    for direction in directions:
        write_direction(
            work,
            Direction(store, direction, f"{direction}-edges", folders[direction]),
            buckets[direction],
            form,
            values,
            shares,
            drop_duplicates=options.drop_duplicates,
            self_loops=options.self_loops,
        )
    written = work.journal.result("in-edges")
    if (compared := work.journal.result("directions")) is None:
        undirected = options.symmetrize or _same(store, values)
        compared = work.journal.finish("directions", {"undirected": undirected}, lambda: None)
    # Removed as often as this is reached: a process may have been killed between the mark and here.
    if "out" in directions:
        rmtree(store / "out" if compared["undirected"] else store / "out" / "self_loops", ignore_errors=True)
    if not written["self_loops"]:
        rmtree(store / "in" / "self_loops", ignore_errors=True)
    weighted = source.has_edge_weight and values is not None
    if weighted and source.weight_unless_ones and written["only_ones"]:
        weighted = False
        for direction in directions:
            rmtree(store / direction / EDGE_WEIGHT, ignore_errors=True)
    return {
        "num_edges": written["edges"],
        "num_self_loops": written["self_loops"],
        "undirected": compared["undirected"],
        "has_edge_weight": weighted,
        "num_edge_features": source.num_edge_features if values is not None else 0,
    }


def _packed(source: Source, form: KeyForm, options: Options, values: ValueForm | None, size: int) -> "Pieces":
    """The edges of ``source`` as keys of each direction with what they carry, about ``size`` at a time, and how many
    have come so far."""
    done = 0
    with prefetched(source.edges(size)) as blocks:
        for block in blocks:
            _check(block, done, source)
            count = len(block.sources)
            if done + count > source.num_edges:
                raise SourceError(f"{source.name} has more edges than the {source.num_edges} it says")
            sources, targets, data = block
            carried = values.records(data, count, done) if values is not None else None
            if source.drop_self_loops:
                kept = sources != targets
                sources, targets = sources[kept], targets[kept]
                carried = carried[kept] if carried is not None else None
            if options.hold_out is not None:
                kept = options.hold_out.of(sources, targets) < 0
                sources, targets = sources[kept], targets[kept]
                carried = carried[kept] if carried is not None else None
            done += count
            forward, reverse = form.pack(targets, sources), form.pack(sources, targets)
            if not options.symmetrize:
                yield done, [("in", Run(forward, carried)), ("out", Run(reverse, carried))]
            elif carried is None:
                yield done, [("in", Run(forward)), ("in", Run(reverse))]
            else:
                yield done, [("in", both_ways(forward, reverse, carried, once=options.drop_duplicates))]
    if done != source.num_edges:
        raise SourceError(f"{source.name} has {done} edges, not the {source.num_edges} it says")


def both_ways(forward: Keys, reverse: Keys, values: Values, *, once: bool) -> Run:
    """Each edge and its reverse one after the other: the order of equal keys must not depend on the blocks.

    ``once``: a self-loop has its own value, not twice that.
    """
    keys = np.stack([forward, reverse], axis=1).reshape(-1)
    edge = np.repeat(np.arange(len(values)), 2)
    if once:
        kept = np.ones(len(keys), dtype=np.bool_)
        kept[1::2] = forward != reverse
        keys, edge = keys[kept], edge[kept]
    return Run(keys, taken(values, edge))


Pieces = Generator[tuple[int, list[tuple[str, Run]]]]
"""How many edges have come so far, and pieces of them with the name of the folder that each is for."""


class EdgeStream(NamedTuple):
    """The ``edges`` that a ``stage`` of a conversion spreads, ``total`` of them; ``task``: what it is called."""

    stage: str
    task: str
    edges: Pieces
    total: int


def spread(
    work: Workplace,
    stream: EdgeStream,
    folders: dict[str, Path],
    form: KeyForm,
    parts: int,
    values: ValueForm | None,
) -> dict[str, list[Bucket]]:
    """Spread edges over buckets on the disk; those of each of the ``folders``, by name."""
    if (found := work.journal.result(stream.stage)) is None:
        spreaders = {}
        for name, folder in folders.items():
            rmtree(folder, ignore_errors=True)
            spreaders[name] = Spreader(folder, low=0, high=form.largest, parts=parts, with_values=values is not None)
        with reported(work.listener, stream.task, stream.total, "edges") as advance:
            try:
                with closing(stream.edges):
                    for done, pieces in stream.edges:
                        for name, run in pieces:
                            spreaders[name].add(*run)
                        advance(done)
            finally:
                buckets = {name: spreader.close() for name, spreader in spreaders.items()}
            found = {name: [asdict(bucket) for bucket in some] for name, some in buckets.items()}
            work.journal.finish(stream.stage, found, lambda: flush_all(list(folders.values())))
    return {name: [Bucket(**bucket) for bucket in some] for name, some in found.items()}


def _check(block: EdgeBlock, before: int, source: Source) -> None:
    nodes, graphs = source.num_nodes, source.graph_offsets
    ends_of = block.sources, block.targets
    for ids in ends_of:
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= nodes):
            outside = [(ends < 0) | (ends >= nodes) for ends in ends_of]
            bad = int(np.flatnonzero(outside[0] | outside[1])[0])
            edge = f"{block.sources[bad]} → {block.targets[bad]}"
            raise SourceError(f"edge {before + bad} ({edge}) leaves the graph: its nodes are 0 to {nodes - 1}")
    if graphs is not None:
        apart = np.subtract(*(np.searchsorted(graphs, ids, side="right") for ids in ends_of))
        if apart.any():
            bad = int(apart.argmax() if apart.max() else apart.argmin())
            edge = f"{block.sources[bad]} → {block.targets[bad]}"
            raise SourceError(f"edge {before + bad} ({edge}) leads from one graph to another")


class Direction(NamedTuple):
    """Where a ``stage`` writes the edges of a direction, ``name``, from files in ``scratch``."""

    store: Path
    name: str
    stage: str
    scratch: Path


def write_direction(
    work: Workplace,
    direction: Direction,
    buckets: list[Bucket],
    form: KeyForm,
    values: ValueForm | None,
    shares: Shares,
    *,
    drop_duplicates: bool = False,
    self_loops: bool = False,
) -> None:
    """Sort ``buckets`` into the arrays of ``direction``; removes their files when done.

    The result of the stage: ``edges`` and ``self_loops``, how many there are, and ``only_ones``: whether all values
    are 1.
    """
    store, name, stage, scratch = direction
    journal, listener = work.journal, work.listener
    if journal.result(stage) is not None:
        rmtree(scratch, ignore_errors=True)
        return
    most = sum(bucket.count for bucket in buckets) + (form.nodes if self_loops else 0)
    progress = journal.progress(stage)
    if progress is None:
        rmtree(store / name, ignore_errors=True)
    else:
        buckets = [Bucket(**bucket) for bucket in progress["buckets"]]
    csr = CsrWriter(store, name, form, most_edges=most, values=values, progress=progress and progress["csr"])
    loops = SelfLoops(form, progress["loops_to"] if progress else 0, values=values) if self_loops else None
    sorter = Sorter(
        scratch,
        buckets,
        capacity=shares.sort_keys,
        block=shares.edges,
        workers=shares.sort_workers,
        values=values.dtype if values is not None else None,
    )
    spent: list[Path] = []
    with closing(csr), reported(listener, f"writing {stage}", most, "edges") as advance:
        with closing(sorter.steps()) as steps:  # Its threads end here, however this ends.
            for step in steps:
                # All edges with equal keys are in one step.
                runs = cut(step.runs, shares.edges)
                if drop_duplicates:
                    runs = distinct(runs) if values is None else merged(runs, values, form)
                for run in runs if loops is None else loops.among(runs):
                    csr.append(run)
                    advance(csr.appended)
                spent.extend(step.spent)
                flushing = partial(_flush, csr, [scratch] if step.refined else [])
                if journal.advance(stage, flushing, partial(_state, csr, loops, step.rest), now=step.refined):
                    for file in spent:
                        file.unlink(missing_ok=True)
                    spent.clear()
        for run in loops.remaining() if loops is not None else ():
            csr.append(run)
            advance(csr.appended)
        csr.complete()
        journal.finish(stage, csr.found(), csr.flush)
    rmtree(scratch, ignore_errors=True)


def _flush(csr: CsrWriter, folders: list[Path]) -> None:
    csr.flush()
    flush_all(folders)


def _state(csr: CsrWriter, loops: SelfLoops | None, rest: tuple[Bucket, ...]) -> dict[str, Any]:
    buckets = [asdict(bucket) for bucket in rest]
    return {"csr": csr.progress(), "loops_to": loops.node if loops is not None else 0, "buckets": buckets}


def _same(store: Path, values: ValueForm | None) -> bool:
    """Whether the in-edges are the out-edges: checksums tell at once in nearly every case, bytes for sure."""
    names = ("indptr", "indices", *(values.names if values is not None else ()))
    pairs = [tuple(open_array(store, f"{side}/{name}") for side in ("in", "out")) for name in names]
    if any(not np.array_equal(first.checksums(), second.checksums()) for first, second in pairs):
        return False
    return all(
        np.array_equal(rows, second.read(start, start + len(rows)))
        for first, second in pairs
        for start, rows in first.blocks(max(1, _COMPARED_BYTES // first.row_bytes))
    )
