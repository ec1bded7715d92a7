# SPDX-License-Identifier: Apache-2.0
"""A store holds exactly the graph it was made from, the same bytes under any budget."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.conversion import conversion, topology
from ooc.conversion import edges as edges_module
from ooc.conversion.budget import Shares
from ooc.storage.verification import verify
from tests.conversion.arrays import Arrays, edges_of, files_of, in_order, random_arrays
from tests.examples import examples, ordinary


@st.composite
def graphs(draw: st.DrawFn) -> Arrays:
    """Few nodes, many edges: duplicates, self-loops, isolated nodes, hubs, now and then symmetric."""
    nodes = draw(st.integers(1, 40))
    arrays = random_arrays(nodes=nodes, edges=draw(st.integers(0, 150)), seed=draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        arrays["edge_index"][1] = np.minimum(arrays["edge_index"][1], draw(st.integers(0, nodes - 1)))
    if draw(st.booleans()):
        arrays["edge_index"] = np.hstack([arrays["edge_index"], arrays["edge_index"][::-1]])
    if draw(st.booleans()):
        arrays["edge_index"] = (
            arrays["edge_index"].T.copy() if arrays["edge_index"].shape[1] != 2 else arrays["edge_index"]
        )
    return arrays


def _expected(arrays: Arrays, *, symmetrize: bool, self_loops: bool, drop_duplicates: bool | None = None) -> np.ndarray:
    edges = arrays["edge_index"] if arrays["edge_index"].shape[0] == 2 else arrays["edge_index"].T
    if symmetrize:
        edges = np.hstack([edges, edges[::-1]])
    if symmetrize if drop_duplicates is None else drop_duplicates:
        edges = np.unique(edges, axis=1)
    if self_loops:
        lacking = np.setdiff1d(np.arange(len(arrays["x"])), edges[0][edges[0] == edges[1]])
        edges = np.hstack([edges, np.stack([lacking, lacking])])
    return in_order(edges)


@settings(max_examples=examples(15), deadline=None)
@given(
    graphs(),
    st.booleans(),
    st.sampled_from([None, False, True]),
    st.booleans(),
    st.sampled_from(["float32", "float64", "float16"]),
)
def test_edges_of_both_directions_equal_the_source(
    tmp_path_factory: pytest.TempPathFactory,
    arrays: Arrays,
    symmetrize: bool,
    drop_duplicates: bool | None,
    self_loops: bool,
    dtype: str,
) -> None:
    out = tmp_path_factory.mktemp("trip") / "g.ooc"
    edge_options = {"symmetrize": symmetrize, "drop_duplicates": drop_duplicates, "self_loops": self_loops}
    store = ooc.convert(arrays, out, dtype=dtype, **edge_options)
    edges = _expected(arrays, **edge_options)
    np.testing.assert_array_equal(edges_of(store), edges)
    np.testing.assert_array_equal(in_order(edges_of(store, "out")), edges)
    reverse = in_order(edges[::-1])
    assert store.undirected == np.array_equal(edges, reverse)
    assert store.undirected != store.has("out/indices")
    loops = np.bincount(edges[0][edges[0] == edges[1]], minlength=store.num_nodes)
    assert store.num_self_loops == loops.sum()
    if store.num_self_loops:
        np.testing.assert_array_equal(store.array("in/self_loops").read(), loops)
    assert not (store.has("in/self_loops") and not store.num_self_loops)
    np.testing.assert_array_equal(store.array("x").read(), arrays["x"].astype(dtype))
    np.testing.assert_array_equal(store.array("y").read(), arrays["y"])
    np.testing.assert_array_equal(store.array("perm").read(), np.arange(store.num_nodes))
    for split, name in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        np.testing.assert_array_equal(store.array(f"split/{split}").read(), arrays[name])
        assert store.split_sizes[split] == arrays[name].sum()
    assert verify(store) == []
    assert [path.name for path in out.parent.iterdir()] == ["g.ooc"]


@pytest.mark.parametrize(
    ("symmetrize", "self_loops"), ordinary(product([False, True], [False, True]), (False, True), (True, False))
)
def test_tiny_budgets_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symmetrize: bool, self_loops: bool
) -> None:
    """Even a memory of twenty edges, rows that are completed three at a time and hubs across many blocks."""
    arrays = random_arrays(nodes=500, edges=4000)
    arrays["edge_index"][0, :1500] = 77
    ample = ooc.convert(arrays, tmp_path / "ample.ooc", symmetrize=symmetrize, self_loops=self_loops)
    tiny = Shares(sort_keys=20, edges=37, feature_rows=11, label_rows=13)
    monkeypatch.setattr(conversion, "divide", lambda *args, **kwargs: tiny)
    for module in (topology, edges_module):
        monkeypatch.setattr(module, "_WINDOW_ROWS", 3)
    monkeypatch.setattr(topology, "_COMPARED_BYTES", 70)
    scarce = ooc.convert(arrays, tmp_path / "scarce.ooc", symmetrize=symmetrize, self_loops=self_loops)
    assert files_of(scarce.path) == files_of(ample.path)
    assert verify(scarce) == []


@pytest.mark.parametrize("edges", [0, 3])
def test_a_sparse_graph_has_all_its_rows(tmp_path: Path, edges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (topology, edges_module):
        monkeypatch.setattr(module, "_WINDOW_ROWS", 100)
    arrays = random_arrays(nodes=5000, edges=edges)
    store = ooc.convert(arrays, tmp_path / "g.ooc", self_loops=True)
    np.testing.assert_array_equal(edges_of(store), _expected(arrays, symmetrize=False, self_loops=True))
    assert store.array("in/indptr").shape == (5001,)


def test_zarr_reads_what_was_converted(tmp_path: Path) -> None:
    arrays = random_arrays(nodes=3000, edges=9000, features=33)
    ooc.convert(arrays, tmp_path / "g.ooc")
    group = zarr.open(tmp_path / "g.ooc", mode="r")
    np.testing.assert_array_equal(group["x"][...], arrays["x"])
    indptr, indices = group["in/indptr"][...], group["in/indices"][...]
    assert indices.dtype == np.int32 and indptr.dtype == np.int64
    found = np.stack([indices, np.repeat(np.arange(3000), np.diff(indptr))])
    np.testing.assert_array_equal(found, in_order(arrays["edge_index"]))
