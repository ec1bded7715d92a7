# SPDX-License-Identifier: Apache-2.0
"""``ooc train``'s options of loss, schedule, averaging, metric and logs, and that resuming knows them all."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ooc
from ooc.cli.arguments import recipe
from ooc.cli.arguments.recipe import build_loss, build_model, build_optimizer, build_schedule
from ooc.cli.arguments.settings import (
    NO_OPTIMIZERS,
    NO_SCHEDULES,
    OPTIMIZERS,
    SCHEDULES,
    TrainSettings,
    check_sampling,
)
from ooc.cli.train import command
from ooc.errors import BudgetError, OptionError
from ooc.events import EpochFinished
from ooc.report.logs import CsvLog, TensorBoardLog
from ooc.storage.store import open_store
from ooc.train.schedule import Schedules
from tests.cli.conftest import RunCommand
from tests.cli.test_run import record
from tests.examples import thorough

SMALL = ["--hidden", "16", "--layers", "2", "--gpu-budget", "32M", "--host-budget", "32M", "--quiet"]


def settings(**changes: Any) -> TrainSettings:
    """Options as by default but for ``changes``."""
    given = command.make_context("train", []).params
    values = {name: given.get(name) for name in TrainSettings.__dataclass_fields__}
    return TrainSettings(**(values | {"log": [], "optimizer_option": [], "schedule_option": []} | changes))


def rates(epochs: int, **changes: Any) -> list[float]:
    """The learning rate of each epoch, with a validation score that never improves."""
    chosen = settings(lr=1.0, epochs=epochs, **changes)
    optimizer = build_optimizer(chosen, torch.nn.Linear(1, 1))
    schedulers: list[Any] = build_schedule(chosen, optimizer, rising=True)
    found = []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([0.5] if plateau else []))
    return found


def test_schedules() -> None:
    """By the numbers."""
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(4, warmup=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(5, schedule="cosine", schedule_epochs=4) == pytest.approx([1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)
    assert rates(4, schedule="cosine", warmup=2) == pytest.approx([0.5, 1, 1, 0.5])
    assert rates(5, schedule="step", step_every=2) == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    assert rates(5, schedule="step", step_every=2, warmup=1, lr_factor=0.5) == pytest.approx([1, 1, 1, 0.5, 0.5])
    assert rates(4, schedule="plateau", plateau_patience=0) == pytest.approx([1, 1, 0.1, 0.01])
    assert rates(4, schedule="plateau", plateau_patience=5, warmup=3) == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_losses(graph: Path) -> None:
    """Balanced weights have the mean 1 over the training rows."""
    store = open_store(graph)
    assert build_loss(settings(), store) is None
    assert isinstance(build_loss(settings(loss="mse"), store), torch.nn.MSELoss)
    plain: Any = build_loss(settings(loss="cross-entropy"), store)
    assert plain.weight is None and plain.label_smoothing == 0
    balanced: Any = build_loss(settings(class_weights="balanced", label_smoothing=0.1), store)
    y = store.array("y").read()[store.array("split/train").read()]
    assert balanced.label_smoothing == 0.1
    assert float(balanced.weight[torch.from_numpy(y)].double().mean()) == pytest.approx(1, rel=1e-6)
    assert float(balanced.weight[0]) * (y == 0).sum() == pytest.approx(float(balanced.weight[1]) * (y == 1).sum())


def rates_of_torch(name: str, options: dict[str, Any]) -> list[float]:
    """The learning rate of six epochs by torch itself."""
    optimizer = torch.optim.Adam(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    found = []
    for _ in range(6):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))
    return found


TORCHS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "ConstantLR": (["factor=0.5", "total_iters=2"], {"factor": 0.5, "total_iters": 2}),
    "CosineAnnealingLR": (["eta_min=0.1"], {"eta_min": 0.1, "T_max": 6}),
    "CosineAnnealingWarmRestarts": (["T_0=2"], {"T_0": 2}),
    "CyclicLR": (
        ["base_lr=0.1", "max_lr=1.", "step_size_up=2", "mode=exp_range", "gamma=0.9"],
        {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2, "mode": "exp_range", "gamma": 0.9},
    ),
    "ExponentialLR": (["gamma=0.5"], {"gamma": 0.5}),
    "LinearLR": (["total_iters=3"], {"total_iters": 3}),
    "MultiStepLR": (["milestones=2,4"], {"milestones": [2, 4]}),
    "OneCycleLR": (["cycle_momentum=false"], {"max_lr": 1.0, "total_steps": 6, "cycle_momentum": False}),
    "PolynomialLR": (["total_iters=6", "power=2"], {"total_iters": 6, "power": 2}),
    "ReduceLROnPlateau": (["patience=1", "factor=0.5"], {"patience": 1, "factor": 0.5, "mode": "max"}),
    "StepLR": (["step_size=2"], {"step_size": 2}),
}


def test_steps_that_are_given_are_the_schedules() -> None:
    """As torch takes them: ``total_steps`` before ``epochs`` and ``steps_per_epoch``."""
    for options in ({"epochs": 4, "steps_per_epoch": 2}, {"epochs": 2, "steps_per_epoch": 1, "total_steps": 7}):
        texts = [f"{name}={value}" for name, value in options.items()]
        assert rates(6, schedule="OneCycleLR", schedule_option=texts) == rates_of_torch(
            "OneCycleLR", {"max_lr": 1.0, **options}
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules(name: str) -> None:
    """All that there are, but for those that take functions or schedulers; and a checkpoint can keep them."""
    texts, options = TORCHS[name]
    assert rates(6, schedule=name, schedule_option=texts) == rates_of_torch(name, options)
    chosen = settings(lr=1.0, epochs=6, schedule=name, schedule_option=texts)
    optimizer = build_optimizer(chosen, torch.nn.Linear(1, 1))
    Schedules(build_schedule(chosen, optimizer, rising=True), optimizer, rising=True)


def test_all_that_torch_has_is_known() -> None:
    """By name, or by the reason why it cannot be."""
    optimizers = {name.casefold() for name in dir(torch.optim) if name[0].isupper() and name != "Optimizer"}
    assert optimizers <= {name.casefold() for name in (*OPTIMIZERS, *NO_OPTIMIZERS)}
    lrs = torch.optim.lr_scheduler
    kinds = {name for name in dir(lrs) if name[0].isupper() and isinstance(getattr(lrs, name), type)}
    schedules = {name for name in kinds if issubclass(getattr(lrs, name), lrs.LRScheduler)} - {"LRScheduler"}
    assert schedules == {*SCHEDULES, *NO_SCHEDULES}
    for name, options in {"RMSprop": ["centered=true", "momentum=0.9"], "NAdam": ["betas=0.8,0.9"]}.items():
        made = build_optimizer(settings(optimizer=name, optimizer_option=options), torch.nn.Linear(2, 2))
        assert type(made).__name__ == name
        assert made.defaults["betas"] == (0.8, 0.9) if name == "NAdam" else made.defaults["centered"] is True
    assert build_optimizer(settings(optimizer="sgd"), torch.nn.Linear(2, 2)).defaults["momentum"] == 0.9


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_from_what_a_checkpoint_keeps(name: str, tmp_path: Path) -> None:
    """To the bit: six steps are three steps, and three."""

    def begun() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        return model, build_optimizer(settings(optimizer=name), model)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.eye(3)).square().sum().backward()
        optimizer.step()

    whole, optimizer = begun()
    for _ in range(3):
        step(whole, optimizer)
    torch.save([whole.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    parts, other = begun()
    for one, state in zip((parts, other), torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        one.load_state_dict(state)
    for _ in range(3):
        step(whole, optimizer)
        step(parts, other)
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))


def test_budgets_count_a_third_moment(run: RunCommand, graph: Path) -> None:
    """12 · 16 + 16 · 2 weights and 18 biases, in float32."""

    def least(*options: str) -> int:
        code, out, err = run("plan", graph, *SMALL[:4], "--floor", "--json", *options)
        assert code == 0, err
        return sum(json.loads(out)["floor"].values())

    amsgrad = least("--optimizer-option", "amsgrad=true")
    assert amsgrad - least() == 4 * (12 * 16 + 16 * 2 + 18)
    assert least("--optimizer", "NAdam") == least()


RECIPES = {
    "cosine, clipped, averaged": ["--schedule", "cosine", "--warmup", "2", "--clip", "0.1", "--average", "ema"],
    "plateau": ["--schedule", "plateau", "--plateau-patience", "0", "--warmup", "2", "--dropout", "0"],
    "steps of sgd": ["--schedule", "step", "--step-every", "2", "--optimizer", "sgd", "--average", "swa"],
    "torch's by name": [
        *("--optimizer", "rmsprop", "--optimizer-option", "centered=true", "--optimizer-option", "momentum=0.5"),
        *("--schedule", "onecyclelr", "--schedule-option", "pct_start=0.5"),
    ],
    "weighted": ["--class-weights", "balanced", "--label-smoothing", "0.1", "--metric", "macro-f1", "--dropout", "0"],
}


@pytest.mark.parametrize("name", thorough(RECIPES, "plateau", "steps of sgd"))
def test_resuming_knows_all_of_it(run: RunCommand, graph: Path, here: Path, name: str) -> None:
    """Nothing but the run is given, and more epochs; losses, scores and weights are those of one run."""
    options = [*SMALL, *RECIPES[name], "--schedule-epochs", "6"]
    assert run("train", graph, *options, "--epochs", "6", "--out", "whole")[0] == 0
    assert run("train", graph, *options, "--epochs", "3", "--out", "parts")[0] == 0
    assert run("train", "--resume", "--out", "parts", "--epochs", "6", "--quiet")[0] == 0
    whole, parts = (
        [json.loads(line) for line in (here / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    names = ("epoch", "loss", "train_score", "valid_score", "test_score")
    assert [[line[n] for n in names] for line in parts] == [[line[n] for n in names] for line in whole]
    weights = [torch.load(here / name / "checkpoint.pt")["model"] for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    code, _, err = run("train", "--resume", "--out", "parts", "--schedule", "none", "--clip", "7", "--average", "none")
    assert code == 2 and "parts was begun with --" in err


def test_a_cosine_ends_where_it_was_meant_to(run: RunCommand, graph: Path, here: Path) -> None:
    """More epochs later do not stretch it."""
    assert run("train", graph, *SMALL, "--schedule", "cosine", "--epochs", "4", "--out", "r")[0] == 0
    assert json.loads((here / "r" / "config.json").read_text())["schedule_epochs"] == 4
    assert run("train", "--resume", "--out", "r", "--epochs", "6", "--quiet")[0] == 0
    state = torch.load(here / "r" / "checkpoint.pt")
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-12)


def test_runs_of_before_these_options_go_on(run: RunCommand, graph: Path, here: Path) -> None:
    """Their configuration lacks them all."""
    assert run("train", graph, *SMALL, "--epochs", "2", "--out", "r")[0] == 0
    config = json.loads((here / "r" / "config.json").read_text())
    for name in ("loss", "clip", "schedule", "average", "log", "class_weights", "warmup"):
        del config[name]
    (here / "r" / "config.json").write_text(json.dumps(config))
    code, _, err = run("train", "--resume", "--out", "r", "--clip", "0.5")
    assert code == 2 and "r was begun with --clip None, not 0.5" in err
    assert run("train", "--resume", "--out", "r", "--epochs", "3", "--quiet")[0] == 0


@pytest.mark.parametrize(("many_graphs", "what"), [(False, "--sampler trains"), (True, "batches are trained")])
def test_batches_are_of_the_cpu(many_graphs: bool, what: str) -> None:
    chosen = settings(device="cuda", sampler="none" if many_graphs else "neighbor")
    with pytest.raises(OptionError, match=f"^{what} on the CPU; leave out --device cuda"):
        check_sampling(chosen, many_graphs=many_graphs)


EXPONENTIAL = ["--schedule", "exponentiallr"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss", "mse"], "MSELoss takes a row of targets a node, the store's task is 'classes'"),
        (["--loss", "bce", "--class-weights", "balanced"], "--class-weights are of cross-entropy"),
        (["--metric", "mae"], "metric mae is not for a store of the task classes"),
        (["--schedule", "plateau", "--eval-every", "0"], "give --eval-every 1 as well"),
        (["--schedule", "cosine", "--warmup", "9", "--epochs", "9"], "leaves nothing of the schedule's 9 epochs"),
        (["--class-weights", "1,2,3"], "--class-weights has 3 weights"),
        (["--class-weights", "1,-2"], "--class-weights"),
        (["--class-weights", "balance"], "did you mean balanced?"),
        (["--class-weights", "0,0"], "leave no training row anything to add"),
        (["--clip", "0"], "--clip"),
        (["--optimizer", "adan"], "did you mean adam?"),
        (["--optimizer", "lbfgs"], "LBFGS evaluates the loss several times a step"),
        (["--optimizer", "sparseadam"], "SparseAdam takes sparse gradients only"),
        (["--optimizer-option", "beta=0.9"], "Adam has no beta; did you mean betas?"),
        (["--optimizer-option", "betas=2,3"], "Adam says: Invalid beta parameter at index 0: 2"),
        (["--optimizer-option", "betas"], "'betas' is not of the form KEY=VALUE"),
        (["--optimizer-option", "lr=1"], "--optimizer-option lr: give --lr"),
        (["--optimizer", "rprop", "--weight-decay", "0.1"], "Rprop has no weight decay; leave out --weight-decay"),
        (["--schedule", "exponential"], "did you mean ExponentialLR?"),
        (["--schedule", "exponentiallr"], "ExponentialLR wants gamma; give --schedule-option gamma=…"),
        (["--schedule", "lambdalr"], "LambdaLR takes a function; from Python"),
        (["--schedule", "steplr", "--schedule-option", "step_size=0"], "StepLR says: "),
        (["--schedule-option", "gamma=1"], "--schedule-option is of torch's schedules"),
        (["--schedule", "linearlr", "--warmup", "3"], "--warmup goes with none, cosine, step and plateau"),
        (["--lr-factor", "1"], "--lr-factor"),
        (["--lr-factor", "0.5", "--schedule", "cosine"], "--lr-factor is of --schedule step or plateau"),
        (["--average-decay", "0.9", "--average", "swa"], "--average-decay is of --average ema"),
        (["--average-from", "2"], "--average-from is of --average ema or swa"),
        (["--label-smoothing", "1.5"], "--label-smoothing"),
        (["--schedule-option", "gamma=1", "--schedule-option", "gamma=2", *EXPONENTIAL], "gamma is given twice"),
        (["--schedule-option", "gamma=1e999", *EXPONENTIAL], "--schedule-option gamma=1e999: it must be finite"),
        (["--schedule-option", "milestones=[1e999]", "--schedule", "multisteplr"], "it must be finite"),
        (["--embedding", "a=3,a=4"], "'a=3,a=4' is not of the form TYPE=COLUMNS,…, each type once"),
        (["--config", "none.toml"], "--config none.toml: No such file or directory"),
    ],
)
def test_nonsense_is_refused(run: RunCommand, graph: Path, here: Path, options: list[str], message: str) -> None:
    """In one line, with nothing left behind."""
    code, _, err = run("train", graph, *SMALL, *options)
    assert code == 2 and message in err and err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_help_is_in_groups() -> None:
    """Every option is under one of the headings."""
    text = CliRunner().invoke(command, ["--help"]).output
    for heading in ("Model:", "Learning rate:", "Evaluation:", "Resources, which never change results:", "The run:"):
        assert f"\n{heading}\n" in text
    assert text.index("Other options:") > text.index("--quiet")
    assert text[text.index("Other options:") :].count("--") == 1  # --help
    assert all(option in text for parameter in command.params for option in parameter.opts if option.startswith("--"))


# ---- logs ---------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_of_epochs(run: RunCommand, graph: Path, here: Path) -> None:
    """What is in metrics.jsonl, but for the numbers of single passes; over a resumption too."""
    assert run("train", graph, *SMALL, "--epochs", "3", "--eval-every", "2", "--log", "csv", "--out", "r")[0] == 0
    assert run("train", "--resume", "--out", "r", "--epochs", "5", "--quiet")[0] == 0
    lines = [json.loads(line) for line in (here / "r" / "metrics.jsonl").read_text().splitlines()]
    rows = read_csv(here / "r" / "metrics.csv")
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4, 5]
    for row, line in zip(rows, lines, strict=True):
        del line["passes"]
        assert row.pop("ssd_way") == line.pop("ssd_way")
        assert {name: None if cell == "" else float(cell) for name, cell in row.items()} == line


def test_a_table_that_is_ahead_or_torn_is_mended(tmp_path: Path) -> None:
    """Epochs that a killed run had written and computes again are there once."""
    first = CsvLog(tmp_path / "log.csv")
    for epoch in (1, 2, 3):
        first(EpochFinished(record(epoch)))
    with (tmp_path / "log.csv").open("a") as file:
        file.write("4,0.")
    again = CsvLog(tmp_path / "log.csv")
    again(EpochFinished(record(3)))
    again(EpochFinished(record(4)))
    assert [row["epoch"] for row in read_csv(tmp_path / "log.csv")] == ["1", "2", "3", "4"]


def test_an_epoch_that_a_run_was_killed_after_gets_its_line(tmp_path: Path) -> None:
    """Its record and checkpoint were written, its line was not, or is torn; whether another epoch follows or not."""
    done = [record(epoch) for epoch in (1, 2, 3)]
    whole = CsvLog(tmp_path / "whole.csv")
    for one in [*done, record(4)]:
        whole(EpochFinished(one))
    lines = (tmp_path / "whole.csv").read_text().splitlines(keepends=True)
    for torn in ("", "3,0."):
        for follows in (True, False):
            (tmp_path / "log.csv").write_text("".join(lines[:3]) + torn)
            log = CsvLog(tmp_path / "log.csv", lambda: done)
            if follows:
                log(EpochFinished(record(4)))
            log.complete()
            assert (tmp_path / "log.csv").read_text().splitlines(keepends=True) == lines[: 5 if follows else 4]


def test_a_table_with_other_columns_is_written_anew(tmp_path: Path) -> None:
    """As one is that an earlier version has begun."""
    (tmp_path / "log.csv").write_text("epoch,loss,valid_acc\n1,0.5,0.25\n")
    CsvLog(tmp_path / "log.csv", lambda: [record(1)])(EpochFinished(record(2)))
    rows = read_csv(tmp_path / "log.csv")
    assert [float(row["loss"]) for row in rows] == [record(1).loss, record(2).loss]
    assert "valid_acc" not in rows[0]


def test_nothing_is_written_of_a_run_without_epochs(tmp_path: Path) -> None:
    CsvLog(tmp_path / "log.csv", list).complete()
    assert not (tmp_path / "log.csv").exists()


class FakeWriters:
    """In place of ``torch.utils.tensorboard``: remembers what is written."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []
        self.scalars: dict[str, list[tuple[float, int]]] = {}

    def SummaryWriter(self, folder: str, purge_step: int) -> "FakeWriters":
        self.made.append((folder, purge_step))
        return self

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((value, step))

    def flush(self) -> None:
        pass


def test_scalars_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores only where there are such; what is computed again is purged."""
    fake = FakeWriters()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)  # type: ignore[arg-type]
    log = TensorBoardLog(tmp_path / "board")
    log(EpochFinished(record(3, valid_score=None)))
    log(EpochFinished(record(4, valid_score=0.5)))
    assert fake.made == [(str(tmp_path / "board"), 3)]
    assert [step for _, step in fake.scalars["loss"]] == [3, 4]
    assert fake.scalars["score/valid"] == [(0.5, 4)]
    assert {"seconds/time", "bytes/ssd_read"} <= fake.scalars.keys() and "epoch" not in fake.scalars


@pytest.mark.parametrize("follows", [True, False])
def test_scalars_of_an_epoch_that_a_run_was_killed_after(
    follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are written again, in place of those that may be there."""
    fake = FakeWriters()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)  # type: ignore[arg-type]
    log = TensorBoardLog(tmp_path / "board", lambda: [record(1), record(2)])
    if follows:
        log(EpochFinished(record(3)))
    log.complete()
    assert fake.made == [(str(tmp_path / "board"), 2)]
    assert [step for _, step in fake.scalars["loss"]] == ([2, 3] if follows else [2])


def test_without_tensorboard_it_is_said_before_training(
    run: RunCommand, graph: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to install."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # type: ignore[arg-type]
    code, _, err = run("train", graph, *SMALL, "--log", "tensorboard")
    assert code == 2 and "pip install tensorboard" in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gat", {"heads": 4}),
        ("gatv2", {"heads": 2}),
        ("transformer", {"heads": 4}),
        ("sage", {"aggr": "max"}),
        ("gin", {"aggr": "max"}),
        ("gin", {"aggr": "mean"}),
    ],
)
def test_models_over_edges(model: str, options: dict[str, Any], graph: Path) -> None:
    """``--hidden`` is the width of a layer whatever its heads, and the output is one column a class."""
    store = open_store(graph)
    built = build_model(settings(model=model, hidden=8, layers=2, **options), store)
    first, last = built.convs
    for name, value in options.items():
        assert getattr(first, name) == value
    rows = torch.randn(5, store.num_features)
    edges = torch.tensor([[0, 1], [1, 2]])
    assert first(rows, edges).shape == (5, 8)
    assert built.eval()(rows, edges).shape == (5, store.num_classes)
    assert type(last) is type(first)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "gat", "heads": 3, "hidden": 16}, "not a multiple of --heads 3"),
        ({"model": "gcn", "heads": 2}, "gcn has none"),
        ({"model": "gat", "aggr": "max"}, "not of gat"),
        ({"residual": True, "jk": "cat"}, "--residual is for models without jumping knowledge"),
    ],
)
def test_options_of_other_models_are_refused(changes: dict[str, Any], said: str, graph: Path) -> None:
    """By name, before anything is made."""
    with pytest.raises(OptionError, match=said):
        build_model(settings(**changes), open_store(graph))


def test_no_model_is_made_whose_weights_memory_cannot_hold(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For training, plans and tables of batches alike."""
    monkeypatch.setattr(recipe, "available_memory_bytes", lambda: 1000)
    with pytest.raises(BudgetError, match=r"the weights of 3 layers, 16 wide, need .* 1\.00 KB are free"):
        build_model(settings(hidden=16), open_store(graph))


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "transformer"])
def test_residual_layers_add_to_their_input(model: str, graph: Path) -> None:
    """Convolutions that give nothing leave two linear maps and the last norm."""
    store = open_store(graph)
    built = build_model(settings(model=model, hidden=8, layers=3, residual=True, norm="layer"), store).eval()
    rows, edges = torch.randn(5, store.num_features), torch.tensor([[0, 1], [1, 2]])
    out = built(rows, edges)
    for parameter in built.convs.parameters():
        torch.nn.init.zeros_(parameter)
    linear = built.lin_out(built.norm_out(built.lin_in(rows)))
    assert out.shape == (5, store.num_classes)
    assert torch.equal(built(rows, edges), linear) and not torch.equal(out, linear)


RESIDUAL = ["--model", "sage", "--residual", "--norm", "layer"]


@pytest.mark.parametrize(
    "options", [["--model", "gat", "--heads", "4"], ["--model", "transformer", "--heads", "2"], RESIDUAL]
)
def test_other_models_train_and_predict(run: RunCommand, graph: Path, here: Path, options: list[str]) -> None:
    """From the command line to logits."""
    run("train", graph, *options, *SMALL, "--epochs", "2", "--out", "run")
    run("predict", "run", "--what", "logits", "--out", "logits.npy", "--gpu-budget", "32M", "--host-budget", "32M")
    assert (here / "logits.npy").exists()


@pytest.fixture
def carrying(tmp_path: Path) -> Path:
    """A store whose edges have weights and three features."""
    path = tmp_path / "carrying.ooc"
    generator = torch.Generator().manual_seed(0)
    data = {
        "edge_index": torch.randint(0, 200, (2, 900), generator=generator).numpy(),
        "x": torch.randn(200, 5, generator=generator).numpy(),
        "y": torch.randint(0, 3, (200,), generator=generator).numpy(),
        "train_mask": np.arange(200) < 100,
        "edge_weight": torch.rand(900, generator=generator).numpy(),
        "edge_attr": torch.randn(900, 3, generator=generator).numpy(),
    }
    ooc.convert(data, path)
    return path


@pytest.mark.parametrize(
    ("options", "left_out"),
    [(["--model", "gcn"], "features"), (["--model", "gat", "--heads", "2"], "weight"), (["--model", "sage"], "all")],
)
def test_what_edges_carry_is_used_or_left_out_by_name(
    run: RunCommand, carrying: Path, here: Path, options: list[str], left_out: str
) -> None:
    """Refused where the model has no use for it; then trained without, and predicted alike."""
    code, _, err = run("train", carrying, *options, *SMALL, "--out", "refused", "--ignore-edge-data", "none")
    assert code == 2 and "the store's edges carry" in err and "--ignore-edge-data" in err
    trained = run("train", carrying, *options, *SMALL, "--epochs", "2", "--out", "run", "--ignore-edge-data", left_out)
    assert trained[0] == 0, trained[2]
    predicted = run("predict", "run", "--what", "logits", "--out", "logits.npy", "--gpu-budget", "32M")
    assert predicted[0] == 0, predicted[2]
    assert np.load(here / "logits.npy").shape == (200, 3)
    small = ("--hidden", "16", "--layers", "2", "--no-advice")
    planned = run("plan", carrying, *options, *small, "--ignore-edge-data", left_out)
    assert planned[0] == 0, planned[2]


def test_weights_that_a_model_does_not_take_are_left_out_and_that_is_said(
    run: RunCommand, carrying: Path, here: Path
) -> None:
    code, out, err = run("train", carrying, "--model", "gat", *SMALL[:-1], "--epochs", "1", "--out", "run")
    assert code == 0 and "without the edges' weights" in " ".join(out.split()), err
    assert run("predict", "run")[0] == 0 and len((here / "run" / "labels.csv").read_text().splitlines()) == 201
    code, _, err = run("train", carrying, "--model", "sage", *SMALL, "--epochs", "1", "--out", "refused")
    assert code == 2 and "the store's edges carry features" in err
