# SPDX-License-Identifier: Apache-2.0
"""Named arrays in files: the generic form in npz and npy, and data sets published as npz with their own names.

An npz file is read completely and counted against the budget; a folder of npy files is mapped. Pickles are never read:
an array of objects is an error.

Reddit as DGL and PyG download it is ``reddit_data.npz`` and ``reddit_graph.npz``, in a folder or in reddit.zip. Layout
as in ``python/dgl/data/reddit.py`` of https://github.com/dmlc/dgl: the first holds ``feature``, ``label`` and
``node_types`` (1, 2, 3: train, validation, test), the second the adjacency matrix as ``scipy.sparse.save_npz`` writes a
COO matrix. Its values are all 1 and are not read; each edge is in it in both directions.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import BudgetError, SourceError
from ooc.sizes import format_size
from ooc.sources.files.dataset_files import DatasetFiles, holds_dataset
from ooc.sources.files.npy import NpyArray, edges_between
from ooc.sources.files.streams import Blob
from ooc.sources.files.zip_members import Archive
from ooc.sources.formats.arrays import ARRAY_NAMES, ARRAY_OPTIONS, ArrayOptions, array_source
from ooc.sources.labels import FoundLabels, LabelForm, label_blocks
from ooc.sources.reading import Reader, Request
from ooc.sources.source import Source, fingerprint_of
from ooc.storage.array import AnyArray
from ooc.storage.store import Task

_HETEROPHILOUS = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")
_BENCHMARK_PARTS = {"x_data": "data", "x_indices": "indices", "x_indptr": "indptr", "x_shape": "shape"}
_BENCHMARK = (
    *("edge_index", "y", "num_nodes", "feat_data", "feat_indices", "feat_indptr", "feat_shape", "labels"),
    *("attr_data", "attr_indices", "attr_indptr", "attr_shape", "adj_data", "adj_indices", "adj_indptr"),
)
_MAPPED_BYTES = 1 << 16


def _opening(
    form: str,
    wanted: Iterable[str],
    arranged: Callable[[Mapping[str, AnyArray], str], Mapping[str, AnyArray]] = lambda arrays, name: arrays,
    usual_split: str | None = None,
    **usual: Any,
) -> Callable[[Path, Request], Source]:
    """Return a function that opens an npz file of the ``form``: its ``wanted`` arrays, ``arranged`` in the generic
    form."""

    def opened(path: Path, request: Request) -> Source:
        arrays, others = _read_npz(path, wanted, budget_bytes=request.budget_bytes)
        others = [] if usual else others  # what published files have besides is known
        options = ArrayOptions(request=request, name=path.stem, format=form, usual_split=usual_split, others=others)
        nbytes = sum(array.nbytes for array in arrays.values())
        source = array_source(arranged(arrays, path.stem), options)
        return replace(source, resident_bytes=nbytes, fingerprint=fingerprint_of(path), **usual)

    return opened


def _open_npy(path: Path, request: Request) -> Source:
    mapped, release = _map_npy_folder(path, ARRAY_NAMES)
    others = sorted(file.stem for file in path.glob("*.npy") if file.stem not in mapped)
    options = ArrayOptions(request=request, name=path.resolve().name, format="npy", release=release, others=others)
    return replace(
        array_source(mapped, options), fingerprint=fingerprint_of(*(path / f"{name}.npy" for name in mapped))
    )


def _has(path: Path, *alternatives: Iterable[str]) -> bool:
    there = {*Archive(Blob.of_file(path)).names()} if path.suffix == ".npz" else set()
    return any({f"{name}.npy" for name in names} <= there for names in alternatives)


def _heterophilous_arrays(arrays: Mapping[str, AnyArray], name: str) -> dict[str, AnyArray]:
    """Return the arrays of heterophilous-graphs: each edge once; the masks' first axis is the splits."""
    if missing := [part for part in _HETEROPHILOUS if part not in arrays]:
        raise SourceError(f"{name}: {', '.join(missing)} missing for the heterophilous format")
    masks = {f"{split}_mask": arrays[f"{split}_masks"].T for split in ("train", "val", "test")}
    plain = {"x": arrays["node_features"], "y": arrays["node_labels"], "edges": arrays["edges"]}
    return plain | masks


def _benchmark_arrays(arrays: Mapping[str, AnyArray], name: str) -> dict[str, AnyArray]:
    """Return the arrays of gnn-benchmark, with its own names or re-encoded with ``feat_*``; positive features become 1,
    as in PyG."""
    prefix = "feat" if "feat_indptr" in arrays else "attr"
    parts = {part: f"{prefix}_{piece}" for part, piece in _BENCHMARK_PARTS.items()}
    label = "y" if "y" in arrays else "labels"
    needed = [*parts.values(), label, *(() if "edge_index" in arrays else ("adj_indices", "adj_indptr"))]
    if missing := [part for part in needed if part not in arrays]:
        raise SourceError(f"{name}: {', '.join(missing)} missing for the gnn-benchmark format")
    taken = {part: arrays[piece] for part, piece in parts.items()} | {"y": arrays[label]}
    values = taken["x_data"]
    if not np.isfinite(values).all():
        raise SourceError(f"{name}: {parts['x_data']} holds NaN or infinity")
    taken["x_data"] = np.where(values > 0, 1, values).astype(np.float32)
    if "num_nodes" in arrays:
        taken["num_nodes"] = arrays["num_nodes"]
    taken["edge_index"] = arrays["edge_index"] if "edge_index" in arrays else _pairs(arrays, name)
    return taken


def _pairs(arrays: Mapping[str, AnyArray], name: str) -> AnyArray:
    indptr, indices = arrays["adj_indptr"], arrays["adj_indices"]
    degrees = np.diff(indptr) if indptr.ndim == 1 and indptr.dtype.kind in "iu" else None
    if degrees is None or indices.ndim != 1 or (degrees < 0).any() or degrees.sum() != len(indices):
        raise SourceError(f"{name}: adj_indptr and adj_indices are no CSR matrix")
    return np.stack([np.repeat(np.arange(len(degrees)), degrees), indices])


# ---- files --------------------------------------------------------------------------------------------------------


def _read_npz(path: Path, wanted: Iterable[str], *, budget_bytes: int) -> tuple[dict[str, AnyArray], list[str]]:
    """Return the ``wanted`` arrays of the file, and the names of its others; raise BudgetError where they would not fit
    the budget unpacked."""
    archive = Archive(Blob.of_file(path))
    # All members are looked up: with a name damaged in the directory an array would seem not to be there.
    members = {name: member for name in archive.names() if (member := archive.member(name)) is not None}
    found = {name: members[f"{name}.npy"] for name in wanted if f"{name}.npy" in members}
    size = sum(member.size for member in found.values())
    if size > budget_bytes:
        raise BudgetError(
            f"{path} unpacks to {format_size(size)}, the host budget is {format_size(budget_bytes)}; "
            f"unzip it to a folder and convert that: its npy files are read in pieces"
        )
    others = [name.removesuffix(".npy") for name in members if name.removesuffix(".npy") not in found]
    return {name: NpyArray(member).whole() for name, member in found.items()}, others


def _map_npy_folder(folder: Path, wanted: Iterable[str]) -> tuple[dict[str, AnyArray], Callable[[], None]]:
    """Return the ``wanted`` arrays that ``folder`` has as NAME.npy, mapped, and a function that frees their pages.

    The function is called between blocks, so that reading takes no more memory than a block.
    """
    arrays: dict[str, AnyArray] = {}
    maps: list[mmap.mmap] = []
    for name in wanted:
        path = folder / f"{name}.npy"
        if not path.is_file():
            continue
        NpyArray(path)  # Refuses damage, objects and what is no number.
        small = path.stat().st_size < _MAPPED_BYTES
        array = np.load(path, mmap_mode=None if small else "r", allow_pickle=False)
        if isinstance(array.base, mmap.mmap):
            maps.append(array.base)
        arrays[name] = np.asarray(array)

    def release() -> None:
        for mapped in maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    return arrays, release


HETEROPHILOUS_READER = Reader(
    needs="heterophilous-graphs npz (node_features, node_labels, edges, *_masks)",
    folder=False,
    recognises=lambda path: _has(path, ("node_features", "node_labels", "edges")),
    open=_opening("heterophilous", _HETEROPHILOUS, _heterophilous_arrays, symmetrize=True),
    takes=ARRAY_OPTIONS,
)
BENCHMARK_READER = Reader(
    needs="gnn-benchmark npz (attr_*, adj_*, labels; or feat_*, edge_index, y)",
    folder=False,
    recognises=lambda path: _has(path, ("feat_indptr",), ("attr_indptr", "adj_indptr")),
    open=_opening(
        "gnn-benchmark", _BENCHMARK, _benchmark_arrays, symmetrize=True, drop_self_loops=True, usual_split="random"
    ),
    takes=ARRAY_OPTIONS,
)
NPZ_READER = Reader(
    needs="npz of named arrays (edge_index, x, y, train_mask, ...), unpacked in memory",
    folder=False,
    recognises=lambda path: path.suffix == ".npz",
    open=_opening("npz", ARRAY_NAMES),
    takes=ARRAY_OPTIONS,
)
NPY_READER = Reader(
    needs="folder of npy files of the same names, read in pieces",
    folder=True,
    recognises=lambda path: any(path.glob("*.npy")),
    open=_open_npy,
    takes=ARRAY_OPTIONS,
)


_DATA = "reddit_data.npz"
_GRAPHS = ("reddit_graph.npz", "reddit_self_loop_graph.npz")
_TRAIN, _VALID, _TEST = 1, 2, 3


def _open_reddit(path: Path, request: Request) -> Source:
    files = DatasetFiles(path, (_DATA,), request.budget_bytes)
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
        edges=lambda size: edges_between(sources.values(size), targets.values(size)),
        features=x.row_blocks,
        labels=lambda size: label_blocks(form, labels(size)),
        fingerprint=files.fingerprint(_DATA, graph_name),
    )


REDDIT_READER = Reader(
    needs="folder of reddit_data.npz and reddit_graph.npz, or reddit.zip",
    folder=None,
    recognises=lambda path: holds_dataset(path, (_DATA,)),
    open=_open_reddit,
)
