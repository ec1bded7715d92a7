# SPDX-License-Identifier: Apache-2.0
"""Wrappers that give every model the same calling convention, whatever its forward takes and returns, so that it can be
traced."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data, HeteroData

from ooc.errors import ModelError
from ooc.model.layers.layer import combine_ends
from ooc.model.layers.layer import side_by_side as parts_side_by_side
from ooc.model.lowering.assembly import Inputs, Results
from ooc.plan.workload import EdgeData

ROWS, EDGES = "rows", "edges"
"""The first two arguments of a model, whatever their names."""


@dataclass(frozen=True)
class CallConvention:
    """How a model is called: with the graph ``as_data``, or with rows, edges and the edge data it has ``taken``, by the
    names of its arguments; with the numbers of edge types (``numbered``), and with ``batch``. ``inputs``: the parts
    side by side in the rows (``named``), without a name if it has no such argument. ``by_name``: the arguments that are
    rows and edges, if these are not the first two. PyG's data may not be asked for what is ``left_out``."""

    as_data: bool
    taken: Mapping[EdgeData, str]
    numbered: bool
    batch: bool
    inputs: Inputs
    by_name: tuple[str, ...]
    left_out: Mapping[str, Collection[str]]


class UniformModel(nn.Module):
    """A model with the common calling convention. ``places``: for each tensor given, the model's argument it belongs to
    (rows, edges or a name), and the type within a dictionary (None: it is the whole argument); a tensor without a place
    is not passed. It returns the rows of the types ``spaces``; of several results, those that ``results`` says."""

    def __init__(
        self, model: nn.Module, way: CallConvention, places: Sequence[Any], results: Results, spaces: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.model, self.training = model, model.training
        self.way, self.places, self.results, self.spaces = way, places, results, spaces

    def call(self, *given: Tensor) -> Tensor:
        arguments: dict[str, Any] = {ROWS: {}, EDGES: {}}
        for place, one in zip(self.places, given, strict=True):
            if place is not None:
                name, kind = place
                if kind is None:
                    arguments[name] = one
                else:
                    arguments.setdefault(name, {})[kind] = one
        rows, edges = arguments.pop(ROWS), arguments.pop(EDGES)
        if isinstance(rows, dict):
            rows = {kind: rows[kind] for kind in dict.fromkeys((*self.way.left_out, *rows)) if kind in rows}
        if self.way.batch:
            arguments["batch"] = torch.zeros(rows.size(0), dtype=torch.long, device=rows.device)
        data = self.way.left_out if self.way.as_data else None
        how: dict[str, Any] = {"inputs": self.way.inputs, "by_name": self.way.by_name, "data": data}
        output = call_model(self.model, rows, edges, arguments, **how)
        return chosen(output, self.results, self.spaces)


class CalledByName(nn.Module):
    """``conv``, or its method ``function``, called with tensors by ``names``, combined as ``ends`` says
    (``combine_ends``), and with ``plain`` arguments; it returns ``parts`` of several results. The module
    ``beside`` is included, too."""

    def __init__(
        self,
        conv: nn.Module,
        names: Sequence[str],
        plain: Mapping[str, Any],
        *,
        function: str = "__call__",
        ends: Mapping[str, tuple[str | None, str | None]] | None = None,
        parts: Sequence[Any] = (),
        beside: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, part in () if beside is None else beside.named_children():
            setattr(self, name, part)
        self.conv, self.training, self.flow = conv, conv.training, getattr(conv, "flow", "source_to_target")
        self.names, self.plain, self.function, self.ends, self.parts = names, plain, function, ends or {}, parts

    def call(self, *given: Tensor) -> Any:
        arguments = combine_ends(dict(zip(self.names, given, strict=True)), self.ends)
        found = getattr(self.conv, self.function)(**arguments, **self.plain)
        return parts_side_by_side(found, self.parts)


def call_model(
    model: nn.Module,
    rows: Any,
    edges: Any,
    others: Mapping[str, Any],
    *,
    inputs: Inputs,
    by_name: Sequence[str],
    data: Mapping[str, Collection[str]] | None,
) -> Any:
    """Return what ``model`` gives for these, as ``UniformModel`` says; ``data``: attributes that may not be asked
    for."""
    others = {**dict.fromkeys(counts_of(model)), **others}
    if inputs:
        of_nodes = named(rows, inputs)
        rows, others = of_nodes.pop("x", None), {**others, **of_nodes}
    if data is not None:
        return model(as_data(rows, edges, others, data))
    if not by_name:
        return model(rows, edges, **others)
    return model(**dict(zip(by_name, (edges,) if rows is None else (rows, edges), strict=False)), **others)


def counts_of(model: nn.Module) -> list[str]:
    """Return the arguments of forward for how many nodes and edges were drawn, which are None for a whole graph."""
    given = signature(model.forward).parameters.values()
    return [one.name for one in given if one.name.startswith("num_sampled_") and one.default is one.empty]


def named(rows: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the parts side by side in ``rows``, by name."""
    found, at = dict[str, Any](), 0
    for name, columns, whole in inputs:
        part = rows[:, at : at + columns] if columns else rows[:, at]
        found[name] = part.long() if whole else part
        at += columns or 1
    found.pop("", None)
    return found


class _StandInData(Data):  # type: ignore[misc]  # PyG is not typed
    """PyG's data, also of proxies, whose shapes PyG must not ask for. It knows the names of the user's further
    attributes: code that asks whether one exists would take another way."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in self._left_out else super().__getitem__(name)

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "__dict__").get("_left_out", ()):
            raise _missing_data_error(name)
        return super().__getattribute__(name)

    def __contains__(self, name: str) -> bool:
        if name in self._left_out:
            raise _missing_data_error(name)
        return name in self._store

    def keys(self, *args: Any) -> Any:
        raise _missing_data_error("a list of all that it has")

    def __fx_create_arg__(self, tracer: Any) -> Any:
        raise ModelError("a layer is given data itself; give it tensors, as layer(data.x, data.edge_index)")

    __len__ = __iter__ = to_dict = keys

    @property
    def num_nodes(self) -> Any:
        return self.x.size(0)

    @property
    def num_graphs(self) -> Any:
        return self.ptr.size(0) - 1 if "ptr" in self else 1


def _missing_data_error(name: str) -> ModelError:
    why = f"its forward asks data for {name}, which it is not given: data has x, edge_index and what edges carry"
    if name in ("pos", "z", "norm", "pe") or name.endswith("_pe"):  # as PyG's transforms name them
        why += f"; columns beside x are given as some of it: data.x = torch.cat([data.x, data.{name}], dim=-1)"
    elif name in ("n_id", "node_id"):
        why += "; rows of weights for nodes by their numbers are an embedding: embedding=64 trains such"
    return ModelError(why)


class _UnknownAttribute:
    """An attribute of the data of which nothing is known but that it exists."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(_missing_data_error(one.name) for one in tree_leaves((args, kwargs)) if isinstance(one, cls))

    def _refuse(self, *asked: Any) -> Any:
        raise _missing_data_error(self.name)

    __fx_create_arg__ = __getattr__ = __bool__ = __getitem__ = _refuse


def as_data(
    rows: Any, edges: Any, others: Mapping[str, Any], left_out: Mapping[str, Collection[str]]
) -> Data | HeteroData:
    """Return the graph as the user's data has it, except for what is ``left_out``, by node type in its order; with
    several types if rows are given in dictionaries."""
    if not isinstance(rows, dict):
        of_all = frozenset(left_out.get("", ()))
        if "adj_t" in of_all:  # the edges were given as adj_t
            others = {"adj_t": edges, **others}
        data = _StandInData(x=rows, edge_index=edges, **others)
        data.__dict__["_left_out"] = of_all.difference(others)
        return data
    data = HeteroData()
    for kind, names in left_out.items():
        nodes = data[kind]  # from now on it exists, possibly as None
        for name in names:
            nodes[name] = _UnknownAttribute(name)
    for name, by_type in {"x": rows, "edge_index": edges, **others}.items():
        for kind, values in by_type.items():
            data[kind][name] = values
    return data


def chosen(output: Any, results: Results, spaces: Sequence[str] = ()) -> Tensor:
    """Return the rows of one node type, or of two, from what a model gives, which may be by type."""

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


def side_by_side(*results: Tensor) -> Tensor:
    """Return a model's results as one matrix."""
    return torch.cat(results, dim=1)


def both_types(first: Tensor, second: Tensor) -> Tensor:
    """Return the rows of two node types."""
    return torch.cat((first, second))


fx.wrap("side_by_side")  # each is one call in the trace
fx.wrap("both_types")


def with_arguments(kind: type[nn.Module], names: Sequence[str], *args: Any, **options: Any) -> nn.Module:
    """Return a module whose ``call`` takes each tensor as an argument of its own, as torch.fx requires."""
    whole = _with_arguments(kind, tuple(names))  # type: ignore[arg-type]  # classes can be hashed
    return whole(*args, **options)


@cache  # each further one slows traces: they patch nn.Module, and Python visits all its subclasses
def _with_arguments(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    source = f"lambda self, {', '.join(names)}: self.call({', '.join(names)})"
    return type("_Whole", (kind,), {"forward": eval(compile(source, __file__, "eval"))})  # not a line of the model
