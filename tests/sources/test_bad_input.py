# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with a source: one clear line, and nothing is left behind."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import ooc
from ooc.errors import OocError, OptionError, SourceError
from ooc.events import Event, Note
from ooc.storage.store import Task
from tests.conversion.arrays import Arrays, open_descriptors, random_arrays


def _changed(name: str, at: Any, value: Any) -> Arrays:
    arrays = random_arrays()
    arrays[name] = arrays[name].astype(np.result_type(arrays[name], np.asarray(value)))
    arrays[name][at] = value
    return arrays


def _replaced(**parts: Any) -> Arrays:
    return {name: array for name, array in (random_arrays() | parts).items() if array is not None}


def _sparse(**parts: Any) -> Arrays:
    x = scipy.sparse.random(60, 12, 0.3, format="csr", random_state=0)
    csr = {f"x_{part}": np.array(getattr(x, part)) for part in ("data", "indices", "indptr", "shape")}
    return _replaced(x=None, **csr | parts)


_MASK = random_arrays()["train_mask"]
_NO_SPLITS = dict.fromkeys(("train_mask", "val_mask", "test_mask"))
_BAD: dict[str, tuple[Arrays, str]] = {
    "edge too large": (_changed("edge_index", (0, 17), 60), r"edge 17 \(60 → \d+\) leaves the graph: .* 0 to 59"),
    "edge negative": (_changed("edge_index", (1, 299), -1), r"edge 299 \(\d+ → -1\) leaves the graph"),
    "edge ids float": (_replaced(edge_index=np.zeros((2, 4))), "float64 values, not node ids"),
    "edges of a wrong shape": (_replaced(edge_index=np.zeros((3, 5), dtype=int)), r"\(3, 5\), neither \[2, E\]"),
    "no edges at all": (_replaced(edge_index=None), "has no edge_index"),
    "NaN": (_changed("x", (4, 2), np.nan), "feature 2 of node 4 is nan"),
    "infinity": (_changed("x", (4, 2), -np.inf), "feature 2 of node 4 is -inf"),
    "no features": (_replaced(x=None), "no features: x is missing"),
    "features in one dimension": (_replaced(x=np.zeros(60)), "not .nodes, features."),
    "features of no columns": (_replaced(x=np.zeros((60, 0))), "60 nodes with 0 features"),
    "no nodes": (_replaced(x=np.zeros((0, 3))), "0 nodes with 3 features"),
    "fewer nodes than rows": (_replaced(num_nodes=np.array(59)), "60 rows for 59 nodes"),
    "nodes not a number": (_replaced(num_nodes=np.array([1, 2])), "num_nodes is no single whole number"),
    "text": (_replaced(x=np.array([["a"]])), "x holds <U1 values, not plain numbers"),
    "objects": (_replaced(y=np.array([None] * 60)), "y holds object values"),
    "label too large": (_changed("y", 8, 3), "node 8 has the label 3; the classes are 0 to 2"),
    "label negative": (_changed("y", 8, -2), "node 8 has the label -2"),
    "label a fraction": (_changed("y", 8, 0.5), "node 8 has the label 0.5, which is no class"),
    "no labels": (_replaced(y=None), "y is missing"),
    "labels of a wrong length": (_replaced(y=np.zeros(59, dtype=int)), r"shape \(59,\), one label for each of 60"),
    "several labels": (_replaced(y=np.zeros((60, 4), dtype=int)), "num_classes is 3, y has 4 columns"),
    "no classes": (_replaced(num_classes=np.array(0)), "num_classes is 0"),
    "overlap": (_replaced(val_mask=_MASK), r"the splits overlap: node \d+ is in train and valid"),
    "empty train split": (_replaced(train_mask=np.zeros(60, dtype=bool)), "empty train split"),
    "no train split": (_replaced(train_mask=None), "has no train_mask or train_idx beside its .*test_mask"),
    "numbers of nodes": (
        _replaced(x=np.arange(60)),
        r"where it numbers nodes, leave it out and give Trainer\(embedding",
    ),
    "mask of a wrong length": (_replaced(test_mask=np.zeros(61, dtype=bool)), r"test_mask has the shape \(61,\)"),
    "mask of numbers": (_changed("train_mask", 3, 2), "other values than true and false"),
    "index out of range": (_replaced(train_mask=None, train_idx=np.array([1, 60])), "names the node 60 of 60"),
    "index again": (_replaced(train_mask=None, train_idx=np.array([3, 1, 3])), "names the node 3 several times"),
    "index negative": (_replaced(train_mask=None, train_idx=np.array([1, -4])), "names the node -4"),
    "index of fractions": (_replaced(train_mask=None, train_idx=np.array([0.5])), "no list of node ids"),
    "two splits": (
        _replaced(train_idx=np.flatnonzero(_MASK)[1:]),
        r"train_mask and train_idx tell different things of node \d+; leave one out",
    ),
    "labels of signs": (
        _replaced(y=np.where(_MASK, 1, -1), num_classes=None, **_NO_SPLITS),
        "no other labels than 1 and -1, of which -1 .or NaN. is no label: give 0 and 1 for two classes",
    ),
    "answers of signs": (
        _replaced(y=np.where(_MASK, 1, -1)[:, None].repeat(2, 1), num_classes=None, **_NO_SPLITS),
        "no other labels than 1 and -1",
    ),
    "train node without label": (
        _replaced(y=np.full(60, -1)),
        r"node \d+ of the train split has no label .-1 and NaN are none.",
    ),
    "CSR incomplete": (_sparse(x_indptr=None), "x_indptr is missing"),
    "CSR indptr falls": (_sparse(x_indptr=np.arange(61)[::-1]), "indptr does not rise"),
    "CSR column out of range": (_sparse(x_shape=np.array([60, 3])), "outside its 3 columns"),
    "CSR dimensions": (_sparse(x_data=np.ones((216, 1))), "is no CSR matrix: data, indices, indptr or shape has wrong"),
    "index of rows": (_replaced(train_mask=None, train_idx=np.array([[0, 1]])), "train_idx is no list of node ids"),
    "edge types of fractions": (_replaced(edge_type=np.zeros(300)), "edge_type has to be a whole number for each"),
    "edge types and weights": (
        _replaced(edge_type=np.zeros(300, dtype=int), edge_weight=np.ones(300)),
        "what edges carry beside edge_type is not kept",
    ),
    "CSR rows": (_sparse(x_shape=np.array([61, 12])), "parts have other lengths"),
    "CSR indices float": (_sparse(x_indices=np.ones(216)), "must be whole numbers"),
    "whole numbers that are rounded": (
        _replaced(x=np.full((60, 12), 2**24 + 1)),
        r"feature 0 of node 0 is 16777217, which float32 would round; give dtype float64",
    ),
    "whole numbers in float64": (
        _replaced(x=np.column_stack((np.linspace(0, 1, 60), np.arange(60.0) + 2**24))),
        r"feature 1 of node 1 is 16777217, which float32 would round; give dtype float64",
    ),
    "whole numbers that no number of float32 is near": (
        _replaced(x=np.full((60, 12), 2**63 - 1)),
        r"feature 0 of node 0 is 9223372036854775807, which float32 would round",
    ),
    "masked": (_replaced(x=np.ma.array(np.ones((60, 12)), mask=np.eye(60, 12))), "x has values that are masked"),
    "weights that are rounded": (
        _replaced(edge_weight=np.full(random_arrays()["edge_index"].shape[1], 2**24 + 1)),
        "the weight of edge 0 is 16777217, which float32 would round; give dtype float64",
    ),
    "whole weights in float64": (
        _replaced(edge_weight=2.0**24 + np.arange(random_arrays()["edge_index"].shape[1])),
        "the weight of edge 1 is 16777217, which float32 would round; give dtype float64",
    ),
    "whole features of edges in float64": (
        _replaced(edge_attr=np.array([[0.5, 2.0**24 + 1]] * random_arrays()["edge_index"].shape[1])),
        "feature 1 of edge 0 is 16777217, which float32 would round; give dtype float64",
    ),
    "CSR of whole numbers": (
        _sparse(x_data=np.full(216, 2.0**24 + 1)),
        "is 16777217, which float32 would round",
    ),
    "CSR NaN": (_sparse(x_data=np.full(216, np.nan)), "is nan"),
}


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.where(_MASK, 1, 3), "arrays: no label is 0: where classes are counted from 1, subtract 1, or there are 4"),
        (
            np.eye(3, dtype=int)[random_arrays()["y"]],
            "arrays: each row of labels has a single 1: if it is a class, give",
        ),
    ],
)
def test_labels_that_may_be_meant_otherwise_are_told_of(tmp_path: Path, y: Any, said: str) -> None:
    heard: list[Event] = []
    ooc.convert(_replaced(y=y, num_classes=None), tmp_path / "g.ooc", listener=heard.append)
    assert any(isinstance(event, Note) and event.text.startswith(said) for event in heard)


def test_arrays_of_other_names_are_told_of(tmp_path: Path) -> None:
    arrays, heard = random_arrays() | {"edge_weights": np.ones(300)}, list[Event]()
    with pytest.warns(RuntimeWarning, match="arrays: not used: edge_weights"):
        ooc.convert(arrays, tmp_path / "g.ooc")
    np.savez(tmp_path / "g.npz", **arrays)
    ooc.convert(tmp_path / "g.npz", tmp_path / "h.ooc", listener=heard.append)
    assert Note("g: not used: edge_weights") in heard


@pytest.fixture(scope="module", autouse=True)
def _open_what_stays_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The event loop that zarr keeps has descriptors of its own."""
    ooc.convert(random_arrays(), tmp_path_factory.mktemp("first") / "g.ooc")


def _assert_refused(
    source: Any, folder: Path, message: str, kind: type[OocError] = SourceError, **options: Any
) -> None:
    files, descriptors = sorted(folder.iterdir()), open_descriptors()
    with pytest.raises(kind, match=message) as caught:
        ooc.convert(source, folder / "g.ooc", **options)
    assert "\n" not in str(caught.value)
    assert sorted(folder.iterdir()) == files and open_descriptors() <= descriptors


@pytest.mark.parametrize("case", _BAD)
def test_bad_arrays_are_refused(tmp_path: Path, case: str) -> None:
    arrays, message = _BAD[case]
    _assert_refused(arrays, tmp_path, message)


@pytest.mark.parametrize("damage", ["truncated", "empty", "no zip", "flipped"])
def test_damaged_npz_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "g.npz"
    np.savez_compressed(path, **random_arrays())
    good = path.read_bytes()
    at = good.index(b"x.npy") + 80
    bad = {
        "truncated": good[: len(good) // 2],
        "empty": b"",
        "no zip": b"hello" * 100,
        "flipped": good[:at] + bytes(byte ^ 255 for byte in good[at : at + 40]) + good[at + 40 :],
    }
    path.write_bytes(bad[damage])
    _assert_refused(path, tmp_path, r"g\.npz.* cannot be read, it is damaged or incomplete")


@pytest.mark.parametrize("size", [0, 50, 3000])
def test_truncated_npy_files_are_refused(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "g"
    folder.mkdir()
    for name, array in random_arrays(nodes=4000, edges=9000).items():
        np.save(folder / f"{name}.npy", array)
    os.truncate(folder / "edge_index.npy", size)
    _assert_refused(folder, tmp_path, r"edge_index\.npy cannot be read, it is damaged or incomplete")


def test_arrays_of_python_objects_are_never_loaded(tmp_path: Path) -> None:
    arrays = random_arrays() | {"y": np.array([{}] * 60)}
    np.savez(tmp_path / "g.npz", **arrays)
    _assert_refused(tmp_path / "g.npz", tmp_path, "array of Python objects")
    (tmp_path / "g").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "g" / f"{name}.npy", array)
    _assert_refused(tmp_path / "g", tmp_path, "array of Python objects")


def test_what_is_not_there_or_not_known_is_refused(tmp_path: Path) -> None:
    _assert_refused(tmp_path / "none.npz", tmp_path, "no file or folder")
    _assert_refused("none", tmp_path, "no file or folder none")
    _assert_refused("0 1\n" * 100, tmp_path, "cannot be read: File name too long")
    (tmp_path / "a.doc").write_text("a")
    _assert_refused(tmp_path / "a.doc", tmp_path, "no known format")
    (tmp_path / "empty").mkdir()
    _assert_refused(tmp_path / "empty", tmp_path, "of no known format")
    _assert_refused(tmp_path / "empty", tmp_path, "0 Planetoid data sets", format="planetoid")
    _assert_refused(tmp_path / "empty", tmp_path, "is a folder", format="npz")
    _assert_refused(tmp_path / "a.doc", tmp_path, "is a file", format="npy")
    _assert_refused(tmp_path / "empty", tmp_path, "not one of", OptionError, format="dgl")
    _assert_refused(17, tmp_path, "a int is no path")
    np.savez(tmp_path / "h.npz", node_features=np.zeros(3), node_labels=np.zeros(3), edges=np.zeros(3))
    _assert_refused(tmp_path / "h.npz", tmp_path, "train_masks, val_masks, test_masks missing")
    np.savez(tmp_path / "b.npz", feat_indptr=np.zeros(3))
    _assert_refused(tmp_path / "b.npz", tmp_path, "feat_data, .* missing")


def test_nonsense_options_are_refused(tmp_path: Path) -> None:
    arrays = random_arrays()
    _assert_refused(arrays, tmp_path, "int8", OptionError, dtype="int8")
    _assert_refused(arrays, tmp_path, "no size", OptionError, host_budget="plenty")
    _assert_refused(arrays, tmp_path, "neither a column of masks nor", split="often")
    _assert_refused(arrays, tmp_path, "one split only", split=2)
    for option in ("features", "labels"):
        told = f"a dictionary of arrays takes no option {option}"
        _assert_refused(arrays, tmp_path, told, OptionError, **{option: np.ones((60, 1))})
    _assert_refused(
        "synthetic:nodes=9,edges=9,features=2,classes=2", tmp_path, "split of its own", OptionError, split=1
    )


def test_features_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    arrays = _changed("x", (3, 1), 70000.0)
    _assert_refused(arrays, tmp_path, "feature 1 of node 3 is 70000, more than float16 can hold", dtype="float16")
    arrays = _changed("x", (3, 1), np.float64(1e300))
    _assert_refused(arrays, tmp_path, r"1e\+300, more than float32", dtype="float32")
    assert ooc.convert(arrays, tmp_path / "g.ooc", dtype="float64").array("x").read()[3, 1] == 1e300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes=9,edges=9,features=2", "classes missing"),
        ("", "nodes, edges, features, classes missing"),
        ("nodes=x,edges=9,features=2,classes=2", "nodes='x' is no number"),
        ("nodes=1.5,edges=9,features=2,classes=2", "nodes=1.5 is no whole number"),
        ("nodes=inf,edges=9,features=2,classes=2", "nodes='inf' is no number|no whole number"),
        ("nodes=1,edges=9,features=2,classes=1", "nodes=1 is not between 2"),
        ("nodes=9,edges=-1,features=2,classes=2", "edges=-1 is not between 0"),
        ("nodes=9,edges=9,features=-1,classes=2", "features=-1 is not between 0"),
        ("nodes=9,edges=9,features=2,classes=10", "classes=10 is not between 1 and 9"),
        ("nodes=9,edges=9,features=2,classes=2,train=1.5", "train=1.5 is not between 0 and 1"),
        ("nodes=9,edges=9,features=2,classes=2,train=nan", "train=nan is not between 0 and 1"),
        ("nodes=9,edges=9,features=2,classes=2,train=0", "empty train split"),
        ("nodes=9,edges=9,features=2,classes=2,colour=3", "'colour' is unknown; known are nodes"),
        ("nodes=9,nodes=8,edges=9,features=2,classes=2", "'nodes' is given twice"),
        ("nodes=90,edges=9,features=2,classes=2,types=2", "types is 1 or 3, the latter of directed graphs of 8 nodes"),
    ],
)
def test_wrong_synthetic_parameters_are_named(tmp_path: Path, text: str, message: str) -> None:
    _assert_refused(f"synthetic:{text}", tmp_path, message)


def test_an_array_whose_name_is_damaged_is_not_overlooked(tmp_path: Path) -> None:
    """An optional one: without it there would be another split, and no error."""
    path = tmp_path / "g.npz"
    np.savez_compressed(path, **random_arrays())
    data = path.read_bytes()
    at = data.rindex(b"val_mask.npy")  # In the directory at the end; each array has its name before it too.
    path.write_bytes(data[:at] + b"w" + data[at + 1 :])
    _assert_refused(path, tmp_path, "damaged or incomplete: File name in directory 'wal_mask.npy' and header .* differ")
    path.write_bytes(data[: at - 38] + b"\x01" + data[at - 37 :])
    _assert_refused(path, tmp_path, r"val_mask\.npy is encrypted")
    # The comment of the entry before the last one swallows the last.
    before = data.rindex(b"PK\1\2", 0, data.rindex(b"PK\1\2"))
    last_bytes = len(data) - 22 - data.rindex(b"PK\1\2")
    path.write_bytes(data[: before + 32] + last_bytes.to_bytes(2, "little") + data[before + 34 :])
    _assert_refused(path, tmp_path, r"is damaged or incomplete: its directory has \d files of \d")


@pytest.mark.parametrize("name", ["g.txt", "g.mtx", "g.parquet", "g.npz", "g.csv"])
def test_pipes_are_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError, match=r"a pipe or a device|not a file|is no file|no regular file|what it is"):
        ooc.convert(tmp_path / name, tmp_path / "g.ooc")


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table([[0, 1], [1, 0], [1, 2]], names=["src", "dst", "dst"])
    parquet.write_table(table, tmp_path / "edges.parquet")
    with pytest.raises(SourceError, match="two of its columns have the same name"):
        ooc.convert(tmp_path / "edges.parquet", tmp_path / "g.ooc")


_RANDOM = {"features": "random:3", "labels": "random:2"}
_TEXTS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "a row of more cells": ({"e.csv": "src,dst,x\n0,1,3\n1,2,3,4\n"}, {"columns": {"x": "ignore"}}, "line 3: 4 cells"),
    "a row of fewer cells": ({"e.csv": "src,dst,x\n0,1,3\n1,2\n"}, {"columns": {"x": "ignore"}}, "line 3: 2 cells"),
    "rows of fewer and more cells": (
        {"e.csv": "src,dst,x,z\n0,1,3,1\n1,2,4\n2,0,5,6,7\n"},
        {"columns": {"x": "ignore", "z": "ignore"}},
        "line 3: 3 cells for 4 columns",
    ),
    "a row of more texts": ({"e.csv": "src,dst\na,b\nb,c,d\n"}, {}, "line 3: 3 cells for 2 columns"),
    "no edge": ({"e.txt": ""}, {"format": "snap"}, "e has 0 nodes, which cannot be converted"),
    "a pickle": ({"e.pt": ""}, {}, "what Python has saved is read there"),
    "NUL in an id": ({"e.jsonl": '{"src": "a\\u0000", "dst": "b"}'}, {}, "holds an id with a NUL character in it"),
    "half a character": ({"e.jsonl": '{"src": "a\\ud800", "dst": "b"}'}, {}, "a text that is none in Unicode"),
    "times as labels": (
        {"edges.csv": "src,dst\n0,1\n", "nodes.csv": "y,f\n2020-01-01,1\n2020-01-02,2\n"},
        {"features": None, "labels": None},
        "the column y holds dates or times, which make no label; make a number of it",
    ),
    "classes in two columns": (
        {"edges.csv": "src,dst\n0,1\n", "nodes.csv": "y,z,f\n0,1,1\n1,0,2\n"},
        {"features": None, "labels": None, "columns": {"y": "label", "z": "label"}, "task": "classes"},
        "has labels in 2 columns, which are no classes",
    ),
    "names of classes that are essays": (
        {"edges.csv": "src,dst\n0,1\n", "nodes.csv": f"y,f\n{'a' * 1001},1\nb,2\n"},
        {"features": None, "labels": None},
        "holds texts of more than 1000 characters",
    ),
    "a feature twice": (
        {"edges.csv": "src,dst\n0,1\n", "nodes.csv": "y,f\n0,1\n1,2\n"},
        {"features": None, "labels": None, "feature_columns": "f,f"},
        "'f,f': each column once is wanted",
    ),
    "no table of edges": ({"edges.doc": "", "nodes.csv": "y,f\n0,1\n"}, {"format": "table"}, "has no edges.csv"),
}


@pytest.mark.parametrize("case", _TEXTS)
def test_wrong_texts_are_refused(tmp_path: Path, case: str) -> None:
    files, options, message = _TEXTS[case]
    (folder := tmp_path / "t").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    source = folder / next(iter(files)) if len(files) == 1 else folder
    given = {name: value for name, value in (_RANDOM | options).items() if value is not None}
    with pytest.raises(OocError, match=message):
        ooc.convert(source, tmp_path / "g.ooc", **given)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("part", ["features", "labels"])
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([None] * 3), r"are object\[3\], not numbers for each node"),
        (np.array(1), r"are int64\[\], not numbers for each node"),
        (np.ones((3, 0)), r"are float64\[3, 0\], not numbers for each node"),
        (np.ones((3, 2, 2)), "the shape .3, 2, 2., not"),
        (np.ma.array(np.ones((3, 2)), mask=np.eye(3, 2)), "have values that are masked"),
        (torch.eye(3).to_sparse(), "is no dense tensor"),
    ],
)
def test_arrays_that_hold_nothing_for_nodes_are_refused(tmp_path: Path, part: str, array: Any, message: str) -> None:
    (tmp_path / "e.txt").write_text("0 1\n1 2\n2 0\n")
    with pytest.raises(SourceError, match=message):
        ooc.convert(tmp_path / "e.txt", tmp_path / "g.ooc", **_RANDOM | {part: array})
    if isinstance(array, np.ndarray) and array.dtype != np.object_ and not np.ma.is_masked(array):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(SourceError, match="shape"):
            ooc.convert(tmp_path / "e.txt", tmp_path / "g.ooc", **_RANDOM | {part: str(tmp_path / "a.npy")})


def test_tensors_of_bfloat16_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "e.txt").write_text("0 1\n1 2\n2 0\n")
    x = torch.randn(3, 2, dtype=torch.bfloat16, requires_grad=True)
    store = ooc.convert(tmp_path / "e.txt", tmp_path / "g.ooc", features=x, labels=torch.eye(3))
    np.testing.assert_array_equal(store.array("x").read(), x.detach().float().numpy())
    assert store.task is Task.MULTILABEL and store.array("y").read().tolist() == np.eye(3).tolist()
