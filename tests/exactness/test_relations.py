# SPDX-License-Identifier: Apache-2.0
"""Graphs whose edges have a type by number, ``edge_type``, against PyG's RGCNConv, full batch."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import FastRGCNConv, FiLMConv, GATConv, GCNConv, GraphConv, RGATConv, RGCNConv, SAGEConv

import ooc
from ooc.errors import ModelError, SourceError
from ooc.train.setup import Tuning

FEATURES, HIDDEN, CLASSES, RELATIONS, EPOCHS = 8, 6, 4, 6, 2
TOLERANCE = 1e-10


def graph() -> Data:
    """90 nodes of which the last have no edges, repeated edges, types 3 and 5 of which there are none."""
    random = torch.Generator().manual_seed(1)
    data = Data(x=torch.randn(90, FEATURES, generator=random, dtype=torch.float64))
    data.edge_index = torch.randint(70, (2, 400), generator=random)
    data.edge_type = torch.tensor([0, 1, 2, 4])[torch.randint(4, (400,), generator=random)]
    data.y = torch.randint(CLASSES, (90,), generator=random)
    part = torch.rand(90, generator=random)
    data.train_mask, data.val_mask, data.test_mask = part < 0.5, part > 0.8, part < 0
    return data


class Net(nn.Module):
    def __init__(self, conv: type[nn.Module] = RGCNConv, **options: Any) -> None:
        super().__init__()
        self.first = conv(FEATURES, HIDDEN, RELATIONS, **options)
        self.second = conv(HIDDEN, CLASSES, RELATIONS, **options)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.first(x, edge_index, edge_type).relu()
        found: Tensor = self.second(x, edge_index, edge_type)
        return found


def made(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Net(**options).double()
    for name, unused in model.named_parameters():
        if name.endswith(".l2"):  # which RGATConv leaves as it comes out of memory
            nn.init.constant_(unused, torch.nan)
    return model


def trained(model: nn.Module, data: ooc.Store | Data, folder: Path, **options: Any) -> list[float]:
    optimizer, tuning = torch.optim.SGD(model.parameters(), lr=0.5), Tuning(tile_rows=16)
    (folder / "spill").mkdir(exist_ok=True)
    options |= {"optimizer": optimizer, "spill_dir": folder / "spill", "_tuning": tuning}
    with ooc.Trainer(model, data, **options) as trainer:
        return [record.loss for record in trainer.fit(epochs=EPOCHS, progress=False)]


def reference(model: nn.Module, data: Data) -> list[float]:
    """PyG's."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        output = model(data.x, data.edge_index, data.edge_type)
        loss = F.cross_entropy(output[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_as_pyg(model: nn.Module, folder: Path) -> None:
    """Losses, gradients and weights."""
    data, expected = graph(), copy.deepcopy(model)
    losses = trained(model, ooc.convert(data, folder / "g.ooc", dtype="float64"), folder)
    torch.testing.assert_close(losses, reference(expected, data), rtol=TOLERANCE, atol=TOLERANCE)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        assert (found.grad is None) == (wanted.grad is None)
        if found.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=TOLERANCE, atol=TOLERANCE)


OPTIONS: dict[str, dict[str, Any]] = {
    "a matrix each": {},
    "bases": {"num_bases": 3},
    "blocks": {"num_blocks": 2},
    "sums": {"aggr": "add", "root_weight": False},
    "maxima": {"aggr": "max", "bias": False},
    "fast": {"conv": FastRGCNConv},
    "fast, bases, sums": {"conv": FastRGCNConv, "num_bases": 2, "aggr": "sum"},
    "fast, blocks": {"conv": FastRGCNConv, "num_blocks": 2},
    "attention": {"conv": RGATConv, "heads": 2, "num_bases": 3, "concat": False},
    "attention to each type": {"conv": RGATConv, "attention_mechanism": "within-relation", "num_blocks": 2},
}


@pytest.mark.thorough("fast, blocks", "sums")
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_gradients_and_weights_are_pygs(name: str, tmp_path: Path) -> None:
    assert_as_pyg(made(**OPTIONS[name]), tmp_path)


def test_the_same_bits_whatever_the_budgets_and_as_it_is(tmp_path: Path) -> None:
    data, slabs = graph(), {"block_rows": 16, "slab_columns": 2}
    store = ooc.convert(data, tmp_path / "g.ooc", dtype="float64")
    assert trained(made(num_bases=3), data, tmp_path) == trained(made(num_bases=3), store, tmp_path, **slabs)


def test_a_number_is_a_type_of_edges(tmp_path: Path) -> None:
    """Also of plain arrays; and none is where edges' data is left out."""
    data = graph()
    names = ("x", "edge_index", "edge_type", "y", "train_mask")
    store = ooc.convert({name: getattr(data, name).numpy() for name in names}, tmp_path / "g.ooc")
    assert store.types is not None and list(store.types.nodes) == ["node"]
    counts = np.bincount(data.edge_type.numpy())
    assert [*store.types.edges.values()] == counts.tolist() and len(counts) == 5
    _, indices = store.topology("edges/node__2__node/out")
    chosen = data.edge_index[:, data.edge_type == 2].numpy()
    np.testing.assert_array_equal(indices.read(), chosen[1][np.lexsort((chosen[1], chosen[0]))])
    assert ooc.convert(data, tmp_path / "h.ooc", drop_edge_data=True).types is None


class OneByOne(nn.Module):
    """A layer for each type, as one writes it by hand."""

    def __init__(self, relations: int = 5) -> None:
        super().__init__()
        kinds = [SAGEConv, GCNConv, partial(GATConv, concat=False, heads=2), partial(SAGEConv, aggr="max")]
        self.convs = nn.ModuleList(kinds[number % 4](FEATURES, HIDDEN) for number in range(relations))
        self.turned, self.out = GraphConv(HIDDEN, HIDDEN), RGCNConv(HIDDEN, CLASSES, RELATIONS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        found = 0
        for number, conv in enumerate(self.convs):
            mask = edge_type == number
            found = found + conv(x, edge_index[:, mask])
        found = self.turned(found.relu(), edge_index[:, edge_type.eq(1)].flip(0))
        out: Tensor = self.out(found, edge_index, edge_type)
        return out


def test_layers_may_be_given_the_edges_of_a_type(tmp_path: Path) -> None:
    """Also of one without any."""
    torch.manual_seed(3)
    assert_as_pyg(OneByOne().double(), tmp_path)


class Alike(Net):
    """A layer that takes edges of all types alike."""

    def __init__(self) -> None:
        super().__init__()
        self.second = GCNConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x, edge_index, edge_type), edge_index)
        return found


class Turned(Net):
    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return super().forward(x, edge_index.flip(0), edge_type)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Net(aggr="median"), r"RGCNConv \(first\): aggr='median' is not supported; use add"),
        (Net(lambda i, o, count: RGCNConv(i, o, count - 3)), "it has num_relations=3, the graph 5 types of edges"),
        (Net(RGATConv, mod="additive"), "mod and attention_mode='multiplicative-self-attention' are not"),
        (Turned(), "it must be given the model's own edge_index and edge_type"),
        (Alike(), "GCNConv"),
        (Net(FiLMConv), r"FiLMConv .*types that a layer looks up are a column of edge_attr"),
        (OneByOne(6), "it asks for edges of type 5; the graph has 5 types"),
        (nn.Sequential(RGCNConv(FEATURES, CLASSES, RELATIONS)), r"or \(x, edge_index, edge_type\)"),
    ],
    ids=[
        "medians",
        "more types",
        "another attention",
        "edges turned",
        "edges alike",
        "films",
        "no such type",
        "one argument",
    ],
)
def test_models_that_are_not_exact_are_refused_by_name(model: nn.Module, told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=told):
        ooc.Trainer(model.double(), ooc.convert(graph(), tmp_path / "g.ooc", dtype="float64"))


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    data = graph()
    data.edge_type[0] = -1
    with pytest.raises(SourceError, match="edge_type has to be 0 to 4095, not -1 to 4"):
        ooc.convert(data, tmp_path / "g.ooc")
    data.edge_index, data.edge_type = data.edge_index[:, :0], data.edge_type[:0]
    with pytest.raises(SourceError, match="there are no edges to be of types; leave out edge_type"):
        ooc.convert(data, tmp_path / "g.ooc")
