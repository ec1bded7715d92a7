# SPDX-License-Identifier: Apache-2.0
"""What nodes have beside x, positions, encodings and categories, comes to models that ask for it by name, as in PyG;
so do rows and edges, in any order, and rows alone."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GINConv, PointNetConv, SAGEConv
from torch_geometric.nn.models import GCN, MLP

import ooc
from ooc.errors import ModelError, OptionError, SourceError, TrainingError
from ooc.train.batched.batches import SampledTrainer, Sampling
from tests.graphs import GraphCase, random_data

KINDS, H = 4, 6


@pytest.fixture
def data() -> Data:
    found = random_data(GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8))
    generator = torch.Generator().manual_seed(2)
    found.pos = torch.randn(len(found.x), 3, generator=generator, dtype=torch.float64)
    found.z = torch.randint(0, KINDS, (len(found.x), 1), generator=generator)
    found.level = found.z[:, 0]
    found.unasked = torch.full((len(found.x), 1), torch.nan)
    return found


class All(nn.Module):
    """Numbers, positions and categories, in an order of its own."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.table, self.encoder = nn.Embedding(KINDS, H), SAGEConv(features + 3 + H, H)
        self.last = GINConv(nn.Linear(H, classes))

    def forward(self, z: Tensor, x: Tensor, edge_index: Tensor, pos: Tensor, level: Tensor) -> Tensor:
        counted = x + z.to(x.dtype) / KINDS + level.int().float().view(-1, 1)
        looked_up = self.table(z.squeeze().long()) + self.table(level.to(torch.long))
        assert looked_up.size(1) == H  # which is computed of made-up numbers
        rows = torch.cat([counted, pos, looked_up], dim=1)
        out: Tensor = self.last(self.encoder(rows, edge_index).relu(), edge_index)
        return out


class Asking(All):
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.z, data.x, data.edge_index, data["pos"], data.level)


class Places(nn.Module):
    """Positions alone, and a layer that is given None for features."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv = PointNetConv(nn.Linear(3, H), nn.Linear(H, classes))

    def forward(self, pos: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(None, pos, edge_index)
        return out


class Backwards(GCN):  # type: ignore[misc]
    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, H, 2, classes)

    def forward(self, edge_index: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, edge_index)
        return out


class Alone(nn.Module):
    """A row of its own, without edges."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.lin = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin(x)
        return out


MODELS: dict[str, tuple[Callable[[int, int], nn.Module], str]] = {
    "all": (All, "z x edge_index pos level"),
    "data": (Asking, ""),
    "positions": (Places, "pos edge_index"),
    "edges first": (Backwards, "edge_index x"),
    "rows alone": (Alone, "x"),
    "a sequence": (lambda features, classes: nn.Sequential(nn.Linear(features, H), nn.Linear(H, classes)), "x"),
    "an MLP with a norm of graphs": (lambda features, classes: MLP([features, H, classes], norm="graph_norm"), "x"),
}


def epochs(model: nn.Module, data: Data, names: str, count: int = 2) -> list[float]:
    """The losses of PyG's full batch; the model is trained."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(count):
        optimizer.zero_grad()
        out = model(*(data[name] for name in names.split())) if names else model(data)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_models_are_given_what_they_ask_for(name: str, data: Data, tmp_path: Path) -> None:
    make, names = MODELS[name]
    torch.manual_seed(1)
    reference = make(data.num_features, int(data.y.max()) + 1).double()
    model, expected = copy.deepcopy(reference), epochs(reference, data, names)
    with ooc.Trainer(model, data, memory="64M", spill_dir=tmp_path) as trainer:
        losses = [record.loss for record in trainer.fit(2, progress=False)]
    assert losses == pytest.approx(expected, rel=1e-10)
    for weight, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-7, atol=1e-9)


class AdjacencyFirst(GCN):  # type: ignore[misc]
    def forward(self, adj: Tensor, features: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(features, adj)
        return out


class ByName(GCN):  # type: ignore[misc]
    def forward(self, *, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, edge_index)
        return out


class Counting(GCN):  # type: ignore[misc]
    """Is told how many nodes were drawn, where such are."""

    def forward(self, x: Tensor, edge_index: Tensor, num_sampled_nodes: Any) -> Tensor:  # type: ignore[override]
        assert num_sampled_nodes is None
        out: Tensor = super().forward(x, edge_index)
        return out


class Numbered(GCN):  # type: ignore[misc]
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        x = data.x + sum(data[f"x{number}"] for number in (1, 2))
        out: Tensor = super().forward(x, data.edge_index)
        return out


@pytest.mark.parametrize("kind", [AdjacencyFirst, ByName, Counting, Numbered])
def test_arguments_by_other_names_and_orders(kind: type[GCN], data: Data, tmp_path: Path) -> None:
    if kind is Numbered:
        data.x1, data.x2 = data.x.clone(), -data.x
    losses = []
    for one in (GCN, kind):
        torch.manual_seed(1)
        model = one(data.num_features, H, 2, int(data.y.max()) + 1).double()
        with ooc.Trainer(model, data, memory="64M", spill_dir=tmp_path) as trainer:
            losses.append([record.loss for record in trainer.fit(2, progress=False)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_a_store_keeps_them_for_whoever_asks(data: Data, tmp_path: Path) -> None:
    """Full graph and batches of it; a model of x alone is given x alone."""
    store = ooc.convert(data, tmp_path / "placed.ooc", inputs=["pos", "z", "level"], dtype="float64")
    options: dict[str, Any] = {"memory": "64M", "spill_dir": tmp_path}
    for make, names in ((All, MODELS["all"][1]), (Asking, ""), (Backwards, "edge_index x")):
        torch.manual_seed(1)
        models = [make(data.num_features, store.num_classes).double() for _ in range(1)]
        models += [copy.deepcopy(models[0]), copy.deepcopy(models[0])]
        expected = epochs(models[0], data, names)
        trainers = [ooc.Trainer(models[1], store, **options)]
        if make is not Backwards:  # whose degrees are not a batch's
            trainers.append(SampledTrainer(models[2], store, Sampling(fanouts=(-1, -1), batch_size=1000), **options))
        for trainer in trainers:
            with trainer:
                assert [one.loss for one in trainer.fit(2, progress=False)] == pytest.approx(expected, rel=1e-10)
    with pytest.raises(OptionError, match="inputs= names what PyG's data has"):
        ooc.convert("synthetic:nodes=20,edges=40,features=2,classes=2", tmp_path / "other.ooc", inputs=["pos"])


def test_what_a_model_may_do_without_is_said(data: Data, tmp_path: Path) -> None:
    """Whether its user would give it, nobody knows."""

    class Optional(Alone):
        def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
            return super().forward(x if pos is None else x + pos.sum(1, keepdim=True))

    expected = {}
    for names in ("x pos", "x"):
        torch.manual_seed(1)
        reference = Optional(data.num_features, 4).double()
        model, expected[names] = copy.deepcopy(reference), epochs(reference, data, names, 1)
        with pytest.warns(RuntimeWarning, match="given pos of the data, which") if names != "x" else nullcontext():
            trainer = ooc.Trainer(model, data, memory="64M", spill_dir=tmp_path)
        with trainer:
            assert [one.loss for one in trainer.fit(1, progress=False)] == pytest.approx(expected[names], rel=1e-10)
        if names != "x":
            del data.pos
    assert expected["x"] != expected["x pos"]


class Placed(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv = SAGEConv(features + 3, H)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(torch.cat([x, pos], dim=1), edge_index)
        return out


class Columns(Placed):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[:, :-3], x[:, -3:], edge_index)


def test_encoders_of_links_are_given_them(data: Data, tmp_path: Path) -> None:
    columns = Data(x=torch.cat([data.x, data.pos], dim=1), edge_index=data.edge_index, y=data.y)
    links, losses = ooc.Links(data.edge_index[:, :40], data.edge_index[:, 40:50]), []
    for kind, graph in ((Placed, data), (Columns, columns)):
        torch.manual_seed(1)
        model = ooc.LinkPredictor(kind(data.num_features).double())
        with ooc.LinkTrainer(model, graph, links, memory="64M", spill_dir=tmp_path) as trainer:
            losses.append([record.loss for record in trainer.fit(2, progress=False)])
    assert losses[0] == losses[1]


def test_later_changes_of_them_are_refused(data: Data, tmp_path: Path) -> None:
    """A store has been made of them, which would not follow."""
    with ooc.Trainer(Alone(data.num_features, 4).double(), data, memory="64M", spill_dir=tmp_path) as trainer:
        data.pos = data.pos + 1  # which nobody asks for
        trainer.fit(1, progress=False)
    with ooc.Trainer(Places(data.num_features, 4).double(), data, memory="64M", spill_dir=tmp_path) as trainer:
        data.pos.mul_(2)
        with pytest.raises(TrainingError, match=r"^pos of the data has changed"):
            trainer.predict()


@pytest.mark.parametrize(
    ("pos", "said"),
    [
        (torch.ones(51, 2), r"pos has the shape \(51, 2\), not a row for each of 50 nodes"),
        (torch.ones(50, 2, 1), r"pos has the shape \(50, 2, 1\)"),
        (torch.tensor(1.0), r"pos has the shape \(\)"),
        (None, "pos is no tensor"),
    ],
)
def test_inputs_have_a_row_for_each_node(data: Data, tmp_path: Path, pos: Tensor | None, said: str) -> None:
    """Of one with more rows the first ones were taken."""
    data.pos = pos
    with pytest.raises(SourceError, match=said):
        ooc.convert(data, tmp_path / "g.ooc", inputs=["pos"])


def test_what_is_not_there_is_refused(data: Data, tmp_path: Path) -> None:
    del data.pos
    for model, said in ((All(data.num_features, 3), "its forward must take"), (Asking(data.num_features, 3), "pos")):
        with pytest.raises(ModelError, match=said):
            ooc.Trainer(model.double(), data, memory="64M", spill_dir=tmp_path)
