# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the engines runs, and moves what it says."""

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_io"


@pytest.fixture
def bench_io(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool as a module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader = SourceFileLoader("bench_io", str(TOOL))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)  # its dataclasses look themselves up there
    loader.exec_module(module)
    return module


def test_every_engine_and_case_is_measured(tmp_path: Path) -> None:
    small = ["--file-size", "8MiB", "--run-size", "8MiB", "--rounds", "1", "--no-fio"]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, TOOL, "--folder", tmp_path, "--json", report, *small], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    assert {result["case"].split()[0] for result in results} == {"read", "randread", "write"}
    for result in results:
        ways = {way["way"]: way for way in result["ways"]}
        assert set(ways) == {"direct", "direct, threads", "buffered"}
        assert all(way["bytes_per_s"] > 0 and way["ratio"] is None for way in ways.values())
        assert all(f"{result['case']} " in done.stdout and way in done.stdout for way in ways)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_interpreters_share_is_of_all_rounds_together(bench_io: ModuleType) -> None:
    """A round alone says little: its processor time outside the kernel is known from few samples."""
    case = bench_io.Case("read", 1 << 20, 8, 0.9)
    runs = [bench_io.Run(100 << 20, seconds, python_s) for seconds, python_s in ((1.0, 0.1), (3.0, 0.0))]
    assert bench_io.python_share(case, runs) == {
        "python_share": pytest.approx(0.025),
        "python_share_error": pytest.approx(0.05),
        "python_s_per_request": pytest.approx(0.1 / 400),
    }
    assert bench_io.python_share(case, runs[:1])["python_share_error"] is None
    assert set(bench_io.python_share(case, [bench_io.Run(1e9)]).values()) == {None}
