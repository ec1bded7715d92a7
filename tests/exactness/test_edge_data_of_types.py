# SPDX-License-Identifier: Apache-2.0
"""Weights and features of edges by their type, and layers that normalise edges within a type, against PyG."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINEConv,
    GraphConv,
    HeteroConv,
    HeteroDictLinear,
    SAGEConv,
    TAGConv,
    TransformerConv,
)

import ooc
from ooc.errors import ModelError
from ooc.train.setup import Tuning
from tests.exactness import test_types as typed

CITES, WRITES, WRITTEN = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "written by", "author")
WIDTH, CLASSES, FEATURES = 6, typed.CLASSES, {CITES: 3, WRITES: 2}
pytestmark = typed.pytestmark


def graph() -> HeteroData:
    """The graph of types, with self-loops and repeated edges among papers; some edges carry something."""
    data, random = typed.graph(), torch.Generator().manual_seed(2)
    data[CITES].edge_index[:, :6] = torch.tensor([[3, 3, 9, 11, 11, 2], [3, 3, 9, 11, 12, 0]])
    for kind in (CITES, WRITTEN):
        edges = data[kind].edge_index.shape[1]
        data[kind].edge_weight = 0.1 + torch.rand(edges, generator=random, dtype=torch.float64)
    for kind, width in FEATURES.items():
        edges = data[kind].edge_index.shape[1]
        data[kind].edge_attr = torch.randn(edges, width, generator=random, dtype=torch.float64)
    return data


class Net(nn.Module):
    """A layer of each kind of convolution that ``make`` gives for a type of edges (None: none), twice."""

    def __init__(self, data: HeteroData, make: Callable[[Any], nn.Module | None]) -> None:
        super().__init__()
        self.lift = HeteroDictLinear({kind: data[kind].x.shape[1] for kind in data.node_types}, WIDTH)
        kinds = [kind for kind in data.edge_types if make(kind) is not None]
        self.convs = nn.ModuleList(HeteroConv({kind: make(kind) for kind in kinds}) for _ in range(2))
        self.out = nn.Linear(WIDTH, CLASSES)

    def layers(self, x_dict: dict[str, Tensor], *edges: Any, **carried: Any) -> Tensor:
        x_dict = self.lift(x_dict)
        for conv in self.convs:
            x_dict = {**x_dict, **{kind: rows.tanh() for kind, rows in conv(x_dict, *edges, **carried).items()}}
        found: Tensor = self.out(x_dict["paper"])
        return found

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        return self.layers(x_dict, edge_index_dict)


class Weighted(Net):
    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor], edge_weight_dict: dict[Any, Tensor]
    ) -> Tensor:
        return self.layers(x_dict, edge_index_dict, edge_weight_dict=edge_weight_dict)


class Featured(Net):
    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor], edge_attr_dict: dict[Any, Tensor]
    ) -> Tensor:
        return self.layers(x_dict, edge_index_dict, edge_attr_dict=edge_attr_dict)


def within(make: Callable[[], nn.Module]) -> Callable[[Any], nn.Module | None]:
    """``make`` for citations, means for edges that lead to papers from elsewhere."""
    return lambda kind: make() if kind == CITES else SAGEConv((WIDTH, WIDTH), WIDTH) if kind[2] == "paper" else None


def with_features(conv: type[nn.Module], **options: Any) -> Callable[[Any], nn.Module | None]:
    """Of the edges that have some; the others are summed."""

    def make(kind: Any) -> nn.Module | None:
        if kind not in FEATURES:
            return SAGEConv((WIDTH, WIDTH), WIDTH, aggr="sum")
        if conv is GINEConv:
            return GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=FEATURES[kind])
        loops = {} if conv is TransformerConv else {"add_self_loops": kind == CITES}
        sizes = WIDTH if kind == CITES else (WIDTH, WIDTH)
        return conv(sizes, WIDTH // 2, heads=2, edge_dim=FEATURES[kind], **loops, **options)

    return make


CASES: dict[str, tuple[type[Net], Callable[[Any], nn.Module | None], str]] = {
    "gcn": (Net, within(lambda: GCNConv(WIDTH, WIDTH)), "all"),
    "chebyshev": (Net, within(lambda: ChebConv(WIDTH, WIDTH, K=3)), "all"),
    "powers": (Net, within(lambda: TAGConv(WIDTH, WIDTH, K=2)), "all"),
    "personalised": (Net, within(lambda: APPNP(K=2, alpha=0.1)), "all"),
    "weighted gcn": (Weighted, within(lambda: GCNConv(WIDTH, WIDTH, improved=True)), "features"),
    "weighted sums": (
        Weighted,
        lambda kind: GraphConv((WIDTH, WIDTH), WIDTH) if kind in (CITES, WRITTEN) else SAGEConv((WIDTH, WIDTH), WIDTH),
        "features",
    ),
    "gat": (Featured, with_features(GATConv), "weight"),
    "gatv2": (Featured, with_features(GATv2Conv), "weight"),
    "transformer": (Featured, with_features(TransformerConv), "weight"),
    "gine": (Featured, with_features(GINEConv), "weight"),
}


def reference(model: nn.Module, data: HeteroData) -> list[float]:
    """PyG's losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    carried = {
        Weighted: {"edge_weight_dict": data.edge_weight_dict},
        Featured: {"edge_attr_dict": data.edge_attr_dict},
    }
    mask = data["paper"].train_mask
    for _ in range(typed.EPOCHS):
        optimizer.zero_grad()
        output = model(data.x_dict, data.edge_index_dict, **carried.get(type(model), {}))
        loss = F.cross_entropy(output[mask], data["paper"].y[mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(model: nn.Module, store: ooc.Store, folder: Path, **options: Any) -> list[float]:
    optimizer, tuning = torch.optim.SGD(model.parameters(), lr=0.2), Tuning(tile_rows=16)
    options |= {"optimizer": optimizer, "spill_dir": folder / "spill", "_tuning": tuning}
    with ooc.Trainer(model, store, **options) as trainer:
        return [record.loss for record in trainer.fit(epochs=typed.EPOCHS, progress=False)]


@pytest.mark.thorough("weighted sums", "powers", "gatv2")
@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_pygs(name: str, tmp_path: Path) -> None:
    kind, make, ignored = CASES[name]
    data = graph()
    torch.manual_seed(3)
    model = kind(data, make).double()
    expected, slabs = copy.deepcopy(model), copy.deepcopy(model)
    store = typed.store_of(data, tmp_path)
    losses = trained(model, store, tmp_path, ignore_edge_data=ignored)
    torch.testing.assert_close(losses, reference(expected, data), rtol=1e-10, atol=1e-10)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        assert (found.grad is None) == (wanted.grad is None)
        if found.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-10)
    if name in ("weighted gcn", "gat"):
        options: dict[str, Any] = {"block_rows": 16, "slab_columns": 2, "ignore_edge_data": ignored}
        assert trained(slabs, store, tmp_path, **options) == losses


def test_what_is_not_taken_is_refused(tmp_path: Path) -> None:
    data = graph()
    store, model = typed.store_of(data, tmp_path), Net(data, within(lambda: GCNConv(WIDTH, WIDTH))).double()
    with pytest.raises(ModelError, match="the store's edges carry weights, of which model Net takes none"):
        ooc.Trainer(model, store)
    gcn = GCNConv(WIDTH, WIDTH, add_self_loops=False)
    between = Net(data, lambda kind: gcn if kind == WRITES else None).double()
    with pytest.raises(ModelError, match="GCNConv"):
        ooc.Trainer(between, store, ignore_edge_data="all")
