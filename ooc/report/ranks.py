# SPDX-License-Identifier: Apache-2.0
"""What several processes would do that train one graph together, as a table and as plain data."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ooc.plan.program.capacity import ExchangeForm
from ooc.plan.program.received import exposed_s
from ooc.plan.simulate.timeline import Resource, Timeline
from ooc.progress.figures import format_duration
from ooc.progress.plan_report import PlanReport
from ooc.report.console import print_table, say
from ooc.sizes import format_size

_FORMS = ("halo_bytes", "columns_bytes")


def describe_ranks(
    reports: Sequence[PlanReport], timelines: Sequence[Timeline], alone_s: float, link_bytes_per_s: int
) -> dict[str, Any]:
    """``reports`` and ``timelines`` are by process, the timelines on one clock; ``alone_s``: an epoch of one."""
    epoch_s = timelines[0].epoch_s
    ranks = []
    for report, timeline in zip(reports, timelines, strict=True):
        plan, share, busy_s = report.plan, report.plan.share, timeline.busy_s
        ranks.append(
            {
                "rows": len(share) if share is not None else plan.rows,
                "memory_bytes": plan.device_peak_bytes + plan.host_peak_bytes,
                "compute_s": busy_s.get(Resource.COMPUTE, 0.0),
                "ssd_s": timeline.ssd_busy_s,
                "received_bytes": plan.received_bytes(report.program),
                "link_s": busy_s.get(Resource.LINK, 0.0),
                "link_exposed_s": sum(
                    exposed_s(received, item.end_s - item.start_s, link_bytes_per_s)
                    for received, item in zip(plan.received(report.program), report.timeline.passes, strict=True)
                ),
            }
        )
    facts = {"link_bytes_per_s": link_bytes_per_s, "epoch_s": epoch_s, "alone_s": alone_s}
    forms = [one.plan.forms(one.program) for one in reports]
    pulls = [
        {
            "pulled": of_ranks[0].source,
            "halo_bytes": max(one.halo_bytes for one in of_ranks),
            "columns_bytes": None if of_ranks[0].columns_bytes is None else max(o.columns_bytes or 0 for o in of_ranks),
            "sent": ExchangeForm.COLUMNS.value if of_ranks[0].is_dealt else ExchangeForm.HALO.value,
        }
        for of_ranks in zip(*forms, strict=True)
    ]
    return {**facts, "speed_up": alone_s / epoch_s, "ranks": ranks, "pulls": pulls}


def print_ranks(found: dict[str, Any], console: Console) -> None:
    """A row a process, and what comes of them together."""
    rows = []
    for rank, one in enumerate(found["ranks"]):
        memory, received = format_size(one["memory_bytes"]), format_size(one["received_bytes"])
        times = (format_duration(one[name]) for name in ("compute_s", "ssd_s", "link_s", "link_exposed_s"))
        computes, moves, receives, waits = times
        rows.append((str(rank), f"{one['rows']:,}", memory, computes, moves, received, receives, waits))
    print_table(("rank", "rows", "memory", "computes", "SSD busy", "receives", "in", "not hidden"), rows, console)
    pulls = [
        (one["pulled"], *("–" if one[name] is None else format_size(one[name]) for name in _FORMS), one["sent"])
        for one in found["pulls"]
    ]
    print_table(("pulled", "received of a halo", "of columns", "sent"), pulls, console)
    say(
        console,
        f"{len(found['ranks'])} processes: {format_duration(found['epoch_s'])} an epoch, one: "
        f"{format_duration(found['alone_s'])}, {found['speed_up']:.2f} times as fast; "
        f"links of {format_size(found['link_bytes_per_s'])} a second",
    )
