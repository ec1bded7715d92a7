# SPDX-License-Identifier: Apache-2.0
"""A disk that misbehaves at random, the same way for the same seed, below everything an engine does."""

import errno
import os
import random
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ooc.prefetch.engines.direct import DirectEngine
from ooc.prefetch.engines.kernel_queue import Batch, KernelQueue
from ooc.prefetch.engines.plain import SystemCalls

PAGE = 4096
UNCHECKED: Any = SimpleNamespace(check_read=lambda block, memory: None, note_write=lambda block, memory: None)
"""Looks at no block."""


@dataclass
class Faults:
    """How often each fault strikes a request, from 0 to 1. ``full`` is a write that finds the disk full, ``wrong`` a
    read that brings one bit otherwise than it is, where system calls are made one by one. ``silent_after``: so many
    requests, or rounds of them, the disk does not answer any more."""

    seed: int = 0
    short: float = 0.0
    broken: float = 0.0
    full: float = 0.0
    interrupted: float = 0.0
    wrong: float = 0.0
    late: float = 0.0
    late_s: float = 0.01
    silent_after: int | None = None
    answer: threading.Event = field(default_factory=threading.Event)
    struck: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def _strikes(self, chance: float) -> bool:
        with self.lock:
            strikes = self._random.random() < chance
            self.struck += strikes
        return strikes

    def delay(self) -> None:
        """Sometimes take long, or until there is an ``answer``."""
        if self.silent_after is not None:
            with self.lock:
                self.silent_after -= 1
            if self.silent_after < 0:
                self.answer.wait()
        if self._strikes(self.late):
            time.sleep(self.late_s)

    def interrupt(self) -> None:
        """Sometimes have a signal come in between."""
        if self._strikes(self.interrupted):
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    def error(self, *, writing: bool) -> int:
        """Sometimes an error number, otherwise 0."""
        if self._strikes(self.broken):
            return errno.EIO
        if writing and self._strikes(self.full):
            return errno.ENOSPC
        return 0

    def falsify(self, memory: memoryview) -> None:
        """Sometimes change a bit."""
        if len(memory) and self._strikes(self.wrong):
            with self.lock:
                memory[self._random.randrange(len(memory))] ^= 1 << self._random.randrange(8)

    def shorten(self, nbytes: int) -> int:
        """Sometimes less than ``nbytes``: whole pages, as O_DIRECT leaves off, or any number within the last page."""
        if nbytes < 2 or nbytes == PAGE or not self._strikes(self.short):
            return nbytes
        with self.lock:
            if nbytes < PAGE:
                return self._random.randrange(1, nbytes)
            return self._random.randrange(1, -(-nbytes // PAGE)) * PAGE


class FaultyCalls(SystemCalls):
    """The calls of ``inner`` on that disk."""

    def __init__(self, faults: Faults, inner: SystemCalls | None = None) -> None:
        self.faults = faults
        self.inner = inner or SystemCalls()

    def read_at(self, descriptor: int, memory: memoryview, offset: int) -> int:
        nbytes = self._before(len(memory), writing=False)
        got = self.inner.read_at(descriptor, memory[:nbytes], offset)
        self.faults.falsify(memory[:got])
        return got

    def write_at(self, descriptor: int, memory: memoryview, offset: int) -> int:
        nbytes = self._before(len(memory), writing=True)
        return self.inner.write_at(descriptor, memory[:nbytes], offset)

    def _before(self, nbytes: int, *, writing: bool) -> int:
        self.faults.delay()
        self.faults.interrupt()
        if code := self.faults.error(writing=writing):
            raise OSError(code, os.strerror(code))
        return self.faults.shorten(nbytes)


class FaultyQueue(KernelQueue):
    """The kernel's queue on that disk: results are made worse than they were, and it is sometimes full."""

    def __init__(self, depth: int, faults: Faults) -> None:
        super().__init__(depth)
        self.faults = faults
        self._written: set[int] = set()

    def submit(self, requests: Batch, first: int, count: int) -> int:
        self.faults.interrupt()
        if self.faults._strikes(self.faults.interrupted):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        count = self.faults.shorten(count) if count < PAGE else count
        if requests.writing:
            self._written.update(range(requests.first_tag + first, requests.first_tag + first + count))
        return super().submit(requests, first, count)

    def reap(self, minimum: int, maximum: int) -> list[tuple[int, int]]:
        self.faults.delay()
        if self.faults._strikes(self.faults.interrupted):
            return []
        return [(tag, self._worsened(tag, result)) for tag, result in super().reap(minimum, maximum)]

    def _worsened(self, tag: int, result: int) -> int:
        if result <= 0:
            return result
        return -self.faults.error(writing=tag in self._written) or self.faults.shorten(result)


def faulty_engine(faults: Faults, **options: int) -> DirectEngine:
    """The direct engine on that disk."""
    return DirectEngine(calls=FaultyCalls(faults), queue=lambda depth: FaultyQueue(depth, faults), **options)
