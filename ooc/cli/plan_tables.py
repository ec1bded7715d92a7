# SPDX-License-Identifier: Apache-2.0
"""An outlook as tables for people: fates, time by resource and pass, what is computed, how long matrices live."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ooc.cli.advice import Change
from ooc.cli.outlook import Outlook, describe_memory, describe_reading
from ooc.cli.progress import format_duration
from ooc.plan.lifetimes import Lifetime, StageStatistics
from ooc.plan.timeline import Resource
from ooc.sizes import format_size

_SHARES = ("device", "host", "ssd", "recompute")
_USES = ("produced", "last forward use", "backward use")
_LEFT = frozenset(("matrix", "fate", "resource", "pass", "bound by", "stage", "change", *_USES))


def print_outlook(outlook: Outlook, console: Console) -> None:
    """Everything that is expected of an epoch."""
    console.print(_fates(outlook.fates))
    console.print(_resources(outlook))
    console.print(_passes(outlook))
    console.print(_stages(outlook.stages))
    console.print(_lifetimes(outlook.lifetimes))
    _say(console, f"memory: {describe_memory(outlook)}, at most")
    if outlook.plan.spill_bytes:
        _say(console, f"disk: {format_size(outlook.plan.spill_bytes)} of scratch")
    read, written = describe_reading(outlook), format_size(outlook.ssd_write_bytes)
    passes, bottleneck = len(outlook.timeline.passes), outlook.timeline.bottleneck.value
    seconds = format_duration(outlook.epoch_s)
    _say(console, f"epoch: {seconds} in {passes} passes, {read} read and {written} written; busiest: {bottleneck}")


def print_changes(changes: Sequence[Change], console: Console) -> None:
    """What would help, the most helpful first."""
    table = _empty("change", "epoch", "saved", "SSD read", "SSD written")
    for change in changes:
        if change.epoch_s is None or change.ssd_read_bytes is None or change.ssd_write_bytes is None:
            table.add_row(change.name, "no plan", "", "", "")
            continue
        moved = format_size(change.ssd_read_bytes), format_size(change.ssd_write_bytes)
        table.add_row(change.name, format_duration(change.epoch_s), _saved(change.saved_s), *moved)
    console.print(table)


def print_assumptions(lines: Sequence[str], console: Console) -> None:
    """One line each, marked as what they are."""
    for line in lines:
        _say(console, f"assumed: {line}")


def _fates(fates: Sequence[dict[str, Any]]) -> Table:
    table = _empty("matrix", "rows", "columns", "bytes", "fate", *_SHARES, "slabs")
    for fate in fates:
        shares = (f"{fate[share]} %" if fate[share] else "" for share in _SHARES)
        shape = f"{fate['rows']:,}", f"{fate['columns']:,}", format_size(fate["bytes"])
        table.add_row(fate["matrix"], *shape, fate["fate"], *shares, str(fate["slabs"]))
    return table


def _resources(outlook: Outlook) -> Table:
    timeline = outlook.timeline
    table = _empty("resource", "busy", "of the epoch", "bytes")
    for resource, busy_s in timeline.busy_s.items():
        share = f"{100 * busy_s / timeline.epoch_s:.0f} %" if timeline.epoch_s else ""
        moved = "" if resource is Resource.COMPUTE else format_size(timeline.moved_bytes.get(resource, 0))
        table.add_row(resource.value, format_duration(busy_s), share, moved)
    return table


def _passes(outlook: Outlook) -> Table:
    table = _empty("pass", "time", "waits", "bound by")
    for item in outlook.timeline.passes:
        seconds = format_duration(item.end_s - item.start_s), format_duration(item.waited_s)
        table.add_row(item.title, *seconds, item.bound.value)
    return table


def _stages(stages: Sequence[StageStatistics]) -> Table:
    table = _empty("stage", "active rows", "active edges", "edge bytes", "loads", "pulls", "stores", "multiply-adds")
    for stage in stages:
        sizes = (stage.edge_bytes, stage.loaded_bytes, stage.pulled_bytes, stage.stored_bytes)
        counts = f"{stage.rows:,}", f"{stage.edges:,}" if stage.edges else ""
        products = f"{stage.multiplies:.2e}" if stage.multiplies else ""
        table.add_row(stage.stage, *counts, *(format_size(size) if size else "" for size in sizes), products)
    return table


def _lifetimes(found: Sequence[Lifetime]) -> Table:
    table = _empty("matrix", "bytes", *_USES)
    for item in found:
        produced = item.produced or "before the epoch"
        uses = item.last_forward or "", ", ".join(item.backward)
        table.add_row(item.matrix, format_size(item.nbytes), produced, *uses)
    return table


def _empty(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=column != "backward use")
    return table


def _saved(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 0 else f"-{format_duration(-seconds)}"


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)
