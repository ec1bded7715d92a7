# SPDX-License-Identifier: Apache-2.0
"""Put a network of values together. Shapes of rows are found by trying functions on a few rows, which also shows that
each row depends on itself alone."""

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
from ooc.model.lowering.projection import NO_COPIES, Linear, Projection, Repeated, SparseProduct, Weights
from ooc.model.lowering.rectified import Rectified, Sigmoidal, Signs
from ooc.model.lowering.values import (
    Aggregate,
    Dense,
    Detached,
    Dropout,
    EmbeddingRows,
    Features,
    Moments,
    Noise,
    RowFunction,
    Rowwise,
    Sum,
    Totals,
    Value,
)
from ooc.plan.workload import EdgeData
from ooc.storage.types import EdgeType, Types

_PROBE_ROWS = 4
_PIECE_ROWS, _PIECE_NUMBERS = 16, 1 << 14
"""Rows of each piece, and numbers of a piece, in which functions are tried on values of any size."""
_MAGNITUDES = 4
"""Such values range from 1e-4 to 1e4, with small whole numbers among them. A function that treats only large numbers,
or zeros, differently would pass on a few numbers around 1."""
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


Inputs = Sequence[tuple[str, int, bool]]
"""The parts that lie side by side in a model's input rows: the name of each argument, or of the attribute of PyG's
data; its columns (0: it is a vector [N]); and whether it is whole numbers. Empty: the rows are ``x``."""


class Results(Enum):
    """Which of a model's results are meant, if it returns several: the first, or, in training, all of them side by
    side."""

    FIRST = "first"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a network is made for: the graph's counts, options, and the mode.

    ``aggregate_once``: aggregations of constant features may be computed once. ``sum_first(i, hops, shape, once,
    scaling)``: whether the i-th product with a weight comes after its aggregation. ``edge_data``: the edge data that
    must take part in the result, with ``num_edge_features`` columns; ``weights_name``: PyG's name for weights;
    ``adj_t``: what PyG's data has in a matrix of edges (``"matrix"``, ``"weights"``, ``"loops"``); ``left_out``: other
    attributes of the data, by type; ``inputs``: the parts of the features. ``training``: with dropout and batch
    statistics. ``product``: how rows and weights are multiplied. ``probed``: results of trying opaque layers;
    ``traced``: the calls of modules; both are shared by all settings of a model. ``feature_entries_per_row``: for
    sparse features, the average number of non-zeros in a row; they are multiplied in sparse form ``on_cpu``.
    ``embedding_columns``: by node type, the columns of learnt rows, which follow the features in a model's input.
    ``most_edges``: returns the most edges of any row, of all or of one type, for opaque layers. ``types``: those of a
    graph with several; counts are then of the scored type. ``outputs_of``: the node types whose rows the model gives,
    one or two (empty: the labelled type). ``results``: for a model that returns several. ``lower`` sets results, order
    and mode by itself.
    """

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
        """The columns of the model's input, by node type; types without any are left out."""
        features = {"": self.num_features} if self.types is None else self.types.features
        columns = {name: count + self.embedding_columns.get(name, 0) for name, count in features.items()}
        return {name: count for name, count in columns.items() if count}

    def edges_of(self, relation: EdgeType | None) -> int:
        """Return the number of edges, or of those of one type."""
        return self.num_edges if self.types is None or relation is None else self.types.edges[relation]

    @property
    def fewest(self) -> tuple[int, int]:
        """The number of nodes and of edges; with several types, the smallest of each."""
        types = self.types
        nodes, edges = (types.nodes.values(), types.edges.values()) if types else ([self.num_nodes], [self.num_edges])
        return min(nodes), min(edges)

    def features_of_edges(self, relation: EdgeType | None) -> int:
        """Return the number of edge features, or of those of one type."""
        if self.types is None or relation is None:
            return self.num_edge_features
        return self.types.edge_features.get(relation, 0)


class Assembly:
    """A network under construction, which makes values in order.

    ``sites``: the dropouts so far; ``products``: the aggregations that commute with a dense product; ``convolved``: the
    input of each convolution; ``edge_data``: the edge data that convolutions take; ``cut_off``: parameters found to get
    no gradient; ``reached``: parameters found to get one, even if zero; ``inputs_cut_off``: node types whose x gets no
    gradient; ``observed``: the moments behind running statistics; ``result_columns``: the columns of several results
    side by side; ``flat_result``: whether the model returns one number a row, [N]; ``second``: the rows of the second
    type, if a model gives rows of two; ``degrees``: in-degrees, by the treatment of self-loops; ``calls``: the calls of
    the model and of modules within convolutions; ``traced``: the model's calls, what each stands for, and the tensors
    made in its forward.
    """

    lower_as_it_is: Callable[..., Value]
    """Lowers a module without a formula; set by the code that traces a model."""

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
        """A context that undoes everything made within it if it raises."""
        before = {name: copy.copy(part) for name, part in vars(self).items()}
        try:
            yield
        except Exception:
            vars(self).update(before)
            raise

    def num_rows(self, value: Value) -> int:
        """Return the number of rows of ``value``."""
        types = self.setting.types
        return self.setting.num_nodes if types is None else types.nodes[value.space]

    def features(self, space: str = "") -> Value:
        """Return x of a node type, after dropout on the input, if any. That has site 0, or, for further node types, a
        negative site that no other dropout has."""
        setting, parts = self.setting, list[Value]()
        columns = setting.num_features if setting.types is None else setting.types.features[space]
        if columns:
            parts.append(Features(self.next_index(), columns, setting.feature_entries_per_row, space))
        if learnt := setting.embedding_columns.get(space):
            parts.append(EmbeddingRows(self.next_index(), learnt, space))
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
        """Return ``x`` as dense rows. Consumers of sparse rows take what is before it (``_sparse_behind``)."""
        return Dense(self.next_index(), (x,), x.tail) if x.entries_per_row is not None else x

    def aggregate(self, source: Value, scaling: AnyScaling) -> Aggregate:
        """Return the scaled sum over neighbours; the same object for the same arguments."""
        check_matrix(source)
        self._check_edges(isinstance(scaling, RelationScaling))
        found = self._aggregates.get((source, scaling))
        if found is None:
            once = self._sums_once(source, scaling)
            found = self._aggregates[source, scaling] = Aggregate(self.next_index(), source, scaling, once=once)
        return found

    def aggregate_product(self, source: Value, weight: nn.Parameter, scaling: AnyScaling, hops: int = 1) -> Value:
        """Return A^hops(source) Wᵀ in the cheaper order: A(HW) = A(H)W."""
        return self.aggregate_map(source, lambda rows: self.linear(rows, weight), tuple(weight.shape), scaling, hops)

    def aggregate_map(
        self,
        source: Value,
        multiply: Callable[[Value], Value],
        shape: tuple[int, ...],
        scaling: AnyScaling,
        hops: int = 1,
    ) -> Value:
        """The same, where ``multiply`` makes the product with a matrix of ``shape`` [O, I]."""
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
        """Whether ``value`` is x, or summed from x: the same in every epoch."""
        if isinstance(value, EdgeAggregate):
            return False
        value = _sparse_behind(value)
        return isinstance(value, Features) or (isinstance(value, Aggregate) and self.is_constant(value.source))

    def _sums_once(self, source: Value, scaling: AnyScaling) -> bool:
        """Whether this sum of ``source`` is computed once: of x, or of such a sum with the same scaling."""
        summed = isinstance(source, Aggregate) and source.once and source.scaling == scaling
        return self.setting.aggregate_once and (summed or isinstance(_sparse_behind(source), Features))

    def linear(self, source: Value, weight: nn.Parameter) -> Value:
        """Return x Wᵀ. For sums of sparse features, return the sums of their products, if these are narrower."""
        _check_columns(source, weight.shape[1])
        if self._is_sum_of_sparse(source) and weight.shape[0] <= weight.shape[1]:
            return self._product_of_sparse(source, weight)
        return Linear(self.next_index(), source, weight, self.setting.product)

    def _is_sum_of_sparse(self, value: Value) -> bool:
        """Whether it is linear in features that are multiplied in sparse form, with the same map for each column."""
        if isinstance(value, Sum):
            return not value.parameters and all(map(self._is_sum_of_sparse, value.inputs))
        if isinstance(value, Aggregate) and not isinstance(value, EdgeAggregate):
            return self._is_sum_of_sparse(value.source)
        return isinstance(value, Dense) and self.setting.on_cpu

    def _product_of_sparse(self, value: Value, weight: nn.Parameter) -> Value:
        """Return A(X) Wᵀ as A(X Wᵀ), recursively down to X."""
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
        self, source: Value, weights: Weights, parameters: Sequence[nn.Parameter], repeated: Repeated = NO_COPIES
    ) -> Value:
        """Return x W(θ)ᵀ + b(θ)."""
        with torch.no_grad():
            _check_columns(source, weights()[0].shape[1])
        if self._is_sum_of_sparse(source) and isinstance(source, Dense):
            return SparseProduct(self.next_index(), source.source, weights, parameters, repeated=repeated)
        product = self.setting.product
        return Projection(self.next_index(), source, weights, parameters, product=product, repeated=repeated)

    def per_edge(self, make: Callable[..., EdgeAggregate], *inputs: Value, relation: EdgeType | None = None) -> Value:
        """Return the result of ``make(index, *inputs, keep=…)``, an aggregation that computes something for every edge,
        or for those of one type."""
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
        """Raise ModelError if a graph with types is asked for edges of no type."""
        if self.setting.types is not None and not of_a_type:
            raise ModelError("it is not supported on graphs with types of edges")

    def site(self, p: float) -> int:
        """Return the site of the next dropout, which keys its masks; 0 if nothing is dropped."""
        if not p:
            return 0
        if p >= 1:
            raise ModelError(f"dropout={p} leaves nothing to train on")
        self.sites += 1
        return self.sites

    def sum(self, terms: Sequence[tuple[float, Value]], biases: Sequence[nn.Parameter] = ()) -> Value:
        """Return Σ c · value + Σ bias, or the value itself if that is all. A multiple within it is replaced by its
        input times the factor. Sums over edge types are added to one another in their order."""
        terms = [_split_factor(factor, value) for factor, value in terms]
        while len(terms) > 2 and all(_begins_a_stage(value) for _, value in terms[:2]):
            terms = [(1.0, Sum(self.next_index(), terms[:2], ())), *terms[2:]]
        if len(terms) == 1 and terms[0][0] == 1 and not biases:
            return terms[0][1]
        return Sum(self.next_index(), terms, biases)

    def dropout(self, source: Value, p: float) -> Value:
        """Return dropout with the masks of the next site, or ``source`` itself if nothing is dropped."""
        site = self.site(p)
        if site and self.setting.on_cpu:
            return self._dense(Dropout(self.next_index(), _sparse_behind(source), p, site))
        return Dropout(self.next_index(), source, p, site) if site else source

    def noise(self, source: Value) -> Value:
        """Return normal numbers in the shape of ``source``, keyed by the next site."""
        self.sites += 1
        return Noise(self.next_index(), source, self.sites)

    def rectified(self, source: Value, slope: float | None = None) -> Value:
        """Return ReLU of ``source``, or LeakyReLU with ``slope``."""
        signs = Signs(self.next_index(), source, not_a_number=slope is None)
        return Rectified(self.next_index(), source, signs, slope)

    def sigmoidal(self, source: Value, *, logistic: bool = False) -> Value:
        """Return tanh of ``source``, or the logistic function."""
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
        """Return a function of rows and of ``moments``. It is tried on a few rows, and raises ModelError naming
        ``name`` if it looks across rows."""
        sums = [part for one in moments for part in one.statistics.sample(self.setting.dtype)]
        tail = self.tried(name, lambda *rows: function(*rows, *sums), inputs, sizes=not heavy)
        options: dict[str, Any] = {"heavy": heavy, "inner_columns": inner_columns}
        return Rowwise(self.next_index(), inputs, tail, function, parameters, moments=moments, **options)

    def matrix(self, name: str, rows: Sequence[Value]) -> Value:
        """Return rows of any shapes side by side, as one matrix; a single matrix as it is."""
        if len(rows) == len(rows[0].tail) == 1:
            return rows[0]
        return self.rowwise(name, lambda *x: torch.cat([one.reshape(len(one), -1) for one in x], dim=1), rows)

    def detached(self, name: str, function: RowFunction, inputs: Sequence[Value], *, whole: bool = False) -> Value:
        """Return a function of rows that no gradient goes back through; ``whole``: it gives whole numbers from 0 on."""
        tail = self.tried(name, function, inputs)
        found = Detached(self.next_index(), inputs, tail, function)
        found.whole = whole
        return found

    def tried(
        self, name: str, function: RowFunction, inputs: Sequence[Value], *, sizes: bool = True
    ) -> tuple[int, ...]:
        """Return the shape of a row of the function's result. Raises ModelError naming ``name`` if it does not depend
        on that row alone."""
        whole = [isinstance(value, Detached) and value.whole for value in inputs]
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
        """Return ``function(x, mean, variance)`` with moments over all rows; ``update`` keeps running statistics."""
        moments = self.moments(source, update)
        if update is not None:
            self.observed.append(moments)
        return Rowwise(self.next_index(), [source], source.tail, function, parameters, moments=[moments])

    def moments(self, source: Value, update: Callable[[Tensor, Tensor, int], None] | None = None) -> Moments:
        """Return mean and variance of every column over all rows."""
        check_matrix(source)
        return Moments(self.next_index(), source, update)

    def total(self, name: str, inputs: Sequence[Value], function: RowFunction, *, inner_columns: int = 0) -> Moments:
        """Return the sum over all rows of ``function``, which has no parameters and gives the sum for any rows. It is
        tried on a few rows, and raises ModelError naming ``name`` if it is no such sum. ``inner_columns``: numbers a
        row of its intermediates, if they are wider than the inputs."""
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
        """Return the index of the value that is made next."""
        self._count += 1
        return self._count


def _split_factor(factor: float, value: Value) -> tuple[float, Value]:
    if isinstance(value, Sum) and len(value.inputs) == 1 and not value.parameters:
        return factor * value.factors[0], value.inputs[0]
    return factor, value


def _begins_a_stage(value: Value) -> bool:
    """Whether it is a sum over edges of a type that the backward pass does not need, or a sum of such."""
    if isinstance(value, Sum):
        return any(map(_begins_a_stage, value.inputs))
    if not isinstance(value, Aggregate) or isinstance(value, EdgeAggregate):
        return False
    return value.space != "" and not value.once


def _sparse_behind(value: Value) -> Value:
    """Return the sparse rows behind ``value``, or ``value`` itself."""
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
    """Return the shape of a row of the function's result. Raises ModelError unless every row depends on its own inputs
    alone, some of which are ``whole`` numbers from 0 on. ``sizes``: also try values of any size."""
    generator = torch.Generator().manual_seed(1)
    tail: tuple[int, ...] = ()
    most = max(_PIECE_NUMBERS // max(1, *map(prod, tails)), 1)
    for piece, of_any_size in [(1, False), (min(most, _PIECE_ROWS), True)][: 1 + sizes]:
        inputs = [torch.randn(_PROBE_ROWS * piece, *one, generator=generator, dtype=dtype) for one in tails]
        inputs = [_spread_magnitudes(one, generator) for one in inputs] if of_any_size else inputs
        inputs = [(one > 0).to(dtype) if is_whole else one for one, is_whole in zip_longest(inputs, whole)]
        tail, is_seen = _compare_pieces(name, function, inputs, piece)
        if not is_seen:
            inputs = [one if is_whole else fractions(one) for one, is_whole in zip_longest(inputs, whole)]
            _compare_pieces(name, function, inputs, piece)
    return tail


def _spread_magnitudes(normal: Tensor, generator: torch.Generator) -> Tensor:
    shares = torch.rand(normal.shape, generator=generator, dtype=normal.dtype)
    return torch.where(shares < 0.25, normal.round(), normal * 10 ** (_MAGNITUDES * (2 * shares - 1)))


def _compare_pieces(
    name: str, function: RowFunction, inputs: Sequence[Tensor], piece: int
) -> tuple[tuple[int, ...], bool]:
    """Return the shape of a row of the function's result, after comparing all rows at once with ``piece`` rows at a
    time; and whether all of it are numbers."""
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
    """Return type and first line of an error; for a bare assertion, its source line."""
    lines = str(error).strip().splitlines()
    if not lines and isinstance(error, AssertionError):
        lines = [frame.line or "" for frame in extract_tb(error.__traceback__)[-1:]]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_columns(source: Value, columns: int) -> None:
    """Raise ModelError if a linear map of this many columns does not fit; the message names the features if these are
    its input."""
    if source.tail == (columns,):
        return
    given = source
    while isinstance(given, (Dropout, Aggregate, Dense)):
        given = given.source
    if isinstance(given, Features):
        raise ModelError(f"the model takes {columns} features, the store has {source.columns}")
    if isinstance(given, EmbeddingRows):
        raise ModelError(f"the model takes {columns} features, the embedding has {source.columns}")
    raise ModelError(f"a linear map of {columns} columns is given {_describe_shape(source)}")


def check_matrix(value: Value) -> None:
    """Raise ModelError if a row of ``value`` has more than one dimension."""
    if len(value.tail) != 1:
        raise ModelError(f"a graph convolution or norm is given {_describe_shape(value)} instead of a matrix")


def _describe_shape(value: Value) -> str:
    return "values of shape [" + ", ".join(["nodes", *map(str, value.tail)]) + "]"
