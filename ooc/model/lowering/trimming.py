# SPDX-License-Identifier: Apache-2.0
"""Models in which each call computes only the rows of a batch that later calls read.

PyG's ``trim_to_layer`` leaves out in its own models what a layer need not compute. Here this is derived from the trace
of any model, by the same distances that leave out rows of the full graph: a value ``d`` hops before the outputs is
needed for the nodes found within ``d`` hops of the seeds, which are the first ones of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch_geometric.nn import GATv2Conv, GINConv, GINEConv, GraphConv, SAGEConv, TransformerConv

from ooc.model.layers.layer import EdgeInput, Graph
from ooc.model.layers.propagation import EdgeCall
from ooc.model.lowering.calls.rowwise import ARITHMETIC
from ooc.model.lowering.calls.stand_ins import Free, OneBatch, OneGraph, Parts, Stacked
from ooc.model.lowering.network import EVERYWHERE, Network, hops
from ooc.model.lowering.symbolic import replaced_functions
from ooc.model.lowering.values import Codes, RowCount, Value

_TAKES_TARGETS = (GATv2Conv, GINConv, GINEConv, GraphConv, SAGEConv, TransformerConv)
"""Convolutions that give the same if the target rows are passed beside all rows."""


class Trimmed(nn.Module):
    """``model``, trimmed by its trace and the distances in a ``network``; made by ``of``.

    It is called with x [n, F], edge_index [2, e], edge data (or None), and how many nodes and edges each hop brought,
    and returns the model's outputs for the seeds. Parameters, modes and hooks are the model's own.
    """

    def __init__(self, model: nn.Module, plan: "_TrimPlan") -> None:
        super().__init__()
        self.model = model
        self.plan = plan
        # Its layers in the order of calls, for code that lists a module's parts.
        self.calls = nn.ModuleList(self.get_submodule(name) for name in plan.modules)
        for name, constant in plan.constants.items():
            self.register_buffer(name, constant, persistent=False)
        # Determined before their forward is wrapped, as offloading does.
        called = ((name, self.get_submodule(name)) for name in plan.modules)
        self.given_targets = frozenset(n for n, m in called if type(m) in _TAKES_TARGETS and not replaced_functions(m))

    @classmethod
    def of(cls, model: nn.Module, network: Network) -> Self | None:
        """Return the trimmed model; None if nothing can be left out, because some value needs all rows, as a norm over
        nodes does, or its rows are not known."""
        plan = None if network.traced is None else _TrimPlan.of(*network.traced)
        return None if plan is None else cls(model, plan)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        edge_attr: Tensor | None,
        nodes_by_hop: Sequence[int],
        edges_by_hop: Sequence[int],
    ) -> Tensor:
        """Return the outputs for the seeds [``nodes_by_hop[0]``, C]."""
        found: Tensor = _TrimmedRun(self, nodes_by_hop, edges_by_hop).run(x, edge_index, edge_weight, edge_attr)
        return found


@dataclass(frozen=True)
class _TrimPlan:
    """The calls of a model with their distances to the outputs: of their results (``after``), and of what they read
    (``before``), which is larger for calls along edges. ``known``: what each call stands for."""

    graph: fx.Graph
    known: Mapping[fx.Node, Any]
    after: Mapping[fx.Node, int]
    before: Mapping[fx.Node, int]
    constants: dict[str, Tensor]

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(str(node.target) for node in self.after if node.op == "call_module"))

    def __deepcopy__(self, memo: object) -> Self:
        return self  # also true for a copy of the module

    @classmethod
    def of(cls, graph: fx.Graph, known: Mapping[fx.Node, Any], constants: dict[str, Tensor]) -> Self | None:
        """Return the plan; None if some call needs all rows, or its rows are not known."""
        after: dict[fx.Node, int] = {}
        before: dict[fx.Node, int] = {}
        for node in reversed(graph.nodes):
            value = _underlying_rows(known.get(node))
            follows_edges = any(isinstance(known.get(source), Graph) for source in node.all_input_nodes)
            if node.op == "output":
                after |= dict.fromkeys(node.all_input_nodes, 0)
                continue
            if node not in after:
                continue  # no later layer reads it
            if isinstance(value, OneBatch) or (follows_edges and not isinstance(value, Value)):
                return None
            of_all = getattr(node.target, "__name__", node.target) in ARITHMETIC and any(
                isinstance(known[one], RowCount) for one in node.all_input_nodes
            )
            if of_all or (isinstance(value, (Free, Parts)) and value.moments):
                return None
            read = [rows for one in node.all_input_nodes if isinstance(rows := _underlying_rows(known[one]), Value)]
            below = hops(value, above=read) if isinstance(value, Value) else {}
            for source in node.all_input_nodes:
                rows = _underlying_rows(known[source])
                further = below.get(rows, EVERYWHERE if follows_edges else 0) if isinstance(rows, Value) else 0
                after[source] = max(after.get(source, 0), after[node] + further)
                if follows_edges:
                    before[node] = max(before.get(node, 0), after[node] + further)
                if after[source] >= EVERYWHERE:
                    return None
        return cls(graph, known, after, before, constants)


class _TrimmedRun(fx.Interpreter):
    """The run of one batch."""

    def __init__(self, module: Trimmed, nodes_by_hop: Sequence[int], edges_by_hop: Sequence[int]) -> None:
        super().__init__(module, graph=module.plan.graph)
        self.extra_traceback = False
        self._plan, self._given_targets = module.plan, module.given_targets
        self._rows = list(accumulate(nodes_by_hop))
        self._edges = list(accumulate([0, *edges_by_hop]))

    def run_node(self, n: fx.Node) -> Any:
        plan = self._plan
        if n.op == "placeholder":
            return super().run_node(n)
        if n.op != "output" and n not in plan.after:
            return None
        found = super().run_node(n)
        value = plan.known.get(n)
        return found[: self._rows_at(plan.after[n])] if isinstance(value, Value | Codes) else found

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, with only the rows and edges that it reads."""
        plan = self._plan
        follows_edges = n in plan.before
        distance = plan.before[n] if follows_edges else plan.after.get(n, 0)
        rows, edges = self._rows_at(distance), self._edges[min(distance, len(self._edges) - 1)]

        def given(source: fx.Node) -> Any:
            what, found = plan.known.get(source), self.env[source]
            if isinstance(what, Stacked) or (isinstance(what, Parts) and isinstance(found, Tensor)):  # truth values
                return found.movedim(what.at, 0)[:rows].movedim(0, what.at)
            if isinstance(what, Value | Codes | OneGraph):
                return found[:rows]
            if isinstance(what, Graph):
                return found[:, :edges]
            if isinstance(what, EdgeInput | EdgeCall):
                whole = isinstance(plan.known.get(n), EdgeInput | EdgeCall)  # slices of columns, for unknown edges
                return found if found is None or whole else found[:edges]
            return _with_row_count(what, found, rows)

        args, kwargs = map_arg((n.args, n.kwargs), given)
        if follows_edges and n.target in self._given_targets and isinstance(args[0], Tensor):
            args = ((args[0], args[0][: self._rows_at(plan.after[n])]), *args[1:])
        return args, kwargs

    def _rows_at(self, distance: int) -> int:
        """Return the number of rows found within this many hops."""
        return int(self._rows[min(distance, len(self._rows) - 1)])


def _underlying_rows(what: Any) -> Any:
    return what.rows if isinstance(what, Codes) else what


def _with_row_count(what: Any, found: Any, rows: int) -> Any:
    """Return ``found`` with another number of rows, if it is that number or a shape."""
    if isinstance(what, RowCount):
        return rows
    if isinstance(what, tuple) and any(isinstance(one, RowCount) for one in what):
        return type(found)(_with_row_count(one, its, rows) for one, its in zip(what, found, strict=True))
    return found
