# SPDX-License-Identifier: Apache-2.0
"""``ooc runs``, and what commands print for programs: one JSON object, or one a line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ooc import cli
from ooc.report.runs import ORDERS, describe_run, find_runs, ordered
from ooc.train.runs.run import RunFolder
from tests.cli.conftest import RunCommand
from tests.cli.test_run import record, state

SMALL = ("--hidden", "8", "--layers", "2", "--gpu-budget", "32M", "--host-budget", "32M")


@pytest.fixture(scope="module")
def trained(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs."""
    folder = tmp_path_factory.mktemp("trained") / "a"
    assert cli.main(["train", str(graph), *SMALL, "--epochs", "2", "--out", str(folder), "--quiet"]) == 0
    return folder


def made(path: Path, scores: list[float | None], **config: Any) -> Path:
    """A run with these validation scores."""
    with RunFolder.create(path, config) as run:
        run.start()
        for epoch, score in enumerate(scores, start=1):
            run.append(record(epoch, valid_score=score, time_s=epoch, host_peak_bytes=10 * len(scores)))
    return path


def test_runs_are_listed_with_what_they_came_to(run: RunCommand, trained: Path) -> None:
    code, out, err = run("runs", trained.parent, "--json")
    [found] = json.loads(out)["runs"]
    assert (code, err) == (0, "")
    assert found["run"] == str(trained) and found["state"] == "finished" and found["problem"] is None
    assert (found["model"], found["metric"], found["epochs"], found["epochs_asked"]) == ("gcn", "accuracy", 2, 2)
    assert Path(found["graph"]).name == "graph.ooc"
    assert found["host_peak_bytes"] > 0 and found["epoch_s"] > 0 and found["last_test"] is not None
    code, out, _ = run("runs", trained.parent)
    assert code == 0 and "finished" in out and "2/2" in out and "all: graph graph, metric accuracy" in out
    assert max(map(len, out.splitlines())) <= 80 or str(trained) in out


def test_how_far_runs_are(tmp_path: Path) -> None:
    begun = made(tmp_path / "run-1", [], epochs=3)
    stopped = made(tmp_path / "run-2", [0.1, 0.4, None], epochs=5, scored_by="accuracy")
    patient = made(tmp_path / "run-10", [0.4, 0.3, 0.2], epochs=9, patience=2, scored_by="accuracy")
    error = made(tmp_path / "deep" / "er" / "run", [0.4, 0.3, 0.35], epochs=3, scored_by="mae")
    shutil.copytree(error, tmp_path / "run-9")
    (tmp_path / "run-9" / "metrics.jsonl").write_text("{\n" + record(2).to_line())
    python = made(tmp_path / "run-11", [0.5], scored_by="accuracy", model_class="GCN", graph="cora")
    (tmp_path / "a.ooc" / "run").mkdir(parents=True)
    (tmp_path / "a.ooc" / "run" / "config.json").write_text("{}")
    found = find_runs(tmp_path)
    assert [Path(one["run"]) for one in found] == [error, begun, stopped, tmp_path / "run-9", patient, python]
    assert [one["state"] for one in found] == ["finished", "stopped", "stopped", "damaged", "finished", "finished"]
    assert [one["best_epoch"] for one in found] == [2, None, 2, None, 1, 1]
    assert [one["best_valid"] for one in found] == [0.3, None, 0.4, None, 0.4, 0.5]
    assert "line 1 is damaged" in found[3]["problem"]
    assert {tuple(one) for one in found} == {tuple(found[0])}
    assert found[5]["model"] == "GCN" and found[5]["graph"] == "cora"
    # The least error stands by itself: it is no score that others can be compared with.
    by = {order: [Path(one["run"]).name for one in ordered(found, order)] for order in ORDERS}
    assert by["score"][:3] == ["run-11", "run-2", "run-10"] and by["score"][-1] in ("run-1", "run-9")
    assert by["time"][0] == "run-11" and by["memory"][0] == "run-11"


def test_more_epochs_than_the_command_asked_for(tmp_path: Path) -> None:
    """Of a run that has been gone on with from Python."""
    found = describe_run(made(tmp_path / "run", [0.1, 0.2, 0.3], epochs=2))
    assert (found["epochs"], found["epochs_asked"], found["state"]) == (3, None, "finished")


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    path = made(tmp_path / "run", [0.1], epochs=3)
    with RunFolder.open(path) as run:
        run.start()
        assert describe_run(path)["state"] == "going on"
        assert describe_run(path, held=True)["state"] == "stopped"
        run.save(state(2))
    assert describe_run(path)["state"] == "stopped"


def test_where_there_are_none(run: RunCommand, here: Path) -> None:
    assert run("runs") == (0, "there are no runs in .; ooc train makes one\n", "")
    (here / "runs").mkdir()
    code, _, err = run("runs", "rnus")
    assert code == 2 and "there is no folder rnus; did you mean runs?" in err
    (here / "runs" / "damaged").mkdir()
    (here / "runs" / "damaged" / "config.json").write_text("{")
    code, out, _ = run("runs")
    assert code == 0 and "runs/damaged: runs/damaged/config.json is damaged: " in out


def test_training_prints_a_line_of_json_an_epoch(run: RunCommand, graph: Path, here: Path) -> None:
    code, out, _ = run("train", graph, *SMALL, "--epochs", "2", "--json", "--out", "r")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["event"] for line in lines] == ["start", "epoch", "epoch", "end"]
    kept = [json.loads(line) for line in (here / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines[1:3]] == [line["loss"] for line in kept]
    assert lines[0]["plan"]["epoch_s"] > 0 and lines[3]["state"] == "finished"
    assert set(lines[3]) == {"event", *describe_run(here / "r")}


def test_a_dry_run_writes_nothing(run: RunCommand, graph: Path, trained: Path, here: Path) -> None:
    before = sorted(path.stat().st_mtime_ns for path in [*trained.iterdir(), *graph.rglob("*")])
    code, out, _ = run("train", graph, *SMALL, "--dry-run")
    assert code == 0 and "nothing is trained or written; without --dry-run, runs/graph-gcn-1 would be" in out
    code, out, _ = run("train", "--resume", "--out", trained, "--dry-run", "--json", "--epochs", "3")
    assert code == 0 and json.loads(out)["dry_run"] is True
    code, out, _ = run("predict", trained, "--out", "x.npy", "--dry-run")
    assert code == 0 and "not written" in out
    code, out, _ = run("predict", trained, "--out", "x.npy", "--dry-run", "--json")
    assert json.loads(out)["shape"] == [2500] and json.loads(out)["written"] is False
    code, out, _ = run("reorder", graph, "o.ooc", "--dry-run")
    assert code == 0 and "o.ooc would be written; nothing has been" in out
    code, out, _ = run("reorder", graph, "--dry-run", "--json")
    assert json.loads(out)["target"] == str(graph.resolve()) and json.loads(out)["disk_bytes"] > 0
    code, out, _ = run("convert", "synthetic:nodes=300,edges=900,features=4,classes=2", "s.ooc", "--dry-run", "--json")
    assert code == 0 and {"name", "target", "stages", "disk_bytes", "seconds"} <= json.loads(out).keys()
    assert list(here.iterdir()) == []
    assert before == sorted(path.stat().st_mtime_ns for path in [*trained.iterdir(), *graph.rglob("*")])


def test_other_commands_print_an_object(run: RunCommand, graph: Path, trained: Path, here: Path) -> None:
    source = "synthetic:nodes=300,edges=900,features=4,classes=2"
    commands: dict[tuple[str | Path, ...], set[str]] = {
        ("convert", source, "s.ooc"): {"path", "num_nodes", "bytes"},
        ("reorder", "s.ooc", "o.ooc"): {"order", "hops"},
        ("verify", "s.ooc"): {"store", "problems"},
        ("export", trained, "w.pt"): {"out", "tensors", "bytes", "model"},
        ("predict", trained, "--out", "p.csv"): {"out", "what", "shape", "written"},
    }
    for words, keys in commands.items():
        code, out, err = run(*words, "--json")
        assert code == 0, err
        assert keys <= json.loads(out).keys()
    chunk = next(path for path in (here / "s.ooc" / "x").rglob("*") if path.is_file() and path.name != "zarr.json")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    code, out, err = run("verify", "s.ooc", "--json")
    assert code == 2 and len(json.loads(out)["problems"]) == 1 and err.count("\n") == 1


def test_every_command_prints_json_but_the_script() -> None:
    for name in cli.COMMANDS:
        options = {option for parameter in cli.load_command(name).params for option in parameter.opts}
        assert ("--json" in options) == (name != "completion"), name


def test_help_fits_80_columns(run: RunCommand) -> None:
    for name in cli.COMMANDS:
        _, out, _ = run(name, "--help")
        assert max(map(len, out.splitlines())) <= 80, name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(run: RunCommand, shell: str) -> None:
    code, script, err = run("completion", shell)
    assert (code, err) == (0, "") and f"_OOC_COMPLETE={shell}_complete" in script


@pytest.mark.parametrize(
    ("words", "found"),
    [("ooc tr", "train"), ("ooc train --model GA", "gatv2"), ("ooc train --max", "--max-ssd-writes")],
)
def test_completion(
    words: str, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the script asks for it."""
    monkeypatch.setenv("_OOC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit):
        cli.main([])
    assert f"plain,{found}" in capsys.readouterr().out.splitlines()
