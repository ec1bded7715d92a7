# SPDX-License-Identifier: Apache-2.0
"""The short form of tools/crash_campaign: some kills and power cuts, and that it would notice what is lost."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples import cases
from tests.tools.loaded import load_tool

SEED = 3


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        tool = load_tool("crash_campaign", patch)
        yield tool.Campaign(tmp_path_factory.mktemp("campaign"), SEED, [], twice=False)


def test_nothing_is_lost(campaign: Any) -> None:
    trials = ["kill:convert:0", "power:train-gcn:3", "kill:train-gcn:1", "power:reorder:2"]
    for trial in cases(trials[:2], trials):
        kind, name, number = trial.split(":")
        campaign.try_one(kind, name, int(number))
    assert [failure for tally in campaign.tallies.values() for failure in tally.failures] == []
    assert sum(tally.counts["power cuts"] for tally in campaign.tallies.values()) == cases([1], [2])[0]


def test_an_epoch_that_is_lost_is_noticed(campaign: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints whose folder is not flushed last, which a power cut may take back."""
    from ooc.storage import array

    def replace(path: Path, data: Any) -> None:
        with path.open("wb") as file:
            _ = data(file) if callable(data) else file.write(data)

    monkeypatch.setattr(array, "replace_file", replace)
    monkeypatch.setattr("ooc.train.runs.run.replace_file", replace)
    monkeypatch.setattr(campaign, "tallies", {})
    number = 0
    while number < 6 and not (campaign.tallies and campaign.tallies["train"].failures):
        campaign.try_one("power", "train-gcn", number)
        number += 1
    assert campaign.tallies["train"].failures


def test_what_was_not_flushed_may_be_gone_torn_or_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was flushed is there, under its name once the folder was."""
    load_tool("crash_campaign", monkeypatch)
    import os

    from forked import call  # type: ignore[import-not-found]
    from power_loss import MODELS, Recorder, after_power_loss  # type: ignore[import-not-found]

    (tmp_path / "d").mkdir()
    seen: list[dict[str, Any]] = []
    kept = tmp_path / "record"

    def work() -> int:
        import pickle

        recorder = Recorder(tmp_path / "d")
        for name, flushed in ("a", True), ("b", False):
            descriptor = os.open(tmp_path / "d" / name, os.O_CREAT | os.O_WRONLY)
            os.write(descriptor, b"x" * 2000)
            if flushed:
                os.fsync(descriptor)
        folder = os.open(tmp_path / "d", os.O_RDONLY)
        os.fsync(folder)
        (tmp_path / "d" / "a").rename(tmp_path / "d" / "c")
        record = recorder.stop()
        kept.write_bytes(pickle.dumps(record))
        return 0

    assert call(work, tmp_path / "log").code == 0
    import pickle

    record = pickle.loads(kept.read_bytes())
    rng = random.Random(0)
    for model in MODELS:
        states = [after_power_loss(record, model, rng) for _ in range(60)]
        assert all((state.get("a") or state.get("c")) == b"x" * 2000 and "b" in state for state in states)
        assert {"a" in state for state in states} == {True, False}
        assert {len(state["b"] or b"") for state in states} >= {0, 2000}
        seen += states
    assert any(0 < (state["b"] or b"").count(0) < 2000 for state in seen)
