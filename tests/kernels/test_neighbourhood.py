# SPDX-License-Identifier: Apache-2.0
"""The graph around a tile has the tile's edges and no others, and its nodes are found where they belong."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels import neighbourhood as module
from ooc.kernels.edges import TileEdges
from ooc.kernels.neighbourhood import PADDED_EDGE, PADDED_ROW, neighbourhood, runs
from tests.examples import examples


def tile_of(neighbours: list[list[int]], start: int, nodes: int, **carried: Tensor) -> TileEdges:
    """A tile whose rows have these neighbours."""
    offsets = torch.tensor([0, *(len(row) for row in neighbours)]).cumsum(0).int()
    indices = torch.tensor([j for row in neighbours for j in row], dtype=torch.int32)
    return TileEdges(indices, offsets, start, nodes, **carried)


@given(
    neighbours=st.lists(st.lists(st.integers(0, 29), max_size=9).map(sorted), min_size=1, max_size=8),
    start=st.integers(0, 20),
    rows=st.integers(28, 30),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_edge_is_there_once(neighbours: list[list[int]], start: int, rows: int) -> None:
    """Counted in rows of the graph again, edges are the tile's in their order, but for absent neighbours."""
    edges = sum(map(len, neighbours))
    features = torch.arange(2.0 * edges).view(edges, 2)
    tile = tile_of(neighbours, start, 30, weight_E=torch.arange(float(edges)), features_EK=features)
    near = neighbourhood(tile, rows)
    nodes = torch.cat((torch.arange(start, start + len(neighbours)), near.others_S))
    numbered = [(j, start + i) for i, row in enumerate(neighbours) for j in row]
    present = [k for k, (j, _) in enumerate(numbered) if j < rows]
    assume(present)
    assert len(nodes.unique()) == len(nodes)
    found = nodes[near.edge_index_2E].t().tolist()
    assert [tuple(edge) for edge in found] == [numbered[k] for k in present]
    assert near.weight_E is not None and near.features_EK is not None
    assert near.weight_E.tolist() == present
    assert torch.equal(near.features_EK, features[present])
    x = torch.randn(30, 3)
    assert torch.equal(near.gather(x), x[nodes])


@pytest.mark.parametrize("at_once", [1, 3, 4, 100])
def test_runs_are_the_tile_row_by_row(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows of few edges together; one row of many alone; nothing left out."""
    monkeypatch.setattr(module, "EDGES_AT_ONCE", at_once)
    rows = [[], [1, 2], [3], [], [0, 1, 2, 3, 4, 5], [7], [8], []]
    edges = sum(map(len, rows))
    tile = tile_of(rows, 10, 30, weight_E=torch.arange(float(edges)), features_EK=torch.arange(2.0 * edges).view(-1, 2))
    found, weights, features, start = [], [], [], 10
    for run in runs(tile):
        assert run.start == start and (len(run.indices_E) <= at_once or run.rows == 1)
        start += run.rows
        bounds = run.offsets_R1.tolist()
        found += [run.indices_E[a:b].tolist() for a, b in itertools.pairwise(bounds)]
        assert run.weight_E is not None and run.features_EK is not None
        weights.append(run.weight_E)
        features.append(run.features_EK)
    assert found == rows
    assert torch.equal(torch.cat(weights), tile.weight_E) and torch.equal(torch.cat(features), tile.features_EK)


def test_runs_are_as_even_as_rows_allow() -> None:
    """Not many edges and few in turns."""
    tile = tile_of([[1, 2]] * 10 + [[]] * 3, 0, 30)
    assert [len(run.indices_E) for run in runs(tile, 18)] == [10, 10]
    assert [len(run.indices_E) for run in runs(tile, 9)] == [6, 8, 6]


def test_damaged_indices_are_found() -> None:
    """A neighbour that is no row of the store is an error of the store's."""
    with pytest.raises(StoreError, match="indices are damaged"):
        neighbourhood(tile_of([[1, 7], [30]], 0, 30), 30)


def test_rows_without_edges_have_one_beside_them() -> None:
    """A layer is never run on no edges at all."""
    tile = tile_of([[], []], 4, 30, weight_E=torch.empty(0), features_EK=torch.empty(0, 3))
    near = neighbourhood(tile, 30)
    assert near.gather(torch.arange(30.0)[:, None])[:, 0].tolist() == [4, 5, 4]
    assert near.edge_index_2E.tolist() == [[1], [2]]
    assert near.weight_E is not None and near.features_EK is not None
    assert near.weight_E.shape == (1,) and near.features_EK.shape == (1, 3)


@given(degrees=st.lists(st.integers(0, 40), min_size=1, max_size=30), most=st.integers(1, 80))
def test_rows_that_are_padded_are_alike(degrees: list[int], most: int) -> None:
    """All rows come once, in order, with their edges, and runs of several have bounded room for those of any."""
    offsets = torch.tensor([0, *degrees]).cumsum(0)
    tile = TileEdges(torch.arange(int(offsets[-1])), offsets, 5, 1 << 20)
    found = list(runs(tile, most, pads=True))
    assert [run.start for run in found] == [5, *(run.start + run.rows for run in found[:-1])]
    assert torch.cat([run.offsets_R1.diff() for run in found]).tolist() == degrees
    assert torch.equal(torch.cat([run.indices_E for run in found]), tile.indices_E)
    for run in found:
        room = run.rows * int(run.offsets_R1.diff().max())
        assert run.rows == 1 or room <= PADDED_EDGE * len(run.indices_E) + PADDED_ROW * run.rows
