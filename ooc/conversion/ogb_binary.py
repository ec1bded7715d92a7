# SPDX-License-Identifier: Apache-2.0
"""ogb's binary layout, ogbn-papers100M's: ``raw/data.npz`` and ``raw/node-label.npz``.

Every array is inflated once. Where the dataset's zip is deflated too, the outer layer is inflated twice: to find the
arrays in data.npz, whose directory lies at its end, and to read them; places that were reached are kept (see
``ForwardBlob``).

N nodes, E edges, F features.
"""

from collections.abc import Iterator

from ooc.conversion.ogb_files import OgbFiles, refuse_edge_data
from ooc.conversion.packed_arrays import PackedArray, unpacking
from ooc.conversion.reading import Request
from ooc.conversion.source import LabelBlock, Source
from ooc.conversion.splits import whole_labels
from ooc.conversion.zip_members import Archive
from ooc.errors import SourceError

_EDGE_FEATURES = "edge_feat"


def binary_source(files: OgbFiles, request: Request) -> Source:
    """The graph in ``files``; its splits are held in memory, the rest is streamed."""
    data, where = Archive(files.blob("raw/data.npz")), files.label("raw/data.npz")
    kept = Archive(files.blob("raw/node-label.npz"))
    labels = PackedArray.find(kept, "node_label", files.label("raw/node-label.npz"))
    of_edges = [name.removesuffix(".npy") for name in data.names() if name.startswith("edge_")]
    if others := [name for name in of_edges if name not in ("edge_index", _EDGE_FEATURES)]:
        refuse_edge_data(f"{where} has {', '.join(others)}", request)
    taken = _EDGE_FEATURES in of_edges and not request.drop_edge_data
    edge_features = PackedArray.find(data, _EDGE_FEATURES, where) if taken else None
    edges, features = (PackedArray.find(data, name, where) for name in ("edge_index", "node_feat"))
    nodes, num_features = features.matrix("[nodes, features]")
    if labels.shape not in ((nodes,), (nodes, 1)):
        raise SourceError(f"{labels.name} has the shape {list(labels.shape)}, a label for each of {nodes} nodes wanted")
    for name, count in (("num_nodes_list", nodes), ("num_edges_list", edges.num_edges())):
        _check_count(data, name, count, where)
    splits = files.splits(None, nodes)

    def label_blocks(size: int) -> Iterator[LabelBlock]:
        row = 0
        for values in labels.values(size):
            stop = row + len(values)
            yield LabelBlock(whole_labels(values, row, labels.name), *splits.masks(row, stop))
            row = stop

    source = Source(
        name=files.name,
        format="ogb",
        num_nodes=nodes,
        num_edges=edges.num_edges(),
        num_features=num_features,
        num_classes=None,
        edges=lambda size: iter(()),  # Replaced below.
        features=features.rows,
        labels=label_blocks,
        resident_bytes=splits.nbytes,
        fingerprint=files.fingerprint,
    )
    return unpacking(source, edges, edge_features)


def _check_count(data: Archive, name: str, count: int, where: str) -> None:
    """SourceError where the list ``name``, of one number for each graph, says otherwise."""
    listed = PackedArray.find(data, name, where)
    if listed.shape != (1,):
        raise SourceError(f"{where}: {name} has the shape {list(listed.shape)}, one graph is wanted")
    found = int(next(listed.values(1))[0])
    if found != count:
        raise SourceError(f"{where}: {name} says {found}, the arrays have {count}")
