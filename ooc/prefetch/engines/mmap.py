# SPDX-License-Identifier: Apache-2.0
"""Plain reading through a memory map: for files that are warm or tiny, and as a second opinion on the others.

Touching a map where the disk fails would kill the process (SIGBUS). So the pages are populated first by a call
that reports the failure instead (``MADV_POPULATE_READ``, Linux 5.14), and the file's length is checked before.
"""

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from ooc.errors import SpillError
from ooc.prefetch.arena import Bytes
from ooc.prefetch.engines.plain import SystemCalls, ThreadEngine
from ooc.prefetch.engines.seam import Span, Ticket

MADV_POPULATE_READ = 22
_EHWPOISON = 133  # named by Python's errno from 3.14 on


class MappedCalls(SystemCalls):
    """Reads as copies out of a map of the range; needs no aligned memory and leaves the file's pages cached."""

    def read_at(self, descriptor: int, memory: memoryview, offset: int) -> int:
        """As a system call would: bytes read, 0 at the end of the file, OSError where the disk fails."""
        nbytes = min(len(memory), os.fstat(descriptor).st_size - offset)
        if nbytes <= 0:
            return 0
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = offset + nbytes - start
        with mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as window:
            self.populate(window)
            # The copies of numpy, unlike those of memoryview, let other threads run.
            source = np.frombuffer(window, dtype=np.uint8, count=nbytes, offset=offset - start)
            np.frombuffer(memory, dtype=np.uint8)[:nbytes] = source
            del source  # or the map could not be closed
        return nbytes

    def populate(self, window: mmap.mmap) -> None:
        """Bring the pages in; OSError where touching them would kill."""
        try:
            window.madvise(MADV_POPULATE_READ)
        except OSError as error:
            if error.errno in (errno.EFAULT, _EHWPOISON):
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
            raise


class MmapEngine(ThreadEngine):
    """Reads only."""

    name = "mmap"

    def __init__(
        self,
        *,
        threads: int = 4,
        bulk_threads: int = 2,
        piece_bytes: int = 4 << 20,
        calls: SystemCalls | None = None,
    ) -> None:
        super().__init__(
            calls=calls or MappedCalls(), threads=threads, bulk_threads=bulk_threads, piece_bytes=piece_bytes
        )

    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        """Refused: a full disk under a map cannot be told from a crash."""
        labels = ", ".join(dict.fromkeys(span.label for span in spans))
        raise SpillError(f"{labels}: the mmap engine only reads")
