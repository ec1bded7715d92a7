# SPDX-License-Identifier: Apache-2.0
"""What the columns of a table of nodes are taken for: ids, labels, splits, features, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
from click.testing import CliRunner

import ooc
from ooc.cli import main
from ooc.cli.convert import command
from ooc.errors import OptionError, SourceError
from ooc.events import Event, Note
from ooc.storage.store import Store
from tests.conversion.arrays import edges_of
from tests.examples import thorough

_EDGES = {"source": [70, 10, 40], "target": [10, 40, 20]}
_NODES = {"id": [70, 10, 40, 20], "f": [0.5, 1.5, 2.5, 3.5], "label": [0, 1, 0, 1]}
_MASKS = {"train": [True, True, False, False], "val": [False, False, True, False], "test": [False] * 3 + [True]}
_WORDS = {"split": ["train", "train", "val", "test"]}


def _folder(folder: Path, form: str, nodes: dict[str, list], edges: dict[str, list] = _EDGES) -> Path:
    (source := folder / "t").mkdir(exist_ok=True)
    for name, columns in (("nodes", nodes), ("edges", edges)):
        if form == "parquet":
            pyarrow.parquet.write_table(pa.table(columns), source / f"{name}.parquet")
        else:
            lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
            (source / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return source


def _splits(store: Store) -> list[list[bool]]:
    return [store.array(f"split/{split}").read().tolist() for split in ("train", "valid", "test")]


def _as_numbers(columns: dict[str, list]) -> dict[str, list]:
    return {name: [int(cell) for cell in cells] for name, cells in columns.items()}


@pytest.mark.parametrize("form", thorough(["csv", "parquet"], "parquet"))
@pytest.mark.parametrize(
    "splits",
    [
        _MASKS,
        _as_numbers(_MASKS),
        {"train_mask": _MASKS["train"], "valid_mask": _MASKS["val"], "test_mask": _MASKS["test"]},
        {"is_train": _MASKS["train"], "Validation": _MASKS["val"], "is_test": _MASKS["test"]},
        _WORDS,
        {"Split": _WORDS["split"]},
    ],
)
def test_columns_of_splits_are_splits(tmp_path: Path, form: str, splits: dict[str, list]) -> None:
    """Masks of true and false, or of 1 and 0, and words: none of them is a feature."""
    events: list[Event] = []
    source = _folder(tmp_path, form, _NODES | splits)
    store = ooc.convert(source, tmp_path / "g.ooc", listener=events.append)
    assert store.num_features == 1 and store.array("x").read()[:, 0].tolist() == _NODES["f"]
    assert _splits(store) == list(_MASKS.values())
    notes = [" ".join(event.text.split()) for event in events if isinstance(event, Note)]
    said = [f"columns of {source / 'nodes'}.{form}: id id f feature label label"]
    if len(splits) == 1:
        said += [f"{name} split, in words" for name in splits]
    else:
        said += [f"{name} {split} split" for name, split in zip(splits, ("train", "valid", "test"), strict=True)]
    assert " ".join(said) in notes
    assert f"columns of {source / 'edges'}.{form}: source src: where edges start target dst: where they end" in notes


def test_a_random_split_beside_ones_own_is_said_and_makes_no_feature_of_it(tmp_path: Path) -> None:
    events: list[Event] = []
    source = _folder(tmp_path, "parquet", _NODES | _MASKS)
    store = ooc.convert(source, tmp_path / "g.ooc", split="random:3", listener=events.append)
    assert store.num_features == 1
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("train, val, test  split, but not used: the split asked for is random:3" in note for note in notes)
    assert any("split is random 60/20/20, seed 3" in note for note in notes)
    with pytest.raises(OptionError, match="contradict each other"):
        ooc.convert(source, tmp_path / "h.ooc", split="random", columns={"train": "train"})


def test_split_columns_of_other_names_are_named(tmp_path: Path) -> None:
    """Of words, or of true and false for one split each."""
    a, b, c = _MASKS.values()
    source = _folder(tmp_path, "parquet", _NODES | {"a": a, "b": b, "c": c, "part": _WORDS["split"]})
    store = ooc.convert(
        source, tmp_path / "g.ooc", columns={"a": "train", "b": "val", "c": "test"}, feature_columns="f"
    )
    assert _splits(store) == list(_MASKS.values())
    words = ooc.convert(source, tmp_path / "h.ooc", columns={"part": "split"}, feature_columns="f")
    assert _splits(words) == list(_MASKS.values())
    alone = ooc.convert(source, tmp_path / "i.ooc", columns={"a": "train", "b": "val"}, feature_columns="f,c")
    assert _splits(alone) == [a, b, [False] * 4] and alone.num_features == 2


def test_features_that_are_called_as_splits_can_be_named(tmp_path: Path) -> None:
    nodes = _NODES | _WORDS | {"val": [0.1, 0.2, 0.3, 0.4]}
    store = ooc.convert(_folder(tmp_path, "csv", nodes), tmp_path / "g.ooc")
    assert store.num_features == 2  # Without a column train it is no split.
    nodes |= {"train": [1.0, 2.0, 3.0, 4.0]}
    with pytest.raises(SourceError, match="more than once what the splits are: split, val, train"):
        ooc.convert(_folder(tmp_path, "csv", nodes), tmp_path / "h.ooc")
    store = ooc.convert(_folder(tmp_path, "csv", nodes), tmp_path / "h.ooc", feature_columns="f,val,train")
    assert store.num_features == 3 and _splits(store) == list(_MASKS.values())


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_index_of_pandas_without_a_name_has_the_ids(tmp_path: Path, form: str) -> None:
    """And is no feature, of which one more was made, nor anything of edges."""
    nodes = pandas.DataFrame({"f": np.sin(np.arange(30)), "label": [0, 1] * 15})
    nodes = nodes[nodes.f > 0]
    edges = pandas.DataFrame({"src": nodes.index[:-1], "dst": nodes.index[1:]}).iloc[3:]
    for name, frame in (("nodes", nodes), ("edges", edges)):
        getattr(frame, f"to_{form}")(tmp_path / f"{name}.{form}")
    store = ooc.convert(tmp_path, tmp_path / "g.ooc")
    assert store.ids is not None and store.ids.tolist() == nodes.index.tolist()
    assert store.num_features == 1 and not store.has_edge_weight and store.num_edges == len(edges)


def test_an_index_that_is_none_is_left_out_by_its_empty_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of two frames, one above the other."""
    nodes = pandas.DataFrame({"f": [0.5, 1.5], "label": [0, 1]})
    pandas.concat([nodes, nodes]).to_csv(_folder(tmp_path, "csv", _NODES, {"src": [0, 3], "dst": [2, 1]}) / "nodes.csv")
    words = ["convert", str(tmp_path / "t"), str(tmp_path / "g.ooc"), "--quiet"]
    assert main(words) == 2 and "the id 0 twice; " in (err := capsys.readouterr().err) and "--column =ignore" in err
    assert main([*words, "--column", "=ignore"]) == 0
    assert main([*words, "--column", "=feature", "--force"]) == 0
    assert ooc.open(tmp_path / "g.ooc").num_features == 2


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_that_counts_rows_is_no_feature_where_none_has_ids(tmp_path: Path, form: str) -> None:
    """Edges by ids from 1 on would lead to the rows behind, unless the last node has none."""
    nodes = {"user": [*range(1, 21)], "f": [0.5] * 20, "label": [0, 1] * 10}
    source = _folder(tmp_path, form, nodes, {"source": [1, 2, 3], "target": [2, 3, 19]})
    with pytest.raises(SourceError, match="the column user holds whole numbers that rise by one from row to row"):
        ooc.convert(source, tmp_path / "g.ooc")
    by_id = ooc.convert(source, tmp_path / "g.ooc", columns={"user": "id"})
    assert by_id.ids is not None and by_id.num_features == 1
    assert ooc.convert(source, tmp_path / "h.ooc", columns={"user": "feature"}).num_features == 2


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("name", "cells", "what"),
    [
        ("joined", [1577836800, 1577836900, 1577837000, 1577837100], "whole numbers as large as times and ids are"),
        ("city", ["Ulm", "Bonn", "Ulm", "Köln"], "texts"),
        ("day", ["2020-01-01", "2020-01-02 10:00:00", "2020-01-03", "2020-01-04"], "texts|dates or times"),
    ],
)
def test_what_should_hardly_be_a_feature_is_refused(
    tmp_path: Path, form: str, name: str, cells: list, what: str
) -> None:
    source = _folder(tmp_path, form, _NODES | _WORDS | {name: cells})
    said = f"the column {name} holds ({what})( such as .*)?, which make no feature; "
    with pytest.raises(SourceError, match=said) as told:
        ooc.convert(source, tmp_path / "g.ooc")
    assert f"leave it out with columns={{'{name}': 'ignore'}}" in str(told.value) and "\n" not in str(told.value)
    for options in ({"feature_columns": "f"}, {"columns": {name: "ignore"}}):
        store = ooc.convert(source, tmp_path / "g.ooc", force=True, **options)
        assert store.num_features == 1


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (pa.array([1, 2, 3, 4], pa.timestamp("s")), "dates or times"),
        (pa.array([1, 2, 3, 4], pa.date32()), "dates or times"),
        (pa.array([7, 8, 7, 8]).dictionary_encode(), "categories"),
        (pa.array(["a", "b", "a", "b"]).dictionary_encode(), "categories"),
    ],
)
def test_times_and_categories_are_no_features(tmp_path: Path, column: pa.Array, what: str) -> None:
    source = _folder(tmp_path, "parquet", _NODES | _WORDS | {"extra": column})
    with pytest.raises(SourceError, match=f"the column extra holds {what}"):
        ooc.convert(source, tmp_path / "g.ooc")


@pytest.mark.parametrize("name", ["id", "node", "node_id", "nid", "Node"])
def test_a_column_of_ids_is_found_by_its_usual_names(tmp_path: Path, name: str) -> None:
    nodes = {name: _NODES["id"]} | {key: cells for key, cells in _NODES.items() if key != "id"} | _WORDS
    store = ooc.convert(_folder(tmp_path, "csv", nodes), tmp_path / "g.ooc")
    assert store.num_features == 1 and store.array("ids").read().tolist() == _NODES["id"]


@pytest.mark.parametrize("between", [";", "\t"])
def test_the_first_line_tells_what_is_between_cells(tmp_path: Path, between: str) -> None:
    source = _folder(tmp_path, "csv", _NODES)
    for file in source.iterdir():
        file.write_text(file.read_text().replace(",", between))
    assert ooc.convert(source, tmp_path / "t.ooc").num_edges == len(_EDGES["source"])


def test_ids_of_another_name_are_asked_for(tmp_path: Path) -> None:
    nodes = {"who": _NODES["id"]} | {key: cells for key, cells in _NODES.items() if key != "id"} | _WORDS
    source = _folder(tmp_path, "csv", nodes)
    with pytest.raises(SourceError, match=r"edge 0 \(70 → 10\) has an end that is no node: nodes are the row") as told:
        ooc.convert(source, tmp_path / "g.ooc")
    assert "if one of who, f, label, split holds them, say columns={'NAME': 'id'}" in str(told.value)
    assert ooc.convert(source, tmp_path / "g.ooc", columns={"who": "id"}).num_features == 1
    with pytest.raises(
        SourceError, match=r"has the columns node and nid; say which one is meant with columns=.'node': 'id"
    ):
        ooc.convert(_folder(tmp_path, "csv", nodes | {"node": [0] * 4, "nid": [0] * 4}), tmp_path / "h.ooc")


def test_two_columns_of_labels_are_told_apart(tmp_path: Path) -> None:
    """The one that is not chosen would give the answer away as a feature."""
    source = _folder(tmp_path, "csv", _NODES | _WORDS | {"y": [1, 0, 1, 0]})
    with pytest.raises(
        SourceError, match=r"has the columns label and y; say which one is meant with columns=.'label': 'la"
    ):
        ooc.convert(source, tmp_path / "g.ooc")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_mask_that_is_none_is_named(tmp_path: Path, form: str) -> None:
    source = _folder(tmp_path, form, _NODES | _MASKS | {"val": [0.0, 0.7, 1.0, 0.0]})
    with pytest.raises(SourceError, match=r"the column val holds .*, not true or false .* say columns="):
        ooc.convert(source, tmp_path / "g.ooc")


def test_empty_cells_are_no_members(tmp_path: Path) -> None:
    masks = {"train": [True, None, None, None], "test": [None, None, 1, 0]}
    parquet = _folder(tmp_path, "parquet", _NODES | masks)
    assert ooc.convert(parquet, tmp_path / "p.ooc").split_sizes == {"train": 1, "valid": 0, "test": 1}
    empty = {name: ["" if cell is None else cell for cell in cells] for name, cells in masks.items()}
    (tmp_path / "csv").mkdir()
    csv = _folder(tmp_path / "csv", "csv", _NODES | empty)
    np.testing.assert_equal(ooc.convert(csv, tmp_path / "c.ooc").split_sizes, {"train": 1, "valid": 0, "test": 1})


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_what_columns_are_taken_for_is_printed(tmp_path: Path, options: list[str]) -> None:
    source = _folder(tmp_path, "csv", _NODES | _MASKS)
    result = CliRunner().invoke(command, [str(source), str(tmp_path / "g.ooc"), *options])
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.splitlines()]
    at = lines.index(f"columns of {source / 'nodes'}.csv:")
    assert lines[at + 1 : at + 7] == [
        "  id     id",
        "  f      feature",
        "  label  label",
        "  train  train split",
        "  val    valid split",
        "  test   test split",
    ]
    assert "  source  src: where edges start" in lines and "  target  dst: where they end" in lines


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(("called", "categories"), [("label", False), ("topic", False), ("topic", True)])
def test_texts_of_labels_name_the_classes(tmp_path: Path, form: str, called: str, categories: bool) -> None:
    """In alphabetical order; without a column ``label`` they are the only column of words."""
    texts: Any = ["maths", "art, and so on", None if form == "parquet" else "", "maths"]
    if categories and form == "parquet":
        texts = pa.array(texts).dictionary_encode()
    elif form == "csv":
        texts[1] = f'"{texts[1]}"'
    nodes = {"id": _NODES["id"], "f": _NODES["f"], called: texts, "train": [True, True, False, False]}
    store = ooc.convert(_folder(tmp_path, form, nodes), tmp_path / "g.ooc")
    assert store.class_names == ("art, and so on", "maths") and store.num_classes == 2 and store.num_features == 1
    assert store.array("y").read().tolist() == [1, 0, -1, 1]
    assert ooc.open(ooc.convert(store_of(tmp_path), tmp_path / "n.ooc").path).class_names is None


def store_of(folder: Path) -> dict[str, Any]:
    """Arrays whose classes have no names."""
    return {"edge_index": np.array([[0], [1]]), "x": np.ones((2, 1)), "y": np.array([0, 1])}


def test_roles_of_edges_columns_count_beside_options(tmp_path: Path) -> None:
    source = _folder(tmp_path, "csv", _NODES, _EDGES | {"w": [1, 2, 3], "a": [4, 5, 6], "b": [7, 8, 9]})
    for number, options in enumerate(
        [
            {"edge_features": "a,b", "columns": {"w": "weight"}},
            {"edge_weight": "w", "edge_features": "a", "columns": {"b": "feature"}},
            {"edge_weight": "w", "columns": {"a": "feature", "b": "feature"}},
        ]
    ):
        store = ooc.convert(source, tmp_path / f"{number}.ooc", **options)
        carried = np.column_stack([array.read() for array in store.edge_data("in")])
        assert carried[np.argsort(carried[:, 0])].tolist() == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    for options, message in (
        ({"edge_weight": "w", "columns": {"a": "weight"}}, "the columns a and w cannot both be weight"),
        ({"drop_edge_data": True, "columns": {"a": "feature"}}, "leaves out what columns={'a': 'feature'} asks for"),
    ):
        with pytest.raises(OptionError, match=message):
            ooc.convert(source, tmp_path / "g.ooc", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"labels": "none", "columns": {"label": "label"}},
        {"labels": "random:2", "columns": {"label": "split"}},
        {"features": "random:2", "columns": {"f": "feature"}},
        {"features": np.ones((4, 1)), "labels": np.array([0, 1, 0, 1]), "feature_columns": "f"},
    ],
)
def test_roles_of_columns_that_are_not_asked_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(
        OptionError, match=r"say that this is not in .*nodes\.csv|feature_columns=f are columns of a table"
    ):
        ooc.convert(_folder(tmp_path, "csv", _NODES), tmp_path / "g.ooc", **options)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_whole_numbers_that_would_be_rounded_are_named(tmp_path: Path, form: str) -> None:
    """In a column of whole numbers alone; among fractions a number is as near as float32 comes."""
    nodes = _NODES | {"f": [0.25, 1.5, 2**24 + 1, 2.5], "many": [1, 2, 2**24 + 1, 3], "label": [0, 1, 0, 1]}
    with pytest.raises(SourceError, match="feature 1 of node 2 is 16777217, which float32 would round"):
        ooc.convert(_folder(tmp_path, form, nodes), tmp_path / "g.ooc")
    store = ooc.convert(_folder(tmp_path, form, nodes), tmp_path / "g.ooc", dtype="float64")
    assert store.array("x").read()[2].tolist() == [2**24 + 1, 2**24 + 1]


@pytest.mark.parametrize("form", ["csv", "parquet", "parquet of lists", "frame", "jsonl"])
@pytest.mark.parametrize("at", [0, 2])
def test_whole_numbers_beyond_float64_are_named(tmp_path: Path, form: str, at: int) -> None:
    """Where the type is float64, too, and whatever stands beside them."""
    cells: list[Any] = [1, 2, 3, 4]
    cells[at] = 2**53 + 1
    nodes = _NODES | {"many": [[cell, 0] for cell in cells] if form == "parquet of lists" else cells}
    if form == "jsonl":
        source: Any = _folder(tmp_path, "csv", nodes)
        (source / "nodes.csv").unlink()
        rows = [dict(zip(nodes, row, strict=True)) for row in zip(*nodes.values(), strict=True)]
        (source / "nodes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif form == "frame":
        source = {"nodes": pandas.DataFrame(nodes), "edges": pandas.DataFrame(_EDGES)}
    else:
        source = _folder(tmp_path, form.split()[0], nodes)
    options: dict[str, Any] = {"columns": {"many": "feature"}, "dtype": "float64"}
    with pytest.raises(SourceError, match=r"column many holds '?9007199254740993'?.*a whole number that float64 would"):
        ooc.convert(source, tmp_path / "g.ooc", **options)


@pytest.mark.parametrize("of", ["nodes", "edges"])
def test_ids_that_may_have_been_rounded_are_no_others(tmp_path: Path, of: str) -> None:
    """2^53 in float64 may have been 2^53 + 1, which is another node: pandas makes fractions of ids beside an empty
    one."""
    nodes = pandas.DataFrame(_NODES | {"id": [2**53, 2**53 + 1, 40, 20]})
    edges = pandas.DataFrame({"source": [2**53, 40], "target": [40, 20]})
    tables = {"nodes": nodes, "edges": edges}
    assert ooc.convert(tables, tmp_path / "g.ooc").num_edges == 2
    column = "id" if of == "nodes" else "source"
    tables[of] = tables[of].astype({column: "float64"})
    with pytest.raises(SourceError, match=rf"column {column} holds .* a whole number that float64 would round"):
        ooc.convert(tables, tmp_path / "h.ooc")


@pytest.mark.parametrize("text", ["NA", "None", "null"])
def test_what_may_be_no_label_is_asked(tmp_path: Path, text: str) -> None:
    """Since pandas reads it as nothing, while it may be the name of a class."""
    nodes = _NODES | {"label": ["a", text, "b", "a"]}
    said = f"the column label holds '{text}', which may be no label or a class of that name: leave such cells empty"
    with pytest.raises(SourceError, match=said):
        ooc.convert(_folder(tmp_path, "csv", nodes), tmp_path / "g.ooc")


def test_too_many_texts_are_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.sources.labels.MOST_CLASSES", 2)
    nodes = _NODES | _WORDS | {"label": ["a", "b", "c", "d"]}
    with pytest.raises(SourceError, match="column label holds more than 2 different texts, such as 'd': these are no"):
        ooc.convert(_folder(tmp_path, "csv", nodes), tmp_path / "g.ooc")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_columns_are_given_roles(tmp_path: Path, form: str) -> None:
    """Where they would be taken for something else, or where two tables have a column of one name."""
    train, val, test = _MASKS.values()
    nodes = {
        "who": _NODES["id"],
        "kind": [1, 0, 1, 0],
        "f": _NODES["f"],
        "label": [5.5] * 4,
        "when": ["2020-01-01"] * 4,
    }
    nodes |= {"a": train, "b": val, "c": test, "weight": [1.0, 2.0, 3.0, 4.0]}
    edges = {"head": _EDGES["source"], "tail": _EDGES["target"], "weight": [0.5, 1.5, 2.5], "time": [1, 2, 3]}
    source = _folder(tmp_path, form, nodes, edges)
    options = [
        *("who=id", "kind=label", "label=feature", "when=ignore", "a=train", "b=val", "c=test", "nodes.weight=ignore"),
        *("head=src", "tail=dst", "time=feature"),
    ]
    words = [word for option in options for word in ("--column", option)]
    result = CliRunner().invoke(command, [str(source), str(tmp_path / "g.ooc"), *words])
    assert result.exit_code == 0, result.output
    store = ooc.open(tmp_path / "g.ooc")
    assert store.array("ids").read().tolist() == _NODES["id"] and _splits(store) == [train, val, test]
    assert store.array("x").read().tolist() == [[f, 5.5] for f in _NODES["f"]]
    assert sorted(store.edge_weight("in").read().tolist()) == edges["weight"] and store.num_edge_features == 1
    assert store.array("y").read().tolist() == nodes["kind"]


def test_a_column_named_weight_is_the_edges_weight(tmp_path: Path) -> None:
    source = _folder(tmp_path, "csv", _NODES | _MASKS, _EDGES | {"Weight": [0.5, 1.5, 2.5]})
    assert ooc.convert(source, tmp_path / "g.ooc").has_edge_weight
    assert not ooc.convert(source, tmp_path / "h.ooc", columns={"Weight": "ignore"}).has_edge_weight
    assert not ooc.convert(source, tmp_path / "i.ooc", drop_edge_data=True).has_edge_weight


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "f=colour",
            "--column f=colour: a column is id, feature, label, split, train, val, test, ignore, src, dst or w",
        ),
        ("labl=label", "--column labl=label: no table has a column 'labl'; did you mean label"),
        ("f=weight", "--column f=weight: the column 'f' cannot be weight; the columns are id, f, label, train"),
        ("f", "'f' is not NAME=ROLE, such as age=ignore"),
    ],
)
def test_roles_that_do_not_fit_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    source = _folder(tmp_path, "csv", _NODES | _MASKS)
    assert main(["convert", str(source), str(tmp_path / "g.ooc"), "--column", option]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "g.ooc").exists()
    with pytest.raises(OptionError, match="the columns id and f cannot both be id"):
        ooc.convert(source, tmp_path / "g.ooc", columns={"id": "id", "f": "id"})


def test_all_columns_that_make_no_feature_are_named_at_once(tmp_path: Path) -> None:
    more = {"born": ["2020-01-01"] * 4, "city": ["Ulm", "Bonn", "Ulm", "Bonn"], "seen": [1577836800] * 4}
    source = _folder(tmp_path, "parquet", _NODES | _WORDS | more)
    with pytest.raises(
        SourceError, match=r"3 columns make no feature: born \(texts\), city \(texts\), seen \(whole"
    ) as told:
        ooc.convert(source, tmp_path / "g.ooc")
    ignore = " ".join(f"columns={{'{name}': 'ignore'}}" for name in more)
    assert f"{ignore} leaves them out, columns={{'born': 'label'}} if that is the classes" in str(told.value)
    assert ooc.convert(source, tmp_path / "g.ooc", columns=dict.fromkeys(more, "ignore")).num_features == 1


@pytest.mark.parametrize("ends", [("from", "to"), ("u", "v"), ("src_id", "dst_id"), ("Source", "Target")])
def test_ends_are_found_by_their_usual_names(tmp_path: Path, ends: tuple[str, str]) -> None:
    edges = {"weight": [1, 2, 3], ends[1]: _EDGES["target"], ends[0]: _EDGES["source"]}
    store = ooc.convert(_folder(tmp_path, "csv", _NODES | _MASKS, edges), tmp_path / "g.ooc")
    assert store.ids is not None and store.ids[edges_of(store)[:, -1]].tolist() == [40, 20]
