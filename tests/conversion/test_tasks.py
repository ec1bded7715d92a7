# SPDX-License-Identifier: Apache-2.0
"""Labels of several questions, and values: stored, ordered, verified; refused if they are neither, or to train on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.conversion.reorder import reorder
from ooc.errors import SourceError, StoreError
from ooc.storage.array import CHECKSUM_FILE
from ooc.storage.store import Task
from ooc.storage.verification import verify
from tests.conversion.arrays import Arrays, random_arrays

_NODES = 60


def _labelled(y: Any) -> Arrays:
    arrays = random_arrays(nodes=_NODES)
    del arrays["num_classes"]
    return {**arrays, "y": np.asarray(y)}


def _cases() -> dict[Task, Arrays]:
    rng = np.random.default_rng(3)
    answers = rng.integers(0, 2, (_NODES, 5))
    values = rng.standard_normal((_NODES, 2)).astype(np.float32)
    cases = {Task.MULTILABEL: _labelled(answers.astype(np.int8)), Task.VALUES: _labelled(values)}
    for task, arrays in cases.items():
        arrays["test_mask"][:] = False  # So that there may be nodes without a label.
        arrays["y"][~(arrays["train_mask"] | arrays["val_mask"])] = -1 if task is Task.MULTILABEL else np.nan
    return cases


@pytest.mark.parametrize("task", [Task.MULTILABEL, Task.VALUES])
def test_they_are_stored_and_keep_to_their_nodes_in_any_order(tmp_path: Path, task: Task) -> None:
    arrays = _cases()[task]
    store = ooc.convert(arrays, tmp_path / "g.ooc", task=task.value)
    assert (store.task, store.num_classes) == (task, arrays["y"].shape[1])
    assert store.array("y").dtype == task.dtype("float32")
    np.testing.assert_array_equal(store.array("y").read(), arrays["y"])
    assert verify(store) == []
    ordered = reorder(store, tmp_path / "h.ooc")
    np.testing.assert_array_equal(ordered.array("y").read(), arrays["y"][ordered.array("perm").read()])
    assert (ordered.task, verify(ordered)) == (task, [])


def test_values_keep_the_type_of_the_features(tmp_path: Path) -> None:
    """What a model in float64 is trained to is what it was trained to in PyG."""
    y = np.random.default_rng(3).standard_normal((_NODES, 2))
    store = ooc.convert(_labelled(y), tmp_path / "g.ooc", dtype="float64")
    assert (store.task, verify(store)) == (Task.VALUES, [])
    np.testing.assert_array_equal(store.array("y").read(), y)
    y[7] = 1e300
    with pytest.raises(SourceError, match=r"node 7 has the label .* values are finite"):
        ooc.convert(_labelled(y), tmp_path / "h.ooc")


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_whole_values_that_would_be_rounded_are_named(tmp_path: Path, dtype: type) -> None:
    y = np.full((_NODES, 2), 0.5, dtype)
    y[:, 1] = 2**24 + 1
    with pytest.raises(SourceError, match="label 1 of node 0 is 16777217, which float32 would round; give dtype"):
        ooc.convert(_labelled(y), tmp_path / "g.ooc", task="values")
    store = ooc.convert(_labelled(y), tmp_path / "g.ooc", task="values", dtype="float64")
    np.testing.assert_array_equal(store.array("y").read(), y)


def test_a_store_that_says_nothing_has_classes(tmp_path: Path) -> None:
    store = ooc.convert(random_arrays(), tmp_path / "g.ooc")
    metadata = store.path / "zarr.json"
    metadata.write_text(metadata.read_text().replace('"task": "classes"', '"other": 1'))
    assert ooc.open(store.path).task is Task.CLASSES
    metadata.write_text(metadata.read_text().replace('"other": 1', '"task": "poems"'))
    with pytest.raises(StoreError, match="'poems' is not a valid Task"):
        ooc.open(store.path)


@pytest.mark.parametrize(
    ("task", "value", "message"),
    [
        (Task.MULTILABEL, 2, "neither 0 nor 1"),
        (Task.MULTILABEL, -2, "neither 0 nor 1"),
        (Task.VALUES, np.inf, "values are finite, or NaN where they are missing"),
    ],
)
def test_a_label_that_is_none_of_the_task_is_refused(tmp_path: Path, task: Task, value: float, message: str) -> None:
    arrays = _cases()[task]
    node = int(np.flatnonzero(arrays["train_mask"])[0])
    arrays["y"][node, 1] = value
    with pytest.raises(SourceError, match=message):
        ooc.convert(arrays, tmp_path / "g.ooc", task=task.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", [Task.MULTILABEL, Task.VALUES])
def test_some_of_a_nodes_labels_may_be_missing(tmp_path: Path, task: Task) -> None:
    """The store says of how many nodes; one that does not is not sound."""
    arrays = _cases()[task]
    rows = np.flatnonzero(arrays["train_mask"])[:3]
    arrays["y"] = arrays["y"].astype(np.float32)
    arrays["y"][rows, 1] = np.nan
    store = ooc.convert(arrays, tmp_path / "g.ooc", task=task.value)
    assert (store.task, store.num_incomplete) == (task, 3)
    assert (np.isnan(store.array("y").read()) if task is Task.VALUES else store.array("y").read() < 0)[rows, 1].all()
    ordered = reorder(store, tmp_path / "h.ooc")
    assert ordered.num_incomplete == 3 and verify(store) == verify(ordered) == []
    metadata = store.path / "zarr.json"
    metadata.write_text(metadata.read_text().replace("incomplete_labels", "other"))
    assert verify(ooc.open(store.path)) == ["y: nodes have some of their labels only, and the store does not say so"]


@pytest.mark.parametrize("task", [Task.MULTILABEL, Task.VALUES])
def test_a_node_of_a_split_needs_its_label(tmp_path: Path, task: Task) -> None:
    arrays = _cases()[task]
    node = int(np.flatnonzero(arrays["val_mask"])[0])
    arrays["y"][node] = -1 if task is Task.MULTILABEL else np.nan
    with pytest.raises(SourceError, match=f"node {node} of the valid split has no label"):
        ooc.convert(arrays, tmp_path / "g.ooc", task=task.value)


def test_nodes_outside_of_given_splits_need_none(tmp_path: Path) -> None:
    """Though all labels are 1 and -1; without splits, these may be two classes."""
    arrays = {"edge_index": np.array([[0], [1]]), "x": np.ones((3, 2)), "y": np.array([1, -1, 1])}
    store = ooc.convert({**arrays, "train_mask": np.array([True, False, True])}, tmp_path / "g.ooc")
    assert store.array("y").read().tolist() == [1, -1, 1]
    with pytest.raises(SourceError, match="no other labels than 1 and -1"):
        ooc.convert(arrays, tmp_path / "h.ooc")


def test_verification_finds_a_label_of_another_kind(tmp_path: Path) -> None:
    store = ooc.convert(_cases()[Task.VALUES], tmp_path / "g.ooc", task="values")
    y = store.array("y")
    rows = np.fromfile(y.chunk_path(0), dtype=np.float32)
    rows[1] = np.inf
    rows.tofile(y.chunk_path(0))
    np.array([y.checksum(0)], dtype="<u4").tofile(y.path / CHECKSUM_FILE)
    assert verify(store) == ["y: there are labels outside their task: values are finite, or NaN where they are missing"]


@pytest.mark.parametrize("task", [Task.MULTILABEL, Task.VALUES])
def test_they_can_be_trained_on(tmp_path: Path, task: Task) -> None:
    """By the loss that goes with them: what was read is what the trainer takes."""
    from torch_geometric.nn.models import GCN

    store = ooc.convert(_cases()[task], tmp_path / "g.ooc", task=task.value)
    with ooc.Trainer(GCN(5, 8, 2, store.num_classes), store, spill_dir=tmp_path) as trainer:
        losses = [record.loss for record in trainer.fit(epochs=20, eval_every=0)]
    assert 0 < losses[-1] < losses[0]
