# SPDX-License-Identifier: Apache-2.0
"""What is particular to ogb's, MAG240M's and IGB's files. That they convert to their graph: ``test_every_format``."""

import gzip
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ooc
from ooc.errors import OptionError, SourceError
from ooc.events import ignore
from ooc.sources.files import streams, zip_members
from ooc.sources.reading import Request
from ooc.sources.registry import open_source
from ooc.sources.source import Source
from ooc.storage.store import Task
from ooc.storage.verification import verify
from tests.conversion.arrays import edges_of, in_order
from tests.sources.fixtures import FIXTURES, Graph, Made, random_graph
from tests.sources.fixtures.ogb import write_csv, write_split_dict


def _made(folder: Path, name: str, **sizes: Any) -> Made:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    return FIXTURES[name](random_graph(rng, **sizes), folder, rng)


def _source(path: Path, **options: Any) -> Source:
    return open_source(path, format=None, request=Request(split=None, budget_bytes=10**9, **options))


def _refused(path: Path, folder: Path, message: str, **options: Any) -> None:
    """Converting says ``message`` in one line and leaves nothing."""
    with pytest.raises(SourceError, match=message) as caught:
        ooc.convert(path, folder / "out.ooc", **options)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("out.ooc*"))


def _rewrite(npz: Path, **changed: Any) -> None:
    """The npz with some arrays changed, added, or with None left out."""
    with np.load(npz) as archive:
        arrays = {**archive, **changed}
    np.savez_compressed(npz, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("ogb-papers100m", 0),
        ("ogb-papers100m-zip-stored", 0),
        ("ogb-papers100m-zip", 2.5),
        ("ogb-papers100m-zip-features-first", 2.5),
    ],
)
def test_every_layer_is_inflated_as_seldom_as_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: float
) -> None:
    """Arrays once, headers aside, but the edges' sources twice; the zip around data.npz so, too, and once to find them,
    where it is compressed at all."""
    made = _made(tmp_path / "s", name, nodes=3000, edges=100_000, features=128)
    inflated = {"inner": 0, "outer": 0}
    read, inflate = zipfile.ZipExtFile._read1, zip_members._MemberFile._inflated  # type: ignore[attr-defined]

    def counting(self: Any, size: int) -> bytes:
        data: bytes = read(self, size)
        inflated["inner"] += len(data) * self.name.endswith(".npy")
        return data

    def counting_inside(self: zip_members._MemberFile, size: int) -> bytes:
        data = inflate(self, size)
        inflated["outer"] += len(data)
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "_read1", counting)
    monkeypatch.setattr(zip_members._MemberFile, "_inflated", counting_inside)
    ooc.convert(made.source, tmp_path / "g.ooc", feature_form="dense")  # of which zeros are not counted before
    graph = made.graph
    twice = 0 if name.endswith("stored") else graph.edge_index.nbytes // 2  # whose edges have their ends one by one
    arrays = graph.edge_index.nbytes + twice + graph.x.nbytes + 4 * graph.num_nodes
    headers = 8 * 4096  # zipfile inflates so much at least
    assert arrays <= inflated["inner"] <= arrays + headers
    if most:
        with zipfile.ZipFile(made.source) as archive:
            outer = sum(info.file_size for info in archive.infolist() if info.filename.endswith(".npz"))
        lookahead = 6 * streams.READ_BYTES  # Of the outer layer, where its end or a header of the inner one is read.
        assert outer <= inflated["outer"] <= most * outer + lookahead


@pytest.mark.parametrize("name", ["ogb-papers100m", "ogb-papers100m-zip"])
def test_both_rows_of_packed_edges_are_read_side_by_side(tmp_path: Path, name: str) -> None:
    made = _made(tmp_path / "s", name)
    source = _source(made.source)
    assert source.prepare is None
    edges = np.hstack([np.stack(block[:2]) for block in source.edges(333)])
    np.testing.assert_array_equal(edges, made.graph.edge_index)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"node_feat": None}, "has no array node_feat"),
        ({"edge_index": np.zeros((2, 1000))}, r"is float64 \[2, 1000\], not node ids \[2, edges\]"),
        ({"edge_index": np.full((2, 1000), 200)}, r"edge 0 \(200 → 200\) leaves the graph: its nodes are 0 to 199"),
        ({"edge_index": np.full((2, 1000), -5)}, r"edge 0 \(-5 → -5\) leaves the graph"),
        ({"edge_index": np.full((2, 1000), 2**40)}, r"edge 0 \(1099511627776 → 1099511627776\) leaves the graph"),
        ({"num_edges_list": np.array([7])}, "num_edges_list says 7, the arrays have 1000"),
        ({"num_nodes_list": np.array([100, 100])}, "one graph is wanted"),
        ({"node_feat": np.zeros((100, 4), np.float32)}, "an entry for each of 100 nodes wanted"),
        ({"node_feat": np.asfortranarray(np.zeros((200, 4), np.float32))}, "lies column by column"),
        ({"node_feat": np.full((200, 4), None)}, "holds an array of Python objects"),
        ({"edge_feat": np.zeros((999, 2))}, r"has the shape \[999, 2\], not \[1000 edges, features\]"),
        ({"edge_reltype": np.zeros((1000, 1))}, "has edge_reltype, which cannot be used yet; give drop_edge_data=True"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    made = _made(tmp_path / "s", "ogb-papers100m", nodes=200, edges=1000)
    _rewrite(made.source / "raw" / "data.npz", **changed)
    _refused(made.source, tmp_path, message)


@pytest.mark.parametrize("budget", ["64M", "2G"])
def test_edge_features_are_taken_or_left_out_when_asked(tmp_path: Path, budget: str) -> None:
    made = _made(tmp_path / "s", "ogb-papers100m", nodes=200, edges=1000)
    carried = np.arange(2000, dtype=np.float32).reshape(1000, 2)
    _rewrite(made.source / "raw" / "data.npz", edge_feat=carried)
    store = ooc.convert(made.source, tmp_path / "g.ooc", drop_edge_data=True)
    np.testing.assert_array_equal(edges_of(store), in_order(made.graph.edge_index))
    assert store.num_edge_features == 0
    store = ooc.convert(made.source, store.path, force=True, host_budget=budget)
    edges = made.graph.edge_index
    for side, order in (("in", np.lexsort((edges[0], edges[1]))), ("out", np.lexsort((edges[1], edges[0])))):
        np.testing.assert_array_equal(edges_of(store, side), edges[:, order])
        np.testing.assert_array_equal(store.edge_features(side).read(), carried[order])


def test_both_ways_of_an_edge_of_proteins_have_its_features(tmp_path: Path) -> None:
    """As ``read_csv_graph_raw`` repeats them; duplicates keep their order."""
    made = _made(tmp_path / "p", "ogb-proteins")
    columns = {}
    for name in ("edge", "edge-feat"):
        with gzip.open(made.source / "raw" / f"{name}.csv.gz", "rt") as file:
            columns[name] = np.repeat(np.loadtxt(file, delimiter=",", dtype=np.float64), 2, axis=0)
    edges = columns["edge"].astype(np.int64)
    edges[1::2] = edges[1::2, ::-1].copy()
    store = ooc.convert(made.source, tmp_path / "g.ooc")
    order = np.lexsort((edges[:, 0], edges[:, 1]))
    np.testing.assert_array_equal(edges_of(store), edges[order].T)
    np.testing.assert_array_equal(store.edge_features("in").read(), columns["edge-feat"][order].astype(np.float32))
    assert store.num_edge_features == 8 and verify(store) == []
    write_csv(made.source / "raw" / "edge-feat.csv.gz", np.ones((len(edges) // 2 - 1, 8)))
    with pytest.raises(SourceError, match=r"edge-feat\.csv\.gz"):
        ooc.convert(made.source, tmp_path / "h.ooc")


def test_proteins_are_multilabel_and_get_their_species_as_features(tmp_path: Path) -> None:
    made = _made(tmp_path / "s", "ogb-proteins")
    store = ooc.convert(made.source, tmp_path / "g.ooc", drop_edge_data=True)
    assert (store.task, store.num_classes, store.num_features) == (Task.MULTILABEL, 112, 8)
    assert (store.array("x").read().sum(axis=1) == 1).all()
    label = made.source / "raw" / "node-label.csv.gz"
    rows = made.graph.y.astype(int)
    rows[3, 5] = 2
    write_csv(label, rows)
    _refused(made.source, tmp_path, "label 5 of node 3 is 2.0, neither 0 nor 1", drop_edge_data=True)


def test_edges_are_doubled_as_ogb_does_self_loops_included(tmp_path: Path) -> None:
    """The layout's own arrays, as ``read_csv_graph_raw`` makes them of the text."""
    made = _made(tmp_path / "s", "ogb-products")
    with gzip.open(made.source / "raw" / "edge.csv.gz", "rt") as file:
        edge = np.loadtxt(file, delimiter=",", dtype=np.int64).T
    doubled = np.repeat(edge, 2, axis=1)
    doubled[0, 1::2], doubled[1, 1::2] = doubled[1, 0::2].copy(), doubled[0, 0::2].copy()
    store = ooc.convert(made.source, tmp_path / "g.ooc")
    np.testing.assert_array_equal(edges_of(store), in_order(doubled))
    assert store.undirected and store.num_self_loops == 2 * int((edge[0] == edge[1]).sum())


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_split_dictionaries_come_before_lists(tmp_path: Path, tensors: bool, zipped: bool) -> None:
    made = _made(tmp_path / "s", "ogb-papers100m")
    write_split_dict(made.graph, made.source / "split" / "time", tensors=tensors)
    for name in ("train", "valid", "test"):
        (made.source / "split" / "time" / f"{name}.csv.gz").unlink()
    path = made.source
    if zipped:
        path = tmp_path / "p.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in made.source.rglob("*.*"):
                archive.write(file, file.relative_to(made.source.parent))
    store = ooc.convert(path, tmp_path / "g.ooc")
    np.testing.assert_array_equal(store.array("split/valid").read(), made.graph.valid)


class _Attack:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("/tmp/was-run"),)  # type: ignore[return-value]


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_split_dictionary_is_run(tmp_path: Path, legacy: bool) -> None:
    made = _made(tmp_path / "s", "ogb-papers100m")
    path = made.source / "split" / "time" / "split_dict.pt"
    torch.save({"train": _Attack()}, path, _use_new_zipfile_serialization=not legacy)
    _refused(made.source, tmp_path, "no file of torch 1.6 or later" if legacy else "touch|getattr.* is not allowed")
    torch.save({"train": [1, 2]}, path)
    _refused(made.source, tmp_path, "train is neither an array nor a whole number")
    torch.save(["train"], path)
    _refused(made.source, tmp_path, "holds no dictionary of arrays")
    torch.save({"train": np.arange(3)}, path)
    _refused(made.source, tmp_path, "lacks one of train, valid, test")
    os.truncate(path, (1 << 28) + 1)
    _refused(made.source, tmp_path, "it is larger than such a file can be")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raw/edge.csv.gz", "0,1\n1,x\n", "line 2: the column 1 holds 'x', not whole numbers"),
        ("raw/edge.csv.gz", "0,1\n1\n2,3,4\n", "line 2: 1 cells for 2 columns"),
        ("raw/edge.csv.gz", "0,1\n1,2.5\n", "line 2: the column 1 holds '2.5', not whole numbers"),
        ("raw/edge.csv.gz", "0,1\n", "has 1 edges, not the 1000 it says"),
        ("raw/edge.csv.gz", "0,1\n" * 1001, "has more edges than the 1000 it says"),
        ("raw/edge.csv.gz", "0,1\n" * 999 + "0,900\n", r"edge 999 \(0 → 900\) leaves the graph"),
        ("raw/edge.csv.gz", "0,1\n" * 999 + "0,99999999999999999999\n", "not whole numbers"),
        ("raw/node-feat.csv.gz", "", "is empty"),
        ("raw/node-feat.csv.gz", "1,2\n" * 150 + "1,\n" + "1,2\n" * 49, "feature 1 of node 150 is nan"),
        ("raw/node-feat.csv.gz", "1,2\n" * 199 + "1,nan\n", "feature 1 of node 199 is nan"),
        ("raw/node-label.csv.gz", "1\n" * 199 + "0.5\n", "node 199 has the label 0.5"),
        ("raw/node-feat.csv.gz", "1,2\n" * 199, "has features of 199 nodes, not of 200"),
        ("raw/node-feat.csv.gz", "1,2\n" * 201, r"features of the shape \(201, 2\) or more, not \(200, 2\)"),
        ("raw/node-label.csv.gz", "1\n" * 199, "has labels of 199 nodes, not of 200"),
        ("raw/node-label.csv.gz", "1\n" * 201, "has labels of more than its 200 nodes"),
        ("raw/num-node-list.csv.gz", "100\n100\n", "lists 2 graphs, not one"),
        ("raw/num-node-list.csv.gz", "-1\n", "-1 nodes"),
        ("split/time/train.csv.gz", "0\n200\n", "the train split names the node 200 of 200"),
        ("split/time/train.csv.gz", "0\n" * 201, "lists more numbers than there can be"),
        ("split/time/train.csv.gz", "", "empty train split"),
    ],
)
def test_text_that_is_wrong_is_named_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    made = _made(tmp_path / "s", "ogb-arxiv", nodes=200, edges=1000)
    with gzip.open(made.source / name, "wt") as file:
        file.write(text)
    _refused(made.source, tmp_path, message)


def test_a_line_without_an_end_is_given_up(tmp_path: Path) -> None:
    """A file of one huge line, which packs to nearly nothing, is not read to its end."""
    made = _made(tmp_path / "s", "ogb-arxiv", nodes=200, edges=1000)
    (made.source / "raw" / "edge.csv.gz").write_bytes(gzip.compress(b"1" * 200_000_000, 1))
    _refused(made.source, tmp_path, "has a line of more than")


def test_missing_files_and_doubled_datasets_are_named(tmp_path: Path) -> None:
    made = _made(tmp_path / "s", "ogb-arxiv")
    (made.source / "raw" / "node-label.csv.gz").unlink()
    _refused(made.source, tmp_path, r"node-label.csv.gz is missing")
    (made.source / "split" / "random").mkdir()
    _refused(made.source, tmp_path, "holds 2 kinds of split, not one")
    first = _made(tmp_path / "z", "ogb-papers100m-zip")
    with zipfile.ZipFile(first.source, "a") as archive:
        archive.writestr("other/raw/edge.csv.gz", b"")
    _refused(first.source, tmp_path, "holds 2 data sets")


def test_any_damage_to_a_zips_directory_is_one_line_or_none(tmp_path: Path) -> None:
    """Every third byte of it changed in turn, and the file cut there: a truncated download says so."""
    made = _made(tmp_path / "s", "ogb-products-zip", nodes=20, edges=30)
    whole = made.source.read_bytes()
    begin = whole.index(b"PK\x01\x02")
    refused = 0
    for at in range(begin, len(whole), 3):
        for damaged in (whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :], whole[:at]):
            made.source.write_bytes(damaged)
            try:
                _source(made.source)
            except SourceError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > (len(whole) - begin) // 3
    with pytest.raises(SourceError, match=r"products.zip cannot be read, it is damaged or incomplete"):
        _source(made.source)


def test_archives_that_cannot_be_streamed_say_what_to_do_and_others_are_read(tmp_path: Path) -> None:
    made = _made(tmp_path / "s", "ogb-papers100m")
    npz = made.source / "raw" / "data.npz"
    with np.load(npz) as archive:
        arrays = dict(archive)
    with zipfile.ZipFile(npz, "w", zipfile.ZIP_BZIP2) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.save(file, array)
    _refused(made.source, tmp_path, r"compressed by method 12, only deflate can be read; unzip")
    _write_without_sizes(npz, arrays)
    packed = tmp_path / "p.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in made.source.rglob("*.*"):
            archive.write(file, file.relative_to(made.source.parent))
    for number, source in enumerate((made.source, packed)):
        store = ooc.convert(source, tmp_path / f"{number}.ooc")
        np.testing.assert_array_equal(edges_of(store), in_order(made.graph.edge_index))


def _write_without_sizes(path: Path, arrays: dict[str, Any]) -> None:
    """As a program does that cannot seek: sizes follow the members instead of preceding them."""

    class Forwards:
        def __init__(self) -> None:
            self._file = path.open("wb")

        def write(self, data: bytes) -> int:
            return self._file.write(data)

        def flush(self) -> None:
            self._file.flush()

    out = Forwards()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[arg-type]
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.save(file, array)
    out._file.close()


def test_what_inflates_to_more_than_declared_is_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that says 1 KB and holds 100 MB costs no more than a first piece."""
    made = _made(tmp_path / "s", "ogb-papers100m")
    npz = made.source / "raw" / "node-label.npz"
    with zipfile.ZipFile(npz, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("node_label.npy", "w") as file:
            np.save(file, np.zeros((25_000_000, 1), np.float32))
        info = archive.getinfo("node_label.npy")
        info.file_size = 128 + 4 * 200
    inflated = 0
    read = zipfile.ZipExtFile._read1  # type: ignore[attr-defined]

    def counting(self: Any, size: int) -> bytes:
        nonlocal inflated
        data: bytes = read(self, size)
        inflated += len(data)
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "_read1", counting)
    with pytest.raises(SourceError, match=r"node_label.npy cannot be read, .* Bad CRC-32"):
        _source(made.source)
    assert inflated < 1 << 20


def test_the_labels_and_sizes_of_igb_must_fit(tmp_path: Path) -> None:
    made = _made(tmp_path / "s", "igb-full")
    paper = made.source / "processed" / "paper"
    fine = ooc.convert(made.source, tmp_path / "fine.ooc", label="2K")
    assert fine.num_classes == 2983 and fine.source["label"] == "2K"
    with pytest.raises(OptionError, match="label '20' is not one of 19, 2K"):
        _source(made.source, options={"label": "20"})
    with pytest.raises(OptionError, match="ogb has a split of its own; split=random cannot be chosen"):
        open_source(
            _made(tmp_path / "p", "ogb-arxiv").source, format=None, request=Request(split="random", budget_bytes=1)
        )
    with pytest.raises(OptionError, match="ogb takes no option label"):
        _source(_made(tmp_path / "o", "ogb-arxiv").source, options={"label": "19"})
    whole = (paper / "node_feat.npy").read_bytes()
    (paper / "node_feat.npy").write_bytes(whole[:-4])
    _refused(made.source, tmp_path, "no whole rows of 1024 float32 values")
    (paper / "node_feat.npy").write_bytes(whole[: 4096 * 100])
    _refused(made.source, tmp_path, r"has the shape \[160\], the labels of 1 to 100 papers wanted")
    large = _made(tmp_path / "l", "igb-large").source
    (large / "processed" / "paper" / "node_feat.npy").unlink()
    _refused(large, tmp_path, r"node_feat\.npy is missing")
    large = _made(tmp_path / "m", "igb-large").source
    np.zeros(199, np.float32).tofile(large / "processed" / "paper" / "node_label_19.npy")
    _refused(large, tmp_path, r"has the shape \[199\], the labels of 200 papers wanted")


def test_mag240m_counts_its_papers_twice(tmp_path: Path) -> None:
    made = _made(tmp_path / "s", "mag240m", nodes=200)
    torch.save({"paper": 201, "num_classes": 5}, made.source / "meta.pt")
    _refused(made.source, tmp_path, "counts 201 papers, .* has 200 rows")


def test_mag240ms_test_papers_count_where_they_have_labels(tmp_path: Path) -> None:
    """By either name that releases have for them; without any, the split is empty."""
    made = _made(tmp_path / "s", "mag240m", nodes=200, classes=4)
    labels = made.source / "processed" / "paper" / "node_label.npy"
    y = np.load(labels)
    tested = np.flatnonzero(np.isnan(y))
    y[tested[:3]] = 1
    np.save(labels, y)
    ids = {"train": np.flatnonzero(made.graph.train), "valid": np.flatnonzero(made.graph.valid)}
    for number, (extra, wanted) in enumerate([({"test": tested}, 3), ({"test-whole": tested}, 3), ({}, 0)]):
        torch.save(ids | extra, made.source / "split_dict.pt")
        store = ooc.convert(made.source, tmp_path / f"{number}.ooc")
        assert store.split_sizes["test"] == wanted
        np.testing.assert_array_equal(np.flatnonzero(store.array("split/test").read()), tested[:wanted])


def _links_in(folder: Path, kind: str, **files: str) -> Path:
    """A dataset of links of 5 nodes, its text files by name."""
    texts = {"num-node-list": "5\n", "num-edge-list": "3\n", "edge": "0,1\n2,3\n3,3\n", **files}
    (folder / "raw").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "raw" / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "split" / kind).mkdir(parents=True)
    for split in ("train", "valid", "test"):
        torch.save({"edge": np.array([[0, 1]])}, folder / "split" / kind / f"{split}.pt")
    return folder


@pytest.mark.parametrize("kind", ["time", "throughput", "target"])
@pytest.mark.parametrize("weighted", [False, True])
def test_graphs_of_links_have_no_labels(tmp_path: Path, kind: str, weighted: bool) -> None:
    """Edges both ways where ogb's loader has them so; weights and features as far as there are such."""
    files = {"edge_weight": "1\n2\n7\n"} if weighted else {"node-feat": "1,2\n" * 5}
    folder = _links_in(tmp_path / "collab", kind, **files)
    store = ooc.convert(folder, tmp_path / "g.ooc", dtype="float64")
    both = weighted or kind != "time"
    ends = [(0, 1), (2, 3), (3, 3)] + ([(1, 0), (3, 2), (3, 3)] if both else [])
    offsets, sources = (array.read() for array in store.topology("in"))
    targets = np.repeat(np.arange(5), np.diff(offsets))
    assert sorted(zip(sources.tolist(), targets.tolist(), strict=True)) == sorted(ends)
    assert store.num_features == (0 if weighted else 2) and sum(store.split_sizes.values()) == 0
    assert store.has_edge_weight == weighted
    if weighted:
        assert sorted(store.edge_weight("in").read().tolist()) == [1, 1, 2, 2, 7, 7]
    links = ooc.Links.read(folder / "split" / kind)
    assert links.train.tolist() == [[0], [1]]


def _graph_of(source: Source) -> Graph:
    """What ``source`` hands out, in small blocks, ``prepare`` aside."""
    blocks = list(source.labels(17))
    columns = [np.concatenate(column) for column in zip(*blocks, strict=True)]
    return Graph(
        edge_index=np.hstack([np.stack(block[:2]) for block in source.edges(13)]),
        x=np.vstack(list(source.features(7))),
        y=columns[0],
        train=columns[1],
        valid=columns[2],
        test=columns[3],
    )


@pytest.mark.parametrize("name", ["ogb-papers100m-zip", "ogb-products", "igb-full", "mag240m"])
def test_sources_start_afresh_at_each_call(tmp_path: Path, name: str) -> None:
    """In blocks of any size, twice the same."""
    made = _made(tmp_path / "s", name, nodes=200, edges=300)
    source = _source(made.source)
    if source.prepare is not None:
        (tmp_path / "work").mkdir()
        source = source.prepare(tmp_path / "work", ignore)
    first, second = _graph_of(source), _graph_of(source)
    for part in ("edge_index", "x", "y", "train", "valid", "test"):
        np.testing.assert_array_equal(getattr(first, part), getattr(second, part))
    np.testing.assert_array_equal(first.x, made.graph.x)
