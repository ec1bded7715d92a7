# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/, run on stand-ins for the reader's data, for an epoch."""

import csv
import gzip
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from torch.distributed.launcher import api

import ooc
from examples import own_data
from ooc import cli
from tests.docs.test_pages import DOCS_COMMANDS
from tests.sources.fixtures import FIXTURES, random_graph

NODES, EDGES = 120, 600
DOWNLOADED = {"ogbn-papers100M", "igb-medium", "mag240m_kddcup2021"}
PLANNED_FOR_LONG = {"papers100M", "igb260m"}
"""About ten seconds each; ``tests/plan/test_large_graphs.py`` plans such."""
SMALLER = {
    "nodes=50M,edges=800M": "nodes=50K,edges=800K",
    "nodes=100000,edges=800000": "nodes=1000,edges=8000",
    "nodes=8000,edges=40000": "nodes=800,edges=4000",
    "graphs=5000": "graphs=150",
    "--ranks 4": "--ranks 2",
}
MEASURING = {"profile"}
"""Takes its time: ``tests/profile`` measures."""
STAND_INS = {"mydata": "csv", "cora": "planetoid", "cnr-2000": "webgraph", "minesweeper.npz": "heterophilous"}
MADE_FIRST = {"synthetic:nodes=300,edges=2000,features=8,classes=4": ("my.ooc", "other.ooc", "papers.ooc")}


def _runs(words: list[str]) -> bool:
    return words[1] not in MEASURING and not (DOWNLOADED | PLANNED_FOR_LONG) & {*words}


RUN = [words for words in DOCS_COMMANDS if _runs(words)]


def _smaller(words: list[str]) -> list[str]:
    text = shlex.join(words)
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return shlex.split(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A current folder with all that the commands name."""
    folder, before = tmp_path_factory.mktemp("docs"), Path.cwd()
    rng = np.random.default_rng(0)
    ends = rng.integers(0, NODES, (EDGES, 2))
    features, labels = rng.standard_normal((NODES, 6)).astype(np.float32), rng.integers(0, 3, NODES)
    os.chdir(folder)
    for spec, stores in MADE_FIRST.items():
        for store in stores:
            ooc.convert(spec, store)
    np.save("x.npy", features)
    np.save("y.npy", labels)
    with gzip.open("links.csv.gz", "wt") as file:
        csv.writer(file).writerows([("src", "dst"), *ends.tolist()])
    for name in "web-Google.txt.gz", "com-friendster.ungraph.txt.gz":
        with gzip.open(name, "wt") as file:
            file.writelines(f"{a}\t{b}\n" for a, b in ends.tolist())
    pyarrow.parquet.write_table(pa.table({"src": ends[:, 0], "dst": ends[:, 1]}), "links.parquet")
    with Path("people.csv").open("w") as file:
        split = rng.choice(["train", "valid", "test"], NODES)
        people = zip(range(NODES), labels.tolist(), split, *features.T.tolist(), strict=True)
        csv.writer(file).writerows([("who", "job", "split", *(f"x{k}" for k in range(6))), *people])
    Path("net.py").write_text(
        "from torch_geometric.nn.models import GCN\n\n"
        "def Net(in_channels, out_channels, hidden_channels):\n"
        "    return GCN(in_channels, hidden_channels, 2, out_channels)\n"
    )
    Path("wanted.txt").write_text("5\n3\n17\n")
    graph = random_graph(rng, nodes=NODES, edges=EDGES, labelled=0.8)
    graph = replace(graph, y=np.where(graph.y < 0, -1, graph.y % 2))
    for name, fixture in STAND_INS.items():
        made_in = tmp_path_factory.mktemp(fixture)
        source = FIXTURES[fixture](graph, made_in, rng).source
        if source.is_dir():
            shutil.copytree(source, name)
        elif (source.parent / "labels.npy").exists():  # a file with others beside it
            shutil.copytree(source.parent, name)
        else:
            shutil.copy(source, name)
    own_data.make_tables(folder, NODES)
    for run in "big", "my-gcn-1", "papers-gcn-1":
        assert cli.main(["train", "my.ooc", "--model", "sage", "--epochs", "2", "--out", f"runs/{run}"]) == 0
    assert cli.main(["train", "my.ooc", "--model", "net.py:Net", "--epochs", "1", "--out", "runs/my-Net-1"]) == 0
    yield folder
    os.chdir(before)


def _forked(*command: str) -> None:
    """What a process of --nproc is told to run, by one that has imported already what it wants."""
    assert command[:2] == ("-m", "ooc")
    sys.exit(cli.main(command[2:]))


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_it_runs(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = api.elastic_launch
    monkeypatch.setattr(api, "elastic_launch", lambda config, _: launch(replace(config, start_method="fork"), _forked))
    arguments = _smaller(words[1:])
    if "--epochs" in arguments:
        arguments[arguments.index("--epochs") + 1] = "1"
    elif arguments[0] == "train":
        arguments += ["--epochs", "3" if "--resume" in arguments else "1"]
    if arguments[0] == "convert":  # two pages name a store alike
        arguments.append("--force")
    else:
        made = [one for one in RUN if one[1] == "convert" and {*one[3:4]} & {*arguments} and not Path(one[3]).exists()]
        for one in made:  # which another process may have been given
            assert cli.main(_smaller(one[1:])) == 0
    for run in ("full", "sampled") if arguments[0] == "report" else ():  # likewise
        if run in arguments and not Path(run).exists():
            assert cli.main(["train", "my.ooc", "--epochs", "1", "--out", run]) == 0
    if arguments[0] == "export":
        Path(arguments[-1]).unlink(missing_ok=True)
    assert cli.main(arguments) == 0


def test_most_of_them_are() -> None:
    assert len(RUN) >= len(DOCS_COMMANDS) - 10
