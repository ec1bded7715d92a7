# SPDX-License-Identifier: Apache-2.0
"""Draw timelines as SVG to look at, HTML to zoom into, or JSON for Perfetto (ui.perfetto.dev)."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ooc.errors import OptionError, RunError
from ooc.plan.simulate.condensed import expand
from ooc.plan.simulate.timeline import MemoryUse, Resource, Stretch, Timeline, stretches, trace
from ooc.report.console import write_text
from ooc.sizes import format_size
from ooc.train.runs.run import PLANNED, TIMELINE, RunFolder

_COLOURS = {
    Resource.COMPUTE: "#2f81c7",
    Resource.HOST_COPY: "#8a63d2",
    Resource.TO_DEVICE: "#1a9c87",
    Resource.TO_HOST: "#6aa84f",
    Resource.SSD_READ: "#e0902a",
    Resource.SSD_WRITE: "#cf4f4f",
    Resource.LINK: "#b0579b",
}
_WIDTH, _LEFT, _RIGHT = 1200, 130, 24
_LANE, _GAP = 30, 8
_PASS_LANE = 22
_MEMORY_HEIGHT = 110
_NEAR_PIXELS, _BAR_PIXELS = 1.5, 5
"""Pixels: events nearer than the first merge into one bar, as wide as the second at most and as high as it is busy."""
_CHARACTER_WIDTH = 6.3
"""The most pixels that a character of the labels' font takes."""
_RESOURCE_FOLDER = files("ooc.report")
STYLE = _RESOURCE_FOLDER.joinpath("gantt.css").read_text(encoding="utf-8")
"""The CSS of a `drawing`."""
_SCRIPT_SIZES = f"{{left: {_LEFT}, wide: {_WIDTH - _LEFT - _RIGHT}, width: {_WIDTH}, character: {_CHARACTER_WIDTH}}}"
SCRIPT = f"'use strict';({_RESOURCE_FOLDER.joinpath('gantt.js').read_text(encoding='utf-8')})({_SCRIPT_SIZES});"
"""The script that lets drawings be zoomed and moved.

Drawings in a box of the class ``zoomable`` move together, also by its buttons ``data-zoom``; there the wheel zooms only
with the key Ctrl. Any other drawing moves by itself.
"""
_BACKGROUND = "svg.gantt{background:#fff}@media (prefers-color-scheme:dark){svg.gantt,body{background:#0f1419}}"


def write_gantt(path: Path, *timelines: Timeline) -> None:
    """Draw ``timelines``, those of several processes one below the other, to ``path``, in the format that its suffix
    names. Raise OptionError for a suffix other than .svg, .html and .json."""
    match path.suffix:
        case ".svg":
            text = svg(*timelines)
        case ".html":
            text = html(*timelines)
        case ".json":
            text = json.dumps(trace(*timelines, names=_rank_titles(timelines)))
        case _:
            raise OptionError(f"{path}: a drawing ends in .svg, .html or .json")
    write_text(path, text)


def _rank_titles(timelines: Sequence[Timeline]) -> list[str]:
    """Return the titles of several processes' drawings; none for a single process."""
    return [f"rank {rank}" for rank in range(len(timelines))] if len(timelines) > 1 else []


def write_trace(path: Path, out: Path) -> None:
    """Write the recorded epoch of the run at ``path``, beside the planned one, to ``out`` for Perfetto.

    Raise RunError where no epoch was recorded or its record is damaged; OptionError where ``out`` cannot be written.
    """
    run = RunFolder.open(path)
    found = {name: run.read(file) for name, file in (("planned", PLANNED), ("measured", TIMELINE))}
    if found["measured"] is None:
        raise RunError(f"{path} holds no timeline.json: runs in batches or of earlier versions have none")
    try:
        timelines = {name: expand(epoch) for name, epoch in found.items() if epoch is not None}
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"the timelines in {path} are damaged: {error}") from error
    write_text(out, json.dumps(trace(*timelines.values(), names=list(timelines))))


def svg(*timelines: Timeline) -> str:
    """Return an SVG, 1,200 pixels wide, of passes, a lane for each resource, and memory, over the same seconds."""
    titles = _rank_titles(timelines) or [timeline.program for timeline in timelines]
    drawn = [_Drawing(one, one.epoch_s, title, one.memory) for one, title in zip(timelines, titles, strict=True)]
    return _stack_drawings(drawn, f"<style>{STYLE}{_BACKGROUND}</style>\n")


def drawing(timeline: Timeline, *, span_s: float, title: str) -> str:
    """Return the SVG of one timeline for a page that has `STYLE`: ``span_s`` seconds wide, and without memory."""
    return _stack_drawings([_Drawing(timeline, span_s, title, ())])


def _stack_drawings(drawings: "Sequence[_Drawing]", style: str = "") -> str:
    """Return one SVG with the drawings one below the other."""
    parts, top = [], 0
    for drawn in drawings:
        parts.append(f'<g transform="translate(0,{top})">' + "\n".join(drawn.parts()) + "</g>")
        top += drawn.height
    box = f'class="gantt" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{style}' + "\n".join(parts) + "\n</svg>\n"


def html(*timelines: Timeline) -> str:
    """Return an HTML page with the SVG: the wheel zooms, dragging moves, and pointing at a bar describes it."""
    timeline = timelines[0]
    title = escape(f"{timeline.program}: {_seconds(timeline.epoch_s)} an epoch")
    page = '<!doctype html><html lang="en"><meta charset="utf-8"><title>' + title + "</title>"
    style = "<style>body{margin:0}svg{max-width:100%;height:auto}</style>"
    return f"{page}{style}\n{svg(*timelines)}<script>{SCRIPT}</script></html>\n"


class _Drawing:
    """A drawing of one timeline, laid out from top to bottom; `parts` yields its SVG, one line for each element."""

    def __init__(self, timeline: Timeline, span_s: float, title: str, memory: tuple[MemoryUse, ...]) -> None:
        self.timeline, self.title, self.memory = timeline, title, memory
        self.epoch_s = timeline.epoch_s or 1.0
        self.span_s = span_s or 1.0
        self.lanes = list(timeline.busy_s)
        self.top = 44
        self.first_lane = self.top + _PASS_LANE + _GAP
        self.memory_top = self.first_lane + len(self.lanes) * (_LANE + _GAP) + 6
        self.axis = self.memory_top + len(memory) * (_MEMORY_HEIGHT + _GAP + 14)
        self.height = self.axis + 26

    def parts(self) -> Iterator[str]:
        timeline = self.timeline
        most = timeline.bottleneck
        busy = timeline.busy_s.get(most, 0.0)
        title = f"{self.title}: {_seconds(timeline.epoch_s)} an epoch"
        if Resource.COMPUTE in timeline.busy_s:  # not measured on a GPU
            title += f", bound by {most.value} ({100 * busy / self.epoch_s:.0f} % busy)"
        yield f'<text x="{_LEFT}" y="24" font-size="15" data-span="{self.span_s!r}">{escape(title)}</text>'
        yield from self._grid()
        yield from self._passes()
        for number, resource in enumerate(self.lanes):
            yield from self._lane(resource, self.first_lane + number * (_LANE + _GAP))
        for number, use in enumerate(self.memory):
            yield from self._memory(use, self.memory_top + number * (_MEMORY_HEIGHT + _GAP + 14) + 14)

    def x(self, time_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * time_s / self.span_s

    def _grid(self) -> Iterator[str]:
        step = _round_step(self.span_s / 8)
        for number in range(int(self.span_s / step) + 1):
            x = self.x(number * step)
            yield f'<line class="grid" x1="{x:.1f}" y1="{self.top}" x2="{x:.1f}" y2="{self.axis}"/>'
            where = f'x="{x:.1f}" y="{self.axis + 16}" text-anchor="middle"'
            yield f'<text class="dim num" data-t="" {where}>{_seconds(number * step)}</text>'

    def _passes(self) -> Iterator[str]:
        yield _label("passes", self.top + 15)
        for item in self.timeline.passes:
            shade = "odd" if item.at % 2 else "even"
            what = f"{item.title}: {_seconds(item.end_s - item.start_s)}, {_seconds(item.waited_s)} of it waiting"
            if item.bound is not Resource.COMPUTE:
                what += f" for {item.bound.value}"
            yield self._box(item.start_s, item.end_s, self.top, _PASS_LANE, what, extra=f'class="{shade}"')
            x, width = self.x(item.start_s), self.x(item.end_s) - self.x(item.start_s)
            fits = int((width - 8) / _CHARACTER_WIDTH)
            shown = item.title if len(item.title) <= fits else item.title[: max(0, fits - 1)] + "…" if fits > 3 else ""
            title = escape(item.title)
            yield (
                f'<text x="{x + 4:.1f}" y="{self.top + 15}" data-x="{x:.2f}" data-w="{width:.2f}" '
                f'data-text="{title}" pointer-events="none">{escape(shown)}</text>'
            )

    def _lane(self, resource: Resource, y: int) -> Iterator[str]:
        busy = self.timeline.busy_s[resource]
        moved = self.timeline.moved_bytes.get(resource, 0)
        below = f"{100 * busy / self.epoch_s:.0f} %" + (f", {format_size(moved)}" if moved else "")
        yield _label(resource.value, y + 13)
        yield f'<text class="dim num" x="{_LEFT - 10}" y="{y + 26}" text-anchor="end">{below}</text>'
        yield f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_LANE}"/>'
        titles = {item.at: item.title for item in self.timeline.passes}
        pixel_s = self.span_s / (_WIDTH - _LEFT - _RIGHT)
        own = (event for event in self.timeline.events if event.resource is resource)
        for bar in stretches(own, _NEAR_PIXELS * pixel_s, _BAR_PIXELS * pixel_s):
            share = min(1.0, bar.busy_s / (bar.end_s - bar.start_s)) if bar.end_s > bar.start_s else 1.0
            height = max(1.0, _LANE * share)
            what = _describe_bar(resource, bar, titles[bar.at])
            yield self._box(bar.start_s, bar.end_s, y + _LANE - height, height, what, f'fill="{_COLOURS[resource]}"')

    def _memory(self, use: MemoryUse, y: int) -> Iterator[str]:
        yield _label(use.tier, y + 13)
        peak = f"peak {format_size(use.peak_bytes)}"
        yield f'<text class="dim num" x="{_LEFT - 10}" y="{y + 27}" text-anchor="end">{peak}</text>'
        yield f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_MEMORY_HEIGHT}"/>'
        most = max(use.peak_bytes, min(use.limit_bytes, 2 * use.peak_bytes), 1) * 1.08
        floor = y + _MEMORY_HEIGHT

        def height(nbytes: int) -> float:
            return floor - _MEMORY_HEIGHT * nbytes / most

        points = [(_LEFT * 1.0, floor * 1.0)]
        for time_s, nbytes in _thin_samples(use.samples, self.span_s):
            points += [(self.x(time_s), points[-1][1]), (self.x(time_s), height(nbytes))]
        points += [(self.x(self.epoch_s), points[-1][1]), (self.x(self.epoch_s), floor * 1.0)]
        shape = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        data = json.dumps([[round(a, 2), round(b, 1)] for a, b in points], separators=(",", ":"))
        what = f"{use.tier}: {format_size(use.peak_bytes)} at most in use of {format_size(use.limit_bytes)}"
        yield f'<polygon class="memory" points="{shape}" data-d="{data}"><title>{escape(what)}</title></polygon>'
        if use.limit_bytes <= most:
            line = height(use.limit_bytes)
            yield f'<line class="limit" x1="{_LEFT}" y1="{line:.1f}" x2="{_WIDTH - _RIGHT}" y2="{line:.1f}"/>'
            limit = f"budget {format_size(use.limit_bytes)}"
            yield f'<text class="dim num" x="{_WIDTH - _RIGHT - 4}" y="{line - 4:.1f}" text-anchor="end">{limit}</text>'

    def _box(self, start_s: float, end_s: float, y: float, height: float, what: str, extra: str) -> str:
        x = self.x(start_s)
        width = self.x(end_s) - x
        return (
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.4):.2f}" height="{height:.1f}" {extra} '
            f'data-x="{x:.3f}" data-w="{width:.3f}"><title>{escape(what)}</title></rect>'
        )


def _label(text: str, y: int) -> str:
    return f'<text x="{_LEFT - 10}" y="{y}" text-anchor="end">{escape(text)}</text>'


def _describe_bar(resource: Resource, bar: Stretch, title: str) -> str:
    moved = f", {format_size(bar.nbytes)}" if bar.nbytes else ""
    return f"{resource.value}, {title}: {_seconds(bar.busy_s)} of {_seconds(bar.end_s - bar.start_s)}{moved}"


def _thin_samples(samples: tuple[tuple[float, int], ...], span_s: float) -> list[tuple[float, int]]:
    """Return samples of memory use, at most one a pixel: the greatest in that pixel's time, so that no peak is lost."""
    kept: list[tuple[float, int]] = []
    for time_s, nbytes in samples:
        if kept and time_s < kept[-1][0] + span_s / (_WIDTH - _LEFT - _RIGHT):
            kept[-1] = kept[-1][0], max(kept[-1][1], nbytes)
        else:
            kept.append((time_s, nbytes))
    return kept


def _round_step(least: float) -> float:
    """Return the least number that is 1, 2 or 5 times a power of ten and not below ``least``."""
    power = 10.0**-12
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 0.1 or seconds == 0 else f"{seconds * 1e3:.3g} ms"
