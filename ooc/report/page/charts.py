# SPDX-License-Identifier: Apache-2.0
"""Charts of one run or several, drawn by matplotlib as SVG for a page.

Text stays text, and colours follow the page's light or dark scheme. Matplotlib writes colours as numbers: those given
here are placeholders, replaced by the page's CSS variables.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ooc.report.page.figures import describe_pass
from ooc.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT, _GRID, _LIMIT = "#010101", "#010102", "#010103"
_SERIES = [f"#0202{number:02x}" for number in range(1, 7)]
_PAGE_COLOURS = {_TEXT: "currentColor", _GRID: "var(--grid)", _LIMIT: "var(--limit)"} | {
    colour: f"var(--s{number})" for number, colour in enumerate(_SERIES, start=1)
}
_SIZE = (5.0, 3.0)
"""The size of a chart in inches of 72 units: as wide as a card, so that its letters are as large as the page's."""
_MOST_ROWS = 10
_DWARFING_RATIO = 3
"""A multiple of the budget: the memory of a process that takes more is not drawn, since it would dwarf the rest."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ooc",
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "path.simplify_threshold": 0.3,
}
_COSTS = (("time", "seconds, evaluations included", "elapsed_s"), ("bytes read and written", "bytes", "moved_bytes"))
"""The quantities, besides epochs, over which runs are compared: name, unit and curve."""
Runs = Sequence[Mapping[str, Any]]
"""The results of ``ooc.report.page.figures`` for each run."""


def charts(runs: Runs) -> list[tuple[str, str]]:
    """Return heading and SVG of each chart that shows all runs together."""
    several = len(runs) > 1
    found = [("Loss", _render("loss", _draw_curves, runs, "loss", "loss"))]
    if any(score is not None for run in runs for score in run["curves"]["valid_score"]):
        metric = runs[0]["metric"]["name"]
        heading = f"Validation {metric}" if several else f"{metric[0].upper()}{metric[1:]}"
        found.append((heading, _render("scores", _draw_curves, runs, "valid_score", metric)))
        for quantity, unit, name in _COSTS if several else ():
            found.append(
                (f"{heading} by {quantity}", _render(name, _draw_curves, runs, "valid_score", metric, name, unit))
            )
    if several:
        found.append(("Time an epoch by what it went to", _render("times", _draw_median_times, runs)))
    return found


def charts_of_run(run: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    """Return heading and SVG of each chart of one run; ``name`` makes the ids of its drawings unique."""
    found = [("Time of every epoch", _render(f"{name}-time", _draw_times, run))]
    if run["measured"] is not None:
        found.append(("Memory during an epoch, against its budget", _render(f"{name}-memory", _draw_memory, run)))
    if run["matrices"]:
        found.append(("Bytes an epoch, by matrix", _render(f"{name}-bytes", _draw_bytes, run)))
    if (run["forecast"] or {}).get("cache"):
        found.append(("Reads found in memory", _render(f"{name}-cache", _draw_cache, run)))
    return found


def passes_chart(run: Mapping[str, Any], name: str) -> str:
    """Return the SVG of each pass's seconds, measured and forecast; an empty text where either is not known."""
    known = run["comparison"] is not None and run["comparison"]["passes"]
    return _render(f"{name}-passes", _draw_passes, run) if known else ""


def _render(name: str, draw: Callable[..., None], *what: Any) -> str:
    """Return, as SVG without a fixed size, what ``draw`` draws of ``what``; ids begin with ``name``."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        draw(axes, *what)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline_svg(out.getvalue(), name)


def _inline_svg(svg: str, name: str) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r" font-family: [^;]*;", "", body)
    body = re.sub(r"(\d\.\d\d)\d+", r"\1", body)
    body = re.sub(r'(?<=<svg) xmlns:xlink="[^"]*" width="[^"]*" height="[^"]*"', ' class="chart" role="img"', body)
    body = body.replace("xlink:href", "href").replace(' version="1.1"', "")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, place in _PAGE_COLOURS.items():
        body = body.replace(colour, place)
    return re.sub(r"\n\s*", "\n", body)


# ---- all runs -----------------------------------------------------------------------------------------------------


def _draw_curves(axes: "Axes", runs: Runs, of: str, called: str, by: str = "epoch", unit: str = "epoch") -> None:
    """Draw every run's curve ``of`` over the curve ``by``; for scores of a single run, those of all splits.

    Epochs without a value are left out; a curve with one value is a point.
    """
    each = zip(runs, cycle(_SERIES), run_labels(runs), strict=False)
    lines = [(run["curves"], of, colour, label) for run, colour, label in each]
    if len(runs) == 1 and of == "valid_score":
        splits = zip(("train", "valid", "test"), _SERIES, strict=False)
        lines = [(runs[0]["curves"], f"{split}_score", colour, split) for split, colour in splits]
    for curves, name, colour, label in lines:
        points = [(x, value) for x, value in zip(curves[by], curves[name], strict=True) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, label=label, marker="o" if len(points) == 1 else "")
    axes.set_ylabel(called)
    _format_x_axis(axes, unit)
    if len(lines) > 1:
        axes.legend(loc="best", handlelength=1.2)


def _format_x_axis(axes: "Axes", unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(unit)
    if unit == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if unit == "bytes":
        axes.xaxis.set_major_formatter(lambda value, _: format_size(int(value)))
        axes.xaxis.set_major_locator(MaxNLocator(5))


def _draw_median_times(axes: "Axes", runs: Runs) -> None:
    medians = {name: [run["medians"][name] for run in runs] for name in ("time_s", "wait_s", "eval_s")}
    _draw_stacked_bars(axes, run_labels(runs), _split_seconds(medians))
    axes.set_xlabel("seconds (median)")


def _split_seconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Split the seconds of epochs, or of runs, into computing, waiting for the SSD, and evaluation."""
    times, waits = seconds["time_s"], seconds["wait_s"]
    computing = [max(0.0, time_s - wait_s) for time_s, wait_s in zip(times, waits, strict=True)]
    return {"computing": computing, "waiting for the SSD": waits, "evaluation": seconds["eval_s"]}


def run_labels(runs: Runs) -> list[str]:
    """Return a label for each run: the shortest ends of their paths that tell all of them apart."""
    paths = [run["run"].rstrip("/").split("/") for run in runs]
    for parts in range(1, max(map(len, paths)) + 1):
        labels = ["/".join(path[-parts:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{path[-1]} ({number})" for number, path in enumerate(paths, start=1)]


# ---- one run ------------------------------------------------------------------------------------------------------


def _draw_times(axes: "Axes", run: Mapping[str, Any]) -> None:
    curves = run["curves"]
    parts = {name: values for name, values in _split_seconds(curves).items() if any(values)}
    if len(curves["epoch"]) == 1:
        _draw_stacked_bars(axes, [f"epoch {curves['epoch'][0]}"], parts)
        axes.set_xlabel("seconds")
        return
    of_parts: dict[str, Any] = {"labels": list(parts), "colors": _SERIES, "alpha": 0.85, "linewidth": 0}
    axes.stackplot(curves["epoch"], list(parts.values()), **of_parts)
    axes.set_xlim(curves["epoch"][0], curves["epoch"][-1])
    axes.set_ylim(0, None)
    axes.set_ylabel("seconds")
    _format_x_axis(axes, "epoch")
    _legend_above(axes, len(parts))


def _draw_memory(axes: "Axes", run: Mapping[str, Any]) -> None:
    """Draw memory in use over the share of the epoch's time: measured, planned, and the budget."""
    measured, planned = run["measured"], run["planned"]
    tiers = [use for use in measured["memory"] if use["tier"] != "process"]
    highest = max(max(use["limit_bytes"], *use["bytes"], 1) for use in tiers)
    unit, scale = _unit(highest)
    for number, use in enumerate(tiers):
        shown = "in use" if len(tiers) == 1 else f"{use['tier']} in use"
        shares = _memory_steps(use["bytes"], measured, scale)
        axes.fill_between(*shares, step="post", color=_SERIES[number], alpha=0.35, linewidth=0, label=shown)
        axes.axhline(use["limit_bytes"] / scale, color=_LIMIT, linestyle="--", linewidth=1.2)
        where = {"xy": (1, use["limit_bytes"] / scale), "xycoords": ("axes fraction", "data"), "ha": "right"}
        axes.annotate("budget", xytext=(0, 3), textcoords="offset points", fontsize=9, **where)  # type: ignore[arg-type]
    for use in (planned or {}).get("memory", ()):
        label = "planned" if use is planned["memory"][0] else None
        axes.step(*_memory_steps(use["bytes"], planned, scale), where="post", color=_TEXT, linewidth=0.9, label=label)
    for use in measured["memory"]:
        if use["tier"] == "process" and 0 < max(use["bytes"], default=0) < _DWARFING_RATIO * highest:
            label = "whole process"
            axes.plot(*_memory_steps(use["bytes"], measured, scale), color=_SERIES[3], linewidth=1.2, label=label)
    axes.set_xlabel("share of the epoch's time")
    axes.set_ylabel(unit)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    _legend_above(axes, 3)


def _memory_steps(nbytes: Sequence[int], epoch: Mapping[str, Any], scale: float) -> tuple[list[float], list[float]]:
    """Return times, as shares of the epoch, and the memory in use from each on, only where it changes."""
    end, piece = epoch["epoch_s"] or 1.0, epoch["piece_s"]
    kept = [k for k in range(len(nbytes)) if k in (0, len(nbytes) - 1) or nbytes[k] != nbytes[k - 1]]
    shares = [min(1.0, k * piece / end) for k in kept]
    values = [nbytes[k] / scale for k in kept]
    return [*shares, 1.0], [*values, values[-1] if values else 0.0]


def _draw_bytes(axes: "Axes", run: Mapping[str, Any]) -> None:
    rows = run["matrices"][:_MOST_ROWS]
    unit, scale = _unit(max(one["used_bytes"] + one["ssd_write_bytes"] for one in rows))
    parts = {
        "found in memory": [one["found_bytes"] / scale for one in rows],
        "read from the SSD": [one["ssd_read_bytes"] / scale for one in rows],
        "written to the SSD": [one["ssd_write_bytes"] / scale for one in rows],
    }
    _draw_stacked_bars(axes, [one["matrix"] for one in rows], parts)
    axes.set_xlabel(f"{unit} an epoch")


def _draw_cache(axes: "Axes", run: Mapping[str, Any]) -> None:
    """Draw the share of an epoch's block reads found in memory, by cache policy, as planned, and as measured."""
    cache = run["forecast"]["cache"]
    uses = cache["uses"] or 1
    rows = {"least recently used": cache["lru"], "Belady (the optimum)": cache["belady"], "as planned": cache["found"]}
    if run["measured"] is not None and not run["on_gpu"]:
        reads = run["measured"]["block_reads"]
        rows["measured"] = (reads["uses"] - reads["read"]) * uses / (reads["uses"] or 1)
    rows = dict(reversed(rows.items()))
    shares = [100 * found / uses for found in rows.values()]
    bars = axes.barh(list(rows), shares, color=_SERIES[0], height=0.55)
    axes.bar_label(bars, [f"{share:.1f} %" for share in shares], padding=4)
    axes.set_xlim(0, 115)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel(f"% of an epoch's {uses:,} reads of blocks")
    axes.grid(visible=False, axis="y")


def _draw_passes(axes: "Axes", run: Mapping[str, Any]) -> None:
    passes = sorted(run["comparison"]["passes"], key=lambda one: -one["measured"])[:_MOST_ROWS][::-1]
    places = range(len(passes))
    for name, colour, offset in (("measured", _SERIES[0], -0.19), ("forecast", _SERIES[1], 0.19)):
        axes.barh([k - offset for k in places], [one[name] for one in passes], 0.36, color=colour, label=name)
    axes.set_yticks(list(places), [_shorten(describe_pass(one["name"])) for one in passes])
    axes.set_xlabel("seconds")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower right", handlelength=1.2)


def _draw_stacked_bars(axes: "Axes", names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw horizontal bars stacked from the left, with the first name on top."""
    left = [0.0] * len(names)
    places = [len(names) - 1 - k for k in range(len(names))]
    for (name, values), colour in zip(parts.items(), _SERIES, strict=False):
        axes.barh(places, values, 0.6, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(places, [_shorten(name) for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(visible=False, axis="y")
    _legend_above(axes, len(parts))


def _legend_above(axes: "Axes", columns: int) -> None:
    axes.figure.legend(loc="outside upper left", ncols=columns, handlelength=1.0, columnspacing=1.0)


def _shorten(name: str) -> str:
    longest = 30
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _unit(nbytes: float) -> tuple[str, float]:
    """Return a unit that suits ``nbytes``, and the bytes it has."""
    unit = format_size(nbytes).rpartition(" ")[2]
    return unit, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}.get(unit, 1.0)
