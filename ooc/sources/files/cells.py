# SPDX-License-Identifier: Apache-2.0
"""What a column of a table looks like, and what its cells are read as."""

import re
from enum import Enum
from itertools import pairwise
from typing import assert_never

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray

LOOKED_AT_ROWS = 100
"""From which what a column looks like is told."""
WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
"""An id in another form, 007 say, is a text: as a number it would come back as another one."""
_TRUTH = {"": False, **dict.fromkeys(("0", "0.0", "false"), False), **dict.fromkeys(("1", "1.0", "true"), True)}
_TIME = re.compile(
    r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{4}/\d\d?/\d\d?( .*)?|\d\d?[/.]\d\d?[/.]\d{2,4}( .*)?|\d\d?:\d\d(:\d\d.*)?"
)
MOST_EXACT = 2**53
"""Up to which float64 has all whole numbers."""
_LEAST_COUNTED = 10
_LARGE = 100_000_000
"""Seconds since 1970 are more since 1973; dates written as one number are near."""


class Cells(Enum):
    """What a column is read as: whole numbers int64 [n]; floating-point numbers [n] (lists: [n, k]) with NaN for an
    empty cell; texts (objects) [n], empty ones included; membership of a split bool [n], an empty cell being no member.
    """

    WHOLE = "whole numbers"
    REAL = "numbers"
    TEXT = "texts"
    MEMBER = "true or false (1 or 0) as a split does; if it is a feature, say columns={'NAME': 'feature'}"


class Rounded(ValueError):
    """A whole number is another one as float64."""

    MEANING = "a whole number that float64 would round"

    def __init__(self) -> None:
        super().__init__(self.MEANING)


class NoWholeNumber(SourceError):
    """A cell of a column of ids is no whole number, or not written as one: the ids are texts."""


class ColumnKind(Enum):
    """What a column looks like, by its type and first rows."""

    NUMBERS = "numbers"
    LARGE = "whole numbers as large as times and ids are"
    COUNTED = "whole numbers that rise by one from row to row, as ids do"
    TRUTH = "true and false"
    TIMES = "dates or times"
    CATEGORIES = "categories"
    TEXTS = "texts"


Block = dict[str, AnyArray]


def is_number(cell: str) -> bool:
    """Whether the text is a number; true and false are none, though they can be read as such."""
    try:
        cell_value(cell if cell.strip() else "empty", Cells.REAL)
    except (Rounded, OverflowError):
        return True
    except ValueError:
        return False
    return cell.strip().lower() not in _TRUTH or not cell.strip().isalpha()


def of_texts(texts: list[str], cells: Cells) -> AnyArray:
    """``texts`` as they are, or as membership of a split, [n]; ValueError where one says neither true nor false."""
    if cells is Cells.TEXT:
        return np.array(texts, dtype=np.object_)
    meaning = {text: cell_value(text, Cells.MEMBER) for text in dict.fromkeys(texts)}
    return np.array([meaning[text] for text in texts], dtype=np.bool_)


def kind_of(cells: list[str]) -> ColumnKind:
    """What the first ``cells`` of a column look like. Where only some are numbers the others are taken for mistakes,
    which reading them tells the place of."""
    cells = [text for cell in cells if (text := cell.strip())]
    numbers = [float(cell) for cell in cells if is_number(cell)]
    if numbers:
        large = all(value.is_integer() and abs(value) >= _LARGE for value in numbers)
        if large:
            return ColumnKind.LARGE
        counted = len(numbers) >= _LEAST_COUNTED and all(
            y - x == 1 for x, y in pairwise([numbers[0] // 1, *numbers[1:]])
        )
        return ColumnKind.COUNTED if counted else ColumnKind.NUMBERS
    for kind, fits in (
        (ColumnKind.TRUTH, lambda cell: cell.lower() in _TRUTH),
        (ColumnKind.TIMES, _TIME.fullmatch),
    ):
        if cells and all(map(fits, cells)):
            return kind
    return ColumnKind.TEXTS if cells else ColumnKind.NUMBERS


def exact(number: int) -> float:
    """The whole ``number`` as float64. Rounded where that cannot hold it."""
    if abs(number) > MOST_EXACT and int(float(number)) != number:
        raise Rounded
    return float(number)


def cell_value(cell: str, cells: Cells) -> int | float | str:
    """ValueError for what is none, numbers as Python alone writes them (``1_0``, digits of other scripts) included.
    Blanks are a part of texts alone."""
    if cells is not Cells.TEXT:
        cell = cell.strip()
        if "_" in cell or not cell.isascii():
            raise ValueError("no number in a file")
    match cells:
        case Cells.WHOLE:
            if not WHOLE_NUMBER.fullmatch(cell):
                raise ValueError("no plain whole number")
            value = int(cell)
            if not -(2**63) <= value < 2**63:
                raise ValueError("past 64 bits")
            return value
        case Cells.REAL:
            truth = _TRUTH.get(cell.lower()) if cell.isalpha() else None
            if WHOLE_NUMBER.fullmatch(cell):
                return exact(int(cell))
            return float(truth) if truth is not None else float(cell) if cell else float("nan")
        case Cells.TEXT:
            return cell
        case Cells.MEMBER:
            if cell.lower() not in _TRUTH:
                raise ValueError("neither true nor false")
            return _TRUTH[cell.lower()]
        case _:
            assert_never(cells)
