# SPDX-License-Identifier: Apache-2.0
"""Published graphs with types of nodes and edges become the stores that PyG's HeteroData of them does."""

import gzip
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.transforms import ToUndirected

import ooc
from ooc.errors import OptionError, SourceError
from ooc.storage.verification import verify
from tests.sources.fixtures.ogb import write_csv
from tests.sources.fixtures.typed import (
    IGBH,
    MAG,
    OGBN_MAG,
    TABLES,
    academic,
    write_igbh,
    write_mag240m,
    write_ogbn_mag,
    write_tables,
)

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


def assert_same(store: ooc.Store, expected: ooc.Store, *, apart: Collection[str] = ()) -> None:
    assert store.types is not None and expected.types is not None
    assert store.types.nodes == expected.types.nodes
    assert store.types.edges == expected.types.edges
    assert (store.types.labelled, store.split_sizes) == (expected.types.labelled, expected.split_sizes)
    assert store.arrays() == sorted([*expected.arrays(), *apart])
    for name in expected.arrays():
        np.testing.assert_array_equal(store.array(name).read(), expected.array(name).read(), err_msg=name)
    assert verify(store) == []


def test_ogbn_mag(tmp_path: Path) -> None:
    """The types without ``node-feat`` have no features; from the zip as well. Features of edges are kept."""
    data = academic(OGBN_MAG)
    data["author", "writes", "paper"].edge_attr = torch.rand(150, 2)
    expected = ooc.convert(data, tmp_path / "expected.ooc")
    folder = write_ogbn_mag(data, tmp_path)
    assert_same(ooc.convert(folder, tmp_path / "mag.ooc"), expected)
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "mag")
    assert_same(ooc.convert(tmp_path / "packed.zip", tmp_path / "zip.ooc"), expected)
    assert expected.types is not None
    assert expected.types.features == {"author": 0, "field_of_study": 0, "institution": 0, "paper": 6}


@pytest.mark.parametrize("authors", [False, True], ids=["papers' features alone", "authors' as well"])
def test_all_types_of_mag240m(authors: bool, tmp_path: Path) -> None:
    """And papers alone, where nothing else is asked for."""
    data = academic(MAG)
    if authors:
        data["author"].x = torch.ones(50, 3)
    expected, folder = ooc.convert(data, tmp_path / "expected.ooc"), write_mag240m(data, tmp_path)
    assert_same(ooc.convert(folder, tmp_path / "all.ooc", types="all"), expected)
    assert ooc.convert(folder, tmp_path / "papers.ooc").types is None
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, folder.name)
    assert_same(ooc.convert(tmp_path / "packed.zip", tmp_path / "zip.ooc", types="all"), expected)
    with pytest.raises(OptionError, match="types 'some' is not one of papers, all"):
        ooc.convert(folder, tmp_path / "some.ooc", types="some")
    counts = torch.load(folder / "meta.pt")
    if authors:
        torch.save(counts | {"author": 51}, folder / "meta.pt")
        with pytest.raises(SourceError, match="has 50 rows for 51 nodes"):
            ooc.convert(folder, tmp_path / "more.ooc", types="all")
    del counts["author"]
    torch.save(counts, folder / "meta.pt")
    with pytest.raises(SourceError, match="does not count nodes of type 'author'"):
        ooc.convert(folder, tmp_path / "uncounted.ooc", types="all")


def test_all_types_of_igb(tmp_path: Path) -> None:
    """Types without features have as many nodes as edges name."""
    data = academic(IGBH)
    data["author"].x = torch.ones(50, 3)
    folder = write_igbh(data, tmp_path)
    expected = ooc.convert(data, tmp_path / "expected.ooc")
    assert_same(ooc.convert(folder, tmp_path / "all.ooc", types="all"), expected)
    assert ooc.convert(folder, tmp_path / "papers.ooc").types is None
    (folder / "processed" / "paper__topic__fos" / "edge_index.npy").unlink()
    with pytest.raises(SourceError, match=r"edge_index\.npy is missing"):
        ooc.convert(folder, tmp_path / "missing.ooc", types="all")


ROLES = {"author.name": "ignore", "field_of_study.level": "ignore"}


def test_a_folder_of_tables(tmp_path: Path) -> None:
    """Ids of numbers, of texts and none; classes by name. Predictions and errors go by the ids."""
    data = academic(TABLES)
    data["author", "writes", "paper"].edge_weight = torch.rand(150) + 0.1
    expected, folder = ooc.convert(data, tmp_path / "expected.ooc"), write_tables(data, tmp_path)
    store = ooc.convert(folder, tmp_path / "tables.ooc", columns=ROLES, host_budget="64M")
    assert store.ids is not None and store.ids.tolist() == (7 * np.arange(80)[::-1] + 3).tolist()
    assert store.class_names == ("biology", "chemistry", "maths", "physics")
    assert_same(store, expected, apart=["ids", "nodes/author/ids"])
    assert store.read_ids(3, 5, "author").tolist() == [b"author 003", b"author 004"]
    assert store.read_ids(3, 5, "field_of_study").tolist() == [3, 4]
    again = ooc.convert(folder, tmp_path / "again.ooc", columns=ROLES, symmetrize=True)
    assert again.types is not None and len(again.types.edges) == 5


def test_folders_of_tables_that_are_no_graph_are_refused(tmp_path: Path) -> None:
    folder = write_tables(academic(TABLES), tmp_path)
    authors, writes = folder / "nodes" / "author.csv", folder / "edges" / "author__writes__paper.csv"
    shutil.copy(authors, authors.with_suffix(".csv.zst"))
    _refuse_tables(folder, tmp_path, r"author\.csv and .*author\.csv\.zst are tables of one type")
    authors.with_suffix(".csv.zst").unlink()
    _refuse_tables(
        folder,
        tmp_path,
        "one table in .*nodes has to have labels, .*: author, paper has",
        columns={"author.name": "label"},
    )
    writes.rename(writes.with_name("author__paper.csv"))
    _refuse_tables(folder, tmp_path, r"author__paper\.csv is not called SOURCE__RELATION__TARGET")
    shutil.rmtree(folder / "edges")
    _refuse_tables(folder, tmp_path, "edges holds no table: CSV, Parquet or JSON lines", format="typed-tables")


def _refuse_tables(
    folder: Path, out: Path, told: str, *, columns: dict[str, str] | None = None, **options: Any
) -> None:
    with pytest.raises(SourceError, match=told):
        ooc.convert(folder, out / "g.ooc", columns=ROLES | (columns or {}), **options)


WRONG: dict[str, tuple[str, str, str, str]] = {
    "no node": (
        "edges/author__writes__paper.csv",
        "author 003",
        "author 999",
        "→ 143) has an end that is no node: nodes of type author are those in the column",
    ),
    "an id twice": ("nodes/author.csv", "author 003", "author 004", "has the id author 004 twice; if the column"),
    "a row that is not there": (
        "edges/paper__has_topic__field_of_study.csv",
        ",19\n",
        ",20\n",
        "edge 0 (3 → 20) has an end that is no node: nodes of type field_of_study are the row numbers of",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tables_that_are_wrong_are_named(name: str, tmp_path: Path) -> None:
    folder = write_tables(academic(TABLES), tmp_path)
    file, old, new, told = WRONG[name]
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(SourceError, match=re.escape(told)):
        ooc.convert(folder, tmp_path / "g.ooc", columns=ROLES)
    with pytest.raises(SourceError, match="make no feature"):
        ooc.convert(folder, tmp_path / "g.ooc")
    with pytest.raises(SourceError, match="no table has a column"):
        ooc.convert(folder, tmp_path / "g.ooc", columns={**ROLES, "author.age": "ignore"})


def test_to_symmetrize_is_pygs_to_undirected(tmp_path: Path) -> None:
    """Reversed types of edges between two types of nodes, and the reverse among those within one."""
    folder = write_ogbn_mag(academic(OGBN_MAG), tmp_path)
    data = ToUndirected()(academic(OGBN_MAG))
    expected = ooc.convert(data, tmp_path / "expected.ooc")
    store = ooc.convert(folder, tmp_path / "mag.ooc", symmetrize=True)
    assert_same(store, expected)
    assert [tuple(kind) for kind in store.types.edges] == data.edge_types  # type: ignore[union-attr]
    again = ooc.convert(academic(OGBN_MAG), tmp_path / "kept.ooc", symmetrize=True, drop_duplicates=False)
    assert again.types is not None and again.types.edges[data.edge_types[2]] == 400
    with pytest.raises(OptionError, match="has edges institution rev_affiliated_with author already"):
        ooc.convert(data, tmp_path / "twice.ooc", symmetrize=True)


def _three_cells(root: Path) -> None:
    with gzip.open(root / "raw" / "triplet-type-list.csv.gz", "wt") as file:
        file.write("author,writes\n")


def _nowhere(root: Path) -> None:
    with gzip.open(root / "raw" / "triplet-type-list.csv.gz", "at") as file:
        file.write("paper,in,venue\n")
    folder = root / "raw" / "relations" / "paper___in___venue"
    shutil.copytree(root / "raw" / "relations" / "paper___cites___paper", folder)


def _two_labelled(root: Path) -> None:
    with gzip.open(root / "raw" / "nodetype-has-label.csv.gz", "wt") as file:
        file.write("author,paper\nTrue,True\n")


def _few(root: Path) -> None:
    write_csv(root / "raw" / "relations" / "paper___cites___paper" / "num-edge-list.csv.gz", [[201]])


def _with_text(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda root: (root / "raw" / name).write_bytes(gzip.compress(data))


REFUSED: dict[str, tuple[Any, str]] = {
    "a number that is none": (_with_text("num-node-dict.csv.gz", b"author\nmany\n"), "there are 'many' nodes of type"),
    "types alone": (_with_text("num-node-dict.csv.gz", b"author\n"), "has no header of types and one line below it"),
    "no text": (_with_text("num-node-dict.csv.gz", b"\xff\n1\n"), "is no text"),
    "a long list": (_with_text("num-node-dict.csv.gz", b"a,\n" * 30_000), "is longer than a list of types can be"),
    "a line of two": (_three_cells, "no SOURCE,RELATION,TARGET"),
    "an end that is not there": (_nowhere, "there are no nodes 'venue'"),
    "two types with labels": (_two_labelled, "says that 2 types of nodes have labels, not one"),
    "fewer edges": (_few, "has 200 edges paper cites paper, not the 201 it says"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_damaged_is_named(name: str, tmp_path: Path) -> None:
    change, told = REFUSED[name]
    root = write_ogbn_mag(academic(OGBN_MAG), tmp_path)
    change(root)
    with pytest.raises(SourceError, match=re.escape(told)) as caught:
        ooc.convert(root, tmp_path / "mag.ooc")
    assert "\n" not in str(caught.value)
