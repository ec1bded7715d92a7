# SPDX-License-Identifier: Apache-2.0
"""Long sequences of small tuples in little memory: a plan has millions of uses, steps and transfers."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")
_ROWS_AT_ONCE = 4096
"""Rows that are converted to columns at a time."""


class Columns(Sequence[Row], Generic[Row]):
    """A sequence of rows of numbers, stored by column in arrays of type ``codes``. An item is made from a row's numbers
    by ``row`` when it is asked for. Loops that must be fast read ``columns`` directly."""

    __slots__ = ("_row", "columns")

    def __init__(self, codes: str, row: Callable[..., Row], rows: Iterable[Iterable[int]] = ()) -> None:
        self._row = row
        self.columns: tuple[array[int], ...] = tuple(array(code) for code in codes)
        self.extend(rows)

    def extend(self, rows: Iterable[Iterable[int]]) -> None:
        rest = iter(rows)
        while some := list(islice(rest, _ROWS_AT_ONCE)):
            for column, numbers in zip(self.columns, zip(*some, strict=True), strict=True):
                column.extend(numbers)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, at: Any) -> Any:
        numbers: list[Any] = [column[at] for column in self.columns]
        return list(map(self._row, *numbers)) if isinstance(at, slice) else self._row(*numbers)

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, *self.columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and self.columns == other.columns


class ByStep(Sequence[tuple[Row, ...]], Generic[Row]):
    """A sequence of tuples, one for each step, that are consecutive stretches of ``rows``. It begins empty."""

    __slots__ = ("_stops", "rows")

    def __init__(self, rows: "Columns[Row] | array[Row]") -> None:  # type: ignore[type-var]
        self.rows = rows
        self._stops = array("q", [0])

    def end_step(self) -> None:
        """End the present step: the rows added since the step before belong to it."""
        self._stops.append(len(self.rows))

    def __len__(self) -> int:
        return len(self._stops) - 1

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[step] for step in range(*at.indices(len(self)))]
        if at < 0:
            at += len(self)
        start, stop = self._stops[at], self._stops[at + 1]
        return tuple(self.rows[start:stop]) if stop > start else ()

    def __iter__(self) -> Iterator[tuple[Row, ...]]:
        rows, start = iter(self.rows), 0
        for stop in islice(self._stops, 1, None):
            yield tuple(islice(rows, stop - start)) if stop > start else ()
            start = stop

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByStep) and (self.rows, self._stops) == (other.rows, other._stops)
