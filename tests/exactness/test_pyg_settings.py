# SPDX-License-Identifier: Apache-2.0
"""Layers in the settings that torch-geometric's own tests of them try: GCNConv, SAGEConv, GINConv, GATConv, GATv2Conv.

Those tests call a layer on graphs of four nodes, with the options and inputs that matter to it. Here the layer is a
model by itself: one linear map of its output gives the classes, and the trainer's losses and gradients are compared
with those of the layer in PyG. Settings that are none here are bipartite inputs, several graphs in one, sparse
tensors in the place of edges, TorchScript, and asking for coefficients.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GINEConv, MessagePassing, SAGEConv

from ooc.errors import ModelError
from tests.exactness.comparison import assert_agrees, store_of, tuned_trainer
from tests.exactness.reference import CustomCase
from tests.examples import every_other

FEATURES, WIDTH, CLASSES = 16, 32, 4
FOUR_TO_TWO = [[0, 1, 2, 3], [0, 0, 1, 1]]
"""Two nodes that hear of two each, one of them itself; two that hear nothing."""
PATH_OF_THREE = [[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]]
"""One node in the middle of three, both ways."""


def graph(edges: list[list[int]], *, nodes: int = 4, features: int = FEATURES) -> Data:
    """Four nodes with as many classes, all but the last trained on."""
    generator = torch.Generator().manual_seed(12345)
    trained = torch.arange(nodes) < nodes - 1
    return Data(
        x=torch.randn(nodes, features, generator=generator, dtype=torch.float64),
        edge_index=torch.tensor(edges),
        y=torch.arange(nodes) % CLASSES,
        train_mask=trained,
        val_mask=~trained,
        test_mask=torch.zeros(nodes, dtype=torch.bool),
    )


class Alone(nn.Module):
    """A layer, and a linear map to the classes."""

    def __init__(self, layer: MessagePassing, width: int, classes: int) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(width, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.layer(x, edge_index))


class AloneWithWeights(Alone):
    """The layer given the edges' weights."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.last(self.layer(x, edge_index, edge_weight))


class AloneWithFeatures(Alone):
    """The layer given the edges' features."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        return self.last(self.layer(x, edge_index, edge_attr=edge_attr))


def agrees(
    make: Callable[[int], MessagePassing],
    data: Data,
    folder: Path,
    *,
    width: int = WIDTH,
    kind: type[Alone] = Alone,
) -> None:
    """Three epochs of the layer are PyG's, two rows and five columns at a time."""
    case = CustomCase(make=lambda features, classes: kind(make(features), width, classes))
    assert_agrees(case, data, folder, tile_rows=2, slab_columns=5)


# ---- GCNConv -----------------------------------------------------------------------------------------------


GCN_OPTIONS: list[dict[str, Any]] = [
    {},
    {"improved": True},
    {"add_self_loops": False},
    {"normalize": False},
    {"bias": False},
    {"cached": True},
    {"add_self_loops": False, "normalize": True, "improved": True},
]


@pytest.mark.thorough(*every_other(map(str, GCN_OPTIONS), ["plain", "weighted"]))
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("options", GCN_OPTIONS, ids=str)
def test_gcn(options: dict[str, Any], weighted: bool, tmp_path: Path) -> None:
    """With and without weights, by every way to normalise."""
    data = graph(FOUR_TO_TWO)
    if weighted:
        data.edge_weight = torch.tensor([0.3, 0.9, 0.5, 0.7], dtype=torch.float64)
    agrees(
        lambda features: GCNConv(features, WIDTH, **options),
        data,
        tmp_path,
        kind=AloneWithWeights if weighted else Alone,
    )


def test_gcn_knows_a_loop_from_an_added_one(tmp_path: Path) -> None:
    """Loops that are there keep their weights when the others are added."""
    data = graph([[0, 1, 2, 3, 1, 1], [1, 2, 3, 0, 1, 1]])
    data.edge_weight = torch.tensor([0.5, 2.0, 0.25, 1.5, 3.0, 0.75], dtype=torch.float64)
    for improved in (False, True):
        agrees(lambda f, i=improved: GCNConv(f, WIDTH, improved=i), data, tmp_path, kind=AloneWithWeights)


@pytest.mark.parametrize("weighted", [False, True])
def test_gcn_the_other_way_round(weighted: bool, tmp_path: Path) -> None:
    """``flow`` is that of the edges as they are stored; weights go with them."""
    data = graph(FOUR_TO_TWO)

    def layer(features: int) -> GCNConv:
        return GCNConv(features, WIDTH, flow="target_to_source")

    if not weighted:
        agrees(layer, data, tmp_path)
        return
    data.edge_weight = torch.ones(data.num_edges, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"edges the other way round are supported .* without weights"):
        agrees(layer, data, tmp_path, kind=AloneWithWeights)


# ---- SAGEConv ----------------------------------------------------------------------------------------------


SAGE_OPTIONS = [{}, {"normalize": True}, {"root_weight": False, "bias": False}]


@pytest.mark.thorough(*every_other(map(str, SAGE_OPTIONS), ["as it is", "projected"], ["mean", "sum", "max"]))
@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
@pytest.mark.parametrize("project", [False, True], ids=["as it is", "projected"])
@pytest.mark.parametrize("rest", SAGE_OPTIONS, ids=str)
def test_sage(aggr: str, project: bool, rest: dict[str, Any], tmp_path: Path) -> None:
    """Aggregations, with a projection before and a normalisation after."""
    agrees(lambda f: SAGEConv(f, WIDTH, aggr=aggr, project=project, **rest), graph(FOUR_TO_TWO), tmp_path)


def test_sage_of_several_aggregations(tmp_path: Path) -> None:
    """By the general path."""
    agrees(lambda f: SAGEConv(f, WIDTH, aggr=["mean", "max", "sum"]), graph(FOUR_TO_TWO), tmp_path)


def test_sage_of_an_lstm_is_refused(tmp_path: Path) -> None:
    """By name, with the reason."""
    layer = SAGEConv(FEATURES, WIDTH, aggr="lstm")
    with pytest.raises(ModelError, match=r"SAGEConv \(layer\): .*depends on the order of edges"):
        tuned_trainer(Alone(layer, WIDTH, CLASSES).double(), store_of(graph(FOUR_TO_TWO), tmp_path))


# ---- GINConv, GINEConv -------------------------------------------------------------------------------------


def mlp(features: int) -> nn.Sequential:
    """The network that GIN's tests put into it."""
    return nn.Sequential(nn.Linear(features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("options", [{}, {"train_eps": True}, {"eps": 0.5}, {"aggr": "mean"}, {"aggr": "max"}], ids=str)
def test_gin(options: dict[str, Any], tmp_path: Path) -> None:
    """With ε given, trained or none, and the other ways to take neighbours together."""
    agrees(lambda f: GINConv(mlp(f), **options), graph(FOUR_TO_TWO), tmp_path)


@pytest.mark.parametrize("edge_dim", [None, 8])
@pytest.mark.parametrize("train_eps", [False, True])
def test_gine(edge_dim: int | None, train_eps: bool, tmp_path: Path) -> None:
    """Features of edges as wide as the nodes', or mapped to them."""
    data = graph(FOUR_TO_TWO)
    generator = torch.Generator().manual_seed(1)
    data.edge_attr = torch.randn(4, edge_dim or FEATURES, generator=generator, dtype=torch.float64)
    agrees(lambda f: GINEConv(mlp(f), train_eps=train_eps, edge_dim=edge_dim), data, tmp_path, kind=AloneWithFeatures)


# ---- GATConv, GATv2Conv ------------------------------------------------------------------------------------

ATTENTIONS = {"GAT": GATConv, "GATv2": GATv2Conv}
ATTENTION_OPTIONS: list[dict[str, Any]] = [
    {"add_self_loops": False},
    {"bias": False},
    {"negative_slope": 0.0},
    {"dropout": 0.5},
    {"heads": 1},
]
LOOPS = {
    "0.5 for one": (1, 0.5),
    "mean for one": (1, "mean"),
    "0.5": (4, 0.5),
    "mean": (4, "mean"),
    "max": (4, "max"),
    "numbers": (4, torch.tensor([0.1, 0.2, 0.3, 0.4])),
}
"""Features of edges, and what added loops have for them."""


@pytest.mark.thorough(*every_other(["side by side", "averaged"], ["", "residual"], ATTENTIONS))
@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("concat", [True, False], ids=["side by side", "averaged"])
def test_attention(kind: str, residual: bool, concat: bool, tmp_path: Path) -> None:
    """Two heads on a small graph, side by side or their mean, with a residual or none."""
    options = {"heads": 2, "residual": residual, "concat": concat}
    width = WIDTH * 2 if concat else WIDTH
    agrees(lambda f: ATTENTIONS[kind](f, WIDTH, **options), graph(FOUR_TO_TWO), tmp_path, width=width)


@pytest.mark.thorough(*every_other(map(str, ATTENTION_OPTIONS), ATTENTIONS))
@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("options", ATTENTION_OPTIONS, ids=str)
def test_attention_options(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """One option at a time, on a star."""
    chosen = {"heads": 2, **options}
    agrees(
        lambda f: ATTENTIONS[kind](f, WIDTH, **chosen), graph(PATH_OF_THREE), tmp_path, width=WIDTH * chosen["heads"]
    )


def test_gatv2_of_shared_weights(tmp_path: Path) -> None:
    """One linear map for both ends."""
    agrees(lambda f: GATv2Conv(f, WIDTH, heads=2, share_weights=True), graph(FOUR_TO_TWO), tmp_path, width=WIDTH * 2)


@pytest.mark.thorough(*every_other(LOOPS, ATTENTIONS))
@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize(("edge_dim", "fill_value"), LOOPS.values(), ids=LOOPS)
def test_attention_with_features_of_edges(kind: str, edge_dim: int, fill_value: Any, tmp_path: Path) -> None:
    """One feature or four, the added loops' a number, numbers or the mean of the others."""
    data = graph([[0, 1, 2, 3, 2], [0, 0, 1, 1, 0]])
    generator = torch.Generator().manual_seed(1)
    data.edge_attr = torch.randn(5, edge_dim, generator=generator, dtype=torch.float64)
    agrees(
        lambda f: ATTENTIONS[kind](f, WIDTH, heads=2, edge_dim=edge_dim, fill_value=fill_value),
        data,
        tmp_path,
        width=WIDTH * 2,
        kind=AloneWithFeatures,
    )


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_without_edges(kind: str, tmp_path: Path) -> None:
    """Nothing but added loops, and nothing at all."""
    nothing: list[list[int]] = [[], []]
    for loops in (True, False):
        data = graph(nothing)
        data.edge_index = data.edge_index.long()
        agrees(
            lambda f, a=loops: ATTENTIONS[kind](f, WIDTH, heads=2, add_self_loops=a), data, tmp_path, width=WIDTH * 2
        )


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_of_both_ends_apart_is_refused(kind: str, tmp_path: Path) -> None:
    """Bipartite layers have no place on one kind of nodes."""
    store = store_of(graph(FOUR_TO_TWO), tmp_path)
    layer = ATTENTIONS[kind]((FEATURES, FEATURES), WIDTH, heads=2)
    model = Alone(layer, WIDTH * 2, CLASSES).double()
    if kind == "GATv2":  # its two maps are two in any case
        tuned_trainer(model, store).close()
        return
    with pytest.raises(ModelError, match="sources and targets apart are not supported"):
        tuned_trainer(model, store)
