# SPDX-License-Identifier: Apache-2.0
"""What is drawn of a graph: the right number of edges, each subset equally likely, and the same whatever else is."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.sampling.sampler import SampledBatch, Sampler, draw_subsets, most_by_hop

_CHI_SQUARE_999 = {9: 27.9, 23: 49.7}
"""By degrees of freedom, what chance exceeds once in a thousand times; the seeds here are fixed."""


def _graph(nodes: int, edges: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    targets = np.sort((nodes * rng.random(edges) ** 2).astype(np.int64))
    return np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=nodes))]), rng.integers(0, nodes, edges)


def _check(batch: SampledBatch, offsets: np.ndarray, sources: np.ndarray, fanouts: list[int]) -> None:
    """Against the definition, node by node."""
    rows, targets = batch.rows, np.repeat(np.arange(len(batch.counts)), batch.counts)
    assert len(set(rows.tolist())) == len(rows) == sum(batch.nodes_by_hop)
    assert len(targets) == len(batch.edges) == len(batch.sources) == sum(batch.edges_by_hop)
    np.testing.assert_array_equal(rows[batch.sources], sources[batch.edges])
    node = edge = 0
    assert len(batch.nodes_by_hop) == 1 + len(fanouts)
    for fanout, count, edge_count in zip(fanouts, batch.nodes_by_hop, batch.edges_by_hop, strict=False):
        for place in range(node, node + count):
            first, last = offsets[rows[place]], offsets[rows[place] + 1]
            drawn = batch.edges[targets == place]
            assert len(drawn) == (last - first if fanout < 0 else min(fanout, last - first))
            assert (np.diff(drawn) > 0).all() and ((first <= drawn) & (drawn < last)).all()
        of_hop = targets[edge : edge + edge_count]
        assert ((node <= of_hop) & (of_hop < node + count)).all()
        node, edge = node + count, edge + edge_count
    # Nobody is there but the seeds and those that an edge comes from.
    assert set(range(batch.nodes_by_hop[0])) | set(batch.sources.tolist()) == set(range(len(rows)))


@given(
    nodes=st.integers(1, 60),
    edges=st.integers(0, 300),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 5, 9]), min_size=1, max_size=3),
    seed=st.integers(0, 999),
)
def test_batches_are_what_the_definition_says(nodes: int, edges: int, fanouts: list[int], seed: int) -> None:
    offsets, sources = _graph(nodes, edges, seed)
    rng = np.random.default_rng(seed)
    seeds = [rng.permutation(nodes)[: rng.integers(1, 9)] for _ in range(3)]
    batches = Sampler(offsets, fanouts, seed=seed).sample(seeds, sources.__getitem__, epoch=1, numbers=[5, 6, 8])
    most = most_by_hop(offsets, fanouts, max(map(len, seeds)))
    for number, batch, own in zip([5, 6, 8], batches, seeds, strict=True):
        np.testing.assert_array_equal(batch.rows[: len(own)], own)
        _check(batch, offsets, sources, fanouts)
        sizes = zip(np.cumsum(batch.nodes_by_hop), np.cumsum([0, *batch.edges_by_hop]), strict=True)
        assert all(size[0] <= bound[0] and size[1] <= bound[1] for size, bound in zip(sizes, most, strict=True))
        alone = Sampler(offsets, fanouts, seed=seed).sample([own], sources.__getitem__, epoch=1, numbers=[number])[0]
        np.testing.assert_array_equal(alone.rows, batch.rows)
        np.testing.assert_array_equal(alone.edges, batch.edges)


def test_every_subset_is_equally_likely() -> None:
    nodes = np.arange(20_000)
    drawn = draw_subsets(nodes, np.full(20_000, 5), 2, (1, 2))
    counts = np.array([((drawn == pair).all(axis=1)).sum() for pair in combinations(range(5), 2)])
    assert counts.sum() == 20_000
    assert ((counts - 2000) ** 2 / 2000).sum() < _CHI_SQUARE_999[9]


def test_every_neighbour_is_equally_likely_from_epoch_to_epoch() -> None:
    offsets, sources = np.array([0, 24, *[24] * 24]), np.arange(1, 25)
    sampler = Sampler(offsets, [6], seed=3)
    times = np.zeros(25)
    for epoch in range(1000):
        (batch,) = sampler.sample([np.array([0])], sources.__getitem__, epoch=epoch, numbers=[0])
        times[batch.rows[1:]] += 1
    # Without replacement the counts vary less than independent draws: by 18/23 of it.
    assert ((times[1:] - 250) ** 2 / 250).sum() * 23 / 18 < _CHI_SQUARE_999[23]
    assert times[1:].std() > 3


@pytest.mark.parametrize("differs", ["seed", "epoch", "batch"])
def test_draws_differ_by_seed_epoch_and_batch(differs: str) -> None:
    offsets, sources = np.array([0, 1000, *[1000] * 1000]), np.arange(1, 1001)
    drawn = []
    for value in (0, 1):
        number = {"seed": 0, "epoch": 0, "batch": 0, differs: value}
        sampler = Sampler(offsets, [20], seed=number["seed"])
        which = {"epoch": number["epoch"], "numbers": [number["batch"]]}
        drawn.append(sampler.sample([np.array([0])], sources.__getitem__, **which)[0].edges.tolist())
    assert drawn[0] != drawn[1]


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 99))
def test_no_degree_sequence_exceeds_the_bound(nodes: int, edges: int, seed: int) -> None:
    offsets, _ = _graph(nodes, edges, seed)
    degrees = np.sort(np.diff(offsets))
    assert most_by_hop(offsets, [-1], nodes)[-1] == (nodes, edges)
    assert most_by_hop(offsets, [2], 1)[-1][1] == min(2, degrees[-1])
