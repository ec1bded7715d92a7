# SPDX-License-Identifier: Apache-2.0
"""``ooc reorder``: a store's rows in another order."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ooc.cli import print_json
from ooc.cli.arguments.options import FORCE, HOST_BUDGET, JSON, ON_CANCEL, ChoiceType, with_verbosity
from ooc.cli.info import describe, describe_shortly
from ooc.progress.reporter import Reporter, Verbosity

if TYPE_CHECKING:
    from ooc.storage.store import Store


@click.command(short_help="Put a store's rows in hop order.")
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--order", type=ChoiceType("hop"), default="hop", show_default=True, help="The order.")
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
        shares = [f"{share:.3g}" for share in _shares(written)[:4]]
        click.echo(describe_shortly(written))
        click.echo(f"rows within 0, 1, 2, … steps of the scored ones: {', '.join(shares)} of all")


def _shares(store: "Store") -> list[float]:
    """Of the rows of all types of nodes, those within 0, 1, … steps of the scored ones."""
    if store.types is None:
        return [rows / store.num_nodes for rows in store.attributes["hops"]]
    hops, nodes = [hops for hops, _ in store.types.hops.values()], sum(store.types.nodes.values())
    return [sum(one[min(hop, len(one) - 1)] for one in hops) / nodes for hop in range(max(map(len, hops)))]
