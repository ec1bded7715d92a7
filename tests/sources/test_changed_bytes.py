# SPDX-License-Identifier: Apache-2.0
"""Single bytes that turn a number into another one, where something in the format can tell."""

import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.errors import SourceError
from ooc.sources.files import pickles
from ooc.sources.formats import igb
from ooc.sources.formats.edges.bvgraph import Code, Family
from tests.conversion.arrays import random_arrays
from tests.sources.fixtures import FIXTURES, Made, random_graph


def _made(folder: Path, name: str) -> Made:
    rng = np.random.default_rng(3)
    (folder / "source").mkdir()
    return FIXTURES[name](random_graph(rng, nodes=40, edges=120, features=4), folder / "source", rng)


def _changed(path: Path, old: bytes, new: bytes) -> None:
    """Replace the first ``old`` in the file."""
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def _refused(source: Any, folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        ooc.convert(source, folder / "g.ooc", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train_mask", "test_mask"])
@pytest.mark.parametrize("value", [2, 0x80])
def test_truth_values_are_one_bit(tmp_path: Path, name: str, value: int) -> None:
    """In place of a 1 too: it would go on into the store as it is."""
    for file, array in random_arrays().items():
        np.save(tmp_path / f"{file}.npy", array)
    _changed(tmp_path / f"{name}.npy", b"\x00\x01", bytes([0, value]))
    _refused(tmp_path, tmp_path, rf"{name} .* it holds truth values that are neither 0 nor 1")


def test_truth_values_of_answers_and_features_are_one_bit(tmp_path: Path) -> None:
    arrays = random_arrays() | {"y": np.ones((60, 3), dtype=np.bool_)}
    arrays.pop("num_classes", None)
    for name in ("y", "x"):
        wrong = np.ones((60, 3), dtype=np.uint8)
        wrong[7, 1] = 0x40
        _refused(arrays | {name: wrong.view(np.bool_)}, tmp_path, f"{name} .*neither 0 nor 1")


def test_a_class_past_all_sense_is_none(tmp_path: Path) -> None:
    """One high byte of a label would make a model of millions of classes."""
    arrays = {name: array for name, array in random_arrays().items() if name != "num_classes"}
    arrays["y"] = arrays["y"].astype(np.int64)
    arrays["y"][8] |= 3 << 16
    _refused(arrays, tmp_path, r"node 8 has the label 19\d{4}; .* as many as nodes or 65,536 at the most\)")
    ooc.convert(arrays | {"num_classes": np.array(200_000)}, tmp_path / "g.ooc")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("1\x1c", "control character 0x1c"),
        ("1\x0b", "control character 0x0b"),
        ("1_0", r"edge 1 \(1_0 → 20\) has an end that is no node"),
        ("\u0661\u0660", r"edge 1 \(\u0661\u0660 → 20\) has an end that is no node"),
    ],
)
def test_numbers_in_tables_are_plain_digits(tmp_path: Path, cell: str, message: str) -> None:
    """Python and numpy take more than that for a number, or for a space."""
    (tmp_path / "edges.csv").write_text(f"source,target\n100,20\n{cell},20\n")
    (tmp_path / "nodes.csv").write_text("id,f,label,split\n1,0.5,0,train\n10,1,1,val\n20,2,,\n100,3,,\n")
    _refused(tmp_path, tmp_path, message)


def test_a_first_line_that_is_no_edge_is_no_header_in_graphbolt(tmp_path: Path) -> None:
    made = _made(tmp_path, "graphbolt")
    (edges,) = made.source.rglob("*.csv")
    edges.write_bytes(b"x" + edges.read_bytes()[1:])
    _refused(made.source, tmp_path, r"begins with 'x.*, no edge; GraphBolt's have no header")


@pytest.mark.parametrize("entry", [b"1e1 20 1", b"1. 20 1", b"+1 20 1", b"20 -1 1"])
def test_rows_and_columns_of_a_matrix_with_values_are_whole_numbers(tmp_path: Path, entry: bytes) -> None:
    made = _made(tmp_path, "mtx-integer")
    lines = made.source.read_bytes().split(b"\n")
    made.source.write_bytes(b"\n".join([*lines[:7], entry, *lines[8:]]))
    _refused(
        made.source,
        tmp_path,
        r"line 8: the column 0 holds .*, not whole|edge \d+ .* leaves the graph",
        **made.options,
    )


def test_the_nodes_that_a_list_counts_are_compared_though_files_have_a_row_for_each(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text("# Nodes: 4 Edges: 3\n0 1\n1 2\n2 3\n")
    np.save(tmp_path / "x.npy", np.ones((6, 2)))  # Two nodes without an edge: those a list does not count.
    np.save(tmp_path / "y.npy", np.arange(6) % 2)
    options = {"features": tmp_path / "x.npy", "labels": tmp_path / "y.npy", "split": "random"}
    store = ooc.convert(path, tmp_path / "g.ooc", **options)
    assert (store.num_nodes, store.num_edges, store.has("ids")) == (6, 3, False)
    _changed(path, b"2 3", b"2 1")
    _refused(path, tmp_path, "says that it has 4 nodes, 3 are in it", force=True, **options)


@pytest.mark.parametrize("part", ["ally", "ty"])
def test_labels_of_planetoid_are_one_hot(tmp_path: Path, part: str) -> None:
    made = _made(tmp_path, "planetoid")
    path = made.source / "raw" / f"ind.made.{part}"
    _changed(path, b"\x00\x01\x00\x00\x00", b"\x00\x02\x00\x00\x00")
    _refused(made.source, tmp_path, rf"{part} is damaged: row \d+ is no one-hot class")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x05\x96" + 8 * b"K" + b"abc.", "it holds mutable bytes|but only 4 remain"),
        (b"\x80\x05\x96\x01" + 7 * b"\0" + b"a.", "it holds mutable bytes"),
        (b"\x80\x02]r\xff\xff\xff\x1f.", "it counts more objects than it has bytes"),
        (b"\x80\x04\x8e" + 8 * b"K" + b"abc.", "but only 4 remain"),
    ],
)
def test_sizes_in_a_pickle_are_checked_before_anything_is_allocated(
    tmp_path: Path, data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of mutable bytes that cannot be had, the interpreter may print an error besides raising it."""
    made = _made(tmp_path, "planetoid")
    (made.source / "raw" / "ind.made.graph").write_bytes(data)
    monkeypatch.setattr(pickles._Unpickler, "load", lambda self: pytest.fail("it was loaded"))
    with pytest.raises(SourceError, match=f"ind.made.graph cannot be read, .*({message})"):
        pickles.read_neighbours(made.source / "raw" / "ind.made.graph")


@pytest.mark.parametrize("text", ["99999999999999999999", "1.5", "x" * 5000])
def test_test_nodes_of_planetoid_are_node_ids(tmp_path: Path, text: str) -> None:
    """Not larger than any number of ours, either; and a long text is not said whole."""
    made = _made(tmp_path, "planetoid")
    (made.source / "raw" / "ind.made.test.index").write_text(f"7\n{text}\n")
    _refused(made.source, tmp_path, "test.index holds something else than node ids: .{1,200}$")


def test_a_pipe_among_planetoids_files_is_not_waited_for(tmp_path: Path) -> None:
    made = _made(tmp_path, "planetoid")
    (path := made.source / "raw" / "ind.made.x").unlink()
    os.mkfifo(path)
    _refused(made.source, tmp_path, r"ind\.made\.x cannot be read: it is no file")


def test_links_to_one_another_are_refused(tmp_path: Path) -> None:
    made = _made(tmp_path, "graphbolt")
    (path := made.source / "edges" / "cite.csv").unlink()
    path.symlink_to(path.name)
    _refused(made.source, tmp_path, "names edges/cite.csv, which leads nowhere")


def test_a_length_of_a_number_that_is_too_long_takes_no_memory() -> None:
    """Of a δ code: 2³⁰ bits follow, by what it says."""
    bits = "0" * 30 + f"{1 << 30:b}" + "1" * 200
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 62 bits"):
            Code(Family.DELTA).read(bits, 0)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_gaps_between_successors_are_counted(tmp_path: Path) -> None:
    """Another successor in the place of one, as many arcs of each kind: the sizes of gaps tell."""
    made = _made(tmp_path, "webgraph")
    properties = made.source.with_suffix(".properties")
    text = properties.read_text()
    before, _, counts = text.partition("successorexpstats=")
    first, second, *rest = counts.strip().split(",")
    for wrong in ([str(int(first) - 1), str(int(second) + 1), *rest], [first, second, *rest, "1"]):
        properties.write_text(f"{before}successorexpstats={','.join(wrong)}\n")
        _refused(made.source, tmp_path, "other gaps between successors than its properties count", **made.options)
    properties.write_text(f"{before}successorexpstats={first},-1\n")
    _refused(made.source, tmp_path, "which are no counts", **made.options)
    properties.write_text(f"{before}successorexpstats={','.join([first, second, *rest, '0'])}\n")
    ooc.convert(made.source, tmp_path / "g.ooc", **made.options)


def test_labels_without_a_header_may_be_of_any_first_papers_but_not_at_the_published_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loader says of its papers and labels is what can tell that a file was cut."""
    made = _made(tmp_path, "igb-full")
    labels = made.source / "processed" / "paper" / "node_label_19.npy"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-4])
    assert sum(ooc.convert(made.source, tmp_path / "cut.ooc").split_sizes.values()) == 31
    labels.write_bytes(whole[:-3])
    _refused(made.source, tmp_path, "no whole rows of 1 float32 values")
    monkeypatch.setitem(igb._PAPERS, "full", 40)
    monkeypatch.setitem(igb._LABELLED_OF_FULL, "19", 32)
    labels.write_bytes(whole[:-4])
    _refused(made.source, tmp_path, r"the shape \[31\], the labels of 32 to 40 papers wanted")
    labels.write_bytes(whole)
    ooc.convert(made.source, tmp_path / "g.ooc")


@pytest.mark.parametrize(
    ("part", "found", "message"),
    [
        ("graph", [1, 2], "holds no lists of neighbours: 'list' object"),
        ("graph", {0: [1.5]}, "holds no lists of neighbours: not all of them are whole numbers"),
        ("graph", {True: [1]}, "holds no lists of neighbours: not all of them are whole numbers"),
        ("graph", {0: [2**70]}, "holds no lists of neighbours: Python int too large"),
        ("allx", [1, 2], "holds no sparse matrix"),
        ("allx", "tx", "allx, tx and test.index of made do not fit one another"),
        ("ty", [1, 2], "holds no array"),
        ("ally", "ty", "labels and features of made do not fit one another"),
        ("y", "ally", r"\d+ nodes cannot hold \d+ training and 500 validation nodes"),
        ("test.index", b"", "names no test node"),
    ],
)
def test_files_of_planetoid_that_hold_something_else_are_refused(
    tmp_path: Path, part: str, found: Any, message: str
) -> None:
    """A text names the file that is there instead."""
    made = _made(tmp_path, "planetoid")
    raw = made.source / "raw"
    data = (raw / f"ind.made.{found}").read_bytes() if isinstance(found, str) else found
    (raw / f"ind.made.{part}").write_bytes(data if isinstance(data, bytes) else pickle.dumps(data, protocol=2))
    _refused(made.source, tmp_path, message)


def test_planetoids_nell_is_refused(tmp_path: Path) -> None:
    made = _made(tmp_path, "planetoid")
    for path in (made.source / "raw").iterdir():
        path.rename(path.with_name(path.name.replace("made", "nell")))
    _refused(made.source, tmp_path, "needs made-up features")
