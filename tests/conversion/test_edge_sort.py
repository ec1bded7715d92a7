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
from ooc.conversion.edge_sort import Bucket, Sorter, Spreader, parts_for
from ooc.conversion.edges import Edges, KeyForm, Keys, ValueForm, coalesced, cut, distinct, keys_of, with_self_loops
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
    edges = keys if width is None else _numbered(keys, width)
    before = open_descriptors()
    with patch.object(edge_sort, "_FAN_OUT", fan_out):
        buckets = _spread(folder, edges, largest=largest, parts=parts_for(count, capacity))
        # A process is killed after some runs, and another begins anew with what was spread.
        for most in (stop, 10**9):
            runs = list[Edges]()
            sorter = Sorter(folder, buckets, edges.dtype, capacity=capacity, block=block, workers=workers)
            running = sorter.runs()
            for found in islice(running, most):
                assert 0 < len(found) <= max(2, capacity, block)
                runs.append(found.copy())
            running.close()
    np.testing.assert_array_equal(np.concatenate([edges[:0], *runs]), edges[np.argsort(keys, kind="stable")])
    assert {path.stem for path in folder.iterdir()} == {Path(bucket.file).stem for bucket in buckets}
    assert open_descriptors() <= before


def _numbered(keys: Keys, width: int) -> Edges:
    """Edges that say where they came."""
    columns = (("edge_weight", "float64", None), *((("edge_features", "float32", width),) if width else ()))
    edges = ValueForm(columns=columns).ones(keys)
    for name, *_ in columns:
        edges[name] += np.arange(len(keys)).reshape(-1, *[1] * (edges[name].ndim - 1))
    return edges


def _spread(folder: Path, edges: Edges, *, largest: int, parts: int) -> list[Bucket]:
    spreader = Spreader(folder, low=0, high=largest, parts=parts)
    for start in range(0, len(edges), 97):
        spreader.add(edges[start : start + 97])
    buckets = spreader.close()
    assert len(buckets) <= parts and sum(bucket.count for bucket in buckets) == len(edges)
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

    def joined(runs: Iterable[Edges]) -> list[int]:
        return [int(key) for run in runs for key in run]

    assert joined(distinct(cut([keys], size))) == np.unique(keys).tolist()
    loops = {int(key) for key in form.loops(0, nodes)}
    wanted = sorted([*keys.tolist(), *(loops - set(keys.tolist()))])
    assert joined(with_self_loops(cut([keys], size), form, ValueForm())) == wanted


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
    edges = form.ones(keys)
    edges["edge_weight"] = [value for _, value in pairs]
    edges["edge_features"][:, 1] = [value for _, value in pairs]
    sums: dict[int, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    runs = coalesced(cut([edges], size), form, keys_form)
    found = list(with_self_loops(runs, keys_form, form) if loops else runs)
    wanted = dict.fromkeys(keys_form.loops(0, 4).tolist() if loops else [], 1.0) | sums
    got = {}
    for run in found:
        for key, value in zip(keys_of(run).tolist(), run, strict=True):
            got[key] = float(value["edge_features"][1])
            assert float(value["edge_weight"]) == float(np.float32(got[key]))
            assert value["edge_features"][0] == max(1, sum(key == other for other, _ in pairs))
    assert list(got) == sorted(wanted) and got == wanted


def test_a_sum_that_does_not_fit_is_named() -> None:
    form = ValueForm(columns=(("edge_features", "float16", 1),))
    edges = form.ones(KeyForm(8).pack(np.array([5, 5]), np.array([3, 3])))
    edges["edge_features"] = 60_000
    with pytest.raises(SourceError, match="between the nodes 3 and 5 have data whose sum cannot be stored"):
        list(coalesced([edges], form, KeyForm(8)))


def test_a_full_disk_while_sorting_closes_every_file(tmp_path: Path) -> None:
    before = open_descriptors()
    spreader = Spreader(tmp_path / "keys", low=0, high=99, parts=20)
    spreader.add(np.arange(100, dtype=np.uint64))
    assert open_descriptors() > before
    spreader.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize("capacity", [100, 5], ids=["sorted", "spread again"])
def test_a_bucket_that_lost_some_is_an_error(tmp_path: Path, capacity: int) -> None:
    edges = _numbered(np.arange(100, dtype=np.uint64), 0)
    buckets = _spread(tmp_path / "keys", edges, largest=99, parts=4)
    os.truncate(tmp_path / "keys" / buckets[1].file, 8)
    sorter = Sorter(tmp_path / "keys", buckets, edges.dtype, capacity=capacity, block=10, workers=2)
    with pytest.raises(OSError, match=f"{buckets[1].file} has 8 bytes of"):
        list(sorter.runs())
