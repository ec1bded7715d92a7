# SPDX-License-Identifier: Apache-2.0
"""``ooc predict`` and ``ooc export``: what a run has learned, for use elsewhere."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn.models import GCN

from ooc import cli
from ooc.storage.store import open_store
from tests.cli.conftest import RunCommand
from tests.examples import ordinary

OPTIONS = ["--hidden", "16", "--layers", "2", "--gpu-budget", "32M", "--host-budget", "32M", "--quiet"]


@pytest.fixture(scope="module")
def learnt(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few epochs, the best of which is not the last."""
    out = tmp_path_factory.mktemp("learnt") / "r"
    assert cli.main(["train", str(graph), *OPTIONS, "--epochs", "12", "--lr", "0.1", "--out", str(out)]) == 0
    assert torch.load(out / "best.pt")["epoch"] < 12
    return out


@pytest.fixture
def trained(learnt: Path, here: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(learnt, here / "r"))


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """By the format's description: length, header, bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    dtypes = {"F32": torch.float32, "I64": torch.int64}
    assert (8 + length) % 8 == 0
    state = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = bytearray(data[8 + length + first : 8 + length + last])
        state[name] = torch.frombuffer(raw, dtype=dtypes[entry["dtype"]]).reshape(entry["shape"])
    assert 8 + length + max(e["data_offsets"][1] for e in header.values()) == len(data)
    return state, metadata


def load(path: Path) -> dict[str, torch.Tensor]:
    """Exported weights, as plain torch code would read them."""
    if path.suffix == ".pt":
        state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return state
    state, metadata = read_safetensors(path)
    assert json.loads(metadata["ooc"])["hidden"] == 16 and metadata["format"] == "pt"
    return state


@torch.no_grad()
def by_pyg(state: dict[str, torch.Tensor], graph: Path) -> torch.Tensor:
    """Logits of PyG's model with these weights on the store's graph."""
    store = open_store(graph)
    model = GCN(store.num_features, 16, 2, store.num_classes).eval()
    model.load_state_dict(state)
    indptr, indices = (torch.from_numpy(array.read().astype(np.int64)) for array in store.topology("in"))
    targets = torch.repeat_interleave(torch.arange(store.num_nodes), indptr.diff())
    outputs: torch.Tensor = model(torch.from_numpy(store.array("x").read()), torch.stack([indices, targets]))
    return outputs


@pytest.mark.parametrize(
    ("weights", "ending"),
    ordinary(product(("best", "last"), (".pt", ".safetensors")), ("best", ".safetensors"), ("last", ".pt")),
)
def test_exported_weights_give_the_predicted_logits(
    run: RunCommand, graph: Path, trained: Path, here: Path, ending: str, weights: str
) -> None:
    """In plain PyG, under its own names."""
    exported, predicted = here / f"model{ending}", here / "logits.npy"
    code, out, err = run("export", trained, exported, "--weights", weights)
    assert code == 0 and err == "" and "4 tensors" in out
    assert run("predict", trained, "--what", "logits", "--weights", weights, "--out", predicted)[0] == 0
    assert np.allclose(np.load(predicted), by_pyg(load(exported), graph), rtol=1e-4, atol=1e-5)
    state = torch.load(trained / {"best": "best.pt", "last": "checkpoint.pt"}[weights])["model"]
    assert all(torch.equal(load(exported)[name], tensor) for name, tensor in state.items())


def test_predictions_of_some_nodes(run: RunCommand, trained: Path, here: Path) -> None:
    """Listed as text or as an array; by default it is labels."""
    code, out, err = run("predict", trained, "--out", "all.csv", "--gpu-budget", "3M")
    assert (code, err, out) == (0, "", "all.csv: labels of 2.50k nodes\n")
    whole = dict(line.split(",") for line in (here / "all.csv").read_text().splitlines()[1:])
    (here / "nodes.txt").write_bytes("\ufeff2400\r\n7\r\n 93 \r\n\r\n".encode())  # as Windows writes it
    np.save(here / "nodes.npy", np.array([2400, 7, 93], dtype=np.uint16))
    for nodes in ("nodes.txt", "nodes.npy"):
        assert run("predict", trained, "--nodes", nodes, "--out", "some.csv", "--force", "--quiet") == (0, "", "")
        lines = (here / "some.csv").read_text().splitlines()
        assert lines == ["node,label", *(f"{node},{whole[node]}" for node in ("2400", "7", "93"))]
    assert sorted(path.name for path in here.iterdir()) == ["all.csv", "nodes.npy", "nodes.txt", "r", "some.csv"]
    (here / "nodes.txt").write_text("")
    code, out, err = run("predict", trained, "--nodes", "nodes.txt", "--out", "none.csv")
    assert (code, out, err.count("\n")) == (2, "", 1) and "nodes is an empty list" in err


def test_another_store_of_the_same_kind(run: RunCommand, trained: Path, here: Path) -> None:
    """The model is the run's, whatever graph it is used on; one of other features is refused."""
    source = "synthetic:nodes=1000,edges=3000,features={},classes=2,seed=9"
    assert run("convert", source.format(12), "b.ooc", "--quiet")[0] == 0
    code, out, _ = run("predict", trained, "b.ooc", "--what", "embeddings", "--out", "b.npy")
    assert (code, out) == (0, "b.npy: embeddings of 1.00k nodes, 16 columns\n")
    assert np.load(here / "b.npy").shape == (1000, 16)
    assert run("convert", source.format(5), "c.ooc", "--quiet")[0] == 0
    code, _, err = run("predict", trained, "c.ooc", "--out", "c.npy")
    assert code == 2 and "12 features, the store has 5" in err
    assert not (here / "c.npy").exists()


def test_another_store_in_the_place_of_the_runs_own_has_to_be_named(run: RunCommand, here: Path) -> None:
    """It would be taken for that which the run was trained on."""
    source = "synthetic:nodes=300,edges=900,features=4,classes=2,seed={}"
    assert run("convert", source.format(1), "g.ooc", "--quiet")[0] == 0
    assert run("train", "g.ooc", *OPTIONS, "--epochs", "1", "--out", "r")[0] == 0
    assert run("convert", source.format(2), "g.ooc", "--quiet", "--force")[0] == 0
    code, _, err = run("predict", "r", "--out", "o.npy")
    assert code == 2 and "r was trained on another store than" in err
    assert run("predict", "r", "g.ooc", "--out", "o.npy")[0] == 0


def test_averaged_weights_are_what_is_exported(run: RunCommand, graph: Path, here: Path) -> None:
    """Last ones too: the average, not the model that is still being trained."""
    assert run("train", graph, *OPTIONS, "--epochs", "3", "--average", "swa", "--out", "r")[0] == 0
    checkpoint = torch.load(here / "r" / "checkpoint.pt")
    assert run("export", "r", "last.pt", "--weights", "last")[0] == 0
    last = load(here / "last.pt")
    assert int(checkpoint["average"]["n_averaged"]) == 3
    assert all(torch.equal(tensor, checkpoint["average"][f"module.{name}"]) for name, tensor in last.items())
    assert not any(torch.equal(last[name], tensor) for name, tensor in checkpoint["model"].items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "nowhere", "--out", "o.npy"], "no run at nowhere"),
        (["predict", "nowhere"], "no run at nowhere"),
        (["predict", "r", "--out", "o.txt"], r"o\.txt must end in one of \.npy, \.zarr, \.parquet, \.csv"),
        (["predict", "r", "--out", "no/o.npy"], "the folder of no/o.npy does not exist"),
        (["predict", "r", "--out", "o.npy", "--nodes", "none.txt"], r"none\.txt: No such file"),
        (["predict", "r", "--out", "o.npy", "--nodes", "bad.txt"], "line 2: 'x' is no node id"),
        (["predict", "r", "--out", "o.npy", "--nodes", "junk.npy"], r"junk\.npy cannot be read: it is no whole"),
        (["predict", "r", "--out", "o.npy", "--nodes", "bad.npy"], r"bad\.npy holds float64\[2\], not a list"),
        (["predict", "r", "--out", "o.npy", "--nodes", "far.txt"], "there is no node 2500; .* has nodes 0 to 2499"),
        (
            ["predict", "r", "--out", "o.npy", "--nodes", "far.txt", "--memory", "10K"],
            r"finding what reaches 1 nodes needs .* of memory; it may take 10\.0 KB; give --memory \d+K",
        ),
        (
            ["predict", "r", "--out", "o.npy", "--type", "a"],
            "a type of nodes is chosen for their embedding, of a graph",
        ),
        (
            ["predict", "r", "--out", "o.npy", "--what", "scores", "--pairs", "pairs.npy"],
            "pairs are scored by an ooc.LinkPredictor, not by ",
        ),
        (["predict", "r", "--out", "o.npy", "--layer", "1"], "a layer is chosen for embeddings only"),
        (["predict", "r", "--out", "o.npy", "--what", "embeddings", "--layer", "2"], "layer 2 is no hidden layer"),
        (["predict", "r", "--out", "o.npy", "--gpu-budget", "10K"], r"give --gpu-budget \d+"),
        (["export", "r", "model.onnx"], r"model\.onnx must end in \.safetensors or \.pt"),
        (["export", "r", "bad.pt"], "exists; give another file, or --force"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    run: RunCommand, trained: Path, here: Path, arguments: list[str], message: str
) -> None:
    """And leaves nothing behind."""
    (here / "junk.npy").write_bytes(b"hello")
    (here / "bad.txt").write_text("3\nx\n")
    (here / "bad.pt").write_text("")
    (here / "far.txt").write_text("2500\n")
    np.save(here / "bad.npy", np.array([1.0, 2.0]))
    np.save(here / "pairs.npy", np.array([[1], [2]]))
    before = sorted(here.rglob("*"))
    code, _, err = run(*arguments)
    assert code == 2 and err.startswith("ooc: error: ") and err.count("\n") == 1
    assert re.search(message, err), err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"num_features": None}, "r says of its store that it had [None, 2, 0, 0] features, classes, edge_features"),
        ({"node_types": {"a": 1}}, "r says of its store types of nodes and edges that are none"),
        (None, "r does not say how many features and classes its store had"),
    ],
)
def test_a_run_that_tells_nothing_of_its_store_has_no_model(
    facts: dict[str, Any] | None, message: str, run: RunCommand, trained: Path
) -> None:
    config = json.loads((trained / "config.json").read_text())
    config["store_facts"] = None if facts is None else config["store_facts"] | facts
    (trained / "config.json").write_text(json.dumps(config))
    code, _, err = run("export", trained, "m.pt")
    assert code == 2 and message in err and err.count("\n") == 1
    code, _, err = run("export", trained, "m.pt", "--model", "gcn.py:Net")
    assert code == 2 and f"--model says where a model of your own is; {trained} has gcn\n" in err


def test_a_run_without_an_epoch_has_no_weights(run: RunCommand, trained: Path, here: Path) -> None:
    """Its folder may be there all the same."""
    for name in ("best.pt", "checkpoint.pt"):
        (trained / name).unlink()
    code, _, err = run("export", trained, "m.pt")
    assert code == 2 and "has no weights yet" in err


def test_weights_of_another_run_are_neither_exported_nor_used(
    run: RunCommand, trained: Path, graph: Path, here: Path
) -> None:
    small = ["--layers", "2", "--hidden", "4", "--gpu-budget", "32M", "--host-budget", "32M", "--epochs", "1"]
    assert run("train", graph, *small, "--out", "other", "--quiet")[0] == 0
    (here / "other" / "best.pt").replace(trained / "best.pt")
    for command in (["export", trained, "m.pt"], ["predict", trained, "--out", "p.npy"]):
        code, _, err = run(*command)
        assert code == 2 and "are not of the model that its configuration describes" in err and err.count("\n") == 1
    assert not (here / "m.pt").exists() and not (here / "p.npy").exists()
