# SPDX-License-Identifier: Apache-2.0
"""Quantiles of the entries of every row, by which entries they are: nothing sorted is kept for their gradient.

Shapes: E entries, of R rows, C columns, Q quantiles of every row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

_ENDS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    **{"lower": (torch.floor,), "higher": (torch.ceil,), "nearest": (torch.round,)},
    **dict.fromkeys(("linear", "midpoint"), (torch.floor, torch.ceil)),
}
"""Of a quantile between two entries, by how it is interpolated: which of them count."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantiles:
    """Which: ``q`` [Q, 1], from 0 to 1, and how those between two entries are interpolated."""

    q: Tensor
    interpolation: str

    def places(self, count_R: Tensor) -> Tensor:
        """Where they lie among sorted entries, those of row after row, [R Q]."""
        return (self.q * (count_R - 1) + (count_R.cumsum(0) - count_R)).t().reshape(-1)

    def entries(self, place_Q: Tensor, columns: Iterator[Tensor], order: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Of every end between which they lie, which entries that is, [R Q, C]; ``order`` sorts those of a column."""
        found: list[list[Tensor]] = [[] for _ in _ENDS[self.interpolation]]
        for values_E in columns:
            order_E = order(values_E)
            for of_end, end in zip(found, _ENDS[self.interpolation], strict=True):
                of_end.append(order_E[end(place_Q.clamp(0, len(order_E) - 1)).long()])
            del order_E
        return [torch.stack(of_end, dim=1) for of_end in found]

    def shares(self, place_Q: Tensor) -> Tensor | float:
        """Of the second of two ends."""
        return place_Q.frac()[:, None] if self.interpolation == "linear" else 0.5

    def between(self, place_Q: Tensor, ends: Sequence[Tensor]) -> Tensor:
        """What they are, of the values of the ends."""
        below, *above = ends
        if not above:
            return below
        share = self.shares(place_Q)
        return below + (above[0] - below) * share if isinstance(share, Tensor) else share * below + share * above[0]


def quantiles_of_rows(values_EC: Tensor, index_E: Tensor, rows: int, quantiles: Quantiles, fill_value: float) -> Tensor:
    """[R, Q C]; ``fill_value`` of rows without entries. One function for torch's modes, which may give it piece by
    piece (``kernels.pieces.caught_sums``)."""
    if has_torch_function_unary(values_EC):
        arguments: tuple[Any, ...] = (values_EC, index_E, rows, quantiles, fill_value)
        return handle_torch_function(quantiles_of_rows, (values_EC,), *arguments)
    with torch.no_grad():
        count_R = torch.bincount(index_E, minlength=rows)
        place_Q = quantiles.places(count_R)

        def order(values_E: Tensor) -> Tensor:
            order_E = values_E.argsort(stable=True)
            return order_E[index_E[order_E].argsort(stable=True)]

        entries = quantiles.entries(place_Q, iter(values_EC.unbind(1)), order)
    found_QC = quantiles.between(place_Q, [values_EC.gather(0, found_QC) for found_QC in entries])
    without_Q = (count_R == 0).repeat_interleave(quantiles.q.numel())
    return found_QC.masked_fill(without_Q[:, None], fill_value).view(rows, -1)
