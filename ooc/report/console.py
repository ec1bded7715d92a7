# SPDX-License-Identifier: Apache-2.0
"""Print lines and tables for people, on a terminal or to a file."""

import re
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from ooc.errors import OptionError, as_error
from ooc.storage.array import replace_file

PLAIN_WIDTH = 80
"""The columns of output to a file; a terminal has its own width."""
_WRAPPED = frozenset(("backward use", "what SOURCE is", "where it lies under --root"))
_WRAPPED_WIDTH = 24
"""Headings of table columns whose cells may wrap, and the width such a column needs, in characters."""
_WORDS = _WRAPPED | {"fate", "bound by", "produced", "last forward use", "setting", "state", "model", "graph", "metric"}
"""Headings of left-aligned table columns, which hold words; the first column does too, all others hold numbers."""
_COLUMN_GAP = 2
UNIT = re.compile(r"(?<=\d) (?=(?:%|s|min|h|[KMGT]?B)(?![\w/]))")
"""A pattern for the space between a number and its unit."""


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all; raise OptionError where that fails."""
    with as_error(OptionError, path):
        replace_file(path, text.encode())


def check_drawing(path: Path | None, *suffixes: str) -> None:
    """Raise OptionError, before any other work, where matplotlib is missing or ``path`` is no file that it can draw."""
    if find_spec("matplotlib") is None:
        raise OptionError("to draw that needs matplotlib; pip install 'ooc[report]'")
    if path is not None and path.suffix.lower() not in suffixes:
        raise OptionError(f"{path}: give a name that ends in {' or '.join(suffixes)}")
    if path is not None and not path.absolute().parent.is_dir():
        raise OptionError(f"{path}: there is no folder {path.parent}")


class Output(Console):
    """A rich console on standard output that lets BrokenPipeError pass on when the reader has gone."""

    def on_broken_pipe(self) -> None:
        """Re-raise the error for the handler that all commands share; rich would exit here with another code."""
        raise


def output() -> Console:
    """Return a console for standard output, as wide as the terminal; PLAIN_WIDTH where it is none."""
    return Output(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def say(console: Console, line: str) -> None:
    """Print ``line``, wrapped between words to the console's width; words, which may be paths, are never broken."""
    console.print("\n  ".join(wrapped(line, console.width - 2)), highlight=False, markup=False, soft_wrap=True)


def print_hanging(label: str, text: str, console: Console) -> None:
    """Print ``label`` and then ``text``, whose further lines are indented by the width of ``label``."""
    for number, line in enumerate(wrapped(text, console.width - len(label))):
        console.print(f"{' ' * len(label) if number else label}{line}", markup=False, highlight=False, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` as lines of at most ``width``, broken between words, but never between a number and its unit."""
    joined = UNIT.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(joined, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print ``rows`` of cells under the headings ``columns``, without empty columns. On a narrow console several tables
    follow each other, each with the first column, so that nothing is cut."""
    widths = [
        max(len(line) for cell in cells for line in cell.split("\n")) for cells in zip(columns, *rows, strict=True)
    ]
    tables, used = [[0]], widths[0]
    for k in range(1, len(columns)):
        if not any(row[k] for row in rows):
            continue
        width = _COLUMN_GAP + (min(widths[k], _WRAPPED_WIDTH) if columns[k] in _WRAPPED else widths[k])
        if len(tables[-1]) > 1 and used + width > console.width - _COLUMN_GAP:
            tables.append([0])
            used = widths[0]
        tables[-1].append(k)
        used += width
    for shown in tables:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for k in shown:
            justify: Literal["left", "right"] = "left" if not k or columns[k] in _WORDS else "right"
            table.add_column(columns[k], justify=justify, no_wrap=columns[k] not in _WRAPPED)
        for row in rows:
            table.add_row(*(row[k] for k in shown))
        console.print(table)
