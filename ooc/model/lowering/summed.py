# SPDX-License-Identifier: Apache-2.0
"""A ``propagate`` whose messages are made of the sources' rows alone, be they weighted by the edges: a sum, or another
known aggregation, of rows over neighbours, as of a convolution with a formula.

Most layers that people write are such. What ``message`` makes of x_j is the same for all edges from a node, so it is
computed once a row (PyG computes it once an edge), and edges move columns of it and nothing else.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from ooc.errors import ModelError
from ooc.model.graph import Scaling
from ooc.model.layers.convolutions import replaced_part
from ooc.model.layers.layer import Call, EdgeInput, Graph, NoFormulaError
from ooc.model.layers.propagation import OfEdges
from ooc.model.layers.sums import SUMS, aggregated, normalization
from ooc.model.lowering.assembly import Assembly, check_matrix
from ooc.model.lowering.interpreter import AsItIs, Interpreter, leaves_of
from ooc.model.lowering.projection import Projection
from ooc.model.lowering.rectified import ExponentialLinear, Rectified, Sigmoidal
from ooc.model.lowering.symbolic import Calls, small_rows
from ooc.model.lowering.values import Dense, Linear, RowCount, Rowwise, Sum, Value
from ooc.model.lowering.whole import with_arguments
from ooc.plan.workload import EdgeData

_BY_ROWS = (Dense, ExponentialLinear, Linear, Projection, Rectified, Rowwise, Sigmoidal, Sum)
"""Values whose rows come of the same rows of their inputs and of parameters, with nothing drawn: so what they are of an
edge's source they are of the source. Norms are none of them: over edges their statistics are others."""
_PLAIN = (bool, int, float, str)
_WEIGHTS = EdgeInput(EdgeData.WEIGHT)
_AS_A_COLUMN: dict[Any, list[Any]] = {
    "view": [(-1, 1)],
    "reshape": [(-1, 1)],
    "unsqueeze": [(-1,), (1,)],
    torch.unsqueeze: [(-1,), (1,)],
    operator.getitem: [((slice(None), None),)],
}
"""What makes [E, 1] of edges' weights [E], with its arguments."""
_WEIGHTED = (Scaling.WEIGHTED_GCN, Scaling.WEIGHTED_GCN_IMPROVED, Scaling.WEIGHTED_GCN_NO_LOOPS)
_MULTIPLY = (operator.mul, torch.mul, torch.multiply, "mul", "multiply")


def takes_rows_alone(conv: nn.Module) -> bool:
    """Whether its ``propagate`` may be such a sum, as far as its functions' arguments tell."""
    if not isinstance(conv, MessagePassing) or replaced_part(conv) or conv.aggr is None or conv.decomposed_layers > 1:
        return False
    hooks = [found for name, found in vars(conv).items() if name.endswith(("_forward_hooks", "_forward_pre_hooks"))]
    names = _names_of(conv, "message")
    if conv.node_dim not in (0, -2):
        return False
    if any(hooks) or not any(name.endswith("_j") for name in names) or _names_of(conv, "update"):
        return False
    own = [getattr(type(conv), name) is not getattr(MessagePassing, name) for name in ("aggregate", "explain_message")]
    return not any(own) and not any(name.endswith("_i") or name in conv.special_args for name in names)


def _names_of(conv: MessagePassing, function: str) -> list[str]:
    return list(conv.inspector.get_param_names(function))


def lower_sum(conv: Any, where: str, last: OfEdges, assembly: Assembly, as_it_is: AsItIs) -> Value:
    """What ``last``, a call of its ``propagate``, gives for every row. ModelError where that is no such sum."""
    (_, graph, *sizes), given = last.args, dict(last.kwargs)
    sizes.append(given.pop("size", None))
    graph, weights, scaling = _edges_of(conv, graph, assembly.setting.dtype)
    if not isinstance(graph, Graph) or not all(one is None or isinstance(one, RowCount) for one in leaves_of(sizes)):
        raise NoFormulaError(f"{where}: its edges are not the graph's own")
    inputs, plain = dict[str, Value | EdgeInput](), dict[str, Any]()
    for name in _names_of(conv, "message"):
        one = _of_source(conv, given, name)
        if isinstance(one, Value) and (len(one.tail) == 1 or conv.node_dim == 0):
            inputs[name] = one
        elif weights(one):
            inputs[name] = _WEIGHTS
        elif one is None or isinstance(one, _PLAIN):
            plain[name] = one
        else:
            raise NoFormulaError(f"{where}: its message takes more than sources' rows")
    message = _OfMessage(conv, where, plain, inputs, assembly, as_it_is)
    rows = message.rows
    flipped = graph.flipped != (conv.flow == "target_to_source")
    weighted = scaling in _WEIGHTED if scaling else message.weighs
    arguments = {"edge_index": replace(graph, flipped=flipped), "edge_weight": _WEIGHTS if weighted else None}
    call = Call(where, arguments, assembly, message.apply)
    call.takes("edge_weight", EdgeData.WEIGHT)
    call.needs(not (scaling or weighted) or (message.weighs and conv.aggr in SUMS))
    if scaling or weighted:
        found: Value = call.aggregate(rows, scaling or Scaling.WEIGHTED_SUM)
    else:
        found = aggregated(call, rows, conv.aggr, conv)
    return found if type(conv).update is MessagePassing.update else call.apply(_Update(conv), found)


def _edges_of(conv: Any, given: Any, dtype: torch.dtype) -> tuple[Any, Callable[[Any], bool], Scaling | None]:
    """Of the edges that ``propagate`` is given: the graph, what tells their weights from all else, and where these are
    those that ``gcn_norm`` makes, which they are."""
    if not isinstance(given, OfEdges):
        return given, lambda one: one == _WEIGHTS, None
    if given.target is not operator.getitem or given.args[1] != 0 or given.args[0].target is not gcn_norm:
        return None, lambda one: False, None
    norm = given.args[0]
    bound = inspect.signature(gcn_norm).bind(*norm.args, **norm.kwargs)
    bound.apply_defaults()
    taken = bound.arguments
    weighted, loops = taken["edge_weight"] == _WEIGHTS, taken["add_self_loops"]
    is_plain = weighted or (taken["edge_weight"] is None and taken["dtype"] == dtype)
    if taken["flow"] != conv.flow or not is_plain or not isinstance(taken["num_nodes"], RowCount):
        return None, lambda one: False, None  # of fewer nodes, the last ones may lack their loops
    scaling = normalization(weighted=weighted, loops=loops, improved=taken["improved"])

    def is_weight(one: Any) -> bool:
        return isinstance(one, OfEdges) and one.target is operator.getitem and one.args == (norm, 1)

    return taken["edge_index"], is_weight, scaling


def _of_source(conv: Any, given: Mapping[str, Any], name: str) -> Any:
    """What ``message`` is given by this name: of rows those of the edges' sources."""
    if not name.endswith("_j"):
        return given.get(name, inspect.signature(conv.message).parameters[name].default)
    one = given[name.removesuffix("_j")]
    return one[conv.flow == "target_to_source"] if isinstance(one, (tuple, list)) and len(one) == 2 else one


class _Message(nn.Module):
    """Calls ``message`` with tensors by their ``names``, and what is ``plain``."""

    def __init__(self, conv: nn.Module, names: Sequence[str], plain: Mapping[str, Any]) -> None:
        super().__init__()
        self.conv = conv
        self.names, self.plain = names, plain

    def call(self, *given: Tensor) -> Any:
        return self.conv.message(**dict(zip(self.names, given, strict=True)), **self.plain)  # type: ignore[operator]


class _Update(nn.Module):
    """Calls ``update`` with what is summed."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, summed: Tensor) -> Any:
        return self.conv.update(summed)  # type: ignore[operator]


class _OfMessage(Interpreter):
    """Runs ``message`` on sources' rows: ``rows`` are what it gives, ``weighs``: times the edges' weights."""

    def __init__(
        self,
        conv: nn.Module,
        where: str,
        plain: Mapping[str, Any],
        inputs: Mapping[str, Value | EdgeInput],
        assembly: Assembly,
        as_it_is: AsItIs,
    ) -> None:
        setting, tails = assembly.setting, [one.tail if isinstance(one, Value) else () for one in inputs.values()]
        key = conv, "message", conv.training, str((tails, [*inputs], plain))
        if key not in setting.traced:
            names = [f"x_{at}" for at in range(len(inputs))]
            whole = with_arguments(_Message, names, conv, [*inputs], plain)
            tried = [small_rows(tail, dtype=setting.dtype) for tail in tails]
            setting.traced[key] = whole, Calls(whole, where, tried, training=setting.training, rows=len(tried))
        whole, calls = setting.traced[key]
        super().__init__(whole, assembly, as_it_is)
        self.weighs = False
        self.rows = self.run(calls, [*inputs.values()])
        check_matrix(self.rows)
        waiting, known = [self.rows], {*inputs.values()}
        while waiting:
            one = waiting.pop()
            if one in known:
                continue
            if not isinstance(one, _BY_ROWS):
                raise NoFormulaError(f"{where}: its message is not made row by row")
            waiting += one.inputs

    def apply(self, module: nn.Module, rows: Value) -> Value:
        """What a module gives for rows."""
        return self._apply_module(module, rows)

    def _result(self, node: fx.Node) -> Any:
        given = [self.known[one] for one in node.all_input_nodes]
        if not any(one == _WEIGHTS or one is _COLUMN for one in given):
            return super()._result(node)
        if given == [_WEIGHTS] and not node.kwargs and node.args[1:] in _AS_A_COLUMN.get(node.target, ()):
            return _COLUMN
        rows = [one for one in given if isinstance(one, Value)]
        is_last = all(user.op == "output" for user in node.users)
        if node.target in _MULTIPLY and len(given) == 2 and _COLUMN in given and rows and is_last:
            self.weighs = True
            return rows[0]
        raise ModelError(f"{node.name} makes something else of the edges' weights than a factor")


_COLUMN = object()
"""Stands for the weights of edges as [E, 1]."""
