# SPDX-License-Identifier: Apache-2.0
"""A model as values: matrices of one row a node, and how each comes of others.

Almost every value is *local*: its row i comes of row i of its inputs, so any rows of it can be computed anywhere,
in any order, and computed again in the backward pass. Two kinds are not, and both need all rows of their input
before they have one of their own: an ``Aggregate`` pulls the rows of neighbours, ``Moments`` are taken over all
rows. They cut a network into stages.

The backward pass goes value by value: ``backward`` takes the gradient of a value to those of its inputs. What it
needs for that (``needs``) is known beforehand: a linear map needs its input, for the weight's gradient; a sum needs
nothing; any other function needs its inputs, to run again under autograd. So it is known beforehand, too, what has
to be kept between the two passes.

Shapes: R rows at hand, I/O columns in and out. A gradient may have fewer rows than the tile: beyond them it is zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ooc.errors import ModelError
from ooc.kernels.dropout.rows import dropped, keep_scale, noise
from ooc.kernels.tensors import first_rows, gradients_of, shaped, with_zeros
from ooc.model.graph import AnyScaling, RelationScaling, ends_of
from ooc.model.lowering.products import SharedFactor
from ooc.plan.workload import EdgeData

RowFunction = Callable[..., Tensor]
"""Tensors [R, …] → tensor [R, …], each row for itself."""


@dataclass(slots=True)
class Rows:
    """Rows ``start:stop`` being computed: what keys their dropout, and what the backward pass finds recorded."""

    start: int
    stop: int
    seed: int
    epoch: int
    tape: dict["Value", Any] = field(default_factory=dict)
    shared_source: SharedFactor = field(default_factory=SharedFactor)
    shared_gradient: SharedFactor = field(default_factory=SharedFactor)


class Summed(Protocol):
    """What gradients are added to, tile after tile: a parameter, or what is made of parameters."""

    grad: Tensor | None


@dataclass(slots=True)
class Gradients:
    """Of a value's inputs (None: none, or not wanted), parameters and moments."""

    inputs: list[Tensor | None]
    parameters: list[tuple[Summed, Tensor]] = field(default_factory=list)
    moments: list[tuple[Any, ...]] = field(default_factory=list)
    """``Moments`` with what their gradients get."""


class Value:
    """A matrix of one row a node. ``index`` orders the values of a network, inputs first; ``tail`` is a row's shape;
    ``space`` the type of the nodes, "" where there is but one. ModelError where inputs are of nodes of several types.
    """

    heavy = False
    """Whether computing it again costs a dense product."""
    of_one_space = True
    """Whether its inputs are rows of the same nodes."""
    running: Tensor | None = None
    """The running mean of a norm, of the moments that it is kept by, and of what is computed by it in evaluation."""
    packed = False
    """Whether it holds bits, eight a byte, and no numbers of the compute dtype."""
    entries_per_row: float | None = None
    """Where its rows come without their zeros, as ``SparseRows``: how many numbers they have left, on average. They are
    multiplied so and dropped out of, and made ``Dense`` for anything else."""

    def __init__(self, index: int, inputs: Sequence["Value"], tail: Sequence[int], space: str = "") -> None:
        self.index = index
        self.inputs = tuple(inputs)
        self.tail = tuple(tail)
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.space: str = inputs[0].space if inputs else space
        for other in inputs if self.of_one_space else ():
            if other.space != self.space:
                raise ModelError(f"it computes with rows of {self.space!r} and of {other.space!r} at once")

    @cached_property
    def columns(self) -> int:
        """Numbers in a row."""
        return prod(self.tail)

    @property
    def held_columns(self) -> int:
        """Numbers of a row that are there."""
        return self.columns if self.entries_per_row is None else ceil(self.entries_per_row)

    @property
    def source(self) -> "Value":
        """Its first input: of most kinds the only one."""
        return self.inputs[0]

    @property
    def gradient_numel(self) -> int:
        """Numbers in the gradients that a tile leaves of its parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def own_trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters)

    @cached_property
    def trains(self) -> bool:
        """Whether some parameter has a part in it. Asked for every tile."""
        return self.own_trains or any(value.trains for value in self.inputs)

    @property
    def operands(self) -> tuple["Value", ...]:
        """The values whose rows ``backward`` is given, where they are at hand: its inputs, as a rule."""
        return self.inputs

    def needs(self) -> tuple["Value", ...]:
        """Those of them that ``backward`` needs."""
        return ()

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        """[R, …] from the rows of the inputs; with ``record``, ``backward`` is going to be called for them."""
        raise NotImplementedError

    def compute_at(self, inputs: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        """The same, with nothing recorded, in ``out`` where there is a way: memory that the rows of the first input may
        lie in, which are then of no more use."""
        return self.compute(inputs, rows, record=False)

    def backward(self, gradient: Tensor, operands: list[Tensor | None], rows: Rows) -> Gradients:
        """From the gradient of this value to those of its inputs; ``operands`` has rows of those that it ``needs``, and
        may be emptied as soon as these are done with."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Codes:
    """Stands for whole numbers of every row, [R, …] of this ``tail``, by which something is looked up: the types of
    nodes, for one. ``rows`` has them as they are computed with, one beside the other."""

    rows: Value
    tail: tuple[int, ...]

    def of(self, rows_RC: Tensor) -> Tensor:
        """[R, …], int64."""
        return rows_RC.long().view(len(rows_RC), *self.tail)


@dataclass(frozen=True)
class RowCount:
    """How many rows ``of`` has, which is another number for every tile."""

    of: "Value" = field(compare=False)


class Features(Value):
    """The store's x, in the compute dtype; with ``entries_per_row`` without its zeros."""

    def __init__(self, index: int, columns: int, entries_per_row: float | None = None, space: str = "") -> None:
        super().__init__(index, (), (columns,), space)
        self.entries_per_row = entries_per_row


class Learnt(Value):
    """Rows that are trained themselves, ``columns`` numbers each: an embedding of every node of a type."""

    own_trains = True

    def __init__(self, index: int, columns: int, space: str = "") -> None:
        super().__init__(index, (), (columns,), space)


class Dense(Value):
    """Rows that come without their zeros, with them."""

    def compute(self, inputs: Sequence[Any], rows: Rows, *, record: bool) -> Tensor:
        found: Tensor = inputs[0].dense()
        return found


class Ones(Value):
    """A one for every row of ``source``, of which there is no gradient."""

    trains = False

    def __init__(self, index: int, source: Value) -> None:
        super().__init__(index, (source,), (1,))

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        return inputs[0].new_ones(len(inputs[0]), 1)


class Aggregate(Value):
    """t · A(s · input): each row the scaled sum of its neighbours' scaled rows. Others are kinds of it (per_edge)."""

    def __init__(self, index: int, source: Value, scaling: AnyScaling, *, once: bool) -> None:
        super().__init__(index, (source,), source.tail)
        self.scaling = scaling
        if isinstance(scaling, RelationScaling):
            self.space = ends_of(scaling)[1]
        self.hops: int = 1 + (source.hops if isinstance(source, Aggregate) and once else 0)
        self.once = once
        """Of constant features: the same in every epoch, A^hops(x)."""

    @property
    def takes_gradient(self) -> bool:
        """Whether its gradient is of use to anybody."""
        return self.source.trains

    @property
    def upstream_of(self) -> "Aggregate":
        """The one whose gradient is pulled for that of its source: itself, or the last of several that go on from one
        another."""
        return self

    @property
    def finds_upstream(self) -> bool:
        """Whether its own stage makes what is pulled."""
        return self.takes_gradient and self.upstream_of is self

    @property
    def upstream_columns(self) -> int:
        """Columns of what is pulled of its gradient."""
        return self.columns

    @property
    def edge_data(self) -> tuple[EdgeData, ...]:
        """What it needs of edges beside their ends."""
        return (EdgeData.WEIGHT,) if self.scaling.basic.weighted else ()


MOMENTS_BYTES = 8
"""That the moments of a tile take for every number: one copy in float64."""


@dataclass(frozen=True, slots=True)
class TileMoments:
    """Of one tile's rows: their number, mean [C] and sum of squared deviations from it [C]; float64."""

    count: int
    mean: Tensor
    deviations: Tensor

    def joined(self, other: "TileMoments") -> "TileMoments":
        """Those of the rows of both, where ``other`` is, by the formulas of Chan, Golub and LeVeque ("Updating formulae
        and a pairwise algorithm for computing sample variances", 1979), which lose no digits however far the mean is
        from zero."""
        place, total = other.mean.device, self.count + other.count
        delta = other.mean - self.mean.to(place)
        mean = self.mean.to(place) + delta * (other.count / total)
        between = delta.square() * (self.count * other.count / total)
        return TileMoments(total, mean, self.deviations.to(place) + other.deviations + between)


@dataclass(frozen=True, slots=True)
class TileTotals:
    """What a function of one tile's rows comes to [K]; float64."""

    total: Tensor

    def joined(self, other: "TileTotals") -> "TileTotals":
        return TileTotals(self.total.to(other.total.device) + other.total)


class Statistics:
    """The moments of one matrix of so many columns, ``numbers``, as far as its tiles are there, and the gradients of
    both.

    Sums are held in float64 and added in the order of the tiles, so results do not depend on plans, budgets or threads.

    ``update`` is told the moments when they are complete: mean, biased variance, number of rows. Tiles are added by
    one thread, moments are read by many, after the last tile.
    """

    parts = 2
    """Tensors that ``moments`` gives."""
    inner_columns = 0
    """Numbers a row of what a total makes on the way, and of its gradient, besides."""
    _found: Any

    def __init__(self, numbers: int, update: Callable[[Tensor, Tensor, int], None] | None = None) -> None:
        self.numbers = numbers
        self._update = update
        self.begin()

    def begin(self) -> None:
        """Forget all tiles."""
        self._found = TileMoments(0, *torch.zeros(2, self.numbers, dtype=torch.float64))
        self._gradients = torch.zeros(self.parts, self.numbers, dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        return 2 * 8 * self.parts * self.numbers

    @torch.no_grad()
    def of_tile(self, rows_RC: Tensor) -> TileMoments | TileTotals:
        """What the rows at hand add."""
        rows = rows_RC.double()
        mean = rows.mean(dim=0)
        centred = rows - mean if rows is rows_RC else rows.sub_(mean)
        return TileMoments(rows_RC.shape[0], mean, centred.square_().sum(dim=0))

    def add(self, tile: TileMoments | TileTotals, *, rows: int) -> None:
        """Take in a tile; ``rows`` is how many there will be in all."""
        self._found = found = self._found.joined(tile)
        if self._update is not None and found.count == rows:
            self._update(found.mean, found.deviations / rows, rows)

    def sample(self, dtype: torch.dtype) -> list[Tensor]:
        """What ``moments`` might give, to try functions with."""
        some = 0.5 + torch.rand(self.numbers, generator=torch.Generator().manual_seed(1), dtype=dtype)
        return [some] * self.parts

    def add_gradients(self, *found: Tensor) -> None:
        """Take in what a tile found for the gradients of all ``parts``."""
        self._gradients = self._gradients.to(found[0].device) + torch.stack(found).double()

    def moments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Mean and biased variance, [C] each."""
        return self._found.mean.to(dtype), (self._found.deviations / self._found.count).to(dtype)

    def gradient(self, rows_RC: Tensor) -> Tensor:
        """What the gradients of both moments add to those of some rows of the matrix itself, [R, C]."""
        dtype, (d_mean, d_variance) = rows_RC.dtype, self._gradients.to(rows_RC.device)
        slope = (2 * d_variance / self._found.count).to(dtype)
        level = (d_mean / self._found.count).to(dtype)
        found: Tensor = (rows_RC - self._found.mean.to(dtype)) * slope + level
        return found


class Totals(Statistics):
    """The sum over all rows of what ``function`` makes of each, [R, …] → [K] of any rows together; with its gradient.
    ``numbers``: K; ``inner_columns``: numbers a row made on the way."""

    parts = 1

    def __init__(self, function: Callable[[Tensor], Tensor], numbers: int, inner_columns: int = 0) -> None:
        super().__init__(numbers)
        self.function, self.inner_columns = function, inner_columns

    def begin(self) -> None:
        super().begin()
        self._found = TileTotals(self._gradients[0])

    @torch.no_grad()
    def of_tile(self, rows_RC: Tensor) -> TileTotals:
        return TileTotals(self.function(rows_RC).double())

    def moments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The total, [K]."""
        return (self._found.total.to(dtype),)

    def gradient(self, rows_RC: Tensor) -> Tensor:
        """What the gradient of the total adds to those of some rows, [R, C]."""
        rows = rows_RC.detach().requires_grad_()
        with torch.enable_grad():
            total = self.function(rows)
        (found,) = gradients_of([total], [rows], [self._gradients[0].to(total)])
        return torch.zeros_like(rows_RC) if found is None else found


class Moments(Value):
    """Mean and variance of every column of the input over all rows, or ``totals``; ``statistics`` holds them."""

    of = ""
    """The norm that keeps running statistics by them."""

    def __init__(
        self,
        index: int,
        source: Value,
        update: Callable[[Tensor, Tensor, int], None] | None = None,
        totals: Totals | None = None,
    ) -> None:
        super().__init__(index, (source,), ())
        self.statistics = Statistics(source.columns, update) if totals is None else totals

    def needs(self) -> tuple[Value, ...]:
        return self.inputs


class Sum(Value):
    """Σ c · input + Σ bias; ``biases`` [O] each."""

    def __init__(self, index: int, terms: Sequence[tuple[float, Value]], biases: Sequence[nn.Parameter]) -> None:
        super().__init__(index, [value for _, value in terms], terms[0][1].tail)
        self.factors = tuple(factor for factor, _ in terms)
        self.parameters = tuple(biases)

    @property
    def makes_rows(self) -> bool:
        """Whether what it computes is never one of its inputs itself."""
        return len(self.inputs) + len(self.parameters) > 1 or self.factors[0] != 1

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        return self._added(inputs, None)

    def compute_at(self, inputs: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        return self._added(inputs, out)

    def _added(self, inputs: Sequence[Tensor], out: Tensor | None) -> Tensor:
        addends = [*zip(self.factors, inputs, strict=True), *((1.0, bias.detach()) for bias in self.parameters)]
        (factor, total), *others = addends
        owned = factor != 1
        if owned:
            total = torch.mul(total, factor, out=out)
        for factor, term in others:
            total = total.add_(term, alpha=factor) if owned else torch.add(total, term, alpha=factor, out=out)
            owned = True
        return total

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        pairs = zip(self.factors, self.inputs, strict=True)
        inputs = [(gradient if factor == 1 else gradient * factor) if value.trains else None for factor, value in pairs]
        return Gradients(inputs, [(bias, gradient.sum(dim=0)) for bias in self.parameters if bias.requires_grad])


class Dropout(Value):
    """Entries dropped with probability ``p``, the others scaled up; ``site`` keys the masks."""

    def __init__(self, index: int, source: Value, p: float, site: int) -> None:
        super().__init__(index, (source,), source.tail)
        self.p = p
        self.site = site
        self.entries_per_row = source.entries_per_row

    def compute(self, inputs: Sequence[Any], rows: Rows, *, record: bool) -> Any:
        if self.entries_per_row is not None:  # of features, which have no gradient
            return inputs[0].dropped(rows.seed, rows.epoch, self.site, rows.start, self.p)
        scale = self._scale(inputs[0], rows)
        if record:
            rows.tape[self] = scale
        return dropped(inputs[0], scale, self.p)

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        scale = rows.tape.pop(self, None)
        if scale is None:
            scale = self._scale(gradient, rows)
        return Gradients([dropped(gradient, first_rows(scale, gradient.shape[0]), self.p)])

    def _scale(self, like: Tensor, rows: Rows) -> Tensor:
        flat = shaped(like, (self.columns,))
        return keep_scale(rows.seed, rows.epoch, self.site, rows.start, flat, self.p).reshape(like.shape)


class Noise(Value):
    """Normal numbers, as many as ``source`` has; ``site`` keys them as it does masks."""

    trains = False

    def __init__(self, index: int, source: Value, site: int) -> None:
        super().__init__(index, (source,), source.tail)
        self.site = site

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        flat = shaped(inputs[0], (self.columns,))
        return noise(rows.seed, rows.epoch, self.site, rows.start, flat).reshape(inputs[0].shape)


class Rowwise(Value):
    """What ``function(*rows, mean, variance, …)`` gives, row by row, with the moments of these rows or of other
    matrices, if it needs any, or the total in place of both; it may use ``parameters``, and is differentiated by
    autograd. ``inner_columns``: numbers a row of what it makes on the way, where that is wider than what it gives."""

    def __init__(
        self,
        index: int,
        inputs: Sequence[Value],
        tail: Sequence[int],
        function: RowFunction,
        parameters: Sequence[nn.Parameter] = (),
        *,
        moments: Sequence[Moments] = (),
        heavy: bool = False,
        inner_columns: int = 0,
    ) -> None:
        super().__init__(index, (*inputs, *moments), tail)
        self.moments = tuple(moments)
        self.inner_columns = inner_columns
        self.function = function
        self.parameters = tuple(parameters)
        self.heavy = heavy

    @property
    def total_numbers(self) -> int:
        """Of the totals among its moments."""
        return sum(one.statistics.numbers for one in self.moments if isinstance(one.statistics, Totals))

    @property
    def gradient_numel(self) -> int:
        return super().gradient_numel + 4 * self.total_numbers  # of a tile, forward or backward, in float64

    def needs(self) -> tuple[Value, ...]:
        return self.inputs[: len(self.inputs) - len(self.moments)]

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        trained, tensors = [value.trains for value in self.needs()], [*inputs]
        for one in self.moments:
            tensors += one.statistics.moments(inputs[0].dtype)
            trained += [one.trains] * one.statistics.parts
        if not record:
            return self.function(*tensors)
        leaves = [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, trained, strict=True)]
        with torch.enable_grad():
            output = self.function(*leaves)
        rows.tape[self] = (leaves, output)
        return output.detach()

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        """For a gradient of the first rows."""
        leaves, output = rows.tape.pop(self)
        found = gradients_of([output], [*leaves, *self.parameters], [with_zeros(gradient, output.shape[0])])
        of_parameters = zip(self.parameters, found[len(leaves) :], strict=True)
        gradients = Gradients([*found[: len(self.needs())], *[None] * len(self.moments)])
        gradients.parameters += [(parameter, part) for parameter, part in of_parameters if part is not None]
        at = len(self.needs())
        for one in self.moments:
            parts = zip(leaves[at:], found[at : at + one.statistics.parts], strict=False)
            of_one = [torch.zeros_like(leaf) if part is None else part for leaf, part in parts]
            at += len(of_one)
            gradients.moments += [(one, *of_one)] if one.trains else []
        return gradients


class Unlearnt(Rowwise):
    """A function of rows that no gradient goes back through; ``whole``: it gives whole numbers, to look up by."""

    trains = False
    whole = False
