# SPDX-License-Identifier: Apache-2.0
"""``tools/compare_plans`` tells plans that are longer than before from those that only differ."""

import runpy
from pathlib import Path
from typing import Any

import pytest

COMPARE_PLANS = Path(__file__).resolve().parents[2] / "tools" / "compare_plans"


def plan(epoch_s: float, **others: Any) -> dict[str, Any]:
    return {"epoch_s": epoch_s, "recomputed": [], "planning_s": 1.0, **others}


@pytest.mark.parametrize(
    ("after", "worse"),
    [
        (plan(1.0), False),
        (plan(0.9, recomputed=["z1"]), False),
        (plan(1.005), False),
        (plan(1.02), True),
        ({"refused": "too little memory", "planning_s": 1.0}, True),
    ],
)
def test_a_longer_epoch_or_a_plan_that_is_gone_is_noticed(
    after: dict[str, Any], worse: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = runpy.run_path(str(COMPARE_PLANS))["compare"]
    assert compare({"one": plan(1.0)}, {"one": after}) == int(worse)
    out = capsys.readouterr().out
    assert "1 cases" in out
    assert ("one: " in out) == (after != plan(1.0))
