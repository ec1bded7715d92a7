# SPDX-License-Identifier: Apache-2.0
"""Tiles are low where a layer is run as it is, edge by edge, and there alone: as the model is found to be."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import AGNNConv, EdgeConv, FAConv, GeneralConv, GraphConv, SAGEConv
from torch_geometric.nn.aggr import AttentionalAggregation, DeepSetsAggregation, Set2Set
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

from ooc.model.graph import ActiveRows
from ooc.model.layers.decoders import LinkPredictor
from ooc.model.lowering.assembly import Setting
from ooc.model.lowering.network import lower
from ooc.plan.workload import EdgeData

WIDEST = 100


class Own(nn.Module):
    """Sums of neighbours by hand."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])


class Behind(nn.Module):
    """A layer behind a map of the features, given the edges' weights where there are such."""

    def __init__(self, layer: nn.Module, columns: int = 8) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, columns), layer

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        beside = [x] if isinstance(self.layer, FAConv) else []
        more = [] if edge_weight is None else [edge_weight]
        found: Tensor = self.layer(self.first(x), *beside, edge_index, *more)
        return found


def columns_of_edges(model: nn.Module, *, nodes: int = 1000, weighted: bool = False) -> int:
    setting = Setting(
        num_nodes=nodes,
        num_features=8,
        aggregate_once=True,
        input_dropout=0.0,
        edge_data=frozenset({EdgeData.WEIGHT} if weighted else ()),
        num_edges=10 * nodes,
        most_edges=lambda relation: 50,
    )
    found = lower(
        model,
        setting,
        num_classes=0,
        active=lambda hops: ActiveRows.everything(nodes, hops),
        edges_per_row=lambda scaling: 10.0,
    )
    return found.columns_of_edges(WIDEST)


@pytest.mark.parametrize("model", [GCN, GraphSAGE, GIN, GAT])
def test_ready_models_have_no_such_layer(model: type[nn.Module]) -> None:
    assert columns_of_edges(model(8, 16, 2, 3)) == 0


FORMULAS = [
    *(FAConv(8), GeneralConv(8, 8), SAGEConv(8, 8, aggr=AttentionalAggregation(nn.Linear(8, 1)))),
    *(SAGEConv(8, 8, aggr=["mean", "max"]), SAGEConv(8, 8, aggr="softmax")),
    *(SAGEConv((16, 8), 8, aggr=Set2Set(8, 2)), SAGEConv(8, 8, aggr=DeepSetsAggregation(nn.Linear(8, 8), nn.ReLU()))),
]
OTHERS = [
    *(EdgeConv(nn.Linear(16, 8)), Own(), GeneralConv(8, 8, attention=True)),
    *(SAGEConv(8, 8, aggr=AttentionalAggregation(nn.Linear(8, 8))), SAGEConv(8, 8, aggr=["mean", "median"])),
    SAGEConv(8, 8, aggr=DeepSetsAggregation(nn.Sequential(nn.Linear(8, 8), nn.Dropout()))),
]


@pytest.mark.parametrize("module", FORMULAS)
def test_layers_with_a_formula_are_none(module: nn.Module) -> None:
    assert columns_of_edges(Behind(module)) == 0


@pytest.mark.parametrize("module", OTHERS)
def test_others_have(module: nn.Module) -> None:
    assert columns_of_edges(Behind(module)) == WIDEST


def test_options_that_only_a_call_tells_count() -> None:
    """Maxima of edges with weights have no formula, those without have one."""
    assert columns_of_edges(Behind(GraphConv(8, 8, aggr="max"))) == 0
    assert columns_of_edges(Behind(GraphConv(8, 8, aggr="max")), weighted=True) == WIDEST


def test_deviations_are_sums_and_maxima_are_not_where_edges_go_the_other_way_round() -> None:
    against = [SAGEConv(8, 8, aggr=aggr, flow="target_to_source") for aggr in ("std", "max")]
    assert [columns_of_edges(Behind(layer)) for layer in against] == [0, WIDEST]


def test_agnn_is_one_where_its_rows_are_many() -> None:
    """Its formula holds keys and values of all rows."""
    assert columns_of_edges(Behind(AGNNConv(), 64), nodes=400_000) == 0
    assert columns_of_edges(Behind(AGNNConv(), 64), nodes=600_000) == WIDEST


def test_links_are_as_wide_as_embeddings() -> None:
    assert columns_of_edges(LinkPredictor(GCN(8, 16, 2, 3), "dot")) == 3
