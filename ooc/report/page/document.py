# SPDX-License-Identifier: Apache-2.0
"""The page: one HTML file that asks for nothing beside itself, and reads as well with scripts off.

Verdict and ranked tables come first, then the charts, the epoch drawn as planned and as measured, the plan's table, and
at the end machine, versions and command. The data of every chart is embedded as JSON (``ooc.report.page.figures`` says
by which rule it is thinned).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ooc.plan.simulate.condensed import expand
from ooc.progress.figures import format_duration
from ooc.report import gantt
from ooc.report.comparison import as_texts
from ooc.report.console import UNIT, write_text
from ooc.report.page.charts import charts, charts_of_run, passes_chart, run_labels
from ooc.report.page.figures import MOST_EPOCHS, figures
from ooc.report.page.findings import compared, used_of_budgets
from ooc.report.page.vocabulary import describe_matrix
from ooc.sizes import format_size

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Even a page that were made to ask for something would not."""
_ZOOM = (("closer", "2"), ("farther", "0.5"), ("whole epoch", "0"))
_TIMES = 8
"""An epoch that is shorter by more would hardly be seen over the other one's seconds."""
_HIDDEN = ("first_epoch", "ooc_version", "store_facts")

Row = Sequence[str]


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write the page of the runs at ``paths`` to ``out``. OptionError where that cannot be written; RunError for what
    is no run, has no epoch, or is damaged."""
    write_text(out, page([figures(path) for path in paths]))


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page of ``runs``, as `figures` gives them."""
    labels = run_labels(runs)
    title = escape(" and ".join(labels) if len(labels) < 4 else f"{len(labels)} runs")
    style = files("ooc.report.page").joinpath("style.css").read_text(encoding="utf-8") + gantt.STYLE
    data = json.dumps(list(runs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style>'
    )
    body = "\n".join(_body(runs, labels))
    embedded = f'<script type="application/json" id="figures">{data}</script><script>{gantt.SCRIPT}</script>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main>{embedded}</body></html>\n'
    )


def _body(runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Iterable[str]:
    several = len(runs) > 1
    yield f"<h1>{escape(labels[0] if not several else f'{len(runs)} runs')}</h1>"
    if several:
        yield f'<p class="verdict">{_unbroken(compared(runs, labels))}</p>'
        yield _card("Side by side", _side_by_side(runs, labels), "wide")
    else:
        yield f'<p class="dim">{escape(_described(runs[0]))}</p>'
        yield f'<p class="verdict">{_unbroken(runs[0]["verdict"])}</p>'
        yield from _tiles(runs[0])
        yield from _tables(runs[0])
    shared = charts(runs)
    if several:
        yield _cards(shared)
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        if several:
            yield f"<h2>{escape(label)}</h2>"
            yield f'<p class="dim">{escape(_described(run))}</p>'
            yield f'<p class="verdict">{_unbroken(run["verdict"])}</p>'
            yield from _tables(run)
        own = charts_of_run(run, f"r{number}")
        yield _cards(own, "four") if several else _cards([*shared, *own])
        yield from _epoch(run)
        yield from _plan(run, f"r{number}")
        yield from _origin(run)
    yield (
        f'<p class="dim">Curves have at most {MOST_EPOCHS} points: of longer runs every n-th epoch, with the first, '
        "the last and the best. An epoch’s times are kept in 512 to 1,024 pieces of equal length, memory as the most "
        "in each. The same as JSON: in this file’s element <code>#figures</code>, or by "
        "<code>ooc report RUN --json</code>.</p>"
    )


# ---- one run ------------------------------------------------------------------------------------------------------


def _described(run: Mapping[str, Any]) -> str:
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


def _tiles(run: Mapping[str, Any]) -> Iterable[str]:
    medians, best = run["medians"], run["best"]
    tiles = [_tile(format_duration(medians["time_s"]), "an epoch of training (median)")]
    if medians["time_s"]:
        share = medians["wait_s"] / medians["time_s"]
        tiles.append(_tile(f"{100 * share:.0f} %", "of it waiting for the SSD", share))
    for where, (used, budget) in used_of_budgets(run).items():
        text = f"memory{where} at most, of {format_size(budget)}"
        tiles.append(_tile(format_size(used), text, used / budget if budget else 0.0))
    tiles.append(_tile(format_size(medians["ssd_read_bytes"]), "read from the SSD an epoch"))
    tiles.append(_tile(format_size(medians["ssd_write_bytes"]), "written to it"))
    if best is not None:
        name = run["metric"]["name"]
        tiles.append(_tile(f"{best['valid_acc']:.4f}", f"best validation {name}, epoch {best['epoch']}"))
    yield f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(value: str, what: str, share: float | None = None) -> str:
    meter = "" if share is None else f'<div class="meter"><i style="width:{min(100.0, 100 * share):.1f}%"></i></div>'
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span>{meter}</div>'


def _tables(run: Mapping[str, Any]) -> Iterable[str]:
    """What took the time and what would help, beside each other."""
    most = max((row["time_s"] for row in run["time"]), default=0.0) or 1.0
    rows = [
        (
            f'<span class="share"><span class="bar" style="width:{70 * row["time_s"] / most:.0f}px"></span>'
            f"{100 * row['share']:.0f} %</span>",
            escape(row["what"]) + (f' <span class="dim">({escape(row["pass"])})</span>' if row["pass"] else ""),
            format_duration(row["time_s"]),
            format_duration(row["wait_s"]) if row["wait_s"] else "",
        )
        for row in run["time"]
    ]
    took = _table(("share", "what", "time", "waits for SSD"), rows, words=(0, 1))
    helping = [
        (
            f"<code>{escape(row['what'])}</code>" if row["what"].startswith(("-", "ooc")) else escape(row["what"]),
            "" if row["saves_s"] is None else f"{format_duration(row['saves_s'])}",
            escape(row["note"]),
        )
        for row in run["helps"]
    ]
    nothing = "<p>Nothing that was measured would save a hundredth of an epoch.</p>"
    helped = _table(("what", "saves at most", ""), helping, words=(0, 2)) if helping else nothing
    rest = '<p class="dim">Seconds an epoch, by what was measured. <code>ooc plan</code> plans changes exactly.</p>'
    yield f'<div class="cards">{_card("What took the time", took)}{_card("What would help most", helped + rest)}</div>'


def _epoch(run: Mapping[str, Any]) -> Iterable[str]:
    """Planned and measured over the same seconds."""
    found = {name: expand(run[name]) for name in ("planned", "measured") if run[name] is not None}
    if not found:
        return
    longest_s = max(timeline.epoch_s for timeline in found.values())
    spans = {name: longest_s for name in found}
    hint = "Bars are as high as their resource is busy. Drag to move, Ctrl and wheel to zoom, point to read."
    if any(timeline.epoch_s * _TIMES < longest_s for timeline in found.values()):
        spans = {name: timeline.epoch_s for name, timeline in found.items()}
        hint += " Each over seconds of its own: one is much shorter than the other."
    titles = {"planned": "planned", "measured": f"measured, epoch {(run['measured'] or {}).get('epoch')}"}
    drawn = "".join(
        gantt.drawing(timeline, span_s=spans[name], title=titles[name], memory=False)
        for name, timeline in found.items()
    )
    buttons = " ".join(f'<button type="button" data-zoom="{by}" hidden>{what}</button>' for what, by in _ZOOM)
    if _process(run):
        hint += f" In this epoch {_process(run)}."
    content = f'<div class="zoomable">{buttons}<p class="dim">{hint}</p><div class="scroll">{drawn}</div></div>'
    yield _card("One epoch: what each resource did when", content, "wide")


def _plan(run: Mapping[str, Any], name: str) -> Iterable[str]:
    forecast = run["forecast"]
    cards = []
    if run["comparison"] is not None:
        rows: list[Row] = [tuple(map(escape, as_texts(one))) for one in run["comparison"]["quantities"]]
        table = _table(("", "forecast", "measured", "ratio"), rows)
        cards.append(_card("Forecast and measured", table + passes_chart(run, name)))
    if run["matrices"]:
        rows = [
            (
                f"{escape(one['what'])} <span class='dim'>({escape(one['matrix'])})</span>",
                *(format_size(one[name]) if one[name] else "" for name in _MOVED),
            )
            for one in run["matrices"]
        ]
        table = _table(("matrix", "needed", "in memory", "SSD read", "SSD written"), rows)
        if any(one["found_bytes"] + one["ssd_read_bytes"] > one["used_bytes"] for one in run["matrices"]):
            table += '<p class="dim">What an evaluation has put out of memory is read once more than needed.</p>'
        cards.append(_card("Bytes of the measured epoch, by matrix and tier", table))
    if cards:
        yield f'<div class="cards">{"".join(cards)}</div>'
    if forecast is not None:
        yield _card("Where the plan keeps every matrix", _fates(forecast["fates"]), "wide")


_MOVED = ("used_bytes", "found_bytes", "ssd_read_bytes", "ssd_write_bytes")


def _fates(fates: Sequence[Mapping[str, Any]]) -> str:
    shares = [share for share in ("device", "host", "ssd", "recompute") if any(fate[share] for fate in fates)]
    names = {"device": "GPU", "host": "memory", "ssd": "SSD", "recompute": "computed again"}
    rows = [
        (
            escape(describe_matrix(fate["matrix"])),
            f"<code>{escape(fate['matrix'])}</code>",
            f"{fate['rows']:,} × {fate['columns']:,}",
            format_size(fate["bytes"]),
            *(f"{fate[share]} %" if fate[share] else "" for share in shares),
        )
        for fate in sorted(fates, key=lambda fate: -fate["bytes"])
    ]
    heads = ("matrix", "name", "rows × columns", "bytes", *(names[share] for share in shares))
    note = '<p class="dim">Shares of what an epoch reads of each, by where it waits until then.</p>'
    return note + _table(heads, rows, words=(0, 1))


def _origin(run: Mapping[str, Any]) -> Iterable[str]:
    """The command, the machine, the versions, and what is missing."""
    start = run["start"]
    parts = []
    if start is not None:
        again = f' <span class="dim">(start {run["starts"]} of this run)</span>' if run["starts"] > 1 else ""
        parts.append(f"<h3>Command{again}</h3><pre>{escape(start['command'])}</pre>")
        machine = dict(start["machine"])
        machine["memory"] = format_size(machine.pop("memory_bytes"))
        keys = {"run": run["run"], "started": start["time"], **machine, **start["versions"]}
        if run["forecast"] is not None:
            hardware = run["forecast"]["hardware"]
            keys["planned by"] = f"{hardware['name']}: {hardware['source']}"
        parts.append(_keys(keys))
    if run["missing"]:
        lines = "".join(f"<li>{escape(line)}</li>" for line in run["missing"])
        parts.append(f"<h3>Not in this report</h3><ul>{lines}</ul>")
    options = {name: value for name, value in run["config"].items() if name not in _HIDDEN}
    parts.append(f"<details><summary>All options</summary>{_keys(options)}</details>")
    yield _card("Where it comes from", "".join(parts), "wide")


# ---- several runs -------------------------------------------------------------------------------------------------


def _side_by_side(runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    rows = []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        medians, last, best, forecast = run["medians"], run["last"], run["best"], run["forecast"]
        dot = f'<span class="dot" style="background:var(--s{number % 6 + 1})"></span>'
        given = 0 if forecast is None else forecast["gpu_budget_bytes"] + forecast["host_budget_bytes"]
        budget = given or run["config"].get("memory") or 0
        rows.append(
            (
                f"{dot}{escape(label)}",
                escape(run["model"] or ""),
                format_size(budget) if budget else "",
                format_size(sum(run["peaks"].values())),
                str(run["epochs"]),
                format_duration(medians["time_s"]),
                format_duration(medians["wait_s"]),
                format_size(medians["ssd_read_bytes"]),
                format_size(medians["ssd_write_bytes"]),
                "" if last["loss"] is None else f"{last['loss']:.4f}",
                "" if best is None else f"{best['valid_acc']:.4f}",
            )
        )
    heads = ("run", "model", "memory", "used", "epochs", "epoch", "waits", "SSD read", "written", "loss", "best valid")
    return _table(heads, rows, words=(0, 1))


# ---- parts --------------------------------------------------------------------------------------------------------


def _process(run: Mapping[str, Any]) -> str:
    """What the system counts, beside what the plan does."""
    found = [use for use in (run["measured"] or {}).get("memory", ()) if use["tier"] == "process" and use["bytes"]]
    if not found:
        return ""
    return f"the process took {format_size(max(found[0]['bytes']))} of RAM at most, Python and torch included"


def _unbroken(text: str) -> str:
    """As HTML, with numbers and what they count in one line."""
    return UNIT.sub("\u00a0", escape(text))


def _cards(drawn: Iterable[tuple[str, str]], kind: str = "") -> str:
    return f'<div class="cards {kind}">{"".join(_card(heading, svg) for heading, svg in drawn)}</div>'


def _card(heading: str, content: str, kind: str = "") -> str:
    return f'<section class="card {kind}"><h3>{escape(heading)}</h3>{content}</section>'


def _keys(values: Mapping[str, Any]) -> str:
    """A table of names and values."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in values.items())
    return f'<div class="scroll"><table class="keys">{rows}</table></div>'


def _table(heads: Sequence[str], rows: Iterable[Row], words: Sequence[int] = (0,)) -> str:
    """Cells are HTML; those of the columns ``words`` are words, the others numbers."""
    kinds = ["w" if k in words else "n" for k in range(len(heads))]
    head = "".join(f'<th class="{kind}">{escape(text)}</th>' for kind, text in zip(kinds, heads, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td class={kind}>{cell}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
