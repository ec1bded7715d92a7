# SPDX-License-Identifier: Apache-2.0
"""``--model FILE.py:NAME``: a model of the user's own, from the command line."""

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData

import ooc
from ooc import cli
from ooc.cli.arguments.recipe import build_model
from ooc.storage.store import Store
from tests.cli.conftest import RunCommand
from tests.cli.test_recipe import settings
from tests.cli.test_train import losses
from tests.graphs import GraphCase, many_graphs, random_data

NET = """
import warnings
from torch import nn
from torch_geometric.nn import ChebConv, GCNConv, SAGEConv
from widths import WIDTH


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, hidden_channels=WIDTH, dropout=0.5):
        super().__init__()
        self.first, self.last = SAGEConv(in_channels, hidden_channels), GCNConv(hidden_channels, out_channels)
        self.norm, self.dropout = nn.LayerNorm(hidden_channels), nn.Dropout(dropout)

    def forward(self, x, edge_index):
        h = self.dropout(self.norm(self.first(x, edge_index)).relu())
        return self.last(h, edge_index)


class Placed(Net):
    def forward(self, x, edge_index, pos):
        return super().forward(x + pos.mean(1, keepdim=True), edge_index)


def demanding(in_channels, depth):
    return Net(in_channels, depth)


def warning(in_channels, out_channels):
    for line in (1, 2):
        warnings.warn_explicit("the net  is untried", UserWarning, __file__, line)
    return Net(in_channels, out_channels)


def nothing():
    return None


def clumsy(in_channels):
    raise KeyError("width")


class Chebyshev(nn.Module):
    def __init__(self, in_channels, out_channels, hidden_channels=8):
        super().__init__()
        self.conv = ChebConv(in_channels, out_channels, 2)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class Told(nn.Module):
    def __init__(self, in_channels, out_channels, metadata=None, edge_dim=None, pool=None, paths=None, hops=None):
        super().__init__()
        self.told = in_channels, out_channels, metadata, edge_dim, pool, paths, hops
"""
SMALL = ("--hidden", "8", "--memory", "64M", "--quiet")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that imports what lies beside it."""
    folder = tmp_path_factory.mktemp("net")
    (folder / "widths.py").write_text("WIDTH = 16\n")
    (folder / "net.py").write_text(NET)
    return folder / "net.py"


@pytest.fixture(scope="module")
def trained(net: Path, graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    words = ["train", str(graph), "--model", f"{net}:Net", "--epochs", "2", "--out", str(folder), *SMALL]
    assert cli.main(words) == 0
    return folder


@pytest.mark.parametrize("model", ["gcn", "Placed"])
def test_in_channels_are_those_of_x_where_a_store_has_more(model: str, net: Path, tmp_path: Path) -> None:
    """Also where predictions are made of the run."""
    data = random_data(GraphCase(nodes=60, edges=200, features=5, classes=3), dtype=torch.float32)
    data.pos = torch.randn(60, 2)
    store, run = ooc.convert(data, tmp_path / "g.ooc", inputs=["pos"]), str(tmp_path / "run")
    own = ["--model", model if model == "gcn" else f"{net}:{model}"]
    assert cli.main(["train", str(store.path), *own, "--epochs", "1", "--out", run, *SMALL]) == 0
    own = [] if model == "gcn" else own
    assert cli.main(["predict", run, *own, "--out", str(tmp_path / "labels.npy")]) == 0


def test_it_is_trained_as_from_python(trained: Path, net: Path, graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(net.parent)
    spec = importlib.util.spec_from_file_location("as_imported", net)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    store = ooc.open(graph)
    torch.manual_seed(0)
    model = module.Net(store.num_features, store.num_classes, hidden_channels=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ooc.Trainer(model, store, memory="64M", optimizer=optimizer, device="cpu") as trainer:
        assert [record.loss for record in trainer.fit(epochs=2, progress=False)] == losses(trained)


def test_its_configuration_repeats_it(run: RunCommand, trained: Path, here: Path) -> None:
    code, _, err = run("train", "--config", trained / "config.toml", "--out", "again", "--quiet")
    assert code == 0, err
    assert losses(here / "again") == losses(trained)


def test_its_path_is_relative_to_the_file_that_names_it(net: Path) -> None:
    config = net.parent / "own.toml"
    config.write_text('[train]\nmodel = "net.py:Net"\n')
    params = cli.load_command("train").make_context("train", ["--config", str(config)]).params
    assert params["model"] == f"{net.resolve()}:Net"


def test_a_run_has_no_code_run_unless_it_is_named(run: RunCommand, trained: Path, net: Path, here: Path) -> None:
    code, _, err = run("predict", trained, "--out", "p.csv")
    assert code == 2 and f"if you trust it, give --model {net.resolve()}:Net" in err
    code, _, err = run("predict", trained, "--out", "p.csv", "--model", f"{net}:Net")
    assert code == 0, err
    assert len(list(csv.reader(Path("p.csv").read_text().splitlines()))) == 2501
    code, _, err = run("export", trained, "w.pt", "--model", f"{net}:Net")
    assert code == 0, err
    assert set(torch.load("w.pt")) >= {"first.lin_l.weight", "norm.weight"}
    code, out, _ = run("runs", trained.parent)
    assert " Net " in out
    code, _, err = run("predict", trained, "--out", "q.csv", "--model", "gcn")
    assert code == 2 and f"--model says where a model of your own is; {trained} has {net.resolve()}:Net\n" in err


def test_it_is_told_of_types_and_of_many_graphs(net: Path, tmp_path: Path) -> None:
    """Columns and features of edges by type; pooling, paths and hops."""
    data, writes, cites = HeteroData(), ("author", "writes", "paper"), ("paper", "cites", "paper")
    data["paper"].x, data["paper"].y, data["author"].x = torch.ones(4, 3), torch.tensor([0, 1, 0, 1]), torch.ones(2, 5)
    data[writes].edge_index, data[writes].edge_attr = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 7)
    data[cites].edge_index = torch.tensor([[0], [1]])
    typed = ooc.convert(data, tmp_path / "typed.ooc")
    many = ooc.convert(many_graphs(9, dtype=torch.float32), tmp_path / "many.ooc")

    def told(store: Store, **options: Any) -> Any:
        return build_model(settings(model=f"{net}:Told", **options), store).told

    kinds = ["author", "paper"], [writes, cites]
    columns, outputs, metadata, edge_dim, *_ = told(typed)
    assert (columns, outputs, edge_dim) == ({"paper": 3, "author": 5}, 2, {writes: 7})
    assert tuple(map(sorted, metadata)) == kinds
    assert told(many, pool="add", paths=2) == (3, 2, None, 2, "add", 2, 0)


def test_a_file_that_has_changed_is_refused(run: RunCommand, trained: Path, net: Path, here: Path) -> None:
    """Elsewhere it may lie."""
    shutil.copytree(trained, "run")
    moved = Path("net.py")
    moved.write_text(net.read_text() + "# changed\n")
    code, _, err = run("predict", "run", "--out", "p.npy", "--model", "net.py:Net")
    assert code == 2 and "net.py has changed since run was begun" in err
    shutil.copy(net.parent / "widths.py", "widths.py")
    shutil.copy(net, moved)
    code, _, err = run("predict", "run", "--out", "p.npy", "--model", "net.py:Net")
    assert code == 0, err
    config = json.loads(Path("run/config.json").read_text())
    Path("run/config.json").write_text(json.dumps(config | {"model": f"{moved.resolve()}:Net"}))
    moved.write_text(net.read_text() + "# changed\n")
    code, _, err = run("train", "--resume", "--out", "run", "--epochs", "3")
    assert code == 2 and "has changed since run was begun" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "net.py:Nett"), "nothing called Nett that makes a model; did you mean Net?"),
        (("--model", "nett.py:Net"), "No such file or directory; did you mean"),
        (("--model", "net.py:demanding"), "demanding wants depth; what it can be given are in_channels"),
        (("--model", "net.py:nothing"), "nothing makes a NoneType, not a torch.nn.Module"),
        (("--model", "net.py:clumsy"), "clumsy cannot be made: KeyError: 'width'"),
        (("--model", "broken.py:Net"), "broken.py cannot be run: ZeroDivisionError: division by zero"),
        (("--model", "net.py:Net", "--layers", "2"), "--layers says nothing to Net, a model of your own; let it take"),
        (("--model", "net.py:Net", "--norm", "batch"), "--norm says nothing to Net, a model of your own"),
        (("--model", "net.txt:Net"), "'net.txt:Net' is not one of 'gcn'"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    run: RunCommand, net: Path, graph: Path, here: Path, options: tuple[str, ...], message: str
) -> None:
    for name in ("net.py", "widths.py"):
        shutil.copy(net.parent / name, name)
    Path("broken.py").write_text("1 / 0\n")
    code, out, err = run(
        "train", graph, *(() if "--layers" in options else ("--hidden", "128")), *options, "--out", "r"
    )
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
    assert not Path("r").exists()


def test_a_warning_is_a_line_once(run: RunCommand, net: Path, graph: Path, here: Path) -> None:
    """Without the place in the code. What is printed of such a model has none of the layers that ooc's own have."""
    code, out, err = run("train", graph, "--model", f"{net}:warning", "--memory", "64M", "--epochs", "1", "--out", "r")
    assert code == 0 and err.count("untried") == err.count("ooc: warning: the net is untried\n") == 1
    assert "model     warning: " in out and "wide" not in out


def test_it_is_planned_for(run: RunCommand, net: Path, graph: Path) -> None:
    code, out, err = run("plan", graph, "--model", f"{net}:Net", "--hidden", "8", "--no-advice", "--json")
    assert code == 0, err
    assert json.loads(out)["epoch_s"] > 0


def test_advice_leaves_out_what_a_model_has_not(run: RunCommand, net: Path, tmp_path: Path) -> None:
    """Spills in a narrower type, of attention, and of ChebConv where there are self-loops."""
    store = ooc.convert(random_data(GraphCase(self_loops=9), dtype=torch.float32), tmp_path / "g.ooc").path
    for model in ("gat", f"{net}:Chebyshev"):
        code, out, err = run("plan", store, "--model", model, "--hidden", "8", "--memory", "64M", "--json")
        assert code == 0, err
        planned = json.loads(out)
        assert [change["name"] for change in planned["changes"]] == ["twice the memory", "a disk twice as fast"]
        assert not planned["spills_rounded"]
    code, _, err = run("plan", store, "--model", f"{net}:Chebyshev", "--spill-dtype", "bfloat16")
    assert code == 2 and "keeps intermediates in its own type; leave out the spill dtype\n" in err
