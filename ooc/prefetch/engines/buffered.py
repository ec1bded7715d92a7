# SPDX-License-Identifier: Apache-2.0
"""Threads over the page cache, for folders where O_DIRECT is refused: tmpfs, some network filesystems."""

from ooc.prefetch.engines.plain import SystemCalls, ThreadEngine


class BufferedEngine(ThreadEngine):
    """What is written is done when the page cache has it; what is read may come from there.

    The page cache is outside any budget of ours: the kernel gives it up when memory runs short, except where
    the files are memory themselves (tmpfs).
    """

    name = "buffered"

    def __init__(
        self,
        *,
        threads: int = 4,
        bulk_threads: int = 2,
        piece_bytes: int = 4 << 20,
        calls: SystemCalls | None = None,
    ) -> None:
        super().__init__(
            calls=calls or SystemCalls(), threads=threads, bulk_threads=bulk_threads, piece_bytes=piece_bytes
        )
