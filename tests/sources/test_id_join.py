# SPDX-License-Identifier: Apache-2.0
"""Ends of edges find the nodes that a dictionary would, however little memory there is."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.events import ignore
from ooc.sources import node_ids
from ooc.sources.node_ids import join, keys_of, take_rows
from tests.examples import examples

_TEXTS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40), min_size=1, max_size=80)


def _objects(texts: list[bytes]) -> np.ndarray:
    return np.array(texts, dtype=object)


def _blocks(keys: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


def _joined(folder: Path, nodes: np.ndarray, ends: np.ndarray, limit: int) -> node_ids.Joined:
    return join(_blocks(nodes, 7), len(nodes), _blocks(ends, 5), folder / "o", limit_bytes=limit, listener=ignore)


@pytest.mark.parametrize("hashes", ["good", "bad"])
@settings(deadline=None, max_examples=examples(12))
@given(texts=_TEXTS, seed=st.integers(0, 99))
def test_any_memory_finds_the_same_nodes(
    tmp_path_factory: pytest.TempPathFactory, hashes: str, texts: list[str], seed: int
) -> None:
    """Held, or spread again and again, also where different keys have the same hash."""
    folder = tmp_path_factory.mktemp("join")
    ids = [text.encode() for text in dict.fromkeys(texts)]
    asked = np.random.default_rng(seed).integers(0, len(ids), 60)
    nodes, ends = keys_of(_objects(ids)), keys_of(_objects([ids[at] for at in asked]))
    with pytest.MonkeyPatch.context() as patch:
        if hashes == "bad":
            good = node_ids._hashes
            patch.setattr(node_ids, "_hashes", lambda keys: good(keys) % np.uint64(5) << np.uint64(60))
            patch.setattr(node_ids, "_LEVELS", 1)
        for limit in (1 << 20, 80 * 40):
            if hashes == "bad" and limit < len(ids) * 120:
                continue
            assert _joined(folder, nodes, ends, limit) == node_ids.Joined(60)
            assert np.fromfile(folder / "o", dtype="<u4").tolist() == asked.tolist()
            assert [path.name for path in folder.iterdir()] == ["o"]


@pytest.mark.parametrize("limit", [1 << 20, 4000, 300])
def test_ids_of_two_nodes_and_of_none_are_found(tmp_path: Path, limit: int) -> None:
    """The first end that is no node's, in the order of the edges, whatever part it is found in, or part of a part."""
    ids = np.random.default_rng(0).permutation(10_000)[:600].astype(np.int64) - 5000
    nodes, ends = keys_of(ids), np.repeat(ids, 3)
    assert _joined(tmp_path, nodes, keys_of(ends), limit) == node_ids.Joined(1800)
    assert np.fromfile(tmp_path / "o", dtype="<u4").tolist() == np.repeat(np.arange(600), 3).tolist()
    ends[[1200, 700, 1600]] = [2**60, -(2**60), 2**61]
    assert _joined(tmp_path, nodes, keys_of(ends), limit).absent == 700
    ids[[33, 555]] = ids[77]
    found = _joined(tmp_path, keys_of(ids), keys_of(ids), limit)
    assert found.duplicate is not None and set(found.duplicate) < {33, 77, 555}
    assert list(tmp_path.glob("o.parts")) == []


def test_row_numbers_are_their_nodes(tmp_path: Path) -> None:
    blocks = [np.array([3, 0]), np.array([4])]
    assert take_rows(iter(blocks), 5, tmp_path / "o") == node_ids.Joined(3)
    assert np.fromfile(tmp_path / "o", dtype="<u4").tolist() == [3, 0, 4]
    assert take_rows(iter(blocks), 4, tmp_path / "p").absent == 2 and not (tmp_path / "p").exists()
    assert take_rows(iter([np.array([-1])]), 4, tmp_path / "p").absent == 0


def test_a_key_tells_texts_apart() -> None:
    """Those up to 16 bytes are their own key, longer ones cannot be mistaken for such."""
    texts = ["", "a", "a" * 15, "a" * 16, "a" * 17, "a" * 18, "b" + "a" * 17, "ÿ" * 8, "ÿ" * 9, "1", "01"]
    keys = keys_of(_objects([text.encode() for text in texts]))
    assert len({key.tobytes() for key in keys}) == len(texts)
    assert keys[3].tobytes() == b"a" * 16 and keys[4].tobytes()[-1] == 0xFF


def test_memory_stays_within_the_limit(tmp_path: Path) -> None:
    """Of which the keys of all nodes would take eight times as much."""
    nodes, limit = 40_000, 3 << 17

    def keys(seed: int, count: int) -> Iterator[np.ndarray]:
        numbers = np.random.default_rng(seed)
        for _ in range(0, count, 2000):
            yield np.stack([numbers.integers(0, 2**63, 2000, np.uint64), np.zeros(2000, np.uint64)], axis=1)

    tracemalloc.start()
    try:
        ends = (block for _ in range(2) for block in keys(0, nodes))
        found = join(keys(0, nodes), nodes, ends, tmp_path / "o", limit_bytes=limit, listener=ignore)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == node_ids.Joined(2 * nodes)
    assert np.array_equal(np.fromfile(tmp_path / "o", "<u4"), np.tile(np.arange(nodes), 2))
    assert limit // 3 < peak < 1.5 * limit
