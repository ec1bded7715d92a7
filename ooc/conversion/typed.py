# SPDX-License-Identifier: Apache-2.0
"""A source with types of nodes and edges → a group of the store for each: features by type of nodes, where they have
such, and both directions of each type of edges, sorted on disk as those of other graphs are."""

import os
from pathlib import Path
from shutil import copy2, copytree, rmtree

from ooc.conversion.budget import Options, Shares
from ooc.conversion.edges import ValueForm
from ooc.conversion.node_arrays import write_features
from ooc.conversion.output import Workplace
from ooc.conversion.topology import Relation, write_relation
from ooc.errors import OptionError
from ooc.sources.source import Source, SourceTypes
from ooc.storage.store import write_group
from ooc.storage.types import EDGES, NODES, Types


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
    graph: Source, parts: SourceTypes, store: Path, work: Workplace, *, options: Options, shares: Shares
) -> Types:
    """Write features and edges of ``graph``, whose types are ``parts``, to ``store``, rows as they are.

    To symmetrize is what PyG's ``ToUndirected`` does: edges within a type of nodes get their reverse among them, others
    a type of edges that are theirs reversed.
    """
    for kind, nodes in parts.nodes.items():
        if nodes.num_features:
            rows, stage = shares.feature_rows, f"features of {kind}"
            write_features(nodes, store / NODES / kind, work, options=options, block_rows=rows, stage=stage)
    edges, self_loops = {}, {}
    for kind, found in parts.edges.items():
        ends = parts.nodes[kind.source].num_nodes, parts.nodes[kind.target].num_nodes
        relation, values = Relation(graph.name, found, ends, kind), ValueForm.of_source(found, options.dtype)
        written = write_relation(relation, store, work, options=options, values=values, shares=shares)
        edges[kind] = int(written["edges"])
        if relation.within_type:
            self_loops[kind] = int(written["self_loops"])
        if relation.within_type and options.symmetrize:
            link(store / f"{relation.group}in", store / f"{relation.group}out")
            rmtree(store / f"{relation.group}out" / "self_loops", ignore_errors=True)
    reverses = {one.reverse: one for one in parts.edges if options.symmetrize and one.source != one.target}
    for reverse, original in reverses.items():
        edges[reverse] = edges[original]
        for side, other in (("in", "out"), ("out", "in")):
            link(store / EDGES / original.folder / side, store / EDGES / reverse.folder / other)
    carrying = {one: parts.edges[reverses.get(one, one)] for one in edges}
    types = Types(
        {kind: nodes.num_nodes for kind, nodes in parts.nodes.items()},
        {kind: nodes.num_features for kind, nodes in parts.nodes.items()},
        edges,
        parts.labelled,
        frozenset(one for one, found in carrying.items() if found.has_edge_weight),
        {one: found.num_edge_features for one, found in carrying.items() if found.num_edge_features},
        self_loops,
    )
    write_groups_of(types, store)
    return types


def write_groups_of(types: Types, folder: Path) -> None:
    """Write the metadata of the groups within the store in ``folder``."""
    groups = [NODES, EDGES, *(f"{NODES}/{kind}" for kind in types.nodes), f"{NODES}/{types.labelled}/split"]
    for relation in types.edges:
        groups += [f"{EDGES}/{relation.folder}", *(f"{EDGES}/{relation.folder}/{side}" for side in ("in", "out"))]
    for group in groups:
        write_group(folder / group, {})


def link(source: Path, target: Path) -> None:
    """Have the arrays in the folder ``source`` in ``target``, too: the same files, where the disk has such."""
    rmtree(target, ignore_errors=True)

    def linked(file: str, other: str) -> None:
        try:
            os.link(file, other)
        except OSError:
            copy2(file, other)

    copytree(source, target, copy_function=linked)
