# SPDX-License-Identifier: Apache-2.0
"""The tests that are marked ``gpu``, in processes of their own."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_parts.report import Failed, LeftOut

TOOLS = Path(__file__).resolve().parent.parent
FIRST = ("test_sums.py", "test_training.py", "test_segments.py", "test_gat.py", "test_maximum.py", "test_dropout.py")
NEEDED = ("pytest", "pytest_timeout", "hypothesis", "triton")
MOST_PROCESSES = 8
"""Each has a context on the GPU, of some hundred megabytes."""
_NO_TESTS = 5
"""Pytest's status where there is nothing to run."""


def run_tests(
    limit_s: float, arguments: tuple[str, ...] = (), processes: int | None = None, files: Sequence[str] = ()
) -> dict[str, Any]:
    """How many passed and how many were skipped, as far as they got in ``limit_s``; of ``files`` below tests/gpu, or of
    all there are.

    Compiling kernels takes most of the time, on one core: so ``processes`` share the tests, by default one for two
    cores. Raises ``Failed`` where a test did not pass.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOut(f"{', '.join(missing)} cannot be imported")
    count = processes or max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))
    run_share = partial(_run_share, command=[*_files(files), *arguments], limit_s=limit_s, count=count)
    with ThreadPoolExecutor(count) as threads:
        shares = list(threads.map(run_share, range(count)))
    counts: Counter[str] = sum((share.counts for share in shares), Counter())
    lacking = sorted({name for share in shares for name in share.lacking})
    told = ", ".join(f"{number} {word}" for word, number in sorted(counts.items())) or "none ended"
    late = any(share.late for share in shares)
    if late:
        told = f"ended after {limit_s:.0f} s: {told}"
    if wrong := [share.wrong for share in shares if share.wrong]:
        raise Failed("; ".join([told, *wrong]))
    if counts["failed"] or counts["error"] or not (late or counts):
        raise Failed(told)
    told_too = {"ended_after_s": limit_s} if late else {}
    return {**counts, "processes": count, **told_too, **({"cannot_be_imported": lacking} if lacking else {})}


@dataclass(frozen=True)
class _Share:
    """What a process has told. ``wrong``: of what went wrong, if it ended. ``late``: it had to be ended. ``lacking``:
    packages for want of which files of tests were skipped, as far as it came to tell."""

    counts: "Counter[str]"
    wrong: str = ""
    late: bool = False
    lacking: tuple[str, ...] = ()


def _run_share(number: int, *, command: Sequence[str], limit_s: float, count: int) -> _Share:
    """Every ``count``-th of the tests, from ``number`` on."""
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-m", "gpu", "-p", "no:cacheprovider", *command]
    command += ["--timeout=0"]  # the part's own limit holds: of a test on a GPU, most of the time may be compiling
    path = os.pathsep.join([str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [*command, "-p", "gpu_parts.share"],
            cwd=TOOLS.parent,
            env={**os.environ, "PYTHONPATH": path, "GPU_CHECK_SHARE": f"{number}/{count}"},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        words = re.findall(r"^tests/\S+.* (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE)
        return _Share(Counter(word.lower() for word in words), late=True)
    counts = Counter(
        {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    )
    lacking = tuple(re.findall(r"^SKIPPED .* (\S+) cannot be imported$", done.stdout, re.MULTILINE))
    if done.returncode in (0, _NO_TESTS):
        return _Share(counts, lacking=lacking)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    told = "; ".join(lines[:5] or (done.stderr or done.stdout).strip().splitlines()[-5:])
    return _Share(counts, f"pytest ended with {done.returncode}: {told}")


def _files(wanted: Sequence[str]) -> list[str]:
    """Those first that training depends on most: compiling takes its time, and not all of them may be reached."""
    found = wanted or sorted(path.name for path in (TOOLS.parent / "tests" / "gpu").glob("test_*.py"))
    first = [name for name in FIRST if name in found]
    ordered = [*first, *(name for name in found if name not in first)]
    return [f"tests/gpu/{name}" for name in ordered]
