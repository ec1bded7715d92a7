# SPDX-License-Identifier: Apache-2.0
"""The page of ``ooc report``: one HTML file that loads nothing else and is readable without scripts.

Verdict and ranked tables come first. Charts, the epoch as planned and as measured, and the plan's table follow, and at
the end machine, versions and command; ``page.html`` sets this order. The data of every chart is embedded as JSON
(``ooc.report.page.figures`` says how it is thinned).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ooc.plan.simulate.condensed import expand
from ooc.progress.figures import format_duration
from ooc.report import gantt
from ooc.report.console import UNIT, write_text
from ooc.report.page.charts import charts, charts_of_run, passes_chart, run_labels
from ooc.report.page.figures import MOST_EPOCHS, compared, describe_matrix, figures, used_of_budgets
from ooc.report.runs import as_texts
from ooc.sizes import format_size

_SEPARATE_SCALE_RATIO = 8
"""The ratio of two epochs' times above which each is drawn over its own seconds: one would hardly be visible."""
_HIDDEN_OPTIONS = ("contents", "first_epoch", "ooc_version", "store_facts")

Run = Mapping[str, Any]
"""The result of `figures` for one run."""


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write the page of the runs at ``paths`` to ``out``; raise OptionError where it cannot be written, and RunError
    for a path that is no run, or a run that has no epoch or is damaged."""
    write_text(out, page([figures(path) for path in paths]))


def page(runs: Sequence[Run]) -> str:
    """Return the page of ``runs``, each a result of `figures`."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "as_texts": as_texts,
        "duration": format_duration,
        "matrix": describe_matrix,
        "of_some": lambda names, rows: {name: text for name, text in names.items() if any(row[name] for row in rows)},
        "size": format_size,
        "size_if_any": lambda nbytes: format_size(nbytes) if nbytes else "",
        "unbroken": lambda text: UNIT.sub("\u00a0", text),
    }
    functions = (budget_of, charts_of_run, compared, described, epoch_of, is_read_again, options_of, origin_of)
    environment.globals |= {one.__name__: one for one in (*functions, passes_chart, tiles)}
    folder, labels = files("ooc.report.page"), run_labels(runs)
    return environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8")).render(
        runs=runs,
        several=len(runs) > 1,
        labels=labels,
        title=" and ".join(labels) if len(labels) < 4 else f"{len(labels)} runs",
        shared=charts(runs),
        style=folder.joinpath("style.css").read_text(encoding="utf-8") + gantt.STYLE,
        script=gantt.SCRIPT,
        data=json.dumps(list(runs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        most_epochs=MOST_EPOCHS,
    )


def described(run: Run) -> str:
    """Return one line with model, graph and machine."""
    graph, parts = run["graph"], []
    if run["model"]:
        parts.append(run["model"])
    if graph:
        counts = f"{graph['num_nodes']:,} nodes, {graph['num_edges']:,} edges, {graph['num_features']} features"
        parts.append(f"{graph['store']}: {counts}, {graph['num_classes']} classes or labels")
    if run["start"]:
        machine = run["start"]["machine"]
        parts.append(f"{machine.get('gpu') or machine['processor']}, {run['start']['time'][:10]}")
    return " · ".join(parts)


def tiles(run: Run) -> Iterator[tuple[str, str, float | None]]:
    """Yield the figures at the top: text, caption, and, for a figure that is a share, the share to draw."""
    medians, best = run["medians"], run["best"]
    yield format_duration(medians["time_s"]), "an epoch of training (median)", None
    if medians["time_s"]:
        share = medians["wait_s"] / medians["time_s"]
        yield f"{100 * share:.0f} %", "of it waiting for the SSD", share
    for where, (used, budget) in used_of_budgets(run).items():
        yield format_size(used), f"memory{where} at most, of {format_size(budget)}", used / budget if budget else 0.0
    yield format_size(medians["ssd_read_bytes"]), "read from the SSD an epoch", None
    yield format_size(medians["ssd_write_bytes"]), "written to it", None
    if best is not None:
        yield f"{best['valid_score']:.4f}", f"best validation {run['metric']['name']}, epoch {best['epoch']}", None


def epoch_of(run: Run) -> dict[str, str] | None:
    """Return the drawing of the planned and the measured epoch, and a hint on its use; None where neither is known."""
    found = {name: expand(run[name]) for name in ("planned", "measured") if run[name] is not None}
    if not found:
        return None
    longest_s = max(timeline.epoch_s for timeline in found.values())
    spans = dict.fromkeys(found, longest_s)
    hint = "Bars are as high as their resource is busy. Drag to move, Ctrl and wheel to zoom, point to read."
    if any(timeline.epoch_s * _SEPARATE_SCALE_RATIO < longest_s for timeline in found.values()):
        spans = {name: timeline.epoch_s for name, timeline in found.items()}
        hint += " Each over seconds of its own: one is much shorter than the other."
    measured = run["measured"] or {}
    for use in measured.get("memory", ()):
        if use["tier"] == "process" and use["bytes"]:  # counted by the system; the plan counts less
            took = format_size(max(use["bytes"]))
            hint += f" In this epoch the process took {took} of RAM at most, Python and torch included."
    titles = {"planned": "planned", "measured": f"measured, epoch {measured.get('epoch')}"}
    drawn = (gantt.drawing(one, span_s=spans[name], title=titles[name]) for name, one in found.items())
    return {"hint": hint, "drawn": "".join(drawn)}


def budget_of(run: Run) -> int:
    """Return the run's memory budget in bytes, as far as it is known; 0 if not."""
    forecast = run["forecast"]
    given = 0 if forecast is None else forecast["gpu_budget_bytes"] + forecast["host_budget_bytes"]
    return int(given or run["config"].get("memory") or 0)


def is_read_again(run: Run) -> bool:
    """Whether any matrix was read more often than the epoch uses it."""
    return any(one["found_bytes"] + one["ssd_read_bytes"] > one["used_bytes"] for one in run["matrices"])


def origin_of(run: Run) -> dict[str, Any]:
    """Return when the run was started, on which machine, and with which versions."""
    start, machine = run["start"], dict(run["start"]["machine"])
    machine["memory"] = format_size(machine.pop("memory_bytes"))
    found = {"run": run["run"], "started": start["time"], **machine, **start["versions"]}
    if run["forecast"] is not None:
        found["planned by"] = "{name}: {source}".format(**run["forecast"]["hardware"])
    return found


def options_of(run: Run) -> dict[str, Any]:
    """Return the run's options, without those of no interest to readers."""
    return {name: value for name, value in run["config"].items() if name not in _HIDDEN_OPTIONS}
