# SPDX-License-Identifier: Apache-2.0
"""Data sets published as npz files with names of their own, brought to the generic form."""

from collections.abc import Mapping

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray

HETEROPHILOUS = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")
_BENCHMARK = {"x_data": "data", "x_indices": "indices", "x_indptr": "indptr", "x_shape": "shape"}
BENCHMARK = (
    *("edge_index", "y", "num_nodes", "feat_data", "feat_indices", "feat_indptr", "feat_shape", "labels"),
    *("attr_data", "attr_indices", "attr_indptr", "attr_shape", "adj_data", "adj_indices", "adj_indptr"),
)


def is_heterophilous(names: list[str]) -> bool:
    return {"node_features", "node_labels", "edges"} <= set(names)


def is_benchmark(names: list[str]) -> bool:
    return "feat_indptr" in names or {"attr_indptr", "adj_indptr"} <= set(names)


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
