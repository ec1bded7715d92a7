# SPDX-License-Identifier: Apache-2.0
"""``ooc train --seeds``: a run a seed, each as by ``--seed``, and what they have come to together."""

import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from ooc import cli
from ooc.report.runs import describe_seed, describe_summary, summarize
from ooc.train.metrics import Metric
from ooc.train.trainer import Trainer
from tests.cli.conftest import RunCommand

SMALL = ["--hidden", "8", "--layers", "2", "--memory", "64M", "--epochs", "2"]


@pytest.fixture(scope="module")
def several(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the seeds 0 and 3."""
    folder = tmp_path_factory.mktemp("several") / "runs"
    assert cli.main(["train", str(graph), *SMALL, "--seeds", "0,3", "--out", str(folder), "-q"]) == 0
    return folder


def losses(run_folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def test_each_is_the_run_of_its_seed(run: RunCommand, graph: Path, several: Path, here: Path) -> None:
    """To the bit; and a run like any other."""
    code, out, err = run("train", graph, *SMALL, "--seed", "3", "--out", "alone", "-q")
    assert code == 0
    assert losses(several / "seed-3") == losses(here / "alone") != losses(several / "seed-0")
    assert sorted(path.name for path in (several / "seed-3").iterdir()) == sorted(
        path.name for path in (here / "alone").iterdir()
    )
    code, _, err = run("predict", several / "seed-3", "--out", "labels.npy", "-q")
    assert code == 0, err
    code, out, _ = run("runs", several, "--json")
    assert [Path(one["run"]).name for one in json.loads(out)["runs"]] == ["seed-0", "seed-3"]
    code, _, err = run("predict", several, "--out", "labels2.npy")
    assert code == 2 and f"it holds those of several seeds, such as {several / 'seed-0'}" in err


def test_what_has_ended_is_not_trained_anew(run: RunCommand, several: Path, here: Path) -> None:
    """A seed that is missing is; seeds and epochs may be added."""
    shutil.copytree(several, "runs")
    shutil.rmtree("runs/seed-3")
    untouched = (here / "runs/seed-0/checkpoint.pt").stat().st_mtime_ns
    code, out, err = run("train", "--resume", "--out", "runs", "--seeds", "0,3,1")
    assert code == 0, err
    assert (here / "runs/seed-0/checkpoint.pt").stat().st_mtime_ns == untouched
    assert losses(here / "runs/seed-3") == losses(several / "seed-3")
    assert re.findall(r"^seed (\d): test 0\.\d{4} at epoch \d ", out, re.MULTILINE) == ["0", "3", "1"]
    assert out.count("forecast") == 1 and "epoch 1/" not in out and all(len(line) <= 80 for line in out.splitlines())
    assert "3 seeds, accuracy on test nodes, mean ± standard deviation:" in out
    code, out, err = run("train", "--resume", "--out", "runs", "--epochs", "3", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [event["event"] for event in events] == [*("start", "epoch", "end") * 3, "seeds"]
    scores = [one["last_test"] for one in events[-1]["runs"]]
    assert len(scores) == 3 and [one["epochs"] for one in events[-1]["runs"]] == [3, 3, 3]
    assert events[-1]["last_test"] == {"mean": statistics.fmean(scores), "std": statistics.stdev(scores)}


def test_interrupted_it_says_how_to_go_on(
    run: RunCommand, graph: Path, several: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, trained = Trainer.fit, []

    def interrupted(trainer: Trainer, **options: Any) -> Any:
        trained.append(fit(trainer, **options | ({"epochs": 1} if trained else {})))
        if len(trained) > 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", interrupted)
        code, _, err = run("train", graph, *SMALL, "--seeds", "0,3", "--out", "runs", "-q")
    assert code == 130 and "stopped after epoch 1 of seed 3; go on with: ooc train --resume --out runs\n" in err
    assert run("train", "--resume", "--out", "runs", "-q")[0] == 0
    assert [losses(here / "runs" / name) for name in ("seed-0", "seed-3")] == [
        losses(several / name) for name in ("seed-0", "seed-3")
    ]


def test_dry_runs_and_errors_leave_nothing(run: RunCommand, graph: Path, here: Path) -> None:
    code, out, err = run("train", graph, *SMALL, "--seeds", "3", "--out", "a", "--dry-run")
    assert code == 0 and out.count("forecast") == 1
    assert "it would be 3 runs, a/seed-0 to a/seed-2" in out
    code, out, err = run("train", graph, *SMALL, "--seeds", "3", "--memory", "100K", "--out", "a")
    assert code == 2 and "the smallest plan needs" in err and err.count("\n") == 1
    assert not list(here.iterdir())
    code, out, err = run("train", graph, *SMALL, "--seeds", "2", "--optimizer", "sgd", "--lr", "1e30", "--out", "a")
    assert code == 2 and "ooc: error: seed 0: the loss of epoch 2 is " in err and err.count("ooc: error: ") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds", "2", "--seed", "1"], "--seed is of one training, --seeds of several; give one of them"),
        (["--seeds", "0,0"], "'0,0' has a seed twice"),
        (["--seeds", "many"], "'many' is neither how many, such as 5, nor seeds, such as 0,3,7"),
        (["--seeds", "-1,2"], "seeds are whole numbers from 0 on"),
        (["--seeds", "2024"], "for one training by that seed give --seed 2024"),
        (["--seeds", "0"], "0 is not in the range 1 to 1000"),
    ],
)
def test_what_is_refused(run: RunCommand, graph: Path, here: Path, options: list[str], said: str) -> None:
    code, _, err = run("train", graph, *SMALL, *options)
    assert code == 2 and said in err and err.count("\n") == 1
    assert not list(here.iterdir())


def test_what_belongs_to_the_runs_is_kept(run: RunCommand, graph: Path, several: Path, here: Path) -> None:
    for options, said in (
        (["--seeds", "3,4"], "was begun with seed 0, too; seeds may be added, not left out"),
        (["--lr", "0.5"], "was begun with --lr 0.01, not 0.5"),
        (["--seed", "3"], "give --seeds, or --out with one of its runs"),
    ):
        code, _, err = run("train", "--resume", "--out", several, *options)
        assert code == 2 and said in err, err
    code, _, err = run("train", graph, *SMALL, "--seeds", "2", "--out", several)
    assert code == 2 and "holds runs of several seeds; go on with them by --resume" in err
    code, _, err = run("train", "--resume", "--out", several / "seed-3", "--seeds", "2")
    assert code == 2 and "is the run of one seed" in err
    # A file's seed gives way to seeds that are said nearer.
    config = several / "seed-3" / "config.toml"
    code, out, _ = run("train", "--config", config, "--seeds", "2", "--out", "b", "--dry-run")
    assert code == 0 and "it would be 2 runs, b/seed-0 to b/seed-1" in out


def test_mean_and_deviation() -> None:
    def described(best: float | None, last: float | None) -> dict[str, Any]:
        return {"best_valid": best, "best_test": best, "last_valid": last, "last_test": last}

    runs = [described(0.80, 0.7), described(0.82, 0.7), described(0.84, 0.7)]
    assert summarize(runs)["best_test"] == {"mean": pytest.approx(0.82), "std": pytest.approx(0.02)}
    assert describe_summary(runs, Metric.ACCURACY)[1:] == [
        "  82.00 ± 2.00 % at the best validation epoch",
        "  70.00 ± 0.00 % after the last epoch",
    ]
    assert describe_summary(runs, Metric.MAE)[1] == "  0.820 ± 0.020 at the best validation epoch"
    assert describe_summary(runs[:1], Metric.R2)[1] == "  0.8000 at the best validation epoch"
    assert describe_summary([*runs, described(None, None)], Metric.R2) == ["4 seeds: nothing was scored"]
    alone = {"epochs": 1, "best_epoch": None, "loss": 0.25}
    assert describe_seed(3, alone, 2.0) == "seed 3: loss 0.25000 after 1 epoch; 2.0 s"
