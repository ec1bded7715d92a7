# SPDX-License-Identifier: Apache-2.0
"""The lock that keeps two processes out of one run's folder; it ends with the process that has it, in whatever way."""

import fcntl
import os
from pathlib import Path

from ooc.errors import RunError
from ooc.storage.array import lock, lock_holder


def lock_folder(path: Path) -> int:
    """An open, locked descriptor of the folder; closed, it gives the lock back. RunError where another process has it,
    OSError where it cannot be asked for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise RunError(f"another process{lock_holder(path)} is using the run at {path}") from None
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether another process has the lock of the folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
