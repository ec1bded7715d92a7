# SPDX-License-Identifier: Apache-2.0
"""The general path of a convolution without a formula: only what it computes of edges, its ``propagate``, runs as it
is.

The convolution's ``forward`` is traced as a model's is. Calls before and after ``propagate`` that look at rows alone
become values, computed once for every row. Calls that look at edges, such as a network of their features or added
self-loops, are deferred as ``EdgeCall`` until ``propagate`` needs them, and are computed with it on the graph around
some rows.

The same holds for other sums of edges to rows, such as degrees: PyG's ``gcn_norm`` becomes two such layers, one that
gives every row its degree, and one that is given their roots as rows of both ends.

Shapes: S nodes of the graph around some rows.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch_geometric.utils import degree, scatter

from ooc.errors import ModelError
from ooc.model.layers.layer import EdgeInput, Graph
from ooc.model.layers.opaque import lower_opaque
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.symbolic import OF_BOTH_ENDS, called
from ooc.model.lowering.values import Codes, Ones, RowCount, Value

ADD_UP = scatter, degree
"""PyG's functions that make rows of edges beside ``propagate``."""
COUNTS = degree, torch.bincount, "bincount"
"""Functions that are given an index alone."""
BY_INDEX = *COUNTS[1:], "index_add", "scatter_add", "scatter_reduce", "index_reduce", torch.index_add, torch.scatter_add
"""Torch's functions that make rows of edges by an index."""
_EXPANSIONS = "unsqueeze", "expand", "expand_as", "view", "repeat", operator.getitem
"""Methods that expand an index before."""
_CONTAINERS = tuple, list, dict, slice
"""Containers of arguments."""


@dataclass(frozen=True, eq=False)
class EdgeCall:
    """A deferred call on edges, from the trace of a convolution or a model. Its arguments may include other such calls,
    calls that depend on parameters alone, rows, edges and their data."""

    number: float
    """The order of calls: later ones may write into the results of earlier ones."""
    kind: str
    """The kind of call, as in torch.fx."""
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: it never changes, so copies of layers share their steps."""
        return self

    def part(self, key: int | str) -> "EdgeCall":
        """Return one of several results."""
        return EdgeCall(self.number + 0.5, "call_function", operator.getitem, (self, key), {})

    @property
    def is_part(self) -> bool:
        """Whether it is one of several results of a module."""
        if self.target is not operator.getitem or type(self.args[1]) not in (int, str):
            return False
        return isinstance(self.args[0], EdgeCall) and self.args[0].kind == "call_module"

    def with_dependencies(self) -> list["EdgeCall"]:
        """Return all calls that it depends on, and itself, in order."""
        found, waiting = set[EdgeCall](), [self]
        while waiting:
            found.add(one := waiting.pop())
            leaves: list[Any] = []
            map_aggregate((one.args, dict(one.kwargs)), leaves.append)
            waiting += [leaf for leaf in leaves if isinstance(leaf, EdgeCall) and leaf not in found]
        return sorted(found, key=lambda one: one.number)


@dataclass(frozen=True)
class _Placeholder:
    """Stands for an argument or result of this name."""

    name: str | int


class Propagation(nn.Module):
    """A module that makes ``steps``, the calls of ``conv`` on edges, in order, and returns the result of the last
    one."""

    def __init__(self, conv: nn.Module, steps: Sequence[EdgeCall]) -> None:
        super().__init__()
        self.conv = conv
        self.flow = _flow_of(steps) or getattr(conv, "flow", "source_to_target")
        self.steps = tuple(steps)
        self.own_rows: tuple[str, ...] = ()
        """Names of targets' rows that lie in a matrix of their own."""

    def forward(self, edge_index: Tensor, **given: Any) -> Any:
        """Run the steps. Rows and edge data have the names that ``steps`` refer to. Rows are those of all nodes [S, …],
        or a pair of these and those of targets, which come first; then nothing is made for other nodes. If targets are
        of another type than sources, or alone look some rows up, those are ``own``."""
        rows = next(values for name, values in given.items() if name.startswith("rows"))
        known: dict[Any, Any] = {**given, "edge_index": edge_index}
        targets = next((values for name, values in given.items() if name.startswith("own")), rows)
        targets = targets[1] if isinstance(targets, tuple) else targets
        known |= {"nodes": len(targets), "sources": len(rows), "dtype": targets.dtype}
        found: Any = None
        for step in self.steps:
            if step.target in OF_BOTH_ENDS:
                args, kwargs = _fill_both_ends(step.args, known), _fill_both_ends(step.kwargs, known)
            else:
                args = [_fill_placeholders(one, known, 0) for one in step.args]
                kwargs = {name: _fill_placeholders(one, known, 0) for name, one in step.kwargs.items()}
            known[step.number] = found = called(self, step.kind, step.target, args, kwargs)
        return found


def _flow_of(steps: Sequence[EdgeCall]) -> str:
    """Return to which end the last step adds edges up, or the step that it depends on; "" if unknown."""
    last = steps[-1]
    while last.target not in (*ADD_UP, *BY_INDEX):
        leaves: list[Any] = []
        map_aggregate((last.args, dict(last.kwargs)), leaves.append)
        before = [leaf.name for leaf in leaves if isinstance(leaf, _Placeholder) and isinstance(leaf.name, int)]
        if len(before) != 1:
            return ""
        last = steps[before[0]]
    position = 0 if last.target in COUNTS else 1 if last.target is scatter else 2
    index: Any = last.kwargs.get("index", last.args[position] if len(last.args) > position else None)
    while isinstance(index, _Placeholder) and isinstance(index.name, int):
        made = steps[index.name]
        if made.target is operator.getitem and made.args[1] in (0, 1):
            return ("target_to_source", "source_to_target")[made.args[1]]
        index = made.args[0] if made.target in _EXPANSIONS else None
    return ""


def _fill_placeholders(tree: Any, known: Mapping[Any, Any], end: int) -> Any:
    """Return ``tree`` with known arguments in place of their names; for rows in pairs, those of one end."""
    if isinstance(tree, _Placeholder):
        found = known[tree.name]
        return found[end] if isinstance(found, tuple) and str(tree.name).startswith("rows") else found
    return (
        map_aggregate(tree, lambda leaf: _fill_placeholders(leaf, known, end))
        if isinstance(tree, _CONTAINERS)
        else tree
    )


def _fill_both_ends(given: Any, known: Mapping[Any, Any]) -> Any:
    """Return the arguments, by position or name, with rows of sources and targets where both were given."""

    def of(one: Any) -> Any:
        if isinstance(one, (tuple, list)) and len(one) == 2:
            return tuple(_fill_placeholders(part, known, end) for end, part in enumerate(one))
        return known[one.name] if isinstance(one, _Placeholder) else _fill_placeholders(one, known, 0)

    return {name: of(one) for name, one in given.items()} if isinstance(given, Mapping) else [of(one) for one in given]


def lower_propagation(
    conv: nn.Module,
    where: str,
    last: EdgeCall,
    like: Mapping[str, Value],
    ends: tuple[str, str],
    assembly: Assembly,
    own: Collection[Value] = (),
) -> Value:
    """Return what ``last``, a call of ``conv`` on edges, gives for every row. Raises ModelError if it cannot be run
    this way. ``like``: any rows of these nodes, by type; ``ends``: the node types that edges lead from and to; ``own``:
    with one node type, rows that only targets have looked up."""
    given, names = dict[str, Any](), dict[Any, _Placeholder]()
    source, target = ends

    def is_own(value: Value) -> bool:
        return value in own or (source != target and value.space == target)

    def replace_by_placeholder(leaf: Any) -> Any:
        if isinstance(leaf, RowCount):
            return _Placeholder("nodes" if source == target or is_own(leaf.of) else "sources")
        if leaf == assembly.setting.dtype:  # a size of rows, which differs when the layer is tried
            return _Placeholder("dtype")
        if isinstance(leaf, (Value, Codes, Graph, EdgeInput)) and leaf not in names:
            kind = "edges"
            if isinstance(leaf, (Value, Codes)):
                kind = "own" if is_own(leaf.rows if isinstance(leaf, Codes) else leaf) else "rows"
            names[leaf] = _Placeholder("edge_index" if isinstance(leaf, Graph) else f"{kind}{len(given)}")
            if names[leaf].name in given:
                raise ModelError(f"{where} is given the edges both ways round")
            given[str(names[leaf].name)] = leaf
        return names.get(leaf, leaf)

    steps = list[EdgeCall]()
    for number, step in enumerate(last.with_dependencies()):
        args, kwargs = map_aggregate((step.args, dict(step.kwargs)), replace_by_placeholder)
        steps.append(EdgeCall(number, step.kind, step.target, args, kwargs))
        names[step] = _Placeholder(number)
    for kind, space in {"rows": source, "own": target}.items():
        if (kind == "rows" or source != target) and not any(name.startswith(kind) for name in given):
            given[kind] = Ones(assembly.next_index(), like[space])
    key = conv, "propagation", str([(step.kind, step.target, step.args, step.kwargs) for step in steps])
    module = assembly.setting.traced.setdefault(key, Propagation(conv, steps))
    module.training, module.own_rows = conv.training, tuple(name for name in given if name.startswith("own"))
    return lower_opaque(module, where, [], given, assembly)
