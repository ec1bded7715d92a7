# SPDX-License-Identifier: Apache-2.0
"""Which columns of which tables hold the nodes' ids, features, labels and splits, and how the user is told."""

import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from ooc.errors import OptionError, SourceError
from ooc.sources.files.tables import Block, Cells, ColumnKind, Table, open_table
from ooc.sources.labels import masks_of_words
from ooc.sources.reading import SPLIT, Request
from ooc.sources.source import Mask
from ooc.storage.store import SPLITS

ID_NAMES = ("id", "node", "node_id", "nid")
_LABEL_NAMES = ("label", "y")
_MEMBER_NAMES = re.compile(r"(?:is_|in_)?(?:(train(?:ing)?)|(val(?:id(?:ation)?)?)|(test(?:ing)?))(?:_mask)?")
_NO_FEATURES = (ColumnKind.LARGE, ColumnKind.TIMES, ColumnKind.CATEGORIES, ColumnKind.TEXTS)
_SHOWN = 20


@dataclass(frozen=True)
class SplitColumns:
    """The columns that say which split a node is in: one of ``words``, or for each split one of true and false."""

    words: str | None
    members: dict[str, str]

    @property
    def cells(self) -> dict[str, Cells]:
        """The columns and what they are read as."""
        return dict.fromkeys(self.members.values(), Cells.MEMBER) | ({self.words: Cells.TEXT} if self.words else {})

    def masks(self, block: Block, row: int, name: str) -> list[Mask]:
        """Who of the rows from ``row`` on is in ``train``, ``valid`` and ``test``."""
        if self.words is not None:
            return masks_of_words(block[self.words], row, name)
        nobody = np.zeros(len(next(iter(block.values()))), dtype=np.bool_)
        return [block[self.members[split]] if split in self.members else nobody for split in SPLITS]


class NodeTables:
    """The tables a request names, each opened once, and what their columns were taken for."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._opened: dict[Path, Table] = {}
        self._meanings: dict[Path, dict[str, str]] = {}

    def open(self, path: Path) -> Table:
        """The table in the file ``path``."""
        if path not in self._opened:
            self._opened[path] = open_table(path, self._request.budget_bytes)
            self._meanings[path] = {}
        return self._opened[path]

    def ids(self, name: str) -> tuple[Table, str] | None:
        """``(table, column)`` of the ids of the nodes of the source ``name``; None where rows are their numbers.

        SourceError where two tables would have to be joined by them.
        """
        found = [(table, column) for table in self._opened.values() if (column := self._id(table)) is not None]
        if found and len(self._opened) > 1:
            raise SourceError(f"{name}: features and labels are in two tables with ids of their own; join them in one")
        for table, column in found:
            self._take(table, (column,), "ids")
        return found[0] if found else None

    def split(self, table: Table) -> SplitColumns | None:
        """The columns that say which split a node is in; None where there are none or a random split is asked for."""
        names, chosen = self._split_names(table), self._request.split
        if not names:
            return None
        if chosen is None:
            self._take(table, names, "splits")
            return _split_columns(table, names)
        if self._request.option("split_column") is not None:
            raise OptionError(f"{SPLIT}={chosen} and a split column contradict each other; give one of them")
        self._take(table, names, f"splits, but not used: the split asked for is {chosen}")
        return None

    def labels(self, table: Table) -> tuple[str, ...]:
        """The columns of labels; SourceError where there is none."""
        found = self._labels(table)
        if not found:
            raise SourceError(f"{table.path} has no column label or y; name the one of labels with label_column=")
        self._take(table, found, "labels")
        return found

    def features(self, table: Table) -> tuple[str, ...]:
        """The columns of features: those asked for, or all that are nothing else and hold numbers.

        SourceError, with the remedy, for a column that is nothing else and should hardly be a feature.
        """
        asked = self._request.option("feature_columns")
        if asked is not None:
            found = listed_columns(table, asked)
        else:
            other = {self._id(table), *self._split_names(table), *self._labels(table)}
            found = tuple(name for name in table.columns if name not in other)
            kinds = table.kinds()
            wrong = next((name for name in found if kinds[name] in _NO_FEATURES), None)
            if wrong is not None:
                raise SourceError(
                    f"{table.path}: the column {wrong} holds {kinds[wrong].value}, which make no feature; name the "
                    f"columns of features with feature_columns=, or what it is with "
                    f"id_column=, label_column= or split_column="
                )
        if not found:
            raise SourceError(f"{table.path} has no column of features, only {', '.join(table.columns[:_SHOWN])}")
        self._take(table, found, "features")
        return found

    def notes(self) -> tuple[str, ...]:
        """What the columns of each table were taken for, a line each."""
        return tuple(column_note(table, self._meanings[path]) for path, table in self._opened.items())

    def _take(self, table: Table, columns: tuple[str, ...], meaning: str) -> None:
        for column in columns:
            self._meanings[table.path].setdefault(column, meaning)

    def _id(self, table: Table) -> str | None:
        return chosen_column(table, self._request, "id_column", ID_NAMES)

    def _split_names(self, table: Table) -> tuple[str, ...]:
        """All columns that are there to say what the splits are."""
        asked = self._request.option("split_column")
        if asked is not None:
            return listed_columns(table, asked)
        features = self._request.option("feature_columns")
        others = [name for name in table.columns if features is None or name not in listed_columns(table, features)]
        # A column called val or test alone may be any number.
        members = "train" in map(_split_called, others)
        return tuple(name for name in others if name.lower() == "split" or (members and _split_called(name)))

    def _labels(self, table: Table) -> tuple[str, ...]:
        asked = self._request.option("label_column")
        if asked is not None:
            return listed_columns(table, asked)
        found = chosen_column(table, self._request, "label_column", _LABEL_NAMES)
        return () if found is None else (found,)


def _split_called(name: str) -> str | None:
    """The split whose members a column of this name tells."""
    found = _MEMBER_NAMES.fullmatch(name.lower())
    return SPLITS[(found.lastindex or 0) - 1] if found else None


def _split_columns(table: Table, names: tuple[str, ...]) -> SplitColumns:
    """What the columns ``names`` are to the splits, by what they are called, or else by their order."""
    members = {split: name for name in names if (split := _split_called(name)) is not None}
    if not members and len(names) == 1:
        return SplitColumns(names[0], {})
    if not members and len(names) <= len(SPLITS):
        return SplitColumns(None, dict(zip(SPLITS, names, strict=False)))
    if len(members) < len(names):
        raise SourceError(
            f"{table.path} says more than once what the splits are: {', '.join(names)}; name with split_column= the "
            f"one that counts, or one each for train, valid and test"
        )
    return SplitColumns(None, members)


def chosen_column(table: Table, request: Request, option: str, usual: tuple[str, ...]) -> str | None:
    """The column that the ``option`` names, else the one that is called as is ``usual``, else None."""
    asked = request.option(option)
    if asked is not None:
        return listed_columns(table, asked, most=1)[0]
    found = [name for name in table.columns if name.lower() in usual]
    if len(found) > 1:
        raise SourceError(f"{table.path} has the columns {' and '.join(found)}; say with {option}= which one is meant")
    return found[0] if found else None


def listed_columns(table: Table, text: str, most: int | None = None) -> tuple[str, ...]:
    """The columns that ``text`` lists, separated by commas; SourceError for one that ``table`` has not."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in table.columns:
            columns = ", ".join(table.columns[:_SHOWN])
            raise SourceError(f"{table.path} has no column {name!r}; it has {columns}")
    if len(set(names)) < len(names) or len(names) > (most or len(names)):
        raise OptionError(f"{text!r}: {'one column' if most else 'each column once'} is wanted")
    return names


def column_note(table: Table, meanings: dict[str, str]) -> str:
    """What each column of ``table`` was taken for, in a line; neighbours of one meaning together."""
    parts = []
    for meaning, group in groupby(table.columns, key=lambda name: meanings.get(name, "not used")):
        names = list(group)
        few = ", ".join(names) if len(names) <= _SHOWN // 2 else f"{names[0]} … {names[-1]} ({len(names)} columns)"
        parts.append(f"{few}: {meaning}")
    return f"columns of {table.path}: {'; '.join(parts)}"
