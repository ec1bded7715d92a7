# SPDX-License-Identifier: Apache-2.0
"""Batches of whole graphs are PyG's, whatever the memory; paths are those that are found by trying all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import TwoHop
from torch_geometric.utils import coalesce, remove_self_loops

import ooc
from ooc.sampling import graphs as module
from ooc.sampling.graphs import GraphLoader
from ooc.sampling.paths import find_paths
from ooc.storage.store import Store
from tests.damage import seal
from tests.graphs import many_graphs

_GRAPHS = many_graphs(120)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ooc.convert(_GRAPHS, tmp_path_factory.mktemp("graphs") / "g.ooc", dtype="float64")


def _edges(batch: Data) -> list[tuple[float, ...]]:
    return sorted(map(tuple, torch.cat([batch.edge_index.T.double(), batch.edge_attr], dim=1).tolist()))


def _paths(edge_index: Tensor, edges: int) -> list[tuple[int, ...]]:
    """All paths, by trying every edge after every path."""
    pairs = edge_index.T.tolist()
    found = [(a, b) for a, b in pairs if a != b]
    for _ in range(edges - 1):
        found = [(*path, b) for path in found for a, b in pairs if a == path[-1] and b not in path[-2:]]
    return sorted(found)


@pytest.mark.parametrize("paths", [0, 2, 3])
def test_batches_are_pygs_with_all_paths(store: Store, paths: int) -> None:
    with GraphLoader(store, 7, paths=paths, shuffle=True, seed=3, memory="50M") as loader:
        seen = []
        for batch in loader:
            asked = Batch.from_data_list([_GRAPHS[graph] for graph in batch.graph_id.tolist()])
            for name in ("x", "y", "batch", "ptr"):
                assert torch.equal(batch[name], asked[name].to(batch[name].dtype)), name
            assert _edges(batch) == _edges(asked) and batch.num_graphs == asked.num_graphs
            if paths:
                assert sorted(map(tuple, batch.path_index.T.tolist())) == _paths(asked.edge_index, paths)
            seen += batch.graph_id.tolist()
    assert sorted(seen) == list(range(120)) and seen != sorted(seen)


def test_graphs_may_have_no_edges_at_all(tmp_path: Path) -> None:
    graphs = [Data(x=one.x, edge_index=one.edge_index[:, :0], y=one.y) for one in _GRAPHS]
    with GraphLoader(ooc.convert(graphs, tmp_path / "g.ooc", dtype="float64"), 7, paths=2, hops=2) as loader:
        for batch in loader:
            assert torch.equal(batch.x, torch.cat([graphs[graph].x for graph in batch.graph_id.tolist()]))
            assert batch.edge_index.shape == batch.hop_index.shape == (2, 0) and batch.path_index.shape == (3, 0)


@pytest.mark.parametrize("hops", [2, 3])
def test_near_nodes_are_those_of_all_walks(store: Store, monkeypatch: pytest.MonkeyPatch, hops: int) -> None:
    def batches() -> list[Any]:
        with GraphLoader(store, 40, paths=2, hops=hops, memory="50M") as loader:
            found = list(loader)
        assert max(batch.hop_index.size(1) for batch in found) <= loader.most.near
        return found

    whole = batches()
    for batch in whole:
        asked = Batch.from_data_list([_GRAPHS[graph] for graph in batch.graph_id.tolist()])
        walked = torch.eye(asked.num_nodes)
        walked[asked.edge_index[1], asked.edge_index[0]] = 1
        wanted = torch.linalg.matrix_power(walked, hops).fill_diagonal_(0).nonzero().T.flip(0)
        assert torch.equal(batch.hop_index, wanted)  # by the second node, then by the first
        if hops == 2:
            # Once: of edges that are there twice PyG's product takes memory that is not its own.
            bare = Data(edge_index=coalesce(asked.edge_index), num_nodes=asked.num_nodes)
            pygs, _ = remove_self_loops(TwoHop()(bare).edge_index)
            assert sorted(batch.hop_index.T.tolist()) == sorted(pygs.T.tolist())
    monkeypatch.setattr("ooc.sampling.paths._WALKS", 5)
    assert all(torch.equal(one.hop_index, other.hop_index) for one, other in zip(whole, batches(), strict=True))


def test_paths_are_made_a_few_at_a_time_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ends = np.unique(rng.integers(0, 12, (60, 2)), axis=0)  # by target, then by source
    degrees, sources = np.bincount(ends[:, 0], minlength=12), ends[:, 1]
    count = len(_paths(torch.from_numpy(ends[:, ::-1].T.copy()), 3))
    whole = find_paths(sources, degrees, 3, count)
    monkeypatch.setattr("ooc.sampling.paths._WALKS", 5)
    assert np.array_equal(find_paths(sources, degrees, 3, count), whole)
    assert np.array_equal(whole, whole[:, np.lexsort(whole)])


@pytest.mark.parametrize(
    "bounds", [{"batch_nodes": 40}, {"batch_edges": 70}, {"batch_paths": 300, "paths": 3}, {"batch_size": 3}]
)
def test_bounds_hold_and_batches_are_as_large_as_they_allow(store: Store, bounds: dict[str, int]) -> None:
    loader = GraphLoader(store, shuffle=True, memory="50M", **bounds)
    name = next(iter(bounds)).removeprefix("batch_").replace("size", "graphs")
    limit, before = next(iter(bounds.values())), None
    for graphs in loader.batches_of(5):
        sizes = {counted: counts.sum() for counted, counts in loader.sizes.of(graphs).items()}
        assert all(sizes[counted] <= getattr(loader.most, counted) for counted in sizes)
        assert sizes[name] <= limit
        first = loader.sizes.of(graphs)[name][0]
        assert before is None or before + first > limit
        before = sizes[name]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Store:
    source = "synthetic:graphs=6000,nodes=30,edges=32,features=40"
    return ooc.convert(source, tmp_path_factory.mktemp("graphs") / "large.ooc")


def test_memory_changes_no_batch_and_is_kept_to(large: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(memory: str) -> Iterator[Any]:
        with GraphLoader(large, batch_nodes=3000, shuffle=True, paths=2, memory=memory) as loader:
            yield loader.plan
            yield from loader
            yield loader.read_bytes

    (all_in, *ample, once), (plan, *scarce, read) = batches("200M"), batches("40M")
    assert "x" in all_in.resident and "x" not in plan.resident and plan.cache_pages["x"] > 0
    assert plan.nbytes <= 40_000_000 < all_in.nbytes and once < read
    for one, other in zip(ample, scarce, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("x", "y", "edge_index", "path_index", "ptr"))
    with pytest.raises(ooc.BudgetError, match=r"graphs, 3,000 nodes, .* paths at most.* give memory='(\w+)'") as caught:
        list(batches("5M"))
    least = str(caught.value).split("memory='")[1].split("'")[0]
    assert sum(1 for _ in batches(least)) == len(ample) + 2


def test_what_cannot_be_is_said(store: Store, tmp_path: Path) -> None:
    for options, said in [
        ({"batch_nodes": 3}, r"graph \d+ alone has 8 nodes, batches at most batch_nodes=3"),
        ({"paths": 4}, "neither 2 nor 3"),
        ({"hops": 1}, "hops=1 is neither 2 nor 3"),
        ({"batch_paths": 9}, "give paths=3"),
        ({"batch_size": 0}, "must be positive"),
        ({"input_graphs": [500]}, "among 0 … 119"),
    ]:
        with pytest.raises(ooc.OptionError, match=said):
            GraphLoader(store, **options)
    one = ooc.convert("synthetic:nodes=100,edges=200,features=2,classes=2", tmp_path / "one.ooc")
    with pytest.raises(ooc.OptionError, match="is one graph"):
        GraphLoader(one)
    with pytest.raises(ooc.StoreError, match="holds 120 graphs"):
        ooc.NeighborLoader(store, [3])
    with pytest.raises(ooc.StoreError, match="holds 120 graphs"):
        ooc.Trainer(torch.nn.Linear(3, 2).double(), store)


def test_a_damaged_topology_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_within", lambda *given: False)
    with pytest.raises(ooc.StoreError, match="in/indices"):
        next(iter(GraphLoader(store, 5)))


@pytest.mark.parametrize(("made", "more"), [({"paths": 3}, 1), ({"paths": 3}, -1), ({"hops": 2}, -1)])
def test_edges_that_are_not_sorted_are_found(store: Store, made: dict[str, int], more: int) -> None:
    loader = GraphLoader(store, 20, **made)
    (loader.sizes.paths if "paths" in made else loader.sizes.near)[:20] += 1000 * more if "hops" in made else more
    with pytest.raises(ooc.StoreError, match="in/indices"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("name", "at", "number"),
    [
        ("graphs/indptr", 0, 1),
        ("graphs/indptr", 2, 0),
        ("graphs/indptr", -1, 3),
        ("in/indptr", 0, 1),
        ("in/indptr", 4, 0),
        ("in/indptr", 5, 40),
        ("in/indices", 0, 23),
    ],
)
def test_graphs_that_overlap_or_lead_elsewhere_are_found(tmp_path: Path, name: str, at: int, number: int) -> None:
    """As the sizes of graphs are counted, or as a batch is made."""
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graphs = [Data(x=torch.zeros(4, 2), edge_index=edges, y=torch.zeros(1, 2)) for _ in range(6)]
    store = ooc.convert(graphs, tmp_path / "g.ooc")
    assert len(GraphLoader(store)) == 6  # graphs one by one
    array = store.array(name)
    content = array.read()
    content[at] = number
    chunk = array.chunk_path(0)
    chunk.write_bytes(content.tobytes() + chunk.read_bytes()[content.nbytes :])
    seal(array)
    for paths in (0, 2):
        with pytest.raises(ooc.StoreError, match=f"{name if paths == 0 else ''}.* is damaged"):
            list(GraphLoader(store, 2, paths=paths))
