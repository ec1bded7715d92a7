# SPDX-License-Identifier: Apache-2.0
"""Below a device, blocks are looked at by another thread than the one that sends them and launches kernels."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ooc.errors import SpillError
from ooc.plan.program.program import Acquire
from ooc.plan.program.staging import CopyTo, Transfer
from ooc.prefetch.frames import Checks
from ooc.prefetch.transfers import Transfers

_DONE = SimpleNamespace(happened=True, wait=lambda: None, settle=lambda: None, of_stream=True)


class Looks:
    """Which thread has looked at what; one at a time may be kept from going on."""

    def __init__(self, *, damaged: int = -1) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._damaged = damaged

    def check_read(self, block: int, memory: Any) -> None:
        self._look("read", block)

    def note_write(self, block: int, memory: Any) -> None:
        self._look("written", block)

    def _look(self, what: str, block: int) -> None:
        assert self.may_go_on.wait(10)
        self.seen.append((what, block, threading.get_ident()))
        if block == self._damaged:
            raise SpillError("other bytes than were written")


def tier_of(checks: Checks, transfers: list[Transfer], acquire: Any, store: Any) -> tuple[Transfers, list[int]]:
    """Two host frames of 8 bytes, and the blocks that the SSD has been asked for."""
    asked: list[int] = []

    def read(spans: list[int], memory: Any) -> Any:
        asked.append(spans[0])
        return _DONE

    device: Any = SimpleNamespace(copy=lambda *given: _DONE)
    engine: Any = SimpleNamespace(read=read, write=lambda spans, memory: _DONE)
    memory = np.zeros(16, np.uint8)
    given: Any = device, memory, 8, engine, lambda block: ([block], 8)
    tier = Transfers(*given, gpudirect=None, slab_of=lambda block: -1, checks=checks)
    program = SimpleNamespace(warm=(), leaves=(), moves={}, bounds=((0, 1),), acquire=acquire, store=store)
    staging: Any = SimpleNamespace(transfers=transfers, program=program)
    tier.begin(staging, staging)
    return tier, asked


def test_what_has_been_read_is_looked_at_aside_before_it_is_sent() -> None:
    checks = Looks(damaged=1)
    acquire = (Acquire(0, 0, True),), (Acquire(1, 1, True),)
    tier, _ = tier_of(checks, [Transfer(0, 0, CopyTo.DEVICE), Transfer(1, 1, CopyTo.DEVICE)], acquire, ((), ()))
    tier.send(0, CopyTo.DEVICE, torch.zeros(8, dtype=torch.uint8), [])
    ((what, block, thread),) = checks.seen
    assert (what, block) == ("read", 0) and thread != threading.get_ident()
    with pytest.raises(SpillError, match="other bytes"):
        tier.send(1, CopyTo.DEVICE, torch.zeros(8, dtype=torch.uint8), [])
    tier.settle()
    tier.close()


def test_a_frame_is_not_filled_while_what_is_written_out_of_it_is_looked_at() -> None:
    """Block 0 goes out of frame 0, which block 1 is to be read into; block 2 is sent meanwhile, by another one."""
    checks = Looks()
    acquire = (Acquire(0, 0, False),), (Acquire(2, 1, False),), (Acquire(1, 0, True),), ()
    order = [(0, CopyTo.HOST), (2, CopyTo.HOST), (2, CopyTo.HOST), (1, CopyTo.DEVICE)]
    transfers = [Transfer(step, block, direction) for step, (block, direction) in enumerate(order)]
    tier, asked = tier_of(checks, transfers, acquire, ((0,), (), (), ()))
    memory = torch.zeros(8, dtype=torch.uint8)
    checks.may_go_on.clear()
    for block, direction in order[:3]:
        tier.send(block, direction, memory, [])
    assert not asked and not checks.seen, "block 1 is not read yet, and nobody waits for it"
    checks.may_go_on.set()
    tier.send(1, CopyTo.DEVICE, memory, [])
    assert asked == [1] and [(what, block) for what, block, _ in checks.seen] == [("written", 0), ("read", 1)]
    tier.finish()
    tier.close()
