# SPDX-License-Identifier: Apache-2.0
"""Measure the disk of a folder, through the engine that training would use there.

An unnamed file is written once, so that bytes are read and not holes. Then it is read and written for moments, in
requests of several sizes at random places. A drive that is only fast until a cache is full looks that fast here, too.
The bytes are random; otherwise a disk that compresses would look faster.
"""

import random
import shutil
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import numpy as np

from ooc.errors import BudgetError
from ooc.interruption import stop_if_asked
from ooc.plan.hardware import Curve, Disk
from ooc.prefetch.arena import Arena
from ooc.prefetch.engine import Span, Ticket
from ooc.prefetch.engines.choice import choose_engine
from ooc.prefetch.spill import create_spill
from ooc.sizes import format_size

FILE_BYTES = 512 << 20
READ_SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
WRITE_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_BOTH_WAYS_SIZE = 1 << 20
_MEMORY_BYTES = 64 << 20
_MOST_IN_FLIGHT = 64
_WINDOW_S = 0.08
_WINDOWS = 3
_LABEL = "the profile"


def measure_disk(folder: Path) -> Disk:
    """Measure for about three seconds and leave nothing in ``folder``. Raises BudgetError if it has no room for the
    file."""
    free = shutil.disk_usage(folder).free
    if free < 2 * FILE_BYTES:
        raise BudgetError(
            f"measuring the disk of {folder} needs a file of {format_size(FILE_BYTES)}, where {format_size(free)} are "
            "free; give another spill_dir="
        )
    with ExitStack() as stack:
        return _Probe(folder, FILE_BYTES, stack).run()


class _Probe:
    """Requests kept in flight over one file of ``folder``, until ``stack`` is closed."""

    def __init__(self, folder: Path, file_bytes: int, stack: ExitStack) -> None:
        self._engine, _ = choose_engine(folder)
        stack.callback(self._engine.close)
        self._file, self._file_bytes = create_spill(folder, _LABEL, file_bytes), file_bytes
        stack.callback(self._file.close)
        self._arena = Arena(_MEMORY_BYTES)
        stack.callback(self._arena.close)
        self._random = random.Random(0)
        self._in_flight: deque[Ticket] = deque()

    def run(self) -> Disk:
        self._fill()
        reads = tuple((float(size), self._rate(size, _depth(size), 1.0)) for size in READ_SIZES)
        writes = tuple((float(size), self._rate(size, _depth(size), 0.0)) for size in WRITE_SIZES)
        both = self._rate(_BOTH_WAYS_SIZE, _depth(_BOTH_WAYS_SIZE), 0.5)
        return Disk(
            read_bytes_per_s=Curve(reads),
            write_bytes_per_s=Curve(writes),
            # At worst, requests of both directions alternate; more than the slower one is never lost.
            both_ways_bytes_per_s=max(both, min(reads[-1][1], writes[-1][1])),
            latency_s=READ_SIZES[0] / self._rate(READ_SIZES[0], 1, 1.0),
        )

    def _fill(self) -> None:
        """Fill memory with random bytes, which repeat after as many as there is memory."""
        memory = self._arena.view(0, _MEMORY_BYTES)
        memory[:] = np.frombuffer(np.random.default_rng(0).bytes(_MEMORY_BYTES), dtype=np.uint8)
        size = READ_SIZES[-1]
        for offset in range(0, self._file_bytes, size):
            self._send(offset, size, offset // size, writing=True)
            self._collect(_depth(size) - 1)
        self._collect(0)

    def _rate(self, size: int, depth: int, reads: float) -> float:
        """Return bytes per second with ``depth`` requests in flight, a fraction ``reads`` of them reads: the best of
        some rounds."""
        return max(self._window(size, depth, reads) for _ in range(_WINDOWS))

    def _window(self, size: int, depth: int, reads: float) -> float:
        begun = perf_counter()
        moved = number = 0
        while perf_counter() - begun < _WINDOW_S:
            stop_if_asked()
            offset = size * self._random.randrange(self._file_bytes // size)
            self._send(offset, size, number % depth, writing=self._random.random() >= reads)
            self._collect(depth - 1)
            moved += size
            number += 1
        self._collect(0)
        return moved / (perf_counter() - begun)

    def _send(self, offset: int, size: int, place: int, *, writing: bool) -> None:
        memory = self._arena.view(place * size % _MEMORY_BYTES, size)
        spans = [Span(self._file, offset, size, _LABEL)]
        self._in_flight.append(self._engine.write(spans, memory) if writing else self._engine.read(spans, memory))

    def _collect(self, left: int) -> None:
        """Wait for requests, in the order sent, until only ``left`` are in flight."""
        while len(self._in_flight) > left:
            self._in_flight.popleft().wait()


def _depth(size: int) -> int:
    """Return how many requests of ``size`` the engine keeps in flight and the memory has room for."""
    return max(1, min(_MOST_IN_FLIGHT, _MEMORY_BYTES // size))
