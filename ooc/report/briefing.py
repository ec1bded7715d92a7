# SPDX-License-Identifier: Apache-2.0
"""What is said of a training before it begins, for people who know graph neural networks and not how ooc plans: graph,
model, memory, what waits in it, and how long an epoch will take. The plan itself is in ``ooc.report.tables``.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from ooc.plan import Kind
from ooc.plan.program.plan import Shares
from ooc.prefetch.engine import PAGE_BYTES
from ooc.progress.figures import format_count, format_duration
from ooc.progress.plan_report import PlanReport, lifetimes
from ooc.report.console import print_hanging
from ooc.sampling.graphs import GraphLoader
from ooc.sampling.loader import NeighborLoader
from ooc.sizes import format_size
from ooc.storage.store import Store, Task

_INDENT = 10
"""Columns of what a line is about."""
_WHOLE = 100


def print_briefing(lines: Sequence[tuple[str, str]], console: Console) -> None:
    """What each is about, and what is to say of it, wrapped below itself."""
    for what, text in lines:
        print_hanging(f"{what:<{_INDENT}}", text, console)


def describe_store(store: Store) -> str:
    """A graph in a line."""
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
    """How much memory may be taken, and how much disk will be."""
    limits, spilled = report.limits, report.plan.spill_bytes
    if report.hardware.has_device_memory:
        sizes = f"{format_size(limits.device_bytes)} on the GPU and {format_size(limits.host_bytes)} beside it"
    else:
        sizes = format_size(limits.memory_bytes)
    where = "here" if spill_dir.resolve() == Path.cwd() else f"in {spill_dir}"
    stepped = report.plan.state_bytes
    kept = f"; {format_size(stepped)} of what the optimizer keeps on the disk" if stepped else ""
    return sizes + kept + (f"; {format_size(spilled)} of scratch on the disk, {where}" if spilled else "")


def describe_waiting(report: PlanReport) -> str:
    """What of an epoch's data waits in memory, in a sentence: shares of what is read, by what it is to the model."""
    shares = {what: _mean(parts) for what, parts in _by_role(report) if parts}
    again = [f"{share.recompute} % of the {what}" for what, share in shares.items() if share.recompute]
    anew = f"; computed again: {_listed(again)}" if again else ""
    if not any(share.ssd for share in shares.values()):
        return f"everything that an epoch reads, once the first one has read it{anew}"
    kept = {what: share.device + share.host for what, share in shares.items()}
    held = [f"{'all' if share == _WHOLE else f'{share} %'} of the {what}" for what, share in kept.items() if share]
    if not held:
        return f"nothing that an epoch reads, all of which waits on the SSD{anew}"
    on_device = [f"{share.device} % of the {what}" for what, share in shares.items() if share.device]
    gpu = f"; on the GPU {_listed(on_device)}" if on_device and report.hardware.has_device_memory else ""
    return f"{_listed(held)}{gpu}; the rest waits on the SSD{anew}"


def describe_forecast(report: PlanReport, epochs: int) -> str:
    """Seconds and bytes of an epoch, and when so many are done."""
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


# ---- what waits where ---------------------------------------------------------------------------------------------


def _by_role(report: PlanReport) -> Iterator[tuple[str, list[tuple[int, Shares]]]]:
    """By what it is to the model, bytes of matrices that an epoch reads, and where these wait."""
    workload = report.workload
    stages = [stage.name for stage in workload.programs[report.program]]
    loss = next((at for at, stage in enumerate(workload.programs[report.program]) if stage.reverse), len(stages))
    produced = {life["matrix"]: life["produced"] for life in lifetimes(workload, report.program)}
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
        elif produced.get(name) is None or stages.index(produced[name]) < loss:
            role = "activations"
        else:
            role = "gradients"
        roles[role].append((nbytes[name], share))
    yield from roles.items()


def _mean(parts: Sequence[tuple[int, Shares]]) -> Shares:
    """Where the parts wait, in per cent of all their bytes."""
    whole = sum(nbytes for nbytes, _ in parts) or 1
    means = (sum(nbytes * share[way] for nbytes, share in parts) / whole for way in range(len(Shares._fields)))
    # A part, however small or large, is neither nothing nor all.
    return Shares(*(min(max(round(x), 1), _WHOLE - 1) if 0 < x < _WHOLE else round(x) for x in means))


def _listed(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def describe_batches(loader: NeighborLoader, *, a_step: int, memory_bytes: int) -> list[tuple[str, str]]:
    """What sampled batches are, ``a_step`` of them, and what is kept of their data."""
    plan = loader.plan
    drawn = ", ".join("all" if fanout < 0 else str(fanout) for fanout in loader.fanouts)
    steps = f", {a_step} a step" if a_step > 1 else ""
    sizes = f"{format_count(plan.most_nodes, 'nodes')} and {format_count(plan.most_edges, 'edges')}"
    batches = f"{len(loader)} an epoch{steps}, of {loader.batch_size:,} nodes and neighbours {drawn}; at most {sizes}"
    kept = "all features in memory"
    if "x" not in plan.resident:
        neighbours = "neighbours too" if "in/indices" in plan.resident else "neighbours on the SSD"
        pages = format_size(plan.cache_pages * PAGE_BYTES)
        kept = f"{pages} of the features in memory, {neighbours}; {plan.lookahead} sampled ahead"
    memory = f"{format_size(memory_bytes)}, of which {format_size(plan.nbytes)} at most are used; {kept}"
    return [("batches", batches), ("memory", memory)]


def describe_graph_batches(loader: GraphLoader, *, a_step: int, memory_bytes: int) -> list[tuple[str, str]]:
    """What batches of whole graphs are, ``a_step`` of them, and what is kept of their data."""
    plan, bounds = loader.plan, ", ".join(f"{bound:,} {name}" for name, bound in loader.bounds.most.items())
    steps = f", {a_step:,} a step" if a_step > 1 else ""
    kept = "all graphs in memory"
    if plan.cache_pages:
        kept = f"{format_size(sum(plan.cache_pages.values()) * PAGE_BYTES)} of the graphs in memory"
    memory = f"{format_size(memory_bytes)}, of which {format_size(plan.nbytes)} at most are used; {kept}"
    return [
        ("batches", f"{len(loader):,} an epoch{steps}, of at most {bounds}; the largest there can be: {plan.most}"),
        ("memory", memory),
    ]
