# SPDX-License-Identifier: Apache-2.0
"""Rows that come in blocks of any sizes are taken as many at a time as is wanted, each once and in order."""

import numpy as np
import pytest

from ooc.errors import SourceError
from ooc.sources.source import EdgeBlock, Rows, with_data
from ooc.storage.array import AnyArray


def _blocks(sizes: list[int]) -> list[AnyArray]:
    return np.split(np.arange(2 * sum(sizes)).reshape(-1, 2), np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_rows_come_in_order_as_many_as_are_wanted(size: int) -> None:
    found = list(Rows(_blocks([5, 0, 1, 9, 0, 2])).blocks(size))
    np.testing.assert_array_equal(np.concatenate(found), _blocks([17])[0])
    assert [len(rows) for rows in found] == [size] * (17 // size) + [17 % size] * (17 % size > 0)
    assert not list(Rows([]).blocks(size))


def test_what_is_cut_out_of_a_block_is_not_copied() -> None:
    (block,) = _blocks([6])
    rows = Rows([block])
    assert all(np.shares_memory(block, rows.take(count)) for count in (2, 4)) and not len(rows.take(1))


@pytest.mark.parametrize(("sizes", "wrong"), [([4, 4], None), ([3, 4], "ends before"), ([8, 1], "has more rows than")])
def test_edges_get_a_row_of_data_each(sizes: list[int], wrong: str | None) -> None:
    edges = [EdgeBlock(ends, ends) for ends in np.split(np.arange(8), [3, 3])]
    features = iter(_blocks(sizes))
    if wrong is not None:
        with pytest.raises(SourceError, match=f"f.npy {wrong}"):
            list(with_data(iter(edges), features=features, name="f.npy"))
        return
    found = list(with_data(iter(edges), features=features, name="f.npy"))
    assert [len(block.sources) for block in found] == [3, 5]
    given = [block.data.features for block in found]
    np.testing.assert_array_equal(np.concatenate([rows for rows in given if rows is not None])[:, 0], 2 * np.arange(8))
