# SPDX-License-Identifier: Apache-2.0
"""All data that a report shows of a run: ``ooc report RUN --json`` prints it, and the page embeds it.

Everything is read from the run's folder. Data that a run of an earlier version lacks is None, and named in ``missing``.
Curves have at most `MOST_EPOCHS` points: of longer runs every n-th epoch, with the first, the last and the best.
Conclusions are in words: a verdict in a sentence, what took the time, and what would help most. Savings are upper
bounds by what was measured, and are called that: nothing is planned anew here (``ooc plan`` does that).
"""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ooc.engine.record import EpochRecord
from ooc.errors import RunError
from ooc.plan.simulate.condensed import expand
from ooc.progress.figures import best_record, format_duration
from ooc.report.runs import compare
from ooc.sizes import format_size
from ooc.train.metrics import FALLING
from ooc.train.runs.run import FORECAST, PLANNED, TIMELINE, RunFolder

MOST_EPOCHS = 400
_CURVES = (
    *("epoch", "loss", "train_score", "valid_score", "test_score", "time_s", "eval_s"),
    *("ssd_read_bytes", "ssd_write_bytes", "device_peak_bytes", "host_peak_bytes"),
)
_MEDIANS = ("time_s", "io_busy_s", "ssd_read_bytes", "ssd_write_bytes")


def figures(path: Path) -> dict[str, Any]:
    """Return the figures of the run at ``path``; raise RunError where it is none, has no epoch yet, or is damaged."""
    run = RunFolder.open(path)
    records = run.records()
    if not records:
        raise RunError(f"{path} has finished no epoch yet; there is nothing to report")
    forecast, starts = run.read(FORECAST), run.starts()
    start = starts[-1] if starts else None
    name = run.config.get("metric") or "score"  # from a run of an earlier version
    metric = (start or {}).get("metric") or {"name": name, "higher_is_better": name not in FALLING}
    measured, planned = _timeline(run, TIMELINE), _timeline(run, PLANNED)
    best = best_record(records, rising=bool(metric["higher_is_better"]))
    found: dict[str, Any] = {
        "run": str(path),
        **_model_and_graph(run.config),
        "metric": metric,
        "epochs": records[-1].epoch,
        "curves": _curves(records, best),
        "last": _record_values(records[-1]),
        "best": None if best is None else _record_values(best),
        "medians": _medians(records),
        "peaks": {name: max(getattr(r, name) for r in records) for name in ("device_peak_bytes", "host_peak_bytes")},
        "on_gpu": any(record.to_device_bytes for record in records),
        "forecast": forecast,
        "measured": measured,
        "planned": planned,
        "matrices": _matrices(measured, forecast),
        "comparison": _comparison(path, forecast, records),
        "start": start,
        "starts": len(starts),
        "config": {name: value for name, value in run.config.items() if name != "store_facts"},
    }
    found["missing"] = _missing_lines(found)
    try:
        found["time"] = time_shares(found, records)
        found["helps"] = find_improvements(found)
        found["verdict"] = verdict(found)
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}/plan.json is damaged: {error}") from error
    return found


def _timeline(run: RunFolder, name: str) -> dict[str, Any] | None:
    found = run.read(name)
    try:
        if found is not None:
            expand(found)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{run.path}/{name} is damaged: {error}") from error
    return found


def _model_and_graph(config: dict[str, Any]) -> dict[str, Any]:
    """Return the run's model and graph according to its configuration, None where it does not say."""
    model, graph, facts = None, None, config.get("store_facts")
    if "model" in config:
        heads = f", {config['heads']} heads" if config.get("heads", 1) > 1 else ""
        file, _, name = str(config["model"]).rpartition(":")  # a model of the user's own may lack these options
        model = name if file else f"{name}, {config.get('layers')} layers of {config.get('hidden')}{heads}"
    if isinstance(facts, dict):
        names = ("num_nodes", "num_edges", "num_features", "num_classes")
        graph = {"store": Path(str(config.get("store", ""))).name, **{name: facts.get(name) for name in names}}
    return {"model": model, "graph": graph}


def _record_values(record: EpochRecord) -> dict[str, Any]:
    values = {name: value for name, value in record.as_dict().items() if name != "passes"}
    return values | {"loss": _none_unless_finite(record.loss)}


def _none_unless_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _curves(records: Sequence[EpochRecord], best: EpochRecord | None) -> dict[str, list[Any]]:
    every = -(-len(records) // MOST_EPOCHS)
    kept = [r for k, r in enumerate(records) if k % every == 0 or k == len(records) - 1 or r is best]
    curves = {name: [_none_unless_finite(getattr(record, name)) for record in kept] for name in _CURVES}
    seconds = dict(zip([r.epoch for r in records], accumulate(r.time_s + r.eval_s for r in records), strict=True))
    moved = dict(zip(seconds, accumulate(r.ssd_read_bytes + r.ssd_write_bytes for r in records), strict=True))
    curves |= {"elapsed_s": [seconds[r.epoch] for r in kept], "moved_bytes": [moved[r.epoch] for r in kept]}
    return curves | {"wait_s": [_waited_s(record) for record in kept]}


def _waited_s(record: EpochRecord) -> float:
    """Return the seconds that training waited for the SSD, without the waits of evaluation."""
    return sum(item.wait_s for item in record.passes) if record.passes else min(record.io_wait_s, record.time_s)


def _medians(records: Sequence[EpochRecord]) -> dict[str, float]:
    """Return medians over all epochs but the first, which fills the memory; ``eval_s`` is spread over all epochs."""
    steady = records[1:] or records
    found = {name: float(statistics.median(getattr(record, name) for record in steady)) for name in _MEDIANS}
    evaluated = [record.eval_s for record in steady if record.eval_s]
    every = len(steady) / len(evaluated) if evaluated else 0.0
    found["wait_s"] = statistics.median(map(_waited_s, steady))
    return found | {"eval_s": statistics.median(evaluated) / every if evaluated else 0.0}


def _matrices(measured: dict[str, Any] | None, forecast: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """Return the bytes that the recorded epoch moved, by matrix, each with its description; the busiest first."""
    if measured is None:
        return None
    sizes = {fate["matrix"]: fate["bytes"] for fate in (forecast or {}).get("fates", ())}
    found = [
        {**one, "what": describe_matrix(one["matrix"]), "bytes": sizes.get(one["matrix"])}
        for one in measured.get("matrices", ())
    ]
    return sorted(found, key=lambda one: -(one["used_bytes"] + one["ssd_write_bytes"]))


def _comparison(path: Path, forecast: dict[str, Any] | None, records: Sequence[EpochRecord]) -> dict[str, Any] | None:
    if forecast is None or records[-1].epoch < forecast.get("first_epoch", 0):  # resumed, with no epoch finished since
        return None
    return compare(path)


def _missing_lines(found: dict[str, Any]) -> list[str]:
    """Return lines on what cannot be shown, and why."""
    lines = []
    if found["forecast"] is None:
        lines.append("no forecast (plan.json), as of runs in batches, from Python, or of earlier versions")
    elif found["comparison"] is None:
        lines.append("no comparison with the forecast: no epoch has finished since it was made")
    if found["measured"] is None:
        lines.append("no measured epoch (timeline.json), as of runs in batches or of earlier versions")
    elif found["on_gpu"]:
        lines.append("kernels and copies on the GPU: only the SSD, memory and passes are timed there")
    if found["planned"] is None:
        lines.append("no planned epoch (planned.json), beside which the measured one would be drawn")
    if found["start"] is None:
        lines.append("no command, machine and versions (starts.jsonl)")
    return lines


# ---- what they come to ----------------------------------------------------------------------------------------------


WAITING_SHARE = 0.1
"""The share of its time that an epoch or a pass must wait for the SSD to count as held up by it."""
_BOUND_SHARE, _NEGLIGIBLE_SHARE = 0.5, 0.005
"""The shares of an epoch's time above which waiting bounds it, and below which waiting is next to nothing."""
_EVAL_EVERY = 5
"""The interval in epochs that is proposed to a run that evaluates every epoch."""
_LEAST_SAVED_SHARE = 0.01
"""The least share of an epoch's time that a suggestion must save to be listed."""


def verdict(found: Mapping[str, Any]) -> str:
    """Return a sentence on what bounded the epoch, whether memory kept to its budgets, and how good the model is."""
    return f"{_bound_clause(found)}; {_memory_clause(found)}; {_result_clause(found)}."


def compared(runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    """Return a sentence on the best run, by score or else by loss, on the fastest, and on the runs' budgets."""
    scored = [run["best"] is not None for run in runs]
    if all(scored) and len({run["metric"]["name"] for run in runs}) == 1:
        metric = runs[0]["metric"]
        what, rising = f"validation {metric['name']}", bool(metric["higher_is_better"])
        values = [run["best"]["valid_score"] for run in runs]
    else:
        what, rising = "last training loss", False
        values = [math.inf if run["last"]["loss"] is None else run["last"]["loss"] for run in runs]
    good = _best_of(labels, values, "best", what, "{:.4f}", rising=rising)
    fast = _best_of(labels, [run["medians"]["time_s"] for run in runs], "fastest", "time an epoch", None, rising=False)
    beyond = [label for run, label in zip(runs, labels, strict=True) if not _within_budget(run)]
    memory = f"beyond its memory went {', '.join(beyond)}" if beyond else "all stayed within their memory"
    graphs = {json.dumps(run["graph"], sort_keys=True) for run in runs}
    unlike = "These runs are on different graphs: " if len(graphs) > 1 else ""
    return f"{unlike}{good}; {fast}; {memory}."


def _best_of(
    labels: Sequence[str], values: Sequence[float], kind: str, what: str, form: str | None, *, rising: bool
) -> str:
    """Return a clause that names the first run by ``values``, and compares it with the next."""

    def shown(value: float) -> str:
        return format_duration(value) if form is None else form.format(value)

    first, second, *_ = sorted(range(len(values)), key=lambda k: -values[k] if rising else values[k])
    if shown(values[first]) == shown(values[second]):
        return f"{labels[first]} and {labels[second]} are alike by {what} ({shown(values[first])})"
    comparison = f"{shown(values[first])} against {shown(values[second])}"
    return f"{labels[first]} is the {kind}, by {what} ({comparison} of {labels[second]})"


def _bound_clause(found: Mapping[str, Any]) -> str:
    """Return a clause on what bounded the epoch, by the share of its time spent waiting for the SSD."""
    medians = found["medians"]
    time, wait = format_duration(medians["time_s"]), format_duration(medians["wait_s"])
    waited = medians["wait_s"] / medians["time_s"] if medians["time_s"] else 0.0
    part = f"of {time} an epoch, computing waited {wait} ({100 * waited:.0f} %)"
    if waited > _BOUND_SHARE:
        return f"The SSD bounded training: {part} for its reads and writes"
    if waited > WAITING_SHARE:
        return f"Computing bounded training, and the SSD held it up: {part} for reads and writes"
    if not medians["ssd_read_bytes"] + medians["ssd_write_bytes"]:
        return f"Computing bounded training, {time} an epoch: everything stayed in memory"
    if waited < _NEGLIGIBLE_SHARE:
        return f"Computing bounded training, {time} an epoch: next to nothing of it was waiting for the SSD"
    return f"Computing bounded training: {part} for the SSD"


def _within_budget(found: Mapping[str, Any]) -> bool:
    """Whether the run's memory kept to its budgets; True where no forecast says what they were."""
    return all(used <= budget for used, budget in used_of_budgets(found).values())


def used_of_budgets(found: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the peak memory and its budget, in bytes, by place; on a CPU both budgets are one memory."""
    forecast, peaks = found["forecast"], found["peaks"]
    if forecast is None:
        return {}
    device = peaks["device_peak_bytes"], forecast["gpu_budget_bytes"]
    host = peaks["host_peak_bytes"], forecast["host_budget_bytes"]
    if found["on_gpu"]:
        return {" on the GPU": device, " on the host": host}
    return {"": (device[0] + host[0], device[1] + host[1])}


def _memory_clause(found: Mapping[str, Any]) -> str:
    sizes = [
        f"{format_size(used)} of {format_size(budget)}{where}"
        for where, (used, budget) in used_of_budgets(found).items()
    ]
    if not sizes:
        return f"{format_size(sum(found['peaks'].values()))} of memory were in use at most"
    kept = "stayed within" if _within_budget(found) else "went beyond"
    return f"memory {kept} its budget ({', '.join(sizes)})"


def _result_clause(found: Mapping[str, Any]) -> str:
    last, best, metric = found["last"], found["best"], found["metric"]["name"]
    epochs = f"after {found['epochs']} epoch{'s' if found['epochs'] != 1 else ''}"
    loss = "no finite number" if last["loss"] is None else f"{last['loss']:.4g}"
    text = f"{epochs} the loss is {loss}"
    if best is not None:
        text += f", and the best validation {metric} {best['valid_score']:.4f} (epoch {best['epoch']}"
        text += f", test {best['test_score']:.4f})" if best["test_score"] is not None else ")"
    return text


def time_shares(found: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    """Return what an epoch's seconds went to, the most first: passes, evaluation, and the time between them."""
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
        rows.append(_time_row(describe_pass(item.name), time_s, wait_s, bound, item.name))
    if rows:
        between_s = max(0.0, medians["time_s"] - sum(row["time_s"] for row in rows))
        rows.append(_time_row("optimizer step, and between the passes", between_s, 0.0, "computing", ""))
    if medians["eval_s"]:
        rows.append(_time_row("evaluation, spread over all epochs", medians["eval_s"], 0.0, "", ""))
    whole_s = medians["time_s"] + medians["eval_s"] or 1.0
    for row in rows:
        row["share"] = row["time_s"] / whole_s
    return sorted(rows, key=lambda row: -row["time_s"])


def _time_row(what: str, time_s: float, wait_s: float, bound: str, name: str) -> dict[str, Any]:
    return {"what": what, "pass": name, "time_s": time_s, "wait_s": wait_s, "bound": bound}


def find_improvements(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what would make an epoch shorter, and by how much at most, the most helpful first."""
    medians, forecast, config = found["medians"], found["forecast"], found["config"]
    wait_s, eval_s = medians["wait_s"], medians["eval_s"]
    rows = []
    fates = () if forecast is None else forecast["fates"]
    spilled = float(sum(fate["bytes"] * fate["ssd"] / 100 for fate in fates))  # fits into so much more memory
    if wait_s and spilled:
        more = f"about {format_size(spilled)} more, and nothing waits on the SSD between two uses"
        rows.append(_saving("more memory", wait_s, more))
    if wait_s:
        rows.append(_saving("an SSD twice as fast", wait_s / 2, "the same plan waits half as long"))
    moved = [(one["ssd_read_bytes"], one["ssd_write_bytes"]) for one in found["matrices"] or ()]
    whole = sum(read + written for read, written in moved)
    intermediate = sum(read + written for read, written in moved if written)  # written matrices are read too
    narrowed = intermediate / whole if whole else 0.0
    may_round = config.get("spill_dtype") == "float32" and (forecast is None or forecast.get("spills_rounded", True))
    if wait_s and narrowed and may_round:
        note = "half the bytes between passes; rounds them, so results change"
        rows.append(_saving("--spill-dtype bfloat16", wait_s * narrowed / 2, note))
    if eval_s and config.get("eval_every") == 1:
        note = f"scores every {_EVAL_EVERY}th epoch instead of each"
        rows.append(_saving(f"--eval-every {_EVAL_EVERY}", eval_s * (_EVAL_EVERY - 1) / _EVAL_EVERY, note))
    start, measured = found["start"], found["measured"]
    processors = threads = 0
    if start is not None and measured is not None and not found["on_gpu"]:
        processors, threads = int(start["machine"]["processors"]), int(measured["threads"])
    if threads and processors > threads:
        note = f"the machine has {processors} processors, and {threads} compute"
        rows.append(_saving(f"--threads {processors}", (medians["time_s"] - wait_s) * (1 - threads / processors), note))
    whole_s = medians["time_s"] + eval_s
    rows = [row for row in rows if row["saves_s"] > _LEAST_SAVED_SHARE * whole_s]
    rows.sort(key=lambda row: -row["saves_s"])
    if forecast is not None and forecast["hardware"]["name"].startswith("unmeasured"):
        rows.append(_saving("ooc profile", None, "measures this machine, so that plans go by it and not by estimates"))
    return rows


def _saving(what: str, saves_s: float | None, note: str) -> dict[str, Any]:
    return {"what": what, "saves_s": saves_s, "note": note}


# ---- matrices and passes in the field's words -----------------------------------------------------------------------


_MATRICES = (
    (r"x", "input features"),
    (r"x/(\w+)", "{} of the input features that are not zero"),
    (r"y", "labels"),
    (r"split/(\w+)", r"mask of the {} nodes"),
    (r"ax(\d*)(\..*)?", "input features, aggregated over in-neighbours once and kept"),
    (r"mx(\d+)(\..*)?", "input features, scaled for the first aggregation"),
    (r"m(\d+)\w*", "messages of layer {}, before they are aggregated"),
    (r"p(\d+)\w*", "aggregated messages of layer {}"),
    (r"dp(\d+)\w*", "gradient of the aggregated messages of layer {}"),
    (r"dm(\d+)\w*", "gradient of the messages of layer {}"),
    (r"dt(\d+)\w*", "gradient of what targets bring to layer {}"),
    (r"pt(\d+)\w*", "what targets pull in layer {}"),
    (r"q(\d+)\w*", "scaled aggregate of layer {}, for its weight's gradient"),
    (r"z(\d+)\w*", "pre-activations of layer {}"),
    (r"s(\d+)\w*", "signs of the activations of layer {}, a bit each"),
    (r"dh(\d+)\w*", "gradient of the activations of layer {}"),
    (r"h(\d+)\w*", "activations of layer {}"),
    (r"emb", "embedding of every node, which is trained"),
    (r"emb\.(\w+)", "what the embedding's optimizer keeps: {}"),
    (r"nodes/(.+)/x", "input features of nodes {}"),
    (r"nodes/(.+)/emb", "embedding of nodes {}, which is trained"),
    (r"nodes/(.+)/emb\.(\w+)", "what the optimizer keeps of the embedding of nodes {}: {}"),
    (r"demb\.all", "gradient of the embedding"),
    (r"dnodes/(.+)/emb\.all", "gradient of the embedding of nodes {}"),
    (r"in-edges", "in-neighbours of every node (topology)"),
    (r"out-edges", "out-neighbours of every node (topology)"),
    (r"(in|out)-(\w+)", "what edges carry, by {} ends"),
)
_PASSES = (
    (r"messages (\d+)", "messages of layer {}"),
    (r"forward (\d+)\w*$", "layer {} forward"),
    (r"forward (\d+)\w* for backward (\d+)", "layer {} forward again, for a backward pass"),
    (r"backward (\d+)\w*", "layer {} backward"),
    (r"pull dm(\d+)\w*", "aggregate over out-neighbours, layer {} backward"),
    (r"pull m(\d+)\w*", "aggregate over in-neighbours, layer {}"),
    (r"pull dp(\d+)\w*", "aggregate over out-neighbours, layer {} backward"),
    (r"step", "the embedding's optimizer step"),
    (r"loss", "last layer, loss and their gradient"),
)


def describe_matrix(name: str) -> str:
    """Return a matrix's description, as ``"pre-activations of layer 2"`` for ``"z2"``; an unknown ``name`` as it is."""
    if described := _description(name, _MATRICES):
        return described
    described = _description(name.partition(".")[0], _MATRICES)  # gradients summed over stages have a numeric suffix
    return f"{described}, {'so far' if name[0] == 'd' else 'computed again'}" if described else name


def describe_pass(title: str) -> str:
    """Return a pass's description, ``"aggregate over in-neighbours, layer 3"`` for ``"pull m3"``, or else ``title``."""
    return _description(title, _PASSES, whole=False) or title


def _description(name: str, known: tuple[tuple[str, str], ...], *, whole: bool = True) -> str:
    for pattern, text in known:
        found = re.fullmatch(pattern, name) if whole else re.match(pattern, name)
        if found is not None:
            return text.format(*found.groups())
    return ""
