# SPDX-License-Identifier: Apache-2.0
"""MAG240M's papers and citations, or all types of nodes and edges: the folder ``mag240m_kddcup2021`` of ``ogb.lsc``, or
its zip.

Layout as in ``ogb/lsc/mag240m.py`` of https://github.com/snap-stanford/ogb. The labels of the test papers are not
published (NaN); papers without a label are left out of the test split. No features of authors and institutions are
published; a user may put them beside those of papers, as ``processed/author/node_feat.npy``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ooc.errors import SourceError
from ooc.sources.files.dataset_files import DatasetFiles, holds_dataset
from ooc.sources.files.pickles import read_torch_dict
from ooc.sources.labels import LabelForm, in_splits, label_blocks
from ooc.sources.reading import Reader, Request
from ooc.sources.source import LabelBlock, Source
from ooc.sources.typed import TYPES, asks_for_types, nodes_in, relation_in, typed_source
from ooc.storage.store import Task
from ooc.storage.types import EdgeType

_EDGES = "processed/paper___cites___paper/edge_index.npy"
_FEATURES = "processed/paper/node_feat.npy"
_LABELS = "processed/paper/node_label.npy"
_META, _SPLITS = "meta.pt", "split_dict.pt"
_OTHERS = ("author", "institution")
_RELATIONS = (
    EdgeType("author", "affiliated_with", "institution"),
    EdgeType("author", "writes", "paper"),
    EdgeType("paper", "cites", "paper"),
)
_NOTE = "the test papers' labels are not published: papers without one are left out of the test split"


def _open(path: Path, request: Request) -> Source:
    """Return the papers in the folder or zip ``path``; the splits are held in memory, the rest is streamed."""
    files = DatasetFiles(path, (_EDGES,), request.budget_bytes)
    features, edges, labels = (files.array(name) for name in (_FEATURES, _EDGES, _LABELS))
    nodes, num_features = features.matrix("[papers, features]")
    meta = files.blob(_META)
    counts = read_torch_dict(meta)
    if counts.get("paper") != nodes:
        raise SourceError(f"{meta.name} counts {counts.get('paper')} papers, {features.name} has {nodes} rows")
    classes = counts.get("num_classes")
    labels.check_column(nodes)
    splits = files.splits(_SPLITS, nodes, needed=("train", "valid"))
    form = LabelForm(name=labels.name, task=Task.CLASSES, width=None)

    def blocks(size: int) -> Iterator[LabelBlock]:
        for block in label_blocks(form, in_splits(labels.values(size), splits.masks)):
            yield block._replace(test=block.test & (block.y >= 0))

    source = Source(
        name="mag240m",
        format="mag240m",
        num_nodes=nodes,
        num_edges=edges.num_edges(),
        num_features=num_features,
        num_classes=classes if isinstance(classes, int) and classes > 0 else None,
        edges=edges.edge_blocks,
        features=features.row_blocks,
        labels=blocks,
        resident_bytes=splits.nbytes,
        fingerprint=files.fingerprint(_EDGES, _FEATURES, _LABELS, _META, _SPLITS),
        description={"split": _NOTE},
        notes=(f"mag240m: {_NOTE}",),
    )
    return _typed_graph(files, source, counts) if asks_for_types(request) else source


def _typed_graph(files: DatasetFiles, papers: Source, counts: Mapping[str, Any]) -> Source:
    """Return all types of nodes and edges in the folder."""
    others, edges = {}, {}
    for kind in _OTHERS:
        if type(count := counts.get(kind)) is not int:
            raise SourceError(f"{files.label(_META)} does not count nodes of type {kind!r}")
        name = f"processed/{kind}/node_feat.npy"
        others[kind] = nodes_in(kind, files.array(name) if files.has(name) else None, count)
    for relation in _RELATIONS:
        edges[relation] = relation_in(files.array(f"processed/{'___'.join(relation)}/edge_index.npy"))
    papers = replace(papers, fingerprint=files.fingerprint("processed", _META, _SPLITS))
    return typed_source(papers, "paper", others, edges)


READER = Reader(
    needs="the folder mag240m_kddcup2021, or its .zip (processed/paper, processed/paper___cites___paper, *.pt)",
    folder=None,
    recognises=lambda path: holds_dataset(path, (_EDGES,)),
    open=_open,
    takes=frozenset((TYPES,)),
)
