# SPDX-License-Identifier: Apache-2.0
"""Models of the user's own: chains of convolutions and row-wise work, residuals, concatenations, propagation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from ooc import models
from ooc.models import Transformer
from tests.exactness.comparison import assert_agrees, make_trainer, store_of
from tests.exactness.models import MODELS, Branches, Predicted, Residual
from tests.exactness.reference import CustomCase
from tests.graphs import GraphCase, random_data

ROUGH = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8)


@pytest.mark.parametrize("undirected", [False, True], ids=["directed", "undirected"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_chains(make: Callable[[int, int], nn.Module], undirected: bool, tmp_path: Path) -> None:
    """Losses, gradients and scores are PyG's."""
    graph = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8, undirected=undirected)
    assert_agrees(CustomCase(make=make), random_data(graph), tmp_path, epochs=3)


@pytest.mark.parametrize(
    ("kind", "options"), [(GraphSAGE, {}), (GCN, {}), (GAT, {"heads": 2}), (Transformer, {"heads": 2})]
)
def test_residual_layers_of_any_kind(kind: type, options: dict[str, int], tmp_path: Path) -> None:
    """Norms first, linear maps around."""

    def make(features: int, classes: int) -> nn.Module:
        gnn = kind(8, 8, num_layers=2, out_channels=8, dropout=0.3, **options)
        return models.Residual(gnn, features, classes, norm="layer_norm", norm_kwargs={"mode": "node"})

    assert_agrees(CustomCase(make=make), random_data(ROUGH), tmp_path, epochs=3)


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
    assert_agrees(case, random_data(ROUGH), tmp_path, epochs=3)
    with make_trainer(case, store_of(random_data(ROUGH), tmp_path), tmp_path) as trainer:
        assert "train_and_score" not in trainer.plan.programs
    with make_trainer(CustomCase(make=MODELS["SGC twice"]), store_of(random_data(ROUGH), tmp_path), tmp_path) as other:
        assert "train_and_score" in other.plan.programs


@pytest.mark.parametrize("make", [Residual, Branches, Predicted], ids=lambda make: make.__name__)
def test_chains_with_dropped_features(make: Callable[[int, int], nn.Module], tmp_path: Path) -> None:
    """Nothing is constant then, and nothing is aggregated once."""
    assert_agrees(CustomCase(make=make, input_dropout=0.3), random_data(ROUGH), tmp_path, epochs=3)
