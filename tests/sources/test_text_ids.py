# SPDX-License-Identifier: Apache-2.0
"""Ids that are texts: of tables and of edges, kept in the store, and the same whatever the memory."""

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.errors import SourceError
from ooc.events import Event, TaskStarted
from ooc.storage.store import Store
from ooc.storage.verification import verify
from tests.conversion.arrays import edges_of, files_of
from tests.examples import examples, thorough

NODES, EDGES = 60, 300
_RNG = np.random.default_rng(0)
IDS = np.array([f"{'long ' * (k % 5)}ë, {k:03d}" for k in _RNG.permutation(NODES)], dtype=object)
ENDS = _RNG.integers(0, NODES, (2, EDGES))
WEIGHTS = np.arange(EDGES) / 4
FEATURE = np.arange(NODES) / 8


def _tables(folder: Path, form: str, ids: np.ndarray = IDS, ends: np.ndarray = IDS[ENDS]) -> Path:
    nodes = {"id": ids, "f": FEATURE, "label": ["b" if k % 3 else "a" for k in range(NODES)]}
    edges = {"src": ends[0], "dst": ends[1], "weight": WEIGHTS}
    (source := folder / "t").mkdir()
    for name, columns in (("nodes", nodes), ("edges", edges)):
        if form == "parquet":
            pyarrow.parquet.write_table(pa.table(columns), source / f"{name}.parquet")
        else:
            quoted = [[f'"{cell}"' if "," in str(cell) else str(cell) for cell in cells] for cells in columns.values()]
            lines = [",".join(columns), *map(",".join, zip(*quoted, strict=True))]
            (source / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return source


def _is_the_graph(store: Store) -> None:
    called = store.array("perm").read()
    edges = called[edges_of(store)]
    found = sorted(zip(*edges.tolist(), store.edge_weight("in").read().tolist(), strict=True))
    assert found == sorted(zip(*ENDS.tolist(), WEIGHTS.tolist(), strict=True))
    assert store.ids is not None and store.ids.tolist() == IDS.tolist()
    np.testing.assert_array_equal(store.array("x").read()[:, 0], FEATURE.astype(np.float32)[called])
    assert verify(store) == []


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_texts_name_nodes(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any memory, in any order of rows."""
    source = _tables(tmp_path, form)
    first = ooc.convert(source, tmp_path / "g.ooc")
    _is_the_graph(first)
    _is_the_graph(ooc.convert(source, tmp_path / "h.ooc", order="hop", dtype="float64"))
    monkeypatch.setattr("ooc.sources.node_ids.NODE_BYTES", 10**6)
    (other := tmp_path / "other").mkdir()
    second = ooc.convert(source, other / "g.ooc", host_budget="40M")
    assert files_of(first.path) == files_of(second.path)
    assert first.class_names == ("a", "b")


def test_texts_of_edges_alone_are_in_order(tmp_path: Path) -> None:
    source = _tables(tmp_path, "csv")
    store = ooc.convert(source / "edges.csv", tmp_path / "g.ooc", features="random:2", labels="random:2")
    assert store.ids is not None and store.ids.tolist() == sorted(set(IDS[ENDS].reshape(-1)))
    assert sorted(store.edge_weight("in").read().tolist()) == WEIGHTS.tolist()


@pytest.mark.parametrize(
    "ids",
    [["007", "7", "08"], ["-1", "5", "12"], ["1.0", "2", "x"], ["1e3", "b", "c"], ["18446744073709551615", "1", "2"]],
)
def test_ids_come_back_as_they_are_written(tmp_path: Path, ids: list[str]) -> None:
    """A number in another form is a text, and one that is found after many rows is none too late."""
    (source := tmp_path / "t").mkdir()
    ids = [*map(str, range(100, 250)), *ids]
    (source / "nodes.csv").write_text("id,f,y\n" + "".join(f"{text},1,{k % 2}\n" for k, text in enumerate(ids)))
    (source / "edges.csv").write_text("src,dst\n" + "".join(f"{a},{b}\n" for a, b in zip(ids[1:], ids, strict=False)))
    store = ooc.convert(source, tmp_path / "g.ooc")
    assert store.ids is not None and [*map(str, store.ids)] == ids
    assert sorted(edges_of(store).T.tolist()) == [[k + 1, k] for k in range(len(ids) - 1)]


@pytest.mark.parametrize("first", ["nan", "-inf"])
def test_an_id_that_reads_as_no_finite_number_may_come_first(tmp_path: Path, first: str) -> None:
    (source := tmp_path / "t").mkdir()
    ids = [first, *map(str, range(30))]
    (source / "nodes.csv").write_text("id,f,y\n" + "".join(f"{text},1,{k % 2}\n" for k, text in enumerate(ids)))
    (source / "edges.csv").write_text(f"src,dst\n{first},7\n")
    store = ooc.convert(source, tmp_path / "g.ooc")
    assert store.ids is not None and store.ids.tolist() == ids


def test_an_edge_list_of_numbers_finds_nodes_named_by_texts(tmp_path: Path) -> None:
    (tmp_path / "e.txt").write_text("1 20\n20 1\n")
    (tmp_path / "n.csv").write_text("id,f,y\n1,0.5,0\n20,1,1\na,2,0\n")
    store = ooc.convert(tmp_path / "e.txt", tmp_path / "g.ooc", features=tmp_path / "n.csv", labels=tmp_path / "n.csv")
    assert store.ids is not None and store.ids.tolist() == ["1", "20", "a"]
    assert edges_of(store).tolist() == [[1, 0], [0, 1]]
    (tmp_path / "e.txt").write_text("# Nodes: 2 Edges: 3\n1 20\n20 1\n")
    with pytest.raises(SourceError, match="says that it has 3 edges, 2 are in it"):
        ooc.convert(tmp_path / "e.txt", tmp_path / "h.ooc", features=tmp_path / "n.csv", labels=tmp_path / "n.csv")


def test_numbers_past_64_bits_are_texts(tmp_path: Path) -> None:
    (path := tmp_path / "e.jsonl").write_text(f'{{"src": 0, "dst": {2**63}}}\n{{"src": {2**63}, "dst": 5}}\n')
    store = ooc.convert(path, tmp_path / "g.ooc", features="random:2", labels="random:2")
    assert store.ids is not None and store.ids.tolist() == ["0", "5", str(2**63)]
    assert edges_of(store).tolist() == [[2, 0], [1, 2]]


def test_a_matrix_finds_nodes_named_by_texts(tmp_path: Path) -> None:
    (path := tmp_path / "m.mtx").write_text("%%MatrixMarket matrix coordinate integer general\n3 3 2\n1 2 5\n2 3 7\n")
    (nodes := tmp_path / "n.csv").write_text("id,f,y\na,1,0\n0,2,1\n2,3,0\n1,4,1\n")
    store = ooc.convert(path, tmp_path / "g.ooc", features=nodes, labels=nodes)
    assert edges_of(store).tolist() == [[3, 1], [2, 3]] and store.edge_weight("in").read().tolist() == [7, 5]


def test_an_end_far_down_that_is_no_node_is_named(tmp_path: Path) -> None:
    """Blocks of 9,765 edges are read again up to it."""
    (folder := tmp_path / "t").mkdir()
    (folder / "nodes.csv").write_text("id,f,y\n0,1,0\n3,2,1\n")
    (folder / "edges.csv").write_text("src,dst\n" + "0,3\n" * 10_000 + "3,7\n")
    with pytest.raises(SourceError, match=r"edge 10000 \(3 → 7\) has an end that is no node"):
        ooc.convert(folder, tmp_path / "g.ooc", host_budget="40M")


def test_two_ids_of_one_hash_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ooc.sources.node_ids.blake2b", lambda text, digest_size: hashlib.blake2b(digest_size=digest_size)
    )
    (folder := tmp_path / "t").mkdir()
    (folder / "nodes.csv").write_text(f"id,f,y\n{'a' * 17},1,0\n{'b' * 17},2,1\n")
    (folder / "edges.csv").write_text(f"src,dst\n{'a' * 17},{'b' * 17}\n")
    with pytest.raises(SourceError, match=r"the ids a+ and b+ have the same hash; change one of them"):
        ooc.convert(folder, tmp_path / "g.ooc")


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_wrong_texts_are_named(tmp_path: Path, form: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        monkeypatch.setattr("ooc.sources.node_ids.NODE_BYTES", 10**6)
    cases = {
        "absent": (IDS, (0, 7, "none"), r"t: edge 7 \(none → .*\) has an end that is no node: nodes are those in the "),
        "empty end": (IDS, (1, 9, ""), "t: edge 9 has an end without an id"),
        "twice": (
            np.append(IDS[:-1], IDS[3]),
            None,
            f"has the id {IDS[3]} twice; if the column id of .* holds no ids",
        ),
        "empty": (np.append(IDS[:-1], ""), None, "row 60 has no id in the column id"),
        "too long": (np.append(IDS[:-1], "a" * 1025), None, "holds the id aaa.*, 1025 bytes long: 1024 are the most"),
    }
    for name, (ids, change, message) in cases.items():
        (folder := tmp_path / name).mkdir()
        ends = IDS[ENDS]
        if change is not None:
            ends[change[0], change[1]] = change[2]
        with pytest.raises(SourceError, match=message) as caught:
            ooc.convert(_tables(folder, form, ids, ends), folder / "g.ooc", host_budget="40M")
        assert "\n" not in str(caught.value) and [path.name for path in folder.iterdir()] == ["t"]


def test_texts_need_a_column_of_ids(tmp_path: Path) -> None:
    (source := tmp_path / "t").mkdir()
    (source / "nodes.csv").write_text("f,g,y\n1,0,1\n2,2,0\n")
    (source / "edges.csv").write_text("src,dst\na,b\n")
    with pytest.raises(SourceError, match=r"edges name nodes by texts, but nodes are the row numbers of .* no column"):
        ooc.convert(source, tmp_path / "g.ooc")


def test_texts_among_numbers_need_a_table_of_nodes(tmp_path: Path) -> None:
    """Of edges alone a mistake would make a node of its own."""
    (path := tmp_path / "e.csv").write_text("src,dst\n" + "".join(f"{k},{k + 1}\n" for k in range(200)) + "7,1x0\n")
    with pytest.raises(SourceError, match="line 202: the column dst holds '1x0', not whole numbers; ids some of which"):
        ooc.convert(path, tmp_path / "g.ooc", features="random:2", labels="random:2")


@pytest.mark.parametrize(
    "task",
    thorough(["finding the edges' nodes", "reading edges", "writing features"], "reading edges", "writing features"),
)
def test_an_interrupted_conversion_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    """To the same bytes; what was found of the ids is not looked for again."""
    monkeypatch.setattr("ooc.sources.node_ids.NODE_BYTES", 10**6)
    source = _tables(tmp_path, "csv")
    whole = ooc.convert(source, tmp_path / "g.ooc", host_budget="40M")
    (other := tmp_path / "other").mkdir()
    begun: list[str] = []

    def interrupting(event: Event) -> None:
        if isinstance(event, TaskStarted):
            begun.append(event.task)
            if begun == [*begun[:-1], task] and begun.count(task) == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ooc.convert(source, other / "g.ooc", host_budget="40M", listener=interrupting)
    begun.append(task)
    before = len(begun)
    store = ooc.convert(source, other / "g.ooc", host_budget="40M", listener=interrupting)
    assert files_of(store.path) == files_of(whole.path)
    assert (task == "finding the edges' nodes") == ("finding the edges' nodes" in begun[before:])


def test_blanks_are_a_part_of_texts(tmp_path: Path) -> None:
    """But for those behind a comma that are not in quotes, and around numbers."""
    (source := tmp_path / "t").mkdir()
    (source / "nodes.csv").write_text('id,f,y\na, 0.5 ,0\na ,0.5,1\n" a", 0.5, 1\nb,1,0\n')
    (source / "edges.csv").write_text("src,dst\na, a \nb,a \n")
    store = ooc.convert(source, tmp_path / "g.ooc")
    assert store.ids is not None and store.ids.tolist() == ["a", "a ", " a", "b"]
    assert sorted(edges_of(store).T.tolist()) == [[0, 1], [3, 1]]


_CHARACTERS = st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"])
_CALLED = st.text(_CHARACTERS, min_size=1, max_size=20)


@settings(deadline=None, max_examples=examples(5))
@given(called=st.lists(_CALLED, min_size=2, max_size=12, unique=True), seed=st.integers(0, 9))
def test_any_text_is_an_id_in_any_kind_of_table(
    tmp_path_factory: pytest.TempPathFactory, called: list[str], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    ends = np.random.default_rng(seed).integers(0, len(called), (2, 15))
    nodes = {"id": called, "f": [0.5] * len(called), "y": [k % 2 for k in range(len(called))]}
    edges = {"src": [called[k] for k in ends[0]], "dst": [called[k] for k in ends[1]]}
    wanted = sorted(ends.T.tolist())
    for form in ("csv", "jsonl", "parquet"):
        (source := folder / form).mkdir()
        for name, columns in (("nodes", nodes), ("edges", edges)):
            rows = [*zip(*columns.values(), strict=True)]
            if form == "parquet":
                pyarrow.parquet.write_table(pa.table(columns), source / f"{name}.parquet")
            elif form == "csv":
                with (source / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
                    csv.writer(file, quoting=csv.QUOTE_NONNUMERIC).writerows([[*columns], *rows])
            else:
                lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
                (source / f"{name}.jsonl").write_text("\n".join(lines))
        store = ooc.convert(source, folder / f"{form}.ooc")
        found = range(len(called)) if store.ids is None else store.ids
        assert [*map(str, found)] == called
        assert sorted(edges_of(store).T.tolist()) == wanted
