# SPDX-License-Identifier: Apache-2.0
"""Predictions are PyG's in eval mode, by the user's node ids, whatever the budgets and the order of the rows."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data

import ooc
from ooc.errors import BudgetError, ModelError, OocError, OptionError
from ooc.plan import ColumnPass
from ooc.storage.store import Store
from ooc.train import rows_file
from ooc.train.prediction import Prediction
from ooc.train.resources import Resources
from tests.exactness.comparison import make_trainer, store_of, tuned_trainer
from tests.exactness.reference import ModelCase
from tests.examples import examples, thorough
from tests.graphs import GraphCase, random_data
from tests.train.labelled import labelled, random_labels, random_values

DATA = random_data(GraphCase(nodes=300, edges=700, self_loops=9, isolated=20, unlabelled=200))
CASE = ModelCase(kind="sage", layers=3, hidden=8, dropout=0.4)


def predicting(model: torch.nn.Module, store: Store, gpu: str = "8M", host: str = "8M", **options: Any) -> Prediction:
    """A prediction within these budgets."""
    asked = {name: options.pop(name) for name in ("what", "layer", "nodes") if name in options}
    return Prediction(model, store, Resources.parse(gpu, host, **options), **asked)


@torch.no_grad()
def by_pyg(model: torch.nn.Module, data: Data = DATA) -> Tensor:
    model.eval()
    outputs: Tensor = model(data.x, data.edge_index)
    model.train()
    return outputs


@torch.no_grad()
def hidden_by_pyg(model: Any, layer: int) -> Tensor:
    """What a hidden layer of PyG's model leaves to the next."""
    h: Tensor = DATA.x
    for conv in model.convs[:layer]:
        h = model.act(conv(h, DATA.edge_index))
    return h


@pytest.fixture(params=thorough(["as it is", "in hop order"], "as it is"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """The graph with its rows as they came, or somewhere else."""
    if request.param == "as it is":
        return store_of(DATA, tmp_path)
    store = ooc.convert(DATA, tmp_path / "graph.ooc", dtype="float64", order="hop")
    assert not np.array_equal(store.array("perm").read(), np.arange(store.num_nodes))
    return store


def test_logits_labels_and_embeddings(store: Store, tmp_path: Path) -> None:
    """Of a trainer's model as it is; training goes on after it."""
    with make_trainer(CASE, store, tmp_path) as trainer:
        trainer.fit(2, eval_every=0)
        expected = by_pyg(trainer.model)
        logits = trainer.predict()
        assert torch.allclose(logits, expected, rtol=1e-9)
        assert torch.equal(trainer.predict("labels"), logits.argmax(dim=1))
        for layer in (1, 2):
            found = trainer.predict("embeddings", layer=layer)
            assert torch.allclose(found, hidden_by_pyg(trainer.model, layer), rtol=1e-9, atol=1e-12)
        assert torch.equal(trainer.predict("embeddings"), found)
        again = trainer.fit(1, eval_every=0)
    with make_trainer(CASE, store, tmp_path) as other:
        assert [r.loss for r in other.fit(3, eval_every=0)][2:] == [r.loss for r in again]


def test_predictions_agree_with_the_scores(store: Store, tmp_path: Path) -> None:
    """An accuracy recomputed from predicted labels is the one that evaluation gives."""
    with make_trainer(CASE, store, tmp_path) as trainer:
        trainer.fit(3, eval_every=0)
        scores, labels = trainer.evaluate(), trainer.predict("labels")
    right = (labels == DATA.y).double()
    assert scores["valid_score"] == pytest.approx(float(right[DATA.val_mask].mean()), rel=1e-12)


@settings(max_examples=examples(5), deadline=None)
@given(
    kind=st.sampled_from(["gcn", "sage"]),
    layers=st.integers(1, 3),
    nodes=st.lists(st.integers(0, 299), min_size=1, max_size=20, unique=True),
    slabs=st.sampled_from([None, 2]),
    hop_order=st.booleans(),
)
def test_only_some_nodes(
    kind: str,
    layers: int,
    nodes: list[int],
    slabs: int | None,
    hop_order: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In the order in which they are given, whatever the rows they lie in."""
    folder = tmp_path_factory.mktemp("case")
    store = ooc.convert(DATA, folder / "graph.ooc", dtype="float64", order="hop" if hop_order else "none")
    case = ModelCase(kind=kind, layers=layers)
    model = case.build(store.num_features, store.num_classes)
    prediction = predicting(
        model, store, "8M", "8M", nodes=nodes, slab_columns=slabs, tile_rows=8, spill_dir=folder, threads=1
    )
    assert torch.allclose(prediction.read(), by_pyg(model)[nodes], rtol=1e-9, atol=1e-12)
    prediction.close()


def test_only_what_reaches_the_nodes_is_computed(tmp_path: Path) -> None:
    """In hop order, for nodes that come first there, a layer computes a few rows."""
    graph = random_data(GraphCase(nodes=2000, edges=3000, unlabelled=1990))
    store = ooc.convert(graph, tmp_path / "graph.ooc", dtype="float64", order="hop")
    model = CASE.build(store.num_features, store.num_classes)
    first = store.array("perm").read(0, 3)
    prediction = predicting(model, store, "8M", "8M", nodes=first, tile_rows=8, spill_dir=tmp_path)
    passes = prediction._session._prepared.plan.programs["train"]
    rows = [item.rows if isinstance(item, ColumnPass) else item.stage.rows for item in passes]
    assert rows[-1] == 8 and max(rows) < 400
    assert torch.allclose(prediction.read(), by_pyg(model, graph)[first], rtol=1e-9)
    prediction.close()


@pytest.mark.parametrize("budgets", [("64M", "64M"), ("200K", "20K")])
def test_budgets_change_nothing(store: Store, tmp_path: Path, budgets: tuple[str, str]) -> None:
    """Least memory and plenty: the same bits, and peaks within the plan."""
    model = CASE.build(store.num_features, store.num_classes)
    with_plenty = predicting(model, store, "64M", "64M", tile_rows=8, spill_dir=tmp_path, threads=1)
    tight = predicting(model, store, *budgets, tile_rows=8, block_rows=16, slab_columns=3, spill_dir=tmp_path)
    assert torch.equal(with_plenty.read(), tight.read())
    with_plenty.close()
    tight.close()


def read_back(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """The table in a file, and the ids if it has them."""
    match path.suffix:
        case ".npy":
            return np.load(path, allow_pickle=False), None
        case ".zarr":
            return np.asarray(zarr.open_array(path, mode="r")[:]), None
        case ".csv":
            header, *lines = path.read_text().splitlines()
            assert header.startswith("node,")
            table = np.array([[float(cell) for cell in line.split(",")] for line in lines])
        case _:
            read: Any = pyarrow.parquet.read_table(path)
            assert read.column_names[0] == "node"
            table = np.stack([column.to_numpy().astype(float) for column in read.columns], axis=1)
    return table[:, 1:], table[:, 0].astype(int)


@pytest.mark.parametrize("nodes", [None, [250, 3, 17]], ids=["all", "some"])
@pytest.mark.parametrize("what", ["logits", "labels"])
def test_files(store: Store, tmp_path: Path, nodes: list[int] | None, what: str) -> None:
    """Every digit is there, ids go with the rows, and nothing else stays behind."""
    folder = tmp_path / "out"
    folder.mkdir()
    with make_trainer(CASE, store, tmp_path) as trainer:
        expected = trainer.predict(what, nodes=nodes).numpy()
        for target in (folder / f"out{ending}" for ending in (".npy", ".zarr", ".csv", ".parquet")):
            trainer.predict(what, nodes=nodes, out=target)
            table, ids = read_back(target)
            assert np.array_equal(table.reshape(expected.shape), expected)
            assert ids is None or ids.tolist() == (nodes or list(range(300)))
    assert len(list(folder.iterdir())) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.ooc", "out", "spill"]


def test_a_file_that_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    target = tmp_path / "out.npy"
    with make_trainer(CASE, store_of(DATA, tmp_path), tmp_path) as trainer:
        trainer.predict("labels", nodes=[3], out=target)
        with pytest.raises(OptionError, match="exists"):
            trainer.predict(out=target)
        trainer.predict("logits", nodes=[3], out=target, force=True)
    assert np.load(target).shape == (1, DATA.y.max() + 1)


@pytest.mark.parametrize("order", ["none", "hop"])
@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_ids_are_those_of_the_source(tmp_path: Path, order: str, ending: str) -> None:
    """In files, in what is asked for, and in ``store.ids``, whatever the order of rows; row numbers are none."""
    rng = np.random.default_rng(0)
    called = rng.choice(10**12, 300, replace=False) + 300
    edges = called[DATA.edge_index.numpy()]
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "edges.csv").write_text("source,target\n" + "".join(f"{a},{b}\n" for a, b in edges.T.tolist()))
    rows = zip(called.tolist(), DATA.y.tolist(), rng.standard_normal(300).tolist(), strict=True)
    lines = [f"{node},{max(0, y)},{x},train\n" for node, y, x in rows]
    (folder / "nodes.csv").write_text("node,label,x,split\n" + "".join(lines))
    store = ooc.convert(folder, tmp_path / "tables.ooc", order=order)
    assert store.ids is not None and store.ids.tolist() == called.tolist()
    model = ModelCase(kind="gcn", layers=2).build(store.num_features, store.num_classes, dtype=torch.float32)
    options: dict[str, Any] = {"spill_dir": tmp_path, "tile_rows": 8, "threads": 1}
    with tuned_trainer(model, store, gpu_budget="8M", host_budget="8M", **options) as trainer:
        logits = trainer.predict()
        trainer.predict(out=tmp_path / f"all{ending}")
        wanted = called[[250, 3, 17]]
        some = trainer.predict(nodes=wanted)
        trainer.predict(nodes=wanted, out=tmp_path / f"some{ending}")
        with pytest.raises(OptionError, match=r"there is no node 3; .* has 300 nodes, by their ids in its source"):
            trainer.predict(nodes=[3])
    assert logits is not None and some is not None and torch.allclose(some, logits[[250, 3, 17]], rtol=1e-5, atol=1e-6)
    for name, expected, ids in (("all", logits, called), ("some", some, wanted)):
        table, found = read_back(tmp_path / f"{name}{ending}")
        assert found is not None and found.tolist() == ids.tolist()
        np.testing.assert_array_equal(table.astype(np.float32), expected.numpy())


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_nodes_and_classes_go_by_their_names(tmp_path: Path, ending: str) -> None:
    names = np.array(['a "b", c', "d", "ë"])
    called = np.array([f"{'long ' * (k % 4)}nöde, {k}" for k in range(300)], dtype=object)
    rows = {"id": called, "x": np.linspace(0, 1, 300), "label": names[np.arange(300) % 3]}
    (folder := tmp_path / "tables").mkdir()
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "nodes.parquet")
    edges = dict(zip(("src", "dst"), called[DATA.edge_index.numpy()], strict=True))
    pyarrow.parquet.write_table(pyarrow.table(edges), folder / "edges.parquet")
    store = ooc.convert(folder, tmp_path / "tables.ooc", order="hop")
    model = ModelCase(kind="gcn", layers=2).build(store.num_features, store.num_classes, dtype=torch.float32)
    options: dict[str, Any] = {"spill_dir": tmp_path, "tile_rows": 8, "threads": 1}
    with tuned_trainer(model, store, gpu_budget="8M", host_budget="8M", **options) as trainer:
        wanted = called[[250, 3, 17]]
        trainer.predict("labels", nodes=wanted, out=tmp_path / f"some{ending}")
        for absent, said in (
            ("nöde", "there is no node nöde; .* by their ids"),
            ("x" * 99, "no node x+: ids in .* are s"),
        ):
            with pytest.raises(OptionError, match=said):
                trainer.predict(nodes=[absent])
        with pytest.raises(OptionError, match="node ids, which are texts in this store, not int64"):
            trainer.predict(nodes=[3])
        labels = trainer.predict("labels")
        for what in ("labels", "logits"):
            trainer.predict(what, out=tmp_path / f"{what}{ending}")
    assert labels is not None and store.class_names == tuple(names)
    read: Any = pyarrow.csv.read_csv if ending == ".csv" else pyarrow.parquet.read_table
    assert read(tmp_path / f"labels{ending}")["label"].to_pylist() == names[labels.numpy()].tolist()
    assert read(tmp_path / f"labels{ending}")["node"].to_pylist() == called.tolist()
    assert read(tmp_path / f"some{ending}")["node"].to_pylist() == wanted.tolist()
    assert read(tmp_path / f"logits{ending}").column_names == ["node", *(f"logit_{name}" for name in names)]


def test_without_ids_of_its_own_a_source_has_none(store: Store) -> None:
    assert store.ids is None


@pytest.mark.parametrize("ending", [".npy", ".zarr", ".csv", ".parquet"])
def test_a_failure_leaves_nothing(store: Store, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a disk that fills up while rows come, nor one that does when the table is whole; an old file stays."""
    target = tmp_path / f"out{ending}"
    target.write_text("old")
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    (tmp_path / "spill").mkdir(exist_ok=True)
    model = CASE.build(store.num_features, store.num_classes)
    for where, name in (os, "pwrite"), (rows_file, "flush_all"):
        prediction = predicting(model, store, "8M", "8M", tile_rows=8, spill_dir=tmp_path / "spill")
        with monkeypatch.context() as patch:
            patch.setattr(where, name, full)
            with pytest.raises((OSError, OocError)):
                prediction.write(target, force=True)
        prediction.close()
    (tmp_path / "spill").rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert target.read_text() == "old"


def test_several_labels_and_values(tmp_path: Path) -> None:
    """Yes or no for each label; values are logits, and have no labels."""
    case = ModelCase(kind="gcn", layers=2)
    store = labelled(DATA, random_labels(DATA, 3), tmp_path)
    with make_trainer(case, store, tmp_path) as trainer:
        found = trainer.predict("labels")
        assert found.dtype is torch.int8
        assert torch.equal(found, (by_pyg(trainer.model) > 0).to(torch.int8))
    store = labelled(DATA, random_values(DATA, 3), tmp_path)
    with make_trainer(case, store, tmp_path) as trainer, pytest.raises(OptionError, match="predict logits"):
        trainer.predict("labels")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"what": "colours"}, "what 'colours' is not one of logits, labels, embeddings"),
        ({"what": "embeddings", "layer": 3}, "layer 3 is no hidden layer; the model has 1 to 2"),
        ({"what": "logits", "layer": 1}, "for embeddings only"),
        ({"nodes": [1, 300]}, "there is no node 300"),
        ({"nodes": [-1]}, "there is no node -1"),
        ({"nodes": [4, 2, 4]}, "node 4 is given twice"),
        ({"nodes": [0.5]}, "list of node ids"),
        ({"nodes": []}, "an empty list"),
        ({"gpu_budget": "1K"}, "give gpu_budget="),
        ({"host_budget": "1K"}, "give host_budget="),
        ({"host_budget": "10K", "nodes": [1]}, "finding what reaches 1 nodes"),
    ],
)
def test_what_cannot_be_predicted_is_refused(asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    """In one line that names it."""
    store = store_of(DATA, tmp_path)
    model = CASE.build(store.num_features, store.num_classes)
    options = dict(asked)
    budgets = [options.pop(name, "8M") for name in ("gpu_budget", "host_budget")]
    with pytest.raises((OptionError, BudgetError), match=said) as caught:
        predicting(model, store, *budgets, tile_rows=8, **options)
    assert "\n" not in str(caught.value)


def test_one_layer_has_no_embeddings(tmp_path: Path) -> None:
    """It has no hidden layer."""
    store = store_of(DATA, tmp_path)
    model = ModelCase(kind="gcn", layers=1).build(store.num_features, store.num_classes)
    with pytest.raises(ModelError, match="no hidden layer"):
        predicting(model, store, what="embeddings")


def test_only_arrays_are_replaced(tmp_path: Path) -> None:
    """A folder of something else is not removed, whatever its name; an old file or array is."""
    store = store_of(DATA, tmp_path)
    model = CASE.build(store.num_features, store.num_classes)
    prediction = predicting(model, store, "8M", "8M", tile_rows=8, spill_dir=tmp_path)
    for name in ("out.npy", "out.zarr"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("x")
        with pytest.raises(OptionError, match="is a folder, and no Zarr array"):
            prediction.write(tmp_path / name, force=True)
        assert (tmp_path / name / "thesis.tex").read_text() == "x"
    (tmp_path / "b.zarr").write_text("a file")
    for _ in range(2):
        prediction.write(tmp_path / "b.zarr", force=True)
        assert read_back(tmp_path / "b.zarr")[0].shape == (300, 4)
    prediction.close()


def test_places_that_cannot_be_written_are_refused(store: Store, tmp_path: Path) -> None:
    """Before anything is computed."""
    model = CASE.build(store.num_features, store.num_classes)
    prediction = predicting(model, store, "8M", "8M", tile_rows=8, spill_dir=tmp_path)
    for target, said in ((tmp_path / "out.txt", r"must end in one of \.npy"), (tmp_path / "no" / "o.npy", "folder")):
        with pytest.raises(OptionError, match=said):
            prediction.write(target)
    prediction.close()
