# SPDX-License-Identifier: Apache-2.0
"""A source's features, labels, splits and ids → ``x``, ``y``, ``split/*``, ``perm`` and ``ids``: checked, features
normalised if wanted, cast, in blocks of rows.

One thread reads (or inflates) features while this one checks, casts and writes.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from ooc.conversion.budget import Options, Shares, most_entries
from ooc.conversion.journal import Journal, flush_all
from ooc.conversion.output import Workplace
from ooc.errors import SourceError
from ooc.events import reported
from ooc.sources.files.prefetching import prefetched
from ooc.sources.labels import MOST_CLASSES
from ooc.sources.source import LabelBlock, Source
from ooc.storage.array import AnyArray
from ooc.storage.sparse_array import INDEX_DTYPE, Entries
from ooc.storage.store import SPLITS, Task
from ooc.storage.writer import ArrayWriter

_FEATURES = "features"
_LEAST = "least feature"
_LABELS = "labels"
_WRITTEN = ("y", "perm", "split")


def write_labels(source: Source, store: Path, *, block_rows: int, journal: Journal) -> dict[str, Any]:
    """Write labels, splits and original ids (nothing is reordered: row i is node i); ``num_classes``, ``split_sizes``,
    and ``incomplete``: how many nodes have some of their labels only.

    SourceError for labels that are none of the source's task, nodes in two splits or in one without a label,
    and an empty train split.
    """
    if (found := journal.result(_LABELS)) is not None:
        return dict(found)
    for name in (*_WRITTEN, "ids"):
        rmtree(store / name, ignore_errors=True)
    task = source.task
    assert task is Task.CLASSES or source.num_classes, "only classes can be counted on the way"
    nodes = source.num_nodes
    sizes = dict.fromkeys(SPLITS, 0)
    largest, incomplete = -1, 0
    shape = (nodes,) if task is Task.CLASSES else (nodes, source.num_classes or 0)
    with ExitStack() as stack:
        y = stack.enter_context(ArrayWriter(store, "y", shape, task.dtype))
        perm = stack.enter_context(ArrayWriter(store, "perm", (nodes,), np.int64))
        splits = {name: stack.enter_context(ArrayWriter(store, f"split/{name}", (nodes,), np.bool_)) for name in SPLITS}
        for row, block in _label_blocks(source, block_rows):
            y.append(block.y.astype(task.dtype, copy=False))
            perm.append(np.arange(row, row + len(block.y), dtype=np.int64))
            for name in SPLITS:
                splits[name].append(getattr(block, name))
                sizes[name] += int(getattr(block, name).sum())
            if task is Task.CLASSES:
                largest = max(largest, int(block.y.max()))
            incomplete += int(task.incomplete(block.y).sum())
        if y.rows != nodes:
            raise SourceError(f"{source.name} has labels of {y.rows} nodes, not of {nodes}")
        if not sizes["train"]:
            raise SourceError(f"{source.name} has an empty train split: no node to train on")
    if source.ids is not None:
        wide = (nodes, source.id_bytes) if source.id_bytes else (nodes,)
        with ArrayWriter(store, "ids", wide, np.uint8 if source.id_bytes else np.int64) as writer:
            for ids in source.ids(block_rows):
                writer.append(ids)
    written = {"num_classes": source.num_classes or largest + 1, "split_sizes": sizes, "incomplete": incomplete}
    arrays = _WRITTEN if source.ids is None else (*_WRITTEN, "ids")
    return journal.finish(_LABELS, written, lambda: flush_all([store / name for name in arrays]))


def _label_blocks(source: Source, block_rows: int) -> Iterator[tuple[int, LabelBlock]]:
    row, task = 0, source.task
    # Where nobody says how many classes there are, a number past any model's width is damage. (A part of a graph may
    # well have labels past the number of its nodes.)
    counted = source.num_classes is None
    most = max(source.num_nodes, MOST_CLASSES) if source.num_classes is None else source.num_classes
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


def write_features(source: Source, store: Path, work: Workplace, *, options: Options, shares: Shares) -> dict[str, Any]:
    """Write ``x`` [N, F], from where an earlier process had come; ``entries``, how many it has, where it is written
    without its zeros.

    ``row_normalize`` is PyG's NormalizeFeatures: the least entry of the whole matrix is subtracted, then
    each row divided by its sum, or by 1 where that is less. SourceError for NaN, infinity, and values
    that the ``dtype`` cannot hold.
    """
    journal, block_rows = work.journal, shares.feature_rows
    if (found := journal.result(_FEATURES)) is not None:
        return dict(found)
    wanted = np.dtype(options.dtype)
    if options.sparse_features:
        return _write_entries(source, store, work, options=options, shares=shares)
    smallest = _smallest(source, wanted, block_rows, work) if options.row_normalize else None
    shape, progress = (source.num_nodes, source.num_features), journal.progress(_FEATURES)
    if progress is None:
        rmtree(store / "x", ignore_errors=True)
    writer = ArrayWriter(store, "x", shape, wanted, progress=progress)
    with reported(work.listener, "writing features", source.num_nodes, "nodes") as advance:
        with writer:
            for row, rows in _feature_blocks(source, wanted, block_rows, first=writer.rows):
                if smallest is not None:
                    rows = rows - smallest
                    rows /= np.maximum(rows.sum(axis=1, keepdims=True), 1)
                writer.append(_cast(rows, wanted, row))
                advance(writer.rows)
                journal.advance(_FEATURES, writer.flush, writer.progress)
            if writer.rows != source.num_nodes:
                raise SourceError(f"{source.name} has features of {writer.rows} nodes, not of {source.num_nodes}")
        return journal.finish(_FEATURES, {}, writer.flush)


def _write_entries(source: Source, store: Path, work: Workplace, *, options: Options, shares: Shares) -> dict[str, Any]:
    """The same of features without their zeros."""
    journal, nodes, wanted = work.journal, source.num_nodes, np.dtype(options.dtype)
    most = most_entries(nodes, source.num_features, wanted.itemsize)
    shapes: dict[str, tuple[int, np.dtype[Any]]] = {
        "indptr": (nodes + 1, np.dtype(np.int64)),
        "indices": (most, INDEX_DTYPE),
        "values": (most, wanted),
    }
    progress = journal.progress(_FEATURES)
    if progress is None:
        rmtree(store / "x", ignore_errors=True)
    writers = {
        part: ArrayWriter(store, f"x/{part}", (rows,), kind, progress=progress and progress[part])
        for part, (rows, kind) in shapes.items()
    }
    indptr, indices, values = writers.values()

    def flush() -> None:
        for writer in writers.values():
            writer.flush()

    with ExitStack() as stack, reported(work.listener, "writing features", nodes, "nodes") as advance:
        for writer in writers.values():
            stack.callback(writer.abandon)
        if progress is None:
            indptr.append(np.zeros(1, dtype=np.int64))
        for row, block in _entry_blocks(source, wanted, shares, first=indptr.rows - 1):
            found, at = block.values, np.repeat(np.arange(row, row + len(block.counts)), block.counts)
            if values.rows + len(found) > most:
                raise SourceError(f"{source.name} has features that take more without their zeros; keep them dense")
            if options.row_normalize:
                if len(found) and found.min() < 0:
                    least = int(found.argmin())
                    raise SourceError(
                        f"feature {block.columns[least]} of node {at[least]} is {found[least]:g}: with entries below "
                        "zero none is zero once rows are normalised; keep features dense, or do not normalise"
                    )
                sums = np.bincount(at - row, weights=found, minlength=len(block.counts))
                found = found / np.maximum(sums, 1)[at - row].astype(found.dtype)
            with np.errstate(over="ignore"):
                cast = found.astype(wanted, copy=False)
            if not (fits := np.isfinite(cast)).all():
                bad = int(fits.argmin())
                raise _unfit(found[bad], feature=block.columns[bad], node=at[bad], wanted=wanted)
            indptr.append(values.rows + np.cumsum(block.counts))
            indices.append(block.columns.astype(INDEX_DTYPE, copy=False))
            values.append(cast)
            advance(indptr.rows - 1)
            journal.advance(_FEATURES, flush, lambda: {part: writer.progress() for part, writer in writers.items()})
        if indptr.rows != nodes + 1:
            raise SourceError(f"{source.name} has features of {indptr.rows - 1} nodes, not of {nodes}")
        for part, writer in writers.items():
            writer.close(shrink=part != "indptr")
        return journal.finish(_FEATURES, {"entries": values.rows}, flush)


def _entry_blocks(
    source: Source, wanted: np.dtype[np.generic], shares: Shares, *, first: int
) -> Iterator[tuple[int, Entries]]:
    """``(row, entries)`` of the rows from ``first`` on, finite, in the types of ``_feature_blocks``."""
    if source.feature_entries is None:
        for row, rows in _feature_blocks(source, wanted, shares.feature_rows, first=first):
            yield row, Entries.of_rows(rows)
        return
    with prefetched(source.feature_entries(shares.feature_entries, first)) as blocks:
        for block in blocks:
            double = np.float64 in (block.values.dtype, wanted)
            values = block.values.astype(np.float64 if double else np.float32, copy=False)
            if not (finite := np.isfinite(values)).all():
                bad = int(finite.argmin())
                at = first + int(np.searchsorted(np.cumsum(block.counts), bad, side="right"))
                raise SourceError(f"feature {block.columns[bad]} of node {at} is {values[bad]}")
            yield first, block._replace(values=values)
            first += len(block.counts)


def _cast(rows: AnyArray, wanted: np.dtype[np.generic], row: int) -> AnyArray:
    with np.errstate(over="ignore"):
        cast = rows.astype(wanted, copy=False)
    if cast.dtype.itemsize < rows.dtype.itemsize and not (fits := np.isfinite(cast)).all():
        at, column = np.argwhere(~fits)[0]
        raise _unfit(rows[at, column], feature=column, node=row + at, wanted=wanted)
    return cast


def _unfit(value: float, *, feature: int, node: int, wanted: np.dtype[np.generic]) -> SourceError:
    return SourceError(f"feature {feature} of node {node} is {value:g}, more than {wanted.name} can hold")


def _smallest(source: Source, wanted: np.dtype[np.generic], block_rows: int, work: Workplace) -> AnyArray:
    if (found := work.journal.result(_LEAST)) is None:
        least = None
        with reported(work.listener, "scanning features", source.num_nodes, "nodes") as advance:
            for row, rows in _feature_blocks(source, wanted, block_rows, first=0):
                lower = rows.min()
                least = lower if least is None or lower < least else least
                advance(row + len(rows))
        assert least is not None, "a source has at least one node"
        # Every float32 is a float64, whose text in JSON is exact.
        found = work.journal.finish(_LEAST, {"least": float(least), "type": least.dtype.name}, lambda: None)
    return np.asarray(found["least"], dtype=found["type"])


def _feature_blocks(
    source: Source, wanted: np.dtype[np.generic], block_rows: int, *, first: int
) -> Iterator[tuple[int, AnyArray]]:
    """``(row, rows)`` from the row ``first`` on, finite, as float64 where the source or the store has that, else
    float32."""
    if source.features_from is not None:
        row, given = first, source.features_from(block_rows, first)
    else:
        row, given = 0, source.features(block_rows)
    wanted_shape = (source.num_nodes, source.num_features)
    with prefetched(given) as blocks:
        for rows in blocks:
            if rows.dtype.kind not in "biuf":
                raise SourceError(f"features are of type {rows.dtype}, not numbers")
            if rows.shape[1:] != (source.num_features,) or row + len(rows) > source.num_nodes:
                shape = (row + len(rows), *rows.shape[1:])
                raise SourceError(f"{source.name} has features of the shape {shape} or more, not {wanted_shape}")
            row, rows = row + len(rows), rows[max(0, first - row) :]
            if not len(rows):
                continue
            double = np.float64 in (rows.dtype, wanted)
            rows = rows.astype(np.float64 if double else np.float32, copy=False)
            start = row - len(rows)
            if not (finite := np.isfinite(rows)).all():
                at, column = np.argwhere(~finite)[0]
                raise SourceError(f"feature {column} of node {start + at} is {rows[at, column]}")
            yield start, rows
