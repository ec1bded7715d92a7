# SPDX-License-Identifier: Apache-2.0
"""``ooc profile`` measures once, shows what it knows, and training goes by it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ooc import profile as profiling
from ooc.events import Listener, Note
from ooc.plan import UNMEASURED
from ooc.plan.hardware import Curve
from ooc.profile import Profile
from tests.cli.conftest import RunCommand

TRAIN = ["--hidden", "16", "--layers", "2", "--gpu-budget", "32M", "--host-budget", "32M", "--epochs", "1"]
MEASURED = replace(
    UNMEASURED,
    disk=replace(UNMEASURED.disk, read_bytes_per_s=Curve(((float(1 << 20), 2.5e9),)), latency_s=1.5e-4),
    processor=replace(UNMEASURED.processor, multiplies_per_s={"float32": 7.5e10}),
    overlap=0.83,
)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An empty cache, and the folders that were measured from here on, in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders: list[Path] = []

    def measure(folder: Path, listener: Listener, *, device: str) -> Profile:
        folders.append(folder)
        listener(Note("measuring"))
        hardware = replace(MEASURED, name="a machine", source=f"measurement {len(folders)}")
        return Profile(hardware, "2026-01-02T03:04:05+00:00")

    monkeypatch.setattr(profiling, "measure", measure)
    return folders


def test_it_measures_once_and_shows_a_table(run: RunCommand, calls: list[Path], tmp_path: Path) -> None:
    code, out, err = run("profile", "--spill-dir", tmp_path, "--device", "cpu")
    assert (code, err) == (0, "measuring\n")
    for text in ("2.50 GB/s", "150.0 µs", "75 G multiply-adds/s", "a machine, 2 threads"):
        assert text in out
    code, again, err = run("profile", "--spill-dir", tmp_path, "--device", "cpu")
    assert (code, err) == (0, "") and "--refresh measures again" in again
    assert calls == [tmp_path]


def test_a_profile_made_on_a_busy_machine_says_so(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for others, warns in ((0.62, True), (0.02, False)):
        made = Profile(UNMEASURED, "2026-01-02T03:04:05+00:00", others)
        monkeypatch.setattr(profiling, "measure", lambda *arguments, made=made, **options: made)
        _, out, _ = run("profile", "--spill-dir", tmp_path, "--device", "cpu", "--refresh")
        assert ("other programs had 62 % of the processors meanwhile" in out) is warns


def test_refresh_measures_again(run: RunCommand, calls: list[Path], tmp_path: Path) -> None:
    for _ in range(2):
        assert run("profile", "--spill-dir", tmp_path, "--device", "cpu", "--refresh")[0] == 0
    assert len(calls) == 2


def test_json_is_the_profile_and_nothing_else(run: RunCommand, calls: list[Path], tmp_path: Path) -> None:
    code, out, err = run("profile", "--spill-dir", tmp_path, "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    found = Profile.from_dict(json.loads(out), where="here")
    assert found.hardware.name == "a machine"
    assert {"what": "SSD read", "setting": "1 MiB requests", "value": 2.5e9, "unit": "B/s"} in json.loads(out)[
        "readings"
    ]


def test_a_folder_that_is_not_there_is_one_line(run: RunCommand, calls: list[Path], tmp_path: Path) -> None:
    code, out, err = run("profile", "--spill-dir", tmp_path / "missing", "--device", "cpu")
    assert (code, out) == (2, "") and err == f"ooc: error: --spill-dir: {tmp_path / 'missing'} is no folder\n"
    assert calls == []


def test_training_says_how_to_measure_until_somebody_has(
    run: RunCommand, calls: list[Path], graph: Path, tmp_path: Path
) -> None:
    spill = ["--spill-dir", str(tmp_path)]
    code, out, _ = run("train", graph, *TRAIN, *spill, "--out", tmp_path / "a")
    hint = f"(estimates; ooc profile --spill-dir {tmp_path} measures this machine in 15 s)"
    assert code == 0 and hint in " ".join(out.split())
    assert calls == [], "training measures nothing by itself"
    assert run("profile", *spill, "--device", "cpu")[0] == 0
    code, out, _ = run("train", graph, *TRAIN, *spill, "--out", tmp_path / "b")
    assert code == 0 and "(estimates" not in out


def test_planning_goes_by_what_was_measured_here(
    run: RunCommand, calls: list[Path], graph: Path, tmp_path: Path
) -> None:
    plan = ["plan", graph, "--hidden", "16", "--gpu-budget", "32M", "--host-budget", "32M", "--no-advice", "--json"]
    plan += ["--spill-dir", tmp_path]
    assert json.loads(run(*plan)[1])["hardware"] == {"name": UNMEASURED.name, "source": UNMEASURED.source}
    assert run("profile", "--spill-dir", tmp_path, "--device", "cpu")[0] == 0
    assert json.loads(run(*plan)[1])["hardware"] == {"name": "a machine", "source": "measurement 1"}


def test_a_profile_describes_its_machine_elsewhere(
    run: RunCommand, calls: list[Path], graph: Path, tmp_path: Path
) -> None:
    _, out, _ = run("profile", "--spill-dir", tmp_path, "--device", "cpu", "--json")
    file = tmp_path / "box.json"
    file.write_text(out, encoding="utf-8")
    options = ["--gpu-budget", "32M", "--host-budget", "32M", "--no-advice", "--json"]
    code, planned, err = run("plan", graph, "--hardware", file, *options)
    assert (code, err) == (0, "") and json.loads(planned)["hardware"]["name"] == "a machine"
