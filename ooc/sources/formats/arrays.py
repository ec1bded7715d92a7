# SPDX-License-Identifier: Apache-2.0
"""Sources that are named arrays: the generic form of npz files, npy folders, dictionaries and PyG objects.

Names (see ``docs/formats.md``): ``edge_index`` [2, E] or [E, 2] (``edges``: [E, 2] or [2, E]); ``x`` [N, F] or CSR
``x_data``, ``x_indices``, ``x_indptr``, ``x_shape``; ``y`` [N] or [N, L]; ``train_mask``, ``val_mask``
(``valid_mask``), ``test_mask`` [N] or [N, splits], or ``train_idx``, ``valid_idx`` (``val_idx``), ``test_idx``;
``edge_weight`` [E], ``edge_attr`` [E, F], ``edge_type`` [E]; ``num_nodes`` and ``num_classes`` if they cannot be
inferred.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.streams import check_truth_values
from ooc.sources.labels import (
    TASK_OPTION,
    USUAL_SPLIT,
    LabelForm,
    NodeList,
    Split,
    in_splits,
    label_blocks,
    label_form,
    only_answers,
    random_split,
    unsaid_split_note,
)
from ooc.sources.node_data import dense_array
from ooc.sources.reading import SPLIT, Request
from ooc.sources.source import EdgeBlock, EdgeData, LabelBlock, Mask, RelationSource, Source, ranges
from ooc.sources.typed import nodes_alone, typed_source
from ooc.storage.array import AnyArray
from ooc.storage.sparse_array import Entries
from ooc.storage.types import EdgeType

EDGE_DATA_NAMES = ("edge_weight", "edge_attr")
_SPLIT_ARRAYS = (
    *("train_mask", "valid_mask", "val_mask", "test_mask"),
    *("train_idx", "valid_idx", "val_idx", "test_idx"),
)
_NODE_ARRAYS = ("x", "y", *_SPLIT_ARRAYS)
_PYG_ARRAYS = ("edge_index", "edge_type", *EDGE_DATA_NAMES, *_NODE_ARRAYS)
_MODEL_INPUTS = ("x", "edge_index", "edge_type", *EDGE_DATA_NAMES)
"""Attributes of PyG's data that models may be given."""
INPUTS = "inputs"
"""The key, in a store's source, of the model inputs beside ``x``: a list of ``[name, columns (0: [N]), whether
integer]``."""
ARRAY_NAMES = (*_PYG_ARRAYS, "edges", "x_data", "x_indices", "x_indptr", "x_shape", "num_nodes", "num_classes")
ARRAY_OPTIONS = frozenset((SPLIT, TASK_OPTION))
_SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}
_SCANNED_ROWS = 1 << 16
_NODE = "node"
"""The node type of a graph with ``edge_type``."""
_MOST_RELATIONS = 1 << 12
"""The most edge types, each of which has folders in the store."""
Piece = TypeVar("Piece")


@dataclass(frozen=True, kw_only=True)
class ArrayOptions:
    """How arrays become a source: the request, a name for messages, and the format's defaults.

    ``others``: names of arrays that the source has besides. ``usual_split``: the default split; None: as given, column
    0 of two-dimensional masks. ``release`` is called after each block, to free the pages of mapped files.
    ``may_lack_features``: ``x`` is optional.
    """

    request: Request
    name: str
    format: str
    others: Sequence[str] = ()
    usual_split: str | None = None
    release: Callable[[], None] = lambda: None
    may_lack_features: bool = False

    @property
    def split(self) -> int | str | None:
        """The requested split, or else the default."""
        return self.usual_split if self.request.split is None else self.request.split


def array_source(arrays: Mapping[str, AnyArray], options: ArrayOptions) -> Source:
    """Return the source of ``arrays``; raise SourceError where they are missing or inconsistent."""
    if options.request.drop_edge_data:
        arrays = {name: array for name, array in arrays.items() if name not in (*EDGE_DATA_NAMES, "edge_type")}
    unsaid = options.split is None and not any(name in arrays for name in _SPLIT_ARRAYS)
    if unsaid:
        options = replace(options, usual_split=USUAL_SPLIT)
    _check_numbers(arrays, options.name)
    without = options.may_lack_features and not any(name == "x" or name.startswith("x_") for name in arrays)
    if without and "num_nodes" in arrays:
        arrays = {**arrays, "x": np.empty((_scalar(arrays, "num_nodes", options.name), 0), dtype=np.float32)}
    read_features, (rows, num_features), feature_entries = _features(arrays, options.name)
    nodes = _scalar(arrays, "num_nodes", options.name) if "num_nodes" in arrays else rows
    if nodes != rows:
        raise SourceError(f"{options.name}: x has {rows} rows for {nodes} nodes")
    if not 0 < nodes <= 2**32 or (num_features < 1 and not without):
        raise SourceError(f"{options.name}: {nodes} nodes with {num_features} features cannot be converted")
    unlabelled = "y" not in arrays and not any(name in arrays for name in _SPLIT_ARRAYS)
    if unlabelled:  # links of such a graph can be trained
        nothing = {"y": np.broadcast_to(np.int64(-1), (nodes,)), "train_idx": np.empty(0, dtype=np.int64)}
        arrays, unsaid = {"num_classes": np.array(1), **arrays, **nothing}, False
        options = replace(options, usual_split=None)
    columns, num_edges = _edge_columns(arrays, options.name)
    carried = _edge_data(arrays, num_edges, options.name)

    labels, form, note = _labels(arrays, nodes, options)
    classes = _scalar(arrays, "num_classes", options.name) if "num_classes" in arrays else form.width
    if classes is not None and (classes < 1 or form.width not in (None, classes)):
        raise SourceError(
            f"{options.name}: num_classes is {classes}" + f", y has {form.width} columns" * bool(form.width)
        )
    said = unsaid_split_note(options.name) if unsaid else f"{options.name}: split is {note}" if note else None
    if unlabelled:
        said = f"{options.name} has no labels: y is missing; nodes cannot be trained, links can"
    unused = f"{options.name}: not used: {', '.join(options.others)}" if options.others else None
    # What weights are called in PyG, where that is not as usual.
    named = {"weights": "edge_attr"} if carried.weight is not None and "edge_weight" not in arrays else {}
    source = Source(
        name=options.name,
        format=options.format,
        num_nodes=nodes,
        num_edges=num_edges,
        num_features=num_features,
        num_classes=classes,
        edges=partial(_blocks, _edge_reader(columns, carried), num_edges, options.release),
        has_edge_weight=carried.weight is not None,
        num_edge_features=0 if carried.features is None else carried.features.shape[1],
        features=partial(_blocks, read_features, nodes, options.release),
        feature_entries=feature_entries,
        labels=labels,
        task=form.task,
        unlabelled=unlabelled,
        description=({"split": note} if note else {}) | named,
        notes=tuple(filter(None, (said, form.note, unused))),
    )
    return _by_relation(source, arrays["edge_type"].reshape(-1), columns, options) if "edge_type" in arrays else source


def _by_relation(source: Source, kinds: AnyArray, columns: tuple[AnyArray, AnyArray], options: ArrayOptions) -> Source:
    """Return ``source`` as a graph of one node type, with an edge type for each number in ``kinds`` [E]."""
    if not source.num_edges:
        raise SourceError(f"{options.name}: there are no edges to be of types; leave out edge_type")
    if len(kinds) != source.num_edges or kinds.dtype.kind not in "iu":
        raise SourceError(f"{options.name}: edge_type has to be a whole number for each of the edges")
    least, most = int(kinds.min()), int(kinds.max())
    if least < 0 or most >= _MOST_RELATIONS:
        raise SourceError(f"{options.name}: edge_type has to be 0 to {_MOST_RELATIONS - 1}, not {least} to {most}")
    if source.has_edge_weight or source.num_edge_features:
        raise SourceError(f"{options.name}: what edges carry beside edge_type is not kept; leave it out")
    counts = np.bincount(kinds)

    def edges(number: int, start: int, stop: int) -> EdgeBlock:
        chosen = np.flatnonzero(kinds[start:stop] == number)
        sources, targets = (column[start:stop][chosen].astype(np.int64) for column in columns)
        return EdgeBlock(sources, targets)

    relations = {}
    for number, count in enumerate(counts):
        blocks = partial(_blocks, partial(edges, number), len(kinds), options.release)
        relations[EdgeType(_NODE, str(number), _NODE)] = RelationSource(int(count), blocks)
    return typed_source(source, _NODE, {}, relations)


def _check_numbers(arrays: Mapping[str, AnyArray], source: str) -> None:
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise SourceError(f"{source}: {name} holds {array.dtype} values, not plain numbers")


def _scalar(arrays: Mapping[str, AnyArray], name: str, source: str) -> int:
    value = arrays[name]
    if value.size != 1 or value.dtype.kind not in "iu":
        raise SourceError(f"{source}: {name} is no single whole number")
    return int(value.reshape(-1)[0])


def _edge_columns(arrays: Mapping[str, AnyArray], source: str) -> tuple[tuple[AnyArray, AnyArray], int]:
    """Return ``((sources, targets), E)`` as views that are not read yet."""
    name = next((name for name in ("edge_index", "edges") if name in arrays), None)
    if name is None:
        raise SourceError(f"{source} has no edge_index")
    array = arrays[name]
    if array.ndim != 2 or 2 not in array.shape:
        raise SourceError(f"{source}: {name} has the shape {array.shape}, neither [2, E] nor [E, 2]")
    if array.dtype.kind not in "iu" and array.size:
        raise SourceError(f"{source}: {name} holds {array.dtype} values, not node ids")
    preferred = 0 if name == "edge_index" else 1
    two = preferred if array.shape[preferred] == 2 else 1 - preferred
    if two == 0:
        return (array[0], array[1]), int(array.shape[1])
    return (array[:, 0], array[:, 1]), int(array.shape[0])


def _edge_data(arrays: Mapping[str, AnyArray], edges: int, source: str) -> EdgeData:
    """Return views of the edges' data. An ``edge_attr`` [E] is the weight where there is no other."""
    weight, features = (arrays.get(name) for name in EDGE_DATA_NAMES)
    if weight is None and features is not None and features.ndim == 1:
        weight, features = features, None
    if weight is not None and weight.shape not in ((edges,), (edges, 1)):
        raise SourceError(f"{source}: the edges' weights have the shape {weight.shape}, one for each of {edges} wanted")
    if features is not None and features.ndim == 1:
        features = features[:, None]
    if features is not None and (features.ndim != 2 or len(features) != edges or not features.shape[1]):
        raise SourceError(f"{source}: edge_attr has the shape {features.shape}, not [{edges} edges, features]")
    return EdgeData(weight=None if weight is None else weight.reshape(-1), features=features)


def _blocks(of: Callable[[int, int], Piece], total: int, release: Callable[[], None], size: int) -> Iterator[Piece]:
    """Yield the results of ``of`` for each ``size`` of the ``total`` rows or edges."""
    for start, stop in ranges(total, size):
        yield of(start, stop)
        release()


def _edge_reader(columns: tuple[AnyArray, AnyArray], carried: EdgeData) -> Callable[[int, int], EdgeBlock]:
    def block(start: int, stop: int) -> EdgeBlock:
        sources, targets = (column[start:stop].astype(np.int64) for column in columns)
        parts = (None if array is None else np.array(array[start:stop]) for array in carried)
        return EdgeBlock(sources, targets, EdgeData(*parts))

    return block


def _features(
    arrays: Mapping[str, AnyArray], source: str
) -> tuple[Callable[[int, int], AnyArray | Entries], tuple[int, int], int | None]:
    """Return ``(reader of the rows start:stop, (N, F), number of entries of sparse features)``."""
    if "x" in arrays:
        x = arrays["x"]
        if x.ndim != 2:
            numbers = x.ndim == 1 and x.dtype.kind in "iu"
            remedy = "; where it numbers nodes, leave it out and give Trainer(embedding=64)" * numbers
            raise SourceError(f"{source}: x has the shape {x.shape}, not [nodes, features]{remedy}")

        def dense(start: int, stop: int) -> AnyArray:
            part = np.array(x[start:stop])
            check_truth_values(part, f"{source}: x")
            return part

        return dense, (int(x.shape[0]), int(x.shape[1])), None
    parts = [f"x_{part}" for part in ("data", "indices", "indptr", "shape")]
    if missing := [part for part in parts if part not in arrays]:
        absent = "x" if len(missing) == len(parts) else ", ".join(missing)
        raise SourceError(f"{source} has no features: {absent} is missing")
    sparse = SparseRows(*(arrays[part] for part in parts), name=f"{source}: x")
    return sparse.rows, sparse.shape, len(arrays["x_data"])


def _labels(
    arrays: Mapping[str, AnyArray], nodes: int, options: ArrayOptions
) -> tuple[Callable[[int], Iterator[LabelBlock]], LabelForm, str | None]:
    """Return ``(blocks, form of the labels, how the split was made, if it was)``."""
    if "y" not in arrays:
        raise SourceError(f"{options.name} has no labels: y is missing")
    y = arrays["y"]
    if y.ndim not in (1, 2) or y.shape[0] != nodes or 0 in y.shape:
        raise SourceError(f"{options.name}: y has the shape {y.shape}, one label for each of {nodes} nodes wanted")

    def part(start: int, stop: int) -> AnyArray:
        check_truth_values(y[start:stop], f"{options.name}: y")
        return y[start:stop]

    form = label_form(
        options.name,
        y.shape,
        y.dtype,
        asked=options.request.option(TASK_OPTION),
        scan=lambda: only_answers(_blocks(part, nodes, options.release, _SCANNED_ROWS)),
    )
    split, note = _splits(arrays, nodes, options)
    random = isinstance(options.split, str)

    def labels(size: int) -> Iterator[LabelBlock]:
        found = in_splits(_blocks(part, nodes, options.release, size), split)
        return label_blocks(form, found, at_random=random)

    return labels, form, note


def _splits(arrays: Mapping[str, AnyArray], nodes: int, options: ArrayOptions) -> tuple[Split, str | None]:
    if isinstance(options.split, str):
        return random_split(nodes, options.split)
    found = {
        split: [f"{name}_{kind}" for kind in ("mask", "idx") for name in names if f"{name}_{kind}" in arrays]
        for split, names in _SPLIT_NAMES.items()
    }
    if not found["train"]:
        told = ", ".join(name for names in found.values() for name in names)
        raise SourceError(f"{options.name} has no train_mask or train_idx beside its {told}")
    columns = {
        split: _agreed_mask({name: _membership(arrays[name], name, nodes, options) for name in names}, options)
        for split, names in found.items()
    }
    wide = any(name.endswith("mask") and arrays[name].ndim == 2 for names in found.values() for name in names)
    if options.split is not None and not wide:
        raise SourceError(f"{options.name} has one split only; split={options.split} asks for a column of masks")
    note = f"column {options.split or 0} of the masks" if wide else None
    return lambda start, stop: tuple(columns[split](start, stop) for split in _SPLIT_NAMES), note


def _agreed_mask(found: Mapping[str, Callable[[int, int], Mask]], options: ArrayOptions) -> Callable[[int, int], Mask]:
    """Return the mask of a split that several arrays define, ``found`` by name; raise SourceError where two differ."""

    def members(start: int, stop: int) -> Mask:
        told = {name: of(start, stop) for name, of in found.items()}
        (first, mask), *others = told.items() or [("", np.zeros(stop - start, dtype=np.bool_))]
        for name, other in others:
            if (differs := mask != other).any():
                at = start + int(differs.argmax())
                raise SourceError(
                    f"{options.name}: {first} and {name} tell different things of node {at}; leave one out"
                )
        return mask

    return members


def _membership(array: AnyArray, name: str, nodes: int, options: ArrayOptions) -> Callable[[int, int], Mask]:
    where = f"{options.name}: {name}"
    if name.endswith("_idx"):
        if array.ndim != 1:
            raise SourceError(f"{where} is no list of node ids")
        return NodeList(array, nodes=nodes, name=where).mask
    if array.ndim not in (1, 2) or array.shape[0] != nodes:
        raise SourceError(f"{where} has the shape {array.shape}, one entry for each of {nodes} nodes wanted")
    if array.ndim == 2:
        column = int(options.split or 0)
        if not 0 <= column < array.shape[1]:
            raise SourceError(f"{where} has {array.shape[1]} columns; there is no split {column}")
        array = array[:, column]

    def masked(start: int, stop: int) -> Mask:
        part = array[start:stop]
        check_truth_values(part, where)
        if not ((part == 0) | (part == 1)).all():
            raise SourceError(f"{where} holds other values than true and false")
        return part.astype(np.bool_)

    return masked


# ---- sparse features ------------------------------------------------------------------------------------------


class SparseRows:
    """A CSR matrix, checked: ``data`` [nnz], ``indices`` [nnz], ``indptr`` [rows + 1], ``shape`` (rows, columns)."""

    def __init__(self, data: AnyArray, indices: AnyArray, indptr: AnyArray, shape: AnyArray, *, name: str) -> None:
        if shape.shape != (2,) or any(array.ndim != 1 for array in (data, indices, indptr)):
            raise SourceError(f"{name} is no CSR matrix: data, indices, indptr or shape has wrong dimensions")
        if any(array.dtype.kind not in "iu" and array.size for array in (indices, indptr, shape)):
            raise SourceError(f"{name} is no CSR matrix: indices, indptr and shape must be whole numbers")
        self.shape = (int(shape[0]), int(shape[1]))
        self._data, self._indices = data, indices
        self._indptr = np.array(indptr).astype(np.int64, copy=False)
        if min(self.shape) < 0 or len(self._indptr) != self.shape[0] + 1 or len(data) != len(indices):
            raise SourceError(f"{name} is no CSR matrix of the shape {self.shape}: its parts have other lengths")
        if self._indptr[0] != 0 or self._indptr[-1] != len(data) or (np.diff(self._indptr) < 0).any():
            raise SourceError(f"{name} is no CSR matrix: indptr does not rise from 0 to {len(data)}")
        self._name = name

    def rows(self, start: int, stop: int) -> Entries:
        """Return the rows ``start:stop``; repeated entries are summed."""
        ends = self._indptr[start : stop + 1]
        columns = self._indices[ends[0] : ends[-1]].astype(np.int64)
        if len(columns) and not (columns.min() >= 0 and columns.max() < self.shape[1]):
            raise SourceError(f"{self._name} has a column index outside its {self.shape[1]} columns")
        kind = self._data.dtype if self._data.dtype.kind == "f" else np.dtype(np.float64)
        return Entries.of_csr(np.diff(ends), columns, self._data[ends[0] : ends[-1]].astype(kind), self.shape[1])


# ---- PyG's objects --------------------------------------------------------------------------------------------


def is_pyg_data(source: object) -> bool:
    """Return whether ``source`` looks like a ``torch_geometric.data.Data`` or ``Dataset``, without importing them."""
    return any(base.__module__.startswith("torch_geometric.data") for base in type(source).__mro__)


def pyg_source(data: Any, request: Request) -> Source:
    """Return the graph of ``data``, or of the only graph in the dataset ``data``; raise SourceError for anything else.

    Tensors are read in place: they are the caller's memory, outside the budget.
    """
    if any(base.__name__ == "Dataset" for base in type(data).__mro__):
        data = data[0]
    kind = type(data).__name__
    if kind not in ("Data", "HeteroData"):
        several = "; where a batch is one graph, with labels of nodes, make a Data of its x, edge_index, y and masks"
        raise SourceError(
            f"a PyG {kind} cannot be converted, only a Data, a HeteroData or a list of Data"
            f"{several if kind == 'DataBatch' else ''}"
        )
    batch = getattr(data, "batch", None) if kind == "Data" else None
    if batch is not None and bool((batch != batch[:1]).any()):
        raise SourceError(
            "the PyG Data has a batch of several graphs, which would count as one; give them as a list, or without "
            "batch if the model does not look at it"
        )
    if request.inputs and kind != "Data":
        raise SourceError(f"the PyG {kind} has {' and '.join(request.inputs)} beside x; make them columns of x")
    if kind == "HeteroData" and (len(data.node_types), len(data.edge_types)) != (1, 1):
        return _hetero_source(data, request)
    of_nodes = data
    parts: list[tuple[Any, tuple[str, ...]]] = [(data, _PYG_ARRAYS)]
    if kind == "HeteroData":  # of one kind of node and one of edge
        of_nodes = data[data.node_types[0]]
        parts = [(of_nodes, _NODE_ARRAYS), (data[data.edge_types[0]], ("edge_index", *EDGE_DATA_NAMES))]
    arrays: dict[str, Any] = {}
    for part, names in parts:
        arrays |= _arrays_of(part, names)
    if "y" not in arrays and kind == "Data":
        arrays |= _labels_by_split(data)
    beside = {name: getattr(data, name, None) for name in request.inputs}
    if beside and "x_data" in arrays:
        raise SourceError(f"the PyG {kind} has {' and '.join(beside)} beside no dense x; make them columns of x")
    if "x" not in arrays and not beside:
        nodes = len(arrays["y"]) if "y" in arrays and "num_nodes" not in of_nodes else of_nodes.num_nodes
        arrays |= {} if nodes is None else {"num_nodes": np.array(nodes)}
    inputs = {"x": arrays["x"]} if "x" in arrays and beside else {}
    for name, tensor in beside.items():
        inputs |= _tensor_arrays(tensor, name)
    if beside:
        arrays |= {"x": SideBySide(inputs, f"the PyG {kind}")}
    options = ArrayOptions(request=request, name=f"the PyG {kind}", format="pyg", may_lack_features=True)
    source = array_source(arrays, options)
    if kind == "Data" and (said := _adjacency_facts(data, arrays)):
        source = replace(source, description=source.description | {"adj_t": said})
    return _describe_unused(source, {"": data} if kind == "Data" else {}, inputs)


def _adjacency_facts(data: Any, arrays: Mapping[str, AnyArray]) -> list[str]:
    """Return what a model would see in edges given as ``adj_t``: "matrix", "weights", and "loops" for self-loops.

    In a torch matrix, PyG's GCNConv adds self-loops to existing ones. In torch-sparse's matrix, as in ``edge_index``,
    they replace existing ones.
    """
    adj_t = None if getattr(data, "edge_index", None) is not None else getattr(data, "adj_t", None)
    if adj_t is None:
        return []
    sources, targets = arrays["edge_index"]
    has_loops = not hasattr(adj_t, "coo") and bool((sources == targets).any())
    return ["matrix"] + ["weights"] * ("edge_weight" in arrays) + ["loops"] * has_loops


def _labels_by_split(data: Any) -> dict[str, AnyArray]:
    """Return labels given for each split, ``train_y`` beside ``train_idx``, as in PyG's ``Entities``; other nodes get
    -1 or NaN."""
    names = [(f"{split}_idx", f"{split}_y") for split in ("train", "val", "test")]
    found = {pair: _arrays_of(data, pair) for pair in names if set(pair) <= {*data.keys()}}
    if not found:
        return {}
    given = [(idx, y, arrays[idx], arrays[y]) for (idx, y), arrays in found.items()]
    dtype = np.result_type(np.int8, *(values.dtype for *_, values in given))
    labels = np.full((int(data.num_nodes), *given[0][-1].shape[1:]), -1 if dtype.kind == "i" else np.nan, dtype)
    for idx, y, nodes, values in given:
        if values.shape != (*nodes.shape, *labels.shape[1:]):
            raise SourceError(f"the PyG Data: {y} has the shape {values.shape}, one label for each of {idx} wanted")
        with suppress(IndexError):  # reported when lists of nodes are checked
            labels[nodes] = values
    return {"y": labels}


def inputs_of(arrays: Mapping[str, AnyArray]) -> list[list[Any]]:
    """Return the description, for a store's source, of ``arrays`` [N] or [N, columns] that are concatenated in
    ``x``."""
    return [[name, array.shape[1] if array.ndim > 1 else 0, array.dtype.kind in "iu"] for name, array in arrays.items()]


class SideBySide:
    """Arrays [N] and [N, columns] presented as one, whose rows are concatenated as they are read.

    SourceError, with ``where``, for one of another form than the others, or than ``nodes``.
    """

    ndim = 2

    def __init__(self, arrays: Mapping[str, AnyArray], where: str, nodes: int | None = None) -> None:
        for name, array in arrays.items():
            nodes = next(iter(array.shape), 1) if nodes is None else nodes
            if array.ndim not in (1, 2) or len(array) != nodes:
                raise SourceError(f"{where}: {name} has the shape {array.shape}, not a row for each of {nodes} nodes")
        self._arrays = [array[:, None] if array.ndim == 1 else array for array in arrays.values()]
        self.shape = len(self._arrays[0]), sum(array.shape[1] for array in self._arrays)
        self.dtype = np.result_type(*self._arrays)

    def __getitem__(self, rows: slice) -> AnyArray:
        return np.concatenate([array[rows] for array in self._arrays], axis=1)


def _hetero_source(data: Any, request: Request) -> Source:
    """Return the graph of a HeteroData.

    One type has labels and splits; without any, the first type counts as such, and only links can be trained. Features
    are optional.
    """
    name = "the PyG HeteroData"
    if not data.edge_types:
        raise SourceError(f"{name} has no edges")
    labelled = [kind for kind in data.node_types if getattr(data[kind], "y", None) is not None]
    with_splits = [kind for kind in data.node_types if any(name in data[kind] for name in _SPLIT_ARRAYS)]
    if len(labelled) > 1:  # prefer the type that has splits
        labelled = [kind for kind in labelled if kind in with_splits] or labelled
    if len(labelled) > 1:
        told, other = " and ".join(map(repr, labelled)), labelled[1]
        raise SourceError(f"{name}: {told} have labels, of which those of one type are trained; del data[{other!r}].y")
    labelled = labelled or with_splits or data.node_types[:1]
    nodes = {kind: _nodes_of_type(data[kind], kind, request, labelled=kind == labelled[0]) for kind in data.node_types}
    edges = {kind: _relation(data[tuple(kind)], kind, request) for kind in map(EdgeType._make, data.edge_types)}
    source = nodes.pop(labelled[0])
    found = typed_source(replace(source, name=name), labelled[0], nodes, edges)
    return _describe_unused(found, {kind: data[kind] for kind in data.node_types}, {})


def _describe_unused(source: Source, data: Mapping[str, Any], inputs: Mapping[str, AnyArray]) -> Source:
    """Return ``source`` with a description of unused attributes and of model inputs.

    It names the attributes that the ``data`` of each node type has besides, and the ``inputs`` concatenated in ``x``.
    """
    known = (*_MODEL_INPUTS, "num_nodes", "batch", "ptr", *inputs)
    others = [[kind, sorted({*one.keys()}.difference(known))] for kind, one in data.items()]
    said = {"left_out": others} | ({INPUTS: inputs_of(inputs)} if inputs else {})
    return replace(source, description=source.description | said)


def _nodes_of_type(data: Any, kind: str, request: Request, *, labelled: bool) -> Source:
    """Return the nodes of one type without edges, and with labels if they are ``labelled``."""
    name = f"the PyG HeteroData's {kind!r}"
    given = {part: tensor for part in _NODE_ARRAYS if (tensor := getattr(data, part, None)) is not None}
    if "x" not in given and data.num_nodes is None:
        raise SourceError(f"{name} has neither features nor a number; give it x or num_nodes")
    if "x" not in given and not labelled:
        return nodes_alone(name, int(data.num_nodes))
    nodes = len(given["x"]) if "x" in given else int(data.num_nodes)
    arrays: dict[str, AnyArray] = {"edge_index": np.empty((2, 0), dtype=np.int64), "num_nodes": np.array(nodes)}
    for part, tensor in given.items():
        arrays |= _tensor_arrays(tensor, part) if labelled or part == "x" else {}
    if not labelled:  # these are never read
        request = replace(request, split=None)
        arrays |= {"y": np.zeros(nodes, dtype=np.int64), "train_mask": np.ones(nodes, np.bool_)}
    return array_source(arrays, ArrayOptions(request=request, name=name, format="pyg", may_lack_features=True))


def _relation(data: Any, kind: EdgeType, request: Request) -> RelationSource:
    """Return the edges of one type."""
    name = f"the PyG HeteroData's edges {kind}"
    arrays = _arrays_of(data, ("edge_index", *EDGE_DATA_NAMES))
    if "edge_index" not in arrays:
        raise SourceError(f"{name} have no edge_index")
    columns, count = _edge_columns(arrays, name)
    arrays = {} if request.drop_edge_data else arrays
    _check_numbers(arrays, name)
    carried = _edge_data(arrays, count, name)

    edges = partial(_blocks, _edge_reader(columns, carried), count, lambda: None)
    features = 0 if carried.features is None else carried.features.shape[1]
    return RelationSource(count, edges, carried.weight is not None, features)


def _arrays_of(part: Any, names: Sequence[str]) -> dict[str, AnyArray]:
    """Return the tensors of these names as arrays of the generic form; edges may be given as ``adj_t``."""
    given = {name: tensor for name in names if (tensor := getattr(part, name, None)) is not None}
    if "edge_index" in names and "edge_index" not in given and (adj_t := getattr(part, "adj_t", None)) is not None:
        ends = getattr(part, "_key", None)
        given |= _adjacency_arrays(adj_t, may_have_loops=ends is not None and ends[0] == ends[-1])
    arrays: dict[str, AnyArray] = {}
    for name, tensor in given.items():
        arrays |= _tensor_arrays(tensor, name)
    return arrays


def _adjacency_arrays(adj_t: Any, *, may_have_loops: bool) -> dict[str, Any]:
    """Return the edges of a sparse matrix as PyG's ``ToSparseTensor`` makes it, and their weights unless all are 1.

    The matrix is torch's or torch-sparse's, and its rows are targets. SourceError for self-loops in torch's matrix,
    which are possible where both ends have one type (``may_have_loops``).
    """
    import torch

    if hasattr(adj_t, "coo"):
        targets, sources, weight = adj_t.coo()
    elif isinstance(adj_t, torch.Tensor) and adj_t.layout is not torch.strided:
        entries = adj_t.detach().to_sparse_coo()  # type: ignore[no-untyped-call]
        (targets, sources), weight = entries._indices(), entries._values()
        if may_have_loops and bool((targets == sources).any()):
            raise SourceError(
                "the PyG Data's adj_t has self-loops, which layers like GCNConv count twice in a matrix of torch's and "
                "once in edge_index: use RemoveSelfLoops before ToSparseTensor, or leave that out, as forward may call "
                "edge_index adj_t"
            )
    else:
        raise SourceError("the PyG Data's adj_t is no sparse matrix")
    edges = {"edge_index": torch.stack((sources, targets))}
    return edges if weight is None or bool((weight == 1).all()) else edges | {"edge_weight": weight}


def _tensor_arrays(tensor: Any, name: str) -> dict[str, AnyArray]:
    """Return a tensor as arrays of the generic form; ``x`` may be sparse, torch's or torch-sparse's."""
    import torch  # Conversion does without, unless it is given tensors.

    if name == "x" and hasattr(tensor, "to_torch_sparse_csr_tensor"):
        tensor = tensor.to_torch_sparse_csr_tensor()
    where = f"the PyG Data's {name}"
    if not isinstance(tensor, torch.Tensor):
        raise SourceError(f"{where} is no tensor")
    if name != "x" or tensor.layout is torch.strided or tensor.dim() != 2 or tensor.dense_dim():
        return {name: dense_array(tensor, where)}
    with warnings.catch_warnings(action="ignore"):  # such tensors are in beta
        rows = tensor.detach().to_sparse_csr()
    parts = {"data": rows.values(), "indices": rows.col_indices(), "indptr": rows.crow_indices()}
    found = {f"x_{part}": dense_array(one, where) for part, one in parts.items()}
    return found | {"x_shape": np.array(rows.shape)}
