# SPDX-License-Identifier: Apache-2.0
"""Lines and tables for people, on a terminal or in a file."""

import sys
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

_WRAPPED = frozenset(("backward use", "what SOURCE is", "where it lies under --root"))
_WRAPPED_WIDTH = 24
"""Columns that are as wide as there is room, and what they need."""
_WORDS = _WRAPPED | {"fate", "bound by", "produced", "last forward use", "setting"}
"""Columns of words, like every first one; all others hold numbers."""
_BETWEEN = 2


def output(plain_width: int) -> Console:
    """Standard output: as wide as the terminal, ``plain_width`` columns where it goes to a file."""
    return Console(width=None if sys.stdout.isatty() else plain_width)


def say(console: Console, line: str) -> None:
    """Print ``line`` as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


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
