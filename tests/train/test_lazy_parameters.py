# SPDX-License-Identifier: Apache-2.0
"""Layers that are told no widths, as ``SAGEConv((-1, -1), 64)``, have the store's, as by a first forward pass."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, Linear, SAGEConv, global_add_pool, to_hetero
from torch_geometric.nn import Sequential as GraphSequential

import ooc
from ooc.errors import ModelError
from ooc.train.batched.batches import SampledTrainer, Sampling
from tests.exactness import test_types as typed
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=60, edges=200, features=6, classes=3)


class Two(nn.Module):
    """Two layers with a norm and dropout between, that are told no widths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = GCNConv(-1, 8, cached=True), nn.LazyBatchNorm1d()
        self.second, self.last = SAGEConv((-1, -1), 8), Linear(-1, GRAPH.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.dropout(self.norm(self.first(x, edge_index)), 0.5, self.training)
        out: Tensor = self.last(self.second(x, edge_index))
        return out


def test_sizes_and_values_are_those_of_a_forward_pass(tmp_path: Path) -> None:
    """Drawn by torch's generator, in the order of the layers; an optimizer that has them already steps them."""
    data = random_data(GRAPH, dtype=torch.float32)
    torch.manual_seed(3)
    expected = Two().eval()
    with torch.no_grad():
        expected(data.x, data.edge_index)
    torch.manual_seed(3)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ooc.Trainer(model, data, memory="64M", optimizer=optimizer, spill_dir=tmp_path) as trainer:
        assert model.training and model.first._cached_edge_index is None
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        trainer.fit(2, progress=False)
        assert not torch.equal(model.first.lin.weight, expected.first.lin.weight)
        found = trainer.predict()
    with torch.no_grad():
        assert torch.allclose(found, model.eval()(data.x, data.edge_index), atol=1e-5)


class Layers(nn.Module):
    """A homogeneous model, for ``to_hetero``."""

    def __init__(self, conv: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.last = conv(), conv(), Linear(-1, typed.CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(self.second(self.first(x, edge_index).relu(), edge_index))
        return out


@pytest.mark.parametrize(
    "conv", [lambda: SAGEConv((-1, -1), 8), lambda: GATConv((-1, -1), 4, heads=2, add_self_loops=False)]
)
def test_models_of_types(conv: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Exactly as PyG trains what came of its first forward pass."""
    data = typed.graph(topics_reached=True)
    expected = typed.made(lambda data: to_hetero(Layers(conv), data.metadata()), data)
    torch.manual_seed(3)
    model = to_hetero(Layers(conv), data.metadata()).double()
    losses = typed.trained(model, typed.store_of(data, tmp_path), tmp_path)
    torch.testing.assert_close(losses, typed.reference(expected, data), rtol=1e-9, atol=1e-9)


def test_embeddings_and_links_count(tmp_path: Path) -> None:
    data = random_data(GRAPH, dtype=torch.float32)
    del data.x
    store = ooc.convert(data, tmp_path / "bare.ooc")
    with ooc.Trainer(Two(), store, memory="64M", embedding=5) as trainer:
        trainer.fit(1, progress=False)
        assert trainer.model.first.lin.in_channels == 5
    encoder = GraphSequential("x, edge_index", [(SAGEConv(-1, 8), "x, edge_index -> x")])
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    with ooc.LinkTrainer(ooc.LinkPredictor(encoder), store, ooc.Links(), memory="64M") as links:
        links.fit(1, progress=False)


def test_batches(tmp_path: Path) -> None:
    """Of sampled neighbours, and of graphs."""
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    encoder = GraphSequential("x, edge_index", [(SAGEConv(-1, GRAPH.classes), "x, edge_index -> x")])
    with SampledTrainer(encoder, store, Sampling(fanouts=[3], batch_size=16), memory="64M") as trainer:
        trainer.fit(1, progress=False)

    class OfGraphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = SAGEConv(-1, 8), Linear(-1, 2)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
            out: Tensor = self.last(global_add_pool(self.conv(x, edge_index), batch, size=batch_size))
            return out

    edge_index = torch.tensor([[0, 1], [1, 0]])
    graphs = [Data(x=torch.randn(3, 4), edge_index=edge_index, y=torch.tensor([k % 2])) for k in range(20)]
    with ooc.GraphTrainer(OfGraphs(), graphs, memory="64M", spill_dir=tmp_path) as of_graphs:
        of_graphs.fit(1, progress=False)


def test_types_without_features_are_named(tmp_path: Path) -> None:
    data = typed.graph(topics_reached=True)
    data["topic"].num_nodes = len(data["topic"].x)
    del data["topic"].x
    model = to_hetero(Layers(lambda: SAGEConv((-1, -1), 8)), data.metadata()).double()
    with pytest.raises(ModelError, match=r"nodes 'topic' have no features, embedding={'topic': 64} trains some"):
        ooc.Trainer(model, typed.store_of(data, tmp_path), memory="64M")


def test_what_has_no_size_then_is_refused_by_name(tmp_path: Path) -> None:
    class Unused(Two):
        def __init__(self) -> None:
            super().__init__()
            self.other = Linear(-1, 3)

    class Failing(Two):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x[:, :0], edge_index) @ torch.ones(2, 2)

    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    with pytest.raises(ModelError, match=r"Unused: other.weight has no size yet, and forward does not use it"):
        ooc.Trainer(Unused(), store, memory="64M")
    with pytest.raises(ModelError, match=r"Failing: its lazily sized parameters cannot be given .* made-up rows: "):
        ooc.Trainer(Failing(), store, memory="64M")
