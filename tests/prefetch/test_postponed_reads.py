# SPDX-License-Identifier: Apache-2.0
"""A read into a host frame that a copy still goes through waits in line, and the host does not."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ooc.plan.program.program import Acquire
from ooc.plan.program.staging import CopyTo, Transfer
from ooc.prefetch.engine import Event
from ooc.prefetch.transfers import Transfers
from tests.prefetch.faults import UNCHECKED


class Copied(Event):
    """Happens when it is told to, or when somebody waits."""

    happened = False
    waited = False

    def wait(self) -> None:
        self.waited = self.waited or not self.happened
        self.happened = True


def test_the_host_goes_on_while_a_frame_is_in_use() -> None:
    """Block 0 goes through frame 0, which block 1 is to be read into; block 2 is sent meanwhile."""
    copies: list[Copied] = []
    read: list[int] = []

    def copy(*given: Any) -> Copied:
        copies.append(Copied())
        return copies[-1]

    def asked(spans: list[int], memory: Any) -> Any:
        read.append(spans[0])
        return SimpleNamespace(happened=True, wait=lambda: None)

    acquire = (Acquire(0, 0, True),), (Acquire(1, 0, True), Acquire(2, 1, True)), (), ()
    transfers = [Transfer(step, block, CopyTo.DEVICE) for step, block in enumerate((0, 2, 2, 1))]
    program = SimpleNamespace(warm=(), acquire=acquire, store=((),) * 4)
    device: Any = SimpleNamespace(copy=copy)
    engine: Any = SimpleNamespace(read=asked)
    given: Any = device, np.zeros(16, np.uint8), 8, engine, lambda block: ([block], 8)
    tier = Transfers(*given, gpudirect=None, slab_of=lambda block: -1, checks=UNCHECKED)
    staging: Any = SimpleNamespace(transfers=transfers, program=program)
    tier.begin(staging, staging)
    memory = torch.zeros(8, dtype=torch.uint8)
    tier.send(0, CopyTo.DEVICE, memory, [])
    tier.send(2, CopyTo.DEVICE, memory, [])
    assert read == [0, 2] and not copies[0].waited, "block 1 waits, block 2 is sent at once"
    copies[0].happened = True
    tier.send(2, CopyTo.DEVICE, memory, [])
    assert read == [0, 2, 1]
    tier.send(1, CopyTo.DEVICE, memory, [])
    assert not any(copy.waited for copy in copies)
