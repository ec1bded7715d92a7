# SPDX-License-Identifier: Apache-2.0
"""Plans: pure data and pure functions. No torch, no I/O, no clock in here.

Reading order: ``workload`` (what is to be done), ``hardware`` (on what) and ``cost`` (how long that takes), ``grid``
(how a matrix lies on disk), ``sequence`` (which blocks are used when), ``replacement`` (which stay in memory),
``program`` (that unrolled to instructions), ``staging`` (the same once more below a device's memory), ``schedule``,
``plan`` (the result), ``verifier`` (the proof that it can run); ``problem`` (what the planner decides, at what cost),
``moves``, ``solver`` and ``planner`` (how it decides). ``fates`` stands by itself: the same choice for any chain.
"""

from ooc.plan.capacity import Limits
from ooc.plan.hardware import UNMEASURED, UNMEASURED_DEVICE, Hardware
from ooc.plan.matrices import MatrixPlan
from ooc.plan.passes import ColumnPass, RowPass
from ooc.plan.plan import Plan
from ooc.plan.planner import make_plan
from ooc.plan.workload import Direction, Fate, Kind, Matrix, Pull, Stage, Topology, Workload

__all__ = [
    "UNMEASURED",
    "UNMEASURED_DEVICE",
    "ColumnPass",
    "Direction",
    "Fate",
    "Hardware",
    "Kind",
    "Limits",
    "Matrix",
    "MatrixPlan",
    "Plan",
    "Pull",
    "RowPass",
    "Stage",
    "Topology",
    "Workload",
    "make_plan",
]
