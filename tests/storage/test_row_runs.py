# SPDX-License-Identifier: Apache-2.0
"""Rows read together are the rows read alone, in as few accesses as are worth it."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.storage.array import Array, open_array, read_rows, runs
from ooc.storage.writer import ArrayWriter
from tests.examples import examples

VALUES = np.random.default_rng(0).standard_normal((3000, 33)).astype(np.float32)


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Array:
    folder: Path = tmp_path_factory.mktemp("rows")
    with ArrayWriter(folder, "x", VALUES.shape, VALUES.dtype, chunk_bytes=1 << 12) as writer:
        writer.append(VALUES)
    return open_array(folder, "x")


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(st.integers(0, 2999), max_size=60), st.integers(1, 5000))
def test_rows_read_together_are_the_rows_read_alone(array: Array, rows: list[int], gap_bytes: int) -> None:
    found = read_rows(array, np.array(rows, dtype=np.int64), gap_bytes=gap_bytes, read_bytes=7 * array.row_bytes)
    np.testing.assert_array_equal(found, VALUES[rows])


def test_rows_near_each_other_are_one_read(array: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the largest read; a gap is read along only where it is small."""
    read, reads = Array.read, []

    def noted(self: Array, start: int = 0, stop: int | None = None) -> np.ndarray:
        reads.append((start, stop))
        return read(self, start, stop)

    monkeypatch.setattr(Array, "read", noted)
    rows = np.array([905, 3, 1, 1, 9, 900, 101])
    read_rows(array, rows, gap_bytes=6 * array.row_bytes, read_bytes=100 * array.row_bytes)
    assert reads == [(1, 10), (101, 102), (900, 906)]
    reads.clear()
    read_rows(array, np.array([98, 99, 100]), gap_bytes=array.row_bytes, read_bytes=100 * array.row_bytes)
    assert reads == [(98, 100), (100, 101)]


@given(st.sets(st.integers(0, 300), max_size=60), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 50)))
def test_runs_are_cut_at_gaps_and_borders_alone(chosen: set[int], gap: int, border: int | None) -> None:
    places = np.array(sorted(chosen), dtype=np.int64)
    found = list(runs(places, gap=gap, border=border))
    assert [place for first, last in found for place in places[first:last]] == places.tolist()
    cuts = {first for first, _ in found} - {0}
    for at, (before, after) in enumerate(pairwise(places.tolist()), start=1):
        crosses = border is not None and before // border != after // border
        assert (at in cuts) == (after - before > gap or crosses)
