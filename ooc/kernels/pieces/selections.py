# SPDX-License-Identifier: Apache-2.0
"""Select from the entries of every row by their order: the highest rows, or quantiles.

Both give the same results for entries that come piece by piece, in the same order every time, and keep nothing sorted
for their gradient. Quantiles of a row in pieces are found by counting: run after run over all pieces, count how many
entries have each value of the next digits, from the highest on, among those whose leading digits are those of the one
searched for. So no entries are held, however many there are.

Shapes: E entries, of R rows, C columns, K highest entries of a row, Q quantiles of every row, T ends of those of one
row, between two of which a quantile may lie; B buckets, one for each value of a digit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

_ENDS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    **{"lower": (torch.floor,), "higher": (torch.ceil,), "nearest": (torch.round,)},
    **dict.fromkeys(("linear", "midpoint"), (torch.floor, torch.ceil)),
}
"""Which of the two entries around a quantile count, by kind of interpolation."""
_DIGIT_BITS = 11
"""Bits that are counted in one run: float32 takes three runs, float64 six."""
_VALUES_AT_ONCE = 1 << 14
"""Values that are counted at a time."""
_BYTES_PER_VALUE = 48
"""Bytes of a value while it is counted: its bits in order, its digit and the place it is counted in, each twice, as
int64."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type a number's bits are read as, by bytes."""


@dataclass(frozen=True, slots=True)
class Highest:
    """The ``count`` entries whose last column is highest, from the highest down, side by side; of equal ones the
    first."""

    count: int

    def width(self, columns: int) -> int:
        """Return the columns of the result for entries with ``columns`` columns."""
        return self.count * columns

    def selecting_nbytes(self, columns: int) -> int:
        """Return a bound on the bytes that selecting from one row's entries takes, beside a piece of them."""
        return 4 * self.width(columns) * torch.float64.itemsize  # before, beside a piece's, both, in order

    def begin(self, like_EC: Tensor) -> "HighestOfRow":
        """Return the selection for one row with such entries."""
        return HighestOfRow(self, like_EC)

    def of_rows(self, values_EC: Tensor, index_E: Tensor, rows: int, fill_value: float) -> Tensor:
        """As ``selected_of_rows``."""
        with torch.no_grad():
            order_E = _descending_order(values_EC)
            order_E = order_E[index_E[order_E].argsort(stable=True)]
            row_E, count_R = index_E[order_E], torch.bincount(index_E, minlength=rows)
            rank_E = torch.arange(len(row_E), device=row_E.device) - (count_R.cumsum(0) - count_R)[row_E]
            kept_E = rank_E < self.count
            place_K = (row_E * self.count + rank_E)[kept_E]
        found = values_EC.index_select(0, order_E[kept_E])
        filled = values_EC.new_full((rows * self.count, values_EC.shape[1]), fill_value)
        return filled.index_copy(0, place_K, found).view(rows, -1)


class HighestOfRow:
    """The highest of one row's entries so far, and how many entries came before each."""

    def __init__(self, selecting: Highest, like_EC: Tensor) -> None:
        self._selecting = selecting
        self._values_KC = like_EC[:0]
        self._before_K = torch.empty(0, dtype=torch.int64, device=like_EC.device)
        self._count = self._spread = 0

    def add(self, part_EC: Tensor) -> None:
        """Add some more entries; each run adds all of them. Among equal ones, earlier entries stay in front."""
        best_K = _descending_order(part_EC)[: self._selecting.count]
        values_KC = torch.cat((self._values_KC, part_EC[best_K]))
        order_K = _descending_order(values_KC)[: self._selecting.count]
        self._before_K = torch.cat((self._before_K, self._count + best_K))[order_K]
        self._values_KC = values_KC[order_K]
        self._count += len(part_EC)

    def end_run(self) -> bool:
        """End a run over all entries; return whether another is needed, which is never so here."""
        return False

    @property
    def value(self) -> Tensor:
        """The result [K C], padded with zeros if there are fewer entries."""
        found = self._values_KC.flatten()
        return torch.cat((found, found.new_zeros(self._selecting.width(self._values_KC.shape[1]) - len(found))))

    def spread(self, gradient: Tensor, part_EC: Tensor) -> Tensor:
        """Return the gradient of some of the entries, which come in the same order, from that of the result."""
        first = self._spread % self._count
        self._spread = first + len(part_EC)
        here_K = (self._before_K >= first) & (self._before_K < self._spread)
        found_EC = torch.zeros_like(part_EC)
        found_EC[self._before_K[here_K] - first] = gradient.view(self._selecting.count, -1)[: len(here_K)][here_K]
        return found_EC


@dataclass(frozen=True, slots=True, eq=False)
class Quantiles:
    """The quantiles wanted: ``q`` [Q, 1], from 0 to 1, and how those between two entries are interpolated."""

    q: Tensor
    interpolation: str

    def places(self, count_R: Tensor) -> Tensor:
        """Return where the quantiles lie among sorted entries, row after row, [R Q]."""
        return (self.q * (count_R - 1) + (count_R.cumsum(0) - count_R)).t().reshape(-1)

    def ends(self, place_Q: Tensor, count: int) -> list[Tensor]:
        """Return which of ``count`` sorted entries each end of an interval around a quantile is, [R Q]."""
        return [end(place_Q.clamp(0, count - 1)).long() for end in _ENDS[self.interpolation]]

    def selecting_nbytes(self, columns: int) -> int:
        """Return a bound on the bytes that counting one row's entries takes: counts, cumulative counts, and copies of
        some values."""
        counts = len(_ENDS[self.interpolation]) * self.q.numel() * (columns << _DIGIT_BITS)
        return 2 * counts * torch.int64.itemsize + counts + max(columns, _VALUES_AT_ONCE) * _BYTES_PER_VALUE

    def width(self, columns: int) -> int:
        return self.q.numel() * columns

    def begin(self, like_EC: Tensor) -> "QuantilesOfRow":
        return QuantilesOfRow(self, like_EC)

    def of_rows(self, values_EC: Tensor, index_E: Tensor, rows: int, fill_value: float) -> Tensor:
        with torch.no_grad():
            count_R = torch.bincount(index_E, minlength=rows)
            place_Q = self.places(count_R)
            ends = self.ends(place_Q, len(values_EC))
            entries: list[list[Tensor]] = [[] for _ in ends]
            for values_E in values_EC.unbind(1):
                order_E = values_E.argsort(stable=True)
                order_E = order_E[index_E[order_E].argsort(stable=True)]
                for of_end, end_Q in zip(entries, ends, strict=True):
                    of_end.append(order_E[end_Q])
        found = [values_EC.gather(0, torch.stack(of_end, dim=1)) for of_end in entries]
        found_QC = self.between(place_Q, found)
        without_Q = (count_R == 0).repeat_interleave(self.q.numel())
        return found_QC.masked_fill(without_Q[:, None], fill_value).view(rows, -1)

    def shares(self, place_Q: Tensor) -> Tensor | float:
        """Return the share of the second of two ends."""
        return place_Q.frac()[:, None] if self.interpolation == "linear" else 0.5

    def between(self, place_Q: Tensor, ends: Sequence[Tensor]) -> Tensor:
        """Return the quantiles, from the values of the ends."""
        below, *above = ends
        if not above:
            return below
        share = self.shares(place_Q)
        return below + (above[0] - below) * share if isinstance(share, Tensor) else share * below + share * above[0]


class QuantilesOfRow:
    """The quantiles of one row's entries of C columns, found in several runs over all of them, and their gradients.
    Among equal entries it is the first with as many before it; 0 equals -0, and NaN comes last."""

    def __init__(self, quantiles: Quantiles, like_EC: Tensor) -> None:
        self._quantiles, self._dtype = quantiles, like_EC.dtype
        self._bits, self._known_bits = 8 * like_EC.itemsize, 0
        self._counts_TCB = like_EC.new_zeros(1, like_EC.shape[1], self._buckets, dtype=torch.int64)
        self._count = self._spread = 0
        self._place_Q = self._prefix_TC = self._rank_TC = self._seen_TC = torch.empty(0)
        self._value_TC = torch.empty(0)

    @property
    def _digit_bits(self) -> int:
        """Bits of the digit that is counted in this run."""
        return min(_DIGIT_BITS, self._bits - self._known_bits)

    @property
    def _buckets(self) -> int:
        return 1 << self._digit_bits

    def add(self, part_EC: Tensor) -> None:
        columns, buckets = part_EC.shape[1], self._buckets
        unknown_bits = self._bits - self._known_bits
        first_C = torch.arange(0, columns * buckets, buckets, device=part_EC.device)
        for some_EC in torch.split(part_EC, max(1, _VALUES_AT_ONCE // columns)):
            key_EC = _ordered_bits(some_EC)
            bucket_EC = ((key_EC >> unknown_bits - self._digit_bits) & buckets - 1).long() + first_C
            for number, counts_CB in enumerate(self._counts_TCB):
                found = bucket_EC
                if self._known_bits:
                    prefix_EC = (key_EC >> unknown_bits) & (1 << self._known_bits) - 1
                    found = bucket_EC[prefix_EC == self._prefix_TC[number]]
                counts_CB += torch.bincount(found.flatten(), minlength=columns * buckets).view_as(counts_CB)
        self._count += len(part_EC) if not self._known_bits else 0

    def end_run(self) -> bool:
        if not self._known_bits:
            _, columns, _ = self._counts_TCB.shape
            self._place_Q = self._quantiles.places(torch.tensor([self._count], device=self._counts_TCB.device))
            end_T = torch.cat(self._quantiles.ends(self._place_Q, self._count))
            self._rank_TC = end_T[:, None].repeat(1, columns)
            self._prefix_TC = torch.zeros_like(self._rank_TC)
        upto_TCB = self._counts_TCB.cumsum(2).expand(len(self._rank_TC), -1, -1)
        digit_TC = (upto_TCB <= self._rank_TC[:, :, None]).sum(2)
        before_TC = upto_TCB.gather(2, (digit_TC - 1).clamp(min=0)[:, :, None])[:, :, 0]
        self._rank_TC = self._rank_TC - before_TC * (digit_TC > 0)
        self._prefix_TC = (self._prefix_TC << self._digit_bits) | digit_TC
        self._known_bits += self._digit_bits
        if self._known_bits < self._bits:
            self._counts_TCB = upto_TCB.new_zeros(*upto_TCB.shape[:2], self._buckets)
            return True
        self._counts_TCB = torch.empty(0)
        self._value_TC = _from_ordered_bits(self._prefix_TC, self._dtype)
        self._seen_TC = torch.zeros_like(self._rank_TC)
        return False

    @property
    def value(self) -> Tensor:
        """The result [Q C]."""
        ends = torch.split(self._value_TC, len(self._place_Q))
        return self._quantiles.between(self._place_Q, ends).flatten()

    def spread(self, gradient: Tensor, part_EC: Tensor) -> Tensor:
        if self._spread == self._count:
            self._spread, self._seen_TC = 0, torch.zeros_like(self._seen_TC)
        self._spread += len(part_EC)
        gradient_QC, ends = gradient.view(len(self._place_Q), -1), len(self._value_TC) // len(self._place_Q)
        shares = self._quantiles.shares(self._place_Q)
        weights = [1.0] if ends == 1 else [1 - shares, shares]
        above_TC = torch.cat([gradient_QC * weight for weight in weights])
        found_EC = torch.zeros_like(part_EC)
        for value_C, rank_C, seen_C, above_C in zip(
            self._value_TC, self._rank_TC, self._seen_TC, above_TC, strict=True
        ):
            same_EC = (part_EC == value_C) | ((part_EC != part_EC) & (value_C != value_C))
            count_C = same_EC.sum(0)
            for column in ((rank_C >= seen_C) & (rank_C < seen_C + count_C)).nonzero().flatten().tolist():
                entry = same_EC[:, column].nonzero()[rank_C[column] - seen_C[column], 0]
                found_EC[entry, column] += above_C[column]
            seen_C += count_C
        return found_EC


Selecting = Highest | Quantiles
"""What is to be selected."""
Selection = HighestOfRow | QuantilesOfRow
"""The selection for one row, whose entries come piece by piece."""


def selected_of_rows(
    values_EC: Tensor, index_E: Tensor, rows: int, selecting: Selecting, fill_value: float = 0.0
) -> Tensor:
    """Return one selected row for each of ``rows``; ``fill_value`` if it has no entries. It is a function of its own
    for torch's modes, which may compute it piece by piece (``kernels.pieces.caught_sums``)."""
    if has_torch_function_unary(values_EC):
        arguments = values_EC, index_E, rows, selecting, fill_value
        return handle_torch_function(selected_of_rows, (values_EC,), *arguments)
    return selecting.of_rows(values_EC, index_E, rows, fill_value)


def _descending_order(values_EC: Tensor) -> Tensor:
    """Return the order in which the last column falls."""
    return values_EC[:, -1].argsort(stable=True, descending=True)


def _ordered_bits(values: Tensor) -> Tensor:
    """Return unsigned integers that are in the order of the values."""
    bits = (values + 0).view(_BITS[values.itemsize])  # of -0, those of 0
    ordered = torch.where(bits < 0, ~bits, bits ^ torch.iinfo(bits.dtype).min)
    return ordered.masked_fill_(values != values, -1)


def _from_ordered_bits(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of such integers."""
    ordered = ordered.to(_BITS[dtype.itemsize])
    return torch.where(ordered < 0, ordered ^ torch.iinfo(ordered.dtype).min, ~ordered).view(dtype)
