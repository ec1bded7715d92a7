# SPDX-License-Identifier: Apache-2.0
"""Putting a network of values together: shapes found by trying, functions of rows proven to be such."""

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from math import inf, prod
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, fx, nn

from ooc.errors import ModelError
from ooc.kernels.tensors import fractions
from ooc.model.graph import AnyScaling, RelationScaling
from ooc.model.layers.per_edge import EdgeAggregate, Result
from ooc.model.lowering.products import IN_FULL, Products
from ooc.model.lowering.projection import ONCE, Linear, Projection, Repeated, SparseProduct, Weights
from ooc.model.lowering.rectified import Rectified, Sigmoidal, Signs
from ooc.model.lowering.values import (
    Aggregate,
    Dense,
    Dropout,
    Features,
    Learnt,
    Moments,
    Noise,
    RowFunction,
    Rowwise,
    Sum,
    Totals,
    Unlearnt,
    Value,
)
from ooc.plan.workload import EdgeData
from ooc.storage.types import EdgeType, Types

_PROBE_ROWS = 4
_PIECE_ROWS, _PIECE_NUMBERS = 16, 1 << 14
"""Of each of so many pieces, in which values of any size are tried, too."""
_MAGNITUDES = 4
"""Of such values: from 1e-4 to 1e4, and small whole numbers besides. What happens to large ones alone, or to zeros, is
not to be seen on a few numbers around 1."""
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


Inputs = Sequence[tuple[str, int, bool]]
"""What lies side by side in the rows that a model is given: names of its arguments, or of what it asks data for, how
many columns each has (0: it is [N]), and whether these are whole numbers. Nothing: the rows are ``x``."""


class Results(Enum):
    """Which of a model's results are meant, where there are several: the first, or in training all side by side."""

    FIRST = "first"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a network is made for. ``aggregate_once``: whether what is aggregated from constant features may be computed
    once; ``sum_first(i, hops, shape, once, scaling)``: whether the i-th product with a weight comes after its
    aggregation, which is scaled so and could be computed once; ``edge_data``: what edges carry that has to have a part
    in the result, so many features, ``weights_name`` what PyG's data calls weights, ``adj_t`` what it has in a matrix
    of edges (``"weights"``, ``"loops"``), ``left_out`` what it has besides, by name, ``inputs`` what its features are
    made of; ``training``: with dropout and the statistics of these rows; ``product``: how rows and weights are
    multiplied; ``probed``: what has been asked about opaque layers, and was found by trying them; ``traced``: what a
    module was found to call, by the module, what it was called for, and ``training``. The settings of one model share
    both. ``feature_entries_per_row``: where features come without their zeros, how many numbers have a row left on
    average; they are multiplied so ``on_cpu``, without a device of its own. ``embedding_columns``: by type of nodes, of
    rows that are trained themselves, which are the model's input, behind features if there are such. ``most_edges``: of
    a row, all or those of one type, asked where there are opaque layers. ``types``: of a graph with several of nodes
    and edges, where the counts are those of the type that is scored. ``outputs_of``: the types of nodes whose rows the
    model gives, one or two (none: the type that is labelled). ``results``: of a model that gives several. ``lower`` has
    an answer of its own for type, order and mode."""

    num_nodes: int
    num_features: int
    aggregate_once: bool = False
    input_dropout: float = 0.0
    num_edges: int = 0
    edge_data: frozenset[EdgeData] = frozenset()
    num_edge_features: int = 0
    weights_name: str = "edge_weight"
    adj_t: frozenset[str] = frozenset()
    left_out: Mapping[str, Collection[str]] = field(default_factory=dict)
    inputs: Inputs = ()
    embedding_columns: Mapping[str, int] = field(default_factory=dict)
    product: Products = IN_FULL
    feature_entries_per_row: float | None = None
    on_cpu: bool = True
    most_edges: Callable[[EdgeType | None], float] = lambda relation: inf
    dtype: torch.dtype = torch.float32
    types: Types | None = None
    outputs_of: tuple[str, ...] = ()
    sum_first: Callable[[int, int, tuple[int, ...], bool, AnyScaling], bool] = lambda *question: True
    training: bool = True
    results: Results = Results.FIRST
    probed: dict[Hashable, Any] = field(default_factory=dict)
    traced: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def in_columns(self) -> dict[str, int]:
        """Of what the model is given for each node, by type; of types of which nothing is known it is given nothing."""
        features = {"": self.num_features} if self.types is None else self.types.features
        columns = {name: count + self.embedding_columns.get(name, 0) for name, count in features.items()}
        return {name: count for name, count in columns.items() if count}

    def edges_of(self, relation: EdgeType | None) -> int:
        """How many edges there are, or of one type."""
        return self.num_edges if self.types is None or relation is None else self.types.edges[relation]

    @property
    def fewest(self) -> tuple[int, int]:
        """How many nodes there are, and edges; of several types the fewest of one."""
        types = self.types
        nodes, edges = (types.nodes.values(), types.edges.values()) if types else ([self.num_nodes], [self.num_edges])
        return min(nodes), min(edges)

    def features_of_edges(self, relation: EdgeType | None) -> int:
        """How many features edges have, or those of one type."""
        if self.types is None or relation is None:
            return self.num_edge_features
        return self.types.edge_features.get(relation, 0)


class Assembly:
    """Makes values, in order. ``sites`` counts the dropouts; ``products`` are the aggregations that commute with a
    dense product, ``convolved`` what each convolution is given, ``edge_data`` what some convolution takes of edges,
    ``cut_off`` the parameters that are found to get no gradient, ``reached`` those that are found to get one, be it
    zero, ``inputs_cut_off`` the types of nodes whose x gets none, ``observed`` the moments that running statistics are
    kept of, ``result_columns`` those of several results that lie side by side, ``flat_result`` whether the model gives
    a number a row, [N], ``second`` the rows of the second type
    where a model gives those of two types of nodes, ``degrees`` how many in-neighbours rows have, by what becomes of
    self-loops, ``calls`` what the model and modules within convolutions are found to call, ``traced`` the model's
    calls, what each stands for, and the tensors that its forward makes."""

    lower_as_it_is: Callable[..., Value]
    """What a module without a formula gives; set by who traces a model."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.sites = 0
        self.products: list[Aggregate] = []
        self.convolved: list[Value] = []
        self.edge_data: set[EdgeData] = set()
        self.cut_off: list[nn.Parameter] = []
        self.reached: list[nn.Parameter] = []
        self.inputs_cut_off: frozenset[str] = frozenset()
        self.observed: list[Moments] = []
        self.result_columns: tuple[int, ...] = ()
        self.flat_result = False
        self.second: Value | None = None
        self.degrees: dict[object, Value] = {}
        self.calls: list[object] = []
        self.traced: tuple[fx.Graph, Mapping[fx.Node, Any], dict[str, Tensor]] | None = None
        self._count = 0
        self._aggregates: dict[tuple[Value, AnyScaling], Aggregate] = {}
        self._products_of_sparse: dict[tuple[Value, nn.Parameter], Value] = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What is made within it counts for nothing where it raises."""
        before = {name: copy.copy(part) for name, part in vars(self).items()}
        try:
            yield
        except Exception:
            vars(self).update(before)
            raise

    def num_rows(self, value: Value) -> int:
        """How many rows ``value`` has."""
        types = self.setting.types
        return self.setting.num_nodes if types is None else types.nodes[value.space]

    def features(self, space: str = "") -> Value:
        """x, of a type of nodes, after the dropout on the input, if there is any: its site is 0, of further types of
        nodes one that no other dropout has."""
        setting, parts = self.setting, list[Value]()
        columns = setting.num_features if setting.types is None else setting.types.features[space]
        if columns:
            parts.append(Features(self.next_index(), columns, setting.feature_entries_per_row, space))
        if learnt := setting.embedding_columns.get(space):
            parts.append(Learnt(self.next_index(), learnt, space))
        x = parts[0]
        if not setting.on_cpu or len(parts) > 1:
            x = self._dense(x)
        if len(parts) > 1:
            x = self.rowwise("features beside an embedding", lambda *rows: torch.cat(rows, dim=1), [x, parts[1]])
        if setting.input_dropout and setting.training:
            site = 0 if setting.types is None else -[*setting.types.nodes].index(space)
            x = Dropout(self.next_index(), x, setting.input_dropout, site)
        return self._dense(x)

    def _dense(self, x: Value) -> Value:
        """``x`` for all that takes rows with their zeros; what does not takes what is before (``_without_zeros``)."""
        return Dense(self.next_index(), (x,), x.tail) if x.entries_per_row is not None else x

    def aggregate(self, source: Value, scaling: AnyScaling) -> Aggregate:
        """The scaled sum over neighbours; the same object for the same question."""
        check_matrix(source)
        self._check_edges(isinstance(scaling, RelationScaling))
        found = self._aggregates.get((source, scaling))
        if found is None:
            once = self._sums_once(source, scaling)
            found = self._aggregates[source, scaling] = Aggregate(self.next_index(), source, scaling, once=once)
        return found

    def aggregate_product(self, source: Value, weight: nn.Parameter, scaling: AnyScaling, hops: int = 1) -> Value:
        """A^hops(source) Wᵀ, in whichever order is cheaper: A(HW) = A(H)W."""
        return self.aggregate_map(source, lambda rows: self.linear(rows, weight), tuple(weight.shape), scaling, hops)

    def aggregate_map(
        self,
        source: Value,
        multiply: Callable[[Value], Value],
        shape: tuple[int, ...],
        scaling: AnyScaling,
        hops: int = 1,
    ) -> Value:
        """The same where ``multiply`` makes the product with a matrix of ``shape`` [O, I]."""
        check_matrix(source)
        place = len(self.products)
        sum_first = self.setting.sum_first(place, hops, shape, self._sums_once(source, scaling), scaling)
        value = source if sum_first else multiply(source)
        for _ in range(hops):
            value = self.aggregate(value, scaling)
        assert isinstance(value, Aggregate)
        self.products.append(value)
        return multiply(value) if sum_first else value

    def is_constant(self, value: Value) -> bool:
        """Whether it is x, or summed from x: the same in every epoch."""
        if isinstance(value, EdgeAggregate):
            return False
        value = _without_zeros(value)
        return isinstance(value, Features) or (isinstance(value, Aggregate) and self.is_constant(value.source))

    def _sums_once(self, source: Value, scaling: AnyScaling) -> bool:
        """Whether this sum of ``source`` is computed once: of x, or of what was summed from it in the same way."""
        summed = isinstance(source, Aggregate) and source.once and source.scaling == scaling
        return self.setting.aggregate_once and (summed or isinstance(_without_zeros(source), Features))

    def linear(self, source: Value, weight: nn.Parameter) -> Value:
        """x Wᵀ; of sums of features without their zeros, the sum of their products, where that is narrower."""
        _check_columns(source, weight.shape[1])
        if self._is_sum_of_sparse(source) and weight.shape[0] <= weight.shape[1]:
            return self._product_of_sparse(source, weight)
        return Linear(self.next_index(), source, weight, self.setting.product)

    def _is_sum_of_sparse(self, value: Value) -> bool:
        """Whether it is linear in features that are multiplied without their zeros, and the same in each column."""
        if isinstance(value, Sum):
            return not value.parameters and all(map(self._is_sum_of_sparse, value.inputs))
        if isinstance(value, Aggregate) and not isinstance(value, EdgeAggregate):
            return self._is_sum_of_sparse(value.source)
        return isinstance(value, Dense) and self.setting.on_cpu

    def _product_of_sparse(self, value: Value, weight: nn.Parameter) -> Value:
        """A(X) Wᵀ = A(X Wᵀ), and so on down to X."""
        if (value, weight) not in self._products_of_sparse:
            if isinstance(value, Sum):
                products = [self._product_of_sparse(one, weight) for one in value.inputs]
                found = self.sum([*zip(value.factors, products, strict=True)])
            elif isinstance(value, Aggregate):
                found = self.aggregate(self._product_of_sparse(value.source, weight), value.scaling)
            else:
                found = SparseProduct(self.next_index(), value.source, lambda: (weight, None), (weight,))
            self._products_of_sparse[value, weight] = found
        return self._products_of_sparse[value, weight]

    def projection(
        self, source: Value, weights: Weights, parameters: Sequence[nn.Parameter], repeated: Repeated = ONCE
    ) -> Value:
        """x W(θ)ᵀ + b(θ)."""
        with torch.no_grad():
            _check_columns(source, weights()[0].shape[1])
        if self._is_sum_of_sparse(source) and isinstance(source, Dense):
            return SparseProduct(self.next_index(), source.source, weights, parameters, repeated=repeated)
        product = self.setting.product
        return Projection(self.next_index(), source, weights, parameters, product=product, repeated=repeated)

    def per_edge(self, make: Callable[..., EdgeAggregate], *inputs: Value, relation: EdgeType | None = None) -> Value:
        """The result of ``make(index, *inputs, keep=…)``, an aggregation that computes something for every edge, or for
        those of one type."""
        check_matrix(inputs[0])
        self._check_edges(relation is not None)
        index, keep = self.next_index(), self.setting.training
        aggregate = make(index, *inputs, keep=keep)
        if keep and not aggregate.trains:
            aggregate, keep = make(index, *inputs, keep=False), False
        if relation is not None:
            aggregate.over(relation)
        return Result(self.next_index(), aggregate) if keep and not aggregate.joint else aggregate

    def _check_edges(self, of_a_type: bool) -> None:
        """ModelError where a graph with types is asked for edges of none."""
        if self.setting.types is not None and not of_a_type:
            raise ModelError("it is not supported on graphs with types of edges")

    def site(self, p: float) -> int:
        """The site of the next dropout, which keys its masks; 0 where nothing is dropped."""
        if not p:
            return 0
        if p >= 1:
            raise ModelError(f"dropout={p} leaves nothing to train on")
        self.sites += 1
        return self.sites

    def sum(self, terms: Sequence[tuple[float, Value]], biases: Sequence[nn.Parameter] = ()) -> Value:
        """Σ c · value + Σ bias; of one value as it is, that value. A multiple is what it is of, times its factor. Sums
        over types of edges are added to one another as they are there, in their order."""
        terms = [_without_factor(factor, value) for factor, value in terms]
        while len(terms) > 2 and all(_begins_a_stage(value) for _, value in terms[:2]):
            terms = [(1.0, Sum(self.next_index(), terms[:2], ())), *terms[2:]]
        if len(terms) == 1 and terms[0][0] == 1 and not biases:
            return terms[0][1]
        return Sum(self.next_index(), terms, biases)

    def dropout(self, source: Value, p: float) -> Value:
        """Dropout with the masks of the next site; of nothing, ``source`` itself."""
        site = self.site(p)
        if site and self.setting.on_cpu:
            return self._dense(Dropout(self.next_index(), _without_zeros(source), p, site))
        return Dropout(self.next_index(), source, p, site) if site else source

    def noise(self, source: Value) -> Value:
        """Normal numbers in the shape of ``source``, of the next site."""
        self.sites += 1
        return Noise(self.next_index(), source, self.sites)

    def rectified(self, source: Value, slope: float | None = None) -> Value:
        """ReLU of ``source``, or with ``slope`` LeakyReLU."""
        signs = Signs(self.next_index(), source, not_a_number=slope is None)
        return Rectified(self.next_index(), source, signs, slope)

    def sigmoidal(self, source: Value, *, logistic: bool = False) -> Value:
        """tanh of ``source``, or the logistic function."""
        return Sigmoidal(self.next_index(), source, logistic=logistic)

    def rowwise(
        self,
        name: str,
        function: RowFunction,
        inputs: Sequence[Value],
        parameters: Sequence[nn.Parameter] = (),
        *,
        moments: Sequence[Moments] = (),
        heavy: bool = False,
        inner_columns: int = 0,
    ) -> Value:
        """A function of rows, and of ``moments``. It is tried on a few: one that looks across rows raises ModelError
        naming ``name``."""
        sums = [part for one in moments for part in one.statistics.sample(self.setting.dtype)]
        tail = self.tried(name, lambda *rows: function(*rows, *sums), inputs, sizes=not heavy)
        options: dict[str, Any] = {"heavy": heavy, "inner_columns": inner_columns}
        return Rowwise(self.next_index(), inputs, tail, function, parameters, moments=moments, **options)

    def matrix(self, name: str, rows: Sequence[Value]) -> Value:
        """Rows of any shapes side by side, as one matrix; of one matrix, itself."""
        if len(rows) == len(rows[0].tail) == 1:
            return rows[0]
        return self.rowwise(name, lambda *x: torch.cat([one.reshape(len(one), -1) for one in x], dim=1), rows)

    def unlearnt(self, name: str, function: RowFunction, inputs: Sequence[Value], *, whole: bool = False) -> Value:
        """A function of rows that no gradient goes back through; ``whole``: it gives whole numbers from 0 on."""
        tail = self.tried(name, function, inputs)
        found = Unlearnt(self.next_index(), inputs, tail, function)
        found.whole = whole
        return found

    def tried(
        self, name: str, function: RowFunction, inputs: Sequence[Value], *, sizes: bool = True
    ) -> tuple[int, ...]:
        """The shape of a row; ModelError naming ``name`` where a row of what it gives is not of that row alone."""
        whole = [isinstance(value, Unlearnt) and value.whole for value in inputs]
        tail = probe(name, function, [value.tail for value in inputs], self.setting.dtype, whole, sizes=sizes)
        if 0 in tail:
            raise ModelError(f"{name} gives rows of no columns, which is not supported")
        return tail

    def normalized(
        self,
        source: Value,
        function: RowFunction,
        parameters: Sequence[nn.Parameter],
        update: Callable[[Tensor, Tensor, int], None] | None = None,
    ) -> Value:
        """``function(x, mean, variance)`` with moments over all rows; ``update`` keeps running statistics."""
        moments = self.moments(source, update)
        if update is not None:
            self.observed.append(moments)
        return Rowwise(self.next_index(), [source], source.tail, function, parameters, moments=[moments])

    def moments(self, source: Value, update: Callable[[Tensor, Tensor, int], None] | None = None) -> Moments:
        """Mean and variance of every column over all rows."""
        check_matrix(source)
        return Moments(self.next_index(), source, update)

    def total(self, name: str, inputs: Sequence[Value], function: RowFunction, *, inner_columns: int = 0) -> Moments:
        """The sum over all rows of what ``function``, without parameters, gives for any rows together. It is tried on a
        few: one that is no such sum raises ModelError naming ``name``. ``inner_columns``: numbers a row of what it
        makes on the way, where that is wider than the inputs."""
        source, tails = self.matrix(name, inputs), [one.tail for one in inputs]

        def of_rows(rows: Tensor) -> Tensor:
            parts = torch.split(rows, [prod(tail) for tail in tails], dim=1)
            return function(*(part.view(len(rows), *tail) for part, tail in zip(parts, tails, strict=True))).flatten()

        dtype = self.setting.dtype
        tried = torch.randn(_PROBE_ROWS, prod(source.tail), generator=torch.Generator().manual_seed(1), dtype=dtype)
        with torch.no_grad():
            found, parts = of_rows(tried), of_rows(tried[:1]) + of_rows(tried[1:])
        tolerance = _PROBE_TOLERANCE[dtype]
        largest = float(found.abs().max())
        if not (largest < inf and torch.allclose(found, parts, rtol=tolerance, atol=tolerance * largest)):
            raise ModelError(f"{name} looks across rows: what it gives depends on all nodes, and is no sum over them")
        return Moments(self.next_index(), source, totals=Totals(of_rows, found.numel(), inner_columns))

    def next_index(self) -> int:
        """Of the value that is made next."""
        self._count += 1
        return self._count


def _without_factor(factor: float, value: Value) -> tuple[float, Value]:
    if isinstance(value, Sum) and len(value.inputs) == 1 and not value.parameters:
        return factor * value.factors[0], value.inputs[0]
    return factor, value


def _begins_a_stage(value: Value) -> bool:
    """Whether it is a sum over edges of a type, which the backward pass does not need, or made of such by adding."""
    if isinstance(value, Sum):
        return any(map(_begins_a_stage, value.inputs))
    if not isinstance(value, Aggregate) or isinstance(value, EdgeAggregate):
        return False
    return value.space != "" and not value.once


def _without_zeros(value: Value) -> Value:
    """What ``value`` is the rows of, with their zeros."""
    return value.source if isinstance(value, Dense) else value


@torch.no_grad()
def probe(
    name: str,
    function: RowFunction,
    tails: Sequence[Sequence[int]],
    dtype: torch.dtype,
    whole: Sequence[bool] = (),
    *,
    sizes: bool = False,
) -> tuple[int, ...]:
    """The shape of a row of what ``function`` gives. ModelError unless every row depends on its own inputs alone, of
    which some are ``whole`` numbers from 0 on; ``sizes``: tried with values of any size, too."""
    generator = torch.Generator().manual_seed(1)
    tail: tuple[int, ...] = ()
    most = max(_PIECE_NUMBERS // max(1, *map(prod, tails)), 1)
    for piece, of_any_size in [(1, False), (min(most, _PIECE_ROWS), True)][: 1 + sizes]:
        inputs = [torch.randn(_PROBE_ROWS * piece, *one, generator=generator, dtype=dtype) for one in tails]
        inputs = [_of_any_size(one, generator) for one in inputs] if of_any_size else inputs
        inputs = [(one > 0).to(dtype) if is_whole else one for one, is_whole in zip_longest(inputs, whole)]
        tail, is_seen = _compared(name, function, inputs, piece)
        if not is_seen:
            inputs = [one if is_whole else fractions(one) for one, is_whole in zip_longest(inputs, whole)]
            _compared(name, function, inputs, piece)
    return tail


def _of_any_size(normal: Tensor, generator: torch.Generator) -> Tensor:
    shares = torch.rand(normal.shape, generator=generator, dtype=normal.dtype)
    return torch.where(shares < 0.25, normal.round(), normal * 10 ** (_MAGNITUDES * (2 * shares - 1)))


def _compared(name: str, function: RowFunction, inputs: Sequence[Tensor], piece: int) -> tuple[tuple[int, ...], bool]:
    """The shape of a row of what ``function`` gives, for all rows and ``piece`` at a time, and whether all of it are
    numbers."""
    rows, dtype = len(inputs[0]), inputs[0].dtype
    try:
        together = function(*(tensor.clone() for tensor in inputs))
        apart = [function(*(tensor[i : i + piece].clone() for tensor in inputs)) for i in range(0, rows, piece)]
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} fails on rows of {rows} nodes: {first_line(error)}") from error
    if not isinstance(together, Tensor) or together.dtype != dtype:
        raise ModelError(f"{name} does not give numbers of type {dtype} for each node")
    across = ModelError(f"{name} looks across rows: what it gives for a node depends on other nodes")
    if together.dim() < 1 or len(together) != rows:
        raise across
    tolerance = _PROBE_TOLERANCE[dtype]
    for alone, of_piece in zip(apart, torch.split(together, piece), strict=True):
        finite = of_piece[of_piece.isfinite()]
        floor = tolerance * (max(1.0, float(finite.abs().max())) if finite.numel() else 1.0)
        same_shape = alone.shape == of_piece.shape
        if not same_shape or not torch.allclose(alone, of_piece, rtol=tolerance, atol=floor, equal_nan=True):
            raise across
    return tuple(together.shape[1:]), not together.isnan().any()


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for one that is told in one line; of a bare assertion what it asserts."""
    lines = str(error).strip().splitlines()
    if not lines and isinstance(error, AssertionError):
        lines = [frame.line or "" for frame in extract_tb(error.__traceback__)[-1:]]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_columns(source: Value, columns: int) -> None:
    """ModelError where a linear map of so many columns does not fit; it says so of features if they are what it is
    given."""
    if source.tail == (columns,):
        return
    given = source
    while isinstance(given, (Dropout, Aggregate, Dense)):
        given = given.source
    if isinstance(given, Features):
        raise ModelError(f"the model takes {columns} features, the store has {source.columns}")
    if isinstance(given, Learnt):
        raise ModelError(f"the model takes {columns} features, the embedding has {source.columns}")
    raise ModelError(f"a linear map of {columns} columns is given {_shape(source)}")


def check_matrix(value: Value) -> None:
    """ModelError where a row of ``value`` is more than a row of numbers."""
    if len(value.tail) != 1:
        raise ModelError(f"a graph convolution or norm is given {_shape(value)} instead of a matrix")


def _shape(value: Value) -> str:
    return "values of shape [" + ", ".join(["nodes", *map(str, value.tail)]) + "]"
