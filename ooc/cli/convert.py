# SPDX-License-Identifier: Apache-2.0
"""``ooc convert``: a source becomes a store."""

from pathlib import Path

import click

from ooc.cli.options import SIZE
from ooc.cli.progress import Reporter, format_count
from ooc.sizes import format_size


@click.command(short_help="Convert a dataset to a store.")
@click.argument("source")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--format", "form", metavar="NAME", help="What SOURCE is; found out by default.")
@click.option(
    "--symmetrize/--as-is",
    default=None,
    help="Add each edge's reverse and drop duplicates, or keep the edges as they are. "
    "By default as is usual for the format.",
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
    help="Which of several splits, counted from 0, or a random one. [default: the source's only or first]",
)
@click.option(
    "--order",
    type=click.Choice(["hop", "none"]),
    default="none",
    show_default=True,
    help="How rows lie in the store: by their distance from the scored nodes, or as in SOURCE. Ids stay as they are.",
)
@click.option("--host-budget", type=SIZE, help="RAM to work in. [default: half of what is free]")
@click.option("--force", is_flag=True, help="Replace OUT when it exists.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    source: str,
    out: Path | None,
    form: str | None,
    symmetrize: bool | None,
    row_normalize: bool,
    self_loops: bool,
    dtype: str,
    split: str | None,
    order: str,
    host_budget: int | None,
    force: bool,
    quiet: bool,
) -> None:
    """Convert SOURCE to the store OUT (NAME.ooc in the current folder by default).

    SOURCE is a folder of Planetoid raw files, an npz file, a folder of npy files, or
    synthetic:nodes=…,edges=…,features=…,classes=…[,labelled=1.0][,train=0.5][,directed=1][,seed=0].
    """
    from ooc.cli.memory import available_memory_bytes
    from ooc.conversion.conversion import convert

    with Reporter(quiet=quiet) as reporter:
        store = convert(
            source,
            out,
            format=form,
            symmetrize=symmetrize,
            row_normalize=row_normalize,
            self_loops=self_loops,
            dtype=dtype,
            split=split,
            order=order,
            host_budget=host_budget if host_budget is not None else available_memory_bytes() // 2,
            force=force,
            listener=reporter,
        )
    if not quiet:
        counts = [format_count(store.num_nodes, "nodes"), format_count(store.num_edges, "edges")]
        click.echo(f"{store.path}: {', '.join(counts)}, {format_size(store.nbytes)}")
