# SPDX-License-Identifier: Apache-2.0
"""Features kept without their zeros: from whatever source, in any order of rows, after any kill, and damaged ones."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data

import ooc
from ooc.cli import main
from ooc.conversion import reorder as reordering
from ooc.errors import BudgetError, SourceError, StoreError
from ooc.events import Event, Note
from ooc.storage import verification
from ooc.storage.store import Store, open_store
from ooc.storage.verification import verify
from tests.conversion.arrays import Arrays, files_of, random_arrays
from tests.conversion.killed import kills_until_the_end, run

NODES, FEATURES = 700, 40


def bag_of_words() -> Arrays:
    """Features [N, F] of which one in twenty is not zero, some rows are, and some are not whole."""
    arrays = random_arrays(nodes=NODES, edges=900, features=FEATURES)
    rng = np.random.default_rng(1)
    x = np.where(rng.random((NODES, FEATURES)) < 1 / 20, rng.integers(1, 9, (NODES, FEATURES)) / 4, 0)
    x[5:9] = 0
    return {**arrays, "x": x.astype(np.float32)}


def as_csr(arrays: Arrays) -> Arrays:
    """The same, the entries of a row in any order, with zeros and repetitions among them."""
    rows, columns = np.nonzero(arrays["x"])
    values = arrays["x"][rows, columns] / 2
    rows, columns, values = (np.concatenate((part, part)) for part in (rows, columns, values))
    zeros = np.arange(5)
    rows, columns = np.concatenate((rows, zeros)), np.concatenate((columns, zeros))
    values = np.concatenate((values, np.zeros(5, dtype=np.float32)))
    order = np.argsort(rows + np.random.default_rng(0).random(len(rows)) / 2, kind="stable")
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=NODES))))
    parts = {"data": values[order], "indices": columns[order], "indptr": indptr, "shape": np.array((NODES, FEATURES))}
    others = {name: array for name, array in arrays.items() if name != "x"}
    return others | {f"x_{name}": part for name, part in parts.items()}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ooc.convert(as_csr(bag_of_words()), tmp_path_factory.mktemp("sparse") / "g.ooc")


def test_they_are_kept_so_where_the_source_has_them_so(store: Store) -> None:
    x, expected = store.array("x"), bag_of_words()["x"]
    assert store.sparse_features is not None and store.sparse_features.entries == np.count_nonzero(expected)
    assert [name for name in store.arrays() if name[0] == "x"] == ["x/indices", "x/indptr", "x/values"]
    assert x.dtype == np.float32 and np.array_equal(x.read(), expected)
    assert np.array_equal(np.concatenate([rows for _, rows in x.blocks(33)]), expected)
    assert verify(store) == []


def test_every_source_of_them_comes_to_the_same_bytes(store: Store, tmp_path: Path) -> None:
    """Dense ones where they are asked for; torch's sparse tensors; with little memory."""
    arrays = bag_of_words()
    data = Data(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    coo = Data(**data.to_dict() | {"x": data.x.to_sparse()})
    with warnings.catch_warnings(action="ignore"):
        csr = Data(**data.to_dict() | {"x": data.x.to_sparse_csr()})
    expected = {name: found for name, found in files_of(store.path).items() if name.startswith("x/")}
    assert len(expected) == 3 * 3 + 1
    for number, source in enumerate((arrays, as_csr(arrays), data, coo, csr)):
        found = ooc.convert(source, tmp_path / f"{number}.ooc", feature_form="sparse", host_budget="40M")
        assert {name: one for name, one in files_of(found.path).items() if name.startswith("x/")} == expected
    assert ooc.convert(as_csr(arrays), tmp_path / "dense.ooc", feature_form="dense").sparse_features is None


@pytest.mark.parametrize(("share", "sparse"), [(1 / 20, True), (1 / 10, False)])
def test_dense_ones_are_kept_so_where_few_are_not_zero(share: float, sparse: bool, tmp_path: Path) -> None:
    """From memory, or from files of which the first rows would be so few: one in sixteen."""
    arrays = random_arrays(nodes=NODES, features=FEATURES)
    arrays["x"][np.random.default_rng(0).random((NODES, FEATURES)) > share] = 0
    assert (ooc.convert(arrays, tmp_path / "g.ooc").sparse_features is not None) == sparse
    arrays["x"][:600] = 0
    arrays["x"][600:] = 1
    assert ooc.convert(arrays, tmp_path / "h.ooc").sparse_features is None
    wide = {**arrays, "x": scipy.sparse.random_array((NODES, 99), density=share, rng=np.random.default_rng(0)).tocsr()}
    edges = scipy.sparse.coo_array((np.ones(300), wide["edge_index"]), shape=(NODES, NODES))
    found = ooc.convert(edges, tmp_path / "s.ooc", features=wide["x"], labels=arrays["y"])
    assert (found.sparse_features is not None) == sparse
    assert np.array_equal(found.array("x").read(), wide["x"].toarray().astype(np.float32))


def test_what_is_kept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = []
    np.savez(tmp_path / "words.npz", **as_csr(bag_of_words()))
    ooc.convert(tmp_path / "words.npz", tmp_path / "g.ooc", listener=events.append)
    (line,) = [event.text for event in events if isinstance(event, Note) and "zero" in event.text]
    assert line == "words: 5.01% of the features are not zero; only those are kept"
    assert main(["convert", str(tmp_path / "words.npz"), str(tmp_path / "o.ooc"), "--dry-run"]) == 0
    capsys.readouterr()
    assert main(["info", str(tmp_path / "g.ooc"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["feature_entries"] == np.count_nonzero(bag_of_words()["x"])


def test_rows_are_normalised_without_zeros_too(tmp_path: Path) -> None:
    arrays = bag_of_words()
    sparse = ooc.convert(as_csr(arrays), tmp_path / "s.ooc", row_normalize=True)
    dense = ooc.convert(arrays, tmp_path / "d.ooc", row_normalize=True)
    assert np.allclose(sparse.array("x").read(), dense.array("x").read(), rtol=1e-6, atol=0)
    arrays["x"][3, 4] = -1
    with pytest.raises(SourceError, match="normalised rows are not zero where features are"):
        ooc.convert(as_csr(arrays), tmp_path / "n.ooc", row_normalize=True, feature_form="sparse")
    assert ooc.convert(as_csr(arrays), tmp_path / "n.ooc", row_normalize=True).sparse_features is None


def test_rows_are_put_in_order(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reordering, "_WINDOW_ROWS", 64)
    ordered = reordering.reorder(store, tmp_path / "o.ooc")
    places = ordered.array("perm").read()
    assert np.array_equal(ordered.array("x").read(), bag_of_words()["x"][places])
    assert ordered.sparse_features is not None and verify(ordered) == []


def test_killed_anywhere_a_conversion_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "words.npz", **as_csr(bag_of_words()))
    source, options = str(tmp_path / "words.npz"), {"order": "hop"}
    (tmp_path / "whole").mkdir()
    steps = run(source, tmp_path / "whole" / "g.ooc", 0, options)
    assert steps is not None
    rng, least = random.Random(3), steps // 4
    (out := tmp_path / "killed" / "g.ooc").parent.mkdir()
    assert kills_until_the_end(source, out, lambda: rng.randint(least, 4 * least), options) > 0
    assert files_of(tmp_path / "killed" / "g.ooc") == files_of(tmp_path / "whole" / "g.ooc")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(np.nan, "feature 7 of node 600 is nan"), (1e6, "feature 7 of node 600 is 1e\\+06, more than float16 can hold")],
)
def test_values_that_cannot_be_kept_are_refused_by_name(value: float, expected: str, tmp_path: Path) -> None:
    arrays = bag_of_words()
    arrays["x"][600, 7] = value
    for number, source in enumerate((arrays, as_csr(arrays))):
        with pytest.raises(SourceError, match=expected):
            ooc.convert(source, tmp_path / f"{number}.ooc", dtype="float16", feature_form="sparse")
    assert list(tmp_path.iterdir()) == []


def test_what_takes_more_without_zeros_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="take more without their zeros; keep them dense"):
        ooc.convert(random_arrays(), tmp_path / "g.ooc", feature_form="sparse")
    with pytest.raises(BudgetError, match="converting"):
        ooc.convert(as_csr(bag_of_words()), tmp_path / "g.ooc", host_budget="1M")
    assert list(tmp_path.iterdir()) == []


# ---- damaged stores -------------------------------------------------------------------------------------------


def changed(store: Store, name: str, place: int, value: float) -> None:
    """Change a number of an array and make its checksum agree."""
    array = store.array(name)
    path = array.chunk_path(0)
    values = np.fromfile(path, dtype=array.dtype)
    values[place] = value
    values.tofile(path)
    sums = array.checksums().copy()
    sums[0] = google_crc32c.value(path.read_bytes())
    sums.tofile(array.path / "checksums.bin")


@pytest.mark.parametrize(
    ("name", "place", "value", "expected"),
    [
        ("x/indices", 3, FEATURES, "x/indices: there are indices outside 0 to 39"),
        ("x/indices", 3, -1, "x/indices: there are indices outside 0 to 39"),
        ("x/indices", 1, 0, "x/indices: there are rows whose indices are not sorted"),
        ("x/values", 3, np.inf, "x/values: entry 3 has inf"),
        ("x/indptr", NODES, 5, "x/indptr: it falls somewhere"),
        ("x/indptr", 0, 1, "x/indptr: it starts at 1, not at 0"),
    ],
)
def test_damage_is_found(
    name: str, place: int, value: float, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_EDGES", 16)
    arrays = bag_of_words()
    arrays["x"][0, :9] = 1  # so that it has a second entry
    store = ooc.convert(as_csr(arrays), tmp_path / "g.ooc")
    changed(store, name, place, value)
    assert any(expected in problem for problem in verify(store))
    if place == NODES or value in (-1, FEATURES):
        with pytest.raises(StoreError, match="is damaged"):
            store.array("x").read()


@pytest.mark.parametrize("entries", [-1, "many", 12])
def test_a_number_of_entries_that_is_none_is_one_line(entries: Any, store: Store, tmp_path: Path) -> None:
    copy = ooc.convert(as_csr(bag_of_words()), tmp_path / "g.ooc")
    metadata = copy.path / "zarr.json"
    content = json.loads(metadata.read_text())
    content["attributes"]["num_feature_entries"] = entries
    metadata.write_text(json.dumps(content))
    with pytest.raises(StoreError, match=r"g\.ooc"):
        open_store(copy.path)


def test_mini_batches_have_them_dense(store: Store) -> None:
    rows = torch.from_numpy(store.array("x").read())
    with ooc.NeighborLoader(store, [2, -1], 16, memory="50M", shuffle=True) as loader:
        assert all(torch.equal(batch.x, rows[batch.row_id]) for batch in loader) and "x" in loader.plan.resident
