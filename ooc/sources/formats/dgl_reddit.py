# SPDX-License-Identifier: Apache-2.0
"""Reddit as DGL and PyG download it: ``reddit_data.npz`` and ``reddit_graph.npz``, in a folder or still in reddit.zip.

Layout as in ``python/dgl/data/reddit.py`` of https://github.com/dmlc/dgl: the first holds ``feature``, ``label``
and ``node_types`` (1, 2, 3: train, validation, test), the second the adjacency matrix as ``scipy.sparse.save_npz``
writes a COO matrix. Its values are all 1 and are not read; each edge is there both ways.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.npy import PackedArray
from ooc.sources.files.streams import FileBlob
from ooc.sources.files.zip_members import Archive
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, LabelBlock, Source, fingerprint_of
from ooc.sources.splits import whole_labels
from ooc.storage.array import AnyArray

_DATA = "reddit_data.npz"
_GRAPHS = ("reddit_graph.npz", "reddit_self_loop_graph.npz")
_TRAIN, _VALID, _TEST = 1, 2, 3


def _open(path: Path, request: Request) -> Source:
    data, graph, files = _archives(path)
    x, y, kinds = (PackedArray.find(data, name, f"{path}: {_DATA}") for name in ("feature", "label", "node_types"))
    sources, targets = (PackedArray.find(graph, name, f"{path}: the graph") for name in ("row", "col"))
    nodes, features = x.matrix("[nodes, features]")
    for array in (y, kinds):
        if array.shape not in ((nodes,), (nodes, 1)):
            raise SourceError(
                f"{array.name} has the shape {list(array.shape)}, an entry for each of {nodes} nodes wanted"
            )
    if len(sources.shape) != 1 or sources.shape != targets.shape:
        raise SourceError(f"{sources.name} and {targets.name} are not of one length")
    for array in (sources, targets, kinds):
        if array.dtype.kind not in "iu":
            raise SourceError(f"{array.name} holds {array.dtype}, not whole numbers")
    _check_shape(graph, nodes, path)

    def edges(size: int) -> Iterator[EdgeBlock]:
        for first, second in zip(sources.values(size), targets.values(size), strict=True):
            yield EdgeBlock(first.astype(np.int64), second.astype(np.int64))

    def labels(size: int) -> Iterator[LabelBlock]:
        row = 0
        for values, types in zip(y.values(size), kinds.values(size), strict=True):
            if (wrong := (types < _TRAIN) | (types > _TEST)).any():
                at = int(wrong.argmax())
                raise SourceError(f"{kinds.name}: node {row + at} is of the type {types[at]}; 1, 2 and 3 are splits")
            yield LabelBlock(whole_labels(values, row, y.name), types == _TRAIN, types == _VALID, types == _TEST)
            row += len(values)

    return Source(
        name="reddit",
        format="dgl-reddit",
        num_nodes=nodes,
        num_edges=sources.shape[0],
        num_features=features,
        num_classes=None,
        edges=edges,
        features=x.row_blocks,
        labels=labels,
        fingerprint=fingerprint_of(*files),
    )


def _archives(path: Path) -> tuple[Archive, Archive, list[Path]]:
    """The npz files of data and graph, and which files they are in."""
    if path.is_dir():
        graph = next((path / name for name in _GRAPHS if (path / name).is_file()), None)
        if graph is None or not (path / _DATA).is_file():
            raise SourceError(f"{path} lacks {_DATA} or {_GRAPHS[0]}")
        return Archive(FileBlob(path / _DATA)), Archive(FileBlob(graph)), [path / _DATA, graph]
    outer = Archive(FileBlob(path))
    found = []
    for wanted in ((_DATA,), _GRAPHS):
        name = next((name for name in outer.names() if name.rpartition("/")[2] in wanted), None)
        member = outer.member(name) if name is not None else None
        if member is None:
            raise SourceError(f"{path} holds no {wanted[0]}")
        found.append(Archive(member.blob()))
    return found[0], found[1], [path]


def _check_shape(graph: Archive, nodes: int, path: Path) -> None:
    shape = PackedArray.find(graph, "shape", f"{path}: the graph")
    found: list[AnyArray] = list(shape.values(2))
    if shape.shape != (2,) or found[0].tolist() != [nodes, nodes]:
        raise SourceError(f"{shape.name} is not that of a graph of {nodes} nodes")


def _recognises(path: Path) -> bool:
    if path.is_dir():
        return (path / _DATA).is_file()
    return path.suffix == ".zip" and any(name.rpartition("/")[2] == _DATA for name in Archive(FileBlob(path)).names())


READER = Reader(
    needs="folder of reddit_data.npz and reddit_graph.npz, or reddit.zip",
    folder=None,
    recognises=_recognises,
    open=_open,
)
