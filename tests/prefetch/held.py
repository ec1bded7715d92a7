# SPDX-License-Identifier: Apache-2.0
"""What a process holds: threads and descriptors."""

import threading
import time
from pathlib import Path


def held() -> tuple[int, int]:
    """Threads and open descriptors now."""
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def assert_no_more_held(before: tuple[int, int]) -> None:
    """Nothing more than ``before``, within two seconds."""
    deadline = time.monotonic() + 2
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, f"threads and descriptors held: {before} before, {held()} now"
        time.sleep(0.01)
