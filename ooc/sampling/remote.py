# SPDX-License-Identifier: Apache-2.0
"""A store as PyG's remote backend (``torch_geometric.data.FeatureStore`` and ``GraphStore``), which PyG's loaders read.

Nodes have their numbers before conversion, 0 … N-1, whatever the order of the rows: node i is ``store.ids[i]`` in the
source. Features, labels and masks are read from the disk, only the rows asked for. The edges are handed over as a
whole, as PyG's samplers need them: 8 bytes an edge and 8 a node. Edges' data are read like features, by the edges'
places. N nodes, E edges, n rows asked for.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeLayout

from ooc.errors import StoreError
from ooc.storage.array import AnyArray, Array, read_rows
from ooc.storage.store import EDGE_FEATURES, EDGE_WEIGHT, Store

ATTRIBUTES = {
    "x": "x",
    "y": "y",
    "train_mask": "split/train",
    "val_mask": "split/valid",
    "test_mask": "split/test",
}
"""Tensors of nodes, and the store's arrays of them."""
EDGE_ATTRIBUTES = {"edge_weight": EDGE_WEIGHT, "edge_attr": EDGE_FEATURES}
"""Optional tensors of edges."""
_BLOCK_EDGES = 1 << 16


def remote_backend(store: Store) -> tuple["StoreFeatures", "StoreGraph"]:
    """Return ``(features, graph)`` for PyG's loaders: ``NeighborLoader(data=ooc.remote_backend(store), …)``.

    Holds 8 bytes a node where the rows are in hop order, nothing otherwise.
    """
    store.check_one_graph("remote_backend")
    places = _places(store)
    return StoreFeatures(store, places), StoreGraph(store, places)


class StoreFeatures(FeatureStore):  # type: ignore[misc]
    """``x``, ``y``, ``train_mask``, ``val_mask`` and ``test_mask`` of a homogeneous graph (group None).

    Where the edges have them, also ``edge_weight`` and ``edge_attr``, by an edge's place among the graph's edges (CSC),
    which is ``e_id`` of a loader's batch. They are not listed, since loaders ask for the listed ones by node. Reading
    is thread-safe. Putting or removing a tensor raises StoreError: a store does not change.
    """

    def __init__(self, store: Store, places: AnyArray | None) -> None:
        super().__init__()
        self._store = store
        self._places = places

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        return [
            attr for name in ATTRIBUTES if self._array(attr := TensorAttr(group_name=None, attr_name=name)) is not None
        ]

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        array = self._array(attr)
        if array is None:
            return None
        of_edges = attr.attr_name in EDGE_ATTRIBUTES
        ids, count = _ids(attr.index, array.shape[0]), array.shape[0]
        if len(ids) and not (ids.min() >= 0 and ids.max() < count):
            what = f"{attr.attr_name} of the {'edge' if of_edges else 'node'}"
            raise IndexError(f"{what} {ids.min() if ids.min() < 0 else ids.max()} of {count}")
        if self._places is not None:
            ids = _edge_places(self._store, self._places, ids) if of_edges else self._places[ids]
        return torch.from_numpy(read_rows(array, ids))

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        array = self._array(attr)
        return None if array is None else array.shape

    def _put_tensor(self, *_: Any) -> bool:
        raise _unchangeable_error(self._store)

    _remove_tensor = _put_tensor

    def _array(self, attr: TensorAttr) -> Array | None:
        if attr.group_name is not None:
            return None
        name = ATTRIBUTES.get(attr.attr_name) or f"in/{EDGE_ATTRIBUTES.get(attr.attr_name)}"
        if name == "x" and self._store.sparse_features is not None:
            return self._store.sparse_features
        found: Array | None = self._store.array(name) if self._store.has(name) else None
        return found

    def __len__(self) -> int:
        return len(self.get_all_tensor_attrs())


class StoreGraph(GraphStore):  # type: ignore[misc]
    """The edges of a homogeneous graph (type None), by target (CSC)."""

    def __init__(self, store: Store, places: AnyArray | None) -> None:
        super().__init__()
        self._store = store
        self._places = places

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        nodes = self._store.num_nodes
        return [EdgeAttr(edge_type=None, layout=EdgeLayout.CSC, is_sorted=True, size=(nodes, nodes))]

    def _get_edge_index(self, attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        if attr.edge_type is not None or attr.layout is not EdgeLayout.CSC:
            return None
        sources, starts = _by_target(self._store, self._places)
        return torch.from_numpy(sources), torch.from_numpy(starts)

    def _put_edge_index(self, *_: Any) -> bool:
        raise _unchangeable_error(self._store)

    _remove_edge_index = _put_edge_index


def _places(store: Store) -> AnyArray | None:
    """Return the row of each original id [N]; None where it is the id."""
    if store.attributes.get("order", "none") == "none":
        return None
    perm = store.array("perm").read()
    places = np.empty(len(perm), dtype=np.int64)
    places[perm] = np.arange(len(perm))
    return places


def _edge_places(store: Store, places: AnyArray, edges: AnyArray) -> AnyArray:
    """Return the places in the store of ``edges`` [n], which are places among the edges by original target."""
    starts = store.array("in/indptr").read()
    ordered = _starts_by_id(starts, places)
    targets = np.searchsorted(ordered, edges, side="right") - 1
    found: AnyArray = starts[places[targets]] + edges - ordered[targets]
    return found


def _starts_by_id(starts: AnyArray, places: AnyArray) -> AnyArray:
    """Return where the in-edges of each original id begin [N + 1], if they are in that order."""
    found: AnyArray = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.diff(starts)[places])])
    return found


def _by_target(store: Store, places: AnyArray | None) -> tuple[AnyArray, AnyArray]:
    """Return ``(sources [E], starts [N + 1])``, both int64 and by original ids."""
    indptr, indices = store.topology("in")
    starts = indptr.read()
    sources = np.empty(indices.shape[0], dtype=np.int64)
    if places is None:
        for row, block in indices.blocks(_BLOCK_EDGES):
            sources[row : row + len(block)] = block
        return sources, starts
    perm = store.array("perm").read()
    degrees = np.diff(starts)
    ordered = _starts_by_id(starts, places)
    row = 0
    while row < store.num_nodes:
        # As many rows as make a block of edges, one at the least.
        stop = max(row + 1, int(np.searchsorted(starts, starts[row] + _BLOCK_EDGES, side="right")) - 1)
        block = indices.read(int(starts[row]), int(starts[stop]))
        to = np.repeat(ordered[perm[row:stop]] - starts[row:stop], degrees[row:stop])
        sources[to + np.arange(starts[row], starts[stop])] = perm[block]
        row = stop
    return sources, ordered


def _ids(index: Any, nodes: int) -> AnyArray:
    """Return the ids that ``index`` selects: None (all), a slice, a mask, or ids in a tensor or an array."""
    if index is None:
        return np.arange(nodes)
    if isinstance(index, slice):
        return np.arange(nodes)[index]
    found = index.detach().cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    found = np.flatnonzero(found) if found.dtype.kind == "b" else found.reshape(-1)
    return found.astype(np.int64, copy=False)


def _unchangeable_error(store: Store) -> StoreError:
    return StoreError(f"the store {store.path} cannot be changed, only read")
