# SPDX-License-Identifier: Apache-2.0
"""Sums of the GPU are those of the processor, to the bit, whatever the shape of programs and the tile."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.errors import ModelError
from ooc.kernels import aggregate
from ooc.kernels.cuda.choice import Shape
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.plan.workload import Direction
from tests.examples import examples
from tests.gpu.device import DEVICE, EXAMPLES, MOST, same_bits, shapes, sized, sums, there
from tests.kernels.kernel_cases import HEIGHTS, KernelGraph, graphs, numbers

pytestmark = pytest.mark.gpu

WIDTHS = st.integers(1, 19)
"""Several programs side by side, the last of them with columns that are none."""
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def in_parts(source: Tensor, indices: Tensor, offsets: Tensor, most: int) -> Tensor:
    """The oracle: parts of rows summed by the processor, and their sums again."""
    rows = list(pairwise(offsets.tolist()))
    parts = [(first, min(first + most, stop)) for start, stop in rows for first in range(start, stop, most)]
    stops = torch.tensor([0, *(stop for _, stop in parts)], dtype=offsets.dtype)
    sums_PW = aggregate.pull(source, indices, stops)
    counts = torch.tensor([0, *(len(range(start, stop, most)) for start, stop in rows)])
    return aggregate.pull(sums_PW, torch.arange(len(parts), dtype=offsets.dtype), counts.cumsum(0).to(offsets.dtype))


def pull(source: Tensor, indices: Tensor, offsets: Tensor, weight: Tensor | None = None) -> Tensor:
    return sums.pull_tile(TileEdges(indices, offsets, 0, len(source), weight_E=weight), source)


@given(graphs(SelfLoops.AS_STORED), st.integers(0, 99), WIDTHS, DTYPES, MOST, shapes(), st.booleans())
@settings(max_examples=examples(5 * EXAMPLES), deadline=None)
def test_sums_have_the_processor_s_bits(
    graph: KernelGraph, seed: int, width: int, dtype: torch.dtype, most: int, shape: Shape, wide_indices: bool
) -> None:
    """Summed in float32 (or float64) in the order of the list, in parts for rows that were cut, rounded once."""
    source = numbers(seed, graph.nodes, width).to(dtype)
    _, _, tile = next(graph.tiles(Direction.IN, graph.nodes))
    expected = in_parts(source if dtype == torch.float64 else source.float(), tile.indices_E, tile.offsets_R1, most).to(
        dtype
    )
    if wide_indices:
        tile = replace(tile, indices_E=tile.indices_E.long())
    found = sized(sums.pull_tile, there(tile), source.to(DEVICE), most=most, shape=shape)
    assert found.dtype == dtype
    assert same_bits(found, expected)


@given(graphs(SelfLoops.EXACTLY_ONE), st.data(), WIDTHS, st.sampled_from([torch.float32, torch.bfloat16]), shapes())
@settings(max_examples=examples(3 * EXAMPLES), deadline=None)
def test_a_row_is_the_last_of_its_own_neighbours(
    graph: KernelGraph, data: st.DataObject, width: int, dtype: torch.dtype, shape: Shape
) -> None:
    """Once, whatever self-loops are stored, in tiles anywhere in the graph, and where the source has the row at all:
    with the processor's bits, rounded once."""
    source = numbers(data.draw(st.integers(0, 99)), data.draw(st.integers(1, graph.nodes)), width).to(dtype)
    for _, _, tile in graph.tiles(Direction.IN, data.draw(HEIGHTS)):
        expected = aggregate.pull_tile(tile, source.float()).to(dtype)
        assert same_bits(sized(sums.pull_tile, there(tile), source.to(DEVICE), shape=shape), expected)


@given(graphs(SelfLoops.EXACTLY_ONE), st.integers(0, 99), MOST)
@settings(max_examples=examples(2 * EXAMPLES), deadline=None)
def test_the_last_part_of_a_row_ends_with_it(graph: KernelGraph, seed: int, most: int) -> None:
    """Nothing but the order of additions tells that a row was cut."""
    source = numbers(seed, graph.nodes, 4)
    _, _, tile = next(graph.tiles(Direction.OUT, graph.nodes))
    found = sized(sums.pull_tile, there(tile), source.to(DEVICE), most=most)
    torch.testing.assert_close(found.cpu(), aggregate.pull_tile(tile, source), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_right_to_where_they_are_wanted(dtype: torch.dtype) -> None:
    """If they can lie there as they are: otherwise the memory is left alone, and the result is new."""
    source = numbers(0, 40, 6).to(dtype)
    tile = TileEdges(torch.tensor([1, 2, 39], dtype=torch.int32), torch.tensor([0, 2, 2, 3], dtype=torch.int32), 0, 40)
    expected = aggregate.pull_tile(tile, source.float()).to(dtype)
    memory = torch.full((4, 6), 7.0, dtype=dtype, device=DEVICE)
    assert sums.pull_tile(there(tile), source.to(DEVICE), out=memory[:3]).data_ptr() == memory.data_ptr()
    assert same_bits(memory[:3], expected) and bool((memory[3] == 7).all())
    for other in (torch.zeros(3, 12, dtype=dtype, device=DEVICE)[:, :6], torch.zeros(3, 6, dtype=torch.float64)):
        assert same_bits(sums.pull_tile(there(tile), source.to(DEVICE), out=other.to(DEVICE)), expected)
        assert not other.any()


@given(graphs(SelfLoops.AS_STORED), st.integers(0, 99), WIDTHS, MOST)
@settings(max_examples=examples(EXAMPLES), deadline=None)
def test_edges_may_have_weights(graph: KernelGraph, seed: int, width: int, most: int) -> None:
    source = numbers(seed, graph.nodes, width)
    _, _, tile = next(graph.tiles(Direction.IN, graph.nodes))
    weight = numbers(seed + 1, tile.indices_E.numel())
    expected = aggregate.pull(source, tile.indices_E, tile.offsets_R1, weight)
    weighted = replace(there(tile), weight_E=weight.to(DEVICE))
    found = sized(sums.pull_tile, weighted, source.to(DEVICE), most=most)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)


@given(graphs(SelfLoops.AS_STORED), st.integers(0, 99), HEIGHTS, st.booleans())
@settings(max_examples=examples(EXAMPLES), deadline=None)
def test_tiles_and_slabs_change_no_bit(graph: KernelGraph, seed: int, height: int, weighted: bool) -> None:
    """By the call that the processor's has, of a slab that lies within a wider matrix."""
    source = numbers(seed, graph.nodes, 12, dtype=torch.float32).to(DEVICE)
    _, _, tile = next(graph.tiles(Direction.OUT, graph.nodes))
    weight = numbers(seed + 1, tile.indices_E.numel(), dtype=torch.float32).to(DEVICE) if weighted else None
    whole = pull(source, tile.indices_E.to(DEVICE), tile.offsets_R1.to(DEVICE), weight)
    for rows, edges, part in graph.tiles(Direction.OUT, height):
        own = None if weight is None else weight[edges].contiguous()
        found = pull(source[:, 3:8], part.indices_E.to(DEVICE), part.offsets_R1.to(DEVICE), own)
        assert same_bits(found, whole[rows, 3:8])


@pytest.mark.parametrize("width", [100, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows(width: int, dtype: torch.dtype) -> None:
    """By the shape of the table, several programs side by side."""
    source = numbers(0, 5, width).to(dtype)
    indices, offsets = torch.tensor([4, 0, 0, 1, 3], dtype=torch.int32), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    found = pull(source.to(DEVICE), indices.to(DEVICE), offsets.to(DEVICE))
    assert same_bits(found, aggregate.pull(source.float(), indices, offsets).to(dtype))


def test_rows_beyond_two_to_the_31_elements() -> None:
    """The last of three rows begins at element 2³² of the matrix; memory between them is never touched."""
    memory = torch.empty(2**32 + 4, dtype=torch.bfloat16, device=DEVICE)
    source = memory.as_strided((3, 4), (2**31, 1))
    source[:] = torch.arange(12, device=DEVICE).view(3, 4).bfloat16()
    indices, offsets = torch.tensor([2, 0, 1], device=DEVICE), torch.tensor([0, 2, 3], device=DEVICE)
    assert pull(source, indices, offsets).tolist() == [[8, 10, 12, 14], [4, 5, 6, 7]]


def test_a_hub_is_cut_by_default() -> None:
    """In bfloat16, adding so many numbers near 1 would end at 256."""
    source = (torch.rand(1300, 4, generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16()
    indices, offsets = torch.arange(1300, dtype=torch.int32), torch.tensor([0, 1300], dtype=torch.int32)
    found = pull(source.to(DEVICE), indices.to(DEVICE), offsets.to(DEVICE))
    torch.testing.assert_close(found.cpu().double(), source.double().sum(0, keepdim=True), rtol=2**-8, atol=0)


@pytest.mark.parametrize("neighbour", [-1, 3, 2**30])
def test_an_index_that_is_no_row_is_not_followed(neighbour: int) -> None:
    source = torch.ones(3, 4, device=DEVICE)
    indices = torch.tensor([0, neighbour], dtype=torch.int32, device=DEVICE)
    assert pull(source, indices, torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)).tolist() == [[1.0] * 4]


def test_no_rows_and_no_edges() -> None:
    source, none = torch.ones(3, 4, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert pull(source, none, torch.zeros(1, dtype=torch.int32, device=DEVICE)).shape == (0, 4)
    assert pull(source, none, torch.zeros(3, dtype=torch.int32, device=DEVICE)).tolist() == [[0.0] * 4] * 2


def test_rows_of_whole_numbers_are_refused() -> None:
    source = torch.ones(3, 4, dtype=torch.int32, device=DEVICE)
    indices = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ModelError, match="int32 cannot be summed on a GPU"):
        pull(source, indices, torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
