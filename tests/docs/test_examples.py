# SPDX-License-Identifier: Apache-2.0
"""The scripts in examples/ run as they stand."""

import importlib
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
        "own_data": "node,label",
        "own_model": "logits differ from PyG's by",
        "prediction": "all logits: (5000, 4)",
    }[name] in capsys.readouterr().out
