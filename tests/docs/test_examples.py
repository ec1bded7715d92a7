# SPDX-License-Identifier: Apache-2.0
"""The scripts in examples/ run as they stand."""

import importlib
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_examples_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module(name).main(tmp_path)
    assert {
        "edge_states": "results differ from PyG's by",
        "embedding": "nearest rows of the same class: 0.9",
        "link_prediction": "area under the ROC curve of the test links: 0.",
        "many_graphs": "predictions: (1252, 1)",
        "offload_transformer": "weights are the same bits: True",
        "own_data": "node,label",
        "own_model": "logits differ from PyG's by",
        "prediction": "all logits: (5000, 4)",
        "sampled_batches": "accuracy on the full graph: 0.",
        "training_levers": "3 seeds, accuracy on test nodes: ",
        "typed_graph": "accuracy on test women: 1.",
    }[name] in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cell after cell, as a kernel would, in an empty folder; they are kept without what they have printed."""
    names: dict[str, object] = {}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"], start=1):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "epoch 5: loss" in printed and "torch.Size([20000])" in printed
    assert (here / "first.pt").exists()
