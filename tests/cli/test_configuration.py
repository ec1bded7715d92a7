# SPDX-License-Identifier: Apache-2.0
"""Options from files and from the environment, and runs that are repeated by what they have written down."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from ooc import cli
from ooc.cli.arguments.configuration import as_toml, read_configuration
from ooc.errors import OptionError
from ooc.suggestions import closest, did_you_mean_path
from tests.cli.conftest import RunCommand
from tests.cli.test_train import losses


def given(name: str, *arguments: str) -> dict[str, Any]:
    """What a command's parameters are for these arguments."""
    command = cli.load_command(name)
    return command.make_context(name, list(arguments)).params


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration of two commands, not in the current folder."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[train]\nstore = "a.ooc"\nmodel = "GAT"\nlr = 1\nepochs = 7\ngpu_budget = "8G"\nhost-budget = 5_000\n'
        'log = ["csv"]\nallow-nonfinite = true\n[plan]\nepochs = 9\nno-advice = true\n'
        '[convert]\nsource = "graph"\nduplicates = "keep"\n'
    )
    return path


def test_a_run_is_repeated_by_its_configuration(run: RunCommand, graph: Path, here: Path) -> None:
    options = [
        "--model",
        "gin",
        "--hidden",
        "8",
        "--layers",
        "2",
        "--schedule",
        "cosine",
        "--clip",
        "1",
        "--lr",
        "0.02",
    ]
    code, _, err = run("train", graph, *options, "--epochs", "3", "--out", "first", "--seed", "3", "--quiet")
    assert code == 0, err
    code, _, err = run("train", "--config", "first/config.toml", "--out", "second", "--quiet")
    assert code == 0, err
    assert losses(here / "first") == losses(here / "second")
    first, second = (json.loads((here / name / "config.json").read_text()) for name in ("first", "second"))
    assert first == second
    assert (here / "first" / "config.toml").read_text() == (here / "second" / "config.toml").read_text()
    # What the run goes on with is written down, too.
    code, _, err = run("train", "--resume", "--out", "second", "--epochs", "4", "--quiet")
    assert code == 0, err
    assert "epochs = 4\n" in (here / "second" / "config.toml").read_text()


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = given("train", "--config", str(file))
    assert (found["model"], found["lr"], found["epochs"], found["hidden"]) == ("gat", 1.0, 7, 128)
    assert (found["gpu_budget"], found["host_budget"], found["log"]) == (8 * 10**9, 5000, ("csv",))
    assert found["allow_nonfinite"] is True
    monkeypatch.setenv("OOC_TRAIN_EPOCHS", "8")
    monkeypatch.setenv("OOC_TRAIN_GPU_BUDGET", "1G")
    assert given("train", "--config", str(file))["epochs"] == 8
    found = given("train", "--config", str(file), "--epochs", "9")
    assert (found["epochs"], found["gpu_budget"]) == (9, 10**9)


def test_memory_said_nearer_takes_the_place_of_budgets_said_further(
    run: RunCommand, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way round; in one place they are refused."""

    def asked(*arguments: str) -> dict[str, Any]:
        plan = ("plan", "--config", str(file), "--graph", "nodes=2000,edges=9000,features=4,classes=2", "--json")
        code, out, err = run(*plan, *arguments)
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    file.write_text('[train]\ngpu-budget = "40M"\n')
    assert asked("--memory", "60M")["memory_bytes"] == 60_000_000
    assert asked("--host-budget", "20M")["memory_bytes"] == 60_000_000
    file.write_text('[train]\nmemory = "60M"\n')
    assert asked()["memory_bytes"] == 60_000_000
    assert asked("--gpu-budget", "40M", "--host-budget", "30M")["memory_bytes"] == 70_000_000
    monkeypatch.setenv("OOC_PLAN_MEMORY", "80M")
    assert asked()["memory_bytes"] == 80_000_000


def test_paths_are_relative_to_the_file(file: Path) -> None:
    assert given("train", "--config", str(file))["store"] == str(file.parent / "a.ooc")
    assert given("convert", "--config", str(file))["source"] == "graph"
    (file.parent / "graph").mkdir()
    assert given("convert", "--config", str(file))["source"] == str(file.parent / "graph")
    assert given("convert", "--config", str(file))["drop_duplicates"] is False


def test_planning_takes_the_options_of_training(file: Path) -> None:
    found = given("plan", "--config", str(file))
    assert (found["model"], found["epochs"], found["no_advice"]) == ("gat", 9, True)
    assert found["store"] == (str(file.parent / "a.ooc"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nmodle = 'gcn'", r"f\.toml, \[train\]: there is no option modle; did you mean model\?"),
        ("[trian]\nmodel = 'gcn'", r"there is no command trian; did you mean train\?"),
        ("model = 'gcn'", r"model stands in no table; .*\[train\]"),
        ("train = 5", r"train is a command, whose options stand below \[train\]"),
        ("[train]\nmodel = 'gnc'", r"\[train\]: model: 'gnc' is not one of .*; did you mean gcn\?"),
        ("[train]\nlayers = 2.7", r"layers: '2\.7' is not a valid whole number"),
        ("[train]\nlayers = true", r"layers: 'True' is not a valid whole number"),
        ("[train]\nlr = nan", r"lr: nan is not a finite number"),
        ("[train]\ngpu-budget = '8X'", r"gpu-budget: .*'8X' is no size"),
        ("[train]\nlayers = [2]", r"layers is one value, not \[2\]"),
        ("[train]\nstore = {a = 1}", r"store cannot be"),
        ("[train]\nresume = true", r"there is no option resume"),
        ("[train]\nlayers = 0", r"\[train\]: layers: 0 is not in the range"),
        ("[train", r"f\.toml: Expected"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        read_configuration(path, "train")


def test_a_variable_that_sets_nothing_is_refused(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_TRAIN_EPOHCS", "8")
    code, _, err = run("train", "x.ooc")
    assert code == 2 and "OOC_TRAIN_EPOHCS is set in the environment" in err
    assert "did you mean OOC_TRAIN_EPOCHS?" in err
    monkeypatch.delenv("OOC_TRAIN_EPOHCS")
    monkeypatch.setenv("OOC_TRAIN_EPOCHS", "0")
    code, _, err = run("train", "x.ooc")
    assert code == 2 and "0 is not in the range x>=1., as OOC_TRAIN_EPOCHS in the environment says" in err


def test_of_the_environment_a_run_takes_what_changes_no_result(
    run: RunCommand, graph: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--hidden", "8", "--layers", "2", "--quiet", "--out", "r")
    assert run("train", graph, "--epochs", "1", *options)[0] == 0
    monkeypatch.setenv("OOC_TRAIN_MODEL", "sage")
    monkeypatch.setenv("OOC_TRAIN_HOST_BUDGET", "33M")
    code, _, err = run("train", "--resume", "--out", "r", "--epochs", "2", "--quiet")
    assert code == 0, err
    config = json.loads((here / "r" / "config.json").read_text())
    assert (config["model"], config["host_budget"]) == ("gcn", 33 * 10**6)


def test_what_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    strange = 'a"\\\n\x7fü/b.ooc'
    path.write_text(as_toml("train", {"store": f"/{strange}", "gpu_budget": None, "lr": 1e-7}, heading="x"))
    assert read_configuration(path, "train") == {"store": f"/{strange}", "lr": "1e-07"}


def test_every_option_can_be_in_a_file() -> None:
    for name in cli.COMMANDS:
        for parameter in cli.load_command(name).params:
            assert isinstance(parameter, click.Argument) or parameter.envvar


def test_what_is_meant_is_what_is_most_like(tmp_path: Path) -> None:
    assert closest("gnc", ["gat", "gcn", "gin"]) == "gcn"
    assert closest("SAEG", ["gat", "sage"]) == "sage"
    assert closest("a100", ["a100-40g", "a5000"]) == "a100-40g"
    assert closest("nothing like it", ["gat"]) is None
    (tmp_path / "b.ooc").mkdir()
    assert str(tmp_path / "b.ooc") in did_you_mean_path(tmp_path / "b.oc")
    assert str(tmp_path) in did_you_mean_path(tmp_path.with_name(tmp_path.name + "x") / "b.ooc")
    assert did_you_mean_path(tmp_path / "zzz") == ""
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert did_you_mean_path(tmp_path / "rnus" / "frist") == f"; did you mean {tmp_path / 'runs' / 'first'}?"
    assert did_you_mean_path(tmp_path / "rnus" / "first") == f"; did you mean {tmp_path / 'runs' / 'first'}?"
