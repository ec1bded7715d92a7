# SPDX-License-Identifier: Apache-2.0
"""ogbn-mag, whose nodes and edges are of several types, as ``ogb`` lays it out (``read_csv_heterograph_raw`` in
``ogb/io/read_graph_raw.py`` of https://github.com/snap-stanford/ogb), a folder or its zip:

``raw/num-node-dict.csv.gz`` and ``raw/nodetype-has-label.csv.gz`` with a header of types,
``raw/triplet-type-list.csv.gz`` with a type of edges a line, ``raw/relations/SOURCE___RELATION___TARGET/edge.csv.gz``,
``raw/node-feat/TYPE``, ``raw/node-label/TYPE``, ``split/KIND/TYPE/{train,valid,test}.csv.gz``. Types without
``node-feat`` have no features. Edges lead one way, as published; the years of papers and the numbers of relations are
not kept.
"""

from collections.abc import Iterator

from ooc.errors import SourceError
from ooc.sources.files.dataset_files import DatasetFiles
from ooc.sources.files.lines import Kind
from ooc.sources.formats.ogb_text import (
    columns_of,
    edges_of,
    features_of,
    only_split,
    pieces,
    read_numbers,
    single_number,
    small_table,
    splits_of,
)
from ooc.sources.labels import LabelForm, label_blocks
from ooc.sources.reading import Request
from ooc.sources.source import EdgeBlock, RelationSource, Source, with_data
from ooc.sources.typed import nodes_alone, typed_source
from ooc.storage.array import AnyArray
from ooc.storage.store import Task
from ooc.storage.types import EdgeType

MARK = "raw/num-node-dict.csv.gz"
_LABELLED = "raw/nodetype-has-label.csv.gz"
_RELATIONS = "raw/triplet-type-list.csv.gz"
_ONE_WAY = "edges lead one way, as published; symmetrize=True adds their reverse"


def heterogeneous_source(files: DatasetFiles, request: Request) -> Source:
    """The graph in ``files``; its splits are held in memory, the rest is streamed."""
    counts = {kind: _count(files, kind, text) for kind, text in _row(files, MARK).items()}
    labelled = [kind for kind, text in _row(files, _LABELLED).items() if text == "True"]
    if len(labelled) != 1 or labelled[0] not in counts:
        raise SourceError(f"{files.label(_LABELLED)} says that {len(labelled)} types of nodes have labels, not one")
    nodes = {kind: _nodes(files, kind, count) for kind, count in counts.items()}
    kind, relations = labelled[0], {}
    for cells in small_table(files, _RELATIONS):
        if len(cells) != 3:
            raise SourceError(f"{files.label(_RELATIONS)} has a line that is no SOURCE,RELATION,TARGET")
        relations[EdgeType(*cells)] = _relation(files, "___".join(cells), request)
    split, label = f"{only_split(files)}/{kind}", f"raw/node-label/{kind}/node-label.csv.gz"
    splits, form = splits_of(files, split, counts[kind]), LabelForm(name=label, task=Task.CLASSES, width=None)

    def labels(size: int) -> Iterator[AnyArray]:
        return pieces(read_numbers(files, label, Kind.CSV_REAL, 1, counts[kind]), size)

    alone = nodes.pop(kind)
    source = Source(
        name=files.name,
        format="ogb",
        num_nodes=alone.num_nodes,
        num_edges=0,
        num_features=alone.num_features,
        num_classes=None,
        edges=alone.edges,
        features=alone.features,
        labels=lambda size: label_blocks(form, splits.joined(labels(size))),
        resident_bytes=splits.nbytes,
        fingerprint=files.fingerprint("raw", "split"),
        description={"split": split},
        notes=(f"{files.name}: {_ONE_WAY}",),
    )
    return typed_source(source, kind, nodes, relations)


def _row(files: DatasetFiles, name: str) -> dict[str, str]:
    """What a file of two lines says of each type."""
    lines = small_table(files, name)
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        raise SourceError(f"{files.label(name)} has no header of types and one line below it")
    return dict(zip(*lines, strict=True))


def _count(files: DatasetFiles, kind: str, text: str) -> int:
    if not text.isdecimal():
        raise SourceError(f"{files.label(MARK)} says that there are {text[:40]!r} nodes of type {kind!r}")
    return int(text)


def _nodes(files: DatasetFiles, kind: str, count: int) -> Source:
    """The nodes of one type, with features or none."""
    name, called = f"raw/node-feat/{kind}/node-feat.csv.gz", f"{files.name}'s {kind!r}"
    if not files.has(name):
        return nodes_alone(called, count)
    columns = columns_of(files, name)
    return nodes_alone(called, count, columns, lambda size: features_of(files, name, columns, count, size))


def _relation(files: DatasetFiles, folder: str, request: Request) -> RelationSource:
    """The edges of one type, with features where they have such."""
    where = f"raw/relations/{folder}"
    count = single_number(files, f"{where}/num-edge-list.csv.gz")
    name = f"{where}/edge-feat.csv.gz"
    columns = columns_of(files, name) if files.has(name) and not request.drop_edge_data else 0

    def edges(size: int) -> Iterator[EdgeBlock]:
        blocks = edges_of(files, f"{where}/edge.csv.gz", count, size)
        rows = features_of(files, name, columns, count, size) if columns else None
        return with_data(blocks, features=rows, name=files.label(name))

    return RelationSource(count, edges, num_edge_features=columns)
