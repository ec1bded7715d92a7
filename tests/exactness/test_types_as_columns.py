# SPDX-License-Identifier: Apache-2.0
"""Layers that are told the type of each node and edge, which are columns of what the store holds, are PyG's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    FiLMConv,
    GCNConv,
    HEATConv,
    HeteroBatchNorm,
    HeteroLayerNorm,
    HeteroLinear,
    MessagePassing,
    SAGEConv,
)

from ooc.errors import ModelError
from ooc.model.lowering.trimming import Trimmed
from ooc.train.batched.batches import SampledTrainer, Sampling
from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of
from tests.exactness.reference import CustomCase, Reference, adam
from tests.graphs import GraphCase, random_data

ROUGH: dict[str, Any] = {"self_loops": 9, "isolated": 7, "duplicates": 15, "unlabelled": 8, "edge_features": 3}
KINDS, EDGE_KINDS, H = 3, 2, 6


def graph(**options: Any) -> Data:
    """The last column of x has the type of each node, the first one of edge_attr that of each edge."""
    data = random_data(GraphCase(**(ROUGH | options)))
    generator = torch.Generator().manual_seed(2)
    data.x[:, -1] = torch.randint(0, KINDS, (len(data.x),), generator=generator).double()
    data.edge_attr[:, 0] = torch.randint(0, EDGE_KINDS, (data.num_edges,), generator=generator).double()
    return data


def heat(inputs: int, outputs: int, **options: Any) -> HEATConv:
    conv = HEATConv(inputs, outputs, KINDS, EDGE_KINDS, 4, 2, 4, heads=2, **options)
    conv.drops_inside = True
    return conv


class Told(nn.Module):
    """All that takes types: attention, norms, maps and tables."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = heat(features - 1, H, dropout=0.2), heat(2 * H, classes, concat=False)
        self.norm, self.other = HeteroBatchNorm(2 * H, KINDS, momentum=None), HeteroLayerNorm(classes, KINDS)
        self.table, self.scale = nn.Embedding(KINDS, 2 * H), nn.Parameter(torch.randn(KINDS, 2 * H))
        self.linear = HeteroLinear(2 * H, 2 * H, KINDS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        kinds, edges = x[:, -2:].long()[:, 1], (edge_attr[:, 0].long(), edge_attr[:, 1:])
        x = self.norm(self.first(x[:, :-1], edge_index, kinds, *edges), kinds).relu()
        x = self.linear(x + self.table(kinds) * self.scale[kinds], kinds)
        out: Tensor = self.other(self.last(x, edge_index, kinds, *edges), kinds)
        return out


class Untracked(nn.Module):
    """A norm without running statistics, and types by which column is largest."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.norm = HeteroBatchNorm(features, 4, affine=False, track_running_stats=False)
        self.conv = heat(features, classes, concat=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        kinds = x[:, :KINDS].argmax(dim=1)
        return self.conv(self.norm(x, kinds), edge_index, kinds, edge_attr[:, 1:].argmax(dim=-1), edge_attr[:, :2])


class Composition(MessagePassing):
    """A layer of CompGCN, whose rows of relations are given to it, and a scale."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="add")
        self.linear, self.own = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor, kinds: Tensor, relations: Tensor, scale: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, kinds=kinds, relations=relations) * scale + self.own(x)

    def message(self, x_j: Tensor, kinds: Tensor, relations: Tensor) -> Tensor:
        return self.linear(x_j - relations[kinds])


class Composed(nn.Module):
    """Rows of relations that go from layer to layer, by a map of their own."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.relations, self.map = nn.Parameter(torch.randn(EDGE_KINDS, features)), nn.Linear(features, H)
        self.first, self.last = Composition(features, H), Composition(H, classes)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        kinds, scale = edge_attr[:, 0].long(), self.scale * 2 + self.relations.mean()
        x = self.first(x, edge_index, kinds, self.relations, scale).tanh()
        return self.last(x, edge_index, kinds, self.map(self.relations).tanh(), scale)


def test_rows_of_relations(tmp_path: Path) -> None:
    """Parameters, and what is computed of such, may be given to layers; in the least memory."""
    case, data = CustomCase(make=Composed), graph()
    store = store_of(data, tmp_path)
    assert_agrees(case, data, tmp_path, epochs=2, store=store, **least(case, store, tmp_path))


class Filmed(nn.Module):
    """A layer of PyG's that leaves out the edges of other types by itself."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv = FiLMConv(features, classes, num_relations=EDGE_KINDS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_attr[:, -1].long())


def test_films_of_relations(tmp_path: Path) -> None:
    data = graph()
    data.edge_attr = data.edge_attr[:, :1]
    assert_agrees(CustomCase(make=Filmed), data, tmp_path, epochs=1)


def test_model_of_all(tmp_path: Path) -> None:
    """Losses, gradients, running statistics and scores."""
    assert_agrees(CustomCase(make=Told), graph(), tmp_path, epochs=2)


def test_in_least_memory(tmp_path: Path) -> None:
    case, data = CustomCase(make=Untracked), graph()
    store = store_of(data, tmp_path)
    assert_agrees(case, data, tmp_path, epochs=2, store=store, **least(case, store, tmp_path))


class Looking(nn.Module):
    """Takes types at two distances from its outputs."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.linear = heat(features, H, concat=False), HeteroLinear(H, H, KINDS)
        self.last, self.table = SAGEConv(H, classes), nn.Embedding(KINDS, classes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        kinds = x[:, -1].long()
        x = self.linear(self.first(x, edge_index, kinds, edge_attr[:, 0].long(), edge_attr[:, 1:]).relu(), kinds)
        return self.last(x, edge_index) + self.table(kinds)


def test_in_batches_of_all_neighbours(tmp_path: Path) -> None:
    """Which compute of each hop what later ones read, of numbers to look up by, too."""
    data, epochs = graph(), 2
    store = store_of(data, tmp_path)
    model = CustomCase(make=Looking).build(store.num_features, store.num_classes)
    reference = Reference(CustomCase(make=Looking), model, data, adam)
    sampling = Sampling(fanouts=[-1, -1], batch_size=10_000)
    with SampledTrainer(model, store, sampling, memory="100M", optimizer=adam(model)) as trainer:
        found = [record.loss for record in trainer.fit(epochs, eval_every=0, progress=False)]
        assert isinstance(trainer.batch_model, Trimmed)
    assert found == pytest.approx([reference.train().loss for _ in range(epochs)], rel=1e-9)


class Wrong(nn.Module):
    def __init__(self, features: int, classes: int, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.use = GCNConv(features, classes), use
        self.table, self.linear = (
            nn.Embedding(KINDS, features, max_norm=1.0),
            HeteroLinear(features, features, KINDS, is_sorted=True),
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.use(self, x), edge_index)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "of trained rows": (lambda own, x: x + own.linear.bias[(x * own.linear.bias[0])[:, 0].long()], "long: whole numb"),
    "a table that changes": (lambda own, x: x + own.table(x[:, -1].long()), "Embedding .table. is not supported with"),
    "in order": (lambda own, x: own.linear(x, x[:, -1].long()), "HeteroLinear .linear. is not supported with"),
    "as numbers": (lambda own, x: x * (x[:, -1].long() + 1), "add does not give numbers of type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str, tmp_path: Path) -> None:
    use, said = REFUSED[name]
    data = graph()
    del data.edge_attr
    store = store_of(data, tmp_path)
    with pytest.raises(ModelError, match=said):
        make_trainer(CustomCase(make=lambda f, c: Wrong(f, c, use)), store, tmp_path)
