# SPDX-License-Identifier: Apache-2.0
"""The roles of tables' columns: ids, features, labels and splits.

A role is given by the user (``--column NAME=ROLE``) or follows from a column's name and values. The user is told which
role each column was given.
"""

import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ooc.errors import OptionError, SourceError
from ooc.sources.files.cells import Block, Cells, ColumnKind, is_number
from ooc.sources.files.tables import Table, is_table, open_table
from ooc.sources.labels import masks_of_words
from ooc.sources.reading import SPLIT, Request
from ooc.sources.source import Mask
from ooc.storage.store import SPLITS

# ---- what the user says ---------------------------------------------------------------------------------------------


NODES, EDGES = "nodes", "edges"
FEATURE, IGNORE = "feature", "ignore"
ID, LABEL, SPLIT_WORDS, TRAIN, VALID, TEST = "id", "label", "split", "train", "val", "test"
WEIGHT, SOURCE_END, TARGET_END = "weight", "src", "dst"
ROLES: Mapping[str, tuple[str, ...]] = {
    NODES: (ID, FEATURE, LABEL, SPLIT_WORDS, TRAIN, VALID, TEST, IGNORE),
    EDGES: (SOURCE_END, TARGET_END, WEIGHT, FEATURE, IGNORE),
}
"""The roles of columns in a table of nodes and in a table of edges."""
_ANY_ROLE = tuple(dict.fromkeys(role for roles in ROLES.values() for role in roles))
_NOTE_WIDTH, _MOST_NAMES_WIDTH, _MOST_LISTED = 79, 26, 10


def asked_roles(request: Request, table: Table, where: str) -> dict[str, str]:
    """Return the roles that the request gives to columns of ``table``, one of ``nodes`` or of ``edges`` (``where``).

    A name that both tables have may be written ``nodes.NAME`` or ``edges.NAME``.
    """
    found = {}
    for text, role in request.columns.items():
        if role not in _ANY_ROLE:
            raise OptionError(f"{as_argument(text, role)}: a column is {', '.join(_ANY_ROLE[:-1])} or {_ANY_ROLE[-1]}")
        name = text if text in table.columns else text.removeprefix(f"{where}.")
        if name in table.columns and role in ROLES[where]:
            found[name] = role
    if where == EDGES:
        found = dict.fromkeys(filter(_UNNAMED_INDEX.fullmatch, table.columns), IGNORE) | found
    for role in (ID, SPLIT_WORDS, TRAIN, VALID, TEST, WEIGHT, SOURCE_END, TARGET_END):
        several = [name for name, its in found.items() if its == role]
        if len(several) > 1:
            raise OptionError(f"the columns {' and '.join(several)} cannot both be {role}")
    return found


def as_argument(name: str, role: str) -> str:
    """Return the Python argument that gives a column a role, for error messages."""
    return f"columns={{{name!r}: {role!r}}}"


def check_all_found(request: Request, tables: Collection[tuple[str, Table]]) -> None:
    """Raise SourceError for a column of the request that no table has, or has in another role."""
    for text, role in request.columns.items():
        if any(
            (text in table.columns or text.removeprefix(f"{where}.") in table.columns) and role in ROLES[where]
            for where, table in tables
        ):
            continue
        there = [name for _, table in tables for name in table.columns]
        what = f"no table has a column {text!r}" if text not in there else f"the column {text!r} cannot be {role}"
        near = get_close_matches(text, there, 1) if text not in there else []
        hint = f"did you mean {near[0]}?" if near else f"the columns are {', '.join(there[:20])}"
        raise SourceError(f"{as_argument(text, role)}: {what}; {hint}")


def column_note(table: Table, meanings: Mapping[str, str]) -> str:
    """Return a note of the roles of ``table``'s columns: a heading, and a line for adjacent columns of one role."""
    rows = []
    for meaning, group in groupby(table.columns, key=lambda name: meanings.get(name, "not used")):
        names = [name or "(no name)" for name in group]
        few = ", ".join(names) if len(names) <= _MOST_LISTED else f"{names[0]} … {names[-1]} ({len(names)} columns)"
        rows.append((few, meaning))
    width = min(_MOST_NAMES_WIDTH, max(len(few) for few, _ in rows))
    lines = [f"columns of {table.path}:"]
    for few, meaning in rows:
        if len(few) > width:
            lines += textwrap.wrap(few, _NOTE_WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
            few = ""
        indent = " " * (width + 4)
        wrapped = textwrap.wrap(meaning, _NOTE_WIDTH - len(indent), subsequent_indent=indent)
        lines.append(f"  {few:<{width}}  " + "\n".join(wrapped))
    return "\n".join(lines)


# ---- tables of nodes ------------------------------------------------------------------------------------------------


ID_NAMES = ("id", "node", "node_id", "nid")
_LABEL_NAMES = ("label", "y")
_MEMBER_NAMES = re.compile(r"(?:is_|in_)?(?:(train(?:ing)?)|(val(?:id(?:ation)?)?)|(test(?:ing)?))(?:_mask)?")
_NOT_FEATURES = (ColumnKind.LARGE, ColumnKind.TIMES, ColumnKind.CATEGORIES, ColumnKind.TEXTS)
_CLASS_NAME_KINDS = (ColumnKind.TEXTS, ColumnKind.CATEGORIES, ColumnKind.TRUTH)
_TEXT_KINDS = (ColumnKind.TEXTS, ColumnKind.CATEGORIES)
_UNNAMED_INDEX = re.compile(r"(?:Unnamed: ?\d+|__index_level_\d+__)?")
"""Names that pandas gives an unnamed index in files. Such a column holds the nodes' ids if no other does; otherwise it
is ignored."""
_ID_PATTERN = re.compile(r"(?i:[_\- .]id|[_\- .]key)$|[a-z]I[dD]$")
_SPLIT_ROLES = {SPLIT_WORDS: "", TRAIN: "train", VALID: "valid", TEST: "test"}
_MOST_SHOWN = 20


@dataclass(frozen=True)
class SplitColumns:
    """The columns that define the splits: one of ``words``, or for each split one of true and false."""

    words: str | None
    members: dict[str, str]

    @property
    def cells(self) -> dict[str, Cells]:
        """The columns, and as what each is read."""
        return dict.fromkeys(self.members.values(), Cells.MEMBER) | ({self.words: Cells.TEXT} if self.words else {})

    def masks(self, block: Block, row: int, name: str) -> list[Mask]:
        """Return masks of ``train``, ``valid`` and ``test`` for a block whose first row is ``row``."""
        if self.words is not None:
            return masks_of_words(block[self.words], row, name)
        nobody = np.zeros(len(next(iter(block.values()))), dtype=np.bool_)
        return [block[self.members[split]] if split in self.members else nobody for split in SPLITS]


class NodeTables:
    """The tables that a request names, each opened once, and the roles of their columns."""

    def __init__(self, request: Request, held: Mapping[Path, Table] = MappingProxyType({})) -> None:
        self._request = request
        self._held = held
        self._may_have_labels, self._may_lack_features = True, False
        self._opened: dict[Path, Table] = {}
        self._meanings: dict[Path, dict[str, str]] = {}

    def of_types(self, *, labelled: bool) -> None:
        """Declare that the tables are of one node type among several: labels only if ``labelled``, features
        optional."""
        self._may_have_labels, self._may_lack_features = labelled, True

    def has_labels(self, table: Table) -> bool:
        """Return whether the table has a column with the role or the name of labels."""
        roles = self._asked_roles(table)
        return LABEL in roles.values() or usual_column(table, LABEL, _LABEL_NAMES, roles) is not None

    def open(self, path: Path) -> Table:
        """Return the table in the file ``path``."""
        if path not in self._opened:
            held = self._held.get(path)
            self._opened[path] = open_table(path, self._request.budget_bytes) if held is None else held
            self._meanings[path] = {}
        return self._opened[path]

    def has(self, path: Path) -> bool:
        """Return whether ``path`` is a table held in memory, or has the name of a table's file."""
        return path in self._held or is_table(path)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables opened so far."""
        return tuple(self._opened.values())

    def ids(self, name: str) -> tuple[Table, str] | None:
        """Return ``(table, column)`` of the node ids of the source ``name``; None where rows are numbered.

        SourceError where features and labels are in two tables, each with ids.
        """
        found = [(table, column) for table in self._opened.values() if (column := self._id_column(table)) is not None]
        if found and len(self._opened) > 1:
            raise SourceError(f"{name}: features and labels are in two tables with ids of their own; join them in one")
        for table, column in found:
            self._record_roles(table, (column,), ID)
        return found[0] if found else None

    def split(self, table: Table) -> SplitColumns | None:
        """Return the columns that define the splits; None where there are none or a random split is asked for."""
        names, chosen = self._split_names(table), self._request.split
        if not names:
            return None
        if chosen is None:
            found = _split_columns(table, names, self._asked_roles(table))
            for split, name in found.members.items():
                self._record_roles(table, (name,), f"{split} split")
            self._record_roles(table, names, "split, in words")
            return found
        if any(role in _SPLIT_ROLES for role in self._asked_roles(table).values()):
            raise OptionError(f"{SPLIT}={chosen} and a split column contradict each other; give one of them")
        self._record_roles(table, names, f"split, but not used: the split asked for is {chosen}")
        return None

    def labels(self, table: Table) -> tuple[tuple[str, ...], bool]:
        """Return the columns of labels, and whether they hold names of classes; raise SourceError where there is
        none."""
        found = self._label_columns(table)
        if not found:
            raise SourceError(
                f"{table.path} has no column label or y; say which one it is with {as_argument('NAME', LABEL)}: it has "
                f"{', '.join(table.columns[:_MOST_SHOWN])}; or give labels='none' to train links"
            )
        kind = table.kinds()[found[0]]
        if kind is ColumnKind.TIMES:
            what = f"the column {found[0]} holds {kind.value}, which make no label"
            raise SourceError(f"{table.path}: {what}; {_remedy(found[0], kind)}")
        numbers = self._request.option("task") not in (None, "classes") or len(found) > 1
        named = not numbers and kind in _CLASS_NAME_KINDS
        self._record_roles(table, found, "label: its texts are the classes' names" if named else LABEL)
        return found, named

    def features(self, table: Table) -> tuple[str, ...]:
        """Return the columns of features: those asked for, or all columns of numbers that have no other role.

        SourceError, with the remedy, for a column without a role whose values are unlikely to be a feature.
        """
        listed, asked = self._request.option("feature_columns"), self._asked_roles(table)
        wanted = {name for name, role in asked.items() if role == FEATURE}
        if listed is not None:
            wanted |= set(listed_columns(table, listed))
            found = tuple(name for name in table.columns if name in wanted and asked.get(name, FEATURE) == FEATURE)
        else:
            index = [name for name in table.columns if _UNNAMED_INDEX.fullmatch(name) and name not in wanted]
            other = {self._id_column(table), *self._split_names(table), *self._label_columns(table), *index}
            found = tuple(name for name in table.columns if asked.get(name, FEATURE) == FEATURE and name not in other)
            kinds = table.kinds()
            no_features = (*_NOT_FEATURES, *([] if self._id_column(table) else [ColumnKind.COUNTED]))
            wrong = {name: kinds[name] for name in found if kinds[name] in no_features and name not in wanted}
            if wrong:
                raise _feature_error(table, wrong)
        if not found and not self._may_lack_features:
            only = ", ".join(table.columns[:_MOST_SHOWN])
            raise SourceError(
                f"{table.path} has no column of features, only {only}; give features='none' to train an embedding"
            )
        self._record_roles(table, tuple(name for name, role in asked.items() if role == IGNORE), "left out, as asked")
        self._record_roles(table, found, FEATURE)
        return found

    def check_used(self, edges: Table | None) -> None:
        """Raise OptionError for a role that is asked for and that no column got: features or labels are elsewhere.

        ``edges``: the table of the edges, whose columns may have the same names.
        """
        used = set() if edges is None else {*asked_roles(self._request, edges, EDGES).items()}
        unused = {}
        for path, table in self._opened.items():
            for one in self._asked_roles(table).items():
                if one[0] in self._meanings[path] or one[1] == IGNORE:
                    used.add(one)
                else:
                    unused[one] = path
        for one in unused.keys() - used:
            raise OptionError(f"{as_argument(*one)}: features= or labels= say that this is not in {unused[one]}")

    def notes(self) -> tuple[str, ...]:
        """Return a note of the columns' roles for each table."""
        return tuple(column_note(table, self._meanings[path]) for path, table in self._opened.items())

    def _record_roles(self, table: Table, columns: tuple[str, ...], meaning: str) -> None:
        for column in columns:
            self._meanings[table.path].setdefault(column, meaning)

    def _asked_roles(self, table: Table) -> dict[str, str]:
        return asked_roles(self._request, table, NODES)

    def _id_column(self, table: Table) -> str | None:
        asked = self._asked_roles(table)
        usual = usual_column(table, ID, ID_NAMES, asked)
        if usual is not None:
            return usual
        alike = [name for name in table.columns if name not in asked and _ID_PATTERN.search(name)]
        index = [name for name in table.columns if name not in asked and _UNNAMED_INDEX.fullmatch(name)]
        return next(iter(alike if len(alike) == 1 else index), None)

    def _split_names(self, table: Table) -> tuple[str, ...]:
        """Return all columns that define splits, including unused ones."""
        roles = self._asked_roles(table)
        said = tuple(name for name, role in roles.items() if role in _SPLIT_ROLES)
        if said:
            return said
        others = self._without_role(table)
        # Without train, a column called val or test may be anything.
        members = "train" in map(_split_marked, others)
        return tuple(name for name in others if name.lower() == "split" or (members and _split_marked(name)))

    def _label_columns(self, table: Table) -> tuple[str, ...]:
        if not self._may_have_labels:
            return ()
        roles = self._asked_roles(table)
        said = tuple(name for name, role in roles.items() if role == LABEL)
        if said:
            return said
        found = usual_column(table, LABEL, _LABEL_NAMES, roles)
        if found is not None:
            return (found,)
        # The only column of words without another role.
        other, kinds = {self._id_column(table), *self._split_names(table)}, table.kinds()
        words = [name for name in self._without_role(table) if name not in other and kinds[name] in _TEXT_KINDS]
        return tuple(words) if len(words) == 1 else ()

    def _without_role(self, table: Table) -> list[str]:
        """Return the columns that the user gives no role."""
        features, roles = self._request.option("feature_columns"), self._asked_roles(table)
        listed = () if features is None else listed_columns(table, features)
        used = {*roles, *listed, *filter(_UNNAMED_INDEX.fullmatch, table.columns)}
        return [name for name in table.columns if name not in used]


def _feature_error(table: Table, wrong: dict[str, ColumnKind]) -> SourceError:
    """Return the error for all columns that are unlikely features, with what to do about them."""
    (first, kind), *others = wrong.items()
    if not others:
        return SourceError(
            f"{table.path}: the column {first} holds {kind.value}{_sample(table, first, kind)}, which make no feature; "
            f"{_remedy(first, kind)}"
        )
    listed = ", ".join(f"{name} ({kind.value})" for name, kind in wrong.items())
    ignored = " ".join(as_argument(name, IGNORE) for name in wrong)
    words = next((name for name, kind in wrong.items() if kind in _TEXT_KINDS), None)
    label = f", {as_argument(words, LABEL)} if that is the classes" if words is not None else ""
    return SourceError(
        f"{table.path}: {len(wrong)} columns make no feature: {listed}; {ignored} leaves them out{label}, "
        "or make numbers of them first"
    )


def _sample(table: Table, name: str, kind: ColumnKind) -> str:
    """Return one of the column's texts for the message, chosen among those that are no numbers."""
    cells = next(iter(table.blocks({name: Cells.TEXT}, _MOST_SHOWN)))[name].tolist() if kind in _TEXT_KINDS else []
    words = [cell for cell in cells if cell and not is_number(cell)]
    return f" such as {words[0][:_MOST_SHOWN]!r}" if words else ""


def _remedy(name: str, kind: ColumnKind) -> str:
    """Return what to do with the column ``name``, which is an unlikely feature."""
    ignore = f"leave it out with {as_argument(name, IGNORE)}"
    match kind:
        case ColumnKind.TIMES:
            return f"make a number of it first, days since some date say, or {ignore}"
        case ColumnKind.LARGE | ColumnKind.COUNTED:
            return f"{ignore}, or say what it is: {as_argument(name, ID)}, or {as_argument(name, FEATURE)}"
        case _:
            return (
                f"{ignore}, say {as_argument(name, LABEL)} if it is the classes, or make numbers of it first: a column "
                "of 0 and 1 for each category"
            )


def _split_marked(name: str) -> str | None:
    """Return the split whose members a column of this name marks, or None."""
    found = _MEMBER_NAMES.fullmatch(name.lower())
    return SPLITS[(found.lastindex or 0) - 1] if found else None


def _split_columns(table: Table, names: tuple[str, ...], asked: dict[str, str]) -> SplitColumns:
    """Return the meaning of the split columns ``names``, from the roles ``asked`` for or from their names."""
    told = {name: _SPLIT_ROLES[role] for name, role in asked.items() if role in _SPLIT_ROLES}
    if [*told.values()] == [""]:
        return SplitColumns(next(iter(told)), {})
    called = {name: told.get(name) or _split_marked(name) for name in names}
    members = {split: name for name, split in called.items() if split}
    if not members and len(names) == 1:
        return SplitColumns(names[0], {})
    if len(members) < len(names):
        raise SourceError(
            f"{table.path} says more than once what the splits are: {', '.join(names)}; say of the one that counts "
            f"{as_argument('NAME', SPLIT_WORDS)}, or of one each {TRAIN!r}, {VALID!r} and {TEST!r}"
        )
    return SplitColumns(None, members)


def usual_column(table: Table, role: str, usual: tuple[str, ...], asked: Mapping[str, str]) -> str | None:
    """Return the column whose role is ``asked`` to be ``role``, or else the one with one of the ``usual`` names, or
    None.

    SourceError where several have such a name.
    """
    said = [name for name, its in asked.items() if its == role]
    if said:
        return said[0]
    found = [name for name in table.columns if name.lower() in usual and name not in asked]
    if len(found) > 1:
        raise SourceError(
            f"{table.path} has the columns {' and '.join(found)}; say which one is meant with "
            f"{as_argument(found[0], role)}"
        )
    return found[0] if found else None


def listed_columns(table: Table, text: str) -> tuple[str, ...]:
    """Return the columns in the comma-separated list ``text``; raise SourceError for one that ``table`` lacks."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in table.columns:
            columns = ", ".join(table.columns[:_MOST_SHOWN])
            raise SourceError(f"{table.path} has no column {name!r}; it has {columns}")
    if len(set(names)) < len(names):
        raise OptionError(f"{text!r}: each column once is wanted")
    return names
