# SPDX-License-Identifier: Apache-2.0
"""Maxima and their gradients are PyG's, ties included, and the same bits however a graph is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import SAGEConv

from ooc.kernels import maximum
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.plan.workload import Direction
from tests.examples import examples
from tests.kernels.kernel_cases import HEIGHTS, PIECES, KernelGraph, by_tiles, graphs, numbers, small_pieces

WIDTH = 3


def pull(graph: KernelGraph, source: Tensor, gradient: Tensor, height: int, workers: int = 1) -> tuple[Tensor, ...]:
    """Maxima of the rows that have a gradient, their ties, and the gradient of all sources."""
    scored = len(gradient)

    def forward(rows: slice, _: slice, tile: TileEdges) -> tuple[Tensor, ...]:
        kept = maximum.pull_maxima(tile, source, keep=True)
        value, ties = kept.view(len(kept), -1, 2).unbind(2)
        assert torch.equal(maximum.pull_maxima(tile, source, keep=False), value)
        return value, ties, maximum.upstream(gradient[rows], kept)

    value, ties, target = by_tiles(graph.tiles(Direction.IN, height, scored), forward, workers=workers)

    def backward(rows: slice, _: slice, tile: TileEdges) -> tuple[Tensor, ...]:
        return (maximum.pull_sources(tile, target_NK=target, source_RW=source[rows]),)

    return value, ties, *by_tiles(graph.tiles(Direction.OUT, height), backward, workers=workers)


def values(seed: int, rows: int, levels: int) -> Tensor:
    """Few distinct values, so that many are equal; exact zeros among them."""
    return (numbers(seed, rows, WIDTH) * levels).round() / levels


@given(
    graphs(SelfLoops.AS_STORED),
    st.integers(0, 999),
    st.sampled_from([1, 3, 10**6]),
    st.booleans(),
    HEIGHTS,
    PIECES,
    st.integers(0, 11),
)
@settings(max_examples=examples(40), deadline=None)
def test_values_and_gradients_are_pyg_s(
    graph: KernelGraph, seed: int, levels: int, rectified: bool, height: int, edges_per_piece: int, unscored: int
) -> None:
    """With ties and without, with maxima of exactly 0, where PyG loses a part of the gradient, and repeated edges."""
    scored = max(1, graph.nodes - unscored)
    source = values(seed, graph.nodes, levels)
    source = source.relu() if rectified else source
    gradient = numbers(seed + 1, scored, WIDTH)
    conv = SAGEConv(WIDTH, WIDTH, aggr="max", root_weight=False, bias=False).double()
    with torch.no_grad():
        conv.lin_l.weight.copy_(torch.eye(WIDTH))
    x = source.clone().requires_grad_()
    expected = conv(x, graph.edge_index)[:scored]
    expected.backward(gradient)
    with small_pieces(edges_per_piece):
        value, _, found = pull(graph, source, gradient, height)
    assert torch.equal(value, expected)
    torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-12)


@given(graphs(), st.integers(0, 999), HEIGHTS, PIECES)
@settings(max_examples=examples(40), deadline=None)
def test_tiles_and_threads_change_no_bit(graph: KernelGraph, seed: int, height: int, edges_per_piece: int) -> None:
    source, gradient = values(seed, graph.nodes, 2).float(), numbers(seed + 1, graph.nodes, WIDTH).float()
    with small_pieces(edges_per_piece):
        whole = pull(graph, source, gradient, graph.nodes)
        for one, other in zip(whole, pull(graph, source, gradient, height, 3), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("column", "ties"), [([3.0, 3.0, 1.0], 2.0), ([0.0, 0.0, -1.0], 3.0), ([-1.0, -2.0, -3.0], 1.0)]
)
@pytest.mark.parametrize("edges_per_piece", [1, 2, 9])
def test_parts_of_a_gradient(column: list[float], ties: float, edges_per_piece: int) -> None:
    """Equal values share; a maximum of 0 makes a part that nobody gets; cutting a row changes neither."""
    graph = KernelGraph(4, torch.tensor([[0, 1, 2], [3, 3, 3]]))
    source = torch.tensor([*column, 7.0])[:, None]
    with small_pieces(edges_per_piece):
        value, counted, gradient = pull(graph, source, torch.ones(4, 1), 4)
    assert value[3].item() == max(column)
    assert counted[:, 0].tolist() == [1.0, 1.0, 1.0, ties]
    assert gradient[:, 0].tolist() == pytest.approx([1 / ties if x == max(column) else 0.0 for x in column] + [0.0])
