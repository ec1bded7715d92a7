# SPDX-License-Identifier: Apache-2.0
"""Reddit as DGL and PyG download it: ``reddit_data.npz`` and ``reddit_graph.npz``, in a folder or still in reddit.zip.

Layout as in ``python/dgl/data/reddit.py`` of https://github.com/dmlc/dgl: the first holds ``feature``, ``label``
and ``node_types`` (1, 2, 3: train, validation, test), the second the adjacency matrix as ``scipy.sparse.save_npz``
writes a COO matrix. Its values are all 1 and are not read; each edge is there both ways.
"""

from pathlib import Path

from ooc.errors import SourceError
from ooc.sources.files.dataset_files import DatasetFiles, holds_dataset
from ooc.sources.files.npy import NpyArray, edges_between
from ooc.sources.labels import FoundLabels, LabelForm, label_blocks
from ooc.sources.reading import Reader, Request
from ooc.sources.source import Source
from ooc.storage.store import Task

_DATA = "reddit_data.npz"
_GRAPHS = ("reddit_graph.npz", "reddit_self_loop_graph.npz")
_TRAIN, _VALID, _TEST = 1, 2, 3


def _open(path: Path, request: Request) -> Source:
    files = DatasetFiles(path, (_DATA,))
    graph_name = next(filter(files.has, _GRAPHS), _GRAPHS[0])
    data, graph = files.archive(_DATA), files.archive(graph_name)
    x, y, kinds = (NpyArray.find(data, name, files.label(_DATA)) for name in ("feature", "label", "node_types"))
    sources, targets, shape = (NpyArray.find(graph, name, files.label(graph_name)) for name in ("row", "col", "shape"))
    nodes, features = x.matrix("[nodes, features]")
    y.check_column(nodes)
    kinds.check_column(nodes)
    if len(sources.shape) != 1 or sources.shape != targets.shape:
        raise SourceError(f"{sources.name} and {targets.name} are not of one length")
    for array in (sources, targets, kinds):
        if array.dtype.kind not in "iu":
            raise SourceError(f"{array.name} holds {array.dtype}, not whole numbers")
    if shape.shape != (2,) or next(shape.values(2)).tolist() != [nodes, nodes]:
        raise SourceError(f"{shape.name} is not that of a graph of {nodes} nodes")

    def labels(size: int) -> FoundLabels:
        row = 0
        for values, types in zip(y.values(size), kinds.values(size), strict=True):
            if (wrong := (types < _TRAIN) | (types > _TEST)).any():
                at = int(wrong.argmax())
                raise SourceError(f"{kinds.name}: node {row + at} is of the type {types[at]}; 1, 2 and 3 are splits")
            yield values, [types == kind for kind in (_TRAIN, _VALID, _TEST)]
            row += len(values)

    form = LabelForm(name=y.name, task=Task.CLASSES, width=None)
    return Source(
        name="reddit",
        format="dgl-reddit",
        num_nodes=nodes,
        num_edges=sources.shape[0],
        num_features=features,
        num_classes=None,
        edges=lambda size: edges_between(sources, targets, size),
        features=x.row_blocks,
        labels=lambda size: label_blocks(form, labels(size)),
        fingerprint=files.fingerprint(_DATA, graph_name),
    )


READER = Reader(
    needs="folder of reddit_data.npz and reddit_graph.npz, or reddit.zip",
    folder=None,
    recognises=lambda path: holds_dataset(path, (_DATA,)),
    open=_open,
)
