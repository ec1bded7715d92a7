# SPDX-License-Identifier: Apache-2.0
"""Rows come out as they are on the disk, whatever is kept of it, and pages are read no oftener than Belady's rule
would: counted beside a plain simulation."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ooc
from ooc.prefetch.arena import Arena
from ooc.prefetch.engine import PAGE_BYTES, Engine
from ooc.prefetch.engines.choice import choose_engine
from ooc.sampling.pages import PagedRows, Pages, ResidentRows, most_pages_of_row
from ooc.storage.array import Array, open_array
from tests.examples import thorough


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made, _ = choose_engine(tmp_path_factory.getbasetemp())
    yield made
    made.close()


@pytest.fixture(scope="module", params=[100, 1433])
def array(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Array:
    """Of rows of a tenth of a page, and of more than one."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.random((2500, request.param), dtype=np.float32),
        "edge_index": rng.integers(0, 2500, (2, 100)),
        "y": np.zeros(2500, dtype=np.int64),
    }
    return ooc.convert(arrays, tmp_path_factory.mktemp("pages") / "g.ooc").array("x")


def _batches(count: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.permutation((2500 * rng.random(250) ** 2).astype(np.int64)) for _ in range(count)]


def _least_reads(accesses: list[np.ndarray], frames: int) -> int:
    """Of sets of pages, needed one after the other, where the rule keeps so many pages in between."""
    kept: set[int] = set()
    reads = 0
    for number, pages in enumerate(accesses):
        reads += len(set(pages.tolist()) - kept)
        later = {page: at for at in range(len(accesses) - 1, number, -1) for page in accesses[at].tolist()}
        kept = set(sorted((kept | set(pages.tolist())) & later.keys(), key=later.__getitem__)[:frames])
    return reads


@pytest.mark.parametrize("share", thorough([0.0, 0.2, 1.0], 1.0))
def test_rows_are_those_on_disk_and_reads_are_the_fewest(array: Array, engine: Engine, share: float) -> None:
    pages = Pages(array, engine)
    frames = int(share * pages.count)
    rows = PagedRows(pages, cache_pages=frames, work_pages=max(8, most_pages_of_row(array)))
    expected = array.read()
    for batches in (_batches(), _batches()[::-1]):  # two superbatches: what is kept of the first serves the second
        before, foresight = rows.pages_read, rows.foresee([rows.needs(batch) for batch in batches])
        rows.begin(foresight)
        for batch, uses in zip(batches, foresight.uses, strict=True):
            np.testing.assert_array_equal(rows.take(batch, uses), expected[batch])
        if not before:
            least = _least_reads([uses.pages for uses in foresight.uses], frames)
            assert least <= rows.pages_read <= 1.1 * least
    np.testing.assert_array_equal(rows.take(np.array([7, 7, 0])), expected[[7, 7, 0]])
    assert len(rows.take(np.empty(0, dtype=np.int64))) == 0


def test_what_fits_is_read_once(array: Array, engine: Engine) -> None:
    before = engine.counters.read_bytes
    rows = ResidentRows(Pages(array, engine))
    assert engine.counters.read_bytes - before == rows.pages_read * PAGE_BYTES
    np.testing.assert_array_equal(rows.take(np.array([3, 2499, 3])), array.read()[[3, 2499, 3]])


def test_a_file_that_ends_early_is_named(array: Array, engine: Engine, tmp_path: Path) -> None:
    short = Array("x", tmp_path, array.shape, array.chunks, array.dtype.str)
    (tmp_path / "c" / "0").mkdir(parents=True)
    (tmp_path / "c" / "0" / "0").write_bytes(bytes(PAGE_BYTES))
    rows = PagedRows(Pages(short, engine), cache_pages=4, work_pages=64)
    with pytest.raises(ooc.SpillError, match=r"x: .*c/0/0"):
        rows.take(np.arange(900))


@pytest.mark.parametrize("learnt", [False, True])
def test_bytes_that_have_changed_are_found(array: Array, engine: Engine, tmp_path: Path, learnt: bool) -> None:
    """As sums of pages are learnt, and when pages are read again."""
    shutil.copytree(array.path, tmp_path / "x")
    half, arena = 64 * PAGE_BYTES, Arena(128 * PAGE_BYTES)
    pages = Pages(open_array(tmp_path, "x"), engine)
    buffers = [arena.view(at * half, half) for at in range(2)]
    if learnt:
        pages.learn(buffers)
    chunk = pages.array.chunk_path(0)
    content = bytearray(chunk.read_bytes())
    content[700 * array.row_bytes] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(ooc.StoreError, match=r"x: the SSD returns other bytes of .*c/0/0"):
        if learnt:
            PagedRows(pages, cache_pages=4, work_pages=64).take(np.arange(900))
        else:
            pages.learn(buffers)
    arena.close()
