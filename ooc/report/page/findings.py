# SPDX-License-Identifier: Apache-2.0
"""What a run's figures come to: a verdict in a sentence, what took the time, and what would help most.

What something would save is what it could save at most, by what was measured, and is called that: nothing is planned
anew here (``ooc plan`` does that).
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ooc.engine.record import EpochRecord
from ooc.progress.figures import format_duration
from ooc.report.page.vocabulary import describe_pass
from ooc.sizes import format_size

WAITING_SHARE = 0.1
"""Of an epoch's time: one that waits longer for the SSD is bound by it, as passes are."""
_MOST, _HARDLY = 0.5, 0.005
"""Of an epoch's time, likewise."""
_EVERY = 5
"""Epochs between two evaluations, where each is evaluated now."""
_WORTH_SHARE = 0.01
"""Of an epoch's time: what saves less is not worth a line."""


def verdict(found: Mapping[str, Any]) -> str:
    """What bounded the epoch, whether memory kept to its budgets, and how good the model has become."""
    return f"{_bound(found)}; {_memory(found)}; {_result(found)}."


def compared(runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    """Which run is the best by its score, or its loss where nothing was scored, and which the fastest; and whether all
    kept to their budgets."""
    scored = [run["best"] is not None for run in runs]
    if all(scored) and len({run["metric"]["name"] for run in runs}) == 1:
        metric = runs[0]["metric"]
        what, rising = f"validation {metric['name']}", bool(metric["higher_is_better"])
        values = [run["best"]["valid_acc"] for run in runs]
    else:
        what, rising = "last training loss", False
        values = [math.inf if run["last"]["loss"] is None else run["last"]["loss"] for run in runs]
    good = _extreme(labels, values, "best", what, "{:.4f}", rising=rising)
    fast = _extreme(labels, [run["medians"]["time_s"] for run in runs], "fastest", "time an epoch", None, rising=False)
    beyond = [label for run, label in zip(runs, labels, strict=True) if not _within_budget(run)]
    memory = f"beyond its memory went {', '.join(beyond)}" if beyond else "all stayed within their memory"
    graphs = {json.dumps(run["graph"], sort_keys=True) for run in runs}
    unlike = "These runs are on different graphs: " if len(graphs) > 1 else ""
    return f"{unlike}{good}; {fast}; {memory}."


def _extreme(
    labels: Sequence[str], values: Sequence[float], kind: str, what: str, form: str | None, *, rising: bool
) -> str:
    """Who is first by ``values``, and the next one for comparison."""

    def shown(value: float) -> str:
        return format_duration(value) if form is None else form.format(value)

    first, second, *_ = sorted(range(len(values)), key=lambda k: -values[k] if rising else values[k])
    if shown(values[first]) == shown(values[second]):
        return f"{labels[first]} and {labels[second]} are alike by {what} ({shown(values[first])})"
    comparison = f"{shown(values[first])} against {shown(values[second])}"
    return f"{labels[first]} is the {kind}, by {what} ({comparison} of {labels[second]})"


def _bound(found: Mapping[str, Any]) -> str:
    """By what of an epoch's time computing waited for the SSD: most of it, a good part, or hardly any."""
    medians = found["medians"]
    time, wait = format_duration(medians["time_s"]), format_duration(medians["wait_s"])
    waited = medians["wait_s"] / medians["time_s"] if medians["time_s"] else 0.0
    part = f"of {time} an epoch, computing waited {wait} ({100 * waited:.0f} %)"
    if waited > _MOST:
        return f"The SSD bounded training: {part} for its reads and writes"
    if waited > WAITING_SHARE:
        return f"Computing bounded training, and the SSD held it up: {part} for reads and writes"
    if not medians["ssd_read_bytes"] + medians["ssd_write_bytes"]:
        return f"Computing bounded training, {time} an epoch: everything stayed in memory"
    if waited < _HARDLY:
        return f"Computing bounded training, {time} an epoch: next to nothing of it was waiting for the SSD"
    return f"Computing bounded training: {part} for the SSD"


def _within_budget(found: Mapping[str, Any]) -> bool:
    """Where no forecast tells the budget, nothing says otherwise."""
    return all(used <= budget for used, budget in used_of_budgets(found).values())


def used_of_budgets(found: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """By where it is, the most memory in use and how much may be; on a CPU both budgets are of one memory."""
    forecast, peaks = found["forecast"], found["peaks"]
    if forecast is None:
        return {}
    device = peaks["device_peak_bytes"], forecast["gpu_budget_bytes"]
    host = peaks["host_peak_bytes"], forecast["host_budget_bytes"]
    if found["on_gpu"]:
        return {" on the GPU": device, " on the host": host}
    return {"": (device[0] + host[0], device[1] + host[1])}


def _memory(found: Mapping[str, Any]) -> str:
    sizes = [
        f"{format_size(used)} of {format_size(budget)}{where}"
        for where, (used, budget) in used_of_budgets(found).items()
    ]
    if not sizes:
        return f"{format_size(sum(found['peaks'].values()))} of memory were in use at most"
    kept = "stayed within" if _within_budget(found) else "went beyond"
    return f"memory {kept} its budget ({', '.join(sizes)})"


def _result(found: Mapping[str, Any]) -> str:
    last, best, metric = found["last"], found["best"], found["metric"]["name"]
    epochs = f"after {found['epochs']} epoch{'s' if found['epochs'] != 1 else ''}"
    loss = "no finite number" if last["loss"] is None else f"{last['loss']:.4g}"
    text = f"{epochs} the loss is {loss}"
    if best is not None:
        text += f", and the best validation {metric} {best['valid_acc']:.4f} (epoch {best['epoch']}"
        text += f", test {best['test_acc']:.4f})" if best["test_acc"] is not None else ")"
    return text


def rank(found: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    """What an epoch's seconds went to, the most first: passes, evaluation, and what lies between."""
    steady = records[1:] or records
    counts = [len(record.passes) for record in steady]
    alike = [record for record, count in zip(steady, counts, strict=True) if count == statistics.mode(counts)]
    medians = found["medians"]
    rows = []
    for number, item in enumerate(alike[-1].passes):
        mine = [record.passes[number] for record in alike]
        time_s = statistics.median(one.time_s for one in mine)
        wait_s = statistics.median(one.wait_s for one in mine)
        bound = "SSD" if wait_s > WAITING_SHARE * time_s else "computing"
        rows.append(_row(describe_pass(item.name), time_s, wait_s, bound, item.name))
    if rows:
        between_s = max(0.0, medians["time_s"] - sum(row["time_s"] for row in rows))
        rows.append(_row("optimizer step, and between the passes", between_s, 0.0, "computing", ""))
    if medians["eval_s"]:
        rows.append(_row("evaluation, spread over all epochs", medians["eval_s"], 0.0, "", ""))
    whole_s = medians["time_s"] + medians["eval_s"] or 1.0
    for row in rows:
        row["share"] = row["time_s"] / whole_s
    return sorted(rows, key=lambda row: -row["time_s"])


def _row(what: str, time_s: float, wait_s: float, bound: str, name: str) -> dict[str, Any]:
    return {"what": what, "pass": name, "time_s": time_s, "wait_s": wait_s, "bound": bound}


def helps(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What would make an epoch shorter, and by how much at most; the most helpful first."""
    medians, forecast, config = found["medians"], found["forecast"], found["config"]
    wait_s, eval_s = medians["wait_s"], medians["eval_s"]
    rows = []
    spilled = _spilled_bytes(forecast)
    if wait_s and spilled:
        more = f"about {format_size(spilled)} more, and nothing waits on the SSD between two uses"
        rows.append(_help("more memory", wait_s, more))
    if wait_s:
        rows.append(_help("an SSD twice as fast", wait_s / 2, "the same plan waits half as long"))
    narrowed = _narrowed_share(found)
    if wait_s and narrowed and config.get("spill_dtype") == "float32":
        note = "half the bytes between passes; rounds them, so results change"
        rows.append(_help("--spill-dtype bfloat16", wait_s * narrowed / 2, note))
    if eval_s and config.get("eval_every") == 1:
        note = f"scores every {_EVERY}th epoch instead of each"
        rows.append(_help(f"--eval-every {_EVERY}", eval_s * (_EVERY - 1) / _EVERY, note))
    processors, threads = _processors(found)
    if threads and processors > threads:
        note = f"the machine has {processors} processors, and {threads} compute"
        rows.append(_help(f"--threads {processors}", (medians["time_s"] - wait_s) * (1 - threads / processors), note))
    whole_s = medians["time_s"] + eval_s
    rows = [row for row in rows if row["saves_s"] > _WORTH_SHARE * whole_s]
    rows.sort(key=lambda row: -row["saves_s"])
    if forecast is not None and forecast["hardware"]["name"].startswith("unmeasured"):
        rows.append(_help("ooc profile", None, "measures this machine, so that plans go by it and not by estimates"))
    return rows


def _help(what: str, saves_s: float | None, note: str) -> dict[str, Any]:
    return {"what": what, "saves_s": saves_s, "note": note}


def _spilled_bytes(forecast: Mapping[str, Any] | None) -> float:
    """Bytes of what an epoch reads from the SSD: with so much more memory it would stay there."""
    if forecast is None:
        return 0.0
    return float(sum(fate["bytes"] * fate["ssd"] / 100 for fate in forecast["fates"]))


def _narrowed_share(found: Mapping[str, Any]) -> float:
    """Of what the SSD moves, how much is intermediates: what is written is read, too."""
    moved = [(one["ssd_read_bytes"], one["ssd_write_bytes"]) for one in found["matrices"] or ()]
    whole = sum(read + written for read, written in moved)
    return sum(read + written for read, written in moved if written) / whole if whole else 0.0


def _processors(found: Mapping[str, Any]) -> tuple[int, int]:
    """Processors that there are, and threads that compute on them; 0 where that is not known."""
    start, measured = found["start"], found["measured"]
    if start is None or measured is None or found["on_gpu"]:
        return 0, 0
    return int(start["machine"]["processors"]), int(measured["threads"])
