# SPDX-License-Identifier: Apache-2.0
"""``ooc train``: train a model on a store within a memory budget, with ``--nproc`` in several processes.

Several processes each run the same command, as ``torchrun`` starts them.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ooc import __version__
from ooc.cli import EXIT_ERROR, EXIT_INTERRUPTED, describe_os_error
from ooc.cli.arguments.configuration import config_option
from ooc.cli.arguments.options import COUNT, SEEDS, GroupedCommand, Option, verbosity_options
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
    user_model_of,
    with_one_memory,
)
from ooc.cli.report import PAGE_SUFFIXES
from ooc.errors import BudgetError, OocError, OptionError, RankError, SpillError, StoreError, TrainingError
from ooc.progress.reporter import Verbosity
from ooc.sizes import format_size

if TYPE_CHECKING:
    from ooc.train.runs.run import RunFolder, SeedRuns

    Opened = tuple[SeedRuns | RunFolder, TrainSettings]
    """The run, or runs of several seeds, to be trained, and its settings."""
    from ooc.ranks import Ranks

_PROCESS_BYTES = 300_000_000
"""The bytes a process takes for Python, torch and PyG, before it has anything to train."""
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
        Option(["--seeds"], type=SEEDS, metavar="N", help=_SEEDS, group=RUN),
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
        from ooc.report.console import check_drawing

        check_drawing(report, *PAGE_SUFFIXES)
    with report_failure_once(context, None):
        ranks = ranks_of_environment()
    if nproc > 1 and ranks is None:
        context.exit(start_processes(nproc, context.obj))
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_restarted = count != "0" if ranks is None else ranks.is_anew  # restarted by torchrun --max-restarts
    resume = resume or (is_restarted and out is not None and Path(out).exists())
    if resume and out is None:
        raise OptionError("--resume needs --out RUN, the run to go on with")

    def opened() -> "Opened":
        """Return the run and its settings, after every check of the options that does not need torch."""
        from ooc.storage.store import open_store
        from ooc.train.runs.run import SeedRuns

        for name in ("spill_dir", "links"):
            if options[name] is not None:
                options[name] = os.path.realpath(options[name])
        options.update({name: list(value) for name, value in options.items() if isinstance(value, tuple)})
        settle_memory(context, options)
        on = None if store is None else os.path.realpath(store)
        if resume and out is not None:
            run, settings = _resumed(context, on, Path(out), seeds, options)
        else:
            run, settings = _created(on, out, settle_seeds(context, options, seeds), options)
        if isinstance(run, SeedRuns) and ranks is not None:
            raise OptionError("--seeds trains one seed after the other, each by one process; leave out --nproc")
        check_links(settings)
        check_sampling(settings, many_graphs=open_store(settings.store).num_graphs > 0)
        return run, settings

    with report_failure_once(context, ranks):
        if ranks is not None:
            from ooc.train.model_snapshot import check_software

            check_software(ranks)
            asked = {"seeds": seeds, "resume": resume, "dry_run": dry_run, **options}
            ranks.check_equal(_shared_options(context, asked), "the command")
        run, settings = opened() if ranks is None else ranks.from_first(opened)
        if ranks is not None:
            settings = _local_settings(context, settings, store, options)
        from ooc.cli.training import Call, train
        from ooc.ranks import ALONE

        shown = Verbosity.ERROR if as_json or (ranks is not None and ranks.rank) else verbosity
        call = Call(verbosity=shown, as_json=as_json, dry_run=dry_run, report=report, ranks=ranks or ALONE)
        try:
            train(call, run, settings)
        except KeyboardInterrupt:
            context.exit(EXIT_INTERRUPTED)


def _resumed(
    context: click.Context, store: str | None, path: Path, seeds: tuple[int, ...] | None, options: dict[str, Any]
) -> "Opened":
    """Return the run, or runs of several seeds, to resume at ``path``, and the settings from now on. Write nothing."""
    from ooc.train.runs.run import RunFolder, SeedRuns, holds_seeds, updated_config

    given = {name: value for name, value in options.items() if _is_given(context, name)}
    given = with_one_memory(given if store is None else {**given, "store": store})
    asked = seeds if _is_given(context, "seeds") else None
    if asked is None and not holds_seeds(path):
        run = RunFolder.open(path, given=given, changeable=CHANGEABLE, defaults=TrainSettings.defaults())
        return run, TrainSettings.from_config(run.config, path)
    runs = SeedRuns.open(path, asked)
    if _is_given(context, "seed"):
        raise OptionError(f"{path} holds runs of several seeds; give --seeds, or --out with one of its runs")
    runs.config = updated_config(path, {**TrainSettings.defaults(), **runs.config}, given, CHANGEABLE)
    return runs, TrainSettings.from_config({**runs.config, "seed": 0}, path)


def _created(store: str | None, out: str | None, seeds: tuple[int, ...] | None, options: dict[str, Any]) -> "Opened":
    """Return a new run, or runs of several seeds, with its settings. Write nothing."""
    from ooc.train.runs.run import RunFolder, SeedRuns

    store = str(only_store(Path()).resolve()) if store is None else store
    if options["schedule"] in SCHEDULES_OVER_EPOCHS:
        options["schedule_epochs"] = options["schedule_epochs"] or options["epochs"]  # more epochs later change no rate
    settings = TrainSettings(store=store, **options)
    path = Path(out) if out is not None else next_run(_RUNS, store, settings.model)
    config = {"ooc_version": __version__, **asdict(settings)}
    if seeds is None:
        return RunFolder.create(path, config), settings
    del config["seed"]
    return SeedRuns.create(path, seeds, config), settings


_MACHINE_OPTIONS = ("spill_dir", "links", "memory", "gpu_budget", "host_budget", "threads")
"""Options, besides the store, that may differ between machines."""


def _shared_options(context: click.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that must agree in all processes, by name; a model of the user's own by its file's digest."""
    from ooc.cli.arguments.recipe import user_model_digest

    names = {str(one.name): one.opts[0] for one in context.command.params}
    found = {names[name]: value for name, value in options.items() if name not in _MACHINE_OPTIONS}
    return found | {"--model": (model_name(options["model"]), user_model_digest(options["model"]))}


def _local_settings(
    context: click.Context, settings: TrainSettings, store: str | None, options: dict[str, Any]
) -> TrainSettings:
    """Return ``settings``, those of rank 0, with the files and memory of this process, perhaps on another machine."""
    settle_memory(context, options)
    own: dict[str, Any] = {"store": store, "model": options["model"] if user_model_of(options["model"]) else None}
    own |= {name: options[name] for name in _MACHINE_OPTIONS if _is_given(context, name)}
    own = with_one_memory({name: value for name, value in own.items() if value is not None})
    for name in ("store", "spill_dir", "links"):
        own.update({name: os.path.realpath(own[name])} if name in own else {})
    return replace(settings, **own)


def _is_given(context: click.Context, name: str) -> bool:
    """Whether a resumed run is given ``name`` anew; the environment counts only for options that change no result."""
    source = context.get_parameter_source(name)
    of_environment = source is ParameterSource.ENVIRONMENT and name in CHANGEABLE
    return of_environment or source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


# ---- several processes ----------------------------------------------------------------------------------------------


_START_TIMEOUT = timedelta(minutes=2)
"""The longest that all processes together may take to start."""


def ranks_of_environment() -> "Ranks | None":
    """Return the group of processes that this process belongs to; None where it is alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # we report a lost process ourselves, in one line
    from ooc.ranks import Ranks

    return Ranks.of_environment(_START_TIMEOUT)


_EXIT_DELAY_S = 5.0
"""Seconds that a process waits before it exits because of another's failure. The failed process, which reports the
reason, must exit first: torchrun then stops the others, and returns the exit code of the first that has exited."""


@contextmanager
def report_failure_once(context: click.Context, ranks: "Ranks | None") -> Iterator[None]:
    """Let only one process report a failure that concerns several; the others exit with EXIT_ERROR and print nothing.

    These are processes told of another's failure, and, on an error that all find alike, such as a loss that is no
    number, all but the first of a machine. Any other error of a rank above 0 is reported with the rank's name, and so
    is an error about files in any rank, because they may be its machine's alone.
    """
    try:
        yield
    except (RankError, TrainingError) as error:
        is_told = error.is_told if isinstance(error, RankError) else ranks is not None and ranks.rank != ranks.here[0]
        if not is_told:
            raise
        if isinstance(error, RankError):
            with suppress(KeyboardInterrupt):
                time.sleep(_EXIT_DELAY_S)
        context.exit(EXIT_ERROR)
    except BaseException as error:
        if ranks is not None:
            ranks.failed()
            if isinstance(error, BrokenPipeError):
                raise  # nobody reads what is printed any more
            of_files = isinstance(error, OSError | SpillError | StoreError) or isinstance(error.__cause__, OSError)
            if of_files or (ranks.rank and isinstance(error, OocError)):
                why = describe_os_error(error) if isinstance(error, OSError) else str(error)
                raise OocError(f"{ranks.name(ranks.rank)}: {why}") from error
        raise


def start_processes(count: int, arguments: Sequence[str]) -> int:
    """Run ``ooc`` with ``arguments`` in ``count`` processes and return their common exit code. Raise BudgetError where
    the free memory cannot hold so many processes, whatever they train."""
    from ooc.memory import available_memory_bytes

    if count * _PROCESS_BYTES > (free := available_memory_bytes()):
        needs = f"{count} processes need {format_size(count * _PROCESS_BYTES)} for programs alone"
        raise BudgetError(f"{needs}, {format_size(free)} are free; give fewer with --nproc")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # silences torch's lines about processes that end
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="ooc",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "ooc", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)  # the process has reported the reason
        name = signal.Signals(-failure.exitcode).name
        hint = "a run that has finished an epoch goes on with --resume"
        click.echo(f"ooc: error: rank {rank} was ended by {name}; {hint}", err=True)
        return EXIT_ERROR
    except (SignalException, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return 0
