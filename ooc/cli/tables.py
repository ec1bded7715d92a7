# SPDX-License-Identifier: Apache-2.0
"""Tables for people: the plan before training, the outcome after it."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ooc.cli.outlook import Outlook, describe_reading
from ooc.cli.progress import format_duration
from ooc.sizes import format_size
from ooc.train.record import EpochRecord

if TYPE_CHECKING:
    from ooc.train.metrics import Metric


def print_plan(outlook: Outlook, console: Console) -> None:
    """Where every matrix waits, and what an epoch will take."""
    plan = outlook.plan
    rows = plan.summary()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    console.print(table)
    read, write = describe_reading(outlook), format_size(outlook.ssd_write_bytes)
    device, host = format_size(plan.device_peak_bytes), format_size(plan.host_peak_bytes)
    spill = format_size(plan.spill_bytes)
    console.print(
        f"plan: reads {read} and writes {write} an epoch, {spill} of scratch on disk, "
        f"at most {device} of device and {host} of host memory",
        highlight=False,
        soft_wrap=True,
    )
    if plan.has_tiers:
        there, back = format_size(plan.to_device_bytes), format_size(plan.to_host_bytes)
        console.print(f"over the wire: {there} to the device and {back} back an epoch", highlight=False, soft_wrap=True)


def print_outcome(
    records: Sequence[EpochRecord],
    *,
    metric: "Metric",
    gpu_budget: int,
    host_budget: int,
    process_peak_bytes: int,
    store_bytes: int,
    spill_bytes: int,
    run: Path,
    console: Console,
) -> None:
    """Loss, accuracies, time, bytes moved, peak memory, and where the run's files are."""
    last = records[-1]
    count = len(records)
    read = sum(record.ssd_read_bytes for record in records)
    written = sum(record.ssd_write_bytes for record in records)
    device_peak = max(record.device_peak_bytes for record in records)
    host_peak = max(record.host_peak_bytes for record in records)
    rows = [("epochs", str(last.epoch)), ("loss", f"{last.loss:.5f}"), (metric.value, _scores(last))]
    best = best_record(records, rising=metric.higher_is_better)
    if best is not None and best.epoch != last.epoch:
        rows.append((f"best {metric.value}", f"{_scores(best)} (epoch {best.epoch})"))
    rows += [
        ("time an epoch", f"{format_duration(statistics.median(r.time_s for r in records))} (median)"),
        ("waiting for SSD", f"{format_duration(statistics.median(r.io_wait_s for r in records))} (median)"),
        ("SSD read", f"{format_size(read)} ({format_size(read / count)} an epoch)"),
        ("SSD written", f"{format_size(written)} ({format_size(written / count)} an epoch)"),
        *_wire(records),
        ("data on disk", f"{format_size(store_bytes)} store + {format_size(spill_bytes)} scratch"),
        ("peak device memory", f"{format_size(device_peak)} of {format_size(gpu_budget)}"),
        ("peak host memory", f"{format_size(host_peak)} of {format_size(host_budget)}"),
        ("peak of the process", f"{format_size(process_peak_bytes)}, Python and torch included"),
        ("run", str(run)),
    ]
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _wire(records: Sequence[EpochRecord]) -> list[tuple[str, str]]:
    """What went over the wire, where there is one."""
    rows = []
    for name, moved in (
        ("to the device", sum(record.to_device_bytes for record in records)),
        ("to the host", sum(record.to_host_bytes for record in records)),
    ):
        if moved:
            rows.append((name, f"{format_size(moved)} ({format_size(moved // len(records))} an epoch)"))
    return rows


def best_record(records: Sequence[EpochRecord], *, rising: bool = True) -> EpochRecord | None:
    """The first epoch with the best validation score, None when none was evaluated."""
    sign = 1.0 if rising else -1.0
    evaluated = [(sign * record.valid_acc, record) for record in records if record.valid_acc is not None]
    return max(evaluated, key=lambda scored: scored[0], default=(0.0, None))[1]


def _scores(record: EpochRecord) -> str:
    scores = {"train": record.train_acc, "valid": record.valid_acc, "test": record.test_acc}
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if value is not None) or "not evaluated"


def _cell(name: str, value: str | int) -> str:
    match value:
        case str():
            return value
        case _ if name == "bytes":
            return format_size(value)
        case _ if name in ("resident", "device", "host", "ssd"):
            return f"{value} %"
        case _:
            return f"{value:,}"
