# SPDX-License-Identifier: Apache-2.0
"""However blocks and chunks cut one another, a changed bit of either is found, and sound bytes pass."""

from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.engine.block_sums import BlockSums
from ooc.errors import SpillError, StoreError
from ooc.plan.layout.grid import Grid
from ooc.storage.array import Array, open_array
from ooc.storage.writer import ArrayWriter

ROWS, COLUMNS = 5000, 2


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Array:
    """In chunks of 1,024 rows."""
    folder = tmp_path_factory.mktemp("sums")
    with ArrayWriter(folder, "x", (ROWS, COLUMNS), "float32", chunk_bytes=8 << 10) as writer:
        writer.append(np.random.default_rng(0).random((ROWS, COLUMNS), dtype=np.float32))
    return open_array(folder, "x")


def content(array: Array, grid: Grid, block: int) -> np.ndarray:
    start = block * grid.block_rows
    return array.read(start, start + grid.height(block)).reshape(-1).view(np.uint8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_bit_of_the_store_is_found(array: Array, data: st.DataObject) -> None:
    """In any order of blocks, of all rows or the first ones, all of their blocks or some; at the latest when all have
    been read, and always when it was sound at first."""
    rows = data.draw(st.sampled_from([ROWS, ROWS - 1, 3000, 1024]))
    grid = Grid(rows, COLUMNS, 4, data.draw(st.sampled_from([1, 96, 512, 1000, 1024, 1536, 4096, 8192])), COLUMNS)
    order = data.draw(st.permutations(range(grid.blocks))) if grid.blocks < 100 else list(range(grid.blocks))[::-1]
    order = order[: data.draw(st.integers(1, len(order)))]
    sums = BlockSums("x", grid, array)
    for _ in range(data.draw(st.integers(0, 2))):
        for block in order[: data.draw(st.integers(1, len(order)))]:
            sums.read(0, block, content(array, grid, block))
        sums.finish()
    wrong = data.draw(st.sampled_from(order))

    def read(block: int) -> None:
        memory = content(array, grid, block)
        if block == wrong:
            memory[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        sums.read(0, block, memory)

    with pytest.raises(StoreError, match=r"^x: the SSD returns other bytes of .*/x/c/\d+/0 than"):
        for block in order:
            read(block)
        sums.finish()


def test_a_changed_bit_of_what_was_written_is_found() -> None:
    grid = Grid(100, 6, 4, 30, 4)
    sums = BlockSums("h", grid)
    blocks = {
        (slab, block): np.full(grid.block_nbytes(slab, block), 7, np.uint8) for slab in (0, 1) for block in (0, 3)
    }
    for place, memory in blocks.items():
        sums.write(*place, memory)
    for place, memory in blocks.items():
        sums.read(*place, memory.copy())
        memory[5] ^= 64
        with pytest.raises(SpillError, match=rf"^h: the SSD returns other bytes of block {place[1]} than were written"):
            sums.read(*place, memory)
    sums.forget(0, 0)  # a device writes it itself
    sums.read(0, 0, blocks[0, 0])


def test_a_version_has_a_checksum_if_all_of_it_was_seen() -> None:
    grid, rows = Grid(100, 6, 4, 30, 6), np.random.default_rng(0).integers(0, 256, (100, 24), np.uint8)
    sums = BlockSums("emb", grid, keeps_crcs=True)
    for block in range(4):
        sums.write(0, block, rows[30 * block : 30 * block + 30].reshape(-1))
    assert sums.written(range(90)) == google_crc32c.value(rows[:90].tobytes())
    assert sums.written(range(30, 100)) == google_crc32c.value(rows[30:].tobytes())
    sums.forget(0, 3)
    assert sums.written(range(90)) is not None and sums.written(range(100)) is None


def test_without_checksums_the_first_reading_counts(tmp_path: Path) -> None:
    array = Array("links", tmp_path, (100,), (100,), "<i4")
    grid, memory = Grid(100, 1, 4, 40, 1), np.zeros(160, np.uint8)
    sums = BlockSums("links", grid, array)
    sums.read(0, 1, memory)
    sums.finish()
    memory[0] = 1
    with pytest.raises(SpillError):
        sums.read(0, 1, memory)
