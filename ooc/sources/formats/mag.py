# SPDX-License-Identifier: Apache-2.0
"""MAG240M's papers and the citations among them: the folder ``mag240m_kddcup2021`` of ``ogb.lsc``, or its zip.

Layout as in ``ogb/lsc/mag240m.py`` of https://github.com/snap-stanford/ogb. The labels of the test papers are
not published (NaN): papers without a label are left out of the test split.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.npy import NpyFile, PackedArray, unpacking
from ooc.sources.files.pickles import MOST_BYTES, read_torch_dict
from ooc.sources.files.streams import Blob, FileBlob
from ooc.sources.files.zip_members import Archive, names_in_zip
from ooc.sources.reading import Reader, Request
from ooc.sources.source import LabelBlock, Source, fingerprint_of, ranges
from ooc.sources.splits import IndexSplits, whole_labels
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS

_EDGES = "processed/paper___cites___paper/edge_index"
_FEATURES = "processed/paper/node_feat"
_LABELS = "processed/paper/node_label"
_FILES = (f"{_EDGES}.npy", f"{_FEATURES}.npy", f"{_LABELS}.npy", "meta.pt", "split_dict.pt")
_NOTE = "the test papers' labels are not published: papers without one are left out of the test split"

Values = Callable[[int], Iterator[AnyArray]]


def mag_source(path: Path, request: Request) -> Source:
    """The papers in the folder or zip ``path``; the splits are held in memory, the rest is streamed."""
    return _folder_source(path) if path.is_dir() else _zip_source(path)


def _folder_source(path: Path) -> Source:
    features, edges, labels = (NpyFile(path / f"{name}.npy") for name in (_FEATURES, _EDGES, _LABELS))

    def label_values(size: int) -> Iterator[AnyArray]:
        return (labels.rows(start, stop).reshape(-1) for start, stop in ranges(labels.shape[0], size))

    source = _source(
        features,
        labels,
        label_values,
        meta=FileBlob(path / "meta.pt"),
        split=FileBlob(path / "split_dict.pt"),
        num_edges=edges.num_edges(),
    )
    return replace(
        source,
        edges=edges.edge_blocks,
        features=features.row_blocks,
        features_from=features.row_blocks,
        fingerprint=fingerprint_of(*(path / name for name in _FILES)),
    )


def _zip_source(path: Path) -> Source:
    archive = Archive(FileBlob(path))
    top = _top(archive.names())
    assert top is not None, "it was recognised by its files"
    features, edges, labels = (
        PackedArray.find(archive, top + name, str(path)) for name in (_FEATURES, _EDGES, _LABELS)
    )
    blobs = []
    for name in ("meta.pt", "split_dict.pt"):
        member = archive.member(top + name)
        if member is None:
            raise SourceError(f"{path} has no {top}{name}")
        blobs.append(member.held(MOST_BYTES))
    source = _source(features, labels, labels.values, meta=blobs[0], split=blobs[1], num_edges=edges.num_edges())
    return unpacking(replace(source, features=features.row_blocks, fingerprint=fingerprint_of(path)), edges)


def _source(
    features: NpyFile | PackedArray,
    labels: NpyFile | PackedArray,
    label_values: Values,
    *,
    meta: Blob,
    split: Blob,
    num_edges: int,
) -> Source:
    """What folder and zip have in common; edges and features are put in by the caller."""
    nodes, num_features = features.matrix("[papers, features]")
    counts = read_torch_dict(meta)
    if counts.get("paper") != nodes:
        raise SourceError(f"{meta.name} counts {counts.get('paper')} papers, {features.name} has {nodes} rows")
    classes = counts.get("num_classes")
    if labels.shape not in ((nodes,), (nodes, 1)):
        raise SourceError(
            f"{labels.name} has the shape {list(labels.shape)}, a label for each of {nodes} papers wanted"
        )
    splits = _splits(split, nodes)

    def label_blocks(size: int) -> Iterator[LabelBlock]:
        row = 0
        for values in label_values(size):
            stop = row + len(values)
            y = whole_labels(values, row, labels.name)
            train, valid, test = splits.masks(row, stop)
            yield LabelBlock(y, train, valid, test & (y >= 0))
            row = stop

    return Source(
        name="mag240m",
        format="mag240m",
        num_nodes=nodes,
        num_edges=num_edges,
        num_features=num_features,
        num_classes=classes if isinstance(classes, int) and classes > 0 else None,
        edges=lambda size: iter(()),
        features=lambda size: iter(()),
        labels=label_blocks,
        resident_bytes=splits.nbytes,
        description={"split": _NOTE},
        notes=(f"mag240m: {_NOTE}",),
    )


def _splits(blob: Blob, nodes: int) -> IndexSplits:
    """The splits in a ``split_dict.pt``; the test papers are there in some releases, by one name or the other."""
    found = read_torch_dict(blob)
    if "test" not in found and "test-whole" in found:
        found["test"] = found["test-whole"]
    lists = {split: array for split in SPLITS if isinstance(array := found.get(split), np.ndarray)}
    if "train" not in lists or "valid" not in lists:
        raise SourceError(f"{blob.name} lacks train or valid")
    return IndexSplits(lists, nodes=nodes, name=blob.name)


def _top(names: list[str]) -> str | None:
    """The folder in the zip that the dataset is in, with its slash; None where it is not."""
    end = f"{_EDGES}.npy"
    return next((name.removesuffix(end) for name in names if name == end or name.endswith(f"/{end}")), None)


def _recognises(path: Path) -> bool:
    if path.is_dir():
        return (path / f"{_EDGES}.npy").is_file()
    return path.suffix == ".zip" and _top(names_in_zip(path)) is not None


READER = Reader(
    needs="the folder mag240m_kddcup2021, or its .zip (processed/paper, processed/paper___cites___paper, *.pt)",
    folder=None,
    recognises=_recognises,
    open=mag_source,
)
