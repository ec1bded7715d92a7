# SPDX-License-Identifier: Apache-2.0
"""The simulator: a program's instructions replayed against the rates of a machine.

One epoch in the steady state is timed: blocks that the epoch before has left in memory are there. It follows the
executor, which on the CPU waits for what a step needs (``ooc.plan.replay``), and on a device with memory of its own
sends kernels and copies off to wait for one another (``ooc.plan.device_replay``).
"""

from ooc.plan.device_replay import DeviceReplay
from ooc.plan.hardware import Hardware
from ooc.plan.plan import Plan
from ooc.plan.replay import Replay
from ooc.plan.timeline import Timeline
from ooc.plan.workload import Workload


def simulate(plan: Plan, workload: Workload, hardware: Hardware, program: str = "train") -> Timeline:
    """One run of ``program`` of a plan made for ``workload``, on ``hardware``."""
    replay = DeviceReplay if plan.has_tiers else Replay
    return replay(plan, workload, hardware, program).run()
