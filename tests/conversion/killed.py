# SPDX-License-Identifier: Apache-2.0
"""A conversion in small steps that kills itself: ``python -m tests.conversion.killed SOURCE OUT AT OPTIONS``.

It counts what it does to the file system within OUT's folder (opening, making, renaming, removing) by the
interpreter's audit events, and sends itself SIGKILL right before the AT-th of these; with AT = 0 it ends, and prints
how many there were. OPTIONS: JSON of ``ooc.convert``'s.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def run(source: str, out: Path, at: int, options: dict[str, Any]) -> int | None:
    """Run it in a process of its own: what it counted, or None if it was killed. Raises for any other end."""
    command = [sys.executable, "-m", __name__, source, str(out), str(at), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if done.returncode == -signal.SIGKILL:
        return None
    if done.returncode:
        raise RuntimeError(f"{done.stdout} {done.stderr}")
    return int(done.stdout)


def _main(source: str, out: str, at: int, options: dict[str, Any]) -> None:
    from ooc.conversion import conversion, journal
    from ooc.conversion.budget import Shares

    tiny = Shares(sort_keys=700, edges=500, feature_rows=190, label_rows=600, sort_workers=2)
    conversion.divide = lambda *args, **kwargs: tiny
    os.fsync = lambda descriptor: None  # What a killed process has written is not lost; this is for the machine's end.
    journal._LEAST_SECONDS, journal._MOST_SHARE = 0.0, float("inf")
    folder, count = os.path.dirname(out), itertools.count(1)  # noqa: PTH120 - no Path in an audit hook

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _WATCHED and str(arguments[0]).startswith(folder) and next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    conversion.convert(source, out, **options)
    print(next(count) - 1)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
