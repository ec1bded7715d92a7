# SPDX-License-Identifier: Apache-2.0
"""How fast this machine reads, writes, inflates and sorts: measured in a few seconds, for a forecast."""

import os
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ooc.errors import BudgetError

_FILE_BYTES = 128 << 20
_BLOCK_BYTES = 4 << 20
_KEYS = 1 << 20
_SORTED_KEYS = 1 << 22  # A bucket's size: sorting slows with it.


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes a second of the disk and of inflating; keys a second of spreading over buckets and sorting by one core."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    inflate_bytes_per_s: float
    spread_keys_per_s: float
    sort_keys_per_s: float
    copy_bytes_per_s: float


def measure(folder: Path) -> Rates:
    """The rates of this machine with the disk that ``folder`` is on; nothing stays there. BudgetError where a small
    file cannot be written."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 50, _KEYS, dtype=np.uint64)
    many = rng.integers(0, 1 << 50, _SORTED_KEYS, dtype=np.uint64)
    # Ids as edges have them: about the mean of what deflated arrays of ids and of floats inflate at.
    packed = zlib.compress(rng.integers(0, 10**8, _KEYS).tobytes(), 1)
    rows = rng.standard_normal((1 << 13, 128))
    read_seconds, write_seconds = _disk_seconds(folder, rng.bytes(_BLOCK_BYTES))
    parts = (keys >> np.uint64(43)).astype(np.uint8)
    return Rates(
        read_bytes_per_s=_FILE_BYTES / read_seconds,
        write_bytes_per_s=_FILE_BYTES / write_seconds,
        inflate_bytes_per_s=keys.nbytes / _seconds(lambda: zlib.decompress(packed)),
        spread_keys_per_s=_KEYS / _seconds(lambda: keys[np.argsort(parts, kind="stable")].min()),
        sort_keys_per_s=_SORTED_KEYS / _seconds(lambda: np.sort(many)),
        copy_bytes_per_s=rows.nbytes / 2 / _seconds(lambda: np.isfinite(rows.astype(np.float32)).all()),
    )


def _seconds(work: Callable[[], object]) -> float:
    """Of the faster of two times: the first one warms up."""
    found = []
    for _ in range(2):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)


def _disk_seconds(folder: Path, block: bytes) -> tuple[float, float]:
    """``(read, write)`` seconds of a file, flushed, and read when the system no longer has it in memory."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begun = time.perf_counter()
            for _ in range(_FILE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            written = time.perf_counter() - begun
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begun = time.perf_counter()
            while file.read(len(block)):
                pass
            return time.perf_counter() - begun, written
    except OSError as error:
        raise BudgetError(f"the disk of {folder} cannot be measured: {error.strerror}") from error
