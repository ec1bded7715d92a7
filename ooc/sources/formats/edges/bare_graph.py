# SPDX-License-Identifier: Apache-2.0
"""Graphs given as edges only, with ids of any kind, joined with the data of ``--features`` and ``--labels``.

``--edge-weight`` and ``--edge-features`` select columns beside the edges, or npy files in their order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ooc.errors import OptionError, SourceError
from ooc.sources.columns import EDGES, NODES, NodeTables, check_all_found
from ooc.sources.files.npy import NpyArray
from ooc.sources.labels import ClassNames
from ooc.sources.node_data import NONE, RANDOM, node_features, node_labels
from ooc.sources.numbered import NUMBERS, BareGraph, Ends, Nodes, Numbering
from ooc.sources.reading import COLUMNS, SPLIT, Request
from ooc.sources.source import EdgeBlock, RelationSource, Source, fingerprint_of, with_data

EDGE_OPTIONS = ("edge_weight", "edge_features")


@dataclass(frozen=True)
class EdgeColumns:
    """Names of the columns of an edge weight, if there is one, and of edge features."""

    weight: str | None = None
    features: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return self.features if self.weight is None else (self.weight, *self.features)


@dataclass(frozen=True)
class EdgeFiles:
    """Files with a row for each edge."""

    weight: NpyArray | None
    features: NpyArray | None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in (self.weight, self.features) if file is not None)

    @property
    def num_features(self) -> int:
        return self.features.shape[1] if self.features is not None else 0

    def joined(self, edges: Iterator[EdgeBlock], size: int) -> Iterator[EdgeBlock]:
        """Yield ``edges`` with their rows of the files; raise SourceError where the numbers of rows differ."""
        return with_data(
            edges,
            weight=(rows.reshape(-1) for rows in self.weight.row_blocks(size)) if self.weight is not None else None,
            features=self.features.row_blocks(size) if self.features is not None else None,
            name=" and ".join(str(path) for path in self.paths),
        )


def asks_for_edge_data(request: Request) -> bool:
    """Return whether the caller says which edge data to keep."""
    return any(request.option(option) is not None for option in EDGE_OPTIONS)


def asked_columns(request: Request, columns: tuple[str, ...], where: str) -> EdgeColumns:
    """Return those of ``columns`` that the request names; raise OptionError for a missing one."""
    weight, features = (
        tuple(name.strip() for name in text.split(",")) if text is not None and not _is_file(text) else ()
        for text in _asked_edge_data(request)
    )
    names = (*weight, *features)
    for name in names:
        if name not in columns:
            there = f"it has {', '.join(columns[:20])}" if columns else "there are none"
            raise OptionError(f"{where} has no column {name!r} beside its edges; {there}")
    if len(weight) > 1:
        raise OptionError(f"edge-weight {request.option('edge_weight')!r}: one column is wanted")
    if len(set(names)) < len(names):
        raise OptionError(f"edge-weight and edge-features name a column twice: {', '.join(names)}")
    return EdgeColumns(weight[0] if weight else None, features)


def edge_files(weight_path: Path | None, features_path: Path | None, *, num_edges: int | None) -> EdgeFiles:
    """Return the npy files at these paths; raise SourceError for another number of edges, if it is known."""
    weight, features = (NpyArray(path) if path is not None else None for path in (weight_path, features_path))
    if features is not None and (len(features.shape) != 2 or not features.shape[1]):
        raise SourceError(f"{features.name} has the shape {list(features.shape)}, not [edges, features]")
    if weight is not None and weight.shape not in (weight.shape[:1], (*weight.shape[:1], 1)):
        raise SourceError(f"{weight.name} has the shape {list(weight.shape)}, not one number for each edge")
    for file in (weight, features):
        if file is not None and num_edges is not None and file.shape[0] != num_edges:
            raise SourceError(f"{file.name} has {file.shape[0]} rows for {num_edges} edges")
    return EdgeFiles(weight, features)


def _asked_edge_data(request: Request) -> list[str | None]:
    """Return what is asked for as weight and as features."""
    found = [request.option(option) for option in EDGE_OPTIONS]
    for option, text in zip(EDGE_OPTIONS, found, strict=True):
        if text is not None and request.drop_edge_data:
            raise OptionError(f"drop_edge_data=True leaves out what {option}= asks for; give one of them")
    return found


def _is_file(text: str) -> bool:
    return text.endswith(".npy")


_LEAST_NODES, _MOST_NODES = 1, 2**32

NODE_OPTIONS = frozenset({"features", "labels", "task", "feature_columns", SPLIT, COLUMNS})
"""Options of any such graph about its nodes; ``EDGE_OPTIONS`` are about its edges."""


def _with_edge_files(graph: BareGraph, found: EdgeFiles) -> BareGraph:
    """Return ``graph`` with the edge data of separate npy files."""
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
    """Return the source of ``graph`` with the features and labels that ``request`` asks for.

    SourceError, with the remedy, where it asks for none, or their numbers of nodes differ.
    """
    paths = (Path(text) if text is not None and _is_file(text) else None for text in _asked_edge_data(request))
    graph = _with_edge_files(graph, edge_files(*paths, num_edges=graph.num_edges if graph.counted else None))
    texts = _asked_node_data(graph, request)
    tables = NodeTables(request, graph.held)
    for part, text in texts.items():
        if part not in request.arrays and not _is_no_file(text) and tables.has(Path(text)):
            tables.open(Path(text))
    edge_tables = ((EDGES, graph.table),) if graph.table is not None else ()
    check_all_found(request, (*((NODES, table) for table in tables.tables), *edge_tables))
    features = node_features(texts["features"], tables, request)
    labels = node_labels(graph.name, texts["labels"], tables, request)
    ids = tables.ids(graph.name)
    tables.check_used(graph.table)
    if features.table is None and (listed := request.option("feature_columns")) is not None:
        raise OptionError(f"feature_columns={listed} are columns of a table; features are {texts['features']}")
    held = bool(graph.held or request.arrays)
    files = [] if held else [Path(text) for text in texts.values() if not _is_no_file(text)]
    known = {count for count in (graph.num_nodes, features.rows, labels.rows) if count is not None}
    if len(known) > 1:
        raise SourceError(
            f"{graph.name}: edges, features and labels are of different numbers of nodes: {sorted(known)}"
        )
    nodes = known.pop() if known else None
    about = [table.rows_about for table in tables.tables] or [2 * graph.num_edges]
    fingerprint = {} if held or not graph.files else fingerprint_of(*graph.files, *files)
    notes = (*tables.notes(), *graph.notes, *labels.notes)

    def of(counts: Mapping[str, int], relations: Sequence[RelationSource], names: ClassNames) -> Source:
        nodes, (edges,) = counts[""], relations
        if not _LEAST_NODES <= nodes <= _MOST_NODES:
            raise SourceError(f"{graph.name} has {nodes} nodes, which cannot be converted")
        if not edges.num_edges and graph.num_nodes is None:
            raise SourceError(f"{graph.name} has no edge: it is empty, damaged or incomplete")
        return Source(
            name=graph.name,
            format=graph.format,
            num_nodes=nodes,
            **vars(edges),
            num_features=features.columns,
            feature_entries=features.entries,
            features=lambda size: features.blocks(nodes, size),
            labels=lambda size: labels.blocks(nodes, size, names),
            num_classes=len(names) or labels.num_classes,
            class_names=names,
            task=labels.task,
            unlabelled=labels.unlabelled,
            weight_unless_ones=graph.weight_unless_ones,
            symmetrize=graph.symmetrize,
            fingerprint=fingerprint,
            description={**texts, **({"split": labels.split} if labels.split else {})},
            notes=notes,
        )

    if graph.num_nodes is not None and ids is None and graph.counted and labels.class_names is None:
        return of({"": graph.num_nodes}, [graph.relation], ())
    numbering = Numbering(
        nodes={"": Nodes(ids=ids, table=features.table or labels.table, count=nodes)},
        edges=[("", "", graph)],
        class_names=labels.class_names,
        budget_bytes=request.budget_bytes,
    )
    most = min(_MOST_NODES, nodes or graph.said.get("nodes") or max(_LEAST_NODES, *about))
    return numbering.preparing(of({"": most}, [graph.relation], ()), "", of)


def _asked_node_data(graph: BareGraph, request: Request) -> dict[str, str]:
    """Return what ``features`` and ``labels`` are: names of files, or words as in options."""
    texts = {}
    for part, path, example in (
        ("features", graph.features, "random:COLUMNS, or none, to train an embedding"),
        ("labels", graph.labels, "random:CLASSES, or none, to train links"),
    ):
        text = request.option(part) or (str(path) if path is not None else None)
        if text is None and part in request.arrays:
            text = f"{part} from Python"
        if text is None:
            raise SourceError(
                f"{graph.name} has no {part} of its own; give {part}=FILE (npy, CSV, Parquet) or {example}"
            )
        texts[part] = text
    return texts


def _is_no_file(text: str) -> bool:
    """Return whether ``text`` means random or missing data instead of a file."""
    return text.startswith(RANDOM) or text == NONE
