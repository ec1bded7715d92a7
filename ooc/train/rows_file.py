# SPDX-License-Identifier: Apache-2.0
"""A table on disk of rows that are computed in any order and stored in the order of the user's node ids.

Rows go straight to their places in an ``.npy`` file beside the target, which takes no further memory; other formats are
made from it, block by block. The target appears complete, by a rename, or not at all.
"""

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ooc.errors import OptionError, StoreError, as_error
from ooc.sizes import format_size
from ooc.storage.array import exchanged, flush, flush_all, lock_holder, open_alone, runs, write_at
from ooc.storage.writer import ArrayWriter
from ooc.storage.zarr_json import METADATA_FILE

AnyArray = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


FORMATS = (".npy", ".zarr", ".parquet", ".csv")
"""File formats, by the ending of the name."""


def check_target(path: Path, *, force: bool) -> None:
    """Raise OptionError if no file can be written to ``path``, or not in the format of its ending."""
    if path.suffix not in FORMATS:
        raise OptionError(f"{path} must end in one of {', '.join(FORMATS)}")
    if path.suffix == ".parquet":
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise OptionError(f"{path}: writing parquet needs pyarrow; pip install pyarrow, or give .npy") from None
    check_new(path, force=force)
    if path.is_dir() and not (path.suffix == ".zarr" and (path / METADATA_FILE).is_file()):
        raise OptionError(f"{path} is a folder, and no Zarr array to be replaced; give another file")


def check_new(path: Path, *, force: bool) -> None:
    """Raise OptionError if the file ``path`` exists and not ``force``, or if it cannot be made."""
    if path.exists() and not force:
        raise OptionError(f"{path} exists; give another file, or force=True to replace it")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"the folder of {path} does not exist")


class RowsFile:
    """A table under construction: rows are ``put`` in any order, from any thread, each once; ``finish`` makes the file
    ``path`` of them.

    ``shape`` is [n, columns], or [n] for one number a row. ``id_type``: the type of the ids of the rows, which are
    ``called`` so: int64 or bytes of UTF-8. It is a context manager; an unfinished table is removed. Raises OptionError
    before anything is written if the file cannot be made or the disk has no room, and when it is full later.
    """

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        id_type: npt.DTypeLike = np.int64,
        force: bool = False,
        called: str = "node",
    ) -> None:
        self.path, self._called = path, called
        check_target(path, force=force)
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._has_ids = path.suffix in (".csv", ".parquet")
        node: list[Any] = [("node", np.dtype(id_type))] if self._has_ids else []
        fields: list[Any] = [*node, ("row", self.dtype, shape[1:])]  # of Any: mypy takes a minute for numpy's own type
        self._record = np.dtype(fields)
        self._row_bytes = self._record.itemsize
        needed, free = self._row_bytes * shape[0], shutil.disk_usage(path.absolute().parent).free
        needed *= 1 if path.suffix == ".npy" else 2
        if needed > free:
            raise OptionError(f"{path} takes {format_size(needed)} while it is written, {format_size(free)} are free")
        self._partial = path.with_name(f"{path.name}.partial")
        self._rows_path = self._partial.with_name(self._partial.name + ".rows")
        try:
            self._file = open_alone(self._rows_path, wait=False)
        except BlockingIOError:
            raise OptionError(f"another process{lock_holder(self._rows_path)} is writing {path}") from None
        self._remove(self._partial)  # left by a killed process
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.flush()
        self._start = self._file.tell()

    def put(self, places: Ids, rows: AnyArray, ids: AnyArray) -> None:
        """Write ``rows`` [n, columns] (or [n]) of the nodes ``ids`` [n] to the ``places`` [n] of the table."""
        order = np.argsort(places, kind="stable")
        records = np.empty(len(places), dtype=self._record)
        records["row"] = rows[order].reshape(-1, *self.shape[1:])
        if self._has_ids:
            records["node"] = ids[order]
        places, data = places[order], records.view(np.uint8)
        for first, last in runs(places):
            offset = self._start + int(places[first]) * self._row_bytes
            with as_error(OptionError, self.path):
                write_at(self._file.fileno(), data[first * self._row_bytes : last * self._row_bytes], offset)

    def finish(self, names: list[str], *, block_bytes: int, values: tuple[str, ...] | None = None) -> None:
        """Make the file of the rows. ``names``: column names, for formats that have them; ``values``: texts written for
        the numbers 0, 1, …; ``block_bytes`` of rows are in memory at once."""
        with as_error(OptionError, self.path):
            made = self._partial
            match self.path.suffix:
                case ".npy":
                    made = self._rows_path
                    self._file.truncate(self._start + self.shape[0] * self._row_bytes)
                case ".zarr":
                    self._write_zarr(block_bytes)
                case ".csv":
                    self._write_csv(names, block_bytes, values)
                case ".parquet":
                    self._write_parquet(names, block_bytes, values)
            flush_all([made])
            if made == self._partial:  # before the rename, or a power cut might leave it
                self._rows_path.unlink(missing_ok=True)
            if not (made.is_dir() and os.path.lexists(self.path)):
                made.replace(self.path)
            elif not exchanged(made, self.path):
                self._remove(self.path)
                made.replace(self.path)
            if made == self._rows_path:
                self._file.close()
            self.close()
            flush(self.path.absolute().parent)

    def _blocks(self, block_bytes: int) -> Iterator[AnyArray]:
        """Yield the records in the order of their places."""
        height = max(1, block_bytes // self._row_bytes)
        for start in range(0, self.shape[0], height):
            count = min(height, self.shape[0] - start)
            data = os.pread(self._file.fileno(), count * self._row_bytes, self._start + start * self._row_bytes)
            yield np.frombuffer(data, dtype=self._record)

    def _write_zarr(self, block_bytes: int) -> None:
        try:
            with ArrayWriter(self._partial.parent, self._partial.name, self.shape, self.dtype) as writer:
                for records in self._blocks(block_bytes):
                    writer.append(records["row"])
        except StoreError as error:
            raise OptionError(str(error)) from error

    def _write_csv(self, names: list[str], block_bytes: int, values: tuple[str, ...] | None) -> None:
        digits = {4: "%.9g", 8: "%.17g"}[self.dtype.itemsize] if self.dtype.kind == "f" else "%d"
        named = None if values is None else [*map(_cell, values)]
        with self._partial.open("w", encoding="utf-8", newline="") as file:
            file.write(",".join(map(_cell, [self._called, *names])) + "\n")
            line = ",".join([digits if named is None else "%s"] * len(names))
            for records in self._blocks(block_bytes):
                ids, rows = records["node"].tolist(), records["row"].reshape(len(records), -1).tolist()
                cells = [_cell(node.decode()) for node in ids] if records["node"].dtype.kind == "S" else ids
                for node, row in zip(cells, rows, strict=True):
                    numbers = row if named is None else [named[value] for value in row]
                    file.write(f"{node},{line % tuple(numbers)}\n")

    def _write_parquet(self, names: list[str], block_bytes: int, values: tuple[str, ...] | None) -> None:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
        texts = self._record["node"].kind == "S"
        kind = pyarrow.from_numpy_dtype(self.dtype) if values is None else pyarrow.string()
        id_kind = pyarrow.string() if texts else pyarrow.int64()
        named = None if values is None else pyarrow.array(values, pyarrow.string())
        schema = pyarrow.schema([(self._called, id_kind), *((name, kind) for name in names)])
        with parquet.ParquetWriter(self._partial, schema) as writer:
            for records in self._blocks(block_bytes):
                ids = [node.decode() for node in records["node"].tolist()] if texts else records["node"]
                rows = [np.ascontiguousarray(column) for column in records["row"].reshape(len(records), -1).T]
                columns = rows if named is None else [named.take(pyarrow.array(column)) for column in rows]
                writer.write_table(pyarrow.table([pyarrow.array(ids, id_kind), *columns], schema=schema))

    def close(self) -> None:
        """Remove an unfinished table."""
        if not self._file.closed:  # until then no other process writes here
            self._remove(self._partial)
            self._rows_path.unlink(missing_ok=True)
            self._file.close()

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _cell(text: str) -> str:
    """Return ``text`` as a cell of a CSV file."""
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text
