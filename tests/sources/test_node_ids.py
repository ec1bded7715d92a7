# SPDX-License-Identifier: Apache-2.0
"""Sparse ids get the numbers that sorting would give them, by whichever of the two ways."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError, SourceError
from ooc.sources.node_ids import RankTable, Same, Sorted, collect, numbering, sorted_with_rows, write_ids
from tests.examples import examples

_IDS = st.sets(st.one_of(st.integers(0, 300), st.integers(0, 100_000)), min_size=1, max_size=200)


@settings(deadline=None)
@given(_IDS, st.lists(st.integers(-5, 100_100), max_size=100))
def test_both_ways_number_ids_as_sorting_does(ids: set[int], asked: list[int]) -> None:
    ascending = np.array(sorted(ids))
    queries = np.array([*asked, *sorted(ids)], dtype=np.int64)
    place = {value: at for at, value in enumerate(sorted(ids))}
    wanted = [place.get(value, -1) for value in queries.tolist()]
    for way in (RankTable(ascending), Sorted(ascending), numbering(ascending)):
        assert way.numbers(queries).tolist() == wanted


@settings(deadline=None)
@given(_IDS, st.randoms(use_true_random=False), st.lists(st.integers(-5, 100_100), max_size=50))
def test_ids_of_rows_name_the_rows(ids: set[int], random: object, asked: list[int]) -> None:
    rows = list(ids)
    random.shuffle(rows)  # type: ignore[attr-defined]
    in_order, order = sorted_with_rows(np.array(rows), name="g")
    queries = np.array([*asked, *rows], dtype=np.int64)
    found = numbering(in_order, rows=order).numbers(queries).tolist()
    assert found == [rows.index(value) if value in ids else -1 for value in queries.tolist()]


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(st.lists(st.one_of(st.integers(0, 50), st.integers(0, 2**40)), max_size=60), max_size=12))
def test_a_scarce_memory_collects_the_same_ids(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    wanted = sorted({value for block in blocks for value in block})

    def arrays() -> Iterator[np.ndarray]:
        return (np.array(block, dtype=np.int64) for block in blocks)

    # Less than the table takes, but for 32 bytes a different id and more.
    for limit in (200 * 1000, 32 * max(1, len(wanted)), 1 << 20):
        assert collect(arrays(), folder / "i", name="g", limit_bytes=limit) == len(wanted)
        assert np.fromfile(folder / "i", dtype=np.int64).tolist() == wanted
    assert [path.name for path in folder.iterdir()] == ["i"]


def test_too_many_ids_are_refused_with_a_budget_that_does(tmp_path: Path) -> None:
    blocks = [np.arange(1000) * 10**9]
    with pytest.raises(BudgetError, match="ids of g are sparse: 1000 of them or more take 32"):
        collect(iter(blocks), tmp_path / "i", name="g", limit_bytes=16_000)
    assert list(tmp_path.iterdir()) == []


def test_dense_ids_are_their_numbers() -> None:
    found = numbering(np.arange(7))
    assert isinstance(found, Same) and found.nbytes == 0
    assert found.numbers(np.array([0, 6, 7, -1])).tolist() == [0, 6, -1, -1]


def test_ids_written_in_parts_are_one_npy(tmp_path: Path) -> None:
    parts = [np.arange(5), np.arange(0), np.array([2**62])]
    assert write_ids(tmp_path / "i", parts) == 6
    assert np.fromfile(tmp_path / "i", dtype=np.int64).tolist() == [0, 1, 2, 3, 4, 2**62]


def test_doubled_and_negative_ids_are_refused() -> None:
    with pytest.raises(SourceError, match="g has the id 3 twice"):
        sorted_with_rows(np.array([3, 1, 3]), name="g")
    with pytest.raises(SourceError, match="g has the id -1"):
        sorted_with_rows(np.array([3, -1]), name="g")
