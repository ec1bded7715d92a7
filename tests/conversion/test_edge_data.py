# SPDX-License-Identifier: Apache-2.0
"""What edges carry is in the store, edge for edge, in both directions: whatever is done to the edges, in any memory."""

import json
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.utils import add_remaining_self_loops, coalesce, to_undirected

import ooc
from ooc.conversion import budget, conversion, reorder, topology
from ooc.conversion import edges as edges_module
from ooc.conversion.budget import Shares
from ooc.errors import BudgetError, OocError, SourceError, StoreError
from ooc.storage.store import Store
from ooc.storage.verification import verify
from tests.conversion.arrays import Arrays, edges_of, files_of, random_arrays
from tests.conversion.killed import kills_until_the_end, run
from tests.examples import cases, examples, ordinary

_TINY = Shares(sort_keys=20, edges=37, feature_rows=11, label_rows=13)


def carrying(*, weight: bool = True, features: int = 2, seed: int = 0, **counts: int) -> Arrays:
    """A random graph with duplicates and self-loops whose edges carry small whole numbers, so that sums are exact."""
    arrays = random_arrays(seed=seed, **counts)
    rng, edges = np.random.default_rng(seed + 1), arrays["edge_index"].shape[1]
    if weight:
        arrays["edge_weight"] = rng.integers(-50, 50, edges).astype(np.float64)
    if features:
        arrays["edge_attr"] = rng.integers(-50, 50, (edges, features)).astype(np.float32)
    return arrays


def _numbers(arrays: Arrays) -> np.ndarray:
    """All that the edges carry, [E, numbers]."""
    return _columns([arrays[name] for name in ("edge_weight", "edge_attr") if name in arrays])


def stored(store: Store, side: str = "in") -> np.ndarray:
    """What the edges carry in the store, [E, numbers], in the order of ``side``."""
    return _columns([array.read() for array in store.edge_data(side)])


def _columns(arrays: list[np.ndarray]) -> np.ndarray:
    wide = [array if array.ndim == 2 else array[:, None] for array in arrays]
    return np.concatenate(wide, axis=1).astype(np.float64)


def _expected(
    arrays: Arrays, *, symmetrize: bool, drop_duplicates: bool | None, self_loops: bool
) -> tuple[np.ndarray, np.ndarray]:
    """``(edges [2, E], numbers [E, C])`` by target, then source, equal ones in the source's order."""
    found: list[tuple[int, int, np.ndarray]] = []
    merging = symmetrize if drop_duplicates is None else drop_duplicates
    for (source, target), numbers in zip(arrays["edge_index"].T.tolist(), _numbers(arrays), strict=True):
        found.append((target, source, numbers))
        if symmetrize and not (merging and source == target):
            found.append((source, target, numbers))
    found.sort(key=lambda edge: edge[:2])
    if merging:
        sums: dict[tuple[int, int], np.ndarray] = {}
        for target, source, numbers in found:
            sums[target, source] = sums.get((target, source), 0) + numbers
        found = [(*ends, numbers) for ends, numbers in sums.items()]
    if self_loops:
        looping = {target for target, source, _ in found if target == source}
        ones = np.ones(_numbers(arrays).shape[1])
        found += [(node, node, ones) for node in range(len(arrays["x"])) if node not in looping]
        found.sort(key=lambda edge: edge[:2])
    ends = np.array([(source, target) for target, source, _ in found], dtype=np.int64).reshape(-1, 2).T
    return ends, np.array([numbers for _, _, numbers in found]).reshape(ends.shape[1], _numbers(arrays).shape[1])


@settings(max_examples=examples(10), deadline=None)
@given(
    nodes=st.integers(1, 40),
    edges=st.integers(0, 120),
    seed=st.integers(0, 2**31),
    weight=st.booleans(),
    features=st.integers(0, 3),
    symmetrize=st.booleans(),
    drop_duplicates=st.sampled_from([None, False, True]),
    self_loops=st.booleans(),
    dtype=st.sampled_from(["float32", "float64", "float16"]),
    tiny=st.booleans(),
    ordered=st.booleans(),
)
def test_edges_carry_what_they_did_whatever_is_done_to_them(
    tmp_path_factory: pytest.TempPathFactory,
    nodes: int,
    edges: int,
    seed: int,
    weight: bool,
    features: int,
    symmetrize: bool,
    drop_duplicates: bool | None,
    self_loops: bool,
    dtype: str,
    tiny: bool,
    ordered: bool,
) -> None:
    """Both directions of any multigraph equal a plain loop over its edges, in any memory and order of the rows."""
    arrays = carrying(nodes=nodes, edges=edges, seed=seed, weight=weight or not features, features=features)
    options: dict[str, Any] = {
        "symmetrize": symmetrize,
        "drop_duplicates": drop_duplicates,
        "self_loops": self_loops,
    }
    out = tmp_path_factory.mktemp("carry") / "g.ooc"
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            _scarce(patch)
        store = ooc.convert(arrays, out, dtype=dtype, order="hop" if ordered else "none", **options)
    ends, numbers = _expected(arrays, **options)
    perm = store.array("perm").read()
    for side in ("in", "out"):
        found = perm[edges_of(store, side)]
        # By original ids again; equal edges stay in their order, which is the source's.
        order = np.lexsort((found[0], found[1]))
        np.testing.assert_array_equal(found[:, order], ends)
        np.testing.assert_array_equal(stored(store, side)[order], numbers)
    assert store.has_edge_weight == ("edge_weight" in arrays) and store.num_edge_features == features
    if store.has_edge_weight:
        assert store.edge_weight("out").dtype == ("float64" if dtype == "float64" else "float32")
    if features:
        assert store.edge_features("in").dtype == dtype
    assert verify(store) == []


def _scarce(patch: pytest.MonkeyPatch) -> None:
    """A memory of twenty edges, rows that are completed three at a time."""
    patch.setattr(conversion, "divide", lambda *args, **kwargs: _TINY)
    for module in (topology, edges_module):
        patch.setattr(module, "_WINDOW_ROWS", 3)
    patch.setattr(topology, "_COMPARED_BYTES", 70)


@pytest.mark.parametrize(
    ("symmetrize", "drop_duplicates", "order"),
    ordinary(
        product([False, True], [False, True], ["none", "hop"]),
        *((False, True, "none"), (True, False, "none"), (True, True, "hop"), (False, False, "hop")),
    ),
)
def test_tiny_budgets_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symmetrize: bool, drop_duplicates: bool, order: str
) -> None:
    """Numbers whose sums depend on the order of summing, hubs, and one pair of nodes with a hundred edges."""
    arrays = carrying(nodes=150, edges=600, features=3)
    arrays["edge_index"][0, :300] = 77
    arrays["edge_index"][1, :120] = 5
    rng = np.random.default_rng(0)
    arrays["edge_weight"] = rng.standard_normal(600) * 10.0 ** rng.integers(-6, 6, 600)
    options: dict[str, Any] = {
        "symmetrize": symmetrize,
        "drop_duplicates": drop_duplicates,
        "self_loops": True,
        "order": order,
        "dtype": "float64",
    }
    ample = ooc.convert(arrays, tmp_path / "ample.ooc", **options)
    _scarce(monkeypatch)
    scarce = ooc.convert(arrays, tmp_path / "scarce.ooc", **options)
    assert files_of(scarce.path) == files_of(ample.path)
    assert ample.undirected == symmetrize and verify(scarce) == []


def _by_pyg(arrays: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(arrays["edge_index"]), torch.from_numpy(_numbers(arrays))


def _sorted(edge_index: torch.Tensor, numbers: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """By target, then source."""
    order = np.lexsort((edge_index[0].numpy(), edge_index[1].numpy()))
    return edge_index.numpy()[:, order], numbers.numpy()[order]


@pytest.mark.parametrize("symmetrize", [False, True])
def test_merged_edges_are_those_of_pyg(tmp_path: Path, symmetrize: bool) -> None:
    """``coalesce`` and ``to_undirected`` sum by default, ``add_remaining_self_loops`` adds ones."""
    arrays = carrying(nodes=60, edges=900)
    kept = arrays["edge_index"][0] != arrays["edge_index"][1]
    arrays |= {"edge_index": arrays["edge_index"][:, kept]} | {
        name: arrays[name][kept] for name in ("edge_weight", "edge_attr")
    }
    wanted = (to_undirected if symmetrize else coalesce)(*_by_pyg(arrays))
    store = ooc.convert(arrays, tmp_path / "g.ooc", symmetrize=symmetrize, drop_duplicates=True)
    ends, numbers = _sorted(*wanted)
    np.testing.assert_array_equal(edges_of(store), ends)
    np.testing.assert_array_equal(stored(store), numbers)
    store = ooc.convert(arrays, store.path, symmetrize=symmetrize, drop_duplicates=True, self_loops=True, force=True)
    ends, numbers = _sorted(*add_remaining_self_loops(*wanted, num_nodes=60))
    np.testing.assert_array_equal(edges_of(store), ends)
    np.testing.assert_array_equal(stored(store), numbers)


def test_both_ways_with_other_values_is_not_undirected(tmp_path: Path) -> None:
    """The edges alone are each other's reverse, what they carry is not: then both directions are kept."""
    arrays = random_arrays(nodes=4, edges=2)
    arrays["edge_index"] = np.array([[0, 1], [1, 0]])
    arrays["edge_weight"] = np.array([2.0, 2.0])
    assert ooc.convert(arrays, tmp_path / "same.ooc").undirected
    arrays["edge_weight"] = np.array([2.0, 3.0])
    store = ooc.convert(arrays, tmp_path / "other.ooc")
    assert not store.undirected
    assert store.edge_weight("in").read().tolist() == [3, 2] and store.edge_weight("out").read().tolist() == [2, 3]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"self_loops": True}, id="plain", marks=pytest.mark.thorough),
        pytest.param({"symmetrize": True, "self_loops": True}, id="both ways", marks=pytest.mark.thorough),
        pytest.param({"order": "hop"}, id="hop order"),
    ],
)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    """Between any two things done to the files, several times in one conversion."""
    (source := tmp_path / "source").mkdir()
    for name, array in carrying(nodes=900, edges=3000, features=2).items():
        np.save(source / f"{name}.npy", array)
    (tmp_path / "whole").mkdir()
    steps = run(str(source), tmp_path / "whole" / "g.ooc", 0, options)
    assert steps is not None and steps > 100
    (tmp_path / "killed").mkdir()
    out, rng = tmp_path / "killed" / "g.ooc", np.random.default_rng(0)
    most = int(0.6 * steps)
    assert kills_until_the_end(str(source), out, lambda: int(rng.integers(1, 1 + most)), options) > 0
    assert files_of(out) == files_of(tmp_path / "whole" / "g.ooc")
    assert [path.name for path in out.parent.iterdir()] == ["g.ooc"] and verify(ooc.open(out)) == []


@pytest.mark.parametrize("symmetrize", [False, True])
def test_reorder_carries_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symmetrize: bool) -> None:
    """In hop order the same edges carry the same, to the byte whether converted so or reordered in little memory."""
    arrays = carrying(nodes=300, edges=900, features=3)
    ordered = ooc.convert(arrays, tmp_path / "ordered.ooc", symmetrize=symmetrize, order="hop")
    store = ooc.convert(arrays, tmp_path / "g.ooc", symmetrize=symmetrize)
    monkeypatch.setattr(reorder, "divide", lambda *args, **kwargs: _TINY)
    assert files_of(reorder.reorder(store, tmp_path / "later.ooc").path) == files_of(ordered.path)
    assert ooc.open(tmp_path / "later.ooc").has_edge_weight and verify(ordered) == []


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """What Python and numpy allocate, with many numbers an edge; and what is too little is said before the work."""
    (source := tmp_path / "source").mkdir()
    for name, array in carrying(nodes=2000, edges=130_000, features=64, weight=False).items():
        np.save(source / f"{name}.npy", array)
    for megabytes in cases([40], [40, 80]):
        tracemalloc.start()
        store = ooc.convert(source, tmp_path / "g.ooc", host_budget=f"{megabytes}M", force=True, symmetrize=True)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < megabytes * 1e6
    assert store.nbytes > 1.4 * 40e6
    least = budget.least_budget_bytes(
        budget.Sizes(name="wide", num_nodes=3, num_edges=2, num_features=1, edge_numbers=10_000)
    )
    assert least == 4 * 16 * 10_000 * 128
    wide = random_arrays(nodes=3, edges=2) | {"edge_attr": np.ones((2, 10_000))}
    with pytest.raises(BudgetError, match="give host_budget='82M"):
        ooc.convert(wide, tmp_path / "wide.ooc", host_budget="60M")


def test_a_store_says_what_its_edges_carry(tmp_path: Path) -> None:
    store = ooc.convert(carrying(features=3), tmp_path / "g.ooc")
    group = zarr.open(store.path, mode="r")
    assert (store.has_edge_weight, store.num_edge_features) == (True, 3)
    for side in ("in", "out"):
        np.testing.assert_array_equal(group[f"{side}/edge_weight"][...], store.edge_weight(side).read())
        np.testing.assert_array_equal(group[f"{side}/edge_features"][...], store.edge_features(side).read())
    assert [array.name for array in store.edge_data("out")] == ["out/edge_weight", "out/edge_features"]
    plain = ooc.convert(carrying(), tmp_path / "plain.ooc", drop_edge_data=True)
    attributes = json.loads((plain.path / "zarr.json").read_text())["attributes"]
    assert not any("edge" in name for name in attributes if name != "num_edges")
    assert plain.edge_data("in") == [] and not plain.has_edge_weight and plain.num_edge_features == 0
    assert files_of(plain.path) == files_of(ooc.convert(random_arrays(), tmp_path / "none.ooc").path)
    with pytest.raises(StoreError, match="has no array 'in/edge_weight'"):
        plain.edge_weight("in")
    with pytest.raises(ValueError):
        store.edge_weight("sideways")


def test_training_refuses_to_leave_them_out_unasked(tmp_path: Path) -> None:
    from torch_geometric.nn.models import GraphSAGE

    store = ooc.convert(carrying(), tmp_path / "g.ooc")
    with pytest.raises(OocError, match="edges carry weights, of which model GraphSAGE takes none"):
        ooc.Trainer(GraphSAGE(5, 8, 2, 3), store, gpu_budget="64M", host_budget="64M")


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"edge_weight": np.ones(299)}, {}, r"weights have the shape \(299,\), one for each of 300 wanted"),
        ({"edge_attr": np.ones((299, 2))}, {}, r"edge_attr has the shape \(299, 2\), not \[300 edges, features\]"),
        ({"edge_attr": np.ones((300, 0))}, {}, "edge_attr has the shape"),
        ({"edge_attr": np.array(["a"] * 300)}, {}, "edge_attr holds <U1 values, not plain numbers"),
        ({"edge_weight": np.array([1.0] * 7 + [np.nan] + [1.0] * 292)}, {}, "the weight of edge 7 is nan"),
        ({"edge_weight": np.full(300, 1e39)}, {}, r"the weight of edge 0 is 1e\+39, more than float32 can hold"),
        (
            {"edge_attr": np.full((300, 2), 1e5)},
            {"dtype": "float16"},
            "feature 0 of edge 0 is 100000, more than float16",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changed: Arrays, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        ooc.convert(random_arrays() | changed, tmp_path / "g.ooc", **options)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_pyg_data_brings_its_own(tmp_path: Path) -> None:
    """``edge_weight`` [E] and ``edge_attr`` [E, F]; an ``edge_attr`` [E] alone is a weight."""
    arrays = carrying(features=3)
    data = Data(**{name: torch.from_numpy(array) for name, array in arrays.items() if array.ndim and "num" not in name})
    store = ooc.convert(data, tmp_path / "a.ooc")
    _, numbers = _expected(arrays, symmetrize=False, drop_duplicates=False, self_loops=False)
    np.testing.assert_array_equal(stored(store), numbers)
    del data.edge_weight
    data.edge_attr = data.edge_attr[:, 0]
    store = ooc.convert(data, tmp_path / "b.ooc")
    assert store.has_edge_weight and not store.num_edge_features
    np.testing.assert_array_equal(stored(store)[:, 0], numbers[:, 1])


def test_numbers_beside_weights_are_a_column(tmp_path: Path) -> None:
    arrays = random_arrays()
    edges = arrays["edge_index"].shape[1]
    weight, numbers = np.linspace(0.5, 1, edges), np.arange(float(edges))
    store = ooc.convert(arrays | {"edge_weight": weight, "edge_attr": numbers}, tmp_path / "g.ooc", dtype="float64")
    order = np.lexsort(arrays["edge_index"])
    np.testing.assert_array_equal(store.edge_weight("in").read(), weight[order])
    np.testing.assert_array_equal(store.edge_features("in").read(), numbers[order, None])
