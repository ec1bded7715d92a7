# SPDX-License-Identifier: Apache-2.0
"""From a module to values: its forward is traced with torch.fx, and what the trace calls is looked up.

Convolutions, norms and layers of torch.nn are taken as they are; all other modules are traced through, so that
what remains is a list of calls. Each is a convolution, a norm, dropout, a linear map, or a function of rows; what is
none of these is refused by its name.
"""

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from traceback import walk_tb
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn import HeteroBatchNorm, HeteroLayerNorm, HeteroLinear, MessageNorm, MessagePassing
from torch_geometric.nn import Sequential as GraphSequential
from torch_geometric.nn.models.jumping_knowledge import JumpingKnowledge
from torch_geometric.utils import degree, scatter

from ooc.errors import ModelError, OocError
from ooc.model.layers.convolutions import lower_convolution
from ooc.model.layers.global_attention import lower_global_attention
from ooc.model.layers.layer import ARGUMENTS, EdgeInput, EdgeKinds, Graph, Layer, layer_of
from ooc.model.layers.opaque import lower_opaque
from ooc.model.layers.propagation import OfEdges, lower_propagation
from ooc.model.lowering.assembly import Assembly, Results, first_line
from ooc.model.lowering.norms import NORMS, lower_hetero_batch_norm, lower_norm
from ooc.model.lowering.plain_forwards import GLOBAL_ATTENTIONS
from ooc.model.lowering.rowwise import (
    HEAVY_FUNCTIONS,
    IN_PLACE,
    OF_NO_NUMBERS,
    OF_SEVERAL,
    ROWWISE_FUNCTIONS,
    ROWWISE_METHODS,
    ROWWISE_MODULES,
    VIEWS,
    WHOLE,
)
from ooc.model.lowering.symbolic import (
    LINEAR,
    Calls,
    attribute,
    join_relations,
    place_in_model,
    place_of_node,
    replaced_functions,
    small_inputs,
    small_inputs_of_relations,
    small_inputs_of_types,
    small_rows,
    writes_in_place,
)
from ooc.model.lowering.values import Codes, Dense, Features, RowCount, Rowwise, Sum, Value
from ooc.plan.workload import EdgeData
from ooc.storage.types import EdgeType, Types

_COUNTED = (
    "it asks for the number of rows by len(), which is another one for every tile; what looks at all nodes at once has "
    "to be a norm or a graph convolution"
)


_WIDER = 1.5
"""Times the columns of what a convolution is given: rows of more are not gathered where it runs as a whole."""
_EDGE_TYPE = "edge_type"
"""The argument of models that take all edges at once and the numbers of their types."""


class _WiderError(ModelError):
    """Of a convolution of which too much would be gathered."""


@dataclass(frozen=True)
class Free:
    """Something that depends on parameters alone, computed whenever it is used."""

    evaluate: Callable[[], Any]
    parameters: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True)
class OneGraph:
    """To which graph each row belongs: to the only one."""


@dataclass(frozen=True)
class OneBatch:
    """All rows as a batch of one."""

    rows: Value


@dataclass(frozen=True)
class Parts:
    """Several results of one function of rows, or truths, which are not kept by themselves."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Value, ...]
    parameters: tuple[nn.Parameter, ...]


class _Whole(nn.Module):
    """A model called as every model here is: with features, edges, and what these carry, by the names of ``taken``;
    with ``batch``, if it must be told to which graph each row belongs. Where it gives several results, it is what
    ``results`` says."""

    def __init__(self, model: nn.Module, taken: Mapping[EdgeData, str], *, batch: bool, results: Results) -> None:
        super().__init__()
        self.model = model
        self.taken = taken
        self.batch = batch
        self.results = results

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        carried = {EdgeData.WEIGHT: edge_weight, EdgeData.FEATURES: edge_attr}
        given = {name: carried[data] for data, name in self.taken.items()}
        if self.batch:
            given["batch"] = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        return chosen(self.model(x, edge_index, **given), self.results)


def chosen(output: Any, results: Results, spaces: Sequence[str] = ()) -> Tensor:
    """What is meant of what a model gives, where that may be by type of nodes the rows of one type, or of two."""

    def of_type(one: Any) -> Any:
        if not spaces or (not isinstance(one, dict) and len(spaces) == 1):
            return one
        if missing := [space for space in spaces if not isinstance(one, dict) or space not in one]:
            raise ModelError(f"the model gives nothing for {missing[0]!r}, of whose nodes rows are needed")
        return both_types(*(one[space] for space in spaces)) if len(spaces) == 2 else one[spaces[0]]

    several = isinstance(output, (tuple, list))
    if several and len(spaces) == 2:
        raise ModelError("the model gives several results, of which rows of two types of nodes are needed")
    first: Tensor = of_type(output[0] if several else output)
    return side_by_side(*map(of_type, output)) if several and results is Results.ALL else first


def side_by_side(*results: Any) -> Tensor:
    """A model's results as one matrix, in one call of a trace."""
    if isinstance(results[0], fx.Proxy):
        together: Any = results[0].tracer.create_proxy("call_function", side_by_side, results, {})
        return cast(Tensor, together)
    return torch.cat(results, dim=1)


def both_types(first: Any, second: Any) -> Tensor:
    """The rows of two types of nodes, in one call of a trace."""
    if isinstance(first, fx.Proxy):
        together: Any = first.tracer.create_proxy("call_function", both_types, (first, second), {})
        return cast(Tensor, together)
    return torch.cat((first, second))


class _WholeOfTypes(nn.Module):
    """A model called as those for graphs with types are: with dictionaries by type of rows, of edges, and of what edges
    carry. ``places``: argument and type of each of the tensors that ``forward`` takes one by one. Of what the model
    gives, the rows of the types ``spaces``; where it gives several results, what ``results`` says."""

    def __init__(
        self, model: nn.Module, places: Sequence[tuple[str, Any]], spaces: Sequence[str], results: Results
    ) -> None:
        super().__init__()
        self.model = model
        self.places = places
        self.spaces, self.results = spaces, results

    def call(self, *given: Tensor) -> Tensor:
        arguments: dict[str, dict[Any, Tensor]] = {"x_dict": {}, "edge_index_dict": {}}
        for (name, kind), one in zip(self.places, given, strict=True):
            arguments.setdefault(name, {})[kind] = one
        output = self.model(arguments.pop("x_dict"), arguments.pop("edge_index_dict"), **arguments)
        return chosen(output, self.results, self.spaces)


def _with_arguments(kind: type[nn.Module], names: Sequence[str], *args: Any) -> nn.Module:
    """A module whose ``call`` is given so many tensors, each an argument of its own, as torch.fx wants them."""
    forward = eval(f"lambda self, {', '.join(names)}: self.call({', '.join(names)})")
    whole: nn.Module = type("_Whole", (kind,), {"forward": forward})(*args)
    return whole


class _Opened(nn.Module):
    """A convolution that is given so many tensors, by the ``names`` of its arguments, and what is ``plain``."""

    def __init__(self, conv: MessagePassing, names: Sequence[str], plain: Mapping[str, Any]) -> None:
        super().__init__()
        self.conv = conv
        self.names, self.plain = names, plain

    def call(self, *given: Tensor) -> Any:
        return self.conv(**dict(zip(self.names, given, strict=True)), **self.plain)


class _WholeOfRelations(nn.Module):
    """A model of one type of nodes called with all edges at once and the numbers of their types."""

    def __init__(self, model: nn.Module, results: Results) -> None:
        super().__init__()
        self.model, self.results = model, results

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return chosen(self.model(x, edge_index, edge_type=edge_type), self.results)


def trace(model: nn.Module, assembly: Assembly) -> Value:
    """The output of ``model`` as a value; ModelError says what is in the way."""
    kind, types = type(model).__name__, assembly.setting.types
    taken = _edge_arguments(model, assembly.setting.edge_data, by_type=types is not None)
    numbered = types is not None and len(types.nodes) == 1 and _EDGE_TYPE in _arguments_of(model)
    batch = types is None and _must_be_told_batch(model)
    try:
        given = [_EDGE_TYPE] if numbered else [*taken.values(), *["batch"] * batch]
        inspect.signature(model.forward).bind(None, None, **dict.fromkeys(given))
    except TypeError as error:
        arguments = "(x_dict, edge_index_dict)" if types else "(x, edge_index)"
        if types is not None and len(types.nodes) == 1:
            arguments += ", or (x, edge_index, edge_type)"
        there = " and ".join(ARGUMENTS[one] for one in EdgeData if one in assembly.setting.edge_data)
        more = f", and edge_weight or edge_attr where the store has them, here {there or 'neither'}"
        more = more.replace("edge_weight or edge_attr", "edge_weight_dict or edge_attr_dict") if types else more
        raise ModelError(f"model {kind} is not supported: its forward must take {arguments}{more}") from error
    spaces = () if types is None else assembly.setting.outputs_of or (types.labelled,)
    columns, modes = assembly.setting.in_columns, [(module, module.training) for module in model.modules()]
    as_given = model.training
    try:
        model.train(assembly.setting.training)
        if as_given:  # a model in training mode with parts that are not: these are frozen
            for module, training in modes:
                module.training &= training
        setting = assembly.setting
        results = setting.results if setting.training else Results.FIRST
        known = model, setting.training, results
        if known not in setting.traced:
            place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            dtype = setting.dtype
            whole: nn.Module
            tried: Sequence[Tensor]
            if types is None:
                tried = small_inputs(columns[""], setting.num_edge_features, dtype=dtype, place=place)
                whole = _Whole(model, taken, batch=batch, results=results)
            elif numbered:
                tried = small_inputs_of_relations(types, columns, dtype=dtype, place=place)
                whole = _WholeOfRelations(model, results)
            else:
                carried = _carried_by_types(types, taken)
                places = [("x_dict", name) for name in columns] + [
                    ("edge_index_dict", tuple(one)) for one in types.edges
                ]
                places += [(taken[data], tuple(one)) for data, one, _ in carried]
                widths = [width for _, _, width in carried]
                tried = small_inputs_of_types(types, columns, widths, dtype=dtype, place=place)
                names = [f"given{at}" for at in range(len(places))]
                whole = _with_arguments(_WholeOfTypes, names, model, places, spaces, results)
            trained_rows = len(columns) if setting.embedding_columns else 0
            calls = Calls(whole, kind, tried, training=setting.training, rows=trained_rows)
            setting.traced[known] = whole, calls
        whole, calls = setting.traced[known]
        assembly.cut_off, assembly.reached = calls.cut_off, calls.reached
        assembly.inputs_cut_off = frozenset(name for at, name in enumerate(columns) if at in calls.inputs_cut_off)
        if types is not None:
            edges: list[Any] = [Graph(), EdgeKinds()]
            if not numbered:
                edges = [Graph(relation=one) for one in types.edges]
                edges += [EdgeInput(data, one) for data, one, _ in _carried_by_types(types, taken)]
            found = _Interpreter(whole, assembly).run(calls, [*map(assembly.features, columns), *edges])
            for space, rows_of in zip(spaces, (found, assembly.second), strict=False):
                if rows_of is None or rows_of.space != space:
                    rows = "nothing" if rows_of is None else f"rows of {rows_of.space!r}"
                    raise ModelError(f"model {kind} gives {rows}, needed are those of {space!r}")
            return found
        inputs = [EdgeInput(data) for data in (EdgeData.WEIGHT, EdgeData.FEATURES)]
        calling = _Interpreter(whole, assembly)
        found = calling.run(calls, [assembly.features(), Graph(), *inputs])
        assembly.traced = calls.graph, calling.known, calls.constants
        return found
    except Exception as error:
        where = place_in_model(reversed([*walk_tb(error.__traceback__)]))
        if isinstance(error, ModelError):
            _placed(error, where)
        if isinstance(error, OocError):  # of the store, it may be
            raise
        bare = set() if types is None else {*types.nodes} - {*columns}
        if isinstance(error, KeyError) and (name := error.args[0]) in bare:
            told = f"nodes {name!r} have no features; train an embedding of them, embedding={{{name!r}: 64}}"
            raise _placed(ModelError(f"model {kind} cannot be taken apart: {told}"), where) from error
        reason = _COUNTED if str(error).startswith("'len' is not supported") else first_line(error)
        if "Proxy" in str(error) or isinstance(error, NotImplementedError):
            reason = reason.replace("'Proxy' object", "'Proxy'").replace("'Proxy'", "a stand-in for a tensor")
            reason += (
                "; values and numbers of rows are not known here: tensors go to tensors' functions, edges to layers"
            )
        raise _placed(ModelError(f"model {kind} cannot be taken apart: {reason}"), where) from error
    finally:
        for module, training in modes:
            module.training = training


def _placed(error: ModelError, place: str) -> ModelError:
    """``error``, which now names the place in the model that it is about, the innermost that is known."""
    if place and not error.place:
        error.args = (f"{error} (in {place})",)
        error.place = place
    return error


def _edge_arguments(model: nn.Module, offered: Collection[EdgeData], *, by_type: bool) -> dict[EdgeData, str]:
    """What of ``offered`` the model's forward has an argument for, and which; ``by_type``: a dictionary."""
    names, found = _arguments_of(model), dict[EdgeData, str]()
    for data in EdgeData:
        forms = (f"{ARGUMENTS[data]}_dict", ARGUMENTS[data]) if by_type else (ARGUMENTS[data],)
        for name in forms:
            if data in offered and name in names:
                found.setdefault(data, name)
    return found


def _carried_by_types(types: Types, taken: Collection[EdgeData]) -> list[tuple[EdgeData, EdgeType, int]]:
    """What of ``taken`` edges of which types carry, and how many features."""
    weights = [(EdgeData.WEIGHT, one, 0) for one in types.edges if one in types.weighted]
    features = [(EdgeData.FEATURES, one, types.edge_features[one]) for one in types.edges if one in types.edge_features]
    return [carried for carried in (*weights, *features) if carried[0] in taken]


def _arguments_of(model: nn.Module) -> set[str]:
    """The names that its forward's arguments have."""
    if isinstance(model, GraphSequential):
        return set(model.signature.param_dict)
    return set(inspect.signature(model.forward).parameters)


def _must_be_told_batch(model: nn.Module) -> bool:
    """Whether it takes ``batch`` and cannot do without."""
    if isinstance(model, GraphSequential):
        return False
    batch = inspect.signature(model.forward).parameters.get("batch")
    return batch is not None and batch.default is inspect.Parameter.empty


class _Interpreter:
    """Runs a trace on values instead of tensors."""

    def __init__(self, whole: nn.Module, assembly: Assembly) -> None:
        self._modules = dict(whole.named_modules())
        self._name = type(self._modules.get("model", whole)).__name__
        self._whole = whole
        self._assembly = assembly
        self.known: dict[fx.Node, Any] = {}
        self._memory: dict[fx.Node, frozenset[fx.Node]] = {}
        """By node, whose results may lie in the same memory as its own."""

    def run(self, calls: Calls, inputs: Sequence[Any]) -> Value:
        """What the module, which makes these calls, gives for ``inputs``."""
        given = iter(inputs)
        for node in calls.nodes:
            try:
                result = next(given) if node.op == "placeholder" else self._result(node)
            except ModelError as error:
                _placed(error, place_of_node(node))
                raise
            if node.op == "output":
                if not isinstance(result, Value) or len(result.tail) != 1:
                    raise ModelError(
                        f"what forward of {self._name} gives is not one row of numbers a node{_remedy(result)}"
                    )
                return result
            self.known[node] = result
            self._memory[node] = self._memory_of(node)
        raise AssertionError("a trace ends with its output")

    def _result(self, node: fx.Node) -> Any:
        """What a node of the trace comes to."""
        match node.op:
            case "get_attr":
                found = attribute(self._whole, str(node.target))
                return Free(lambda: found, (found,) if isinstance(found, nn.Parameter) else ())
            case "call_module":
                return self._call_module(node)
            case "call_function" | "call_method":
                return self._call(node)
            case _:
                (result,) = node.args
                return fx.map_arg(result, self._look_up)

    def _apply_module(self, module: nn.Module, rows: Value) -> Value:
        """What a module inside a convolution gives, called with rows alone."""
        setting = self._assembly.setting
        known = module, rows.tail, setting.training
        if known not in setting.traced:
            part = nn.Sequential(OrderedDict(model=module))
            place = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
            tried = small_rows(rows.tail, dtype=setting.dtype, place=place)
            setting.traced[known] = part, Calls(part, type(module).__name__, [tried], training=setting.training)
        part, calls = setting.traced[known]
        return _Interpreter(part, self._assembly).run(calls, [rows])

    def _run_as_it_is(self, conv: MessagePassing, where: str, args: Any, kwargs: Any) -> Value:
        """What a convolution without a formula gives: of its forward no more is run as it is than what looks at edges,
        where a trace can tell, and else all of it; all of it, too, where that can be and gathers narrower rows."""
        assembly, traced = self._assembly, self._assembly.setting.traced
        layer, rows = layer_of(conv, where, args, kwargs)
        key = conv, "opened", conv.training, str((layer.tails, layer.codes, layer.carried, layer.plain))
        must_open = *key, "as nothing else can be"
        as_a_whole = partial(lower_opaque, conv, where, args, kwargs, assembly)
        try:
            if traced.get(key, key) is not None:
                with assembly.attempt():
                    if key not in traced:
                        traced[key] = self._calls_of(conv, layer)
                    found, gathered = _OfConvolution(traced[key], layer, assembly).run_on(rows)
                    if must_open in traced or gathered <= _WIDER * sum(map(prod, layer.tails.values())):
                        return found
                    raise _WiderError(f"{where} would gather {gathered} columns")
        except _WiderError:
            try:
                with assembly.attempt():
                    found = as_a_whole()
                traced[key] = None
                return found
            except ModelError:
                traced[must_open] = True
            return _OfConvolution(traced[key], layer, assembly).run_on(rows)[0]
        except Exception as error:  # of the user's code, which may raise anything where stand-ins are given
            if isinstance(error, OocError) and not isinstance(error, ModelError):
                raise
            traced[key] = None
        return as_a_whole()

    def _calls_of(self, conv: MessagePassing, layer: Layer) -> tuple[nn.Module, Calls]:
        """Of the layer, a convolution: what it is in, and what its forward calls."""
        setting = self._assembly.setting
        given: dict[str, Any] = {"dtype": setting.dtype, "place": torch.device("cpu")}
        _, edge_index, weight, features = small_inputs(1, setting.num_edge_features, **given)
        tried = [small_rows(tail, **given) for tail in layer.tails.values()]
        tried = [(x > 0).long() if name in layer.codes else x for name, x in zip(layer.rows, tried, strict=True)]
        carried = {EdgeData.WEIGHT: weight, EdgeData.FEATURES: features.abs()}
        tried += [edge_index, *(one.of(carried[one.data]) for one in layer.carried.values())]
        names = [*layer.rows, layer.edges, *layer.carried]
        arguments = [f"{'x' if at < len(layer.rows) else 'edge'}_{at}" for at in range(len(names))]
        arguments[len(layer.rows)] = "edge_index"
        whole = _with_arguments(_Opened, arguments, conv, names, layer.plain)
        rows = len(layer.rows) - len(layer.codes)
        return whole, Calls(whole, layer.where, tried, training=setting.training, rows=rows, opened=conv)

    # ---- modules -----------------------------------------------------------------------------------------

    def _call_module(self, node: fx.Node) -> Any:
        target = str(node.target)
        module = self._modules[target]
        kind = type(module)
        where = f"{kind.__name__} ({target.removeprefix('model.')})" if target != "model" else f"{kind.__name__}"
        args, kwargs = self._arguments(node)
        assembly = self._assembly
        if isinstance(module, MessagePassing):
            as_it_is = partial(self._run_as_it_is, module)
            return lower_convolution(module, where, args, kwargs, assembly, trace=self._apply_module, as_it_is=as_it_is)
        if any("forward" in replaced_functions(part) for part in module.modules()):
            raise ModelError(f"{where}: another forward than its class's, set on the instance, is not supported")
        if any(isinstance(a, (Graph, EdgeInput, EdgeKinds)) for a in (*args, *kwargs.values())):
            return self._look_at_edges(node, module, where, args, kwargs)
        if kind is JumpingKnowledge:
            return self._jump(module, where, args[0])
        if kind is MessageNorm and len(args) == 2 and all(isinstance(arg, Value) for arg in args) and not kwargs:
            return assembly.rowwise(where, lambda *rows: module(*rows), args, tuple(module.parameters()))
        if any(isinstance(a, Codes) for a in (*args, *kwargs.values())):
            return self._by_codes(module, where, args, kwargs)
        if kind in OF_SEVERAL:
            if module.training and getattr(module, "dropout", 0.0):
                raise ModelError(f"{where}: dropout={module.dropout} inside is not supported; set it to 0")
            return self._apply(where, module, False, args, kwargs)
        source = args[0] if args else None
        if isinstance(module, GLOBAL_ATTENTIONS) and len(args) == 1 and isinstance(source, OneBatch) and not kwargs:
            return OneBatch(lower_global_attention(module, where, source.rows, assembly))
        others = [a for a in (*args[1:], *kwargs.values()) if a is not None]
        told = isinstance(module, NORMS) and others == [OneGraph()]
        if not isinstance(source, Value) or (others and not told):
            raise ModelError(f"{where} is called in a way that is not supported")
        if isinstance(module, NORMS):
            return lower_norm(module, where, source, assembly, told=told)
        if kind is nn.Identity:
            return source
        if kind is nn.Dropout:
            self._check_in_place(node, where, bool(module.inplace))
            return assembly.dropout(source, float(module.p)) if module.training else source
        if kind in LINEAR:
            return self._linear(source, module.weight, module.bias, where)
        if is_parametrized(module):
            raise ModelError(
                f"{where} is not supported: its weights are computed from others; "
                "torch.nn.utils.parametrize.remove_parametrizations keeps them as they are"
            )
        if kind not in ROWWISE_MODULES:
            raise ModelError(f"{where} is not supported: it is not known to work row by row")
        in_place = bool(getattr(module, "inplace", False))
        self._check_in_place(node, where, in_place)
        if kind in (nn.ReLU, nn.LeakyReLU):
            return assembly.rectified(source, None if kind is nn.ReLU else float(module.negative_slope))
        parameters = tuple(module.parameters())
        return assembly.rowwise(where, lambda x: module(x.clone() if in_place else x), [source], parameters)

    def _look_at_edges(
        self, node: fx.Node, module: nn.Module, where: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """What a module that is no graph convolution makes of the edges: it runs as it is. Where it gives several
        results, those that are asked for."""
        if self._assembly.setting.types is not None:
            raise ModelError(f"{where} is given the edges and is no graph convolution")
        if not any(isinstance(one, (Value, Codes)) for one in (*args, *kwargs.values())):
            raise ModelError(
                f"{where} is given what edges carry, and no rows; a network of these belongs into the convolution: a "
                "subclass whose forward calls it"
            )
        args, kwargs = map_aggregate((args, kwargs), lambda one: None if isinstance(one, OneGraph) else one)
        users = [user for user in node.users if user.users]
        keys: set[Any] = {user.args[1] if user.target is operator.getitem else None for user in users}
        if not keys or not all(type(key) is int for key in keys):
            return lower_opaque(module, where, args, kwargs, self._assembly)
        return {key: lower_opaque(module, where, args, kwargs, self._assembly, part=key) for key in keys}

    def _by_codes(self, module: nn.Module, where: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
        """What a module gives that looks something up by whole numbers of rows."""
        given, parameters = [*args, *kwargs.values()], tuple(module.parameters())
        codes = given[-1]
        if isinstance(codes, Codes) and not any(isinstance(one, Codes) for one in given[:-1]):
            is_plain = type(module) is nn.Embedding and module.max_norm is None and not module.sparse
            if is_plain and not module.scale_grad_by_freq and len(given) == 1:
                return self._assembly.rowwise(where, lambda rows: module(codes.of(rows)), [codes.rows], parameters)
            if len(given) == 2 and isinstance(given[0], Value):
                inputs, is_linear = [given[0], codes.rows], type(module) is HeteroLinear
                if type(module) is HeteroBatchNorm:
                    return lower_hetero_batch_norm(module, where, given[0], codes, self._assembly)
                if type(module) is HeteroLayerNorm or (is_linear and not module.is_sorted):
                    return self._assembly.rowwise(
                        where, lambda x, rows: module(x, codes.of(rows)), inputs, parameters, heavy=is_linear
                    )
        raise ModelError(f"{where} is not supported with whole numbers of rows as they are given")

    def _jump(self, module: JumpingKnowledge, where: str, values: Any) -> Value:
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, Value) for value in values):
            raise ModelError(f"{where} is not given a list of matrices")
        parameters, heavy = tuple(module.parameters()), module.lstm is not None
        return self._assembly.rowwise(where, lambda *rows: module(list(rows)), list(values), parameters, heavy=heavy)

    def _linear(self, source: Value, weight: Any, bias: Any, where: str) -> Value:
        if not isinstance(weight, nn.Parameter) or not (bias is None or isinstance(bias, nn.Parameter)):
            raise ModelError(f"{where}: its weight is computed from others, which is not supported")
        if len(source.tail) != 1:
            parameters = (weight,) if bias is None else (weight, bias)
            return self._assembly.rowwise(where, lambda x: F.linear(x, weight, bias), [source], parameters, heavy=True)
        product = self._assembly.linear(source, weight)
        return self._assembly.sum([(1.0, product)], () if bias is None else (bias,))

    # ---- functions ---------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        target = IN_PLACE.get(node.target, node.target)
        name = getattr(node.target, "__name__", str(node.target))
        args, kwargs = self._arguments(node)
        if not args and "input" in kwargs:
            args = [kwargs.pop("input")]
        flips = target in ("flip", torch.flip) and isinstance(args[0], Graph)
        if flips and _leaves(kwargs.get("dims", args[1:])) in ([0], [-2]):  # the ends of edges change places
            return replace(args[0], flipped=not args[0].flipped)
        if target is operator.getitem and isinstance(args[0], dict):
            return args[0].get(args[1])
        if args and isinstance(args[0], EdgeInput) and (step := _step_of_edges(target, args[1:], kwargs)):
            return replace(args[0], steps=(*args[0].steps, step))
        if any(isinstance(a, (Graph, EdgeInput, EdgeKinds)) for a in _leaves((args, kwargs))):
            raise ModelError(
                f"{name} is given the edges; only graph convolutions may look at them, and modules in the model that "
                "do nothing else"
            )
        self._check_in_place(node, name, target is not node.target or bool(kwargs.get("inplace")))
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        if node.op == "call_function" and target in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if target is torch.randn_like and isinstance(args[0], Value):
            if not self._assembly.setting.training:
                raise ModelError("randn_like in evaluation is not supported; draw noise if self.training")
            return self._assembly.noise(args[0])
        if node.op == "call_function" and target is F.linear and isinstance(args[0], Value):
            weight, bias = (lambda input, weight, bias=None: map(_parameter, (weight, bias)))(*args, **kwargs)
            if isinstance(weight, nn.Parameter):
                return self._linear(args[0], weight, bias, name)
        rectified = self._rectified(target, args, kwargs)
        if rectified is not None:
            return rectified
        if target is join_relations:
            return self._joined(*args)
        if target is side_by_side:
            return self._beside(args)
        if target is both_types:
            first, self._assembly.second = args
            return first
        if target is operator.getitem:
            self._check_all_rows(name, *args)
        of_rows = target in ("split", torch.split) and isinstance(args[0], Value)
        if of_rows and kwargs.get("dim", (args[2:] or [0])[0]) in (0, -1 - len(args[0].tail)):
            raise ModelError(f"{name} looks across rows: how many are in a part says where they lie")
        if target in WHOLE and isinstance(args[0], Value):
            return self._codes(name, args[0], partial(_called, target, args[1:], kwargs))
        if target is operator.getitem and isinstance(args[0], Codes):
            return self._codes(name, args[0].rows, lambda rows: args[0].of(rows)[args[1]])
        if target in ("unsqueeze", torch.unsqueeze) and isinstance(args[0], Value) and args[1:] == [0]:
            return OneBatch(args[0])
        if target in ("squeeze", torch.squeeze) and isinstance(args[0], OneBatch) and args[1:] == [0]:
            return args[0].rows
        of_whole = target in (torch.zeros, "new_zeros") and kwargs.get("dtype") is torch.long
        if of_whole and [*map(type, _leaves(args[-1:]))] == [RowCount]:  # a number a row
            return OneGraph()
        if target in ("to", "float", "double") and isinstance(args[0], Value):
            return self._as_it_is(name, args, kwargs)
        if target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        if target is operator.getitem and isinstance(args[0], Parts) and not node.users:
            return None  # of several results one that is not asked for
        if target in ("to", "float", "double") and isinstance(args[0], Parts):
            wanted = [one for one in args if one != torch.device("cpu")]
            return self._apply(name, target, True, wanted, kwargs) if len(wanted) > 1 or target != "to" else args[0]
        special = self._shape(target, args) if len(args) >= 1 else None
        if special is not None:
            return special
        known = ROWWISE_FUNCTIONS if node.op == "call_function" else ROWWISE_METHODS
        if target not in known:
            values = [a for a in _leaves((args, kwargs)) if isinstance(a, (Value, Parts))]
            if values or node.op == "call_method":
                raise ModelError(f"{name} is not supported: it is not known to work row by row")
        return self._apply(name, target, node.op == "call_method", args, kwargs)

    def _as_it_is(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
        """Rows in the type that they have, where they are."""
        dtype, wanted = self._assembly.setting.dtype, [*args[1:], *kwargs.values()]
        wanted += [{"float": torch.float32, "double": torch.float64}.get(name, dtype)]
        if any(one not in (dtype, torch.device("cpu")) for one in wanted):
            raise ModelError(f"{name}: another type than the model's, {dtype}, is not supported")
        rows: Value = args[0]
        return rows

    def _codes(self, name: str, source: Value, function: Callable[[Tensor], Tensor]) -> Codes:
        """Whole numbers that a function makes of features as they are in the store."""
        if not _is_of_features(source):
            raise ModelError(f"{name}: whole numbers are taken of the store's features, as they are, alone")

        def side_by_side(rows: Tensor) -> Tensor:
            return function(rows).to(rows.dtype).reshape(len(rows), -1)

        tail = function(torch.zeros(1, *source.tail)).shape[1:]
        return Codes(self._assembly.unlearnt(name, side_by_side, [source], whole=True), tuple(tail))

    def _joined(self, found: Sequence[Value], aggr: str) -> Value:
        """What rows get over several types of edges, put together."""
        if aggr in ("sum", "mean") and len(set(found)) == len(found) and all(len(one.tail) == 1 for one in found):
            factor = 1.0 if aggr == "sum" else 1.0 / len(found)
            return self._assembly.sum([(factor, one) for one in found])

        def joined(*rows: Tensor) -> Any:
            return join_relations(list(rows), aggr)

        return self._assembly.rowwise(f"HeteroConv's {aggr}", joined, found)

    def _beside(self, results: Sequence[Any]) -> Value:
        """A model's results side by side; of them, so many columns each."""
        for number, result in enumerate(results):
            if not isinstance(result, Value) or len(result.tail) != 1:
                raise ModelError(f"result {number} of forward of {self._name} is not one row of numbers a node")
        self._assembly.result_columns = tuple(result.columns for result in results)
        return self._assembly.rowwise("the results", lambda *rows: torch.cat(rows, dim=1), results)

    def _check_all_rows(self, name: str, source: Any, key: Any) -> None:
        """A slice of rows has to be of all: few rows, as functions are tried on, do not tell."""
        rows = key[0] if isinstance(key, (tuple, list)) and key else key
        if not isinstance(source, Value) or not isinstance(rows, slice):
            return
        bounds, nodes = (rows.start, rows.stop, rows.step), self._assembly.num_rows(source)
        if all(bound is None or isinstance(bound, int) for bound in bounds) and rows.indices(nodes) != (0, nodes, 1):
            raise ModelError(f"{name} looks across rows: it takes some rows and leaves out others")

    def _dropout(
        self, input: Any, p: float = 0.5, training: bool = True, train: bool = True, inplace: bool = False
    ) -> Value:
        if not isinstance(input, Value):
            raise ModelError("dropout of something that is no matrix of rows is not supported")
        drops = training and train
        if drops and p and not self._assembly.setting.training:
            raise ModelError("dropout in evaluation is not supported; give F.dropout(…, training=self.training)")
        return self._assembly.dropout(input, float(p)) if drops else input

    def _rectified(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
        """ReLU or LeakyReLU of a value; None for anything else."""
        if target in (F.relu, torch.relu, "relu"):
            given = inspect.signature(lambda input, inplace=False: None).bind(*args, **kwargs)
        elif target is F.leaky_relu:
            given = inspect.signature(lambda input, negative_slope=0.01, inplace=False: None).bind(*args, **kwargs)
        else:
            return None
        given.apply_defaults()
        source, slope = given.arguments["input"], given.arguments.get("negative_slope")
        return self._assembly.rectified(source, slope) if isinstance(source, Value) else None

    def _shape(self, target: Any, args: list[Any]) -> Any:
        """What the shape, type and parts of a value are; None for any other question."""
        first, rest = args[0], args[1:]
        if isinstance(first, Value):
            if target == "size" or (target is getattr and rest[0] == "shape"):
                sizes = (RowCount(), *first.tail)
                return sizes[rest[0]] if target == "size" and rest else sizes
            if target == "dim" or (target is getattr and rest[0] == "ndim"):
                return 1 + len(first.tail)
            if target is getattr:
                fixed = {"dtype": self._assembly.setting.dtype, "device": torch.device("cpu")}
                if rest[0] not in fixed:
                    raise ModelError(f"the attribute {rest[0]} of a matrix of rows is not supported")
                return fixed[rest[0]]
        if isinstance(first, Parts) and target in (operator.getitem, getattr):
            of, key = first.function, rest[0]
            return self._rows_or_parts(first.name, lambda *t: target(of(*t), key), first.inputs, first.parameters)
        return None

    def _apply(self, name: str, target: Any, method: bool, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A call of a whitelisted function: a sum, another function of rows, of parameters, or of plain numbers."""
        leaves = _leaves((args, kwargs))
        rows = [leaf.rows if isinstance(leaf, Codes) else leaf for leaf in leaves]
        rows += [value for leaf in leaves if isinstance(leaf, Parts) for value in leaf.inputs]
        values = list(dict.fromkeys(leaf for leaf in rows if isinstance(leaf, Value)))
        free = [leaf for leaf in leaves if isinstance(leaf, (Free, Parts))]
        parameters = tuple(dict.fromkeys(p for leaf in free for p in leaf.parameters))
        of_module = isinstance(target, nn.Module)
        if of_module:
            parameters = tuple(dict.fromkeys((*parameters, *target.parameters())))

        def function(*tensors: Tensor) -> Any:
            given = dict(zip(values, tensors, strict=True))

            def replaced(leaf: Any) -> Any:
                if isinstance(leaf, Value):
                    return given[leaf]
                if isinstance(leaf, Codes):
                    return leaf.of(given[leaf.rows])
                if isinstance(leaf, Parts):
                    return leaf.function(*(given[one] for one in leaf.inputs))
                if isinstance(leaf, Free):
                    return leaf.evaluate()
                return tensors[0].shape[0] if isinstance(leaf, RowCount) else leaf

            a, k = map_aggregate((args, kwargs), replaced)
            return getattr(a[0], target)(*a[1:], **k) if method else target(*a, **k)

        if not values:
            if any(isinstance(leaf, RowCount) for leaf in leaves):
                raise ModelError(f"{name} computes with the number of rows, which is not supported")
            return Free(function, parameters) if free else function()
        summed = self._sum(target, args, kwargs)
        if summed is not None:
            return summed
        heavy = of_module or target in HEAVY_FUNCTIONS
        if of_module or name in OF_NO_NUMBERS or any(isinstance(leaf, Parts) for leaf in leaves):
            return self._rows_or_parts(name, function, values, parameters, heavy=heavy)
        return self._assembly.rowwise(name, function, values, parameters, heavy=heavy)

    def _rows_or_parts(
        self,
        name: str,
        function: Callable[..., Any],
        values: Sequence[Value],
        parameters: Sequence[nn.Parameter],
        *,
        heavy: bool = False,
    ) -> Value | Parts:
        """What a function of rows gives, where that is one matrix of numbers; else what it is part of."""
        with torch.no_grad():
            tried = function(*(torch.zeros(2, *value.tail, dtype=self._assembly.setting.dtype) for value in values))
        if isinstance(tried, Tensor) and tried.dtype == self._assembly.setting.dtype:
            return self._assembly.rowwise(name, function, values, parameters, heavy=heavy)
        if isinstance(tried, Tensor):
            self._assembly.check_truths(name, function, values)
        return Parts(name, function, tuple(values), tuple(parameters))

    def _sum(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
        """Sums and multiples of matrices, which need nothing kept for their gradients."""
        if kwargs or len(args) != 2:
            return None
        sign = {operator.add: 1.0, torch.add: 1.0, "add": 1.0, operator.sub: -1.0, torch.sub: -1.0, "sub": -1.0}
        left, right = args
        if target in sign:
            if isinstance(left, Value) and isinstance(right, Value):
                if left is not right and left.tail == right.tail and len(left.tail) == 1:
                    return self._assembly.sum([(1.0, left), (sign[target], right)])
            elif isinstance(left, Value) and len(left.tail) == sign[target] == 1:
                bias = _parameter(right)
                if bias is not None and left.tail == tuple(bias.shape):
                    return self._assembly.sum([(1.0, left)], (bias,))
        if target in (operator.mul, torch.mul, "mul"):
            value, factor = (left, right) if isinstance(left, Value) else (right, left)
            if isinstance(value, Value) and len(value.tail) == 1 and isinstance(factor, (int, float)):
                return self._assembly.sum([(float(factor), value)])
        return None

    # ---- arguments ---------------------------------------------------------------------------------------

    def _arguments(self, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = map_aggregate((node.args, node.kwargs), self._look_up)
        return list(args), dict(kwargs)

    def _look_up(self, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf not in self.known:
            raise ModelError(f"{leaf.name} is kept from an earlier forward pass, which is not supported")
        return self.known[leaf]

    def _check_in_place(self, node: fx.Node, name: str, in_place: bool) -> None:
        """Writing into a matrix is the same as making a new one only where nobody looks at the old one again."""
        if not in_place:
            return
        operand = node.args[0] if node.args else node.kwargs.get("input")
        kept = Value, OfEdges, EdgeInput, Graph
        if not isinstance(operand, fx.Node) or not isinstance(self.known[operand], kept):
            return
        memory = self._memory[operand]
        shared = operand.target in VIEWS or any(other.op in ("placeholder", "get_attr") for other in memory)
        alike = (other for other in self._memory if memory & self._memory[other])
        if shared or any(user > node for other in alike for user in other.users):
            raise ModelError(f"{name} writes into a matrix that is used again; use it without in-place")

    def _memory_of(self, node: fx.Node) -> frozenset[fx.Node]:
        """Of those whose memory the result of ``node`` may be, itself if it is new."""
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        written = node.target in IN_PLACE or node.kwargs.get("inplace") or getattr(module, "inplace", False)
        viewed = node.target in VIEWS or isinstance(module, (nn.Flatten, nn.Unflatten, JumpingKnowledge))
        inputs = node.all_input_nodes
        if not (written or viewed or any(self.known[one] is self.known[node] for one in inputs)):
            return frozenset([node])
        return frozenset(other for one in inputs for other in self._memory[one])


class _OfConvolution(_Interpreter):
    """Runs what a convolution calls: what looks at edges is put by until all of it is computed together."""

    def __init__(self, traced: tuple[Any, Calls], layer: Layer, assembly: Assembly) -> None:
        whole, self._calls = traced
        super().__init__(whole, assembly)
        self._conv: MessagePassing = whole.conv
        self._layer, self._where = layer, layer.where
        self._steps: dict[fx.Node, OfEdges] = {}

    def run_on(self, rows: Sequence[Value]) -> tuple[Value, int]:
        """What it gives for these, which count as what it is given; and how many columns are gathered for it."""
        layer, assembly = self._layer, self._assembly
        given = dict(zip(layer.rows, rows, strict=True))
        codes = {name: Codes(given[name], layer.tails[name]) for name in layer.codes}
        convolved = [*assembly.convolved, assembly.matrix(self._where, rows[:1])]
        result = self.run(self._calls, [*(given | codes).values(), Graph(layer.flipped), *layer.carried.values()])
        gathered = sum(value.columns for value in assembly.convolved[len(convolved) - 1 :])
        assembly.convolved[:] = convolved
        return result, gathered

    def _result(self, node: fx.Node) -> Any:
        found = _leaves([self.known[one] for one in node.all_input_nodes])
        if node.op == "output" or not any(isinstance(one, (OfEdges, Graph, EdgeInput)) for one in found):
            return super()._result(node)
        step = self._step(node)
        adds_up = step.target in (scatter, degree) and RowCount() in (*step.args[1:], *step.kwargs.values())
        if step.target != "propagate" and not adds_up:
            return step
        rows = next(one for one in self.known.values() if isinstance(one, Value))
        return lower_propagation(self._conv, self._where, step, rows, self._assembly)

    def _step(self, node: fx.Node) -> OfEdges:
        """A call that is put by. What depends on parameters alone is computed from those of the copy that is run."""

        def given(one: fx.Node) -> Any:
            return self._step(one) if isinstance(self.known[one], Free) else self.known[one]

        if node not in self._steps:
            args, kwargs = fx.map_arg((node.args, node.kwargs), given)
            module = self._modules.get(str(node.target)) if node.op == "call_module" else None
            in_place = node.target in IN_PLACE or writes_in_place(node.op, node.target)
            in_place = in_place or bool(kwargs.get("inplace") or getattr(module, "inplace", False))
            self._check_in_place(node, self._where, in_place)
            self._steps[node] = OfEdges(len(self._steps), node.op, node.target, args, kwargs)
        return self._steps[node]


def _called(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rows: Tensor) -> Any:
    """A method by its name, or a function, of ``rows``."""
    return getattr(rows, target)(*args, **kwargs) if isinstance(target, str) else target(rows, *args, **kwargs)


def _is_of_features(value: Value) -> bool:
    """Whether it comes of the store's features, of no parameter and of nothing that is drawn."""
    of_others = isinstance(value, (Rowwise, Sum, Dense)) and not value.parameters
    return isinstance(value, Features) or (of_others and all(map(_is_of_features, value.inputs)))


def _step_of_edges(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """A step of an ``EdgeInput``: some columns, whole numbers of these, or which of the columns is largest."""
    if target is operator.getitem and isinstance(args[0], (tuple, list)) and len(args[0]) == 2:
        rows, columns = args[0]
        return ("__getitem__", ((rows, columns),)) if rows == slice(None) and type(columns) in (int, slice) else None
    if target == "long" and not args and not kwargs:
        return "long", ()
    dim = kwargs.get("dim", args[0] if args else None)
    return ("argmax", (dim,)) if target in ("argmax", torch.argmax) and dim in (1, -1) and len(args) < 2 else None


def _remedy(result: Any) -> str:
    """What to write where this is no matrix of rows."""
    if isinstance(result, dict):
        return "; return the matrices of rows as a tuple, the one that is scored first"
    if isinstance(result, (tuple, list)):
        return "; return one matrix, or with a loss of your own a tuple of matrices, the one that is scored first"
    return ""


def _parameter(argument: Any) -> Any:
    """The parameter that an argument stands for, if it is one."""
    if isinstance(argument, Free) and len(argument.parameters) == 1 and argument.evaluate() is argument.parameters[0]:
        return argument.parameters[0]
    return None


def _leaves(tree: Any) -> list[Any]:
    """What an argument contains, through lists, tuples, dictionaries and slices."""
    found: list[Any] = []
    map_aggregate(tree, found.append)
    return found
