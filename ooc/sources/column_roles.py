# SPDX-License-Identifier: Apache-2.0
"""What the user says a column is (``--column NAME=ROLE``), and how what each was taken for is shown."""

import textwrap
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from itertools import groupby

from ooc.errors import OptionError, SourceError
from ooc.sources.files.tables import Table
from ooc.sources.reading import Request

NODES, EDGES = "nodes", "edges"
FEATURE, IGNORE = "feature", "ignore"
ID, LABEL, SPLIT_WORDS, TRAIN, VALID, TEST = "id", "label", "split", "train", "val", "test"
WEIGHT, SOURCE_END, TARGET_END = "weight", "src", "dst"
ROLES: Mapping[str, tuple[str, ...]] = {
    NODES: (ID, FEATURE, LABEL, SPLIT_WORDS, TRAIN, VALID, TEST, IGNORE),
    EDGES: (SOURCE_END, TARGET_END, WEIGHT, FEATURE, IGNORE),
}
"""What a column can be in a table of nodes and in one of edges."""
_ALL = tuple(dict.fromkeys(role for roles in ROLES.values() for role in roles))
_WIDTH, _MOST_NAMES_WIDTH, _SHOWN = 79, 26, 10


def asked_roles(request: Request, table: Table, where: str) -> dict[str, str]:
    """The roles that the request gives to columns of ``table``, one of ``nodes`` or of ``edges`` (``where``).

    A name that both tables have may be written ``nodes.NAME`` or ``edges.NAME``.
    """
    found = {}
    for text, role in request.columns.items():
        if role not in _ALL:
            raise OptionError(f"{as_argument(text, role)}: a column is {', '.join(_ALL[:-1])} or {_ALL[-1]}")
        name = text if text in table.columns else text.removeprefix(f"{where}.")
        if name in table.columns and role in ROLES[where]:
            found[name] = role
    for role in (ID, SPLIT_WORDS, TRAIN, VALID, TEST, WEIGHT, SOURCE_END, TARGET_END):
        several = [name for name, its in found.items() if its == role]
        if len(several) > 1:
            raise OptionError(f"the columns {' and '.join(several)} cannot both be {role}")
    return found


def as_argument(name: str, role: str) -> str:
    """How a column is given a role, as errors say it to Python."""
    return f"columns={{{name!r}: {role!r}}}"


def check_all_found(request: Request, tables: Collection[tuple[str, Table]]) -> None:
    """SourceError for a column that the request gives a role, but that none of the ``tables`` has in that role."""
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
    """What each column of ``table`` was taken for: a heading and a line for neighbours of one meaning."""
    rows = []
    for meaning, group in groupby(table.columns, key=lambda name: meanings.get(name, "not used")):
        names = list(group)
        few = ", ".join(names) if len(names) <= _SHOWN else f"{names[0]} … {names[-1]} ({len(names)} columns)"
        rows.append((few, meaning))
    width = min(_MOST_NAMES_WIDTH, max(len(few) for few, _ in rows))
    lines = [f"columns of {table.path}:"]
    for few, meaning in rows:
        if len(few) > width:
            lines += textwrap.wrap(few, _WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
            few = ""
        indent = " " * (width + 4)
        wrapped = textwrap.wrap(meaning, _WIDTH - len(indent), subsequent_indent=indent)
        lines.append(f"  {few:<{width}}  " + "\n".join(wrapped))
    return "\n".join(lines)
