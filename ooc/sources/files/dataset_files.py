# SPDX-License-Identifier: Apache-2.0
"""The files of a published data set by their paths in it, in a folder or in the zip it is published as."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import Cells
from ooc.sources.files.lines import text_block_bytes, text_lines
from ooc.sources.files.npy import NpyArray
from ooc.sources.files.pickles import read_torch_dict
from ooc.sources.files.streams import Blob
from ooc.sources.files.text_table import TextTable
from ooc.sources.files.zip_members import Archive
from ooc.sources.labels import IndexSplits
from ooc.sources.source import fingerprint_of
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS

_BLOCK_ROWS = 1 << 18


def holds_dataset(path: Path, marks: tuple[str, ...]) -> bool:
    """Return whether ``path`` is a folder with one of the files ``marks``, or a zip with one in some folder of it."""
    if path.is_dir():
        return any((path / mark).is_file() for mark in marks)
    return path.suffix == ".zip" and any(_top(name, marks) is not None for name in Archive(Blob.of_file(path)).names())


def _top(name: str, marks: tuple[str, ...]) -> str | None:
    """Return the folder in a zip, with its slash, that contains a file of ``marks``; None for other files."""
    return next((name.removesuffix(mark) for mark in marks if name == mark or name.endswith("/" + mark)), None)


class DatasetFiles:
    """The data set at ``path``, recognised by one of the files ``marks``.

    Files have names such as ``raw/data.npz``, without the ``prefix`` that all of them share. Text is parsed in blocks
    that fit the budget.
    """

    def __init__(self, path: Path, marks: tuple[str, ...], budget_bytes: int, *, prefix: str = "") -> None:
        self._path, self._top, self._block_bytes = path, prefix, text_block_bytes(budget_bytes)
        self._archive: Archive | None = None
        self._names: list[str] = []
        if path.is_dir():
            self.name = path.resolve().name
        else:
            self._archive = Archive(Blob.of_file(path))
            self._names = self._archive.names()
            tops = {top for name in self._names if (top := _top(name, marks)) is not None}
            if len(tops) != 1:
                raise SourceError(f"{path} holds {len(tops)} data sets ({' or '.join(marks)}), not one")
            self._top = tops.pop()
            self.name = self._top.rstrip("/") or path.stem

    def fingerprint(self, *names: str) -> dict[str, Any]:
        """Return the identity of the zip, or of those of the files and folders ``names`` that exist."""
        there = (path for name in names if (path := self._path_of(name)).exists())
        return fingerprint_of(*([self._path] if self._archive is not None else there))

    def label(self, name: str) -> str:
        """Return the name of the file ``name`` for messages."""
        return f"{self._path}: {self._top}{name}" if self._archive is not None else str(self._path_of(name))

    def _path_of(self, name: str) -> Path:
        """Return the path of a file in a folder."""
        return self._path / f"{self._top}{name}"

    def has(self, name: str) -> bool:
        """Return whether there is a file ``name``."""
        return self._path_of(name).is_file() if self._archive is None else self._top + name in self._names

    def folders(self, parent: str) -> set[str]:
        """Return the names of the folders in the folder ``parent``."""
        if self._archive is None:
            folder = self._path_of(parent)
            return {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()
        inside = (name.split("/") for name in self._names if name.startswith(f"{self._top}{parent}/"))
        depth = self._top.count("/") + 1
        return {parts[depth] for parts in inside if len(parts) > depth + 1}

    def blob(self, name: str) -> Blob:
        """Return the file ``name``; raise SourceError where it is missing, as all following methods do."""
        member = self._archive.member(self._top + name) if self._archive is not None else None
        if not self.has(name):
            raise SourceError(f"{self.label(name)} is missing")
        return Blob.of_file(self._path_of(name)) if member is None else member

    def archive(self, name: str) -> Archive:
        """Return the archive in the file ``name``."""
        return Archive(self.blob(name))

    def array(self, name: str) -> NpyArray:
        """Return the array in the npy file ``name``."""
        return NpyArray(self.blob(name))

    def lines(self, name: str) -> Iterator[bytes]:
        """Yield the text file ``name``, compressed or not, in blocks of whole lines."""
        return text_lines(self.blob(name), self._block_bytes)

    def table(self, name: str, columns: int | None = None) -> TextTable:
        """Return the table in the text file ``name``, with ``columns`` columns, by default those of the first row."""
        return TextTable(Path(self.label(name)), lambda: self.lines(name), columns=columns)

    def columns(self, name: str) -> int:
        """Return the number of columns in the first row of a table."""
        return len(self.table(name).columns)

    def numbers(
        self, name: str, cells: Cells = Cells.WHOLE, columns: int | None = None, size: int = _BLOCK_ROWS
    ) -> Iterator[AnyArray]:
        """Yield the numbers in a table, [n, ``columns``], at most ``size`` rows at a time; empty cells are NaN.

        By default there are as many columns as in the first row.
        """
        return self.table(name, self.columns(name) if columns is None else columns).rows_of(cells, size)

    def splits(self, name: str, nodes: int, *, needed: Sequence[str]) -> IndexSplits:
        """Return the splits in the file ``name``, a ``split_dict.pt``, which must have those that are ``needed``.

        In some releases the test nodes are called ``test-whole``.
        """
        found = read_torch_dict(self.blob(name))
        found.setdefault("test", found.get("test-whole", 0))
        lists = {split: array for split in SPLITS if isinstance(array := found.get(split), np.ndarray)}
        if not lists.keys() >= set(needed):
            raise SourceError(f"{self.label(name)} lacks one of {', '.join(needed)}")
        return IndexSplits(lists, nodes=nodes, name=self.label(name))
