# SPDX-License-Identifier: Apache-2.0
"""A model as values: matrices with one row a node, and how each is computed from others.

Almost every value is *local*: its row i comes from row i of its inputs, so any of its rows can be computed anywhere, in
any order, and again in the backward pass. Two kinds are not local and need all rows of their input first: an
``Aggregate`` pulls the rows of neighbours, and ``Moments`` are taken over all rows. They cut a network into stages.

The backward pass goes value by value: ``backward`` turns the gradient of a value into those of its inputs. What it
needs for that (``needs``) is known beforehand: a linear map needs its input, for the weight's gradient; a sum needs
nothing; any other function needs its inputs, to run again under autograd. So it is also known what must be kept between
the two passes.

Shapes: R rows at hand, I/O columns in and out. A gradient has all rows of the tile.
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
from ooc.kernels.tensors import gradients_of, shaped
from ooc.model.graph import AnyScaling, RelationScaling, ends_of
from ooc.model.lowering.products import SharedFactor
from ooc.plan.workload import EdgeData

RowFunction = Callable[..., Tensor]
"""A function of tensors [R, …] to a tensor [R, …], in which rows are independent."""


@dataclass(slots=True)
class Rows:
    """Rows ``start:stop`` being computed, with the keys of their dropout and what was recorded for the backward
    pass."""

    start: int
    stop: int
    seed: int
    epoch: int
    tape: dict["Value", Any] = field(default_factory=dict)
    shared_source: SharedFactor = field(default_factory=SharedFactor)
    shared_gradient: SharedFactor = field(default_factory=SharedFactor)


class Summed(Protocol):
    """What gradients are added to, tile after tile: a parameter, or a tensor made of parameters."""

    grad: Tensor | None


@dataclass(slots=True)
class Gradients:
    """The gradients of a value's inputs (None: none, or not needed), parameters and moments."""

    inputs: list[Tensor | None]
    parameters: list[tuple[Summed, Tensor]] = field(default_factory=list)
    moments: list[tuple[Any, ...]] = field(default_factory=list)
    """``Moments`` with their gradients."""


class Value:
    """A matrix with one row a node. ``index`` orders the values of a network, inputs first; ``tail`` is the shape of a
    row; ``space`` is the node type, "" if there is only one. Raises ModelError if its inputs are of different node
    types."""

    heavy = False
    """Whether computing it again costs a dense product."""
    of_one_space = True
    """Whether its inputs are rows of the same nodes."""
    running: Tensor | None = None
    """A norm's running mean, for the moments behind it, and for what is computed with it in evaluation."""
    packed = False
    """Whether it holds bits, eight a byte, instead of numbers of the compute dtype."""
    entries_per_row: float | None = None
    """For sparse rows (``SparseRows``), the average number of non-zeros in a row. They are multiplied and dropped out
    of in sparse form, and made ``Dense`` for anything else."""

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
        """The numbers in a row."""
        return prod(self.tail)

    @property
    def held_columns(self) -> int:
        """The numbers in a row that are stored."""
        return self.columns if self.entries_per_row is None else ceil(self.entries_per_row)

    @property
    def source(self) -> "Value":
        """The first input, which is the only one for most kinds."""
        return self.inputs[0]

    @property
    def gradient_numel(self) -> int:
        """The numbers in the gradients that a tile computes of its parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def own_trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters)

    @cached_property
    def trains(self) -> bool:
        """Whether it depends on a trained parameter. It is cached, as every tile asks."""
        return self.own_trains or any(value.trains for value in self.inputs)

    @property
    def operands(self) -> tuple["Value", ...]:
        """The values whose rows ``backward`` is given if they are at hand: usually the inputs."""
        return self.inputs

    def needs(self) -> tuple["Value", ...]:
        """Return those of ``operands`` that ``backward`` needs."""
        return ()

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        """Return [R, …] from the rows of the inputs. ``record``: ``backward`` will be called for them."""
        raise NotImplementedError

    def compute_at(self, inputs: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        """Return the same without recording, in ``out`` if possible. That memory may hold the rows of the first input,
        which are not needed any more."""
        return self.compute(inputs, rows, record=False)

    def backward(self, gradient: Tensor, operands: list[Tensor | None], rows: Rows) -> Gradients:
        """Return the gradients of the inputs from that of this value. ``operands`` has rows of those that it ``needs``,
        and may be emptied as soon as they are used."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Codes:
    """Whole numbers of every row, [R, …] with this ``tail``, by which something is looked up, such as node types.
    ``rows`` holds them side by side in the compute dtype."""

    rows: Value
    tail: tuple[int, ...]

    def of(self, rows_RC: Tensor) -> Tensor:
        """Return [R, …], int64."""
        return rows_RC.long().view(len(rows_RC), *self.tail)


@dataclass(frozen=True)
class RowCount:
    """The number of rows of ``of``, which differs from tile to tile."""

    of: "Value" = field(compare=False)


class Features(Value):
    """The store's x in the compute dtype; sparse if ``entries_per_row`` is given."""

    def __init__(self, index: int, columns: int, entries_per_row: float | None = None, space: str = "") -> None:
        super().__init__(index, (), (columns,), space)
        self.entries_per_row = entries_per_row


class EmbeddingRows(Value):
    """Learnt rows with ``columns`` numbers each: an embedding of every node of a type."""

    own_trains = True

    def __init__(self, index: int, columns: int, space: str = "") -> None:
        super().__init__(index, (), (columns,), space)


class Dense(Value):
    """Sparse rows in dense form."""

    def compute(self, inputs: Sequence[Any], rows: Rows, *, record: bool) -> Tensor:
        found: Tensor = inputs[0].dense()
        return found


class Ones(Value):
    """The number one for every row of ``source``, without a gradient."""

    trains = False

    def __init__(self, index: int, source: Value) -> None:
        super().__init__(index, (source,), (1,))

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        return inputs[0].new_ones(len(inputs[0]), 1)


class Aggregate(Value):
    """t · A(s · input): each row is the scaled sum of its neighbours' scaled rows. Other aggregations are subclasses
    (per_edge)."""

    def __init__(self, index: int, source: Value, scaling: AnyScaling, *, once: bool) -> None:
        super().__init__(index, (source,), source.tail)
        self.scaling = scaling
        if isinstance(scaling, RelationScaling):
            self.space = ends_of(scaling)[1]
        self.hops: int = 1 + (source.hops if isinstance(source, Aggregate) and once else 0)
        self.once = once
        """Whether it is A^hops(x) of constant features, the same in every epoch."""

    @property
    def takes_gradient(self) -> bool:
        """Whether its gradient is needed."""
        return self.source.trains

    @property
    def upstream_of(self) -> "Aggregate":
        """The aggregate whose gradient is pulled to get the gradient of the source: itself, or the last of several in a
        chain."""
        return self

    @property
    def finds_upstream(self) -> bool:
        """Whether its own stage computes what is pulled backward."""
        return self.takes_gradient and self.upstream_of is self

    @property
    def upstream_columns(self) -> int:
        """The columns that are pulled of its gradient."""
        return self.columns

    @property
    def edge_data(self) -> tuple[EdgeData, ...]:
        """The edge data that it needs."""
        return (EdgeData.WEIGHT,) if self.scaling.basic.weighted else ()


MOMENTS_BYTES = 8
"""Bytes that a tile's moments take for every number: one copy in float64."""


@dataclass(frozen=True, slots=True)
class TileMoments:
    """The moments of one tile's rows: their number, mean [C] and sum of squared deviations [C]; float64."""

    count: int
    mean: Tensor
    deviations: Tensor

    def joined(self, other: "TileMoments") -> "TileMoments":
        """Return the moments of the rows of both tiles, if there is an ``other``, by the formulas of Chan, Golub and
        LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979), which stay accurate
        however far the mean is from zero."""
        place, total = other.mean.device, self.count + other.count
        delta = other.mean - self.mean.to(place)
        mean = self.mean.to(place) + delta * (other.count / total)
        between = delta.square() * (self.count * other.count / total)
        return TileMoments(total, mean, self.deviations.to(place) + other.deviations + between)


@dataclass(frozen=True, slots=True)
class TileTotals:
    """The sum [K] of a function over one tile's rows; float64."""

    total: Tensor

    def joined(self, other: "TileTotals") -> "TileTotals":
        return TileTotals(self.total.to(other.total.device) + other.total)


class Statistics:
    """The moments of one matrix with ``numbers`` columns, as far as its tiles are there, and the gradients of both
    moments.

    Sums are in float64 and added in the order of the tiles, so results do not depend on plans, budgets or threads.
    ``update`` is called with the complete moments: mean, biased variance, number of rows. One thread adds tiles; many
    read moments after the last tile.
    """

    parts = 2
    """The number of tensors that ``moments`` returns."""
    inner_columns = 0
    """Numbers a row of a total's intermediates, and of their gradients."""
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
        """Return the contribution of the rows at hand."""
        rows = rows_RC.double()
        mean = rows.mean(dim=0)
        centred = rows - mean if rows is rows_RC else rows.sub_(mean)
        return TileMoments(rows_RC.shape[0], mean, centred.square_().sum(dim=0))

    def add(self, tile: TileMoments | TileTotals, *, rows: int) -> None:
        """Add a tile; ``rows`` is the number of rows of all tiles."""
        self._found = found = self._found.joined(tile)
        if self._update is not None and found.count == rows:
            self._update(found.mean, found.deviations / rows, rows)

    def sample(self, dtype: torch.dtype) -> list[Tensor]:
        """Return possible results of ``moments``, to try functions with."""
        some = 0.5 + torch.rand(self.numbers, generator=torch.Generator().manual_seed(1), dtype=dtype)
        return [some] * self.parts

    def add_gradients(self, *found: Tensor) -> None:
        """Add a tile's part of the gradients of all ``parts``."""
        self._gradients = self._gradients.to(found[0].device) + torch.stack(found).double()

    def moments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return mean and biased variance, [C] each."""
        return self._found.mean.to(dtype), (self._found.deviations / self._found.count).to(dtype)

    def gradient(self, rows_RC: Tensor) -> Tensor:
        """Return the contribution of both moments' gradients to the gradient of some rows of the matrix, [R, C]."""
        dtype, (d_mean, d_variance) = rows_RC.dtype, self._gradients.to(rows_RC.device)
        slope = (2 * d_variance / self._found.count).to(dtype)
        level = (d_mean / self._found.count).to(dtype)
        found: Tensor = (rows_RC - self._found.mean.to(dtype)) * slope + level
        return found


class Totals(Statistics):
    """The sum over all rows of ``function``, [R, …] → [K] for any rows together, with its gradient. ``numbers``: K;
    ``inner_columns``: numbers a row of its intermediates."""

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
        """Return the total, [K]."""
        return (self._found.total.to(dtype),)

    def gradient(self, rows_RC: Tensor) -> Tensor:
        """Return the contribution of the total's gradient to the gradient of some rows, [R, C]."""
        rows = rows_RC.detach().requires_grad_()
        with torch.enable_grad():
            total = self.function(rows)
        (found,) = gradients_of([total], [rows], [self._gradients[0].to(total)])
        return torch.zeros_like(rows_RC) if found is None else found


class Moments(Value):
    """Mean and variance of every column of the input over all rows, or ``totals``; ``statistics`` holds them."""

    of = ""
    """The norm whose running statistics they update."""

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
        """Whether its result is always a new tensor, never one of its inputs."""
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
    """Dropout with probability ``p``, with the remaining entries scaled up; ``site`` keys the masks."""

    def __init__(self, index: int, source: Value, p: float, site: int) -> None:
        super().__init__(index, (source,), source.tail)
        self.p = p
        self.site = site
        self.entries_per_row = source.entries_per_row

    def compute(self, inputs: Sequence[Any], rows: Rows, *, record: bool) -> Any:
        if self.entries_per_row is not None:  # features have no gradient
            return inputs[0].dropped(rows.seed, rows.epoch, self.site, rows.start, self.p)
        scale = self._scale(inputs[0], rows)
        if record:
            rows.tape[self] = scale
        return dropped(inputs[0], scale, self.p)

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        scale = rows.tape.pop(self, None)
        if scale is None:
            scale = self._scale(gradient, rows)
        return Gradients([dropped(gradient, scale, self.p)])

    def _scale(self, like: Tensor, rows: Rows) -> Tensor:
        flat = shaped(like, (self.columns,))
        return keep_scale(rows.seed, rows.epoch, self.site, rows.start, flat, self.p).reshape(like.shape)


class Noise(Value):
    """Normal numbers, as many as ``source`` has; ``site`` keys them like masks."""

    trains = False

    def __init__(self, index: int, source: Value, site: int) -> None:
        super().__init__(index, (source,), source.tail)
        self.site = site

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        flat = shaped(inputs[0], (self.columns,))
        return noise(rows.seed, rows.epoch, self.site, rows.start, flat).reshape(inputs[0].shape)


class Rowwise(Value):
    """``function(*rows, mean, variance, …)``, row by row, with the moments of these rows or of other matrices, if it
    needs any, or a total in place of both. It may use ``parameters``, and autograd differentiates it.
    ``inner_columns``: numbers a row of its intermediates, if they are wider than its result."""

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
        """The numbers in the totals among its moments."""
        return sum(one.statistics.numbers for one in self.moments if isinstance(one.statistics, Totals))

    @property
    def gradient_numel(self) -> int:
        return super().gradient_numel + 4 * self.total_numbers  # a tile's sums, forward or backward, in float64

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
        """Return the gradients of the inputs."""
        leaves, output = rows.tape.pop(self)
        found = gradients_of([output], [*leaves, *self.parameters], [gradient])
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


class Detached(Rowwise):
    """A function of rows that no gradient goes back through; ``whole``: it gives whole numbers, to look up by."""

    trains = False
    whole = False
