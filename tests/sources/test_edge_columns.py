# SPDX-License-Identifier: Apache-2.0
"""Where each format has what edges carry, and what is said where it is not told apart."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io
import scipy.sparse

import ooc
from ooc.errors import OocError, SourceError
from ooc.storage.store import Store
from ooc.storage.verification import verify
from tests.conversion.arrays import edges_of, files_of
from tests.sources.fixtures import FIXTURES, random_graph

_MADE_UP = {"features": "random:4", "labels": "random:3"}
_LINES = [(0, 1, 0.25, 7, -1), (1, 2, -3e4, 8, -2), (0, 1, 0.5, 9, -3), (2, 2, 1, 10, -4)]
_IN_ORDER = [0, 2, 1, 3]


def _of_lines(store: Store) -> None:
    assert edges_of(store).T.tolist() == [list(_LINES[at][:2]) for at in _IN_ORDER]
    assert store.edge_weight("in").read().tolist() == [_LINES[at][2] for at in _IN_ORDER]
    assert store.edge_features("in").read().tolist() == [list(_LINES[at][3:]) for at in _IN_ORDER]
    assert verify(store) == []


def _write(path: Path, separator: str, head: str = "") -> Path:
    path.write_text(head + "".join(separator.join(map(str, line)) + "\n" for line in _LINES))
    return path


def test_columns_of_edge_lists_and_tables(tmp_path: Path) -> None:
    """By number in a list or a table without names, else by name; a Parquet column of lists is as many features."""
    by_number = _MADE_UP | {"edge_weight": "2", "edge_features": "3,4"}
    by_name = _MADE_UP | {"edge_weight": "w", "edge_features": "f,g"}
    _of_lines(ooc.convert(_write(tmp_path / "a.txt", "\t"), tmp_path / "a.ooc", **by_number))
    _of_lines(
        ooc.convert(_write(tmp_path / "b.csv", ","), tmp_path / "b.ooc", columns={"0": "src", "1": "dst"}, **by_number)
    )
    head = "source,target,w,f,g\n"
    _of_lines(ooc.convert(_write(tmp_path / "c.csv", ",", head), tmp_path / "c.ooc", **by_name))
    columns = dict(zip(head.strip().split(","), zip(*_LINES, strict=True), strict=True))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.array([line[3:] for line in _LINES], float).reshape(-1)), 2)
    table = pa.table({name: columns[name] for name in ("source", "target", "w")} | {"both": lists})
    pq.write_table(table, tmp_path / "d.parquet")
    _of_lines(
        ooc.convert(tmp_path / "d.parquet", tmp_path / "d.ooc", **_MADE_UP, edge_weight="w", edge_features="both")
    )


def test_files_with_a_row_for_each_edge(tmp_path: Path) -> None:
    """In the order of the edges, for any format that comes as edges alone; ids may be numbered on the way."""
    np.save(tmp_path / "w.npy", np.array([[line[2]] for line in _LINES]))
    np.save(tmp_path / "f.npy", np.array([line[3:] for line in _LINES]))
    files = {"edge_weight": str(tmp_path / "w.npy"), "edge_features": str(tmp_path / "f.npy")}
    (tmp_path / "e.txt").write_text("".join(f"{10 * line[0]} {10 * line[1]}\n" for line in _LINES))
    _of_lines(ooc.convert(tmp_path / "e.txt", tmp_path / "e.ooc", **_MADE_UP, **files))
    both = files | {"edge_weight": "w"}
    path = _write(tmp_path / "c.csv", ",", "source,target,w,f,g\n")
    _of_lines(ooc.convert(path, tmp_path / "c.ooc", **_MADE_UP, **both))
    np.save(tmp_path / "w.npy", np.ones(5))
    with pytest.raises(OocError, match=r"w\.npy and .*f\.npy has more rows than there are edges"):
        ooc.convert(tmp_path / "e.txt", tmp_path / "e.ooc", force=True, **_MADE_UP, **files)
    np.save(tmp_path / "w.npy", np.ones(3))
    with pytest.raises(OocError, match="ends before the edges do"):
        ooc.convert(tmp_path / "e.txt", tmp_path / "e.ooc", force=True, **_MADE_UP, **files)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"edges with data \(w, f, g\); say what each column is, columns={'w': 'feature'}, 'weight' or"),
        ({"edge_weight": "v"}, "has no column 'v' beside its edges; it has w, f, g"),
        ({"edge_weight": "w,f"}, "one column is wanted"),
        ({"edge_weight": "w", "edge_features": "w"}, "name a column twice"),
        ({"edge_weight": "w", "drop_edge_data": True}, "drop_edge_data=True leaves out what edge_weight= asks for"),
        ({"edge_weight": "none.npy"}, "none.npy is missing"),
        ({"edge_weight": "e"}, "the column e holds 'x', not numbers"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    head = "source,target,w,f,g\n" if "e" not in options.values() else "source,target,w,f,e\n"
    path = _write(tmp_path / "c.csv", ",", head)
    path.write_text(path.read_text().replace("-1\n", "x\n"))
    with pytest.raises(OocError, match=message) as caught:
        ooc.convert(path, tmp_path / "g.ooc", **_MADE_UP, **options)
    assert "\n" not in str(caught.value) and [found.name for found in tmp_path.iterdir()] == ["c.csv"]


@pytest.mark.parametrize("symmetry", ["general", "symmetric"])
def test_values_of_a_matrix_are_weights(tmp_path: Path, symmetry: str) -> None:
    """As scipy reads them, the diagonal of a symmetric matrix once."""
    dense = np.random.default_rng(0).integers(-3, 4, (20, 20)).astype(np.float64) / 8
    dense = dense + dense.T if symmetry == "symmetric" else dense
    scipy.io.mmwrite(tmp_path / "m.mtx", scipy.sparse.coo_matrix(dense), symmetry=symmetry)
    store = ooc.convert(tmp_path / "m.mtx", tmp_path / "g.ooc", **_MADE_UP)
    wanted = scipy.io.mmread(tmp_path / "m.mtx").toarray()
    found = np.zeros_like(wanted)
    found[tuple(edges_of(store))] = store.edge_weight("in").read()
    np.testing.assert_array_equal(found, wanted)
    assert store.undirected == (symmetry == "symmetric") and verify(store) == []


@pytest.mark.parametrize(("symmetry", "merged"), [("general", False), ("general", True), ("symmetric", False)])
def test_a_matrix_of_ones_has_no_weights(tmp_path: Path, symmetry: str, merged: bool) -> None:
    """The same bytes as of a pattern, also where edges that are there both ways are merged with their reverses."""
    entries = "3 3 4\n2 1 1\n1 2 1\n3 2 1\n3 3 1\n" if merged else "3 3 3\n2 1 1\n3 2 1\n3 3 1\n"
    options = {"symmetrize": True} if merged else {}
    for field in ("real", "pattern"):
        text = f"%%MatrixMarket matrix coordinate {field} {symmetry}\n" + entries
        text = text.replace(" 1\n", "\n") if field == "pattern" else text
        (tmp_path / f"{field}.mtx").write_text(text)
        ooc.convert(tmp_path / f"{field}.mtx", tmp_path / f"{field}.ooc", **_MADE_UP, **options)
    assert files_of(tmp_path / "real.ooc") == files_of(tmp_path / "pattern.ooc")
    assert not ooc.open(tmp_path / "real.ooc").has_edge_weight


def test_weights_of_its_own_and_of_a_file_are_not_both_taken(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.ones(3))
    with pytest.raises(SourceError, match=r"has edge data of its own; .*w\.npy would replace it"):
        ooc.convert(scipy.sparse.eye(3).tocsr(), tmp_path / "g.ooc", edge_weight=str(tmp_path / "w.npy"), **_MADE_UP)


@pytest.mark.parametrize(
    ("option", "shape", "message"),
    [
        ("edge_weight", (2, 2), r"has the shape \[2, 2\], not one number for each edge"),
        ("edge_features", (2,), r"has the shape \[2\], not \[edges, features\]"),
    ],
)
def test_files_of_edges_that_have_another_shape_are_refused(
    tmp_path: Path, option: str, shape: tuple[int, ...], message: str
) -> None:
    (tmp_path / "e.txt").write_text("0 1\n1 2\n")
    np.save(tmp_path / "w.npy", np.ones(shape))
    with pytest.raises(SourceError, match=message):
        ooc.convert(tmp_path / "e.txt", tmp_path / "g.ooc", **_MADE_UP, **{option: str(tmp_path / "w.npy")})


@pytest.mark.parametrize("part", ["edges", "nodes"])
def test_lists_that_get_longer_are_refused(tmp_path: Path, part: str) -> None:
    """From one group of rows to the next; categories are told by pyarrow's schema alone, which may be missing."""
    (folder := tmp_path / "t").mkdir()
    columns = {"edges": {"src": [0, 1], "dst": [1, 0]}, "nodes": {"y": [0, 1]}}
    for name, whole in columns.items():
        parts = [pa.table({**whole, "f": [[1.0] * width] * 2}) for width in (2, 3 if name == part else 2)]
        with pq.ParquetWriter(folder / f"{name}.parquet", parts[0].schema, store_schema=False) as file:
            for one in parts:
                file.write_table(one)
    said = {
        "edges": r"edge_features of the edges from 2 on is of the shape \(2, 3\)",
        "nodes": "rows of 2 features and rows of 3",
    }
    with pytest.raises(SourceError, match=said[part]):
        ooc.convert(folder, tmp_path / "g.ooc", columns={"edges.f": "feature"})


@pytest.mark.parametrize("form", ["graphbolt", "graphbolt-numpy"])
def test_graphbolt_lists_data_of_edges(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(0)
    made = FIXTURES[form](random_graph(rng, nodes=50, edges=300), tmp_path, rng)
    path = made.source / "metadata.yaml"
    entry = "  - domain: edge\n    type: null\n    name: {0}\n    format: numpy\n    path: data/{0}.npy\n"
    added = "".join(entry.format(name) for name in ("weight", "since"))
    path.write_text(path.read_text().replace("feature_data:\n", f"feature_data:\n{added}"))
    weight, since = rng.random(300).astype(np.float32), rng.random((300, 3)).astype(np.float32)
    np.save(made.source / "data" / "weight.npy", weight)
    np.save(made.source / "data" / "since.npy", since)
    store = ooc.convert(made.source, tmp_path / "g.ooc")
    edges = made.graph.edge_index
    order = np.lexsort((edges[0], edges[1]))
    np.testing.assert_array_equal(store.edge_weight("in").read(), weight[order])
    np.testing.assert_array_equal(store.edge_features("in").read(), since[order])
    assert not ooc.convert(made.source, store.path, force=True, drop_edge_data=True).has_edge_weight
    path.write_text(path.read_text().replace("feature_data:\n", "feature_data:\n" + entry.format("other")))
    np.save(made.source / "data" / "other.npy", since)
    with pytest.raises(OocError, match=r"has the features other, since for edges .*; one, or one called feat"):
        ooc.convert(made.source, tmp_path / "h.ooc")
