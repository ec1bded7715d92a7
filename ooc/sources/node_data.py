# SPDX-License-Identifier: Apache-2.0
"""Features, labels and splits for a graph that is given as edges only.

They come from npy files, arrays of a Python program or columns of tables, or are generated at random.

N nodes, F features, L columns of labels.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import OptionError, SourceError
from ooc.sources.columns import IGNORE, NodeTables, as_argument
from ooc.sources.files.cells import Cells
from ooc.sources.files.npy import NpyArray
from ooc.sources.files.streams import check_truth_values
from ooc.sources.files.tables import Table, side_by_side, width
from ooc.sources.labels import (
    USUAL_SPLIT,
    ClassNames,
    FoundLabels,
    LabelForm,
    classes_of_names,
    in_splits,
    label_blocks,
    label_form,
    names_of_classes,
    only_answers,
    random_split,
    unsaid_split_note,
)
from ooc.sources.reading import Request
from ooc.sources.source import LabelBlock, ranges
from ooc.storage.array import AnyArray
from ooc.storage.sparse_array import Entries
from ooc.storage.store import Task


def dense_array(tensor: Any, where: str) -> AnyArray:
    """Return a tensor as an array; raise SourceError, with ``where``, for a sparse one."""
    import torch

    if tensor.layout is not torch.strided:
        raise SourceError(f"{where} is no dense tensor")
    unknown = tensor.dtype is torch.bfloat16 or (tensor.is_floating_point() and tensor.itemsize < 2)  # to numpy
    found: AnyArray = (tensor.float() if unknown else tensor).numpy(force=True)
    return found


class HeldArray:
    """An array or sparse matrix held in memory, read by rows; ``name`` for messages. SourceError for anything else."""

    def __init__(self, given: Any, name: str) -> None:
        self.name = name
        self._sparse = hasattr(given, "tocsr")
        if self._sparse:
            given = given.tocsr()
        elif hasattr(given, "detach"):  # A tensor.
            given = dense_array(given, name)
        if np.ma.is_masked(given):
            raise SourceError(f"{name} have values that are masked; fill them, or leave these nodes out")
        self._array: Any = given if self._sparse else np.asarray(given)
        self.shape: tuple[int, ...] = tuple(self._array.shape)
        self.dtype: np.dtype[Any] = self._array.dtype
        if self.dtype.kind not in "biuf" or not self.shape or 0 in self.shape:
            raise SourceError(f"{name} are {self.dtype}{list(self.shape)}, not numbers for each node")

    @property
    def entries(self) -> int | None:
        """The number of entries of a sparse matrix; None for a dense array."""
        return int(self._array.nnz) if self._sparse else None

    def rows(self, start: int, stop: int) -> AnyArray:
        """Return a copy of the rows ``start:stop``."""
        part = self._array[start:stop]
        found: AnyArray = part.toarray() if self._sparse else np.array(part)
        check_truth_values(found, self.name)
        return found

    def _without_zeros(self, start: int, stop: int) -> Entries:
        part = self._array[start:stop]
        values = part.data.astype(self.dtype if self.dtype.kind == "f" else np.float64)
        return Entries.of_csr(np.diff(part.indptr), part.indices.astype(np.int64), values, part.shape[1])

    def row_blocks(self, size: int) -> Iterator[AnyArray | Entries]:
        """Yield all rows, at most ``size`` at a time."""
        rows = self._without_zeros if self._sparse else self.rows
        return (rows(start, stop) for start, stop in ranges(self.shape[0], size))

    def matrix(self, meaning: str) -> tuple[int, int]:
        """Return its two extents; raise SourceError, with their ``meaning``, for another number of dimensions."""
        if len(self.shape) != 2:
            raise SourceError(f"{self.name} have the shape {list(self.shape)}, not {meaning}")
        return self.shape[0], self.shape[1]


RANDOM, NONE = "random:", "none"
_FEATURE_STREAM, _LABEL_STREAM = 0x0F, 0x1A
_BLOCK_VALUES = 1 << 19
_BLOCK_ROWS = 1 << 16
_MOST_COLUMNS = 1 << 20
_RANDOM = re.compile(r"random:([0-9]{1,40})(?::([0-9]{0,40}))?")  # int() refuses thousands of digits.


@dataclass(frozen=True, kw_only=True)
class NodeFeatures:
    """``blocks(nodes, size)``: features [n, ``columns``] of that many nodes, or of those that there are.

    ``rows``: the number of nodes with features; None where only reading tells, or any number will do. ``entries``: the
    number of entries of sparse features.
    """

    columns: int = 0
    blocks: Callable[[int, int], Iterator[AnyArray | Entries]] = lambda nodes, size: iter(())
    rows: int | None = None
    table: Table | None = None
    entries: int | None = None


def node_features(text: str, tables: NodeTables, request: Request) -> NodeFeatures:
    """Return the features for ``--features``: ``random:F[:SEED]``, ``none`` or a file; or for an array held in
    memory."""
    if "features" in request.arrays:
        return _array_features(HeldArray(request.arrays["features"], "features"))
    if text == NONE:
        return NodeFeatures()
    if text.startswith(RANDOM):
        return _random_features(text)
    path = Path(text)
    return _table_features(tables.open(path), tables) if tables.has(path) else _array_features(_npy_of_nodes(path))


def _array_features(array: NpyArray | HeldArray) -> NodeFeatures:
    rows, columns = array.matrix("[nodes, features]")

    def blocks(nodes: int, size: int) -> Iterator[AnyArray | Entries]:
        return array.row_blocks(size)

    entries = array.entries if isinstance(array, HeldArray) else None
    return NodeFeatures(columns=columns, blocks=blocks, rows=rows, entries=entries)


def _table_features(table: Table, tables: NodeTables) -> NodeFeatures:
    names = tables.features(table)
    if not names:
        return NodeFeatures(table=table)
    wanted = dict.fromkeys(names, Cells.REAL)
    columns = width(table, names)
    if not 0 < columns <= _MOST_COLUMNS:
        raise SourceError(f"{table.path} has no rows of features, or more than {_MOST_COLUMNS} columns")

    def blocks(nodes: int, size: int) -> Iterator[AnyArray]:
        row = 0
        for block in table.blocks(wanted, size):
            part = side_by_side(block, names)
            for name in names if not np.isfinite(part).all() else ():
                cells = block[name].reshape(len(part), -1)
                for at in np.flatnonzero(~np.isfinite(cells).all(axis=1))[:1]:
                    (value, *_), remedy = cells[at][~np.isfinite(cells[at])], as_argument(name, IGNORE)
                    where = f"{table.path}: the column {name} of node {row + at} is {value}"
                    raise SourceError(f"{where}; fill it, or leave the column out with {remedy}")
            row += len(part)
            if part.shape[1] != columns:
                raise SourceError(f"{table.path} has rows of {columns} features and rows of {part.shape[1]}")
            yield part

    return NodeFeatures(columns=columns, blocks=blocks, rows=table.rows, table=table)


def _random_features(text: str) -> NodeFeatures:
    """Return standard normal features, in fixed blocks with a generator each: a row depends on its number alone."""
    columns, seed = _random_parameters(text, "features")
    height = max(1, _BLOCK_VALUES // columns)

    def blocks(nodes: int, size: int) -> Iterator[AnyArray]:
        for start, stop in ranges(nodes, height):
            generator = np.random.Generator(np.random.SFC64([seed, _FEATURE_STREAM, start // height]))
            yield generator.standard_normal((stop - start, columns), dtype=np.float32)

    return NodeFeatures(columns=columns, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class NodeLabels:
    """``blocks(nodes, size, names)``: blocks of labels, as a source's, of that many nodes, or of those that there are.

    ``num_classes`` None: one more than the largest. ``split``: the description of a random split. ``class_names()``:
    where labels are texts, reads all of them and returns the classes' names, which ``blocks`` takes.
    """

    task: Task
    num_classes: int | None
    blocks: Callable[[int, int, ClassNames], Iterator[LabelBlock]]
    notes: tuple[str, ...]
    rows: int | None = None
    table: Table | None = None
    split: str | None = None
    class_names: Callable[[], ClassNames] | None = None
    unlabelled: bool = False


def node_labels(name: str, text: str, tables: NodeTables, request: Request) -> NodeLabels:
    """Return the labels for ``--labels``: ``random:C[:SEED]``, ``none`` or a file, for the graph ``name``."""
    asked = request.option("task")
    if text == NONE:
        return _no_labels(name, request)
    if text.startswith(RANDOM):
        classes, seed = _random_parameters(text, "labels")
        form = LabelForm(name=name, task=Task.CLASSES, width=None)
        return _with_split(
            name,
            form,
            lambda nodes, size, names: _random_labels(classes, seed, nodes),
            str(request.split or "random"),
            num_classes=classes,
        )
    path = Path(text)
    array: NpyArray | HeldArray
    if "labels" in request.arrays:
        array = HeldArray(request.arrays["labels"], "labels")
    elif tables.has(path):
        return _table_labels(name, tables.open(path), tables, request)
    else:
        array = _npy_of_nodes(path)
    if len(array.shape) > 2:
        raise SourceError(f"{array.name} has the shape {array.shape}, not one label or row of labels for each node")

    def found(nodes: int, size: int, names: ClassNames = ()) -> FoundLabels:
        for start, stop in ranges(array.shape[0], size):
            yield array.rows(start, stop), ()

    def scan() -> bool:
        return only_answers(y for y, _ in found(array.shape[0], _BLOCK_ROWS))

    form = label_form(array.name, array.shape, array.dtype, asked=asked, scan=scan)
    split = USUAL_SPLIT if request.split is None else str(request.split)
    labels = _with_split(name, form, found, split, rows=array.shape[0])
    return labels if request.split is not None else replace(labels, notes=(unsaid_split_note(array.name),))


def _no_labels(name: str, request: Request) -> NodeLabels:
    """Return missing labels, for a graph whose links are trained."""
    if request.split is not None:
        raise OptionError(f"split={request.split} is of nodes with labels, and labels are to be none")

    def blocks(nodes: int, size: int, names: ClassNames) -> Iterator[LabelBlock]:
        for start, stop in ranges(nodes, size):
            nobody = np.zeros(stop - start, dtype=np.bool_)
            yield LabelBlock(np.full(stop - start, -1), nobody, nobody, nobody)

    notes = (f"{name} has no labels, as asked: nodes cannot be trained, links can",)
    return NodeLabels(task=Task.CLASSES, num_classes=1, blocks=blocks, notes=notes, unlabelled=True)


def _table_labels(name: str, table: Table, tables: NodeTables, request: Request) -> NodeLabels:
    columns, named = tables.labels(table)
    splits = tables.split(table)
    # Cells of a table are of no type: several columns are answers unless something else is asked for.
    shape, answers = (0, len(columns)), np.dtype(np.int8)
    form = label_form(str(table.path), shape, answers, asked=request.option("task"), scan=lambda: True)
    wanted = dict.fromkeys(columns, Cells.TEXT if named else Cells.REAL) | (splits.cells if splits is not None else {})

    def found(nodes: int, size: int, names: ClassNames) -> FoundLabels:
        row = 0
        for block in table.blocks(wanted, size):
            y = classes_of_names(block[columns[0]], names) if named else side_by_side(block, columns)
            yield y, splits.masks(block, row, name) if splits is not None else ()
            row += len(y)

    def class_names() -> ClassNames:
        texts = (block[columns[0]] for block in table.blocks({columns[0]: Cells.TEXT}, _BLOCK_ROWS))
        return names_of_classes(texts, f"{table.path}: the column {columns[0]}")

    unsaid = splits is None and request.split is None
    split = USUAL_SPLIT if unsaid else None if request.split is None else str(request.split)
    labels = _with_split(name, form, found, split, rows=table.rows, table=table)
    notes = (unsaid_split_note(str(table.path)),) if unsaid else labels.notes
    return replace(labels, notes=notes, class_names=class_names if named else None)


def _with_split(
    name: str,
    form: LabelForm,
    found: Callable[[int, int, ClassNames], FoundLabels],
    split: str | None,
    *,
    num_classes: int | None = None,
    rows: int | None = None,
    table: Table | None = None,
) -> NodeLabels:
    """Return labels with a random ``split`` of the labelled nodes; None where columns beside the labels define
    splits."""
    note = random_split(1, split)[1] if split is not None else None

    def blocks(nodes: int, size: int, names: ClassNames) -> Iterator[LabelBlock]:
        labels = found(nodes, size, names)
        if split is not None:
            labels = in_splits((y for y, _ in labels), random_split(nodes, split)[0])
        return label_blocks(form, labels, at_random=split is not None)

    said = (f"{name}: split is {note}",) if note else ()
    return NodeLabels(
        task=form.task,
        num_classes=form.width if num_classes is None else num_classes,
        blocks=blocks,
        rows=rows,
        table=table,
        split=note,
        notes=(*said, *((form.note,) if form.note else ())),
    )


def _random_labels(classes: int, seed: int, nodes: int) -> FoundLabels:
    for start, stop in ranges(nodes, _BLOCK_ROWS):
        generator = np.random.Generator(np.random.SFC64([seed, _LABEL_STREAM, start // _BLOCK_ROWS]))
        yield generator.integers(0, classes, stop - start), ()


# ---- files --------------------------------------------------------------------------------------------------------


def _random_parameters(text: str, option: str) -> tuple[int, int]:
    """Return ``(number, seed)`` of ``random:NUMBER[:SEED]``."""
    found = _RANDOM.fullmatch(text)
    if found is None or not 0 < int(found[1]) <= _MOST_COLUMNS:
        what = f"{option}={text[:40]!r} is not random:NUMBER[:SEED]"
        raise OptionError(f"{what}; the most is {_MOST_COLUMNS}, and a seed has 40 digits at the most")
    return int(found[1]), int(found[2] or 0)


def _npy_of_nodes(path: Path) -> NpyArray:
    """Return the array in the npy file ``path``; raise SourceError where it has no row of numbers for each node."""
    if path.suffix != ".npy":
        raise SourceError(f"{path} is neither an npy file nor a table (CSV, Parquet)")
    array = NpyArray(path)
    if not array.shape or 0 in array.shape:
        raise SourceError(f"{path} is of the shape {list(array.shape)}, not numbers for each node")
    return array
