# SPDX-License-Identifier: Apache-2.0
"""The interpreter: runs a trace on values instead of tensors, by looking up each of its calls.

A call is a convolution, a norm, dropout, a linear map, or a function of rows; anything else is refused by name.
"""

import operator
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from math import prod
from traceback import walk_tb
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn import (
    AGNNConv,
    FeaStConv,
    GATConv,
    GATv2Conv,
    HeteroBatchNorm,
    HeteroLayerNorm,
    HeteroLinear,
    MessageNorm,
    MessagePassing,
    SimpleConv,
    SuperGATConv,
)
from torch_geometric.nn.models.jumping_knowledge import JumpingKnowledge

from ooc.errors import ModelError, OocError
from ooc.model.layers.convolutions import lower_convolution
from ooc.model.layers.layer import EdgeInput, EdgeKinds, Graph
from ooc.model.layers.propagation import EdgeCall, lower_propagation
from ooc.model.lowering.assembly import Assembly, first_line
from ooc.model.lowering.calls.functions import Call, Functions
from ooc.model.lowering.calls.rowwise import IN_PLACE, OF_SEVERAL, ROWWISE_MODULES, VIEWS, assigned
from ooc.model.lowering.calls.stand_ins import Computed, Free, Known, OneBatch, OneGraph, Stacked, leaves_of
from ooc.model.lowering.matrices import swaps_ends
from ooc.model.lowering.norms import NORMS, lower_hetero_batch_norm, lower_norm
from ooc.model.lowering.plain_forwards import GLOBAL_ATTENTIONS, lower_global_attention
from ooc.model.lowering.symbolic import (
    CONSTANT,
    LINEAR,
    PLACE,
    Calls,
    attribute,
    calls_of,
    place_in_model,
    replaced_functions,
    small_inputs,
    small_rows,
    writes_in_place,
)
from ooc.model.lowering.values import Codes, RowCount, Value
from ooc.model.lowering.whole import CalledByName, UniformModel, with_arguments
from ooc.plan.workload import EdgeData

_ANY_SHAPE_MODULES = (*LINEAR, *ROWWISE_MODULES)
_REMOVES_LOOPS = (AGNNConv, FeaStConv, GATConv, GATv2Conv, SuperGATConv)
"""Layers that remove self-loops before they add theirs."""
_MATRIX_MAKERS = "sparse_coo_tensor", "sparse_csr_tensor", "to_torch_coo_tensor", "to_torch_csr_tensor", "to_dense_adj"
_PRODUCTS = "matmul", "mm", "spmm", "_sparse_mm", "sparse_mm"

_FIRST_ARGUMENT_NAMES = "condition", "input", "tensors", "size"
"""The names of torch's first arguments."""
_ROWS = Value, RowCount
_OF_EDGES = Graph, EdgeInput, EdgeKinds, EdgeCall


def reason_of(error: Exception) -> str:
    """Return the message of an error in the user's code, with its type; the code was given stand-ins for tensors."""
    text = str(error)
    reason = text if text.startswith("it ") else first_line(error)
    if re.search("Proxy|_StandIn|__array_", text) or isinstance(error, NotImplementedError):
        reason = re.sub("'Proxy'( object)?|_StandIn|Proxy", "a stand-in for a tensor", reason)
        reason += "; values and numbers of rows are not known here: tensors go to tensors' functions, edges to layers"
    return reason


def message_of(error: Exception) -> str:
    """Return the message of an error, and where in the model it was raised."""
    said = str(error) if isinstance(error, ModelError) else reason_of(error)
    place = place_in_model(reversed([*walk_tb(error.__traceback__)]))
    return said if getattr(error, "place", "") or not place else f"{said} (in {place})"


def with_place(error: ModelError, place: str) -> ModelError:
    """Return ``error`` with the place in the model it is about, the innermost one known."""
    if place and not error.place:
        error.args = (f"{error} (in {place})",)
        error.place = place
    return error


class Interpreter:
    """Runs a trace on values instead of tensors."""

    def __init__(self, whole: nn.Module, assembly: Assembly) -> None:
        self._modules = dict(whole.named_modules())
        self._name = type(self._modules.get("model", whole)).__name__
        self.whole = whole
        self._assembly = assembly
        self._functions = Functions(assembly, self._name)
        self.known: dict[fx.Node, Any] = {}
        self._tails: Mapping[fx.Node, Sequence[int]] = {}
        self._drawing: Collection[fx.Node] = ()
        self._free_calls: dict[fx.Node, EdgeCall] = {}
        self._memory: dict[fx.Node, frozenset[fx.Node]] = {}
        """The nodes whose results may share memory with a node's own."""
        self._made_of_edges: Counter[EdgeCall] = Counter()
        """How often modules are called on rows of edges."""

    def run(self, calls: Calls, inputs: Sequence[Any]) -> Value:
        """Return what the module that makes these calls gives for ``inputs``."""
        self._assembly.calls.append(calls)
        self._tails, self._drawing = calls.tails, calls.drawing
        given = iter(inputs)
        for node in calls.nodes:
            try:
                result = next(given) if node.op == "placeholder" else self._result(node)
            except ModelError as error:
                with_place(error, node.meta.get(PLACE, ""))
                raise
            if node.op == "output":
                if isinstance(self.whole, UniformModel) and isinstance(result, Value) and not result.tail:
                    self._assembly.flat_result = True
                    result = self._assembly.rowwise("the result", lambda x: x[:, None], [result])
                if not isinstance(result, Value) or (isinstance(self.whole, UniformModel) and len(result.tail) != 1):
                    raise ModelError(
                        f"what forward of {self._name} gives is not one row of numbers a node{_remedy(result)}"
                    )
                self._warn_of_recomputed_edges()
                return result
            self.known[node] = result
            self._memory[node] = self._nodes_sharing_memory(node)
        raise AssertionError("a trace ends with its output")

    def _warn_of_recomputed_edges(self) -> None:
        """Warn if rows of edges are computed anew from layer to layer, and that is most of the work."""
        once, calls = len(self._made_of_edges), self._made_of_edges.total()
        if calls >= 2 * once > 0:
            warnings.warn(
                f"{self._name} hands rows of edges on from layer to layer, which are not kept: each layer computes "
                f"them from the first on, {calls} calls of modules instead of {once}; with the edges as a type of "
                "nodes they are computed once (docs/types.md, edges with states)",
                RuntimeWarning,
                stacklevel=2,
            )

    def _result(self, node: fx.Node) -> Any:
        """Return the result of a node of the trace."""
        match node.op:
            case "get_attr":
                found = attribute(self.whole, str(node.target))
                if isinstance(found, Tensor) and found.layout is not torch.strided:
                    raise ModelError(
                        f"{str(node.target).removeprefix('model.')} is a sparse matrix that the model keeps; edges "
                        "come as edge_index and edge_weight, of which torch.sparse_coo_tensor may make one in forward"
                    )
                parameters = (found,) if isinstance(found, nn.Parameter) else ()
                return Free(evaluate=lambda known: found, parameters=parameters)
            case "call_module":
                return self._call_module(node)
            case "call_function" | "call_method":
                return self._call(node)
            case _:
                (result,) = node.args
                return fx.map_arg(result, self._look_up)

    def apply_module(self, module: nn.Module, rows: Value) -> Value:
        """Return what a module inside a convolution gives for rows alone."""
        setting = self._assembly.setting

        def made() -> tuple[nn.Module, list[Tensor]]:
            return nn.Sequential(OrderedDict(model=module)), [small_rows(rows.tail, dtype=setting.dtype)]

        part, calls = calls_of(setting, (module, rows.tail, setting.training), type(module).__name__, made)
        return Interpreter(part, self._assembly).run(calls, [rows])

    # ---- modules -----------------------------------------------------------------------------------------

    def _call_module(self, node: fx.Node) -> Any:
        target = str(node.target)
        module = self._modules[target]
        kind = type(module)
        where = f"{kind.__name__} ({target.removeprefix('model.')})" if target != "model" else f"{kind.__name__}"
        args, kwargs = self._arguments(node)
        assembly = self._assembly
        if isinstance(module, MessagePassing):
            if assembly.setting.adj_t:
                args, kwargs = self._take_adjacency_weights(module, where, args, kwargs)
            if any(isinstance(one, (EdgeCall, Free)) for one in leaves_of((args, kwargs))):
                return self._lower_with_edge_calls(node, module, where)
            as_it_is = partial(self._lower_without_formula, node, module)
            return lower_convolution(module, where, args, kwargs, assembly, trace=self.apply_module, as_it_is=as_it_is)
        if any("forward" in replaced_functions(part) for part in module.modules()):
            raise ModelError(f"{where}: another forward than its class's, set on the instance, is not supported")
        if any(isinstance(a, _OF_EDGES) for a in (*args, *kwargs.values())):
            return self._lower_edge_module(node, module, where, args, kwargs)
        if any(isinstance(a, Codes) for a in (*args, *kwargs.values())):
            return self._lower_lookup(module, where, args, kwargs)
        in_place = bool(getattr(module, "inplace", False))
        self._check_in_place(node, where, in_place)
        if args and isinstance(args[0], Free) and isinstance(module, nn.Dropout):
            return self._functions.dropout(args[0], float(module.p)) if module.training and module.p else args[0]
        if args and isinstance(args[0], Free) and kind in _ANY_SHAPE_MODULES and not is_parametrized(module):
            return self._functions.apply(where, module, args, kwargs)
        if not args and "input" in kwargs:  # the form in which torch's modules call it
            args = [kwargs.pop("input")]
        if not isinstance(module, GLOBAL_ATTENTIONS):
            args, kwargs = map_aggregate((args, kwargs), self._functions.stack_batch)
        is_stacked = any(isinstance(one, Stacked) for one in leaves_of((args, kwargs)))
        if kind in OF_SEVERAL or kind in (JumpingKnowledge, MessageNorm) or (is_stacked and kind in _ANY_SHAPE_MODULES):
            if module.training and (dropout := _dropout_inside(module)):
                raise ModelError(f"{where}: dropout={dropout} inside is not supported; set it to 0")
            return self._functions.apply(where, module, args, kwargs)
        source = args[0] if args else None
        if isinstance(module, GLOBAL_ATTENTIONS) and len(args) == 1 and isinstance(source, OneBatch) and not kwargs:
            return OneBatch(lower_global_attention(module, where, source.rows, assembly))
        others = [a for a in (*args[1:], *kwargs.values()) if a is not None]
        has_batch = isinstance(module, NORMS) and others == [OneGraph()]
        if not isinstance(source, Value) or (others and not has_batch):
            raise ModelError(f"{where} is called in a way that is not supported")
        if isinstance(module, NORMS):
            return lower_norm(module, where, source, assembly, has_batch=has_batch)
        if kind is nn.Identity:
            return source
        if kind is nn.Dropout:
            return self._functions.dropout(source, float(module.p), module.training)
        if kind in LINEAR:
            return self._functions.linear(source, module.weight, module.bias, where)
        if is_parametrized(module) and not [*module.parametrizations.buffers()] and not _dropout_inside(module):
            return self._functions.apply(where, module, args, kwargs)
        if is_parametrized(module):
            raise ModelError(
                f"{where} is not supported: its weights are computed from others; "
                "torch.nn.utils.parametrize.remove_parametrizations keeps them as they are"
            )
        if kind not in ROWWISE_MODULES:
            of_floats = "; x is floating-point numbers here, so look categories up by x.long()"
            more = of_floats if isinstance(module, nn.Embedding) else ""
            raise ModelError(f"{where} is not supported: it is not known to work row by row{more}")
        if (activated := self._functions.activation(module, [source], {})) is not None:
            return activated
        parameters = tuple(module.parameters())
        return assembly.rowwise(where, lambda x: module(x.clone() if in_place else x), [source], parameters)

    def _lower_edge_module(
        self, node: fx.Node, module: nn.Module, where: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Lower a module that takes edges but is no graph convolution; it runs as it is."""
        self._check_loops(where)
        if self._assembly.setting.types is not None:
            raise ModelError(f"{where} is given the edges and is no graph convolution")
        carried = next((one for one in args if isinstance(one, EdgeInput)), None)
        if type(module) is nn.Embedding and carried is not None and ("long", ()) not in carried.steps:
            raise ModelError(
                f"{where}: what edges carry is floating-point numbers here, so look categories up by "
                "edge_attr[:, 0].long()"
            )
        is_of_rows = any(isinstance(one, (Value, Codes)) for one in (*args, *kwargs.values()))
        if not is_of_rows or any(isinstance(one, EdgeCall) for one in leaves_of((args, kwargs))):
            return self._lower_edge_call(node, where)
        args, kwargs = map_aggregate((args, kwargs), lambda one: None if isinstance(one, OneGraph) else one)
        return self._lower_without_formula(node, module, where, args, kwargs)

    def _lower_without_formula(
        self, node: fx.Node, module: nn.Module, where: str, args: Sequence[Any], kwargs: Known
    ) -> Any:
        """Lower a convolution without a formula, or another module that takes edges. If it returns several results,
        return those asked for, by number or name; they are computed side by side, with one dropout."""
        lower = partial(self._assembly.lower_as_it_is, module, self._assembly, where, args, kwargs)
        users = [user for user in node.users if user.users]
        asked = [(user.args[1] if user.target is operator.getitem else None, user) for user in users]
        if not asked or not all(type(key) in (int, str) for key, _ in asked):
            return lower()
        keys: dict[Any, fx.Node] = dict(asked)
        tails = {key: self._tails[user] for key, user in keys.items() if user in self._tails}
        found = dict[Any, Any]()
        if len(tails) < len(keys):  # other values are rows of edges
            self._check_drawing(node, where)
            made = self._defer_call(node, where)
            found = {key: made.part(key) for key in keys if key not in tails}
        if not tails:
            return found
        together, widths = lower(parts=tuple(tails)), [*map(prod, tails.values())]
        for at, (key, tail) in enumerate(tails.items()):

            def of_key(rows: Tensor, at: int = at, tail: Sequence[int] = tail) -> Tensor:
                return torch.split(rows, widths, dim=1)[at].reshape(len(rows), *tail)

            found[key] = self._assembly.rowwise(f"result {key!r}", of_key, [together])
        return found

    def _lower_edge_call(self, node: fx.Node, where: str) -> Any:
        """Lower a call of the model itself on edges: rows of nodes, or a call deferred until rows of nodes are made of
        it."""
        if self._assembly.setting.types is not None:
            raise ModelError(
                f"{where} is given the edges in the model's own forward, which is not supported where these have "
                "types; a layer may be given those of one type"
            )
        self._check_drawing(node, where)
        made = self._defer_call(node, where)
        of_rows = any(isinstance(one, _ROWS) for one in leaves_of((made.args, made.kwargs))) or made.is_part
        return self._lower_rows_of_edges(made, self.whole, where) if of_rows and node in self._tails else made

    def _take_adjacency_weights(
        self, conv: MessagePassing, where: str, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a convolution if edges came as ``adj_t``, from which PyG takes weights."""
        setting, forward = self._assembly.setting, signature(conv.forward)
        is_known = type(conv).__module__.startswith("torch_geometric.")
        adds = getattr(conv, "add_self_loops", False) and getattr(conv, "normalize", True)
        adds = adds and type(conv) not in _REMOVES_LOOPS
        self._check_loops(where, adds or not is_known)
        if "weights" not in setting.adj_t or EdgeData.WEIGHT not in setting.edge_data:
            return args, kwargs
        bound = forward.bind(*args, **kwargs)
        if "edge_weight" in forward.parameters:
            if bound.arguments.get("edge_weight") is None and any(isinstance(one, Graph) for one in bound.args):
                bound.arguments["edge_weight"] = EdgeInput(EdgeData.WEIGHT)
        elif conv.fuse:
            raise ModelError(f"{where} takes no weights, which adj_t has; ignore_edge_data='weight' trains without")
        return list(bound.args), bound.kwargs

    def _lower_adjacency_product(self, node: fx.Node, graph: Graph, rows: Value, where: str) -> Any:
        """Lower ``adj_t @ rows``, the sum over in-edges of the sources' rows times the matrix's values."""
        conv = SimpleConv(aggr="sum")
        args, kwargs = self._take_adjacency_weights(conv, where, [rows, graph], {})
        as_it_is = partial(self._lower_without_formula, node, conv)
        return lower_convolution(conv, where, args, kwargs, self._assembly, trace=self.apply_module, as_it_is=as_it_is)

    def _check_loops(self, where: str, adds: bool = True) -> None:
        if adds and "loops" in self._assembly.setting.adj_t:
            raise ModelError(
                f"{where}: adj_t has self-loops, which a layer that adds such counts twice in a matrix of torch's and "
                "once in edge_index: use RemoveSelfLoops before ToSparseTensor, or leave that out, as forward may call "
                "edge_index adj_t"
            )

    def _defer_call(self, node: fx.Node, where: str) -> EdgeCall:
        """Return a deferred call on edges, to be computed when rows of nodes are made of it."""
        self._check_loops(where)
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        self._check_in_place(node, where, writes_in_place(node) or bool(getattr(module, "inplace", False)))
        name = str(node.target).removesuffix("_")  # the method without in-place writes
        is_method = node.op == "call_method" and callable(getattr(Tensor, name, None))
        return EdgeCall(
            len(self.known), node.op, name if is_method else node.target, *self._deferred_arguments(node, where)
        )

    def _check_drawing(self, node: fx.Node, where: str) -> None:
        """Refuse dropout in a deferred call, which is computed anew for everything that is made of it."""
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        of_module = module is not None and module.training and _dropout_inside(module) > 0
        is_unknown = not self._tails and (of_module or node.target in (F.dropout, torch.dropout))
        if node in self._drawing or is_unknown:
            raise ModelError(f"{where}: dropout of what edges carry is not supported outside of a convolution")

    def _lower_with_edge_calls(self, node: fx.Node, conv: MessagePassing, where: str) -> Any:
        """Lower a convolution that is given deferred results of edges, or whose results are asked for by number or
        name; all of it runs as it is."""
        last, (args, kwargs) = self._defer_call(node, where), self._arguments(node)
        users = [user for user in node.users if user.target is operator.getitem and user.users]
        asked: dict[Any, fx.Node] = {user.args[1]: user for user in users}
        if asked and all(type(key) in (int, str) for key in asked):
            self._check_drawing(node, where)
            return {
                key: self._lower_rows_of_edges(last.part(key), conv, where) if user in self._tails else last.part(key)
                for key, user in asked.items()
            }
        given, why = signature(conv.forward).bind(*args, **kwargs).arguments, ""
        of_edges = [name for name in ("edge_index", "edge_weight") if given.get(name) is not None]
        if any(isinstance(given[name], EdgeCall) for name in of_edges) and not getattr(conv, "cached", False):
            try:
                with self._assembly.attempt():
                    return self._open_convolution(conv, where, of_edges, given)
            except Exception as error:  # the user's code may raise anything when given proxies
                if isinstance(error, OocError) and not isinstance(error, ModelError):
                    raise
                why = message_of(error).removeprefix("propagate: ")
        try:
            return self._lower_rows_of_edges(last, conv, where)
        except ModelError as error:
            more = "; it runs as it is, since what it is given of edges is not what the store has but computed of that"
            is_computed = any(isinstance(one, EdgeCall) for one in leaves_of(given))
            raise ModelError(f"{where}: {why}" if why else f"{error}{more * is_computed}") from error

    def _open_convolution(
        self, conv: MessagePassing, where: str, of_edges: Sequence[str], given: Mapping[str, Any]
    ) -> Value:
        """Lower a convolution by its own calls, if the model computes its edges or weights, under these names. As
        ``gcn_norm`` does, these calls may use degrees of sources, which the graph around a row does not tell."""
        setting, rows = self._assembly.setting, [name for name, one in given.items() if isinstance(one, Value)]
        names = [*rows, *of_edges]
        plain = {name: one for name, one in given.items() if name not in names}

        def made() -> tuple[nn.Module, list[Tensor]]:
            small = dict(zip(("x", "edge_index", "edge_weight"), small_inputs(1, 0, dtype=setting.dtype), strict=False))
            tried = [small_rows(given[name].tail, dtype=setting.dtype) for name in rows]
            tried += [small[name] for name in of_edges]
            within = with_arguments(CalledByName, names, conv, names, plain, beside=self.whole)
            # What edges are computed of may be tensors that forward made.
            vars(within).update((name, one) for name, one in vars(self.whole).items() if name.startswith(CONSTANT))
            return within, tried

        key = conv, "within", conv.training, str(plain), *((name, given[name].tail) for name in rows), *of_edges
        whole, calls = calls_of(setting, key, where, made, rows=len(rows), opened=conv)
        inner = Interpreter(whole, self._assembly)
        inner.known.update(self.known)  # later calls have higher numbers
        return inner.run(calls, [given[name] for name in names])

    def _lower_rows_of_edges(self, last: EdgeCall, owner: nn.Module, where: str) -> Value:
        """Return the rows of nodes that ``last`` gives; it runs as it is with everything it depends on. ``owner``: the
        convolution, or the model, that makes the call."""
        steps = last.with_dependencies()
        self._made_of_edges.update(one for one in steps if one.kind == "call_module")
        given = leaves_of([(one.args, dict(one.kwargs)) for one in steps])
        rows = next((one.of if isinstance(one, RowCount) else one for one in given if isinstance(one, _ROWS)), None)
        if rows is None:
            raise ModelError(f"{where} is given no rows")
        paths = dict.fromkeys(str(one.target) for one in steps if one.kind in ("call_module", "get_attr"))
        parts = {path: f"part_{number}" for number, path in enumerate(paths)}  # equal for equal layers
        traced, key = self._assembly.setting.traced, (owner, "with edges", *paths)
        if key not in traced:
            traced[key] = nn.Module()
            for path, name in parts.items():
                setattr(traced[key], name, attribute(self.whole, path))
            traced[key].flow = getattr(owner, "flow", "source_to_target")
        traced[key].training = owner.training  # its parts have modes of their own
        own = dict[EdgeCall, EdgeCall]()
        for one in steps:
            args, kwargs = map_aggregate(
                (one.args, dict(one.kwargs)), lambda leaf: own.get(leaf, leaf) if isinstance(leaf, EdgeCall) else leaf
            )
            target = f"conv.{parts[str(one.target)]}" if str(one.target) in parts else one.target
            own[one] = EdgeCall(one.number, one.kind, target, args, kwargs)
        return lower_propagation(traced[key], where, own[last], {"": rows}, ("", ""), self._assembly)

    def _deferred_arguments(self, node: fx.Node, where: str) -> Any:
        """Return the arguments of a call. Those that depend on parameters alone become calls themselves, made from the
        parameters of a thread's copy."""
        numbers = {one: number for number, one in enumerate(self.known)}

        def given(one: fx.Node) -> Any:
            found = self.known[one]
            if not isinstance(found, Free) or found.has_sums(where):
                return found
            if one not in self._free_calls:
                args, kwargs = fx.map_arg((one.args, one.kwargs), given)
                self._free_calls[one] = EdgeCall(numbers[one], one.op, one.target, args, kwargs)
            return self._free_calls[one]

        return fx.map_arg((node.args, dict(node.kwargs)), given)

    def _lower_lookup(self, module: nn.Module, where: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
        """Lower a module that looks something up by whole numbers of rows."""
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

    # ---- functions ---------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        """Return what a function or method gives; of edges and their data here, of all else by ``Functions``."""
        target = IN_PLACE.get(node.target, node.target)
        name = "item assignment" if target is assigned else getattr(node.target, "__name__", str(node.target))
        args, kwargs = self._arguments(node)
        in_place = target is not node.target or target is assigned or bool(kwargs.get("inplace"))
        if not args and (first := next((one for one in _FIRST_ARGUMENT_NAMES if one in kwargs), None)) is not None:
            args = [kwargs.pop(first)]
        if (graph := _same_edges(target, args, kwargs)) is not None:
            return graph
        if (of_type := self._edges_of_a_type(target, args)) is not None:
            return of_type
        if target is operator.getitem and isinstance(args[0], dict):
            return args[0].get(args[1])
        kind = [*args[1:], *kwargs.values()] if target in ("to", "type") else [torch.int] if target == "int" else []
        is_whole = kind in ([torch.long], [torch.int])
        if is_whole and isinstance(args[0], (Value, Graph, EdgeInput)):
            target, args, kwargs = "long", args[:1], {}
        if isinstance(args[0] if args else None, Codes) and (is_whole or target == "long"):
            return args[0]
        if target in ("to", "float", "double") and isinstance(args[0], (Value, Graph, EdgeInput, Codes)):
            return self._functions.convert(name, args[0], [*args[1:], *kwargs.values()])
        if args and isinstance(args[0], EdgeInput):
            step = _edge_data_step(args[0], target, args[1:], kwargs, self._assembly.setting.num_edge_features)
            if step is not None:
                return replace(args[0], steps=(*args[0].steps, step)) if step[0] else args[0]
        if any(isinstance(one, _OF_EDGES) for one in leaves_of((args, kwargs))):
            return self._call_on_edges(node, name, target, args, kwargs)
        self._check_in_place(node, name, in_place)
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        return self._functions.call(Call(name, target, args, kwargs, bool(node.users), writes_in_place(node)))

    def _edges_of_a_type(self, target: Any, args: Sequence[Any]) -> EdgeKinds | Graph | None:
        """Return what ``edge_type == 1`` gives, or ``edge_index[:, edge_type == 1]``; None for any other call."""
        types = self._assembly.setting.types
        match args:
            case [EdgeKinds(None), int(number)] if types is not None and target in (operator.eq, torch.eq, "eq"):
                if not 0 <= number < len(types.edges):
                    raise ModelError(f"it asks for edges of type {number}; the graph has {len(types.edges)} types")
                return EdgeKinds(number)
            case [Graph(relation=None) as graph, (slice() as ends, EdgeKinds(int(number)))] if types is not None:
                is_all = target is operator.getitem and ends == slice(None)
                return replace(graph, relation=[*types.edges][number]) if is_all else None
        return None

    def _call_on_edges(self, node: fx.Node, name: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return what a function or method gives for edges or their data: mostly a call that is deferred."""
        if name.startswith("dropout_"):
            given = signature(node.target).bind(*args, **kwargs)  # type: ignore[arg-type]  # it is a function
            given.apply_defaults()
            if given.arguments["p"] and given.arguments["training"]:
                raise ModelError(f"{name}: other edges in every epoch are not supported; F.dropout of messages is")
            if isinstance(args[0], Graph):  # the edges that it returns, and their places among all
                of_edges = self._lower_edge_call(node, name)
                return {0: args[0], 1: of_edges.part(1), 2: of_edges.part(2)}
        if name in _MATRIX_MAKERS or (name in _PRODUCTS and isinstance(args[0], Graph)):
            if "matrix" in self._assembly.setting.adj_t and len(args) == 2 and isinstance(args[1], Value):
                return self._lower_adjacency_product(node, args[0], args[1], name)
            raise ModelError(
                f"{name} takes the edges for a matrix; its product with rows is SimpleConv(aggr='sum')(x, "
                "edge_index, edge_weight), whose weights are the matrix's numbers"
            )
        if target is assigned:
            raise ModelError(f"{name} is given the edges; scatter and index_add say what becomes of several")
        return self._lower_edge_call(node, "an index" if target is operator.getitem else name)

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
        """Refuse an in-place write if the matrix it overwrites is used again."""
        if not in_place:
            return
        operand = node.args[0] if node.args else node.kwargs.get("input")
        kept = Value, Stacked, OneBatch, Computed, EdgeCall, EdgeInput, Graph
        if not isinstance(operand, fx.Node) or not isinstance(self.known[operand], kept):
            return
        memory = self._memory[operand]
        shared = operand.target in VIEWS or any(other.op in ("placeholder", "get_attr") for other in memory)
        alike = (other for other in self._memory if memory & self._memory[other])
        if shared or any(user > node for other in alike for user in other.users):
            how = "let it be into a clone" if name == "item assignment" else "use it without in-place"
            raise ModelError(f"{name} writes into a matrix that is used again; {how}")

    def _nodes_sharing_memory(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the nodes whose memory the result of ``node`` may share; itself if it is new."""
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        written = writes_in_place(node) or getattr(module, "inplace", False)
        viewed = node.target in VIEWS or isinstance(module, (nn.Flatten, nn.Unflatten, JumpingKnowledge))
        inputs = node.all_input_nodes
        if not (written or viewed or any(self.known[one] is self.known[node] for one in inputs)):
            return frozenset([node])
        return frozenset(other for one in inputs for other in self._memory[one])


def _dropout_inside(module: nn.Module) -> float:
    """Return the largest dropout probability within one of torch's own modules."""
    found = (one.p if isinstance(one, nn.Dropout) else getattr(one, "dropout", 0.0) for one in module.modules())
    return max((float(one) for one in found if not isinstance(one, nn.Module)), default=0.0)


def _same_edges(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph | None:
    """Return all edges as a call gives them, with their ends as they are or swapped; None for any other call."""
    edges, rest = args[0] if args else None, args[1:]
    if isinstance(edges, Graph):
        if target is operator.getitem and isinstance(rest[0], Free) and not (rest[0].parameters or rest[0].moments):
            rest = [rest[0].of({}).tolist()]  # an index that is a constant tensor
        if swaps_ends(target, [edges, *rest], kwargs):
            return replace(edges, flipped=not edges.flipped)
        if target in ("long", "contiguous", "clone") and not rest:
            return edges
    parts = args[0] if target is torch.stack else None
    if isinstance(parts, (list, tuple)) and kwargs.get("dim", args[1] if len(args) > 1 else 0) in (0, -2):
        ends = [one.args if isinstance(one, EdgeCall) and one.target is operator.getitem else () for one in parts]
        graph = ends[0][0] if ends[0] else None
        if isinstance(graph, Graph) and ends in ([(graph, 0), (graph, 1)], [(graph, 1), (graph, 0)]):
            return graph if ends[0][1] == 0 else replace(graph, flipped=not graph.flipped)
    return None


def _edge_data_step(
    of: EdgeInput, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], columns: int
) -> tuple[str, tuple[Any, ...]] | None:
    """Return a step that selects from edge data: some of the ``columns``, the only column as a vector, conversion to
    whole numbers, or the index of the largest column; an empty step if nothing changes, None if it is no such step."""
    if target is operator.getitem and isinstance(args[0], (tuple, list)) and len(args[0]) == 2:
        rows, which = args[0]
        return ("__getitem__", ((rows, which),)) if rows == slice(None) and type(which) in (int, slice) else None
    if target == "long" and not args and not kwargs:
        return "long", ()
    name = getattr(target, "__name__", target)
    is_weight = of.data is EdgeData.WEIGHT
    is_column = of.relation is None and (is_weight or columns == 1) and all(one == ("long", ()) for one in of.steps)
    if is_column and [*args] in _TO_VECTORS.get(name, ()):
        return ("", ()) if is_weight else ("__getitem__", ((slice(None), 0),))
    dim = kwargs.get("dim", args[0] if args else None)
    return ("argmax", (dim,)) if target in ("argmax", torch.argmax) and dim in (1, -1) and len(args) < 2 else None


_TO_VECTORS: dict[str, list[list[int]]] = {
    "squeeze": [[], [1], [-1]],
    "view": [[-1]],
    "reshape": [[-1]],
    "flatten": [[]],
}
"""The arguments that make a vector of a matrix with one column, by method."""


def _remedy(result: Any) -> str:
    """Return advice for a result that is no matrix of rows."""
    if isinstance(result, EdgeCall):
        return "; of edges these are made by what is told how many there are, as scatter(…, dim_size=x.size(0)) is"
    if isinstance(result, dict):
        return "; return the matrices of rows as a tuple, the one that is scored first"
    return ""
