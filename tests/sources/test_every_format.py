# SPDX-License-Identifier: Apache-2.0
"""Each layout's fixture converts to the graph it was written from, edge for edge and feature for feature."""

from pathlib import Path

import numpy as np
import pytest

import ooc
from ooc.storage.verification import verify
from tests.conversion.arrays import edges_of, files_of, in_order
from tests.examples import thorough
from tests.sources.fixtures import FIXTURES, Graph, random_graph


def _graph(seed: int = 0, nodes: int = 300) -> tuple[Graph, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return random_graph(rng, nodes=nodes, edges=5 * nodes, labelled=0.8), rng


@pytest.mark.parametrize(
    "name",
    thorough(
        sorted(FIXTURES),
        *("ogb-papers100m-zip-stored", "ogb-papers100m-zip-features-first", "ogb-products-zip", "mag240m-zip"),
        *("snap-gz", "mtx-gz", "mtx-integer", "dgl-reddit-deflated", "jsonl-zst"),
    ),
)
def test_a_fixture_converts_to_its_graph(tmp_path: Path, name: str) -> None:
    """Whatever the budget, which changes no byte."""
    made = FIXTURES[name](*_with_folder(tmp_path))
    graph = made.graph
    store, other = (
        ooc.convert(made.source, tmp_path / budget / "g.ooc", host_budget=budget, **made.options)
        for budget in ("4G", "200M")
        if (tmp_path / budget).mkdir() is None
    )
    assert files_of(store.path) == files_of(other.path)
    np.testing.assert_array_equal(edges_of(store), in_order(graph.edge_index))
    np.testing.assert_array_equal(in_order(edges_of(store, "out")), in_order(graph.edge_index))
    np.testing.assert_array_equal(store.array("x").read(), graph.x.astype(np.float32))
    np.testing.assert_array_equal(store.array("y").read(), graph.y)
    assert store.num_classes >= graph.num_classes
    if str(made.options.get("split", "")).startswith("random"):
        labelled = int((graph.y >= 0).sum())
        assert sum(store.split_sizes.values()) == labelled
        assert store.split_sizes["train"] == pytest.approx(0.6 * labelled, rel=0.15)
    else:
        for split in ("train", "valid", "test"):
            np.testing.assert_array_equal(store.array(f"split/{split}").read(), getattr(graph, split))
    assert verify(store) == []


def _with_folder(tmp_path: Path) -> tuple[Graph, Path, np.random.Generator]:
    folder = tmp_path / "source"
    folder.mkdir()
    graph, rng = _graph()
    return graph, folder, rng
