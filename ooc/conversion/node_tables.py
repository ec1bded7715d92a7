# SPDX-License-Identifier: Apache-2.0
"""Which columns of which tables hold the nodes' ids, features, labels and splits."""

from pathlib import Path

from ooc.conversion.reading import Request
from ooc.conversion.tables import Table, open_table
from ooc.errors import OptionError, SourceError

_SHOWN = 20


class NodeTables:
    """The tables a request names, each opened once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._opened: dict[Path, Table] = {}

    def open(self, path: Path) -> Table:
        """The table in the file ``path``."""
        if path not in self._opened:
            self._opened[path] = open_table(path, self._request.budget_bytes)
        return self._opened[path]

    def ids(self, name: str) -> tuple[Table, str] | None:
        """``(table, column)`` of the ids of the nodes of the source ``name``; None where rows are their numbers.

        SourceError where two tables would have to be joined by them.
        """
        found = [(table, column) for table in self._opened.values() if (column := self._id(table)) is not None]
        if found and len(self._opened) > 1:
            raise SourceError(f"{name}: features and labels are in two tables with ids of their own; join them in one")
        return found[0] if found else None

    def split(self, table: Table) -> str | None:
        """The column that says which split a node is in."""
        return chosen_column(table, self._request.option("split_column"), ("split",))

    def labels(self, table: Table) -> tuple[str, ...]:
        """The columns of labels; SourceError where there is none."""
        found = self._labels(table)
        if not found:
            raise SourceError(f"{table.path} has no column label or y; name the one of labels with --label-column")
        return found

    def features(self, table: Table) -> tuple[str, ...]:
        """The columns of features: those asked for, or all that are nothing else."""
        asked = self._request.option("feature_columns")
        if asked is not None:
            return _listed(table, asked)
        other = {self._id(table), self.split(table), *self._labels(table)}
        found = tuple(name for name in table.columns if name not in other)
        if not found:
            raise SourceError(f"{table.path} has no column of features, only {', '.join(table.columns[:_SHOWN])}")
        return found

    def _id(self, table: Table) -> str | None:
        return chosen_column(table, self._request.option("id_column"), ("id", "node_id"))

    def _labels(self, table: Table) -> tuple[str, ...]:
        asked = self._request.option("label_column")
        if asked is not None:
            return _listed(table, asked)
        return tuple(name for name in ("label", "y") if name in table.columns)[:1]


def chosen_column(table: Table, asked: str | None, usual: tuple[str, ...]) -> str | None:
    """The column that was ``asked`` for, else the first of the ``usual`` ones that ``table`` has, else None."""
    if asked is None:
        return next((name for name in usual if name in table.columns), None)
    return _listed(table, asked, most=1)[0]


def _listed(table: Table, text: str, most: int | None = None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in table.columns:
            columns = ", ".join(table.columns[:_SHOWN])
            raise SourceError(f"{table.path} has no column {name!r}; it has {columns}")
    if len(set(names)) < len(names) or len(names) > (most or len(names)):
        raise OptionError(f"{text!r}: {'one column' if most else 'each column once'} is wanted")
    return names
