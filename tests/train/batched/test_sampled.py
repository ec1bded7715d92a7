# SPDX-License-Identifier: Apache-2.0
"""Training by sampled batches: with all neighbours drawn, the full graph's losses; resumed, an undisturbed run's."""

import copy
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GraphConv, SAGEConv, SGConv
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

import ooc
from ooc.cli import main
from ooc.engine.record import EpochRecord
from ooc.errors import OptionError, TrainingError
from ooc.events import Event, TaskAdvanced
from ooc.model.lowering.trimming import Trimmed
from ooc.offloading.saved import Saving
from ooc.sizes import parse_size
from ooc.storage.store import Store
from ooc.train.batched.batches import SampledTrainer, Sampling
from tests.examples import thorough
from tests.graphs import GraphCase, random_data
from tests.progress.test_reporter import Terminal

_CASE = GraphCase(nodes=400, edges=2500, features=9, self_loops=15, duplicates=20, isolated=5, weighted=True)
_ALL = Sampling(fanouts=[-1, -1], batch_size=10_000)
_FEW = Sampling(fanouts=[4, 3], batch_size=60)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ooc.convert(random_data(_CASE), tmp_path_factory.mktemp("sampled") / "g.ooc", dtype="float64")


def _model(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return kind(9, 8, 2, 4, **options).double()


def _train(
    model: nn.Module, store: Store | Data, sampling: Sampling, epochs: int = 2, **options: Any
) -> list[EpochRecord]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with SampledTrainer(model, store, sampling, optimizer=optimizer, **({"memory": "100M"} | options)) as trainer:
        return trainer.fit(epochs)


@pytest.mark.parametrize(
    ("kind", "ignored", "options"),
    [
        (GCN, "weight", {"jk": "cat"}),
        (GCN, "none", {"improved": True}),
        pytest.param(GCN, "none", {}, marks=pytest.mark.thorough),
        pytest.param(GCN, "none", {"add_self_loops": False}, marks=pytest.mark.thorough),
        (GraphSAGE, "weight", {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}),
        (GIN, "weight", {}),
    ],
)
def test_with_all_neighbours_losses_are_the_full_graphs(
    store: Store, kind: type[nn.Module], ignored: str, options: dict[str, Any]
) -> None:
    """Also where gradients are clipped of which the optimizer steps a part."""
    found: list[list[EpochRecord]] = []
    makes: list[Callable[..., ooc.Trainer]] = [ooc.Trainer, partial(SampledTrainer, sampling=_ALL)]
    for make in makes:
        model = _model(kind, **options)
        optimizer = torch.optim.Adam([*model.parameters()][1:], lr=0.02)
        given: dict[str, Any] = {"memory": "100M", "optimizer": optimizer, "clip_norm": 0.1}
        with make(model, store, ignore_edge_data=ignored, **given) as trainer:
            found.append(trainer.fit(2, progress=False))
    for one, other in zip(*found, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-12)
        assert (other.train_score, other.valid_score, other.test_score) == (
            one.train_score,
            one.valid_score,
            one.test_score,
        )


@pytest.mark.parametrize("kind", [SAGEConv, GCNConv, nn.Linear])
def test_a_layer_is_a_model_by_itself(store: Store, kind: type[nn.Module]) -> None:
    losses = []
    makes: list[Callable[..., ooc.Trainer]] = [ooc.Trainer, partial(SampledTrainer, sampling=_ALL)]
    for make in makes:
        torch.manual_seed(0)
        model = kind(store.num_features, store.num_classes).double()
        with make(model, store, memory="100M", ignore_edge_data="weight") as trainer:
            losses.append(trainer.fit(progress=False)[0].loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    with pytest.raises(OptionError, match=r"accumulate must be a whole number from 1 on, not 1\.5"):
        SampledTrainer(model, store, Sampling(fanouts=[3], batch_size=4, accumulate=1.5))  # type: ignore[arg-type]


class OfData(nn.Module):
    """Takes all of a graph at once."""

    def __init__(self) -> None:
        super().__init__()
        self.gcn = _model(GCN)

    def forward(self, data: Data) -> Tensor:
        out: Tensor = self.gcn(data.x, data.edge_index, data.edge_weight)
        return out


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_model_may_take_data_in_one(store: Store, trimmed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as of one that takes its parts."""
    if not trimmed:
        monkeypatch.setattr(Trimmed, "of", lambda *_: None)
    of_parts, of_data = (_train(model, store, _FEW, 2) for model in (_model(GCN), OfData()))
    assert [one.loss for one in of_parts] == [one.loss for one in of_data]


class OfMadeWeights(nn.Module):
    """Sums by what it makes of the edges' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GraphConv(9, 8), GraphConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        made = edge_weight.sigmoid()
        out: Tensor = self.last(self.first(x, edge_index, made).relu(), edge_index, made)
        return out


@pytest.mark.parametrize("trimmed", [False, True])
def test_what_is_made_of_edges_is_that_of_the_edges_that_are_read(
    store: Store, trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not trimmed:
        monkeypatch.setattr(Trimmed, "of", lambda *_: None)
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(OfMadeWeights().double())
    optimizer = torch.optim.Adam(models[0].parameters(), lr=0.02)
    with ooc.Trainer(models[0], store, memory="100M", optimizer=optimizer) as trainer:
        full = trainer.fit(2, progress=False)
    for one, two in zip(full, _train(models[1], store, _ALL, 2), strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-12)


class Several(nn.Module):
    """Gives what it is scored by, and its rows before that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GraphSAGE(9, 8, 1), GraphSAGE(8, 4, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.first(x, edge_index).relu()
        return self.last(rows, edge_index), rows


def _of_both(results: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(results[0], labels, reduction="none") + results[1].square().mean(dim=1)


@pytest.mark.parametrize(
    ("loss", "trimmed"), thorough([(None, False), (_of_both, False), (_of_both, True)], (_of_both, False))
)
def test_of_several_results_ones_own_loss_gets_all(
    store: Store, loss: Any, trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = Several().double()
    other, options = copy.deepcopy(model), {"ignore_edge_data": "weight", "loss": loss}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with ooc.Trainer(model, store, memory="100M", optimizer=optimizer, **options) as trainer:
        full = trainer.fit(2, progress=False)
    if not trimmed:
        monkeypatch.setattr(Trimmed, "of", lambda *_: None)
    for one, two in zip(full, _train(other, store, _ALL, 2, **options), strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-12)
        assert two.valid_score == one.valid_score


class Squeezed(GraphSAGE):  # type: ignore[misc]
    """A number a node, [N]."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs).squeeze(-1)


def test_a_model_may_give_a_number_a_node(tmp_path: Path) -> None:
    data, losses = random_data(_CASE), []
    data.y, data.edge_weight = data.x[:, 0], None
    for kind in (GraphSAGE, Squeezed):
        torch.manual_seed(1)
        losses.append([one.loss for one in _train(kind(9, 8, 2, 1).double(), data, _FEW, spill_dir=tmp_path)])
    assert losses[0] == losses[1]


def test_gcn_is_right_on_average_where_few_are_drawn(store: Store) -> None:
    """One layer, of which every seed's output is the full graph's in expectation."""
    torch.manual_seed(0)
    model = GCN(9, 4, 1).double()
    means = []
    with torch.no_grad():
        for fanout, epochs in ((-1, 1), (2, 9), (2, 144)):
            sampling = Sampling(fanouts=[fanout], batch_size=10_000)
            with SampledTrainer(model, store, sampling, memory="100M") as trainer:
                outputs = torch.zeros(store.num_nodes, 4, dtype=torch.float64)
                for _ in range(epochs):
                    (batch,) = trainer.loader
                    with trainer._normalized(model, batch):
                        outputs[batch.n_id[: batch.batch_size]] += trainer._outputs(model, batch)[: batch.batch_size]
                means.append(outputs / epochs)
    exact, few, many = means
    # Errors that are chance alone fall with the root of how many are averaged: here to a quarter.
    assert 3 < (few - exact).norm() / (many - exact).norm() < 5


def test_a_batch_that_a_model_cannot_take_is_named(tmp_path: Path) -> None:
    """A node by itself has no variance."""
    data = random_data(GraphCase(nodes=9, edges=0, features=9))
    model = _model(GraphSAGE, norm="batch_norm")
    trainer = SampledTrainer(model, data, Sampling(fanouts=[2, 2], batch_size=1), spill_dir=tmp_path)
    with trainer, pytest.raises(ooc.ModelError, match=r"batch 1 of epoch 1: Expected more than 1 value per channel"):
        trainer.fit(1, progress=False)


def test_memory_scoring_and_modes_in_between_change_no_bit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dropout": 0.5, "norm": "batch_norm"}
    losses = [record.loss for record in _train(_model(GCN, **options), store, _FEW, 3)]
    optimizer_of = _model(GCN, **options)
    with SampledTrainer(
        optimizer_of, store, _FEW, memory="100M", optimizer=torch.optim.Adam(optimizer_of.parameters(), lr=0.02)
    ) as trainer:
        monkeypatch.setattr(SampledTrainer, "_both_fit_in_memory", False)  # as where scoring needs the batches' memory
        assert [trainer.fit(1)[0].loss for _ in range(2)] == losses[:2]
        optimizer_of.eval()  # as who looks at its outputs does
        assert trainer.fit(1)[0].loss == losses[2] and not optimizer_of.training


@pytest.mark.parametrize("kind", [GCN, GraphSAGE])
def test_memory_that_is_named_for_scoring_is_enough(kind: type[nn.Module], store: Store) -> None:
    """Beside it lies what is known of every node, of which a loader holds some."""
    memory, sampling = 1, Sampling(fanouts=[1, 1], batch_size=1)
    options = {"ignore_edge_data": "weight"}
    for _ in ("batches", "scoring"):
        with pytest.raises(ooc.BudgetError) as caught:
            SampledTrainer(_model(kind), store, sampling, memory=memory, **options)
        memory = parse_size(str(caught.value).split("memory='")[1].split("'")[0])
    SampledTrainer(_model(kind), store, sampling, memory=memory, **options).close()


def brier(outputs: Tensor, classes: Tensor) -> Tensor:
    """Of every row, which autograd saves several numbers for."""
    return (outputs.softmax(dim=1) - F.one_hot(classes, outputs.shape[1])).square().sum(dim=1)


@pytest.mark.parametrize(("kind", "loss"), thorough([(GCN, None), (GAT, brier)], (GCN, None)))
def test_a_step_that_does_not_fit_is_taken_apart_and_changes_no_bit(
    kind: type[nn.Module], loss: Any, store: Store, tmp_path: Path
) -> None:
    """What the layers save is recomputed or goes to the SSD; with less memory still, the error names the least. What a
    loss saves is of no layer."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return kind(9, 64, 4, 4, dropout=0.5, norm="batch_norm").double()

    sampling, notes = Sampling(fanouts=[4, 4, 4, 4], batch_size=200), list[str]()
    options: dict[str, Any] = {"spill_dir": tmp_path, "ignore_edge_data": "weight", "loss": loss}
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.02)
    with SampledTrainer(trained, store, sampling, memory="100M", optimizer=optimizer, **options) as trainer:
        losses = [record.loss for record in trainer.fit(2)]
        assert trainer._saving is None
    with pytest.raises(ooc.BudgetError, match=r"for the model, and need .*; give memory='\w+'") as caught:
        _train(model(), store, sampling, memory="2M", **options)
    least = parse_size(str(caught.value).split("memory='")[1].split("'")[0])
    assert least < 0.8 * trainer.loader.plan.least_bytes
    frugal = model()
    found = _train(frugal, store, sampling, 2, memory=least, listener=lambda event: notes.append(str(event)), **options)
    assert [record.loss for record in found] == losses
    assert all(map(torch.equal, frugal.state_dict().values(), trained.state_dict().values()))
    assert any("does not fit" in note for note in notes) and list(tmp_path.iterdir()) == []


def test_a_step_that_is_taken_apart_leaves_out_the_same_rows(store: Store) -> None:
    """Others would give other sums, whatever the memory."""
    model, rows = _model(GraphSAGE), list[int]()
    with SampledTrainer(model, store, _FEW, memory="100M", ignore_edge_data="weight") as trainer:
        model.convs[0].lin_r.register_forward_hook(lambda module, given, found: rows.append(len(found)))
        (batch, *_) = trainer.loader
        for around in (nullcontext(), Saving(trainer.batch_model).applied()):
            with around:
                trainer._outputs(trainer.batch_model, batch)
    assert rows[0] == rows[1] < len(batch.x)


def test_what_layers_make_of_the_rows_that_are_read_counts_in_the_memory(store: Store) -> None:
    notes = list[str]()
    options = {"memory": "100M", "listener": lambda event: notes.append(str(event)), "ignore_edge_data": "weight"}
    least = []
    for width in (16, 64):
        with SampledTrainer(GraphSAGE(9, width, 2, 4), store, _FEW, **options) as trainer:
            assert isinstance(trainer.batch_model, Trimmed)
            least.append(trainer.loader.plan.least_bytes)
    parameters = 4 * 4 * 2 * (48 * 9 + 48 * 4 + 64)  # with gradients and Adam's moments, in float32
    assert least[1] - least[0] > 2 * parameters and not any("not counted" in note for note in notes)


def test_batches_of_a_step_make_one_large_batch(store: Store) -> None:
    one = _train(_model(GraphSAGE), store, Sampling(fanouts=[-1, -1], batch_size=80), ignore_edge_data="weight")
    several = Sampling(fanouts=[-1, -1], batch_size=20, accumulate=4)
    other = _train(_model(GraphSAGE), store, several, ignore_edge_data="weight")
    assert [record.loss for record in other] == pytest.approx([record.loss for record in one], rel=1e-12)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_of_a_step_is_torchs_of_its_nodes(accumulate: int, store: Store) -> None:
    """By the weights of their classes, not by those of all training nodes."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1, 3, 0.5], dtype=torch.float64))
    models = [_model(GraphSAGE) for _ in range(2)]
    ours, theirs = (torch.optim.SGD(model.parameters(), 0.1) for model in models)
    sampling = Sampling(fanouts=[3, 2], batch_size=40, accumulate=accumulate)
    options: dict[str, Any] = {"memory": "100M", "ignore_edge_data": "weight", "loss": loss, "optimizer": ours}
    with SampledTrainer(models[0], store, sampling, **options) as trainer:
        trainer.fit(1, eval_every=0, progress=False)
    batches = list(ooc.NeighborLoader(store, [3, 2], batch_size=40, input_nodes="train", shuffle=True))
    for first in range(0, len(batches), accumulate):
        step = batches[first : first + accumulate]
        outputs = torch.cat([models[1](batch.x, batch.edge_index)[: batch.batch_size] for batch in step])
        loss(outputs, torch.cat([batch.y[: batch.batch_size] for batch in step])).backward()
        theirs.step()
        theirs.zero_grad()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-10, atol=1e-12)


def test_on_a_terminal_training_is_shown_by_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    _train(_model(GraphSAGE), store, _FEW, epochs=1, ignore_edge_data="weight")
    last = stream.getvalue().split("\x1b[2K")[-1]
    for part in ("GraphSAGE on g.ooc", "epoch 1/1", "lowest", "valid accuracy", "of 100 MB", "waiting", "SSD read"):
        assert part in last
    assert "forecast" not in last and "SSD busy" not in last


@pytest.mark.parametrize(
    ("conv", "called", "said"),
    [
        (SGConv, lambda conv, x, edges, weight: conv(x, edges), "SGConv takes degrees"),
        (
            GCNConv,
            lambda conv, x, edges, weight: conv(x, edges, weight.sigmoid()),
            "GCNConv normalizes edges or weights",
        ),
        (
            GCNConv,
            lambda conv, x, edges, weight: conv(x, edges[:, weight > 0.5]),
            "GCNConv normalizes edges or weights",
        ),
        (
            partial(GraphConv, flow="target_to_source"),
            lambda conv, x, edges, weight: conv(x, edges),
            "sums against the edges need out-edges, and a batch has in-edges",
        ),
        (GCNConv, lambda conv, x, edges, weight: (conv(x, edges), x[:, :4] - x[:, :4].mean(0))[1], "adds nothing"),
    ],
)
def test_what_takes_degrees_of_its_edges_is_refused(
    conv: type[nn.Module], called: Callable[..., Tensor], said: str, store: Store
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weighs, self.conv = GCNConv(9, 9), conv(9, 4)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_weight: torch.Tensor) -> torch.Tensor:
            return called(self.conv, self.weighs(x, edge_index, edge_weight), edge_index, edge_weight)

    with pytest.raises(ooc.ModelError, match=said):
        _train(Model().double(), store, _ALL)


# ---- from the command line -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ooc.convert(random_data(_CASE), tmp_path_factory.mktemp("sampled") / "f.ooc").path


def _ooc(*words: object) -> int:
    return main([str(word) for word in words])


_OPTIONS = [
    *("--layers", "2", "--hidden", "8", "--memory", "100M", "--threads", "1"),
    *("--sampler", "neighbor", "--fanouts", "4,3", "--batch-size", "60"),
]


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_is_gone_on_with_has_an_undisturbed_ones_losses(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert _ooc("train", floats, *_OPTIONS, "--epochs", 4, "--out", whole) == 0
    assert _ooc("train", floats, *_OPTIONS, "--epochs", 2, "--out", parts) == 0
    capsys.readouterr()
    assert _ooc("train", "--resume", "--epochs", 4, "--out", parts) == 0
    assert "neighbours 4, 3" in capsys.readouterr().out
    assert _losses(parts) == _losses(whole) and len(_losses(whole)) == 4
    assert _ooc("report", parts, "--out", tmp_path / "page.html") == 0
    assert _ooc("predict", parts, "--out", tmp_path / "labels.npy") == 0
    assert _ooc("runs", tmp_path) == 0
    capsys.readouterr()
    assert _ooc("train", "--resume", "--fanouts", "9,9", "--out", parts) == 2
    assert "fanouts" in capsys.readouterr().err


def test_json_says_how_batches_are_made(floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _ooc("train", floats, *_OPTIONS, "--epochs", 1, "--json", "--out", tmp_path / "run") == 0
    start, epoch, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert start["sampling"]["fanouts"] == [4, 3] and epoch["epoch"] == 1 and end["state"] == "finished"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fanouts", "3,3"], "give --sampler neighbor"),
        (["--accumulate", "4"], "an epoch of the full graph is one step, with nothing to accumulate"),
        (["--sampler", "neighbor", "--spill-dtype", "bfloat16"], "--spill-dtype is of full-graph training"),
        (["--sampler", "neighbor", "--host-budget", "1G"], "give --memory"),
        (["--sampler", "neighbor", "--norm", "graph"], "takes statistics of all nodes"),
        (["--sampler", "neighbor", "--fanouts", "3,0"], "at least 1 neighbour"),
        (["--sampler", "neighbor", "--memory", "1M"], "give --memory"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert _ooc("train", floats, *options, "--epochs", 1, "--out", tmp_path / "run") == 2
    line = capsys.readouterr().err
    assert said in line and not (tmp_path / "run").exists()
    assert "Traceback" not in line


@pytest.mark.parametrize("asked", thorough(["evaluate", "predict", "close"], "predict"))
def test_what_is_refused_amid_an_epoch_does_not_end_it(store: Store, asked: str) -> None:
    """It closed the loader first, of whose next batch the epoch then made an error."""
    met: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, TaskAdvanced) and event.task.startswith("epoch"):
            with pytest.raises(TrainingError, match="the trainer is at work"):
                getattr(trainer, asked)()
            met.append(event.task)

    trained = _train(_model(GraphSAGE, dropout=0.5), store, _FEW, ignore_edge_data="weight")
    model = _model(GraphSAGE, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    options: dict[str, Any] = {"optimizer": optimizer, "memory": "100M", "ignore_edge_data": "weight"}
    with SampledTrainer(model, store, _FEW, listener=listen, **options) as trainer:
        losses = [record.loss for record in trainer.fit(2)]
    assert losses == [record.loss for record in trained]
    assert {*met} == {"epoch 1", "epoch 2"}
