# SPDX-License-Identifier: Apache-2.0
"""The tests that are marked ``gpu``, in a process of their own."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_parts.report import Failed, LeftOut

CHECKOUT = Path(__file__).resolve().parent.parent.parent
FIRST = ("test_sums.py", "test_training.py", "test_segments.py", "test_gat.py", "test_maximum.py", "test_dropout.py")
OF_PYG = ("test_training.py", "test_memory.py", "test_edge_functions.py")
"""Files that cannot be collected without torch-geometric."""
NEEDED = ("pytest", "pytest_timeout", "hypothesis", "triton")


def run_tests(limit_s: float, arguments: tuple[str, ...] = ()) -> dict[str, Any]:
    """How many passed and how many were skipped, as far as they got in ``limit_s``.

    Raises ``Failed`` where one did not pass.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOut(f"{', '.join(missing)} cannot be imported")
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *_files(), "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        counts = Counter(re.findall(r"^tests/\S+.* (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE))
        told = ", ".join(f"{number} {word.lower()}" for word, number in sorted(counts.items())) or "none ended"
        if counts["FAILED"] or counts["ERROR"]:
            raise Failed(f"ended after {limit_s:.0f} s: {told}") from None
        return {**{word.lower(): number for word, number in counts.items()}, "ended_after_s": limit_s}
    counts = Counter(
        {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    )
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
        told = "; ".join(lines[:5] or (done.stderr or done.stdout).strip().splitlines()[-5:])
        raise Failed(f"pytest ended with {done.returncode}: {told}")
    return counts


def _files() -> list[str]:
    """Those first that training depends on most: compiling takes its time, and not all of them may be reached."""
    found = sorted(path.name for path in (CHECKOUT / "tests" / "gpu").glob("test_*.py"))
    first = [name for name in FIRST if name in found]
    ordered = [*first, *(name for name in found if name not in first)]
    if importlib.util.find_spec("torch_geometric") is None:
        ordered = [name for name in ordered if name not in OF_PYG]
    return [f"tests/gpu/{name}" for name in ordered]
