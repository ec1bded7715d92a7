# SPDX-License-Identifier: Apache-2.0
"""An epoch's record tells of each of its passes what it took, and expectations are of the same passes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ooc.engine.record import EpochRecord
from ooc.plan import UNMEASURED
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource
from ooc.storage.store import Store
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=3000, edges=12000, features=30)
MODEL = ModelCase(kind="sage", layers=3, hidden=24, dropout=0.2)
SMALL = {"gpu_budget": "1100K", "host_budget": "100K", "tile_rows": 64}
"""Budgets under which matrices spill."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


def test_passes_are_the_plan_s_and_add_up_to_the_epoch(store: Store, tmp_path: Path) -> None:
    with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **SMALL) as trainer:
        record = trainer.fit(epochs=3, eval_every=0)[-1]
        names = [item.title for item in trainer.plan.programs["train"]]
    assert [done.name for done in record.passes] == names
    assert {done.program for done in record.passes} == {"train"}
    assert sum(done.time_s for done in record.passes) <= record.time_s
    assert all(done.time_s >= 0 and done.compute_s > 0 and done.cpu_s >= 0 for done in record.passes)
    assert 0 < sum(done.read_bytes for done in record.passes) <= record.ssd_read_bytes
    assert 0 < sum(done.write_bytes for done in record.passes) <= record.ssd_write_bytes


def test_the_simulator_s_passes_and_bytes_are_those_of_an_epoch(store: Store, tmp_path: Path) -> None:
    with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **SMALL) as trainer:
        record = trainer.fit(epochs=2, eval_every=0)[-1]
        timeline = simulate(trainer.plan, trainer.workload, trainer.hardware)
    assert timeline.moved_bytes[Resource.SSD_READ] == record.ssd_read_bytes
    assert timeline.moved_bytes[Resource.SSD_WRITE] == record.ssd_write_bytes
    assert [item.title for item in timeline.passes] == [done.name for done in record.passes]


def test_a_faster_machine_is_never_expected_to_be_slower(store: Store, tmp_path: Path) -> None:
    with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **SMALL) as trainer:
        plan, work, now = trainer.plan, trainer.workload, UNMEASURED
    faster = [
        replace(now, disk=replace(now.disk, both_ways_bytes_per_s=2 * now.disk.both_ways_bytes_per_s)),
        replace(now, processor=replace(now.processor, stream_bytes_per_s=2 * now.processor.stream_bytes_per_s)),
        replace(now, processor=replace(now.processor, multiplies_per_s={"float32": 1e12})),
        replace(now, processor=replace(now.processor, cache_bytes=1 << 40)),
        replace(now, overlap=1.0),
        replace(now, seconds_per_block=0.0),
    ]
    seconds = simulate(plan, work, now).epoch_s
    for other in faster:
        assert simulate(plan, work, other).epoch_s <= seconds


def test_what_is_known_of_the_machine_changes_no_result(store: Store, tmp_path: Path) -> None:
    slow = replace(
        UNMEASURED,
        overlap=0.0,
        disk=replace(UNMEASURED.disk, both_ways_bytes_per_s=1e6),
        processor=replace(UNMEASURED.processor, seconds_per_step=1.0, stream_bytes_per_s=1e6),
    )
    losses = []
    for hardware in (UNMEASURED, slow):
        with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **SMALL, hardware=hardware) as trainer:
            losses.append([record.loss for record in trainer.fit(epochs=2, eval_every=0)])
            assert trainer.hardware is hardware
    assert losses[0] == losses[1]


def test_records_come_back_from_a_line_and_old_ones_have_no_passes(store: Store, tmp_path: Path) -> None:
    with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **SMALL) as trainer:
        record = trainer.fit(epochs=1, eval_every=0)[0]
    assert EpochRecord.from_line(record.to_line()) == record
    old = json.loads(record.to_line())
    del old["passes"], old["valid_score"]
    assert EpochRecord.from_dict(old).passes == ()
    assert EpochRecord.from_dict({**old, "valid_acc": 0.5}).valid_score == 0.5  # as it was called
    with pytest.raises(ValueError, match="passes are not those of an epoch's record"):
        EpochRecord.from_dict({**old, "passes": [{"name": "loss"}]})
