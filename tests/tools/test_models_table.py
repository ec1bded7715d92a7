# SPDX-License-Identifier: Apache-2.0
"""docs/layers.md is what tools/models_table makes of the torch-geometric that is installed."""

import os
import re
import sys
import time
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.exactness.reference import Epoch, Reference

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs/layers.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool() -> Any:
    """The tool as a module, which finds its neighbours as a script's would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHECKOUT / "tools"))
        loader = SourceFileLoader("models_table", str(CHECKOUT / "tools/models_table"))
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None
        module = module_from_spec(spec)
        patch.setitem(sys.modules, loader.name, module)  # its dataclasses look themselves up there
        loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def graphs(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool.make_graphs(tmp_path_factory.mktemp("graphs"), rough_only=True)


def rows() -> dict[str, list[str]]:
    """The cells behind each name in the page's tables."""
    found: dict[str, list[str]] = {}
    for line in re.findall(r"^\| (`.*) \|$", PAGE, re.MULTILINE):
        names, *cells = line.split(" | ")
        for name in re.findall(r"`(.*?)`", names):
            assert name not in found, name
            found[name] = cells
    return found


def test_everything_that_torch_geometric_has_is_on_the_page(tool: ModuleType) -> None:
    """And nothing that it has not."""
    from pyg_layers import GROUPS

    listed = {name.partition(",")[0] for name in rows()}
    assert listed == {name for module in GROUPS.values() for name in module.__all__}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("Convolutions", "GCNConv"),
        ("Convolutions", "LEConv"),
        ("Convolutions", "SplineConv"),
        pytest.param("Convolutions", "DNAConv", marks=pytest.mark.thorough),
        ("Norms", "GraphNorm"),
        ("Ready models", "JumpingKnowledge, cat"),
        pytest.param("Aggregators", "SetTransformerAggregation", marks=pytest.mark.thorough),
    ],
)
def test_the_page_says_what_comes_of_trying(tool: ModuleType, graphs: Any, group: str, name: str) -> None:
    from pyg_layers import catalogue

    entry = catalogue()[group][name]
    found = tool.compare(entry.model, graphs, entry.form)
    cells = rows()[name]
    if found.kind == "exact":
        assert cells[0] == found.detail
    else:
        assert cells == list(tool.explained(name, found))


def test_another_result_is_told_from_an_exact_one(
    tool: ModuleType, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyg_layers import catalogue

    train = Reference.train

    def slightly_off(reference: Reference) -> Epoch:
        epoch = train(reference)
        return replace(epoch, loss=epoch.loss * (1 + 1e-8))

    monkeypatch.setattr(Reference, "train", slightly_off)
    found = tool.compare(catalogue()["Convolutions"]["GCNConv"].model, graphs, "")
    assert found.kind == "differs" and "epoch 1: loss differs by 1.0e-08" in found.detail


def test_a_trial_that_fails_or_hangs_is_said_to(tool: ModuleType) -> None:
    trials = {
        ("a", "fails"): lambda: 1 // 0,
        ("a", "ends"): lambda: os._exit(1),
        ("a", "hangs"): lambda: time.sleep(60),
    }
    found = dict(tool.guarded(trials, jobs=3, timeout_s=0.9))
    assert found["a", "fails"] == "ZeroDivisionError: integer division or modulo by zero"
    assert found["a", "ends"] == "its process ended"
    assert found["a", "hangs"] == "took more than 1 s"


def test_reasons_are_shortened_to_what_they_say(tool: ModuleType) -> None:
    reason = (
        "DirConv (first.layer): flip is given the edges; only convolutions may look at them (in Dir.forward, d.py l)"
    )
    assert tool.shortened(reason) == "flip is given the edges; only convolutions may look at them"
    assert tool.shortened("model Twice is not supported: it has none; give one. More.") == "it has none; give one"
