# SPDX-License-Identifier: Apache-2.0
"""Text as the ``ogb`` package has it: gzipped columns of numbers, mostly without headers."""

import re
from collections.abc import Iterator

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.dataset_files import DatasetFiles
from ooc.sources.files.lines import Kind, rows_of_numbers, stream_lines
from ooc.sources.files.streams import gunzipped
from ooc.sources.labels import IndexSplits
from ooc.sources.source import EdgeBlock, ranges
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS

_EMPTY_CELL = re.compile(rb"(?<=,)(?=[,\r\n])|^(?=[,\r\n])", re.MULTILINE)
_MOST_TABLE_BYTES = 1 << 16


def columns_of(files: DatasetFiles, name: str) -> int:
    """How many columns the first row has."""
    for text in stream_lines(gunzipped(files.blob(name)), files.label(name)):
        return text[: text.index(b"\n")].count(b",") + 1
    raise SourceError(f"{files.label(name)} is empty")


def read_numbers(
    files: DatasetFiles, name: str, kind: Kind, columns: int, rows: int | None, *, fill: bool = False
) -> Iterator[AnyArray]:
    """The numbers in the gzip file ``name``, [n, ``columns``] at a time; SourceError where they are not ``rows`` rows
    (None: any number). ``fill``: empty cells are NaN."""
    label, done = files.label(name), 0
    lines = stream_lines(gunzipped(files.blob(name)), label)
    if fill:
        lines = (_EMPTY_CELL.sub(b"nan", text) for text in lines)
    for block in rows_of_numbers(lines, label, columns=(columns,), kind=kind):
        done += len(block)
        if rows is not None and done > rows:
            raise SourceError(f"{label} has more than the {rows} rows it must have")
        yield block
    if rows is not None and done != rows:
        raise SourceError(f"{label} has {done} rows, {rows} were expected")


def edges_of(files: DatasetFiles, name: str, count: int, size: int) -> Iterator[EdgeBlock]:
    """The ``count`` edges whose ends are in the gzip file ``name``, at most ``size`` at a time."""
    for ends in pieces(read_numbers(files, name, Kind.CSV_WHOLE, 2, count), size):
        yield EdgeBlock(ends[:, 0].copy(), ends[:, 1].copy())


def features_of(files: DatasetFiles, name: str, columns: int, count: int, size: int) -> Iterator[AnyArray]:
    """The rows in the gzip file ``name`` as float32 [n, columns], as ogb reads them."""
    for rows in pieces(read_numbers(files, name, Kind.CSV_REAL, columns, count), size):
        with np.errstate(over="ignore"):  # Becomes infinite, which is refused by whoever stores it.
            yield rows.astype(np.float32)


def pieces(blocks: Iterator[AnyArray], rows: int) -> Iterator[AnyArray]:
    """The same rows, at most ``rows`` at a time."""
    for block in blocks:
        for start, stop in ranges(len(block), rows):
            yield block[start:stop]


def splits_of(files: DatasetFiles, kind: str, nodes: int) -> IndexSplits:
    folder = f"split/{kind}"
    name = f"{folder}/split_dict.pt"
    if not files.has(name):
        listed = {split: numbers_of(files, f"{folder}/{split}.csv.gz", most=nodes) for split in SPLITS}
        return IndexSplits(listed, nodes=nodes, name=files.label(folder))
    return files.splits(name, nodes, needed=SPLITS)


def only_split(files: DatasetFiles) -> str:
    """The kind of split there is: the folder in ``split``."""
    kinds = files.folders("split")
    if len(kinds) != 1:
        raise SourceError(f"{files.label('split')} holds {len(kinds)} kinds of split, not one")
    return kinds.pop()


def numbers_of(files: DatasetFiles, name: str, *, most: int) -> AnyArray:
    """The column of whole numbers in the gzip file ``name``, int64 [n]; SourceError for more than ``most``."""
    blocks = [np.empty(0, dtype=np.int64)]
    for block in read_numbers(files, name, Kind.CSV_WHOLE, 1, None):
        blocks.append(block[:, 0])
        most -= len(block)
        if most < 0:
            raise SourceError(f"{files.label(name)} lists more numbers than there can be")
    return np.concatenate(blocks)


def single_number(files: DatasetFiles, name: str) -> int:
    """The one number in a file that lists one for each graph."""
    numbers = numbers_of(files, name, most=1 << 16)
    if len(numbers) != 1:
        raise SourceError(f"{files.label(name)} lists {len(numbers)} graphs, not one")
    return int(numbers[0])


def small_table(files: DatasetFiles, name: str) -> list[list[str]]:
    """The cells of a small file, row by row."""
    label, text = files.label(name), b""
    for block in stream_lines(gunzipped(files.blob(name)), label):
        text += block
        if len(text) > _MOST_TABLE_BYTES:
            raise SourceError(f"{label} is longer than a list of types can be")
    try:
        return [line.split(",") for line in text.decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise SourceError(f"{label} is no text") from error
