# SPDX-License-Identifier: Apache-2.0
"""A forecast says beforehand what a conversion then reads, writes and needs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ooc
from ooc.conversion.budget import Options, Sizes
from ooc.conversion.forecast import Forecast, Rates, forecast, sizes_of_dataset
from ooc.errors import BudgetError
from ooc.events import Event, TaskStarted
from ooc.sources.names import DATASETS
from ooc.sources.reading import Request
from ooc.sources.registry import open_source

_RATES = Rates(
    read_bytes_per_s=1e9,
    write_bytes_per_s=1e9,
    inflate_bytes_per_s=2e8,
    spread_keys_per_s=5e7,
    sort_keys_per_s=2e7,
    copy_bytes_per_s=1e9,
)
_OPTIONS = Options(symmetrize=False, drop_duplicates=False, self_loops=False, row_normalize=False, dtype="float32")
_SOURCE = "synthetic:nodes=200000,edges=900000,features=20,classes=4"


def _sizes(source: str) -> Sizes:
    return Sizes.of(open_source(source, format=None, request=Request(split=None, budget_bytes=10**9)))


def _forecast(sizes: Sizes, *, ordered: bool = False, **changes: Any) -> Forecast:
    return forecast(sizes, _RATES, replace(_OPTIONS, **changes), ordered=ordered)


@pytest.mark.parametrize("symmetrize", [False, True])
def test_stages_store_and_disk_are_those_of_the_conversion(tmp_path: Path, symmetrize: bool) -> None:
    found = _forecast(_sizes(_SOURCE), symmetrize=symmetrize, row_normalize=True)
    tasks, most = [], 0

    def watch(event: Event) -> None:
        nonlocal most
        if isinstance(event, TaskStarted):
            tasks.append(event.task)
        files = (file for file in tmp_path.rglob("*") if file.is_file())
        most = max(most, sum(_size(file) for file in files))

    store = ooc.convert(
        _SOURCE, tmp_path / "g.ooc", symmetrize=symmetrize, drop_duplicates=False, row_normalize=True, listener=watch
    )
    assert ["labels", *tasks] == [*(stage.name for stage in found.stages), "flushing to disk"]
    # Besides: padding of chunks, checksums and metadata.
    assert 0.8 * store.nbytes < found.store_bytes < store.nbytes
    assert most <= found.disk_bytes < 2 * most


def test_of_a_small_graph_metadata_counts_too(tmp_path: Path) -> None:
    source = "synthetic:nodes=200,edges=900,features=4,classes=2,seed=1"
    found = _forecast(_sizes(source))
    ooc.convert(source, tmp_path / "g.ooc", symmetrize=_OPTIONS.symmetrize)
    assert sum(_size(file) for file in tmp_path.rglob("*") if file.is_file()) <= found.disk_bytes


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("ordered", [False, True])
def test_the_least_memory_is_what_the_conversion_says(tmp_path: Path, ordered: bool) -> None:
    found = _forecast(_sizes(_SOURCE), ordered=ordered)
    order = "hop" if ordered else "none"
    with pytest.raises(BudgetError):
        ooc.convert(_SOURCE, tmp_path / "g.ooc", order=order, host_budget=found.least_memory_bytes - 1)
    assert ooc.convert(_SOURCE, tmp_path / "g.ooc", order=order, host_budget=found.least_memory_bytes)


def _of(name: str, **changes: Any) -> Forecast:
    return _forecast(sizes_of_dataset(DATASETS[name]), **changes)


def test_published_datasets_need_no_files() -> None:
    """From their counts alone: 56.9 GB of features and two directions of 1.6 billion ids of 4 bytes each."""
    papers = _of("ogbn-papers100M")
    assert [stage.name for stage in papers.stages] == [
        *("labels", "reading edges", "writing in-edges", "writing out-edges", "writing features")
    ]
    features = papers.stages[-1]
    assert features.written_bytes == 111_059_956 * 128 * 4
    assert features.seconds == pytest.approx(features.written_bytes / _RATES.inflate_bytes_per_s, rel=0.01)
    assert 7.2e10 < papers.store_bytes < papers.disk_bytes < 7.6e10
    assert papers.stages[1].written_bytes == 2 * 8 * 1_615_685_872, "a key of every edge, both ways"
    igb = _of("igb260m")
    assert igb.stages[-1].read_bytes == igb.stages[-1].written_bytes == 269_346_174 * 1024 * 4
    # Not deflated: the disk's time, both ways.
    assert igb.stages[-1].seconds == pytest.approx(2 * 269_346_174 * 1024 * 4 / 1e9)
    assert _of("igb260m", ordered=True).disk_bytes > 1.9 * igb.disk_bytes
    assert _of("igb260m", dtype="float16").store_bytes < 0.55 * igb.store_bytes
