# SPDX-License-Identifier: Apache-2.0
"""Lines and tables for people, on a terminal or in a file."""

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
"""Columns of what goes to a file; a terminal has its own."""
_WRAPPED = frozenset(("backward use", "what SOURCE is", "where it lies under --root"))
_WRAPPED_WIDTH = 24
"""Columns that are as wide as there is room, and what they need."""
_WORDS = _WRAPPED | {"fate", "bound by", "produced", "last forward use", "setting", "state", "model", "graph", "metric"}
"""Columns of words, like every first one; all others hold numbers."""
_BETWEEN = 2
UNIT = re.compile(r"(?<=\d) (?=(?:%|s|min|h|[KMGT]?B)(?![\w/]))")
"""The space before a unit."""


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all. OptionError where that cannot be done."""
    with as_error(OptionError, path):
        replace_file(path, text.encode())


def check_drawing(path: Path | None, *suffixes: str) -> None:
    """OptionError, before anything is done for it, where matplotlib draws nothing, or nothing at ``path``."""
    if find_spec("matplotlib") is None:
        raise OptionError("to draw that needs matplotlib; pip install 'ooc[report]'")
    if path is not None and path.suffix.lower() not in suffixes:
        raise OptionError(f"{path}: give a name that ends in {' or '.join(suffixes)}")
    if path is not None and not path.absolute().parent.is_dir():
        raise OptionError(f"{path}: there is no folder {path.parent}")


class Output(Console):
    """Standard output, whose reader may go."""

    def on_broken_pipe(self) -> None:
        """Have the error go on to who ends all commands alike; rich would end the program, with another exit code."""
        raise


def output() -> Console:
    """Standard output: as wide as the terminal, and where it goes to a file as wide as most are."""
    return Output(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def say(console: Console, line: str) -> None:
    """Print ``line``, broken between words where it is too long. A word, which may be a path, is never broken."""
    console.print("\n  ".join(wrapped(line, console.width - 2)), highlight=False, markup=False, soft_wrap=True)


def print_hanging(label: str, text: str, console: Console) -> None:
    """Print ``text`` behind ``label``, and what has no room in the line below itself."""
    for number, line in enumerate(wrapped(text, console.width - len(label))):
        console.print(f"{' ' * len(label) if number else label}{line}", markup=False, highlight=False, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines, broken between words, but never between a number and its unit."""
    joined = UNIT.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(joined, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """``rows`` of cells under the headings ``columns``. A column without content is left out. Where the console is too
    narrow, several tables follow each other, each with the first column: nothing is cut."""
    widths = [
        max(len(line) for cell in cells for line in cell.split("\n")) for cells in zip(columns, *rows, strict=True)
    ]
    tables, used = [[0]], widths[0]
    for k in range(1, len(columns)):
        if not any(row[k] for row in rows):
            continue
        width = _BETWEEN + (min(widths[k], _WRAPPED_WIDTH) if columns[k] in _WRAPPED else widths[k])
        if len(tables[-1]) > 1 and used + width > console.width - _BETWEEN:
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
