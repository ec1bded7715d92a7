# SPDX-License-Identifier: Apache-2.0
"""From a source's edges with their data to ``in/`` and ``out/`` of the store, sorted on disk.

Stages: the edges of both directions are distributed to buckets of keys; the buckets of each direction, in turn, are
sorted and written; the directions are compared. Each stage leaves a mark. In a heterogeneous graph each edge type has
such a group, and each node type has one for its features.
"""

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copy2, copytree, ignore_patterns, rmtree
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ooc.conversion.budget import Options, Shares
from ooc.conversion.edge_sort import Bucket, Sorter, Spreader, parts_for
from ooc.conversion.edges import (
    KEY,
    Edges,
    KeyForm,
    Keys,
    ValueForm,
    coalesced,
    cut,
    distinct,
    keys_of,
    with_self_loops,
)
from ooc.conversion.output import Workplace
from ooc.errors import OptionError, SourceError
from ooc.events import reported
from ooc.sources.source import EdgeBlock, RelationSource, Source, SourceTypes
from ooc.storage.array import open_array
from ooc.storage.store import EDGE_WEIGHT
from ooc.storage.types import ONLY, EdgeType, Types
from ooc.storage.writer import ArrayWriter
from ooc.threads import ahead

_WINDOW_ROWS = 1 << 18
_TOPOLOGY = ("indptr", "indices", "self_loops")


class CsrWriter:
    """A writer of a direction's ``indptr`` [N+1], ``indices`` [E] and ``self_loops`` [N] from ascending edges, with
    their data.

    The data is ``edge_weight`` [E] and ``edge_features`` [E, F], as ``values`` says. ``most_edges`` bounds E, which is
    known only at the end.
    """

    def __init__(self, store: Path, direction: str, form: KeyForm, *, most_edges: int, values: ValueForm) -> None:
        self._form = form
        self._index_dtype = np.dtype(np.int32 if form.nodes <= 2**31 else np.int64)
        shapes: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
            "indptr": ((form.num_rows + 1,), np.int64),
            "indices": ((most_edges,), self._index_dtype),
            "self_loops": ((form.num_rows,), np.int32),
        }
        for name, kind, width in values.columns:
            shapes[name] = ((most_edges,) if width is None else (most_edges, width), kind)
        # The first row that is not complete yet, and what came of it so far.
        self._row = self._row_edges = self._row_loops = 0
        self.edges = self.self_loops = 0
        self._writers = {
            name: ArrayWriter(store, f"{direction}/{name}", shape, dtype) for name, (shape, dtype) in shapes.items()
        }
        self._indptr, self._indices, self._loops = (self._writers[name] for name in _TOPOLOGY)
        self._values = {name: writer for name, writer in self._writers.items() if name not in _TOPOLOGY}
        self._indptr.append(np.zeros(1, dtype=np.int64))

    @property
    def appended(self) -> int:
        """The number of edges so far."""
        return self._indices.rows

    def found(self) -> dict[str, Any]:
        """The numbers of edges and self-loops."""
        return {"edges": self.edges, "self_loops": self.self_loops}

    def append(self, edges: Edges) -> None:
        """Add edges, none below the earlier ones."""
        if not len(edges):
            return
        for name, writer in self._values.items():
            writer.append(edges[name])
        keys = keys_of(edges)
        rows, columns = self._form.rows(keys), self._form.columns(keys)
        self._indices.append(columns.astype(self._index_dtype))
        looping = rows[rows == columns]
        self.self_loops += len(looping)
        last = int(rows[-1])
        done = done_loops = 0
        for start in range(self._row, last, _WINDOW_ROWS):
            stop = min(start + _WINDOW_ROWS, last)
            here, here_loops = np.searchsorted(rows, stop), np.searchsorted(looping, stop)
            self._complete_rows(stop, rows[done:here], looping[done_loops:here_loops])
            done, done_loops = int(here), int(here_loops)
        self._row_edges += len(rows) - done
        self._row_loops += len(looping) - done_loops

    def complete(self) -> None:
        """Complete the remaining rows, and the arrays."""
        nothing = np.empty(0, dtype=np.int64)
        for start in range(self._row, self._form.num_rows, _WINDOW_ROWS):
            self._complete_rows(min(start + _WINDOW_ROWS, self._form.num_rows), nothing, nothing)
        for writer in self._writers.values():
            writer.close(shrink=writer not in (self._indptr, self._loops))

    def _complete_rows(self, stop: int, rows: npt.NDArray[np.int64], looping: npt.NDArray[np.int64]) -> None:
        """Complete the rows up to ``stop``; ``rows`` and ``looping`` have a row's number for each of its edges and
        self-loops."""
        first, height = self._row, stop - self._row
        counts = np.bincount(rows - first, minlength=height)
        counts[0] += self._row_edges
        loops = np.bincount(looping - first, minlength=height)
        loops[0] += self._row_loops
        ends = np.cumsum(counts, out=counts)
        ends += self.edges
        self._indptr.append(ends)
        self._loops.append(loops.astype(np.int32))
        self.edges = int(ends[-1])
        self._row, self._row_edges, self._row_loops = stop, 0, 0


_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Relation:
    """The edges of type ``kind`` of the source ``name``; ``ends``: the numbers of nodes at both ends."""

    name: str
    edges: RelationSource
    ends: tuple[int, int]
    kind: EdgeType

    @property
    def called(self) -> str:
        """The name of the type for stages and messages, after "edges"."""
        return "" if self.kind == ONLY else f" {self.kind}"


def write_edges(graph: Source, store: Path, work: Workplace, *, options: Options, shares: Shares) -> dict[str, Any]:
    """Write the edges of ``graph``, with their data, to the store at ``store``; return the attributes that describe
    them.

    SourceError for an edge that leaves the graph, and for one without its data.
    """
    written = {}
    for kind, found in graph.edges_of.items():
        ends = graph.nodes_of[kind.source].num_nodes, graph.nodes_of[kind.target].num_nodes
        relation = Relation(graph.name, found, ends, kind)
        written[kind] = _write_relation(relation, store, work, options=options, shares=shares)
    if graph.types is None:
        return _finish_one_type(graph, written[ONLY], store, work, options)
    return _finish_types(graph, graph.types, written, store, options)


def _finish_one_type(
    source: Source, written: dict[str, Any], store: Path, work: Workplace, options: Options
) -> dict[str, Any]:
    """Finish edges of one type: they may exist in both directions, and weights may all be 1."""
    directions, values = ("in",) if options.symmetrize else ("in", "out"), ValueForm.of_source(source, options.dtype)
    if (compared := work.journal.result("directions")) is None:
        undirected = options.symmetrize or _is_undirected(store, values)
        compared = work.journal.finish("directions", {"undirected": undirected}, now=True)
    # Removed as often as this is reached: a process may have been killed between the mark and here.
    if "out" in directions and compared["undirected"]:
        rmtree(store / "out", ignore_errors=True)
    weighted = source.has_edge_weight and not (source.weight_unless_ones and written["only_ones"])
    if source.has_edge_weight and not weighted:
        for direction in directions:
            rmtree(store / direction / EDGE_WEIGHT, ignore_errors=True)
    return {
        "num_edges": written["edges"],
        "num_self_loops": written["self_loops"],
        "undirected": compared["undirected"],
        **({"has_edge_weight": True} if weighted else {}),
        **({"num_edge_features": source.num_edge_features} if source.num_edge_features else {}),
    }


def _write_relation(
    relation: Relation, store: Path, work: Workplace, *, options: Options, shares: Shares
) -> dict[str, Any]:
    """Write the edges of one type by both of their ends, or by one where each edge's reverse is among them.

    Temporary files are in ``work``. Returns the numbers of edges and self-loops, and whether all data is 1.
    """
    within, values = relation.kind.within_type, ValueForm.of_source(relation.edges, options.dtype)
    symmetric = options.symmetrize and within
    (sources, targets), group, called = relation.ends, relation.kind.group, relation.called
    sides = {}
    for side, height in (("in", targets), ("out", sources))[: 1 if symmetric else 2]:
        form, scratch = KeyForm(max(relation.ends), height), work.scratch / f"{group}{side}"
        sides[side] = Direction(store, f"{group}{side}", f"{side}-edges{called}", scratch, form)
    packed, total = _pack_edges(relation, sides["in"].form, options, values, shares.edges), relation.edges.num_edges
    parts = parts_for(total * (1 + symmetric), shares.sort_keys)
    spread_out = spread(work, f"edges{called}", packed, sides, task=f"reading edges{called}", total=total, parts=parts)
    once, self_loops = options.drop_duplicates and within, options.self_loops
    for side, buckets in spread_out.items():
        write_direction(work, sides[side], buckets, values, shares, drop_duplicates=once, self_loops=self_loops)
    written: dict[str, Any] = work.journal.result(f"in-edges{called}")
    for side in ("out",) if within and written["self_loops"] else ("in", "out"):
        rmtree(store / f"{group}{side}" / "self_loops", ignore_errors=True)
    return written


def _pack_edges(relation: Relation, form: KeyForm, options: Options, values: ValueForm, size: int) -> "Pieces":
    """Yield the edges of ``relation`` as keys of each direction with their data, without held-out ones.

    They come about ``size`` at a time, with the number of edges so far.
    """
    found, done = relation.edges, 0
    symmetric = options.symmetrize and relation.kind.within_type
    without_loops = isinstance(found, Source) and found.drop_self_loops
    whole = values.whole_columns()
    with closing(ahead(found.edges(size), name="ooc-read", most=2)) as blocks:
        for block in blocks:
            _check_ends(block, done, relation)
            count = len(block.sources)
            if done + count > found.num_edges:
                raise SourceError(f"{relation.name} has more edges{relation.called} than the {found.num_edges} it says")
            sources, targets, data = block
            carried = values.records(data, count, done) if values.columns else None
            for name, columns in whole.items():
                if (given := getattr(data, name)).dtype == np.float64:
                    columns.examine(given.reshape(count, -1), done)
            done += count
            kept = sources != targets if without_loops else None
            if options.hold_out is not None:
                kept = options.hold_out.kept_of(relation.kind, sources, targets, kept)
            if kept is not None:
                sources, targets = sources[kept], targets[kept]
                carried = None if carried is None else carried[kept]
            forward, reverse = form.pack(targets, sources), form.pack(sources, targets)
            if symmetric and carried is not None:
                once = options.drop_duplicates and relation.kind == ONLY
                yield done, [("in", both_ways(forward, reverse, carried, once=once))]
            else:
                yield done, _by_direction(carried, ("in", forward), ("in" if symmetric else "out", reverse))
    for columns in whole.values():
        columns.check()
    if done != found.num_edges:
        raise SourceError(f"{relation.name} has {done} edges{relation.called}, not the {found.num_edges} it says")


def _by_direction(carried: Edges | None, *sides: tuple[str, Keys]) -> Iterator[tuple[str, Edges]]:
    """Yield the edges of each direction; with data, in the same records one after the other."""
    for side, keys in sides:
        if carried is not None:
            carried[KEY] = keys
        yield side, keys if carried is None else carried


def both_ways(forward: Keys, reverse: Keys, carried: Edges, *, once: bool) -> Edges:
    """Return each edge and its reverse one after the other, so that the order of equal keys does not depend on the
    blocks.

    ``once``: a self-loop has its own data, not twice that.
    """
    pairs = np.stack([forward, reverse], axis=1)
    kept = np.ones(pairs.shape, dtype=np.bool_)
    kept[:, 1] = forward != reverse if once else True
    edges = carried.repeat(kept.sum(axis=1))
    edges[KEY] = pairs[kept]
    return edges


Pieces = Generator[tuple[int, Iterable[tuple[str, Edges]]]]
"""The number of edges so far, and blocks of them with the name of the folder for each, one after the other."""


class Direction(NamedTuple):
    """The place where a ``stage`` writes the edges of a direction, ``name``, from files in ``scratch`` with keys of
    that ``form``."""

    store: Path
    name: str
    stage: str
    scratch: Path
    form: KeyForm


def spread(
    work: Workplace, stage: str, pieces: Pieces, directions: dict[str, Direction], *, task: str, total: int, parts: int
) -> dict[str, list[Bucket]]:
    """Distribute ``total`` edges, which come in ``pieces``, to buckets on the disk; return those of each of the
    ``directions``.

    ``task``: the name of the ``stage`` when it resumes.
    """
    if (found := work.journal.result(stage)) is None:
        spreaders = {}
        for name, (*_, folder, form) in directions.items():
            rmtree(folder, ignore_errors=True)
            spreaders[name] = Spreader(folder, low=0, high=form.largest, parts=parts)
        with reported(work.listener, task, total, "edges") as advance:
            try:
                with closing(pieces):
                    for done, some in pieces:
                        for name, edges in some:
                            spreaders[name].add(edges)
                        advance(done)
            finally:
                buckets = {name: spreader.close() for name, spreader in spreaders.items()}
            found = {name: [asdict(bucket) for bucket in of_side] for name, of_side in buckets.items()}
            work.journal.finish(stage, found)
    return {name: [Bucket(**bucket) for bucket in of_side] for name, of_side in found.items()}


def _check_ends(block: EdgeBlock, before: int, relation: Relation) -> None:
    ends_of = block.sources, block.targets
    outside = [(ids < 0) | (ids >= count) for ids, count in zip(ends_of, relation.ends, strict=True)]
    if any(wrong.any() for wrong in outside):
        bad = int(np.flatnonzero(outside[0] | outside[1])[0])
        end = 0 if outside[0][bad] else 1
        nodes = "its nodes" if relation.kind == ONLY else f"nodes {relation.kind[2 * end]!r}"
        where = f"{nodes} are 0 to {relation.ends[end] - 1}"
        raise SourceError(f"{_describe_edge(block, bad, before)}{relation.called} leaves the graph: {where}")
    graphs = relation.edges.graph_offsets if isinstance(relation.edges, Source) else None
    if graphs is not None:
        apart = np.subtract(*(np.searchsorted(graphs, ids, side="right") for ids in ends_of))
        if apart.any():
            bad = int(apart.argmax() if apart.max() else apart.argmin())
            raise SourceError(f"{_describe_edge(block, bad, before)} leads from one graph to another")


def _describe_edge(block: EdgeBlock, at: int, before: int) -> str:
    return f"edge {before + at} ({block.sources[at]} → {block.targets[at]})"


def write_direction(
    work: Workplace,
    direction: Direction,
    buckets: list[Bucket],
    values: ValueForm,
    shares: Shares,
    *,
    drop_duplicates: bool = False,
    self_loops: bool = False,
) -> None:
    """Sort ``buckets`` into the arrays of ``direction``; remove their files when done.

    The result of the stage is ``edges`` and ``self_loops``, their numbers, and ``only_ones``: whether all weights are
    1, before those of duplicates are summed.
    """
    store, name, stage, scratch, form = direction
    journal, listener = work.journal, work.listener
    if journal.result(stage) is not None:
        rmtree(scratch, ignore_errors=True)
        return
    most = sum(bucket.count for bucket in buckets) + (form.nodes if self_loops else 0)
    rmtree(store / name, ignore_errors=True)
    csr = CsrWriter(store, name, form, most_edges=most, values=values)
    only_ones = True

    def examined(runs: Iterable[Edges]) -> Iterator[Edges]:
        nonlocal only_ones
        for run in runs:
            only_ones = only_ones and bool((run[EDGE_WEIGHT] == 1).all())
            yield run

    sizes = {"capacity": shares.sort_keys, "block": shares.edges, "workers": shares.sort_workers}
    sorter = Sorter(scratch, buckets, values.dtype, **sizes)
    with reported(listener, f"writing {stage}", most, "edges") as advance:
        with closing(sorter.runs()) as ascending:  # Ends its threads in any case.
            runs = cut(ascending, shares.edges)
            runs = examined(runs) if EDGE_WEIGHT in values.names else runs
            if drop_duplicates:
                runs = coalesced(runs, values, form) if values.columns else distinct(runs)
            for run in with_self_loops(runs, form, values) if self_loops else runs:
                csr.append(run)
                advance(csr.appended)
        csr.complete()
        journal.finish(stage, csr.found() | {"only_ones": only_ones}, now=True)
    rmtree(scratch, ignore_errors=True)


def _is_undirected(store: Path, values: ValueForm) -> bool:
    """Return whether the in-edges are the out-edges: checksums usually differ at once, otherwise bytes are compared."""
    names = ("indptr", "indices", *values.names)
    pairs = [tuple(open_array(store, f"{side}/{name}") for side in ("in", "out")) for name in names]
    if any(not np.array_equal(first.checksums(), second.checksums()) for first, second in pairs):
        return False
    return all(
        np.array_equal(rows, second.read(start, start + len(rows)))
        for first, second in pairs
        for start, rows in first.blocks(max(1, _COMPARED_BYTES // first.row_bytes))
    )


# ---- several types --------------------------------------------------------------------------------------------------


def check_options(graph: Source, parts: SourceTypes, options: Options) -> None:
    """Raise OptionError for an option that heterogeneous graphs do not support."""
    asked = {
        "drop_duplicates without symmetrize": options.drop_duplicates and not options.symmetrize,
        "self_loops": options.self_loops,
        "row_normalize": options.row_normalize,
        "feature_form='sparse'": options.sparse_features,
    }
    for name, given in asked.items():
        if given:
            raise OptionError(f"{graph.name} has several types of nodes or edges: {name} is not supported for such")
    there = {kind.folder.lower() for kind in parts.edges}
    for kind in parts.edges if options.symmetrize else ():
        if not kind.within_type and kind.reverse.folder.lower() in there:
            raise OptionError(f"{graph.name} has edges {kind.reverse} already; leave out symmetrize, or one of the two")


def _finish_types(
    graph: Source, parts: SourceTypes, written: dict[EdgeType, dict[str, Any]], store: Path, options: Options
) -> dict[str, Any]:
    """Finish the edges of a heterogeneous graph.

    Symmetrising is PyG's ``ToUndirected``: edges within a node type get their reverse among them, and for others a
    reverse edge type is added.
    """
    edges = {one: int(found["edges"]) for one, found in written.items()}
    self_loops = {one: int(found["self_loops"]) for one, found in written.items() if one.within_type}
    for one in self_loops if options.symmetrize else ():
        link(store / f"{one.group}in", store / f"{one.group}out")
    reverses = {one.reverse: one for one in parts.edges if options.symmetrize and not one.within_type}
    for reverse, original in reverses.items():
        edges[reverse] = edges[original]
        for side, other in (("in", "out"), ("out", "in")):
            link(store / f"{original.group}{side}", store / f"{reverse.group}{other}")
    carrying = {one: parts.edges[reverses.get(one, one)] for one in edges}
    types = Types(
        {kind: nodes.num_nodes for kind, nodes in parts.nodes.items()},
        {kind: nodes.num_features for kind, nodes in parts.nodes.items()},
        edges,
        parts.labelled,
        frozenset(one for one, found in carrying.items() if found.has_edge_weight),
        {one: found.num_edge_features for one, found in carrying.items() if found.num_edge_features},
        self_loops,
        {
            kind: nodes.id_bytes
            for kind, nodes in parts.nodes.items()
            if nodes.ids is not None and kind != parts.labelled
        },
    )
    return {"num_edges": sum(edges.values()), "num_self_loops": 0, "undirected": False, **types.attributes()}


def link(source: Path, target: Path) -> None:
    """Link the arrays in the folder ``source`` into ``target``: the same files, where the disk supports that.

    Self-loops are counted once, where in-edges are.
    """
    rmtree(target, ignore_errors=True)

    def linked(file: str, other: str) -> None:
        try:
            os.link(file, other)
        except OSError:
            copy2(file, other)

    copytree(source, target, copy_function=linked, ignore=ignore_patterns("self_loops"))
