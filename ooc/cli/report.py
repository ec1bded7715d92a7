# SPDX-License-Identifier: Apache-2.0
"""``ooc report``: show runs as one HTML page, as JSON, or as a trace for Perfetto."""

import json
from pathlib import Path

import click

from ooc.errors import OptionError

_OUT = "The page. [default: RUN/report.html; report.html for several runs]"
_TRACE = "Write the recorded epoch, and the planned one, for Perfetto (ui.perfetto.dev) or chrome://tracing instead."
PAGE_SUFFIXES = (".html", ".htm")


@click.command(short_help="Show runs as one HTML page.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE.html", help=_OUT)
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.json", help=_TRACE)
@click.option("--json", "as_json", is_flag=True, help="Print the page's figures as one JSON object a run.")
def command(runs: tuple[Path, ...], out: Path | None, trace: Path | None, as_json: bool) -> None:
    """Make one HTML page of a run, or of several side by side, that needs no network and no scripts.

    It begins with what bounded the epoch, whether memory kept to its budget and how good the model is; what took the
    time and what would help; then curves, the epoch as planned and as measured, memory, bytes and the plan.
    """
    if sum(given is not None for given in (out, trace)) + as_json > 1:
        raise OptionError("--out, --trace and --json are three different things to make; give one of them")
    if as_json:
        from ooc.report.page.figures import figures

        for run in runs:
            click.echo(json.dumps(figures(run), allow_nan=False))
        return
    if trace is not None:
        from ooc.report.gantt import write_trace

        if len(runs) > 1:
            raise OptionError("--trace takes one run: an epoch of its own is drawn")
        write_trace(runs[0], trace)
        click.echo(f"{trace}: open it at ui.perfetto.dev or chrome://tracing", err=True)
        return
    from ooc.report.console import check_drawing
    from ooc.report.page.document import write_report

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    check_drawing(out, *PAGE_SUFFIXES)
    write_report(runs, target)
    click.echo(target)
