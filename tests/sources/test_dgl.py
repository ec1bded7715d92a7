# SPDX-License-Identifier: Apache-2.0
"""DGL's Reddit and GraphBolt's folders: what is refused, and why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.errors import BudgetError, SourceError
from tests.sources.fixtures import FIXTURES, Made, random_graph


def _made(name: str, tmp_path: Path) -> Made:
    rng = np.random.default_rng(4)
    (folder := tmp_path / "source").mkdir()
    return FIXTURES[name](random_graph(rng, nodes=60, edges=200), folder, rng)


def _with(path: Path, **changed: Any) -> None:
    with np.load(path) as arrays:
        found = {**arrays, **changed}
    np.savez(path, **{name: array for name, array in found.items() if array is not None})


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        ("reddit_data", {"label": None}, "has no array label"),
        ("reddit_data", {"label": np.zeros(9)}, "an entry for each of 60 nodes wanted"),
        ("reddit_data", {"label": np.full(60, 0.5)}, "node 0 has the label 0.5, which is no class"),
        ("reddit_data", {"node_types": np.arange(60)}, "node 0 is of the type 0; 1, 2 and 3 are splits"),
        ("reddit_data", {"node_types": np.ones(60)}, "float64, not whole numbers"),
        ("reddit_data", {"feature": np.zeros(60)}, r"the shape \[60\], not \[nodes, features\]"),
        ("reddit_graph", {"row": np.zeros(3, np.int32)}, "are not of one length"),
        ("reddit_graph", {"shape": np.array([60, 61])}, "not that of a graph of 60 nodes"),
        ("reddit_graph", {"shape": None}, "has no array shape"),
    ],
)
def test_files_of_reddit_that_do_not_fit_are_refused(
    tmp_path: Path, file: str, changed: dict[str, Any], message: str
) -> None:
    made = _made("dgl-reddit", tmp_path)
    _with(made.source / f"{file}.npz", **changed)
    with pytest.raises(SourceError, match=message):
        ooc.convert(made.source, tmp_path / "g.ooc")


def test_reddit_needs_both_its_files(tmp_path: Path) -> None:
    made = _made("dgl-reddit", tmp_path)
    (made.source / "reddit_graph.npz").unlink()
    with pytest.raises(SourceError, match=r"reddit_graph\.npz is missing"):
        ooc.convert(made.source, tmp_path / "g.ooc")


def _replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "graph_topology:\n  path: a.pt\n", "a pickled object that is never loaded; convert the folder"),
        (lambda text: "graph: [", "is no YAML"),
        (lambda text: "- 1", "says nothing"),
        (lambda text: "!!python/object/apply:os.system ['true']", "is no YAML"),
        (_replaced("num: 60", "num: 61"), "has 60 rows for 61 nodes"),
        (_replaced("num: 60", "num: many"), "'many', no number of nodes"),
        (_replaced("  nodes:\n    - num: 60", "  nodes:\n    - num: 60\n    - num: 60"), "nodes is of 2 kinds"),
        (_replaced("    - format: csv", "    - type: a:to:b\n      format: csv"), "only graphs of one kind"),
        (_replaced("format: csv", "format: torch"), "edges are of the format torch"),
        (_replaced("edges/cite.csv", "metadata.yaml"), "metadata.yaml is no table: .csv"),
        (_replaced("graph:", "graph: 7\ngraf:"), "has no graph, or it is no dict"),
        (_replaced("edges/cite.csv", "../../etc/passwd"), "which is outside of its folder"),
        (_replaced("edges/cite.csv", "/etc/passwd"), "which is outside of its folder"),
        (_replaced("edges/cite.csv", "edges/none.csv"), "which is not there"),
        (_replaced("domain: node", "domain: edge"), "has no features for nodes"),
        (lambda text: text.split("tasks:")[0], "has no tasks, hence no labels"),
        (_replaced("name: labels", "name: answers"), "the train_set has seeds, answers; seeds and labels are wanted"),
        (_replaced("path: set/train-seeds.npy", "path: set/test-seeds.npy"), "one node and one label|overlap|twice"),
        (
            _replaced("format: numpy\n            in_memory", "format: torch\n            in_memory"),
            "format torch, not",
        ),
    ],
)
def test_metadata_that_cannot_be_used_is_refused(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    made = _made("graphbolt", tmp_path)
    path = made.source / "metadata.yaml"
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    with pytest.raises(SourceError, match=message) as caught:
        ooc.convert(made.source, tmp_path / "g.ooc")
    assert "\n" not in str(caught.value)


def test_splits_too_large_for_the_budget_are_refused(tmp_path: Path) -> None:
    made = _made("graphbolt", tmp_path)
    for part in ("seeds", "labels"):
        np.save(made.source / "set" / f"train-{part}.npy", np.zeros(2_000_000, dtype=np.int64))
    with pytest.raises(BudgetError, match="give host_budget='9"):
        ooc.convert(made.source, tmp_path / "g.ooc", host_budget="50M")


def test_files_of_graphbolt_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made = _made("graphbolt", tmp_path)
    metadata, seeds = made.source / "metadata.yaml", made.source / "set" / "test-seeds.npy"
    good = np.load(seeds)
    np.save(seeds, np.concatenate([np.load(made.source / "set" / "train-seeds.npy")[:1], good[1:]]))
    with pytest.raises(SourceError, match=r"the splits name the node \d+ twice"):
        ooc.convert(made.source, tmp_path / "g.ooc")
    np.save(seeds, good)
    metadata.write_text(metadata.read_text().replace("validation_set:", "others:"))
    sizes = ooc.convert(made.source, tmp_path / "g.ooc").split_sizes
    assert sizes["test"] == len(good) and sizes["train"] and not sizes["valid"]
    (made.source / "edges" / "cite.csv").write_text("0,1,2\n")
    with pytest.raises(SourceError, match="has 3 columns; sources and targets are wanted"):
        ooc.convert(made.source, tmp_path / "h.ooc")
    metadata.write_bytes(b"\xff")
    with pytest.raises(SourceError, match=r"metadata.yaml cannot be read: .* invalid start byte"):
        ooc.convert(made.source, tmp_path / "h.ooc")
