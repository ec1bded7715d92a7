# SPDX-License-Identifier: Apache-2.0
"""The short form of tools/fuzz_campaign: a few damaged inputs, and that it would notice what must not be."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tools.loaded import load_tool

SEED = 7


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield load_tool("fuzz_campaign", patch)


@pytest.fixture(scope="module")
def campaign(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool.Campaign(tmp_path_factory.mktemp("fuzz"), SEED, ["npz", "planetoid", "table", "graphbolt", "store"])


def test_damaged_inputs_are_refused_or_make_a_sound_store(campaign: Any) -> None:
    for number in range(5):
        for names in campaign.formats.values():
            outcome = campaign.one(names[number % len(names)], number)
            assert outcome in ("refused", "another store", "right"), f"{names}, {number}: {outcome}"


@pytest.mark.parametrize("what", ["a traceback", "two lines", "a hang", "a pickle", "a stray file", "memory"])
def test_what_must_not_be_is_noticed(
    campaign: Any, tool: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def bad(self: Any, name: str, sandbox: Path) -> str:
        from ooc.errors import SourceError

        match what:
            case "a traceback":
                raise ValueError("broken")
            case "two lines":
                raise SourceError("one\ntwo")
            case "a hang":
                reading, _ = os.pipe()
                os.read(reading, 1)
            case "a pickle":
                (sandbox / "ran").mkdir()
            case "a stray file":
                (sandbox / "work" / "evil.npy").touch()
            case "memory":
                return str(len(b"x" * 40_000_000))
        return "another store"

    monkeypatch.setattr(tool.Campaign, "_convert", bad)
    monkeypatch.setattr(tool, "HANG_S", 1)
    monkeypatch.setattr(tool, "MOST_BYTES", 9_000_000 if what == "memory" else 300_000_000)
    expected = {
        "a traceback": "traceback: ValueError",
        "two lines": "bad line: ",
        "a hang": "hung: ",
        "a pickle": "a pickle ran: ",
        "a stray file": "stray files: evil.npy",
        "memory": "memory: ",
    }
    campaign._batch("npz", ["npz"], 0, 1)  # in a child: threads that other tests have left would be taken for work
    assert campaign.failures.pop().startswith(f"npz:0: {expected[what]}")
