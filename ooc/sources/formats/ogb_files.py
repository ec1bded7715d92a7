# SPDX-License-Identifier: Apache-2.0
"""The files of an ogb dataset by their paths in it, whether in a folder or in its zip, and its splits."""

from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.lines import CsvForm, csv_rows
from ooc.sources.files.pickles import MOST_BYTES, read_torch_dict
from ooc.sources.files.streams import Blob, FileBlob, Inflated, Stream
from ooc.sources.files.zip_members import Archive, Member, names_in_zip
from ooc.sources.source import fingerprint_of
from ooc.sources.splits import IndexSplits
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS

_MARKS = ("raw/data.npz", "raw/edge.csv.gz")
_SPLIT_DICT = "split_dict.pt"


def has_ogb_files(path: Path) -> bool:
    """Whether ``path`` is a folder or a zip of such a dataset."""
    if path.is_dir():
        return any((path / mark).is_file() for mark in _MARKS)
    return path.suffix == ".zip" and any(_top(name) is not None for name in names_in_zip(path))


def _top(name: str) -> str | None:
    """The folder in the zip, with its slash, that a file of ``_MARKS`` is in; None for other files."""
    return next((name.removesuffix(mark) for mark in _MARKS if name == mark or name.endswith("/" + mark)), None)


class OgbFiles:
    """The dataset at ``path``; files go by names such as ``raw/data.npz``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archive: Archive | None = None
        self._names: set[str] = set()
        self._top = ""
        if path.is_dir():
            self.name = path.resolve().name
        else:
            self._archive = Archive(FileBlob(path))
            self._names = set(self._archive.names())
            tops = {top for name in self._names if (top := _top(name)) is not None}
            if len(tops) != 1:
                raise SourceError(f"{path} holds {len(tops)} ogb datasets (raw/data.npz or raw/edge.csv.gz), not one")
            self._top = tops.pop()
            self.name = self._top.rstrip("/") or path.stem

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Which files these are."""
        if self._archive is not None:
            return fingerprint_of(self._path)
        return fingerprint_of(*(folder for part in ("raw", "split") if (folder := self._path / part).is_dir()))

    def has(self, name: str) -> bool:
        """Whether there is a file ``name``."""
        if self._archive is None:
            return (self._path / name).is_file()
        return self._top + name in self._names

    def blob(self, name: str) -> Blob:
        """The file ``name`` to look around in. SourceError where it is missing."""
        member = self._member(name)
        return FileBlob(self._path / name) if member is None else member.blob()

    def text(self, name: str) -> Stream:
        """What the gzip file ``name`` holds; its checksum is checked at the end, that of the zip around it too."""
        member = self._member(name)
        if member is None:
            return Inflated(FileBlob(self._path / name).at(0), self.label(name), gzip=True)
        return Inflated(member.open(), self.label(name), gzip=True)

    def label(self, name: str) -> str:
        """How messages call the file ``name``."""
        return f"{self._path}: {self._top}{name}" if self._archive is not None else str(self._path / name)

    def numbers(self, name: str, *, most: int) -> AnyArray:
        """The column of whole numbers in the gzip file ``name``, int64 [n]; SourceError for more than ``most``."""
        form = CsvForm(rows=None, columns=1, dtype=np.int64)
        blocks = [np.empty(0, dtype=np.int64)]
        for block in csv_rows(self.text(name), form, self.label(name)):
            blocks.append(block[:, 0])
            most -= len(block)
            if most < 0:
                raise SourceError(f"{self.label(name)} lists more numbers than there can be")
        return np.concatenate(blocks)

    def splits(self, kind: str | None, nodes: int) -> IndexSplits:
        """The split ``kind``, or the only one there is."""
        folder = f"split/{kind or self.only_split()}"
        if self.has(f"{folder}/{_SPLIT_DICT}"):
            name = f"{folder}/{_SPLIT_DICT}"
            member = self._member(name)
            found = read_torch_dict(self.blob(name) if member is None else member.held(MOST_BYTES))
            ids = {split: array for split in SPLITS if isinstance(array := found.get(split), np.ndarray)}
            if len(ids) != len(SPLITS):
                raise SourceError(f"{self.label(name)} lacks one of {', '.join(SPLITS)}")
            return IndexSplits(ids, nodes=nodes, name=self.label(name))
        listed = {split: self.numbers(f"{folder}/{split}.csv.gz", most=nodes) for split in SPLITS}
        return IndexSplits(listed, nodes=nodes, name=self.label(folder))

    def only_split(self) -> str:
        """The kind of split there is: the folder in ``split``."""
        if self._archive is None:
            folder = self._path / "split"
            kinds = {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()
        else:
            inside = (name.removeprefix(self._top) for name in self._names if name.startswith(f"{self._top}split/"))
            kinds = {parts[1] for name in inside if len(parts := name.split("/")) > 2}
        if len(kinds) != 1:
            raise SourceError(f"{self.label('split')} holds {len(kinds)} kinds of split, not one")
        return kinds.pop()

    def _member(self, name: str) -> Member | None:
        """The zip's member ``name``; None in a folder, where the file was found to be there."""
        if not self.has(name):
            raise SourceError(f"{self.label(name)} is missing")
        return self._archive.member(self._top + name) if self._archive is not None else None
