# SPDX-License-Identifier: Apache-2.0
"""Tiles are low where a layer is run as it is, edge by edge, and there alone."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import AGNNConv, EdgeConv, FAConv, GeneralConv, SAGEConv
from torch_geometric.nn.aggr import AttentionalAggregation
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE, MetaLayer

from ooc.model.lowering.network import opaque_columns


class Own(nn.Module):
    """Sums of neighbours by hand."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])


@pytest.mark.parametrize("model", [GCN, GraphSAGE, GIN, GAT])
def test_ready_models_have_no_such_layer(model: type[nn.Module]) -> None:
    assert opaque_columns(model(8, 16, 2, 3), 16) == 0


FORMULAS = [
    *(FAConv(8), GeneralConv(8, 8), SAGEConv(8, 8, aggr=AttentionalAggregation(nn.Linear(8, 1)))),
    *(SAGEConv(8, 8, aggr=["mean", "max"]), SAGEConv(8, 8, aggr="softmax")),
]
OTHERS = [
    *(EdgeConv(nn.Linear(16, 8)), MetaLayer(None, None, None), Own()),
    *(FAConv(8, normalize=False), GeneralConv(8, 8, attention=True)),
    *(SAGEConv(8, 8, aggr=AttentionalAggregation(nn.Linear(8, 8))), SAGEConv(8, 8, aggr=["mean", "median"])),
]


@pytest.mark.parametrize("module", FORMULAS)
def test_layers_with_a_formula_are_none(module: nn.Module) -> None:
    assert opaque_columns(nn.ModuleList([nn.Linear(8, 8), module]), 16) == 0


@pytest.mark.parametrize("module", OTHERS)
def test_others_have(module: nn.Module) -> None:
    assert opaque_columns(nn.ModuleList([nn.Linear(8, 8), module]), 16) == 16


def test_agnn_is_one_where_its_rows_are_many() -> None:
    """Its formula holds keys and values of all rows."""
    model = nn.ModuleList([nn.Linear(8, 64), AGNNConv()])
    assert opaque_columns(model, 64, nodes=400_000) == 0
    assert opaque_columns(model, 64, nodes=600_000) == 64
