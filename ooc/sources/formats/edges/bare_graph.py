# SPDX-License-Identifier: Apache-2.0
"""Graphs that come as edges alone, with ids of any kind, joined with what ``--features`` and ``--labels`` say."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ooc.errors import SourceError
from ooc.events import Listener
from ooc.sources.columns import EDGES, NODES, NodeTables, check_all_found
from ooc.sources.edge_options import EdgeFiles, asked_files
from ooc.sources.node_data import NONE, RANDOM, node_features, node_labels
from ooc.sources.numbered import NUMBERS, BareGraph, Ends, Nodes, Numbering
from ooc.sources.reading import COLUMNS, SPLIT, Request
from ooc.sources.source import EdgeBlock, Source, fingerprint_of

_LEAST_NODES, _MOST_NODES = 1, 2**32

NODE_OPTIONS = frozenset({"features", "labels", "task", "feature_columns", SPLIT, COLUMNS})
"""What any such graph takes of nodes; ``EDGE_OPTIONS`` are those of edges."""


def _with_edge_files(graph: BareGraph, found: EdgeFiles) -> BareGraph:
    """``graph`` with what its edges have in npy files of their own besides."""
    if not found.paths:
        return graph
    if (graph.has_edge_weight and found.weight) or (graph.num_edge_features and found.features):
        raise SourceError(f"{graph.name} has edge data of its own; {found.paths[0]} would replace it")

    def edges(size: int, *, ids: Ends = NUMBERS, data: bool = True) -> Iterator[EdgeBlock]:
        blocks = graph.edges(size, ids=ids, data=data)
        return found.joined(blocks, size) if data else blocks

    return replace(
        graph,
        files=(*graph.files, *found.paths),
        edges=edges,
        has_edge_weight=graph.has_edge_weight or found.weight is not None,
        num_edge_features=graph.num_edge_features or found.num_features,
    )


def bare_source(graph: BareGraph, request: Request) -> Source:
    """The source of ``graph`` with the features and labels that ``request`` asks for.

    SourceError, with the remedy, where it asks for none, or for those of another number of nodes.
    """
    graph = _with_edge_files(graph, asked_files(request, graph.num_edges if graph.counted else None))
    texts = {}
    for part, path, example in (
        ("features", graph.features, "random:COLUMNS, or none, to train an embedding"),
        ("labels", graph.labels, "random:CLASSES"),
    ):
        text = request.option(part) or (str(path) if path is not None else None)
        if text is None and part in request.arrays:
            text = f"{part} from Python"
        if text is None:
            raise SourceError(
                f"{graph.name} has no {part} of its own; give {part}=FILE (npy, CSV, Parquet) or {example}"
            )
        texts[part] = text
    tables = NodeTables(request, graph.held)
    for part, text in texts.items():
        if part not in request.arrays and not _is_no_file(part, text) and tables.has(Path(text)):
            tables.open(Path(text))
    edge_tables = ((EDGES, graph.table),) if graph.table is not None else ()
    check_all_found(request, (*((NODES, table) for table in tables.tables), *edge_tables))
    features = node_features(texts["features"], tables, request)
    labels = node_labels(graph.name, texts["labels"], tables, request)
    ids = tables.ids(graph.name)
    held = bool(graph.held or request.arrays)
    files = [] if held else [Path(text) for part, text in texts.items() if not _is_no_file(part, text)]
    known = {count for count in (graph.num_nodes, features.rows, labels.rows) if count is not None}
    if len(known) > 1:
        raise SourceError(
            f"{graph.name}: edges, features and labels are of different numbers of nodes: {sorted(known)}"
        )
    nodes = known.pop() if known else None
    about = [table.rows_about for table in tables.tables] or [min(2 * graph.num_edges, _MOST_NODES)]
    source = Source(
        name=graph.name,
        format=graph.format,
        num_nodes=nodes or graph.said.get("nodes") or max(_LEAST_NODES, *about),
        num_edges=graph.num_edges,
        num_features=features.columns,
        feature_entries=features.entries,
        num_classes=labels.num_classes,
        task=labels.task,
        edges=graph.edges,
        has_edge_weight=graph.has_edge_weight,
        num_edge_features=graph.num_edge_features,
        weight_unless_ones=graph.weight_unless_ones,
        features=lambda size: features.blocks(0, size),
        labels=lambda size: labels.blocks(0, size, ()),
        symmetrize=graph.symmetrize,
        fingerprint={} if held or not graph.files else fingerprint_of(*graph.files, *files),
        description={"features": texts["features"], "labels": texts["labels"]}
        | ({"split": labels.split} if labels.split else {}),
        notes=(*tables.notes(), *graph.notes, *labels.notes),
    )

    def of(nodes: int, edges: int, names: tuple[str, ...]) -> Source:
        """The source of so many nodes and edges, and classes of these names."""
        if not _LEAST_NODES <= nodes <= _MOST_NODES:
            raise SourceError(f"{graph.name} has {nodes} nodes, which cannot be converted")
        return replace(
            source,
            num_nodes=nodes,
            num_edges=edges,
            features=lambda size: features.blocks(nodes, size),
            labels=lambda size: labels.blocks(nodes, size, names),
            num_classes=len(names) or source.num_classes,
            class_names=names,
        )

    if graph.num_nodes is not None and ids is None and graph.counted and labels.class_names is None:
        return of(graph.num_nodes, graph.num_edges, ())
    numbering = Numbering(
        nodes={"": Nodes(ids=ids, table=features.table or labels.table, count=nodes)},
        edges=[("", "", graph)],
        class_names=labels.class_names,
        budget_bytes=request.budget_bytes,
    )

    def prepare(folder: Path, listener: Listener) -> Source:
        counts = numbering.counts(folder, listener)
        if not counts["edges"][0]:
            raise SourceError(f"{graph.name} has no edge: it is empty, damaged or incomplete")
        found, width = numbering.ids("", folder, counts)
        edges = numbering.between_nodes(0, folder, counts)
        counted = of(counts["nodes"][""]["nodes"], counts["edges"][0], tuple(counts["class_names"]))
        return replace(counted, edges=edges, ids=found, id_bytes=width)

    bytes_there = 16 * source.num_nodes + 8 * source.num_edges
    return replace(source, prepare=prepare, prepare_bytes=bytes_there)


def _is_no_file(part: str, text: str) -> bool:
    """Whether what is asked for is made up, or nothing."""
    return text.startswith(RANDOM) or (part == "features" and text == NONE)
