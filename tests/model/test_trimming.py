# SPDX-License-Identifier: Apache-2.0
"""Models that compute only rows that later calls read give the outputs and gradients of all rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.nn.models import GAT, GraphSAGE

import ooc
from ooc.model.graph import ActiveRows
from ooc.model.lowering.assembly import Setting
from ooc.model.lowering.network import lower
from ooc.model.lowering.trimming import Trimmed
from ooc.models import Residual, Transformer
from ooc.plan.workload import EdgeData
from tests.graphs import GraphCase, random_data

_CASE = GraphCase(nodes=500, edges=1500, features=6, self_loops=15, duplicates=20, isolated=5, edge_features=3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ooc.Store:
    return ooc.convert(random_data(_CASE), tmp_path_factory.mktemp("trimmed") / "g.ooc", dtype="float64")


class _Own(nn.Module):
    """Branches of different depth, parts, stacked matrices, shapes that are asked for, a tensor and a layer of its
    own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.SAGEConv(6, 8, aggr="max"), gnn.GATv2Conv(8, 4, heads=2, edge_dim=3)
        self.third, self.last = _Difference(), gnn.GraphConv(12, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())])

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h = self.first(x, edge_index).relu()
        left, right = self.blocks[0](h).chunk(2, dim=-1)
        h = self.second(h, edge_index, edge_attr).view(x.size(0), 2, 4) * torch.tensor([[1.0], [2.0]])
        h = h.reshape(h.size(0), 8) + torch.cat([left, right], dim=-1)
        stacked = torch.stack([h, left.repeat(1, 2)])
        h = self.third(stacked.mean(dim=0), edge_index)
        h = torch.where(stacked[:, :, :1] > 0, stacked * h, stacked).sum(dim=0).view(h.shape)
        h = torch.cat([h, left], dim=1)
        out: Tensor = self.last(h, edge_index) + F.silu(left)
        return out


class _Difference(gnn.MessagePassing):  # type: ignore[misc]  # PyG is not typed
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i).tanh()


_MODELS: list[tuple[Callable[[], nn.Module], list[int]]] = [
    (lambda: GraphSAGE(6, 8, 3, 4, norm="layer_norm", norm_kwargs={"mode": "node"}), [4, 3, 2]),
    (lambda: GraphSAGE(6, 8, 3, 4), [3]),  # of fewer hops than layers
    (lambda: GraphSAGE(6, 8, 2, 4, jk="lstm"), [3, 3, 3]),  # of more
    (lambda: GAT(6, 8, 2, 4, heads=2, edge_dim=3), [4, -1]),
    (lambda: Transformer(6, 8, 2, 4, heads=2, edge_dim=3), [4, 3]),
    (lambda: Residual(GraphSAGE(8, 8, 3, 8), 6, 4, norm="layer_norm", norm_kwargs={"mode": "node"}), [2, 2, 2]),
    (_Own, [4, 3, 3]),
]


@pytest.mark.parametrize(("make", "fanouts"), _MODELS)
def test_outputs_and_gradients_are_those_of_all_rows(
    store: ooc.Store, make: Callable[[], nn.Module], fanouts: list[int]
) -> None:
    torch.manual_seed(0)
    model = make().double()
    trimmed = _trimmed(model)
    assert trimmed is not None
    loader = ooc.NeighborLoader(store, fanouts, 20, input_nodes="train", memory="100M")
    batch = next(iter(loader))
    loader.close()
    weights = torch.randn(20, 4, dtype=torch.float64)
    given: dict[str, Any] = {} if not _carried(model) else {"edge_attr": batch.edge_attr}

    expected = model(batch.x, batch.edge_index, **given)[:20]
    expected_gradients = _gradients(expected, model, weights)
    rows: list[int] = []
    for layer in model.modules():
        if isinstance(layer, gnn.MessagePassing):
            layer.register_forward_hook(lambda layer, given, made: rows.append(len(made)))
    found = trimmed(
        batch.x, batch.edge_index, None, given.get("edge_attr"), batch.num_sampled_nodes, batch.num_sampled_edges
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_gradients(found, model, weights), expected_gradients, rtol=1e-10, atol=1e-12)
    assert rows[-1] < batch.num_nodes
    assert len(fanouts) == 1 or rows == sorted(rows, reverse=True)


def test_what_needs_all_rows_is_left_whole() -> None:
    assert _trimmed(GraphSAGE(6, 8, 2, 4, norm="batch_norm").double()) is None
    assert _trimmed(GraphSAGE(6, 8, 2, 4, norm="layer_norm").double()) is None  # over the whole graph by default


def _trimmed(model: nn.Module) -> Trimmed | None:
    setting = Setting(
        num_nodes=500,
        num_features=6,
        aggregate_once=False,
        input_dropout=0.0,
        edge_data=frozenset(_carried(model)),
        num_edge_features=3,
    )
    network = lower(
        model,
        setting,
        num_classes=4,
        active=lambda hops: ActiveRows.everything(500, hops),
        edges_per_row=lambda scaling: 3.0,
    )
    return Trimmed.of(model, network)


def _carried(model: nn.Module) -> set[Any]:
    takes = isinstance(model, (GAT, Transformer, _Own))
    return {EdgeData.FEATURES} if takes else set()


def _gradients(outputs: Tensor, model: nn.Module, weights: Tensor) -> list[Tensor | None]:
    return [*torch.autograd.grad((outputs * weights).sum(), [*model.parameters()], allow_unused=True)]
