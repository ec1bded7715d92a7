# SPDX-License-Identifier: Apache-2.0
"""``ooc runs``: list runs side by side."""

from pathlib import Path

import click

from ooc.cli import print_json
from ooc.cli.arguments.options import JSON, choice_option
from ooc.errors import RunError
from ooc.suggestions import did_you_mean_path

_USUAL = Path("runs")


@click.command(short_help="List runs with their results.")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@choice_option(
    "--sort",
    *("name", "score", "time", "memory", "date"),
    help="The best validation score, the least seconds an epoch, the least memory or the newest first.",
)
@JSON
def command(folder: Path | None, sort: str, as_json: bool) -> None:
    """List the runs in FOLDER and below it (in runs/, when left out, or here): how far they are, their best and last
    validation score, seconds an epoch (the median) and the most memory that they took.
    """
    from ooc.report.console import output
    from ooc.report.runs import find_runs, ordered, print_runs

    folder = folder if folder is not None else _USUAL if _USUAL.is_dir() else Path()
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}{did_you_mean_path(folder)}")
    found = ordered(find_runs(folder), sort)
    if as_json:
        print_json({"runs": found})
    elif found:
        print_runs(found, output())
    else:
        click.echo(f"there are no runs in {folder}; ooc train makes one")
