# SPDX-License-Identifier: Apache-2.0
"""What several processes would do that train one graph together, as a table and as plain data."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ooc.plan.program.received import exposed_s
from ooc.plan.simulate.timeline import Resource, Timeline
from ooc.progress.figures import format_duration
from ooc.progress.plan_report import PlanReport
from ooc.report.console import print_table, say
from ooc.sizes import format_size


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
    dealt = reports[0].plan.dealt_bytes(reports[0].program, len(reports))
    facts = {"link_bytes_per_s": link_bytes_per_s, "epoch_s": epoch_s, "alone_s": alone_s, "dealt_bytes": dealt}
    return {**facts, "speed_up": alone_s / epoch_s, "ranks": ranks}


def print_ranks(found: dict[str, Any], console: Console) -> None:
    """A row a process, and what comes of them together."""
    rows = []
    for rank, one in enumerate(found["ranks"]):
        memory, received = format_size(one["memory_bytes"]), format_size(one["received_bytes"])
        times = (format_duration(one[name]) for name in ("compute_s", "ssd_s", "link_s", "link_exposed_s"))
        computes, moves, receives, waits = times
        rows.append((str(rank), f"{one['rows']:,}", memory, computes, moves, received, receives, waits))
    print_table(("rank", "rows", "memory", "computes", "SSD busy", "receives", "in", "not hidden"), rows, console)
    most = max(one["received_bytes"] for one in found["ranks"])
    if found["dealt_bytes"] < most:
        dealt = format_size(found["dealt_bytes"])
        say(console, f"with columns dealt out among processes, which is not done, each would receive {dealt}")
    say(
        console,
        f"{len(found['ranks'])} processes: {format_duration(found['epoch_s'])} an epoch, one: "
        f"{format_duration(found['alone_s'])}, {found['speed_up']:.2f} times as fast; "
        f"links of {format_size(found['link_bytes_per_s'])} a second",
    )
