# SPDX-License-Identifier: Apache-2.0
"""Segments cover every edge once, in order, no longer than asked, cut where the row alone decides."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.kernels.cuda.segments import EDGES_PER_SEGMENT, long_parts, most_parts
from ooc.kernels.edges import TileEdges
from tests.examples import examples
from tests.gpu.device import DEVICE, EXAMPLES, cut
from tests.gpu.segment_lists import list_long_rows, list_segments

pytestmark = pytest.mark.gpu

DEGREES = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 60)), max_size=30)
MOST = st.integers(1, 20)
START = st.sampled_from([0, 7, 2**31 + 5])
ROWS = 4


class Listed(NamedTuple):
    """A segment as programs find it; a slot of −1: a whole row."""

    slot: int
    row: int
    first: int
    edges: int
    steps: int


def tile_of(degrees: list[int], start: int = 0, dtype: torch.dtype = torch.int64) -> TileEdges:
    offsets = torch.tensor([0, *degrees]).cumsum(0).to(dtype)
    return TileEdges(torch.zeros(0, dtype=dtype, device=DEVICE), offsets.to(DEVICE), start, start + len(degrees))


def of_programs(tile: TileEdges, most: int = EDGES_PER_SEGMENT, *, self_loops: bool = False) -> list[Listed]:
    """All segments, and places behind the last one, by programs of four."""
    parts_P2, slots = cut(tile, most)
    programs = -(-(slots + tile.rows) // ROWS) + 1
    lists = torch.full((5, programs * ROWS), -9, device=DEVICE)
    list_segments[(programs,)](
        *(tile.offsets_R1, parts_P2, lists, slots, tile.rows, tile.start, most),
        SELF_LOOPS=self_loops,
        PLACES=programs * ROWS,
        ROWS=ROWS,
    )
    return [Listed(*numbers) for numbers in zip(*lists.tolist(), strict=True)]


def of_long_rows(tile: TileEdges, most: int) -> list[tuple[int, int, int, int, int]]:
    """Row, first slot, slots, and whether there are parts before and behind these, of what the programs of long rows
    find, one for a part."""
    parts_P2, slots = cut(tile, most)
    lists = torch.full((5, slots), -9, device=DEVICE)
    if slots:
        list_long_rows[(slots,)](*(tile.offsets_R1, parts_P2, lists, slots, tile.rows, tile.start, most), PLACES=slots)
    return list(zip(*lists.tolist(), strict=True))


def expected_of(degrees: list[int], most: int) -> list[Listed]:
    """What every row with edges is cut into, and rows without: in order of rows."""
    found, slot, start = [], 0, 0
    for row, degree in enumerate(degrees):
        for first in range(0, max(1, degree), most):
            edges = min(most, degree - first)
            found.append(Listed(slot if degree > most else -1, row, start + first, edges, edges))
            slot += degree > most
        start += degree
    return found


@given(DEGREES, MOST, START, st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=examples(5 * EXAMPLES), deadline=None)
def test_every_row_is_covered_once_and_in_order(degrees: list[int], most: int, start: int, dtype: torch.dtype) -> None:
    """A row of n edges is max(1, ⌈n / most⌉ ) segments, each full but the last; parts of long rows come first, and have
    slots side by side that are nobody else's."""
    start = start if dtype is torch.int64 else min(start, 7)
    expected = expected_of(degrees, most)
    found = of_programs(tile_of(degrees, start, dtype), most)
    used = [one for one in found if one.row < len(degrees)]
    assert used == [one for one in expected if one.slot >= 0] + [one for one in expected if one.slot < 0]
    assert all(one.row == len(degrees) and one.slot < 0 and not one.steps for one in found if one not in used)


@given(DEGREES, MOST, START)
@settings(max_examples=examples(3 * EXAMPLES), deadline=None)
def test_a_self_loop_comes_behind_the_last_edge_of_a_row(degrees: list[int], most: int, start: int) -> None:
    ends = torch.tensor([0, *degrees]).cumsum(0).tolist()
    for one in of_programs(tile_of(degrees, start), most, self_loops=True):
        is_last = one.row < len(degrees) and one.first + one.edges == ends[one.row + 1]
        assert one.steps == one.edges + is_last


@given(DEGREES, MOST, START)
@settings(max_examples=examples(5 * EXAMPLES), deadline=None)
def test_a_long_row_is_added_up_once(degrees: list[int], most: int, start: int) -> None:
    """By the program of its first part, over all its slots; the programs of its other parts find nothing to do."""
    slots: dict[int, list[int]] = {}
    for one in expected_of(degrees, most):
        if one.slot >= 0:
            slots.setdefault(one.row, []).append(one.slot)
    found = of_long_rows(tile_of(degrees, start), most)
    assert {row: list(range(first, first + count)) for row, first, count, _, _ in found if count} == slots
    assert all(row == len(degrees) for row, _, count, _, _ in found if not count)
    assert not any(goes_on or is_open for _, _, _, goes_on, is_open in found)


@given(DEGREES, MOST, st.data())
@settings(max_examples=examples(3 * EXAMPLES), deadline=None)
def test_where_a_row_is_cut_depends_on_nothing_but_the_row(degrees: list[int], most: int, data: st.DataObject) -> None:
    """A tile has the parts that the whole graph's list has for its rows."""
    offsets = np.cumsum([0, *degrees])
    first = data.draw(st.integers(0, len(degrees)))
    stop = data.draw(st.integers(first, len(degrees)))
    whole, part = long_parts(offsets, 0, most), long_parts(offsets[first : stop + 1], first, most)
    assert part.tolist() == [[row, number] for row, number in whole.tolist() if first <= row < stop]
    assert len(whole) <= most_parts(sum(degrees), most)


def test_what_the_tile_brings_is_not_looked_for() -> None:
    """Offsets on torch's device "meta" hold nothing; neither do those that a GPU has not computed yet."""
    parts = torch.tensor([[3, 0], [3, 1]])
    tile = TileEdges(torch.zeros(0), torch.empty(5, device="meta"), 2, 9, parts_P2=parts)
    parts_P2, slots = cut(tile)
    assert parts_P2 is parts and slots == 2


def test_edges_beyond_32_bits_are_counted() -> None:
    """Offsets of one row that begin where int32 ends."""
    start = 2**31 - 2
    offsets = torch.tensor([0, start, start + 5], device=DEVICE)
    found = of_programs(TileEdges(torch.zeros(0), offsets, 0, 2), 2**30)
    assert [one for one in found if one.row < 2] == [
        Listed(0, 0, 0, 2**30, 2**30),
        Listed(1, 0, 2**30, 2**30 - 2, 2**30 - 2),
        Listed(-1, 1, start, 5, 5),
    ]


def test_a_tile_without_rows() -> None:
    assert of_programs(tile_of([])) == [Listed(-1, 0, 0, 0, 0)] * ROWS


def test_parts_of_a_graph_are_those_of_its_rows() -> None:
    """The type is the offsets'."""
    for dtype in (np.int32, np.int64):
        parts = long_parts(np.array([0, 5, 5, 16], dtype=dtype), 4, 5)
        assert parts.dtype == dtype
        assert parts.tolist() == [[6, 0], [6, 1], [6, 2]]
