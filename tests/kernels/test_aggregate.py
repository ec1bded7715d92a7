# SPDX-License-Identifier: Apache-2.0
"""Sums over neighbours in bfloat16: gathered narrow, summed in float32, rounded once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ooc.kernels.aggregate import pull, pull_tile, sums_rows_of
from ooc.kernels.edges import SelfLoops, TileEdges, are_other_rows, counted, insert_self_loops, select_edges

ROWS = 500


@st.composite
def neighbour_lists(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Indices, offsets and the first row of up to 40 consecutive rows of a graph of ROWS nodes, loops among them."""
    start = draw(st.integers(0, ROWS - 40))
    count = draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    degrees = torch.randint(0, draw(st.sampled_from([1, 3, 70])), (count,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)]).int()
    indices = torch.randint(0, ROWS, (int(degrees.sum()),), generator=generator)
    loops = torch.rand(len(indices), generator=generator) < 0.2
    rows = torch.repeat_interleave(torch.arange(start, start + count), degrees)
    return torch.where(loops, rows, indices).int(), offsets, start


def lists(indices: Tensor, offsets: Tensor) -> list[list[int]]:
    return [indices[a:b].tolist() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


@pytest.mark.parametrize("width", [1, 16, 33, 128])
def test_a_hub_is_summed_in_float32(width: int) -> None:
    """In bfloat16, adding 54,000 numbers near 1 would end at 256."""
    source = torch.rand(54_000, width).bfloat16() + 0.5
    indices, offsets = torch.arange(54_000, dtype=torch.int32), torch.tensor([0, 54_000], dtype=torch.int32)
    exact = source.double().sum(0, keepdim=True)
    assert torch.allclose(pull(source, indices, offsets).double(), exact, rtol=2**-8 + 1e-4, atol=0)
    assert torch.allclose(exact, torch.full_like(exact, 54_000), rtol=0.05)


@given(neighbour_lists(), st.integers(1, 140))
def test_a_sum_is_the_float32_sum_rounded(case: tuple[Tensor, Tensor, int], width: int) -> None:
    """Where it lies halfway between two bfloat16 either of them will do."""
    indices, offsets, _ = case
    source = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    wide = pull(source.float(), indices, offsets)
    narrow = pull(source, indices, offsets)
    is_halfway = (wide.view(torch.int32) & 0xFFFF) == 0x8000
    away = (wide.view(torch.int32) + 0x8000).bitwise_and(-0x10000).view(torch.float32)
    assert narrow.dtype == torch.bfloat16
    assert bool(((narrow == wide.bfloat16()) | (is_halfway & (narrow.float() == away))).all())


@given(neighbour_lists(), st.integers(1, 100), st.data())
def test_slabs_and_tiles_change_no_bit(case: tuple[Tensor, Tensor, int], width: int, data: st.DataObject) -> None:
    indices, offsets, _ = case
    source = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    whole = pull(source, indices, offsets)
    first = data.draw(st.integers(0, width - 1))
    stop = data.draw(st.integers(first + 1, width))
    row = data.draw(st.integers(0, len(offsets) - 2))
    part = pull(
        source[:, first:stop].contiguous(), indices[int(offsets[row]) :], (offsets[row:] - offsets[row]).contiguous()
    )
    assert torch.equal(part, whole[row:, first:stop])


@given(neighbour_lists(), st.integers(-5, 45))
def test_a_row_becomes_the_last_of_its_neighbours(case: tuple[Tensor, Tensor, int], count: int) -> None:
    indices, offsets, start = case
    stop = min(start + count, start + len(offsets) - 1)
    expected = [
        [*neighbours, *([row] if row < stop else [])] for row, neighbours in enumerate(lists(indices, offsets), start)
    ]
    found = insert_self_loops(indices, offsets, start, stop)[:2]
    assert lists(*found) == expected
    assert [part.dtype for part in found] == [indices.dtype, offsets.dtype]


@given(neighbour_lists(), st.integers(0, ROWS))
def test_edges_left_out(case: tuple[Tensor, Tensor, int], rows: int) -> None:
    """Those from a row to itself, and those to rows that are not there; and which edges are left."""
    indices, offsets, start = case
    given_lists = lists(indices, offsets)
    features = torch.zeros(len(indices), 1)
    for loops in SelfLoops:
        tile = TileEdges(indices, offsets, start, ROWS, loops, features_EK=features)
        found, bounds, places = counted(tile, rows)
        expected = [
            [n for n in neighbours if n < rows and (loops is SelfLoops.AS_STORED or n != row)]
            + [row] * (loops is SelfLoops.EXACTLY_ONE and row < rows)
            for row, neighbours in enumerate(given_lists, start)
        ]
        assert lists(found, bounds) == expected
        everything = torch.cat((indices, torch.arange(start, start + len(offsets) - 1, dtype=torch.int32)))
        assert torch.equal(found, indices if places is None else everything[places])


@given(neighbour_lists(), st.sampled_from([ROWS, ROWS - 30, 200]), st.booleans(), st.booleans())
def test_rows_of_a_tile(case: tuple[Tensor, Tensor, int], height: int, with_loops: bool, known: bool) -> None:
    """Of a source that may be shorter than the graph; with each row as its own neighbour, exactly once, where asked."""
    indices, offsets, start = case
    source = torch.randn(height, 5, generator=torch.Generator().manual_seed(height))
    if known:
        indices, offsets, _ = select_edges(are_other_rows(indices, offsets, start), indices, offsets)
    tile = TileEdges(indices, offsets, start, ROWS, SelfLoops.EXACTLY_ONE if with_loops else SelfLoops.AS_STORED)
    expected = []
    for row, neighbours in enumerate(lists(indices, offsets), start):
        summed = [n for n in neighbours if n != row] + [row] if with_loops else neighbours
        within_source = torch.tensor([n for n in summed if n < height], dtype=torch.int32)
        expected.append(pull(source, within_source, torch.tensor([0, len(within_source)], dtype=torch.int32)))
    assert torch.equal(pull_tile(tile, source, has_loops=not known), torch.cat(expected))


def test_only_what_is_accumulated_in_the_models_own_type_is_summed_as_it_is() -> None:
    """A model in float64 is not to be summed in float32."""
    assert sums_rows_of(torch.bfloat16, torch.float32)
    assert sums_rows_of(torch.float64, torch.float64)
    assert not sums_rows_of(torch.bfloat16, torch.float64)
    assert not sums_rows_of(torch.float32, torch.float64)
