# SPDX-License-Identifier: Apache-2.0
"""The same graph from a folder, from JSON lines, from frames, networkx, scipy and PyG's objects in memory."""

import copy
import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import networkx
import numpy as np
import pandas
import polars
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToSparseTensor

import ooc
from ooc.errors import OocError, OptionError, SourceError
from ooc.storage.store import Store
from tests.conversion.arrays import edges_of, in_order

IDS = ["a", "b, c", "7", "long " * 9 + "end"]
NODES: dict[str, list[Any]] = {
    "id": IDS,
    "f": [0.5, 1.5, 2.5, 3.5],
    "flag": [True, False, True, True],
    "label": ["red", None, "blue", "red"],
    "train": [True, False, False, True],
    "val": [False, False, True, False],
}
EDGES: dict[str, list[Any]] = {
    "src": [IDS[0], IDS[1], IDS[3], IDS[1]],
    "dst": [IDS[1], IDS[2], IDS[0], IDS[2]],
    "weight": [0.25, 2.0, 3.0, 0.5],
}


def _is_it(store: Store) -> None:
    assert store.ids is not None and store.ids.tolist() == IDS
    assert store.array("x").read().tolist() == [[f, flag] for f, flag in zip(NODES["f"], NODES["flag"], strict=True)]
    assert store.class_names == ("blue", "red") and store.array("y").read().tolist() == [1, -1, 0, 1]
    assert store.split_sizes == {"train": 2, "valid": 1, "test": 0}
    found = [*zip(*edges_of(store).tolist(), store.edge_weight("in").read().tolist(), strict=True)]
    assert sorted(found) == [(0, 1, 0.25), (1, 2, 0.5), (1, 2, 2.0), (3, 0, 3.0)]


def _json_lines(folder: Path) -> Path:
    (source := folder / "t").mkdir()
    for name, columns in (("nodes", NODES), ("edges", EDGES)):
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
        (source / f"{name}.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    return source


def _tabs(folder: Path) -> Path:
    (source := folder / "t").mkdir()
    for name, columns in (("nodes", NODES), ("edges", EDGES)):
        rows = [["" if cell is None else str(cell) for cell in cells] for cells in zip(*columns.values(), strict=True)]
        (source / f"{name}.tsv").write_text("\n".join(map("\t".join, [columns, *rows])) + "\n")
    return source


def _written_by(package: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (source := folder / "t").mkdir()
        for name, columns in (("nodes", NODES), ("edges", EDGES)):
            frame = package.DataFrame(columns)
            path = source / f"{name}.parquet"
            frame.to_parquet(path) if package is pandas else frame.write_parquet(path)
        return source

    return write


def _frames(package: Any) -> Callable[[Path], Any]:
    return lambda folder: {"nodes": package.DataFrame(NODES), "edges": package.DataFrame(EDGES)}


def _networkx(folder: Path) -> Any:
    graph = networkx.MultiDiGraph()
    for node, *values in zip(*NODES.values(), strict=True):
        graph.add_node(node, **dict(zip([*NODES][1:], values, strict=True)))
    for source, target, weight in zip(*EDGES.values(), strict=True):
        graph.add_edge(source, target, weight=weight)
    return graph


@pytest.mark.parametrize(
    "made",
    [_json_lines, _tabs, _written_by(pandas), _written_by(polars), _frames(pandas), _frames(polars), _networkx],
    ids=["jsonl", "tsv", "parquet of pandas", "parquet of polars", "pandas", "polars", "networkx"],
)
def test_one_graph_in_many_forms(tmp_path: Path, made: Callable[[Path], Any]) -> None:
    _is_it(ooc.convert(made(tmp_path), tmp_path / "g.ooc"))


@pytest.mark.parametrize("package", [pandas, polars])
def test_columns_of_frames_are_what_their_types_say(tmp_path: Path, package: Any) -> None:
    """Numbers of any type are features; dates and categories are not, and whole numbers are ids however few bits."""
    ids = np.array([3, 1, 2], dtype=np.int16)
    nodes = package.DataFrame(
        {"id": ids, "a": np.array([1, 2, 3], dtype=np.uint8), "b": [0.5, 1.0, 2.0], "y": [0, 1, 0]}
    )
    edges = package.DataFrame({"src": ids, "dst": ids[::-1]})
    store = ooc.convert({"nodes": nodes, "edges": edges}, tmp_path / "g.ooc")
    assert store.ids is not None and store.ids.tolist() == [3, 1, 2] and store.ids.dtype == np.int64
    assert store.array("x").read().tolist() == [[1, 0.5], [2, 1], [3, 2]]
    when = [datetime.datetime(2020, 1, day) for day in (1, 2, 3)]
    kinds = {"dates or times": package.Series("c", when) if package is polars else package.Series(when)}
    kinds["categories"] = (
        polars.Series("c", ["u", "v", "u"], polars.Categorical)
        if package is polars
        else pandas.Series(["u", "v", "u"], dtype="category")
    )
    for what, column in kinds.items():
        more = nodes.with_columns(column) if package is polars else nodes.assign(c=column)
        with pytest.raises(SourceError, match=f"nodes: the column c holds {what}( such as .*)?, which make no feature"):
            ooc.convert({"nodes": more, "edges": edges}, tmp_path / "h.ooc")
        left_out = ooc.convert({"nodes": more, "edges": edges}, tmp_path / "h.ooc", columns={"c": "ignore"}, force=True)
        assert left_out.num_features == 2


@pytest.mark.parametrize("named", [True, False])
def test_the_index_of_a_frame_holds_ids(tmp_path: Path, named: bool) -> None:
    nodes = pandas.DataFrame(NODES).set_index("id")
    edges = pandas.DataFrame(EDGES).set_index(["src", "dst"])
    _is_it(ooc.convert({"nodes": nodes if named else nodes.rename_axis(None), "edges": edges}, tmp_path / "g.ooc"))


@pytest.mark.parametrize("rows", [[1, 2], [1, 0, 2]])
def test_an_index_of_rows_that_were_left_or_moved_is_not_passed_over(tmp_path: Path, rows: list[int]) -> None:
    """Edges may go by it, or by the rows as they are: which has to be said."""
    nodes = pandas.DataFrame({"f": [1.0, 2.0, 3.0], "y": [0, 1, 0]}).iloc[rows]
    edges = pandas.DataFrame({"src": [1], "dst": [2]})
    with pytest.raises(SourceError, match="the frame nodes has no ids but an index that does not count its rows"):
        ooc.convert({"nodes": nodes, "edges": edges}, tmp_path / "g.ooc")
    store = ooc.convert({"nodes": nodes.rename_axis("id"), "edges": edges}, tmp_path / "g.ooc")
    assert store.ids is not None and store.ids.tolist() == rows
    edges = edges - 1
    store = ooc.convert({"nodes": nodes.reset_index(drop=True), "edges": edges}, tmp_path / "h.ooc")
    assert store.num_nodes == len(rows) and not store.has("ids")


@pytest.mark.parametrize("made", [UUID, Decimal])
def test_objects_of_a_frame_are_ids(tmp_path: Path, made: Callable[[Any], Any]) -> None:
    """Which come of databases: UUIDs as texts, decimals as whole numbers; others of these were cut to such."""
    texts = [f"00000000-0000-0000-0000-00000000000{number}" for number in (3, 1, 2)]
    ids = [made(text if made is UUID else int(text[-1])) for text in texts]
    nodes = pandas.DataFrame({"id": ids, "f": [0.5, 1.5, 2.5], "label": [0, 1, 0]})
    edges = pandas.DataFrame({"source": ids[:2], "target": ids[1:]})
    store = ooc.convert({"nodes": nodes, "edges": edges}, tmp_path / "g.ooc")
    assert [*store.ids] == (texts if made is UUID else [3, 1, 2])
    if made is not UUID:
        nodes["id"] += Decimal("0.5")
        with pytest.raises(SourceError, match=r"holds '3[.]5' in row 0"):
            ooc.convert({"nodes": nodes, "edges": edges}, tmp_path / "other.ooc")


def test_arrays_in_a_column_of_pandas_are_features(tmp_path: Path) -> None:
    nodes = pandas.DataFrame({"f": [*np.arange(6.0).reshape(3, 2)], "label": [0, 1, 0]})
    store = ooc.convert({"nodes": nodes, "edges": pandas.DataFrame({"u": [0, 1], "v": [1, 2]})}, tmp_path / "g.ooc")
    assert store.array("x").read().tolist() == [[0, 1], [2, 3], [4, 5]]


def test_labels_of_pandas_may_be_missing(tmp_path: Path) -> None:
    nodes = pandas.DataFrame({"f": [1.0, 2.0, 3.0, 4.0], "y": pandas.array([0, None, 1, 0], "Int64")})
    store = ooc.convert({"nodes": nodes, "edges": pandas.DataFrame({"src": [0], "dst": [1]})}, tmp_path / "g.ooc")
    assert store.array("y").read().tolist() == [0, -1, 1, 0]


def test_texts_that_look_like_numbers_name_classes(tmp_path: Path) -> None:
    nodes = pandas.DataFrame({"f": [1.0, 2.0, 3.0], "y": ["2", "10", "2"]})
    store = ooc.convert({"nodes": nodes, "edges": pandas.DataFrame({"src": [0], "dst": [1]})}, tmp_path / "g.ooc")
    assert store.class_names == ("10", "2") and store.array("y").read().tolist() == [1, 0, 1]


def test_a_frame_of_edges_alone(tmp_path: Path) -> None:
    x, y = np.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1])
    edges = pandas.DataFrame({"a": [0, 1], "b": [1, 2]})
    store = ooc.convert(edges, tmp_path / "g.ooc", features=x, labels=y)
    assert store.array("x").read().tolist() == x.tolist() and edges_of(store).tolist() == [[0, 1], [1, 2]]
    with pytest.raises(SourceError, match="frames has no features of its own; give features="):
        ooc.convert(edges, tmp_path / "h.ooc")


def test_undirected_graphs_of_networkx_go_both_ways(tmp_path: Path) -> None:
    graph = networkx.karate_club_graph()
    networkx.set_node_attributes(graph, {node: [float(node), 1.0] for node in graph}, "x")
    store = ooc.convert(graph, tmp_path / "g.ooc")
    assert store.num_nodes == 34 and store.num_edges == 2 * 78 and store.undirected and store.has_edge_weight
    assert store.class_names == ("Mr. Hi", "Officer") and store.num_features == 2 and not store.has("ids")


def test_edges_between_the_same_two_nodes_of_a_multigraph_stay_as_many(tmp_path: Path) -> None:
    """As PyG's ``from_networkx`` has them: both ways, and an edge from a node to itself once."""
    graph = networkx.MultiGraph()
    graph.add_nodes_from((node, {"x": float(node), "y": node % 2}) for node in range(3))
    graph.add_edges_from([(0, 1), (1, 0), (2, 2)])
    store = ooc.convert(graph, tmp_path / "g.ooc")
    assert edges_of(store).tolist() == [[1, 1, 0, 0, 2], [0, 0, 1, 1, 2]] and store.undirected
    for number, (*_, carried) in enumerate(graph.edges(data=True)):
        carried["weight"] = 2.0 + number
    store = ooc.convert(graph, tmp_path / "w.ooc")
    assert store.num_edges == 5 and store.edge_weight("in").read().tolist() == [2, 3, 2, 3, 4]


def test_sparse_matrices_of_scipy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix = scipy.sparse.random_array((20, 20), density=0.2, rng=rng)
    x, y = scipy.sparse.random_array((20, 5), density=0.5, rng=rng), rng.integers(0, 3, 20)
    for form in ("csr", "coo", "csc", "dok"):
        held = scipy.sparse.dok_matrix(matrix) if form == "dok" else matrix.asformat(form)
        store = ooc.convert(held, tmp_path / f"{form}.ooc", features=x, labels=y, split="random:1")
        found = np.zeros((20, 20))
        found[tuple(edges_of(store))] = store.edge_weight("in").read()
        np.testing.assert_allclose(found, matrix.toarray(), rtol=1e-6)
        np.testing.assert_array_equal(store.array("x").read(), x.toarray().astype(np.float32))
    ones = ooc.convert(scipy.sparse.eye_array(20), tmp_path / "ones.ooc", features="random:3", labels="random:2")
    assert not ones.has_edge_weight and ones.num_edges == 20
    with pytest.raises(SourceError, match=r"different numbers of nodes"):
        ooc.convert(matrix, tmp_path / "h.ooc", features=x, labels=y[:-1])


def test_a_hetero_data_of_one_kind_is_taken(tmp_path: Path) -> None:
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    plain = Data(x=torch.randn(3, 2), y=torch.tensor([0, 1, 0]), edge_index=edges, edge_weight=torch.rand(3))
    hetero = HeteroData()
    hetero["paper"].x, hetero["paper"].y = plain.x, plain.y
    hetero["paper", "cites", "paper"].edge_index = edges
    hetero["paper", "cites", "paper"].edge_weight = plain.edge_weight
    stores = [ooc.convert(data, tmp_path / f"{k}.ooc") for k, data in enumerate((plain, hetero))]
    for name in ("x", "y", "in/indices", "in/edge_weight", "split/train"):
        np.testing.assert_array_equal(*(store.array(name).read() for store in stores))
    np.testing.assert_array_equal(edges_of(stores[1]), in_order(edges.numpy()))
    for option in ("features", "labels"):
        with pytest.raises(OptionError, match=f"PyG's data takes no option {option}"):
            ooc.convert(hetero, tmp_path / "h.ooc", **{option: plain.x})
    del hetero["paper"].x
    assert ooc.convert(hetero, tmp_path / "bare.ooc").num_features == 0
    hetero["author"].x = hetero["paper"].x = plain.x
    with pytest.raises(SourceError, match="the PyG HeteroData has pos beside x; make them columns of x"):
        ooc.convert(hetero, tmp_path / "h.ooc", inputs=["pos"])
    typed = ooc.convert(hetero, tmp_path / "h.ooc")
    assert typed.array("edges/paper__cites__paper/in/edge_weight").shape == (3,)


def test_labels_may_lie_beside_the_nodes_of_each_split(tmp_path: Path) -> None:
    """As PyG's ``Entities`` has them."""
    nodes, others = torch.tensor([3, 0]), torch.tensor([1])
    data = Data(x=torch.randn(4, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), train_idx=nodes, test_idx=others)
    data.train_y, data.test_y = torch.tensor([2, 1]), torch.tensor([0])
    store = ooc.convert(data, tmp_path / "g.ooc")
    assert store.array("y").read().tolist() == [1, 0, -1, 2]
    assert store.split_sizes == {"train": 2, "valid": 0, "test": 1}
    data.train_y, data.test_y = torch.tensor([0.25, 1.75]).bfloat16(), torch.tensor([1.0])
    values = ooc.convert(data, tmp_path / "v.ooc", task="values")
    assert values.array("y").read().reshape(-1)[[3, 0, 1]].tolist() == [0.25, 1.75, 1]
    data.train_y, data.test_y = torch.tensor([[True, False], [True, True]]), torch.tensor([[False, True]])
    answers = ooc.convert(data, tmp_path / "a.ooc")
    assert answers.array("y").read().tolist() == [[1, 1], [0, 1], [-1, -1], [1, 0]]
    data.train_y = torch.ones(1, 2)
    with pytest.raises(SourceError, match=r"train_y has the shape \(1, 2\), one label for each of train_idx wanted"):
        ooc.convert(data, tmp_path / "h.ooc")
    data.train_y = torch.tensor([[True, False], [True, True]])
    data.train_idx = torch.tensor([3, 9])
    with pytest.raises(SourceError, match="9"):
        ooc.convert(data, tmp_path / "h.ooc")


class _OfTorchSparse:
    """What of torch-sparse's matrices is looked at."""

    def __init__(self, adj_t: torch.Tensor) -> None:
        self._adj_t = adj_t.to_sparse_coo()

    def coo(self) -> tuple[torch.Tensor, ...]:
        return *self._adj_t._indices(), self._adj_t._values()

    def to_torch_sparse_csr_tensor(self) -> torch.Tensor:
        return self._adj_t.to_sparse_csr()


@pytest.mark.parametrize("kind", [lambda one: one, torch.Tensor.to_sparse_coo, _OfTorchSparse])
def test_edges_may_be_given_as_a_matrix_of_targets_and_sources(kind: Callable[[Any], Any], tmp_path: Path) -> None:
    """As ``ToSparseTensor`` leaves them, with weights or without, also of graphs with types."""
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
    plain = Data(x=torch.randn(3, 2), y=torch.tensor([0, 1, 0]), edge_index=edges, edge_weight=torch.rand(4))
    sparse = ToSparseTensor(attr="edge_weight")(copy.copy(plain))
    sparse.adj_t = kind(sparse.adj_t)
    stores = [ooc.convert(data, tmp_path / f"{k}.ooc") for k, data in enumerate((plain, sparse))]
    for name in ("in/indices", "in/indptr", "in/edge_weight"):
        np.testing.assert_array_equal(*(store.array(name).read() for store in stores))
    hetero = HeteroData()
    hetero["paper"].x, hetero["paper"].y, hetero["author"].x = plain.x, plain.y, torch.randn(4, 2)
    hetero["author", "writes", "paper"].edge_index = torch.tensor([[3, 0], [1, 2]])
    sparse = ToSparseTensor()(copy.copy(hetero))
    sparse["author", "writes", "paper"].adj_t = kind(sparse["author", "writes", "paper"].adj_t)
    typed = ooc.convert(sparse, tmp_path / "h.ooc")
    assert typed.array("edges/author__writes__paper/in/indices").read().tolist() == [3, 0]
    assert not typed.types.weighted
    sparse = Data(x=kind(plain.x.to_sparse_csr()), y=plain.y, adj_t=kind(torch.eye(3).to_sparse_csr()))
    loops = ooc.convert(sparse, tmp_path / "l.ooc")
    assert (loops.num_edges, "loops" in loops.source["adj_t"]) == (3, kind is not _OfTorchSparse)
    np.testing.assert_array_equal(loops.array("x").read(), plain.x.numpy())
    hetero["paper", "cites", "paper"].adj_t = sparse.adj_t
    if kind is not _OfTorchSparse:
        with pytest.raises(SourceError, match="adj_t has self-loops, which layers like GCNConv count twice"):
            ooc.convert(hetero, tmp_path / "t.ooc")
    with pytest.raises(SourceError, match="adj_t is no sparse matrix"):
        ooc.convert(Data(x=plain.x, y=plain.y, adj_t=torch.eye(3)), tmp_path / "d.ooc")


def _graph_of(node: Any) -> Any:
    graph = networkx.DiGraph()
    graph.add_edge(node, "b")
    return graph


_LINES = '{"id": 1, "f": 1, "y": 0}\n{"id": 2, "f": 2, "y": 1}\n'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"edges": pandas.DataFrame(EDGES), "papers": 1}, "frames are called nodes and edges, not papers"),
        ({"edges": pandas.DataFrame(EDGES), "nodes": 1}, "nodes is a int, not a frame of pandas or polars"),
        (polars.DataFrame(EDGES).lazy(), r"edges is a LazyFrame; give edges.collect\(\)"),
        (pandas.DataFrame(EDGES).iloc[:0], "edges is empty"),
        (_graph_of((1, 2)), r"a node of the networkx graph is \(1, 2\), neither a text nor a whole number"),
        (networkx.DiGraph(), "has 0 nodes and 0 edges"),
        (scipy.sparse.eye_array(2, 3), r"has the shape \(2, 3\); a graph's is square"),
        ([1, 2], "a list is no path, PyG Data, dictionary of arrays or frames, networkx graph or sparse matrix"),
    ],
)
def test_objects_that_are_no_graph_are_refused(tmp_path: Path, source: Any, message: str) -> None:
    with pytest.raises(OocError, match=message) as caught:
        ooc.convert(source, tmp_path / "g.ooc")
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (_LINES + "{", "nodes.jsonl, line 3: no JSON: Expecting property name"),
        (_LINES + "[1]", "nodes.jsonl, line 3: an object in braces is wanted, one a line"),
        ("", "nodes.jsonl is empty"),
        (_LINES + '{"id": 3, "f": "x", "y": 1}', "nodes.jsonl: the column f holds 'x' in row 2, not numbers"),
        (
            _LINES + '{"id": 3, "f": [1], "y": 1}',
            "nodes.jsonl: the column f holds lists that are not of as many numbers",
        ),
        (_LINES + '{"id": 3, "f": {}, "y": 1}', "nodes.jsonl: the column f holds '{}' in row 2, not numbers"),
        (_LINES + '{"id": [3], "f": 1, "y": 1}', r"nodes.jsonl: the column id holds '\[3\]' in row 2, not texts"),
        (_LINES + '{"id": 2, "f": 1, "y": 1}', "has the id 2 twice"),
    ],
)
def test_wrong_lines_of_json_are_named(tmp_path: Path, nodes: str, message: str) -> None:
    (source := tmp_path / "t").mkdir()
    (source / "nodes.jsonl").write_text(nodes)
    (source / "edges.jsonl").write_text('{"src": 1, "dst": 2}\n')
    with pytest.raises(SourceError, match=message) as caught:
        ooc.convert(source, tmp_path / "g.ooc")
    assert "\n" not in str(caught.value)


def test_a_key_that_comes_late_is_no_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.sources.files.tables._ROWS_WITH_KEYS", 6)
    (source := tmp_path / "t").mkdir()
    (source / "nodes.jsonl").write_text(_LINES * 3 + '{"id": 9, "g": 1}')
    (source / "edges.jsonl").write_text('{"src": 1, "dst": 2}\n')
    with pytest.raises(SourceError, match="line 7: none of the first 6 lines has the key 'g'; give the first line all"):
        ooc.convert(source, tmp_path / "g.ooc")


def test_lists_of_numbers_are_as_many_features(tmp_path: Path) -> None:
    (source := tmp_path / "t").mkdir()
    (source / "nodes.jsonl").write_text('{"x": [1, 2.5], "y": 0}\n{"x": [3, 4], "y": 1}\n')
    (source / "edges.jsonl").write_text('{"src": 1, "dst": 0}\n')
    assert ooc.convert(source, tmp_path / "g.ooc").array("x").read().tolist() == [[1, 2.5], [3, 4]]


def test_other_options_take_no_arrays(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="feature_columns= is a list, not a text"):
        ooc.convert(pandas.DataFrame(EDGES), tmp_path / "g.ooc", feature_columns=["y"])
