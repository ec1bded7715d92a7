# SPDX-License-Identifier: Apache-2.0
"""Labels and splits for a graph that comes as edges alone: an npy file, a table's columns, or made up.

N nodes, L columns of labels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ooc.conversion.arrays import random_split
from ooc.conversion.label_form import LabelForm, label_form, only_answers
from ooc.conversion.node_features import RANDOM, check_rows, npy_of_nodes, random_parameters
from ooc.conversion.node_tables import NodeTables
from ooc.conversion.reading import Request
from ooc.conversion.source import LabelBlock, Mask, ranges
from ooc.conversion.tables import Cells, Table, is_table
from ooc.errors import SourceError
from ooc.storage.array import AnyArray
from ooc.storage.store import Task

_STREAM = 0x1A
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class NodeLabels:
    """``blocks(nodes, size)``, as a source's; SourceError where there are not those of ``nodes``.

    ``num_classes`` None: one more than the largest. ``rows``: as of ``NodeFeatures``.
    """

    task: Task
    num_classes: int | None
    blocks: Callable[[int, int], Iterator[LabelBlock]]
    rows: int | None
    table: Table | None
    split: str | None
    notes: tuple[str, ...]


_Found = Iterator[tuple[AnyArray, list[Mask] | None]]
"""Labels [n] or [n, L] as in the file and, where it has them, who is in train, valid and test."""


def node_labels(name: str, text: str, tables: NodeTables, request: Request) -> NodeLabels:
    """What ``--labels`` asks for: ``random:C[:SEED]`` or a file, for the graph ``name``."""
    asked = request.option("task")
    if text.startswith(RANDOM):
        classes, seed = random_parameters(text, "labels")
        form = LabelForm(name=name, task=Task.CLASSES, width=None)
        return _with_split(
            name,
            form,
            lambda nodes, size: _made_up(classes, seed, nodes),
            str(request.split or "random"),
            num_classes=classes,
        )
    path = Path(text)
    if is_table(path):
        return _of_table(name, tables.open(path), tables, request)
    array = npy_of_nodes(path)
    if len(array.shape) > 2:
        raise SourceError(f"{path} has the shape {array.shape}, not one label or row of labels for each node")
    if request.split is None:
        raise SourceError(f"{path} says nothing of splits; give split='random', or a table with a column split")

    def found(nodes: int, size: int) -> _Found:
        check_rows(path, array.shape[0], nodes)
        for start, stop in ranges(nodes, size):
            yield array.rows(start, stop), None

    def scan() -> bool:
        return only_answers(y for y, _ in found(array.shape[0], _BLOCK_ROWS))

    form = label_form(str(path), array.shape, array.dtype, asked=asked, scan=scan)
    return _with_split(name, form, found, str(request.split), rows=array.shape[0])


def _of_table(name: str, table: Table, tables: NodeTables, request: Request) -> NodeLabels:
    names = tables.labels(table)
    columns = tables.split(table)
    if columns is None and request.split is None:
        raise SourceError(
            f"{table.path} has no column split; name one with split_column=, or one each of true and false for train, "
            f"valid and test, or give split='random'"
        )
    # Cells of a table are of no type: several columns are answers unless something else is asked for.
    shape, answers = (0, len(names)), np.dtype(np.int8)
    form = label_form(str(table.path), shape, answers, asked=request.option("task"), scan=lambda: True)
    wanted = dict.fromkeys(names, Cells.REAL) | (columns.cells if columns is not None else {})

    def found(nodes: int, size: int) -> _Found:
        done = 0
        for block in table.blocks(wanted, size):
            y = np.column_stack([block[label] for label in names])
            masks = columns.masks(block, done, name) if columns is not None else None
            done += len(y)
            if done > nodes:
                break
            yield y, masks
        check_rows(table.path, done, nodes)

    split = None if request.split is None else str(request.split)
    return _with_split(name, form, found, split, rows=table.rows, table=table)


def _with_split(
    name: str,
    form: LabelForm,
    found: Callable[[int, int], _Found],
    split: str | None,
    *,
    num_classes: int | None = None,
    rows: int | None = None,
    table: Table | None = None,
) -> NodeLabels:
    """``split``: a random one of the labelled nodes; None where columns beside the labels say it."""
    note = random_split(1, split)[1] if split is not None else None

    def blocks(nodes: int, size: int) -> Iterator[LabelBlock]:
        members = random_split(nodes, split)[0] if split is not None else None
        row = 0
        for raw, masks in found(nodes, size):
            y = form.block(raw, row)
            if members is not None:
                labelled = form.task.labelled(y)
                masks = [mask & labelled for mask in members(row, row + len(y))]
            assert masks is not None, "without a random split the table has columns of them"
            yield LabelBlock(y, *masks)
            row += len(y)

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


def _made_up(classes: int, seed: int, nodes: int) -> _Found:
    for start, stop in ranges(nodes, _BLOCK_ROWS):
        generator = np.random.Generator(np.random.SFC64([seed, _STREAM, start // _BLOCK_ROWS]))
        yield generator.integers(0, classes, stop - start), None
