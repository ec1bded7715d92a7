# SPDX-License-Identifier: Apache-2.0
"""Tables in files and in memory: which kind one is, and what may be asked of all of them."""

from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import Block, Cells
from ooc.sources.files.lines import plain_suffix, text_block_bytes
from ooc.sources.files.parquet_table import PARQUET_SUFFIXES, ParquetTable
from ooc.sources.files.text_table import CSV_SUFFIXES, TextTable
from ooc.sources.files.value_tables import JSON_SUFFIXES, HeldTable, JsonTable
from ooc.storage.array import AnyArray

TABLE_SUFFIXES = (*CSV_SUFFIXES, *PARQUET_SUFFIXES, *JSON_SUFFIXES)
Table = TextTable | ParquetTable | JsonTable | HeldTable


def is_table(path: Path) -> bool:
    """Whether the file's name is a table's."""
    return plain_suffix(path) in (*CSV_SUFFIXES, *JSON_SUFFIXES) or path.suffix in PARQUET_SUFFIXES


def open_table(path: Path, budget_bytes: int) -> Table:
    """The table in the file ``path``; SourceError where it is none, or cannot be read."""
    if plain_suffix(path) in CSV_SUFFIXES:
        return TextTable.of_file(path, text_block_bytes(budget_bytes))
    if plain_suffix(path) in JSON_SUFFIXES:
        return JsonTable(path, text_block_bytes(budget_bytes))
    if path.suffix in PARQUET_SUFFIXES:
        return ParquetTable(path)
    raise SourceError(f"{path} is no table: {', '.join(TABLE_SUFFIXES)} are")


def side_by_side(block: Block, names: tuple[str, ...]) -> AnyArray:
    """The columns ``names`` as one array [n, c]; a column of lists is several."""
    return np.column_stack([block[name] for name in names])


def width(table: Table, names: tuple[str, ...]) -> int:
    """How many numbers the columns ``names`` are, as the first row tells; 0 without one."""
    first = next(table.blocks(dict.fromkeys(names, Cells.REAL), 1), None) if names else None
    return side_by_side(first, names).shape[1] if first is not None else 0
