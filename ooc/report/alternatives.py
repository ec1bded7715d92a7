# SPDX-License-Identifier: Apache-2.0
"""The same training planned otherwise: which one change would help most."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ooc.errors import BudgetError, OptionError
from ooc.plan import Hardware, Limits
from ooc.plan.hardware import Curve, Disk
from ooc.progress.plan_report import PlanReport

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
            figures = outcome(plan)
        except OptionError:  # the model has no such option, as attention no narrower spill
            continue
        saved_s = 0.0 if figures["epoch_s"] is None else report.epoch_s - figures["epoch_s"]
        found.append({"name": name, **{key: figures[key] for key in _FIGURES}, "saved_s": saved_s})
    return sorted(found, key=lambda change: -change["saved_s"])


def _alternatives(
    report: PlanReport, plans: Plans, spilled_narrow: bool
) -> Iterator[tuple[str, Callable[[], PlanReport]]]:
    limits, hardware = report.limits, report.hardware
    host = replace(limits, host_bytes=_TIMES * limits.host_bytes)
    device = replace(limits, device_bytes=_TIMES * limits.device_bytes)
    disk = faster(hardware.disk, _TIMES)
    if hardware.has_device_memory:
        yield "twice the host budget", lambda: plans(host, hardware, spilled_narrow)
        yield "twice the gpu budget", lambda: plans(device, hardware, spilled_narrow)
    else:
        both = replace(host, device_bytes=device.device_bytes)
        yield "twice the memory", lambda: plans(both, hardware, spilled_narrow)
    yield "a disk twice as fast", lambda: plans(limits, replace(hardware, disk=disk), spilled_narrow)
    if not spilled_narrow:
        yield "--spill-dtype bfloat16", lambda: plans(limits, hardware, True)


def faster(disk: Disk, times: float) -> Disk:
    """A drive of so many times the bytes a second, both ways."""

    def scaled(curve: Curve) -> Curve:
        return replace(curve, points=tuple((x, times * y) for x, y in curve.points))

    return replace(
        disk,
        read_bytes_per_s=scaled(disk.read_bytes_per_s),
        write_bytes_per_s=scaled(disk.write_bytes_per_s),
        both_ways_bytes_per_s=times * disk.both_ways_bytes_per_s,
    )


def outcome(plan: Callable[[], PlanReport]) -> dict[str, Any]:
    """The figures of a plan that stand in tables, or the ``reason`` why there is none."""
    try:
        report = plan()
    except BudgetError as error:
        return dict.fromkeys((*_FIGURES, "bottleneck")) | {"reason": str(error)}
    figures = {key: getattr(report, key) for key in _FIGURES}
    return {**figures, "bottleneck": report.timeline.bottleneck.value, "reason": None}
