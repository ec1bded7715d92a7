# SPDX-License-Identifier: Apache-2.0
"""Layers that drop entries inside of them, are run as they are: results are PyG's with the same masks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, SAGEConv
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax

from ooc.errors import ModelError
from ooc.kernels import neighbourhood
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.dropout.opaque import Dropped, DroppedRows, InnerDropout
from ooc.kernels.edges import TileEdges, pieces
from ooc.plan.workload import Direction
from tests.exactness.comparison import (
    DIRECTIONS,
    assert_agrees,
    in_turn,
    least,
    make_trainer,
    store_of,
    train_epoch,
)
from tests.exactness.conftest import Converted
from tests.exactness.reference import CustomCase, ModelCase, smooth_adam
from tests.exactness.test_savings import in_hop_order
from tests.examples import examples
from tests.graphs import GraphCase, graph_cases, random_data

EPOCHS = 2
H = 6
ROUGH = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8)
UNDIRECTED = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8, undirected=True)


class OfNodes(MessagePassing):
    """Drops what comes in and what goes out, with an activation between: in-neighbours are dropped alike everywhere.
    By ``len``, which no trace can follow, it runs as a whole."""

    drops_inside = True

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="mean")
        self.linear, self.drop = nn.Linear(inputs, outputs), nn.Dropout(0.4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.linear(F.dropout(x, 0.3, self.training)).tanh()
        return self.drop(self.propagate(edge_index, x=x) + x[: len(x)])


class OfMessages(MessagePassing):
    """An MLP of messages with dropout in it, in place and not."""

    drops_inside = True

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="max")
        self.mlp = nn.Sequential(nn.Linear(2 * inputs, H), nn.Dropout(0.4, inplace=True), nn.Tanh())
        self.last = nn.Linear(H, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.dropout(self.last(self.mlp(torch.cat((x_i, x_j - x_i), dim=-1))), 0.2, self.training)


class OfCoefficients(MessagePassing):
    """Attention of one's own: coefficients of several heads dropped, of edges with self-loops added or not."""

    drops_inside = True

    def __init__(self, inputs: int, outputs: int, loops: str) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.loops, self.heads = loops, 2
        self.linear, self.score = nn.Linear(inputs, self.heads * outputs), nn.Linear(2 * outputs, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if "removed" in self.loops:
            edge_index, _ = remove_self_loops(edge_index)
        if "added" in self.loops:
            edge_index, _ = add_self_loops(edge_index, num_nodes=len(x))
        return self.propagate(edge_index, x=self.linear(x).view(len(x), self.heads, -1)).mean(dim=1)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = self.score(torch.cat((x_i, x_j), dim=-1)).tanh()
        return F.dropout(softmax(score, index, num_nodes=size_i), 0.4, self.training) * x_j


class OfSeveral(MessagePassing):
    """Gives several results of the same entries: two of rows of different shapes, the second by the first's dropout."""

    drops_inside = True

    def __init__(self, inputs: int, outputs: int, traced: bool) -> None:
        super().__init__(aggr="sum")
        self.linear, self.traced = nn.Linear(inputs, outputs), traced

    def forward(self, x: Tensor, edge_index: Tensor) -> dict[str, Tensor]:
        x = self.linear(x).tanh()
        if not self.traced:
            x = F.dropout(x[: len(x)], 0.3, self.training)
        found = self.propagate(edge_index, x=x) + x
        return {"rows": found, "of each": found.square().sum(-1), "pairs": torch.stack([found, x], dim=1)}

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.dropout(x_i * x_j, 0.2, self.training)


class Several(nn.Module):
    """Layers that give several results."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = OfSeveral(features, H, True), OfSeveral(H, H, False)
        self.last = nn.Linear(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = self.first(x, edge_index)
        x = first["pairs"].sum(1) - first["rows"] / (1 + first["of each"])[:, None]
        second = self.second(x, edge_index)
        return self.last((second["pairs"][:, 0] - second["rows"] / 2) * first["of each"].unsqueeze(-1))


class Among(nn.Module):
    """Two such layers with others and dropout between."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = OfNodes(features, H), SAGEConv(H, H)
        self.third, self.last = OfMessages(H, H), OfCoefficients(H, classes, "removed, added")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(self.first(x, edge_index).relu(), 0.3, self.training)
        x = self.third(self.second(x, edge_index).relu(), edge_index)
        return self.last(F.dropout(x, 0.2, self.training), edge_index)


class Twice(nn.Module):
    """A layer of a kind after another one."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index).relu(), edge_index)


def attention(loops: str) -> ModelCase:
    """Two layers of attention."""
    return CustomCase(make=lambda f, c: Twice(OfCoefficients(f, H, loops), OfCoefficients(H, c, loops)))


MODELS: dict[str, ModelCase] = {
    "nodes": CustomCase(make=lambda f, c: Twice(OfNodes(f, H), OfNodes(H, c))),
    "messages": CustomCase(make=lambda f, c: Twice(OfMessages(f, H), OfMessages(H, c))),
    "coefficients": attention("as they are"),
    "coefficients, self-loops added": attention("added"),
    "coefficients, self-loops removed": attention("removed"),
    "coefficients, self-loops anew": attention("removed, added"),
    "several results": CustomCase(make=Several),
    "among others": CustomCase(make=Among, input_dropout=0.2),
}


@pytest.mark.thorough(
    "messages-undirected",
    "coefficients, self-loops added-undirected",
    "coefficients, self-loops removed-directed",
    "among others-undirected",
)
@pytest.mark.parametrize(("name", "undirected"), in_turn(MODELS, DIRECTIONS))
def test_models(name: str, undirected: bool, converted: Converted, tmp_path: Path) -> None:
    """Losses, gradients and scores are PyG's, in seven tiles, forward and backward with the same masks."""
    data, store = converted(UNDIRECTED if undirected else ROUGH)
    assert_agrees(MODELS[name], data, tmp_path, epochs=EPOCHS, store=store)


def test_least_memory(converted: Converted, tmp_path: Path) -> None:
    """So they are where nothing waits in memory."""
    data, store = converted(ROUGH)
    model = MODELS["among others"]
    assert_agrees(model, data, tmp_path, epochs=EPOCHS, store=store, **least(model, store, tmp_path))


def test_float32(tmp_path: Path) -> None:
    """Single precision, to 1e-4."""
    data = random_data(ROUGH, dtype=torch.float32)
    model = MODELS["coefficients, self-loops anew"]
    assert_agrees(model, data, tmp_path, dtype=torch.float32, make_optimizer=smooth_adam, epochs=EPOCHS)


def test_rows_that_do_not_reach_the_loss_are_left_out(tmp_path: Path) -> None:
    """In the order of hops from few training nodes; masks go by rows of the store."""
    store, data = in_hop_order(random_data(GraphCase(nodes=150, edges=200, unlabelled=144, seed=5)), tmp_path)
    plan = assert_agrees(MODELS["messages"], data, tmp_path, epochs=EPOCHS, store=store)
    assert len({item.rows for item in plan.programs["train"]}) > 2


def test_tiles_of_many_edges_are_run_in_parts(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node or edge of several parts is dropped alike in all."""
    monkeypatch.setattr(neighbourhood, "EDGES_AT_ONCE", 16)
    data, store = converted(ROUGH)
    assert_agrees(MODELS["among others"], data, tmp_path, epochs=1, store=store, tile_rows=32)


def test_results_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    """Gradients and losses are equal to the last bit under every budget and on any threads; masks change by epochs."""
    graph = GraphCase(nodes=200, edges=800, features=12, self_loops=20, isolated=20, duplicates=40, unlabelled=60)
    store = store_of(random_data(graph, dtype=torch.float32), tmp_path)
    model = MODELS["among others"]
    given: dict[str, Any] = {"dtype": torch.float32, "tile_rows": 64}

    def trained(**options: Any) -> tuple[list[float], dict[str, Tensor]]:
        with make_trainer(model, store, tmp_path, **given, **options) as trainer:
            epochs = [train_epoch(trainer) for _ in range(2)]
            return [epoch.loss for epoch in epochs], epochs[-1].gradients

    scarce = least(model, store, tmp_path, **given)
    losses, gradients = trained()
    for options in ({"slab_columns": 1, "threads": 3}, {**scarce, "threads": 1}):
        other_losses, other_gradients = trained(**options)
        assert other_losses == losses, options
        for parameter, gradient in other_gradients.items():
            assert torch.equal(gradient, gradients[parameter]), (options, parameter)
    assert trained(seed=1)[0] != losses


@given(
    graph=graph_cases(),
    name=st.sampled_from(list(MODELS)),
    tile_rows=st.sampled_from([4, 16, 64]),
    share=st.sampled_from([1.0, 1.3, 100.0]),
)
@settings(
    max_examples=examples(2),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_case_is_exact(graph: GraphCase, name: str, tile_rows: int, share: float, tmp_path: Path) -> None:
    """Under the least budgets that the trainer itself says would do, or a multiple of them."""
    data = random_data(graph)
    nodes, edges = len(data.x), data.edge_index.shape[1]
    others = int((data.edge_index[0] != data.edge_index[1]).sum())
    kinds = {nodes, edges, others, edges + nodes, others + nodes}  # the reference tells rows by their number
    assume(len(kinds) == (3 if edges == others else 5))
    store = store_of(data, tmp_path)
    budgets = least(MODELS[name], store, tmp_path, tile_rows=tile_rows)
    budgets["gpu_budget"] = int(budgets["gpu_budget"] * share)
    assert_agrees(
        MODELS[name],
        data,
        tmp_path,
        make_optimizer=smooth_adam,
        epochs=EPOCHS,
        store=store,
        tile_rows=tile_rows,
        **budgets,
    )


def test_coefficients_are_dropped_as_those_of_attention() -> None:
    """One mask for all: that of attention's kernels for the same edges, repeated ones among them."""
    indices, offsets = torch.tensor([1, 4, 4, 4, 0, 4, 6]), torch.tensor([0, 4, 4, 7])
    tile = TileEdges(indices, offsets, 4, 9)
    dropout = EdgeDropout(0.5, 3, 2, 7)
    (piece,) = pieces(tile, 9)
    expected = dropout.scale(piece, Direction.IN, range(5), torch.float64)
    near = neighbourhood.neighbourhood(tile, 9)
    with InnerDropout(near, [Dropped(DroppedRows.EDGES, 5)], lambda call, p: dropout, "Layer"):
        found = F.dropout(torch.ones(7, 5, dtype=torch.float64), 0.5)
    assert torch.equal(found, expected)
    assert 0 < int((found == 0).sum()) < found.numel()


class OfMany(MessagePassing):
    """Drops where it is run on many nodes alone, by what Python reads off a size without asking."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return F.dropout(self.linear(self.propagate(edge_index, x=x)), 0.3, self.training and math.log(x.size(0)) > 6)


def test_dropout_that_is_not_found_by_trying_is_refused_in_training(tmp_path: Path) -> None:
    """By name, rather than drawn from torch's generator."""
    store = store_of(random_data(GraphCase(nodes=500, edges=900)), tmp_path)
    model = CustomCase(make=OfMany)
    with (
        make_trainer(model, store, tmp_path, tile_rows=512) as trainer,
        pytest.raises(ModelError, match="OfMany: how often"),
    ):
        trainer.fit(epochs=1, eval_every=0)
