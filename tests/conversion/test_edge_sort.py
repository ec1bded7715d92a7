# SPDX-License-Identifier: Apache-2.0
"""The external sort equals numpy's, whatever the keys and however little memory."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.conversion.csr import KeyForm, cut, distinct, with_self_loops
from ooc.conversion.edge_sort import EdgeSorter
from tests.conversion.arrays import open_descriptors


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 3000),
    largest=st.sampled_from([0, 1, 5, 1000, 2**40, 2**64 - 1]),
    hub=st.floats(0, 1),
    capacity=st.integers(1, 400),
    fan_out=st.integers(2, 9),
    block=st.integers(1, 500),
)
def test_any_keys_come_back_sorted(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    largest: int,
    hub: float,
    capacity: int,
    fan_out: int,
    block: int,
) -> None:
    """Skewed keys and repeated ones too, which must be split more than once or cannot be split at all."""
    folder = tmp_path_factory.mktemp("sort") / "keys"
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, largest, count, dtype=np.uint64, endpoint=True)
    keys[rng.random(count) < hub] = rng.integers(0, min(largest, 3), dtype=np.uint64, endpoint=True)
    before = open_descriptors()
    sorter = EdgeSorter(folder, largest=largest, expected=count, capacity=capacity, block=block, fan_out=fan_out)
    for start in range(0, count, 97):
        sorter.add(keys[start : start + 97].copy())
    blocks = []
    for found in sorter.sorted_blocks():
        assert 0 < len(found) <= max(2, capacity)
        blocks.append(found.copy())
    np.testing.assert_array_equal(np.concatenate([np.empty(0, dtype=np.uint64), *blocks]), np.sort(keys))
    assert not folder.exists() and open_descriptors() == before


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=60), st.integers(1, 9))
def test_blocks_lose_duplicates_and_gain_self_loops(nodes: int, pairs: list[tuple[int, int]], size: int) -> None:
    """Also where duplicates and loops fall on the border of two blocks."""
    form = KeyForm(nodes)
    pairs = [(row % nodes, column % nodes) for row, column in pairs]
    rows, columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    keys = np.sort(form.pack(rows, columns))
    np.testing.assert_array_equal(
        np.sort(form.rows(keys) * nodes + form.columns(keys)), np.sort(rows * nodes + columns)
    )

    def joined(blocks: object) -> list[int]:
        return [int(key) for found in blocks for key in found]  # type: ignore[attr-defined]

    assert joined(distinct(cut([keys], size))) == np.unique(keys).tolist()
    loops = {int(key) for key in form.loops(0, nodes)}
    wanted = sorted([*keys.tolist(), *(loops - set(keys.tolist()))])
    assert joined(with_self_loops(cut([keys], size), form)) == wanted


def test_a_full_disk_while_sorting_closes_every_file(tmp_path: Path) -> None:
    before = open_descriptors()
    sorter = EdgeSorter(tmp_path / "keys", largest=100, expected=100, capacity=10, block=10)
    sorter.add(np.arange(100, dtype=np.uint64))
    assert open_descriptors() > before
    sorter.close()
    assert open_descriptors() == before
