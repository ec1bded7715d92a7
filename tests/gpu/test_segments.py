# SPDX-License-Identifier: Apache-2.0
"""Segments cover every edge once, in order, no longer than asked, cut where the row alone decides."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.train.kernels.cuda.segments import Segments, bounds
from tests.examples import examples
from tests.gpu.device import DEVICE, EXAMPLES, cut, cutting

pytestmark = pytest.mark.gpu

DEGREES = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 60)), max_size=30)
MOST = st.integers(1, 20)


def offsets_of(degrees: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *degrees]).cumsum(0).to(dtype)


def cut_there(offsets: Tensor, edges: int, most: int) -> Segments:
    return cut(offsets.to(DEVICE), edges, most)


def lists(segments: Segments) -> list[Tensor]:
    """Of segments, then of long rows: the row numbers first."""
    of_segments = [segments.row_S, segments.first_S, segments.edges_S, segments.slot_S]
    return [*of_segments, segments.row_L, segments.slot_L, segments.slots_L]


def made_by_torch(offsets_R1: Tensor, edges: int, most: int) -> list[Tensor]:
    """The oracle: the same lists by torch's operators, all rows at once; at least one row."""
    rows, (_, long_rows) = offsets_R1.numel() - 1, bounds(edges, most)
    parts_R = ((offsets_R1.diff().long() + most - 1) // most).clamp_(min=1)
    is_long_R = parts_R > 1
    slots_R = parts_R * is_long_R
    part_stops_R, slot_stops_R = parts_R.cumsum(0), slots_R.cumsum(0)

    numbers = torch.arange(rows + edges // most)
    row_S = torch.searchsorted(part_stops_R, numbers, right=True)
    is_used_S = row_S < rows
    known_S = row_S.clamp(max=rows - 1)
    part_S = numbers - (part_stops_R - parts_R)[known_S]
    first_S = offsets_R1[known_S] + part_S * most
    edges_S = (offsets_R1[known_S + 1] - first_S).clamp_(max=most) * is_used_S
    slot_S = torch.where(is_long_R[known_S] & is_used_S, (slot_stops_R - slots_R)[known_S] + part_S, -1)

    row_L = torch.searchsorted(is_long_R.cumsum(0), torch.arange(1, long_rows + 1))
    is_used_L, known_L = row_L < rows, row_L.clamp(max=rows - 1)
    slot_L, slots_L = (slot_stops_R - slots_R)[known_L] * is_used_L, slots_R[known_L] * is_used_L
    return [row_S, first_S, edges_S.int(), slot_S, row_L, slot_L, slots_L.int()]


@given(DEGREES, MOST, st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=examples(5 * EXAMPLES), deadline=None)
def test_lists_are_those_that_torch_makes(degrees: list[int], most: int, dtype: torch.dtype) -> None:
    """To the number; what is behind them, so that lists begin where programs like them to, belongs to no row."""
    offsets = offsets_of([*degrees, 7], dtype)
    edges = sum(degrees) + 7
    expected = made_by_torch(offsets, edges, most)
    found = [one.cpu() for one in lists(cut_there(offsets, edges, most))]
    for one, other in zip(expected, found, strict=True):
        assert len(one) <= len(other) < len(one) + 4
        assert torch.equal(other[: len(one)], one)
    row_S, _, edges_S, slot_S, row_L, _, slots_L = found
    behind, behind_long = slice(len(expected[0]), None), slice(len(expected[4]), None)
    assert (row_S[behind] == len(degrees) + 1).all() and not edges_S[behind].any() and (slot_S[behind] < 0).all()
    assert (row_L[behind_long] == len(degrees) + 1).all() and not slots_L[behind_long].any()


def test_more_rows_and_places_than_a_program_takes_at_a_time() -> None:
    """Running sums go on where a block of rows ends; lists are filled by several programs."""
    degrees = torch.randint(0, 9, (2500,), generator=torch.Generator().manual_seed(0)).tolist()
    offsets, edges = offsets_of(degrees), sum(degrees)
    for one, other in zip(made_by_torch(offsets, edges, 3), lists(cut_there(offsets, edges, 3)), strict=True):
        assert torch.equal(other.cpu()[: len(one)], one)


@given(DEGREES, MOST, st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=examples(5 * EXAMPLES), deadline=None)
def test_every_row_is_covered_once_and_in_order(degrees: list[int], most: int, dtype: torch.dtype) -> None:
    """A row of n edges is max(1, ⌈n / most⌉ ) segments, each full but the last."""
    offsets = offsets_of(degrees, dtype)
    segments = cut_there(offsets, sum(degrees), most)
    expected = [
        (row, start + first, min(most, degree - first))
        for row, (degree, start) in enumerate(zip(degrees, offsets.tolist(), strict=False))
        for first in range(0, max(1, degree), most)
    ]
    found = list(zip(segments.row_S.tolist(), segments.first_S.tolist(), segments.edges_S.tolist(), strict=True))
    used = [one for one in found if one[0] < segments.rows]
    assert used == expected
    assert found[: len(used)] == used
    assert all(edges == 0 for _, _, edges in found[len(used) :])


@given(DEGREES, MOST)
@settings(max_examples=examples(5 * EXAMPLES), deadline=None)
def test_parts_of_long_rows_have_slots_side_by_side(degrees: list[int], most: int) -> None:
    """A row of one segment has none; slots of a long row are consecutive and nobody else's."""
    segments = cut_there(offsets_of(degrees), sum(degrees), most)
    by_row: dict[int, list[int]] = {}
    for row, slot in zip(segments.row_S.tolist(), segments.slot_S.tolist(), strict=True):
        if slot >= 0:
            by_row.setdefault(row, []).append(slot)
    assert sorted(by_row) == [row for row, degree in enumerate(degrees) if degree > most]
    taken = [slot for slots in by_row.values() for slot in slots]
    assert taken == list(range(len(taken)))
    long_rows = {
        row: list(range(first, first + count))
        for row, first, count in zip(
            segments.row_L.tolist(), segments.slot_L.tolist(), segments.slots_L.tolist(), strict=True
        )
        if row < segments.rows
    }
    assert long_rows == by_row
    assert all(count == 0 for row, count in zip(segments.row_L, segments.slots_L, strict=True) if row == segments.rows)


@given(DEGREES, MOST)
@settings(max_examples=examples(EXAMPLES), deadline=None)
def test_numbers_of_programs_are_as_rows_and_edges_say(degrees: list[int], most: int) -> None:
    """Nothing is read back to know how many to launch; the workspace is bounded beforehand."""
    segments = cut_there(offsets_of(degrees), sum(degrees), most)
    slots, long_rows = bounds(sum(degrees), most)
    assert segments.count == (len(degrees) + sum(degrees) // most if degrees else 0)
    assert (segments.slots, segments.long_rows) == (slots, long_rows)
    assert int(segments.slots_L.sum()) <= slots <= 2 * (sum(degrees) // most)


@given(DEGREES, MOST, st.data())
@settings(max_examples=examples(3 * EXAMPLES), deadline=None)
def test_where_a_row_is_cut_depends_on_nothing_but_the_row(degrees: list[int], most: int, data: st.DataObject) -> None:
    """A tile of some of the rows cuts them as the whole does."""
    first = data.draw(st.integers(0, len(degrees)))
    stop = data.draw(st.integers(first, len(degrees)))
    offsets = offsets_of(degrees)
    whole = cut_there(offsets, sum(degrees), most)
    part = cut_there(offsets[first : stop + 1] - offsets[first], sum(degrees[first:stop]), most)

    def edges_by_row(segments: Segments, added_rows: int, added_edges: int) -> list[tuple[int, int, int]]:
        return [
            (row + added_rows, start + added_edges, edges)
            for row, start, edges in zip(
                segments.row_S.tolist(), segments.first_S.tolist(), segments.edges_S.tolist(), strict=True
            )
            if row < segments.rows
        ]

    expected = [one for one in edges_by_row(whole, 0, 0) if first <= one[0] < stop]
    assert edges_by_row(part, first, int(offsets[first])) == expected


def test_edges_beyond_32_bits_are_counted() -> None:
    """Offsets of one row that begin where int32 ends."""
    start = 2**31 - 2
    segments = cut_there(torch.tensor([0, start, start + 5]), start + 5, 2**30)
    assert segments.first_S.tolist()[:3] == [0, 2**30, start]
    assert segments.edges_S.tolist()[:3] == [2**30, 2**30 - 2, 5]


class Counted:
    """A program that is not launched, but counted."""

    launches = 0

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launched

    def launched(self, *arguments: object, **options: object) -> None:
        Counted.launches += 1


@pytest.mark.parametrize(("rows", "edges", "most"), [(0, 0, 512), (3, 0, 512), (30, 600, 7), (1024, 50_000, 512)])
def test_two_programs_a_running_sum_and_nothing_is_read_back(
    rows: int, edges: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is known of the offsets is their number: tensors of torch's device "meta" hold nothing."""
    monkeypatch.setattr(Counted, "launches", 0)
    monkeypatch.setattr(cutting, "count_parts", Counted())
    monkeypatch.setattr(cutting, "fill_lists", Counted())
    segments = cut(torch.empty(rows + 1, dtype=torch.int32, device="meta"), edges, most)
    assert segments.row_S.is_meta
    assert Counted.launches == (2 if rows else 0)
    assert (segments.slots, segments.long_rows) == (bounds(edges, most) if rows else (0, 0))


def test_lists_begin_at_addresses_that_programs_are_compiled_for() -> None:
    """A multiple of 16 bytes each, whatever the numbers of rows and edges: otherwise tiles would be compiled anew."""
    for rows, edges in ((1, 0), (3, 20), (6, 47)):
        segments = cut_there(offsets_of([edges, *[0] * (rows - 1)]), edges, 4)
        assert [one.data_ptr() % 16 for one in lists(segments) if one.numel()] == [0] * (7 if edges else 4)
