# SPDX-License-Identifier: Apache-2.0
"""Layers whose messages begin with linear maps of the rows at both ends of an edge, which are computed once a row
instead ("hoisted"): W (x_i, x_j, e) = W_i x_i + W_j x_j + W_e e.

Most layers that are no plain sums are of this kind: ``EdgeConv``, ``CGConv``, or a user's network of ``torch.cat((x_i,
x_j))``. PyG multiplies for every edge. Here a message is cut in two. Whatever it computes from the rows of one end
alone, and linear maps of sums, differences and concatenations of both ends, become values, computed for every row. What
is left for edges is often an activation of a sum, or the product of two such, perhaps plus another sum, perhaps
followed by a linear map, which can be moved behind the sum over edges: σ(z_i + z_j) is an edge function
(``ooc.kernels.functions.Product``), which stores nothing for edges. Anything else runs by the general path
(``ooc.model.layers.propagation``), from the values at the ends of edges.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from ooc.errors import ModelError
from ooc.kernels.functions import Activation, Factor, Product
from ooc.model.layers.attention import GATED_TOGETHER
from ooc.model.layers.edge_functions import NO_TERM, EdgeTerm, FunctionSum
from ooc.model.layers.layer import Call, EdgeInput, Graph, NoFormulaError
from ooc.model.layers.propagation import EdgeCall, lower_propagation
from ooc.model.layers.sums import SUMS
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.calls.functions import activation_of
from ooc.model.lowering.calls.interpreter import Interpreter
from ooc.model.lowering.calls.stand_ins import Free, leaves_of, parameter_of
from ooc.model.lowering.messages.summed import (
    MULTIPLY,
    PLAIN,
    UpdateModule,
    argument_and_end,
    calls_of_message,
    check_by_rows,
    degree_of,
    names_of,
    propagates_as_pyg,
)
from ooc.model.lowering.symbolic import is_linear, writes_in_place
from ooc.model.lowering.values import RowCount, Value
from ooc.plan.workload import EdgeData

_WIDER = 2.0
"""Linear maps may gather at most this many times the columns of the unchanged rows; with more, they stay where they
are."""
_SOURCE, _TARGET, _EDGE = 0, 1, 2
"""The ends of an edge, where rows are looked up; and the edge itself, with its data."""
_ADD = {operator.add: 1.0, torch.add: 1.0, "add": 1.0, operator.sub: -1.0, torch.sub: -1.0, "sub": -1.0}
_CONCATENATE = (torch.cat, torch.concat, torch.hstack)
_ROW_INDEPENDENT = (*PLAIN, torch.dtype, torch.device, Free)
"""Arguments unrelated to rows, which are the same at either end, such as a number of columns."""


@dataclass(frozen=True)
class _Term:
    """``factor`` times the rows at one ``end`` of edges, or times data of edges."""

    end: int
    factor: float
    of: Any


@dataclass(frozen=True, eq=False)
class _EndTerms:
    """Stands for a matrix [E, C] of edges: ``blocks`` side by side, each with a number of columns and the sum of its
    terms. With one block and one term, rows may have any ``tail``."""

    blocks: tuple[tuple[int, tuple[_Term, ...]], ...]

    @property
    def ends(self) -> set[int]:
        return {term.end for _, terms in self.blocks for term in terms}


@dataclass(frozen=True, eq=False)
class _Product:
    """Stands for the result of ``node``: the product of one or two such matrices, of one block each, with their
    activations; perhaps a further matrix ``added`` to it, an activation ``outer`` of the whole, and a linear map's
    weight and bias by which it is ``mapped``."""

    factors: tuple[tuple[Activation, float, _EndTerms], ...]
    node: fx.Node
    added: _EndTerms | None = None
    outer: tuple[Activation, float] | None = None
    mapped: tuple[nn.Parameter, nn.Parameter | None] | None = None


@dataclass(frozen=True, eq=False)
class _MappedEdges:
    """Stands for some columns of a weight, each part times a factor, times data of edges."""

    of: Any
    weight: nn.Parameter
    scaled_columns: tuple[tuple[float, slice], ...]


def _end_terms(end: int, value: Any, columns: int | None = None) -> _EndTerms:
    return _EndTerms(((value.columns if columns is None else columns, (_Term(end, 1.0, value),)),))


def lower_hoisted(
    conv: Any,
    where: str,
    last: EdgeCall,
    like: Mapping[str, Value],
    assembly: Assembly,
    *,
    by_formula: bool,
) -> Value:
    """Return what ``last``, a call of the layer's ``propagate``, gives for every row. Raises ModelError if nothing is
    saved in this way, or if ``by_formula`` is asked for and there is no edge function. ``like``: any rows, by node
    type."""
    (owner, index, *sizes), given = last.args, dict(last.kwargs)
    sizes.append(given.pop("size", None))
    if not propagates_as_pyg(conv) or names_of(conv, "update"):
        raise NoFormulaError(f"{where}: it has a propagate of its own")
    if not all(one is None or isinstance(one, RowCount) for one in leaves_of(sizes)):
        raise NoFormulaError(f"{where}: it is told how many rows there are")
    message = _MessageInterpreter(conv, where, given, last, index, assembly)
    found = message.by_formula(like)
    if found is None and (by_formula or assembly.setting.types is not None):
        raise NoFormulaError(f"{where}: its messages are no edge function")
    if found is None:
        target = message.step("call_function", operator.getitem, (index, int(conv.flow == "source_to_target")))
        messages, own = message.of_edges()
        result = message.step("call_method", "aggregate", (owner, messages, target, None, RowCount(like[""])))
        found = lower_propagation(conv, where, result, like, ("", ""), assembly, own)
    return found if type(conv).update is MessagePassing.update else message.apply_module(UpdateModule(conv), found)


class _MessageInterpreter(Interpreter):
    """Runs ``message``: calls on one end run on rows, the others on stand-ins."""

    def __init__(
        self,
        conv: Any,
        where: str,
        given: Mapping[str, Any],
        last: EdgeCall,
        index: Any,
        assembly: Assembly,
    ) -> None:
        plain, rows, edges = dict[str, Any](), dict[str, _EndTerms](), dict[str, _EndTerms]()
        tails, carried_tails = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for name in names_of(conv, "message"):
            one, end = argument_and_end(conv, given, name)
            if isinstance(one, Value) and end is not None and (len(one.tail) == 1 or conv.node_dim == 0):
                rows[name] = _end_terms(end, one)
                tails.append(one.tail)
            elif isinstance(one, EdgeInput) and end is None:
                features = assembly.setting.features_of_edges(one.relation)
                values = torch.zeros(1, *[features] * (one.data is EdgeData.FEATURES))
                carried_tails.append(tuple(one.of(values).shape[1:]))
                edges[name] = _end_terms(_EDGE, one, prod(carried_tails[-1]))
            elif name not in conv.special_args and (one is None or isinstance(one, PLAIN)):
                plain[name] = one
            else:
                raise NoFormulaError(f"{where}: its message takes other things than rows and what edges carry")
        inputs, setting = rows | edges, assembly.setting
        tails += carried_tails
        whole, self._calls = calls_of_message(conv, where, plain, tails, [*inputs], setting, rows=len(rows))
        super().__init__(whole, assembly)
        self._where, self._index, self._conv = where, index, conv
        self._number = last.number
        self._steps: dict[Any, EdgeCall] = {}
        self._saves_maps = False
        self._given = {term.of for one in rows.values() for _, terms in one.blocks for term in terms}
        assembly.calls.append(self._calls)
        waiting = iter(inputs.values())
        for node in self._calls.nodes:
            if node.op == "output":
                self._found = self._look_up(node.args[0])
                return
            self.known[node] = next(waiting) if node.op == "placeholder" else self._result(node)
            self._memory[node] = frozenset([node])  # nothing is written in place

    def of_edges(self) -> tuple[EdgeCall, set[Value]]:
        """Return the call that gives messages, and the rows that targets alone look up. Raises ModelError if linear
        maps of rows save no more than they cost."""
        result = self._defer_matrix(self._found)
        if not isinstance(result, EdgeCall):
            raise NoFormulaError(f"{self._where}: its message gives nothing of edges")
        looked_up = {
            leaf for one in result.with_dependencies() for leaf in leaves_of(one.args) if isinstance(leaf, Value)
        }
        sources, targets = ({one for one in looked_up if (one, end) in self._steps} for end in (_SOURCE, _TARGET))
        own = targets if sources and not sources & targets and looked_up == sources | targets else set[Value]()
        if not self._saves_maps or _count_columns(looked_up - own) > _WIDER * _count_columns(self._given):
            raise NoFormulaError(f"{self._where}: nothing is saved by linear maps of rows")
        return result, own

    def by_formula(self, like: Mapping[str, Value]) -> Value | None:
        """Return the sum of messages by an edge function; None if they are none. ``like``: any rows, by node type."""
        found, index, conv, assembly = self._found, self._index, self._conv, self._assembly
        if isinstance(found, _EndTerms) and len(found.blocks) == 1:
            found = _Product(((Activation.IDENTITY, 0.0, found),), self._calls.nodes[-1])
        is_mean = conv.aggr == "mean"
        if not isinstance(found, _Product) or not (is_mean or conv.aggr in SUMS) or not assembly.setting.on_cpu:
            return None
        if not isinstance(index, Graph) or index.flipped or conv.flow != "source_to_target":
            return None
        columns = found.factors[0][2].blocks[0][0]
        channels = next(c for c in range(min(GATED_TOGETHER, columns), columns + 1) if columns % c == 0)
        sources, targets, maps, factors = list[Value](), list[Value](), list[list[_Term]](), list[Factor]()
        carried = EdgeInput(EdgeData.FEATURES, index.relation)  # linear maps of these become part of the function
        more = () if found.added is None else ((Activation.IDENTITY, 0.0, found.added),)
        for activation, constant, matrix in (*found.factors, *more):
            ((_, terms),) = matrix.blocks
            at_ends = [[term for term in terms if term.end == end] for end in (_SOURCE, _TARGET, _EDGE)]
            maps.append(at_ends[_EDGE])
            mapped = [term.of.of if isinstance(term.of, _MappedEdges) else None for term in at_ends[_EDGE]]
            if not (at_ends[_SOURCE] or at_ends[_TARGET]) or any(one != carried for one in mapped):
                return None
            for rows, some in ((sources, at_ends[_SOURCE]), (targets, at_ends[_TARGET])):
                rows += [self._sum_terms(some)] if some else []
            factors.append(Factor(activation, constant, bool(at_ends[_SOURCE]), bool(at_ends[_TARGET])))
        is_more = found.added is not None or found.outer is not None
        if not sources or (is_more and any(maps)):
            return None
        call = Call(self._where, {"edge_index": index}, assembly, self.apply_module)
        features = assembly.setting.features_of_edges(index.relation)
        term, number = self._term(maps, features, channels), len(found.factors)
        outer = Factor(*found.outer or ())
        function = Product(1, tuple(factors[:number]), factors[number] if more else None, outer)
        make = partial(
            FunctionSum,
            channels=channels,
            columns=columns,
            functions=lambda groups: replace(function, groups=len(groups)),
            term=term,
        )
        if term.features:
            assembly.edge_data.add(EdgeData.FEATURES)
        ends = [self._interleave(rows, channels) for rows in (sources, targets) if rows]
        total = call.per_edge(make, *ends)
        if is_mean:
            count = degree_of(call, index, like)
            total = assembly.rowwise(self._where, lambda rows, n: rows / n.clamp(min=1.0), [total, count])
        if found.mapped is None:
            return total
        weight, bias = found.mapped
        if bias is None:
            return assembly.linear(total, weight)
        return self._with_bias(total, degree_of(call, index, like), weight, bias, is_mean=is_mean)

    def _with_bias(
        self, total: Value, count: Value, weight: nn.Parameter, bias: nn.Parameter, *, is_mean: bool
    ) -> Value:
        """Return the sum, or mean, of messages whose map was moved behind it, with the bias as often as there are
        edges."""

        def append_count(rows: Tensor, count: Tensor) -> Tensor:
            return torch.cat((rows, count.clamp(max=1.0) if is_mean else count), dim=1)

        def made() -> tuple[Tensor, None]:
            return torch.cat((weight, bias[:, None]), dim=1), None

        with_count = self._assembly.rowwise(self._where, append_count, [total, count])
        return self._assembly.projection(with_count, made, [weight, bias])

    @staticmethod
    def _term(maps: Sequence[Sequence[_Term]], features: int, channels: int) -> EdgeTerm:
        """Return what edge features add to each factor."""
        weights = tuple(dict.fromkeys(term.of.weight for terms in maps for term in terms))
        if not weights:
            return NO_TERM
        like = weights[0]

        def made() -> tuple[Tensor, None]:
            none = like.new_zeros(len(like), features)
            parts = [
                sum((_combine_columns(t.of.weight, t.of.scaled_columns) * t.factor for t in terms), none)
                if terms
                else none
                for terms in maps
            ]
            by_group = torch.stack([part.view(-1, channels, features) for part in parts], dim=1)
            return by_group.flatten(0, 2), None

        return EdgeTerm(features, len(maps) * channels, made, weights)

    def _interleave(self, rows: Sequence[Value], channels: int) -> Value:
        """Return matrices interleaved, this many columns of each in turn."""
        if len(rows) == 1:
            return rows[0]

        def in_turn(*parts: Tensor) -> Tensor:
            return torch.stack([part.reshape(len(part), -1, channels) for part in parts], dim=2).flatten(1)

        return self._assembly.rowwise(self._where, in_turn, rows)

    def step(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> EdgeCall:
        """Return a further call on edges."""
        self._number += 1
        return EdgeCall(self._number, kind, target, args, kwargs or {})

    def _result(self, node: fx.Node) -> Any:
        given = [self.known[one] for one in node.all_input_nodes]
        of_edges = [one for one in given if isinstance(one, (_EndTerms, _Product, EdgeCall))]
        if not of_edges:
            return super()._result(node)
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        if self._writes_in_place(node) and not self._is_made_for(node):
            raise NoFormulaError(f"{self._where}: its message writes in place")
        args, kwargs = self._arguments(node)
        found: Any = self._combine_linearly(node, args, kwargs)
        if found is None:
            found = self._map_linearly(node, module, args, kwargs)
        if found is None and len({end for one in of_edges if isinstance(one, _EndTerms) for end in one.ends}) == 1:
            found = self._hoist_to_end(node, given)
        if found is None:
            found = self._make_product(node, module, args, kwargs)
        return self._defer_edge_call(node) if found is None else found

    def _writes_in_place(self, node: fx.Node) -> bool:
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        return writes_in_place(node) or bool(getattr(module, "inplace", False))

    def _is_made_for(self, node: fx.Node) -> bool:
        """Whether the operand of ``node`` was made by a linear map for it alone."""
        (operand,) = node.all_input_nodes if len(node.all_input_nodes) == 1 else (node,)
        maker = self._modules.get(str(operand.target)) if operand.op == "call_module" else None
        return maker is not None and is_linear(maker) and len(operand.users) == 1

    # ---- what is linear ----------------------------------------------------------------------------------

    def _combine_linearly(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _EndTerms | None:
        """Return a sum, difference, multiple or concatenation of such matrices; None for anything else."""
        target = node.target
        if target in _CONCATENATE and args:
            rest = [*args[1:], *kwargs.values()]
            given: Any = node.args[0]
            parts = [part for pair in zip(given, args[0], strict=True) if (part := self._as_matrix(*pair)) is not None]
            if len(parts) == len(given) and (rest in ([1], [-1]) or (target is torch.hstack and not rest)):
                return _EndTerms(tuple(block for part in parts for block in part.blocks))
        if kwargs or len(args) != 2 - (target in (operator.neg, torch.neg, "neg")):
            return None
        if target in _ADD:
            first, second = (self._as_matrix(*pair) for pair in zip(node.args, args, strict=True))
            if first is not None and second is not None and _widths(first) == _widths(second):
                return _merge_terms(first, _scale_terms(second, _ADD[target]))
        elif target in (operator.neg, torch.neg, "neg"):
            first = self._as_matrix(node.args[0], args[0])
            return None if first is None else _scale_terms(first, -1.0)
        elif target in (operator.mul, torch.mul, "mul"):
            numbers = [one for one in args if isinstance(one, (int, float))]
            found = [
                self._as_matrix(*pair) for pair in zip(node.args, args, strict=True) if isinstance(pair[0], fx.Node)
            ]
            if numbers and found and found[0] is not None:
                return _scale_terms(found[0], float(numbers[0]))
        return None

    def _as_matrix(self, node: Any, found: Any) -> _EndTerms | None:
        """Return ``found``, the result of ``node``, if it is a matrix of edges."""
        if isinstance(found, EdgeCall):
            sample = self._calls.tails.get(node)
            return _end_terms(_EDGE, found, sample[0]) if sample is not None and len(sample) == 1 else None
        is_matrix = isinstance(found, _EndTerms) and len(self._calls.tails.get(node, ())) == 1
        return found if is_matrix else None

    def _map_linearly(
        self, node: fx.Node, module: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _EndTerms | _Product | None:
        """Return a linear map of a matrix that involves ends, or of a product; None for anything else."""
        if not args or kwargs:
            return None
        weight: Any = None
        bias: Any = None
        if module is not None and is_linear(module) and len(args) == 1:
            weight, bias = module.weight, module.bias
        elif node.target is F.linear:
            given = (*args[1:], None, None)[:2]
            weight, bias = (one if (of := parameter_of(one)) is None else of for one in given)
        if not isinstance(weight, nn.Parameter) or not (bias is None or isinstance(bias, nn.Parameter)):
            return None
        if isinstance(args[0], _Product) and args[0].mapped is None:
            return replace(args[0], node=node, mapped=(weight, bias))
        matrix = self._as_matrix(node.args[0], args[0])
        if matrix is None or matrix.ends == {_EDGE}:
            return None
        self._saves_maps = True
        stops = [*accumulate(columns for columns, _ in matrix.blocks)]
        places = [slice(*ends) for ends in pairwise((0, *stops))]
        by_rows = dict[tuple[int, Any], list[tuple[float, slice]]]()
        for place, (_, terms) in zip(places, matrix.blocks, strict=True):
            for term in terms:
                by_rows.setdefault((term.end, term.of), []).append((term.factor, place))
        found = list[_Term]()
        for end, of in sorted(by_rows, key=lambda one: (_TARGET, _SOURCE, _EDGE).index(one[0])):
            scaled_columns, own = by_rows[end, of], None if found else bias
            if end == _EDGE:
                rows: Any = _MappedEdges(of, weight, tuple(scaled_columns))
            else:
                rows = self._multiplied_rows(of, weight, own, scaled_columns)
            found.append(_Term(end, 1.0, rows))
        return _EndTerms(((weight.shape[0], tuple(found)),))

    def _multiplied_rows(
        self,
        rows: Value,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        scaled_columns: Sequence[tuple[float, slice]],
    ) -> Value:
        """Return rows times the sum of some columns of the weight, each times a factor."""
        if scaled_columns == [(1.0, slice(0, weight.shape[1]))]:
            return self._functions.linear(rows, weight, bias, self._where)

        def made() -> tuple[Tensor, Tensor | None]:
            return _combine_columns(weight, scaled_columns), bias

        return self._assembly.projection(rows, made, [one for one in (weight, bias) if one is not None])

    def _make_product(
        self, node: fx.Node, module: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Product | None:
        """Return an activation of a matrix of both ends, the product of two such, or with something added or an
        activation of the whole; None for anything else."""
        if node.target in MULTIPLY and len(args) == 2 and not kwargs:
            factors = [self._factors(*pair) for pair in zip(node.all_input_nodes, args, strict=False)]
            if len(factors) == 2 and len(factors[0]) == len(factors[1]) == 1:
                pair = factors[0][0], factors[1][0]
                return _Product(pair, node) if _widths(pair[0][2]) == _widths(pair[1][2]) else None
            return None
        if node.target in _ADD and len(args) == 2 and not kwargs:
            return self._sum_with_product(node, args)
        known = activation_of(node.target if module is None else module, args, kwargs)
        if known is not None and isinstance(args[0], _Product) and args[0].outer is None and args[0].mapped is None:
            return replace(args[0], node=node, outer=known)
        matrix = None if known is None else self._as_matrix(node.all_input_nodes[0], args[0])
        if known is None or matrix is None or len(matrix.blocks) > 1 or matrix.ends == {_EDGE}:
            return None
        return _Product(((*known, matrix),), node)

    def _sum_with_product(self, node: fx.Node, args: Sequence[Any]) -> _Product | None:
        """Return a product plus or minus another matrix; None for another sum."""
        at = int(isinstance(args[1], _Product) and _ADD[node.target] == 1)
        product, matrix = args[at], self._as_matrix(node.args[1 - at], args[1 - at])
        if not isinstance(product, _Product) or product.added or product.outer or product.mapped or matrix is None:
            return None
        is_alike = _widths(matrix) == _widths(product.factors[0][2]) and _EDGE not in matrix.ends
        return (
            replace(product, node=node, added=_scale_terms(matrix, 1.0 if at else _ADD[node.target]))
            if is_alike
            else None
        )

    def _factors(self, node: fx.Node, found: Any) -> tuple[tuple[Activation, float, _EndTerms], ...]:
        if isinstance(found, _Product):
            return () if found.added or found.outer or found.mapped else found.factors
        matrix = self._as_matrix(node, found)
        if matrix is None or len(matrix.blocks) > 1 or matrix.ends == {_EDGE}:
            return ()
        return ((Activation.IDENTITY, 0.0, matrix),)

    # ---- rows, and edges ---------------------------------------------------------------------------------

    def _hoist_to_end(self, node: fx.Node, given: Sequence[Any]) -> Any:
        """Return a function of the rows at one end of edges; None if it must be computed for edges."""
        ends = {end for one in given if isinstance(one, _EndTerms) for end in one.ends}
        if ends == {_EDGE} or any(isinstance(one, (EdgeCall, _Product)) for one in given):
            return None
        (end,) = ends
        before = {one: self.known[one] for one in node.all_input_nodes}
        with suppress(ModelError), self._assembly.attempt():
            self.known |= {
                one: self._rows_at_end(found) for one, found in before.items() if isinstance(found, _EndTerms)
            }
            known = {found for one in before if isinstance(found := self.known[one], Value)}
            try:
                found = super()._result(node)
            finally:
                self.known |= before
            if isinstance(found, Value):
                check_by_rows(self._where, found, known)
                self._saves_maps |= found.heavy
                return _end_terms(end, found)
            if all(one is None or isinstance(one, _ROW_INDEPENDENT) for one in leaves_of(found)):
                return found
        return None

    def _rows_at_end(self, matrix: _EndTerms) -> Value:
        """Return the rows at one end whose look-up gives ``matrix``."""
        parts = [self._sum_terms(terms) for _, terms in matrix.blocks]
        return self._assembly.matrix(self._where, parts) if len(parts) > 1 else parts[0]

    def _sum_terms(self, terms: Sequence[_Term]) -> Value:
        if len(terms) == 1 and terms[0].factor == 1:
            found: Value = terms[0].of
            return found
        return self._assembly.sum([(term.factor, term.of) for term in terms])

    def _defer_edge_call(self, node: fx.Node) -> EdgeCall:
        """Return a call that is made on edges, with its arguments."""

        def given(one: fx.Node) -> Any:
            found = self.known[one]
            of_none = isinstance(found, Free) and not found.has_sums(self._where)
            return self._defer_edge_call(one) if of_none else self._defer_matrix(found)

        if self._writes_in_place(node):
            raise NoFormulaError(f"{self._where}: its message writes in place")
        if node not in self._steps:
            args, kwargs = fx.map_arg((node.args, node.kwargs), given)
            self._steps[node] = self.step(node.op, node.target, args, kwargs)
        return self._steps[node]

    def _defer_matrix(self, found: Any) -> Any:
        """Return the call that looks up rows of both ends, if ``found`` is made of these."""
        if isinstance(found, _Product):
            return self._defer_edge_call(found.node)
        if not isinstance(found, _EndTerms):
            return found
        if found not in self._steps:
            blocks = [self._defer_sum(terms) for _, terms in found.blocks]
            several = partial(self.step, "call_function", torch.cat, (blocks, -1))
            self._steps[found] = several() if len(blocks) > 1 else blocks[0]
        return self._steps[found]

    def _defer_sum(self, terms: Sequence[_Term]) -> Any:
        for end in (_SOURCE, _TARGET):
            several = [term for term in terms if term.end == end]
            if len(several) > 1:  # are added up row by row
                others = (term for term in terms if term.end != end)
                terms = [*others, _Term(end, 1.0, self._sum_terms(several))]
        total: Any = None
        for term in sorted(terms, key=lambda term: term.factor != 1):
            part = self._edge_data(term.of) if term.end == _EDGE else self._gather_rows(term.of, term.end)
            if total is None:
                total = part if term.factor == 1 else self.step("call_function", torch.mul, (part, term.factor))
            else:
                total = self.step("call_function", torch.add, (total, part), {"alpha": term.factor})
        return total

    def _edge_data(self, of: Any) -> Any:
        """Return data of the edges themselves."""
        if not isinstance(of, _MappedEdges):
            return of
        name = next(name for name, one in self.whole.named_parameters() if one is of.weight)
        weight = self.step("call_function", _combine_columns, (self.step("get_attr", name, ()), of.scaled_columns))
        return self.step("call_function", F.linear, (of.of, weight))

    def _gather_rows(self, rows: Value, end: int) -> EdgeCall:
        """Return rows at one end of the edges."""
        if (rows, end) not in self._steps:
            at = int(end == _TARGET) if self._conv.flow == "source_to_target" else int(end == _SOURCE)
            if end not in self._steps:
                self._steps[end] = self.step("call_function", operator.getitem, (self._index, at))
            self._steps[rows, end] = self.step("call_function", torch.index_select, (rows, 0, self._steps[end]))
        return self._steps[rows, end]


def _count_columns(rows: Iterable[Value]) -> int:
    return sum(one.columns for one in rows)


def _widths(matrix: _EndTerms) -> list[int]:
    return [columns for columns, _ in matrix.blocks]


def _scale_terms(matrix: _EndTerms, factor: float) -> _EndTerms:
    scaled = ((columns, [_Term(t.end, factor * t.factor, t.of) for t in terms]) for columns, terms in matrix.blocks)
    return _EndTerms(tuple((columns, tuple(terms)) for columns, terms in scaled))


def _merge_terms(first: _EndTerms, second: _EndTerms) -> _EndTerms:
    """Return the sum of two lists of terms, merged by what they are of."""
    blocks = list[tuple[int, tuple[_Term, ...]]]()
    for (columns, terms), (_, others) in zip(first.blocks, second.blocks, strict=True):
        factors = dict[tuple[int, Any], float]()
        for term in (*terms, *others):
            factors[term.end, term.of] = factors.get((term.end, term.of), 0.0) + term.factor
        blocks.append((columns, tuple(_Term(end, factor, of) for (end, of), factor in factors.items())))
    return _EndTerms(tuple(blocks))


def _combine_columns(weight: Tensor, scaled_columns: Sequence[tuple[float, slice]]) -> Tensor:
    """Return the sum of some columns of a weight, each part times a factor."""
    parts = [weight[:, place] if factor == 1 else weight[:, place] * factor for factor, place in scaled_columns]
    return sum(parts[1:], parts[0])
