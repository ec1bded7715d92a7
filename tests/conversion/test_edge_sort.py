# SPDX-License-Identifier: Apache-2.0
"""The external sort equals numpy's, whatever the keys and however little memory."""

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.conversion import edge_sort
from ooc.conversion.edge_sort import Bucket, Sorter, Spreader, parts_for, values_path
from ooc.conversion.edges import KeyForm, Keys, Run, SelfLoops, ValueForm, Values, cut, distinct, merged
from ooc.errors import SourceError
from tests.conversion.arrays import open_descriptors
from tests.examples import examples


@settings(max_examples=examples(30), deadline=None)
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
    width=st.sampled_from([None, 0, 3]),
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
    width: int | None,
) -> None:
    """Skewed keys and repeated ones too, which must be split more than once or cannot be split at all.

    What they carry comes with them, that of equal keys in the order it was given.
    """
    folder = tmp_path_factory.mktemp("sort") / "keys"
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, largest, count, dtype=np.uint64, endpoint=True)
    keys[rng.random(count) < hub] = rng.integers(0, min(largest, 3), dtype=np.uint64, endpoint=True)
    values = None if width is None else _numbered(count, width)
    before = open_descriptors()
    with patch.object(edge_sort, "_FAN_OUT", fan_out):
        buckets = _spread(folder, keys, largest=largest, parts=parts_for(count, capacity), values=values)
        # A process is killed after some steps, and another begins anew with what was spread.
        for steps in (stop, 10**9):
            runs = list[Run]()
            sorter = Sorter(
                folder,
                buckets,
                capacity=capacity,
                block=block,
                workers=workers,
                values=None if values is None else values.dtype,
            )
            running = sorter.steps()
            for step in islice(running, steps):
                for found in step:
                    assert 0 < len(found.keys) <= max(2, capacity, block)
                    runs.append(Run(found.keys.copy(), found.values))
            running.close()
    np.testing.assert_array_equal(np.concatenate([keys[:0], *(run.keys for run in runs)]), np.sort(keys))
    if values is not None:
        carried = [run.values for run in runs if run.values is not None]
        np.testing.assert_array_equal(np.concatenate([values[:0], *carried]), values[np.argsort(keys, kind="stable")])
    assert {path.stem for path in folder.iterdir()} == {Path(bucket.file).stem for bucket in buckets}
    assert open_descriptors() <= before


def _numbered(count: int, width: int) -> Values:
    """Records that say where they came."""
    columns = (("edge_weight", "float64", None), *((("edge_features", "float32", width),) if width else ()))
    values = np.ones(count, dtype=ValueForm(columns=columns).dtype)
    for name in values.dtype.names or ():
        values[name] += np.arange(count).reshape(-1, *[1] * (values[name].ndim - 1))
    return values


def _spread(folder: Path, keys: Keys, *, largest: int, parts: int, values: Values | None = None) -> list[Bucket]:
    spreader = Spreader(folder, low=0, high=largest, parts=parts, with_values=values is not None)
    for start in range(0, len(keys), 97):
        piece = slice(start, start + 97)
        spreader.add(keys[piece], None if values is None else values[piece])
    buckets = spreader.close()
    assert len(buckets) <= parts and sum(bucket.count for bucket in buckets) == len(keys)
    return buckets


@settings(max_examples=examples(60), deadline=None)
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

    def joined(runs: Iterable[Run]) -> list[int]:
        return [int(key) for run in runs for key in run.keys]

    assert joined(distinct(cut([Run(keys)], size))) == np.unique(keys).tolist()
    loops = {int(key) for key in form.loops(0, nodes)}
    wanted = sorted([*keys.tolist(), *(loops - set(keys.tolist()))])
    loops_to = SelfLoops(form)
    found = joined(loops_to.among(cut([Run(keys)], size)))
    assert [*found, *joined(loops_to.remaining())] == wanted


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.floats(-(2.0**90), 2.0**90, width=32)), max_size=60),
    st.integers(1, 9),
    st.booleans(),
)
def test_values_of_equal_keys_are_summed_the_same_however_they_are_cut(
    pairs: list[tuple[int, float]], size: int, loops: bool
) -> None:
    """One after another in double precision: to the last bit what a loop over them gives. Added loops carry ones."""
    keys_form = KeyForm(4)
    form = ValueForm(columns=(("edge_weight", "float32", None), ("edge_features", "float64", 2)))
    pairs = sorted(pairs, key=lambda pair: pair[0])
    keys = np.array([key for key, _ in pairs], dtype=np.uint64)
    values = np.ones(len(pairs), dtype=form.dtype)
    values["edge_weight"] = [value for _, value in pairs]
    values["edge_features"][:, 1] = [value for _, value in pairs]
    sums: dict[int, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    runs = merged(cut([Run(keys, values)], size), form, keys_form)
    loops_to = SelfLoops(keys_form, values=form)
    found = [*loops_to.among(runs), *loops_to.remaining()] if loops else list(runs)
    wanted = dict.fromkeys(keys_form.loops(0, 4).tolist() if loops else [], 1.0) | sums
    got = {}
    for run in found:
        assert run.values is not None
        for key, value in zip(run.keys.tolist(), run.values, strict=True):
            got[key] = float(value["edge_features"][1])
            assert float(value["edge_weight"]) == float(np.float32(got[key]))
            assert value["edge_features"][0] == max(1, sum(key == other for other, _ in pairs))
    assert list(got) == sorted(wanted) and got == wanted


def test_a_sum_that_does_not_fit_is_named() -> None:
    form = ValueForm(columns=(("edge_features", "float16", 1),))
    values = np.ones(2, dtype=form.dtype)
    values["edge_features"] = 60_000
    key = KeyForm(8).pack(np.array([5, 5]), np.array([3, 3]))
    with pytest.raises(SourceError, match="between the nodes 3 and 5 have data whose sum cannot be stored"):
        list(merged([Run(key, values)], form, KeyForm(8)))


def test_a_full_disk_while_sorting_closes_every_file(tmp_path: Path) -> None:
    before = open_descriptors()
    spreader = Spreader(tmp_path / "keys", low=0, high=99, parts=20)
    spreader.add(np.arange(100, dtype=np.uint64))
    assert open_descriptors() > before
    spreader.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize("capacity", [100, 5], ids=["sorted", "spread again"])
@pytest.mark.parametrize("lost", ["keys", "values"])
def test_a_bucket_that_lost_some_is_an_error(tmp_path: Path, capacity: int, lost: str) -> None:
    values = _numbered(100, 0)
    buckets = _spread(tmp_path / "keys", np.arange(100, dtype=np.uint64), largest=99, parts=4, values=values)
    path = tmp_path / "keys" / buckets[1].file
    os.truncate(path if lost == "keys" else values_path(path), 8)
    sorter = Sorter(tmp_path / "keys", buckets, capacity=capacity, block=10, workers=2, values=values.dtype)
    with pytest.raises(OSError, match=f"{buckets[1].file[:-5]}.{lost} has 8 bytes of"):
        for step in sorter.steps():
            list(step)
