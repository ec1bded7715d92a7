# SPDX-License-Identifier: Apache-2.0
"""Convolutions without a formula, run either *opened* or as a whole.

Opened, the calls of the convolution's forward are traced, and only those that look at edges run as they are. A
convolution is opened if a trace can follow it, unless more columns would be gathered that way; if one way fails, the
other is tried.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import fx, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree

from ooc.errors import ModelError, OocError
from ooc.model.graph import ends_of_edges
from ooc.model.layers.layer import EdgeInput, Graph, Layer, NoFormulaError, layer_of
from ooc.model.layers.opaque import lower_opaque
from ooc.model.layers.propagation import ADD_UP, BY_INDEX, COUNTS, EdgeCall, lower_propagation
from ooc.model.lowering.assembly import Assembly, Setting
from ooc.model.lowering.calls.interpreter import Interpreter, message_of
from ooc.model.lowering.calls.stand_ins import leaves_of
from ooc.model.lowering.messages.hoisted import lower_hoisted
from ooc.model.lowering.messages.summed import (
    lower_degree,
    lower_sum,
    propagates_as_pyg,
    takes_rows_alone,
)
from ooc.model.lowering.symbolic import Calls, calls_of, small_inputs, small_rows
from ooc.model.lowering.values import Codes, RowCount, Value
from ooc.model.lowering.whole import CalledByName, with_arguments
from ooc.plan.workload import EdgeData

_WIDER = 1.5
"""An opened convolution may gather at most this many times the columns that it is given; with more, it runs as a
whole."""


@dataclass(frozen=True)
class Opened:
    """A convolution in the module ``whole``, which passes it its arguments, and the ``calls`` of its forward. ``sums``:
    run it this way only if its ``propagate`` is a sum of rows, or of an edge function."""

    whole: nn.Module
    calls: Calls
    sums: bool = False


def lower_as_it_is(
    conv: nn.Module,
    assembly: Assembly,
    where: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: tuple[Any, ...] = (),
) -> Value:
    """Lower a convolution without a formula, or another module that takes edges; if it returns several results,
    ``parts`` of them side by side. Raises ModelError if it can be run neither opened nor as a whole."""
    layer, rows = layer_of(conv, where, args, kwargs, parts)
    if assembly.setting.types is not None and layer.relation is None:
        raise layer.refuse("it takes edges of one type; of a graph with edge_type it would take all alike")
    traced = assembly.setting.traced
    asked = layer.tails, layer.codes, layer.carried, layer.plain, parts, layer.ends, layer.own, layer.relation
    key = conv, "opened", conv.training, str(asked)
    if key not in traced:
        ways, why = list[Opened | None](), list[str]()
        ways += _list_ways(layer, assembly.setting, why, [gcn_norm] if takes_rows_alone(conv) else [])
        traced[key] = ways, why
    ways, why = traced[key]

    def by(opened: Opened | None) -> Value:
        if opened is None:
            return lower_opaque(conv, where, args, kwargs, assembly, parts=parts)
        return _ConvolutionInterpreter(opened, layer, assembly).run_on(rows)

    while len(ways) > 1 or ways[0] is not None:
        try:
            with assembly.attempt():
                return by(ways[0])
        except Exception as error:  # the user's code may raise anything when given proxies
            if isinstance(error, OocError) and not isinstance(error, ModelError):
                raise
            if ways[0] is not None and not ways[0].sums:
                why.append(message_of(error))
            del ways[0]
            ways += [] if ways else _list_ways(layer, assembly.setting, why)
    try:
        return by(ways[0])
    except ModelError as error:
        if why and str(error) not in why[0]:
            raise ModelError(f"{error}; it runs as a whole, since {why[0]}") from error
        raise


def _list_ways(
    layer: Layer, setting: Setting, why: list[str], whole: Sequence[Callable[..., Any]] = ()
) -> list[Opened | None]:
    """Return the ways to run it, the best first: opened, or None for as a whole; ``why`` collects the reasons against
    opening. If it calls one of the ``whole`` functions of edges, the only way is as a sum; other ways are tried if that
    fails."""
    try:
        opened = _trace_calls(layer, setting, whole)
    except Exception as error:
        if isinstance(error, OocError) and not isinstance(error, ModelError):
            raise
        if whole:
            return _list_ways(layer, setting, why)
        why.append(message_of(error))
        return [None]
    if any(node.target in whole for node in opened.calls.nodes):
        return [replace(opened, sums=True)]
    is_wider = _gathered_columns(opened.calls) > _WIDER * sum(map(prod, layer.tails.values()))
    ways = [None, opened, None] if is_wider else [opened, None]
    sums = [replace(opened, sums=True)] if is_wider and propagates_as_pyg(layer.module) else []
    return [*sums, *ways]


def _gathered_columns(calls: Calls) -> int:
    """Return the columns of all rows that calls on edges gather together."""
    needed, total = dict[fx.Node, set[fx.Node]](), 0
    for node in calls.nodes:
        of_edges = [needed[one] for one in node.all_input_nodes if one in needed]
        if of_edges or (node.op == "placeholder" and node not in calls.tails):
            own = {one for one in node.all_input_nodes if one in calls.tails and one not in needed}
            needed[node] = own.union(*of_edges)
        if node.target in ("propagate", *ADD_UP):
            total += sum(prod(calls.tails[one]) for one in needed.pop(node, ())) or 1
    return total


def _trace_calls(layer: Layer, setting: Setting, whole: Sequence[Callable[..., Any]]) -> Opened:
    """Return the layer, a convolution, with the calls of its forward, in which the ``whole`` functions of edges are
    single calls."""
    _, edge_index, weight, features = small_inputs(1, setting.features_of_edges(layer.relation), dtype=setting.dtype)
    tried = [small_rows(tail, dtype=setting.dtype) for tail in layer.tails.values()]
    tried = [(x > 0).long() if name in layer.codes else x for name, x in zip(layer.rows, tried, strict=True)]
    carried = {EdgeData.WEIGHT: weight, EdgeData.FEATURES: features.abs() % 2}  # 0 or 1 as whole numbers
    tried += [edge_index, *(one.of(carried[one.data]) for one in layer.carried.values())]
    names = [*layer.rows, layer.edges, *layer.carried]
    arguments = [f"{'x' if at < len(layer.rows) else 'edge'}_{at}" for at in range(len(names))]
    arguments[len(layer.rows)] = "edge_index"
    how: dict[str, Any] = {"ends": layer.ends, "parts": layer.parts}
    opened = with_arguments(CalledByName, arguments, layer.module, names, layer.plain, **how)
    options: dict[str, Any] = {"rows": len(layer.rows) - len(layer.codes), "opened": layer.module, "whole": whole}
    key = layer.module, "calls", layer.module.training, layer.kind, layer.relation, *whole
    return Opened(*calls_of(setting, key, layer.where, lambda: (opened, tried), **options))


def _scatters_rows(step: EdgeCall) -> bool:
    """Return whether the call makes rows from edges: with a given number of rows, or by adding to given rows."""
    if step.target in (*ADD_UP, *COUNTS):
        return any(isinstance(one, RowCount) for one in (*step.args[1:], *step.kwargs.values()))
    to = step.args[0] if step.target in BY_INDEX else None
    made = leaves_of((to.args, dict(to.kwargs))) if isinstance(to, EdgeCall) else [to]
    return any(isinstance(one, Value if made == [to] else RowCount) for one in made)


class _ConvolutionInterpreter(Interpreter):
    """Runs a convolution's calls. Calls that look at edges are deferred until all of them are computed together."""

    def __init__(self, opened: Opened, layer: Layer, assembly: Assembly) -> None:
        super().__init__(opened.whole, assembly)
        self._calls, self._sums = opened.calls, opened.sums
        self._conv = layer.module
        self._layer, self._where = layer, layer.where
        self._random_calls: set[EdgeCall] = set()
        self._used_random_calls: set[EdgeCall] = set()
        """Calls that draw random numbers, and those of them that some sum already uses."""

    def run_on(self, rows: Sequence[Value]) -> Value:
        """Return what the convolution gives for these rows, which are recorded as its input."""
        layer, assembly = self._layer, self._assembly
        given = dict(zip(layer.rows, rows, strict=True))
        codes = {name: Codes(given[name], layer.tails[name]) for name in layer.codes}
        convolved = [*assembly.convolved]
        if layer.relation is None:
            convolved.append(assembly.matrix(self._where, rows[:1]))
        graph, norms = Graph(layer.flipped, layer.relation), len(assembly.observed)
        result = self.run(self._calls, [*(given | codes).values(), graph, *layer.carried.values()])
        assembly.convolved[:] = convolved
        for moments in assembly.observed[norms:]:
            moments.of += f" of {self._where}"
        return result

    def _result(self, node: fx.Node) -> Any:
        found = leaves_of([self.known[one] for one in node.all_input_nodes])
        if node.op == "output" or not any(isinstance(one, (EdgeCall, Graph, EdgeInput)) for one in found):
            return super()._result(node)
        if node.op != "call_module" and all(isinstance(one, EdgeInput) for one in found):
            with suppress(ModelError):  # inputs that it may be tried on: columns of these, or integers
                if isinstance(part := super()._result(node), EdgeInput):
                    return part
        step = self._defer_call(node, self._where)
        self._random_calls.update([step] if node in self._drawing else [])
        adds_up = node in self._tails and any(map(_scatters_rows, step.with_dependencies()))
        if step.target != "propagate" and not adds_up:
            return step
        drawn = self._random_calls.intersection(step.with_dependencies())
        if drawn & self._used_random_calls:
            raise ModelError(f"{self._where} drops edges, or what these carry, once for several sums")
        self._used_random_calls |= drawn
        if step.target == "propagate" and takes_rows_alone(self._conv):
            with suppress(ModelError), self._assembly.attempt():
                return lower_sum(self._conv, self._where, step, self._assembly)
        if any(one.target is gcn_norm for one in step.with_dependencies()):
            raise NoFormulaError(f"{self._where}: gcn_norm is computed of all edges")
        rows = {one.space: one for one in self.known.values() if isinstance(one, Value)}
        ends = ends_of_edges(self._layer.relation, flipped=self._layer.flipped)
        if step.target == "propagate":
            given = self._conv, self._where, step, rows, self._assembly
            with nullcontext() if self._sums else suppress(ModelError), self._assembly.attempt():
                return lower_hoisted(*given, by_formula=self._sums)
        if step.target is degree:
            with suppress(ModelError), self._assembly.attempt():
                return lower_degree(self._where, step, self._assembly, rows)
        return lower_propagation(self._conv, self._where, step, rows, ends, self._assembly)
