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
from ooc.model.lowering.products import IN_FULL, Products, SharedFactor
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

    def __init__(self, index: int, inputs: Sequence["Value"], tail: Sequence[int]) -> None:
        self.index = index
        self.inputs = tuple(inputs)
        self.tail = tuple(tail)
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.space: str = inputs[0].space if inputs else ""
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
        super().__init__(index, (), (columns,))
        self.space = space
        self.entries_per_row = entries_per_row


class Learnt(Value):
    """Rows that are trained themselves, ``columns`` numbers each: an embedding of every node of a type."""

    def __init__(self, index: int, columns: int, space: str = "") -> None:
        super().__init__(index, (), (columns,))
        self.space = space

    @property
    def own_trains(self) -> bool:
        return True


class Dense(Value):
    """Rows that come without their zeros, with them."""

    def compute(self, inputs: Sequence[Any], rows: Rows, *, record: bool) -> Tensor:
        found: Tensor = inputs[0].dense()
        return found


class Ones(Value):
    """A one for every row of ``source``, of which there is no gradient."""

    def __init__(self, index: int, source: Value) -> None:
        super().__init__(index, (source,), (1,))

    @property
    def trains(self) -> bool:
        return False

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
        return (EdgeData.WEIGHT,) if self.scaling.weighted else ()


MOMENTS_BYTES = 8
"""That ``tile_moments`` takes for every number."""


@dataclass(frozen=True, slots=True)
class TileMoments:
    """Of one tile's rows: their number, mean [C] and sum of squared deviations from it [C]; float64."""

    count: int
    mean: Tensor
    deviations: Tensor

    def joined(self, other: "TileMoments") -> "TileMoments":
        """Those of the rows of both, by the formulas of Chan, Golub and LeVeque ("Updating formulae and a pairwise
        algorithm for computing sample variances", 1979), which lose no digits however far the mean is from zero."""
        total = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / total)
        between = delta.square() * (self.count * other.count / total)
        return TileMoments(total, mean, self.deviations + other.deviations + between)


def tile_moments(rows_RC: Tensor) -> TileMoments:
    """The moments of the rows at hand. Takes one copy of them in float64 (``MOMENTS_BYTES``)."""
    rows = rows_RC.double()
    mean = rows.mean(dim=0)
    centred = rows - mean if rows is rows_RC else rows.sub_(mean)
    return TileMoments(rows_RC.shape[0], mean, centred.square_().sum(dim=0))


class Statistics:
    """The moments of one matrix of C columns, as far as its tiles are there, and the gradients of both.

    Sums are held in float64 and added in the order of the tiles, so results do not depend on plans, budgets or threads.

    ``update`` is told the moments when they are complete: mean, biased variance, number of rows. Tiles are added by
    one thread, moments are read by many, after the last tile.
    """

    parts = 2
    """Tensors that ``moments`` gives."""

    def __init__(self, columns: int, update: Callable[[Tensor, Tensor, int], None] | None) -> None:
        self._columns = columns
        self._update = update
        self.begin()

    def begin(self) -> None:
        """Forget all tiles."""
        mean, deviations, self._d_mean, self._d_variance = (
            torch.zeros(self._columns, dtype=torch.float64) for _ in range(4)
        )
        self._found = TileMoments(0, mean, deviations)

    @property
    def nbytes(self) -> int:
        return 4 * 8 * self._columns

    def add(self, tile: TileMoments, *, rows: int) -> None:
        """Take in a tile; ``rows`` is how many there will be in all."""
        self._go_to(tile.mean.device)
        self._found = found = self._found.joined(tile)
        if found.count == rows and self._update is not None:
            self._update(found.mean, found.deviations / rows, rows)

    def sample(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What ``moments`` might give, to try functions with."""
        return _some_numbers(self._columns, dtype), _some_numbers(self._columns, dtype)

    def add_gradients(self, *found: Tensor) -> None:
        """Take in what a tile found for the gradients of both moments."""
        d_mean, d_variance = found
        self._go_to(d_mean.device)
        self._d_mean += d_mean.double()
        self._d_variance += d_variance.double()

    def _go_to(self, place: torch.device) -> None:
        """Be where tiles are computed."""
        if self._d_mean.device != place:
            found = self._found
            self._found = TileMoments(found.count, found.mean.to(place), found.deviations.to(place))
            self._d_mean, self._d_variance = self._d_mean.to(place), self._d_variance.to(place)

    def moments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Mean and biased variance, [C] each."""
        return self._found.mean.to(dtype), (self._found.deviations / self._found.count).to(dtype)

    def gradient(self, rows_RC: Tensor) -> Tensor:
        """What the gradients of both moments add to those of some rows of the matrix itself, [R, C]."""
        dtype = rows_RC.dtype
        slope = (2 * self._d_variance / self._found.count).to(dtype)
        level = (self._d_mean / self._found.count).to(dtype)
        return (rows_RC - self._found.mean.to(dtype)) * slope + level


@dataclass(frozen=True, slots=True)
class TileTotals:
    """What a function of one tile's rows comes to [K]; float64."""

    total: Tensor

    def joined(self, other: "TileTotals") -> "TileTotals":
        return TileTotals(self.total + other.total)


class Totals:
    """The sum over all rows of what ``function`` makes of each, [R, …] → [K] of any rows together; with its gradient,
    as ``Statistics`` have the moments. ``numbers``: K; ``inner_columns``: numbers a row made on the way."""

    parts = 1

    def __init__(self, function: Callable[[Tensor], Tensor], numbers: int, inner_columns: int = 0) -> None:
        self.function = function
        self.numbers = numbers
        self.inner_columns = inner_columns
        self.begin()

    def begin(self) -> None:
        """Forget all tiles."""
        self._total, self._d_total = (torch.zeros(self.numbers, dtype=torch.float64) for _ in range(2))

    @property
    def nbytes(self) -> int:
        return 2 * 8 * self.numbers

    def add(self, tile: TileTotals, *, rows: int) -> None:
        """Take in a tile."""
        self._total = self._total.to(tile.total.device) + tile.total

    def sample(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What ``moments`` might give, to try functions with."""
        return (_some_numbers(self.numbers, dtype),)

    def add_gradients(self, *found: Tensor) -> None:
        """Take in what a tile found for the gradient of the total."""
        (d_total,) = found
        self._d_total = self._d_total.to(d_total.device) + d_total.double()

    def moments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The total, [K]."""
        return (self._total.to(dtype),)

    def gradient(self, rows_RC: Tensor) -> Tensor:
        """What the gradient of the total adds to those of some rows, [R, C]."""
        rows = rows_RC.detach().requires_grad_()
        with torch.enable_grad():
            total = self.function(rows)
        (found,) = gradients_of([total], [rows], [self._d_total.to(total.dtype)])
        return torch.zeros_like(rows_RC) if found is None else found


def _some_numbers(count: int, dtype: torch.dtype) -> Tensor:
    return 0.5 + torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=dtype)


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

    @property
    def inner_columns(self) -> int:
        """Numbers a row of what a total makes on the way, and of its gradient, besides."""
        return self.statistics.inner_columns if isinstance(self.statistics, Totals) else 0

    def needs(self) -> tuple[Value, ...]:
        return self.inputs

    @torch.no_grad()
    def of_tile(self, rows_RC: Tensor) -> TileMoments | TileTotals:
        """What the rows at hand add."""
        if isinstance(self.statistics, Totals):
            return TileTotals(self.statistics.function(rows_RC).double())
        return tile_moments(rows_RC)


class Multiplied(Value):
    """x Wᵀ, W [O, I] being what ``_weight`` gives."""

    heavy = True
    product: Products

    def needs(self) -> tuple[Value, ...]:
        return self.inputs if self.own_trains else ()

    def _weight(self) -> Tensor:
        """W, without a gradient."""
        raise NotImplementedError

    def _of_parameters(self, weight_gradient: Tensor, gradient: Tensor) -> list[tuple[Summed, Tensor]]:
        """What a tile adds to the gradients of parameters, from those of the weight and of the tile's rows."""
        raise NotImplementedError

    def _multiplied(self, source: Tensor, rows: Rows, out: Tensor | None = None) -> Tensor:
        multiply = self.product
        weight_IO = multiply.weight((self, "forward"), lambda: self._weight().T)
        return multiply(multiply.rounded(source, rows.shared_source), weight_IO, source.dtype, out)

    def backward(
        self, gradient: Tensor, operands: list[Tensor | None], rows: Rows, out: Tensor | None = None
    ) -> Gradients:
        """``out``: where the input's gradient may be put."""
        source, multiply, kept_as = operands.pop(), self.product, gradient.dtype
        factor = multiply.rounded(gradient, rows.shared_gradient)
        found = Gradients([None])
        if source is not None and self.own_trains:
            taken = first_rows(multiply.rounded(source, rows.shared_source), gradient.shape[0])
            found.parameters = self._of_parameters(multiply(factor.T, taken, kept_as), gradient)
            del taken
        del source  # whose gradient is as large
        if self.source.trains:
            found.inputs[0] = multiply(factor, multiply.weight((self, "backward"), self._weight), kept_as, out)
        return found


class Linear(Multiplied):
    """x Wᵀ; ``weight`` [O, I]."""

    def __init__(self, index: int, source: Value, weight: nn.Parameter, product: Products = IN_FULL) -> None:
        super().__init__(index, (source,), (weight.shape[0],))
        self.weight = weight
        self.product = product
        self.parameters = (weight,)

    def _weight(self) -> Tensor:
        return self.weight.detach()

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        return self._multiplied(inputs[0], rows)

    def compute_at(self, inputs: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        return self._multiplied(inputs[0], rows, out)

    def _of_parameters(self, weight_gradient: Tensor, gradient: Tensor) -> list[tuple[Summed, Tensor]]:
        return [(self.weight, weight_gradient)]


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

    def __init__(self, index: int, source: Value, site: int) -> None:
        super().__init__(index, (source,), source.tail)
        self.site = site

    @property
    def trains(self) -> bool:
        return False

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        flat = shaped(inputs[0], (self.columns,))
        return noise(rows.seed, rows.epoch, self.site, rows.start, flat).reshape(inputs[0].shape)


class Differentiated(Value):
    """What ``function`` gives, which may use ``parameters``; differentiated by autograd. ``inner_columns``: numbers a
    row of what it makes on the way, where that is wider than what it gives."""

    def __init__(
        self,
        index: int,
        inputs: Sequence[Value],
        tail: Sequence[int],
        function: RowFunction,
        parameters: Sequence[nn.Parameter],
        *,
        heavy: bool = False,
        inner_columns: int = 0,
    ) -> None:
        super().__init__(index, inputs, tail)
        self.inner_columns = inner_columns
        self.function = function
        self.parameters = tuple(parameters)
        self.heavy = heavy

    def _run(self, tensors: Sequence[Tensor], trained: Sequence[bool], rows: Rows, *, record: bool) -> Tensor:
        """The function of ``tensors``; of those that are ``trained``, ``_gradients`` will tell the gradients."""
        if not record:
            return self.function(*tensors)
        leaves = [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, trained, strict=True)]
        with torch.enable_grad():
            output = self.function(*leaves)
        rows.tape[self] = (leaves, output)
        return output.detach()

    def _gradients(self, gradient: Tensor, rows: Rows) -> tuple[list[Tensor | None], list[tuple[Summed, Tensor]]]:
        """Of the tensors, and of parameters, for a gradient of the first rows; None for what has no part in it."""
        leaves, output = rows.tape.pop(self)
        found = gradients_of([output], [*leaves, *self.parameters], [with_zeros(gradient, output.shape[0])])
        of_parameters = zip(self.parameters, found[len(leaves) :], strict=True)
        return found[: len(leaves)], [(p, part) for p, part in of_parameters if part is not None]


class Rowwise(Differentiated):
    """Any function of rows."""

    def needs(self) -> tuple[Value, ...]:
        return self.inputs

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        return self._run(inputs, [value.trains for value in self.inputs], rows, record=record)

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        return Gradients(*self._gradients(gradient, rows))


class Unlearnt(Rowwise):
    """A function of rows that no gradient goes back through; ``whole``: it gives whole numbers, to look up by."""

    def __init__(
        self, index: int, inputs: Sequence[Value], tail: Sequence[int], function: RowFunction, *, whole: bool
    ) -> None:
        super().__init__(index, inputs, tail, function, ())
        self.whole = whole

    @property
    def trains(self) -> bool:
        return False


class Normalized(Differentiated):
    """``function(*rows, mean, variance, …)``, row by row: a matrix like ``values``, or of rows of another ``tail``,
    with the moments of these or of other matrices, or the total in place of both."""

    def __init__(
        self,
        index: int,
        values: Sequence[Value],
        moments: Sequence[Moments],
        function: RowFunction,
        parameters: Sequence[nn.Parameter],
        tail: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        tail = values[0].tail if tail is None else tail
        super().__init__(index, (*values, *moments), tail, function, parameters, **options)
        self._values, self._moments = tuple(values), tuple(moments)

    @property
    def total_numbers(self) -> int:
        """Of the totals among its moments."""
        return sum(one.statistics.numbers for one in self._moments if isinstance(one.statistics, Totals))

    @property
    def gradient_numel(self) -> int:
        return super().gradient_numel + 4 * self.total_numbers  # of a tile, forward or backward, in float64

    def needs(self) -> tuple[Value, ...]:
        return self._values

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        trained, moments = [value.trains for value in self._values], list[Tensor]()
        for one in self._moments:
            parts = one.statistics.moments(inputs[0].dtype)
            moments += parts
            trained += [one.trains] * len(parts)
        return self._run([*inputs, *moments], trained, rows, record=record)

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        leaves = rows.tape[self][0]
        found, parameters = self._gradients(gradient, rows)
        given, moments = len(self._values), []
        of_moments = [
            torch.zeros_like(leaf) if part is None else part
            for leaf, part in zip(leaves[given:], found[given:], strict=True)
        ]
        for one in self._moments:
            parts, of_moments = of_moments[: one.statistics.parts], of_moments[one.statistics.parts :]
            if one.trains:
                moments.append((one, *parts))
        return Gradients([*found[:given], *[None] * len(self._moments)], parameters, moments)
