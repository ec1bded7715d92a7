# SPDX-License-Identifier: Apache-2.0
"""Which change would help most: the same training planned anew with twice the memory, a faster disk, less to spill."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ooc.cli.outlook import Outlook
from ooc.errors import BudgetError, OptionError
from ooc.plan import Hardware, Limits
from ooc.plan.hardware import Curve, Disk

Plans = Callable[[Limits, Hardware, bool], Outlook]
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


def changes(outlook: Outlook, plans: Plans, *, spilled_narrow: bool) -> list[Change]:
    """The changes there are, the most helpful first. ``spilled_narrow``: bfloat16 is what is spilled already."""
    tried = [_change(name, outlook, plan) for name, plan in _alternatives(outlook, plans, spilled_narrow)]
    return sorted((change for change in tried if change is not None), key=lambda change: -change.saved_s)


def _alternatives(outlook: Outlook, plans: Plans, spilled_narrow: bool) -> Iterator[tuple[str, Callable[[], Outlook]]]:
    limits, hardware = outlook.limits, outlook.hardware
    host = replace(limits, host_bytes=_TIMES * limits.host_bytes)
    device = replace(limits, device_bytes=_TIMES * limits.device_bytes)
    faster = replace(hardware, disk=_faster(hardware.disk))
    yield "twice the host budget", lambda: plans(host, hardware, spilled_narrow)
    yield "twice the gpu budget", lambda: plans(device, hardware, spilled_narrow)
    yield "a disk twice as fast", lambda: plans(limits, faster, spilled_narrow)
    if not spilled_narrow:
        yield "--spill-dtype bfloat16", lambda: plans(limits, hardware, True)


def _change(name: str, outlook: Outlook, plan: Callable[[], Outlook]) -> Change | None:
    """What the change comes to; None where the model has no such option, as attention no narrower spill."""
    try:
        other = plan()
    except OptionError:
        return None
    except BudgetError:
        return Change(name, None, None, None, 0.0)
    saved = outlook.epoch_s - other.epoch_s
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
