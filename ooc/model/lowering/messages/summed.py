# SPDX-License-Identifier: Apache-2.0
"""Layers whose messages are made of the sources' rows alone, perhaps times one number for every edge: a sum, or another
known aggregation, of rows over neighbours, like a convolution with a formula.

Most layers that people write are of this kind. What ``message`` computes from x_j is the same for all edges from a
node, so it is computed once a row (PyG computes it once an edge), and edges only move its columns. The number may be
the edge's weight, the result of ``gcn_norm``, or a product of numbers of the rows at its ends, such as degrees: Σ_j a_i
b_j x_j = a_i Σ_j (b_j x_j). With any other number the sum runs by the general path.
"""

import inspect
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, degree

from ooc.errors import ModelError
from ooc.model.graph import Scaling, ends_of_edges
from ooc.model.layers.convolutions import replaced_part
from ooc.model.layers.layer import Call, EdgeInput, Graph, NoFormulaError
from ooc.model.layers.propagation import EdgeCall
from ooc.model.layers.sums import SUMS, aggregated, normalization
from ooc.model.lowering.assembly import Assembly, Setting, check_matrix, first_line
from ooc.model.lowering.calls.interpreter import Interpreter
from ooc.model.lowering.calls.rowwise import ARITHMETIC
from ooc.model.lowering.calls.stand_ins import leaves_of
from ooc.model.lowering.projection import Linear, Projection
from ooc.model.lowering.rectified import ExponentialLinear, Rectified, Sigmoidal
from ooc.model.lowering.symbolic import Calls, calls_of, small_rows
from ooc.model.lowering.values import Dense, Ones, RowCount, Rowwise, Sum, Value
from ooc.model.lowering.whole import CalledByName, with_arguments
from ooc.plan.workload import EdgeData

_ROWWISE_VALUES = (Dense, ExponentialLinear, Linear, Projection, Rectified, Rowwise, Sigmoidal, Sum)
"""Values whose rows depend only on the same rows of their inputs and on parameters, without random numbers, so that
they may be computed for sources instead of edges. Norms are not among them: their statistics over edges would be
different."""
PLAIN = (bool, int, float, str)
_TO_COLUMN: dict[Any, list[Any]] = {
    "view": [(-1, 1)],
    "reshape": [(-1, 1)],
    "unsqueeze": [(-1,), (1,)],
    torch.unsqueeze: [(-1,), (1,)],
    operator.getitem: [((slice(None), None),)],
}
"""Calls that turn edge weights [E] into [E, 1], with their arguments."""
_VECTOR, _COLUMN = object(), object()
"""Stand for a factor of every edge, as [E] and as [E, 1]."""
_WEIGHTED = (Scaling.WEIGHTED_GCN, Scaling.WEIGHTED_GCN_IMPROVED, Scaling.WEIGHTED_GCN_NO_LOOPS)
MULTIPLY = (operator.mul, torch.mul, torch.multiply, "mul", "multiply")


def takes_rows_alone(conv: Any) -> bool:
    """Whether a layer's ``propagate`` may be such a sum, judging by the arguments of its functions."""
    if not propagates_as_pyg(conv):
        return False
    names = names_of(conv, "message")
    if not any(name.endswith("_j") for name in names) or names_of(conv, "update"):
        return False
    return not any(name.endswith("_i") or name in conv.special_args for name in names)


def propagates_as_pyg(conv: nn.Module) -> bool:
    """Whether a layer's ``propagate`` and what it calls are PyG's, except ``message`` and ``update``. PyG makes a
    ``propagate`` for a class without one, in a module named after the class."""
    kind: Any = type(conv)
    if (
        not isinstance(conv, MessagePassing)
        or replaced_part(conv)
        or conv.aggr is None
        or conv.decomposed_layers > 1
        or conv.node_dim not in (0, -2)
    ):
        return False
    if any(found for name, found in vars(conv).items() if name.endswith(("_forward_hooks", "_forward_pre_hooks"))):
        return False
    made = tuple(f"{one.__module__}_{one.__name__}" for one in kind.__mro__)
    if kind.propagate is not MessagePassing.propagate and not kind.propagate.__module__.startswith(made):
        return False
    calls = "aggregate", "explain_message", "_collect", "_lift", "_index_select", "_check_input", "_set_size"
    return all(getattr(kind, name) is getattr(MessagePassing, name) for name in calls)


def names_of(conv: MessagePassing, function: str) -> list[str]:
    """Return the argument names of one of the layer's functions, ``message`` or ``update``."""
    return list(conv.inspector.get_param_names(function))


@dataclass(frozen=True)
class _Edges:
    """Edges that ``propagate`` may be given: those of a ``graph``, for which ``index`` stands in the trace; with
    ``loops``, plus one from every node to itself; with ``scaling``, weighted by the ``gcn_norm`` call ``norm``."""

    graph: Graph
    index: Any
    loops: bool = False
    scaling: Scaling | None = None
    norm: EdgeCall | None = None

    @property
    def weights(self) -> EdgeInput:
        """The weights of the graph's edges."""
        return EdgeInput(EdgeData.WEIGHT, self.graph.relation)


def lower_sum(conv: Any, where: str, last: EdgeCall, assembly: Assembly) -> Value:
    """Return what ``last``, a call of the layer's ``propagate``, gives for every row. Raises ModelError if it is no
    such sum."""
    (_, index, *sizes), given = last.args, dict(last.kwargs)
    sizes.append(given.pop("size", None))
    edges = _edges_of_index(conv, index, assembly.setting.dtype)
    if edges is None or not all(one is None or isinstance(one, RowCount) for one in leaves_of(sizes)):
        raise NoFormulaError(f"{where}: its edges are not the graph's own")
    inputs, plain, factors = dict[str, Any](), dict[str, Any](), list[tuple[Value, int]]()
    for name in names_of(conv, "message"):
        one, weight = argument_and_end(conv, given, name)[0], _VECTOR
        while isinstance(one, EdgeCall) and one.args[1:] in _TO_COLUMN.get(one.target, ()):
            one, weight = one.args[0], _COLUMN
        if isinstance(one, Value) and (len(one.tail) == 1 or conv.node_dim == 0):  # gathered for each edge
            inputs[name] = one
        elif one is None or isinstance(one, PLAIN):
            plain[name] = one
        elif any(found is _VECTOR or found is _COLUMN for found in inputs.values()):
            raise NoFormulaError(f"{where}: its messages have several factors")
        else:
            inputs[name] = weight
            factors = [] if _are_weights(one, edges) else _row_factors(where, one, edges)
    message = _MessageInterpreter(conv, where, plain, inputs, assembly)
    at_targets = conv.flow == "target_to_source"
    flipped = edges.graph.flipped != at_targets
    weighted = edges.scaling in _WEIGHTED if edges.scaling else message.weighs and not factors
    weights = edges.weights if weighted else None
    arguments = {"edge_index": replace(edges.graph, flipped=flipped), "edge_weight": weights}
    call = Call(where, arguments, assembly, message.apply_module)
    call.takes("edge_weight", EdgeData.WEIGHT)
    is_sum, is_mean = conv.aggr in SUMS, conv.aggr == "mean"
    call.needs(is_sum or not (message.weighs or edges.loops) or (is_mean and not message.weighs))
    call.needs(message.weighs or not edges.scaling)
    call.needs(not (weighted and edges.loops))
    rows, factors = message.rows, factors if message.weighs else []
    rows = scaled(assembly, where, rows, [own for own, end in factors if end == at_targets])
    if message.weighs or edges.loops:
        scaling = edges.scaling or (Scaling.WEIGHTED_SUM if weighted else Scaling.SUM)
        found: Value = call.aggregate(rows, scaling)
    else:
        found = aggregated(call, rows, conv.aggr, conv)
    if edges.loops:
        found = assembly.sum([(1.0, found), (1.0, rows)])
    if edges.loops and is_mean:
        count = degree_of(call, call.arguments["edge_index"], {rows.space: rows})
        found = assembly.rowwise(where, lambda total, n: total / (n + 1.0), [found, count])
    found = scaled(assembly, where, found, [own for own, end in factors if end != at_targets])
    return found if type(conv).update is MessagePassing.update else call.apply(UpdateModule(conv), found)


def lower_degree(where: str, last: EdgeCall, assembly: Assembly, like: Mapping[str, Value]) -> Value:
    """Return every row's degree at one end of edges, for which ``last`` calls PyG's ``degree``. Raises ModelError
    unless these are the graph's own edges, perhaps with self-loops. ``like``: any rows of these nodes, by type."""
    bound = inspect.signature(degree).bind(*last.args, **last.kwargs)
    dtype = bound.arguments.get("dtype") or torch.get_default_dtype()
    edges, end = _end_of(bound.arguments["index"])
    found = None if edges is None else _edges_of_index(None, edges, assembly.setting.dtype)
    if found is None or found.scaling or dtype != assembly.setting.dtype:
        raise NoFormulaError(f"{where}: it counts other edges than the graph's own")
    graph = replace(found.graph, flipped=found.graph.flipped != (end == 0))
    call = Call(where, {"edge_index": graph}, assembly, lambda module, rows: rows)
    more = float(found.loops)
    return assembly.rowwise(where, lambda count: count[:, 0] + more, [degree_of(call, graph, like)])


def degree_of(call: Call, graph: Graph, like: Mapping[str, Value]) -> Value:
    """Return the degrees of rows in ``graph``, which ``call`` is given, [R, 1]. ``like``: any rows, by node type."""
    assembly = call.assembly
    if graph not in assembly.degrees:
        source, _ = ends_of_edges(graph.relation, flipped=graph.flipped)
        assembly.degrees[graph] = call.aggregate(Ones(assembly.next_index(), like[source]), Scaling.SUM)
    return assembly.degrees[graph]


def scaled(assembly: Assembly, where: str, rows: Value, factors: Sequence[Value]) -> Value:
    """Return rows times a number of each row, and another factor."""
    for own in factors:
        rows = assembly.rowwise(where, lambda x, one: x * one[:, None], [rows, own])
    return rows


def _are_weights(one: Any, edges: _Edges) -> bool:
    """Whether ``one`` stands for the weights of these edges."""
    if edges.norm is None:
        return isinstance(one, EdgeInput) and one == edges.weights
    return isinstance(one, EdgeCall) and one.target is operator.getitem and one.args == (edges.norm, 1)


def _edges_of_index(conv: Any, index: Any, dtype: torch.dtype) -> _Edges | None:
    """Return the edges that ``index`` stands for: the graph's, those with PyG's ``add_self_loops``, or those of PyG's
    ``gcn_norm`` for ``conv``; None for any others."""
    if isinstance(index, Graph):
        return _Edges(index, index)
    if not isinstance(index, EdgeCall) or index.target is not operator.getitem or index.args[1] != 0:
        return None
    made = index.args[0]
    if not isinstance(made, EdgeCall) or made.target not in (gcn_norm, add_self_loops):
        return None
    bound = inspect.signature(made.target).bind(*made.args, **made.kwargs)
    bound.apply_defaults()
    taken = bound.arguments
    if not isinstance(taken["edge_index"], Graph) or not isinstance(taken["num_nodes"], RowCount):
        return None  # with fewer nodes, the last ones may lack their self-loops
    if made.target is add_self_loops:
        return _Edges(taken["edge_index"], index, loops=True) if taken["edge_attr"] is None else None
    weighted = taken["edge_weight"] == _Edges(taken["edge_index"], index).weights
    is_plain = weighted or (taken["edge_weight"] is None and taken["dtype"] == dtype)
    if conv is None or taken["flow"] != conv.flow or not is_plain:
        return None
    scaling = normalization(weighted=weighted, loops=taken["add_self_loops"], improved=taken["improved"])
    return _Edges(taken["edge_index"], index, scaling=scaling, norm=made)


def _row_factors(where: str, one: Any, edges: _Edges) -> list[tuple[Value, int]]:
    """Return numbers of rows, each with its end of the edges, whose product is ``one`` for every edge."""
    if isinstance(one, EdgeCall) and one.target in MULTIPLY and len(one.args) == 2:
        return [found for part in one.args for found in _row_factors(where, part, edges)]
    rows, at = one.args if isinstance(one, EdgeCall) and one.target is operator.getitem else (None, None)
    of, end = _end_of(at)
    if edges.scaling or of is None or of != edges.index or not isinstance(rows, Value) or rows.tail != ():
        raise NoFormulaError(f"{where}: its message takes more than sources' rows")
    return [(rows, end)]


def _end_of(index: Any) -> tuple[Any, int]:
    """Return the edges of which ``index`` is one end, and the end; None for anything else."""
    if isinstance(index, EdgeCall) and index.target is operator.getitem and index.args[1] in (0, 1):
        return index.args
    return None, 0


def argument_and_end(conv: Any, given: Mapping[str, Any], name: str) -> tuple[Any, int | None]:
    """Return the argument of ``message`` with this name, and the end of the edges it belongs to: 0 for where messages
    come from, 1 for the other, None for neither. The first of a pair is for sources, whichever way messages go, unless
    PyG has made no ``propagate`` for the class."""
    if not name.endswith(("_j", "_i")):
        return given.get(name, inspect.signature(conv.message).parameters[name].default), None
    one, end = given.get(name[:-2]), int(name.endswith("_i"))
    if isinstance(one, (tuple, list)) and len(one) == 2:
        one = one[end ^ (conv.flow == "target_to_source" and type(conv).propagate is MessagePassing.propagate)]
    return one, end


def check_by_rows(where: str, found: Value, known: Collection[Any]) -> None:
    """Raise ModelError unless the rows depend only on the same rows of ``known``."""
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if one in known:
            continue
        if not isinstance(one, _ROWWISE_VALUES):
            raise NoFormulaError(f"{where}: its message is not made row by row")
        waiting += one.inputs


class UpdateModule(nn.Module):
    """A module that calls ``update`` with the sums."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, summed: Tensor) -> Any:
        return self.conv.update(summed)


def calls_of_message(
    conv: nn.Module,
    where: str,
    plain: Mapping[str, Any],
    tails: Sequence[tuple[int, ...]],
    names: Sequence[str],
    setting: Setting,
    *,
    rows: int | None = None,
) -> tuple[nn.Module, Calls]:
    """Return the calls of ``message``, given rows of these ``tails`` by ``names``, of which the first ``rows`` have
    gradients; and a module that holds ``conv`` and calls it."""
    key = conv, "message", conv.training, str((tails, names, plain, rows))
    options: dict[str, Any] = {"fewest": (min(setting.fewest),) * 2, "opened": None if rows is None else conv}
    options["rows"] = len(tails) if rows is None else rows

    def made() -> tuple[nn.Module, list[Tensor]]:
        arguments = [f"x_{at}" for at in range(len(names))]
        whole = with_arguments(CalledByName, arguments, conv, names, plain, function="message")
        return whole, [small_rows(tail, dtype=setting.dtype) for tail in tails]

    try:
        return calls_of(setting, key, where, made, **options)
    except ModelError:
        raise
    except Exception as error:  # the user's code may raise anything when given proxies
        raise NoFormulaError(f"{where}: its message cannot be traced: {first_line(error)}") from error


class _MessageInterpreter(Interpreter):
    """Runs ``message`` on sources' rows: ``rows`` are its result; ``weighs``: whether these are multiplied by the
    edges' weights."""

    def __init__(
        self,
        conv: nn.Module,
        where: str,
        plain: Mapping[str, Any],
        inputs: Mapping[str, Any],
        assembly: Assembly,
    ) -> None:
        setting, of_weight = assembly.setting, {_VECTOR: (), _COLUMN: (1,)}
        tails = [one.tail if isinstance(one, Value) else of_weight[one] for one in inputs.values()]
        whole, calls = calls_of_message(conv, where, plain, tails, [*inputs], setting)
        super().__init__(whole, assembly)
        self.weighs = False
        self.rows = self.run(calls, [*inputs.values()])
        check_matrix(self.rows)
        check_by_rows(where, self.rows, {*inputs.values()})

    def _result(self, node: fx.Node) -> Any:
        given = [self.known[one] for one in node.all_input_nodes]
        name = getattr(node.target, "__name__", node.target)
        if name in ARITHMETIC and any(isinstance(one, RowCount) for one in given):
            raise ModelError(f"{name} computes with the number of edges, which is not that of rows")
        if not any(one is _VECTOR or one is _COLUMN for one in given):
            return super()._result(node)
        if given == [_VECTOR] and not node.kwargs and node.args[1:] in _TO_COLUMN.get(node.target, ()):
            return _COLUMN
        rows = [one for one in given if isinstance(one, Value)]
        is_last = all(user.op == "output" for user in node.users)
        if node.target in MULTIPLY and len(given) == 2 and _COLUMN in given and rows and is_last:
            self.weighs = True
            return rows[0]
        raise ModelError(f"{node.name} makes something else of the edges' weights than a factor")
