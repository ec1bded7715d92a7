# SPDX-License-Identifier: Apache-2.0
"""The same training planned otherwise: which one change would help most, and what every pair of budgets would give."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ooc.errors import BudgetError, OptionError
from ooc.memory import divide_memory
from ooc.plan import Hardware, Limits
from ooc.plan.hardware import Curve
from ooc.report.plan_report import PlanReport

Plans = Callable[[Limits, Hardware, bool], PlanReport]
"""Plan for these budgets on this machine; ``True``: with intermediates spilled as bfloat16."""
_TIMES = 2
_FIGURES = ("epoch_s", "ssd_read_bytes", "ssd_write_bytes")


def changes(report: PlanReport, plans: Plans, *, spilled_narrow: bool) -> list[dict[str, Any]]:
    """What an epoch would take if one thing, ``name``, were otherwise, the most helpful first. Without a plan for that
    ``epoch_s`` is None. ``spilled_narrow``: bfloat16 is what is spilled already."""
    found = []
    for name, plan in _alternatives(report, plans, spilled_narrow):
        try:
            outcome = _outcome(plan)
        except OptionError:  # the model has no such option, as attention no narrower spill
            continue
        saved_s = 0.0 if outcome["epoch_s"] is None else report.epoch_s - outcome["epoch_s"]
        found.append({"name": name, **{key: outcome[key] for key in _FIGURES}, "saved_s": saved_s})
    return sorted(found, key=lambda change: -change["saved_s"])


def _alternatives(
    report: PlanReport, plans: Plans, spilled_narrow: bool
) -> Iterator[tuple[str, Callable[[], PlanReport]]]:
    limits, hardware = report.limits, report.hardware
    host = replace(limits, host_bytes=_TIMES * limits.host_bytes)
    device = replace(limits, device_bytes=_TIMES * limits.device_bytes)
    disk = replace(
        hardware.disk,
        read_bytes_per_s=_scaled(hardware.disk.read_bytes_per_s),
        write_bytes_per_s=_scaled(hardware.disk.write_bytes_per_s),
        both_ways_bytes_per_s=_TIMES * hardware.disk.both_ways_bytes_per_s,
    )
    if hardware.has_device_memory:
        yield "twice the host budget", lambda: plans(host, hardware, spilled_narrow)
        yield "twice the gpu budget", lambda: plans(device, hardware, spilled_narrow)
    else:
        both = replace(host, device_bytes=device.device_bytes)
        yield "twice the memory", lambda: plans(both, hardware, spilled_narrow)
    yield "a disk twice as fast", lambda: plans(limits, replace(hardware, disk=disk), spilled_narrow)
    if not spilled_narrow:
        yield "--spill-dtype bfloat16", lambda: plans(limits, hardware, True)


def _scaled(curve: Curve) -> Curve:
    return replace(curve, points=tuple((x, _TIMES * y) for x, y in curve.points))


def sweep(axes: dict[str, list[int]], limits: Limits, plan: Callable[[Limits], PlanReport]) -> list[dict[str, Any]]:
    """What an epoch would take with every pair of budgets, row by row, or every size of memory, or the ``reason`` why
    there is no plan. ``limits`` hold where there is no axis."""
    if "memory" in axes:
        pairs = [divide_memory(memory_bytes) for memory_bytes in axes["memory"]]
    else:
        pairs = list(product(axes.get("gpu", [limits.device_bytes]), axes.get("host", [limits.host_bytes])))
    cells = []
    for gpu_bytes, host_bytes in pairs:
        tried = replace(limits, device_bytes=gpu_bytes, host_bytes=host_bytes, one_memory="memory" in axes)
        outcome = _outcome(partial(plan, tried))
        budgets = {"gpu_budget_bytes": gpu_bytes, "host_budget_bytes": host_bytes}
        if tried.one_memory:
            budgets = {"memory_bytes": tried.memory_bytes} | budgets
        cells.append({**budgets, **outcome, "feasible": outcome["reason"] is None})
    return cells


def _outcome(plan: Callable[[], PlanReport]) -> dict[str, Any]:
    """The figures of a plan that stand in tables, or the ``reason`` why there is none."""
    try:
        report = plan()
    except BudgetError as error:
        return dict.fromkeys((*_FIGURES, "bottleneck")) | {"reason": str(error)}
    figures = {key: getattr(report, key) for key in _FIGURES}
    return {**figures, "bottleneck": report.timeline.bottleneck.value, "reason": None}
