# SPDX-License-Identifier: Apache-2.0
"""From a module to values: its forward is traced with torch.fx, and the traced calls are run on values
(``interpreter``).

Convolutions, norms and layers of torch.nn are calls; all other modules are traced through, so that a list of calls
remains.
"""

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import HeteroConv
from torch_geometric.nn import Sequential as GraphSequential

from ooc.errors import ModelError, OocError
from ooc.model.layers.layer import ARGUMENTS, EdgeInput, EdgeKinds, Graph
from ooc.model.lowering.assembly import Assembly, Inputs, Results, Setting, first_line
from ooc.model.lowering.calls.interpreter import Interpreter, reason_of, with_place
from ooc.model.lowering.opened import lower_as_it_is
from ooc.model.lowering.symbolic import (
    calls_of,
    place_in_model,
    small_inputs,
    small_inputs_of_relations,
    small_inputs_of_types,
    uncached,
)
from ooc.model.lowering.values import Value
from ooc.model.lowering.whole import EDGES, ROWS, CallConvention, UniformModel, counts_of, with_arguments
from ooc.plan.workload import EdgeData
from ooc.storage.types import EdgeType, Types

_LOCK = RLock()
_EDGE_TYPE = "edge_type"
"""The argument of models that take all edges at once with the numbers of their types."""


_NAMES_OF_EDGES = re.compile("edge_index|adj|^(edges?|ei)$")
_NOT_OF_ONE_GRAPH = {
    "get_attention_loss": "SuperGATConv's attention loss is of edges that are drawn anew in every epoch; train without",
    "trim_to_layer": "trim_to_layer is for sampled batches, which have no row too many without it; leave it out",
}
"""Functions of PyG that fail here, with the reason."""
_NAMES_OF_DATA = ("data", "batch", "batched_data", "graph", "g")


def _call_convention_of(model: nn.Module, setting: Setting) -> CallConvention:
    """Return how ``model`` is called. Raises ModelError if its forward takes something else."""
    kind, types = type(model).__name__, setting.types
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ModelError(f"{kind} is not supported: give the model in it, its module")
    for path, part in model.named_modules():
        if type(part).__module__.startswith("torch_geometric.nn.pool."):
            raise ModelError(
                f"{type(part).__name__} ({path}): which nodes are kept, or put together, depends on all of the "
                "graph; of many small graphs ooc.GraphTrainer trains such models"
            )
    as_data = takes_data(model)
    taken = edge_arguments(model, setting.edge_data, setting.weights_name, by_type=types is not None)
    numbered = types is not None and len(types.nodes) == 1 and (as_data or _EDGE_TYPE in _arguments_of(model))
    batch = types is None and not as_data and _requires_batch(model)
    given = [_EDGE_TYPE] if numbered else [*taken.values(), *["batch"] * batch]
    given += counts_of(model)
    inputs, by_name = setting.inputs, tuple[str, ...]()
    if types is None and not as_data:
        inputs, by_name = arranged(model, inputs, given)
    given += [name for name, *_ in inputs if name not in ("x", "")]
    try:
        if not as_data:
            by_place = () if by_name else (None, None)
            inspect.signature(model.forward).bind(*by_place, **dict.fromkeys([*by_name, *given]))
    except TypeError as error:
        arguments = "(x_dict, edge_index_dict)" if types else "(x, edge_index)"
        if types is not None and len(types.nodes) == 1:
            arguments += ", or (x, edge_index, edge_type)"
        there = " and ".join(ARGUMENTS[one] for one in EdgeData if one in setting.edge_data)
        more = f", and edge_weight or edge_attr where the store has them, here {there or 'neither'}"
        more = more.replace("edge_weight or edge_attr", "edge_weight_dict or edge_attr_dict") if types else more
        beside = "what its data has of nodes beside x"
        more += f", and {beside} as columns of x" if types else f", by name {beside}, but no labels or masks"
        more += f"; or (data), which has all this. It takes {inspect.signature(model.forward)}"
        raise ModelError(f"model {kind} is not supported: its forward must take {arguments}{more}") from error
    if types is None and _is_called_by_type(model):
        raise ModelError(
            f"model {kind} takes rows and edges by type, as (x_dict, edge_index_dict): a graph of one type of "
            "nodes and one of edges is kept without types, and a model of it takes (x, edge_index)"
        )
    return CallConvention(as_data, taken, numbered, batch, inputs, by_name, setting.left_out)


def _with_small_inputs(
    way: CallConvention, model: nn.Module, setting: Setting, results: Results, spaces: Sequence[str] = ()
) -> tuple[nn.Module, Sequence[Tensor]]:
    """Return the model as a module that is called with individual tensors, and small tensors of the graph's widths."""
    types, columns, dtype, taken = setting.types, setting.in_columns, setting.dtype, way.taken
    tried: Sequence[Tensor]
    names: Sequence[str] = ("x", "edge_index", *ARGUMENTS.values())
    places: list[tuple[str, Any] | None] = [(ROWS, None), (EDGES, None)]
    if types is None:
        tried = small_inputs(columns[""], setting.num_edge_features, dtype=dtype)
        places += [(taken[data], None) if data in taken else None for data in ARGUMENTS]
    elif way.numbered:
        tried, names = small_inputs_of_relations(types, columns, dtype=dtype), ("x", "edge_index", _EDGE_TYPE)
        places.append((_EDGE_TYPE, None))
    else:
        carried = _carried_by_types(types, taken)
        places = [*((ROWS, name) for name in columns), *((EDGES, tuple(one)) for one in types.edges)]
        places += [(taken[data], tuple(one)) for data, one, _ in carried]
        tried = small_inputs_of_types(types, columns, [width for _, _, width in carried], dtype=dtype)
        names = [f"given{at}" for at in range(len(places))]
    return with_arguments(UniformModel, names, model, way, places, results, spaces), tried


@contextmanager
def _exclusively() -> Iterator[None]:
    """A context for one thread at a time: while a trace runs, functions of torch, PyG and Python are replaced for all
    threads."""
    with _LOCK:
        yield


@_exclusively()
def initialize(model: nn.Module, setting: Setting) -> None:
    """Initialise lazily sized parameters of ``model``, as PyG's examples do by a forward pass of the graph; here the
    pass is over a few made-up rows, in evaluation mode. Raises ModelError if that fails."""
    modes = [(module, module.training) for module in model.modules()]
    whole, tried = _with_small_inputs(_call_convention_of(model, setting), model, setting, Results.FIRST)
    try:
        with torch.no_grad(), ExitStack() as stack:
            for module in model.eval().modules():
                stack.enter_context(uncached(module))
            whole(*tried)
    except Exception as error:
        bare = [] if setting.types is None else [name for name in setting.types.nodes if name not in setting.in_columns]
        remedy = f"; nodes {bare[0]!r} have no features, embedding={{{bare[0]!r}: 64}} trains some" if bare else ""
        raise ModelError(
            f"{type(model).__name__}: its lazily sized parameters cannot be given their sizes by a run on a few "
            f"made-up rows: {first_line(error)}{remedy}"
        ) from error
    finally:
        for module, training in modes:
            module.training = training


@_exclusively()
def trace(model: nn.Module, assembly: Assembly) -> Value:
    """Return the output of ``model`` as a value. Raises ModelError that says what prevents it."""
    setting, assembly.lower_as_it_is = assembly.setting, lower_as_it_is
    kind, types, columns = type(model).__name__, setting.types, setting.in_columns
    way = _call_convention_of(model, setting)
    spaces = () if types is None else setting.outputs_of or (types.labelled,)
    modes = [(module, module.training) for module in model.modules()]
    as_given = model.training
    try:
        model.train(setting.training)
        if as_given:  # parts in eval mode of a model in training mode are frozen
            for module, training in modes:
                module.training &= training
        results = setting.results if setting.training else Results.FIRST
        made = partial(_with_small_inputs, way, model, setting, results, () if way.numbered else spaces)
        trained_rows = len(columns) if setting.embedding_columns else 0
        whole, calls = calls_of(setting, (model, setting.training, results), kind, made, rows=trained_rows)
        assembly.cut_off, assembly.reached = calls.cut_off, calls.reached
        assembly.inputs_cut_off = frozenset(name for at, name in enumerate(columns) if at in calls.inputs_cut_off)
        edges: list[Any] = [Graph(), EdgeInput(EdgeData.WEIGHT), EdgeInput(EdgeData.FEATURES)]
        if types is not None and way.numbered:
            edges = [Graph(), EdgeKinds()]
        elif types is not None:
            edges = [Graph(relation=one) for one in types.edges]
            edges += [EdgeInput(data, one) for data, one, _ in _carried_by_types(types, way.taken)]
        calling = Interpreter(whole, assembly)
        found = calling.run(calls, [*map(assembly.features, columns), *edges])
        if types is None:
            assembly.traced = calls.graph, calling.known, calls.constants
        for space, rows_of in zip(spaces, (found, assembly.second), strict=False):
            if rows_of is None or rows_of.space != space:
                rows = "nothing" if rows_of is None else f"rows of {rows_of.space!r}"
                raise ModelError(f"model {kind} gives {rows}, needed are those of {space!r}")
        return found
    except Exception as error:
        where = place_in_model(reversed([*walk_tb(error.__traceback__)]))
        takes_all = not way.as_data and {"x", "edge_index"} <= _arguments_of(model) and not _is_called_by_type(model)
        if types is not None and len(types.nodes) == 1 and takes_all and not way.numbered:
            raise ModelError(
                f"model {kind} is given rows and edges by type, as edges have types, and cannot be taken apart: "
                f"{error}; let its forward take (x, edge_index, edge_type), or leave types that are numbers out, by "
                "del data.edge_type or drop_edge_data=True"
            ) from error
        if isinstance(error, ModelError):
            with_place(error, where)
            error.args = (f"{error}{_own_rows_advice(model, setting)}",)
        if isinstance(error, OocError):  # the weights may be the store's
            raise
        called = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
        reason = next((why for name, why in _NOT_OF_ONE_GRAPH.items() if name in called), reason_of(error))
        if way.as_data and isinstance(error, AttributeError):
            reason += "; data has x, edge_index and what edges carry"
        if own := _own_rows_advice(model, setting):
            reason += own
        elif bare := [name for name in (types.nodes if types else ()) if name not in columns]:
            reason += f"; nodes {bare[0]!r} have no features: embedding={{{bare[0]!r}: 64}} trains some"
        raise with_place(ModelError(f"model {kind} cannot be taken apart: {reason}"), where) from error
    finally:
        for module, training in modes:
            module.training = training


def _own_rows_advice(model: nn.Module, setting: Setting) -> str:
    """Return advice for a matrix in the model that has a row for each node, which does not match the rows of a tile."""
    counts = {"": setting.num_nodes} if setting.types is None else setting.types.nodes
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        for kind in () if is_lazy(one) or one.dim() != 2 else (kind for kind in counts if counts[kind] == len(one)):
            if not one.requires_grad:
                return f"; {name} has a row for each node, and belongs into the data, as columns of x"
            columns = one.shape[1] if setting.types is None else {kind: one.shape[1]}
            return f"; {name} has a row for each node: embedding={columns} trains such, and gives them in x"
    return ""


def takes_data(model: nn.Module) -> bool:
    """Whether forward must be given one argument, which by its name or type is all of a graph as PyG has it."""
    given = inspect.signature(model.forward).parameters.values()
    needed = [one for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(needed) != 1:
        return False
    (one,) = needed
    kind = one.annotation if isinstance(one.annotation, str) else getattr(one.annotation, "__name__", "")
    return one.name in _NAMES_OF_DATA or kind.endswith(("Data", "Batch"))


def edge_arguments(
    model: nn.Module, offered: Collection[EdgeData], weights_name: str, *, by_type: bool = False
) -> dict[EdgeData, str]:
    """Return the forward's arguments for the edge data in ``offered``, or their names in PyG's data, if it takes that.
    ``by_type``: arguments are dictionaries."""
    usual = ARGUMENTS | {EdgeData.WEIGHT: weights_name}
    if takes_data(model):
        return {data: usual[data] for data in offered}
    names, found = _arguments_of(model), dict[EdgeData, str]()
    for data in EdgeData:
        forms = (f"{ARGUMENTS[data]}_dict", ARGUMENTS[data]) if by_type else (ARGUMENTS[data], usual[data])
        for name in forms:
            if data in offered and name in names:
                found.setdefault(data, name)
    return found


def arranged(model: nn.Module, inputs: Inputs, given: Collection[str]) -> tuple[Inputs, tuple[str, ...]]:
    """Return the ``inputs``, without names where the forward has no such argument; and the names of the arguments that
    are rows and edges, if it takes them, beside those ``given``; empty if these are the first two."""
    own = {"x", *_arguments_of(model)}
    inputs = [(name if name in own else "", columns, whole) for name, columns, whole in inputs]
    of_nodes = {name for name, *_ in inputs}
    has_x, given = not inputs or "x" in of_nodes, {*given, *of_nodes} - {"x"}
    parameters = inspect.signature(model.forward).parameters
    only_by_name = {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    if isinstance(model, GraphSequential):
        needed = named = [*model.signature.param_dict]
    elif any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
        return inputs, ()
    else:
        named = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD]
        needed = [name for name in named if parameters[name].default is inspect.Parameter.empty]
    free = [name for name in named if name not in given]
    edges = [name for name in free if _NAMES_OF_EDGES.search(name)][:1]
    rows = [name for name in free if name not in (*edges, "batch")][: int(has_x)]
    others = [name for name in free if name not in (*rows, "batch") and name in needed]
    found = (*rows, *(edges or others[:1]))
    if not rows and of_nodes > {"x"}:  # all its node inputs are beside x
        inputs = [(name if name != "x" else "", columns, whole) for name, columns, whole in inputs]
    elif len(rows) < has_x:
        return inputs, ()
    by_place = [*found] == named[:2] and len(found) == 2
    return inputs, () if by_place and named[1] not in only_by_name else found


def asked_for(model: nn.Module, offered: Collection[str] = ()) -> set[str]:
    """Return the names of forward's arguments; or, if it is given data, the names that the model's methods may ask the
    data for, including ``offered`` names that are a text with a number, as ``data[f"x{i}"]``."""
    if not takes_data(model):
        return _arguments_of(model)
    own = (kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
    codes = [method.__code__ for kind in own for method in vars(kind).values() if hasattr(method, "__code__")]
    for code in codes:  # including nested ones, as of comprehensions
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    texts = {text for code in codes for text in code.co_consts if isinstance(text, str)}
    numbered = {name for name in offered if name[-1:].isdigit() and name.rstrip("0123456789") in texts}
    return texts.union(numbered, *(code.co_names for code in codes))


def _carried_by_types(types: Types, taken: Collection[EdgeData]) -> list[tuple[EdgeData, EdgeType, int]]:
    """Return which edge types carry each of the ``taken`` data, and how many features."""
    weights = [(EdgeData.WEIGHT, one, 0) for one in types.edges if one in types.weighted]
    features = [(EdgeData.FEATURES, one, types.edge_features[one]) for one in types.edges if one in types.edge_features]
    return [carried for carried in (*weights, *features) if carried[0] in taken]


def _arguments_of(model: nn.Module) -> set[str]:
    """Return the names of forward's arguments."""
    if isinstance(model, GraphSequential):
        return set(model.signature.param_dict)
    return set(inspect.signature(model.forward).parameters)


def _is_called_by_type(model: nn.Module) -> bool:
    """Whether forward takes dictionaries by type; the results of ``to_hetero`` do so under other names."""
    calls = model.graph.nodes if isinstance(model, fx.GraphModule) else ()
    if isinstance(model, HeteroConv) or any(getattr(node.target, "__name__", "") == "get_dict" for node in calls):
        return True
    return "edge_index_dict" in _arguments_of(model)


def _requires_batch(model: nn.Module) -> bool:
    """Whether it requires the argument ``batch``."""
    batch = inspect.signature(model.forward).parameters.get("batch")
    return batch is not None and batch.default is inspect.Parameter.empty
