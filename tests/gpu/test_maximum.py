# SPDX-License-Identifier: Apache-2.0
"""Maxima, ties and gradients of the GPU are the processor's, which are PyG's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.kernels import maximum as reference
from ooc.kernels.cuda.choice import Shape
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.plan.workload import Direction
from tests.examples import examples
from tests.gpu.device import DEVICE, EXAMPLES, MOST, maximum, same_bits, shapes, sized, there
from tests.kernels.kernel_cases import KernelGraph, graphs, numbers

pytestmark = pytest.mark.gpu

WIDTH = 5


def values(seed: int, rows: int, width: int, levels: int) -> Tensor:
    """Few distinct values, so that many are equal; exact zeros among them."""
    return (numbers(seed, rows, width) * levels).round() / levels


@given(
    graphs(),
    st.integers(0, 99),
    st.integers(1, 11),
    st.sampled_from([1, 3]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    MOST,
    shapes(),
    st.integers(0, 5),
)
@settings(max_examples=examples(EXAMPLES), deadline=None)
def test_maxima_ties_and_gradients(
    graph: KernelGraph, seed: int, width: int, levels: int, dtype: torch.dtype, most: int, shape: Shape, absent: int
) -> None:
    """Also of sources narrower than what is kept of them, where the last are absent, and with self-loops."""
    present = max(1, graph.nodes - absent)
    source = values(seed, graph.nodes, width, levels).to(dtype)
    wide = source if dtype == torch.float64 else source.float()
    _, _, tile = next(graph.tiles(Direction.IN, graph.nodes))
    expected = reference.pull_maxima(tile, wide[:present], keep=True)
    options = dict(most=most, shape=shape)
    kept = sized(maximum.pull_maxima, there(tile), source[:present].to(DEVICE), keep=True, **options)
    assert same_bits(kept, expected)
    alone = sized(maximum.pull_maxima, there(tile), source[:present].to(DEVICE), keep=False, **options)
    assert alone.dtype == dtype
    assert same_bits(alone, expected.view(graph.nodes, width, 2)[:, :, 0].to(dtype))

    gradient = numbers(seed + 1, graph.nodes, width).to(wide.dtype)
    target = reference.upstream(gradient, expected)
    assert same_bits(reference.upstream(gradient.to(DEVICE), kept), target)
    _, _, tile = next(graph.tiles(Direction.OUT, graph.nodes))
    own = reference.pull_sources(tile, target_NK=target[:present], source_RW=wide)
    options = dict(most=most, shape=shape)
    found = sized(
        maximum.pull_sources, there(tile), target_NK=target[:present].to(DEVICE), source_RW=source.to(DEVICE), **options
    )
    assert found.dtype == dtype
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(found.cpu().to(own.dtype), own, rtol=close, atol=close)


@pytest.mark.parametrize("most", [1, 2, 9])
@pytest.mark.parametrize(
    ("column", "ties"), [([3.0, 3.0, 1.0], 2.0), ([0.0, 0.0, -1.0], 3.0), ([-1.0, -2.0, -3.0], 1.0)]
)
def test_parts_of_a_gradient(column: list[float], ties: float, most: int) -> None:
    """Equal values share; a maximum of 0 makes a part that nobody gets; cutting a row changes neither."""
    tile = TileEdges(torch.arange(3, dtype=torch.int32), torch.tensor([0, 0, 3], dtype=torch.int32), 3, nodes=5)
    source = torch.tensor(column, device=DEVICE)[:, None]
    kept = sized(maximum.pull_maxima, there(tile), source, keep=True, most=most)
    assert kept.tolist() == [[0.0, 1.0], [max(column), ties]]


@given(graphs(), st.integers(0, 99), st.sampled_from([1, 3]), shapes())
@settings(max_examples=examples(EXAMPLES), deadline=None)
def test_shapes_and_tiles_change_no_bit(graph: KernelGraph, seed: int, height: int, shape: Shape) -> None:
    source = numbers(seed, graph.nodes, WIDTH, dtype=torch.float32).to(DEVICE)
    target = numbers(seed + 1, graph.nodes, 2 * WIDTH, dtype=torch.float32).to(DEVICE)
    target[:, ::2] = source.amax(0)  # a maximum that some source equals
    _, _, tile = next(graph.tiles(Direction.OUT, graph.nodes))
    whole = maximum.pull_sources(there(tile), target_NK=target, source_RW=source)
    for rows, _, part in graph.tiles(Direction.OUT, height):
        part = there(part)
        found = sized(maximum.pull_sources, part, target_NK=target, source_RW=source[rows], shape=shape)
        assert same_bits(found, whole[rows])


def test_self_loops_are_counted_once() -> None:
    """Those stored are left out and every row is among its own neighbours."""
    tile = TileEdges(torch.tensor([1, 1, 2]), torch.tensor([0, 2, 3]), 1, nodes=3, self_loops=SelfLoops.EXACTLY_ONE)
    source = torch.tensor([[9.0], [1.0], [5.0]], device=DEVICE)
    assert maximum.pull_maxima(there(tile), source, keep=True).tolist() == [[1.0, 1.0], [5.0, 1.0]]
