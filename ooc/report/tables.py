# SPDX-License-Identifier: Apache-2.0
"""Lines and tables about trainings, for people.

The lines before a training are for readers who know graph neural networks, but not how ooc plans: graph, model, memory,
which data stays in memory, and how long an epoch takes. Tables show a whole plan with its forecast, what would change
it, a plan for several processes, and the outcome of a run.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from ooc.engine.record import EpochRecord
from ooc.plan import Hardware, Kind
from ooc.plan.program.capacity import ExchangeForm
from ooc.plan.program.plan import Shares
from ooc.plan.simulate.timeline import Resource, Timeline
from ooc.prefetch.engine import PAGE_BYTES
from ooc.progress.figures import best_record, format_count, format_duration, format_scores
from ooc.progress.live import Tier
from ooc.progress.plan_report import PlanReport, lifetimes, stage_statistics
from ooc.report.console import print_table, say
from ooc.sizes import format_size
from ooc.storage.store import Store, Task

if TYPE_CHECKING:
    from ooc.sampling.graphs import GraphLoader
    from ooc.sampling.loader import NeighborLoader
    from ooc.train.batched.graphs import Fit
    from ooc.train.metrics import Metric


_WHOLE = 100


def describe_store(store: Store) -> str:
    """Return a one-line description of the graph."""
    outputs = {Task.CLASSES: "classes", Task.MULTILABEL: "labels", Task.VALUES: "values"}[store.task]
    nodes, edges = format_count(store.num_nodes, "nodes"), format_count(store.num_edges, "edges")
    labelled, called = store.num_graphs or store.num_nodes, "graphs" if store.num_graphs else "nodes"
    trained = f"{100 * store.split_sizes['train'] / labelled:.2g} % of the {called} to train on"
    nodes = f"{format_count(store.num_graphs, 'graphs')}, {nodes}" if store.num_graphs else nodes
    width = f"{store.num_features} features, {store.num_classes} {outputs}"
    if store.types is not None:
        counts = f"{len(store.types.nodes)} types of nodes and {len(store.types.edges)} of edges"
        nodes = f"{counts}, {format_count(store.num_nodes, 'nodes')} of type {store.types.labelled}"
    return f"{store.path.name}: {nodes}, {edges}, {width}, {trained}; {format_size(store.nbytes)}"


def describe_memory(report: PlanReport, spill_dir: Path) -> str:
    """Return one line on how much memory may be taken, and how much disk space will be."""
    limits, spilled = report.limits, report.plan.spill_bytes
    if report.hardware.has_device_memory:
        sizes = f"{format_size(limits.device_bytes)} on the GPU and {format_size(limits.host_bytes)} beside it"
    else:
        sizes = format_size(limits.memory_bytes)
    where = "here" if spill_dir.absolute() == Path.cwd() else f"in {spill_dir}"
    stepped = report.plan.state_bytes
    kept = f"; {format_size(stepped)} of what the optimizer keeps on the disk" if stepped else ""
    return sizes + kept + (f"; {format_size(spilled)} of scratch on the disk, {where}" if spilled else "")


def describe_waiting(report: PlanReport) -> str:
    """Return a sentence on which shares of an epoch's data stay in memory, by role in the model."""
    shares = {what: _mean_placement(parts) for what, parts in _placements_by_role(report).items() if parts}
    again = [f"{share.recompute} % of the {what}" for what, share in shares.items() if share.recompute]
    anew = f"; computed again: {_join_words(again)}" if again else ""
    if not any(share.ssd for share in shares.values()):
        return f"everything that an epoch reads, once the first one has read it{anew}"
    kept = {what: share.device + share.host for what, share in shares.items()}
    held = [f"{'all' if share == _WHOLE else f'{share} %'} of the {what}" for what, share in kept.items() if share]
    if not held:
        return f"nothing that an epoch reads, all of which waits on the SSD{anew}"
    on_device = [f"{share.device} % of the {what}" for what, share in shares.items() if share.device]
    gpu = f"; on the GPU {_join_words(on_device)}" if on_device and report.hardware.has_device_memory else ""
    return f"{_join_words(held)}{gpu}; the rest waits on the SSD{anew}"


def describe_forecast(report: PlanReport, epochs: int) -> str:
    """Return the forecast seconds and bytes of an epoch, and the time that ``epochs`` of them take."""
    moved = [
        f"{verb} {format_size(nbytes)}"
        for verb, nbytes in (("reads", report.ssd_read_bytes), ("writes", report.ssd_write_bytes))
        if nbytes
    ]
    traffic = f" (it {' and '.join(moved)})" if moved else ""
    scored = "" if report.score_s is None else f" and {format_duration(report.score_s)} to score it"
    total_s = epochs * (report.epoch_s + (report.score_s or 0.0))
    total = f"; {epochs} epochs take about {format_duration(total_s)}" if epochs > 1 else ""
    return f"{format_duration(report.epoch_s)} an epoch{traffic}{scored}{total}"


# ---- what waits where -----------------------------------------------------------------------------------------------


def _placements_by_role(report: PlanReport) -> dict[str, list[tuple[int, Shares]]]:
    """Return, by role in the model, the bytes and the placement of each matrix that an epoch reads."""
    workload = report.workload
    stages = workload.programs[report.program]
    loss = next((at for at, stage in enumerate(stages) if stage.reverse), len(stages))
    forward, backward = ({name for stage in part for name in stage.writes} for part in (stages[:loss], stages[loss:]))
    nbytes = {fate["matrix"]: fate["bytes"] for fate in report.plan.fates()}
    roles: dict[str, list[tuple[int, Shares]]] = {
        role: [] for role in ("graph", "features", "embedding", "activations", "gradients")
    }
    for name, share in report.plan.shares().items():
        if name not in workload.matrices:
            role = "features" if name.startswith("x/") else "graph"
        elif workload.matrices[name].kind in (Kind.STORE, Kind.CONSTANT):
            role = "features"
        elif workload.matrices[name].kind is Kind.LEARNT:
            role = "embedding"
        else:
            role = "gradients" if name in backward - forward else "activations"
        roles[role].append((nbytes[name], share))
    return roles


def _mean_placement(parts: Sequence[tuple[int, Shares]]) -> Shares:
    """Return the placement of all parts together, in per cent of their bytes."""
    whole = sum(nbytes for nbytes, _ in parts) or 1
    means = (sum(nbytes * share[way] for nbytes, share in parts) / whole for way in range(len(Shares._fields)))
    # Only nothing is shown as 0 %, and only all as 100 %.
    return Shares(*(min(max(round(x), 1), _WHOLE - 1) if 0 < x < _WHOLE else round(x) for x in means))


def _join_words(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def describe_batches(loader: "NeighborLoader", *, a_step: int, memory_bytes: int) -> list[tuple[str, str]]:
    """Return label and text of the lines on sampled batches, ``a_step`` to a step, and their data in memory."""
    plan = loader.plan
    drawn = ", ".join("all" if fanout < 0 else str(fanout) for fanout in loader.fanouts)
    steps = f", {a_step} a step" if a_step > 1 else ""
    sizes = " and ".join(map(format_count, loader.most, ("nodes", "edges")))
    batches = f"{len(loader)} an epoch{steps}, of {loader.batch_size:,} nodes and neighbours {drawn}; at most {sizes}"
    kept = "all features in memory"
    if "x" not in plan.resident:
        neighbours = "neighbours too" if "in/indices" in plan.resident else "neighbours on the SSD"
        pages = format_size(sum(plan.cache_pages.values()) * PAGE_BYTES)
        kept = f"{pages} of the features in memory, {neighbours}; {plan.lookahead} sampled ahead"
    memory = f"{format_size(memory_bytes)}, of which {format_size(plan.nbytes)} at most are used; {kept}"
    return [("batches", batches), ("memory", memory)]


def describe_graph_batches(loader: "GraphLoader", *, a_step: int, memory_bytes: int) -> list[tuple[str, str]]:
    """Return label and text of the lines on batches of whole graphs, ``a_step`` to a step, and their memory."""
    plan, bounds = loader.plan, ", ".join(f"{bound:,} {name}" for name, bound in loader.bounds.most.items())
    steps = f", {a_step:,} a step" if a_step > 1 else ""
    kept = "all graphs in memory"
    if plan.cache_pages:
        kept = f"{format_size(sum(plan.cache_pages.values()) * PAGE_BYTES)} of the graphs in memory"
    memory = f"{format_size(memory_bytes)}, of which {format_size(plan.nbytes)} at most are used; {kept}"
    return [
        ("batches", f"{len(loader):,} an epoch{steps}, of at most {bounds}; the largest there can be: {loader.most}"),
        ("memory", memory),
    ]


# ---- tables ---------------------------------------------------------------------------------------------------------


_PLACEMENTS = ("device", "host", "ssd", "recompute")
_PCIE_TRAFFIC = (("to the device", "to_device_bytes"), ("to the host", "to_host_bytes"))
_BATCH_OPTION_ENDS = {"graphs": "size"}
_REQUEST_BYTES = 1 << 20
"""The size of the disk requests whose rates the list of machines shows."""
_ROW_BYTES = 512
"""Bytes of the gathered rows whose rate of pulls the list of machines shows: 128 columns of float32."""


def print_summary(report: PlanReport, console: Console) -> None:
    """Print lines on the memory, the disk space and the time of an epoch."""
    plan = report.plan
    for tier in report.tiers:
        say(console, f"{tier.where}: {format_size(tier.planned_bytes)} of {format_size(tier.limit_bytes)}, at most")
    for nbytes, what in (
        (plan.spill_bytes, "scratch"),
        (plan.state_bytes, "what the optimizer keeps; a run has two versions"),
        (plan.learnt_bytes, "an embedding and its optimizer, in two to four versions"),
    ):
        if nbytes:
            say(console, f"disk: {format_size(nbytes)} of {what}")
    read, first = report.ssd_read_bytes, report.first_epoch_read_bytes
    more = f" ({format_size(first)} in the first, which fills the memory)" if first > read else ""
    moved = f"{format_size(read)}{more} read and {format_size(report.ssd_write_bytes)} written"
    epoch, busiest = report.timeline, report.timeline.bottleneck.value
    say(console, f"epoch: {format_duration(report.epoch_s)} in {len(epoch.passes)} passes, {moved}; busiest: {busiest}")


def print_report(report: PlanReport, console: Console) -> None:
    """Print the whole plan, and the tables that explain the time of an epoch."""
    _print_fates(report, console)
    _print_resources(report, console)
    _print_passes(report, console)
    _print_stages(report, console)
    _print_lifetimes(report, console)


def describe_budgets(report: PlanReport) -> str:
    """Return the memory budgets in words; where the CPU computes, there is only one."""
    limits = report.limits
    if not report.hardware.has_device_memory:
        return f"memory {format_size(limits.memory_bytes)}"
    return f"budgets {format_size(limits.device_bytes)} for the device, {format_size(limits.host_bytes)} for the host"


def print_changes(changes: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table of changes that would help, in the given order."""
    rows = []
    for change in changes:
        if change["epoch_s"] is None:
            rows.append((change["name"], "no plan", "", "", ""))
            continue
        saved = change["saved_s"]
        shown = format_duration(abs(saved))
        shown = f"-{shown}" if saved < 0 and shown != format_duration(0.0) else shown
        moved = format_size(change["ssd_read_bytes"]), format_size(change["ssd_write_bytes"])
        rows.append((change["name"], format_duration(change["epoch_s"]), shown, *moved))
    print_table(("change", "epoch", "saved", "SSD read", "SSD written"), rows, console)


def print_assumptions(lines: Sequence[str], console: Console) -> None:
    """Print the plan's assumptions, one line each, marked as such."""
    for line in lines:
        say(console, f"assumed: {line}")


def _print_fates(report: PlanReport, console: Console) -> None:
    rows = []
    tiers = report.hardware.has_device_memory
    for fate in report.plan.fates():
        shares = (f"{fate[share]} %" if fate[share] else "" for share in _PLACEMENTS)
        shape = f"{fate['rows']:,}", f"{fate['columns']:,}", format_size(fate["bytes"])
        where = fate["fate"] if tiers else fate["fate"].replace("host", "memory")
        rows.append((fate["matrix"], *shape, where, *shares, str(fate["slabs"])))
    shown = _PLACEMENTS if tiers else tuple("memory" if share == "host" else share for share in _PLACEMENTS)
    print_table(("matrix", "rows", "columns", "bytes", "fate", *shown, "slabs"), rows, console)


def _print_resources(report: PlanReport, console: Console) -> None:
    timeline = report.timeline
    rows = []
    for resource, busy_s in timeline.busy_s.items():
        share = f"{100 * busy_s / timeline.epoch_s:.0f} %" if timeline.epoch_s else ""
        moved = "" if resource is Resource.COMPUTE else format_size(timeline.moved_bytes.get(resource, 0))
        rows.append((resource.value, format_duration(busy_s), share, moved))
    print_table(("resource", "busy", "of the epoch", "bytes"), rows, console)


def _print_passes(report: PlanReport, console: Console) -> None:
    rows = [
        (item.title, format_duration(item.end_s - item.start_s), format_duration(item.waited_s), item.bound.value)
        for item in report.timeline.passes
    ]
    print_table(("pass", "time", "waits", "bound by"), rows, console)


def _print_stages(report: PlanReport, console: Console) -> None:
    rows = []
    for stage in stage_statistics(report.workload, report.program):
        sizes = (stage[f"{what}_bytes"] for what in ("edge", "loaded", "pulled", "stored"))
        counts = f"{stage['rows']:,}", f"{stage['edges']:,}" if stage["edges"] else ""
        products = f"{stage['multiplies']:.2e}" if stage["multiplies"] else ""
        rows.append((stage["stage"], *counts, *(format_size(size) if size else "" for size in sizes), products))
    columns = ("stage", "active rows", "active edges", "edge bytes", "loads", "pulls", "stores", "multiply-adds")
    print_table(columns, rows, console)


def _print_lifetimes(report: PlanReport, console: Console) -> None:
    rows = []
    for item in lifetimes(report.workload, report.program):
        reads = item["last_forward"] or "", ", ".join(item["backward"])
        rows.append((item["matrix"], format_size(item["nbytes"]), item["produced"] or "before the epoch", *reads))
    print_table(("matrix", "bytes", "produced", "last forward use", "backward use"), rows, console)


def print_fits(fits: "Sequence[Fit]", console: Console) -> None:
    """Print the largest batches by memory: the bound on graphs, nodes or paths, and the average number of graphs."""
    counted = list(dict.fromkeys(fit.counted for fit in fits))
    rows = []
    for memory in dict.fromkeys(fit.memory_bytes for fit in fits):
        row = [format_size(memory)]
        for fit in fits:
            if fit.memory_bytes == memory:
                row += [f"{fit.bound:,}" if fit.bound else "none", f"{fit.graphs:,.0f}" if fit.bound else ""]
        rows.append(row)
    heads = [name for each in counted for name in (f"--batch-{_BATCH_OPTION_ENDS.get(each, each)}", "graphs")]
    print_table(("memory", *heads), rows, console)
    say(
        console,
        "graphs: on average. By graphs or nodes a batch may be of the largest or densest ones there are. A step "
        "in float32 with all kept that layers save, parameters, gradients, and what Adam keeps; on a GPU its own few "
        "hundred MB come on top.",
    )


def print_floor(parts: dict[str, int], console: Console) -> None:
    """Print the least memory that training takes, part by part."""
    rows = [(what, format_size(nbytes)) for what, nbytes in parts.items()]
    print_table(("least memory", "bytes"), [*rows, ("in all", format_size(sum(parts.values())))], console)


def print_machines(machines: Sequence[Hardware], console: Console) -> None:
    """Print a table of machines, and the sources of their figures."""
    rows = []
    for machine in machines:
        pulled = _ROW_BYTES / machine.processor.pull_seconds_per_edge.at(_ROW_BYTES)
        cells = (
            machine.name,
            format_size(machine.device_memory_bytes),
            format_size(machine.host_memory_bytes),
            format_size(machine.wire.to_device_bytes_per_s) if machine.wire is not None else "none",
            format_size(machine.disk.read_bytes_per_s.at(_REQUEST_BYTES)),
            format_size(machine.disk.write_bytes_per_s.at(_REQUEST_BYTES)),
            f"{2 * machine.processor.multiplies_per_s['float32']:.2g}",
            format_size(pulled),
        )
        rows.append(cells)
    columns = ("machine", "device", "host", "wire/s", "SSD read/s", "write/s", "float32 FLOP/s", "pulled/s")
    print_table(columns, rows, console)
    for machine in machines:
        say(console, f"{machine.name}: {machine.source}")


# ---- a run ----------------------------------------------------------------------------------------------------------


def print_outcome(
    records: Sequence[EpochRecord],
    report: PlanReport | None,
    console: Console,
    *,
    metric: "Metric",
    store_bytes: int,
    run: Path,
) -> None:
    """Print a run's loss, scores, times, bytes moved, peak memory, and folder; without a ``report``, no forecast."""

    last, forecasts, scratch_bytes = records[-1], dict[str, float](), 0
    if report is not None:
        forecasts = {"time_s": report.timeline.epoch_s, "io_wait_s": report.timeline.wait_s}
        forecasts |= {"ssd_read_bytes": report.ssd_read_bytes, "ssd_write_bytes": report.ssd_write_bytes}
        forecasts["received_bytes"] = report.plan.received_bytes(report.program)
        scratch_bytes = report.plan.spill_bytes

    def moved(title: str, field: str) -> tuple[str, str]:
        total = sum(getattr(record, field) for record in records)
        forecast = f"; forecast {format_size(forecasts[field])}" if field in forecasts else ""
        return title, f"{format_size(total)} ({format_size(total / len(records))} an epoch{forecast})"

    def median(title: str, field: str) -> tuple[str, str]:
        seconds = statistics.median(getattr(record, field) for record in records)
        forecast = f"; forecast {format_duration(forecasts[field])}" if field in forecasts else ""
        return title, f"{format_duration(seconds)} (median{forecast})"

    rows = [("epochs", str(last.epoch)), ("loss", f"{last.loss:.5f}"), (metric.value, _scores_text(last))]
    best = best_record(records, rising=metric.higher_is_better)
    if best is not None and best.epoch != last.epoch:
        rows.append((f"best {metric.value}", f"{_scores_text(best)} (epoch {best.epoch})"))
    rows += [
        median("time an epoch", "time_s"),
        median("waiting for SSD", "io_wait_s"),
        moved("SSD read", "ssd_read_bytes"),
        moved("SSD written", "ssd_write_bytes"),
    ]
    if any(record.received_bytes for record in records):
        rows += [moved("received", "received_bytes"), median("waiting for rows", "exchange_wait_s")]
    rows += [
        *(moved(title, field) for title, field in _PCIE_TRAFFIC if any(getattr(r, field) for r in records)),
        ("data on disk", f"{format_size(store_bytes)} store + {format_size(scratch_bytes)} scratch"),
        *((f"peak {one.where}", _peak_text(one, records)) for one in (report.tiers if report else ())),
        ("peak of the process", f"{format_size(getrusage(RUSAGE_SELF).ru_maxrss * 1024)}, Python and torch included"),
        ("run", str(run)),
    ]
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _peak_text(tier: Tier, records: Sequence[EpochRecord]) -> str:
    return f"{format_size(max(map(tier.peak_bytes, records)))} of {format_size(tier.limit_bytes)}"


def _scores_text(record: EpochRecord) -> str:
    return ", ".join(format_scores(record)) or "not evaluated"


# ---- several processes ----------------------------------------------------------------------------------------------


_FORM_BYTES = ("halo_bytes", "columns_bytes")


def describe_ranks(reports: Sequence[PlanReport], timelines: Sequence[Timeline], alone_s: float) -> dict[str, Any]:
    """Return the epoch of several processes as plain data; ``alone_s`` is the seconds of an epoch in one process.

    ``reports`` and ``timelines`` are those of each process, the timelines on one clock.
    """
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
                "link_exposed_s": report.link_exposed_s,
            }
        )
    limits = reports[0].limits
    facts = {"link_bytes_per_s": limits.link_bytes_per_s, "links": reports[0].links}
    facts |= {"epoch_s": epoch_s, "alone_s": alone_s}
    forms = [one.plan.forms(one.program) for one in reports]
    pulls = [
        {
            "pulled": of_ranks[0].source,
            "halo_bytes": max(one.halo_bytes for one in of_ranks),
            "columns_bytes": None if of_ranks[0].columns_bytes is None else max(o.columns_bytes or 0 for o in of_ranks),
            "sent": ExchangeForm.COLUMNS.value if of_ranks[0].is_sharded else ExchangeForm.HALO.value,
        }
        for of_ranks in zip(*forms, strict=True)
    ]
    return {**facts, "speed_up": alone_s / epoch_s, "ranks": ranks, "pulls": pulls}


def print_ranks(found: dict[str, Any], console: Console) -> None:
    """Print a table with one row for each process, the bytes of each pull, and the speed-up of all together."""
    rows = []
    for rank, one in enumerate(found["ranks"]):
        memory, received = format_size(one["memory_bytes"]), format_size(one["received_bytes"])
        times = (format_duration(one[name]) for name in ("compute_s", "ssd_s", "link_s", "link_exposed_s"))
        computes, moves, receives, waits = times
        rows.append((str(rank), f"{one['rows']:,}", memory, computes, moves, received, receives, waits))
    print_table(("rank", "rows", "memory", "computes", "SSD busy", "receives", "in", "not hidden"), rows, console)
    pulls = [
        (one["pulled"], *("–" if one[name] is None else format_size(one[name]) for name in _FORM_BYTES), one["sent"])
        for one in found["pulls"]
    ]
    print_table(("pulled", "received of a halo", "of columns", "sent"), pulls, console)
    say(
        console,
        f"{len(found['ranks'])} processes: {format_duration(found['epoch_s'])} an epoch, one: "
        f"{format_duration(found['alone_s'])}, {found['speed_up']:.2f} times as fast; "
        f"links of {found['links']}",
    )
