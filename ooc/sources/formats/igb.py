# SPDX-License-Identifier: Apache-2.0
"""IGB: a folder tiny, small, medium, large or full with ``processed/paper`` and its citations; or all types of nodes
and edges, where they are there (IGBH).

Layout, counts and splits as in ``igb/dataloader.py`` of https://github.com/IllinoisGraphBenchmark/IGB-Datasets.
Features and labels of large and full have no npy header despite their name: float32 in a file whose size must match the
known number of papers. In full only the first papers have a label. The loader removes self-loops and adds one to each
node. Here edges are converted as they are; ``--self-loops`` and the models may do that. Authors, institutes and fields
of study have features if their ``node_feat.npy`` exists. Without it, their number is that of the ids in edges.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.npy import MAGIC, NpyArray
from ooc.sources.labels import whole_labels
from ooc.sources.reading import Reader, Request
from ooc.sources.source import Ids, LabelBlock, RelationSource, Source, fingerprint_of, ranges
from ooc.sources.typed import TYPES, asks_for_types, nodes_in, relation_in, typed_source
from ooc.storage.types import EdgeType
from ooc.suggestions import check_choice

LABEL = "label"
_EDGES = "processed/paper__cites__paper/edge_index.npy"
_FEATURES = "processed/paper/node_feat.npy"
_LABELS = {"19": "processed/paper/node_label_19.npy", "2K": "processed/paper/node_label_2K.npy"}
_NUM_CLASSES = {"19": 19, "2K": 2983}
_NUM_FEATURES = 1024
_RAW = np.dtype("<f4")
_PAPERS = {"large": 100_000_000, "full": 269_346_174}
_OTHERS = ("author", "institute", "fos")
_RELATIONS = (
    EdgeType("paper", "written_by", "author"),
    EdgeType("author", "affiliated_to", "institute"),
    EdgeType("paper", "topic", "fos"),
)
_LABELLED_OF_FULL = {"19": 227_130_858, "2K": 157_675_969}
"""How many of the first papers of full have a label, by the kind of label."""


def igb_source(path: Path, request: Request) -> Source:
    """Return the papers in the folder ``path``, read in blocks; nothing is held in memory."""
    kind = request.option(LABEL) or "19"
    check_choice("label", kind, _LABELS)
    features = _array(path / _FEATURES, (_NUM_FEATURES,))
    nodes, num_features = features.matrix("[papers, features]")
    size = path.resolve().name
    published, usual = nodes == _PAPERS["full"], _PAPERS.get(size, nodes)
    full = published or size == "full"
    least = _LABELLED_OF_FULL[kind] if published else 1
    labels = _open_labels(path / _LABELS[kind], nodes, prefix=full, least=least)
    edges = NpyArray(path / _EDGES)
    labelled = least if published else labels.shape[0]
    train, valid = int(labelled * 0.6), int(labelled * 0.2)

    def label_blocks(rows: int) -> Iterator[LabelBlock]:
        for start, stop in ranges(nodes, rows):
            row: Ids = np.arange(start, stop)
            y = np.full(stop - start, -1, dtype=np.int64)
            known = max(0, min(stop, labelled) - start)
            if known:
                y[:known] = whole_labels(labels.rows(start, start + known).reshape(-1), start, labels.name)
            tested = (row >= train + valid) & (row < labelled)
            yield LabelBlock(y, row < train, (row >= train) & (row < train + valid), tested)

    source = Source(
        name=f"igb-{size}",
        format="igb",
        num_nodes=nodes,
        num_edges=edges.num_edges(preferred=1),
        num_features=num_features,
        num_classes=_NUM_CLASSES[kind],
        edges=lambda size: edges.edge_blocks(size, preferred=1),
        features=features.row_blocks,
        labels=label_blocks,
        fingerprint=fingerprint_of(*(path / name for name in (_FEATURES, _EDGES, _LABELS[kind]))),
        description={LABEL: kind, "split": f"60 %, 20 % and the rest of the first {labelled} papers, in order"},
        notes=(f"{path} has {nodes} papers; the published {size} has {usual}",) if nodes != usual else (),
    )
    return _typed_graph(path, source, edges) if asks_for_types(request) else source


def _typed_graph(path: Path, papers: Source, cites: NpyArray) -> Source:
    """Return all types of nodes and edges in the folder."""
    processed, edges = path / "processed", {EdgeType("paper", "cites", "paper"): relation_in(cites, 1)}
    ends: dict[str, int] = {}
    files = [path / _FEATURES, path / _EDGES]
    for relation in _RELATIONS:
        files.append(processed / relation.folder / "edge_index.npy")
        array = NpyArray(files[-1])
        edges[relation] = relation_in(array, 1)
        for kind, axis in ((relation.source, 0), (relation.target, 1)):
            if kind != "paper" and not (processed / kind / "node_feat.npy").is_file():
                ends[kind] = max(ends.get(kind, 0), _largest_id(edges[relation], axis) + 1)
    others = {}
    for kind in _OTHERS:
        features = _array(processed / kind / "node_feat.npy", (_NUM_FEATURES,)) if kind not in ends else None
        others[kind] = nodes_in(kind, features, ends[kind] if features is None else features.shape[0])
        files += [] if features is None else [features.path]
    papers = replace(papers, fingerprint=papers.fingerprint | fingerprint_of(*files))
    return typed_source(papers, "paper", others, edges)


def _largest_id(edges: RelationSource, axis: int) -> int:
    """Return the largest id among the sources (0) or targets (1)."""
    ends = ((block.sources, block.targets)[axis] for block in edges.edges(1 << 18))
    return max((int(ids.max()) for ids in ends if len(ids)), default=0)


def _open_labels(path: Path, nodes: int, *, prefix: bool, least: int) -> NpyArray:
    """Return the labels of all papers; with ``prefix``, of at least the ``least`` first ones, [n] or [n, 1]."""
    labels = _array(path, ())
    rows = labels.shape[0] if len(labels.shape) in (1, 2) else 0
    fits = least <= rows <= nodes if prefix else rows == nodes
    if labels.shape not in ((rows,), (rows, 1)) or not fits:
        wanted = f"{least} to {nodes}" if prefix else str(nodes)
        raise SourceError(f"{path} has the shape {list(labels.shape)}, the labels of {wanted} papers wanted")
    return labels


def _array(path: Path, columns: tuple[int, ...]) -> NpyArray:
    """Return the array in the file, which has a header or is rows of ``columns`` float32 values."""
    if not path.is_file():
        raise SourceError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return NpyArray(path)
    rows, left = divmod(size, prod(columns) * _RAW.itemsize)
    if left:
        raise SourceError(f"{path} has {size} bytes, which are no whole rows of {prod(columns)} float32 values")
    return NpyArray(path, raw=((rows, *columns), _RAW))


READER = Reader(
    needs="one of IGB's folders tiny, small, medium, large, full (processed/paper, processed/paper__cites__paper)",
    folder=True,
    recognises=lambda path: (path / _EDGES).is_file(),
    open=igb_source,
    takes=frozenset((LABEL, TYPES)),
)
