# SPDX-License-Identifier: Apache-2.0
"""tools/bench_accuracy keeps runs and goes on from them; GAT's early stopping is the published one."""

import importlib
import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool as a module, whose trainings give their seed as score."""
    loader = SourceFileLoader("bench_accuracy", str(TOOLS / "bench_accuracy"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    module.trained = trained = []

    def train(dataset: str, model: str, seed: int, data: str, scratch: str) -> dict[str, Any]:
        trained.append(f"{dataset} {seed}")
        if seed == 13:
            raise KeyboardInterrupt
        return {"seed": seed, "best": seed / 100, "last": 0.5, "best_epoch": 1}

    monkeypatch.setattr(module, "train", train)
    return module


@pytest.fixture(scope="module")
def published() -> ModuleType:
    """tools/published_gat.py, which finds its neighbours as a script's would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        return importlib.import_module("published_gat")


def test_a_table_is_made_in_several_sittings(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only runs that the file lacks are run; one that is cut off leaves those before it."""
    asked = ["--json", str(tmp_path / "scores.json"), "--tasks"]
    tool.main([*asked, "cora:gcn", "--first-seed", "2", "--seeds", "2"])
    tool.main([*asked, "cora:gcn,citeseer:gcn", "--seeds", "3"])
    with pytest.raises(KeyboardInterrupt):
        tool.main([*asked, "cora:gcn", "--first-seed", "12", "--seeds", "2"])
    assert tool.trained[:4] == ["cora 2", "cora 3", "cora 0", "cora 1"]
    assert tool.trained[4:] == ["citeseer 0", "citeseer 1", "citeseer 2", "cora 12", "cora 13"]
    capsys.readouterr()
    tool.main([*asked, "cora:gcn", "--seeds", "4"])
    assert tool.trained[9:] == []
    assert capsys.readouterr().out.splitlines()[2:] == ["| cora | gcn | 5 | 3.60 ± 4.83 | 50.00 ± 0.00 |"]
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


def test_runs_of_other_settings_are_not_mixed_in(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scores.json"
    asked = ["--json", str(path), "--tasks", "cora:sage", "--seeds", "1"]
    tool.main(asked)
    monkeypatch.setitem(tool.RECIPES, "sage", tool.RECIPES["sage"].replace("--epochs 200", "--epochs 201"))
    with pytest.raises(SystemExit, match=r"runs of cora:sage with other settings: .* --epochs 200 .*another --json"):
        tool.main(asked)
    path.write_text(json.dumps([{"dataset": "cora", "model": "sage", "runs": []}]))
    with pytest.raises(SystemExit, match="it does not say which"):
        tool.main(asked)


def published_loop(epochs: list[tuple[float, float]], patience: int) -> tuple[int, int]:
    """Epochs run and the one scored, as the loop of the authors' ``execute_cora.py`` has it."""
    most_accuracy, least_loss, waited, saved = 0.0, float("inf"), 0, 0
    for epoch, (loss, accuracy) in enumerate(epochs, 1):
        if accuracy >= most_accuracy or loss <= least_loss:
            if accuracy >= most_accuracy and loss <= least_loss:
                saved = epoch
            most_accuracy, least_loss, waited = max(accuracy, most_accuracy), min(loss, least_loss), 0
        else:
            waited += 1
            if waited == patience:
                return epoch, saved
    return len(epochs), saved


VALUES = st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5])


@given(epochs=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=40), patience=st.integers(1, 5))
def test_training_stops_and_chooses_as_published(
    published: ModuleType, epochs: list[tuple[float, float]], patience: int
) -> None:
    stopping = published.EarlyStopping(patience)
    run, chosen = 0, 0
    for loss, accuracy in epochs:
        run += 1
        chosen = run if stopping.note(loss, accuracy) else chosen
        if stopping.over:
            break
    assert (run, chosen) == published_loop(epochs, patience)


def test_gat_is_trained_as_published(published: ModuleType, tmp_path: Path) -> None:
    """Eight heads of eight channels, then one; it ends where it has to, and the epoch chosen is one of those run."""
    store = store_of(random_data(GraphCase(nodes=60, edges=150, features=6), dtype=torch.float32), tmp_path)
    first, last = published.build_model(store, seed=1).convs
    assert (first.heads, first.out_channels, first.concat) == (8, 8, True)
    assert (last.heads, last.out_channels, last.concat) == (1, store.num_classes, False)
    result = published.train(str(store.path), seed=1, most_epochs=3)
    assert (result["epochs"], result["stopped"], result["seed"]) == (3, False, 1)
    assert 1 <= result["best_epoch"] <= 3
    assert result["best"] is not None and result["last"] is not None
