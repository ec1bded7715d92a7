# SPDX-License-Identifier: Apache-2.0
"""The rows that reach a set of rows are those a plain search finds."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.events import Event, TaskAdvanced, TaskFinished, TaskStarted
from ooc.storage import traversal
from ooc.storage.array import Array
from ooc.storage.store import Store
from ooc.storage.traversal import farthest_of, nearest
from tests.conversion.arrays import edges_of, random_arrays
from tests.examples import examples


def _searched(edges: np.ndarray, seeds: np.ndarray, depth: int) -> list[np.ndarray]:
    """The sets by going through all edges once a step."""
    sets = [seeds.copy()]
    for _ in range(depth):
        found = sets[-1].copy()
        for source, target in edges.T.tolist():
            found[source] |= sets[-1][target]
        sets.append(found)
    return sets


@settings(max_examples=examples(25), deadline=None)
@given(
    nodes=st.integers(1, 40),
    edges=st.integers(0, 90),
    seed=st.integers(0, 2**32),
    share=st.floats(0, 1),
    depth=st.integers(0, 6),
    symmetrize=st.booleans(),
    sizes=st.sampled_from([(1 << 17, 1 << 19, 1 << 15), (3, 2, 0), (7, 5, 1), (64, 1, 4)]),
)
def test_the_sets_are_those_of_a_plain_search(
    tmp_path_factory: pytest.TempPathFactory,
    nodes: int,
    edges: int,
    seed: int,
    share: float,
    depth: int,
    symmetrize: bool,
    sizes: tuple[int, int, int],
) -> None:
    """Whatever the sizes of blocks; with duplicates, self-loops, isolated nodes, no seed at all."""
    arrays = random_arrays(nodes=nodes, edges=edges, seed=seed)
    store = ooc.convert(arrays, tmp_path_factory.mktemp("reach") / "g.ooc", symmetrize=symmetrize)
    seeds = np.random.default_rng(seed).random(nodes) < share
    before = seeds.copy()
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("_ROWS", "_EDGES", "_GAP_EDGES"), sizes, strict=True):
            patch.setattr(traversal, name, size)
        hops = nearest(store, [seeds], depth)
    for hop, wanted in enumerate(_searched(edges_of(store), seeds, depth)):
        np.testing.assert_array_equal(hops <= hop, wanted)
    np.testing.assert_array_equal(seeds, before)


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(1, 30), st.integers(0, 60), st.integers(0, 2**32), st.floats(0, 1), st.integers(0, 5))
def test_the_nearest_of_several_masks_is_the_first_as_near(
    tmp_path_factory: pytest.TempPathFactory, nodes: int, edges: int, seed: int, share: float, most: int
) -> None:
    """Rows in several masks, and masks without a row, too."""
    store = ooc.convert(random_arrays(nodes=nodes, edges=edges, seed=seed), tmp_path_factory.mktemp("near") / "g.ooc")
    masks = list(np.random.default_rng(seed).random((3, nodes)) < share / 2)
    found = nearest(store, masks, most)
    each = np.stack([nearest(store, [mask], most) for mask in masks]).astype(np.int64)
    each[each == 255] = 10**6
    wanted = each.min(axis=0) * 3 + each.argmin(axis=0)
    wanted[wanted >= 10**6] = 255
    np.testing.assert_array_equal(found, wanted)


def _path(tmp_path: Path, nodes: int) -> Store:
    """0 → 1 → 2 → …"""
    line = np.stack([np.arange(nodes - 1), np.arange(1, nodes)])
    return ooc.convert(random_arrays(nodes=nodes, edges=0) | {"edge_index": line}, tmp_path / "g.ooc")


def test_more_steps_than_a_byte_counts(tmp_path: Path) -> None:
    store = _path(tmp_path, 700)
    seeds = np.arange(700) == 650
    found = nearest(store, [seeds], 600)
    wanted = 650 - np.arange(700)
    wanted[(wanted < 0) | (wanted > 600)] = np.iinfo(found.dtype).max
    np.testing.assert_array_equal(found, wanted)
    assert found.itemsize == 2 and farthest_of(found) == 600
    assert nearest(store, [seeds], 3).itemsize == 1


def test_the_search_stops_where_nothing_is_new(tmp_path: Path) -> None:
    store = _path(tmp_path, 10)
    hops = nearest(store, [np.arange(10) == 2], 2**20)
    assert farthest_of(hops) == 2
    assert hops[:3].tolist() == [2, 1, 0] and (hops[3:] == np.iinfo(hops.dtype).max).all()


def test_only_the_edges_of_newly_reached_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traversal, "_GAP_EDGES", 0)
    store = ooc.convert(random_arrays(nodes=300, edges=400), tmp_path / "g.ooc")
    seeds = np.arange(300) % 50 == 0
    read, entries = Array.read, []

    def counting(self: Array, start: int = 0, stop: int | None = None) -> np.ndarray:
        found = read(self, start, stop)
        if self.name == "in/indices":
            entries.append(len(found))
        return found

    monkeypatch.setattr(Array, "read", counting)
    hops = nearest(store, [seeds], 3)
    monkeypatch.undo()
    degrees = np.diff(store.array("in/indptr").read())
    assert sum(entries) == degrees[hops <= 2].sum() < degrees.sum()


def test_wrong_seeds_are_refused_and_progress_is_told(tmp_path: Path) -> None:
    store = _path(tmp_path, 10)
    with pytest.raises(ValueError, match="seeds"):
        nearest(store, [np.zeros(9, dtype=np.bool_)], 2)
    events: list[Event] = []
    nearest(store, [np.arange(10) == 9], 4, events.append)
    assert isinstance(events[0], TaskStarted) and isinstance(events[-1], TaskFinished)
    done = [event.done for event in events if isinstance(event, TaskAdvanced)]
    assert done == sorted(done) and done[-1] == 9
