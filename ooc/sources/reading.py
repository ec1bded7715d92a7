# SPDX-License-Identifier: Apache-2.0
"""The interface of a format: how it is recognised, what it needs, which options it takes, how it is opened.

Imports nothing but the standard library, since ``ooc convert --help`` shows the options.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ooc.errors import OptionError

if TYPE_CHECKING:
    from ooc.sources.source import Source

SPLIT = "split"
COLUMNS = "columns"


@dataclass(frozen=True)
class ReadingOption:
    """An option of ``ooc convert`` and ``ooc.convert`` that only some formats take: ``--NAME METAVAR``."""

    metavar: str
    help: str


READING_OPTIONS: dict[str, ReadingOption] = {
    "features": ReadingOption("FILE|random:F[:SEED]|none", "Features of a graph that has none: npy or a table."),
    "labels": ReadingOption("FILE|random:C[:SEED]|none", "Labels of a graph that has none: npy or a table."),
    "task": ReadingOption("classes|multilabel|values", "What the labels are. [default: by their type and shape]"),
    "feature_columns": ReadingOption("A,B,...", "Columns of features. [default: all that are nothing else]"),
    "edge_weight": ReadingOption("COLUMN|FILE", "The edges' weights: a column beside their ends, or npy [edges]."),
    "edge_features": ReadingOption("A,B,...|FILE", "The edges' features: columns, or npy [edges, features]."),
    "types": ReadingOption(
        "papers|all", "Of MAG240M and IGB: papers and citations, or all there is. [default: papers]"
    ),
    "label": ReadingOption("19|2K", "Which of IGB's two kinds of label: 19 classes or 2983. [default: 19]"),
}
"""Options by their Python names; the command line writes ``_`` as ``-``. Each Reader says which ones it takes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the caller asks of a reader.

    ``split``: None (the format's own), a column of masks, or ``"random[:SEED]"``. ``drop_edge_data``: convert without
    the edges' weights and features. ``options``: the given ones of ``READING_OPTIONS``. ``arrays``: features and labels
    held by a Python program, by the names of those options. ``columns``: roles of tables' columns, where the usual ones
    are wrong. ``inputs``: names of model inputs beside ``x`` in PyG's data.
    """

    split: int | str | None
    budget_bytes: int
    drop_edge_data: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[str] = ()

    def option(self, name: str) -> str | None:
        """Return the value given for the option ``name``; None where it was not given."""
        return self.options.get(name)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One format. ``needs``: what a source of it is, in a line for ``ooc convert --list``.

    ``folder``: whether it is a folder (True), a file (False), either (None). ``recognises`` may open a path that exists
    but not read all of it. ``takes``: the names of its options, of ``READING_OPTIONS``, ``SPLIT`` or ``COLUMNS``.
    """

    needs: str
    folder: bool | None
    recognises: Callable[[Path], bool]
    open: Callable[[Path, Request], "Source"]
    takes: frozenset[str] = frozenset()


def check_taken(takes: frozenset[str], form: str, request: Request) -> None:
    """Raise OptionError where ``request`` has an option that the format, called ``form``, does not take."""
    given: dict[str, Any] = dict(request.options) | dict.fromkeys(request.arrays, "an array")
    if request.split is not None:
        given[SPLIT] = request.split
    if request.columns:
        given[COLUMNS] = "; ".join(f"{name}={role}" for name, role in request.columns.items())
    for name, value in given.items():
        if name in takes:
            continue
        if name == SPLIT:
            raise OptionError(f"{form} has a split of its own; split={value} cannot be chosen")
        raise OptionError(f"{form} takes no option {name.replace('_', '-')} ({name}={value})")
