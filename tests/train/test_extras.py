# SPDX-License-Identifier: Apache-2.0
"""Schedules, clipping and averaged weights do what they do in plain PyG, and survive being interrupted."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_geometric.nn.models import GCN

from ooc.engine.record import EpochRecord
from ooc.errors import ModelError, OptionError, RunError, TrainingError
from ooc.storage.store import Store
from ooc.train.metrics import Metric
from ooc.train.runs.run import RunFolder
from ooc.train.runs.state import TrainingState
from ooc.train.schedule import Averaging, Schedules, by_factor, cosine, steps
from ooc.train.trainer import Trainer
from tests.exactness.comparison import store_of, train_epoch, tuned_trainer
from tests.exactness.reference import accuracies, disagreement
from tests.examples import thorough
from tests.graphs import GraphCase, random_data
from tests.train.labelled import FullBatch

DATA = random_data(GraphCase(nodes=120, edges=400))
LR = 0.05


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(DATA, tmp_path_factory.mktemp("store"))


def new_model() -> GCN:
    torch.manual_seed(4)
    return GCN(DATA.num_features, 8, 2, 4).double()


def make(
    store: Store,
    folder: Path,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, lr=LR),
    schedule: Callable[[torch.optim.Optimizer], Any] = lambda _: None,
    average: Callable[[nn.Module], AveragedModel | None] = lambda _: None,
    **options: Any,
) -> Trainer:
    model = new_model()
    chosen = optimizer(model.parameters())
    return tuned_trainer(
        model,
        store,
        "64M",
        "64M",
        optimizer=chosen,
        scheduler=schedule(chosen),
        average=average(model),
        spill_dir=folder,
        tile_rows=8,
        **options,
    )


def ema(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=LR),
    "rprop": lambda p: torch.optim.Rprop(p, lr=LR),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lrs.StepLR(o, 2, gamma=0.3),
    "milestones": lambda o: lrs.MultiStepLR(o, [1, 3]),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=12),
    "sequence": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.ExponentialLR(o, 0.5)], [2]),
    "two": lambda o: [lrs.LinearLR(o, 0.2, total_iters=3), lrs.StepLR(o, 2, 0.5)],
    "warm-up and cosine": lambda o: by_factor(o, cosine(4), warmup=2),
    "warm-up and steps": lambda o: by_factor(o, steps(2, 0.1), warmup=1),
}


@pytest.mark.parametrize("name", thorough(OPTIMIZERS, "rmsprop", "adagrad", "rprop"))
def test_any_optimizer(store: Store, tmp_path: Path, name: str) -> None:
    """Losses and gradients are those of PyG with the same optimizer."""
    optimizer = OPTIMIZERS[name]
    with make(store, tmp_path, optimizer=optimizer) as trainer:
        reference = FullBatch(trainer.model, DATA, DATA.y, nn.CrossEntropyLoss())
        reference.optimizer = optimizer(reference.model.parameters())
        for _ in range(4):
            assert disagreement(train_epoch(trainer), reference.train(), floor=1e-3)[0] <= 1e-8


@pytest.mark.parametrize("name", thorough(SCHEDULES, "step", "milestones", "cosine", "restarts", "warm-up and steps"))
def test_any_schedule(store: Store, tmp_path: Path, name: str) -> None:
    """Stepped once an epoch, after the optimizer."""
    schedule = SCHEDULES[name]
    with make(store, tmp_path, schedule=schedule) as trainer:
        reference = FullBatch(trainer.model, DATA, DATA.y, nn.CrossEntropyLoss(), LR)
        made = schedule(reference.optimizer)
        for _ in range(6):
            loss = trainer.fit(1, eval_every=0)[0].loss
            assert loss == pytest.approx(reference.train().loss, rel=1e-9)
            for one in made if isinstance(made, list) else [made]:
                one.step()
            assert trainer.optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_plateau_goes_by_the_validation_score(store: Store, tmp_path: Path, dropout: float) -> None:
    """Also where the score arrives with the next epoch's gradients: its step has the new rate already."""

    def plateau(optimizer: torch.optim.Optimizer) -> lrs.ReduceLROnPlateau:
        return lrs.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)

    with make(store, tmp_path, schedule=plateau, input_dropout=dropout) as trainer:
        records = trainer.fit(8, eval_every=1)
        rate = trainer.optimizer.param_groups[0]["lr"]
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=LR)
    expected = plateau(optimizer)
    for record in records:
        assert record.valid_score is not None
        expected.step(record.valid_score)
    assert rate == optimizer.param_groups[0]["lr"] < LR


def test_scores_out_of_turn_step_no_plateau(store: Store, tmp_path: Path) -> None:
    """Of the last epoch that is asked for, which is scored whatever ``eval_every`` is: who goes on has the rates of a
    training that did not stop there."""
    made: list[lrs.ReduceLROnPlateau] = []

    def plateau(optimizer: torch.optim.Optimizer) -> lrs.ReduceLROnPlateau:
        made.append(lrs.ReduceLROnPlateau(optimizer, mode="max", patience=0))
        return made[-1]

    with make(store, tmp_path, schedule=plateau) as trainer:
        for epochs, stepped in ((1, 0), (1, 1), (3, 2)):
            assert trainer.fit(epochs, eval_every=2)[-1].valid_score is not None
            assert made[-1].last_epoch == stepped


def test_scores_out_of_turn_are_no_bar_for_those_in_turn() -> None:
    """Patience ends a training that is gone on with where it ends one that did not stop."""
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters())
    along = Schedules(None, optimizer, rising=True), Averaging(model, None, 1)
    state = TrainingState(model, optimizer, *along, Metric.ACCURACY, None, 0)
    amounts = (
        "loss",
        "time_s",
        "ssd_read_bytes",
        "ssd_write_bytes",
        "host_peak_bytes",
        "device_peak_bytes",
        "io_wait_s",
    )
    for epoch, score, stale in ((2, 0.5, 0), (3, 0.7, 0), (4, 0.6, 0), (5, 0.8, 0), (6, 0.6, 1)):
        record = EpochRecord(epoch=epoch, valid_score=score, **dict.fromkeys(amounts, 0))
        state.conclude(record, in_turn=epoch % 2 == 0)
        assert state.stale == stale
    assert state.best is not None and state.best["epoch"] == 5


def test_gradients_are_clipped_as_torch_does(store: Store, tmp_path: Path) -> None:
    """By the norm of all gradients together, before the step."""
    with make(store, tmp_path, clip_norm=0.05) as trainer:
        reference = FullBatch(trainer.model, DATA, DATA.y, nn.CrossEntropyLoss(), LR)

        def clip() -> object:
            return nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)

        for _ in range(4):
            assert disagreement(train_epoch(trainer), reference.train(clip), floor=1e-3)[0] <= 1e-9
        norm = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm()
        assert float(norm) == pytest.approx(0.05, rel=1e-5)


def test_averaged_weights_are_scored_and_the_model_keeps_its_own(store: Store, tmp_path: Path) -> None:
    """An exponential moving average from epoch 2 on, as updated by hand beside PyG."""
    with make(store, tmp_path, average=ema, average_from=2) as trainer:
        reference = FullBatch(trainer.model, DATA, DATA.y, nn.CrossEntropyLoss(), LR)
        average = ema(reference.model)
        for epoch in range(1, 6):
            record = trainer.fit(1, eval_every=1)[0]
            assert record.loss == pytest.approx(reference.train().loss, rel=1e-9)
            if epoch >= 2:
                average.update_parameters(reference.model)
            scored = average.module if epoch >= 2 else reference.model
            expected = accuracies(scored, DATA)
            assert {name: getattr(record, name) for name in expected} == expected
        pairs = zip(trainer.model.parameters(), reference.model.parameters(), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in pairs)
        logits = trainer.predict()
        average.module.eval()
        assert torch.allclose(logits, average.module(DATA.x, DATA.edge_index), rtol=1e-9)


EVERYTHING = {
    "schedule, clipping, average": {
        "schedule": SCHEDULES["one cycle"],
        "average": ema,
        "clip_norm": 0.1,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=LR),
    },
    "plateau": {"schedule": lambda o: lrs.ReduceLROnPlateau(o, mode="max", patience=0)},
    "swa from epoch 3": {"average": lambda m: AveragedModel(m), "average_from": 3, "schedule": SCHEDULES["milestones"]},
    "sequence": {"schedule": SCHEDULES["sequence"]},
    "lambda, state in float32": {
        "schedule": SCHEDULES["warm-up and cosine"],
        "optimizer": lambda p: torch.optim.NAdam(p, lr=LR),
    },
    "several": {"schedule": SCHEDULES["two"]},
}


@pytest.mark.parametrize("name", thorough(EVERYTHING, "sequence", "several"))
def test_resuming_is_exact_to_the_bit(store: Store, tmp_path: Path, name: str) -> None:
    """A run cut after every epoch, each time gone on with by new objects, equals an uncut one."""
    options = EVERYTHING[name]
    with make(store, tmp_path, **options) as whole:
        expected = [(r.loss, r.valid_score) for r in whole.fit(4, eval_every=1)]
    found = []
    for epoch in range(1, 5):
        run = RunFolder.create(tmp_path / "run", {}) if epoch == 1 else RunFolder.open(tmp_path / "run")
        with make(store, tmp_path, out=run, **options) as part:
            found += [(r.loss, r.valid_score) for r in part.fit(epoch, eval_every=1, resume=epoch > 1)]
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), part.model.parameters(), strict=True))
    assert part._schedules.state() == whole._schedules.state()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"optimizer": lambda p: torch.optim.AdamW(p, lr=LR)}, "AdamW, StepLR, accuracy"),
        ({"schedule": lambda o: lrs.ExponentialLR(o, 0.9)}, "Adam, ExponentialLR, accuracy"),
        ({"metric": "macro-f1"}, "Adam, StepLR, macro-f1"),
    ],
)
def test_a_run_is_not_gone_on_with_in_another_way(
    store: Store, tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    """It would be neither the one nor the other."""
    usual: dict[str, Any] = {"schedule": SCHEDULES["step"]}
    with make(store, tmp_path, out=tmp_path / "run", **usual) as begun:
        begun.fit(1)
    said = f"of another optimizer, schedule or metric: Adam, StepLR, accuracy there, {named} in this training"
    with make(store, tmp_path, out=tmp_path / "run", **usual | other) as trainer, pytest.raises(RunError, match=said):
        trainer.fit(2, resume=True)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({}, ""),
        ({"clip_norm": 0.5, "input_dropout": 0.25}, "clip_norm, input_dropout"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss"),
        ({"loss": lambda out, y: (out.logsumexp(1) - out.gather(1, y[:, None])[:, 0]) * 2}, "loss"),
    ],
)
def test_it_is_said_what_a_run_had_otherwise(store: Store, tmp_path: Path, other: dict[str, Any], named: str) -> None:
    with make(store, tmp_path, out=tmp_path / "run", loss=nn.CrossEntropyLoss()) as begun:
        begun.fit(1)
    with make(store, tmp_path, out=tmp_path / "run", **{"loss": nn.CrossEntropyLoss()} | other) as trainer:
        said = f"run was trained with another {named}; it goes on"
        with pytest.warns(RuntimeWarning, match=said) if named else nullcontext():
            trainer.fit(2, resume=True)


def test_runs_go_on_by_the_names_that_scores_had(store: Store, tmp_path: Path) -> None:
    """``valid_acc`` and the like, whatever the metric: in metrics and checkpoints of earlier versions."""
    with make(store, tmp_path, out=tmp_path / "whole") as whole:
        whole.fit(4)
    with make(store, tmp_path, out=tmp_path / "run") as begun:
        begun.fit(2)
    metrics, checkpoint = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "checkpoint.pt"
    metrics.write_text(metrics.read_text().replace("_score", "_acc"))
    state = torch.load(checkpoint, weights_only=True)
    for name in ("best", "record"):
        state[name] = {key.replace("_score", "_acc"): value for key, value in state[name].items()}
    torch.save(state, checkpoint)
    with make(store, tmp_path, out=RunFolder.open(tmp_path / "run")) as other:
        other.fit(4, resume=True)
    runs = [RunFolder.open(tmp_path / name) for name in ("whole", "run")]
    found = [[(one.loss, one.train_score, one.valid_score, one.test_score) for one in run.records()] for run in runs]
    assert len(found[0]) == 4
    assert found[0] == found[1]
    assert runs[0].last()["best"] == runs[1].last()["best"]


def test_averaging_cannot_be_taken_up_or_left_off_on_the_way(store: Store, tmp_path: Path) -> None:
    """The average so far would be missing, or lost."""
    with make(store, tmp_path, out=tmp_path / "run") as begun:
        begun.fit(1, eval_every=0)
    with (
        make(store, tmp_path, out=RunFolder.open(tmp_path / "run"), average=ema) as other,
        pytest.raises(RunError, match="weight averaging"),
    ):
        other.fit(2, resume=True, eval_every=0)


def test_there_must_be_a_run_to_go_on_with(store: Store, tmp_path: Path) -> None:
    """One that was begun and stopped before its first epoch was done is one."""
    for out in (None, RunFolder.create(tmp_path / "run", {})):
        with make(store, tmp_path, out=out) as none, pytest.raises(RunError, match=r"there is no run .*to go on with"):
            none.fit(2, resume=True, eval_every=0)
    assert not (tmp_path / "run").exists()
    with RunFolder.create(tmp_path / "run", {}) as stopped:
        stopped.start()
    with make(store, tmp_path, out=RunFolder.open(tmp_path / "run")) as begun:
        assert len(begun.fit(2, resume=True, eval_every=0)) == 2


@pytest.mark.parametrize("eval_every", [0, 1])
def test_weights_and_losses_that_are_no_numbers_end_the_training(store: Store, tmp_path: Path, eval_every: int) -> None:
    """The epochs before are kept, also one whose scores come with that loss."""
    run = tmp_path / "run"
    with make(store, tmp_path, out=run, optimizer=lambda p: torch.optim.SGD(p, lr=1e200)) as trainer:
        with pytest.raises(TrainingError, match=r"the loss of epoch 2 "):
            trainer.fit(9, eval_every=eval_every)
        done = trainer.epoch
        assert len(RunFolder.open(run).records()) == done == 1
        assert len(trainer.fit(2, allow_nonfinite=True, eval_every=0)) == 2 and trainer.epoch == done + 2


def test_a_step_that_makes_weights_infinite_ends_the_training(store: Store, tmp_path: Path) -> None:
    """Before an epoch's loss tells it."""
    steps = lambda p: torch.optim.SGD(p, lr=1e308, weight_decay=1e9)  # noqa: E731
    said = r"the step of epoch 1 made convs\.\S+ infinite or no number; there is no checkpoint; a lower"
    with make(store, tmp_path, out=tmp_path / "run", optimizer=steps) as trainer:
        with pytest.raises(TrainingError, match=said):
            trainer.fit(2, eval_every=0)
        assert trainer.epoch == 0


def test_budgets_beyond_memory_are_cut_with_a_warning(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ooc.memory.available_memory_bytes", lambda: 100_000_000)
    said = "budgets of 64.0 MB and 64.0 MB are more than is free; planned for 50.0 MB and 50.0 MB"
    with pytest.warns(RuntimeWarning, match=said), make(store, tmp_path) as trainer:
        assert (trainer.limits.device_bytes, trainer.limits.host_bytes) == (50_000_000, 50_000_000)


class Odd(lrs.StepLR):
    """Its state holds a function."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "how": print}


def test_what_cannot_be_is_refused(store: Store, tmp_path: Path) -> None:
    """By name."""
    other = torch.optim.Adam(new_model().parameters())
    with pytest.raises(ModelError, match="StepLR is of another optimizer"):
        make(store, tmp_path, schedule=lambda _: lrs.StepLR(other, 1))
    with pytest.raises(ModelError, match="Odd cannot be kept in a checkpoint"):
        make(store, tmp_path, schedule=lambda o: Odd(o, 1))
    with pytest.raises(ModelError, match="none of torch"):
        make(store, tmp_path, schedule=lambda _: "cosine")
    with pytest.raises(ModelError, match="'min', this metric needs mode='max'"):
        make(store, tmp_path, schedule=lambda o: lrs.ReduceLROnPlateau(o))
    with pytest.raises(ModelError, match="averages another model"):
        make(store, tmp_path, average=lambda _: AveragedModel(nn.Linear(2, 2)))
    with pytest.raises(ModelError, match="averages another model"):  # in another type
        make(store, tmp_path, average=lambda model: AveragedModel(model).float())
    with pytest.raises(OptionError, match="clip norm must be positive, not 0"):
        make(store, tmp_path, clip_norm=0)
    with pytest.raises(OptionError, match=r"optimizer 'adam' is none of torch's; give torch.optim.Adam"):
        make(store, tmp_path, optimizer=lambda p: "adam")
    with pytest.raises(ModelError, match="SparseAdam"):
        make(store, tmp_path, optimizer=lambda p: torch.optim.SparseAdam(list(p)))
    with pytest.raises(ModelError, match="LBFGS evaluates the loss several times a step"):
        make(store, tmp_path, optimizer=lambda p: torch.optim.LBFGS(list(p)))

    def sharing(model: nn.Module) -> AveragedModel:
        average = AveragedModel(model)
        average.module = model
        return average

    with pytest.raises(ModelError, match="shares parameters with the model; make it as"):
        make(store, tmp_path, average=sharing)
    once = make(store, tmp_path, schedule=lambda o: lrs.OneCycleLR(o, 0.1, total_steps=1))
    with once, pytest.raises(OptionError, match="scheduler OneCycleLR says: Tried to step 2 times"):
        once.fit(2, eval_every=0)
    plateau = make(store, tmp_path, schedule=lambda o: lrs.ReduceLROnPlateau(o, mode="max"))
    with plateau, pytest.raises(OptionError, match="eval_every"):
        plateau.fit(1, eval_every=0)
