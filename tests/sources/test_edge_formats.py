# SPDX-License-Identifier: Apache-2.0
"""Edge lists, tables and matrices: which node an id is, what is made up, and what is refused."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import ooc
from ooc.errors import OocError, OptionError, SourceError
from ooc.storage.store import Store, Task
from ooc.storage.verification import verify
from tests.conversion.arrays import edges_of, files_of, in_order

_MADE_UP = {"features": "random:4", "labels": "random:3"}


def _snap(folder: Path, edges: np.ndarray, *, comments: str = "") -> Path:
    path = folder / "graph.txt"
    path.write_text(comments + "".join(f"{a}\t{b}\n" for a, b in edges.T.tolist()))
    return path


def _sparse_edges(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = rng.choice(10**9, 200, replace=False)
    return ids[rng.integers(0, 200, (2, 900))]


@pytest.mark.parametrize("order", ["none", "hop"])
def test_ids_become_their_ranks_and_are_kept(tmp_path: Path, order: str) -> None:
    """In any order of the rows ``ids`` says what the file calls the node of each."""
    edges = _sparse_edges()
    path = _snap(tmp_path, edges)
    store = ooc.convert(path, tmp_path / "g.ooc", order=order, **_MADE_UP)
    ids = np.unique(edges)
    assert store.num_nodes == len(ids) and store.num_edges == edges.shape[1]
    found, perm = store.array("ids").read(), store.array("perm").read()
    np.testing.assert_array_equal(found, ids[perm])
    np.testing.assert_array_equal(in_order(found[edges_of(store)]), in_order(edges))
    assert verify(store) == []


def test_ids_that_are_numbers_are_not_kept(tmp_path: Path) -> None:
    store = ooc.convert(_snap(tmp_path, np.array([[0, 1, 2], [1, 2, 0]])), tmp_path / "g.ooc", **_MADE_UP)
    assert not store.has("ids") and store.num_nodes == 3


def test_made_up_features_and_labels_depend_on_their_seed_alone(tmp_path: Path) -> None:
    path = _snap(tmp_path, _sparse_edges())

    def made(name: str, **options: str) -> Store:
        return ooc.convert(path, tmp_path / f"{name}.ooc", **{**_MADE_UP, **options})

    first = made("a", host_budget="100M")
    assert files_of(first.path) == files_of(made("b", host_budget="3G").path)
    other = made("c", features="random:4:1", labels="random:3:1")
    assert not np.array_equal(first.array("x").read(), other.array("x").read())
    assert not np.array_equal(first.array("y").read(), other.array("y").read())
    x = first.array("x").read()
    assert abs(x.mean()) < 0.15 and abs(x.std() - 1) < 0.15
    assert set(first.array("y").read().tolist()) == {0, 1, 2} and first.num_classes == 3
    assert first.source["features"] == "random:4" and first.source["split"] == "random 60/20/20, seed 0"


def test_ids_of_a_list_may_be_negative_and_follow_a_byte_order_mark(tmp_path: Path) -> None:
    (path := tmp_path / "g.txt").write_text("\ufeff-1 2\n2 -3\n")
    store = ooc.convert(path, tmp_path / "g.ooc", **_MADE_UP)
    assert store.ids is not None and store.ids.tolist() == [-3, -1, 2]
    assert edges_of(store).tolist() == [[2, 1], [0, 2]]


def test_an_undirected_list_is_made_symmetric_unless_asked_not_to(tmp_path: Path) -> None:
    edges = np.array([[0, 1, 2], [1, 2, 3]])
    path = _snap(tmp_path, edges, comments="# Undirected graph: x.txt\n# Nodes: 4 Edges: 3\n")
    assert ooc.convert(path, tmp_path / "a.ooc", **_MADE_UP).num_edges == 6
    assert ooc.convert(path, tmp_path / "b.ooc", symmetrize=False, **_MADE_UP).num_edges == 3


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("# Nodes: 4 Edges: 2\n0 1\n", _MADE_UP, "says that it has 4 nodes, 2 are in it"),
        ("# Nodes: 2 Edges: 2\n0 1\n", _MADE_UP, "says that it has 2 edges, 1 are in it"),
        ("# nothing\n", _MADE_UP, "of no known format"),
        ("a b\nb c\n", _MADE_UP, r"two whole numbers a line, .* texts are for a \.csv"),
        ("# nothing\n", _MADE_UP | {"format": "snap"}, "no edge|cannot be converted"),
        (
            "0 1 5\n",
            _MADE_UP,
            r"has edges with data \(2\); say what each column is, columns={'2': 'feature'}",
        ),
        ("0 1\n1 2 0.5\n", _MADE_UP, "line 2: 3 cells for 2 columns"),
        ("0 1\n1 x\n", _MADE_UP, "line 2: the column 1 holds 'x', not whole numbers; ids some of which are texts need"),
        ("0 1 5\n", _MADE_UP | {"edge_weight": "0"}, "has no column '0' beside its edges; it has 2$"),
        ("0 1\n", _MADE_UP | {"edge_weight": "2"}, "has no column '2' beside its edges; there are none$"),
        (
            "0 1\n",
            _MADE_UP | {"features": "random:999999999"},
            "not random:NUMBER.*; the most is 1048576",
        ),
        ("0 1\n", _MADE_UP | {"features": "random:" + "9" * 5000}, "9' is not random:NUMBER"),
        ("0 1\n", _MADE_UP | {"features": "random:3:" + "9" * 5000}, "a seed has 40 digits at the most"),
        ("0 1\n", {"labels": "random:3"}, "no features of its own; give features=FILE"),
        ("0 1\n", {"features": "random:3"}, "no labels of its own; give labels=FILE"),
        ("0 1\n", _MADE_UP | {"features": "random:0"}, "not random:NUMBER"),
        ("0 1\n", _MADE_UP | {"features": "random:x"}, "not random:NUMBER"),
        ("0 1\n", _MADE_UP | {"features": "nothing.npy"}, "nothing.npy is missing"),
        ("0 1\n", _MADE_UP | {"features": "graph.txt"}, "neither an npy file nor a table"),
        ("0 1\n", _MADE_UP | {"label": "a"}, "snap takes no option label"),
        ("0 1\n", _MADE_UP | {"colour": "a"}, "no option 'colour'"),
    ],
)
def test_edge_lists_that_do_not_add_up_are_refused(
    tmp_path: Path, text: str, options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("graph.txt").write_text(text)
    with pytest.raises(OocError, match=message) as caught:
        ooc.convert("graph.txt", "g.ooc", **options)
    assert "\n" not in str(caught.value) and [path.name for path in tmp_path.iterdir()] == ["graph.txt"]


def test_edge_data_may_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text("0 1 0.25\n1 2 -3e4\n")
    store = ooc.convert(path, tmp_path / "g.ooc", drop_edge_data=True, **_MADE_UP)
    assert edges_of(store).tolist() == [[0, 1], [1, 2]]
    path.write_text("0 1 0.25\n0.5 1 0.25\n")
    with pytest.raises(SourceError, match=r"line 2: the column 0 holds '0\.5', not whole numbers"):
        ooc.convert(path, tmp_path / "h.ooc", drop_edge_data=True, **_MADE_UP)


def test_edges_must_stay_among_the_rows_of_the_files(tmp_path: Path) -> None:
    path = _snap(tmp_path, np.array([[0, 1], [1, 5]]))
    np.save(tmp_path / "x.npy", np.ones((5, 2)))
    np.save(tmp_path / "y.npy", np.arange(5) % 2)
    files = {"features": tmp_path / "x.npy", "labels": tmp_path / "y.npy", "split": "random"}
    with pytest.raises(SourceError, match=r"edge 1 \(1 → 5\) has an end that is no node"):
        ooc.convert(path, tmp_path / "g.ooc", **files)
    np.save(tmp_path / "y.npy", np.arange(6) % 2)
    with pytest.raises(SourceError, match=r"different numbers of nodes: \[5, 6\]"):
        ooc.convert(path, tmp_path / "g.ooc", **files)


@pytest.mark.parametrize("made_up", [True, False], ids=["of edges", "of a table"])
def test_ids_too_many_for_the_budget_are_numbered_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_up: bool
) -> None:
    """To the same bytes as in memory."""
    edges = _sparse_edges() - 10**8  # Some are negative.
    columns = {"source": edges[0], "target": edges[1], "weight": np.arange(edges.shape[1]) / 8}
    (source := tmp_path / "t").mkdir()
    pyarrow.parquet.write_table(pa.table(columns), source / "edges.parquet")
    options = _MADE_UP
    if not made_up:
        called, options = np.unique(edges)[::-1], {}
        columns = {"id": called, "f": np.sin(called), "label": called % 3}
        pyarrow.parquet.write_table(pa.table(columns), source / "nodes.parquet")
    held = ooc.convert(source, tmp_path / "held.ooc", **options)
    monkeypatch.setattr("ooc.sources.node_ids.NODE_BYTES", 10**6)
    joined = ooc.convert(source, tmp_path / "joined.ooc", host_budget="64M", **options)
    assert joined.has_edge_weight and joined.ids is not None and held.ids is not None
    assert joined.ids.tolist() == held.ids.tolist() and set(held.ids.tolist()) == set(edges.reshape(-1).tolist())
    for name in held.arrays():
        np.testing.assert_array_equal(held.array(name).read(), joined.array(name).read())


def _tables(folder: Path, edges: str, nodes: str) -> Path:
    (source := folder / "t").mkdir(exist_ok=True)
    (source / "edges.csv").write_text(edges)
    (source / "nodes.csv").write_text(nodes)
    return source


_EDGES, _NODES = "source,target\n10,20\n20,30\n", "id,f,label,split\n10,0.5,0,train\n30,1,1,val\n20,2,,\n"


def test_nodes_are_the_rows_of_their_table(tmp_path: Path) -> None:
    """Ids in no order, a label missing, the split in words."""
    store = ooc.convert(_tables(tmp_path, _EDGES, _NODES), tmp_path / "g.ooc")
    assert edges_of(store).tolist() == [[2, 0], [1, 2]] and store.array("ids").read().tolist() == [10, 30, 20]
    assert store.array("x").read().tolist() == [[0.5], [1], [2]] and store.array("y").read().tolist() == [0, 1, -1]
    assert store.split_sizes == {"train": 1, "valid": 1, "test": 0} and store.name == "g"


def test_a_table_without_names_is_named_by_position(tmp_path: Path) -> None:
    path = tmp_path / "e.tsv"
    path.write_text("0\t1\n1\t2\n")
    assert edges_of(ooc.convert(path, tmp_path / "g.ooc", **_MADE_UP)).tolist() == [[0, 1], [1, 2]]
    with pytest.raises(SourceError, match="no table has a column '2'; the columns are 0, 1"):
        ooc.convert(path, tmp_path / "h.ooc", columns={"2": "src"}, **_MADE_UP)
    turned = ooc.convert(path, tmp_path / "t.ooc", columns={"1": "src", "0": "dst"}, **_MADE_UP)
    assert edges_of(turned).tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("values", [False, True])
def test_several_columns_of_labels_are_answers_or_values(tmp_path: Path, values: bool) -> None:
    nodes = "f,a,b,split\n1,0,1,train\n2,1,1,test\n3,,,\n"
    options: dict[str, Any] = {"columns": {"a": "label", "b": "label"}} | ({"task": "values"} if values else {})
    store = ooc.convert(_tables(tmp_path, "source,target\n0,1\n2,0\n", nodes), tmp_path / "g.ooc", **options)
    assert store.task is (Task.VALUES if values else Task.MULTILABEL) and store.num_classes == 2
    nothing = float("nan") if values else -1
    np.testing.assert_array_equal(store.array("y").read(), [[0, 1], [1, 1], [nothing, nothing]])


@pytest.mark.parametrize(
    ("edges", "nodes", "options", "message"),
    [
        ("source,target,w\n10,20,1\n", _NODES, {}, r"edges with data \(w\)"),
        ("a,b,w\n10,20,1\n", _NODES, {}, "say which ones the ends of edges are in with columns={'NAME': 'src'} and"),
        ("source,target\n10,20\n10\n", _NODES, {}, "line 3: 1 cells for 2 columns"),
        ("source,target\n10,x\n", _NODES, {}, r"edge 0 \(10 → x\) has an end that is no node: nodes are those in"),
        ("source,target\n10,-20\n", _NODES, {}, r"edge 0 \(10 → -20\) has an end that is no node"),
        ("source,target\n10,99\n", _NODES, {}, r"edge 0 \(10 → 99\) has an end that is no node"),
        ('source,target\n"10,20\n', _NODES, {}, "is no CSV"),
        ('source,target\n10,20\n"1\n0",20\n', _NODES, {}, "line 3: a cell in quotes goes on in the next line"),
        ("", _NODES, {}, "is empty"),
        (_EDGES, _NODES.replace("30,1,1", "10,1,1"), {}, "has the id 10 twice"),
        (_EDGES, _NODES.replace("0.5", "half"), {}, "line 2: the column f holds 'half', not numbers"),
        (_EDGES, _NODES.replace("0.5", ""), {}, "column f of node 0 is nan; fill it, or leave the column out"),
        (_EDGES, _NODES.replace("0,train", "0.5,train"), {}, "node 0 has the label 0.5, which is no class"),
        (_EDGES, _NODES.replace("val", "later"), {}, "node 1 is in the split 'later'; splits are"),
        (_EDGES, _NODES.replace("label", "kind"), {}, "no column label or y; say which one it is with"),
        (_EDGES, _NODES.replace("id,f", "id,id"), {}, "two columns of one name"),
        (_EDGES, _NODES.split("\n", 1)[1], {}, "the first line names the columns, and '0.5' is hardly the name of one"),
        ("anna,ben\nben,carl\n", _NODES, {}, "the first line names the columns, and anna, ben may be an edge"),
        (
            _EDGES,
            'id,f,label\n10,"0,5",0\n20,"1,5",1\n30,"2,5",1\n',
            {},
            "holds texts such as '0,5', which make no feature",
        ),
        (_EDGES, _NODES, {"feature_columns": "f,g"}, "has no column 'g'; it has id, f, label, split"),
        (_EDGES, _NODES, {"task": "guess"}, "task 'guess' is not one of"),
        (
            _EDGES,
            "id,label,split\n10,0,train\n20,1,test\n30,1,\n",
            {},
            "no column of features, only id, label, split; give",
        ),
        (_EDGES, "id,f,label,split\n", {}, "has no rows of features"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    tmp_path: Path, edges: str, nodes: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises((SourceError, OptionError), match=message) as caught:
        ooc.convert(_tables(tmp_path, edges, nodes), tmp_path / "g.ooc", **options)
    assert "\n" not in str(caught.value)


def test_tables_need_no_labels_where_links_are_trained(tmp_path: Path) -> None:
    source = _tables(tmp_path, _EDGES, "id,f\n10,0.5\n20,1\n30,2\n")
    store = ooc.convert(source, tmp_path / "g.ooc", labels="none")
    assert store.split_sizes == {"train": 0, "valid": 0, "test": 0} and (store.array("y").read() == -1).all()
    bare = ooc.convert(source / "edges.csv", tmp_path / "h.ooc", features="none", labels="none")
    assert (bare.num_nodes, bare.num_features) == (3, 0) and verify(store) == verify(bare) == []
    with pytest.raises(OptionError, match="split=random is of nodes with labels"):
        ooc.convert(source, tmp_path / "i.ooc", labels="none", split="random")


def test_tables_with_ids_are_not_joined(tmp_path: Path) -> None:
    source = _tables(tmp_path, _EDGES, _NODES)
    (tmp_path / "labels.csv").write_text("id,label,split\n10,0,train\n20,0,\n30,1,\n")
    with pytest.raises(SourceError, match="two tables with ids of their own; join them in one"):
        ooc.convert(source, tmp_path / "g.ooc", labels=tmp_path / "labels.csv")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([True, False]), "the column target holds 'True' in row 0, not whole numbers"),
        (pa.array([1, None]), "the column target holds 'None' in row 1, not whole numbers"),
        (pa.array([1.0, 2.5]), "the column target holds '2.5' in row 1, not whole numbers"),
    ],
)
def test_parquet_columns_of_another_type_are_refused(tmp_path: Path, column: pa.Array, message: str) -> None:
    pyarrow.parquet.write_table(pa.table({"source": [0, 1], "target": column}), tmp_path / "e.parquet")
    with pytest.raises(SourceError, match=message):
        ooc.convert(tmp_path / "e.parquet", tmp_path / "g.ooc", **_MADE_UP)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    (tmp_path / "e.txt.zst").write_bytes(b"")
    for module, name in (("pyarrow.parquet", "e.parquet"), ("zstandard", "e.txt.zst")):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(SourceError, match=f"needs the package {module.split('.')[0]} to be read; pip install"):
            ooc.convert(tmp_path / name, tmp_path / "g.ooc", **_MADE_UP)


_BANNER = "%%MatrixMarket matrix coordinate pattern general\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%%MatrixMarket matrix array real general\n2 2\n", "does not start as a sparse Matrix Market"),
        (_BANNER.replace("pattern", "complex") + "2 2 1\n1 1 1 1\n", "complex and general; a graph is"),
        (_BANNER.replace("general", "hermitian") + "2 2 1\n1 1\n", "pattern and hermitian"),
        (_BANNER + "2 3 1\n1 1\n", "a matrix of 2 × 3"),
        (_BANNER + "2 2\n", "no line of rows, columns and entries"),
        (_BANNER + "2 2 2\n1 1\n2 2\n1 2\n", "more edges than the 2 it says"),
        (_BANNER + "% a long comment, longer than all\n2 2 3\n1 1\n2 2\n", "m has 2 edges, not the 3 it says"),
        (_BANNER + "2 2 900\n1 1\n", "too few for 900 entries"),
        (_BANNER + "2 2 2\n1 1\n3 2\n", r"edge 1 \(2 → 1\) leaves the graph: its nodes are 0 to 1"),
        (_BANNER + "2 2 2\n1 1\n1 0\n", r"edge 1 \(0 → -1\) leaves the graph"),
        (_BANNER + "2 2 1\n1 1 1\n", "line 3: 3 cells for 2 columns"),
    ],
)
def test_matrices_that_are_no_graph_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m.mtx").write_text(text)
    with pytest.raises(SourceError, match=message):
        ooc.convert(tmp_path / "m.mtx", tmp_path / "g.ooc", **_MADE_UP)


def test_weights_of_a_matrix_may_be_dropped(tmp_path: Path) -> None:
    text = _BANNER.replace("pattern", "real").replace("general", "symmetric") + "3 3 2\n2 1 0.5\n3 3 -1e9\n"
    (tmp_path / "m.mtx.gz").write_bytes(gzip.compress(text.encode()))
    store = ooc.convert(tmp_path / "m.mtx.gz", tmp_path / "g.ooc", drop_edge_data=True, **_MADE_UP)
    assert edges_of(store).tolist() == [[1, 0, 2], [0, 1, 2]] and store.name == "g"
