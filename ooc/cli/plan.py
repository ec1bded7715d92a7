# SPDX-License-Identifier: Apache-2.0
"""``ooc plan``: forecast what a training would take, on this machine or another, without running anything."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ooc.cli import print_json
from ooc.cli.arguments.configuration import config_option
from ooc.cli.arguments.options import COUNT, GroupedCommand, Option
from ooc.cli.arguments.settings import (
    RUN,
    SAMPLING,
    TrainSettings,
    check_links,
    only_store,
    settle_memory,
    train_options,
)
from ooc.errors import HardwareError, OptionError
from ooc.plan import Hardware
from ooc.plan.graphs import KNOWN, GraphStatistics, known_graph
from ooc.suggestions import did_you_mean

if TYPE_CHECKING:
    from ooc.cli.planning import Planning
    from ooc.storage.store import Store

_LIST = "list"
_SUBJECT_GROUP, _OUTPUT_GROUP = "What to plan for", "What to show"

_COUNTS = ("nodes", "edges", "features", "classes")
_ENTRIES = (*_COUNTS, "labelled", "undirected", "dtype")
_DTYPES = ("float16", "float32", "float64")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_HIGHEST_COUNT = 2**40
"""The highest accepted count of nodes, edges, features or classes, beyond that of any existing graph."""
_SUFFIX = ".json"
_MANY_LAYERS = 100
"""The number of layers above which planning takes so long that the command says so beforehand."""

_GRAPH = (
    "Plan for a graph that is not here: a known one by its name, or "
    "nodes=…,edges=…,features=…,classes=… and, where they differ, labelled=…, undirected=1, dtype=float16. labelled "
    "up to 1 is a fraction of the nodes, above it a count; edges are counted as stored. What is not known of it is "
    "assumed on the cautious side, and printed."
)
_HARDWARE = (
    "Plan for a machine that is not here: the name of one that comes with ooc, or a file; budgets are then by default "
    "9/10 of its memory. 'list' shows those that there are."
)
_NO_SAVINGS = "Compute every row of every layer, everything every epoch."
_NO_ADVICE = "Do not plan again with more memory and a faster disk."
_WHAT_IF = (
    "Plan for other memory and other SSDs, point by point: gpu=8G,24G host=64G,128G ssd=3G,7G (bytes a second), "
    "without a GPU memory=8G,16G; by default the usual ones."
)
_PLOT = "Draw what --what-if has found: .svg or .png."
_FLOOR = "The least memory that training takes, part by part."
_BATCHES = "Of many graphs: the largest batches that fit into each of these memories, such as 8G,12G,16G,24G."
_COMPARE = "Compare what was forecast for the run at RUN with what was measured."
_RANKS = "Plan for so many processes that train the graph together, each with a share of its rows (ooc train --nproc)."
_GANTT = "Draw the epoch: .svg, .html, or .json for Perfetto."


class _Stores(click.Argument):
    """The STORE argument, which falls back to its default; before 8.4, click had no defaults for several values."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, {name: one for name, one in opts.items() if one != ()})
        return (value,) if isinstance(value, str) else value, source


@click.command(
    cls=GroupedCommand,
    short_help="Show what training would take, here or elsewhere.",
    params=[
        _Stores(["store"], nargs=-1, metavar="[STORE]"),
        Option(["--graph"], metavar="GRAPH", help=_GRAPH, group=_SUBJECT_GROUP),
        Option(["--hardware"], metavar="NAME|FILE", help=_HARDWARE, group=_SUBJECT_GROUP),
        Option(["--ranks"], type=COUNT, default=1, metavar="N", help=_RANKS, group=_SUBJECT_GROUP),
        Option(["--no-savings"], is_flag=True, help=_NO_SAVINGS, group=_SUBJECT_GROUP),
        Option(["--what-if"], is_flag=True, help=_WHAT_IF, group=_OUTPUT_GROUP),
        Option(["--plot"], type=click.Path(path_type=Path), metavar="FILE", help=_PLOT, group=_OUTPUT_GROUP),
        Option(["--floor"], is_flag=True, help=_FLOOR, group=_OUTPUT_GROUP),
        Option(["--batches"], metavar="SIZE,SIZE,…", help=_BATCHES, group=_OUTPUT_GROUP),
        Option(["--compare"], type=click.Path(path_type=Path), metavar="RUN", help=_COMPARE, group=_OUTPUT_GROUP),
        Option(["--gantt"], type=click.Path(path_type=Path), metavar="FILE", help=_GANTT, group=_OUTPUT_GROUP),
        Option(["--no-advice"], is_flag=True, help=_NO_ADVICE, group=_OUTPUT_GROUP),
        Option(["--json", "as_json"], is_flag=True, help="One JSON object instead of tables.", group=_OUTPUT_GROUP),
        *(option for option in train_options() if option.group not in (RUN, SAMPLING)),
        config_option(_SUBJECT_GROUP),
    ],
    context_settings={"show_default": True},
)
def command(
    store: tuple[str, ...],
    graph: str | None,
    hardware: str | None,
    ranks: int,
    no_savings: bool,
    what_if: bool,
    plot: Path | None,
    floor: bool,
    batches: str | None,
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
    given = () if graph is not None and not _on_command_line("store") else store  # a store in --config yields to it
    if hardware == _LIST:
        _list_machines(as_json)
    elif compare is not None:
        if graph is not None or len(given) > 1:
            raise OptionError("--compare takes what the run was trained on: give no graph besides, or its store")
        _refuse_unused("--compare", {"compare", "store", "as_json"})
        _compare(compare, given[0] if given else None, as_json)
    else:
        stores = [text for text in given if not (what_if and "=" in text)]
        axes = [text for text in given if text not in stores]
        if what_if:
            _refuse_unused("--what-if", others={"gantt", "memory"})
        elif plot is not None:
            raise OptionError("--plot draws what --what-if finds; for one epoch there is --gantt")
        if floor:
            _refuse_unused(
                "--floor", others={"what_if", "gantt", "memory", "gpu_budget", "host_budget", "max_ssd_writes"}
            )
        if ranks > 1:
            _refuse_unused("--ranks", others={"what_if", "floor"})
        if batches is not None:
            _refuse_unused("--batches", others={"graph", "what_if", "floor", "gantt", "memory", "dtype", "ranks"})
            from ooc.cli.planning import print_batches

            print_batches(stores, batches, options, as_json)
            return
        planning = _planning(stores, graph, hardware, no_savings, options, ranks)
        from ooc.cli.planning import print_least_memory, print_planned, print_what_if

        if planning.settings.layers > _MANY_LAYERS:
            click.echo(f"planning {planning.settings.layers:,} layers, which may take minutes", err=True)
        if floor:
            print_least_memory(planning, as_json)
        elif what_if:
            print_what_if(planning, axes, plot=plot, as_json=as_json)
        else:
            print_planned(planning, gantt=gantt, advice=not no_advice, as_json=as_json)


def _refuse_unused(option: str, allowed: Collection[str] = (), *, others: Collection[str] = ()) -> None:
    """Raise OptionError for an option given on the command line that would have no effect beside ``option``: one of
    ``others``, or, where that is empty, any but ``allowed``."""
    for parameter in click.get_current_context().command.params:
        name = str(parameter.name)
        if _on_command_line(name) and (name in others if others else name not in allowed):
            raise OptionError(f"{parameter.opts[0]} has no part in {option}; leave out one of the two")


def _on_command_line(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _planning(
    stores: Sequence[str],
    graph: str | None,
    hardware: str | None,
    no_savings: bool,
    options: dict[str, Any],
    processes: int,
) -> "Planning":
    """Return the training to be planned: its settings, graph, machine, savings and ranks."""
    if len(stores) > 1 or (stores and graph is not None):
        raise OptionError(f"one graph at a time: {' '.join(stores)}{'' if graph is None else f' and --graph {graph}'}")
    found: Store | GraphStatistics
    if graph is not None:
        found = parse_graph(graph)
    else:
        from ooc.storage.store import open_store

        found = open_store(stores[0] if stores else only_store(Path()))
    from ooc.cli.planning import Planning
    from ooc.ranks import Ranks
    from ooc.train.setup import Saving

    settle_memory(click.get_current_context(), options)
    settings = TrainSettings(store=graph or str(getattr(found, "path", "")), **options)
    check_links(settings)
    machine = None if hardware is None else load_hardware(hardware)
    together = Ranks(count=processes)
    return Planning(settings, found, machine, () if no_savings else tuple(Saving), together)


def _compare(run: Path, store: str | None, as_json: bool) -> None:
    from ooc.report.console import output
    from ooc.report.runs import compare, print_comparison

    if store is not None:
        from ooc.storage.store import open_store
        from ooc.train.runs.run import RunFolder

        RunFolder.open(run).check_store(open_store(store))
    found = compare(run)
    if as_json:
        print_json(found)
    else:
        print_comparison(found, output())


def _list_machines(as_json: bool) -> None:
    from ooc.report.console import output
    from ooc.report.tables import print_machines

    machines = {name: load_hardware(name) for name in shipped()}
    if as_json:
        print_json({name: machine.as_dict() for name, machine in machines.items()})
    else:
        print_machines(list(machines.values()), output())


# ---- the graph -----------------------------------------------------------------------------------------------


def parse_graph(text: str) -> GraphStatistics:
    """Return the graph that ``text`` describes: ``NAME``, ``NAME,labelled=…`` or
    ``nodes=…,edges=…,features=…,classes=…``.

    ``labelled`` up to 1 is a fraction of the nodes, above it a count; by default all nodes are labelled. OptionError
    names the entry that is wrong.
    """
    parts = [part.strip() for part in text.split(",")]
    known = None
    if "=" not in parts[0]:
        name = parts.pop(0)
        known = known_graph(name)
        if known is None:
            raise OptionError(
                f"--graph {name}: no such graph; known are {', '.join(KNOWN)}; "
                f"or give nodes=…,edges=…,features=…,classes=…{did_you_mean(name, KNOWN)}"
            )
    given: dict[str, str] = {}
    for part in parts:
        name, separator, value = part.partition("=")
        if name not in _ENTRIES or not separator:
            known_entries = f"known are {', '.join(_ENTRIES)}{did_you_mean(name, _ENTRIES)}"
            raise OptionError(f"--graph: {part!r} is no entry with a value; {known_entries}")
        if name in given:
            raise OptionError(f"--graph: {name} is given twice")
        given[name] = value
    missing = [name for name in _COUNTS if name not in given and known is None]
    if missing:
        raise OptionError(f"--graph: {', '.join(missing)} missing")
    changes = {"feature_dtype" if name == "dtype" else name: _entry(name, value) for name, value in given.items()}
    nodes = changes["nodes"] if "nodes" in changes or known is None else known.nodes
    if "labelled" in changes:
        share = changes["labelled"]
        changes["labelled"] = max(1, int(share * nodes)) if share <= 1 else int(share)
        if changes["labelled"] > nodes:
            raise OptionError(f"--graph: labelled={given['labelled']} is more than the {nodes:,} nodes")
    elif "nodes" in changes:
        changes["labelled"] = nodes
    if known is None:
        return GraphStatistics(**changes, name="given", source="as given")
    if given:
        changes["source"] = f"{known.source}; given otherwise: {', '.join(given)}"
    return replace(known, **changes)


def _entry(name: str, text: str) -> Any:
    """Return the value of the entry ``name`` written as ``text``; raise OptionError for an invalid one."""
    number = _number(text)
    count = int(number) if number <= _HIGHEST_COUNT and number == int(number) else -1
    match name:
        case "dtype" if text in _DTYPES:
            return text
        case "undirected" if text in ("0", "1"):
            return text == "1"
        case "labelled" if 0 < number <= 1 or count > 1:
            return number
        case "nodes" | "edges" | "features" | "classes" if count >= (name != "features"):
            return count
    wanted = {"dtype": f"not one of {', '.join(_DTYPES)}", "undirected": "neither 0 nor 1"}
    wanted["labelled"] = "neither a fraction up to 1 nor a count"
    raise OptionError(f"--graph: {name}={text} is {wanted.get(name, 'no count')}")


def _number(text: str) -> float:
    """Return the number written as ``1e9``, ``1_000``, ``1.5M`` or ``0.014``; NaN for any other text."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([kmgb]?)", text.lower())
    if match is None:
        return math.nan
    plain = match[1].replace("_", "")
    scale = _SCALES[match[2]]
    return int(plain) * scale if plain.isdigit() else round(float(plain) * scale, 9)


# ---- machines ---------------------------------------------------------------------------------------------------


def shipped() -> dict[str, Any]:
    """Return the hardware description files that come with ooc, by machine name."""
    found = {file.name.removesuffix(_SUFFIX): file for file in files("ooc").joinpath("hardware").iterdir()}
    return {name: file for name, file in sorted(found.items()) if file.name.endswith(_SUFFIX)}


def load_hardware(name: str) -> Hardware:
    """Return the shipped machine called ``name``, or the machine that the file ``name`` describes.

    Raise OptionError where there is neither, and HardwareError naming the file and the entry that is wrong.
    """
    known = shipped()
    if (file := known.get(name.lower())) is not None:
        return _parse_hardware(file.read_text(encoding="utf-8"), file.name)
    path = Path(name)
    if not (path.suffix or path.exists()):
        listed = f"there are {', '.join(known)}; or give a file, NAME.json"
        raise OptionError(f"--hardware {name}: no such machine; {listed}{did_you_mean(name, known)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text"
        raise OptionError(f"--hardware {name}: {reason}") from error
    return _parse_hardware(text, name)


def _parse_hardware(text: str, where: str) -> Hardware:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise HardwareError(f"{where}: no JSON: {error}") from error
    if not isinstance(data, dict):
        raise HardwareError(f"{where}: it holds no JSON object")
    if isinstance(data.get("hardware"), dict):  # the output of ooc profile --json
        data = data["hardware"]
    return Hardware.from_dict(data, where=where)
