# SPDX-License-Identifier: Apache-2.0
"""From a source's features, labels, splits and ids to ``x``, ``y``, ``split/*``, ``perm`` and ``ids`` of the store:
checked, normalised if requested, cast, in blocks of rows.

One thread reads (or inflates) features while this one checks, casts and writes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from ooc.conversion.budget import Options
from ooc.conversion.output import Journal, Workplace
from ooc.conversion.whole_numbers import WholeColumns, first_of, rounded_by, values_of
from ooc.errors import SourceError
from ooc.events import reported
from ooc.sources.labels import MOST_CLASSES, USUAL_SPLIT
from ooc.sources.source import LabelBlock, Source, ranges
from ooc.storage.array import AnyArray, whole_numbers_rounded
from ooc.storage.sparse_array import Entries, EntriesWriter, most_entries
from ooc.storage.store import SPLITS, Task
from ooc.storage.types import ids_shape
from ooc.storage.writer import ArrayWriter
from ooc.threads import ahead

_LEAST_STAGE = "least feature"
_LABELS_STAGE = "labels"
_SPARSE_FACTOR = 8  # Products with them are about as fast then as with all.
_SCAN_VALUES = 1 << 18
_LABEL_ARRAYS = ("y", "perm", "split")
_ROWS = 1 << 16


def write_labels(source: Source, store: Path, *, dtype: str, block_rows: int, journal: Journal) -> dict[str, Any]:
    """Write labels, splits, offsets of graphs and original numbers (row i is node i), and return what the attributes
    need.

    It is ``num_classes``, ``split_sizes``, ``incomplete``: how many nodes or graphs have only some of their labels, and
    ``odd``: a hint on labels that may be meant differently. ``dtype``: of the features. SourceError for labels that do
    not fit the source's task, for nodes in two splits or without a label in one, and for an empty train split.
    """
    if (found := journal.result(_LABELS_STAGE)) is not None:
        return dict(found)
    for name in (*_LABEL_ARRAYS, "graphs"):
        rmtree(store / name, ignore_errors=True)
    task, wanted = source.task, source.task.dtype(dtype)
    assert task is Task.CLASSES or source.num_classes, "only classes can be counted on the way"
    nodes, count = source.num_nodes, source.num_labelled
    sizes = dict.fromkeys(SPLITS, 0)
    least, largest, incomplete, of_signs = 0, -1, 0, True
    has_first, is_one_hot = False, task is Task.MULTILABEL and (source.num_classes or 0) > 1
    shape = (count,) if task is Task.CLASSES else (count, source.num_classes or 0)
    with ExitStack() as stack:
        y = stack.enter_context(ArrayWriter(store, "y", shape, wanted))
        splits = {name: stack.enter_context(ArrayWriter(store, f"split/{name}", (count,), np.bool_)) for name in SPLITS}
        for _, block in _label_blocks(source, wanted, block_rows):
            y.append(block.y.astype(wanted, copy=False))
            for name in SPLITS:
                splits[name].append(getattr(block, name))
                sizes[name] += int(getattr(block, name).sum())
            if task is not Task.VALUES:
                least, largest = min(least, int(block.y.min())), max(largest, int(block.y.max()))
                of_signs = of_signs and bool((np.abs(block.y) == 1).all())
                has_first = has_first or bool((block.y == 0).any())
                is_one_hot = is_one_hot and bool((block.y.reshape(len(block.y), -1).sum(axis=1) == 1).all())
            incomplete += int(task.incomplete(block.y).sum())
        if y.rows != count:
            raise SourceError(f"{source.name} has labels of {y.rows} {source.labelled}s, not of {count}")
        # Otherwise unlabelled nodes are left out.
        drawn = str(source.description.get("split", "")).startswith(USUAL_SPLIT)
        if of_signs and (least, largest) == (-1, 1) and (drawn or task is Task.MULTILABEL):
            raise SourceError(
                f"{source.name} has no other labels than 1 and -1, of which -1 (or NaN) is no label: give 0 and 1 for "
                "two classes, or task='values' for numbers"
            )
        if not sizes["train"] and not source.unlabelled:
            raise SourceError(f"{source.name} has an empty train split: no {source.labelled} to train on")
    with ArrayWriter(store, "perm", (nodes,), np.int64) as perm:
        for start, stop in ranges(nodes, _ROWS):
            perm.append(np.arange(start, stop, dtype=np.int64))
    if source.graph_offsets is not None:
        with ArrayWriter(store, "graphs/indptr", (count + 1,), np.int64) as offsets:
            offsets.append(source.graph_offsets)
    write_ids(source, store, block_rows=block_rows)
    odd = ""
    if task is Task.CLASSES and not has_first and largest > 0:
        odd = f"no label is 0: where classes are counted from 1, subtract 1, or there are {largest + 1}"
    elif is_one_hot:
        odd = "each row of labels has a single 1: if it is a class, give its number instead (y.argmax(1))"
    written = {
        "num_classes": source.num_classes or largest + 1,
        "split_sizes": sizes,
        "incomplete": incomplete,
        "odd": odd,
    }
    return journal.finish(_LABELS_STAGE, written)


def write_ids(source: Source, store: Path, *, block_rows: int) -> None:
    """Write the source's ids of the nodes, where they are not their numbers."""
    rmtree(store / "ids", ignore_errors=True)
    if source.ids is not None:
        shape = ids_shape(source.num_nodes, source.id_bytes)
        with ArrayWriter(store, "ids", shape, np.uint8 if source.id_bytes else np.int64) as writer:
            for ids in source.ids(block_rows):
                writer.append(ids)


def _label_blocks(source: Source, wanted: np.dtype[Any], block_rows: int) -> Iterator[tuple[int, LabelBlock]]:
    row, task = 0, source.task
    # Where nobody says how many classes there are, a number past any model's width is damage. (A part of a graph may
    # well have labels past the number of its nodes.)
    counted = source.num_classes is None
    count, called = source.num_labelled, source.labelled
    most = max(count, MOST_CLASSES) if source.num_classes is None else source.num_classes
    whole = None
    if task is Task.VALUES and wanted != np.float64:
        whole = WholeColumns(most, lambda row, column: f"label {column} of {called} {row}")
    for block in source.labels(block_rows):
        if row + len(block.y) > count:
            raise SourceError(f"{source.name} has labels of more than its {count} {called}s")
        if task is Task.VALUES:
            given = block.y
            with np.errstate(over="ignore"):
                block = block._replace(y=given.astype(wanted, copy=False))
            if (rounded := whole_numbers_rounded(block.y, given)) is not None:
                at, column, value = first_of(given, row, rounded)
                raise rounded_by(wanted.name, f"label {column} of {called} {at}", value)
            if whole is not None and given.dtype == np.float64:
                whole.examine(np.where(np.isnan(given), 0, given), row)
        valid = task.valid(block.y, most)
        if not valid.all():
            at = int(valid.argmin())
            reason = " (where they are counted, as many as nodes or 65,536 at the most)" * counted
            raise SourceError(f"{called} {row + at} has the label {block.y[at]}; {task.meaning(most)}{reason}")
        labelled = task.labelled(block.y)
        seen = block.train & (block.valid | block.test)
        if seen.any():
            at = int(seen.argmax())
            names = " and ".join(name for name in SPLITS if getattr(block, name)[at])
            raise SourceError(f"the splits overlap: {called} {row + at} is in {names}, and would be scored as unseen")
        for name in SPLITS:
            bare = getattr(block, name) & ~labelled
            if bare.any():
                where = f"{called} {row + int(bare.argmax())} of the {name} split"
                hint = f"leave it out of the split, as all {called}s are predicted"
                raise SourceError(f"{where} has no label (-1 and NaN are none); {hint}")
        yield row, block
        row += len(block.y)
    if whole is not None:
        whole.check()


def write_features(
    source: Source, store: Path, work: Workplace, *, options: Options, block_rows: int, stage: str
) -> dict[str, Any]:
    """Write ``x`` [N, F]; ``entries``: the number of entries, where only non-zero ones are written.

    ``row_normalize`` is PyG's NormalizeFeatures: the least entry of the whole matrix is subtracted, then each row is
    divided by its sum, or by 1 where that is less. SourceError for NaN, infinity, values that the ``dtype`` cannot
    hold, integers that float32 would round, and sparse features that would take more than dense ones.
    """
    journal, sparse = work.journal, options.sparse_features
    if (found := journal.result(stage)) is not None:
        return dict(found)
    wanted = np.dtype(options.dtype)
    smallest = _least_feature(source, wanted, block_rows, work) if options.row_normalize else None
    if sparse and smallest:
        raise SourceError(f"{source.name}: normalised rows are not zero where features are; keep them dense")
    shape = source.num_nodes, source.num_features
    rmtree(store / "x", ignore_errors=True)
    writer = (EntriesWriter if sparse else ArrayWriter)(store, "x", shape, wanted)
    with reported(work.listener, "writing features", source.num_nodes, "nodes") as advance:
        with writer:
            for row, rows in _feature_blocks(source, wanted, block_rows, sparse=sparse):
                if smallest is not None:
                    rows = _normalize(rows, smallest)
                if isinstance(writer, EntriesWriter) and writer.entries + len(rows[-1]) > most_entries(shape, wanted):
                    raise SourceError(f"{source.name} has features that take more without their zeros; keep them dense")
                writer.append(_cast(rows, wanted, row))
                advance(writer.rows)
            if writer.rows != source.num_nodes:
                raise SourceError(f"{source.name} has features of {writer.rows} nodes, not of {source.num_nodes}")
        result = {"entries": writer.entries} if isinstance(writer, EntriesWriter) else {}
        return journal.finish(stage, result)


def mostly_zeros(source: Source, dtype: str, *, row_normalize: bool) -> bool:
    """Return whether features take at most an eighth when stored as sparse.

    Entries are counted until they are too many. Dense features of a source that has to be prepared are not examined.
    """
    wanted, entries = np.dtype(dtype), 0
    most = most_entries((source.num_nodes, source.num_features), wanted) // _SPARSE_FACTOR
    if source.prepare is not None:
        return not row_normalize and source.feature_entries is not None and source.feature_entries <= most
    block_rows, sparse = max(1, _SCAN_VALUES // source.num_features), source.feature_entries is not None
    for row, rows in _feature_blocks(source, wanted, block_rows, sparse=sparse):
        values, stop = values_of(rows), row + len(rows.counts if sparse else rows)
        entries += int(np.count_nonzero(values))
        if entries * source.num_nodes > most * stop or (row_normalize and values.min(initial=0) < 0):
            return False
    return True


def _normalize(rows: Any, smallest: AnyArray) -> Any:
    if isinstance(rows, Entries):
        sums = np.bincount(rows.rows, weights=rows.values, minlength=len(rows.counts))
        return rows._replace(values=rows.values / np.maximum(sums, 1)[rows.rows].astype(rows.values.dtype))
    rows = rows - smallest
    rows /= np.maximum(rows.sum(axis=1, keepdims=True), 1)
    return rows


def _cast(rows: Any, wanted: np.dtype[np.generic], row: int) -> Any:
    values = values_of(rows)
    with np.errstate(over="ignore"):
        cast = values.astype(wanted, copy=False)
    if cast.dtype.itemsize < values.dtype.itemsize and not (fits := np.isfinite(cast)).all():
        at, column, value = first_of(rows, row, ~fits)
        raise SourceError(f"{_feature_name(at, column)} is {value:g}, more than {wanted.name} can hold")
    return rows._replace(values=cast) if isinstance(rows, Entries) else cast


def _feature_name(node: int, column: int) -> str:
    return f"feature {column} of node {node}"


def _least_feature(source: Source, wanted: np.dtype[np.generic], block_rows: int, work: Workplace) -> AnyArray:
    if (found := work.journal.result(_LEAST_STAGE)) is None:
        least = None
        with reported(work.listener, "scanning features", source.num_nodes, "nodes") as advance:
            for row, rows in _feature_blocks(source, wanted, block_rows):
                lower = rows.min()
                least = lower if least is None or lower < least else least
                advance(row + len(rows))
        assert least is not None, "a source has at least one node"
        # Every float32 is a float64, whose text in JSON is exact.
        found = work.journal.finish(_LEAST_STAGE, {"least": float(least), "type": least.dtype.name})
    return np.asarray(found["least"], dtype=found["type"])


def _feature_blocks(
    source: Source, wanted: np.dtype[np.generic], block_rows: int, *, sparse: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield ``(row, rows)``, finite, as float64 where the source or the store has that, else float32.

    ``sparse``: as sparse entries, and otherwise dense, whatever the source yields.
    """
    row, wanted_shape = 0, (source.num_nodes, source.num_features)
    whole = WholeColumns(source.num_features, _feature_name) if wanted != np.float64 else None
    with closing(ahead(source.features(block_rows), name="ooc-read", most=2)) as blocks:
        for rows in blocks:
            start = row
            if isinstance(rows, Entries):
                row += len(rows.counts)
                rows = rows if sparse else rows.dense(source.num_features)
            else:
                row += len(rows)
                if rows.shape[1:] != (source.num_features,) or row > source.num_nodes:
                    shape = (row, *rows.shape[1:])
                    raise SourceError(f"{source.name} has features of the shape {shape} or more, not {wanted_shape}")
                rows = Entries.of_rows(rows) if sparse else rows
            values = values_of(rows)
            double, given = np.float64 in (values.dtype, wanted), values
            values = values.astype(np.float64 if double else np.float32, copy=False)
            if (rounded := whole_numbers_rounded(values, given)) is not None:
                before = rows._replace(values=given) if isinstance(rows, Entries) else given
                at, column, value = first_of(before, start, rounded)
                raise rounded_by(values.dtype.name, _feature_name(at, column), value)
            if double and whole is not None:
                whole.examine(rows, start)
            rows = rows._replace(values=values) if isinstance(rows, Entries) else values
            if not (finite := np.isfinite(values)).all():
                at, column, value = first_of(rows, start, ~finite)
                raise SourceError(f"{_feature_name(at, column)} is {value}")
            yield start, rows
    if whole is not None:
        whole.check()
