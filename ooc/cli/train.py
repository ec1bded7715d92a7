# SPDX-License-Identifier: Apache-2.0
"""``ooc train``: a store and a size of memory become a trained model."""

import shlex
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ooc import __version__
from ooc.cli import EXIT_INTERRUPTED
from ooc.cli.arguments.configuration import as_toml, config_option
from ooc.cli.arguments.options import COUNT, GroupedCommand, Option, verbosity_options
from ooc.cli.arguments.settings import (
    CHANGEABLE,
    RUN,
    SCHEDULES_OVER_EPOCHS,
    TrainSettings,
    check_links,
    check_sampling,
    model_name,
    next_run,
    only_store,
    settle_memory,
    settle_seeds,
    train_options,
    with_one_memory,
)
from ooc.cli.processes import follow, is_first, is_restarted, ranks_of_environment, silent_where_told, start_processes
from ooc.cli.report import check_page
from ooc.cli.seeds import SeedsType, say_as_json, say_stopped, train_seeds
from ooc.errors import OptionError, RunError
from ooc.events import Relay
from ooc.progress.reporter import Reporter, Verbosity

if TYPE_CHECKING:
    from rich.console import Console

    from ooc.engine.record import EpochRecord
    from ooc.events import Listener
    from ooc.progress.live import TrainingView
    from ooc.ranks import Ranks
    from ooc.report.logs import EpochLog
    from ooc.report.plan_report import PlanReport
    from ooc.train.runs.run import RunFolder
    from ooc.train.runs.seeds import SeedRuns
    from ooc.train.trainer import Trainer

_RUNS = Path("runs")
_JSON = "One JSON object a line: the start, every epoch, the end."
_OUT = "The run's folder. [default: a new one in runs/]"
_SEEDS = "One run each, by so many seeds (0, 1, …) or by these (0,3,7), into RUN/seed-0, …; then mean and deviation."
_NPROC = "Train by so many processes, as torchrun does. It changes no bit of results (of batches, with --threads)."
_REPORT = "Write a page about the run, as ooc report does, when it ends or is stopped."


@click.command(
    cls=GroupedCommand,
    short_help="Train a model on a store.",
    params=[
        click.Argument(["store"], required=False, type=click.Path()),
        *train_options(),
        Option(["--out"], type=click.Path(), metavar="RUN", help=_OUT, group=RUN),
        Option(
            ["--resume"], is_flag=True, help="Go on with the run at --out; its options hold unless given.", group=RUN
        ),
        Option(["--seeds"], type=SeedsType(), metavar="N", help=_SEEDS, group=RUN),
        Option(["--nproc"], type=COUNT, default=1, metavar="N", help=_NPROC, group=RUN),
        Option(["--dry-run"], is_flag=True, help="Plan, show the plan and write nothing.", group=RUN),
        *verbosity_options(RUN),
        Option(["--json", "as_json"], is_flag=True, help=_JSON, group=RUN),
        Option(["--report"], type=click.Path(path_type=Path), metavar="FILE.html", help=_REPORT, group=RUN),
        config_option(RUN),
    ],
    context_settings={"show_default": True},
)
@click.pass_context
def command(
    context: click.Context,
    /,
    store: str | None,
    out: str | None,
    resume: bool,
    seeds: tuple[int, ...] | None,
    nproc: int,
    dry_run: bool,
    verbosity: Verbosity,
    as_json: bool,
    report: Path | None,
    **options: Any,
) -> None:
    """Train on the whole graph in STORE, exactly, within the memory that --memory allows.

    STORE may be left out where the current folder holds exactly one *.ooc. Memory never changes
    results, only how long they take.
    """
    if report is not None:
        check_page(report)
    ranks = ranks_of_environment()
    if nproc > 1 and ranks is None:
        context.exit(start_processes(nproc, context.obj))
    shown = Verbosity.ERROR if as_json or not is_first(ranks) else verbosity
    call = _Call(verbosity=shown, as_json=as_json, dry_run=dry_run, report=report, ranks=ranks)
    resume = resume or (is_restarted() and out is not None and Path(out).exists())
    if resume and out is None:
        raise OptionError("--resume needs --out RUN, the run to go on with")

    def opened() -> "tuple[tuple[SeedRuns, TrainSettings] | None, tuple[RunFolder, TrainSettings] | None]":
        settled = _settle(context, store, options)
        several = _open_seeds(context, settled, out, resume, seeds, options)
        if several is not None and ranks is not None:
            raise OptionError("--seeds trains one seed after the other, each by one process; leave out --nproc")
        return several, None if several else _open_run(context, settled, out, resume, options)

    with silent_where_told(context, ranks):
        several, one = opened() if ranks is None else ranks.told(opened)
        try:
            if one is not None:
                _train_one(call, *one)
            elif several is not None:
                train = partial(_train, replace(call, alone=False))
                train_seeds(*several, train, shown, as_json=as_json, dry_run=dry_run)
                if report is not None and not dry_run:
                    _write_report(several[0].begun, report, shown)
        except KeyboardInterrupt:
            context.exit(EXIT_INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What is done and shown of a training. ``alone``: it is no run of several, and its outcome is printed. ``ranks``:
    the processes that train together, of which the first prints."""

    verbosity: Verbosity
    as_json: bool
    dry_run: bool
    report: Path | None
    ranks: "Ranks | None"
    alone: bool = True

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return is_first(self.ranks)


def _train_one(call: _Call, run: "RunFolder", settings: TrainSettings) -> None:
    run = run if call.is_first else follow(run)
    with Reporter(verbosity=call.verbosity, epochs=settings.epochs) as reporter, run:
        if run.resumed and call.verbosity > Verbosity.ERROR and not run.has_checkpoint:
            click.echo(f"{run.path} has finished no epoch: its first is the first", err=True)
        try:
            _train(call, run, settings, reporter, call.verbosity)
        except KeyboardInterrupt:
            reporter.close()
            done = run.records()
            if call.is_first:
                say_stopped(f"epoch {done[-1].epoch}" if done else "", run.path if run.started else None)
                if call.report is not None and done:
                    _write_report([run.path], call.report, call.verbosity)
            raise
        except BaseException:
            run.discard()
            raise
    if call.report is not None and not call.dry_run and call.is_first:
        _write_report([run.path], call.report, call.verbosity)


def _write_report(runs: list[Path], out: Path, verbosity: Verbosity) -> None:
    from ooc.report.page.document import write_report

    write_report(runs, out)
    if verbosity > Verbosity.ERROR:
        click.echo(f"report: {out}")


def _open_run(
    context: click.Context, /, store: str | None, out: str | None, resume: bool, options: dict[str, Any]
) -> "tuple[RunFolder, TrainSettings]":
    """The run to train, new or begun before, and the settings that hold for it. Writes nothing."""
    from ooc.train.runs.run import RunFolder

    if resume and out is not None:
        given = _given_now(context, store, options)
        run = RunFolder.open(out, given=given, changeable=CHANGEABLE, defaults=TrainSettings.defaults())
        return run, TrainSettings.from_config(run.config, run.path)
    settings, path = _begun(store, out, options)
    return RunFolder.create(path, {"ooc_version": __version__, **asdict(settings)}), settings


def _open_seeds(
    context: click.Context,
    /,
    store: str | None,
    out: str | None,
    resume: bool,
    seeds: tuple[int, ...] | None,
    options: dict[str, Any],
) -> "tuple[SeedRuns, TrainSettings] | None":
    """The runs of several seeds, where such are asked for or gone on with, and what they share. Writes nothing."""
    from ooc.train.runs.run import given_anew
    from ooc.train.runs.seeds import SeedRuns, holds_seeds

    if resume and out is not None:
        path = Path(out)
        asked = seeds is not None and _is_given(context, "seeds")
        if not holds_seeds(path):
            if asked:
                SeedRuns.open(path)  # which says what is there
            return None
        if _is_given(context, "seed"):
            raise OptionError(f"{path} holds runs of several seeds; give --seeds, or --out with one of its runs")
        runs = SeedRuns.open(path, seeds if asked else None)
        given = _given_now(context, store, options)
        runs.config = given_anew(path, {**TrainSettings.defaults(), **runs.config}, given, CHANGEABLE)
        return runs, TrainSettings.from_config({**runs.config, "seed": 0}, path)
    seeds = settle_seeds(context, options, seeds)
    if seeds is None:
        return None
    settings, path = _begun(store, out, options)
    shared = {name: value for name, value in asdict(settings).items() if name != "seed"}
    return SeedRuns.create(path, seeds, {"ooc_version": __version__, **shared}), settings


def _settle(context: click.Context, store: str | None, options: dict[str, Any]) -> str | None:
    """Make whole what paths were given, and choose between options that exclude each other; returns the store's."""
    for name in ("spill_dir", "links"):
        if options[name] is not None:
            options[name] = str(Path(options[name]).resolve())
    options.update({name: list(value) for name, value in options.items() if isinstance(value, tuple)})
    settle_memory(context, options)
    return None if store is None else str(Path(store).resolve())


def _given_now(context: click.Context, store: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What a run that is gone on with is asked for."""
    given = {name: value for name, value in options.items() if _is_given(context, name)}
    return with_one_memory(given if store is None else {**given, "store": store})


def _begun(store: str | None, out: str | None, options: dict[str, Any]) -> tuple[TrainSettings, Path]:
    """The settings of what is begun anew, and the folder for it."""
    store = str(only_store(Path()).resolve()) if store is None else store
    if options["schedule"] in SCHEDULES_OVER_EPOCHS:
        options["schedule_epochs"] = options["schedule_epochs"] or options["epochs"]  # more epochs later change nothing
    settings = TrainSettings(store=store, **options)
    return settings, Path(out) if out is not None else next_run(_RUNS, store, settings.model)


def _is_given(context: click.Context, name: str) -> bool:
    """Whether a run that is gone on with is asked for this: of the environment only what changes no result counts."""
    match context.get_parameter_source(name):
        case ParameterSource.COMMANDLINE | ParameterSource.DEFAULT_MAP:
            return True
        case ParameterSource.ENVIRONMENT:
            return name in CHANGEABLE
        case _:
            return False


def _train(call: _Call, run: "RunFolder", settings: TrainSettings, reporter: Reporter, verbosity: Verbosity) -> None:
    """Train ``run``, or only plan it."""
    from ooc.report.console import output
    from ooc.report.logs import epoch_as_json
    from ooc.report.plan_report import PlanReport
    from ooc.report.runs import describe_run
    from ooc.report.starts import note_start
    from ooc.report.tables import print_outcome
    from ooc.train.batched.batches import BatchTrainer

    ranks = call.ranks
    logs = _logs(settings, run) if call.is_first else []
    lines = [epoch_as_json] if call.as_json and call.is_first else []
    made = partial(_trainer, run, settings, Relay(reporter, *logs, *lines))
    with made() if ranks is None else ranks.all_of(made) as trainer:
        report = None
        if not isinstance(trainer, BatchTrainer):
            parts = trainer.workload, trainer.plan, trainer.hardware, trainer.limits
            report = PlanReport.of_run(*parts, eval_every=settings.eval_every)
        done = _epochs_done(run)
        if verbosity >= Verbosity.INFO:
            _brief(trainer, settings, report, settings.epochs - done, output(), verbosity)
        if call.as_json and call.is_first:
            say_as_json("start", _start(run, settings, trainer, report, dry_run=call.dry_run))
        elif call.dry_run and call.alone and call.is_first:
            click.echo(f"nothing is trained or written; without --dry-run, {run.path} would be the run")
        if call.dry_run:
            return
        note_start(run, report, trainer.spill_dir, trainer.metric)
        if reporter.is_live and report is not None:
            reporter.show(_view(settings, run, trainer, report, done))
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
        print_outcome(
            run.records(), report, output(), metric=trainer.metric, store_bytes=trainer.store.nbytes, run=run.path
        )


def _trainer(run: "RunFolder", settings: TrainSettings, listener: "Listener") -> "Trainer":
    """What trains ``run``."""
    from ooc.storage.store import open_store

    check_links(settings)
    heading = f"ooc {__version__}: ooc train --config THIS_FILE repeats the run"
    run.repeated_by = as_toml("train", asdict(settings), heading=heading)
    store = open_store(settings.store)
    check_sampling(settings, many_graphs=store.num_graphs > 0)
    run.check_store(store)

    import torch

    from ooc.cli.arguments.recipe import admit_parameters, build_trainer, check_own_model
    from ooc.train.links.metrics import LinkMetric
    from ooc.train.metrics import Metric, resolve_metric

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    check_own_model(settings.model, run)
    admit_parameters(settings, store)
    if settings.links is None:
        metric: Metric | LinkMetric = resolve_metric(settings.metric, store.task, store.num_classes)
    else:
        metric = LinkMetric.of(settings.metric or "mrr")
    return build_trainer(settings, store, run, metric, listener)


def _start(
    run: "RunFolder", settings: TrainSettings, trainer: "Trainer", report: "PlanReport | None", *, dry_run: bool
) -> dict[str, Any]:
    """What the first line of ``--json`` says."""
    from ooc.train.batched.graphs import GraphTrainer
    from ooc.train.batched.sampled import SampledTrainer

    begun: dict[str, Any] = {"run": str(run.path), "store": settings.store}
    begun |= {"epochs": settings.epochs, "resumed": run.resumed, "dry_run": dry_run}
    if isinstance(trainer, GraphTrainer):
        made = trainer.loader.plan
        return begun | {"batches": {"number": len(trainer.loader), **asdict(made), "resident": sorted(made.resident)}}
    if isinstance(trainer, SampledTrainer):
        plan = trainer.loader.plan
        drawn = {"fanouts": settings.drawn, "batches": len(trainer.loader)}
        return begun | {"sampling": {**drawn, **asdict(plan), "resident": sorted(plan.resident)}}
    assert report is not None
    return begun | {"plan": report.as_dict()}


def _view(
    settings: TrainSettings, run: "RunFolder", trainer: "Trainer", report: "PlanReport", done: int
) -> "TrainingView":
    """What shows the training on a terminal."""
    from ooc.progress.live import TrainingView

    return TrainingView(
        title=f"{model_name(settings.model)} on {trainer.store.path.name}, {run.path}",
        first=done + 1,
        records=_earlier_records(run, done),
        last=settings.epochs,
        metric=trainer.metric.value,
        rising=trainer.metric.higher_is_better,
        promise=report.promise,
    )


def _epochs_done(run: "RunFolder") -> int:
    last = run.last()
    return 0 if last is None else int(last["epoch"])


def _earlier_records(run: "RunFolder", done: int) -> "list[EpochRecord]":
    """Of the epochs done, for the view."""
    try:
        return [record for record in run.records() if record.epoch <= done]
    except RunError:  # a damaged line, which is mended when the run goes on
        return []


def _brief(
    trainer: "Trainer",
    settings: TrainSettings,
    report: "PlanReport | None",
    epochs: int,
    console: "Console",
    verbosity: Verbosity,
) -> None:
    """Say what will be trained within what, and what is expected of it; ``verbosity`` DEBUG: the whole plan."""
    from ooc.cli.arguments.recipe import describe_model
    from ooc.plan import UNMEASURED, UNMEASURED_DEVICE
    from ooc.report.briefing import (
        describe_batches,
        describe_forecast,
        describe_graph_batches,
        describe_memory,
        describe_store,
        describe_waiting,
        print_briefing,
    )
    from ooc.report.console import say
    from ooc.report.tables import print_plan
    from ooc.train.batched.graphs import GraphTrainer
    from ooc.train.batched.sampled import SampledTrainer

    spill = shlex.quote(str(trainer.spill_dir))
    weighted = trainer.store.has_edge_weight
    lines = [
        ("graph", describe_store(trainer.store)),
        ("model", describe_model(settings, trainer.model, weighted=weighted)),
    ]
    if isinstance(trainer, GraphTrainer):
        a_step, memory = settings.accumulate, trainer.memory_bytes
        print_briefing(lines + describe_graph_batches(trainer.loader, a_step=a_step, memory_bytes=memory), console)
        return
    if report is None:
        assert isinstance(trainer, SampledTrainer)
        lines += describe_batches(trainer.loader, a_step=settings.accumulate, memory_bytes=trainer.memory_bytes)
        print_briefing(lines, console)
        return
    lines += [
        ("memory", describe_memory(report, trainer.spill_dir)),
        ("in memory", describe_waiting(report)),
        ("forecast", describe_forecast(report.promise, epochs)),
    ]
    print_briefing(lines, console)
    if verbosity >= Verbosity.DEBUG:
        print_plan(report, console)
    if trainer.hardware in (UNMEASURED, UNMEASURED_DEVICE):
        of_device = " --device cuda" if settings.device == "cuda" else ""
        of_disk = "" if trainer.spill_dir.resolve() == Path.cwd() else f" --spill-dir {spill}"
        say(console, f"(estimates; ooc profile{of_device}{of_disk} measures this machine in 15 s)")


def _logs(settings: TrainSettings, run: "RunFolder") -> "list[EpochLog]":
    """The logs asked for, beside the run's own."""
    from ooc.report.logs import CsvLog, TensorBoardLog

    kinds = {"csv": (CsvLog, "metrics.csv"), "tensorboard": (TensorBoardLog, "tensorboard")}
    return [kind(run.path / name, run.records) for log, (kind, name) in kinds.items() if log in settings.log]
