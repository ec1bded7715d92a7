# SPDX-License-Identifier: Apache-2.0
"""Graphs known only by their statistics, which is enough to plan for a graph that is not on this machine.

What the counts do not say is assumed, on the cautious side:

- *Degrees.* Where rows can be left out, those that are computed have ``BIAS`` times the mean degree: labelled nodes
  are rarely the lonely ones, and a node is found the likelier the more edges it has (the neighbour of a random node
  has more neighbours than a random node; S. L. Feld, American Journal of Sociology 96(6), 1991).
- *Reach.* From r new rows, BIAS · mean · r in-edges lead to sources drawn uniformly from all nodes: of N nodes, the
  expected share 1 - exp(-draws / N) is hit. Any other distribution of the sources hits fewer: hubs are hit again.
- *The heaviest tile* has, besides, a hub of 4 √E neighbours. A graph whose degrees are not correlated has hubs of at
  most about √(mean degree · N) = √E (M. Boguñá, R. Pastor-Satorras, A. Vespignani, European Physical Journal B 38,
  2004); reddit and ogbn-products have up to twice as many, web graphs many more: theirs is given where it is known.
- No self-loops.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, exp, isqrt

BIAS = 2
"""The mean degree of the rows that are computed, relative to the graph's, where other rows are left out."""
_HUB = 4
_MOST_HOPS = 32


@dataclass(frozen=True, slots=True)
class GraphStatistics:
    """Counts that describe a graph. ``edges``: stored edges; an ``undirected`` graph stores both directions and is its
    own transpose. ``labelled``: nodes that are trained on and scored. ``hub``: the largest in-degree, if known.
    ``feature_dtype``: of the features on disk. ``source``: where the figures are from, for people to read."""

    name: str
    nodes: int
    edges: int
    features: int
    classes: int
    labelled: int
    source: str
    undirected: bool = False
    feature_dtype: str = "float32"
    hub: int | None = None

    @property
    def bias(self) -> int:
        """The mean degree of the first rows in hop order, relative to the graph's; 1 if no rows can be left out."""
        return BIAS if self.labelled < self.nodes else 1

    @property
    def most_neighbours(self) -> int:
        """The largest in-degree, assumed if it is not known."""
        return min(self.edges, _HUB * isqrt(self.edges) if self.hub is None else self.hub)


def reach(graph: GraphStatistics) -> list[int]:
    """Return, as element d, the number of rows within d hops backwards over in-edges of the labelled ones, as assumed
    above."""
    reached = [graph.labelled]
    new = graph.labelled
    while reached[-1] < graph.nodes and len(reached) < _MOST_HOPS:
        draws = min(graph.edges, graph.bias * (graph.edges / graph.nodes) * new)
        new = min(graph.nodes - reached[-1], ceil((graph.nodes - reached[-1]) * (1 - exp(-draws / graph.nodes))))
        if not new:
            break
        reached.append(reached[-1] + new)
    return reached


def spread_edges(graph: GraphStatistics, tile_rows: int) -> Sequence[int]:
    """Return ``tile_edges`` for a graph that is not here: entry i counts the edges of tiles 0…i-1. It takes eight bytes
    a tile.

    The first tile has the hub. The others have ``bias`` times the mean degree until all edges are used up.
    """
    tiles = -(-graph.nodes // tile_rows)
    a_tile, first, nodes, edges = graph.bias * graph.edges * tile_rows, graph.most_neighbours, graph.nodes, graph.edges
    between = (min(edges, first + a_tile * i // nodes) for i in range(1, tiles))
    return array("q", chain((0,), between, (graph.edges,)))


_SAGE = "Hamilton et al., Inductive representation learning on large graphs, NeurIPS 2017; counts as DGL has it"
_OGB = "Hu et al., Open Graph Benchmark, NeurIPS 2020"
_WEB = "Boldi and Vigna, The WebGraph framework, WWW 2004; features and labels synthetic"
_IGB = "Khatua et al., IGB, KDD 2023; all nodes taken for labelled"
_SNAP = (
    "Yang and Leskovec, ICDM 2012 (SNAP): 1,806,067,135 undirected edges, stored in both directions; "
    "features and labels synthetic"
)
_LSC = "Hu et al., OGB-LSC, 2021: paper cites paper; all nodes taken for labelled"
_KNOWN = (
    # name, nodes, edges, features, classes, labelled, source
    GraphStatistics("reddit", 232_965, 114_615_892, 602, 41, 232_965, _SAGE, undirected=True),
    GraphStatistics("ogbn-products", 2_449_029, 123_718_280, 100, 47, 2_449_029, _OGB, undirected=True),
    GraphStatistics("it-2004", 41_291_594, 1_150_725_436, 256, 64, 41_291_594, _WEB, hub=1_326_744),
    GraphStatistics("ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 172, 1_546_782, _OGB),
    GraphStatistics("igb260m", 269_346_174, 3_995_777_033, 1024, 19, 269_346_174, _IGB),
    GraphStatistics("friendster", 65_608_366, 2 * 1_806_067_135, 256, 64, 65_608_366, _SNAP, undirected=True),
    GraphStatistics("MAG240M", 121_751_666, 1_297_748_926, 768, 153, 121_751_666, _LSC, feature_dtype="float16"),
)
KNOWN = {graph.name: graph for graph in _KNOWN}
"""The graphs that are known by name."""


def known_graph(name: str) -> GraphStatistics | None:
    """Return the one known graph whose name contains ``name``, in any case; None if there is none, or more than one."""
    found = [graph for graph in _KNOWN if name.lower() in graph.name.lower()]
    return found[0] if len(found) == 1 else None
