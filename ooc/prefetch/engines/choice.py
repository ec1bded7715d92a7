# SPDX-License-Identifier: Apache-2.0
"""The choice of an engine for a folder, by trying: a file is actually written and read there."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from ooc.memory import filesystem_of
from ooc.prefetch.engine import PAGE_BYTES, Counters, Engine, open_direct
from ooc.prefetch.engines import kvikio
from ooc.prefetch.engines.direct import BufferedEngine, DirectEngine
from ooc.prefetch.spill import open_nameless

BY_WAY_OF_HOST = "by way of host memory"
BY_GPUDIRECT = "straight to the GPU and back by GPUDirect where nothing waits in host memory"
"""The description of blocks' way from the SSD to a GPU and back."""

_PROBE_BYTES = 2 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class DirectProbe:
    """Whether O_DIRECT works in a folder. ``works`` is None where it could not be tried."""

    works: bool | None
    reason: str


def choose_engine(path: Path, *more: Path) -> tuple[Engine, str]:
    """Return the engine for files in these folders, and the reason for it. Never fails; unusable files fail later.

    One folder that supports O_DIRECT is enough for the direct engine, which reads files of other folders through the
    page cache.
    """
    probes = [probe_direct(folder) for folder in (path, *more)]
    if all(probe.works is False for probe in probes):
        return BufferedEngine(), probes[0].reason
    chosen = next((probe for probe in probes if probe.works), probes[0])
    engine = DirectEngine()
    return engine, f"{chosen.reason}; {engine.how}"


def choose_gpudirect(path: Path, *, device: str, counters: Counters) -> Engine | None:
    """Return the engine that moves data between files in ``path`` and a GPU's own memory; it shares ``counters``.

    That is KvikIO, where GPUDirect has been observed to work in both directions; otherwise None. KvikIO's bounce
    buffers are host memory too, and do not read ahead.
    """
    if device != "cuda" or not kvikio.probe(path).reaches_gpu:
        return None
    return kvikio.KvikioEngine(counters=counters)


def probe_direct(folder: Path) -> DirectProbe:
    """Write pages with O_DIRECT to a nameless file in ``folder`` and read them back."""
    filesystem = filesystem_of(folder)
    try:
        with os.fdopen(open_nameless(folder), "rb") as buffered:
            direct = open_direct(Path(f"/proc/self/fd/{buffered.fileno()}"), os.O_RDWR | os.O_CLOEXEC)
            if direct < 0:
                return DirectProbe(False, f"{filesystem} refuses O_DIRECT")
            try:
                return _move_pages(direct, filesystem)
            finally:
                os.close(direct)
    except OSError as error:
        return DirectProbe(None, f"{folder} cannot be written to ({error.strerror}), so each file is tried by itself")


def _move_pages(direct: int, filesystem: str) -> DirectProbe:
    with mmap.mmap(-1, _PROBE_BYTES) as written, mmap.mmap(-1, _PROBE_BYTES) as back:
        written[:] = bytes(range(256)) * (_PROBE_BYTES // 256)
        try:
            moved = os.pwritev(direct, [written], 0) == os.preadv(direct, [back], 0) == _PROBE_BYTES
        except OSError as error:
            return DirectProbe(False, f"{filesystem} takes O_DIRECT files but not their requests ({error.strerror})")
        if not moved or written[:] != back[:]:
            return DirectProbe(False, f"{filesystem} returns other bytes with O_DIRECT than were written")
    return DirectProbe(True, f"{filesystem} takes O_DIRECT")
