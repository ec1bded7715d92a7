# SPDX-License-Identifier: Apache-2.0
"""``device="cuda"``: a GPU where there is one, otherwise the tests' device with the kernel in the interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn.models import GCN, GraphSAGE

import ooc
from ooc.plan.hardware import UNMEASURED_DEVICE
from ooc.prefetch.cuda import Cuda
from ooc.storage.store import Store
from ooc.train.record import EpochRecord
from ooc.train.trainer import Trainer
from tests.gpu.device import DEVICE, sums
from tests.graphs import GraphCase, random_data
from tests.train.fake_device import FakeDevice

pytestmark = pytest.mark.gpu

GRAPH = GraphCase(nodes=120, edges=500, features=12, self_loops=9, train=0.2, unlabelled=70)


def interpreted(source: Tensor, *lists: Tensor | None) -> Tensor:
    """The interpreter copies whole memories to and fro; it is given copies."""
    on_host = [None if part is None else part.cpu() for part in lists]
    return sums.pull(source.cpu(), *on_host).to(source.device)


@contextmanager
def device(patched: pytest.MonkeyPatch) -> Iterator[None]:
    """What computes where there is no GPU."""
    if DEVICE.type == "cuda":
        yield
        return
    with FakeDevice() as fake:
        patched.setattr("ooc.train.setup.find_device", lambda name: fake)
        patched.setattr("ooc.train.executor.pull", interpreted)
        patched.setattr("ooc.train.executor.follows_all", lambda source: False)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """In hop order: not every row is computed, and neighbours beyond them are passed over."""
    data = random_data(GRAPH, dtype=torch.float32)
    return ooc.convert(data, tmp_path_factory.mktemp("gpu") / "hop.ooc", dtype="float32", order="hop")


@pytest.mark.parametrize("kind", [GCN, GraphSAGE], ids=["gcn", "sage"])
def test_losses_are_those_of_the_cpu(
    kind: type[torch.nn.Module], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within what GPUs round otherwise; and the bytes over the wire are the plan's."""

    def trained(**options: Any) -> tuple[list[EpochRecord], int]:
        torch.manual_seed(0)
        model = kind(12, 8, 2, 4, dropout=0.2)
        with Trainer(model, store, host_budget="300K", spill_dir=tmp_path, tile_rows=32, **options) as trainer:
            return trainer.fit(epochs=3), trainer.plan.to_device_bytes

    expected, _ = trained(gpu_budget="16M")
    with device(monkeypatch):
        budget = 100_000 + (Cuda.overhead_bytes if DEVICE.type == "cuda" else 0)
        found, to_device = trained(gpu_budget=budget, device="cuda", hardware=UNMEASURED_DEVICE)
    assert [r.loss for r in found] == pytest.approx([r.loss for r in expected], rel=1e-3)
    assert found[-1].to_device_bytes == to_device > 0
