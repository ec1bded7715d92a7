# SPDX-License-Identifier: Apache-2.0
"""The same training planned otherwise: which one change would help most, and what every pair of budgets would give."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from ooc.errors import BudgetError, OptionError
from ooc.plan import Hardware, Limits
from ooc.plan.hardware import Curve, Disk
from ooc.report.plan_report import PlanReport

Plans = Callable[[Limits, Hardware, bool], PlanReport]
"""Plan for these budgets on this machine; ``True``: with intermediates spilled as bfloat16."""
_TIMES = 2


@dataclass(frozen=True, slots=True)
class Change:
    """What an epoch would take if one thing were otherwise. ``epoch_s`` is None where there is no plan for that."""

    name: str
    epoch_s: float | None
    ssd_read_bytes: int | None
    ssd_write_bytes: int | None
    saved_s: float


def changes(report: PlanReport, plans: Plans, *, spilled_narrow: bool) -> list[Change]:
    """The changes there are, the most helpful first. ``spilled_narrow``: bfloat16 is what is spilled already."""
    tried = [_change(name, report, plan) for name, plan in _alternatives(report, plans, spilled_narrow)]
    return sorted((change for change in tried if change is not None), key=lambda change: -change.saved_s)


def _alternatives(
    report: PlanReport, plans: Plans, spilled_narrow: bool
) -> Iterator[tuple[str, Callable[[], PlanReport]]]:
    limits, hardware = report.limits, report.hardware
    host = replace(limits, host_bytes=_TIMES * limits.host_bytes)
    device = replace(limits, device_bytes=_TIMES * limits.device_bytes)
    faster = replace(hardware, disk=_faster(hardware.disk))
    yield "twice the host budget", lambda: plans(host, hardware, spilled_narrow)
    yield "twice the gpu budget", lambda: plans(device, hardware, spilled_narrow)
    yield "a disk twice as fast", lambda: plans(limits, faster, spilled_narrow)
    if not spilled_narrow:
        yield "--spill-dtype bfloat16", lambda: plans(limits, hardware, True)


def _change(name: str, report: PlanReport, plan: Callable[[], PlanReport]) -> Change | None:
    """What the change comes to; None where the model has no such option, as attention no narrower spill."""
    try:
        other = plan()
    except OptionError:
        return None
    except BudgetError:
        return Change(name, None, None, None, 0.0)
    saved = report.epoch_s - other.epoch_s
    return Change(name, other.epoch_s, other.ssd_read_bytes, other.ssd_write_bytes, saved)


def _faster(disk: Disk) -> Disk:
    return replace(
        disk,
        read_bytes_per_s=_scaled(disk.read_bytes_per_s),
        write_bytes_per_s=_scaled(disk.write_bytes_per_s),
        both_ways_bytes_per_s=_TIMES * disk.both_ways_bytes_per_s,
    )


def _scaled(curve: Curve) -> Curve:
    return replace(curve, points=tuple((x, _TIMES * y) for x, y in curve.points))


# ---- pairs of budgets ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of budgets, and what an epoch would take; ``reason``: why there is no plan, otherwise None."""

    gpu_budget_bytes: int
    host_budget_bytes: int
    epoch_s: float | None = None
    ssd_read_bytes: int | None = None
    ssd_write_bytes: int | None = None
    bottleneck: str | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"feasible": self.reason is None}


def sweep(axes: dict[str, list[int]], *, gpu: int, host: int, plan: Callable[[int, int], PlanReport]) -> list[Cell]:
    """Every pair of budgets, row by row; ``gpu`` and ``host`` hold where there is no axis."""
    pairs = product(axes.get("gpu", [gpu]), axes.get("host", [host]))
    return [_cell(on_device, on_host, plan) for on_device, on_host in pairs]


def _cell(gpu: int, host: int, plan: Callable[[int, int], PlanReport]) -> Cell:
    try:
        report = plan(gpu, host)
    except BudgetError as error:
        return Cell(gpu, host, reason=str(error))
    bottleneck = report.timeline.bottleneck.value
    return Cell(gpu, host, report.epoch_s, report.ssd_read_bytes, report.ssd_write_bytes, bottleneck)
