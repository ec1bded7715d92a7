# SPDX-License-Identifier: Apache-2.0
"""A source's labels, splits and ids → ``y``, ``split/*``, ``perm`` and ``ids``, checked on the way."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from ooc.conversion.journal import Journal, flush_all
from ooc.errors import SourceError
from ooc.sources.source import LabelBlock, Source
from ooc.storage.store import SPLITS, Task
from ooc.storage.writer import ArrayWriter

_STAGE = "labels"
_WRITTEN = ("y", "perm", "split")
_COUNTED_CLASSES = 65_536
"""Classes that a graph may have of fewer nodes, where nobody says how many there are."""


def write_labels(source: Source, store: Path, *, block_rows: int, journal: Journal) -> dict[str, Any]:
    """Write labels, splits and original ids (nothing is reordered: row i is node i); ``num_classes``, ``split_sizes``.

    SourceError for labels that are none of the source's task, nodes in two splits or in one without a label,
    and an empty train split.
    """
    if (found := journal.result(_STAGE)) is not None:
        return dict(found)
    for name in (*_WRITTEN, "ids"):
        rmtree(store / name, ignore_errors=True)
    task = source.task
    assert task is Task.CLASSES or source.num_classes, "only classes can be counted on the way"
    nodes = source.num_nodes
    sizes = dict.fromkeys(SPLITS, 0)
    largest = -1
    shape = (nodes,) if task is Task.CLASSES else (nodes, source.num_classes or 0)
    with ExitStack() as stack:
        y = stack.enter_context(ArrayWriter(store, "y", shape, task.dtype))
        perm = stack.enter_context(ArrayWriter(store, "perm", (nodes,), np.int64))
        splits = {name: stack.enter_context(ArrayWriter(store, f"split/{name}", (nodes,), np.bool_)) for name in SPLITS}
        for row, block in _checked(source, block_rows):
            y.append(block.y.astype(task.dtype, copy=False))
            perm.append(np.arange(row, row + len(block.y), dtype=np.int64))
            for name in SPLITS:
                splits[name].append(getattr(block, name))
                sizes[name] += int(getattr(block, name).sum())
            if task is Task.CLASSES:
                largest = max(largest, int(block.y.max()))
        if y.rows != nodes:
            raise SourceError(f"{source.name} has labels of {y.rows} nodes, not of {nodes}")
        if not sizes["train"]:
            raise SourceError(f"{source.name} has an empty train split: no node to train on")
    if source.ids is not None:
        with ArrayWriter(store, "ids", (nodes,), np.int64) as writer:
            for ids in source.ids(block_rows):
                writer.append(ids)
    written = {"num_classes": source.num_classes or largest + 1, "split_sizes": sizes}
    arrays = _WRITTEN if source.ids is None else (*_WRITTEN, "ids")
    return journal.finish(_STAGE, written, lambda: flush_all([store / name for name in arrays]))


def _checked(source: Source, block_rows: int) -> Iterator[tuple[int, LabelBlock]]:
    row, task = 0, source.task
    # Where nobody says how many classes there are, a number past any model's width is damage. (A part of a graph may
    # well have labels past the number of its nodes.)
    counted = source.num_classes is None
    most = max(source.num_nodes, _COUNTED_CLASSES) if source.num_classes is None else source.num_classes
    for block in source.labels(block_rows):
        if row + len(block.y) > source.num_nodes:
            raise SourceError(f"{source.name} has labels of more than its {source.num_nodes} nodes")
        valid = task.valid(block.y, most)
        if not valid.all():
            at = int(valid.argmin())
            reason = " (where they are counted, as many as nodes or 65,536 at the most)" * counted
            raise SourceError(f"node {row + at} has the label {block.y[at]}; {task.meaning(most)}{reason}")
        labelled = task.labelled(block.y)
        twice = block.train.astype(np.int8) + block.valid + block.test > 1
        if twice.any():
            at = int(twice.argmax())
            names = " and ".join(name for name in SPLITS if getattr(block, name)[at])
            raise SourceError(f"the splits overlap: node {row + at} is in {names}")
        for name in SPLITS:
            bare = getattr(block, name) & ~labelled
            if bare.any():
                raise SourceError(f"node {row + int(bare.argmax())} of the {name} split has no label")
        yield row, block
        row += len(block.y)
