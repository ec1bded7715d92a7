# SPDX-License-Identifier: Apache-2.0
"""Many graphs as one source: the rows of one graph after another, edges within them, and labels of graphs.

G graphs, N nodes and E edges of all of them together.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np

from ooc.errors import SourceError
from ooc.sources.formats.arrays import ARRAY_OPTIONS, EDGE_DATA_NAMES, INPUTS, SideBySide, inputs_of, is_pyg_data
from ooc.sources.labels import (
    TASK_OPTION,
    USUAL_SPLIT,
    IndexSplits,
    LabelForm,
    Split,
    in_splits,
    label_blocks,
    label_form,
    random_split,
    unsaid_split_note,
)
from ooc.sources.node_data import dense_array
from ooc.sources.reading import Request, check_taken
from ooc.sources.source import EdgeBlock, EdgeData, Ids, LabelBlock, Rows, Source
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS, Task

_NUMBERS_PER_GRAPH = 3
"""Numbers held for each graph: where it begins, and up to two that a format needs."""
_PASSED_ATTRIBUTES = ("x", "edge_index", "num_nodes", "batch", "ptr")
"""Attributes of PyG's data that models are given otherwise."""
OF_EDGES = "of_edges"
"""The key, in a store's source, of the edges' counterpart of ``INPUTS``."""


def graphs_source(
    *,
    name: str,
    format: str,
    sizes: Ids,
    values: Callable[[int], Iterator[AnyArray]],
    form: LabelForm,
    request: Request,
    splits: Mapping[str, AnyArray] | None = None,
    classes: int | None = None,
    **others: Any,
) -> Source:
    """Return the source of graphs with these numbers of nodes, ``sizes`` [G], whose labels are ``values`` [n] or [n,
    L].

    ``splits``: the numbers of each split's graphs, if the source defines them; ``classes``: their number, if known;
    ``others``: further fields of ``Source``. SourceError for a graph without nodes.
    """
    if not len(sizes) or not sizes.all():
        raise SourceError(
            f"{name}: graph {int(sizes.argmin())} has no nodes" if len(sizes) else f"{name} has no graphs"
        )
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    notes, asked = [form.note] if form.note else [], request.split
    split: Split
    listed_bytes, at_random = 0, asked is not None or splits is None
    if asked is None and splits is not None:
        listed = IndexSplits(splits, nodes=len(sizes), name=f"{name}: splits of graphs")
        split, said, listed_bytes = listed.masks, "of the source", listed.nbytes
    else:
        split, said = random_split(len(sizes), str(asked or USUAL_SPLIT))
        notes.append(unsaid_split_note(name) if asked is None else f"{name}: split is {said}")

    def labels(size: int) -> Iterator[LabelBlock]:
        return label_blocks(form, in_splits(values(size), split), at_random=at_random)

    made = Source(
        name=name,
        format=format,
        num_nodes=int(offsets[-1]),
        num_classes=form.width or classes,
        labels=labels,
        task=form.task,
        graph_offsets=offsets,
        resident_bytes=_NUMBERS_PER_GRAPH * offsets.nbytes + listed_bytes,
        notes=tuple(notes),
        **others,
    )
    return replace(made, description={"split": said, **made.description})


def graph_labels(
    name: str, width: int, dtype: np.dtype[np.generic], request: Request, only_answers: Callable[[], bool]
) -> LabelForm:
    """Return the form of ``width`` labels per graph: as for nodes, except that one floating-point number is a value."""
    asked = request.option(TASK_OPTION)
    if asked is None and width == 1 and dtype.kind == "f" and not only_answers():
        return LabelForm(name=name, task=Task.VALUES, width=1, note=f"{name}: labels are taken as values")
    return label_form(name, (1, width), dtype, asked=asked, scan=only_answers)


# ---- PyG's objects --------------------------------------------------------------------------------------------------


def is_many_graphs(source: object) -> bool:
    """Return whether ``source`` is a list or dataset of PyG's ``Data``, or another iterable of them.

    SourceError for an iterator, which yields them only once.
    """
    if isinstance(source, str | Mapping) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        return False
    if _are_splits(source):
        return True
    if is_pyg_data(source):
        dataset = any(base.__name__ == "Dataset" for base in type(source).__mro__)
        return dataset and len(source) != 1  # type: ignore[arg-type]
    if not type(source).__module__.startswith(("pandas", "polars", "networkx", "scipy")):
        once = isinstance(source, Iterator)
        if isinstance(source, list | tuple) and not source:
            raise SourceError(f"the {type(source).__name__} of graphs is empty")
        first = next(iter(source), None)  # type: ignore[call-overload]
        if first is not None and is_pyg_data(first):
            if once:
                raise SourceError(f"a {type(source).__name__} gives its graphs once, and they are read several times")
            return True
    return False


def _are_splits(source: object) -> bool:
    """Return whether ``source`` is three lists or datasets of graphs."""
    return isinstance(source, list | tuple) and len(source) == len(SPLITS) and all(map(is_many_graphs, source))


def in_turn(graphs: Any) -> Iterable[Any]:
    """Return an iterable of the graphs; one that only has ``__getitem__`` is indexed within its length."""
    if hasattr(type(graphs), "__iter__") or not hasattr(graphs, "__len__"):
        return cast("Iterable[Any]", graphs)
    return _IndexedGraphs(graphs)


@dataclass(frozen=True)
class _IndexedGraphs:
    graphs: Any

    def __iter__(self) -> Iterator[Any]:
        return (self.graphs[at] for at in range(len(self.graphs)))


class _ConcatenatedSplits:
    """The graphs of ``parts``, each of which is a split, one after another."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = [*parts]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(map(in_turn, self._parts))

    def get_idx_split(self) -> dict[str, AnyArray]:
        ends = np.cumsum([0, *map(len, self._parts)])
        return {split: np.arange(*ends[at : at + 2]) for at, split in enumerate(SPLITS)}


def many_graphs_source(graphs: Any, request: Request) -> Source:
    """Return the graphs of a list or dataset of PyG's ``Data``.

    They are iterated over once to count them, and once for each of edges, features and labels; one at a time is held. A
    dataset's ``get_idx_split`` defines its splits; of three lists or datasets each is a split.
    """
    check_taken(ARRAY_OPTIONS, "a list of graphs", request)
    graphs = _ConcatenatedSplits(graphs) if _are_splits(graphs) else graphs
    name = getattr(graphs, "name", None) or (
        "the graphs" if isinstance(graphs, list | tuple | _ConcatenatedSplits) else type(graphs).__name__
    )
    each = in_turn(graphs)
    found = _Graphs(each, str(name), request)
    splits = None
    if hasattr(graphs, "get_idx_split"):
        told = graphs.get_idx_split()
        splits = {split: np.asarray(told[split]) for split in SPLITS}
    form = graph_labels(found.name, found.labels, found.label_type, request, lambda: found.only_answers)
    return graphs_source(
        name=found.name,
        format="pyg",
        sizes=np.array(found.sizes, dtype=np.int64),
        values=lambda size: Rows(found.y(data, at) for at, data in enumerate(each)).blocks(size),
        form=form,
        request=request,
        splits=splits,
        num_edges=found.edges,
        num_features=found.features or 1,
        features=lambda size: Rows(found.x(data, at) for at, data in enumerate(each)).blocks(size),
        edges=found.edge_blocks,
        has_edge_weight=bool(found.columns["edge_weight"]),
        num_edge_features=found.columns["edge_attr"],
        description={"left_out": [["", sorted(found.others)]], **found.description},
    )


class _Graphs:
    """The sizes and forms found by one pass over PyG's graphs; SourceError where a graph differs in form from the
    first."""

    def __init__(self, graphs: Iterable[Any], name: str, request: Request) -> None:
        self.name, self._graphs = name, graphs
        self.sizes = array("q")
        self.edges, self.only_answers = 0, True
        self.columns: dict[str, int] = {}
        self._beside, self._of_edges = tuple(request.inputs), () if request.drop_edge_data else EDGE_DATA_NAMES
        self.description: dict[str, Any] = {}
        self.others = set[str]()
        """Names of the graphs' other attributes."""
        of_nodes = True
        for at, data in enumerate(graphs):
            if type(data).__name__ != "Data" or data.edge_index is None:
                batches = "; of batches give the graphs, as the dataset of a DataLoader" * type(data).__name__.endswith(
                    "Batch"
                )
                raise SourceError(f"{name}: graph {at} is no homogeneous PyG Data with an edge_index{batches}")
            if data.x is not None and data.x.ndim != 2:
                raise SourceError(f"{name}: x of graph {at} has the shape {tuple(data.x.shape)}, not [nodes, features]")
            x, y = self._x(data, at), self.y(data, at)
            edges = self._ends(data, at).shape[1]
            carried = {one: self._edge_values(data, one, at) for one in EDGE_DATA_NAMES}
            columns = {one: 0 if of is None or request.drop_edge_data else of.shape[1] for one, of in carried.items()}
            shape = (0 if x is None else x.shape[1], y.shape[1], columns)
            of_nodes = of_nodes and np.shape(data.y)[:1] == (int(data.num_nodes),) != (1,)
            said = self._describe_inputs(data, at)
            if not at:
                self.description = said
                self.features, self.labels, self.columns = shape
                self.label_type = y.dtype
            if shape != (self.features, self.labels, self.columns) and not of_nodes:
                wanted = (self.features, self.labels, *self.columns.values())
                given = (*shape[:2], *columns.values())
                raise SourceError(
                    f"{name}: graph {at} has features, labels, weights and features of edges in {given} columns, the "
                    f"first has {wanted}"
                )
            # Integers where all graphs have such: PyG's batches are of the type that holds all.
            self.label_type = np.result_type(self.label_type, y.dtype)
            for part, inputs in self.description.items():
                for of_all, (one, count, whole) in zip(inputs, said[part], strict=False):
                    if of_all[:2] != [one, count]:
                        what = f"{one} of graph {at} has {count or 'no'} columns"
                        raise SourceError(f"{name}: {what}, {of_all[0]} of the first has {of_all[1] or 'none'}")
                    of_all[-1] &= whole
            self.sizes.append(int(data.num_nodes))
            self.others |= {*data.keys()}.difference((*_PASSED_ATTRIBUTES, *EDGE_DATA_NAMES, *self._beside))
            self.edges += edges
            self.only_answers &= bool(((y == 0) | (y == 1) | np.isnan(y)).all())
        if not self.sizes:
            raise SourceError(f"{name} has no graphs")
        if of_nodes:
            raise SourceError(
                f"{name}: y of every graph has an entry for each of its nodes; labels are of graphs: make it "
                "[1, labels] if it is those of the graph; with labels of nodes, of batch = Batch.from_data_list(graphs)"
                " Data(x=batch.x, edge_index=batch.edge_index, y=batch.y) with masks is one graph, for ooc.Trainer"
            )

    def y(self, data: Any, at: int) -> AnyArray:
        """Return the labels of a graph, [1, L]."""
        y = self._array(data, "y", at).reshape(1, -1)
        return y.astype(np.float64) if y.dtype.kind == "f" else y

    def x(self, data: Any, at: int) -> AnyArray:
        """Return the features of a graph, [n, F]; ones where graphs have no features."""
        x = self._x(data, at)
        return np.ones((int(data.num_nodes), 1), dtype=np.float32) if x is None else x[:]

    def _x(self, data: Any, at: int) -> SideBySide | None:
        """Return all inputs of the nodes, None where there are none."""
        arrays = self._inputs(data, at)
        return SideBySide(arrays, f"{self.name}, graph {at}", int(data.num_nodes)) if arrays else None

    def _inputs(self, data: Any, at: int) -> dict[str, AnyArray]:
        names = ("x", *self._beside) if data.x is not None else self._beside
        return {name: self._array(data, name, at) for name in names}

    def _describe_inputs(self, data: Any, at: int) -> dict[str, Any]:
        """Return a description of the nodes' and edges' inputs, in graphs like ``data``."""
        edges = {name: self._array(data, name, at) for name in self._of_edges if getattr(data, name, None) is not None}
        return {INPUTS: inputs_of(self._inputs(data, at)), OF_EDGES: inputs_of(edges)}

    def _array(self, data: Any, name: str, at: int) -> AnyArray:
        """Return an attribute of a graph that holds numbers."""
        value, where = getattr(data, name, None), f"{self.name}: {name} of graph {at}"
        if value is None:
            raise SourceError(f"{self.name}: graph {at} has no {name}")
        try:
            found = dense_array(value, where) if hasattr(value, "layout") else np.asarray(value)
        except ValueError as error:  # of lists that are of different lengths
            raise SourceError(f"{where} is no array: {error}") from error
        if found.dtype.kind not in "biuf":
            raise SourceError(f"{where} holds {found.dtype} values, not plain numbers")
        return found

    def _ends(self, data: Any, at: int) -> AnyArray:
        """Return the ends of a graph's edges, [2, e]."""
        ends = self._array(data, "edge_index", at)
        if ends.ndim != 2 or len(ends) != 2 or (ends.dtype.kind not in "iu" and ends.size):
            what = f"is {ends.dtype} {list(ends.shape)}, not node ids [2, edges]"
            raise SourceError(f"{self.name}: edge_index of graph {at} {what}")
        return ends.astype(np.int64)

    def _edge_values(self, data: Any, name: str, at: int) -> AnyArray | None:
        """Return the edges' weights or features, [e, columns]."""
        if getattr(data, name, None) is None:
            return None
        values, edges = self._array(data, name, at), data.edge_index.shape[1]
        wide = (edges, 1) if name == "edge_weight" else (edges, *values.shape[1:2])
        if values.shape not in ((edges,), wide):
            raise SourceError(f"{self.name}: {name} of graph {at} has the shape {values.shape} for {edges} edges")
        return values[:, None] if values.ndim == 1 else values

    def edge_blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield the edges of whole graphs, about ``size`` of them at a time."""
        row, held, parts = 0, 0, list[tuple[AnyArray, ...]]()
        taken = [name for name in EDGE_DATA_NAMES if self.columns[name]]
        for at, data in enumerate(self._graphs):
            ends = self._ends(data, at)
            if ends.size and not 0 <= ends.min() <= ends.max() < data.num_nodes:
                raise SourceError(f"{self.name}: an edge leaves its graph, which has {data.num_nodes} nodes")
            carried = [self._edge_values(data, name, at) for name in taken]
            parts.append((ends[0] + row, ends[1] + row, *(array for array in carried if array is not None)))
            row, held = row + int(data.num_nodes), held + ends.shape[1]
            if held >= size:
                yield self._block(parts, taken)
                held, parts = 0, []
        if parts:
            yield self._block(parts, taken)

    def _block(self, parts: list[tuple[AnyArray, ...]], taken: list[str]) -> EdgeBlock:
        sources, targets, *carried = map(np.concatenate, zip(*parts, strict=True))
        named = dict(zip(taken, carried, strict=True))
        weight = named.get("edge_weight")
        return EdgeBlock(
            sources, targets, EdgeData(None if weight is None else weight.reshape(-1), named.get("edge_attr"))
        )
