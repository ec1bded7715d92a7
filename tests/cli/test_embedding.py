# SPDX-License-Identifier: Apache-2.0
"""``--embedding`` from training to predictions, and in plans."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import RunCommand

SMALL = ("--hidden", "8", "--layers", "2", "--memory", "32M", "--embedding", "8", "--quiet")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ooc import cli

    store = tmp_path_factory.mktemp("bare") / "bare.ooc"
    source = "synthetic:nodes=2500,edges=9000,features=0,classes=3"
    assert cli.main(["convert", source, str(store), "--quiet"]) == 0
    return store


def test_a_run_is_gone_on_with_and_its_rows_written(run: RunCommand, bare: Path, here: Path) -> None:
    """Its options hold, and its last rows and labels come out by the model and the rows that go together."""
    options = ("--embedding-optimizer", "adagrad", "--embedding-option", "std=0.1", "--embedding-lr", "0.1")
    assert run("train", bare, *SMALL, *options, "--epochs", "4", "--out", "whole")[0] == 0
    assert run("train", bare, *SMALL, *options, "--epochs", "2", "--out", "r")[0] == 0
    code, _, err = run("train", "--resume", "--out", "r", "--epochs", "4", "--embedding", "9")
    assert (code, err.count("\n")) == (2, 1)
    assert "was begun with --embedding 8, not 9" in err
    assert run("train", "--resume", "--out", "r", "--epochs", "4", "--quiet")[0] == 0
    for name in ("r", "whole"):
        words = ("predict", name, "--what", "embeddings", "--layer", "0", "--weights", "last", "--out", f"{name}.npy")
        assert run(*words, "--quiet")[0] == 0
    rows = np.load("r.npy")
    assert rows.shape == (2500, 8)
    assert np.array_equal(rows, np.load("whole.npy"))
    assert 0.05 < rows.std() < 1
    assert run("predict", "r", "--out", "labels.csv", "--quiet")[0] == 0
    code, _, err = run("export", "r", "weights.pt")
    assert code == 0
    assert "the embedding of the nodes is not among them" in err


def test_types_without_features_have_one_each(run: RunCommand, here: Path) -> None:
    """Of columns that are said by type, gone on with, and written type by type."""
    run("convert", "synthetic:nodes=900,edges=3000,features=8,classes=4,types=3,bare=1", "typed.ooc")
    small = ("--model", "rgcn", "--hidden", "8", "--layers", "2", "--memory", "32M", "--quiet")
    code, _, err = run("train", "typed.ooc", *small)
    assert (code, "nodes 'author' have no features; train an embedding of them, --embedding 64" in err) == (2, True)
    assert run("train", "typed.ooc", *small, "--embedding", "author=6,topic=3", "--epochs", "1", "--out", "r")[0] == 0
    assert run("train", "--resume", "--out", "r", "--epochs", "2", "--quiet")[0] == 0
    words = ("predict", "r", "--what", "embeddings", "--layer", "0", "--out", "rows.npy", "--quiet")
    assert "--layer 0 --type topic --weights best --out topic.npy writes it" in run("export", "r", "weights.pt")[2]
    assert run(*words, "--type", "topic")[0] == 0
    assert np.load(here / "rows.npy").shape == (112, 3)
    code, _, err = run(*words, "--force")
    assert (code, "of all nodes of a type: author, topic" in err) == (2, True)


def test_another_stores_rows_are_not_the_runs(run: RunCommand, bare: Path, here: Path) -> None:
    assert run("train", bare, *SMALL, "--epochs", "1", "--out", "r")[0] == 0
    assert run("convert", "synthetic:nodes=2500,edges=9000,features=0,classes=3,seed=1", "other.ooc", "-q")[0] == 0
    code, _, err = run("predict", "r", "other.ooc")
    assert (code, "was trained on another store" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--embedding-lr", "0.1"), "--embedding-lr is of an embedding; give --embedding COLUMNS, too"),
        (("--embedding", "8", "--sampler", "neighbor"), "--embedding is of full-graph training"),
        (("--embedding", "8", "--average", "ema"), "not trained with averaged weights"),
        (("--embedding", "8", "--spill-dtype", "bfloat16"), "not trained with a narrower spill_dtype"),
        (("--embedding", "8", "--embedding-option", "beta=1"), "Adam has no beta; did you mean betas?"),
        (("--embedding", "8", "--embedding-option", "lr=1"), "give --embedding-lr"),
        (("--embedding", "8", "--embedding-option", "std=wide"), "it must be a number"),
        ((), "have no features; train an embedding of them, --embedding 64"),
    ],
)
def test_what_cannot_be_is_one_line(
    options: tuple[str, ...], message: str, run: RunCommand, bare: Path, here: Path
) -> None:
    code, _, err = run("train", bare, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (here / "runs").exists()


def test_a_plan_has_the_bytes_of_the_step(run: RunCommand, here: Path) -> None:
    """An epoch reads and writes the rows and both of Adam's moments once."""
    graph = "nodes=2M,edges=8M,features=0,classes=8"
    words = ("--hidden", "16", "--layers", "2", "--embedding", "64", "--memory", "512M", "--no-advice", "--json")
    code, out, err = run("plan", "--graph", graph, *words)
    assert (code, err) == (0, "")
    plan = json.loads(out)
    matrices = {matrix["matrix"]: matrix for matrix in plan["fates"]}
    for name in ("emb", "emb.exp_avg", "emb.exp_avg_sq"):
        assert matrices[name]["bytes"] == 4 * 64 * 2_000_000
    assert plan["ssd_write_bytes"] >= 3 * 4 * 64 * 2_000_000


def test_a_gpu_is_refused(run: RunCommand, here: Path) -> None:
    graph = "nodes=20000,edges=80000,features=0,classes=8"
    code, _, err = run("plan", "--graph", graph, "--hardware", "a5000", "--embedding", "8")
    assert (code, "an embedding is not trained on a GPU" in err) == (2, True)
