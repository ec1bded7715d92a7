# SPDX-License-Identifier: Apache-2.0
"""The different ids of edges are collected in order, and come back from the disk, whatever they are."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.sources.node_ids import IdFile, collect
from tests.examples import examples

_NUMBERS = st.one_of(st.integers(0, 50), st.integers(-9, 2**40))
_TEXTS = st.text("abc", min_size=1, max_size=6).map(str.encode)


@pytest.mark.parametrize(("of", "dtype"), [(_NUMBERS, np.int64), (_TEXTS, np.object_)], ids=["numbers", "texts"])
@settings(deadline=None, max_examples=examples(12))
@given(data=st.data())
def test_a_scarce_memory_collects_the_same_ids(
    tmp_path_factory: pytest.TempPathFactory, of: st.SearchStrategy, dtype: type, data: st.DataObject
) -> None:
    """Ascending, from memory or from many sorted runs, which are merged when they are too many."""
    folder = tmp_path_factory.mktemp("ids")
    blocks = [np.array(block, dtype=dtype) for block in data.draw(st.lists(st.lists(of, max_size=60), max_size=12))]
    wanted = sorted({value for block in blocks for value in block.tolist()})
    for limit in (500, 32 * 20, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ooc.sources.node_ids._MOST_RUNS", 3)
            found = collect(iter(blocks), folder / "i", limit_bytes=limit)
        longest = max(map(len, wanted), default=0) if dtype is np.object_ else 0
        assert (found.rows, found.width) == (len(wanted), longest)
        assert [value for part in found.blocks(7) for value in part.tolist()] == wanted
    assert sorted(path.name for path in folder.iterdir()) == ["i", "i.lengths"]


def test_ids_come_back_from_the_disk(tmp_path: Path) -> None:
    numbers = IdFile.write(tmp_path / "n", [np.arange(5), np.arange(0), np.array([2**62])])
    assert numbers.rows == 6 and np.concatenate([*numbers.stored(2)]).tolist() == [0, 1, 2, 3, 4, 2**62]
    assert not numbers.are_rows() and IdFile.write(tmp_path / "r", [np.arange(3), np.array([3])]).are_rows()
    texts = IdFile.write(tmp_path / "t", [np.array([b"a", b"bcd"], dtype=object), np.array([b"e"], dtype=object)])
    assert [row.tobytes() for row in np.concatenate([*texts.stored(2)])] == [b"a\0\0", b"bcd", b"e\0\0"]
    assert texts.texts_of((2, 1)) == ["e", "bcd"] and numbers.texts_of((5,)) == [str(2**62)]
