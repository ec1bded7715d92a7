# SPDX-License-Identifier: Apache-2.0
"""The short form of tools/network_campaign, and that it notices other results than PyG's."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.examples import examples
from tests.tools.loaded import load_tool


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield load_tool("network_campaign", monkeypatch)
    torch.set_default_dtype(before)


def test_random_networks_train_as_by_pyg(tool: ModuleType) -> None:
    assert [tool.verdict(seed) for seed in range(1, 1 + examples(1))] == [("the same", "")] * examples(1)


def test_other_results_are_noticed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_pyg(given: object, original: object = tool.by_pyg) -> object:
        found = original(given)  # type: ignore[operator]
        return found | {name: tensor + 1e-4 for name, tensor in found.items() if name != "losses"}

    monkeypatch.setattr(tool, "by_pyg", by_pyg)
    what, why = tool.verdict(1)
    assert what == "failed" and "is not PyG's" in why
