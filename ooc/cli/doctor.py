# SPDX-License-Identifier: Apache-2.0
"""``ooc doctor``: how this machine would run a training, why, and what would help."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ooc.cli.options import JSON
from ooc.sizes import format_size


@click.command(short_help="Show how this machine would run, and what would help.")
@click.argument("path", type=click.Path(path_type=Path), default=Path())
@JSON
def command(path: Path, as_json: bool) -> None:
    """Show how scratch files in PATH (here, when left out) would be read and written, the budgets that
    would be taken, and the versions of what is installed. Each problem comes with one remedy.
    """
    from ooc.cli.machine import probe_layer

    report = probe_layer(path)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
        return
    for title, facts in report.facts.items():
        click.echo(title)
        for name, value in facts.items():
            click.echo(f"  {name.removesuffix('_bytes').replace('_', ' '):<28} {_readable(name, value)}")
    if not report.problems:
        click.echo("no problems found")
        return
    click.echo("problems")
    for problem in report.problems:
        click.echo(f"  {problem.what}")
        click.echo(f"    → {problem.remedy}")


def _readable(name: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case int() if name.endswith("_bytes"):
            return format_size(value)
        case list():
            return ", ".join(map(str, value)) or "nothing"
        case _:
            return str(value)
