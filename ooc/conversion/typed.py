# SPDX-License-Identifier: Apache-2.0
"""A source with types of nodes and edges → a group of the store for each: features by type of nodes, where they have
such, labels and splits of the one that has them, both directions of each type of edges, sorted on disk as those of
other graphs are."""

import os
from dataclasses import asdict
from pathlib import Path
from shutil import copy2, copytree, rmtree
from typing import Any

from ooc.conversion.budget import Options, Shares
from ooc.conversion.edge_sort import parts_for
from ooc.conversion.edges import KeyForm, Run, ValueForm
from ooc.conversion.held_out_links import HeldOut
from ooc.conversion.node_arrays import write_features, write_labels
from ooc.conversion.output import Workplace
from ooc.conversion.topology import Direction, EdgeStream, Pieces, both_ways, spread, write_direction
from ooc.errors import OptionError, SourceError
from ooc.sources.files.prefetching import prefetched
from ooc.sources.source import RelationSource, Source, SourceTypes
from ooc.storage.store import FORMAT_VERSION, VERSION_WITH_TYPES, write_group
from ooc.storage.types import EDGES, NODES, EdgeType, Types


def check_options(graph: Source, parts: SourceTypes, options: Options) -> None:
    """OptionError for what is not done to graphs with types."""
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
        if kind.source != kind.target and kind.reverse.folder.lower() in there:
            raise OptionError(f"{graph.name} has edges {kind.reverse} already; leave out symmetrize, or one of the two")


def write_types(
    graph: Source, parts: SourceTypes, store: Path, work: Workplace, *, name: str, options: Options, shares: Shares
) -> None:
    """Write all of ``graph``, whose types are ``parts``, to ``store``, rows as they are. To symmetrize is what PyG's
    ``ToUndirected`` does: edges within a type of nodes get their reverse among them, others a type of edges that are
    theirs reversed."""
    journal = work.journal
    labelled = store / NODES / parts.labelled
    labels = write_labels(graph, labelled, block_rows=shares.label_rows, journal=journal)
    for kind, nodes in parts.nodes.items():
        if not nodes.num_features:
            continue
        rows, stage = shares.feature_rows, f"features of {kind}"
        write_features(nodes, store / NODES / kind, work, options=options, block_rows=rows, stage=stage)
    edges, self_loops = {}, {}
    for relation, found in parts.edges.items():
        ends = parts.nodes[relation.source].num_nodes, parts.nodes[relation.target].num_nodes
        values = ValueForm.of_source(found, options.dtype)
        written = _write_relation(relation, found, ends, values, store, work, options, shares)
        edges[relation] = int(written["edges"])
        if relation.source == relation.target:
            self_loops[relation] = int(written["self_loops"])
    reverses = {one.reverse: one for one in parts.edges if options.symmetrize and one.source != one.target}
    for reverse, relation in reverses.items():
        edges[reverse] = edges[relation]
        for side, other in (("in", "out"), ("out", "in")):
            link(store / EDGES / relation.folder / side, store / EDGES / reverse.folder / other)
    carrying = {one: parts.edges[reverses.get(one, one)] for one in edges}
    types = Types(
        {kind: nodes.num_nodes for kind, nodes in parts.nodes.items()},
        {kind: nodes.num_features for kind, nodes in parts.nodes.items()},
        edges,
        parts.labelled,
        frozenset(relation for relation, found in carrying.items() if found.has_edge_weight),
        {relation: found.num_edge_features for relation, found in carrying.items() if found.num_edge_features},
        self_loops,
    )
    write_groups_of(types, store)
    attributes: dict[str, Any] = {
        "ooc_format": FORMAT_VERSION if types.weighted or types.edge_features else VERSION_WITH_TYPES,
        "name": name,
        "num_nodes": graph.num_nodes,
        "num_edges": sum(edges.values()),
        "num_features": graph.num_features,
        "num_classes": labels["num_classes"],
        "task": graph.task.value,
        "has_ids": graph.ids is not None,
        **({"id_bytes": graph.id_bytes} if graph.id_bytes else {}),
        **({"class_names": list(graph.class_names)} if graph.class_names else {}),
        "undirected": False,
        "num_self_loops": 0,
        "split_sizes": labels["split_sizes"],
        **({"incomplete_labels": labels["incomplete"]} if labels["incomplete"] else {}),
        "order": "none",
        **types.attributes(),
        "source": {"what": graph.name, "format": graph.format, **graph.description, "options": asdict(options)},
        "created": journal.created,
        "complete": True,
    }
    write_group(store, attributes)


def write_groups_of(types: Types, folder: Path) -> None:
    """Write the metadata of the groups within the store in ``folder``."""
    groups = [NODES, EDGES, *(f"{NODES}/{kind}" for kind in types.nodes), f"{NODES}/{types.labelled}/split"]
    for relation in types.edges:
        groups += [f"{EDGES}/{relation.folder}", *(f"{EDGES}/{relation.folder}/{side}" for side in ("in", "out"))]
    for group in groups:
        write_group(folder / group, {})


def _write_relation(
    relation: EdgeType,
    found: RelationSource,
    ends: tuple[int, int],
    values: ValueForm | None,
    store: Path,
    work: Workplace,
    options: Options,
    shares: Shares,
) -> dict[str, Any]:
    """Write both directions of the edges of one type between so many sources and targets, with what they carry; how
    many there are, and how many self-loops."""
    sources, targets = ends
    widest, group = max(ends), f"{EDGES}/{relation.folder}"
    symmetric = options.symmetrize and relation.source == relation.target
    forms = {"in": KeyForm(widest, targets), "out": KeyForm(widest, sources)}
    if symmetric:
        del forms["out"]
    folders = {side: work.scratch / relation.folder / side for side in forms}
    (work.scratch / relation.folder).mkdir(parents=True, exist_ok=True)
    other = "in" if symmetric else "out"
    pieces = _packed(relation, found, ends, forms["in"], values, shares.edges, other=other, hold_out=options.hold_out)
    stream = EdgeStream(f"edges {relation}", f"reading edges {relation}", pieces, found.num_edges)
    parts = parts_for(found.num_edges * (1 + symmetric), shares.sort_keys)
    buckets = spread(work, stream, folders, KeyForm(widest), parts, values)
    for side, form in forms.items():
        direction = Direction(store, f"{group}/{side}", f"{side}-edges {relation}", folders[side])
        once = symmetric and options.drop_duplicates
        write_direction(work, direction, buckets[side], form, values, shares, drop_duplicates=once)
    if symmetric:
        link(store / group / "in", store / group / "out")
    written: dict[str, Any] = work.journal.result(f"in-edges {relation}")
    for side in ("in", "out") if relation.source != relation.target or not written["self_loops"] else ("out",):
        rmtree(store / group / side / "self_loops", ignore_errors=True)
    return written


def link(source: Path, target: Path) -> None:
    """Have the arrays in the folder ``source`` in ``target``, too: the same files, where the disk has such."""
    rmtree(target, ignore_errors=True)

    def linked(file: str, other: str) -> None:
        try:
            os.link(file, other)
        except OSError:
            copy2(file, other)

    copytree(source, target, copy_function=linked)


def _packed(
    relation: EdgeType,
    found: RelationSource,
    ends: tuple[int, int],
    form: KeyForm,
    values: ValueForm | None,
    size: int,
    *,
    other: str,
    hold_out: HeldOut | None,
) -> Pieces:
    """The edges as keys of each direction, the ``other`` of which their reverse go to, and how many have come so far,
    without those that are held out; SourceError for one that leaves the graph."""
    done = 0
    with prefetched(found.edges(size)) as blocks:
        for block in blocks:
            for ids, count, kind in zip((block.sources, block.targets), ends, (relation[0], relation[2]), strict=True):
                if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                    raise SourceError(f"an edge {relation} leaves the graph: nodes {kind!r} are 0 to {count - 1}")
            carried = values.records(block.data, len(block.sources), done) if values is not None else None
            done += len(block.sources)
            sources, targets = block.sources, block.targets
            kept = None if hold_out is None else hold_out.kept_of(relation, sources, targets)
            if kept is not None:
                sources, targets = sources[kept], targets[kept]
                carried = None if carried is None else carried[kept]
            inward, outward = form.pack(targets, sources), form.pack(sources, targets)
            if carried is not None and other == "in":
                yield done, [("in", both_ways(inward, outward, carried, once=False))]
            else:
                yield done, [("in", Run(inward, carried)), (other, Run(outward, carried))]
    if done != found.num_edges:
        raise SourceError(f"there are {done} edges {relation}, not the {found.num_edges} that are said to be")
