# SPDX-License-Identifier: Apache-2.0
"""Edges with states of their own, as a type of nodes, against models that keep these beside ``edge_index``."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SimpleConv
from torch_geometric.utils import scatter

import ooc
from ooc.train.setup import Tuning

FEATURES, EDGE_FEATURES, HIDDEN, OUTPUTS, EPOCHS = 5, 3, 6, 2, 2
TOLERANCE = 1e-10


def graph() -> Data:
    """90 nodes of which the last have no edges, repeated edges."""
    random = torch.Generator().manual_seed(1)
    edge_index = torch.randint(70, (2, 400), generator=random)
    x, y = (torch.randn(90, columns, generator=random, dtype=torch.float64) for columns in (FEATURES, OUTPUTS))
    edge_attr = torch.randn(400, EDGE_FEATURES, generator=random, dtype=torch.float64)
    part = torch.rand(90, generator=random)
    masks = {"train_mask": part < 0.5, "val_mask": part > 0.8, "test_mask": part < 0}
    return Data(x=x, edge_index=edge_index, edge_attr=edge_attr, y=y, **masks)


def edges_as_nodes(data: Data) -> HeteroData:
    (sources, targets), edges = data.edge_index, torch.arange(data.num_edges)
    found = HeteroData({"node": {key: data[key] for key in ("x", "y", "train_mask", "val_mask", "test_mask")}})
    found["edge"].x = data.edge_attr
    found["node", "source", "edge"].edge_index = torch.stack((sources, edges))
    found["node", "target", "edge"].edge_index = torch.stack((targets, edges))
    found["edge", "into", "node"].edge_index = torch.stack((edges, targets))
    return found


class Ends:
    """Rows of sources and of targets, and sums over the edges into each node."""

    def __init__(self, edge_index: Tensor) -> None:
        self.edge_index = edge_index

    def source(self, x: Tensor, e: Tensor) -> Tensor:
        return x[self.edge_index[0]]

    def target(self, x: Tensor, e: Tensor) -> Tensor:
        return x[self.edge_index[1]]

    def into(self, e: Tensor, x: Tensor) -> Tensor:
        found: Tensor = scatter(e, self.edge_index[1], dim=0, dim_size=len(x), reduce="sum")
        return found


class EndsOfTypes:
    """The same of edges as nodes."""

    def __init__(self, edge_index_dict: dict[tuple[str, str, str], Tensor], of_neighbours: nn.Module) -> None:
        self.edges, self.sum = edge_index_dict, of_neighbours

    def source(self, x: Tensor, e: Tensor) -> Tensor:
        return self.sum((x, e), self.edges["node", "source", "edge"])  # type: ignore[no-any-return]

    def target(self, x: Tensor, e: Tensor) -> Tensor:
        return self.sum((x, e), self.edges["node", "target", "edge"])  # type: ignore[no-any-return]

    def into(self, e: Tensor, x: Tensor) -> Tensor:
        return self.sum((e, x), self.edges["edge", "into", "node"])  # type: ignore[no-any-return]


class Mesh(nn.Module):
    """Edges anew of themselves and both ends, nodes of their sums (Pfaff and others, 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Sequential(nn.Linear(3 * HIDDEN, HIDDEN), nn.ReLU(), nn.LayerNorm(HIDDEN))
        self.nodes = nn.Sequential(nn.Linear(2 * HIDDEN, HIDDEN), nn.ReLU(), nn.LayerNorm(HIDDEN))

    def forward(self, x: Tensor, e: Tensor, ends: Ends | EndsOfTypes) -> tuple[Tensor, Tensor]:
        e = e + self.edges(torch.cat((e, ends.source(x, e), ends.target(x, e)), dim=-1))
        return x + self.nodes(torch.cat((x, ends.into(e, x)), dim=-1)), e


class Gated(nn.Module):
    """Gates of every edge, normalized over those of a node, batch norms of nodes and of edges (Bresson, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.u, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(5))
        self.norm, self.norm_of_edges = nn.BatchNorm1d(HIDDEN), nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor, e: Tensor, ends: Ends | EndsOfTypes) -> tuple[Tensor, Tensor]:
        found = ends.target(self.a(x), e) + ends.source(self.b(x), e) + self.c(e)
        gates = torch.sigmoid(found)
        sums = ends.into(gates * ends.source(self.v(x), e), x) / (ends.into(gates, x) + 1e-6)
        return x + self.norm(self.u(x) + sums).relu(), e + self.norm_of_edges(found).relu()


class Net(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.nodes, self.edges = nn.Linear(FEATURES, HIDDEN), nn.Linear(EDGE_FEATURES, HIDDEN)
        self.first, self.second, self.out = layer(), layer(), nn.Linear(2 * HIDDEN, OUTPUTS)

    def computed(self, x: Tensor, e: Tensor, ends: Ends | EndsOfTypes) -> Tensor:
        x, e = self.second(*self.first(self.nodes(x), self.edges(e), ends), ends)
        found: Tensor = self.out(torch.cat((x, ends.into(e, x)), dim=-1))
        return found


class Plain(Net):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.computed(x, edge_attr, Ends(edge_index))


class OfTypes(Net):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__(layer)
        self.sum = SimpleConv(aggr="sum")

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Tensor:
        return self.computed(x_dict["node"], x_dict["edge"], EndsOfTypes(edge_index_dict, self.sum))


def reference(model: nn.Module, data: Data) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(
            model(data.x, data.edge_index, data.edge_attr)[data.train_mask], data.y[data.train_mask]
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(model: nn.Module, store: ooc.Store, folder: Path, memory: str) -> list[float]:
    folder.mkdir()
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": nn.MSELoss(), "spill_dir": folder}
    with ooc.Trainer(model, store, memory=memory, _tuning=Tuning(tile_rows=16), **options) as trainer:
        assert (trainer.plan.ssd_write_bytes > 0) == (memory != "64M")
        return [record.loss for record in trainer.fit(epochs=EPOCHS, progress=False)]


@pytest.mark.parametrize("layer", [Mesh, Gated])
def test_losses_gradients_and_weights_are_those_of_matrices_of_edges(layer: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain, model = Plain(layer).double(), OfTypes(layer).double()
    model.load_state_dict(plain.state_dict())
    lean = copy.deepcopy(model)
    store = ooc.convert(edges_as_nodes(graph()), tmp_path / "g.ooc", dtype="float64")
    losses = trained(model, store, tmp_path / "ample", "64M")
    torch.testing.assert_close(losses, reference(plain, graph()), rtol=TOLERANCE, atol=TOLERANCE)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=TOLERANCE, atol=TOLERANCE)
    assert losses == trained(lean, store, tmp_path / "lean", "200K")
    assert all(map(torch.equal, model.state_dict().values(), lean.state_dict().values()))
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=TOLERANCE, atol=TOLERANCE)
