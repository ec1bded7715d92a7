# SPDX-License-Identifier: Apache-2.0
"""Plans: pure data and pure functions. No torch, no I/O, no clock in here.

Reading order: ``workload`` (what is to be done), ``hardware`` (on what) and ``cost`` (how long that takes); ``layout``
(how matrices are cut and held), ``program`` (that unrolled to instructions, with the proof that they fit), ``simulate``
(how long they take); ``problem`` (what the planner decides, at what cost), ``moves``, ``solver`` and ``planner`` (how
it decides); ``chain`` (the same for any chain of layers).
"""

from ooc.plan.hardware import UNMEASURED, UNMEASURED_DEVICE, Hardware
from ooc.plan.layout.passes import ColumnPass, MatrixPlan, RowPass
from ooc.plan.planner import make_plan
from ooc.plan.program.capacity import Limits
from ooc.plan.program.plan import Plan
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
