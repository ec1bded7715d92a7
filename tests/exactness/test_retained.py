# SPDX-License-Identifier: Apache-2.0
"""What passes retain for one another, where budgets leave memory for it: bits are the same without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GENConv

from ooc.engine import runtime
from ooc.kernels.edges import Spare
from ooc.model.layers.layer import Layer
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.layers import MlpMessages
from tests.exactness.reference import CustomCase
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=200, edges=900, features=5, self_loops=9, isolated=20, duplicates=30, edge_features=3)


class Both(nn.Module):
    """A layer that takes features of edges and rows in pairs, and one that drops messages."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GENConv(features, 8, edge_dim=3, norm=None, learn_t=True)
        self.second = MlpMessages(8, classes, "softmax")

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index)


def test_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is retained, some of it, or nothing: the same losses and parameters; and runs are run once, or twice."""
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    run, calls, found = Layer.run, 0, []

    def counted(layer: Layer, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(layer, *arguments)

    monkeypatch.setattr(Layer, "run", counted)
    for share in (1.0, 0.3, 0.0):
        monkeypatch.setattr(runtime, "Spare", lambda nbytes, share=share: Spare(int(share * nbytes)))
        with make_trainer(CustomCase(make=Both), store, tmp_path, dtype=torch.float32, threads=2) as trainer:
            assert trainer.plan.retained_bytes > 0
            records = trainer.fit(epochs=1, eval_every=0)
            calls = 0
            records += trainer.fit(epochs=1, eval_every=0)
            assert records[-1].host_peak_bytes <= trainer.plan.host_peak_bytes
            weights = [parameter.clone() for parameter in trainer.model.parameters()]
        found.append((calls, [record.loss for record in records], weights))
    (all_calls, *everything), (some_calls, *something), (no_calls, *nothing) = found
    assert all_calls < some_calls < no_calls == 2 * all_calls
    for losses, parameters in (something, nothing):
        assert losses == everything[0]
        assert all(map(torch.equal, parameters, everything[1]))


def test_no_budget_is_exceeded(tmp_path: Path) -> None:
    """Retained is what the two budgets have left, and no more than there could be."""
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    for budget in ("2M", "3M", "64M"):
        options = {"gpu_budget": budget, "host_budget": budget, "threads": 1}
        with make_trainer(CustomCase(make=Both), store, tmp_path, dtype=torch.float32, **options) as trainer:
            plan = trainer.plan
        assert plan.device_peak_bytes <= plan.device_limit_bytes and plan.host_peak_bytes <= plan.host_limit_bytes
        left = plan.device_limit_bytes + plan.host_limit_bytes - plan.device_peak_bytes - plan.host_peak_bytes
        assert plan.retained_bytes == plan.retainable_bytes or left == 0
