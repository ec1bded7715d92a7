# SPDX-License-Identifier: Apache-2.0
"""Graphs with types of nodes and edges from the command line."""

import json
import shutil
from pathlib import Path

import pytest

import ooc
from tests.cli.conftest import RunCommand
from tests.cli.test_train import losses

SMALL = ["--hidden", "8", "--layers", "2", "--memory", "40M", "--eval-every", "2"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = "synthetic:nodes=1600,edges=8000,features=16,classes=4,types=3"
    return ooc.convert(source, tmp_path_factory.mktemp("typed") / "t.ooc").path


@pytest.fixture
def typed(converted: Path, here: Path) -> Path:
    """A store of this test's own."""
    return Path(shutil.copytree(converted, here / "t.ooc"))


def test_a_run_goes_on_as_if_it_had_never_stopped(run: RunCommand, typed: Path, here: Path) -> None:
    for name, epochs in (("once", 4), ("twice", 2)):
        code, _, err = run("train", typed, "--model", "rgcn", *SMALL, "--epochs", str(epochs), "--out", name)
        assert code == 0, err
    assert run("train", "--resume", "--out", "twice", "--epochs", "4")[0] == 0
    assert losses(here / "once") == losses(here / "twice")
    assert run("predict", "twice", "--what", "labels", "--out", "labels.npy")[0] == 0
    assert (here / "labels.npy").exists()


@pytest.mark.parametrize("model", ["hgt", "han"])
def test_attention_over_types(model: str, run: RunCommand, typed: Path) -> None:
    options = ("--model", model, "--heads", "2", "--dropout", "0.2", *SMALL, "--epochs", "1", "--out", "r")
    code, _, err = run("train", typed, *options)
    assert code == 0, err
    assert run("predict", "r", "--what", "labels", "--out", "labels.npy")[0] == 0


def test_what_is_said_of_the_store(run: RunCommand, typed: Path) -> None:
    facts = json.loads(run("info", typed, "--json")[1])
    assert facts["labelled"] == "paper" and len(facts["node_types"]) == 3
    assert facts["edge_types"]["paper cites paper"] == 3000
    assert run("verify", typed)[0] == 0
    code, out, _ = run("plan", typed, "--model", "sage", *SMALL[:4], "--no-advice")
    assert code == 0 and "4 types" in out


def test_a_process_that_has_no_rows_of_a_type_is_forecast(run: RunCommand, here: Path) -> None:
    """Of one that has fewer panels than there are processes the first of these computes all."""
    assert run("convert", "synthetic:nodes=8000,edges=40000,features=16,classes=4,types=3", "t.ooc")[0] == 0
    code, out, err = run("plan", "t.ooc", "--model", "rgcn", *SMALL[:6], "--threads", "1", "--ranks", "2", "--json")
    assert code == 0, err
    assert len(json.loads(out)["ranks"]["ranks"]) == 2


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            ("train", "--model", "gat"),
            "gat is for graphs of one type; for those with types there are rgcn",
        ),
        (("train", "--model", "rgcn", "--norm", "batch"), "--norm is not for graphs with types"),
        (
            ("train", "--model", "sage", "--sampler", "neighbor", "--out", "r"),
            "a NeighborLoader is for graphs",
        ),
        (("info", "--layers", "2"), "--layers is for graphs with one of each"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_refused(command: tuple[str, ...], told: str, run: RunCommand, typed: Path) -> None:
    code, _, err = run(command[0], typed, *command[1:])
    assert code == 2 and told in err and err.count("\n") == 1


def test_rgcn_is_for_types(run: RunCommand, graph: Path) -> None:
    code, _, err = run("train", graph, "--model", "rgcn")
    assert code == 2 and "rgcn is for graphs with types" in err
