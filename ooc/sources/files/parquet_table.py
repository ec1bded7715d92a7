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
from ooc.sources.files.cells import LOOKED_AT_ROWS, Block, Cells, ColumnKind, kind_of, of_texts
from ooc.sources.files.lines import optional
from ooc.sources.files.streams import size_of
from ooc.storage.array import AnyArray

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
                    yield {name: self._column(batch, name, cells) for name, cells in wanted.items()}
                    done += batch.num_rows
        if done != self.rows:
            raise SourceError(f"{self.path} holds {done} rows, {self.rows} by its own count")

    def _column(self, batch: Any, name: str, cells: Cells) -> AnyArray:
        types = optional("pyarrow.types", self.path)
        column, kind = batch.column(name), batch.column(name).type
        if types.is_dictionary(kind):
            column, kind = column.dictionary_decode(), kind.value_type
        lists = types.is_list(kind) or types.is_large_list(kind)
        if cells is Cells.REAL and (lists or types.is_fixed_size_list(kind)):
            return self._lists(column, name)
        text = _is_text(types, kind)
        number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        match cells:
            case Cells.TEXT if text or number:
                texts = column if text else column.cast("string")
                return np.asarray(texts.fill_null("").to_numpy(zero_copy_only=False), dtype=np.object_)
            case Cells.WHOLE if (types.is_integer(kind) or types.is_floating(kind)) and not column.null_count:
                return self._cast(column, name, "int64")
            case Cells.REAL if number:
                return self._cast(column, name, kind if types.is_floating(kind) else "float64")
            case Cells.MEMBER if number or text:
                with contextlib.suppress(ValueError):
                    return of_texts(["" if cell is None else str(cell) for cell in column.to_pylist()], cells)
        empty = " with empty cells" if column.null_count else ""
        raise SourceError(f"{self.path}: the column {name} holds {kind}{empty}, not {cells.value}")

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

    def _lists(self, column: Any, name: str) -> AnyArray:
        values = np.asarray(column.flatten().to_numpy(zero_copy_only=False))
        width = len(values) // max(1, len(column))
        if column.null_count or values.dtype.kind not in "biuf" or {len(cell) for cell in column} - {width}:
            raise SourceError(f"{self.path}: the lists in the column {name} are not of as many numbers each")
        return values.reshape(len(column), width)

    def _cast(self, column: Any, name: str, kind: Any) -> AnyArray:
        try:
            return np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))
        except optional("pyarrow", self.path).ArrowInvalid as error:
            raise SourceError(f"{self.path}: the column {name} does not fit: {_one_line(error)}") from error

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
