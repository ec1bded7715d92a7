# SPDX-License-Identifier: Apache-2.0
"""Sums and extremes over the edges of one row that come in pieces, caught when an opaque layer calls torch for them.

A layer reduces by torch's operators that work by an index, or by a sparse product over edges
(``kernels.pieces.reductions``), itself or in PyG's aggregations, softmaxes and degrees. When it runs on a piece of a
row's edges, each of these calls gets a part of what belongs to the row. The part is added to a running total; once that
is complete, a later run is given the total. A call that depends on another one's total has a higher ``level``: a
softmax takes one run over all pieces for the largest score, one for the sum, one for what it weights. A piece's graph
is the row, node 0, with in-neighbours that have no edges of their own (``kernels.neighbourhood``). Selecting entries by
their order (``kernels.pieces.selections``) is such a call, too; quantiles, which count their entries, take several runs
of their level.

Backward, each call is differentiated by itself: the gradient of its total is known without the other edges.

Shapes: E edges of a piece, S nodes of its graph, X whatever a call's rows are.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ooc.errors import ModelError
from ooc.kernels.dropout.opaque import LOOPS, OF_NODES, DroppedRows, ends_of
from ooc.kernels.neighbourhood import Neighbourhood
from ooc.kernels.pieces.reductions import PRODUCTS, Reduction, reduction_of
from ooc.kernels.pieces.selections import Selecting, Selection, selected_of_rows


class Kind(Enum):
    """How a row's entries are reduced, by torch's name."""

    SUM = "sum"
    HIGHEST = "amax"
    LOWEST = "amin"
    PRODUCT = "prod"
    SELECTION = "selection"


_EXTREMES = (Kind.HIGHEST, Kind.LOWEST)


@dataclass(frozen=True, slots=True)
class CaughtSum:
    """One call that reduces: its kind, what its tensor has rows for, the run in which its total is found, from 1, and
    the bytes its running total takes beside a row's numbers."""

    kind: Kind
    rows: DroppedRows
    level: int
    held_bytes: int


class Total:
    """The running total of one call: ``value``, and, in ``counts``, the number of entries that are the extreme, or, for
    a product (of the other entries), of zeros. ``gradient``: the gradient of the total; ``leaf``: the tensor it is
    differentiated by."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.value: Tensor | None = None
        self.counts: Tensor | None = None
        self.gradient: Tensor | None = None
        self.leaf: Tensor | None = None
        self.selecting: Selecting | None = None
        self._shares: Tensor | None = None
        self._selection: Selection | None = None

    def add(self, part_EX: Tensor) -> None:
        """Add some more entries."""
        if not len(part_EX):
            return
        match self.kind:
            case Kind.SUM:
                part = part_EX.sum(0)
                self.value = part if self.value is None else self.value + part
            case Kind.HIGHEST | Kind.LOWEST:
                is_highest = self.kind is Kind.HIGHEST
                best = part_EX.amax(0) if is_highest else part_EX.amin(0)
                if self.value is not None and self.counts is not None:
                    best = torch.maximum(best, self.value) if is_highest else torch.minimum(best, self.value)
                    self.counts = self.counts * (self.value == best)
                ties = (part_EX == best).sum(0)
                self.value, self.counts = best, ties if self.counts is None else self.counts + ties
            case Kind.PRODUCT:
                is_zero_EX = part_EX == 0
                part, zeros = part_EX.masked_fill(is_zero_EX, 1).prod(0), is_zero_EX.sum(0)
                self.value = part if self.value is None else self.value * part
                self.counts = zeros if self.counts is None else self.counts + zeros
            case Kind.SELECTION:
                assert self.selecting is not None
                if self._selection is None:
                    self._selection = self.selecting.begin(part_EX)
                self._selection.add(part_EX)

    def end_run(self) -> bool:
        """End a run over all entries; return whether they must be added once more."""
        if self._selection is None or self.value is not None:
            return False
        if self._selection.end_run():
            return True
        self.value = self._selection.value
        return False

    def begin_backward(self) -> None:
        """Begin the backward pass: nothing more is added, and uses of the total are differentiated from here on."""
        self.gradient = self._shares = None
        if self.value is not None and self.value.is_floating_point():
            self.leaf = self._without_zero_products(self.value).detach().requires_grad_()

    def reduced_into(self, into_1X: Tensor, *, includes: bool = False) -> Tensor:
        """Return the row, ``into`` before, with all entries. ``includes``: an extreme counts the value that was there,
        too."""
        if self.value is None:
            return into_1X
        value = self._without_zero_products(self.value) if self.leaf is None else self.leaf
        match self.kind:
            case Kind.SUM:
                return into_1X + value
            case Kind.HIGHEST | Kind.LOWEST:
                if self.leaf is not None and self.counts is not None:
                    self._shares = self.counts + (into_1X.detach()[0] == value.detach())  # as torch counts ties
                return self._merge_own_value(value[None], into_1X) if includes else value[None]
            case Kind.SELECTION:
                return value[None]
            case Kind.PRODUCT:
                return into_1X.clone() * value  # ``into`` is modified, which autograd must not notice

    def _merge_own_value(self, value_1X: Tensor, into_1X: Tensor) -> Tensor:
        """Return the more extreme of the two. If they are equal, ``into`` gets a share of the gradient as in torch."""
        is_beyond_1X = into_1X > value_1X if self.kind is Kind.HIGHEST else into_1X < value_1X
        found_1X = torch.where(is_beyond_1X, into_1X, value_1X)
        if self._shares is not None and into_1X.requires_grad:
            found_1X = found_1X + (into_1X - into_1X.detach()) * ((into_1X == value_1X) / self._shares)
        return found_1X

    def spread(self, part_EX: Tensor) -> Tensor:
        """Return the gradient of some of the entries, from that of the total."""
        assert self.gradient is not None and self.value is not None
        match self.kind:
            case Kind.SUM:
                return self.gradient.expand_as(part_EX)
            case Kind.HIGHEST | Kind.LOWEST:
                assert self._shares is not None
                return (part_EX == self.value) * (self.gradient / self._shares)
            case Kind.PRODUCT:
                assert self.counts is not None
                others = torch.where(part_EX == 0, self.counts == 1, self.counts == 0)
                return others * (self.gradient * self.value) / part_EX.masked_fill(part_EX == 0, 1)
            case Kind.SELECTION:
                assert self._selection is not None
                return self._selection.spread(self.gradient, part_EX)

    def _without_zero_products(self, value: Tensor) -> Tensor:
        if self.kind is not Kind.PRODUCT or self.counts is None:
            return value
        return value.masked_fill(self.counts > 0, 0)


@dataclass(frozen=True, slots=True)
class _Entries:
    """What one call is given: ``rows``, each reduced into the row of ``into`` of its number. ``includes``: an extreme
    counts the value that was there, too; ``selecting``: what is to be selected."""

    kind: Kind
    into: Tensor
    numbers_E: Tensor
    rows: Tensor
    includes: bool = False
    selecting: Selecting | None = None


class AllSumsFound(Exception):
    """Raised to end a run when everything it was for is known."""


class _Catching(TorchFunctionMode):
    """A mode in which calls that reduce rows by an index are replaced by ``_replace_reduction``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is selected_of_rows:
            values_EC, index_E, count, selecting, fill_value = args
            filled = values_EC.new_full((count, selecting.width(values_EC.shape[1])), fill_value)
            result = self._replace_reduction(_Entries(Kind.SELECTION, filled, index_E, values_EC, selecting=selecting))
            return func(*args) if result is None else result
        if func in PRODUCTS:
            result = self._product(*args) if len(args) == 2 else None
            return func(*args, **kwargs) if result is None else result
        asked = reduction_of(func, args, kwargs)
        if asked is None or asked.name not in _NAMES:
            return func(*args, **kwargs)
        into, rows = asked.into.movedim(asked.dim, 0), asked.rows.movedim(asked.dim, 0)
        if asked.name == "mean":
            result = self._mean(asked, into, rows)
        else:
            result = self._replace_reduction(_Entries(Kind(asked.name), into, asked.numbers_E, rows, asked.includes))
        if result is None:
            return func(*args, **kwargs)
        result = result.movedim(0, asked.dim)
        return asked.into.copy_(result) if asked.in_place else result

    def _mean(self, asked: Reduction, into: Tensor, rows: Tensor) -> Tensor:
        """Return a mean, from a sum and a count."""
        ones = rows.new_ones(len(rows), *[1] * (rows.dim() - 1))
        there = ones.new_full((len(into), *ones.shape[1:]), float(asked.includes))
        total = self._sum(into if asked.includes else torch.zeros_like(into), asked.numbers_E, rows)
        count = self._sum(there, asked.numbers_E, ones)
        return torch.where(count > 0, total / count.clamp(min=1), into)

    def _sum(self, into: Tensor, numbers_E: Tensor, rows: Tensor) -> Tensor:
        found = self._replace_reduction(_Entries(Kind.SUM, into, numbers_E, rows))
        return into.index_add(0, numbers_E, rows) if found is None else found

    def _product(self, left: Tensor, right_SC: Tensor) -> Tensor | None:
        """Return the product with a sparse matrix that has a weight for every edge, in the row of its target."""
        if not isinstance(left, Tensor) or left.layout is not torch.sparse_coo or right_SC.dim() != 2:
            return None
        targets_E, sources_E = left._indices()
        into = right_SC.new_zeros(len(left), right_SC.shape[1])
        return self._replace_reduction(
            _Entries(Kind.SUM, into, targets_E, left._values()[:, None] * right_SC[sources_E])
        )

    def _replace_reduction(self, given: _Entries) -> Tensor | None:
        """Return the result to be given instead of the call's, or None for the call's own."""
        raise NotImplementedError


_NEED_ALL_NAMES = (
    "sort msort argsort topk kthvalue median nanmedian mode quantile nanquantile "
    "cumsum cumprod cummax cummin logcumsumexp diff"
)
_NEED_ALL_ENTRIES = {
    getattr(where, name): f"torch.{name}" for name in _NEED_ALL_NAMES.split() for where in (torch, torch.Tensor)
}
"""Functions that need all of their entries at once."""
_NAMES = {"mean", *(kind.value for kind in Kind if kind is not Kind.SELECTION)}


class Finding(_Catching):
    """A mode that records the calls. ``found``: their kinds and what their rows stand for (None: nothing known, or rows
    not added to the edges' targets); ``given``: the numbers they get; ``held_bytes``: as in ``CaughtSum``. ``near``: a
    graph with a different number of each of ``DroppedRows``. ``changed``: the call whose result is to be changed, to
    half as much again plus ``by``. ``together``: other functions that need all their entries at once, for at least as
    many rows as there are edges."""

    def __init__(self, near: Neighbourhood, changed: int | None = None, by: float = 0.0) -> None:
        super().__init__()
        self.found: list[tuple[Kind, DroppedRows | None]] = []
        self.given: list[Tensor] = []
        self.held_bytes: list[int] = []
        self.together: list[str] = []
        self._changed, self._by = changed, by
        self._edges = near.edge_index_2E.shape[1]
        self._targets = {rows: ends_of(rows, near)[0] for rows in DroppedRows if rows not in OF_NODES}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NEED_ALL_ENTRIES and any(
            len(one) >= self._edges for one in args if isinstance(one, Tensor) and one.dim()
        ):
            self.together.append(_NEED_ALL_ENTRIES[func])
        return super().__torch_function__(func, types, args, kwargs)

    def _replace_reduction(self, given: _Entries) -> Tensor | None:
        into, numbers_E, rows, selecting = given.into, given.numbers_E, given.rows, given.selecting
        of = (one for one, targets in self._targets.items() if torch.equal(targets, numbers_E))
        self.found.append((given.kind, next(of, None)))
        columns = rows[0].numel() if len(rows) else 0
        self.held_bytes.append(0 if selecting is None else selecting.selecting_nbytes(columns))
        self.given.append(torch.cat((rows.detach().flatten(), into.detach().flatten())))
        if self._changed != len(self.found) - 1:
            return None
        if selecting is not None:
            return selected_of_rows(rows, numbers_E, len(into), selecting) * 1.5 + self._by
        index = numbers_E.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        includes = given.includes or given.kind not in _EXTREMES
        return into.scatter_reduce(0, index, rows, given.kind.value, include_self=includes) * 1.5 + self._by


@dataclass(eq=False)
class Catching(_Catching):
    """A mode while a layer runs on a piece, ``near``. Calls of a level below ``level`` return their totals; all pass
    their entries to ``take``, and call number ``last`` ends the run with AllSumsFound. ``is_first``: this is the row's
    piece in which an added self-loop counts. ``where`` is the layer."""

    where: str
    near: Neighbourhood
    calls: Sequence[CaughtSum]
    totals: Sequence[Total]
    take: Callable[[int, Tensor], None]
    _: KW_ONLY
    level: int
    last: int
    is_first: bool
    done: int = field(default=0, init=False)

    def _replace_reduction(self, given: _Entries) -> Tensor | None:
        number, into, rows = self.done, given.into, given.rows
        self.done += 1
        if number >= len(self.calls) or self.calls[number].kind is not given.kind:
            raise self._refusal()
        call, edges = self.calls[number], len(rows)
        rest, self.totals[number].selecting = into[1:], given.selecting
        if call.rows in LOOPS:  # after the edges node by node, the row's own first
            edges -= 1 + len(self.near.others_S)
            loops = rows[edges + 1 :][: len(rest)]
            match given.kind:
                case Kind.SUM:
                    rest = rest + loops
                case Kind.PRODUCT:
                    rest = rest.clone() * loops
                case Kind.HIGHEST | Kind.LOWEST:
                    rest = loops
                case Kind.SELECTION:  # gradients for other rows are of no use here
                    pass
            edges += self.is_first
        self.take(number, rows[:edges])
        if number == self.last:
            raise AllSumsFound
        own = (
            self.totals[number].reduced_into(into[:1], includes=given.includes) if call.level < self.level else into[:1]
        )
        return torch.cat((own, rest))

    def check(self) -> None:
        """Raise ModelError unless all calls have been made."""
        if self.done < len(self.calls):
            raise self._refusal()

    def _refusal(self) -> ModelError:
        return ModelError(f"{self.where}: how often it adds something up depends on the rows that it is run on")
