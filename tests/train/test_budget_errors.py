# SPDX-License-Identifier: Apache-2.0
"""Too small a budget is found before anything is written, and what the message asks for is enough."""

import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch_geometric.nn.models import GCN

import ooc
from ooc.errors import BudgetError
from ooc.storage.store import Store
from ooc.train import job
from tests.exactness.comparison import least_budgets, make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=2000, edges=9000, features=30, self_loops=10)
MODEL = ModelCase(kind="sage", layers=3, hidden=24, dropout=0.2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A graph of a few hundred KB."""
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


def contents(folder: Path) -> list[Path]:
    """Every file and folder below, to see that nothing was added."""
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(("gpu", "host"), [("1", "1G"), ("1G", "1"), ("1", "1"), ("20K", "20K")])
def test_too_small_is_one_line_and_leaves_nothing(gpu: str, host: str, store: Store, tmp_path: Path) -> None:
    """Which budget, how much there is, how much would do."""
    (tmp_path / "spill").mkdir()
    before = contents(tmp_path)
    budgets = {"gpu_budget": gpu, "host_budget": host}
    with pytest.raises(BudgetError) as caught:
        make_trainer(MODEL, store, tmp_path, dtype=torch.float32, out=tmp_path / "run", **budgets)
    message = str(caught.value)
    assert "\n" not in message and "budget" in message
    assert ("gpu_budget=" in message) or ("host_budget=" in message)
    assert contents(tmp_path) == before


def test_of_data_of_pyg_it_is_told_in_the_trainers_words(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"the memory is 1.00 MB; give memory='34M'$"):
        ooc.Trainer(GCN(30, 8, 2, 4), random_data(GRAPH, dtype=torch.float32), memory="1M", spill_dir=tmp_path)


@pytest.mark.parametrize("memory", ["1M", "100M"])
@pytest.mark.parametrize("is_enabled", [True, False])
def test_while_a_plan_is_made_no_garbage_is_collected(
    memory: str, is_enabled: bool, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a quarter of the time; afterwards it is as before, whether there is a plan or not."""
    during = []
    describe = job.describe_workload
    monkeypatch.setattr(job, "describe_workload", lambda *a, **k: (during.append(gc.isenabled()), describe(*a, **k))[1])
    (gc.enable if is_enabled else gc.disable)()
    try:
        with suppress(BudgetError), ooc.Trainer(GCN(30, 8, 2, 4), store, memory=memory, spill_dir=tmp_path):
            pass
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
    assert during and not any(during)


def test_the_least_that_is_named_does(store: Store, tmp_path: Path) -> None:
    """Asking for what the message says works and runs; a tenth less, the rounding of the message, does not."""

    def build(gpu: str, host: str):  # type: ignore[no-untyped-def]
        options = {"gpu_budget": gpu, "host_budget": host, "block_rows": 32, "tile_rows": 32}
        return make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **options)

    gpu, host = least_budgets(build)
    with build(str(gpu), str(host)) as trainer:
        records = trainer.fit(epochs=2, eval_every=0)
        assert trainer.plan.device_peak_bytes <= gpu
        assert trainer.plan.host_peak_bytes <= host
    assert all(record.device_peak_bytes <= gpu and record.host_peak_bytes <= host for record in records)
    for less_gpu, less_host in ((int(gpu * 0.9), host), (gpu, int(host * 0.9))):
        with pytest.raises(BudgetError):
            build(str(less_gpu), str(less_host))


def test_projected_peaks_are_an_upper_bound_and_not_absurd(store: Store, tmp_path: Path) -> None:
    """What was measured stays below what was planned, and above half of it."""
    budgets = {"gpu_budget": "600K", "host_budget": "400K"}
    with make_trainer(MODEL, store, tmp_path, dtype=torch.float32, tile_rows=32, **budgets) as trainer:
        last = trainer.fit(epochs=2, eval_every=0)[-1]
        plan = trainer.plan
    assert plan.device_peak_bytes // 2 <= last.device_peak_bytes <= plan.device_peak_bytes <= 600_000
    assert plan.host_peak_bytes // 2 <= last.host_peak_bytes <= plan.host_peak_bytes <= 400_000


def test_a_full_disk_is_found_before_training(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the plan's spill size, before a byte is written."""
    full = os.statvfs(tmp_path)
    full = os.statvfs_result((*full[:3], 3, 3, *full[5:]))  # three blocks free
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    (tmp_path / "spill").mkdir()
    before = contents(tmp_path)
    small = {"gpu_budget": "600K", "host_budget": "100K"}
    with (
        pytest.raises(BudgetError) as caught,
        make_trainer(MODEL, store, tmp_path, dtype=torch.float32, **small) as trainer,
    ):
        trainer.fit(epochs=1, eval_every=0)
    assert "free" in str(caught.value)
    assert contents(tmp_path) == before
