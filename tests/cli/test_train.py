# SPDX-License-Identifier: Apache-2.0
"""``ooc train``: what it writes, what it says, and that being interrupted changes nothing."""

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ooc import cli
from ooc.cli.arguments.recipe import build_model, build_optimizer
from ooc.cli.arguments.settings import TrainSettings
from ooc.engine import session
from ooc.engine.record import EpochRecord
from ooc.sizes import parse_size
from ooc.storage.store import open_store
from tests.cli.conftest import RunCommand, exit_code, forked

SMALL = ["--hidden", "16", "--layers", "2", "--gpu-budget", "32M", "--host-budget", "32M"]
LONG = [*SMALL, "--epochs", "40", "--eval-every", "15"]
RICH = [
    *(*SMALL, "--epochs", "40", "--eval-every", "1", "--dropout", "0"),
    *("--schedule", "plateau", "--plateau-patience", "1", "--warmup", "5", "--lr-factor", "0.5"),
    *("--clip", "0.5", "--optimizer", "adamw", "--weight-decay", "0.01", "--log", "csv"),
]
AVERAGED = [*LONG, "--average", "ema", "--average-from", "2", "--schedule", "cosine", "--norm", "batch"]
TIGHT = ["--gpu-budget", "2840K", "--host-budget", "300K", "--block-rows", "2048", "--slab-columns", "5"]
TIGHT += ["--threads", "2"]


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_folder)]


@pytest.fixture(scope="module")
def undisturbed(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the long run when nothing interrupts it."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert cli.main(["train", str(graph), *LONG, "--out", str(folder), "--quiet"]) == 0
    return losses(folder)


def test_a_run_and_what_it_leaves(run: RunCommand, graph: Path, here: Path) -> None:
    code, out, err = run("train", graph, *SMALL, "--epochs", "4", "--eval-every", "2", "--out", "r")
    # The first run on a store says that it leaves the first aggregation there.
    assert code == 0 and err in ("", f"the first aggregation is kept in {graph} for later runs\n")
    assert sorted(path.name for path in (here / "r").iterdir()) == [
        "best.pt",
        "checkpoint.pt",
        "config.json",
        "config.toml",
        "metrics.jsonl",
        "plan.json",
        "planned.json",
        "starts.jsonl",
        "timeline.json",
    ]
    lines = metrics(here / "r")
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert all(list(line) == list(EpochRecord.__dataclass_fields__) for line in lines)
    assert [line["valid_score"] is None for line in lines] == [True, False, True, False]
    assert len(re.findall(r"^epoch \d/4  loss \d\.\d+", out, re.MULTILINE)) == 4
    for line in (
        "graph",
        "model     GCN: 2 layers, 16 wide, 242 parameters",
        "memory    64.0 MB",
        "in memory",
        "forecast",
    ):
        assert re.search(f"^{line}", out, re.MULTILINE)
    for word in ("accuracy", "SSD read", "SSD written", "peak memory"):
        assert word in out
    assert "matrix" not in out and all(len(line) <= 80 for line in out.splitlines())
    assert re.search(r"run +r\b", out)


def test_weights_too_large_are_refused_before_they_are_made(run: RunCommand, graph: Path, here: Path) -> None:
    code, _, err = run("train", graph, "--hidden", "1000000", "--gpu-budget", "1G", "--out", "r")
    assert code == 2 and err.count("\n") == 1
    assert "the weights of 3 layers, 1000000 wide, need 4" in err and "give a smaller --hidden" in err
    assert not list(here.iterdir())


def test_a_device_that_is_not_there_is_one_line(
    run: RunCommand, graph: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = "device cuda is not available on this machine; use --device cpu"
    for command in (("train", graph, "--out", "r"), ("plan", graph)):
        code, out, err = run(*command, "--device", "cuda")
        assert (code, out, err) == (2, "", f"ooc: error: {said}\n")
    assert not list(here.iterdir())


def test_quiet_prints_the_outcome_only(run: RunCommand, graph: Path, here: Path) -> None:
    code, out, err = run("train", graph, *SMALL, "--epochs", "1", "--quiet", "--out", "r")
    assert (code, err) == (0, "")
    assert "peak memory" in out and "epoch 1" not in out and "matrix" not in out


def test_the_whole_plan_is_there_for_who_asks(run: RunCommand, graph: Path, here: Path) -> None:
    """And when what was done; a level may be asked for in one way."""
    code, out, err = run("train", graph, *SMALL, "--epochs", "1", "-v", "--out", "r")
    assert code == 0 and "matrix" in out and "busiest: " in out and "device" not in out
    assert re.search(r"^epoch 1: \d", err, re.MULTILINE)
    code, out, err = run("train", "--resume", "--out", "r", "--epochs", "2", "--log-level", "warning")
    assert code == 0 and "graph " not in out and "epoch 2" not in out + err and "peak memory" in out
    code, _, err = run("train", graph, "-q", "--log-level", "debug")
    assert code == 2 and "--quiet and --log-level debug: give one of them" in err


def test_budgets_blocks_and_threads_change_nothing(run: RunCommand, graph: Path, here: Path) -> None:
    common = ["train", graph, "--hidden", "16", "--epochs", "3", "--eval-every", "1", "--quiet"]
    assert run(*common, "--out", "a")[0] == 0
    assert run(*common, *TIGHT, "--out", "b")[0] == 0
    assert metrics(here / "b")[0]["ssd_write_bytes"] > 0
    scores = ("loss", "train_score", "valid_score", "test_score")
    assert [[line[name] for name in scores] for line in metrics(here / "a")] == [
        [line[name] for name in scores] for line in metrics(here / "b")
    ]


def test_writes_to_the_ssd_keep_to_their_limit(run: RunCommand, graph: Path, here: Path) -> None:
    """At the cost of time, never of the result; where nothing keeps to it, the least limit that does is named."""
    common = ["train", graph, "--hidden", "16", "--epochs", "2", "--eval-every", "0", "--quiet"]
    assert run(*common, *TIGHT, "--out", "a")[0] == 0
    assert metrics(here / "a")[-1]["ssd_write_bytes"] > 0
    code, _, err = run(*common, *TIGHT, "--max-ssd-writes", "0", "--out", "b")
    least = re.search(r"the limit is 0 B; give --max-ssd-writes (\w+), or a larger --host-budget", err)
    assert code == 2 and least is not None and err.count("\n") == 1
    assert run(*common, *TIGHT, "--max-ssd-writes", least[1], "--out", "b")[0] == 0
    assert metrics(here / "b")[-1]["ssd_write_bytes"] <= parse_size(least[1])
    assert losses(here / "a") == losses(here / "b")


def test_the_only_store_and_a_numbered_run(run: RunCommand, graph: Path, here: Path) -> None:
    (here / "graph.ooc").symlink_to(graph, target_is_directory=True)
    for number in (1, 2):
        code, out, _ = run("train", *SMALL, "--model", "sage", "--epochs", "1", "--eval-every", "0")
        assert code == 0 and f"runs/graph-sage-{number}" in out and "not evaluated" in out


def test_resuming_needs_nothing_but_the_run(run: RunCommand, graph: Path, here: Path) -> None:
    common = [*SMALL, "--optimizer", "adamw", "--weight-decay", "0.1", "--seed", "4", "--norm", "layer"]
    assert run("train", graph, *common, "--epochs", "6", "--out", "whole")[0] == 0
    assert run("train", graph, *common, "--epochs", "2", "--out", "parts")[0] == 0
    assert run("train", "--resume", "--out", "parts", "--epochs", "4", "--gpu-budget", "20M")[0] == 0
    assert run("train", "--resume", "--out", "parts", "--epochs", "6", graph)[0] == 0
    assert losses(here / "parts") == losses(here / "whole")
    assert json.loads((here / "parts" / "config.json").read_text())["gpu_budget"] == 20_000_000
    weights = [torch.load(here / name / "checkpoint.pt")["model"] for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_resuming_with_something_else_is_refused_by_name(run: RunCommand, graph: Path, here: Path) -> None:
    assert run("train", graph, *SMALL, "--epochs", "1", "--out", "r")[0] == 0
    before = (here / "r" / "config.json").read_text()
    for option, value in (("--lr", "0.5"), ("--model", "sage"), ("--seed", "1"), ("--norm", "layer")):
        code, _, err = run("train", "--resume", "--out", "r", option, value)
        assert code == 2 and f"r was begun with {option} " in err and err.count("\n") == 1
    code, _, err = run("train", graph, "--out", "r")
    assert code == 2 and "--resume" in err
    other = here / "other.ooc"
    assert run("convert", "synthetic:nodes=2500,edges=15000,features=12,classes=2,seed=6", other)[0] == 0
    code, _, err = run("train", "--resume", "--out", "r", other)
    assert code == 2 and "another store" in err
    assert (here / "r" / "config.json").read_text() == before


def test_where_there_is_no_run_there_is_nothing_to_resume(run: RunCommand, graph: Path, here: Path) -> None:
    """A wrong --out would train anew, for hours and by default options."""
    code, _, err = run("train", graph, "--resume", "--out", "r")
    assert (code, err) == (2, "ooc: error: there is no run at r\n")
    assert not list(here.iterdir())


def test_a_run_stopped_before_its_first_epoch_was_done_has_its_options(
    run: RunCommand, graph: Path, here: Path
) -> None:
    assert run("train", graph, *SMALL, "--epochs", "1", "--out", "r")[0] == 0
    for name in ("checkpoint.pt", "metrics.jsonl", "best.pt"):
        (here / "r" / name).unlink()
    code, _, err = run("train", "--resume", "--out", "r")
    assert code == 0 and "r has finished no epoch: its first is the first" in err
    assert len(metrics(here / "r")) == 1


def test_a_loss_that_is_no_finite_number_ends_the_run(run: RunCommand, graph: Path, here: Path) -> None:
    """The last checkpoint stays; it can be gone on with, and --allow-nonfinite does."""
    common = ["train", graph, *SMALL, "--epochs", "4", "--eval-every", "0", "--quiet", "--out", "r"]
    code, out, err = run(*common, "--lr", "1e30", "--optimizer", "sgd")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match(r"ooc: error: the loss of epoch 2 is (nan|inf); the checkpoint of epoch 1 is kept; ", err)
    assert [line["epoch"] for line in metrics(here / "r")] == [1]
    assert torch.load(here / "r" / "checkpoint.pt")["epoch"] == 1
    code, _, err = run("train", "--resume", "--out", "r", "--quiet")
    assert code == 2 and "the checkpoint of epoch 1 is kept" in err
    assert run("train", "--resume", "--out", "r", "--quiet", "--allow-nonfinite")[0] == 0
    assert [line["epoch"] for line in metrics(here / "r")] == [1, 2, 3, 4]


def test_budgets_are_cut_to_the_memory_there_is(
    run: RunCommand, graph: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ooc.memory.available_memory_bytes", lambda: 100_000_000)
    small = ["--hidden", "16", "--layers", "2", "--epochs", "1", "--eval-every", "0"]
    code, out, err = run("train", graph, *small, "--gpu-budget", "900G", "--host-budget", "20M", "--out", "r")
    assert code == 0 and "memory 100 MB" in " ".join(out.split())
    said = "budgets of 900 GB and 20.0 MB are more than is free; planned for 80.0 MB and 20.0 MB\n"
    assert said in err and "of 100 MB" in out
    code, _, err = run("predict", "r", "--gpu-budget", "900G", "--host-budget", "900G", "--out", "labels.npy")
    assert code == 0 and "planned for 50.0 MB and 50.0 MB" in err
    code, _, err = run("predict", "r", "--memory", "900G", "--out", "labels.npy", "--force")
    assert code == 0 and "memory of 900 GB is more than is free; planned for 100 MB" in err
    assert run("train", "--resume", "--out", "r", "--epochs", "2", "--memory", "64M", "--quiet")[0] == 0
    config = json.loads((here / "r" / "config.json").read_text())
    assert [config[name] for name in ("memory", "gpu_budget", "host_budget")] == [64_000_000, None, None]


def test_folders_that_are_missing_are_made(run: RunCommand, graph: Path, here: Path) -> None:
    common = ["train", graph, "--hidden", "16", "--epochs", "1", "--quiet", *TIGHT]
    assert run(*common, "--spill-dir", "scratch/of/mine", "--out", "runs/of/mine")[0] == 0
    assert (here / "scratch" / "of" / "mine").is_dir() and len(metrics(here / "runs" / "of" / "mine")) == 1


def test_metrics_that_were_cut_short_are_whole_after_resuming(run: RunCommand, graph: Path, here: Path) -> None:
    """Lost lines, a torn one, and those of epochs that the checkpoint does not know."""
    assert run("train", graph, *SMALL, "--epochs", "5", "--quiet", "--out", "r")[0] == 0
    path = here / "r" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    whole = [{**json.loads(line), "passes": []} for line in lines]
    cuts = ["", lines[0], lines[0] + lines[1][:40], lines[0] + lines[1][:40] + "\n" + lines[2], lines[4]]
    for cut in [*cuts, "".join(lines) + lines[4].replace('"epoch": 5', '"epoch": 6')]:
        path.write_text(cut)
        assert run("train", "--resume", "--out", "r", "--epochs", "5", "--quiet")[0] == 0
        assert [{**line, "passes": []} for line in metrics(here / "r")] == whole


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (["--hidden", "8"], r"of another model: convs\.0\.\S+ is \[8(, 12)?\] there, \[16(, 12)?\] in this model"),
        (["--layers", "3"], r"of another model: convs\.1\.\S+ is "),
        (["--model", "sage"], "of another model: .* missing"),
        (["--optimizer", "sgd"], "of another optimizer"),
        (["--average", "ema"], "weight averaging"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_checkpoint_of_another_run_is_refused(
    run: RunCommand, graph: Path, here: Path, other: list[str], message: str
) -> None:
    """And nothing of the run is changed for it."""
    common = ["train", graph, *SMALL, "--epochs", "2", "--quiet"]
    assert run(*common, "--out", "a")[0] == 0
    assert run(*common, "--out", "b", *other, "--epochs", "1")[0] == 0
    (here / "b" / "checkpoint.pt").replace(here / "a" / "checkpoint.pt")
    before = (here / "a" / "metrics.jsonl").read_text()
    code, _, err = run("train", "--resume", "--out", "a", "--epochs", "4", "--quiet")
    assert code == 2 and err.startswith("ooc: error: ") and err.count("\n") == 1
    assert re.search(message, err), err
    assert (here / "a" / "metrics.jsonl").read_text() == before


def test_early_stopping(run: RunCommand, graph: Path, here: Path) -> None:
    options = [*SMALL, "--epochs", "500", "--patience", "3", "--lr", "0.05"]
    assert run("train", graph, *options, "--out", "r")[0] == 0
    lines = metrics(here / "r")
    scores = [line["valid_score"] for line in lines]
    assert len(lines) < 500 and scores.index(max(scores)) == len(scores) - 4
    assert torch.load(here / "r" / "best.pt")["epoch"] == len(scores) - 3


def test_roc_auc(run: RunCommand, graph: Path, here: Path) -> None:
    code, out, _ = run("train", graph, *SMALL, "--epochs", "2", "--metric", "roc-auc")
    assert code == 0 and "roc-auc" in out


@pytest.mark.parametrize(
    "options",
    [["--model", "gin"], ["--norm", "batch"], ["--norm", "graph"], ["--jk", "cat", "--norm", "layer"]],
    ids=" ".join,
)
def test_models_and_norms_resume_exactly(run: RunCommand, graph: Path, here: Path, options: list[str]) -> None:
    """Running statistics and all."""
    common = ["train", graph, *SMALL, *options, "--quiet"]
    assert run(*common, "--epochs", "4", "--out", "whole")[0] == 0
    assert run(*common, "--epochs", "2", "--out", "parts")[0] == 0
    assert run("train", "--resume", "--out", "parts", "--epochs", "4", "--quiet")[0] == 0
    assert losses(here / "parts") == losses(here / "whole")
    states = [torch.load(here / name / "checkpoint.pt")["model"] for name in ("whole", "parts")]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert run("predict", "whole", "--out", "labels.npy", "--quiet")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-budget", "10K"], r"give --gpu-budget \d+[KM]"),
        (["--host-budget", "10K"], r"give --host-budget \d+[KM]?"),
        # The first run on a store needs room.
        (["--spill-dir", "/proc/nowhere", "--gpu-budget", "64M"], "/proc/nowhere(: |, where 0 B are free)"),
        (["--spill-dir", "loop"], "loop: File exists"),
        (["--memory", "1G"], "give either it or --gpu-budget and --host-budget"),
        (["--block-rows", "7"], "multiple of 2048"),
        (["--patience", "3", "--eval-every", "0"], "patience counts evaluations; give --eval-every"),
        (["--out", "/proc/run"], "/proc/run: "),
    ],
)
def test_what_cannot_be_run_leaves_nothing(
    run: RunCommand, graph: Path, here: Path, options: list[str], message: str
) -> None:
    loop = here / "loop"
    loop.symlink_to("loop")
    code, _, err = run("train", graph, *SMALL, "--epochs", "1", *options)
    assert code == 2
    assert err.startswith("ooc: error: ") and err.count("\n") == 1 and re.search(message, err)
    assert list(here.iterdir()) == [loop]


def test_the_least_budget_named_is_enough(run: RunCommand, graph: Path, here: Path) -> None:
    common = ["train", graph, "--epochs", "1", "--quiet"]
    _, _, err = run(*common, "--gpu-budget", "10K", "--host-budget", "10M")
    needed = re.search(r"--gpu-budget (\w+)", err)
    assert needed is not None
    assert run(*common, "--gpu-budget", needed[1], "--host-budget", "10M")[0] == 0


def test_a_full_disk_is_found_before_training(
    run: RunCommand, graph: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    code, _, err = run("train", graph, "--hidden", "16", "--epochs", "1", *TIGHT, "--out", "a/r")
    assert code == 2 and "1.00 KB are free" in err
    assert list(here.iterdir()) == []


def wait_for_epochs(folder: Path, count: int, process: int) -> None:
    """Until it has done so many: in a minute of the processor, however long that takes beside others."""
    log, trains = folder / "metrics.jsonl", psutil.Process(process)
    while not (log.exists() and log.read_text().count("\n") >= count):
        assert trains.status() != psutil.STATUS_ZOMBIE and trains.cpu_times().user < 60
        time.sleep(0.005)


def train_until(
    graph: Path, folder: Path, epochs_done: int, ended_by: signal.Signals, *, options: list[str] = LONG
) -> int:
    """The exit code of a long run, in a process of its own, that a signal ends when it has done so many epochs."""

    def train() -> int:
        # Where this is itself in the background of a shell, Ctrl-C is ignored, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main(["train", str(graph), *options, "--threads", "1", "--out", str(folder)])

    process = forked(train)
    try:
        wait_for_epochs(folder, epochs_done, process)
        os.kill(process, ended_by)
    except BaseException:
        os.kill(process, signal.SIGKILL)
        raise
    finally:
        code = exit_code(process)
    return code


@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_kill_and_resume(run: RunCommand, graph: Path, here: Path, undisturbed: list[float]) -> None:
    assert train_until(graph, here / "r", 3, signal.SIGKILL) == -signal.SIGKILL
    assert len(losses(here / "r")) < len(undisturbed)
    assert run("train", "--resume", "--out", "r", "--quiet")[0] == 0
    assert losses(here / "r") == undisturbed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(RICH, id="scored while training"),
        pytest.param(AVERAGED, id="averaged", marks=pytest.mark.thorough),
    ],
)
def test_kill_and_resume_with_all_the_extras(run: RunCommand, graph: Path, here: Path, options: list[str]) -> None:
    """Schedule, clipping, average and statistics go on as if nothing had been; so does the table of epochs."""
    assert run("train", graph, *options, "--out", "whole", "--quiet")[0] == 0
    assert train_until(graph, here / "r", 7, signal.SIGKILL, options=options) == -signal.SIGKILL
    assert 7 <= len(losses(here / "r")) < len(losses(here / "whole"))
    assert run("train", "--resume", "--out", "r", "--quiet")[0] == 0
    outcomes = [
        [(line["epoch"], line["loss"], line["valid_score"]) for line in metrics(here / name)] for name in ("r", "whole")
    ]
    assert outcomes[0] == outcomes[1]
    weights = [torch.load(here / name / "checkpoint.pt")["model"] for name in ("r", "whole")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    if "csv" in options:
        assert (here / "r" / "metrics.csv").read_text().count("\n") == 41


@pytest.mark.timeout(600)
def test_interrupt_and_resume(
    run: RunCommand, graph: Path, here: Path, undisturbed: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends the run cleanly and says how to go on with it."""
    assert train_until(graph, here / "r", 2, signal.SIGINT) == cli.EXIT_INTERRUPTED
    err = capfd.readouterr().err
    # On a slow machine lines of progress come before it.
    said = re.search(r"(?:^|\n)ooc: stopped after epoch (\d+); go on with: (ooc train --resume --out \S+)\n$", err)
    assert said is not None
    assert len(losses(here / "r")) == int(said[1])
    assert not list(here.rglob("*.ooc-tmp")) and [path.name for path in here.iterdir()] == ["r"]
    assert run(*said[2].split()[1:], "--quiet")[0] == 0
    assert losses(here / "r") == undisturbed


def test_models_are_those_of_pyg(graph: Path) -> None:
    """Row-wise LayerNorm, mean aggregation, weights by the seed."""
    chosen = TrainSettings(
        store=str(graph),
        model="sage",
        layers=3,
        hidden=8,
        dropout=0.25,
        norm="layer",
        seed=3,
        optimizer="adamw",
        lr=0.1,
        weight_decay=0.01,
    )
    model: Any = build_model(chosen, open_store(graph))
    assert [(conv.in_channels, conv.out_channels, conv.aggr) for conv in model.convs] == [
        (12, 8, "mean"),
        (8, 8, "mean"),
        (8, 2, "mean"),
    ]
    assert {norm.mode for norm in model.norms if hasattr(norm, "mode")} == {"node"}
    again = build_model(chosen, open_store(graph))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    optimizer = build_optimizer(chosen, model)
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["weight_decay"] == 0.01
