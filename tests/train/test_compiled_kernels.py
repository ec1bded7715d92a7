# SPDX-License-Identifier: Apache-2.0
"""Loops are compiled before the first epoch, and torch's operators serve where they cannot be."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, SAGEConv

from ooc.kernels import pulls
from ooc.kernels.compiled import loops
from ooc.train.trainer import Trainer


class OneLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found: Tensor = self.layer(x, edge_index)
        return found


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gat": lambda: GATConv(5, 3),
    "gatv2": lambda: GATv2Conv(5, 3),
    "maximum": lambda: SAGEConv(5, 3, aggr="max"),
}


def graph() -> Data:
    torch.manual_seed(0)
    edges = torch.randint(0, 30, (2, 100)).unique(dim=1)
    return Data(torch.randn(30, 5), edges, y=torch.randint(0, 3, (30,)), train_mask=torch.ones(30, dtype=torch.bool))


@pytest.mark.parametrize("layer", LAYERS)
def test_an_epoch_compiles_nothing(layer: str, tmp_path: Path) -> None:
    def compiled() -> int:
        modules = [module for name, module in sys.modules.items() if name.startswith(f"{loops.__package__}.")]
        every = [one for module in modules for one in vars(module).values()]
        return sum(len(one.signatures) for one in every if hasattr(one, "signatures"))

    with Trainer(OneLayer(LAYERS[layer]()), graph(), "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer._start()
        before = compiled()
        trainer.fit(1)
    assert compiled() == before > 0


def test_a_model_without_edges_has_its_loss_compiled_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ooc.kernels.compiled import cross_entropy

    class Mapped(nn.Linear):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    calls, loop = list[Any](), cross_entropy._cross_entropy
    monkeypatch.setattr(cross_entropy, "_cross_entropy", lambda *given: calls.append(given) or loop(*given))
    with Trainer(Mapped(5, 3), graph(), "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer._start()
        assert len(calls) == 1


def test_without_the_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ooc.kernels.compiled.loops", ModuleType("nothing"))
    for name in ("gat", "maximum", "edge_function"):
        monkeypatch.delitem(sys.modules, f"ooc.kernels.compiled.{name}", raising=False)
        monkeypatch.delattr("ooc.kernels.compiled." + name, raising=False)
    pulls._of_cpu.cache_clear()
    try:
        assert pulls.pulls_for(torch.zeros(1)).attend.__module__ == "ooc.kernels.gat"
    finally:
        pulls._of_cpu.cache_clear()
