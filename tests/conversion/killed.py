# SPDX-License-Identifier: Apache-2.0
"""A conversion in small steps that kills itself, in a process of its own.

It counts what it does to the file system within OUT's folder (opening, making, renaming, removing) by the
interpreter's audit events, and sends itself SIGKILL right before the AT-th of these.
"""

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ooc.conversion import conversion, output
from ooc.conversion.budget import Shares

_WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def run(source: str, out: Path, at: int, options: dict[str, Any]) -> int | None:
    """Convert, and be killed right before the ``at``-th event: None; with 0, or past the last one, it ends: how many
    there were. Raises for any other end."""
    told, tell = os.pipe()
    child = os.fork()  # everything is imported: a new interpreter takes ten times as long as what it would do
    if child == 0:
        try:
            os.write(tell, str(_convert(source, str(out), at, options)).encode())
        except BaseException:
            os.write(tell, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as pipe:
        found = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return None
    if status:
        raise RuntimeError(found)
    return int(found)


def kills_until_the_end(source: str, out: Path, draw: Callable[[], int], options: dict[str, Any]) -> int:
    """How often it was killed, each time after as many events as are drawn, before it had ended."""
    kills = 0
    try:
        while run(source, out, draw(), options) is None:
            kills += 1
    except RuntimeError as error:  # it was killed when nothing was left to be done
        assert kills and "exists; give force=True" in str(error)
    return kills


def _convert(source: str, out: str, at: int, options: dict[str, Any]) -> int:
    tiny = Shares(sort_keys=700, edges=500, feature_rows=190, label_rows=600, sort_workers=2)
    conversion.divide = lambda *args, **kwargs: tiny
    output._FLUSH_EVERY_S = 0.0
    folder, count = os.path.dirname(out), itertools.count(1)  # noqa: PTH120 - no Path in an audit hook

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _WATCHED and str(arguments[0]).startswith(folder) and next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    conversion.convert(source, out, **options)
    return next(count) - 1
