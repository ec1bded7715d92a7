# SPDX-License-Identifier: Apache-2.0
"""``ooc doctor`` says what is, finds what is wrong, and has one remedy for each."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ooc.report import machine
from tests.cli.conftest import RunCommand


def report_of(run: RunCommand, *arguments: str | Path) -> dict[str, Any]:
    code, out, err = run("doctor", *arguments, "--json")
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


def remedies(report: dict[str, Any]) -> dict[str, str]:
    return {problem["what"]: problem["remedy"] for problem in report["problems"]}


def test_it_says_which_engine_is_used_and_why(run: RunCommand, tmp_path: Path) -> None:
    disk = report_of(run, tmp_path)["facts"]["disk"]
    assert disk["folder"] == str(tmp_path)
    assert disk["engine"] in ("direct", "buffered")
    assert disk["filesystem"] in disk["why"]
    assert disk["to_a_gpu"] == "by way of host memory"
    assert disk["free_bytes"] > 0
    assert disk["gpudirect"] == (disk["gpudirect_lacks"] == [])
    assert list(tmp_path.iterdir()) == []


def test_budgets_stay_below_what_is_free(run: RunCommand, tmp_path: Path) -> None:
    memory = report_of(run, tmp_path)["facts"]["memory"]
    taken = memory["default_gpu_budget_on_cpu_bytes"] + memory["default_host_budget_bytes"]
    assert 0 < taken < memory["free_bytes"] <= memory["total_bytes"]
    assert memory["left_bytes"] == memory["free_bytes"] - taken


def test_people_read_lines(run: RunCommand, here: Path) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for line in ("disk\n", "memory\n", "processors\n", "gpu\n", "libraries\n", "  engine ", "  torch ", " GB\n"):
        assert line in out
    assert "\nverdict: " in out and "\nwhat would help most\n  1. " in out
    assert all(len(line) <= 80 for line in out.splitlines() if "/" not in line)
    assert "gpudirect" not in out and "budget" not in out  # there is no GPU


def test_a_missing_folder_is_a_problem_with_a_remedy(run: RunCommand, tmp_path: Path) -> None:
    missing = tmp_path / "a" / "b"
    report = report_of(run, missing)
    assert report["facts"]["disk"]["folder"] == str(tmp_path)
    assert remedies(report)[f"{missing} does not exist; looked at {tmp_path} instead"] == f"mkdir -p {missing}"
    code, out, _ = run("doctor", missing)
    assert code == 0 and "\n  1. " in out and f"→ mkdir -p {missing}\n" in out


def test_a_file_is_no_folder(run: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = report_of(run, tmp_path / "file")
    assert remedies(report)[f"{tmp_path / 'file'} is no folder; looked at {tmp_path} instead"] == "name a folder"


def test_a_folder_that_cannot_be_written_to(run: RunCommand) -> None:
    report = report_of(run, "/proc")
    assert "give --spill-dir a folder that you may write to" in remedies(report).values()


def test_refused_o_direct_and_a_full_memory_filesystem(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Path | str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    report = report_of(run, tmp_path)
    assert report["facts"]["disk"]["engine"] == "buffered"
    assert report["facts"]["disk"]["o_direct"] == "refused"
    assert "give --spill-dir a folder on a local disk" in remedies(report).values()
    monkeypatch.setattr(machine, "filesystem_of", lambda _: "tmpfs")
    assert "give --spill-dir a folder on a disk" in remedies(report_of(run, tmp_path)).values()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EAGAIN, "sysctl -w fs.aio-max-nr=1048576 (as root)"),
        (errno.EPERM, "allow io_setup, io_submit, io_getevents and io_destroy"),
        (errno.ENOSYS, "run on a kernel built with CONFIG_AIO"),
    ],
)
def test_no_kernel_queue(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(self: object, depth: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ooc.prefetch.engines.kernel_queue.KernelQueue.__init__", refuse)
    found = remedies(report_of(run, tmp_path))
    assert found[f"io_submit is not to be had: {os.strerror(number)}"].startswith(remedy)


def test_threads_memory_and_disk(run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than processors, no huge pages, a disk smaller than the budgets."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(machine, "_HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr("ooc.memory.available_memory_bytes", lambda: 1 << 60)
    found = " | ".join(f"{what} → {remedy}" for what, remedy in remedies(report_of(run, tmp_path)).items())
    assert "OMP_NUM_THREADS is 4096, but only" in found and "→ export OMP_NUM_THREADS=" in found
    assert "huge pages are off" in found and "→ echo madvise > " in found
    assert "less than the memory of" in found
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 1 << 20)
    assert "a control group allows 1.05 MB of the machine's" in str(report_of(run, tmp_path)["hints"])


def test_the_verdict_is_of_what_is_worst(run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "_PROFILE_FOLDER", tmp_path / "none")
    assert report_of(run, "/proc")["verdict"].startswith("training cannot work there: ")
    code, out, _ = run("doctor", tmp_path)
    assert code == 0 and "estimates of another machine" in out and "→ ooc profile --spill-dir" in out
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    found = report_of(run, tmp_path)
    assert found["verdict"].startswith("training works, but ") and found["hints"][0]["remedy"].startswith("ooc profile")
    first = run("doctor", tmp_path)[1].split("what would help most\n")[1]
    assert "ooc profile" not in first.splitlines()[1]  # what is wrong goes before what would be better
