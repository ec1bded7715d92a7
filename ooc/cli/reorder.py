# SPDX-License-Identifier: Apache-2.0
"""``ooc reorder``: write a store anew with its rows in another order."""

from pathlib import Path
from typing import Any

import click

from ooc.cli import print_json
from ooc.cli.arguments.options import FORCE, HOST_BUDGET, JSON, ON_CANCEL, choice_option, with_verbosity
from ooc.cli.info import describe, describe_shortly
from ooc.progress.reporter import Reporter, Verbosity


@click.command(short_help="Put a store's rows in hop order.")
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("out", required=False, type=click.Path(path_type=Path))
@choice_option("--order", "hop", help="The order.")
@HOST_BUDGET
@FORCE
@ON_CANCEL
@click.option("--dry-run", is_flag=True, help="Only say what it would take: disk and memory.")
@with_verbosity
@JSON
def command(
    store: Path, out: Path | None, dry_run: bool, verbosity: Verbosity, as_json: bool, on_cancel: str, **options: Any
) -> None:
    """Write STORE to OUT, or anew in its place, with the rows sorted by their distance from the scored nodes.

    Training then touches only the first rows of each array where few nodes can reach the loss. The graph and the ids
    that are shown stay the same. Results do but for rounding, as sums are added in another order, and for dropout,
    whose masks go by row: training takes other random numbers. A run on STORE cannot be resumed on what is written, so
    reorder in place only when there is none to go on with.
    """
    from ooc.conversion.budget import describe_demand
    from ooc.conversion.reorder import demand, reorder

    if dry_run:
        needed = demand(store, out, **options)
        if as_json:
            print_json(needed)
        else:
            click.echo(f"{needed['target']} would be written; nothing has been")
            click.echo("\n".join(describe_demand(**needed)))
        return
    with Reporter(verbosity=verbosity) as reporter:
        written = reorder(store, out, listener=reporter, on_cancel=on_cancel, **options)
    if as_json:
        print_json(describe(written))
    elif verbosity > Verbosity.ERROR:
        types = written.types
        hops = [written.attributes["hops"]] if types is None else [one for one, _ in types.hops.values()]
        nodes, farthest = sum(written.node_counts.values()), max(map(len, hops))
        rows = (sum(one[min(hop, len(one) - 1)] for one in hops) for hop in range(min(4, farthest)))
        shares = [f"{count / nodes:.3g}" for count in rows]
        click.echo(describe_shortly(written))
        click.echo(f"rows within 0, 1, 2, … steps of the scored ones: {', '.join(shares)} of all")
