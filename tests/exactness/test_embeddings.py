# SPDX-License-Identifier: Apache-2.0
"""An embedding that is trained along is torch's: rows, losses, gradients, whatever the model, optimizer and plan."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import EdgeConv, GATv2Conv, LGConv, SimpleConv
from torch_geometric.nn.models import LINKX

import ooc
from ooc.storage.store import Store
from tests.exactness.comparison import DIRECTIONS, FLOOR, TOLERANCE, in_turn, least_budgets, train_epoch, tuned_trainer
from tests.exactness.layers import MlpMessages
from tests.exactness.models import Branches, Dense
from tests.exactness.reference import CustomCase, ModelCase, Reference, adam, disagreement
from tests.graphs import GraphCase, random_data

COLUMNS = 6
GRAPH = GraphCase(nodes=90, edges=260, features=3, self_loops=4, isolated=5, duplicates=8, unlabelled=30)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.99)}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.2}),
    "adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.3, "initial_accumulator_value": 0.2}),
    "sparseadam": (torch.optim.SparseAdam, {"betas": (0.8, 0.99), "eps": 1e-4}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
}
LR = 0.05


class Own(nn.Module):
    """Layers that run as they are, the first on the embedding itself."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = MlpMessages(features, 5)
        self.second = EdgeConv(nn.Linear(10, classes))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Maximum(nn.Module):
    """Attention of the newer kind, and the embedding once more behind it."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GATv2Conv(features, 4, heads=2)
        self.last = nn.Linear(8 + features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(torch.cat([self.first(x, edge_index), x], dim=1))


MODELS = {
    "gcn": ModelCase(kind="gcn", layers=2, dropout=0.3, input_dropout=0.2),
    "gcn, sums first": ModelCase(kind="gcn", layers=3, hidden=20),
    "sage": ModelCase(kind="sage", layers=2, dropout=0.3),
    "gat": ModelCase(kind="gat", layers=2, dropout=0.2, options={"heads": 2}),
    "gin": ModelCase(kind="gin", layers=2, options={"norm": "batch_norm", "jk": "cat"}),
    "layers of one's own": CustomCase(make=Own),
    "attention": CustomCase(make=Maximum),
    "dense": CustomCase(make=Dense),
    "branches": CustomCase(make=Branches),
}


def without_features(data: Data) -> Data:
    """The same graph, of whose nodes nothing is known."""
    bare = copy.copy(data)
    del bare["x"]
    bare.num_nodes = data.num_nodes
    return bare


def graph_in(folder: Path, data: Data, **options: Any) -> tuple[Store, Data]:
    """The store, and the same graph with its nodes in the store's order."""
    folder.mkdir(exist_ok=True)
    store = ooc.convert(data, folder / "graph.ooc", dtype="float64", **options)
    perm = torch.from_numpy(store.array("perm").read())
    place = torch.empty_like(perm)
    place[perm] = torch.arange(len(perm))
    rows = {name: data[name][perm] for name in ("x", "y", "train_mask", "val_mask", "test_mask") if name in data}
    return store, Data(edge_index=place[data.edge_index], num_nodes=len(perm), **rows)


def trainer_of(case: ModelCase, store: Store, folder: Path, optimizer: str = "adam", **options: Any) -> ooc.Trainer:
    """One with small tiles; ``optimizer`` steps the embedding."""
    dtype = options.pop("dtype", torch.float64)
    model = case.build(store.num_features + COLUMNS, store.num_classes, dtype=dtype)
    embedding = ooc.Embedding(COLUMNS, optimizer=optimizer, lr=LR, std=0.7, **OPTIMIZERS[optimizer][1])
    options = {"gpu_budget": "64M", "host_budget": "64M", "tile_rows": 16, "optimizer": adam(model)} | options
    return tuned_trainer(
        model, store, embedding=embedding, input_dropout=case.input_dropout, spill_dir=folder, **options
    )


def rows_of(trainer: ooc.Trainer) -> Tensor:
    """The embedding in the order of the store's rows."""
    rows = trainer.predict("embeddings", layer=0)
    assert rows is not None
    return rows[torch.from_numpy(trainer.store.array("perm").read())]


def with_embedding(features: Tensor | None, rows: Tensor) -> Tensor:
    return rows if features is None else torch.cat((features, rows), dim=1)


class Learning(Reference):
    """PyG with ``torch.nn.Embedding``'s weight for its input."""

    def __init__(self, case: ModelCase, trainer: ooc.Trainer, data: Data, optimizer: str, seed: int) -> None:
        self.rows, features = nn.Parameter(rows_of(trainer)), data.x if "x" in data else None
        self.features = features
        super().__init__(case, trainer.model, copy.copy(data), adam, seed)
        self.sparse = optimizer == "sparseadam"
        plain = {} if self.sparse else {"foreach": False}
        self.steps = OPTIMIZERS[optimizer][0]([self.rows], lr=LR, **plain, **OPTIMIZERS[optimizer][1])

    def train(self, before_step: Callable[[], object] = lambda: None) -> Any:
        self.steps.zero_grad()
        every = torch.arange(len(self.rows))
        looked_up = F.embedding(every, self.rows, sparse=True) if self.sparse else self.rows
        self.data.x = with_embedding(self.features, looked_up)
        found = super().train(before_step)
        self.steps.step()
        self.data.x = with_embedding(self.features, self.rows).detach()
        return found


def assert_learns_alike(
    case: ModelCase, store: Store, data: Data, folder: Path, optimizer: str = "adam", epochs: int = 2, **options: Any
) -> None:
    """Losses, gradients and rows of some epochs, and the scores after them, are PyG's."""
    with trainer_of(case, store, folder, optimizer, seed=5, **options) as trainer:
        reference = Learning(case, trainer, data, optimizer, seed=5)
        for epoch in range(epochs):
            difference, whose = disagreement(train_epoch(trainer), reference.train(), floor=FLOOR[torch.float64])
            assert difference <= TOLERANCE[torch.float64], f"epoch {epoch + 1}: {whose} differs by {difference:.1e}"
        torch.testing.assert_close(rows_of(trainer), reference.rows.detach(), rtol=1e-9, atol=1e-9)
        scores, expected = trainer.evaluate(), reference.accuracies()
    assert {name: scores[name] for name in expected} == expected


@pytest.mark.thorough("layers of one's own-undirected", "gcn-undirected", "branches-directed")
@pytest.mark.parametrize(("name", "undirected"), in_turn(MODELS, DIRECTIONS, all_ways={"gcn", "layers of one's own"}))
def test_models(name: str, undirected: bool, tmp_path: Path) -> None:
    """Rows, losses and parameters' gradients equal PyG's, dropout included."""
    data = without_features(random_data(GraphCase(**{**vars(GRAPH), "undirected": undirected})))
    store, data = graph_in(tmp_path, data)
    assert store.num_features == 0
    assert_learns_alike(MODELS[name], store, data, tmp_path)


@pytest.mark.thorough("adam-hop")
@pytest.mark.parametrize(("optimizer", "order"), in_turn(OPTIMIZERS, {"none": "none", "hop": "hop"}, all_ways={"adam"}))
def test_optimizers(optimizer: str, order: str, tmp_path: Path) -> None:
    """As torch.optim steps a dense matrix, those rows too that no gradient reaches."""
    graph = GraphCase(nodes=150, edges=200, unlabelled=130, isolated=30)
    store, data = graph_in(tmp_path, without_features(random_data(graph)), order=order)
    case = ModelCase(kind="sage", layers=2)
    assert_learns_alike(case, store, data, tmp_path, optimizer, epochs=3)


@pytest.mark.thorough("dense")
@pytest.mark.parametrize("name", ["gat", "sage", "layers of one's own", "dense"])
def test_rows_that_no_loss_reaches(name: str, tmp_path: Path) -> None:
    """In hop order the backward pass leaves them out; the optimizer does not."""
    graph = GraphCase(nodes=200, edges=260, unlabelled=190, isolated=60)
    store, data = graph_in(tmp_path, without_features(random_data(graph)), order="hop")
    with trainer_of(MODELS[name], store, tmp_path) as trainer:
        assert trainer.workload.programs["train"][-1].name == "step"
    assert_learns_alike(MODELS[name], store, data, tmp_path, "adamw")


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_features_come_first(name: str, tmp_path: Path) -> None:
    """A store's features are put before the embedding."""
    store, data = graph_in(tmp_path, random_data(GRAPH))
    assert_learns_alike(MODELS[name], store, data, tmp_path)


def test_sparse_features_come_first(tmp_path: Path) -> None:
    """So are features that are kept without their zeros."""
    data = random_data(GraphCase(nodes=70, edges=200, features=30))
    data.x = data.x * (torch.rand(data.x.shape, generator=torch.Generator().manual_seed(1)) < 0.1)
    store, data = graph_in(tmp_path, data, feature_form="sparse")
    assert_learns_alike(MODELS["gcn"], store, data, tmp_path)


def outcome(make: Callable[..., ooc.Trainer], **options: Any) -> tuple[list[float], Tensor, list[Tensor]]:
    with make(**options) as trainer:
        losses = [record.loss for record in trainer.fit(epochs=2, eval_every=2, progress=False)]
        return losses, rows_of(trainer), [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.thorough("sage", "gin")
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gin"])
def test_results_do_not_depend_on_the_plan(name: str, tmp_path: Path) -> None:
    """Budgets, block heights and slabs change no bit of the losses, the rows and the weights."""
    graph = GraphCase(nodes=150, edges=600, unlabelled=50)
    store, _ = graph_in(tmp_path, without_features(random_data(graph, dtype=torch.float32)))

    def make(**options: Any) -> ooc.Trainer:
        return trainer_of(MODELS[name], store, tmp_path, dtype=torch.float32, **options)

    gpu, host = least_budgets(lambda gpu, host: make(gpu_budget=gpu, host_budget=host, block_rows=16))
    expected = outcome(make)
    plans: list[dict[str, Any]] = [
        {"gpu_budget": gpu, "host_budget": host, "block_rows": 16},
        {"gpu_budget": gpu * 3 // 2, "host_budget": host * 2, "threads": 2},
        {"slab_columns": 2, "block_rows": 32},
    ]
    for plan in plans:
        losses, rows, weights = outcome(make, **plan)
        assert losses == expected[0], f"{plan}: losses differ"
        assert torch.equal(rows, expected[1]), f"{plan}: rows differ"
        assert all(map(torch.equal, weights, expected[2])), f"{plan}: weights differ"


class Linkx(nn.Module):
    """PyG's LINKX, whose weights of nodes are the embedding behind the features."""

    def __init__(self, model: LINKX) -> None:
        super().__init__()
        self.sum, self.bias = SimpleConv(), model.edge_lin.bias
        self.node_mlp, self.final_mlp = model.node_mlp, model.final_mlp
        self.cat_lin1, self.cat_lin2 = model.cat_lin1, model.cat_lin2

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.sum(x[:, -COLUMNS:], edge_index) + self.bias
        out = out + self.cat_lin1(out)
        out = out + self.node_mlp(x[:, :-COLUMNS])
        return self.final_mlp((out + self.cat_lin2(self.node_mlp(x[:, :-COLUMNS]))).relu())


def test_linkx(tmp_path: Path) -> None:
    """Losses of three epochs are those of PyG's own."""
    store, data = graph_in(tmp_path, random_data(GRAPH))
    theirs = LINKX(store.num_nodes, store.num_features, COLUMNS, store.num_classes, num_layers=2).double()
    model = Linkx(copy.deepcopy(theirs))
    options: dict[str, Any] = {"optimizer": torch.optim.Adam(model.parameters(), lr=LR), "spill_dir": tmp_path}
    embedding = ooc.Embedding(COLUMNS, optimizer="adam", lr=LR)
    with ooc.Trainer(model, store, memory="64M", embedding=embedding, **options) as trainer:
        theirs.edge_lin.weight.data.copy_(rows_of(trainer))
        found = [record.loss for record in trainer.fit(epochs=3, progress=False)]
    steps, expected = torch.optim.Adam(theirs.parameters(), lr=LR), []
    for _ in found:
        steps.zero_grad()
        out = theirs(data.x, data.edge_index)[data.train_mask]
        loss = torch.nn.functional.cross_entropy(out, data.y[data.train_mask])
        loss.backward()
        steps.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-9)


def test_first_rows_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """They are drawn by rows, from a normal distribution of the deviation asked for."""
    store = ooc.convert("synthetic:nodes=9000,edges=100,features=0,classes=3", tmp_path / "g.ooc")
    found = []
    for seed, block_rows in ((1, None), (1, 4608), (2, None)):
        model = ModelCase(kind="gcn").build(8, 3, dtype=torch.float32)
        options: dict[str, Any] = {"memory": "64M", "seed": seed, "block_rows": block_rows, "spill_dir": tmp_path}
        with ooc.Trainer(model, store, embedding=ooc.Embedding(8, std=0.5), **options) as trainer:
            rows = trainer.predict("embeddings", layer=0)
            assert rows is not None
            found.append(rows)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert abs(found[0].std().item() - 0.5) < 0.01
    assert abs(found[0].mean().item()) < 0.01


def test_the_learning_rate_may_be_the_models(tmp_path: Path) -> None:
    """Without one of its own the embedding goes by the model's, as a schedule changes it."""
    store, data = graph_in(tmp_path, without_features(random_data(GRAPH)))
    model = ModelCase(kind="gcn").build(COLUMNS, store.num_classes)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    options: dict[str, Any] = {"memory": "64M", "optimizer": optimizer, "scheduler": schedule, "spill_dir": tmp_path}
    with ooc.Trainer(model, store, embedding=ooc.Embedding(COLUMNS, optimizer="sgd"), **options) as trainer:
        rows = nn.Parameter(rows_of(trainer))
        losses = [record.loss for record in trainer.fit(epochs=3, eval_every=0, progress=False)]
    steps = torch.optim.SGD([*other.parameters(), rows], lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(steps, 0.5)
    for loss in losses:
        steps.zero_grad()
        out = other(rows, data.edge_index)[data.train_mask]
        expected = torch.nn.functional.cross_entropy(out, data.y[data.train_mask])
        expected.backward()
        steps.step()
        schedule.step()
        assert abs(loss - expected.item()) < 1e-9


@pytest.mark.thorough("layers of one's own-none")
@pytest.mark.parametrize(("name", "order"), [("gat", "none"), ("sage", "hop"), ("layers of one's own", "none")])
def test_gradients_are_clipped_together(name: str, order: str, tmp_path: Path) -> None:
    """The rows' and the parameters', by the norm of all: in the first epoch they are, in a later one not."""
    graph = GraphCase(nodes=200, edges=300, unlabelled=180, isolated=40)
    store, data = graph_in(tmp_path, without_features(random_data(graph)), order=order)
    for clip_norm in (0.05, 1e3):
        with trainer_of(MODELS[name], store, tmp_path, seed=5, clip_norm=clip_norm) as trainer:
            reference = Learning(MODELS[name], trainer, data, "adam", seed=5)

            def clip(reference: Learning = reference, clip_norm: float = clip_norm) -> Tensor:
                return nn.utils.clip_grad_norm_([*reference.model.parameters(), reference.rows], clip_norm)

            for _ in range(2):
                difference, whose = disagreement(
                    train_epoch(trainer), reference.train(clip), floor=FLOOR[torch.float64]
                )
                assert difference <= TOLERANCE[torch.float64], whose
            torch.testing.assert_close(rows_of(trainer), reference.rows.detach(), rtol=1e-9, atol=1e-9)


class Light(nn.Module):
    """LightGCN: rows and their sums over neighbours, averaged; nothing of its own to train."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(LGConv() for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = x
        for conv in self.convs:
            x = conv(x, edge_index)
            found = found + x
        return found / (len(self.convs) + 1)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_model_may_have_no_parameters_of_its_own(default: torch.dtype, tmp_path: Path) -> None:
    """It computes in torch's default type; its run is gone on with."""
    graph = random_data(GRAPH)
    store, data = graph_in(tmp_path, without_features(graph))
    torch.set_default_dtype(default)
    seen: list[Tensor] = []
    try:
        for epochs, more in ((2, {}), (3, {"resume": True})):
            options: dict[str, Any] = {"memory": "64M", "out": tmp_path / "run"}
            embedding = ooc.Embedding(COLUMNS, optimizer="adagrad", lr=LR)
            with ooc.Trainer(Light(2), store, embedding=embedding, **options) as trainer:
                seen += [] if more else [rows_of(trainer)]
                losses = [r.loss for r in trainer.fit(epochs=epochs, progress=False, **more)]
                found = rows_of(trainer)
        steps = torch.optim.Adagrad([weight := nn.Parameter(seen[0].clone())], lr=LR)
        for _ in range(3):
            steps.zero_grad()
            out = Light(2)(weight, data.edge_index)[data.train_mask]
            loss = F.cross_entropy(out, data.y[data.train_mask])
            loss.backward()
            steps.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == default
    tolerance = 1e-9 if default == torch.float64 else 1e-4
    assert abs(losses[-1] - loss.item()) < tolerance
    torch.testing.assert_close(found, weight.detach(), rtol=tolerance, atol=tolerance)
