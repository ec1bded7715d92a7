# SPDX-License-Identifier: Apache-2.0
"""Layers of one's own whose messages are made of sources' rows alone are sums of rows, as PyG's with a formula are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GraphConv, MessagePassing, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import OptTensor
from torch_geometric.utils import add_self_loops, degree, remove_self_loops

from ooc.errors import ModelError
from ooc.plan import Plan
from tests.exactness.comparison import assert_agrees, make_trainer, store_of
from tests.exactness.layers import behind, twice
from tests.exactness.reference import CustomCase
from tests.graphs import GraphCase, random_data

EPOCHS = 2
ROUGH: dict[str, Any] = {"self_loops": 9, "isolated": 7, "duplicates": 15, "unlabelled": 8}


class Own(MessagePassing):
    """The plainest layer that there is, around which the others are written."""

    def __init__(self, inputs: int, outputs: int, aggr: Any = "mean", **options: Any) -> None:
        super().__init__(aggr=aggr, **options)
        self.neighbours, self.own = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.neighbours(self.propagate(edge_index, x=x)) + self.own(x)


class OfRows(Own):
    """A message that is computed, and something done to what is summed."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, scale=2.0, size=(x.size(0), x.size(0)))

    def message(self, x_j: Tensor, scale: float) -> Tensor:
        return scale * F.elu(self.neighbours(x_j)) + self.own(x_j).relu()

    def update(self, aggr_out: Tensor) -> Tensor:
        return F.normalize(aggr_out, dim=-1)


class OfSources(Own):
    """Rows of sources are others than those of targets, and wider than the input."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=(self.neighbours(x), x), y=(self.own(x).sigmoid(), None))

    def message(self, x_j: Tensor, y_j: Tensor) -> Tensor:
        return torch.cat((x_j * y_j, y_j), dim=-1)[:, : x_j.size(1)]


class Subclass(GraphConv):
    """PyG's, that may do anything; takes edges' weights as a vector."""


class Weighted(Own):
    """Weights of edges by another name."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: OptTensor = None) -> Tensor:
        return self.propagate(edge_index, x=self.neighbours(x), w=edge_weight) + self.own(x)

    def message(self, x_j: Tensor, w: OptTensor) -> Tensor:
        return x_j if w is None else x_j * w[:, None]


class Normalized(Own):
    """Calls PyG's norm, with options of its own."""

    def __init__(self, inputs: int, outputs: int, aggr: Any = "add", *, loops: bool = False) -> None:
        super().__init__(inputs, outputs, aggr)
        self.loops = loops

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: OptTensor = None) -> Tensor:
        edges, norm = gcn_norm(edge_index, edge_weight, x.size(0), self.loops, self.loops, self.flow, x.dtype)
        return self.propagate(edges, x=self.neighbours(x), norm=self.changed(norm)) + self.own(x)

    def changed(self, norm: Tensor) -> Tensor:
        """As it is."""
        return norm

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j.tanh()


class Tutorial(Own):
    """As PyG's documentation writes GCN: self-loops, degrees, and what is made of these for every edge."""

    def __init__(self, inputs: int, outputs: int, *, end: int = 1, loops: bool = True, **options: Any) -> None:
        super().__init__(inputs, outputs, "add", **options)
        self.end, self.loops = end, loops

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.loops:
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        ends = edge_index[0], edge_index[1]
        inverse = torch.pow(degree(ends[self.end], x.size(0), dtype=x.dtype), -0.5)
        inverse[inverse == float("inf")] = 0
        norm = inverse[ends[0]] * inverse[ends[1]]
        return self.propagate(edge_index, x=self.neighbours(x), norm=norm.view(-1, 1)) + self.own(x)

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm * x_j


class ByTargets(Own):
    """Sums over other edges, times what is told of the targets alone."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = add_self_loops(edge_index, None, 1.0, x.size(0))[0]
        return self.propagate(edges, x=self.neighbours(x), factor=self.own(x)[:, 0][edges[1]])

    def message(self, x_j: Tensor, factor: Tensor) -> Tensor:
        return factor[:, None] * x_j.relu()


class Wide(Own):
    """Sums more columns than it is given."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, 4 * inputs, "add")
        self.last = nn.Linear(4 * inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.propagate(edge_index, x=self.own(x)))


class Looped(Own):
    """Over other edges than the graph's."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(add_self_loops(edge_index, num_nodes=x.size(0))[0], x=self.neighbours(x))


SUMS: dict[str, Callable[[int, int], nn.Module]] = {
    "mean": Own,
    "sum, the other way": lambda i, o: Own(i, o, "add", flow="target_to_source"),
    "max": lambda i, o: Own(i, o, "max"),
    "several": lambda i, o: OfRows(i, o, "sum"),
    "pairs": OfSources,
    "pairs, the other way": lambda i, o: OfSources(i, o, flow="target_to_source"),
    "a subclass": Subclass,
    "a subclass of SAGE": type("Sage", (SAGEConv,), {}),
    "a subclass of GCN": type("Gcn", (GCNConv,), {}),
    "normalized": Normalized,
    "the tutorial's": Tutorial,
    "the tutorial's, of out-degrees": lambda i, o: Tutorial(i, o, end=0, loops=False, flow="target_to_source"),
    "wide": Wide,
    "by targets": lambda i, o: ByTargets(i, o, "add"),
    "means with self-loops": Looped,
}


class Dropping(Own):
    """Drops edges' numbers, each by itself; in evaluation nothing."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.neighbours(x))

    def message(self, x_j: Tensor) -> Tensor:
        return F.dropout(x_j, 0.5, self.training)


class NormOfEdges(Own):
    """Statistics are those of edges, and not of rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.norm = nn.BatchNorm1d(inputs)

    def message(self, x_j: Tensor) -> Tensor:
        return self.norm(x_j)


class CentredEdges(Own):
    """Less the mean of all edges' messages."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j - x_j.mean(dim=0)


class CountedEdges(Own):
    """A part of the number of edges."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j / x_j.size(0)


class OwnAggregate(Own):
    """Sums by a function of its own."""

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        return inputs.new_zeros(dim_size, inputs.size(1)).index_add(0, index, 2 * inputs)


class OwnPropagate(Own):
    """Does something else than PyG around ``message``."""

    def propagate(self, edge_index: Tensor, size: Any = None, **given: Any) -> Tensor:
        messages = 3 * self.message(given["x"][edge_index[0]])
        return messages.new_zeros(len(given["x"]), messages.size(1)).index_add(0, edge_index[1], messages)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


class UpdateWithRows(Own):
    """What is done to the sum takes rows, too."""

    def update(self, aggr_out: Tensor, x: Tensor) -> Tensor:
        return aggr_out + x


class Squared(Normalized):
    """Takes what the norm is made of, and makes something else of it."""

    def changed(self, norm: Tensor) -> Tensor:
        return norm.square()


class FewerNodes(Normalized):
    """Leaves it to PyG how many nodes there are: as many as edges tell."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: OptTensor = None) -> Tensor:
        edges, norm = gcn_norm(edge_index, edge_weight, None, dtype=x.dtype)
        return self.propagate(edges, x=self.neighbours(x), norm=norm)


class OfOtherEdges(Tutorial):
    """Degrees and factors of edges that are not the graph's."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, _ = remove_self_loops(edge_index)
        inverse = degree(edges[1], x.size(0), dtype=x.dtype).clamp(min=1).reciprocal()
        return self.propagate(edges, x=self.neighbours(x), norm=inverse[edges[1]].view(-1, 1))


OTHERS: dict[str, Callable[[int, int], nn.Module]] = {
    "own aggregate": OwnAggregate,
    "own propagate": OwnPropagate,
    "update with rows": UpdateWithRows,
    "maxima with self-loops": lambda i, o: Looped(i, o, "max"),
    "the norm squared": Squared,
    "other edges": OfOtherEdges,
}


def runs_as_it_is(plan: Plan) -> bool:
    """Whether any layer goes by the general path."""
    return any(item.pull.is_opaque for item in plan.programs["train"] if item.pull is not None)


def planned(make: Callable[[int, int], nn.Module], folder: Path) -> Plan:
    """Of such a layer."""
    store = store_of(random_data(GraphCase(**ROUGH)), folder)
    with make_trainer(CustomCase(make=behind(make)), store, folder) as trainer:
        return trainer.plan


@pytest.mark.thorough("a subclass of SAGE", "sum, the other way", "mean", "normalized")
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, tmp_path: Path) -> None:
    """Losses, gradients and scores are PyG's, and nothing runs as it is."""
    case, data = CustomCase(make=twice(SUMS[name])), random_data(GraphCase(**ROUGH))
    assert not runs_as_it_is(assert_agrees(case, data, tmp_path, epochs=EPOCHS))


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, tmp_path: Path) -> None:
    """What looks like a sum and is none still is PyG's."""
    case, data = CustomCase(make=behind(OTHERS[name])), random_data(GraphCase(**ROUGH))
    assert runs_as_it_is(assert_agrees(case, data, tmp_path, epochs=EPOCHS))


class Squashed(Weighted):
    """Weights that are more than factors."""

    def message(self, x_j: Tensor, w: OptTensor) -> Tensor:
        return x_j if w is None else (x_j * w.view(-1, 1)).tanh()


class Learnt(Weighted):
    """Weights that are computed of those of edges and of the rows at both ends; those of ``loops`` are 1."""

    def __init__(self, inputs: int, outputs: int, aggr: str, *, loops: bool = False, **options: Any) -> None:
        super().__init__(inputs, outputs, aggr, **options)
        self.loops = loops

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: OptTensor = None) -> Tensor:
        assert edge_weight is not None
        rows = self.own(x).tanh()
        w = (edge_weight + (rows[edge_index[0]] * rows[edge_index[1]]).sum(dim=-1)).sigmoid()
        if self.loops:
            edge_index, w = add_self_loops(edge_index, w, 1.0, num_nodes=x.size(0))
        return self.propagate(edge_index, x=self.neighbours(x), w=w[:, None] if self.loops else w) + rows

    def message(self, x_j: Tensor, w: OptTensor) -> Tensor:
        assert w is not None
        return w.view(-1, 1) * x_j


class Unweighed(Learnt):
    """Weights that are computed, and nothing is done with them."""

    def message(self, x_j: Tensor, w: OptTensor) -> Tensor:
        return x_j.relu()


@pytest.mark.thorough("improved", "a subclass", "the norm squared", "computed")
@pytest.mark.parametrize(
    ("make", "as_it_is"),
    [
        (lambda i, o: Weighted(i, o, "add"), False),
        (Subclass, False),
        (lambda i, o: Normalized(i, o, loops=True), False),
        (Squared, True),
        (lambda i, o: Weighted(i, o, "mean"), True),
        (lambda i, o: Squashed(i, o, "add"), True),
        (lambda i, o: Learnt(i, o, "add"), True),
        (lambda i, o: Learnt(i, o, "mean", flow="target_to_source"), True),
        (lambda i, o: Learnt(i, o, "mean", loops=True), True),
        (lambda i, o: Unweighed(i, o, "mean"), True),
    ],
    ids=[
        *("own", "a subclass", "improved", "the norm squared", "a mean", "not a factor"),
        *("computed", "computed, the other way", "computed, with loops", "computed in vain"),
    ],
)
def test_weights(make: Callable[[int, int], nn.Module], as_it_is: bool, tmp_path: Path) -> None:
    """Sums may be weighted by what edges carry."""
    case, data = CustomCase(make=behind(make)), random_data(GraphCase(**ROUGH, weighted=True))
    assert runs_as_it_is(assert_agrees(case, data, tmp_path, epochs=EPOCHS)) is as_it_is


def test_dropout_of_edges(tmp_path: Path) -> None:
    """Edges from one node drop other numbers each."""
    assert runs_as_it_is(planned(Dropping, tmp_path))


@pytest.mark.parametrize("make", [NormOfEdges, CentredEdges, CountedEdges, FewerNodes])
def test_what_all_edges_decide(make: Callable[[int, int], nn.Module], tmp_path: Path) -> None:
    """Over edges a mean, or a count of nodes, is another one than over rows: it is refused, as what runs as it is."""
    with pytest.raises(ModelError):
        planned(make, tmp_path)
