# SPDX-License-Identifier: Apache-2.0
"""Verification finds what is wrong, even where the checksums agree with it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn.models import GCN

import ooc
from ooc.events import Event, TaskFinished, TaskStarted
from ooc.storage import verification
from ooc.storage.store import Store
from ooc.storage.verification import verify
from tests.conversion.arrays import edges_of, random_arrays


@pytest.fixture(params=[False, True], ids=["directed", "undirected"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return ooc.convert(random_arrays(nodes=3000, edges=9000), tmp_path / "g.ooc", symmetrize=request.param)


def _change(store: Store, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Change the first chunk of an array and make its checksum agree."""
    array = store.array(name)
    path = array.chunk_path(0)
    values = np.fromfile(path, dtype=array.dtype)
    change(values)
    values.tofile(path)
    sums = array.checksums().copy()
    sums[0] = google_crc32c.value(path.read_bytes())
    sums.tofile(array.path / "checksums.bin")


def test_sound_stores_pass_whatever_the_block_sizes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    assert verify(store, events.append) == []
    started = [event.task for event in events if isinstance(event, TaskStarted)]
    assert started == [event.task for event in events if isinstance(event, TaskFinished)]
    monkeypatch.setattr(verification, "_ROWS", 7)
    monkeypatch.setattr(verification, "_EDGES", 3)
    assert verify(ooc.convert(random_arrays(), store.path, force=True)) == []


def test_a_flipped_byte_is_found_in_every_array(store: Store) -> None:
    for name in store.arrays():
        path = store.array(name).chunk_path(0)
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert [name in problem and "checksum" in problem for problem in verify(store)] == [True]
        path.write_bytes(good)
    assert verify(store) == []


def test_missing_and_short_chunks_are_found(store: Store) -> None:
    path = store.array("x").chunk_path(0)
    path.write_bytes(path.read_bytes()[:100])
    store.array("y").chunk_path(0).unlink()
    (store.array("perm").path / "checksums.bin").unlink()
    problems = verify(store)
    assert [problem.split(":")[0] for problem in problems] == ["perm", "x", "y"]


def _swap(values: np.ndarray) -> None:
    values[0], values[1] = values[1], values[0]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("y", lambda v: v.__setitem__(5, 3), "labels outside"),
        ("y", lambda v: v.__setitem__(slice(0, 3000), -1), "without a label"),
        ("split/train", lambda v: v.__setitem__(slice(0, 3000), True), "overlap"),
        ("split/valid", lambda v: v.__setitem__(slice(0, 3000), False), "are said to be"),
        ("perm", lambda v: v.__setitem__(5, 4), "original ids"),
        ("x", lambda v: v.__setitem__(9, np.nan), "feature 4 of node 1 is nan"),
        ("in/indptr", lambda v: v.__setitem__(0, 1), "starts at 1"),
        ("in/indptr", lambda v: v.__setitem__(5, 10**6), "falls"),
        ("in/indptr", lambda v: v.__setitem__(3000, v[3000] + 1), "ends at"),
        ("in/indices", lambda v: v.__setitem__(0, 3000), "outside 0 to 2999"),
        ("in/indices", lambda v: v.__setitem__(0, -1), "outside 0 to 2999"),
        ("in/indices", lambda v: v[:9].__setitem__(slice(None), v[8::-1].copy()), "not sorted"),
        ("in/indptr", lambda v: v.__setitem__(1, v[2]), "transpose|sorted"),
        ("in/self_loops", lambda v: v.__setitem__(7, v[7] + 1), "do not agree"),
    ],
)
def test_wrong_values_with_right_checksums_are_found(
    store: Store, name: str, change: Callable[[np.ndarray], None], message: str
) -> None:
    _change(store, name, change)
    problems = verify(store)
    assert problems and all("\n" not in problem for problem in problems)
    assert any(re.search(message, problem) for problem in problems), problems


def test_features_are_checked_where_only_nodes_without_labels_have_some(tmp_path: Path) -> None:
    data = HeteroData()
    data["user"].num_nodes, data["user"].y = 4, torch.tensor([0, 1, 0, 1])
    data["user"].train_mask = torch.tensor([True, True, False, False])
    data["item"].x = torch.ones(3, 2)
    data["user", "likes", "item"].edge_index = torch.tensor([[0, 1, 2], [0, 1, 2]])
    store = ooc.convert(data, tmp_path / "g.ooc")
    assert verify(store) == []
    _change(store, "nodes/item/x", lambda values: values.__setitem__(3, np.nan))
    assert verify(store) == ["nodes/item/x: feature 1 of node 1 is nan"]


def test_directions_that_differ_in_one_edge_are_found(tmp_path: Path) -> None:
    arrays = random_arrays(nodes=50, edges=0) | {"edge_index": np.array([[1, 4, 9], [2, 2, 7]])}
    store = ooc.convert(arrays, tmp_path / "g.ooc")
    _change(store, "out/indices", lambda values: values.__setitem__(2, 8))
    assert verify(store) == ["topology: in-edges and out-edges are not each other's transpose"]


def test_a_wrong_number_of_self_loops_is_found(store: Store) -> None:
    path = store.path / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"]["num_self_loops"] += 1
    path.write_text(json.dumps(metadata))
    assert any("are said to be" in problem for problem in verify(ooc.open(store.path)))


@pytest.mark.parametrize("symmetrize", [False, True])
@pytest.mark.parametrize("name", ["edge_weight", "edge_features"])
def test_what_edges_carry_is_the_same_in_both_directions(
    tmp_path: Path, symmetrize: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = random_arrays(nodes=50, edges=200)
    rng = np.random.default_rng(0)
    arrays["edge_index"][:, 0] = (0, 1)
    arrays |= {"edge_weight": rng.random(200) + 1, "edge_attr": rng.random((200, 2)) + 1}
    store = ooc.convert(arrays, tmp_path / "g.ooc", symmetrize=symmetrize)
    side = "in" if symmetrize else "out"
    first = edges_of(store, side)[:, 0]
    assert not symmetrize or first[0] != first[1], "an edge that is its own reverse would agree with itself"
    monkeypatch.setattr(verification, "_BLOCK_BYTES", 64)
    assert verify(store) == []

    def change(value: float) -> None:
        _change(store, f"{side}/{name}", lambda values: np.put(values, 0, value))

    change(0.5)
    assert [problem.split(":")[0] for problem in verify(store)] == ["topology"]
    change(float("nan"))
    assert verify(store) == [f"{side}/{name}: edge 0 has nan"]


@pytest.mark.parametrize("name", ["zarr.json", "x/zarr.json", "x/checksums.bin", "x/c/0/0", "in/indices/c/0"])
@pytest.mark.parametrize("device", [False, True], ids=["a pipe", "a device"])
def test_what_is_no_file_is_neither_waited_for_nor_read_for_ever(tmp_path: Path, name: str, device: bool) -> None:
    store = ooc.convert(random_arrays(nodes=3000, edges=9000), tmp_path / "g.ooc")
    path = store.path / name
    path.unlink()
    path.symlink_to("/dev/zero") if device else os.mkfifo(path)
    with pytest.raises(ooc.StoreError) as caught:
        problems = verify(ooc.open(store.path))
        raise ooc.StoreError(problems[0])
    assert len(str(caught.value)) < 300
    path.unlink()
    os.mkfifo(path)
    with (
        pytest.raises(ooc.OocError),
        ooc.Trainer(GCN(5, 4, 2, 3), ooc.open(store.path), memory="8M", spill_dir=tmp_path) as trainer,
    ):
        trainer.fit(1, progress=False)
