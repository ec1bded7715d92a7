# SPDX-License-Identifier: Apache-2.0
"""Find a module's calls by running its forward twice on stand-ins for tensors (torch.fx).

Stand-ins see calls and nothing else. Anything else that forward does would happen once, or be lost, and nobody would
notice: drawing random numbers, counting calls, a backward of its own, asking whether something is a tensor. So each of
these is detected and refused by name, and what is computed with gradients off is detached. Moreover, the calls must
give the same results as the module itself on a small graph.
"""

import builtins
import math
import operator
import os
import random
import re
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from inspect import isfunction, signature
from pathlib import Path
from threading import get_ident
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction
from torch_geometric import utils
from torch_geometric.nn import Aggregation, GCNConv, HANConv, HeteroLinear, HGTConv, MessagePassing
from torch_geometric.nn.conv import hetero_conv
from torch_geometric.nn.dense.linear import Linear as GraphLinear
from torch_geometric.nn.models.jumping_knowledge import JumpingKnowledge

from ooc.errors import ModelError
from ooc.kernels.tensors import fractions
from ooc.model.lowering.assembly import Setting, first_line
from ooc.model.lowering.calls.rowwise import IN_PLACE, VIEWS, WHOLE, assigned
from ooc.model.lowering.matrices import PRODUCTS, matrix_of_edges
from ooc.model.lowering.norms import NORMS
from ooc.model.lowering.plain_forwards import GLOBAL_ATTENTIONS, plain_forwards
from ooc.storage.types import Types

LINEAR: tuple[type[nn.Module], ...] = (nn.Linear, GraphLinear)
_GIVE_ROWS_BY_TYPE = (HANConv, HGTConv)
_NODES, _EDGES = 13, 40
_TOLERANCE = 1e-5
_NUMBERS_AT_ONCE = 1 << 18
_ROUNDINGS = 100
OF_BOTH_ENDS = ("propagate", "edge_updater")
"""The methods of PyG's convolutions that take separate rows for source and target nodes."""
_LIBRARIES = "torch", "torch_geometric", "ooc"
"""What users' modules are not part of."""
CONSTANT = "_tensor_constant"
"""The prefix of torch.fx's names for tensors that a forward makes."""
_ONCE = ", which would happen once and not in every epoch"
_ADDED_SIZES = ((0, 0), (1009, 10**6), (10**6, 1010), (10**12, 10**12 + 1))
"""How many more rows and edges than were tried the graph may have; fewer for a small graph are added."""
_OPERATOR_NAMES = "eq ne lt le gt ge neg add sub mul truediv floordiv mod pow and_ or_ not_ is_ is_not getitem"
_NUMBER_FUNCTIONS = frozenset(getattr(operator, name) for name in _OPERATOR_NAMES.split())
_SHAPE_NAMES = "size shape numel dim ndim dtype device layout is_cuda is_floating_point requires_grad"
_SHAPE_QUERIES = frozenset(_SHAPE_NAMES.split())
_PLAIN = (bool, int, float, complex, str, Tensor)
PLACE = "place in the model"
"""The key of a traced node's metadata for its place in the model (``place_in_model``)."""
_MODEL_ATTRIBUTE = "model"
"""The attribute of a traced wrapper module that holds the user's model."""
_PACKAGE = Path(__file__).parents[2]
_NOT_THE_MODEL = tuple(
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, _PACKAGE / "model", _PACKAGE / "train")
)


@dataclass(eq=False, repr=False)
class Calls:
    """The calls of ``module``, in order, as the ``nodes`` of a ``graph``, inputs first.

    ``constants``: tensors that its forward makes. ``name``: the module's, for refusals. ``training``: gradients will be
    needed. ``inputs``: tensors to try it on; the first ``rows`` of them are rows. ``cut_off``: trained parameters found
    to get no gradient, for example behind a ``detach``; ``reached``: those found to get one; ``inputs_cut_off``: the
    rows, by index, that get none. ``opened``: a convolution within the module whose own calls are traced; ``whole``:
    functions of edges that stay single calls in it, besides PyG's utilities. ``tails``: the shape of a row, for each
    call that gives rows; ``drawing``: the calls that draw random numbers. ``fewest``: the least rows and edges that the
    graph has.
    """

    module: nn.Module
    name: str
    inputs: Sequence[Tensor]
    _: KW_ONLY
    training: bool
    fewest: tuple[int, int]
    rows: int = 1
    opened: nn.Module | None = None
    whole: Collection[Callable[..., Any]] = ()
    cut_off: list[nn.Parameter] = field(init=False, default_factory=list)
    reached: list[nn.Parameter] = field(init=False, default_factory=list)
    inputs_cut_off: set[int] = field(init=False, default_factory=set)
    tails: dict[fx.Node, tuple[int, ...]] = field(init=False, default_factory=dict)
    drawing: set[fx.Node] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        module = self.module
        tracer = _Tracer(self)
        with (
            _restoring(module) as before,
            torch.enable_grad(),
            self._refuse_autograd_functions(),
            _without_checkpointing(),
        ):
            drawn = _random_states()
            try:
                self.graph = tracer.trace(module)
            except TypeError as error:  # torch's own check: a proxy is no tensor
                if found := re.search(r"to buffer '(\w+)'", str(error)):
                    raise self._changes(f"buffer {found[1]}") from error
                raise
            self.nodes = list(self.graph.nodes)
            constants = {name: value for name, value in vars(module).items() if name.startswith(CONSTANT)}
            if not _same_random_states(drawn, _random_states()):
                raise self._refuse("it draws random numbers other than by dropout, or another thread has drawn some")
            for what in before.changed():
                raise self._changes(what)
            self._check_again(before)
        self._check_written()
        vars(module).update(constants)  # keeps tensors alive that forward makes and calls refer to
        self.constants = constants
        self._cut_gradients(tracer)
        self._check_results()

    def __repr__(self) -> str:
        """Everything that distinguishes the calls from others, except dropout's options, which the masks depend on
        anyway."""
        lines = []
        for node in self.nodes:
            drops = node.op == "call_function" and node.target in (F.dropout, torch.dropout)
            given = node.all_input_nodes if drops else (node.args, node.kwargs)
            lines.append(f"{node.name} = {node.op} {node.target} {given}")
        return "\n".join((*lines, *(f"{name} = {one.dtype} {one.tolist()}" for name, one in self.constants.items())))

    def _refuse(self, why: str) -> ModelError:
        return ModelError(f"model {self.name} is not supported: {why}")

    def _changes(self, what: str) -> ModelError:
        return self._refuse(f"its forward changes its {what}{_ONCE}")

    def _check_again(self, before: "ModuleState") -> None:
        """Refuse a module that makes other calls the second time. Proxies kept from the first time are invalid then,
        unless they are made of the edges alone: these are the same in every epoch, and computed anew in each."""
        again = _Tracer(self).trace(self.module)
        kept = [one for node in again.nodes for one in node.all_input_nodes if one.graph is not again]
        if kept:
            for one in kept:
                if not self._is_of_edges_alone(one):
                    raise self._refuse(f"{one.name} is kept from an earlier forward pass")
            before.restore()
            again = _Tracer(self).trace(self.module)
        if list(map(_describe_call, again.nodes)) != list(map(_describe_call, self.nodes)):
            raise self._refuse("it calls other layers, or with other numbers, each time")

    def _is_of_edges_alone(self, node: fx.Node) -> bool:
        """Return whether the call is a function of the edges, their data, sizes and numbers only, without dropout."""
        inputs, seen, waiting = [one for one in self.nodes if one.op == "placeholder"], set[fx.Node](), [node]
        while waiting:
            if (one := waiting.pop()) in seen or _is_of_sizes(one):
                continue
            seen.add(one)
            waiting += one.all_input_nodes
            if one in inputs[: self.rows] or one.op in ("call_module", "get_attr") or "dropout" in str(one.target):
                return False
        return True

    def _check_written(self) -> None:
        """Refuse writes into a parameter or buffer, also through ``data`` or through shared memory."""
        for node in self.nodes:
            written = node.all_input_nodes[:1] if writes_in_place(node) or node.target is assigned else []
            while written and (written[0].target in VIEWS or written[0].target is assigned):
                written = written[0].all_input_nodes[:1]
            if written and written[0].op == "get_attr":
                raise self._changes(str(written[0].target).removeprefix("model."))

    def _refuse_autograd_functions(self) -> AbstractContextManager[Any]:
        """Refuse autograd.Functions: their backward is not seen, and the calls in their forward would be differentiated
        instead."""
        own, as_before = get_ident(), vars(torch.autograd.Function)["apply"]

        def apply(function: type, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != own:
                return as_before.__get__(None, function)(*args, **kwargs)
            if function.__name__ == "_NoopSaveInputs":  # of checkpoint() in torch 2.9, which then keeps nothing
                return torch.empty(0)
            raise self._refuse(f"{function.__name__} is a torch.autograd.Function, with a backward of its own")

        return mock.patch.object(torch.autograd.Function, "apply", classmethod(apply))

    def _cut_gradients(self, tracer: "_Tracer") -> None:
        """Detach what is computed with gradients off from what is made of it with gradients on, as far as it depends on
        trained parameters; for others it makes no difference."""
        modules, trained, without = dict(self.module.named_modules()), set[fx.Node](), tracer.without_gradients
        for node in self.nodes:
            own: list[Any] = []
            if node.op == "call_module":
                own = list(modules[str(node.target)].parameters())
            elif node.op == "get_attr":
                own = [attribute(self.module, str(node.target))]
            needs = any(getattr(o, "requires_grad", False) for o in own) or trained.intersection(node.all_input_nodes)
            if not needs or _is_of_sizes(node) or node.target in ("detach", torch.detach):
                continue
            trained.add(node)
            users = [user for user in node.users if user not in without]
            if node not in without or not users:
                continue
            into = node.all_input_nodes[0] if writes_in_place(node) or node.target is assigned else None
            if not isinstance(tracer._sample(node), Tensor) or (into is not None and into not in without):
                what = str(node.target if node.op == "call_module" else node.name).removeprefix("model.")
                raise self._refuse(
                    f"{what}, with gradients off, gives several results, or writes into what is made with them; use "
                    "detach() instead"
                )
            with self.graph.inserting_after(node):
                cut = self.graph.call_method("detach", (node,))
            cut.meta[PLACE] = node.meta[PLACE]
            for user in users:
                user.replace_input_with(node, cut)
        self.nodes = list(self.graph.nodes)

    def _check_results(self) -> None:
        """Refuse a module whose results, or gradients in training, differ from those of its calls. A module that fails
        on ``inputs`` is not compared."""
        inputs, is_whole = self.inputs, any(node.target in WHOLE for node in self.nodes)
        if is_whole:
            inputs = [(one > 0).to(one.dtype) if one.is_floating_point() else one for one in inputs]
        try:
            expected = self._run(self.module, inputs)
            if not is_whole and any(one is not None and one.isnan().any() for one in expected):
                inputs = [fractions(one) if one.is_floating_point() else one for one in inputs]
                expected = self._run(self.module, inputs)
        except ModelError:
            raise
        except Exception:
            if self.opened is not None:
                raise
            return
        calls = _TailRecorder(self.module, inputs[0].dtype, graph=self.graph)
        calls.extra_traceback = False
        try:
            found = self._run(calls.run, inputs)
        except Exception as error:
            raise self._refuse(f"what its forward calls cannot be called again: {first_line(error)}") from error
        self.tails, self.drawing = calls.tails, calls.drawing
        if not _results_agree(found[:1], expected[:1]):
            raise self._refuse(
                "its forward computes something else than it calls, as it does where it asks type(x) or "
                "hasattr(x, …), where torch.autocast is on (give compute_dtype='bfloat16'), or where += or "
                "x[:, 0] = … writes into a tensor that has another name, too"
            )
        if not _results_agree(found, expected):
            raise self._refuse("its gradients are not those of what its forward calls; it has a backward of its own")
        if self.training:
            gradients = expected[1:] or [None] * (self.rows + len(self._trained))
            self.inputs_cut_off = {at for at in range(self.rows) if gradients[at] is None}
            pairs = [*zip(self._trained, gradients[self.rows :], strict=True)]
            self.cut_off = [parameter for parameter, found in pairs if found is None]
            self.reached = [parameter for parameter, found in pairs if found is not None]

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _run(self, module: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the result of ``module`` for ``inputs``; in training, also the gradients of the rows among them and of
        the parameters. The module stays as it was."""
        given = [one.clone() for one in inputs]
        wanted = [*(rows.requires_grad_(self.training) for rows in given[: self.rows]), *self._trained]
        looked_up = {str(node.target) for node in self.nodes if node.op == "get_attr"}
        plain = _without_compile(), _without_checkpointing(), uncached(self.opened)
        with _restoring(self.module) as before, ExitStack() as stack, torch.set_grad_enabled(self.training):
            for one in plain:
                stack.enter_context(one)
            for generator in (torch.default_generator, *torch.cuda.default_generators):
                generator.manual_seed(1)  # torch.manual_seed records the stack for absent devices
            result = module(*given)
            for name, buffer, value in before.buffers:
                if name in looked_up and not torch.equal(buffer, value):
                    raise self._changes(f"buffer {name.removeprefix('model.')}")
            if not isinstance(result, Tensor) or not (self.training and result.requires_grad):
                return [result.detach() if isinstance(result, Tensor) else None]
            upstream = small_rows(result.shape[1:], dtype=result.dtype)[: len(result)]
            gradients = torch.autograd.grad(result, wanted, upstream, allow_unused=True)
        return [result.detach(), *gradients]


def calls_of(
    setting: Setting, key: Hashable, name: str, make: Callable[[], tuple[nn.Module, Sequence[Tensor]]], **options: Any
) -> tuple[nn.Module, Calls]:
    """Return the module made by ``make``, which also gives tensors to try it on, with its calls; both are found once
    for each ``key``."""
    if key not in setting.traced:
        module, tried = make()
        every: dict[str, Any] = {"training": setting.training, "fewest": setting.fewest} | options
        setting.traced[key] = module, Calls(module, name, tried, **every)
    found: tuple[nn.Module, Calls] = setting.traced[key]
    return found


class _TailRecorder(fx.Interpreter):
    """Runs calls, and records the ``tails`` of those that give rows and which are ``drawing`` random numbers."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self._dtype = dtype
        self.tails: dict[fx.Node, tuple[int, ...]] = {}
        self.drawing: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        before = torch.get_rng_state()
        found = super().run_node(n)
        if not torch.equal(before, torch.get_rng_state()):
            self.drawing.add(n)
        is_tensor = isinstance(found, Tensor) and found.dtype == self._dtype and n.op != "get_attr"
        if is_tensor and found.dim() and len(found) == _NODES:
            self.tails[n] = found.shape[1:]
        return found


def place_in_model(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost of these frames that is a model's, as ``Net.forward, net.py line 12``."""
    for frame, line in frames:
        file, called = frame.f_code.co_filename, frame.f_code.co_varnames[:1]
        owner = frame.f_locals.get(called[0]) if called else None  # ``self``, whatever the model calls it
        if not file.startswith(_NOT_THE_MODEL) and isinstance(owner, nn.Module):
            return f"{type(owner).__name__}.{frame.f_code.co_name}, {Path(file).name} line {line}"
    return ""


def small_inputs(columns: int, edge_features: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features, edges, edge weights and edge features of a small random graph."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_NODES, columns, generator=generator, dtype=dtype)
    edge_index = torch.randint(_NODES, (2, _EDGES), generator=generator)
    weight = 0.1 + torch.rand(_EDGES, generator=generator, dtype=dtype)
    features = torch.randn(_EDGES, edge_features, generator=generator, dtype=dtype)
    return x, edge_index, weight, features


def small_inputs_of_types(
    types: Types, columns: Mapping[str, int], carried: Sequence[int] = (), *, dtype: torch.dtype
) -> list[Tensor]:
    """Return the tensors of a small random graph with types: rows of the node types in ``columns``, edges of every
    type, and for each of ``carried`` that many edge features (0: weights)."""
    generator = torch.Generator().manual_seed(1)
    counts = {name: _NODES + at for at, name in enumerate(types.nodes)}
    x = [torch.randn(counts[name], width, generator=generator, dtype=dtype) for name, width in columns.items()]
    edges = [
        torch.stack([torch.randint(counts[end], (_EDGES,), generator=generator) for end in (one.source, one.target)])
        for one in types.edges
    ]
    data = [
        torch.randn(_EDGES, width, generator=generator, dtype=dtype)
        if width
        else 0.1 + torch.rand(_EDGES, generator=generator, dtype=dtype)
        for width in carried
    ]
    return [*x, *edges, *data]


def small_inputs_of_relations(types: Types, columns: Mapping[str, int], *, dtype: torch.dtype) -> list[Tensor]:
    """Return features, edges and edge types of a small random graph with one node type."""
    x, *edges = small_inputs_of_types(types, columns, dtype=dtype)
    edge_type = torch.cat([one.new_full(one.shape[1:], number) for number, one in enumerate(edges)])
    return [x, torch.cat(edges, dim=1), edge_type]


def small_rows(tail: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Return rows of this shape."""
    return torch.randn(_NODES, *tail, generator=torch.Generator().manual_seed(1), dtype=dtype)


def attribute(module: nn.Module, target: str) -> Any:
    """Return the attribute that torch.fx calls ``target``, through nested modules."""
    owner: Any = module
    for name in target.split("."):
        owner = getattr(owner, name)
    return owner


def called(root: Any, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a traced node of ``root``."""
    if kind == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    if kind == "call_function":
        return target(*args, **kwargs)
    found = attribute(root, target)
    return found if kind == "get_attr" else found(*args, **kwargs)


def writes_in_place(node: fx.Node) -> bool:
    """Whether it is a function or method that writes into its operand: ``relu_``, ``+=``, ``inplace=True``."""
    if node.op not in ("call_function", "call_method") or node.target in _NUMBER_FUNCTIONS:
        return False
    name = getattr(node.target, "__name__", str(node.target))
    named_so = name.endswith("_") and not name.endswith("__")
    return named_so or node.target in IN_PLACE or bool(node.kwargs.get("inplace"))


class _StandIn(fx.Proxy):
    """A proxy that passes as a tensor in Python's ``isinstance``, which PyG's convolutions ask first of all, unless it
    is a size or made of sizes. To code written in C, such as torch's functions, it is no tensor, since that would read
    a tensor's memory."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the parts of a result; an absent part of a pair is None."""
        found: Iterator[Any] = self.tracer.iter(self)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        """Assign where truth values select, as in ``inverse[inverse == inf] = 0``."""
        if not isinstance(key, _StandIn):
            return _assign_item(self, key, value)
        is_each = isinstance(value, _StandIn) and self.tracer._sample(value.node).dim()  # type: ignore[attr-defined]
        (self.masked_scatter_ if is_each else self.masked_fill_)(key, value)


_isinstance = isinstance


def _is_instance_or_stands_in(one: Any, kinds: Any) -> bool:
    """``isinstance`` while proxies exist, which count as tensors or as several, except to torch's own code, which would
    go on to call C's."""
    kind = type(one)
    if kind not in (fx.Proxy, _StandIn):
        return _isinstance(one, kinds)
    asking = sys._getframe(1).f_globals.get("__name__", "")
    is_nobodys = asking.startswith("torch.") or (kind is fx.Proxy and asking.startswith("ooc."))
    if is_nobodys or issubclass(kind, kinds) or _is_of_sizes(one.node):
        return issubclass(kind, kinds)
    if kind is _StandIn or not (issubclass(Tensor, kinds) or issubclass(tuple, kinds)):
        return issubclass(Tensor, kinds)
    return _isinstance(one.tracer._sample(one.node), kinds)


def _is_of_sizes(node: fx.Node) -> bool:
    """Whether it is a shape or size, or a number that Python computes from such."""
    if node.op == "call_method":
        return node.target in _SHAPE_QUERIES
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _SHAPE_QUERIES
    return node.target in _NUMBER_FUNCTIONS and all(map(_is_of_sizes, node.all_input_nodes))


class _Tracer(fx.Tracer):
    """The tracer. It leaves modules whole that are lowered as a whole.

    ``without_gradients``: calls made with gradients off. Questions about shapes are answered by running the calls on
    ``inputs``. ``opened``: a convolution that is traced itself, with PyG's own functions left whole. ``trained``: how
    many of the inputs, the first ones, get gradients; None for none.
    """

    proxy_buffer_attributes = True

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._name, self._inputs, self._opened = calls.name, calls.inputs, calls.opened
        self._trained = calls.rows if calls.training else None
        self._added_sizes = {*_ADDED_SIZES, (min(0, calls.fewest[0] - _NODES), min(0, calls.fewest[1] - _EDGES))}
        self._of_edges = {*_edge_functions(), *calls.whole}
        self.without_gradients: set[fx.Node] = set()
        self._counts = {one.shape[0 if one.is_floating_point() else -1] for one in self._inputs}
        self._edges = {one.shape[1] for one in self._inputs if not one.is_floating_point() and one.dim() == 2}
        self._samples: dict[fx.Node, Any] = {}
        self._traced_in = get_ident()
        """The thread that traces, since torch.fx wraps ``nn.Module`` for all threads; 0 while samples are computed.
        Taking the wrappers off meanwhile takes milliseconds each time, as Python then forgets what it knows of all
        subclasses."""
        self._queries: set[fx.Node] = set()

    def path_of_module(self, mod: nn.Module) -> str:
        try:
            return super().path_of_module(mod)
        except NameError as error:
            name = type(mod).__name__
            raise ModelError(f"{name} is made in forward; make it in __init__ and keep it as an attribute") from error

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return super().proxy(node) if self._opened is None else _StandIn(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, *rest: Any, **options: Any) -> Any:
        """Create a node. After an in-place method, the tensor's existing proxy refers to the result."""
        made = super().create_proxy(kind, target, args, *rest, **options)
        is_tensor = kind == "call_method" and isinstance(args[0], fx.Proxy)
        if is_tensor and not isinstance(args[0], fx.proxy.Attribute) and writes_in_place(made.node):
            args[0].node = made.node
        return made

    def create_arg(self, a: Any) -> Any:
        return a.node if type(a) in (fx.Proxy, _StandIn) else super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return an attribute. Anything computed from a buffer is computed at each use, since the buffer may be written
        into meanwhile."""
        if self._traced_in != get_ident() or (isinstance(attr_val, Tensor) and not attr_val.is_floating_point()):
            return attr_val  # numbers may decide how many operations there are
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m is self._opened:
            return False
        if (
            isinstance(m, (MessagePassing, JumpingKnowledge, HeteroLinear, *NORMS, *GLOBAL_ATTENTIONS))
            or type(m) in LINEAR
        ):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        with ExitStack() as stack:
            for patch in self._patches(args[0]):
                stack.enter_context(patch)
            graph = super().trace(*args, **kwargs)
        for node in reversed(list(graph.nodes)):
            if node in self._queries and not node.users:
                graph.erase_node(node)
        return graph

    def _patches(self, root: nn.Module) -> Iterator[AbstractContextManager[Any]]:
        """Yield the patches for a trace: torch makes tensors with as many rows as a proxy has; what a convolution, or
        the model, computes of edges by its own functions or PyG's is a single call; and convolutions cache nothing."""
        yield mock.patch.object(hetero_conv, "group", _group_in_one_call)
        yield mock.patch.multiple(
            fx.Proxy, __setitem__=_assign_item, __setattr__=_set_attribute, create=True, **_NUMBER_METHODS
        )
        if self._opened is None:  # for the numbers of rows and edges
            yield mock.patch.object(Aggregation, "__call__", lambda self, *a, **k: nn.Module.__call__(self, *a, **k))
        yield plain_forwards()
        yield _without_compile()
        yield mock.patch.object(fx.Proxy, "__len__", _proxy_length)
        for name in ("full", "ones", "zeros"):
            f = getattr(torch, name)
            yield mock.patch.object(torch, name, partial(self._record_call, f, "call_function", f))
        yield mock.patch.object(torch, "tensor", partial(self._make_constant, torch.tensor))
        yield mock.patch.object(torch, "sparse_coo_tensor", partial(matrix_of_edges, torch.sparse_coo_tensor))
        of = root if self._opened is None else self._opened
        kinds = {kind for part in of.modules() for kind in type(part).__mro__}
        modules = _modules_used({one.__module__ for one in (*kinds, GCNConv, utils.get_laplacian)} | {utils.__name__})
        found = [(one, name, f) for one in modules for name, f in [*vars(one).items()]]
        for owner, name, f in found:
            if isfunction(f) and f in self._of_edges:
                yield mock.patch.object(owner, name, partial(self._record_edge_call, f))
        for name in OF_BOTH_ENDS if isinstance(self._opened, MessagePassing) else ():
            f = partial(self._record_call, getattr(self._opened, name).__func__, "call_method", name, self._opened)
            yield mock.patch.object(self._opened, name, f)
        yield uncached(self._opened)
        yield mock.patch.object(builtins, "isinstance", _is_instance_or_stands_in)

    def _record_edge_call(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._opened is None and not self._depend_on_edges(args, kwargs):
            return f(*args, **kwargs)
        made = self._record_call(f, "call_function", f, *args, **kwargs)
        is_several = isinstance(made, fx.Proxy) and isinstance(self._sample(made.node), (tuple, list))
        return tuple(self.iter(made)) if is_several else made

    def _depend_on_edges(self, args: Any, kwargs: Any) -> bool:
        """Whether some of these arguments depend on the edges."""
        waiting = [one.node for one in tree_leaves((args, kwargs)) if isinstance(one, fx.Proxy)]
        seen = set[fx.Node]()
        while waiting:
            if (one := waiting.pop()) not in seen:
                seen.add(one)
                waiting += one.all_input_nodes
        return any(map(is_of_edges, seen))

    def _record_call(self, f: Callable[..., Any], kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(one, fx.Proxy) for one in tree_leaves((args, kwargs))):
            return f(*args, **kwargs)
        return self.create_proxy(kind, target, args, kwargs)

    def _make_constant(self, make: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor of numbers, some of which are sizes of a proxy."""

        def known(one: Any) -> Any:
            return self.only_answer(one.node, lambda number: number) if type(one) in (fx.Proxy, _StandIn) else one

        return make(tree_map(known, data) if self._traced_in == get_ident() else data, *args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer a question about shapes whose answer does not depend on the number of rows and edges; otherwise raise
        ModelError."""
        return bool(self.only_answer(obj.node, bool))

    def only_answer(self, node: fx.Node, kind: Callable[[Any], Any]) -> Any:
        """Return the value of ``node``, made of shapes, as a ``kind``, if it does not depend on the number of rows and
        edges; otherwise raise ModelError."""
        answers = {kind(self._evaluate_sizes(node, more)) for more in self._added_sizes}
        if len(answers) > 1:
            raise self._value_branch_error()
        return answers.pop()

    def iter(self, obj: Any) -> Iterator[Any]:
        """Iterate over a tensor or tuple whose length does not depend on the number of rows and edges."""
        found = self._sample(obj.node)
        if len(found) in self._counts:
            raise ModelError(
                f"model {self._name} cannot be taken apart: it goes through the rows of a matrix one by one; matrices "
                "beside x, as x1 and x2, are given to arguments of their names"
            )
        return iter([None if one is None else obj[at] for at, one in enumerate(found)])

    def _evaluate_sizes(self, node: fx.Node, more: tuple[int, int]) -> Any:
        """Return the answer for this many more rows and edges than were tried. Raises ModelError if sizes are compared
        with a number other than 0 and 1, which may be the graph's own count."""
        name: Any = node.target
        rest: Any = (*node.args[1:], *node.kwargs.values())
        self._queries.add(node)
        if node.op == "call_function" and name in _NUMBER_FUNCTIONS:
            args = fx.node.map_arg(node.args, lambda one: self._evaluate_sizes(one, more))
            if name in (operator.eq, operator.ne):
                tried = fx.node.map_arg(node.args, lambda one: self._evaluate_sizes(one, _ADDED_SIZES[0]))
                same = [one for one, other in zip(args, tried, strict=True) if one == other]
                if len(same) == 1 and same[0] not in (0, 1):
                    raise self._value_branch_error()
            return node.target(*args)  # type: ignore[operator]
        name, rest = (rest[0], ()) if name is getattr else (name, rest)
        source = node.args[0] if node.args else None
        if name not in _SHAPE_QUERIES or not isinstance(source, fx.Node):
            raise self._value_branch_error()
        if name == "requires_grad":
            return self._trained is not None and self._is_trained(source)
        sample = self._sample(source)
        sizes, of_rows = list(sample.shape), source.op != "get_attr"
        for at, size in enumerate(sizes):  # rows and edges may have another dimension before them
            if of_rows and size in self._counts:
                sizes[at] += more[size in self._edges]
                break
        match name:
            case "size" | "shape":
                return sizes[rest[0]] if rest else tuple(sizes)
            case "numel":
                return math.prod(sizes)
            case "dim" | "ndim":
                return len(sizes)
            case "is_floating_point":
                return sample.is_floating_point()
            case _:
                return getattr(sample, str(name))

    def _is_trained(self, node: fx.Node) -> bool:
        """Whether gradients flow through ``node`` to something that is trained."""
        inputs = [one for one in self.graph.nodes if one.op == "placeholder"][: self._trained or 0]
        seen, waiting = set[fx.Node](), [node]
        while waiting:
            one = waiting.pop()
            if one in seen or one in self.without_gradients or one.target in ("detach", torch.detach):
                continue
            seen.add(one)
            waiting += one.all_input_nodes
            own: list[Any] = [attribute(self.root, str(one.target))] if one.op == "get_attr" else []
            own += self.root.get_submodule(str(one.target)).parameters() if one.op == "call_module" else []
            if one in inputs or any(getattr(part, "requires_grad", False) for part in own):
                return True
        return False

    def _value_branch_error(self) -> ModelError:
        return ModelError(
            f"model {self._name} cannot be taken apart: it goes one way or another by values, or by how many rows or "
            "edges there are; if, while and assert may ask for columns, types and the model's own options, and "
            "torch.where chooses number by number"
        )

    def _sample(self, node: fx.Node) -> Any:
        """Return the value of ``node`` for the inputs that are tried."""
        if node in self._samples:
            return self._samples[node]
        needed, waiting = set[fx.Node](), [node]
        while waiting:
            one = waiting.pop()
            if one not in needed and one not in self._samples:
                needed.add(one)
                waiting += one.all_input_nodes
        self._traced_in = 0
        try:
            with _restoring(self.root), torch.no_grad():
                for at, one in enumerate(self.graph.nodes):
                    if one in needed and one.op == "placeholder":
                        self._samples[one] = self._inputs[at].clone()
                    elif one in needed:
                        args, kwargs = fx.node.map_arg((one.args, one.kwargs), self._samples.__getitem__)
                        found = called(self.root, one.op, one.target, args, kwargs)
                        # Made-up numbers may lie outside of a table; 0 is in each.
                        whole = getattr(found, "dtype", None) in (torch.int, torch.long)
                        looks_up = whole and args and isinstance(args[0], Tensor) and args[0].is_floating_point()
                        self._samples[one] = torch.zeros_like(found) if looks_up else found
        finally:
            self._traced_in = get_ident()
        return self._samples[node]

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a call of a module as it was before ``torch.compile``. The innermost module that looks at edges itself
        is left whole; one that gives rows by type returns a dictionary."""
        if self._traced_in != get_ident():
            return forward(*args, **kwargs)
        if "_orig_mod" in m._modules:
            inner: Any = m._orig_mod
            return self.call_module(inner, inner.forward, args, kwargs)
        path = self.path_of_module(m)
        if isinstance(m, torch.jit.ScriptModule):
            raise ModelError(
                f"{path.removeprefix('model.')} is scripted, which a trace cannot see into; leave it as it was "
                "written, without torch.jit"
            )
        if isinstance(m, Aggregation) and self._opened is None and self._depend_on_edges(args, kwargs):
            return self.create_proxy("call_module", path, args, kwargs)
        if self._is_edge_module(m, path, args, kwargs):
            return self._trace_edge_module(m, path, forward, args, kwargs)
        found: Any = super().call_module(m, forward, args, kwargs)
        is_seen = isinstance(found, fx.Proxy)
        if is_seen and isinstance(m, _GIVE_ROWS_BY_TYPE):
            given = signature(m.forward).bind(*args, **kwargs).arguments
            if given.get("return_semantic_attention_weights"):
                raise ModelError(f"{type(m).__name__}: return_semantic_attention_weights is not supported")
            x_dict, reached = given["x_dict"], {kind[-1] for kind in given["edge_index_dict"]}
            if isinstance(m, HANConv):
                return {name: found[name] if name in reached else None for name in x_dict}
            return {name: found[name] for name in x_dict if name in m.dst_node_types}
        return found

    def _is_edge_module(self, m: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether ``m`` is a submodule that takes edges as input and contains no convolution."""
        opens = self._opened is not None and not isinstance(self._opened, MessagePassing)
        if opens or path.removesuffix("._orig_mod") == _MODEL_ATTRIBUTE or self.is_leaf_module(m, path):
            return False
        has_convolution = any(isinstance(part, MessagePassing) for part in m.modules())
        given = (one.node for one in tree_leaves((args, kwargs)) if isinstance(one, fx.Proxy))
        return not has_convolution and any(map(is_of_edges, given))

    def _trace_edge_module(
        self, m: nn.Module, path: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before, stack, as_it_was = len(self.graph.nodes), self.module_stack.copy(), ModuleState(m)
        try:
            found = super().call_module(m, forward, args, kwargs)
            made = list(self.graph.nodes)[before:]
            given = {_edge_input_of(one.node) for one in tree_leaves((args, kwargs)) if isinstance(one, fx.Proxy)}
            looks_up = "edge_index" not in given and any(node.target in WHOLE for node in made)
            if looks_up or not any(map(_computes_from_edges, made)):
                return found
        except Exception:
            self.module_stack = stack
        as_it_was.restore()  # it may have kept a proxy that is erased now
        for node in reversed(list(self.graph.nodes)[before:]):
            if node.op != "get_attr":  # parameters' proxies are looked up by name
                self.graph.erase_node(node)
        return self.create_proxy("call_module", path, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta[PLACE] = place_in_model(walk_stack(sys._getframe(1)))
        if not torch.is_grad_enabled():
            self.without_gradients.add(node)
        return node


def _assign_item(of: fx.Proxy, key: Any, value: Any) -> None:
    """Assign to part of a tensor, and make its existing proxy refer to the result. Assigning through an attribute is
    refused."""
    made = of.tracer.create_proxy("call_function", assigned, (of, key, value), {})
    if not isinstance(of, fx.proxy.Attribute):
        of.node = made.node


def _set_attribute(of: fx.Proxy, name: str, value: Any) -> None:
    if hasattr(Tensor, name):
        raise ModelError(f"its forward sets {name} of {of.node.name.removeprefix('model_')}{_ONCE}")
    object.__setattr__(of, name, value)


def _number_converter(kind: Callable[[Any], Any]) -> Callable[[fx.Proxy], Any]:
    """Return a method that converts a proxy for a size, as in ``range(x.size(1))``, to a number; for tensors it raises
    TypeError."""

    def number(of: fx.Proxy) -> Any:
        if not isinstance(of.tracer, _Tracer) or not _is_of_sizes(of.node):
            raise TypeError(
                "it takes a tensor's values for a Python number, as int(), float(), range() and a list's index do, and "
                "values are not known here; torch's functions of tensors go by them, as torch.where and x * x.sum() do"
            )
        return of.tracer.only_answer(of.node, kind)

    return number


def _apply_ufunc(of: fx.Proxy, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    """Apply a NumPy function: ``np.float64(2) * x`` gives a tensor, and ``np.sqrt(x.size(1))`` a number; otherwise
    raise TypeError."""
    stand_ins = [one for one in inputs if isinstance(one, fx.Proxy)]
    if isinstance(of.tracer, _Tracer) and all(_is_of_sizes(one.node) for one in stand_ins):
        only = of.tracer.only_answer
        return ufunc(*(only(one.node, float) if isinstance(one, fx.Proxy) else one for one in inputs), **options)
    if ufunc not in _NUMPY_FUNCTIONS or options:
        raise TypeError(f"np.{ufunc.__name__} of a tensor is not supported; torch.{ufunc.__name__} may be")
    return _NUMPY_FUNCTIONS[ufunc](*(one.item() if isinstance(one, np.generic) else one for one in inputs))


_NUMPY_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.true_divide: operator.truediv,
    np.power: operator.pow,
}
_NUMBER_METHODS: dict[str, Any] = {
    "__index__": _number_converter(operator.index),
    "__int__": _number_converter(int),
    "__float__": _number_converter(float),
}
_NUMBER_METHODS["__array_ufunc__"] = _apply_ufunc


def _proxy_length(of: fx.Proxy) -> int:
    """Return the length of a parameter, buffer or shape; otherwise raise TypeError, as ``(*x,)`` only asks for a
    hint."""
    if (of.node.op == "get_attr" or _is_of_sizes(of.node)) and isinstance(of.tracer, _Tracer):
        return len(of.tracer._sample(of.node))
    raise TypeError(
        "it asks for the number of rows by len(), which is another one for every tile; x.size(0) of all may be added "
        "and multiplied with, and sums, means and norms are over all"
    )


def _modules_used(names: set[str]) -> list[ModuleType]:
    """Return the loaded modules of these ``names`` and those whose functions a user's among them has, and so on."""
    found, waiting = dict[str, ModuleType](), [*names]
    while waiting:
        name = waiting.pop()
        if name not in found and name in sys.modules:
            found[name] = sys.modules[name]
            own = () if name.partition(".")[0] in _LIBRARIES else [*vars(found[name]).values()]
            waiting += [one.__module__ for one in own if isfunction(one)]
            waiting += [one.__name__ for one in own if isinstance(one, ModuleType)]
    return [*found.values()]


@cache
def _edge_functions() -> tuple[Callable[..., Any], ...]:
    """Return PyG's functions by which convolutions change edges and their data. Functions that answer questions are
    left out, as are those that sum edges to rows on the way."""
    no_calls = ("is_", "contains_", "get_laplacian")
    return tuple(f for name, f in vars(utils).items() if isfunction(f) and not name.startswith(no_calls))


join_relations = hetero_conv.group
"""How ``HeteroConv`` combines what a node gets over several edge types."""


def _group_in_one_call(found: list[Any], aggr: str | None) -> Any:
    """``join_relations`` as a single call of a trace: its own calls would stack rows, which no stage does."""
    if len(found) < 2 or aggr is None or aggr == "cat":
        return join_relations(found, aggr)
    return found[0].tracer.create_proxy("call_function", join_relations, (found, aggr), {})


def is_of_edges(node: fx.Node) -> bool:
    """Whether it is the model's edges, also flipped, or columns of their data."""
    return bool(_edge_input_of(node))


def _edge_input_of(node: fx.Node) -> str:
    """Return the name of the model's input that ``node`` is in this sense, or ""."""
    if node.op == "placeholder":
        return str(node.target) if str(node.target).startswith("edge_") else ""
    of_first = _edge_input_of(node.all_input_nodes[0]) if node.all_input_nodes else ""
    if node.target in ("flip", torch.flip, "to"):
        return of_first
    takes_columns = node.op != "call_module" and (node.target is operator.getitem or node.target in WHOLE)
    return of_first if takes_columns and of_first != "edge_index" else ""


def _computes_from_edges(node: fx.Node) -> bool:
    """Return whether the call computes something else of the edges than their product, as a matrix, with rows."""
    if node.target in PRODUCTS and node.args and node.args[0] is node.all_input_nodes[0] and is_of_edges(node.args[0]):
        return any(map(is_of_edges, node.all_input_nodes[1:]))
    return node.op != "call_module" and not is_of_edges(node) and any(map(is_of_edges, node.all_input_nodes))


@contextmanager
def _without_compile() -> Iterator[None]:
    """A context in which whatever ``torch.compile`` has made runs as it was before: a trace cannot follow it, and
    compiling for a small graph takes long."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    with _nested_traces(), torch.compiler.set_stance("force_eager"):
        yield


def uncached(conv: nn.Module | None) -> AbstractContextManager[Any]:
    """A context in which a PyG convolution neither caches what it makes of edges nor uses an earlier cache, which may
    be of another graph."""
    names = [*vars(conv)] if isinstance(getattr(conv, "cached", None), bool) else []
    kept: dict[str, Any] = dict.fromkeys(name for name in names if name.startswith("_cached")) | (
        {"cached": False} if names else {}
    )
    return mock.patch.multiple(conv, **kept) if kept else nullcontext()


def _without_checkpointing() -> Any:
    """A context in which ``torch.utils.checkpoint`` just calls its function: the planner decides what is recomputed."""
    return mock.patch.object(CheckpointFunction, "apply", staticmethod(lambda run, preserve, *args: run(*args)))


@cache
def _nested_traces() -> Any:
    """A context in which traces may meet what ``torch.compile`` has made. There is one for all, as torch keeps
    something for each."""
    import torch._dynamo.config as compiling

    return compiling.patch(error_on_nested_fx_trace=False)


class ModuleState:
    """The state of a module and its submodules, to compare with later and to restore."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [
            (
                name,
                one,
                dict(vars(one)),
                {key: _copy_container(value) for key, value in vars(one).items()},
            )
            for name, one in module.named_modules()
        ]
        """Each submodule with its name, its attributes, and copies of these."""
        own = (value for _, _, attributes, _ in self._modules for value in attributes.values())
        self._written = {id(one): one._version for one in own if isinstance(one, Tensor)}
        self.buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()]

    def changed(self, *, tensors: bool = True) -> Iterator[str]:
        """Yield the buffers and plain attributes, with ``tensors`` also tensors, that have changed. An attribute that
        was None, or is a proxy now, is a cached result and does not count."""
        for name, buffer, value in self.buffers:
            if not torch.equal(buffer, value):
                yield f"buffer {name.removeprefix('model.')}"
        plain = _PLAIN if tensors else _PLAIN[:-1]
        for name, one, _, attributes in self._modules:
            for key, old in attributes["_buffers"].items():
                if one._buffers.get(key) is not old:
                    yield f"buffer {_path(name, key)}"
            for key, old in attributes.items():
                new = vars(one).get(key)
                is_kept = tensors and new is old and isinstance(new, Tensor)
                is_written = is_kept and new._version != self._written.get(id(new), 0)
                if is_written or (isinstance(old, plain) and isinstance(new, plain) and not _equal(old, new)):
                    yield f"attribute {_path(name, key)}"

    def spoil(self) -> list[str]:
        """Overwrite with NaN or zeros the attributes that are other tensors than before, and return their names, so
        that any use of them shows."""
        found = []
        for name, one, originals, _ in self._modules:
            for key, value in vars(one).items():
                if isinstance(value, Tensor) and value is not originals.get(key):
                    nothing = torch.nan if value.is_floating_point() else 0
                    vars(one)[key] = torch.full_like(value, nothing, requires_grad=False)
                    found.append(_path(name, key))
        return found

    def restore(self) -> None:
        for _, one, originals, attributes in self._modules:
            for key, original in originals.items():
                if type(original) is list:
                    original[:] = attributes[key]
                elif isinstance(original, dict) and not _same_items(original, attributes[key]):
                    original.clear()
                    original.update(attributes[key])
            now = vars(one)
            if now.keys() != originals.keys() or any(now[key] is not value for key, value in originals.items()):
                now.clear()
                now.update(originals)
        with torch.no_grad():
            for _, buffer, value in self.buffers:
                buffer.copy_(value)


@contextmanager
def _restoring(module: nn.Module) -> Iterator[ModuleState]:
    """A context after which attributes, buffers and random generators are as they were."""
    before, (python, arrays, tensors) = ModuleState(module), _random_states()
    try:
        yield before
    finally:
        before.restore()
        random.setstate(python)
        np.random.set_state(arrays)
        torch.random.set_rng_state(tensors)


def _random_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


def _same_random_states(before: tuple[Any, Any, Tensor], after: tuple[Any, Any, Tensor]) -> bool:
    arrays = zip(before[1], after[1], strict=True)
    return before[0] == after[0] and all(np.array_equal(*pair) for pair in arrays) and torch.equal(before[2], after[2])


def _path(module: str, attribute: str) -> str:
    return ".".join(filter(None, [module.removeprefix("model").lstrip("."), attribute]))


def _same_items(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether they have the very same values in the same order."""
    return [*one] == [*other] and all(value is other[key] for key, value in one.items())


def _copy_container(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other or (isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other))
    return bool(one == other)


def _results_agree(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Whether results agree. A number that is zero except for rounding may differ by the rounding of what it came from:
    of the largest number of all."""
    largest = max(
        (_largest_magnitude(one) * torch.finfo(one.dtype).eps for one in expected if one is not None), default=0.0
    )
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(_all_close(*pair, floor=_ROUNDINGS * largest) for pair in pairs)


def _largest_magnitude(one: Tensor) -> float:
    return max((float(part.abs().nan_to_num(0.0, 0.0).max()) for part in _split_numbers(one)), default=0.0)


def _all_close(one: Tensor | None, other: Tensor | None, *, floor: float) -> bool:
    if one is None or other is None:
        return one is other
    tolerances = {"rtol": _TOLERANCE, "atol": _TOLERANCE * _largest_magnitude(other) + floor}
    pairs = (
        zip(_split_numbers(one), _split_numbers(other), strict=True) if one.shape == other.shape else ((one, other),)
    )
    return all(a.shape == b.shape and torch.allclose(a, b, **tolerances, equal_nan=True) for a, b in pairs)


def _split_numbers(one: Tensor) -> Sequence[Tensor]:
    """Return all of a tensor's numbers, a few at a time: comparing a gradient as large as the widest weight makes
    several copies."""
    return one.reshape(-1).chunk(1 + one.numel() // _NUMBERS_AT_ONCE) if one.numel() else ()


def _describe_call(node: fx.Node) -> tuple[str, str, list[str]]:
    """Return what a node calls, and with which numbers."""
    target = str(node.target)
    given = [repr(one) for one in tree_leaves((node.args, node.kwargs)) if isinstance(one, _PLAIN[:-2])]
    return node.op, CONSTANT if target.startswith(CONSTANT) else target, given


# ---- what a user has put in the place of a module's own parts ---------------------------------------------
#
# A formula for a module holds for its class as it is written: for what it has inside by its constructor, and for its
# own functions. So whoever computes by a formula asks here first.


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes x Wᵀ + b with parameters of its own; a subclass may do anything else."""
    parts: Any = module
    return (
        type(module) in LINEAR
        and not replaced_functions(module)
        and isinstance(parts.weight, nn.Parameter)
        and (parts.bias is None or isinstance(parts.bias, nn.Parameter))
    )


def replaced_functions(module: nn.Module) -> list[str]:
    """Return the methods, ``forward`` and those it may call, that the instance has replaced."""
    return [name for name in vars(module) if _is_computing(type(module), name) and not _is_set_by_pyg(module, name)]


def unbound_replacements(module: nn.Module) -> list[str]:
    """Return those of ``replaced_functions`` that are not bound to the module, and would stay with it when it is
    copied."""
    return [name for name in replaced_functions(module) if getattr(vars(module)[name], "__self__", None) is not module]


def _is_computing(kind: type[nn.Module], name: str) -> bool:
    if not callable(getattr(kind, name, None)):
        return False
    return name == "forward" or not (hasattr(nn.Module, name) or name == "reset_parameters")


def _is_set_by_pyg(module: nn.Module, name: str) -> bool:
    """Whether PyG has set ``propagate`` on the instance, as with ``decomposed_layers``; it gives the same."""
    if name != "propagate" or not isinstance(module, MessagePassing):
        return False
    own = [getattr(type(module), propagate, None) for propagate in ("_orig_propagate", "_jinja_propagate")]
    return getattr(vars(module)[name], "__func__", name) in own
