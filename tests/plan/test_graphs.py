# SPDX-License-Identifier: Apache-2.0
"""Graphs known by their counts: the counts, and assumptions on the cautious side."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.plan.graphs import KNOWN, GraphStatistics, known_graph, reach, spread_edges

PUBLISHED = {
    "reddit": (232_965, 114_615_892, 602, 41),
    "ogbn-products": (2_449_029, 123_718_280, 100, 47),
    "it-2004": (41_291_594, 1_150_725_436, 256, 64),
    "ogbn-papers100M": (111_059_956, 1_615_685_872, 128, 172),
    "igb260m": (269_346_174, 3_995_777_033, 1024, 19),
    "friendster": (65_608_366, 2 * 1_806_067_135, 256, 64),
    "MAG240M": (121_751_666, 1_297_748_926, 768, 153),
}
MOST_NEIGHBOURS = {"reddit": 21_657, "ogbn-products": 17_481, "friendster": 5_214}
"""Of the largest hub, by DGL, OGB and SNAP."""


def a_graph(nodes: int = 1000, edges: int = 8000, labelled: int = 50, **changes: int) -> GraphStatistics:
    return GraphStatistics(
        name="a", nodes=nodes, edges=edges, features=4, classes=2, labelled=labelled, source="a test", **changes
    )


@st.composite
def graphs(draw: st.DrawFn) -> GraphStatistics:
    nodes = draw(st.integers(1, 100_000))
    return a_graph(nodes, draw(st.integers(1, 10**7)), draw(st.integers(1, nodes)))


def test_an_edge_among_many_nodes_reaches_none() -> None:
    assert reach(a_graph(nodes=10**9, edges=1, labelled=1)) == [1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_published(name: str) -> None:
    graph = KNOWN[name]
    assert (graph.nodes, graph.edges, graph.features, graph.classes) == PUBLISHED[name]


def test_names_go_by_any_case_and_by_what_people_call_them() -> None:
    assert known_graph("PRODUCTS") is known_graph("ogbn-products") is KNOWN["ogbn-products"]
    assert known_graph("papers100M") is KNOWN["ogbn-papers100M"]
    assert known_graph("cora") is known_graph("ogbn") is known_graph("") is None


def test_features_and_labels_that_differ_from_the_rest() -> None:
    assert KNOWN["MAG240M"].feature_dtype == "float16"
    assert KNOWN["ogbn-papers100M"].labelled == 1_546_782
    assert all(g.labelled == g.nodes for g in KNOWN.values() if g.name != "ogbn-papers100M")


@pytest.mark.parametrize("name", MOST_NEIGHBOURS)
def test_no_hub_is_larger_than_assumed(name: str) -> None:
    assert KNOWN[name].most_neighbours >= MOST_NEIGHBOURS[name]


@given(graphs())
def test_what_is_reached_grows_and_stays_within_the_graph(graph: GraphStatistics) -> None:
    reached = reach(graph)
    assert reached[0] == graph.labelled
    assert all(a < b for a, b in pairwise(reached))
    assert reached[-1] <= graph.nodes


def test_a_step_reaches_no_more_than_there_are_edges_to_follow() -> None:
    graph = a_graph(nodes=1_000_000, edges=2_000_000, labelled=100)
    first, second = reach(graph)[:2]
    assert second - first <= graph.bias * graph.edges / graph.nodes * first


@given(graphs(), st.sampled_from([1, 8, 1024]))
def test_edges_are_spread_over_all_tiles_and_none_is_lost(graph: GraphStatistics, tile_rows: int) -> None:
    edges = spread_edges(graph, tile_rows)
    assert len(edges) == -(-graph.nodes // tile_rows) + 1
    assert edges[0] == 0 and edges[-1] == edges[len(edges) - 1] == graph.edges
    assert all(a <= b for a, b in pairwise(edges))
    assert edges[1] >= min(graph.edges, graph.most_neighbours)


def test_the_first_tile_has_the_hub() -> None:
    assert list(spread_edges(a_graph(nodes=40, edges=400, labelled=40, hub=7), 10)) == [0, 107, 207, 307, 400]
    assert list(spread_edges(a_graph(nodes=40, edges=400, labelled=4, hub=7), 10)) == [0, 207, 400, 400, 400]
