# SPDX-License-Identifier: Apache-2.0
"""Sums and extremes over the edges of one row that come piece by piece, caught as a layer of unknown insides asks torch
for them.

A layer adds up by ``scatter_add``, ``index_add`` or ``scatter_reduce``, directly or by PyG's aggregations, softmaxes
and degrees. Run on a piece of a row's edges, each of these calls gets a part of what belongs to the row: it is added to
a running total, and once that is complete, a later run is given it. A call that depends on another one's total has a
higher ``level``: a softmax takes one run over all pieces for the largest score, one for the sum, one for what it
weighs. A piece's graph is the row, node 0, with in-neighbours that have no edges of their own
(``kernels.neighbourhood``). Quantiles take several runs of their level, in which entries are counted.

Backward, each call is differentiated by itself: what flows back to its total is known without the other edges.

Shapes: E edges of a piece, S nodes of its graph, X whatever a call's rows are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ooc.errors import ModelError
from ooc.kernels.dropout.opaque import LOOPS, DroppedRows, ends_of
from ooc.kernels.fixed_order import rows_scattered
from ooc.kernels.neighbourhood import Neighbourhood
from ooc.kernels.pieces.quantiles import Quantiles, Selection, quantiles_of_rows


class Kind(Enum):
    """What becomes of a row's entries, by torch's name."""

    SUM = "sum"
    HIGHEST = "amax"
    LOWEST = "amin"
    PRODUCT = "prod"
    QUANTILES = "quantiles"


_SUMS = (torch.Tensor.scatter_add, torch.scatter_add, torch.Tensor.index_add, torch.index_add)
_SUMS_IN_PLACE = (torch.Tensor.scatter_add_, torch.Tensor.index_add_)
_REDUCES = (torch.Tensor.scatter_reduce, torch.scatter_reduce)


@dataclass(frozen=True, slots=True)
class CaughtSum:
    """One call: what it makes of what a tensor has a row for, the run in which its total is found, from 1, and what its
    running total takes beside numbers of a row."""

    kind: Kind
    rows: DroppedRows
    level: int
    held_bytes: int


class Total:
    """What one call makes of those of a row's entries that there have been: ``value``, and ``beside`` it how many of
    them are the extreme or, of a product, which is that of the others, zero. ``gradient``: what flows back to it, and
    ``leaf`` what is differentiated by."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.value: Tensor | None = None
        self.beside: Tensor | None = None
        self.gradient: Tensor | None = None
        self.leaf: Tensor | None = None
        self.quantiles: Quantiles | None = None
        self._shares: Tensor | None = None
        self._selection: Selection | None = None

    def add(self, part_EX: Tensor) -> None:
        """Some more entries."""
        if not len(part_EX):
            return
        match self.kind:
            case Kind.SUM:
                part = part_EX.sum(0)
                self.value = part if self.value is None else self.value + part
            case Kind.HIGHEST | Kind.LOWEST:
                is_highest = self.kind is Kind.HIGHEST
                best = part_EX.amax(0) if is_highest else part_EX.amin(0)
                if self.value is not None and self.beside is not None:
                    best = torch.maximum(best, self.value) if is_highest else torch.minimum(best, self.value)
                    self.beside = self.beside * (self.value == best)
                ties = (part_EX == best).sum(0)
                self.value, self.beside = best, ties if self.beside is None else self.beside + ties
            case Kind.PRODUCT:
                is_zero_EX = part_EX == 0
                part, zeros = part_EX.masked_fill(is_zero_EX, 1).prod(0), is_zero_EX.sum(0)
                self.value = part if self.value is None else self.value * part
                self.beside = zeros if self.beside is None else self.beside + zeros
            case Kind.QUANTILES:
                assert self.quantiles is not None
                if self._selection is None:
                    self._selection = Selection(self.quantiles, part_EX)
                self._selection.add(part_EX)

    def end_run(self) -> bool:
        """To be called when all entries have been added; whether they are to be added once more."""
        if self._selection is None or self.value is not None:
            return False
        if self._selection.end_run():
            return True
        self.value = self._selection.value
        return False

    def begin_backward(self) -> None:
        """Nothing more is added: from here on what uses it is differentiated."""
        self.gradient = self._shares = None
        if self.value is not None and self.value.is_floating_point():
            self.leaf = self._whole(self.value).detach().requires_grad_()

    def onto(self, into_1X: Tensor) -> Tensor:
        """The row that was ``into`` with all entries."""
        if self.value is None:
            return into_1X
        value = self._whole(self.value) if self.leaf is None else self.leaf
        match self.kind:
            case Kind.SUM:
                return into_1X + value
            case Kind.HIGHEST | Kind.LOWEST:
                if self.leaf is not None and self.beside is not None:
                    self._shares = self.beside + (into_1X.detach()[0] == value.detach())  # as torch counts ties
                return value[None]
            case Kind.QUANTILES:
                return value[None]
            case Kind.PRODUCT:
                return into_1X.clone() * value  # into is written to, which autograd must not find changed

    def spread(self, part_EX: Tensor) -> Tensor:
        """From its gradient to that of some of the entries."""
        assert self.gradient is not None and self.value is not None
        match self.kind:
            case Kind.SUM:
                return self.gradient.expand_as(part_EX)
            case Kind.HIGHEST | Kind.LOWEST:
                assert self._shares is not None
                return (part_EX == self.value) * (self.gradient / self._shares)
            case Kind.PRODUCT:
                assert self.beside is not None
                others = torch.where(part_EX == 0, self.beside == 1, self.beside == 0)
                return others * (self.gradient * self.value) / part_EX.masked_fill(part_EX == 0, 1)
            case Kind.QUANTILES:
                assert self._selection is not None
                return self._selection.spread(self.gradient, part_EX)

    def _whole(self, value: Tensor) -> Tensor:
        if self.kind is not Kind.PRODUCT or self.beside is None:
            return value
        return value.masked_fill(self.beside > 0, 0)


class AllCaught(Exception):
    """Everything that a run was for is known: nobody needs the rest of it."""


class _Catching(TorchFunctionMode):
    """In here, what adds rows up by an index is ``_reduced``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is quantiles_of_rows:
            values_EC, index_E, count, quantiles, fill_value = args
            filled = values_EC.new_full((count, quantiles.q.numel() * values_EC.shape[1]), fill_value)
            result = self._reduced(Kind.QUANTILES, filled, index_E, values_EC, quantiles)
            return func(*args) if result is None else result
        is_sum, is_reduce = func in _SUMS or func in _SUMS_IN_PLACE, func in _REDUCES or func is _REDUCE_IN_PLACE
        if not (is_sum or is_reduce):
            return func(*args, **kwargs)
        given: tuple[Any, ...] = tuple(kwargs.get(n) if k >= len(args) else args[k] for k, n in enumerate(_GIVEN))
        into, dim, index, rows = given
        kind = "sum" if is_sum else kwargs.get("reduce", args[4] if len(args) > 4 else None)
        if kind not in _NAMES or (kind in ("amax", "amin") and kwargs.get("include_self", True)):
            return func(*args, **kwargs)
        if "alpha" in kwargs or not isinstance(rows, Tensor) or not isinstance(index, Tensor):
            return func(*args, **kwargs)
        numbers_E, dim = index, dim % into.dim()
        if index.dim() > 1 and rows.numel():
            found = rows_scattered(into, dim, index, rows)
            if found is None:
                return func(*args, **kwargs)
            numbers_E = found[2]
        result = self._reduced(Kind(kind), into.movedim(dim, 0), numbers_E, rows.movedim(dim, 0))
        if result is None:
            return func(*args, **kwargs)
        result = result.movedim(0, dim)
        return into.copy_(result) if func in _SUMS_IN_PLACE or func is _REDUCE_IN_PLACE else result

    def _reduced(
        self, kind: Kind, into: Tensor, numbers_E: Tensor, rows: Tensor, quantiles: Quantiles | None = None
    ) -> Tensor | None:
        """What is to be given instead; None: what the call gives by itself."""
        raise NotImplementedError


_NAMES = {kind.value for kind in Kind if kind is not Kind.QUANTILES}
_REDUCE_IN_PLACE = torch.Tensor.scatter_reduce_
_GIVEN = ("input", "dim", "index", "src")


class Finding(_Catching):
    """Notes the calls: ``found`` what they are, and of what a row for each (None: of nothing that is known, or not
    added to the edges' targets); ``given`` the numbers that they get, ``held_bytes`` as of a ``CaughtSum``. ``near``: a
    graph on which all ``DroppedRows`` are of different numbers. ``changed``: of which call the result is to be another
    one."""

    def __init__(self, near: Neighbourhood, changed: int | None = None) -> None:
        super().__init__()
        self.found: list[tuple[Kind, DroppedRows | None]] = []
        self.given: list[Tensor] = []
        self.held_bytes: list[int] = []
        self._changed = changed
        self._targets = {rows: ends_of(rows, near)[0] for rows in DroppedRows if rows is not DroppedRows.NODES}

    def _reduced(
        self, kind: Kind, into: Tensor, numbers_E: Tensor, rows: Tensor, quantiles: Quantiles | None = None
    ) -> Tensor | None:
        of = (one for one, targets in self._targets.items() if torch.equal(targets, numbers_E))
        self.found.append((kind, next(of, None)))
        columns = rows[0].numel() if len(rows) else 0
        self.held_bytes.append(0 if quantiles is None else quantiles.counting_nbytes(columns))
        self.given.append(torch.cat((rows.detach().flatten(), into.detach().flatten())))
        if self._changed != len(self.found) - 1:
            return None
        if quantiles is not None:
            return quantiles_of_rows(rows, numbers_E, len(into), quantiles, 0.0) * 1.5 + 0.25
        return _put(into.clone(), numbers_E, rows, kind) * 1.5 + 0.25


def _put(into: Tensor, numbers_E: Tensor, rows: Tensor, kind: Kind) -> Tensor:
    index = numbers_E.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
    return into.scatter_reduce(0, index, rows, kind.value, include_self=kind in (Kind.SUM, Kind.PRODUCT))


class Catching(_Catching):
    """While a layer runs on a piece, ``near``: calls of a level below ``level`` give their totals, all hand their
    entries to ``take``, and that of number ``last`` ends it by AllCaught. ``is_first``: of the row's pieces, the one
    whose added self-loop counts."""

    def __init__(
        self,
        where: str,
        near: Neighbourhood,
        calls: Sequence[CaughtSum],
        totals: Sequence[Total],
        take: Callable[[int, Tensor], None],
        *,
        level: int,
        last: int,
        is_first: bool,
    ) -> None:
        super().__init__()
        self._where, self._calls, self._totals, self._take = where, calls, totals, take
        self._nodes, self._level, self._last, self._is_first = 1 + len(near.others_S), level, last, is_first
        self._done = 0

    def _reduced(
        self, kind: Kind, into: Tensor, numbers_E: Tensor, rows: Tensor, quantiles: Quantiles | None = None
    ) -> Tensor | None:
        number = self._done
        self._done += 1
        if number >= len(self._calls) or self._calls[number].kind is not kind:
            raise self._refusal()
        call, edges = self._calls[number], len(rows)
        rest, self._totals[number].quantiles = into[1:], quantiles
        if call.rows in LOOPS:  # node by node behind the edges, the row's own first
            edges -= self._nodes
            loops = rows[edges + 1 :][: len(rest)]
            if quantiles is not None:
                loops = loops.repeat(1, quantiles.q.numel())
            rest = rest + loops if kind is Kind.SUM else rest.clone() * loops if kind is Kind.PRODUCT else loops
            edges += self._is_first
        self._take(number, rows[:edges])
        if number == self._last:
            raise AllCaught
        own = self._totals[number].onto(into[:1]) if call.level < self._level else into[:1]
        return torch.cat((own, rest))

    def check(self) -> None:
        """ModelError unless all calls have been made."""
        if self._done < len(self._calls):
            raise self._refusal()

    def _refusal(self) -> ModelError:
        return ModelError(f"{self._where}: how often it adds something up depends on the rows that it is run on")
