# SPDX-License-Identifier: Apache-2.0
"""``ooc verify``: check that a store is consistent and undamaged."""

from pathlib import Path

import click

from ooc.cli import print_json
from ooc.cli.arguments.options import JSON, with_verbosity
from ooc.errors import StoreError
from ooc.progress.reporter import Reporter, Verbosity


@click.command(short_help="Check a store.")
@click.argument("store", type=click.Path(path_type=Path))
@with_verbosity
@JSON
def command(store: Path, verbosity: Verbosity, as_json: bool) -> None:
    """Check STORE: counts, indices sorted and in range, both directions alike, labels, splits, checksums.

    Prints what is wrong, a line each; the exit code is 2 then.
    """
    from ooc.storage.store import open_store
    from ooc.storage.verification import verify

    opened = open_store(store)
    with Reporter(verbosity=verbosity) as reporter:
        problems = verify(opened, reporter)
    if as_json:
        print_json({"store": str(store), "problems": problems})
    if len(problems) == 1:
        raise StoreError(f"{store}: {problems[0]}")
    if problems:
        for problem in [] if as_json else problems:
            click.echo(problem)
        raise StoreError(f"{store}: {len(problems)} problems found")
    if verbosity > Verbosity.ERROR and not as_json:
        click.echo(f"{store}: all is well")
