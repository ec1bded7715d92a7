# SPDX-License-Identifier: Apache-2.0
"""Models called as every model here is, whatever their forward takes and gives: so they are traced."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ooc.errors import ModelError
from ooc.model.lowering.assembly import Results
from ooc.plan.workload import EdgeData


class Whole(nn.Module):
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


def side_by_side(*results: Tensor) -> Tensor:
    """A model's results as one matrix."""
    return torch.cat(results, dim=1)


def both_types(first: Tensor, second: Tensor) -> Tensor:
    """The rows of two types of nodes."""
    return torch.cat((first, second))


fx.wrap("side_by_side")  # each is one call of a trace
fx.wrap("both_types")


class WholeOfTypes(nn.Module):
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


def with_arguments(kind: type[nn.Module], names: Sequence[str], *args: Any) -> nn.Module:
    """A module whose ``call`` is given so many tensors, each an argument of its own, as torch.fx wants them."""
    forward = eval(f"lambda self, {', '.join(names)}: self.call({', '.join(names)})")
    whole: nn.Module = type("_Whole", (kind,), {"forward": forward})(*args)
    return whole


class WholeOfRelations(nn.Module):
    """A model of one type of nodes called with all edges at once and the numbers of their types."""

    def __init__(self, model: nn.Module, results: Results) -> None:
        super().__init__()
        self.model, self.results = model, results

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return chosen(self.model(x, edge_index, edge_type=edge_type), self.results)
