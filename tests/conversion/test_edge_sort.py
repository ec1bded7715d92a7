# SPDX-License-Identifier: Apache-2.0
"""The external sort equals numpy's, whatever the keys and however little memory."""

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.conversion.csr import KeyForm, SelfLoops, cut, distinct
from ooc.conversion.edge_sort import Bucket, Keys, Sorter, Spreader, parts_for
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
    workers=st.integers(1, 3),
    stop=st.integers(0, 20),
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
    workers: int,
    stop: int,
) -> None:
    """Skewed keys and repeated ones too, which must be split more than once or cannot be split at all."""
    folder = tmp_path_factory.mktemp("sort") / "keys"
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, largest, count, dtype=np.uint64, endpoint=True)
    keys[rng.random(count) < hub] = rng.integers(0, min(largest, 3), dtype=np.uint64, endpoint=True)
    before = open_descriptors()
    buckets = _spread(folder, keys, largest=largest, parts=parts_for(count, capacity, fan_out))
    blocks, rest = [], tuple(buckets)
    # A process is killed after some steps, and another goes on with what the last one on record left.
    for steps in (stop, 10**9):
        sorter = Sorter(folder, rest, capacity=capacity, block=block, workers=workers, fan_out=fan_out)
        running = sorter.steps()
        for step in islice(running, steps):
            for found in step.blocks:
                assert 0 < len(found) <= max(2, capacity, block)
                blocks.append(found.copy())
            rest = step.rest
            step.spent.unlink()
        running.close()
    np.testing.assert_array_equal(np.concatenate([np.empty(0, dtype=np.uint64), *blocks]), np.sort(keys))
    assert not list(folder.iterdir()) and open_descriptors() == before


def _spread(folder: Path, keys: Keys, *, largest: int, parts: int) -> list[Bucket]:
    spreader = Spreader(folder, low=0, high=largest, parts=parts)
    for start in range(0, len(keys), 97):
        spreader.add(keys[start : start + 97])
    buckets = spreader.close()
    assert len(buckets) <= parts and sum(bucket.count for bucket in buckets) == len(keys)
    return buckets


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
    loops_to = SelfLoops(form)
    found = joined(loops_to.among(cut([keys], size)))
    # What is left is told by one number, as it is after a process was killed.
    assert [*found, *joined(SelfLoops(form, loops_to.node).remaining())] == wanted


def test_a_full_disk_while_sorting_closes_every_file(tmp_path: Path) -> None:
    before = open_descriptors()
    spreader = Spreader(tmp_path / "keys", low=0, high=99, parts=20)
    spreader.add(np.arange(100, dtype=np.uint64))
    assert open_descriptors() > before
    spreader.close()
    assert open_descriptors() == before


def test_a_bucket_that_lost_keys_is_an_error(tmp_path: Path) -> None:
    buckets = _spread(tmp_path / "keys", np.arange(100, dtype=np.uint64), largest=99, parts=4)
    os.truncate(tmp_path / "keys" / buckets[1].file, 8)
    sorter = Sorter(tmp_path / "keys", buckets, capacity=100, block=10, workers=2)
    with pytest.raises(OSError, match="has 8 bytes of"):
        list(sorter.steps())
