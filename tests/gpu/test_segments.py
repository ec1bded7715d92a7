# SPDX-License-Identifier: Apache-2.0
"""Segments cover every edge once, in order, no longer than asked, cut where the row alone decides."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.train.kernels.cuda.segments import bounds, cut

DEGREES = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 60)), max_size=30)
MOST = st.integers(1, 20)


def offsets_of(degrees: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *degrees]).cumsum(0).to(dtype)


@given(DEGREES, MOST, st.sampled_from([torch.int32, torch.int64]))
def test_every_row_is_covered_once_and_in_order(degrees: list[int], most: int, dtype: torch.dtype) -> None:
    """A row of n edges is max(1, ⌈n / most⌉ ) segments, each full but the last."""
    offsets = offsets_of(degrees, dtype)
    segments = cut(offsets, sum(degrees), most)
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
def test_parts_of_long_rows_have_slots_side_by_side(degrees: list[int], most: int) -> None:
    """A row of one segment has none; slots of a long row are consecutive and nobody else's."""
    segments = cut(offsets_of(degrees), sum(degrees), most)
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
def test_arrays_are_as_long_as_rows_and_edges_say(degrees: list[int], most: int) -> None:
    """Nothing is read back to know how many programs to launch; the workspace is bounded beforehand."""
    segments = cut(offsets_of(degrees), sum(degrees), most)
    slots, long_rows = bounds(sum(degrees), most)
    assert segments.count == (len(degrees) + sum(degrees) // most if degrees else 0)
    assert (segments.slots, segments.long_rows) == (slots, long_rows)
    assert int(segments.slots_L.sum()) <= slots <= 2 * (sum(degrees) // most)


@given(DEGREES, MOST, st.data())
def test_where_a_row_is_cut_depends_on_nothing_but_the_row(degrees: list[int], most: int, data: st.DataObject) -> None:
    """A tile of some of the rows cuts them as the whole does."""
    first = data.draw(st.integers(0, len(degrees)))
    stop = data.draw(st.integers(first, len(degrees)))
    offsets = offsets_of(degrees)
    whole = cut(offsets, sum(degrees), most)
    part = cut(offsets[first : stop + 1] - offsets[first], sum(degrees[first:stop]), most)

    def edges_by_row(segments, added_rows: int, added_edges: int) -> list[tuple[int, int, int]]:  # type: ignore[no-untyped-def]
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
    segments = cut(torch.tensor([0, start, start + 5]), start + 5, 2**30)
    assert segments.first_S.tolist()[:3] == [0, 2**30, start]
    assert segments.edges_S.tolist()[:3] == [2**30, 2**30 - 2, 5]


@given(st.integers(0, 30), st.integers(0, 600), MOST)
@settings(deadline=None)  # the first tensor without data takes seconds
def test_nothing_is_read_back(rows: int, edges: int, most: int) -> None:
    """The cut is computed without knowing a single offset: tensors of torch's device "meta" have none."""
    segments = cut(torch.empty(rows + 1, dtype=torch.int32, device="meta"), edges, most)
    assert segments.row_S.is_meta
    assert (segments.slots, segments.long_rows) == (bounds(edges, most) if rows else (0, 0))
