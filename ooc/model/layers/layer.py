# SPDX-License-Identifier: Apache-2.0
"""A convolution as a model calls it; and an opaque layer, run as it is on the graph around some rows.

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
"""Of which types a module's hooks are, by module."""
_NOT_FLIPPED = (
    "edges the other way round are supported for sums, means and GCN's sums, all without weights, and for layers that "
    "run as they are"
)

ARGUMENTS = {EdgeData.WEIGHT: "edge_weight", EdgeData.FEATURES: "edge_attr"}
"""What PyG's models call what edges carry."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Stands for the edge index: good for nothing but being given to a convolution. ``flipped``: every edge the other
    way round. ``relation``: of a graph with types, whose edges these are; None: all."""

    flipped: bool = False
    relation: EdgeType | None = None


@dataclass(frozen=True, slots=True)
class EdgeInput:
    """Stands for what the store's edges carry, or those of one type: good for nothing but being given to a
    convolution, as a whole or what tensors' methods make of it: ``steps``, each with its arguments."""

    data: EdgeData
    relation: EdgeType | None = None
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def __hash__(self) -> int:
        return hash((self.data, str(self.steps), self.relation))  # slices have none

    def of(self, values: Tensor) -> Tensor:
        """[E, …], of what the edges carry."""
        for name, arguments in self.steps:
            values = getattr(values, name)(*arguments)
        return values

    def whole_columns(self, columns: int) -> list[int]:
        """Which of so many have to be whole numbers from 0 on; edges have one number, or a row of them."""
        if ("long", ()) not in self.steps:
            return []
        numbers = torch.arange(columns).view(1, *[-1] * (self.data is EdgeData.FEATURES))
        before = replace(self, steps=self.steps[: self.steps.index(("long", ()))])
        return [int(number) for number in before.of(numbers).flatten()]


@dataclass(frozen=True, slots=True)
class EdgeKinds:
    """Stands for the numbers of the edges' types, in the order of the store's, beside a ``Graph`` of all edges."""


class NoFormulaError(ModelError):
    """Of a convolution that runs as it is."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a convolution: its arguments by name, what refusals call it, and how to trace a module on rows."""

    where: str
    arguments: dict[str, Any]
    assembly: Assembly
    trace: Callable[[nn.Module, Value], Value]

    def matrix(self, name: str) -> Value:
        """The argument ``name``, which must be a matrix of rows; of a pair NoFormulaError."""
        value = self.arguments[name]
        self.needs(not are_ends(value))
        if not isinstance(value, Value):
            raise ModelError(f"{self.where}: {name} must be one matrix of rows")
        return value

    def ends(self, name: str) -> tuple[Value, Value]:
        """The argument ``name`` as rows of sources and rows of targets: one matrix for both, or a pair."""
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
        """The type of the edges, of a graph with several."""
        graph = self.arguments.get("edge_index")
        return graph.relation if isinstance(graph, Graph) else None

    def takes(self, name: str, data: EdgeData) -> bool:
        """Whether the argument ``name`` is what the store's edges carry of this kind; it may be nothing, too."""
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
        """Of the edges that the convolution is given."""
        return self.assembly.setting.features_of_edges(self.relation)

    @property
    def flipped(self) -> bool:
        """Whether the convolution sums over out-neighbours."""
        graph = self.arguments.get("edge_index")
        return isinstance(graph, Graph) and graph.flipped

    def aggregate(self, rows: Value, scaling: Scaling) -> Value:
        """The scaled sum over neighbours, at the end of the edges that this call asks for."""
        return self.assembly.aggregate(rows, self._oriented(rows, scaling))

    def aggregate_product(self, rows: Value, weight: nn.Parameter, scaling: Scaling, hops: int = 1) -> Value:
        """A^hops(rows) Wᵀ, in whichever order is cheaper."""
        return self.assembly.aggregate_product(rows, weight, self._oriented(rows, scaling), hops)

    def over(self, graph: Graph) -> "Call":
        """The call for other edges."""
        return replace(self, arguments={"edge_index": graph})

    def per_edge(self, make: Callable[..., EdgeAggregate], *inputs: Value) -> Value:
        """The result of an aggregation that computes something for every edge (``Assembly.per_edge``); NoFormulaError
        where edges are taken the other way round."""
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
        """NoFormulaError unless options and arguments are ``known`` to be those that the formula is for."""
        if not known:
            raise NoFormulaError(f"{self.where}: there is no formula for its options and what it is given")

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}")

    def apply(self, module: nn.Module, rows: Value) -> Value:
        """What a module inside the convolution gives for rows, whatever it is."""
        try:
            return self.trace(module, rows)
        except ModelError as error:
            raise self.refuse(str(error)) from error


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and its call by a model: the names of the matrices of rows that it is given, each with its columns of the
    matrix in which they lie side by side, for edges and for what these carry; ``plain`` are all other arguments. A name
    is that of the argument, or one of those that ``ends`` says an argument for rows of sources and of targets is made
    of. ``where`` is what refusals call it; ``parts``: which of several results are meant, side by side; ``codes``:
    which rows are whole numbers; ``tails``: of rows; ``flipped``: edges are given to it the other way round. ``pairs``:
    of rows it takes those of all nodes and those of targets apart, as PyG's convolutions do, and computes nothing for
    nodes that no edge leads to. ``relation``: the type of the edges; ``own``: where that is between two types of nodes,
    or targets alone look some rows up, which of the rows are of targets: they lie side by side in a matrix of their
    own. ``counts``: which rows come of how many edges there are, and of nothing else. ``looks_up``: the rows of
    edges' ends are left where they are as far as possible (``kernels.edge_rows``), on the CPU alone.
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
        """The same for layers that are called alike, of whichever type of edges."""
        carried = {name: replace(one, relation=None) for name, one in self.carried.items()}
        return repr(replace(self, module=nn.Module(), where="", relation=None, carried=carried))

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}")

    def run(self, module: nn.Module, x_SC: Tensor, near: Neighbourhood) -> Tensor:
        """What ``module``, the layer or a copy of it, gives for all nodes of ``near``, or in ``pairs`` for its rows;
        one row of numbers a node."""
        found: Tensor = self.call(module, x_SC, near)
        if len(found) < near.rows:
            raise self.refuse(
                "it gives no rows for the last nodes where no edges lead to these: tell what adds up how many rows "
                "there are, by dim_size=x.size(0), or in aggregate by its argument dim_size"
            )
        return found if found.dim() == 2 else found.reshape(len(found), -1)

    def call(self, module: nn.Module, x_SC: Tensor, near: Neighbourhood) -> Any:
        """The same as ``module`` gives it."""
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
        arguments = {**self.plain, **given_as(rows, self.ends), self.edges: edge_index}
        for name, one in self.carried.items():
            values = stored[one.data]
            assert values is not None
            arguments[name] = one.of(values.to(x_SC.dtype))
        if not self.looks_up:
            return side_by_side(module(**arguments), self.parts)
        from ooc.kernels.edge_rows import LookedUp, made  # needs numba

        with LookedUp():
            return made(side_by_side(module(**arguments), self.parts))

    def _split(self, x_SC: Tensor, names: Collection[str]) -> dict[str, Tensor]:
        """The matrices of these names, which lie side by side in one; more columns are of no use."""
        widths = [self.rows[name] for name in names]
        parts = torch.split(x_SC if sum(widths) == x_SC.shape[1] else x_SC[:, : sum(widths)], widths, dim=1)
        found = {name: part.view(len(part), *self.tails[name]) for name, part in zip(names, parts, strict=True)}
        return {name: part.long() if name in self.codes else part for name, part in found.items()}

    @staticmethod
    def _between(x_SC: Tensor, near: Neighbourhood) -> tuple[Tensor, Tensor]:
        """Edges between nodes of two types, each counted by themselves, and the rows of targets."""
        rows = near.rows
        if near.stands_in:
            return near.edge_index_2E.new_tensor([[0], [rows]]), torch.cat((x_SC[:rows], x_SC[:1]))
        return near.edge_index_2E - near.edge_index_2E.new_tensor([[rows], [0]]), x_SC[:rows]

    @property
    def of_sources(self) -> list[str]:
        """The names of the rows that are not targets' ``own``."""
        return [name for name in self.rows if name not in self.own]

    @property
    def columns(self) -> int:
        """Of the matrix of all rows that it is run on."""
        return max(sum(self.rows[name] for name in names) for names in (self.of_sources, self.own))

    @property
    def sums_at_sources(self) -> bool:
        """Whether it has messages go from an edge's second end to its first."""
        return getattr(self.module, "flow", "") == "target_to_source"

    @property
    def edge_data(self) -> tuple[EdgeData, ...]:
        """What it takes of edges beside their ends."""
        return tuple(dict.fromkeys(one.data for one in self.carried.values()))

    @property
    def whole_columns(self) -> list[int]:
        """Which columns of its rows have to be whole numbers from 0 on."""
        return self._columns(self.codes)

    def whole_of_edges(self, data: EdgeData, columns: int) -> list[int]:
        """The same of what edges carry, so many numbers each."""
        return [one for given in self.carried.values() if given.data is data for one in given.whole_columns(columns)]

    @property
    def positive_columns(self) -> list[int]:
        """Which columns of its rows are no less than 0, so that it may take their roots and logarithms."""
        return self._columns(self.counts)

    def _columns(self, of: Collection[str]) -> list[int]:
        starts = dict[str, int]()
        for names in (self.of_sources, self.own):
            starts |= zip(names, accumulate((self.rows[name] for name in names), initial=0), strict=False)
        return [starts[name] + column for name in of for column in range(self.rows[name])]

    def forward(self, module: nn.Module, x_SC: Tensor, near: Neighbourhood) -> Tensor:
        """Its rows → [R, O]."""
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
        """From the gradient of its rows to those of the nodes [S, C], if ``trains``, and of parameters of ``module``;
        None for what has no part in it."""
        x_SC = x_SC.detach().requires_grad_(trains)
        with torch.enable_grad():
            result = self.run(module, x_SC, near)[: near.rows]
        found = gradients_of([result], [x_SC, *parameters], [gradient_RO])
        return found[0], found[1:]


def layer_of(
    module: nn.Module, where: str, args: Sequence[Any], kwargs: Mapping[str, Any], parts: tuple[Any, ...] = ()
) -> tuple[Layer, list[Value]]:
    """The layer as it is called, for ``parts`` of its result if there are several, and the rows it is given;
    ModelError for a call that is not supported."""
    from ooc.model.lowering.symbolic import strangers  # here, so that what has no such layer does without PyG

    for one in module.modules():
        for name in strangers(one):  # copies would share what it refers to
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
        counts=tuple(name for name, value in rows.items() if _counts_edges(value)),
    )
    if not rows or len(edges) != 1:
        raise layer.refuse("it must be given matrices of rows and the model's own edges, beside what these carry")
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
    """Those of several results, each of as many rows; of none, the result itself."""
    if not parts:
        return results
    return torch.cat([results[part].reshape(results[part].size(0), -1) for part in parts], dim=1)


def are_ends(value: Any) -> bool:
    """Whether it is rows of sources and rows of targets, of which one may lack."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and all(one is None or isinstance(one, _ROWS) for one in value) and any(value)


def _own_rows(layer: Layer, rows: Mapping[str, Value]) -> tuple[str, ...]:
    """Which of the rows that ``layer`` is given are of targets, if these are of another type than sources."""
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
            told = " or ".join(sorted(map(repr, wanted[name])))
            raise layer.refuse(f"{name} has rows of {space!r} where {edges} have {told}")
    own = tuple(name for name, space in spaces.items() if space == target) if source != target else ()
    if own and layer.sums_at_sources:
        raise layer.refuse("PyG's flow is for nodes of one type; between two give it edge_index.flip(0)")
    for space in (source, target):
        if space not in spaces.values():
            raise layer.refuse(f"it is given no rows of {space!r}, as its edges have; give (x_source, x_target)")
    return own


def given_as(rows: Mapping[str, Any], ends: Mapping[str, tuple[str | None, str | None]]) -> dict[str, Any]:
    """Arguments made of matrices by their names: each by itself, or as ``ends`` say a pair, for which rows that are a
    pair already have one for each end."""
    found = {name: one for name, one in rows.items() if not any(name in pair for pair in ends.values())}

    def at(end: int, name: str | None) -> Any:
        one = None if name is None else rows[name]
        return one[end] if isinstance(one, tuple) else one

    return found | {name: tuple(at(end, one) for end, one in enumerate(pair)) for name, pair in ends.items()}


def _counts_edges(value: Value) -> bool:
    """Whether it comes of sums of ones alone."""
    return isinstance(value, Ones) or (bool(value.inputs) and all(map(_counts_edges, value.inputs)))


@cache
def _lean() -> dict[type[nn.Module], type[nn.Module]]:
    """What runs in the place of PyG's aggregations: quantiles (and its median) by which entries they are, found column
    by column, so that nothing sorted is kept for the gradient; and where rows have no edges, as those of a tile may,
    PyG's look for entry -1. Its sort without a place for as many entries of every row as any row has, and of equal ones
    the first in order."""
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
    """By id, for copies to share: what PyG's convolutions in ``module`` know of the arguments of their own functions.
    No call changes it, and copying it takes most of the time that copying a convolution does."""
    found = (getattr(part, "inspector", None) for part in module.modules())
    return {id(one): one for one in found if type(one).__module__ == "torch_geometric.inspector"}


def computed(module: nn.Module) -> dict[int, Tensor]:
    """By id, for copies: what calls have left in ``module``, which cannot be copied with what it was computed of."""
    kept = (value for part in module.modules() for value in vars(part).values() if not _is_nothing(value))
    leaves = (leaf for value in kept for leaf in tree_leaves(value))
    return {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_leaf}


def _is_nothing(value: object) -> bool:
    """Whether no tensor is in it: most of what a module has are hooks that there are not, and options."""
    return not value if type(value) in _HOOKS else value is None or isinstance(value, (bool, int, float, str))


@contextmanager
def in_modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """The modules are in training mode or not meanwhile; each is then in the mode that it had."""
    before = {module: module.training for module in modes}
    try:
        for module, mode in modes.items():
            module.training = mode
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def sharing(module: nn.Module, where: str) -> nn.Module:
    """A copy of ``module`` with the very same parameters and buffers: its mode and what it keeps between calls are its
    own. ModelError where it cannot be copied."""
    known = inspectors(module) | computed(module)
    known |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ModelError(f"{where} has a scripted part, whose copies have parameters of their own; leave out torch.jit")
    for part in module.modules():
        for value in vars(part).values():
            if type(value) in _HOOKS and not value:  # deepcopy takes long for each
                known[id(value)] = type(value)()
    try:
        copied = copy.deepcopy(module, known)
    except Exception as error:
        raise ModelError(f"{where} cannot be copied for every thread: {type(error).__name__}: {error}") from error
    for part in copied.modules():
        if (lean := _lean().get(type(part))) is not None:
            part.__class__ = lean
    return copied
