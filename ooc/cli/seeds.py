# SPDX-License-Identifier: Apache-2.0
"""``ooc train --seeds``: the same training by several seeds, one run after the other."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from ooc import __version__
from ooc.cli.arguments.settings import CHANGEABLE, TrainSettings
from ooc.errors import TrainingError
from ooc.progress.reporter import Reporter, Verbosity
from ooc.report.console import output, print_hanging, say
from ooc.report.runs import describe_run, describe_seed, describe_summary, summarize
from ooc.train.metrics import Metric
from ooc.train.runs.run import RunFolder, holds_run
from ooc.train.runs.seeds import SeedRuns

TrainOne = Callable[[RunFolder, TrainSettings, Reporter, Verbosity], None]


def train_seeds(
    runs: SeedRuns, settings: TrainSettings, train: TrainOne, verbosity: Verbosity, *, as_json: bool, dry_run: bool
) -> None:
    """Train what is not yet trained of ``runs``, and print what all of them have come to.

    KeyboardInterrupt after having said how to go on.
    """
    if verbosity >= Verbosity.INFO:
        seeds = ", ".join(map(str, runs.seeds))
        print_hanging("seeds     ", f"{seeds}: one run each, in {runs.path}", output())
    if dry_run:
        _try(runs, settings, train, verbosity, told=not as_json)
        return
    found = []
    shown = verbosity
    with _reporter(verbosity, settings) as reporter:
        for seed in runs.seeds:
            path = runs.run_path(seed)
            run, own = _open_run(runs, settings, seed)
            before = describe_run(path) if run.resumed else None
            if before is None or not _is_finished(before, own):
                _train_one(runs, run, own, train, reporter, shown)
                shown = min(shown, Verbosity.WARNING)  # what is trained within what is said once
            found.append(describe_run(path))
            if verbosity > Verbosity.ERROR:
                seconds = sum(record.time_s + record.eval_s for record in run.records())
                click.echo(describe_seed(seed, found[-1], seconds))
    if as_json:
        say_as_json("seeds", {"out": str(runs.path), "seeds": runs.seeds, "runs": found, **summarize(found)})
        return
    for line in describe_summary(found, Metric(found[-1]["metric"])):
        click.echo(line)
    if verbosity > Verbosity.ERROR:
        click.echo(f"side by side: ooc runs {shlex.quote(str(runs.path))}")


def _try(runs: SeedRuns, settings: TrainSettings, train: TrainOne, verbosity: Verbosity, *, told: bool) -> None:
    """Plan one of the trainings, and say what would become of all."""
    run, own = _open_run(runs, settings, runs.seeds[0])
    with Reporter(verbosity=verbosity) as reporter, run:
        train(run, own, reporter, verbosity)
    if told:
        paths = [str(runs.run_path(seed)) for seed in runs.seeds]
        where = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
        count = f"{len(paths)} run{'s' * (len(paths) != 1)}"
        say(output(), f"nothing is trained or written; it would be {count}, {where}")


def _reporter(verbosity: Verbosity, settings: TrainSettings) -> Reporter:
    """What shows a training live on a terminal; elsewhere epochs are lines only for who wants to know all."""
    live = Reporter(verbosity=verbosity, epochs=settings.epochs)
    if live.is_live or verbosity >= Verbosity.DEBUG:
        return live
    return Reporter(verbosity=min(verbosity, Verbosity.WARNING), epochs=settings.epochs)


def _open_run(runs: SeedRuns, settings: TrainSettings, seed: int) -> tuple[RunFolder, TrainSettings]:
    """The run of ``seed``, new or begun before, and its settings, which are those of all but for the seed."""
    path, own = runs.run_path(seed), replace(settings, seed=seed)
    if not holds_run(path):
        return RunFolder.create(path, {"ooc_version": __version__, **asdict(own)}), own
    run = RunFolder.open(path, given=asdict(own), changeable=CHANGEABLE, defaults=TrainSettings.defaults())
    return run, TrainSettings.from_config(run.config, path)


def _is_finished(found: dict[str, Any], settings: TrainSettings) -> bool:
    """Whether there is nothing left to train; fewer epochs may have been asked for before."""
    asked = found["epochs_asked"] == settings.epochs or found["epochs"] >= settings.epochs
    return bool(found["state"] == "finished" and asked)


def _train_one(
    runs: SeedRuns,
    run: RunFolder,
    settings: TrainSettings,
    train: TrainOne,
    reporter: Reporter,
    verbosity: Verbosity,
) -> None:
    try:
        with run:
            runs.start()
            train(run, settings, reporter, verbosity)
    except KeyboardInterrupt:
        reporter.close()
        done = run.records()
        say_stopped(f"epoch {done[-1].epoch} of seed {settings.seed}" if done else "", runs.path)
        raise
    except BaseException as error:
        run.discard()
        runs.discard()
        if isinstance(error, TrainingError):
            raise TrainingError(f"seed {settings.seed}: {error}") from error
        raise


def say_stopped(done: str, path: Path | None) -> None:
    """Say that a training was interrupted after what is ``done``, and how that at ``path`` goes on."""
    hint = "" if path is None else f"; go on with: ooc train --resume --out {shlex.quote(str(path))}"
    click.echo(f"ooc: stopped {f'after {done}' if done else 'before the first epoch was done'}{hint}", err=True)


def say_as_json(event: str, facts: dict[str, Any]) -> None:
    """A line of ``--json``."""
    click.echo(json.dumps({"event": event, **facts}, allow_nan=False))
