# SPDX-License-Identifier: Apache-2.0
"""Sparse ids get the numbers that sorting would give them, by whichever of the two ways."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import SourceError
from ooc.sources.node_ids import RankTable, Same, Sorted, collect, collect_texts, numbering, sorted_with_rows, write_ids
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
@given(st.lists(st.lists(st.one_of(st.integers(0, 50), st.integers(-9, 2**40)), max_size=60), max_size=12))
def test_a_scarce_memory_collects_the_same_ids(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    wanted = sorted({value for block in blocks for value in block})

    def arrays() -> Iterator[np.ndarray]:
        return (np.array(block, dtype=np.int64) for block in blocks)

    # The least of them has runs go to files, and be merged there.
    for limit in (200 * 1000, 32 * max(1, len(wanted)), 32 * 20, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ooc.sources.node_ids._MOST_RUNS", 3)
            assert collect(arrays(), folder / "i", limit_bytes=limit) == len(wanted)
        assert np.fromfile(folder / "i", dtype=np.int64).tolist() == wanted
    assert [path.name for path in folder.iterdir()] == ["i"]


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(st.lists(st.text("abc", max_size=6), max_size=60), max_size=40))
def test_a_scarce_memory_collects_the_same_texts(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[str]]
) -> None:
    """In the order of their bytes, from one set or from many sorted runs, which are merged when they are too many."""
    folder = tmp_path_factory.mktemp("texts")
    given_blocks = [[text.encode() for text in block] for block in blocks]
    wanted = sorted({text for block in given_blocks for text in block})
    for limit in (1 << 20, 500):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ooc.sources.node_ids._MOST_RUNS", 3)
            found = collect_texts(iter(given_blocks), folder / "i", limit_bytes=limit)
        assert (found.rows, found.width) == (len(wanted), max(map(len, wanted), default=0))
        assert [text for part in found.blocks(7) for text in part] == wanted
    assert sorted(path.name for path in folder.iterdir()) == ["i", "i.lengths"]


def test_dense_ids_are_their_numbers() -> None:
    found = numbering(np.arange(7))
    assert isinstance(found, Same) and found.nbytes == 0
    assert found.numbers(np.array([0, 6, 7, -1])).tolist() == [0, 6, -1, -1]


def test_ids_written_in_parts_are_one_npy(tmp_path: Path) -> None:
    parts = [np.arange(5), np.arange(0), np.array([2**62])]
    assert write_ids(tmp_path / "i", parts) == 6
    assert np.fromfile(tmp_path / "i", dtype=np.int64).tolist() == [0, 1, 2, 3, 4, 2**62]


def test_doubled_ids_are_refused() -> None:
    with pytest.raises(SourceError, match="g has the id 3 twice"):
        sorted_with_rows(np.array([3, 1, 3]), name="g")


def test_negative_ids_are_ids() -> None:
    in_order, rows = sorted_with_rows(np.array([3, -1]), name="g")
    assert numbering(in_order, rows=rows).numbers(np.array([-1, 0, 3])).tolist() == [1, -1, 0]
    assert numbering(np.array([-2, 0])).numbers(np.array([-2, -1, 0])).tolist() == [0, -1, 1]
