# SPDX-License-Identifier: Apache-2.0
"""Plan the same training for other memory and SSDs: a grid (``ooc plan --what-if``), or one change at a time.

A grid, shown as a table and a picture, has a point for each GPU memory, host memory (where the CPU computes, one memory
that is both) and SSD. Of two points with the same time a buyer wants the smaller. The *Pareto front* therefore has the
points that are not beaten by one that asks for no more of anything.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from ooc.errors import BudgetError, OptionError
from ooc.events import Listener, reported
from ooc.memory import divide_memory
from ooc.plan import Hardware, Limits
from ooc.plan.hardware import Curve, Disk
from ooc.progress.figures import format_duration
from ooc.progress.plan_report import PlanReport
from ooc.report.console import print_table, say
from ooc.sizes import format_size, parse_size
from ooc.suggestions import did_you_mean

CARDS = (8, 12, 16, 24, 40, 48, 80)
"""The memory sizes of common GPUs, in GB."""
SHARE_OF_MEMORY = 0.9
"""The share of a card's or machine's memory taken as its budget; driver, system and process need the rest."""
_DEMANDS = {
    "memory": "memory_bytes",
    "gpu": "gpu_budget_bytes",
    "host": "host_budget_bytes",
    "ssd": "ssd_bytes_per_s",
}
"""The name of a cell's demand, by axis."""
_LEAST_BUDGET = re.compile(r"\b(gpu|host|memory)(?:_budget)?='([^']+)'")
REQUEST_BYTES = 1 << 20
"""The size of the requests whose rate stands for the speed of an SSD."""
_GB = 10**9
_EQUAL_TIME_RATIO = 1.03
"""Plans count as equally fast up to this ratio of their times."""
_MOST_MEMORIES = 7

Plan = Callable[..., PlanReport]
"""A function that plans for limits and a machine; ``narrow``: with intermediates spilled as bfloat16."""


@dataclass(frozen=True, slots=True)
class Value:
    """A position on an axis, with its label; the amount is in bytes, for the SSD in bytes a second."""

    amount: int
    label: str


Axes = Mapping[str, Sequence[Value]]


def parse_axes(texts: Sequence[str]) -> dict[str, list[Value]]:
    """Return the axes in ``memory=8G,16G``, or ``gpu=8G,16G`` and ``host=64G,…``, and ``ssd=2G,7G`` (bytes a second),
    each ascending. They may stand in one text or in several. Raise OptionError for anything else."""
    axes: dict[str, list[Value]] = {}
    for text in " ".join(texts).split():
        axis, separator, amounts = text.partition("=")
        if axis not in _DEMANDS or not separator:
            axes_there = "gpu=8G,24G and host=64G,128G, on a CPU sizes of memory alike; and ssd=2G,7G"
            raise OptionError(f"{text}: give {axes_there}{did_you_mean(axis, _DEMANDS)}")
        if axis in axes:
            raise OptionError(f"{axis} is given twice")
        parts = [part.removesuffix("/s") for part in amounts.split(",")]
        found = sorted({parse_size(part, name=f"--what-if {axis}") for part in parts})
        axes[axis] = [Value(size, format_size(size) + ("/s" if axis == "ssd" else "")) for size in found]
    if "memory" in axes and axes.keys() & {"gpu", "host"}:
        raise OptionError("memory is both budgets together; give sizes of it, or of gpu and host")
    return axes


def full_axes(
    given: Axes, hardware: Hardware, limits: Limits, *, memory_bytes: int, least_bytes: int
) -> dict[str, Sequence[Value]]:
    """Return the axes ``given``, and common values for the others. ``memory_bytes`` is the machine's memory;
    ``least_bytes`` the least that training takes.

    With a GPU these are common cards, and half, all and twice the host memory; else round sizes from the least to twice
    the memory. For the SSD they are the machine's own and one twice as fast. Where one of two budgets on a CPU is
    given, the other is that of ``limits``.
    """
    axes: dict[str, Sequence[Value]] = {}
    if hardware.has_device_memory:
        if "memory" in given:
            raise OptionError(f"{hardware.name} has a GPU; give gpu= and host=")
        sizes = [memory_bytes // 2, memory_bytes, 2 * memory_bytes]
        axes["gpu"] = given.get("gpu") or [Value(int(SHARE_OF_MEMORY * n * _GB), f"{n} GB card") for n in CARDS]
        axes["host"] = given.get("host") or [Value(int(SHARE_OF_MEMORY * n), f"{n / _GB:.3g} GB RAM") for n in sizes]
    elif given.keys() & {"gpu", "host"}:
        axes["gpu"] = given.get("gpu") or [Value(limits.device_bytes, format_size(limits.device_bytes))]
        axes["host"] = given.get("host") or [Value(limits.host_bytes, format_size(limits.host_bytes))]
    else:
        usual = (Value(size, format_size(size)) for size in _round_sizes(least_bytes, 2 * memory_bytes))
        axes["memory"] = given.get("memory") or [*usual]
    own = int(hardware.disk.read_bytes_per_s.at(REQUEST_BYTES))
    axes["ssd"] = given.get("ssd") or [Value(own * n, f"{format_size(own * n)}/s") for n in (1, 2)]
    return axes


def _round_sizes(least_bytes: int, most_bytes: int) -> list[int]:
    """Return at most ``_MOST_MEMORIES`` of 1, 2 and 5 times powers of ten, from the last not above ``least_bytes``."""
    usual = [digit * 10**power for power in range(6, 13) for digit in (1, 2, 5)]
    first = max((k for k, size in enumerate(usual) if size <= least_bytes), default=0)
    last = max(first + 1, *(k for k, size in enumerate(usual) if size <= most_bytes))
    places = min(_MOST_MEMORIES, last - first + 1)
    return [usual[first + round(k * (last - first) / (places - 1))] for k in range(places)]


def grid(axes: Axes, limits: Limits, hardware: Hardware, plan: Plan, listener: Listener) -> list[dict[str, Any]]:
    """Return a cell for every point as plain data: its demands and the figures of an epoch, or the bytes it lacks.

    Not every point needs a plan: one that does not fit does not with any SSD, and a faster SSD changes nothing where
    none is read or written.
    """
    memories = [axis for axis in ("memory", "gpu", "host") if axis in axes]
    points = list(product(*(axes[axis] for axis in memories)))
    cells: list[dict[str, Any]] = []
    known: dict[tuple[Value, ...], dict[str, Any]] = {}
    with reported(listener, "planning", len(points) * len(axes["ssd"]), "points") as advance:
        for ssd, point in product(axes["ssd"], points):
            if point not in known or known[point]["ssd_read_bytes"] or known[point]["ssd_write_bytes"]:
                amounts = [value.amount for value in point]
                device, host = amounts if len(amounts) == 2 else divide_memory(*amounts)
                tried = replace(limits, device_bytes=device, host_bytes=host, one_memory=len(amounts) == 1)
                times = ssd.amount / hardware.disk.read_bytes_per_s.at(REQUEST_BYTES)
                on = replace(hardware, disk=faster_disk(hardware.disk, times))
                known[point] = found = plan_figures(partial(plan, tried, on))
                found["lacking_bytes"] = {} if found["reason"] is None else _shortfall(found["reason"], tried)
            cell: dict[str, Any] = {}
            for axis, value in zip((*memories, "ssd"), (*point, ssd), strict=True):
                cell |= {_DEMANDS[axis]: value.amount, axis: value.label}
            cells.append({**cell, "feasible": known[point]["reason"] is None, **known[point]})
            advance(len(cells))
    for cell in cells:
        cell["pareto"] = cell["feasible"] and not any(_dominates(other, cell) for other in cells)
    return cells


def _shortfall(reason: str, limits: Limits) -> dict[str, int]:
    """Return the bytes that each budget lacks; ``reason`` ends with the least that would do."""
    have = {"gpu": limits.device_bytes, "host": limits.host_bytes, "memory": limits.memory_bytes}
    least = {name: parse_size(size, name=name) for name, size in _LEAST_BUDGET.findall(reason)}
    return {name: size - have[name] for name, size in least.items()}


def _demands(cell: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(cell[name] for name in _DEMANDS.values() if name in cell)


def _dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether ``one`` asks for less of something and more of nothing, and is as fast as ``other``."""
    if not one["feasible"] or one is other:
        return False
    less, more = _demands(one), _demands(other)
    no_more = all(a <= b for a, b in zip(less, more, strict=True))
    return no_more and less != more and bool(one["epoch_s"] <= _EQUAL_TIME_RATIO * other["epoch_s"])


# ---- for people ----------------------------------------------------------------------------------------------


def print_grid(cells: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table for each SSD, and the Pareto front in one of its own."""
    for ssd in dict.fromkeys(cell["ssd"] for cell in cells):
        shown = [cell for cell in cells if cell["ssd"] == ssd]
        say(console, f"SSD {ssd}: seconds an epoch, and bytes to and from the SSD")
        _print_plane(shown, console)
    front = sorted((cell for cell in cells if cell["pareto"]), key=lambda cell: -cell["epoch_s"])
    if not front:
        say(console, "no point of these does; what each lacks stands in its place")
        return
    say(console, "*: nothing that asks for no more is as fast. These points, the slowest first:")
    named = [axis for axis in _DEMANDS if axis in cells[0]]
    rows = [(*(cell[axis] for axis in named), format_duration(cell["epoch_s"]), cell["bottleneck"]) for cell in front]
    print_table((*named, "epoch", "bound by"), rows, console)


def _print_plane(cells: Sequence[dict[str, Any]], console: Console) -> None:
    if "memory" in cells[0]:
        rows = [(cell["memory"], *_cell_texts(cell)) for cell in cells]
        print_table(("memory", "epoch", "SSD"), rows, console)
        return
    hosts = list(dict.fromkeys(cell["host"] for cell in cells))
    across = len(hosts)
    lines = [
        (cells[k]["gpu"], *("\n".join(filter(None, _cell_texts(cell))) for cell in cells[k : k + across]))
        for k in range(0, len(cells), across)
    ]
    print_table(("GPU", *hosts), lines, console)


def _cell_texts(cell: Mapping[str, Any]) -> tuple[str, str]:
    if cell["epoch_s"] is None:
        lacking = cell["lacking_bytes"].items()
        return "too small", ", ".join(f"{budget} +{format_size(nbytes)}" for budget, nbytes in lacking)
    moved = cell["ssd_read_bytes"] + cell["ssd_write_bytes"]
    return format_duration(cell["epoch_s"]) + (" *" if cell["pareto"] else "  "), format_size(moved) if moved else ""


def next_points(cells: Sequence[dict[str, Any]], start: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return, for each axis, the cell with the next higher value there, the fastest first.

    All start from one cell: the largest that asks for no more than ``start``, which maps names of demands to amounts,
    or the smallest feasible one if there is none.
    """
    feasible = [cell for cell in cells if cell["feasible"]]
    within = [cell for cell in feasible if all(cell[name] <= start[name] for name in start if name in cell)]
    if not feasible:
        return []
    here = max(within, key=_demands) if within else min(feasible, key=_demands)
    found = []
    point = {axis: here[axis] for axis in _DEMANDS if axis in here}
    for axis in point:
        name, same = _DEMANDS[axis], [_DEMANDS[other] for other in point if other != axis]
        more = (cell for cell in feasible if cell[name] > here[name])
        others = [cell for cell in more if all(cell[key] == here[key] for key in same)]
        if others:
            there = min(others, key=_demands)
            step = {"axis": axis, "to": there[axis], "epoch_s": there["epoch_s"]}
            found.append({"from": point, "from_epoch_s": here["epoch_s"], **step})
    return sorted(found, key=lambda step: step["epoch_s"])


def print_next_points(found: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the starting cell and what each step from there saves."""
    if not found:
        return
    start, before_s = found[0]["from"], found[0]["from_epoch_s"]
    say(console, f"from {', '.join(f'{axis} {label}' for axis, label in start.items())}, {format_duration(before_s)}:")
    for step in found:
        saved_s = before_s - step["epoch_s"]
        saved = f"{format_duration(saved_s)} ({100 * saved_s / before_s:.0f} %)"
        found_s = saved if saved_s > (_EQUAL_TIME_RATIO - 1) * before_s else "nothing"
        say(console, f"  {step['axis']} {step['to']} saves {found_s}")


# ---- a picture of it ------------------------------------------------------------------------------------------------


SUFFIXES = (".svg", ".png")
_DASHES = ("-", "--", ":", "-.")
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e6bbf", "#c98b1b", "#5b6770")
"""Line colours by host memory, which people who confuse red and green can tell apart, too."""


def draw(cells: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw the epoch's seconds over memory to ``path``, with the Pareto front ringed, and crosses for missing plans."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    across = "memory" if "memory" in cells[0] else "gpu"
    places = list(dict.fromkeys(cell[across] for cell in cells))
    hosts = list(dict.fromkeys(cell.get("host", "") for cell in cells))
    ssds = list(dict.fromkeys(cell["ssd"] for cell in cells))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ooc", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        axes = figure.subplots()
        longest = max((cell["epoch_s"] for cell in cells if cell["feasible"]), default=1.0)
        for number, (host, ssd) in enumerate((host, ssd) for host in hosts for ssd in ssds):
            line = [cell for cell in cells if (cell.get("host", ""), cell["ssd"]) == (host, ssd)]
            colour = _COLOURS[hosts.index(host) % len(_COLOURS)]
            there = [cell for cell in line if cell["feasible"]]
            label = ", ".join(filter(None, (host, f"SSD {ssd}")))
            line_style = _DASHES[ssds.index(ssd) % len(_DASHES)]
            points = [places.index(cell[across]) for cell in there], [cell["epoch_s"] for cell in there]
            drawn: dict[str, Any] = {"marker": "o", "markersize": 4, "zorder": 2 + number / 100}
            axes.plot(*points, line_style, color=colour, label=label, **drawn)
            best = [cell for cell in there if cell["pareto"]]
            at = [places.index(cell[across]) for cell in best]
            axes.scatter(at, [cell["epoch_s"] for cell in best], s=90, facecolors="none", edgecolors=colour, zorder=4)
            lacking = [places.index(cell[across]) for cell in line if not cell["feasible"]]
            axes.scatter(lacking, [1.12 * longest] * len(lacking), marker="x", color=colour, s=30, clip_on=False)
        axes.set_xticks(range(len(places)), places)
        axes.set_xlim(-0.4, len(places) - 0.6)
        axes.set_ylim(0, 1.18 * longest)
        axes.set_ylabel("seconds an epoch (forecast)")
        axes.set_xlabel("memory" if across == "memory" else "GPU")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(axis="y", color="#d8dce0", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, title="ringed: Pareto front; ×: too small", title_fontsize=9)
        # No date: the same points give the same file.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


# ---- one change at a time -------------------------------------------------------------------------------------------


_IMPROVEMENT = 2
_FIGURES = ("epoch_s", "ssd_read_bytes", "ssd_write_bytes")


def changes(report: PlanReport, plan: Plan, *, spilled_narrow: bool) -> list[dict[str, Any]]:
    """Return what an epoch would take after each of several single changes, the most helpful first.

    ``epoch_s`` is None for a change without a plan. ``spilled_narrow``: spills are bfloat16 already.
    """
    limits, hardware = report.limits, report.hardware
    host = replace(limits, host_bytes=_IMPROVEMENT * limits.host_bytes)
    device = replace(limits, device_bytes=_IMPROVEMENT * limits.device_bytes)
    disk = replace(hardware, disk=faster_disk(hardware.disk, _IMPROVEMENT))
    memories = {"twice the host budget": host, "twice the gpu budget": device}
    if not hardware.has_device_memory:
        memories = {"twice the memory": replace(host, device_bytes=device.device_bytes)}
    tried = [(name, at, hardware, spilled_narrow) for name, at in memories.items()]
    tried.append(("a disk twice as fast", limits, disk, spilled_narrow))
    if not spilled_narrow:
        tried.append(("--spill-dtype bfloat16", limits, hardware, True))
    found = []
    for name, at, on, narrow in tried:
        try:
            figures = plan_figures(partial(plan, at, on, narrow=narrow))
        except OptionError:  # the model lacks the option, such as bfloat16 spills with attention
            continue
        saved_s = 0.0 if figures["epoch_s"] is None else report.epoch_s - figures["epoch_s"]
        found.append({"name": name, **{key: figures[key] for key in _FIGURES}, "saved_s": saved_s})
    return sorted(found, key=lambda change: -change["saved_s"])


def faster_disk(disk: Disk, times: float) -> Disk:
    """Return a drive ``times`` as fast as ``disk``, in reading and in writing."""

    def scaled(curve: Curve) -> Curve:
        return replace(curve, points=tuple((x, times * y) for x, y in curve.points))

    return replace(
        disk,
        read_bytes_per_s=scaled(disk.read_bytes_per_s),
        write_bytes_per_s=scaled(disk.write_bytes_per_s),
        both_ways_bytes_per_s=times * disk.both_ways_bytes_per_s,
    )


def plan_figures(plan: Callable[[], PlanReport]) -> dict[str, Any]:
    """Return the figures of a plan that tables show, or the ``reason`` why there is none."""
    try:
        report = plan()
    except BudgetError as error:
        return dict.fromkeys((*_FIGURES, "bottleneck")) | {"reason": str(error)}
    figures = {key: getattr(report, key) for key in _FIGURES}
    return {**figures, "bottleneck": report.timeline.bottleneck.value, "reason": None}
