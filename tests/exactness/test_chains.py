# SPDX-License-Identifier: Apache-2.0
"""Models of the user's own: chains of convolutions and row-wise work, residuals, concatenations, propagation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, MessagePassing, SAGEConv
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from ooc import models
from ooc.models import Transformer
from tests.exactness.comparison import DIRECTIONS, assert_agrees, in_turn, make_trainer, store_of
from tests.exactness.models import MODELS, Branches, Predicted, Residual
from tests.exactness.reference import CustomCase
from tests.graphs import GraphCase, random_data

ROUGH = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8)


@pytest.mark.thorough(
    "GCNII, two weights-undirected",
    "TAG of one hop-undirected",
    "SGC of one hop-directed",
    "APPNP without teleport-undirected",
)
@pytest.mark.parametrize(("name", "undirected"), in_turn(MODELS, DIRECTIONS))
def test_chains(name: str, undirected: bool, tmp_path: Path) -> None:
    """Losses, gradients and scores are PyG's."""
    graph = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8, undirected=undirected)
    assert_agrees(CustomCase(make=MODELS[name]), random_data(graph), tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"), [(GraphSAGE, {}), (GCN, {}), (GAT, {"heads": 2}), (Transformer, {"heads": 2})]
)
def test_residual_layers_of_any_kind(kind: type, options: dict[str, int], tmp_path: Path) -> None:
    """Norms first, linear maps around."""

    def make(features: int, classes: int) -> nn.Module:
        gnn = kind(8, 8, num_layers=2, out_channels=8, dropout=0.3, **options)
        return models.Residual(gnn, features, classes, norm="layer_norm", norm_kwargs={"mode": "node"})

    assert_agrees(CustomCase(make=make), random_data(ROUGH), tmp_path)


class OtherInTraining(nn.Module):
    """Has no dropout, and yet computes something else in training."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv, self.last = SAGEConv(features, 8), SAGEConv(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        return self.last(F.leaky_relu(x, 0.3 if self.training else 0.1), edge_index)


def test_each_mode_has_a_network_of_its_own(tmp_path: Path) -> None:
    """And one forward pass does not stand for both where they differ."""
    case = CustomCase(make=OtherInTraining)
    assert_agrees(case, random_data(ROUGH), tmp_path)
    with make_trainer(case, store_of(random_data(ROUGH), tmp_path), tmp_path) as trainer:
        assert "train_and_score" not in trainer.plan.programs
    with make_trainer(CustomCase(make=MODELS["SGC twice"]), store_of(random_data(ROUGH), tmp_path), tmp_path) as other:
        assert "train_and_score" in other.plan.programs


class TwoLayers(nn.Module):
    """Whose subclasses do something else between or behind its layers in evaluation."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv, self.last = GCNConv(features, 8), SAGEConv(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.between(self.conv(x, edge_index)), edge_index)

    def between(self, x: Tensor) -> Tensor:
        return x


class OtherBuffer(TwoLayers):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.register_buffer("one", torch.full((8,), 1.0))
        self.register_buffer("other", torch.linspace(-1, 2, 8))

    def between(self, x: Tensor) -> Tensor:
        return x * (self.one if self.training else self.other)


class OtherConstant(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        return x / torch.tensor(2.0 if self.training else -3.0)


class OtherKeyword(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        return torch.clamp(x, max=0.1) if self.training else torch.clamp(x, min=0.1)


class OtherDimension(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 4) if self.training else x.reshape(-1, 4, 2)
        return x.transpose(1, 2).flatten(1)


class OtherScaling(TwoLayers):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.unscaled = GCNConv(features, 8, normalize=False)
        self.unscaled.lin, self.unscaled.bias = self.conv.lin, self.conv.bias

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last((self.conv if self.training else self.unscaled)(x, edge_index), edge_index)


class OtherMultiple(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        return 2.0 * x if self.training else 3.0 * x


class Plain(MessagePassing):
    """Takes a plain argument."""

    def forward(self, x: Tensor, edge_index: Tensor, *, scale: float) -> Tensor:
        return self.propagate(edge_index, x=x, scale=scale)

    def message(self, x_j: Tensor, x_i: Tensor, scale: float) -> Tensor:
        return (scale * x_j * x_i).tanh()


class OtherArgument(TwoLayers):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.plain = Plain()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.plain(self.conv(x, edge_index), edge_index, scale=0.1 if self.training else 0.9)
        return self.last(x, edge_index)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x if self.training else x


class OtherInside(TwoLayers):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.conv = GINConv(nn.Sequential(nn.Linear(features, 8), Doubled()))


class Alike(TwoLayers):
    """Computes the same in both modes, with much that has to be looked through."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.register_buffer("scale", torch.linspace(-1, 2, 8))
        self.shift, self.norm, self.plain = nn.Parameter(torch.ones(8)), nn.LayerNorm(8), Plain()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.between(self.conv(x, edge_index))
        x = F.dropout(self.plain(x, edge_index, scale=0.5), 0.0, self.training)
        return self.last(x, edge_index)

    def between(self, x: Tensor) -> Tensor:
        x = torch.clamp(self.norm(x) * self.scale, min=-1.0, max=2.0) + self.shift.exp() * self.shift
        first, second = x.chunk(2, dim=-1)
        return 2 * torch.cat([first.relu(), F.elu(second, alpha=0.5)], dim=-1)


@pytest.mark.parametrize(
    "make",
    [
        *(OtherBuffer, OtherConstant, OtherKeyword, OtherDimension),
        *(OtherScaling, OtherMultiple, OtherArgument, OtherInside),
    ],
)
def test_whatever_differs_in_evaluation_is_scored_apart(make: type[TwoLayers], tmp_path: Path) -> None:
    """Tensors, names of arguments, shapes, scalings, factors, arguments of a layer that runs as it is, and what is
    within a convolution."""
    with make_trainer(CustomCase(make=make), store_of(random_data(ROUGH), tmp_path), tmp_path) as trainer:
        assert "train_and_score" not in trainer.plan.programs


def test_modes_that_compute_the_same_share_a_forward_pass(tmp_path: Path) -> None:
    """With buffers, weights made of parameters, norms of rows, parts, layers that run as they are, and dropout of
    nothing."""
    with make_trainer(CustomCase(make=Alike), store_of(random_data(ROUGH), tmp_path), tmp_path) as trainer:
        assert "train_and_score" in trainer.plan.programs


@pytest.mark.parametrize("make", [Residual, Branches, Predicted], ids=lambda make: make.__name__)
def test_chains_with_dropped_features(make: Callable[[int, int], nn.Module], tmp_path: Path) -> None:
    """Nothing is constant then, and nothing is aggregated once."""
    assert_agrees(CustomCase(make=make, input_dropout=0.3), random_data(ROUGH), tmp_path)
