# SPDX-License-Identifier: Apache-2.0
"""Shapes suit every width, and the fastest one measured is kept; by a timer that knows the times."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.kernels.cuda.choice import (
    MOST_WARPS,
    Case,
    Choices,
    Kernel,
    Shape,
    power_of_two,
)

CHECKOUT = Path(__file__).resolve().parent.parent.parent

sys.path.insert(0, str(CHECKOUT / "tools"))
from gpu_parts.shapes import ROUNDS, candidates, measure  # noqa: E402

sys.path.remove(str(CHECKOUT / "tools"))

CASE = Case(Kernel.SUM, 128, 4)


@given(st.integers(1, 1024), st.sampled_from([2, 4, 8]), st.booleans())
def test_programs_are_whole_powers_of_two(width: int, itemsize: int, whole_rows: bool) -> None:
    """Of rows, columns and warps, as Triton has it; a program that needs whole rows has all their columns."""
    case = Case(Kernel.ATTEND if whole_rows else Kernel.SUM, width, itemsize)
    tried = candidates(case)
    assert tried[0] == case.usual
    assert len(tried) == len(set(tried)) <= 40
    for shape in tried:
        assert all(size == power_of_two(size) for size in (shape.rows, shape.columns, shape.warps))
        assert shape.warps <= MOST_WARPS
        assert shape.columns >= width or not whole_rows


@given(st.integers(1, 10**6))
def test_powers_of_two(width: int) -> None:
    power = power_of_two(width)
    assert power // 2 < width <= power
    assert power & (power - 1) == 0


def test_the_fastest_candidate_is_kept_on_disk(tmp_path: Path) -> None:
    """Whoever opens the file again has it; other widths have the table's."""
    path = tmp_path / "cache" / "shapes.json"
    fastest = candidates(CASE)[-1]
    calls: list[Shape] = []

    def seconds(shape: Shape) -> float:
        calls.append(shape)
        return 1.0 if shape == fastest else 2.0

    assert measure(Choices(path), CASE, seconds) == fastest
    assert calls == candidates(CASE) * ROUNDS
    again = Choices(path)
    assert again.shape(CASE) == fastest
    assert again.shape(Case(Kernel.SUM, 64, 4)) == Case(Kernel.SUM, 64, 4).usual
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_one_slow_round_does_not_decide() -> None:
    """The median does; of equals the earlier one, which is the table's."""
    times = iter([9.0, *[1.0] * (len(candidates(CASE)) * ROUNDS)])
    assert measure(Choices(None), CASE, lambda _: next(times)) == CASE.usual


def test_candidates_that_do_not_run_are_left_out() -> None:
    """As those too large for a GPU; where none runs, the reason is told."""
    slowest = candidates(CASE)[1]

    def only_one(shape: Shape) -> float:
        if shape != slowest:
            raise RuntimeError("out of resource: shared memory")
        return 5.0

    assert measure(Choices(None), CASE, only_one) == slowest

    def none(shape: Shape) -> float:
        raise RuntimeError("out of resource: registers")

    with pytest.raises(RuntimeError, match="registers"):
        measure(Choices(None), CASE, none)


@pytest.mark.parametrize("text", ["", "[]", '{"sum 128 x 4": {"rows": "many"}}', '{"sum 128 x 4": 3}', "null"])
def test_a_damaged_file_counts_as_not_there(tmp_path: Path, text: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(text)
    assert Choices(path).shape(CASE) == CASE.usual


def test_what_is_kept_is_plain(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    measure(Choices(path), CASE, lambda _: 1.0)
    shape = CASE.usual
    expected = {"rows": shape.rows, "columns": shape.columns, "unroll": shape.unroll, "warps": shape.warps}
    assert json.loads(path.read_text()) == {"sum 128 x 4": expected}


@given(st.integers(1, 1024))
def test_whole_rows_are_counted_as_what_they_are_summed_in(width: int) -> None:
    """So narrower sources have the programs of float32, and as many registers."""
    assert candidates(Case(Kernel.ATTEND, width, 2)) == candidates(Case(Kernel.ATTEND, width, 4))
    assert Case(Kernel.ATTEND, 64, 2).usual.rows == 2 and Case(Kernel.SUM, 64, 2).usual.rows == 4


def test_only_shapes_that_change_no_bit_are_tried() -> None:
    """Where columns are added up, threads and warps decide in which order."""
    case = Case(Kernel.ATTEND_SOURCES, 48, 4)
    assert {(shape.rows, shape.columns, shape.warps) for shape in candidates(case)} == {(2, 64, 1)}
    assert len(candidates(case)) > 1
