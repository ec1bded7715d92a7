# SPDX-License-Identifier: Apache-2.0
"""``ooc convert``: convert a dataset to a store."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ooc.cli import print_json
from ooc.cli.arguments.configuration import config_option
from ooc.cli.arguments.options import FORCE, HOST_BUDGET, JSON, ON_CANCEL, ChoiceType, choice_option, with_verbosity
from ooc.progress.reporter import Reporter, Verbosity
from ooc.sources.reading import READING_OPTIONS

FunctionOfOptions = Callable[..., None]


def _add_reading_options(function: FunctionOfOptions) -> FunctionOfOptions:
    """Add the options that only some formats accept to the command, in the order of READING_OPTIONS."""
    for name, option in reversed(READING_OPTIONS.items()):
        flag = f"--{name.replace('_', '-')}"
        function = click.option(flag, name, metavar=option.metavar, help=option.help)(function)
    return function


def _parse_roles(values: tuple[str, ...]) -> dict[str, str]:
    """Return the role of each column by the column's name, from the texts ``NAME=ROLE`` in ``values``."""
    found = {}
    for value in values:
        name, equals, role = value.rpartition("=")
        if not (equals and role):
            raise click.BadParameter(f"{value!r} is not NAME=ROLE, such as age=ignore")
        found[name] = role
    return found


def _print_list(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ooc.report.console import Output
        from ooc.report.conversion_tables import print_list

        print_list(Output())
        context.exit()


@click.command(short_help="Convert a dataset to a store.", params=[config_option()])
@click.argument("source")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--format", metavar="NAME", help="What SOURCE is; found out by default.")
@click.option(
    "--symmetrize/--as-is",
    default=None,
    help="Add each edge's reverse, or keep the edges as they are. By default as is usual for the format.",
)
@click.option(
    "--duplicates",
    "drop_duplicates",
    type=ChoiceType("keep", "drop"),
    callback=lambda _context, _option, value: None if value is None else value == "drop",
    help="Edges between the same two nodes. [default: usual for the format; drop with --symmetrize, keep with --as-is]",
)
@click.option("--row-normalize", is_flag=True, help="Scale each node's features to the sum 1.")
@click.option("--self-loops", is_flag=True, help="Add an edge to itself to every node that has none.")
@choice_option("--dtype", "float32", "float64", "float16", help="How features are stored.")
@choice_option(
    "--feature-form",
    *("auto", "dense", "sparse"),
    help="Keep features with their zeros or without; by default without where that takes an eighth at most.",
)
@click.option(
    "--split",
    metavar="COLUMN|random[:SEED]",
    callback=lambda _context, _option, value: int(value) if value is not None and value.isdecimal() else value,
    help="Which of several splits, counted from 0, or a random one. [default: the source's only or first]",
)
@click.option(
    "--order",
    type=ChoiceType("hop", "none"),
    default="none",
    show_default=True,
    help="How rows lie in the store: by their distance from the scored nodes, or as in SOURCE. Ids stay as they are.",
)
@click.option("--drop-edge-data", is_flag=True, help="Convert without the weights or features that edges have.")
@click.option(
    "--hold-out-links",
    metavar="VALID,TEST[,SEED][:TYPE[:REVERSE]]",
    help="Shares of the edges to leave out of the graph, as links for ooc train --links; they go to NAME.links.npz. Of "
    "a graph with types those of one, as 0.05,0.1:user,rates,movie, and of its reverse, if there is one.",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME=ROLE",
    callback=lambda _context, _option, values: _parse_roles(values),
    help="What a column of a table is, where it is taken for something else: id, feature, label, split, train, val, "
    "test, src, dst, weight or ignore. May be given several times.",
)
@_add_reading_options
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=Path("data"),
    show_default=True,
    help="Where datasets named by SOURCE lie, or are downloaded to.",
)
@click.option("--yes", is_flag=True, help="Download without asking.")
@HOST_BUDGET
@FORCE
@ON_CANCEL
@click.option("--dry-run", is_flag=True, help="Only say what it would take: time, disk, memory.")
@with_verbosity
@JSON
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_list,
    help="Show what can be SOURCE: formats, names, and what each needs.",
)
def command(
    source: str,
    out: Path | None,
    root: Path,
    yes: bool,
    on_cancel: str,
    dry_run: bool,
    verbosity: Verbosity,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SOURCE to the store OUT (NAME.ooc in the current folder by default).

    SOURCE is a dataset's name, a file or folder of a known format (see --list), or
    synthetic:nodes=…,edges=…,features=…,classes=…[,labelled=1.0][,train=0.5][,directed=1][,seed=0]; many graphs are
    synthetic:graphs=…,nodes=…,edges=…,features=…[,classes=0][,seed=0], with nodes and edges of one on average.
    """
    from ooc.cli.info import describe, describe_shortly
    from ooc.conversion.conversion import convert
    from ooc.sources.names import named, obtain

    if dry_run:
        from ooc.report.console import Output
        from ooc.report.conversion_tables import print_forecast

        print_forecast(source, out, root=root, console=Output(), as_json=as_json, **options)
        return

    def confirm(question: str) -> bool:
        return yes or (sys.stdin.isatty() and click.confirm(f"{question}?", err=True))

    with Reporter(verbosity=verbosity) as reporter:
        place: str | Path = source
        if (dataset := named(source)) is not None:  # downloaded where its files are missing and the user agrees
            place = obtain(dataset, root, confirm=confirm, listener=reporter)
            out = out or Path(f"{dataset.name}.ooc")
        store = convert(place, out, on_cancel=on_cancel, listener=reporter, **options)
    if as_json:
        print_json(describe(store))
    elif verbosity > Verbosity.ERROR:
        click.echo(describe_shortly(store))
