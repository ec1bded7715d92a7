# SPDX-License-Identifier: Apache-2.0
"""A source's features → the array ``x``: checked, normalised if wanted, cast, in blocks of rows."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ooc.conversion.source import Source
from ooc.errors import SourceError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted
from ooc.storage.array import AnyArray, create_array


def write_features(
    source: Source, store: Path, *, dtype: str, row_normalize: bool, block_rows: int, listener: Listener
) -> None:
    """Write ``x`` [N, F] of ``dtype``.

    ``row_normalize`` is PyG's NormalizeFeatures: the least entry of the whole matrix is subtracted, then
    each row divided by its sum, or by 1 where that is less. SourceError for NaN, infinity, and values
    that ``dtype`` cannot hold.
    """
    wanted = np.dtype(dtype)
    smallest = _smallest(source, wanted, block_rows, listener) if row_normalize else None
    task = "writing features"
    listener(TaskStarted(task, source.num_nodes, "nodes"))
    with create_array(store, "x", (source.num_nodes, source.num_features), wanted) as writer:
        for row, rows in _blocks(source, wanted, block_rows):
            if smallest is not None:
                rows = rows - smallest
                rows /= np.maximum(rows.sum(axis=1, keepdims=True), 1)
            with np.errstate(over="ignore"):
                cast = rows.astype(wanted, copy=False)
            if cast.dtype.itemsize < rows.dtype.itemsize and not (fits := np.isfinite(cast)).all():
                at, column = np.argwhere(~fits)[0]
                raise SourceError(
                    f"feature {column} of node {row + at} is {rows[at, column]:g}, more than {dtype} can hold"
                )
            writer.append(cast)
            listener(TaskAdvanced(task, row + len(cast)))
    listener(TaskFinished(task))


def _smallest(source: Source, wanted: np.dtype[np.generic], block_rows: int, listener: Listener) -> AnyArray:
    task = "scanning features"
    listener(TaskStarted(task, source.num_nodes, "nodes"))
    least = None
    for row, rows in _blocks(source, wanted, block_rows):
        lower = rows.min()
        least = lower if least is None or lower < least else least
        listener(TaskAdvanced(task, row + len(rows)))
    listener(TaskFinished(task))
    assert least is not None, "a source has at least one node"
    return np.asarray(least)


def _blocks(source: Source, wanted: np.dtype[np.generic], block_rows: int) -> Iterator[tuple[int, AnyArray]]:
    """``(first row, rows)``, finite, as float64 where the source or the store has that, else float32."""
    row = 0
    for rows in source.features(block_rows):
        if rows.dtype.kind not in "biuf":
            raise SourceError(f"features are of type {rows.dtype}, not numbers")
        double = np.float64 in (rows.dtype, wanted)
        rows = rows.astype(np.float64 if double else np.float32, copy=False)
        if not (finite := np.isfinite(rows)).all():
            at, column = np.argwhere(~finite)[0]
            raise SourceError(f"feature {column} of node {row + at} is {rows[at, column]}")
        yield row, rows
        row += len(rows)
