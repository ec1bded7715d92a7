# SPDX-License-Identifier: Apache-2.0
"""Datasets as the ``ogb`` package lays them out: a folder, or the zip it is downloaded as, which stays packed.

The layout is that of ``ogb/nodeproppred/dataset.py``, ``ogb/io/read_graph_raw.py`` and ``master.csv`` of
https://github.com/snap-stanford/ogb, with ``split/KIND/`` beside ``raw/``:

Binary, ogbn-papers100M: ``raw/data.npz`` and ``raw/node-label.npz``. Every array is inflated once, except the edges'
sources, all of which lie before their targets. If the dataset's zip is deflated too, its layer is inflated once more to
find the arrays in data.npz, whose directory lies at its end. Positions that were reached are remembered.

Text, ogbn-products, ogbn-arxiv and ogbn-proteins: ``raw/*.csv.gz`` without headers. The kind of split tells which
dataset it is, and so, as in ``master.csv``, whether the file has each edge once for both directions. Then every edge is
followed by its reverse, as in ``read_csv_graph_raw``: nothing is dropped, and a self-loop comes twice. ogbn-proteins
has no node features; the species of each protein, one-hot in ascending order of the species' ids, stands in for them.
Its edges have features, which an edge's reverse shares.

Text without labels, ogbl-collab, -ppa, -citation2 and -ddi: the edges of ``raw/`` carry messages and are the links to
train; ``split/KIND/*.pt`` has the links (``ooc.Links.read``). ogbl-ddi has no node features.

Many graphs, ogbg-molhiv and the other molecules, and ogbg-ppa: the same text with ``graph-label.csv.gz``, one line per
graph, ends of edges as numbers within their graph, each edge once for both directions.

Heterogeneous, ogbn-mag (``read_csv_heterograph_raw``): ``raw/num-node-dict.csv.gz`` and
``raw/nodetype-has-label.csv.gz`` with a header of types, ``raw/triplet-type-list.csv.gz`` with an edge type per line,
``raw/relations/SOURCE___RELATION___TARGET/edge.csv.gz``, ``raw/node-feat/TYPE``, ``raw/node-label/TYPE``,
``split/KIND/TYPE/{train,valid,test}.csv.gz``. Types without ``node-feat`` have no features. Edges have one direction,
as published; the years of papers and the numbers of relations are not kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import Cells
from ooc.sources.files.dataset_files import DatasetFiles, holds_dataset
from ooc.sources.files.npy import NpyArray
from ooc.sources.files.zip_members import Archive
from ooc.sources.formats.many_graphs import graph_labels, graphs_source
from ooc.sources.labels import IndexSplits, LabelForm, in_splits, label_blocks, only_answers
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, EdgeData, RelationSource, Source, ranges, with_data
from ooc.sources.typed import nodes_alone, typed_source
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS, Task
from ooc.storage.types import EdgeType

# ---- text -----------------------------------------------------------------------------------------------------------


_MOST_TABLE_BYTES = 1 << 16


def edges_of(files: DatasetFiles, name: str, size: int) -> Iterator[EdgeBlock]:
    """Yield the edges whose ends are in the file ``name``, at most ``size`` at a time."""
    for ends in files.numbers(name, Cells.WHOLE, 2, size):
        yield EdgeBlock(ends[:, 0].copy(), ends[:, 1].copy())


def features_of(files: DatasetFiles, name: str, columns: int, size: int) -> Iterator[AnyArray]:
    """Yield the rows in the file ``name`` as float32 [n, columns], as ogb reads them."""
    for rows in files.numbers(name, Cells.REAL, columns, size):
        with np.errstate(over="ignore"):  # Becomes infinite, which is refused by whoever stores it.
            yield rows.astype(np.float32)


def splits_of(files: DatasetFiles, kind: str, nodes: int) -> IndexSplits:
    folder = f"split/{kind}"
    name = f"{folder}/split_dict.pt"
    if not files.has(name):
        listed = {split: numbers_of(files, f"{folder}/{split}.csv.gz", most=nodes) for split in SPLITS}
        return IndexSplits(listed, nodes=nodes, name=files.label(folder))
    return files.splits(name, nodes, needed=SPLITS)


def only_split(files: DatasetFiles) -> str:
    """Return the kind of split: the only folder in ``split``."""
    kinds = files.folders("split")
    if len(kinds) != 1:
        raise SourceError(f"{files.label('split')} holds {len(kinds)} kinds of split, not one")
    return kinds.pop()


def numbers_of(files: DatasetFiles, name: str, *, most: int) -> AnyArray:
    """Return the column of integers in the file ``name``, int64 [n]; raise SourceError for more than ``most``."""
    blocks = [np.empty(0, dtype=np.int64)]
    for block in files.numbers(name, Cells.WHOLE, 1):
        blocks.append(block[:, 0])
        most -= len(block)
        if most < 0:
            raise SourceError(f"{files.label(name)} lists more numbers than there can be")
    return np.concatenate(blocks)


def single_number(files: DatasetFiles, name: str) -> int:
    """Return the number in a file that lists one per graph, of a single graph."""
    numbers = numbers_of(files, name, most=1 << 16)
    if len(numbers) != 1:
        raise SourceError(f"{files.label(name)} lists {len(numbers)} graphs, not one")
    return int(numbers[0])


def small_table(files: DatasetFiles, name: str) -> list[list[str]]:
    """Return the cells of a small file, row by row."""
    label, text = files.label(name), b""
    for block in files.lines(name):
        text += block
        if len(text) > _MOST_TABLE_BYTES:
            raise SourceError(f"{label} is longer than a list of types can be")
    try:
        return [line.split(",") for line in text.decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise SourceError(f"{label} is no text") from error


# ---- types of nodes and edges ---------------------------------------------------------------------------------------


MARK = "raw/num-node-dict.csv.gz"
_LABELLED = "raw/nodetype-has-label.csv.gz"
_RELATIONS = "raw/triplet-type-list.csv.gz"
_ONE_WAY = "edges lead one way, as published; symmetrize=True adds their reverse"


def heterogeneous_source(files: DatasetFiles, request: Request) -> Source:
    """Return the graph in ``files``; its splits are held in memory, the rest is streamed."""
    told = _row(files, MARK)
    if wrong := [kind for kind, text in told.items() if not text.isdecimal()]:
        raise SourceError(f"{files.label(MARK)} says that there are {told[wrong[0]][:40]!r} nodes of type {wrong[0]!r}")
    counts = {kind: int(text) for kind, text in told.items()}
    labelled = [kind for kind, text in _row(files, _LABELLED).items() if text == "True"]
    if len(labelled) != 1 or labelled[0] not in counts:
        raise SourceError(f"{files.label(_LABELLED)} says that {len(labelled)} types of nodes have labels, not one")
    nodes = {kind: _nodes(files, kind, count) for kind, count in counts.items()}
    kind, relations = labelled[0], {}
    for cells in small_table(files, _RELATIONS):
        if len(cells) != 3:
            raise SourceError(f"{files.label(_RELATIONS)} has a line that is no SOURCE,RELATION,TARGET")
        where = f"raw/relations/{'___'.join(cells)}"
        count = single_number(files, f"{where}/num-edge-list.csv.gz")
        relations[EdgeType(*cells)] = _relation(files, where, count, request)
    split, label = f"{only_split(files)}/{kind}", f"raw/node-label/{kind}/node-label.csv.gz"
    splits, form = splits_of(files, split, counts[kind]), LabelForm(name=label, task=Task.CLASSES, width=None)

    source = replace(
        nodes.pop(kind),
        name=files.name,
        format="ogb",
        labels=lambda size: label_blocks(form, in_splits(files.numbers(label, Cells.REAL, 1, size), splits.masks)),
        resident_bytes=splits.nbytes,
        fingerprint=files.fingerprint("raw", "split"),
        description={"split": split},
        notes=(f"{files.name}: {_ONE_WAY}",),
    )
    return typed_source(source, kind, nodes, relations)


def _row(files: DatasetFiles, name: str) -> dict[str, str]:
    """Return the values by type in a file of two lines, types and values."""
    lines = small_table(files, name)
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        raise SourceError(f"{files.label(name)} has no header of types and one line below it")
    return dict(zip(*lines, strict=True))


def _nodes(files: DatasetFiles, kind: str, count: int) -> Source:
    """Return the nodes of one type; features are optional."""
    name, called = f"raw/node-feat/{kind}/node-feat.csv.gz", f"{files.name}'s {kind!r}"
    if not files.has(name):
        return nodes_alone(called, count)
    columns = files.columns(name)
    return nodes_alone(called, count, columns, lambda size: features_of(files, name, columns, size))


def _relation(
    files: DatasetFiles,
    where: str,
    count: int,
    request: Request,
    *,
    both_ways: bool = False,
    moved: Callable[[Iterator[EdgeBlock]], Iterator[EdgeBlock]] = lambda blocks: blocks,
) -> RelationSource:
    """Return the ``count`` edges of the folder ``where``, with weights and features if they have them.

    ``moved`` shifts their ends to the nodes' numbers; ``both_ways``: each is followed by its reverse.
    """
    ends, weights, features = (f"{where}/{name}.csv.gz" for name in ("edge", "edge_weight", "edge-feat"))
    weighted = files.has(weights) and not request.drop_edge_data
    columns = files.columns(features) if files.has(features) and not request.drop_edge_data else 0

    def edges(size: int) -> Iterator[EdgeBlock]:
        rows = max(1, size // (1 + both_ways))
        blocks = with_data(
            moved(edges_of(files, ends, rows)),
            weight=(part[:, 0] for part in files.numbers(weights, Cells.REAL, 1, rows)) if weighted else None,
            features=features_of(files, features, columns, rows) if columns else None,
            name=files.label(features if columns else weights),
        )
        return map(_with_reverse, blocks) if both_ways else blocks

    return RelationSource(count * (1 + both_ways), edges, weighted, columns)


# ---- one type, and many graphs --------------------------------------------------------------------------------------


_ADD_INVERSE_EDGE = frozenset(("sales_ranking", "species", "throughput", "target"))
"""The kinds of split of ogbn-products, ogbn-proteins, ogbl-ppa and ogbl-ddi, which list edges once for both
directions."""
_CSV_EDGES = "raw/edge.csv.gz"
_MARKS = ("raw/data.npz", _CSV_EDGES, MARK)
_LABELS = "raw/node-label.csv.gz"
_EDGE_WEIGHTS = "raw/edge_weight.csv.gz"
"""The file of weights, which only ogbl-collab has; it lists its edges once for both directions."""
_SPECIES = ("raw/node_species.csv.gz", "raw/species.csv.gz")
_MOST_SPECIES = 1 << 16
_MOST_GRAPHS = 1 << 32
_GRAPH_LABELS = "raw/graph-label.csv.gz"
_NPZ_EDGE_FEATURES = "edge_feat"


def _open(path: Path, request: Request) -> Source:
    files = DatasetFiles(path, _MARKS, request.budget_bytes)
    if files.has(MARK):
        return heterogeneous_source(files, request)
    if files.has(_GRAPH_LABELS):
        return _csv_graphs(files, request)
    return _binary_source(files, request) if files.has("raw/data.npz") else _csv_source(files, request)


def _binary_source(files: DatasetFiles, request: Request) -> Source:
    """Return the graph in ``files``; its splits are held in memory, the rest is streamed."""
    data, where = files.archive("raw/data.npz"), files.label("raw/data.npz")
    kept = files.archive("raw/node-label.npz")
    labels = NpyArray.find(kept, "node_label", files.label("raw/node-label.npz"))
    of_edges = [name.removesuffix(".npy") for name in data.names() if name.startswith("edge_")]
    others = [name for name in of_edges if name not in ("edge_index", _NPZ_EDGE_FEATURES)]
    if others and not request.drop_edge_data:
        what = f"{where} has {', '.join(others)}"
        raise SourceError(f"{what}, which cannot be used yet; give drop_edge_data=True to convert without it")
    taken = _NPZ_EDGE_FEATURES in of_edges and not request.drop_edge_data
    edges, features = (NpyArray.find(data, name, where) for name in ("edge_index", "node_feat"))
    edge_features = NpyArray.find(data, _NPZ_EDGE_FEATURES, where) if taken else None
    shape = (edges.num_edges(), 1) if edge_features is None else edge_features.shape
    if len(shape) != 2 or shape[0] != edges.num_edges() or not shape[1]:
        raise SourceError(f"{where}: edge_feat has the shape {list(shape)}, not [{edges.num_edges()} edges, features]")

    def edge_blocks(size: int) -> Iterator[EdgeBlock]:
        blocks = edges.edge_blocks(size)
        if edge_features is None:
            return blocks
        return with_data(blocks, features=edge_features.row_blocks(size), name=edge_features.name)

    nodes, num_features = features.matrix("[nodes, features]")
    labels.check_column(nodes)
    for name, count in (("num_nodes_list", nodes), ("num_edges_list", edges.num_edges())):
        _check_count(data, name, count, where)
    splits = splits_of(files, only_split(files), nodes)
    form = LabelForm(name=labels.name, task=Task.CLASSES, width=None)
    return Source(
        name=files.name,
        format="ogb",
        num_nodes=nodes,
        num_edges=edges.num_edges(),
        num_features=num_features,
        edges=edge_blocks,
        num_edge_features=0 if edge_features is None else edge_features.shape[1],
        features=features.row_blocks,
        labels=lambda size: label_blocks(form, in_splits(labels.values(size), splits.masks)),
        resident_bytes=splits.nbytes,
        fingerprint=files.fingerprint("raw", "split"),
    )


def _check_count(data: Archive, name: str, count: int, where: str) -> None:
    """Raise SourceError where the list ``name``, of one number per graph, does not hold just ``count``."""
    listed = NpyArray.find(data, name, where)
    if listed.shape != (1,):
        raise SourceError(f"{where}: {name} has the shape {list(listed.shape)}, one graph is wanted")
    found = int(next(listed.values(1))[0])
    if found != count:
        raise SourceError(f"{where}: {name} says {found}, the arrays have {count}")


def _csv_source(files: DatasetFiles, request: Request) -> Source:
    """Return the graph in ``files``; splits and species are held in memory, the rest is streamed."""
    nodes, listed_edges = (single_number(files, f"raw/num-{what}-list.csv.gz") for what in ("node", "edge"))
    if not 0 < nodes <= 2**32 or listed_edges < 0:
        raise SourceError(f"{files.label('raw')}: {nodes} nodes with {listed_edges} edges cannot be converted")
    kind = only_split(files)
    of_links = not files.has(_LABELS) and files.has(f"split/{kind}/train.pt")
    both_ways = kind in _ADD_INVERSE_EDGE or files.has(_EDGE_WEIGHTS)
    relation = _relation(files, "raw", listed_edges, request, both_ways=both_ways)
    splits = IndexSplits({}, nodes=nodes, name="") if of_links else splits_of(files, kind, nodes)
    tasks = 1 if of_links else files.columns(_LABELS)
    task, width = (Task.CLASSES, None) if tasks == 1 else (Task.MULTILABEL, tasks)
    form = LabelForm(name=files.label(_LABELS), task=task, width=width)
    features = _Features(files, may_be_none=of_links)
    notes = features.notes
    if of_links:
        notes += (f"{files.name} has links instead of labels: {files.label(f'split/{kind}')} is what --links takes",)

    def labels(size: int) -> Iterator[AnyArray]:
        if of_links:
            return (np.full((stop - start, 1), -1.0) for start, stop in ranges(nodes, size))
        return files.numbers(_LABELS, Cells.REAL, tasks, size)

    return Source(
        name=files.name,
        format="ogb",
        num_nodes=nodes,
        num_features=features.columns,
        num_classes=1 if of_links else form.width,
        task=form.task,
        unlabelled=of_links,
        **vars(relation),
        features=features.blocks,
        labels=lambda size: label_blocks(form, in_splits(labels(size), splits.masks)),
        resident_bytes=splits.nbytes,
        fingerprint=files.fingerprint("raw", "split"),
        description={"split": kind, **features.description},
        notes=notes,
    )


def _csv_graphs(files: DatasetFiles, request: Request) -> Source:
    """Return the graphs in ``files``; sizes and splits are held in memory, the rest is streamed."""
    sizes, listed = (numbers_of(files, f"raw/num-{what}-list.csv.gz", most=_MOST_GRAPHS) for what in ("node", "edge"))
    width, kind = files.columns(_GRAPH_LABELS), only_split(files)
    first, first_edge, total = np.cumsum(sizes) - sizes, np.cumsum(listed) - listed, int(listed.sum())

    labels = partial(files.numbers, _GRAPH_LABELS, Cells.REAL, width)

    def moved(blocks: Iterator[EdgeBlock]) -> Iterator[EdgeBlock]:
        done = 0
        for ends in blocks:
            graphs = np.searchsorted(first_edge, np.arange(done, done + len(ends.sources)), side="right") - 1
            if any(((side < 0) | (side >= sizes[graphs])).any() for side in (ends.sources, ends.targets)):
                raise SourceError(f"{files.label(_CSV_EDGES)}: an edge leaves its graph")
            yield EdgeBlock(ends.sources + first[graphs], ends.targets + first[graphs])
            done += len(graphs)

    relation = _relation(files, "raw", total, request, both_ways=True, moved=moved)
    features = _Features(files)
    whole = all(bool((np.isnan(y) | (y == np.trunc(y))).all()) for y in labels())
    label_type = np.dtype(np.int64 if whole and width == 1 else np.float64)
    form = graph_labels(files.name, width, label_type, request, lambda: only_answers(labels()))
    folder = f"split/{kind}"
    return graphs_source(
        name=files.name,
        format="ogb",
        sizes=sizes,
        values=labels,
        form=form,
        request=request,
        splits={split: numbers_of(files, f"{folder}/{split}.csv.gz", most=len(sizes)) for split in SPLITS},
        **vars(relation),
        num_features=features.columns,
        features=features.blocks,
        fingerprint=files.fingerprint("raw", "split"),
    )


class _Features:
    """The rows of ``node-feat.csv.gz``, or the one-hot species where there is no such file."""

    def __init__(self, files: DatasetFiles, *, may_be_none: bool = False) -> None:
        self._files = files
        self.description: dict[str, str] = {}
        self.notes: tuple[str, ...] = ()
        self._name = "raw/node-feat.csv.gz"
        self._species: AnyArray | None = None
        if files.has(self._name):
            self.columns = files.columns(self._name)
            return
        found = [name for name in _SPECIES if files.has(name)]
        if not found and may_be_none:
            self.columns = 0
            self.notes = (f"{files.name} has no node features; train an embedding of its nodes",)
            return
        if not found:
            raise SourceError(f"{files.name} has no node features ({files.label(self._name)} is missing)")
        self._name = found[0]
        self._species = np.unique(np.concatenate([np.unique(block) for block in self._ids()]))
        self.columns = len(self._species)
        if self.columns > _MOST_SPECIES:
            raise SourceError(f"{files.label(self._name)} names {self.columns} species, which cannot be features")
        self.description = {"features": f"one-hot of {self._name}"}
        self.notes = (f"{files.name} has no node features: the {self.columns} species, one-hot, stand in for them",)

    def blocks(self, size: int) -> Iterator[AnyArray]:
        """Yield float32 [n, columns], as ogb reads them."""
        if self._species is None:
            yield from features_of(self._files, self._name, self.columns, size)
            return
        for ids in self._ids(size=size):
            yield (ids == self._species).astype(np.float32)

    def _ids(self, **size: int) -> Iterator[AnyArray]:
        return self._files.numbers(self._name, Cells.WHOLE, 1, **size)


def _with_reverse(block: EdgeBlock) -> EdgeBlock:
    """Return each edge followed by its reverse, which has the same data."""
    pairs = np.stack([block.sources, block.targets], axis=1)
    twice = (None if values is None else values.repeat(2, axis=0) for values in block.data)
    return EdgeBlock(pairs.reshape(-1), pairs[:, ::-1].reshape(-1), EdgeData(*twice))


READER = Reader(
    needs="an ogbn, ogbl or ogbg dataset's folder or .zip, as ogb downloads it (raw/data.npz or raw/*.csv.gz, split/)",
    folder=None,
    recognises=lambda path: holds_dataset(path, _MARKS),
    open=_open,
)
