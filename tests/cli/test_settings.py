# SPDX-License-Identifier: Apache-2.0
"""What follows from options that were left out: the store, the run's folder, the budgets."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from ooc import memory
from ooc.cli.arguments import settings
from ooc.cli.arguments.settings import TrainSettings, check_sampling
from ooc.cli.train import command
from ooc.errors import OptionError, RunError


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


def usual(**changes: Any) -> dict[str, Any]:
    """A configuration as ``ooc train`` writes it."""
    context = command.make_context("train", ["/s.ooc"])
    names = TrainSettings.__dataclass_fields__
    values = {name: value for name, value in context.params.items() if name in names}
    lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
    return {**asdict(TrainSettings(**{**values, **lists})), **changes}


def test_settings_come_back_from_a_configuration() -> None:
    config = usual(lr=1, gpu_budget=5, log=["csv"], threads=2, clip=0.5, residual=True)
    found = TrainSettings.from_config({**config, "else": 1}, Path("run"))
    assert asdict(found) == config
    with pytest.raises(RunError, match=r"run was not begun by ooc train: .* lacks .*layers"):
        TrainSettings.from_config({"store": "/s.ooc"}, Path("run"))


@pytest.mark.parametrize("name", TrainSettings.__dataclass_fields__)
@pytest.mark.parametrize("value", [-3, "abc\n", [5], {}, float("nan"), 1e999, ["abc"]], ids=repr)
def test_a_configuration_with_impossible_values_is_refused_by_name(name: str, value: Any) -> None:
    """Whatever the option; a path may be any text."""
    if name in ("store", "spill_dir", "links") and isinstance(value, str):
        return
    with pytest.raises(RunError, match=rf"^run/config\.json is damaged: {name} cannot be "):
        TrainSettings.from_config(usual(**{name: value}), Path("run"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("lr", "0.1"),
            ("lr", 10**400),
            ("lr", True),
            ("lr", None),
            ("hidden", 8.0),
            ("hidden", 0),
            ("hidden", "8"),
            ("layers", True),
        ),
        *(("aggr", "foo"), ("optimizer", "adan"), ("threads", 0), ("log", 5), ("log", "csv"), ("log", None)),
        *(("gpu_budget", "4G"), ("store", None), ("store", 5), ("residual", 1), ("residual", None), ("seed", 2**63)),
    ],
)
def test_values_that_only_look_like_an_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RunError, match=rf"^run/config\.json is damaged: {name} cannot be "):
        TrainSettings.from_config(usual(**{name: value}), Path("run"))


def test_budgets_are_shares_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000)
    assert memory.default_budgets(None) == (250, 500)
    assert memory.default_budgets(2000) == (1800, 500)


def test_types_of_numbers_go_by_the_names_that_torch_users_give_them() -> None:
    context = command.make_context("train", ["/s.ooc", "--amp", "bf16", "--spill-dtype", "BF16"])
    assert (context.params["dtype"], context.params["spill_dtype"]) == ("bfloat16", "bfloat16")


def test_models_go_by_any_case() -> None:
    from ooc.cli.train import command

    for name, model in (("GCN", "gcn"), ("GATv2", "gatv2"), ("GraphSAGE", "sage"), ("Sage", "sage")):
        assert command.make_context("train", ["a.ooc", "--model", name]).params["model"] == model


def test_budgets_keep_to_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU both are of the same RAM; the smaller one is kept where it takes no more than half."""
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000)
    asked = {(400, 600): (400, 600), (900, 100): (900, 100), (900, 300): (700, 300), (900, 900): (500, 500)}
    for budgets, kept in asked.items():
        assert memory.budgets_within(*budgets, device_free_bytes=None) == kept
    assert memory.budgets_within(100, 9000, device_free_bytes=None) == (100, 900)
    assert memory.budgets_within(9000, 9000, device_free_bytes=2000) == (2000, 1000)


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


@pytest.mark.parametrize("size", [512, 1024])
def test_batches_of_the_full_graph_are_refused(size: int) -> None:
    """Of any size, that of sampled ones by default included."""
    with pytest.raises(OptionError, match="--batch-size is of sampled"):
        check_sampling(TrainSettings(store="g.ooc", batch_size=size))
