# SPDX-License-Identifier: Apache-2.0
"""The work of ``ooc train`` on a run, or on the runs of several seeds.

This module loads torch, so ``train`` imports it only once the options are settled.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from ooc import __version__
from ooc.cli import restore_garbage_collection
from ooc.cli.arguments.configuration import as_toml
from ooc.cli.arguments.recipe import build_trainer, check_user_model, describe_model
from ooc.cli.arguments.settings import CHANGEABLE, TrainSettings, model_name
from ooc.engine.record import EpochRecord
from ooc.errors import RunError, TrainingError
from ooc.events import Listener, Relay, ignore
from ooc.plan import UNMEASURED, UNMEASURED_DEVICE
from ooc.progress.plan_report import PlanReport
from ooc.progress.reporter import Reporter, Verbosity
from ooc.ranks import Ranks
from ooc.report import tables
from ooc.report.console import output, print_hanging, say
from ooc.report.logs import Correction, CsvLog, EpochLog, TensorBoardLog, epoch_as_json, note_start
from ooc.report.page.document import write_report
from ooc.report.runs import describe_run, describe_seed, describe_summary, summarize
from ooc.storage.store import open_store
from ooc.train.batched.batches import SampledTrainer
from ooc.train.batched.graphs import GraphTrainer
from ooc.train.links.metrics import LinkMetric
from ooc.train.metrics import Metric, resolve_metric
from ooc.train.runs.run import RunFolder, SeedRuns, holds_run
from ooc.train.trainer import Trainer

_INDENT = 10
"""Columns of the labels before the lines that describe a training."""
_LOGS = {"csv": (CsvLog, "metrics.csv"), "tensorboard": (TensorBoardLog, "tensorboard")}


@dataclass(frozen=True, kw_only=True)
class Call:
    """The options of one ``ooc train`` call that say what is shown and done. ``alone``: the run is not one of several
    seeds, and its outcome is printed. ``ranks``: the processes that train together; the first of them prints."""

    verbosity: Verbosity
    as_json: bool
    dry_run: bool
    report: Path | None
    ranks: Ranks
    alone: bool = True

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.ranks.rank == 0

    def write_report(self, runs: Sequence[Path]) -> None:
        """Write the page about ``runs`` if one was asked for, this process is the first, and something was trained."""
        if self.report is not None and self.is_first and not self.dry_run:
            write_report(runs, self.report)
            if self.verbosity > Verbosity.ERROR:
                click.echo(f"report: {self.report}")


def train(call: Call, run: RunFolder | SeedRuns, settings: TrainSettings) -> None:
    """Train a run, or the runs of several seeds in turn. On KeyboardInterrupt, say how to go on and re-raise."""
    if isinstance(run, SeedRuns):
        _train_seeds(call, run, settings)
        call.write_report(run.begun)
        return
    run = run if call.is_first else run.followed()
    with Reporter(verbosity=call.verbosity, epochs=settings.epochs) as reporter:
        if run.resumed and call.verbosity > Verbosity.ERROR and not run.has_checkpoint:
            click.echo(f"{run.path} has finished no epoch: its first is the first", err=True)
        _train_or_discard(call, run, settings, reporter)
    call.write_report([run.path])


def _train_or_discard(
    call: Call, run: RunFolder, settings: TrainSettings, reporter: Reporter, seeds: SeedRuns | None = None
) -> None:
    """Train ``run``, which may be one of several ``seeds``; on an error, discard a run that has finished no epoch."""
    with run:
        try:
            if seeds is not None:
                seeds.start()
            _train(call, run, settings, reporter)
        except KeyboardInterrupt:
            reporter.close()
            done = run.records()
            where, of_seed = (run.path if run.started else None), ""
            if seeds is not None:
                where, of_seed = seeds.path, f" of seed {settings.seed}"
            if call.is_first:
                after = f"after epoch {done[-1].epoch}{of_seed}" if done else "before the first epoch was done"
                hint = "" if where is None else f"; go on with: ooc train --resume --out {shlex.quote(str(where))}"
                click.echo(f"ooc: stopped {after}{hint}", err=True)
            if done and seeds is None:
                call.write_report([run.path])
            raise
        except BaseException as error:
            run.discard()
            if seeds is not None:
                seeds.discard()
                if isinstance(error, TrainingError):
                    raise TrainingError(f"seed {settings.seed}: {error}") from error
            raise


def _train(call: Call, run: RunFolder, settings: TrainSettings, reporter: Reporter) -> None:
    """Train ``run``; in a dry run, only plan it."""
    logs: list[EpochLog] = []
    if call.is_first:
        logs = [kind(run.path / name, run.records) for log, (kind, name) in _LOGS.items() if log in settings.log]
    lines = [epoch_as_json] if call.as_json and call.is_first else []
    relay = Relay(reporter, *logs, *lines)
    with call.ranks.in_all(partial(_build_run_trainer, run, settings, relay)) as trainer:
        report = trainer.report(settings.eval_every)
        done = trainer.ranks.from_first(lambda: int((run.last() or {"epoch": 0})["epoch"]))
        if call.verbosity >= Verbosity.INFO:
            _print_heading(trainer, settings, report, settings.epochs - done, call.verbosity)
        if call.as_json and call.is_first:
            say_as_json("start", _start_event(run, settings, trainer, report, dry_run=call.dry_run))
        elif call.dry_run and call.alone and call.is_first:
            click.echo(f"nothing is trained or written; without --dry-run, {run.path} would be the run")
        if call.dry_run:
            return
        note_start(run, report, trainer.spill_dir, trainer.metric)
        if reporter.is_live:
            title = f"{model_name(settings.model)} on {trainer.store.path.name}, {run.path}"
            shown = done + 1, settings.epochs, settings.eval_every, _earlier_records(run, done)
            reporter.show(trainer.view(title, *shown))
        corrected = ignore if report is None else Correction(report, settings.epochs, reporter)
        with relay.joined(corrected if call.verbosity >= Verbosity.INFO else ignore):
            restore_garbage_collection()
            trainer.fit(
                epochs=settings.epochs,
                eval_every=settings.eval_every,
                patience=settings.patience,
                resume=run.resumed,
                allow_nonfinite=settings.allow_nonfinite,
                progress=False,
            )
        for log in logs:
            log.complete()
    reporter.close()
    if call.as_json and call.is_first:
        say_as_json("end", describe_run(run.path, held=True))
    elif call.alone and call.is_first:
        tables.print_outcome(
            run.records(), report, output(), metric=trainer.metric, store_bytes=trainer.store.nbytes, run=run.path
        )


def _build_run_trainer(run: RunFolder, settings: TrainSettings, listener: Listener) -> Trainer:
    """Return the trainer of ``run``, after checking its store and its model's file."""
    heading = f"ooc {__version__}: ooc train --config THIS_FILE repeats the run"
    run.repeated_by = as_toml("train", asdict(settings), heading=heading)
    store = open_store(settings.store)
    run.check_store(store)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    check_user_model(settings.model, run)
    if settings.links is None:
        metric: Metric | LinkMetric = resolve_metric(settings.metric, store.task, store.num_classes)
    else:
        metric = LinkMetric.of(settings.metric or "mrr")
    return build_trainer(settings, store, run, metric, listener)


def _start_event(
    run: RunFolder, settings: TrainSettings, trainer: Trainer, report: PlanReport | None, *, dry_run: bool
) -> dict[str, Any]:
    """Return the contents of the first line of ``--json``."""
    begun: dict[str, Any] = {"run": str(run.path), "store": settings.store}
    begun |= {"epochs": settings.epochs, "resumed": run.resumed, "dry_run": dry_run}
    if isinstance(trainer, GraphTrainer | SampledTrainer):
        plan, number = trainer.loader.plan, len(trainer.loader)
        planned = {**asdict(plan), "resident": sorted(plan.resident)}
        if isinstance(trainer, GraphTrainer):
            return begun | {"batches": {"number": number, **planned, "most": asdict(trainer.loader.most)}}
        nodes, edges = trainer.loader.most
        planned |= {"cache_pages": plan.cache_pages["x"], "most_nodes": nodes, "most_edges": edges}
        return begun | {"sampling": {"fanouts": settings.drawn, "batches": number, **planned}}
    assert report is not None
    return begun | {"plan": report.as_dict()}


def _earlier_records(run: RunFolder, done: int) -> list[EpochRecord]:
    """Return the records of the ``done`` epochs, for the live view."""
    try:
        return [record for record in run.records() if record.epoch <= done]
    except RunError:  # a damaged line, repaired when the run is resumed
        return []


def _print_heading(
    trainer: Trainer, settings: TrainSettings, report: PlanReport | None, epochs: int, verbosity: Verbosity
) -> None:
    """Print graph, model, memory and forecast before training; with ``verbosity`` DEBUG, also the whole plan."""
    console, store = output(), trainer.store
    lines = [
        ("graph", tables.describe_store(store)),
        ("model", describe_model(settings, trainer.model, weighted=store.has_edge_weight)),
    ]
    if report is not None and trainer.ranks.count > 1:
        given = "as given" if settings.link else "as measured"
        lines.append(("links", f"{report.links}, {given}"))
    if report is not None:
        lines += [
            ("memory", tables.describe_memory(report, trainer.spill_dir)),
            ("in memory", tables.describe_waiting(report)),
            ("forecast", tables.describe_forecast(report, epochs)),
        ]
    elif isinstance(trainer, GraphTrainer):
        lines += tables.describe_graph_batches(
            trainer.loader, a_step=settings.accumulate, memory_bytes=trainer.memory_bytes
        )
    elif isinstance(trainer, SampledTrainer):
        lines += tables.describe_batches(trainer.loader, a_step=settings.accumulate, memory_bytes=trainer.memory_bytes)
    for what, text in lines:
        print_hanging(f"{what:<{_INDENT}}", text, console)
    if report is None:
        return
    if verbosity >= Verbosity.DEBUG:
        tables.print_summary(report, console)
        tables.print_report(report, console)
    if trainer.hardware in (UNMEASURED, UNMEASURED_DEVICE):
        of_device = " --device cuda" if settings.device == "cuda" else ""
        spill = shlex.quote(str(trainer.spill_dir))
        of_disk = "" if trainer.spill_dir.absolute() == Path.cwd() else f" --spill-dir {spill}"
        say(console, f"(estimates; ooc profile{of_device}{of_disk} measures this machine in 15 s)")


# ---- several seeds --------------------------------------------------------------------------------------------------


def _train_seeds(call: Call, runs: SeedRuns, settings: TrainSettings) -> None:
    """Train the seeds of ``runs`` that are not finished, and print the summary of all of them."""
    call = replace(call, alone=False)
    if call.verbosity >= Verbosity.INFO:
        seeds = ", ".join(map(str, runs.seeds))
        print_hanging(f"{'seeds':<{_INDENT}}", f"{seeds}: one run each, in {runs.path}", output())
    if call.dry_run:
        run, own = _open_run(runs, settings, runs.seeds[0])
        with Reporter(verbosity=call.verbosity) as reporter, run:
            _train(call, run, own, reporter)
        if not call.as_json:
            paths = [str(runs.run_path(seed)) for seed in runs.seeds]
            where = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
            count = f"{len(paths)} run{'s' * (len(paths) != 1)}"
            say(output(), f"nothing is trained or written; it would be {count}, {where}")
        return
    found = []
    reporter = Reporter(verbosity=call.verbosity, epochs=settings.epochs)
    if not reporter.is_live and call.verbosity < Verbosity.DEBUG:  # print epochs only with --verbose
        reporter = Reporter(verbosity=min(call.verbosity, Verbosity.WARNING), epochs=settings.epochs)
    with reporter:
        for seed in runs.seeds:
            path = runs.run_path(seed)
            run, own = _open_run(runs, settings, seed)
            before = describe_run(path) if run.resumed else None
            if before is None or not _is_finished(before, own):
                _train_or_discard(call, run, own, reporter, runs)
                once = min(call.verbosity, Verbosity.WARNING)  # the description of the training is printed once
                call = replace(call, verbosity=once)
            found.append(describe_run(path))
            if call.verbosity > Verbosity.ERROR:
                seconds = sum(record.time_s + record.eval_s for record in run.records())
                click.echo(describe_seed(seed, found[-1], seconds))
    if call.as_json:
        say_as_json("seeds", {"out": str(runs.path), "seeds": runs.seeds, "runs": found, **summarize(found)})
        return
    for line in describe_summary(found, Metric(found[-1]["metric"])):
        click.echo(line)
    if call.verbosity > Verbosity.ERROR:
        click.echo(f"side by side: ooc runs {shlex.quote(str(runs.path))}")


def _open_run(runs: SeedRuns, settings: TrainSettings, seed: int) -> tuple[RunFolder, TrainSettings]:
    """Return the run of ``seed``, new or resumed, and its settings: ``settings`` with that seed."""
    path, own = runs.run_path(seed), replace(settings, seed=seed)
    if not holds_run(path):
        return RunFolder.create(path, {"ooc_version": __version__, **asdict(own)}), own
    run = RunFolder.open(path, given=asdict(own), changeable=CHANGEABLE, defaults=TrainSettings.defaults())
    return run, TrainSettings.from_config(run.config, path)


def _is_finished(found: dict[str, Any], settings: TrainSettings) -> bool:
    """Whether ``found`` describes a run that needs no more training; it may have been asked for fewer epochs before."""
    asked = found["epochs_asked"] == settings.epochs or found["epochs"] >= settings.epochs
    return bool(found["state"] == "finished" and asked)


def say_as_json(event: str, facts: dict[str, Any]) -> None:
    """Print one event as a line of ``--json``."""
    click.echo(json.dumps({"event": event, **facts}, allow_nan=False))
