# SPDX-License-Identifier: Apache-2.0
"""A run's folder has one epoch as it was measured: its bytes are the epoch's, and watching changes no result."""

import sys
from pathlib import Path
from threading import Thread
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ooc.engine.recording import EpochRecorder
from ooc.plan.program.program import Program
from ooc.plan.simulate.condensed import PIECES, expand
from ooc.plan.simulate.timeline import Resource
from ooc.prefetch.frames import HostWorkspace
from ooc.storage.store import Store
from ooc.train.runs.run import TIMELINE, RunFolder
from tests.engine.fake_device import FakeDevice
from tests.engine.test_device import use
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.examples import thorough
from tests.graphs import GraphCase, random_data

MODEL = ModelCase(kind="sage", layers=3, hidden=24, dropout=0.2)
SMALL = {"gpu_budget": "1100K", "host_budget": "100K", "tile_rows": 64}
"""Budgets under which matrices spill."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    graph = GraphCase(nodes=3000, edges=12000, features=30)
    return store_of(random_data(graph, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("threads", thorough([1, 2], 1))
def test_what_is_recorded_is_what_the_epoch_took(
    store: Store, tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of epochs that begin with nothing under way: bytes count where they arrive, and a write may be under way when its
    epoch ends."""
    finish = HostWorkspace.finish

    def settled(workspace: HostWorkspace, program: Program) -> None:
        finish(workspace, program)
        for ticket in workspace._on_their_way.values():
            ticket.settle()

    monkeypatch.setattr(HostWorkspace, "finish", settled)
    options = {**SMALL, "threads": threads}
    with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **options) as trainer:
        unwatched = [record.loss for record in trainer.fit(epochs=2, eval_every=0)]
    with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **options, out=tmp_path / "run") as trainer:
        records = trainer.fit(epochs=2, eval_every=0)
        limit, peak = trainer.plan.device_limit_bytes + trainer.plan.host_limit_bytes, trainer.plan
        titles = [item.title for item in trainer.plan.programs["train"]]
        hits = trainer.plan.hit_rate
    assert [record.loss for record in records] == unwatched
    found = RunFolder.open(tmp_path / "run").read(TIMELINE)
    assert found is not None and found["epoch"] == 2 and found["threads"] == threads
    seen, record = expand(found), records[1]
    assert seen.moved_bytes == {
        Resource.SSD_READ: record.ssd_read_bytes,
        Resource.SSD_WRITE: record.ssd_write_bytes,
    }
    for name in ("ssd_read_bytes", "ssd_write_bytes"):
        assert sum(matrix[name] for matrix in found["matrices"]) == getattr(record, name)
    busy = {one["resource"]: one["busy_s"] for one in found["resources"]}
    computed_s = sum(item.compute_s for item in record.passes)
    assert busy["compute"] == pytest.approx(computed_s / threads, rel=0.1)
    assert 0 < busy["SSD reads"] <= found["epoch_s"] <= record.time_s
    assert [item.title for item in seen.passes] == titles
    arena, process = seen.memory
    assert arena.limit_bytes == limit and 0 < arena.peak_bytes <= peak.device_peak_bytes + peak.host_peak_bytes
    assert process.peak_bytes > arena.peak_bytes
    reads = found["block_reads"]
    assert 1 - reads["read"] / reads["uses"] == pytest.approx(hits)
    assert all(len(one["busy"]) <= PIECES for one in found["resources"])


def test_a_run_that_goes_on_has_the_later_epoch(store: Store, tmp_path: Path) -> None:
    """One epoch more is the first of its process, which fills the memory: what was recorded before stays."""
    epochs = []
    for last in (1, 2, 4):
        with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **SMALL, out=tmp_path / "run") as trainer:
            trainer.fit(epochs=last, eval_every=0, resume=last > 1)
        found = RunFolder.open(tmp_path / "run").read(TIMELINE)
        assert found is not None
        epochs.append(found["epoch"])
    assert epochs == [1, 1, 4]


def test_a_device_s_memory_and_the_ssd_are_recorded_and_its_kernels_are_not(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeDevice(1) as fake:
        use(fake, monkeypatch)
        options = {"gpu_budget": "2M", "host_budget": "1M", "tile_rows": 64, "device": "cuda", "threads": 1}
        with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **options, out=tmp_path / "run") as trainer:
            record = trainer.fit(epochs=2, eval_every=0)[1]
            peaks = trainer.plan.device_peak_bytes, trainer.plan.host_peak_bytes
    found = RunFolder.open(tmp_path / "run").read(TIMELINE)
    assert found is not None and found["epoch"] == 2
    seen = expand(found)
    assert seen.moved_bytes.get(Resource.SSD_READ, 0) == record.ssd_read_bytes > 0
    assert Resource.COMPUTE not in seen.busy_s
    device, host, _ = seen.memory
    assert (device.tier, host.tier) == ("device memory", "host memory")
    assert 0 < device.peak_bytes <= peaks[0] and host.peak_bytes == peaks[1]


def test_what_threads_send_at_once_is_all_there() -> None:
    """As workers that write do, and the host that reads."""
    rounds, often = 3000, sys.getswitchinterval()
    recorder, failed = EpochRecorder("train"), list[Exception]()
    lane = recorder._condenser.lane(Resource.SSD_WRITE)
    recorder._names, recorder._drive, recorder._began_s = {}, (lane, lane), perf_counter()

    def send(name: str) -> None:
        span: Any = SimpleNamespace(nbytes=1, label=name)
        try:
            for _ in range(rounds):
                ticket: Any = SimpleNamespace(happened=True, ended_s=perf_counter())
                recorder._sent([span], True, ticket)
        except Exception as error:
            failed.append(error)

    threads = [Thread(target=send, args=(name,)) for name in "ab"]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(often)
    assert not failed
    assert sum(lane.nbytes) == 2 * rounds
    assert recorder._moved == {name: [0, 0, rounds, rounds] for name in "ab"}
