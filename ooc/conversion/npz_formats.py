# SPDX-License-Identifier: Apache-2.0
"""The generic form in npz files and npy folders, and data sets published as npz with names of their own."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ooc.conversion.archive import map_npy_folder, npz_names, read_npz
from ooc.conversion.arrays import ARRAY_NAMES, ArrayOptions, array_source
from ooc.conversion.label_form import TASK_OPTION
from ooc.conversion.reading import SPLIT, Reader, Request
from ooc.conversion.source import Source, fingerprint_of
from ooc.errors import SourceError
from ooc.storage.array import AnyArray

HETEROPHILOUS = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")
_BENCHMARK = {"x_data": "data", "x_indices": "indices", "x_indptr": "indptr", "x_shape": "shape"}
BENCHMARK = (
    *("edge_index", "y", "num_nodes", "feat_data", "feat_indices", "feat_indptr", "feat_shape", "labels"),
    *("attr_data", "attr_indices", "attr_indptr", "attr_shape", "adj_data", "adj_indices", "adj_indptr"),
)


def _open_npz(path: Path, request: Request) -> Source:
    arrays, held = read_npz(path, ARRAY_NAMES, budget_bytes=request.budget_bytes)
    return array_source(arrays, _options(path, "npz", request, held=held))


def _open_npy(path: Path, request: Request) -> Source:
    mapped, release = map_npy_folder(path, ARRAY_NAMES)
    options = ArrayOptions(
        name=path.resolve().name,
        format="npy",
        split=request.split,
        drop_edge_data=request.drop_edge_data,
        task=request.option(TASK_OPTION),
        release=release,
        fingerprint=fingerprint_of(*(path / f"{name}.npy" for name in mapped)),
    )
    return array_source(mapped, options)


def _open_heterophilous(path: Path, request: Request) -> Source:
    arrays, held = read_npz(path, HETEROPHILOUS, budget_bytes=request.budget_bytes)
    options = _options(path, "heterophilous", request, held=held, symmetrize=True)
    return array_source(heterophilous_arrays(arrays, path.stem), options)


def _open_benchmark(path: Path, request: Request) -> Source:
    arrays, held = read_npz(path, BENCHMARK, budget_bytes=request.budget_bytes)
    options = _options(path, "gnn-benchmark", request, held=held, symmetrize=True, split="random")
    return array_source(benchmark_arrays(arrays, path.stem), options)


def _options(
    path: Path, form: str, request: Request, *, held: int, symmetrize: bool = False, split: str | None = None
) -> ArrayOptions:
    """``split`` where the format has none of its own and none is asked for."""
    return ArrayOptions(
        name=path.stem,
        format=form,
        symmetrize=symmetrize,
        drop_self_loops=form == "gnn-benchmark",
        split=split if request.split is None else request.split,
        drop_edge_data=request.drop_edge_data,
        task=request.option(TASK_OPTION),
        resident_bytes=held,
        fingerprint=fingerprint_of(path),
    )


def _is_npz(path: Path) -> bool:
    return path.suffix == ".npz"


def _has(path: Path, *alternatives: Iterable[str]) -> bool:
    return _is_npz(path) and any(set(names) <= set(npz_names(path)) for names in alternatives)


def heterophilous_arrays(arrays: Mapping[str, AnyArray], name: str) -> dict[str, AnyArray]:
    """heterophilous-graphs: each edge once, a column of splits along the first axis of the masks."""
    if missing := [part for part in HETEROPHILOUS if part not in arrays]:
        raise SourceError(f"{name}: {', '.join(missing)} missing for the heterophilous format")
    masks = {f"{split}_mask": arrays[f"{split}_masks"].T for split in ("train", "val", "test")}
    plain = {"x": arrays["node_features"], "y": arrays["node_labels"], "edges": arrays["edges"]}
    return plain | masks


def benchmark_arrays(arrays: Mapping[str, AnyArray], name: str) -> dict[str, AnyArray]:
    """gnn-benchmark, its own names or re-encoded with ``feat_*``: features are 1 if positive, as in PyG."""
    prefix = "feat" if "feat_indptr" in arrays else "attr"
    parts = {part: f"{prefix}_{piece}" for part, piece in _BENCHMARK.items()}
    label = "y" if "y" in arrays else "labels"
    needed = [*parts.values(), label, *(() if "edge_index" in arrays else ("adj_indices", "adj_indptr"))]
    if missing := [part for part in needed if part not in arrays]:
        raise SourceError(f"{name}: {', '.join(missing)} missing for the gnn-benchmark format")
    taken = {part: arrays[piece] for part, piece in parts.items()} | {"y": arrays[label]}
    values = taken["x_data"]
    if values.dtype.kind not in "biuf" or (values.dtype.kind == "f" and not np.isfinite(values).all()):
        raise SourceError(f"{name}: {parts['x_data']} holds NaN, infinity or no numbers at all")
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


_TAKES = frozenset({SPLIT, TASK_OPTION})
HETEROPHILOUS_READER = Reader(
    needs="heterophilous-graphs npz (node_features, node_labels, edges, *_masks)",
    folder=False,
    recognises=lambda path: _has(path, ("node_features", "node_labels", "edges")),
    open=_open_heterophilous,
    takes=_TAKES,
)
BENCHMARK_READER = Reader(
    needs="gnn-benchmark npz (attr_*, adj_*, labels; or feat_*, edge_index, y)",
    folder=False,
    recognises=lambda path: _has(path, ("feat_indptr",), ("attr_indptr", "adj_indptr")),
    open=_open_benchmark,
    takes=_TAKES,
)
NPZ_READER = Reader(
    needs="npz of named arrays (edge_index, x, y, train_mask, ...), unpacked in memory",
    folder=False,
    recognises=_is_npz,
    open=_open_npz,
    takes=_TAKES,
)
NPY_READER = Reader(
    needs="folder of npy files of the same names, read in pieces",
    folder=True,
    recognises=lambda path: any(path.glob("*.npy")),
    open=_open_npy,
    takes=_TAKES,
)
