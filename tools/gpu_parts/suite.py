# SPDX-License-Identifier: Apache-2.0
"""The tests that are marked ``gpu``, in a process of their own."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_parts.report import Failed, LeftOut

CHECKOUT = Path(__file__).resolve().parent.parent.parent
NEEDED = ("pytest", "pytest_timeout", "hypothesis", "triton")


def run_tests(limit_s: float, arguments: tuple[str, ...] = ()) -> dict[str, Any]:
    """How many passed and how many were skipped. Raises ``Failed`` where one did not pass."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOut(f"{', '.join(missing)} cannot be imported")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise LeftOut(f"not done after {limit_s:.0f} s") from None
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
        told = "; ".join(lines[:5] or (done.stderr or done.stdout).strip().splitlines()[-5:])
        raise Failed(f"pytest ended with {done.returncode}: {told}")
    return counts
