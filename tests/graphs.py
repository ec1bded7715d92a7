# SPDX-License-Identifier: Apache-2.0
"""Small random graphs as PyG ``Data``: with self-loops, isolated nodes, duplicate edges, or without."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data


@dataclass(frozen=True, kw_only=True)
class GraphCase:
    """What a random graph is to contain. All counts; ``edges`` before symmetrising and duplicating."""

    nodes: int = 50
    edges: int = 160
    features: int = 9
    classes: int = 4
    undirected: bool = False
    self_loops: int = 0
    isolated: int = 0
    duplicates: int = 0
    unlabelled: int = 0
    weighted: bool = False
    edge_features: int = 0
    train: float = 0.5
    seed: int = 0


def graph_cases(**other: st.SearchStrategy[Any]) -> st.SearchStrategy[GraphCase]:
    """Rough graphs of a few nodes, directed or not; ``other``: what is drawn in another way."""
    usual: dict[str, st.SearchStrategy[Any]] = {
        "nodes": st.integers(3, 60),
        "edges": st.integers(0, 200),
        "features": st.integers(1, 12),
        "undirected": st.booleans(),
        "self_loops": st.integers(0, 12),
        "isolated": st.integers(0, 8),
        "duplicates": st.integers(0, 30),
        "unlabelled": st.integers(0, 30),
        "seed": st.integers(0, 10_000),
    }
    return st.builds(GraphCase, **(usual | other))


def random_data(case: GraphCase, *, dtype: torch.dtype = torch.float64) -> Data:
    """The graph ``case`` describes: x [N, F], edge_index [2, E], y [N] (-1: no label) and three masks [N].

    Sources are drawn with a power law, so that there are hubs as well as rows without in-edges.
    At least one node is in the train split; the rest is halved between validation and test.
    """
    generator = torch.Generator().manual_seed(case.seed)
    order = torch.randperm(case.nodes, generator=generator)
    linked = order[min(case.isolated, case.nodes) :]
    edge_index = _edges(case, linked, generator)
    y = torch.randint(0, case.classes, (case.nodes,), generator=generator)
    centres = torch.randn(case.classes, case.features, generator=generator, dtype=dtype)
    x = centres[y] + torch.randn(case.nodes, case.features, generator=generator, dtype=dtype)

    labelled = torch.randperm(case.nodes, generator=generator)[: max(1, case.nodes - case.unlabelled)]
    train_count = max(1, int(case.train * labelled.numel()))
    valid_count = (labelled.numel() - train_count + 1) // 2
    y_partial = torch.full_like(y, -1)
    y_partial[labelled] = y[labelled]
    train, valid, test = labelled.split([train_count, valid_count, labelled.numel() - train_count - valid_count])
    data = Data(
        x=x,
        edge_index=edge_index,
        y=y_partial,
        train_mask=_mask(case.nodes, train),
        val_mask=_mask(case.nodes, valid),
        test_mask=_mask(case.nodes, test),
    )
    if case.weighted:
        weight = 0.1 + 2 * torch.rand(edge_index.size(1), generator=generator, dtype=dtype)
        weight[torch.rand(edge_index.size(1), generator=generator) < 0.1] = 0.0
        data.edge_weight = _alike_both_ways(edge_index, weight) if case.undirected else weight
    if case.edge_features:
        features = torch.randn(edge_index.size(1), case.edge_features, generator=generator, dtype=dtype)
        data.edge_attr = _alike_both_ways(edge_index, features) if case.undirected else features
    return data


def _alike_both_ways(edge_index: Tensor, values: Tensor) -> Tensor:
    """``values`` [E, …] such that the k-th edge between two nodes carries the same in either direction."""
    seen: dict[tuple[int, int], int] = {}
    first: dict[tuple[int, int, int], int] = {}
    rows = []
    for edge, (source, target) in enumerate(edge_index.t().tolist()):
        repeat = seen.get((source, target), 0)
        seen[source, target] = repeat + 1
        rows.append(first.setdefault((min(source, target), max(source, target), repeat), edge))
    return values[rows]


def _edges(case: GraphCase, linked: Tensor, generator: torch.Generator) -> Tensor:
    """edge_index [2, E] among ``linked`` nodes, shuffled; loops only where the case asks for them."""
    if linked.numel() == 0:
        return torch.empty(2, 0, dtype=torch.int64)
    skewed = (torch.rand(case.edges, generator=generator) ** 2 * linked.numel()).long()
    source = linked[skewed]
    target = linked[torch.randint(0, linked.numel(), (case.edges,), generator=generator)]
    edge_index = torch.stack([source, target])[:, source != target]
    loops = linked[torch.randint(0, linked.numel(), (case.self_loops,), generator=generator)]
    if edge_index.size(1):
        again = torch.randint(0, edge_index.size(1), (case.duplicates,), generator=generator)
        edge_index = torch.cat([edge_index, edge_index[:, again]], dim=1)
    if case.undirected:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    edge_index = torch.cat([edge_index, torch.stack([loops, loops])], dim=1)
    return edge_index[:, torch.randperm(edge_index.size(1), generator=generator)]


def _mask(nodes: int, members: Tensor) -> Tensor:
    mask = torch.zeros(nodes, dtype=torch.bool)
    mask[members] = True
    return mask


def many_graphs(
    count: int, *, labels: str = "values", edge_features: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Data]:
    """Graphs of 1 to 8 nodes and 0 to 20 edges, with self-loops and repetitions: x [n, 3], edge_attr, and y [1, 2] for
    ``values``, [1] in three ``classes``, or [1, 2] of 0, 1 and NaN for ``answers``."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    found = []
    for _ in range(count):
        nodes, edges = int(drawn(1, 9)), int(drawn(0, 21))
        y = {
            "values": torch.randn(1, 2, generator=generator).to(dtype),  # as stores have them
            "classes": drawn(0, 3, 1),
            "answers": torch.tensor([0.0, 1.0, torch.nan], dtype=dtype)[drawn(0, 3, 1, 2)],
        }[labels]
        if labels == "answers" and y.isnan().all():
            y[0, 0] = 1
        data = Data(
            x=torch.randn(nodes, 3, generator=generator, dtype=dtype), edge_index=drawn(0, nodes, 2, edges), y=y
        )
        if edge_features:
            data.edge_attr = torch.randn(edges, edge_features, generator=generator, dtype=dtype)
        found.append(data)
    return found
