# SPDX-License-Identifier: Apache-2.0
"""Tables in Parquet, for which the package ``pyarrow`` is needed."""

import base64
import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import LOOKED_AT_ROWS, Block, Cells, ColumnKind, kind_of
from ooc.sources.files.lines import optional
from ooc.sources.files.streams import size_of
from ooc.sources.files.value_tables import Values, as_cells

PARQUET_SUFFIXES = (".parquet", ".pq")
_PARQUET_BUFFER_BYTES = 1 << 20


class ParquetTable:
    """A table of typed columns, read page by page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading() as file:
            self.columns: tuple[str, ...] = tuple(file.schema_arrow.names)
            if len(set(self.columns)) < len(self.columns):
                raise ValueError("two of its columns have the same name")
            self.rows: int | None = int(file.metadata.num_rows)
            self.rows_about = int(file.metadata.num_rows)

    def count(self) -> int:
        """How many rows there are."""
        return self.rows_about

    def blocks(self, wanted: Mapping[str, Cells], size: int) -> Iterator[Block]:
        done = 0
        with self._reading() as file:
            # One row group after the other: over all of them pyarrow keeps several times as much in memory.
            for group in range(file.metadata.num_row_groups):
                batches = file.iter_batches(
                    batch_size=size, row_groups=[group], columns=list(wanted), use_threads=False
                )
                for batch in batches:
                    yield {
                        name: as_cells(self._values(batch.column(name)), cells, f"{self.path}: the column {name}", done)
                        for name, cells in wanted.items()
                    }
                    done += batch.num_rows
        if done != self.rows:
            raise SourceError(f"{self.path} holds {done} rows, {self.rows} by its own count")

    def _values(self, column: Any) -> Values:
        """Numbers as numpy has them, lists of as many each as a matrix, all else one by one."""
        types = optional("pyarrow.types", self.path)
        column = column.dictionary_decode() if types.is_dictionary(column.type) else column
        kind = column.type
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            values = np.asarray(column.flatten().to_numpy(zero_copy_only=False))
            width = len(values) // max(1, len(column))
            even = not column.null_count and {len(cell) for cell in column} <= {width}
            return values.reshape(len(column), width) if even else list(column.to_pylist())
        whole = (types.is_integer(kind) or types.is_boolean(kind)) and not column.null_count
        plain = whole or types.is_floating(kind)
        found: Values = column.to_numpy(zero_copy_only=False) if plain else column.to_pylist()
        return found

    def text_ids(self, column: str) -> bool:
        """Whether the column holds ids that are no whole numbers, by its type."""
        types = optional("pyarrow.types", self.path)
        with self._reading() as file:
            kind = file.schema_arrow.field(column).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        return _is_text(types, value) or types.is_uint64(value)

    def kinds(self) -> dict[str, ColumnKind]:
        return self._kinds

    @cached_property
    def _kinds(self) -> dict[str, ColumnKind]:
        types = optional("pyarrow.types", self.path)
        with self._reading() as file:
            columns = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
            categories = self._categories(file)
            flat = [name for name, kind in columns.items() if types.is_integer(kind) or types.is_floating(kind)]
            head = next(file.iter_batches(batch_size=LOOKED_AT_ROWS, columns=flat, use_threads=False), None)
        found = {}
        for name, kind in columns.items():
            if name in categories or types.is_dictionary(kind):
                found[name] = ColumnKind.CATEGORIES
            elif types.is_temporal(kind):
                found[name] = ColumnKind.TIMES
            elif types.is_boolean(kind):
                found[name] = ColumnKind.TRUTH
            elif _is_text(types, kind):
                found[name] = ColumnKind.TEXTS
            elif name in flat and head is not None:
                found[name] = kind_of(["" if cell is None else str(cell) for cell in head.column(name).to_pylist()])
            else:  # Lists of numbers; what else it may be is refused where it is read.
                found[name] = ColumnKind.NUMBERS
        return found

    def _categories(self, file: Any) -> set[str]:
        """The columns that were categories when they were written; Parquet itself knows those of numbers as numbers."""
        arrow, types = optional("pyarrow", self.path), optional("pyarrow.types", self.path)
        written = (file.metadata.metadata or {}).get(b"ARROW:schema")
        if written is None:
            return set()
        schema = arrow.ipc.read_schema(arrow.BufferReader(base64.b64decode(written)))
        return {field.name for field in schema if types.is_dictionary(field.type)}

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Any]:
        """The file, open for a while; what a damaged one raises meanwhile is one SourceError."""
        parquet, arrow = optional("pyarrow.parquet", self.path), optional("pyarrow", self.path)
        size_of(self.path)
        try:
            with parquet.ParquetFile(
                self.path, buffer_size=_PARQUET_BUFFER_BYTES, page_checksum_verification=True
            ) as file:
                yield file
        except (OSError, ValueError, KeyError, MemoryError, arrow.ArrowException) as error:
            if isinstance(error, OSError) and error.strerror:
                raise SourceError(f"{self.path} cannot be read: {error.strerror}") from error
            raise SourceError(f"{self.path} cannot be read, it is damaged or no Parquet: {_one_line(error)}") from error


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
