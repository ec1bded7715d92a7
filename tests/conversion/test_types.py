# SPDX-License-Identifier: Apache-2.0
"""Stores with types of nodes and edges: what is written, what is refused, what is found damaged."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.transforms import ToUndirected

import ooc
from ooc.errors import OptionError, SourceError
from ooc.storage.store import Store
from ooc.storage.types import EdgeType, Types
from ooc.storage.verification import verify
from tests.conversion.arrays import files_of, in_order
from tests.exactness.test_types import graph


def test_a_hetero_data_becomes_groups_by_type(tmp_path: Path) -> None:
    data = graph()
    store = ooc.convert(data, tmp_path / "g.ooc", dtype="float64")
    assert store.types is not None and store.types.labelled == "paper"
    assert store.types.nodes == {"paper": 90, "author": 61, "topic": 20}
    assert (store.num_nodes, store.num_features, store.num_edges) == (90, 7, 710)
    for kind in data.node_types:
        np.testing.assert_array_equal(store.array(f"nodes/{kind}/x").read(), data[kind].x.numpy())
        assert (tmp_path / "g.ooc" / "nodes" / kind / "x" / "zarr.json").exists()
    np.testing.assert_array_equal(store.array("y").read(), data["paper"].y.numpy())
    for source, relation, target in data.edge_types:
        sources, targets = data[source, relation, target].edge_index.numpy()
        folder = f"edges/{EdgeType(source, relation, target).folder}"
        for side, rows, columns, height in (("in", targets, sources, target), ("out", sources, targets, source)):
            indptr, indices = store.topology(f"{folder}/{side}")
            counts = np.bincount(rows, minlength=data[height].num_nodes)
            np.testing.assert_array_equal(indptr.read(), np.concatenate(([0], np.cumsum(counts))))
            np.testing.assert_array_equal(indices.read(), columns[np.lexsort((columns, rows))])
            assert store.neighbours(f"{folder}/{side}") == data[target if side == "out" else source].num_nodes
    assert verify(store) == []
    assert ooc.open(tmp_path / "g.ooc").types == store.types


def test_what_edges_carry_is_kept_by_type(tmp_path: Path) -> None:
    """In the order of either direction, and self-loops are counted; of a store without, the version is an older one."""
    data, cites = graph(), ("paper", "cites", "paper")
    data[cites].edge_index[:, :4] = 7
    data[cites].edge_weight, data["author", "writes", "paper"].edge_attr = torch.rand(300), torch.rand(200, 2)
    store = ooc.convert(data, tmp_path / "g.ooc")
    assert store.types is not None and store.types.weighted == {EdgeType(*cites)}
    assert store.types.edge_features == {EdgeType("author", "writes", "paper"): 2}
    sources, targets = data[cites].edge_index.numpy()
    order = np.lexsort((targets, sources))
    weights = store.edge_weight("edges/paper__cites__paper/out").read()
    np.testing.assert_array_equal(weights, data[cites].edge_weight.numpy()[order])
    sources, targets = data["author", "writes", "paper"].edge_index.numpy()
    features = store.edge_features("edges/author__writes__paper/in").read()
    np.testing.assert_array_equal(
        features, data["author", "writes", "paper"].edge_attr.numpy()[np.lexsort((sources, targets))]
    )
    loops = store.array("edges/paper__cites__paper/in/self_loops").read()
    assert loops[7] >= 4 and loops.sum() == store.self_loops("edges/paper__cites__paper/in")
    assert verify(store) == []
    both_ways = ooc.convert(data, tmp_path / "b.ooc", symmetrize=True, dtype="float64")
    expected = ToUndirected()(data)
    for folder, kind in (
        ("paper__cites__paper", cites),
        ("paper__rev_writes__author", ("paper", "rev_writes", "author")),
    ):
        sources, targets = expected[kind].edge_index.numpy()
        carried = expected[kind].edge_weight if kind == cites else expected[kind].edge_attr
        read = both_ways.edge_weight if kind == cites else both_ways.edge_features
        stored = read(f"edges/{folder}/in").read()
        np.testing.assert_allclose(stored, carried.numpy()[np.lexsort((sources, targets))], rtol=1e-6)  # PyG's: float32
    assert verify(both_ways) == []
    without = ooc.convert(data, tmp_path / "h.ooc", drop_edge_data=True)
    assert not without.edge_data("edges/paper__cites__paper/in")


def test_the_same_store_in_little_memory(tmp_path: Path) -> None:
    source = "synthetic:nodes=3000,edges=300000,features=8,classes=4,types=3"
    stores = [ooc.convert(source, tmp_path / f"{k}.ooc", host_budget=b) for k, b in enumerate(("34M", "1G"))]
    assert stores[0].types is not None and sum(stores[0].types.edges.values()) == 300_000
    for name in stores[0].arrays():
        np.testing.assert_array_equal(*(store.array(name).checksums() for store in stores), err_msg=name)
    assert verify(stores[0]) == []
    writes, back = (
        stores[0].array(f"edges/{kind}").read()
        for kind in ("author__writes__paper/in/indices", "paper__written_by__author/out/indices")
    )
    np.testing.assert_array_equal(writes, back)  # the same edges the other way round


def test_damage_is_found(tmp_path: Path) -> None:
    store = ooc.convert("synthetic:nodes=800,edges=4000,features=4,classes=4,types=3", tmp_path / "g.ooc")
    path = store.array("edges/paper__cites__paper/in/indices").chunk_path(0)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    assert any("paper__cites__paper" in problem for problem in verify(store))


def _with(change: Callable[[HeteroData], object]) -> HeteroData:
    data = graph()
    change(data)
    return data


def _leave_out_features(data: HeteroData) -> None:
    del data["topic"].x


def _label_authors_as_well(data: HeteroData) -> None:
    data["author"].y, data["author"].train_mask = torch.zeros(61).long(), torch.ones(61, dtype=torch.bool)


def test_of_several_types_with_labels_those_of_the_one_with_splits_are_taken(tmp_path: Path) -> None:
    data = _with(_label_authors_as_well)
    del data["author"].train_mask
    stores = [ooc.convert(one, tmp_path / f"{place}.ooc") for place, one in enumerate((data, graph()))]
    assert stores[0].types == stores[1].types and stores[0].split_sizes == stores[1].split_sizes


def test_directions_that_share_files_share_them_in_hop_order_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes where the disk has no links."""
    plain = ooc.convert(graph(), tmp_path / "plain.ooc", symmetrize=True)
    store = ooc.convert(graph(), tmp_path / "g.ooc", symmetrize=True, order="hop")
    assert store.types is not None and verify(store) == []
    perms = {kind: store.array(f"nodes/{kind}/perm" * (kind != "paper") or "perm").read() for kind in store.types.nodes}
    for kind in store.types.edges:
        found, wanted = (_ends(one, kind) for one in (store, plain))
        found = np.stack([perms[kind.source][found[0]], perms[kind.target][found[1]]])
        np.testing.assert_array_equal(in_order(found), in_order(wanted))
    for first, second in (
        ("paper__cites__paper/in", "paper__cites__paper/out"),
        ("author__writes__paper/in", "paper__rev_writes__author/out"),
    ):
        assert (store.path / "edges" / first / "indices" / "zarr.json").samefile(
            store.path / "edges" / second / "indices" / "zarr.json"
        )

    def refused(*names: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    copied = ooc.convert(graph(), tmp_path / "copied.ooc", symmetrize=True, order="hop")
    assert files_of(copied.path) == files_of(store.path)


def _ends(store: Store, kind: EdgeType) -> np.ndarray:
    indptr, indices = (array.read() for array in store.topology(f"{kind.group}in"))
    return np.stack([indices.astype(np.int64), np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))])


REFUSED: dict[str, tuple[Callable[[HeteroData], object], str]] = {
    "no features": (_leave_out_features, "'topic' has neither features nor a number"),
    "labels twice": (_label_authors_as_well, r"of which those of one type are trained; del data\['author'\]\.y"),
    "no labels": (lambda data: data["paper"].__delattr__("y"), "'paper' has no labels: y is missing"),
    "too few weights": (
        lambda data: setattr(data["paper", "cites", "paper"], "edge_weight", torch.ones(299)),
        "edges paper cites paper: the edges' weights have the shape",
    ),
    "complex weights": (
        lambda data: setattr(data["paper", "cites", "paper"], "edge_weight", torch.ones(300).cfloat()),
        "edges paper cites paper: edge_weight holds complex64 values, not plain numbers",
    ),
    "no ends": (
        lambda data: (
            delattr(data["paper", "cites", "paper"], "edge_index"),
            setattr(data["paper", "cites", "paper"], "z", 1),
        ),
        "edges paper cites paper have no edge_index",
    ),
    "an end that is not there": (
        lambda data: data["topic", "covers", "paper"].edge_index[0].add_(1000),
        "topic covers paper leaves the graph: nodes 'topic' are 0 to 19",
    ),
    "a name for no folder": (
        lambda data: setattr(data["paper", "in/out", "paper"], "edge_index", torch.zeros(2, 1).long()),
        "cannot be the name of a folder",
    ),
    "a name of nodes for no folder": (
        lambda data: setattr(data["../topic"], "x", torch.ones(2, 1)),
        "the node type '../topic' cannot be the name of a folder",
    ),
}


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, told = REFUSED[name]
    with pytest.raises(SourceError, match=told):
        ooc.convert(_with(change), tmp_path / "g.ooc")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["drop_duplicates", "self_loops", "row_normalize"])
def test_options_that_are_for_one_type_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=option):
        ooc.convert(graph(), tmp_path / "g.ooc", **{option: True})


def test_types_are_read_as_they_are_written() -> None:
    types = Types({"a": 3, "b": 2}, {"a": 1, "b": 4}, {EdgeType("a", "to", "b"): 5}, "b")
    assert Types.of(types.attributes()) == types
    assert Types.of({}) is None
    with pytest.raises(ValueError, match="none of the store's"):
        Types.of(types.attributes() | {"labelled": "c"})
