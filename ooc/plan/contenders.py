# SPDX-License-Identifier: Apache-2.0
"""Of arrangements that are forecast to be about as fast, the one that the simulator finds fastest.

The search goes by single steps, and where they lead depends on where it begins: so it begins twice. And a forecast
takes each pass for itself, its resources side by side. What it leaves out are the beginnings and ends of passes and
sweeps, where one resource waits for another: little on a large graph, a quarter of an epoch where a pass has a few
dozen steps. There a program is simulated in a fraction of a second, so a few of them are.
"""

from dataclasses import replace

from ooc.plan.forecast import TIE
from ooc.plan.layout import Choice, Layout
from ooc.plan.plan import Plan
from ooc.plan.planner import Arrangement, arrange_from_one_width
from ooc.plan.simulator import simulate

_MOST_STEPS = 8000
"""Of all programs that are simulated for one plan."""


def fastest_plan(arranged: Arrangement) -> Plan:
    """The plan of ``arranged``, or of one of its contenders.

    On a device with memory of its own alone: on the CPU, where forecasts were compared with epochs, the order of the
    forecasts stands. So it does with a limit on what is written, which contenders may pass.
    """
    if not arranged.hardware.has_device_memory or arranged.limits.ssd_write_bytes is not None:
        return arranged.plan
    other = arrange_from_one_width(arranged)
    others: list[tuple[Choice, Layout]] = []
    if other is not None:
        if other.seconds < (1 - TIE) * arranged.seconds:  # else the first search's end stands
            arranged, other = other, arranged
        others.append((other.choice, other.layout))
    best = arranged.plan
    most = _MOST_STEPS // max(1, len(best.unrolled["train"].steps)) - 1
    if most < 1:
        return best
    shortest_s = _seconds(arranged, best)
    for choice, layout in [*others, *arranged.contenders][:most]:
        plan = replace(arranged, choice=choice, layout=layout).plan
        seconds = _seconds(arranged, plan)
        if seconds < shortest_s:
            best, shortest_s = plan, seconds
    return best


def _seconds(arranged: Arrangement, plan: Plan) -> float:
    return simulate(plan, arranged.workload, arranged.hardware).epoch_s
