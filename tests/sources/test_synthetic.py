# SPDX-License-Identifier: Apache-2.0
"""Synthetic graphs: as asked for, the same by seed under any budget, and worth learning on."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.sources.formats.synthetic import parse, synthetic_source
from ooc.sources.labels import Shuffle
from tests.conversion.arrays import edges_of, files_of, in_order
from tests.examples import examples

_BASE = "synthetic:nodes=20000,edges=200000,features=16,classes=7"


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 5))
def test_a_shuffle_is_a_bijection_with_its_inverse(n: int, seed: int, stream: int) -> None:
    places = np.arange(n)
    shuffle = Shuffle(n, seed, stream=stream)
    values = shuffle.at(places)
    np.testing.assert_array_equal(np.sort(values), places)
    np.testing.assert_array_equal(shuffle.place_of(values), places)


def test_shuffles_are_random_enough() -> None:
    """Neighbouring places do not stay together, and seeds differ."""
    n = 100_000
    first, second = (Shuffle(n, seed).at(np.arange(n)) for seed in (1, 2))
    assert abs(np.corrcoef(np.arange(n), first)[0, 1]) < 0.02
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert (np.abs(np.diff(first)) < n / 100).mean() < 0.05
    assert len(np.unique(Shuffle(2**32, 3).at(np.arange(2**32 - 1000, 2**32)))) == 1000


def test_the_graph_is_what_was_asked_for(tmp_path: Path) -> None:
    store = ooc.convert(f"{_BASE},labelled=0.3,train=0.4,seed=5", tmp_path / "g.ooc")
    assert (store.num_nodes, store.num_edges, store.num_features, store.num_classes) == (20000, 200000, 16, 7)
    assert store.split_sizes == {"train": 2400, "valid": 1800, "test": 1800}
    assert store.num_self_loops == 0 and not store.undirected
    y = store.array("y").read()
    assert (y >= 0).sum() == 6000 and np.bincount(y[y >= 0]).min() > 700
    labelled = sum(store.array(f"split/{split}").read() for split in ("train", "valid", "test"))
    np.testing.assert_array_equal(labelled == 1, y >= 0)
    assert store.source["seed"] == 5 and store.source["labelled"] == 0.3


def test_degrees_follow_a_power_law_and_edges_the_communities(tmp_path: Path) -> None:
    store = ooc.convert(_BASE, tmp_path / "g.ooc")
    sources, targets = edges_of(store)
    y = store.array("y").read()
    assert 0.7 < (y[sources] == y[targets]).mean() < 0.8  # 0.7 by choice, 1/7 of the rest by chance.
    for ends in (sources, targets):
        degree = np.sort(np.bincount(ends, minlength=20000))[::-1]
        assert degree[0] > 30 * degree.mean() and (degree == 0).sum() < 2000
        # The exponent of the tail, by Hill's estimate over the top thousand: 1 + 1 / 0.6 is meant.
        exponent = 1 + 1 / np.log(degree[:1000] / degree[1000]).mean()
        assert 2.2 < exponent < 3.2


def test_undirected_graphs_hold_each_edge_both_ways_once(tmp_path: Path) -> None:
    directed = ooc.convert(_BASE, tmp_path / "d.ooc")
    store = ooc.convert(f"{_BASE},directed=0", tmp_path / "u.ooc")
    edges = edges_of(directed)
    np.testing.assert_array_equal(edges_of(store), in_order(np.unique(np.hstack([edges, edges[::-1]]), axis=1)))
    assert store.undirected
    np.testing.assert_array_equal(store.array("x").read(), directed.array("x").read())


def test_the_same_bytes_by_seed_whatever_the_budget(tmp_path: Path) -> None:
    first = ooc.convert(_BASE, tmp_path / "a.ooc", host_budget="34M")
    second = ooc.convert(f"{_BASE},seed=0", tmp_path / "b.ooc", host_budget="1G")
    other = ooc.convert(f"{_BASE},seed=1", tmp_path / "c.ooc")
    assert files_of(first.path) == files_of(second.path) != files_of(other.path)


@pytest.mark.parametrize(
    "text", ["nodes=2,edges=5,features=1,classes=2,train=1", "nodes=3,edges=0,features=2,classes=1"]
)
def test_the_smallest_graphs(tmp_path: Path, text: str) -> None:
    store = ooc.convert(f"synthetic:{text}", tmp_path / "g.ooc")
    assert store.num_self_loops == 0 and (edges_of(store) < store.num_nodes).all()


def test_numbers_may_be_written_with_exponents() -> None:
    parameters = parse("synthetic: nodes=1e3, edges=2_000 ,features=4,classes=2,directed=0")
    assert (parameters.nodes, parameters.edges, parameters.directed) == (1000, 2000, 0)


def test_labels_can_be_learned_from_neighbours_better_than_from_features() -> None:
    """The nearest class mean, of a node's own features and of its neighbourhood's: neither useless nor perfect."""
    source = synthetic_source("synthetic:nodes=20000,edges=300000,features=64,classes=10")
    x = np.concatenate(list(source.features(1000)))
    y = np.concatenate([block.y for block in source.labels(1000)])
    sums = np.zeros_like(x)
    degree = np.zeros(len(x))
    for block in source.edges(1000):
        np.add.at(sums, block.targets, x[block.sources])
        np.add.at(degree, block.targets, 1)
    centres = np.stack([x[y == label].mean(axis=0) for label in range(10)])

    def accuracy(features: np.ndarray) -> float:
        distances = (centres**2).sum(axis=1) / 2 - features @ centres.T
        return float((distances.argmin(axis=1) == y).mean())

    means = sums / np.maximum(degree, 1)[:, None]
    assert 0.3 < accuracy(x) < 0.65
    assert accuracy(x) + 0.15 < accuracy(x + 2 * means) < 0.97
