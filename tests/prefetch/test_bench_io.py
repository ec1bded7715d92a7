# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the engines runs, and moves what it says."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_io"


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
        assert {"direct", "buffered"} <= set(ways)
        assert ("mmap" in ways) == (not result["case"].startswith("write"))
        assert all(way["bytes_per_s"] > 0 and way["ratio"] is None for way in ways.values())
        assert all(f"{result['case']} " in done.stdout and way in done.stdout for way in ways)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
