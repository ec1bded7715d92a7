# SPDX-License-Identifier: Apache-2.0
"""Training computes again what its planner says had better not be kept, and moves the bytes that the plan names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn.models import GCN

import ooc
from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Hardware, Plan
from ooc.plan.hardware import Curve, Disk
from ooc.storage.store import Store
from tests.exactness.comparison import tuned_trainer

LAYERS, HIDDEN, TILE_ROWS = 6, 32, 64
NODES = 2000
KEPT_BYTES = NODES * HIDDEN * 4


def with_disk(bytes_per_s: float) -> Hardware:
    rate = Curve(((1.0, bytes_per_s),))
    return replace(UNMEASURED, disk=Disk(rate, rate, bytes_per_s, 1e-4), seconds_per_block=0.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    source = f"synthetic:nodes={NODES},edges={2 * NODES},features=8,classes=4,seed=1"
    return ooc.convert(source, tmp_path_factory.mktemp("store") / "graph.ooc")


def run(store: Store, folder: Path, *, layers: int = LAYERS, **options: Any) -> tuple[Plan, list[float]]:
    """The plan and the losses of two epochs, which move what the plan says."""
    torch.manual_seed(5)
    model = GCN(store.num_features, HIDDEN, layers, store.num_classes, dropout=0.3)
    options = {"gpu_budget": "64M", "host_budget": "64M", "threads": 1, "tile_rows": TILE_ROWS} | options
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with tuned_trainer(model, store, optimizer=optimizer, spill_dir=folder, **options) as trainer:
        records = trainer.fit(epochs=2, eval_every=0)
        assert records[-1].ssd_read_bytes == trainer.plan.ssd_read_bytes
        assert records[-1].ssd_write_bytes == trainer.plan.ssd_write_bytes
        return trainer.plan, [record.loss for record in records]


@pytest.fixture(scope="module")
def plenty(store: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, list[float]]:
    """The same with memory for everything."""
    return run(store, tmp_path_factory.mktemp("plenty"))


def computed_again(plan: Plan) -> set[str]:
    return {str(row["matrix"]) for row in plan.summary() if "recompute" in str(row["fate"])}


SCARCE = {"gpu_budget": "900K", "host_budget": 3 * KEPT_BYTES // 2, "block_rows": TILE_ROWS}
"""Memory for some of the five matrices that are kept of six layers."""


def test_with_a_slow_disk_most_is_computed_again(
    store: Store, plenty: tuple[Plan, list[float]], tmp_path: Path
) -> None:
    """And less is moved, as measured; losses are those of plenty of memory, and of a disk that is worth waiting for."""
    roomy, expected = plenty
    fast, kept = run(store, tmp_path, hardware=with_disk(1e13), **SCARCE)
    slow, again = run(store, tmp_path, hardware=with_disk(1e7), **SCARCE)
    assert not computed_again(roomy)
    assert computed_again(fast) <= {"z1"}, "which takes no pull"
    assert computed_again(slow) - {"z1"}
    assert 0 < slow.ssd_bytes < fast.ssd_bytes
    assert expected == kept == again


def test_what_may_not_be_written_is_computed_again(
    store: Store, plenty: tuple[Plan, list[float]], tmp_path: Path
) -> None:
    """Nothing is written, though what is kept for the backward pass would be more than the memory."""
    _, expected = plenty
    plan, losses = run(store, tmp_path, hardware=with_disk(1e13), max_ssd_writes=0, **SCARCE)
    assert plan.ssd_write_bytes == 0
    assert computed_again(plan) - {"z1"}
    assert losses == expected


def test_a_limit_on_writes_that_nothing_keeps_is_refused(store: Store, tmp_path: Path) -> None:
    options = {"gpu_budget": "640K", "host_budget": "100K", "block_rows": TILE_ROWS, "layers": 3}
    with pytest.raises(BudgetError, match="give max_ssd_writes="):
        run(store, tmp_path, max_ssd_writes=0, **options)
