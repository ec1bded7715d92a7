# SPDX-License-Identifier: Apache-2.0
"""The roofline (Williams, Waterman and Patterson, 2009): flops a second against flops for every byte that must move.

Kernels lie close together, so each has a number, and its name beside the picture with how often its limit it takes.
"""

from collections.abc import Sequence
from itertools import product
from math import cos, hypot, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GATHERS, _STREAMS = "#c2410c", "#1f6feb"
_STYLES = ("-", "--", "-.", ":")
_APART = 13.0
"""Points of 1/72 inch between the middles of numbers, and of numbers and marks."""


class Roof(NamedTuple):
    """A limit, of bytes or of flops a second."""

    name: str
    bytes_per_s: float = 0.0
    flops_per_s: float = 0.0


class Mark(NamedTuple):
    """A kernel: flops for every byte, and a second; how often its limit it takes; whether it gathers rows."""

    name: str
    flops_per_byte: float
    flops_per_s: float
    ratio: float
    gathers: bool


def draw(path: Path, roofs: Sequence[Roof], marks: Sequence[Mark]) -> None:
    """Write an SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "ooc", "font.size": 10, "grid.color": "#e8e8e8"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(11.5, 6.5), layout="constrained")
        axes, names = figure.subplots(1, 2, width_ratios=[2.4, 1])
        ordered = sorted(marks, key=lambda mark: (not mark.gathers, mark.flops_per_byte, mark.name))
        _set_scales(axes, roofs, ordered)
        _draw_roofs(axes, roofs)
        figure.draw_without_rendering()  # where marks lie is known from here on
        _draw_marks(axes, ordered)
        _list_names(names, ordered)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _set_scales(axes: "Axes", roofs: Sequence[Roof], marks: Sequence[Mark]) -> None:
    low = 0.6 * min(mark.flops_per_byte for mark in marks)
    high = 2.5 * max(mark.flops_per_byte for mark in marks)
    slowest = min(roof.bytes_per_s for roof in roofs if roof.bytes_per_s)
    bottom = min(low * slowest, *(mark.flops_per_s for mark in marks))
    top = max(roof.flops_per_s for roof in roofs)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.5 * bottom / 1e9, 2.0 * top / 1e9))
    axes.set(xlabel="flops for every byte that must move", ylabel="GFLOP/s")
    axes.grid(visible=True)
    axes.set_axisbelow(True)


def _draw_roofs(axes: "Axes", roofs: Sequence[Roof]) -> None:
    low, high = axes.get_xlim()
    top = max(roof.flops_per_s for roof in roofs)
    fastest = max(roof.bytes_per_s for roof in roofs)
    for roof, style in zip((roof for roof in roofs if roof.bytes_per_s), _STYLES, strict=False):
        end = min(high, top / roof.bytes_per_s)
        label = f"{roof.name}: {roof.bytes_per_s / 1e9:.1f} GB/s"
        axes.plot(
            [low, end], [at * roof.bytes_per_s / 1e9 for at in (low, end)], style, color="#555", lw=1, label=label
        )
    for roof, style in zip((roof for roof in roofs if roof.flops_per_s), _STYLES, strict=False):
        begin = min(high / 2, roof.flops_per_s / fastest)
        label = f"{roof.name}: {roof.flops_per_s / 1e9:.0f} GFLOP/s"
        axes.plot([begin, high], [roof.flops_per_s / 1e9] * 2, style, color="#15803d", lw=1.2, label=label)
    axes.legend(loc="lower right", fontsize=9, framealpha=1.0)


def _draw_marks(axes: "Axes", marks: Sequence[Mark]) -> None:
    at = [(mark.flops_per_byte, mark.flops_per_s / 1e9) for mark in marks]
    scale = 72 / axes.figure.dpi
    places = [(float(x) * scale, float(y) * scale) for x, y in axes.transData.transform(at)]
    taken = list(places)
    for number, (mark, value, (x, y)) in enumerate(zip(marks, at, places, strict=True), start=1):
        colour = _GATHERS if mark.gathers else _STREAMS
        axes.plot(*value, "o", color=colour, markersize=4)
        turns = (2 * pi * turn / 16 for turn in range(16))
        candidates = [(d * cos(turn), d * sin(turn)) for d, turn in product((12, 20, 28, 40, 55), turns)]
        free = [
            c
            for c in candidates
            if all(hypot(x + c[0] - a, y + c[1] - b) >= _APART for a, b in taken if (a, b) != (x, y))
        ]
        aside = (free or candidates)[0]
        taken.append((x + aside[0], y + aside[1]))
        line = {"arrowstyle": "-", "color": colour, "lw": 0.5, "shrinkA": 0, "shrinkB": 0}
        options: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "color": colour, "arrowprops": line}
        axes.annotate(str(number), value, aside, textcoords="offset points", **options)


def _list_names(axes: "Axes", marks: Sequence[Mark]) -> None:
    axes.axis("off")
    axes.text(0.0, 1.0, "times the limit", transform=axes.transAxes, fontsize=9, va="top", color="#555")
    for number, mark in enumerate(marks, start=1):
        y, colour = 1.0 - number / (len(marks) + 1), _GATHERS if mark.gathers else _STREAMS
        axes.text(0.0, y, f"{number}", transform=axes.transAxes, fontsize=9, va="top", color=colour)
        axes.text(0.1, y, mark.name, transform=axes.transAxes, fontsize=9, va="top")
        axes.text(1.0, y, f"{mark.ratio:.1f}", transform=axes.transAxes, fontsize=9, va="top", ha="right")
