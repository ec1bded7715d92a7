# SPDX-License-Identifier: Apache-2.0
"""The lock that keeps two processes out of one run's folder; it ends with the process that has it, in whatever way."""

import errno
import fcntl
import os
from pathlib import Path

from ooc.errors import RunError

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
"""What some network file systems answer; a run is only less protected there."""


def lock_folder(path: Path) -> int:
    """An open, locked descriptor of the folder; closed, it gives the lock back. RunError where another process has it,
    OSError where it cannot be asked for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(f"another process is using the run at {path}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
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
