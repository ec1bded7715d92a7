# SPDX-License-Identifier: Apache-2.0
"""What follows from options that were left out: the store, the run's folder, the budgets."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from ooc import memory
from ooc.cli import settings
from ooc.cli.settings import TrainSettings
from ooc.errors import OptionError, RunError


def make(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {name: None for name in TrainSettings.__dataclass_fields__}
    return TrainSettings(**(values | changes))


def test_the_only_store_here_is_meant(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no \*\.ooc"):
        settings.only_store(tmp_path)
    (tmp_path / "a.ooc").mkdir()
    (tmp_path / "b.ooc.partial").mkdir()
    assert settings.only_store(tmp_path) == tmp_path / "a.ooc"
    (tmp_path / "b.ooc").mkdir()
    with pytest.raises(OptionError, match=r"several: a\.ooc, b\.ooc"):
        settings.only_store(tmp_path)


def test_runs_are_numbered(tmp_path: Path) -> None:
    assert settings.next_run(tmp_path, "/data/cora.ooc", "gcn") == tmp_path / "cora-gcn-1"
    (tmp_path / "cora-gcn-1").mkdir()
    assert settings.next_run(tmp_path, "/data/cora.ooc", "gcn") == tmp_path / "cora-gcn-2"


def test_settings_come_back_from_a_configuration() -> None:
    original = make(store="/s.ooc", lr=0.1)
    assert TrainSettings.from_config({**original.as_config(), "else": 1}, Path("run")) == original
    with pytest.raises(RunError, match=r"run was not begun by ooc train: .* lacks .*layers"):
        TrainSettings.from_config({"store": "/s.ooc"}, Path("run"))


def test_budgets_given_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.budgets(make(gpu_budget=5, host_budget=6), "cpu", 0) == (5, 6)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000)
    assert settings.budgets(make(), "cpu", 0) == (250, 500)
    assert settings.budgets(make(), "cuda", 2000) == (1800, 500)
    assert settings.budgets(make(host_budget=7), "cpu", 0) == (250, 7)


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """The least room in any group around this process counts, page cache being room."""
    if version == 1:
        entry, root, limit, usage = (
            "4:memory:/job/step",
            tmp_path / "memory",
            "limit_in_bytes",
            "usage_in_bytes",
        )
        cache = "total_inactive_file"
    else:
        entry, root, limit, usage = "0::/job/step", tmp_path, "max", "current"
        cache = "inactive_file"
    (root / "job" / "step").mkdir(parents=True)
    (root / "job" / f"memory.{limit}").write_text("1000000\n")
    (root / "job" / f"memory.{usage}").write_text("400000\n")
    (root / "job" / "memory.stat").write_text(f"rss 5\n{cache} 100000\n")
    (root / "job" / "step" / f"memory.{limit}").write_text("max\n")
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{entry}\n1:cpu:/\n")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    assert memory.available_memory_bytes() == 700_000


def test_without_control_groups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "none")
    assert 0 < memory.available_memory_bytes() <= psutil.virtual_memory().total
