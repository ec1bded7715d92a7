# SPDX-License-Identifier: Apache-2.0
"""The process's standard streams as every command may rely on them: there, and able to take any text."""

import io
import os
import sys
from pathlib import Path
from typing import TextIO

_STANDARD = (0, 1, 2)


def prepare_streams() -> None:
    """Stand in for streams that are closed, and let a terminal that is not UTF-8 show what it cannot as ``\\uXXXX``."""
    _open_descriptors()
    # Python has None for a stream that was closed when it started: what would be written there is not wanted.
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _open_descriptors() -> None:
    """The next file that is opened would get the number of a closed stream, and what a library prints with it."""
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == descriptor:
                os.set_inheritable(descriptor, True)
            else:
                os.dup2(opened, descriptor)
                os.close(opened)


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
