# SPDX-License-Identifier: Apache-2.0
"""The short form of tools/soak_campaign, and that it tells what grows from what does not."""

import random
from pathlib import Path

import pytest

from tests.examples import examples
from tests.tools.loaded import load_tool


def test_cycles_hold_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool("soak_campaign", monkeypatch)
    monkeypatch.setattr(tool, "EPOCHS", 2)
    first, *others = tool.soak(tmp_path, minutes=0, cycles=1 + examples(1))
    for held in others:
        assert (held.descriptors, held.threads, held.files) <= (first.descriptors, first.threads, first.files)


@pytest.mark.parametrize(
    ("a_cycle", "threads", "grows"),
    [(0, 0, False), (100_000, 0, True), (0, 1, True)],
    ids=["flat", "memory", "a thread"],
)
def test_what_grows_is_told(monkeypatch: pytest.MonkeyPatch, a_cycle: int, threads: int, grows: bool) -> None:
    tool = load_tool("soak_campaign", monkeypatch)
    rng = random.Random(0)
    held = [
        tool.Held(500_000_000 + n * a_cycle + rng.randrange(2_000_000), 8, 4 + threads * (n > 150), 9)
        for n in range(200)
    ]
    found, lines = tool.judge(held)
    assert found is grows and lines[-1] == ("something grows" if grows else "flat")
