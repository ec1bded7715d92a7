# SPDX-License-Identifier: Apache-2.0
"""A source's features → the array ``x``: checked, normalised if wanted, cast, in blocks of rows.

One thread reads (or inflates) while this one checks, casts and writes.
"""

from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import numpy as np

from ooc.conversion.budget import Options
from ooc.conversion.output import Workplace
from ooc.errors import SourceError
from ooc.events import reported
from ooc.sources.files.prefetching import prefetched
from ooc.sources.source import Source
from ooc.storage.array import AnyArray
from ooc.storage.writer import ArrayWriter

_STAGE = "features"
_SCAN = "least feature"


def write_features(source: Source, store: Path, work: Workplace, *, options: Options, block_rows: int) -> None:
    """Write ``x`` [N, F], from where an earlier process had come.

    ``row_normalize`` is PyG's NormalizeFeatures: the least entry of the whole matrix is subtracted, then
    each row divided by its sum, or by 1 where that is less. SourceError for NaN, infinity, and values
    that the ``dtype`` cannot hold.
    """
    journal = work.journal
    if journal.result(_STAGE) is not None:
        return
    wanted = np.dtype(options.dtype)
    smallest = _smallest(source, wanted, block_rows, work) if options.row_normalize else None
    shape, progress = (source.num_nodes, source.num_features), journal.progress(_STAGE)
    if progress is None:
        rmtree(store / "x", ignore_errors=True)
    writer = ArrayWriter(store, "x", shape, wanted, progress=progress)
    with reported(work.listener, "writing features", source.num_nodes, "nodes") as advance:
        with writer:
            for row, rows in _blocks(source, wanted, block_rows, first=writer.rows):
                if smallest is not None:
                    rows = rows - smallest
                    rows /= np.maximum(rows.sum(axis=1, keepdims=True), 1)
                writer.append(_cast(rows, wanted, row))
                advance(writer.rows)
                journal.advance(_STAGE, writer.flush, writer.progress)
            if writer.rows != source.num_nodes:
                raise SourceError(f"{source.name} has features of {writer.rows} nodes, not of {source.num_nodes}")
        journal.finish(_STAGE, {}, writer.flush)


def _cast(rows: AnyArray, wanted: np.dtype[np.generic], row: int) -> AnyArray:
    with np.errstate(over="ignore"):
        cast = rows.astype(wanted, copy=False)
    if cast.dtype.itemsize < rows.dtype.itemsize and not (fits := np.isfinite(cast)).all():
        at, column = np.argwhere(~fits)[0]
        value = rows[at, column]
        raise SourceError(f"feature {column} of node {row + at} is {value:g}, more than {wanted.name} can hold")
    return cast


def _smallest(source: Source, wanted: np.dtype[np.generic], block_rows: int, work: Workplace) -> AnyArray:
    if (found := work.journal.result(_SCAN)) is None:
        least = None
        with reported(work.listener, "scanning features", source.num_nodes, "nodes") as advance:
            for row, rows in _blocks(source, wanted, block_rows, first=0):
                lower = rows.min()
                least = lower if least is None or lower < least else least
                advance(row + len(rows))
        assert least is not None, "a source has at least one node"
        # Every float32 is a float64, whose text in JSON is exact.
        found = work.journal.finish(_SCAN, {"least": float(least), "type": least.dtype.name}, lambda: None)
    return np.asarray(found["least"], dtype=found["type"])


def _blocks(
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
