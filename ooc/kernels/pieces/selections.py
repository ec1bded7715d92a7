# SPDX-License-Identifier: Apache-2.0
"""What of the entries of every row is selected by their order: quantiles, or the rows that are highest. Either gives
the same of entries that come piece by piece, and nothing sorted is kept for its gradient.

Shapes: E entries, of R rows, C columns, K of those of one row that are highest.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


class Selection(Protocol):
    """That of one row, whose entries come piece by piece, in one order as often as they are asked for."""

    def add(self, part_EC: Tensor) -> None:
        """Some more entries; all of them in each run."""

    def end_run(self) -> bool:
        """To be called when all have been added; whether they are to be added once more."""

    @property
    def value(self) -> Tensor:
        """What is selected, a vector."""

    def spread(self, gradient: Tensor, part_EC: Tensor) -> Tensor:
        """From the gradient of the value to that of some of the entries."""


class Selecting(Protocol):
    """What is to be selected."""

    def width(self, columns: int) -> int:
        """Columns of what is selected of so many."""

    def selecting_nbytes(self, columns: int) -> int:
        """A bound on what selecting from the entries of one row takes, beside a piece of them."""

    def begin(self, like_EC: Tensor) -> Selection:
        """That of one row with such entries."""

    def of_rows(self, values_EC: Tensor, index_E: Tensor, rows: int, fill_value: float) -> Tensor:
        """As ``selected_of_rows``."""


def selected_of_rows(
    values_EC: Tensor, index_E: Tensor, rows: int, selecting: Selecting, fill_value: float = 0.0
) -> Tensor:
    """One row for each of ``rows``; ``fill_value`` where there are no entries. One function for torch's modes, which
    may give it piece by piece (``kernels.pieces.caught_sums``)."""
    if has_torch_function_unary(values_EC):
        arguments = values_EC, index_E, rows, selecting, fill_value
        return handle_torch_function(selected_of_rows, (values_EC,), *arguments)
    return selecting.of_rows(values_EC, index_E, rows, fill_value)


@dataclass(frozen=True, slots=True)
class Highest:
    """The ``count`` rows of entries whose last column is highest, from the highest down, side by side; of equal ones
    the first."""

    count: int

    def width(self, columns: int) -> int:
        return self.count * columns

    def selecting_nbytes(self, columns: int) -> int:
        return 4 * self.width(columns) * torch.float64.itemsize  # before, beside a piece's, both, in order

    def begin(self, like_EC: Tensor) -> "HighestOfRow":
        return HighestOfRow(self, like_EC)

    def of_rows(self, values_EC: Tensor, index_E: Tensor, rows: int, fill_value: float) -> Tensor:
        with torch.no_grad():
            order_E = _falling(values_EC)
            order_E = order_E[index_E[order_E].argsort(stable=True)]
            row_E, count_R = index_E[order_E], torch.bincount(index_E, minlength=rows)
            rank_E = torch.arange(len(row_E), device=row_E.device) - (count_R.cumsum(0) - count_R)[row_E]
            kept_E = rank_E < self.count
            place_K = (row_E * self.count + rank_E)[kept_E]
        found = values_EC.index_select(0, order_E[kept_E])
        filled = values_EC.new_full((rows * self.count, values_EC.shape[1]), fill_value)
        return filled.index_copy(0, place_K, found).view(rows, -1)


class HighestOfRow:
    """Those of the entries that there have been, and how many came before each."""

    def __init__(self, selecting: Highest, like_EC: Tensor) -> None:
        self._selecting = selecting
        self._values_KC = like_EC[:0]
        self._before_K = torch.empty(0, dtype=torch.int64, device=like_EC.device)
        self._count = self._spread = 0

    def add(self, part_EC: Tensor) -> None:
        """Some more entries; of equal ones those before stay in front."""
        best_K = _falling(part_EC)[: self._selecting.count]
        values_KC = torch.cat((self._values_KC, part_EC[best_K]))
        order_K = _falling(values_KC)[: self._selecting.count]
        self._before_K = torch.cat((self._before_K, self._count + best_K))[order_K]
        self._values_KC = values_KC[order_K]
        self._count += len(part_EC)

    def end_run(self) -> bool:
        """All are known after one."""
        return False

    @property
    def value(self) -> Tensor:
        """[K C], with zeros behind where there are fewer entries."""
        found = self._values_KC.flatten()
        return torch.cat((found, found.new_zeros(self._selecting.width(self._values_KC.shape[1]) - len(found))))

    def spread(self, gradient: Tensor, part_EC: Tensor) -> Tensor:
        """To those that are selected, which come in the same order."""
        first = self._spread % self._count
        self._spread = first + len(part_EC)
        here_K = (self._before_K >= first) & (self._before_K < self._spread)
        found_EC = torch.zeros_like(part_EC)
        found_EC[self._before_K[here_K] - first] = gradient.view(self._selecting.count, -1)[: len(here_K)][here_K]
        return found_EC


def _falling(values_EC: Tensor) -> Tensor:
    """In which order the last column falls."""
    return values_EC[:, -1].argsort(stable=True, descending=True)
