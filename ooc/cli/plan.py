# SPDX-License-Identifier: Apache-2.0
"""``ooc plan``: what training would take, on this machine or another, without running anything."""

import gc
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ooc.cli import in_options
from ooc.cli.options import GroupedCommand, Option
from ooc.cli.settings import RUN, TrainSettings, only_store, train_options
from ooc.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from ooc.cli.planning import Planning
    from ooc.plan.graphs import GraphStatistics
    from ooc.storage.store import Store

_PLAIN_WIDTH = 160
"""Columns of a table that goes to a file; a terminal has its own."""
_LIST = "list"
_FOR, _SHOWN = "What to plan for", "What to show"
_OBJECTS_BETWEEN_COLLECTIONS = 100_000


_GRAPH = (
    "Plan for a graph that is not here: a known one by its name, or "
    "nodes=…,edges=…,features=…,classes=…[,labelled=…][,undirected=1][,dtype=float16]. labelled up to 1 is a "
    "fraction of the nodes, above it a count; edges are counted as stored. What is not known of it is assumed on the "
    "cautious side, and printed."
)
_HARDWARE = (
    "Plan for a machine that is not here: the name of one that comes with ooc, or a file; budgets are then by default "
    "9/10 of its memory. 'list' shows those that there are."
)
_NO_SAVINGS = "Compute every row of every layer, everything every epoch."
_NO_ADVICE = "Do not plan again with more memory and a faster disk."
_SWEEP = "Plan for all pairs of these budgets: gpu=8G,16G,24G host=64G,128G."
_COMPARE = "Compare what was forecast for the run at RUN with what was measured."
_GANTT = "Draw the epoch: .svg, .html, or .json for Perfetto."


@click.command(
    cls=GroupedCommand,
    short_help="Show what training would take, here or elsewhere.",
    params=[
        click.Argument(["given"], nargs=-1, metavar="[STORE]"),
        Option(["--graph"], metavar="GRAPH", help=_GRAPH, group=_FOR),
        Option(["--hardware"], metavar="NAME|FILE", help=_HARDWARE, group=_FOR),
        Option(["--no-savings"], is_flag=True, help=_NO_SAVINGS, group=_FOR),
        Option(["--sweep"], multiple=True, metavar="BUDGETS…", help=_SWEEP, group=_SHOWN),
        Option(["--compare"], type=click.Path(path_type=Path), metavar="RUN", help=_COMPARE, group=_SHOWN),
        Option(["--gantt"], type=click.Path(path_type=Path), metavar="FILE", help=_GANTT, group=_SHOWN),
        Option(["--no-advice"], is_flag=True, help=_NO_ADVICE, group=_SHOWN),
        Option(["--json", "as_json"], is_flag=True, help="One JSON object instead of tables.", group=_SHOWN),
        *(option for option in train_options() if option.group != RUN),
    ],
    context_settings={"show_default": True},
)
def command(
    given: tuple[str, ...],
    graph: str | None,
    hardware: str | None,
    no_savings: bool,
    sweep: tuple[str, ...],
    compare: Path | None,
    gantt: Path | None,
    no_advice: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan the training of a model, with the options of ooc train, and forecast an epoch of it. Nothing is run.

    The graph is that in STORE (by default the only *.ooc in the current folder) or one that --graph describes; the
    machine is this one or one that --hardware describes.
    """
    from ooc.report.console import output

    console = output(_PLAIN_WIDTH)
    if hardware == _LIST:
        _list_machines(console, as_json)
    elif compare is not None:
        if graph is not None or len(given) > 1:
            raise OptionError("--compare takes what the run was trained on: give no graph besides, or its store")
        _without_part("--compare", {"compare", "given", "as_json"})
        _compare(compare, given[0] if given else None, console, as_json)
    else:
        from ooc.cli.plan_options import is_axis, parse_axes

        stores = [text for text in given if not (sweep and is_axis(text))]
        axes = parse_axes([*sweep, *(text for text in given if text not in stores)])
        if axes:
            _without_part("--sweep", others={"gantt", *(f"{axis}_budget" for axis in axes)})
        planning = _planning(stores, graph, hardware, no_savings, options)
        with _rare_collections():
            if axes:
                _sweep(planning, axes, console, as_json)
            else:
                _plan(planning, console, gantt=gantt, advice=not no_advice, as_json=as_json)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A plan is a million objects, none of them garbage: looking for some every 700 of them takes a tenth of the time
    of planning. What is imported by now is not looked through at all."""
    often = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *often[1:])
    try:
        yield
    finally:
        gc.set_threshold(*often)
        gc.unfreeze()


def _without_part(option: str, allowed: Collection[str] = (), *, others: Collection[str] = ()) -> None:
    """Refuse what was given beside ``option`` and would count for nothing: ``others``, or all but ``allowed``."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and (name in others if others else name not in allowed):
            raise OptionError(f"{parameter.opts[0]} has no part in {option}; leave out one of the two")


def _planning(
    stores: Sequence[str], graph: str | None, hardware: str | None, no_savings: bool, options: dict[str, Any]
) -> "Planning":
    """What is to be planned for."""
    if len(stores) > 1 or (stores and graph is not None):
        raise OptionError(f"one graph at a time: {' '.join(stores)}{'' if graph is None else f' and --graph {graph}'}")
    found: Store | GraphStatistics
    if graph is not None:
        from ooc.cli.plan_options import parse_graph

        found = parse_graph(graph)
    else:
        from ooc.storage.store import open_store

        found = open_store(stores[0] if stores else only_store(Path()))
    from ooc.cli.plan_options import load_hardware
    from ooc.cli.planning import Planning
    from ooc.train.setup import Saving

    settings = TrainSettings(store=graph or str(getattr(found, "path", "")), **options)
    machine = None if hardware is None else load_hardware(hardware)
    return Planning(settings, found, machine, () if no_savings else tuple(Saving))


def _plan(planning: "Planning", console: "Console", *, gantt: Path | None, advice: bool, as_json: bool) -> None:
    from ooc.cli.planning import NARROW
    from ooc.report.alternatives import changes
    from ooc.report.console import say
    from ooc.report.gantt import write_gantt
    from ooc.report.tables import print_assumptions, print_changes, print_report

    report = planning.report()
    narrow = planning.settings.spill_dtype == NARROW
    if gantt is not None:
        write_gantt(report.timeline, gantt)
    found = []
    if advice:
        found = changes(report, lambda at, on, n: planning.report(at, on, narrow=n), spilled_narrow=narrow)
    if as_json:
        more = {"changes": [asdict(change) for change in found], "assumptions": planning.assumptions()}
        _print_json({"graph": planning.describe_graph(), **report.as_dict(), **more})
        return
    say(console, planning.describe_graph())
    say(console, planning.describe_machine())
    print_report(report, console)
    if found:
        print_changes(found, console)
    print_assumptions(planning.assumptions(), console)


def _sweep(planning: "Planning", axes: dict[str, list[int]], console: "Console", as_json: bool) -> None:
    from ooc.report.alternatives import sweep
    from ooc.report.console import say
    from ooc.report.tables import print_assumptions, print_sweep

    limits = planning.limits
    cells = sweep(
        axes,
        gpu=limits.device_bytes,
        host=limits.host_bytes,
        plan=lambda gpu, host: planning.report(replace(limits, device_bytes=gpu, host_bytes=host)),
    )
    command = click.get_current_context().command
    cells = [replace(c, reason=None if c.reason is None else in_options(c.reason, command)) for c in cells]
    if as_json:
        _print_json({"cells": [cell.as_dict() for cell in cells], "assumptions": planning.assumptions()})
        return
    say(console, planning.describe_graph())
    print_sweep(cells, console)
    for reason in dict.fromkeys(cell.reason for cell in cells if cell.reason is not None):
        say(console, f"too small: {reason}")
    print_assumptions(planning.assumptions(), console)


def _compare(run: Path, store: str | None, console: "Console", as_json: bool) -> None:
    from ooc.report.comparison import compare, print_comparison

    if store is not None:
        from ooc.storage.store import open_store
        from ooc.train.run import RunFolder

        RunFolder.open(run).check_store(open_store(store))
    found = compare(run)
    if as_json:
        _print_json(found.as_dict())
    else:
        print_comparison(found, console)


def _list_machines(console: "Console", as_json: bool) -> None:
    from ooc.cli.plan_options import load_hardware, shipped_names
    from ooc.report.tables import print_machines

    machines = {name: load_hardware(name) for name in shipped_names()}
    if as_json:
        _print_json({name: machine.as_dict() for name, machine in machines.items()})
    else:
        print_machines(list(machines.values()), console)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))
