# SPDX-License-Identifier: Apache-2.0
"""Heterogeneous graphs, assembled from the nodes and edges of each type."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ooc.errors import SourceError
from ooc.sources.files.npy import NpyArray
from ooc.sources.reading import Request
from ooc.sources.source import RelationSource, Source, SourceTypes, nothing
from ooc.storage.array import AnyArray
from ooc.storage.sparse_array import Entries
from ooc.storage.types import EdgeType
from ooc.suggestions import check_choice

Rows = Callable[[int], Iterator[AnyArray | Entries]]
TYPES = "types"
_NAME = re.compile(r"\w[\w .+-]*")


def nodes_alone(name: str, num_nodes: int, num_features: int = 0, features: Rows = nothing) -> Source:
    """Return the nodes of a type without labels; ``features`` are optional."""
    if not 0 < num_nodes <= 2**32:
        raise SourceError(f"{name}: {num_nodes} nodes cannot be converted")
    return Source(name=name, num_nodes=num_nodes, num_features=num_features, features=features)


def typed_source(
    source: Source, labelled: str, others: Mapping[str, Source], edges: Mapping[EdgeType, RelationSource]
) -> Source:
    """Return the graph of the nodes of ``source``, of type ``labelled``, ``others`` by type, and ``edges`` by type.

    SourceError where a type cannot be the name of a folder, or edges lead to a missing node type.
    """
    nodes = {labelled: source, **others}
    if wrong := [kind for kind in nodes if not _NAME.fullmatch(kind)]:
        raise SourceError(f"{source.name}: the node type {wrong[0]!r} cannot be the name of a folder; rename it")
    taken: set[str] = set()
    for kind in edges:
        if kind.folder.lower() in taken or not _NAME.fullmatch(kind.relation):
            raise SourceError(f"{source.name}: the edge type {tuple(kind)} cannot be the name of a folder; rename it")
        if missing := [end for end in (kind.source, kind.target) if end not in nodes]:
            raise SourceError(
                f"{source.name}: there are no nodes {missing[0]!r}, which the edges {tuple(kind)} lead to"
            )
        taken.add(kind.folder.lower())
    count = sum(one.num_edges for one in edges.values())
    return replace(source, num_edges=count, types=SourceTypes(nodes, edges, labelled))


def nodes_in(name: str, array: NpyArray | None, num_nodes: int) -> Source:
    """Return the nodes of a type without labels, with the features in ``array``, if there is one."""
    if array is None:
        return nodes_alone(name, num_nodes)
    rows, columns = array.matrix("[nodes, features]")
    if rows != num_nodes:
        raise SourceError(f"{array.name} has {rows} rows for {num_nodes} nodes")
    return nodes_alone(name, rows, columns, array.row_blocks)


def relation_in(array: NpyArray, preferred: int = 0) -> RelationSource:
    """Return the edges in ``array``, [2, E] or [E, 2]; where the shape is ambiguous, the ends are along axis
    ``preferred``."""
    return RelationSource(array.num_edges(preferred), lambda size: array.edge_blocks(size, preferred=preferred))


def asks_for_types(request: Request) -> bool:
    """Return whether all types of nodes and edges are asked for, instead of papers and citations only."""
    asked = request.option(TYPES) or "papers"
    check_choice(TYPES, asked, ("papers", "all"))
    return asked == "all"
