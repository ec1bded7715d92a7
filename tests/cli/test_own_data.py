# SPDX-License-Identifier: Apache-2.0
"""Tables of one's own, from the shell: converted, trained on by GCN and GAT, predicted under their own names."""

import csv
from pathlib import Path

import pytest

from examples import own_data
from tests.cli.conftest import RunCommand

NODES = 300
SIZES = ("--memory", "64M", "--hidden", "8", "--layers", "2", "--epochs", "2")


@pytest.mark.parametrize(("form", "models"), [("csv", ("gcn", "gat")), ("parquet", ("gcn",))], ids=["csv", "parquet"])
def test_four_commands_from_tables_to_labels(run: RunCommand, here: Path, form: str, models: tuple[str, ...]) -> None:
    """Ids and labels are texts, edges have weights, and no option but sizes is given."""
    own_data.make_tables(here, NODES)
    for words in (
        ("convert", f"papers-{form}", "papers.ooc"),
        *(("train", "papers.ooc", *(("--model", "gat") if model == "gat" else ()), *SIZES) for model in models),
        *(("predict", f"runs/papers-{model}-1") for model in models),
    ):
        code, out, err = run(*words)
        assert code == 0, err
        assert all(len(line) <= 80 for line in (out + err).splitlines() if str(here) not in line)
    with (here / "papers-csv" / "nodes.csv").open() as file:
        nodes = [row["id"] for row in csv.DictReader(file)]
    for model in models:
        with (here / "runs" / f"papers-{model}-1" / "labels.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["node"] for row in rows] == nodes and {row["label"] for row in rows} <= set(own_data.FIELDS)


def test_some_nodes_are_asked_for_by_their_names(run: RunCommand, here: Path) -> None:
    own_data.make_tables(here, NODES)
    with (here / "papers-csv" / "nodes.csv").open() as file:
        wanted = [row["id"] for row in csv.DictReader(file)][7:4:-1]
    Path("wanted.txt").write_text("\n".join(wanted) + "\n")
    assert run("convert", "papers-csv", "papers.ooc")[0] == 0
    assert run("train", "papers.ooc", *SIZES, "--out", "run")[0] == 0
    assert run("predict", "run", "--nodes", "wanted.txt", "--what", "logits", "--out", "some.csv")[0] == 0
    with Path("some.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["node"] for row in rows] == wanted
    assert list(rows[0]) == ["node", *(f"logit_{name}" for name in own_data.FIELDS)]


def test_nodes_are_asked_for_by_numbers_below_zero(run: RunCommand, here: Path) -> None:
    names = [-5, 2**62, 7, -(2**63), 0, 12]
    Path("nodes.csv").write_text("id,a,y\n" + "".join(f"{name},{at},{at % 2}\n" for at, name in enumerate(names)))
    Path("edges.csv").write_text("src,dst\n" + "".join(f"{name},{names[at - 1]}\n" for at, name in enumerate(names)))
    Path("wanted.txt").write_text(f"{-(2**63)}\n{2**62}\n-5")
    assert run("convert", here, "g.ooc", "--split", "random")[0] == 0
    assert run("train", "g.ooc", *SIZES, "--out", "run")[0] == 0
    assert run("predict", "run", "--nodes", "wanted.txt", "--out", "some.csv")[0] == 0
    with Path("some.csv").open() as file:
        assert [int(row["node"]) for row in csv.DictReader(file)] == [-(2**63), 2**62, -5]
