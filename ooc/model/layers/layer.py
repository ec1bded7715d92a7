# SPDX-License-Identifier: Apache-2.0
"""A convolution as a model calls it, and an opaque layer, run as it is on the graph around some rows.

Shapes: R rows, S nodes of the graph around them, C columns in and O out, E edges.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ooc.errors import ModelError
from ooc.kernels.neighbourhood import Neighbourhood
from ooc.kernels.pieces.selections import Highest, Quantiles, selected_of_rows
from ooc.kernels.tensors import gradients_of
from ooc.model.graph import AnyScaling, RelationScaling, Scaling, ends_of_edges
from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Codes, Ones, Value
from ooc.plan.workload import EdgeData
from ooc.storage.types import EdgeType

_PLAIN = (bool, int, float, str, torch.dtype)
_ROWS = (Value, Codes)
_HOOKS = (dict, OrderedDict)
"""The types of a module's dictionaries of hooks."""
_NOT_FLIPPED = (
    "edges the other way round are supported for sums, means and GCN's sums, all without weights, and for layers that "
    "run as they are"
)

ARGUMENTS = {EdgeData.WEIGHT: "edge_weight", EdgeData.FEATURES: "edge_attr"}
"""The names of PyG's arguments for edge data."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Stands for the edge index, which can only be passed to a convolution. ``flipped``: with both ends of edges
    exchanged; ``relation``: the edge type, in a graph with types (None: all edges)."""

    flipped: bool = False
    relation: EdgeType | None = None


@dataclass(frozen=True, slots=True)
class EdgeInput:
    """Stands for the store's edge data, or that of one edge type, which can only be passed to a convolution, as a whole
    or after tensor methods, the ``steps``, each with its arguments."""

    data: EdgeData
    relation: EdgeType | None = None
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def __hash__(self) -> int:
        return hash((self.data, str(self.steps), self.relation))  # slices have no weak references

    def of(self, values: Tensor) -> Tensor:
        """Return [E, …], from the data of edges."""
        for name, arguments in self.steps:
            values = getattr(values, name)(*arguments)
        return values

    def whole_columns(self, columns: int) -> list[int]:
        """Return which of these columns must be whole numbers from 0 on; an edge has one number, or a row of them."""
        if ("long", ()) not in self.steps:
            return []
        numbers = torch.arange(columns).view(1, *[-1] * (self.data is EdgeData.FEATURES))
        before = replace(self, steps=self.steps[: self.steps.index(("long", ()))])
        return [int(number) for number in before.of(numbers).flatten()]


@dataclass(frozen=True, slots=True)
class EdgeKinds:
    """Stands for the numbers of edge types, in the store's order, beside a ``Graph`` of all edges; or, with ``equal``,
    for which edges are of that type."""

    equal: int | None = None


class NoFormulaError(ModelError):
    """Raised for a convolution without a formula, which then runs as it is."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a convolution: its arguments by name, its name in refusals, and how to trace a module on rows."""

    where: str
    arguments: dict[str, Any]
    assembly: Assembly
    trace: Callable[[nn.Module, Value], Value]

    def matrix(self, name: str) -> Value:
        """Return the argument ``name``, which must be a matrix of rows. Raises NoFormulaError for a pair."""
        value = self.arguments[name]
        self.needs(not are_ends(value))
        if not isinstance(value, Value):
            raise ModelError(f"{self.where}: {name} must be one matrix of rows")
        return value

    def ends(self, name: str) -> tuple[Value, Value]:
        """Return the argument ``name`` as rows of sources and rows of targets: one matrix for both, or a pair."""
        given, relation = self.arguments[name], self.relation
        if relation is None:
            return self.matrix(name), self.matrix(name)
        source, target = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, given)
        if not isinstance(source, Value) or not isinstance(target, Value):
            raise self.refuse(f"{name} must be rows of the sources and rows of the targets of its edges")
        for rows, space in zip((source, target), ends_of_edges(relation, flipped=self.flipped), strict=True):
            if rows.space != space:
                raise self.refuse(f"{name} has rows of {rows.space!r} where the edges {relation} have {space!r}")
        return source, target

    @property
    def relation(self) -> EdgeType | None:
        """The edge type, in a graph with several."""
        graph = self.arguments.get("edge_index")
        return graph.relation if isinstance(graph, Graph) else None

    def takes(self, name: str, data: EdgeData) -> bool:
        """Whether the argument ``name`` is this kind of the store's edge data; it may also be absent."""
        given = self.arguments.get(name)
        if given is None:
            return False
        if given != EdgeInput(data, self.relation):
            wanted = "[E]" if data is EdgeData.WEIGHT else "[E, F]"
            self.needs(not isinstance(given, EdgeInput) or not given.steps)
            is_other = isinstance(given, EdgeInput) and given.data is not data
            shape = f", {wanted}; give data with such" if is_other else ""
            raise self.refuse(f"{name} must be the model's own {ARGUMENTS[data]}{shape}")
        self.assembly.edge_data.add(data)
        return True

    @property
    def num_edge_features(self) -> int:
        """The number of features of the edges that the convolution is given."""
        return self.assembly.setting.features_of_edges(self.relation)

    @property
    def flipped(self) -> bool:
        """Whether the convolution sums over out-neighbours."""
        graph = self.arguments.get("edge_index")
        return isinstance(graph, Graph) and graph.flipped

    def aggregate(self, rows: Value, scaling: Scaling) -> Value:
        """Return the scaled sum over neighbours, at the end of the edges that this call asks for."""
        return self.assembly.aggregate(rows, self._oriented(rows, scaling))

    def aggregate_product(self, rows: Value, weight: nn.Parameter, scaling: Scaling, hops: int = 1) -> Value:
        """Return A^hops(rows) Wᵀ, in the cheaper order."""
        return self.assembly.aggregate_product(rows, weight, self._oriented(rows, scaling), hops)

    def over(self, graph: Graph) -> "Call":
        """Return the call for other edges."""
        return replace(self, arguments={"edge_index": graph})

    def per_edge(self, make: Callable[..., EdgeAggregate], *inputs: Value) -> Value:
        """Return the result of an aggregation that computes something for every edge (``Assembly.per_edge``). Raises
        NoFormulaError if edges are flipped."""
        self.needs(not self.flipped)
        self._check_source(inputs[0])
        return self.assembly.per_edge(make, *inputs, relation=self.relation)

    def _check_source(self, rows: Value) -> None:
        relation, (space, _) = self.relation, ends_of_edges(self.relation, flipped=self.flipped)
        if relation is not None and rows.space != space:
            raise self.refuse(f"it is given rows of {rows.space!r} where the edges {relation} have {space!r}")

    def _oriented(self, rows: Value, scaling: Scaling) -> AnyScaling:
        other = scaling.against_the_edges() if self.flipped else scaling
        if other is None:
            raise self.refuse(_NOT_FLIPPED)
        if self.relation is None:
            return other
        self._check_source(rows)
        if scaling.within_a_type and self.relation.source != self.relation.target:
            raise self.refuse(f"edges between two types, {self.relation}, are summed or averaged over")
        return RelationScaling(other, self.relation)

    def needs(self, known: bool) -> None:
        """Raise NoFormulaError unless options and arguments are ``known``, those that the formula is for."""
        if not known:
            raise NoFormulaError(f"{self.where}: there is no formula for its options and what it is given")

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}")

    def apply(self, module: nn.Module, rows: Value) -> Value:
        """Return what a module inside the convolution gives for rows, whatever it is."""
        try:
            return self.trace(module, rows)
        except ModelError as error:
            raise self.refuse(str(error)) from error


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and its call by a model.

    ``rows``: the matrices of rows that it is given, by name, with the columns of each; they lie side by side in one
    matrix. A name is that of an argument; ``ends`` says which names make up an argument for separate rows of sources
    and targets. ``edges``: the name of the edge index; ``carried``: edge data, by name; ``plain``: all other arguments.
    ``where``: the layer's name in refusals. ``parts``: the results that are meant, side by side, if there are several;
    ``codes``: which rows are whole numbers; ``tails``: the shapes of rows; ``flipped``: edges are passed the other way
    round. ``pairs``: it takes separate rows for all nodes and for targets, as PyG's convolutions do, and computes
    nothing for nodes without in-edges. ``relation``: the edge type. ``own``: which rows belong to targets, if edges are
    between two node types or if targets alone look them up; these lie side by side in a matrix of their own.
    ``counts``: which rows depend only on degrees. ``looks_up``: rows at edges' ends are replaced by stand-ins as far as
    possible (``kernels.edge_rows``), on the CPU only.
    """

    module: nn.Module
    where: str
    rows: Mapping[str, int]
    edges: str
    carried: Mapping[str, EdgeInput]
    plain: Mapping[str, Any]
    parts: tuple[Any, ...] = ()
    codes: Collection[str] = ()
    tails: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    flipped: bool = False
    pairs: bool = False
    ends: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    relation: EdgeType | None = None
    own: Collection[str] = ()
    counts: Collection[str] = ()
    looks_up: bool = False

    @property
    def kind(self) -> str:
        """A key that is equal for layers called alike, whatever the edge type."""
        carried = {name: replace(one, relation=None) for name, one in self.carried.items()}
        return repr(replace(self, module=nn.Module(), where="", relation=None, carried=carried))

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}")

    def run(self, module: nn.Module, x_SC: Tensor, near: Neighbourhood) -> Tensor:
        """Return what ``module``, the layer or a copy of it, gives for all nodes of ``near``, or, in ``pairs``, for its
        rows: one row of numbers a node."""
        found: Tensor = self.call(module, x_SC, near)
        if len(found) < near.rows:
            raise self.refuse(
                "it gives no rows for the last nodes where no edges lead to these: tell what adds up how many rows "
                "there are, by dim_size=x.size(0), or in aggregate by its argument dim_size"
            )
        return found if found.dim() == 2 else found.reshape(len(found), -1)

    def call(self, module: nn.Module, x_SC: Tensor, near: Neighbourhood) -> Any:
        """Return the result of ``module`` as it is."""
        stored = {EdgeData.WEIGHT: near.weight_E, EdgeData.FEATURES: near.features_EK}
        edge_index, rows = near.edge_index_2E, dict[str, Any]()
        if self.own:
            edge_index, targets = self._between(x_SC, near)
            rows = self._split(x_SC[near.rows :], self.of_sources) | self._split(targets, self.own)
        else:
            rows = self._split(x_SC, self.rows)
            if self.pairs and not near.stands_in and near.rows < x_SC.shape[0]:
                rows = {name: (part, part[: near.rows]) for name, part in rows.items()}
        edge_index = edge_index.flip(0) if self.sums_at_sources else edge_index
        arguments = {**self.plain, **combine_ends(rows, self.ends), self.edges: edge_index}
        for name, one in self.carried.items():
            values = stored[one.data]
            assert values is not None
            arguments[name] = one.of(values.to(x_SC.dtype))
        if not self.looks_up:
            return side_by_side(module(**arguments), self.parts)
        from ooc.kernels.edge_rows import LazyGathers, materialized  # needs numba

        with LazyGathers():
            return materialized(side_by_side(module(**arguments), self.parts))

    def _split(self, x_SC: Tensor, names: Collection[str]) -> dict[str, Tensor]:
        """Return the matrices of these names, which lie side by side in one; further columns are ignored."""
        widths = [self.rows[name] for name in names]
        parts = torch.split(x_SC if sum(widths) == x_SC.shape[1] else x_SC[:, : sum(widths)], widths, dim=1)
        found = {name: part.view(len(part), *self.tails[name]) for name, part in zip(names, parts, strict=True)}
        return {name: part.long() if name in self.codes else part for name, part in found.items()}

    @staticmethod
    def _between(x_SC: Tensor, near: Neighbourhood) -> tuple[Tensor, Tensor]:
        """Return edges between two node types, with each end numbered by itself, and the rows of targets."""
        rows = near.rows
        if near.stands_in:
            return near.edge_index_2E.new_tensor([[0], [rows]]), torch.cat((x_SC[:rows], x_SC[:1]))
        return near.edge_index_2E - near.edge_index_2E.new_tensor([[rows], [0]]), x_SC[:rows]

    @property
    def of_sources(self) -> list[str]:
        """The names of rows that are not targets' ``own``."""
        return [name for name in self.rows if name not in self.own]

    @property
    def columns(self) -> int:
        """The columns of the matrix of all rows that it is run on."""
        return max(sum(self.rows[name] for name in names) for names in (self.of_sources, self.own))

    @property
    def sums_at_sources(self) -> bool:
        """Whether messages go from an edge's second end to its first."""
        return getattr(self.module, "flow", "") == "target_to_source"

    @property
    def edge_data(self) -> tuple[EdgeData, ...]:
        """The edge data that it takes."""
        return tuple(dict.fromkeys(one.data for one in self.carried.values()))

    @property
    def whole_columns(self) -> list[int]:
        """Which columns of its rows must be whole numbers from 0 on."""
        return self._columns(self.codes)

    def whole_of_edges(self, data: EdgeData, columns: int) -> list[int]:
        """Return which columns of the edge data must be whole numbers from 0 on."""
        return [one for given in self.carried.values() if given.data is data for one in given.whole_columns(columns)]

    @property
    def positive_columns(self) -> list[int]:
        """Which columns of its rows are at least 0, so that it may take their roots and logarithms."""
        return self._columns(self.counts)

    def _columns(self, of: Collection[str]) -> list[int]:
        starts = dict[str, int]()
        for names in (self.of_sources, self.own):
            starts |= zip(names, accumulate((self.rows[name] for name in names), initial=0), strict=False)
        return [starts[name] + column for name in of for column in range(self.rows[name])]

    def forward(self, module: nn.Module, x_SC: Tensor, near: Neighbourhood) -> Tensor:
        """Return the result for its rows [R, O]."""
        with torch.no_grad():
            return self.run(module, x_SC, near)[: near.rows]

    def backward(
        self,
        module: nn.Module,
        x_SC: Tensor,
        near: Neighbourhood,
        gradient_RO: Tensor,
        parameters: Sequence[nn.Parameter],
        *,
        trains: bool,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the nodes' rows [S, C], if ``trains``, and of parameters of ``module``, from the
        gradient of its rows; None for what takes no part."""
        x_SC = x_SC.detach().requires_grad_(trains)
        with torch.enable_grad():
            result = self.run(module, x_SC, near)[: near.rows]
        found = gradients_of([result], [x_SC, *parameters], [gradient_RO])
        return found[0], found[1:]


def layer_of(
    module: nn.Module, where: str, args: Sequence[Any], kwargs: Mapping[str, Any], parts: tuple[Any, ...] = ()
) -> tuple[Layer, list[Value]]:
    """Return the layer as it is called, for ``parts`` of its result if there are several, and the rows it is given.
    Raises ModelError for an unsupported call."""
    from ooc.model.lowering.symbolic import (
        unbound_replacements,
    )  # imported here, so that models without such layers need no PyG

    for one in module.modules():
        for name in unbound_replacements(one):  # copies would share the objects it refers to
            what = f"{name} of {type(one).__name__}, set on the instance,"
            raise ModelError(f"{where}: {what} is not supported; write a subclass with a method of that name")
    try:
        signature = inspect.signature(module.forward)
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ModelError(f"{where} is called in a way that is not supported: {error}") from error
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    matrices, ends = dict[str, Any](), dict[str, tuple[str | None, str | None]]()
    for name, value in given.items():
        if isinstance(value, _ROWS):
            matrices[name] = value
        elif are_ends(value):
            source, target = value
            first, second = (None if one is None else f"{name}.{end}" for end, one in enumerate(value))
            ends[name] = (name, name) if source is target else (first, second)
            matrices |= {one: rows for one, rows in zip(ends[name], value, strict=True) if one is not None}
    rows = {name: value.rows if isinstance(value, Codes) else value for name, value in matrices.items()}
    edges = {name: value for name, value in given.items() if isinstance(value, Graph)}
    carried = {name: value for name, value in given.items() if isinstance(value, EdgeInput)}
    known = {*rows, *ends, *edges, *carried}
    plain = {name: value for name, value in given.items() if name not in known}
    relation = next((graph.relation for graph in edges.values()), None)
    layer = Layer(
        module,
        where,
        {name: value.columns for name, value in rows.items()},
        "".join(edges),
        carried,
        plain,
        parts,
        codes=tuple(name for name, value in matrices.items() if isinstance(value, Codes)),
        tails={name: value.tail for name, value in matrices.items()},
        flipped=any(graph.flipped for graph in edges.values()),
        ends=ends,
        relation=relation,
        counts=tuple(name for name, value in rows.items() if _counts_ones(value)),
    )
    if not rows or len(edges) != 1:
        why = "; edges that a layer keeps itself come as an argument, edge_index" if rows and not edges else ""
        raise layer.refuse(f"it must be given matrices of rows and the model's own edges, beside what these carry{why}")
    for name, value in plain.items():
        if value is not None and not isinstance(value, _PLAIN):
            of_types = isinstance(value, EdgeKinds) or any(isinstance(one, EdgeKinds) for one in given.values())
            remedy = "; types that a layer looks up are a column of edge_attr, edge_attr[:, -1].long()"
            raise layer.refuse(f"{name} is neither rows nor edges nor a plain number{remedy * of_types}")
    if any(one.relation != relation for one in carried.values()):
        raise layer.refuse("it is given what edges carry, and other edges")
    own = _own_rows(layer, rows) or tuple(name for name in rows if name in getattr(module, "own_rows", ()))
    return replace(layer, own=own), list(rows.values())


def side_by_side(results: Any, parts: Sequence[Any]) -> Any:
    """Return these parts of several results side by side; without parts, the result itself."""
    if not parts:
        return results
    return torch.cat([results[part].reshape(results[part].size(0), -1) for part in parts], dim=1)


def are_ends(value: Any) -> bool:
    """Whether it is a pair of rows of sources and rows of targets, one of which may be missing."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and all(one is None or isinstance(one, _ROWS) for one in value) and any(value)


def _own_rows(layer: Layer, rows: Mapping[str, Value]) -> tuple[str, ...]:
    """Return which of the rows given to ``layer`` are targets', if these are of another type than sources."""
    relation, spaces = layer.relation, {name: value.space for name, value in rows.items()}
    pairs = [(spaces[a], spaces[b]) for a, b in layer.ends.values() if a is not None and b is not None]
    first = next(iter(spaces.values()))
    source, target = next(iter(pairs), (first, first))
    if relation is not None:
        source, target = ends_of_edges(relation, flipped=layer.flipped)
    wanted = {name: {source, target} for name in rows}
    for pair in layer.ends.values():
        wanted |= {name: {space} for name, space in zip(pair, (source, target), strict=True) if name is not None}
    for name, space in spaces.items():
        if space not in wanted[name]:
            edges = "its edges" if relation is None else f"the edges {relation}"
            wanted_types = " or ".join(sorted(map(repr, wanted[name])))
            raise layer.refuse(f"{name} has rows of {space!r} where {edges} have {wanted_types}")
    own = tuple(name for name, space in spaces.items() if space == target) if source != target else ()
    if own and layer.sums_at_sources:
        raise layer.refuse("PyG's flow is for nodes of one type; between two give it edge_index.flip(0)")
    for space in (source, target):
        if space not in spaces.values():
            raise layer.refuse(f"it is given no rows of {space!r}, as its edges have; give (x_source, x_target)")
    return own


def combine_ends(rows: Mapping[str, Any], ends: Mapping[str, tuple[str | None, str | None]]) -> dict[str, Any]:
    """Return the arguments made of matrices by name: single ones as they are, others combined to pairs as ``ends``
    says. A matrix that is a pair already has one for each end."""
    found = {name: one for name, one in rows.items() if not any(name in pair for pair in ends.values())}

    def at(end: int, name: str | None) -> Any:
        one = None if name is None else rows[name]
        return one[end] if isinstance(one, tuple) else one

    return found | {name: tuple(at(end, one) for end, one in enumerate(pair)) for name, pair in ends.items()}


def _counts_ones(value: Value) -> bool:
    """Whether it is made of sums of ones alone."""
    return isinstance(value, Ones) or (bool(value.inputs) and all(map(_counts_ones, value.inputs)))


@cache
def _lean_aggregations() -> dict[type[nn.Module], type[nn.Module]]:
    """Return leaner replacements of PyG's aggregations. Quantiles and medians are found column by column, by the
    indices of entries, so that nothing sorted is kept for the gradient; for rows without edges, as tiles have, PyG's
    would look for entry -1. The sort needs no place in every row for as many entries as the longest has, and takes the
    first of equal ones first."""
    from torch_geometric.nn.aggr import MedianAggregation, QuantileAggregation, SortAggregation

    class LeanQuantiles(QuantileAggregation):  # type: ignore[misc]
        def forward(self, x: Tensor, index: Tensor, ptr: Any, dim_size: int, dim: int = -2) -> Tensor:
            if dim % x.dim():
                return super().forward(x, index, ptr, dim_size, dim)  # type: ignore[no-any-return]
            quantiles = Quantiles(self.q, self.interpolation)
            found = selected_of_rows(x.flatten(1), index, dim_size, quantiles, self.fill_value)
            return found.view(dim_size, self.q.numel() * x.shape[1], *x.shape[2:])

    class LeanSort(SortAggregation):  # type: ignore[misc]
        def forward(self, x: Tensor, index: Tensor, ptr: Any, dim_size: int, dim: int = -2) -> Tensor:
            self.assert_two_dimensional_input(x, dim)
            return selected_of_rows(x, index, dim_size, Highest(self.k))

    return {QuantileAggregation: LeanQuantiles, MedianAggregation: LeanQuantiles, SortAggregation: LeanSort}


def inspectors(module: nn.Module) -> dict[int, Any]:
    """Return PyG's knowledge of the arguments of convolutions' functions in ``module``, by id, to be shared by copies.
    No call changes it, and copying it takes most of the time of copying a convolution."""
    found = (getattr(part, "inspector", None) for part in module.modules())
    return {id(one): one for one in found if type(one).__module__ == "torch_geometric.inspector"}


def computed_tensors(module: nn.Module) -> dict[int, Tensor]:
    """Return tensors that calls have left in ``module``, by id, detached: they cannot be copied with their autograd
    history."""
    kept = (value for part in module.modules() for value in vars(part).values() if not _holds_no_tensor(value))
    leaves = (leaf for value in kept for leaf in tree_leaves(value))
    return {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_leaf}


def _holds_no_tensor(value: object) -> bool:
    """Whether it cannot hold a tensor: most attributes of a module are empty hooks and options."""
    return not value if type(value) in _HOOKS else value is None or isinstance(value, (bool, int, float, str))


@contextmanager
def in_modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """A context in which the modules are in these modes, and afterwards in those they had."""
    before = {module: module.training for module in modes}
    try:
        for module, mode in modes.items():
            module.training = mode
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def sharing(module: nn.Module, where: str) -> nn.Module:
    """Return a copy of ``module`` that shares its parameters and buffers, but has its own mode and its own attributes
    between calls. Raises ModelError if it cannot be copied."""
    known = inspectors(module) | computed_tensors(module)
    known |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ModelError(f"{where} has a scripted part, whose copies have parameters of their own; leave out torch.jit")
    for part in module.modules():
        for value in vars(part).values():
            if type(value) in _HOOKS and not value:  # deepcopy is slow for each
                known[id(value)] = type(value)()
    try:
        copied = copy.deepcopy(module, known)
    except Exception as error:
        raise ModelError(f"{where} cannot be copied for every thread: {type(error).__name__}: {error}") from error
    for part in copied.modules():
        if (lean := _lean_aggregations().get(type(part))) is not None:
            part.__class__ = lean
    return copied
