# SPDX-License-Identifier: Apache-2.0
"""Scratch files that cannot outlive the process.

A spill file never has a name (``O_TMPFILE``; where a filesystem lacks that, it is unlinked as soon as it is open). So
the system frees it when the process ends, however that happens, and no later run can mistake it for its own. Its blocks
are allocated at once: a full disk is reported before training starts.
"""

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ooc.errors import SpillError
from ooc.prefetch.engine import OpenFile, open_direct
from ooc.sizes import format_size


def create_spill(folder: Path, label: str, nbytes: int, parts: Sequence[tuple[int, int]] | None = None) -> OpenFile:
    """Return a nameless file of ``nbytes`` in ``folder`` for the matrix ``label``; raise SpillError when that fails.

    ``parts``: the offsets and bytes that will be written (None: everything).
    """
    parts = [(0, max(nbytes, 1))] if parts is None else parts
    try:
        buffered = open_nameless(folder)
    except OSError as error:
        raise SpillError(f"{folder}: cannot create spill files there: {error.strerror}") from None
    path = Path(f"/proc/self/fd/{buffered}")
    try:
        os.ftruncate(buffered, max(nbytes, 1))
        for offset, length in parts:
            os.posix_fallocate(buffered, offset, length)
        direct = open_direct(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        os.close(buffered)
        room = format_size(sum(size for _, size in parts))
        raise SpillError(f"{folder}: no room for the {room} of {label}: {error.strerror}") from None
    return OpenFile(folder / f"<spill of {label}>", direct, buffered)


def open_nameless(folder: Path) -> int:
    """Return a descriptor, for reading and writing, of a file in ``folder`` that is removed with it; raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix="ooc-spill-", dir=folder)
    Path(name).unlink()
    return descriptor
