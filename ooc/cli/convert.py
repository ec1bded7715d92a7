# SPDX-License-Identifier: Apache-2.0
"""``ooc convert``: a source becomes a store."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from ooc.cli.options import SIZE
from ooc.report.progress import Reporter, format_count
from ooc.sizes import format_size
from ooc.sources.reading import READING_OPTIONS

FunctionOfOptions = Callable[..., None]


def _reading_options(function: FunctionOfOptions) -> FunctionOfOptions:
    """Add the options that single formats take, in the order of the table."""
    for name, option in reversed(READING_OPTIONS.items()):
        flag = f"--{name.replace('_', '-')}"
        function = click.option(flag, name, metavar=option.metavar, help=option.help)(function)
    return function


def _print_list(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from rich.console import Console

        from ooc.report.conversion_tables import print_list

        print_list(Console())
        context.exit()


def _obtained(source: str, root: Path, yes: bool, listener: Reporter) -> tuple[str | Path, str | None]:
    """Where ``source`` lies and its name, if it is a dataset's; downloaded if it must be and may be."""
    from ooc.sources.names import named, obtain

    def confirm(question: str) -> bool:
        return yes or (sys.stdin.isatty() and click.confirm(f"{question}?", err=True))

    dataset = named(source)
    if dataset is None:
        return source, None
    return obtain(dataset, root, confirm=confirm, listener=listener), dataset.name


@click.command(short_help="Convert a dataset to a store.")
@click.argument("source")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--format", "form", metavar="NAME", help="What SOURCE is; found out by default.")
@click.option(
    "--symmetrize/--as-is",
    default=None,
    help="Add each edge's reverse, or keep the edges as they are. By default as is usual for the format.",
)
@click.option(
    "--duplicates",
    type=click.Choice(["keep", "drop"]),
    help="Edges between the same two nodes. [default: usual for the format; drop with --symmetrize, keep with --as-is]",
)
@click.option("--row-normalize", is_flag=True, help="Scale each node's features to the sum 1.")
@click.option("--self-loops", is_flag=True, help="Add an edge to itself to every node that has none.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64", "float16"]),
    default="float32",
    show_default=True,
    help="How features are stored.",
)
@click.option(
    "--split",
    metavar="COLUMN|random[:SEED]",
    callback=lambda _context, _option, value: int(value) if value is not None and value.isdecimal() else value,
    help="Which of several splits, counted from 0, or a random one. [default: the source's only or first]",
)
@click.option(
    "--order",
    type=click.Choice(["hop", "none"]),
    default="none",
    show_default=True,
    help="How rows lie in the store: by their distance from the scored nodes, or as in SOURCE. Ids stay as they are.",
)
@click.option("--drop-edge-data", is_flag=True, help="Convert without the weights or features that edges have.")
@_reading_options
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=Path("data"),
    show_default=True,
    help="Where datasets named by SOURCE lie, or are downloaded to.",
)
@click.option("--yes", is_flag=True, help="Download without asking.")
@click.option("--host-budget", type=SIZE, help="RAM to work in. [default: half of what is free]")
@click.option("--force", is_flag=True, help="Replace OUT when it exists.")
@click.option(
    "--on-cancel",
    type=click.Choice(["keep", "remove"]),
    default="keep",
    show_default=True,
    help="What Ctrl-C does with the work so far. Kept, the same command goes on.",
)
@click.option("--dry-run", is_flag=True, help="Only say what it would take: time, disk, memory.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
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
    form: str | None,
    symmetrize: bool | None,
    duplicates: str | None,
    row_normalize: bool,
    self_loops: bool,
    dtype: str,
    split: int | str | None,
    order: str,
    drop_edge_data: bool,
    root: Path,
    yes: bool,
    host_budget: int | None,
    force: bool,
    on_cancel: str,
    dry_run: bool,
    quiet: bool,
    **reading: str | None,
) -> None:
    """Convert SOURCE to the store OUT (NAME.ooc in the current folder by default).

    SOURCE is a dataset's name, a file or folder of a known format (see --list), or
    synthetic:nodes=…,edges=…,features=…,classes=…[,labelled=1.0][,train=0.5][,directed=1][,seed=0].
    """
    from ooc.conversion.conversion import convert
    from ooc.memory import available_memory_bytes

    budget = host_budget if host_budget is not None else available_memory_bytes() // 2
    if dry_run:
        from rich.console import Console

        from ooc.report.conversion_tables import print_forecast
        from ooc.sources.reading import Request

        given = {name: value for name, value in reading.items() if value is not None}
        print_forecast(
            source,
            root=root,
            out=out,
            force=force,
            form=form,
            request=Request(split=split, budget_bytes=budget, drop_edge_data=drop_edge_data, options=given),
            symmetrize=symmetrize,
            self_loops=self_loops,
            row_normalize=row_normalize,
            ordered=order == "hop",
            dtype=dtype,
            console=Console(),
        )
        return
    with Reporter(quiet=quiet) as reporter:
        place, name = _obtained(source, root, yes, reporter)
        store = convert(
            place,
            out if out is not None or name is None else Path(f"{name}.ooc"),
            format=form,
            symmetrize=symmetrize,
            drop_duplicates=None if duplicates is None else duplicates == "drop",
            row_normalize=row_normalize,
            self_loops=self_loops,
            dtype=dtype,
            split=split,
            order=order,
            host_budget=budget,
            drop_edge_data=drop_edge_data,
            force=force,
            on_cancel=on_cancel,
            listener=reporter,
            **cast("dict[str, Any]", reading),
        )
    if not quiet:
        counts = [format_count(store.num_nodes, "nodes"), format_count(store.num_edges, "edges")]
        click.echo(f"{store.path}: {', '.join(counts)}, {format_size(store.nbytes)}")
