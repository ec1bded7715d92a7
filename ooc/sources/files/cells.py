# SPDX-License-Identifier: Apache-2.0
"""The kinds of tables' columns, judged by their first rows, and the values that cells are read as."""

import re
from enum import Enum
from itertools import pairwise
from typing import assert_never

import numpy as np

from ooc.errors import SourceError
from ooc.storage.array import AnyArray

LOOKED_AT_ROWS = 100
"""The rows by which a column's kind is judged."""
WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
"""The form of an integer id. An id in another form, such as 007, is a text, since as an integer it would lose its
form."""
_TRUTH = {"": False, **dict.fromkeys(("0", "0.0", "false"), False), **dict.fromkeys(("1", "1.0", "true"), True)}
_TIME = re.compile(
    r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{4}/\d\d?/\d\d?( .*)?|\d\d?[/.]\d\d?[/.]\d{2,4}( .*)?|\d\d?:\d\d(:\d\d.*)?"
)
MOST_EXACT = 2**53
"""The largest number up to which float64 represents all integers."""
_LEAST_COUNTED = 10
_LARGE = 100_000_000
"""The least large number: seconds since 1970 are larger since 1973; dates written as one number are near."""


class Cells(Enum):
    """What a column is read as.

    WHOLE: int64 [n]; REAL: floating point [n] (lists: [n, k]), NaN for an empty cell; TEXT: objects [n], possibly
    empty; MEMBER: membership of a split, bool [n], false for an empty cell.
    """

    WHOLE = "whole numbers"
    REAL = "numbers"
    TEXT = "texts"
    MEMBER = "true or false (1 or 0) as a split does; if it is a feature, say columns={'NAME': 'feature'}"


class Rounded(ValueError):
    """An integer that float64 would round."""

    MEANING = "a whole number that float64 would round"

    def __init__(self) -> None:
        super().__init__(self.MEANING)


class NoWholeNumber(SourceError):
    """A cell of a column of ids is no integer, or not in its plain form: the ids are texts."""


class ColumnKind(Enum):
    """What a column appears to hold, judged by its type and first rows."""

    NUMBERS = "numbers"
    LARGE = "whole numbers as large as times and ids are"
    COUNTED = "whole numbers that rise by one from row to row, as ids do"
    TRUTH = "true and false"
    TIMES = "dates or times"
    CATEGORIES = "categories"
    TEXTS = "texts"


Block = dict[str, AnyArray]


def is_number(cell: str) -> bool:
    """Return whether the text is a number; true and false are not, although they can be read as numbers."""
    try:
        cell_value(cell if cell.strip() else "empty", Cells.REAL)
    except (Rounded, OverflowError):
        return True
    except ValueError:
        return False
    return cell.strip().lower() not in _TRUTH or not cell.strip().isalpha()


def of_texts(texts: list[str], cells: Cells) -> AnyArray:
    """Return ``texts`` as they are, or as membership of a split, [n]; raise ValueError for other words than true and
    false."""
    if cells is Cells.TEXT:
        return np.array(texts, dtype=np.object_)
    meaning = {text: cell_value(text, Cells.MEMBER) for text in dict.fromkeys(texts)}
    return np.array([meaning[text] for text in texts], dtype=np.bool_)


def kind_of(cells: list[str]) -> ColumnKind:
    """Return the kind of a column with these first ``cells``.

    Where only some are numbers, the column counts as numbers: reading it will report the others as mistakes, with their
    places.
    """
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
    """Return the integer ``number`` as float64; raise Rounded where that is not exact."""
    if abs(number) > MOST_EXACT and int(float(number)) != number:
        raise Rounded
    return float(number)


def cell_value(cell: str, cells: Cells) -> int | float | str:
    """Return the value of a cell; raise ValueError for an invalid one.

    Numbers that only Python writes so (``1_0``, digits of other scripts) are invalid. Blanks are kept in texts only.
    """
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
