# SPDX-License-Identifier: Apache-2.0
"""``ooc doctor``: show how this machine would run a training, why, and what would help."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ooc.cli import print_json
from ooc.cli.arguments.options import JSON
from ooc.sizes import format_size

_MOST_REMEDIES = 3
"""The most remedies shown, though further problems are always listed."""
_LABEL_WIDTH = 20
_GPU_FACTS = {
    *("to_a_gpu", "gpudirect", "gpudirect_lacks", "nvidia-ml-py", "kvikio-cu13"),
    *("default_gpu_budget_on_cpu_bytes", "default_host_budget_bytes"),
}
"""Facts shown only on a machine with a GPU."""


@click.command(short_help="Show how this machine would run, and what would help.")
@click.argument("path", type=click.Path(path_type=Path), default=Path())
@JSON
def command(path: Path, as_json: bool) -> None:
    """Show how scratch files in PATH (here, when left out) would be read and written, the memory that
    would be taken, and the versions of what is installed; then a verdict, and what would help most, each with what to
    do about it.
    """
    from ooc.report.console import output, print_hanging, say
    from ooc.report.machine import examine

    report, console = examine(path), output()
    if as_json:
        print_json({**asdict(report), "verdict": report.verdict})
        return
    for title, facts in report.facts.items():
        click.echo(title)
        of_gpu = report.facts["gpu"]["driver"] is not None
        for name, value in facts.items():
            if of_gpu if name == "default_memory_bytes" else name in _GPU_FACTS and not of_gpu:
                continue
            label = f"  {name.removesuffix('_bytes').replace('_', ' '):<{_LABEL_WIDTH}} "
            print_hanging(label, _format_value(name, value), console)
    most, more = report.remedies[:_MOST_REMEDIES], report.problems[_MOST_REMEDIES:]
    say(console, f"verdict: {report.verdict}")
    click.echo("what would help most" if most else "nothing would help")
    for number, problem in enumerate([*most, *more], start=1):
        print_hanging(f"  {number}. ", problem.what, console)
        click.echo(f"     → {problem.remedy}")  # which may be a command


def _format_value(name: str, value: Any) -> str:
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
