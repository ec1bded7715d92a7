# SPDX-License-Identifier: Apache-2.0
"""``ooc train --sampler``: what is said of training by sampled mini-batches, before, meanwhile and after."""

import resource
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ooc.cli.arguments.settings import TrainSettings
from ooc.progress.reporter import Reporter, Verbosity

if TYPE_CHECKING:
    from ooc.engine.record import EpochRecord
    from ooc.report.logs import EpochLog
    from ooc.storage.store import Store
    from ooc.train.metrics import Metric
    from ooc.train.run import RunFolder
    from ooc.train.sampled import SampledTrainer

Say = Callable[[str, dict[str, Any]], None]


def train_sampled(
    run: "RunFolder",
    settings: TrainSettings,
    store: "Store",
    reporter: Reporter,
    verbosity: Verbosity,
    logs: "Sequence[EpochLog]",
    *,
    say: Say | None,
    dry_run: bool,
    alone: bool,
) -> None:
    """Train ``run`` by sampled batches, or only say how it would be: by ``say`` as JSON, else for people; ``alone``: it
    is no run of several."""
    import torch

    from ooc.cli.arguments.recipe import admit_parameters, build_sampled_trainer, check_own_model, describe_model
    from ooc.report.briefing import describe_store, print_briefing
    from ooc.report.console import output
    from ooc.report.logs import epoch_as_json, several
    from ooc.report.runs import describe_run
    from ooc.report.starts import note_start
    from ooc.train.metrics import resolve_metric

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    check_own_model(settings.model, run)
    admit_parameters(settings, store)
    metric = resolve_metric(settings.metric, store.task, store.num_classes)
    listener = several(reporter, *logs, *([] if say is None else [epoch_as_json]))
    with build_sampled_trainer(settings, store, run, metric, listener) as trainer:
        if verbosity >= Verbosity.INFO:
            model = describe_model(settings, trainer.model, weighted=store.has_edge_weight)
            lines = [("graph", describe_store(store)), ("model", model), *_describe_batches(trainer)]
            print_briefing(lines, output())
        if say is not None:
            begun = {"epochs": settings.epochs, "resumed": run.resumed, "dry_run": dry_run}
            say("start", {"run": str(run.path), "store": settings.store, **begun, "sampling": _plan(trainer)})
        elif dry_run and alone:
            click.echo(f"nothing is trained or written; without --dry-run, {run.path} would be the run")
        if dry_run:
            return
        note_start(run, None, trainer.spill_dir, metric)
        trainer.fit(
            epochs=settings.epochs,
            eval_every=settings.eval_every,
            patience=settings.patience,
            resume=run.resumed,
            allow_nonfinite=settings.allow_nonfinite,
        )
        for log in logs:
            log.complete()
    reporter.close()
    if say is not None:
        say("end", describe_run(run.path, held=True))
    elif alone:
        _print_outcome(run, run.records(), metric)


def _plan(trainer: "SampledTrainer") -> dict[str, Any]:
    plan, loader = trainer.loader.plan, trainer.loader
    return {
        "fanouts": list(loader.fanouts),
        "batch_size": loader.batch_size,
        "batches": len(loader),
        "most_nodes": plan.most_nodes,
        "most_edges": plan.most_edges,
        "lookahead": plan.lookahead,
        "resident": sorted(plan.resident),
        "cache_pages": plan.cache_pages,
        "memory_bytes": trainer.limits.memory_bytes,
        "planned_bytes": plan.nbytes,
        "least_bytes": plan.least_bytes,
    }


def _describe_batches(trainer: "SampledTrainer") -> list[tuple[str, str]]:
    from ooc.prefetch.engine import PAGE_BYTES
    from ooc.progress.figures import format_count
    from ooc.sizes import format_size

    loader, plan, group = trainer.loader, trainer.loader.plan, trainer.sampling.accumulate
    drawn = ", ".join("all" if fanout < 0 else str(fanout) for fanout in loader.fanouts)
    steps = f", {group} a step" if group > 1 else ""
    sizes = f"{format_count(plan.most_nodes, 'nodes')} and {format_count(plan.most_edges, 'edges')}"
    batches = f"{len(loader)} an epoch{steps}, of {loader.batch_size:,} nodes and neighbours {drawn}; at most {sizes}"
    if "x" in plan.resident:
        kept = "all features in memory"
    else:
        kept = f"{format_size(plan.cache_pages * PAGE_BYTES)} of the features in memory"
        kept += ", neighbours too" if "in/indices" in plan.resident else ", neighbours on the SSD"
        kept += f"; {plan.lookahead} sampled ahead"
    memory = f"{format_size(trainer.limits.memory_bytes)}, of which {format_size(plan.nbytes)} at most are used; {kept}"
    return [("batches", batches), ("memory", memory)]


def _print_outcome(run: "RunFolder", records: "Sequence[EpochRecord]", metric: "Metric") -> None:
    """Loss, scores, time and bytes, and where the run's files are."""
    import statistics

    from ooc.progress.figures import format_duration
    from ooc.report.console import output, print_hanging
    from ooc.report.tables import best_record, describe_scores
    from ooc.sizes import format_size

    last, best = records[-1], best_record(records, rising=metric.higher_is_better)
    rows = [("epochs", str(last.epoch)), ("loss", f"{last.loss:.5f}"), (metric.value, describe_scores(last))]
    if best is not None and best.epoch != last.epoch:
        rows.append((f"best {metric.value}", f"{describe_scores(best)} (epoch {best.epoch})"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read = sum(record.ssd_read_bytes for record in records)
    rows += [
        ("time an epoch", f"{format_duration(statistics.median(record.time_s for record in records))} (median)"),
        ("waiting", f"{format_duration(statistics.median(record.io_wait_s for record in records))} for batches"),
        ("SSD read", f"{format_size(read)} ({format_size(read / len(records))} an epoch)"),
        ("peak of the process", f"{format_size(peak)}, Python and torch included"),
        ("run", str(run.path)),
    ]
    for label, text in rows:
        print_hanging(f"{label:<22}", text, output())
