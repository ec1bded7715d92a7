# SPDX-License-Identifier: Apache-2.0
"""Features for a graph that comes as edges alone: an npy file, a table's columns, or made up. N nodes, F features."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ooc.conversion.node_tables import NodeTables
from ooc.conversion.npy_files import NpyFile
from ooc.conversion.tables import Cells, Table, is_table
from ooc.errors import OptionError, SourceError
from ooc.storage.array import AnyArray

RANDOM = "random:"
_STREAM = 0x0F
_BLOCK_VALUES = 1 << 19
_MOST_COLUMNS = 1 << 20
_MOST_DIGITS = 40  # int() refuses thousands of them.


@dataclass(frozen=True, kw_only=True)
class NodeFeatures:
    """``blocks(nodes, size, row)``: features [n, ``columns``] of the nodes from ``row`` on, where the source
    ``seeks``, else of all of them; SourceError where there are not those of ``nodes``.

    ``rows``: of how many nodes there are; None where only reading tells, or any number will do.
    """

    columns: int
    blocks: Callable[[int, int, int], Iterator[AnyArray]]
    rows: int | None
    seeks: bool
    table: Table | None = None


def node_features(text: str, tables: NodeTables) -> NodeFeatures:
    """What ``--features`` asks for: ``random:F[:SEED]`` or a file."""
    if text.startswith(RANDOM):
        return _made_up(text)
    path = Path(text)
    return _of_table(tables.open(path), tables) if is_table(path) else _of_npy(path)


def random_parameters(text: str, option: str) -> tuple[int, int]:
    """``(number, seed)`` of ``random:NUMBER[:SEED]``."""
    number, _, seed = text.removeprefix(RANDOM).partition(":")
    if not (number.isdecimal() and (seed == "" or seed.isdecimal()) and number.strip("0")):
        raise OptionError(f"{option}={text!r} is not random:NUMBER[:SEED]")
    if len(number) > _MOST_DIGITS or int(number) > _MOST_COLUMNS:
        raise OptionError(f"{option}='random:{number[:_MOST_DIGITS]}' is too large; the most is {_MOST_COLUMNS}")
    if len(seed) > _MOST_DIGITS:
        raise OptionError(f"{option}=: the seed has {len(seed)} digits; the most are {_MOST_DIGITS}")
    return int(number), int(seed or 0)


def npy_of_nodes(path: Path) -> NpyFile:
    """The array in the npy file ``path``; SourceError where it has no row of numbers for each node."""
    if path.suffix != ".npy":
        raise SourceError(f"{path} is neither an npy file nor a table (CSV, Parquet)")
    array = NpyFile(path)
    if not array.shape or 0 in array.shape:
        raise SourceError(f"{path} is of the shape {list(array.shape)}, not numbers for each node")
    return array


def check_rows(path: Path, have: int, nodes: int) -> None:
    """SourceError where ``path`` has not one row for each node."""
    if have != nodes:
        raise SourceError(f"{path} has {'more' if have > nodes else have} rows for {nodes} nodes")


def _of_npy(path: Path) -> NodeFeatures:
    array = npy_of_nodes(path)
    rows, columns = array.matrix("[nodes, features]")

    def blocks(nodes: int, size: int, row: int) -> Iterator[AnyArray]:
        check_rows(path, rows, nodes)
        return array.row_blocks(size, row)

    return NodeFeatures(columns=columns, blocks=blocks, rows=rows, seeks=True)


def _of_table(table: Table, tables: NodeTables) -> NodeFeatures:
    names = tables.features(table)
    wanted = dict.fromkeys(names, Cells.REAL)

    def together(size: int) -> Iterator[AnyArray]:
        for block in table.blocks(wanted, size):
            yield np.column_stack([block[name] for name in names])

    first = next(together(1), None)  # One row tells how wide columns of lists are.
    if first is None or not 0 < first.shape[1] <= _MOST_COLUMNS:
        raise SourceError(f"{table.path} has no features, or more than {_MOST_COLUMNS}")
    columns = int(first.shape[1])

    def blocks(nodes: int, size: int, row: int) -> Iterator[AnyArray]:
        done = 0
        for part in together(size):
            if part.shape[1] != columns:
                raise SourceError(f"{table.path} has rows of {columns} features and rows of {part.shape[1]}")
            done += len(part)
            if done > nodes:
                break
            yield part
        check_rows(table.path, done, nodes)

    return NodeFeatures(columns=columns, blocks=blocks, rows=table.rows, seeks=False, table=table)


def _made_up(text: str) -> NodeFeatures:
    """Standard normal, in blocks of a fixed size with a generator each: a row depends on its number alone."""
    columns, seed = random_parameters(text, "features")
    height = max(1, _BLOCK_VALUES // columns)

    def blocks(nodes: int, size: int, row: int) -> Iterator[AnyArray]:
        for start in range(row - row % height, nodes, height):
            generator = np.random.Generator(np.random.SFC64([seed, _STREAM, start // height]))
            part = generator.standard_normal((min(height, nodes - start), columns), dtype=np.float32)
            yield part[max(0, row - start) :]

    return NodeFeatures(columns=columns, blocks=blocks, rows=None, seeks=True)
