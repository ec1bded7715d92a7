# SPDX-License-Identifier: Apache-2.0
"""Messages that begin with linear maps of the rows at both ends of an edge: these are computed once a row, and what is
left is an edge function, or runs by the general path with less to do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import CGConv, EdgeConv, FiLMConv, MessagePassing
from torch_geometric.typing import OptTensor

from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of
from tests.exactness.reference import CustomCase
from tests.examples import examples
from tests.graphs import GraphCase, random_data

EPOCHS = 2
ROUGH: dict[str, Any] = {"self_loops": 9, "isolated": 7, "duplicates": 15, "unlabelled": 8}
EDGE_FEATURES, WIDTH = 3, 5
Make = Callable[[int, int], nn.Module]


class Own(MessagePassing):
    """The plainest of such layers, around which the others are written."""

    def __init__(self, inputs: int, outputs: int, aggr: Any = "add", ends: int = 2, **options: Any) -> None:
        super().__init__(aggr=aggr, **options)
        self.of_ends, self.gate = nn.Linear(ends * inputs, outputs), nn.Linear(inputs, outputs, bias=False)
        self.last = nn.Linear(outputs, outputs)
        self.network = nn.Sequential(self.of_ends, nn.ReLU(inplace=True), self.last)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.relu(self.of_ends(torch.cat((x_i, x_j), dim=-1)))


class Difference(Own):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j - x_i


class Network(Own):
    """Whose last linear map is of sums: its bias is added for every edge."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.network(torch.cat((x_i, x_j - x_i), dim=1))


class Gate(Own):
    """Both factors have an activation; what is done to sums takes no rows."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x_i - 2.0 * x_j)) * F.leaky_relu(self.of_ends(torch.cat([x_j, x_i], 1)), 0.2)

    def update(self, aggr_out: Tensor) -> Tensor:
        return F.normalize(aggr_out, dim=-1)


class OneOfEach(Own):
    """One factor of either end, where one is a network of rows."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.gate(x_i) * self.last(F.elu(self.gate(x_j)))


class Pairs(Own):
    """Rows of several matrices at either end."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=(x, x.tanh()), y=self.gate(x), scale=0.5)

    def message(self, x_i: Tensor, x_j: Tensor, y_j: Tensor, scale: float) -> Tensor:
        return F.silu(self.of_ends(torch.cat((x_i, scale * x_j), dim=-1)) + y_j)


class Twice(Own):
    """The same rows again and again, and the same map."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        z = (x_j + x_j - 0.5 * x_i) + x_i
        return torch.tanh(self.gate(z - x_j)) * self.gate(x_i + x_i)


class Shifted(Own):
    """Something is added to a product, or taken off, and all of it has an activation; then a linear map."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        scaled = torch.sigmoid(self.of_ends(torch.cat((x_i, x_j), dim=1))) * self.gate(x_j)
        return self.last(F.elu(scaled - 0.5 * self.gate(x_i - x_j), alpha=1.5))


class Bare(Own):
    """A linear map and nothing else."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.of_ends(torch.hstack((x_j, -x_i)))


class Square(nn.Module):
    """Layers of one width, between linear maps."""

    def __init__(self, features: int, classes: int, makes: Sequence[Make], width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, width), nn.Linear(width, classes)
        self.layers = nn.ModuleList(make(width, width) for make in makes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: OptTensor = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = (layer(x, edge_index) if edge_attr is None else layer(x, edge_index, edge_attr=edge_attr)).tanh()
        return self.last(x)


def square(make: Make, width: int = WIDTH) -> Callable[[int, int], nn.Module]:
    """Two such layers."""
    return lambda features, classes: Square(features, classes, (make, make), width)


FORMULAS: dict[str, Make] = {
    "relu, sum": Own,
    "relu, mean": lambda i, o: Own(i, o, "mean"),
    "a difference": lambda i, o: Difference(i, o, "mean"),
    "a network, sum": Network,
    "a network, mean": lambda i, o: Network(i, o, "mean"),
    "EdgeConv": lambda i, o: EdgeConv(nn.Sequential(nn.Linear(2 * i, o), nn.ReLU(), nn.Linear(o, o, False)), "sum"),
    "CGConv": lambda i, o: CGConv(i),
    "a gate": Gate,
    "one of each end": OneOfEach,
    "pairs": lambda i, o: Pairs(i, o, "mean"),
    "shifted, sum": Shifted,
    "shifted, mean": lambda i, o: Shifted(i, o, "mean"),
    "FiLM": FiLMConv,
    "linear": Bare,
    "twice": Twice,
}


class Dropping(Own):
    """Drops edges' numbers, each by itself; in evaluation nothing."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.dropout(super().message(x_i, x_j), 0.5, self.training)


class Deep(Own):
    """Three linear maps, of which the second stays one of edges; and numbers of edges by rows at one end."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        hidden = F.gelu(self.network(torch.cat((x_i, x_j), dim=1)))
        return self.last(hidden) * self.gate(x_j).softmax(dim=-1)[:, :1] + x_i.new_ones(x_i.size(0), 1)


class Parts(Own):
    """Looks at shapes, and takes what it computes apart."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        first, *others = self.of_ends(torch.cat((x_i, x_j), dim=1)).chunk(2, dim=-1)
        first = (first.view(x_i.shape[0], -1) * 2.0).exp().clamp(max=3.0)
        return torch.cat((first, others[0].abs()[..., : x_j.size(-1)]), dim=1)


class Stacked(Own):
    """Puts rows of one end one above the other, and looks at the other end's then."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.gate(torch.stack((x_j, x_j.tanh())).mean(dim=0) - x_i).relu() + torch.stack((x_i, x_j)).sum(dim=0)


class LookedUp(Own):
    """Looks up by whole numbers that are features of one end."""

    def __init__(self, inputs: int, outputs: int, aggr: Any = "add") -> None:
        super().__init__(inputs, outputs, aggr)
        self.table = nn.Embedding(3, inputs)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        kinds = x_j[:, 0].abs().long().clamp(max=2)
        return self.gate(self.table(kinds) - x_i).relu()


class Overwritten(Own):
    """Writes into rows that it looks at again."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        x_j += x_i
        return self.of_ends(torch.cat((x_j.relu_(), x_j), dim=1))


class Normalized(Own):
    """Looks at all messages of a row."""

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        from torch_geometric.utils import softmax

        return softmax(self.of_ends(torch.cat((x_i, x_j), dim=1)), index)


GENERAL: dict[str, Make] = {
    "max": lambda i, o: Network(i, o, "max"),
    "std": lambda i, o: Own(i, o, "std"),
    "the other way": lambda i, o: Own(i, o, flow="target_to_source"),
    "pairs, the other way": lambda i, o: Pairs(i, o, flow="target_to_source"),
    "deep": lambda i, o: Deep(i, o, "mean"),
    "parts": Parts,
    "stacked": Stacked,
    "overwritten": lambda i, o: Overwritten(i, o, "mean"),
    "a softmax": Normalized,
    "EdgeConv": lambda i, o: EdgeConv(nn.Sequential(nn.Linear(2 * i, o), nn.ReLU(), nn.Linear(o, o))),
}


def check(make: Make, folder: Path, *, general: bool, graph: dict[str, Any] = ROUGH) -> None:
    """Losses, gradients and scores are PyG's; ``general``: layers run by the general path."""
    case, data = CustomCase(make=square(make)), random_data(GraphCase(**graph))
    plan = assert_agrees(case, data, folder, epochs=EPOCHS)
    assert any(item.pull.is_opaque for item in plan.programs["train"] if item.pull is not None) is general


@pytest.mark.parametrize(
    "names", [[*FORMULAS][start : start + 3] for start in range(0, len(FORMULAS), 3)], ids="; ".join
)
def test_formulas(names: list[str], tmp_path: Path) -> None:
    """Three in a model, one behind the other."""
    case = CustomCase(make=lambda features, classes: Square(features, classes, [FORMULAS[name] for name in names]))
    plan = assert_agrees(case, random_data(GraphCase(**ROUGH)), tmp_path, epochs=EPOCHS)
    assert not any(item.pull.is_opaque for item in plan.programs["train"] if item.pull is not None)


@pytest.mark.thorough("std", "pairs, the other way", "EdgeConv")
@pytest.mark.parametrize("name", GENERAL)
def test_general(name: str, tmp_path: Path) -> None:
    check(GENERAL[name], tmp_path, general=True)


def test_what_is_looked_up_at_one_end(tmp_path: Path) -> None:
    """By numbers among the features, as they are: the first of two layers."""

    class Model(nn.Module):
        def __init__(self, features: int, classes: int) -> None:
            super().__init__()
            self.first, self.second = LookedUp(features, WIDTH), Own(WIDTH, classes)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index), edge_index)

    assert_agrees(CustomCase(make=Model), random_data(GraphCase(**ROUGH)), tmp_path, epochs=EPOCHS)


def test_dropout_of_edges(tmp_path: Path) -> None:
    """Masks are those of edges: as the layer alone, it trains by the general path."""
    case = CustomCase(make=square(Dropping))
    with make_trainer(case, store_of(random_data(GraphCase(**ROUGH)), tmp_path), tmp_path) as trainer:
        assert any(item.pull.is_opaque for item in trainer.plan.programs["train"] if item.pull is not None)
        assert trainer.fit(1, eval_every=0)[0].loss > 0


class OfEdges(Own):
    """Takes the features of edges, in one of two factors."""

    def __init__(self, inputs: int, outputs: int, aggr: Any = "add", *, bare: bool = False) -> None:
        super().__init__(inputs, outputs, aggr)
        self.of_edges, self.bare = nn.Linear(2 * inputs + EDGE_FEATURES, outputs), bare

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: OptTensor = None) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: OptTensor) -> Tensor:
        assert edge_attr is not None
        found = self.of_edges(torch.cat((x_i, edge_attr, x_j), dim=-1)).tanh()
        return found + edge_attr.sum(dim=-1, keepdim=True) if self.bare else found * self.gate(x_j)


class ShiftedByEdges(OfEdges):
    """Something is added to a product of which features of edges are a part."""

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: OptTensor) -> Tensor:
        return (super().message(x_i, x_j, edge_attr) + x_i).relu()


class OfEdgesAlone(OfEdges):
    """Of sources and edges, as GINE's."""

    def message(self, x_j: Tensor, edge_attr: OptTensor) -> Tensor:  # type: ignore[override]
        assert edge_attr is not None
        return F.softplus(self.of_edges(torch.cat((x_j, x_j, edge_attr), dim=-1)))


@pytest.mark.thorough("mean", "CGConv")
@pytest.mark.parametrize(
    ("make", "general"),
    [
        (OfEdges, False),
        (lambda i, o: OfEdges(i, o, "mean"), False),
        (OfEdgesAlone, False),
        (lambda i, o: CGConv(i, dim=EDGE_FEATURES), False),
        (lambda i, o: OfEdges(i, o, bare=True), True),
        (ShiftedByEdges, True),
    ],
    ids=["own", "mean", "sources alone", "CGConv", "as they are", "shifted"],
)
def test_features_of_edges(make: Make, general: bool, tmp_path: Path) -> None:
    check(make, tmp_path, general=general, graph={**ROUGH, "edge_features": EDGE_FEATURES})


@pytest.mark.thorough("formula")
@pytest.mark.parametrize(
    "make", [Gate, Shifted, lambda i, o: Network(i, o, "max")], ids=["formula", "shifted", "general"]
)
def test_any_budget_gives_the_same_bits(make: Make, tmp_path: Path) -> None:
    """By whole matrices in memory, and by narrow slabs or buckets of them."""
    store, losses = store_of(random_data(GraphCase(nodes=250, edges=1000, features=24)), tmp_path), []
    case, tiles = CustomCase(make=square(make, 40)), {"tile_rows": 64}
    for options in ({}, least(case, store, tmp_path, **tiles)):
        with make_trainer(case, store, tmp_path, **tiles, **options) as trainer:
            losses.append([record.loss for record in trainer.fit(2, eval_every=0)])
            written = trainer.plan.ssd_write_bytes
    assert losses[0] == losses[1]
    assert written > 0


@st.composite
def messages(draw: st.DrawFn) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """What some operators make of the rows at both ends, one after the other."""
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=6))

    def message(layer: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
        known = [x_i, x_j]
        for number, step in enumerate(steps):
            known.append(step(layer.maps[number % 2], known[-1], known[-2]))
        return known[-1] + 0.1 * known[-2]

    return message


STEPS: tuple[Callable[[nn.Linear, Tensor, Tensor], Tensor], ...] = (
    lambda linear, x, y: linear(torch.cat((x, y), dim=1)),
    lambda linear, x, y: linear(torch.cat((y - x, 0.5 * y), dim=1)),
    lambda linear, x, y: x + y,
    lambda linear, x, y: x - y,
    lambda linear, x, y: x * y,
    lambda linear, x, y: F.silu(y + x * y),
    lambda linear, x, y: -2.0 * x,
    lambda linear, x, y: x.sigmoid(),
    lambda linear, x, y: F.elu(x, alpha=1.5),
    lambda linear, x, y: y.tanh(),
    lambda linear, x, y: x * x.abs().clamp(max=2.0),
    lambda linear, x, y: F.softplus(x) * torch.sigmoid(y),
    lambda linear, x, y: torch.cat((x[:, :2], y[:, 2:]), dim=-1),
)


@given(messages(), st.sampled_from(["add", "mean", "max"]))
@settings(max_examples=examples(5), deadline=None)
def test_random_messages(
    tmp_path_factory: pytest.TempPathFactory, message: Callable[[Any, Tensor, Tensor], Tensor], aggr: str
) -> None:
    class Layer(MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr=aggr)
            self.maps = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
            self.fixed = message

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return message(self, x_i, x_j)

    class Model(nn.Module):
        def __init__(self, features: int, classes: int) -> None:
            super().__init__()
            self.first, self.layer, self.last = nn.Linear(features, WIDTH), Layer(), nn.Linear(WIDTH, classes)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.last(self.layer(self.first(x), edge_index))

    data = random_data(GraphCase(**ROUGH))
    assert_agrees(CustomCase(make=Model), data, tmp_path_factory.mktemp("hoisted"), epochs=1)
