# SPDX-License-Identifier: Apache-2.0
"""Sources of many graphs: PyG's lists and datasets, TUDataset's texts, ogbg's, made-up ones."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data, Dataset
from torch_geometric.io import read_tu_data

import ooc
from ooc.cli import main
from ooc.conversion.reorder import reorder
from ooc.sources.files.dataset_files import DatasetFiles
from ooc.sources.formats.tu_dataset import _Columns
from ooc.sources.reading import Request
from ooc.sources.registry import open_source
from ooc.storage.store import Store, Task
from ooc.storage.verification import verify
from tests.conversion.arrays import edges_of, files_of, in_order
from tests.graphs import many_graphs


class _Counted:
    """Graphs that are made when they are asked for, and how often that is."""

    def __init__(self, graphs: list[Data]) -> None:
        self.graphs, self.passes = graphs, 0

    def __iter__(self) -> Iterator[Data]:
        self.passes += 1
        yield from self.graphs


@pytest.mark.parametrize(("labels", "task"), [("values", "values"), ("classes", "classes"), ("answers", "multilabel")])
def test_a_list_of_graphs_is_one_store(tmp_path: Path, labels: str, task: str) -> None:
    graphs = many_graphs(60, labels=labels)
    counted = _Counted(graphs)
    store = ooc.convert(counted, tmp_path / "g.ooc", dtype="float64", split="random:3")
    whole = Batch.from_data_list(graphs)
    assert store.num_graphs == 60 and store.task is Task(task) and counted.passes < 8
    assert verify(store) == [] and sum(store.split_sizes.values()) == 60
    assert store.array("graphs/indptr").read().tolist() == whole.ptr.tolist()
    np.testing.assert_array_equal(store.array("x").read(), whole.x.numpy())
    np.testing.assert_array_equal(edges_of(store), in_order(whole.edge_index.numpy()))
    y, asked = store.array("y").read(), whole.y.numpy()
    np.testing.assert_array_equal(
        y, np.where(np.isnan(asked), -1, asked) if labels == "answers" else asked.astype(y.dtype)
    )
    assert store.num_incomplete == (int(whole.y.isnan().any(1).sum()) if labels == "answers" else 0)


def test_three_lists_are_the_splits(tmp_path: Path) -> None:
    """Such as ``random_split`` of torch gives."""
    graphs = many_graphs(20)
    parts = graphs[:12], torch.utils.data.Subset(graphs, range(12, 17)), graphs[17:]
    stores = [ooc.convert(one, tmp_path / f"{at}.ooc") for at, one in enumerate((parts, [*parts]))]
    for store in stores:
        assert store.split_sizes == {"train": 12, "valid": 5, "test": 3}
        assert store.array("split/valid").read().nonzero()[0].tolist() == [*range(12, 17)]
        np.testing.assert_allclose(store.array("x").read(), torch.cat([one.x for one in graphs]), rtol=1e-6)


class _Indexed(Dataset):  # type: ignore[misc]
    def __init__(self, graphs: list[Data]) -> None:
        super().__init__()
        self._graphs = graphs

    def len(self) -> int:
        return len(self._graphs)

    def get(self, idx: int) -> Data:
        return self._graphs[idx]


def _with(**others: Any) -> Data:
    """A graph of 4 nodes and 3 edges with some attributes that are others."""
    usual = {"x": torch.eye(4), "edge_index": torch.tensor([[0, 1, 2], [1, 2, 3]]), "y": torch.ones(1), "num_nodes": 4}
    return Data(**usual | others)


def test_tensors_of_graphs_may_be_any_that_one_graphs_may_be(tmp_path: Path) -> None:
    """Parameters, few bits, negated views, weights in a column; a dataset of one graph is that graph."""
    plain = _with(edge_weight=torch.ones(3, 1))
    others = [
        _with(x=torch.eye(4).bfloat16().requires_grad_(), edge_weight=torch.ones(3, requires_grad=True)),
        _with(x=torch._neg_view(-torch.eye(4)), edge_weight=torch.ones(3).to(torch.float8_e4m3fn)),
    ]
    for at, one in enumerate((plain, *others)):
        store = ooc.convert([one] * 3, tmp_path / f"{at}.ooc", split="random:3")
        assert files_of(store.path) == files_of(tmp_path / "0.ooc")
    one = ooc.convert(_Indexed([_with(y=torch.arange(4) % 2)]), tmp_path / "one.ooc")
    assert not one.num_graphs and one.num_nodes == 4 and one.num_classes == 2


def test_integers_of_some_graphs_are_numbers_of_all(tmp_path: Path) -> None:
    """As in PyG's batches. The others were cut to integers before a model had them."""
    whole = _with(x=torch.ones(4, 2).long(), z=torch.arange(4), edge_attr=torch.arange(3), y=torch.ones(1).long())
    real = _with(x=torch.rand(4, 2), z=torch.rand(4), edge_attr=torch.rand(3), y=torch.rand(1))
    for at, graphs in enumerate(([whole, real], [real, whole], [whole, whole])):
        store = ooc.convert(graphs, tmp_path / f"{at}.ooc", split="random:3", inputs=["z"], dtype="float64")
        assert [one[-1] for part in ("inputs", "of_edges") for one in store.source[part]] == [at == 2] * 3
        assert store.task is (Task.CLASSES if at == 2 else Task.VALUES)
    for other, said in (
        ({"x": torch.ones(4, 1), "z": torch.ones(4, 2)}, "x of graph 1 has 1 columns, x of the first has 2"),
        ({"edge_attr": torch.ones(3, 1)}, "edge_attr of graph 1 has 1 columns, edge_attr of the first has none"),
    ):
        graphs = [whole, Data(**whole.to_dict() | other)]
        with pytest.raises(ooc.SourceError, match=said):
            ooc.convert(graphs, tmp_path / "g.ooc", inputs=["z"])


def test_edges_of_whole_graphs_come_in_blocks() -> None:
    graphs = many_graphs(20)
    source = open_source(graphs, format=None, request=Request(split=None, budget_bytes=10**9))
    blocks, whole = list(source.edges(10)), Batch.from_data_list(graphs)
    assert 3 < len(blocks) < 20
    ends = np.concatenate([np.stack(block[:2]) for block in blocks], axis=1)
    np.testing.assert_array_equal(ends, whole.edge_index)
    np.testing.assert_array_equal(np.concatenate([block.data.features for block in blocks]), whole.edge_attr)


def test_what_is_no_list_of_graphs_is_said(tmp_path: Path) -> None:
    graphs = many_graphs(4)
    wrong = {
        "of batches give the graphs": [Batch.from_data_list(graphs)],
        r"x of graph 0 has the shape \(\d+,\)": [Data(x=torch.ones(3), edge_index=graphs[0].edge_index, y=graphs[0].y)],
        "gives its graphs once": iter(graphs),
        "the list of graphs is empty": [],
        r"graph 4 has features, .* \(3, 2, 0, 0\)": [*graphs, *many_graphs(1, edge_features=0)],
        "graph 1 has no y": [graphs[0], Data(x=graphs[0].x, edge_index=graphs[0].edge_index)],
        "an edge leaves its graph": [Data(x=torch.ones(2, 1), edge_index=torch.full((2, 1), 5), y=torch.ones(1))] * 2,
        r"an entry for each of its nodes; .* make it \[1, labels\]": [
            Data(x=one.x, edge_index=one.edge_index, y=torch.arange(one.num_nodes)) for one in graphs[:1] * 2
        ],
        "with labels of nodes, of batch = Batch.from": [
            Data(x=one.x, edge_index=one.edge_index, y=torch.ones(one.num_nodes, 3)) for one in graphs
        ],
        "where a batch is one graph, with labels of nodes, make a Data of its x": Batch.from_data_list(graphs),
        "x of graph 0 is no dense tensor": [_with(x=torch.eye(4).to_sparse())],
        r"graph 1: x has the shape \(3, 4\), not a row for each of 4 nodes": [_with(), _with(x=torch.ones(3, 4))],
        r"edge_index of graph 1 is int64 \[3, 2\], not node ids \[2, edges\]": [
            _with(), _with(edge_index=_with().edge_index.t())],
        "edge_index of graph 0 is float32": [_with(edge_index=torch.rand(2, 3))],
        r"edge_weight of graph 0 has the shape \(\) for 3 edges": [_with(edge_weight=torch.tensor(1.0))],
        r"edge_weight of graph 0 has the shape \(3, 2\)": [_with(edge_weight=torch.ones(3, 2))],
        "y of graph 0 holds <U1 values": [_with(y="a")],
        "y of graph 0 is no array": [_with(y=[[1], [1, 0]])],
        "has no graphs": _Indexed([]),
        "graph 1 has no nodes": [graphs[0], Data(x=graphs[0].x[:0], edge_index=graphs[0].edge_index[:, :0],
                                 edge_attr=graphs[0].edge_attr[:0], y=graphs[0].y)],
    }  # fmt: skip
    for said, source in wrong.items():
        with pytest.raises(ooc.SourceError, match=said):
            ooc.convert(source, tmp_path / "g.ooc")
    with pytest.raises(ooc.OptionError, match="stay together"):
        ooc.convert(graphs, tmp_path / "g.ooc", order="hop")
    with pytest.raises(ooc.OptionError, match="none of whose links are held out; leave out hold_out_links="):
        ooc.convert(graphs, tmp_path / "g.ooc", hold_out_links="0.1,0.1")
    with pytest.raises(ooc.OptionError, match="dense"):
        ooc.convert(graphs, tmp_path / "g.ooc", feature_form="sparse")
    store = ooc.convert(graphs, tmp_path / "g.ooc")
    with pytest.raises(ooc.StoreError, match="an order by hops"):
        reorder(store)


def _tu(folder: Path, *, values: bool) -> Path:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 7, 30)
    graph = np.repeat(np.arange(30), sizes)
    first = np.cumsum(sizes) - sizes
    of_edge = np.sort(rng.integers(0, 30, 150))
    ends = first[of_edge, None] + (rng.random((150, 2)) * sizes[of_edge, None]).astype(int)
    ends = np.unique(ends, axis=0)
    texts = {
        "A": ends + 1,
        "graph_indicator": graph + 1,
        "node_labels": rng.integers(2, 5, len(graph)),
        "node_attributes": rng.random((len(graph), 2)).round(4),
        "edge_labels": rng.integers(0, 3, len(ends)),
        "graph_labels": rng.choice([-1, 1], 30),
    }
    if values:
        texts["graph_attributes"] = rng.random(30).round(4)
    folder.mkdir()
    for name, rows in texts.items():
        lines = [", ".join(map(str, np.atleast_1d(row).tolist())) for row in rows]
        (folder / f"DS_{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("values", [False, True])
def test_tudatasets_are_pygs(tmp_path: Path, values: bool) -> None:
    folder = _tu(tmp_path / "DS", values=values)
    data, slices, _ = read_tu_data(str(folder), "DS")
    store, other = (ooc.convert(folder, tmp_path / f"{budget}.ooc", host_budget=budget) for budget in ("1G", "40M"))
    names = set(files_of(store.path)) - {"zarr.json"}
    assert all(files_of(store.path)[name] == files_of(other.path)[name] for name in names)
    assert store.array("graphs/indptr").read().tolist() == slices["x"].tolist() and verify(store) == []
    np.testing.assert_array_equal(store.array("x").read(), data.x.numpy())
    np.testing.assert_array_equal(edges_of(store), in_order(_global(data, slices)))
    np.testing.assert_array_equal(store.array("y").read().reshape(-1), data.y.numpy())
    assert store.task is (Task.VALUES if values else Task.CLASSES)
    order = np.lexsort(_global(data, slices))
    np.testing.assert_array_equal(store.edge_features("in").read(), data.edge_attr.numpy()[order])


def _two_graphs(folder: Path, **others: str) -> Path:
    texts = {"A": "1, 2\n2, 1\n3, 4\n4, 3\n", "graph_indicator": "1\n1\n2\n2\n", "graph_labels": "5\n7\n"}
    folder.mkdir()
    for name, text in (texts | others).items():
        (folder / f"DS_{name}.txt").write_text(text)
    return folder


def test_a_tudataset_may_have_nothing_but_classes(tmp_path: Path) -> None:
    bare = ooc.convert(_two_graphs(tmp_path / "a"), tmp_path / "a.ooc")
    carrying = _two_graphs(tmp_path / "b", edge_attributes="1\n2\n3\n4\n")
    dropped = ooc.convert(carrying, tmp_path / "b.ooc", drop_edge_data=True)
    assert {name: dropped.checksum(name) for name in dropped.arrays()} == {
        name: bare.checksum(name) for name in bare.arrays()
    }
    assert edges_of(bare).tolist() == [[1, 0, 3, 2], [0, 1, 2, 3]] and bare.class_names == ("5", "7")
    assert bare.array("x").read().tolist() == [[1]] * 4 and bare.array("y").read().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        # A random split has places for the graphs that there are; another's was looked for without an end.
        ("graph_labels", "1\n-1\n1\n", "labels of more than the 2 nodes or graphs that there are"),
        ("graph_labels", "1\n", "has labels of 1 graphs, not of 2"),
        ("graph_indicator", "1\n2\n1\n2\n", "the graphs of nodes are not 1, 1, …, 2, 2, …"),
        ("graph_indicator", f"1\n1\n{10**15}\n{10**15}\n", "the graphs of nodes are not 1, 1, …, 2, 2, …"),
        ("node_attributes", "1\n2\n3\n", "has features of 3 nodes, not of 4"),
        ("node_attributes", "1\n2\n3\n4\n5\n", r"has features of the shape \(5, 1\) or more, not \(4, 1\)"),
        ("A", "1, 2\n2, 3\n", r"edge 1 \(1 → 2\) leads from one graph to another"),
    ],
)
def test_texts_of_graphs_that_do_not_fit_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    folder = _two_graphs(tmp_path / "DS", **{name: text})
    with pytest.raises(ooc.SourceError, match=said):
        ooc.convert(folder, tmp_path / "g.ooc")
    assert [path.name for path in tmp_path.iterdir()] == ["DS"]


def test_attributes_that_end_with_a_block_are_too_few(tmp_path: Path) -> None:
    (tmp_path / "DS_node_labels.txt").write_text("0\n1\n0\n1\n")
    (tmp_path / "DS_node_attributes.txt").write_text("0.5\n1.5\n")
    columns = _Columns(DatasetFiles(tmp_path, (), 1 << 25, prefix="DS_"), "node")
    with pytest.raises(ooc.SourceError, match="differ in length"):
        list(columns.blocks(2))


def _global(data: Data, slices: dict[str, torch.Tensor]) -> np.ndarray:
    counts = slices["edge_index"].diff()
    return (data.edge_index + slices["x"][:-1].repeat_interleave(counts)).numpy()


def test_ogbg_texts_with_missing_answers(tmp_path: Path) -> None:
    graphs = many_graphs(25, labels="answers")
    folder = tmp_path / "mol"

    def write(name: str, lines: list[str]) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))

    def rows(parts: list[torch.Tensor]) -> list[str]:
        return [",".join("" if value != value else repr(value) for value in row) for row in torch.cat(parts).tolist()]

    write("raw/edge.csv.gz", rows([one.edge_index.T for one in graphs]))
    write("raw/num-node-list.csv.gz", [str(one.num_nodes) for one in graphs])
    write("raw/num-edge-list.csv.gz", [str(one.num_edges) for one in graphs])
    write("raw/node-feat.csv.gz", rows([one.x for one in graphs]))
    write("raw/edge-feat.csv.gz", rows([one.edge_attr for one in graphs]))
    write("raw/graph-label.csv.gz", rows([one.y for one in graphs]))
    for number, split in enumerate(("train", "valid", "test")):
        write(f"split/scaffold/{split}.csv.gz", [str(at) for at in range(number, 25, 3)])
    store = ooc.convert(folder, tmp_path / "g.ooc", dtype="float64")
    for one in graphs:
        one.edge_index = torch.cat([one.edge_index, one.edge_index.flip(0)], dim=1)
    whole = Batch.from_data_list(graphs)
    assert verify(store) == [] and store.task is Task.MULTILABEL and store.undirected
    np.testing.assert_array_equal(edges_of(store), in_order(whole.edge_index.numpy()))
    np.testing.assert_allclose(store.array("x").read(), whole.x.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(store.array("y").read(), whole.y.nan_to_num(nan=-1).numpy())
    assert np.flatnonzero(store.array("split/valid").read()).tolist() == list(range(1, 25, 3))


def test_made_up_graphs_are_as_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "synthetic:graphs=5000,nodes=12,edges=14,features=3,seed=4"
    store = ooc.convert(text, tmp_path / "a.ooc")
    other = ooc.convert(text, tmp_path / "b.ooc", host_budget="40M")
    assert all(np.array_equal(store.array(name).read(), other.array(name).read()) for name in store.arrays())
    sizes = np.diff(store.array("graphs/indptr").read())
    assert sizes.min() == 6 and sizes.max() == 18 and sizes.mean() == pytest.approx(12, rel=0.02)
    assert store.num_edges / 2 / 5000 == pytest.approx(14, rel=0.05) and verify(store) == []
    assert ooc.convert(f"{text},classes=3", tmp_path / "c.ooc").num_classes == 3
    assert main(["info", str(store.path)]) == 0 and main(["verify", str(store.path)]) == 0
    assert "num_graphs       5,000" in capsys.readouterr().out
    with pytest.raises(ooc.SourceError, match="features missing"):
        ooc.convert("synthetic:graphs=10,nodes=3,edges=3", tmp_path / "d.ooc")
    with pytest.raises(ooc.SourceError, match="edges=1 is not between 2"):
        ooc.convert("synthetic:graphs=10,nodes=3,edges=1,features=1", tmp_path / "d.ooc")


def test_verification_finds_edges_between_graphs(tmp_path: Path) -> None:
    store: Store = ooc.convert(many_graphs(10), tmp_path / "g.ooc")
    path = store.array("graphs/indptr").chunk_path(0)
    offsets = np.fromfile(path, dtype=np.int64)
    offsets[1:10] -= 1
    path.write_bytes(offsets.tobytes())
    assert "checksum" in verify(store)[0]
    import google_crc32c

    sums = store.array("graphs/indptr").path / "checksums.bin"
    sums.write_bytes(np.array([google_crc32c.value(path.read_bytes())], dtype="<u4").tobytes())
    assert any("from one graph to another" in problem for problem in verify(store))
    offsets[10] -= 1
    path.write_bytes(offsets.tobytes())
    sums.write_bytes(np.array([google_crc32c.value(path.read_bytes())], dtype="<u4").tobytes())
    assert f"graphs/indptr: it ends at {offsets[10]}" in str(verify(store))
