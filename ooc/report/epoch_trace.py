# SPDX-License-Identifier: Apache-2.0
"""A run's recorded epoch, and the planned one beside it, in Chrome's trace event format: for ui.perfetto.dev."""

import json
from pathlib import Path

from ooc.errors import RunError
from ooc.plan.simulate.condensed import expand
from ooc.plan.simulate.timeline import trace
from ooc.report.console import write_text
from ooc.train.run import RunFolder


def write_trace(path: Path, out: Path) -> None:
    """Of the run at ``path``, to ``out``. RunError where no epoch of it has been recorded or its record is damaged;
    OptionError where ``out`` cannot be written."""
    run = RunFolder.open(path)
    found = {name: run.timeline(planned=name == "planned") for name in ("planned", "measured")}
    if found["measured"] is None:
        raise RunError(f"{path} holds no timeline.json: it was trained by a version that recorded none")
    try:
        timelines = {name: expand(epoch) for name, epoch in found.items() if epoch is not None}
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"the timelines in {path} are damaged: {error}") from error
    write_text(out, json.dumps(trace(*timelines.values(), names=list(timelines))))
