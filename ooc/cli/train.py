# SPDX-License-Identifier: Apache-2.0
"""``ooc train``: a store and two budgets become a trained model."""

import resource
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ooc import __version__
from ooc.cli import EXIT_INTERRUPTED
from ooc.cli.options import (
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    PROPER_FRACTION,
    SIZE,
    SIZE_OR_ZERO,
    WIDTH,
    GroupedCommand,
)
from ooc.cli.progress import Reporter
from ooc.cli.settings import CHANGEABLE, TrainSettings, next_run, only_store
from ooc.errors import OptionError, RunError
from ooc.sizes import format_size

if TYPE_CHECKING:
    from ooc.storage.store import Store
    from ooc.train.logs import EpochLog
    from ooc.train.run import RunFolder

_RUNS = Path("runs")
_PLAIN_WIDTH = 120
"""Columns of a table that goes to a file; a terminal has its own."""


METRICS = ("accuracy", "micro-f1", "macro-f1", "roc-auc", "average-precision", "mae", "r2")


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of ``ooc train``, in the order of its help."""
    option = click.option
    choice = click.Choice
    options = [
        option(
            "--model",
            type=choice(["gcn", "sage", "gin", "gat", "gatv2", "transformer"]),
            default="gcn",
            help="GCN, GraphSAGE, GIN, GAT, GATv2 or graph transformer.",
        ),
        option(
            "--heads",
            type=COUNT,
            default=1,
            help="Attention heads of gat, gatv2 and transformer; --hidden is that of all of them together.",
        ),
        option(
            "--aggr",
            type=choice(["auto", "mean", "sum", "max"]),
            default="auto",
            help="How sage (auto: mean) and gin (auto: sum) take neighbours together.",
        ),
        option(
            "--ignore-edge-data",
            type=choice(["none", "weight", "features", "all"]),
            default="none",
            help="What to leave out of what the store's edges carry; a model that takes none of it is refused.",
        ),
        option("--layers", type=COUNT, default=3, help="Convolutions."),
        option("--residual", is_flag=True, help="Layers add to their input, between two linear maps; norms go first."),
        option("--hidden", type=WIDTH, default=128, help="Width of the hidden layers."),
        option("--dropout", type=PROBABILITY, default=0.5, help="On every hidden layer."),
        option("--input-dropout", type=PROBABILITY, default=0.0, help="On the features."),
        option("--dtype", type=choice(["float32", "bfloat16"]), default="float32", help=_DTYPE),
        option("--spill-dtype", type=choice(["float32", "bfloat16"]), default="float32", help=_SPILL_DTYPE),
        option("--norm", type=choice(["none", "layer", "batch", "graph"]), default="none", help=_NORM),
        option("--jk", type=choice(["none", "last", "cat", "max"]), default="none", help="Jumping knowledge."),
        option("--loss", type=choice(["auto", "cross-entropy", *_LOSSES]), default="auto", help=_LOSS),
        option("--label-smoothing", type=FRACTION, default=0.0, help="Of cross-entropy."),
        option("--class-weights", type=choice(["none", "balanced"]), default="none", help=_CLASS_WEIGHTS),
        option("--optimizer", type=choice(["adam", "adamw", "sgd"]), default="adam", help=_OPTIMIZER),
        option("--lr", type=POSITIVE, default=0.01, help="Learning rate."),
        option("--weight-decay", type=NON_NEGATIVE, default=0.0, help="On all parameters."),
        option("--clip", type=POSITIVE, metavar="NORM", help="Scale gradients down to this norm, all together."),
        option("--epochs", type=COUNT, default=100, help="Epochs in all, those before --resume included."),
        option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of weights and dropout."),
        option("--schedule", type=choice(["none", "cosine", "step", "plateau"]), default="none", help=_SCHEDULE),
        option("--warmup", type=COUNT_OR_ZERO, default=0, metavar="EPOCHS", help="Let it rise linearly first."),
        option(
            "--schedule-epochs", type=COUNT, help="Epochs until cosine reaches 0. [default: --epochs as given first]"
        ),
        option("--step-every", type=COUNT, default=30, metavar="EPOCHS", help="Between the steps of step."),
        option("--lr-factor", type=PROPER_FRACTION, default=0.1, help="What step and plateau multiply it by."),
        option("--plateau-patience", type=COUNT_OR_ZERO, default=10, help=_PLATEAU_PATIENCE),
        option("--average", type=choice(["none", "ema", "swa"]), default="none", help=_AVERAGE),
        option("--average-from", type=COUNT, default=1, metavar="EPOCH", help="The first epoch that is averaged."),
        option("--average-decay", type=PROPER_FRACTION, default=0.99, help="What ema keeps of the average an epoch."),
        option("--metric", type=choice(METRICS), help=_METRIC),
        option("--eval-every", type=COUNT_OR_ZERO, default=1, help="Evaluate every N epochs; 0: never."),
        option("--patience", type=COUNT_OR_ZERO, default=0, help=_PATIENCE),
        option("--gpu-budget", type=SIZE, help=_GPU_BUDGET),
        option("--host-budget", type=SIZE, help="RAM to work in. [default: half of the free memory]"),
        option(
            "--device", type=choice(["auto", "cpu", "cuda"]), default="auto", help="Where to compute; auto is the CPU."
        ),
        option("--threads", type=COUNT, help="Compute threads. [default: as torch chooses]"),
        option("--spill-dir", type=click.Path(), help="Where scratch files go. [default: the disk of RUN]"),
        option(
            "--max-ssd-writes",
            type=SIZE_OR_ZERO,
            help="What training may write to the SSD an epoch, at most; 0: nothing. [default: any amount]",
        ),
        option("--block-rows", type=COUNT, help="Rows of a block; by default as the budgets allow."),
        option("--slab-columns", type=COUNT, help="Columns of a slab; by default as the budgets allow."),
        option("--out", type=click.Path(), metavar="RUN", help="The run's folder. [default: a new one in runs/]"),
        option("--resume", is_flag=True, help="Go on with the run at --out; its options hold unless given."),
        option("--log", type=choice(["csv", "tensorboard"]), multiple=True, help=_LOG),
        option("--allow-nonfinite", is_flag=True, help="Go on when the loss or the weights are no finite numbers."),
        option("--quiet", is_flag=True, help="Print the outcome and errors only."),
    ]
    for decorate in reversed(options):
        function = decorate(function)
    return function


_NORM = (
    "After every convolution but the last (with --jk after that, too): LayerNorm of each node by itself, BatchNorm, "
    "GraphNorm. The latter two take statistics of all nodes: an epoch then computes all rows, and takes more passes."
)
_DTYPE = "What rows and weights are rounded to where they are multiplied; their sums and all else stay float32."
_SPILL_DTYPE = "What intermediates are rounded to between passes; bfloat16 moves half the bytes. Sums stay float32."
_LOSSES = ("bce", "mse", "l1", "smooth-l1")
_LOSS = "By default cross-entropy for classes, bce (with logits) for several labels a node, mse for values."
_CLASS_WEIGHTS = "Let every class count alike in cross-entropy, however many training nodes it has."
_OPTIMIZER = "sgd is with momentum 0.9."
_SCHEDULE = "How the learning rate changes from epoch to epoch; plateau goes by the validation score."
_PLATEAU_PATIENCE = "Evaluations without a better score that plateau waits for."
_AVERAGE = "Score and keep an average of the weights: exponential (ema) or of all epochs alike (swa)."
_PATIENCE = "Stop when the validation score has not improved in this many evaluations; 0: never."
_METRIC = (
    "What evaluation measures; roc-auc and average-precision for two classes or several labels a node. "
    "[default: accuracy, for several labels roc-auc, for values mae]"
)
_GPU_BUDGET = (
    "Memory of the device to work in; on the CPU its compute memory, beside --host-budget. "
    "[default: 9/10 of the free GPU memory; on the CPU a quarter of the free memory]"
)
_LOG = "Write every epoch to RUN/metrics.csv or for TensorBoard to RUN/tensorboard, too. May be given twice."


class _TrainCommand(GroupedCommand):
    """``ooc train``, its many options in groups."""

    groups: Mapping[str, Sequence[str]] = {
        "Model": (
            "model",
            "heads",
            "aggr",
            "residual",
            "ignore_edge_data",
            "layers",
            "hidden",
            "dropout",
            "input_dropout",
            "norm",
            "jk",
            "dtype",
            "spill_dtype",
        ),
        "Loss and optimizer": (
            *("loss", "label_smoothing", "class_weights"),
            *("optimizer", "lr", "weight_decay", "clip", "epochs", "seed"),
        ),
        "Learning rate": ("schedule", "warmup", "schedule_epochs", "step_every", "lr_factor", "plateau_patience"),
        "Averaged weights": ("average", "average_from", "average_decay"),
        "Evaluation": ("metric", "eval_every", "patience"),
        "Resources, which never change results": (
            *(
                "gpu_budget",
                "host_budget",
                "device",
                "threads",
                "spill_dir",
                "max_ssd_writes",
                "block_rows",
                "slab_columns",
            ),
        ),
        "The run": ("out", "resume", "log", "allow_nonfinite", "quiet"),
    }


@click.command(cls=_TrainCommand, short_help="Train a model on a store.", context_settings={"show_default": True})
@click.argument("store", required=False, type=click.Path())
@_options
@click.pass_context
def command(
    context: click.Context, /, store: str | None, out: str | None, resume: bool, quiet: bool, **options: Any
) -> None:
    """Train on the whole graph in STORE, exactly, within two memory budgets.

    STORE may be left out where the current folder holds exactly one *.ooc. Budgets never change
    results, only how long they take.
    """
    run, settings = _open_run(context, store, out, resume, options)
    with Reporter(quiet=quiet, epochs=settings.epochs) as reporter, run:
        if resume and not quiet and not run.has_checkpoint:
            click.echo(f"{run.path} has finished no epoch: its first is the first", err=True)
        try:
            _train(run, settings, reporter, quiet)
        except KeyboardInterrupt:
            reporter.close()
            done = run.records()
            epochs = f"after epoch {done[-1].epoch}" if done else "before the first epoch was done"
            hint = f"; go on with: ooc train --resume --out {shlex.quote(str(run.path))}" if run.started else ""
            click.echo(f"ooc: stopped {epochs}{hint}", err=True)
            context.exit(EXIT_INTERRUPTED)
        except BaseException:
            run.discard()
            raise


def _open_run(
    context: click.Context, /, store: str | None, out: str | None, resume: bool, options: dict[str, Any]
) -> "tuple[RunFolder, TrainSettings]":
    """The run to train, new or begun before, and the settings that hold for it. Writes nothing."""
    from ooc.train.run import RunFolder

    if store is not None:
        store = str(Path(store).resolve())
    if options["spill_dir"] is not None:
        options["spill_dir"] = str(Path(options["spill_dir"]).resolve())
    options["log"] = list(options["log"])
    if resume and out is None:
        raise OptionError("--resume needs --out RUN, the run to go on with")
    if resume and out is not None:
        given = {name: value for name, value in options.items() if _is_given(context, name)}
        if store is not None:
            given["store"] = store
        run = RunFolder.open(out, given=given, changeable=CHANGEABLE, defaults=TrainSettings.defaults())
        return run, TrainSettings.from_config(run.config, run.path)
    if store is None:
        store = str(only_store(Path()).resolve())
    if options["schedule"] == "cosine":
        options["schedule_epochs"] = options["schedule_epochs"] or options["epochs"]  # more epochs later change nothing
    settings = TrainSettings(store=store, **options)
    path = Path(out) if out is not None else next_run(_RUNS, store, settings.model)
    return RunFolder.create(path, {"ooc_version": __version__, **settings.as_config()}), settings


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _train(run: "RunFolder", settings: TrainSettings, reporter: Reporter, quiet: bool) -> None:
    from ooc.storage.store import open_store

    store = open_store(settings.store)
    check_same_store(run, store)

    import torch
    from rich.console import Console

    from ooc.cli.models import admit_parameters, build_model
    from ooc.cli.outlook import Outlook
    from ooc.cli.recipe import build_average, build_loss, build_optimizer, build_schedule
    from ooc.cli.tables import print_outcome, print_plan
    from ooc.plan import UNMEASURED, UNMEASURED_DEVICE
    from ooc.train.logs import several
    from ooc.train.metrics import resolve_metric
    from ooc.train.trainer import Trainer

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    admit_parameters(settings, store)
    metric = resolve_metric(settings.metric, store.task, store.num_classes)
    model = build_model(settings, store)
    optimizer = build_optimizer(settings, model)
    logs = _logs(settings, run)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    with Trainer(
        model,
        store,
        gpu_budget=settings.gpu_budget,
        host_budget=settings.host_budget,
        device=settings.device,
        seed=settings.seed,
        optimizer=optimizer,
        loss=build_loss(settings, store),
        spill_dir=settings.spill_dir,
        out=run,
        input_dropout=settings.input_dropout,
        metric=metric.value,
        scheduler=build_schedule(settings, optimizer, rising=metric.higher_is_better),
        clip_norm=settings.clip,
        average=build_average(settings, model),
        average_from=settings.average_from,
        listener=several(reporter, *logs),
        block_rows=settings.block_rows,
        slab_columns=settings.slab_columns,
        max_ssd_writes=settings.max_ssd_writes,
        spill_dtype=settings.spill_dtype,
        compute_dtype=settings.dtype,
        ignore_edge_data=settings.ignore_edge_data,
    ) as trainer:
        outlook = Outlook.of_run(
            trainer.workload, trainer.plan, trainer.hardware, trainer.limits, eval_every=settings.eval_every
        )
        if not quiet:
            on = "device" if settings.device == "cuda" else "CPU"
            device_bytes, host_bytes = trainer.limits.device_bytes, trainer.limits.host_bytes
            sizes = f"{format_size(device_bytes)} for the {on}, {format_size(host_bytes)} for the host"
            click.echo(f"{store.path} ({format_size(store.nbytes)}), budgets {sizes}")
            print_plan(outlook, console)
            if trainer.hardware in (UNMEASURED, UNMEASURED_DEVICE):
                spill = shlex.quote(str(trainer.spill_dir))
                of_device = "--device cuda " if settings.device == "cuda" else ""
                measuring = f"ooc profile {of_device}--spill-dir {spill}"
                click.echo(f"planned by estimates; {measuring} measures this machine in 15 s")
        last = run.last()
        run.save_forecast({"first_epoch": 1 if last is None else last["epoch"] + 1, **outlook.as_dict()})
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
    print_outcome(
        run.records(),
        metric=metric,
        gpu_budget=trainer.limits.device_bytes,
        host_budget=trainer.limits.host_bytes,
        process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        store_bytes=store.nbytes,
        spill_bytes=trainer.plan.spill_bytes,
        run=run.path,
        console=console,
    )


def _logs(settings: TrainSettings, run: "RunFolder") -> "list[EpochLog]":
    """The logs asked for, beside the run's own."""
    from ooc.train.logs import CsvLog, TensorBoardLog

    logs: list[EpochLog] = []
    if "csv" in settings.log:
        logs.append(CsvLog(run.path / "metrics.csv", run.records))
    if "tensorboard" in settings.log:
        logs.append(TensorBoardLog(run.path / "tensorboard", run.records))
    return logs


def check_same_store(run: "RunFolder", store: "Store") -> None:
    """Note what store a run is on; refuse to go on with it on another one."""
    names = ("num_nodes", "num_edges", "num_features", "num_classes", "source", "created")
    facts = {name: store.attributes[name] for name in names}
    if store.num_edge_features:
        facts["num_edge_features"] = store.num_edge_features
    before = run.config.setdefault("store_facts", facts)
    if before != facts:
        raise RunError(f"{run.path} was trained on another store than {store.path}")
