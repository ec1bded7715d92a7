# SPDX-License-Identifier: Apache-2.0
"""All that a report shows of a run, as plain data: ``ooc report RUN --json`` prints it, and the page embeds it.

Everything is read from the run's folder; what a run of an earlier version has not recorded is None, and named in
``missing``. Curves have at most `MOST_EPOCHS` points: of longer runs every n-th epoch, with the first, the last and the
best.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ooc.engine.record import EpochRecord
from ooc.errors import RunError
from ooc.plan.simulate.condensed import expand
from ooc.progress.figures import best_record
from ooc.report.comparison import compare
from ooc.report.page.findings import helps, rank, verdict
from ooc.report.page.vocabulary import describe_matrix
from ooc.train.runs.run import FORECAST, PLANNED, TIMELINE, RunFolder

MOST_EPOCHS = 400
_CURVES = (
    *("epoch", "loss", "train_acc", "valid_acc", "test_acc", "time_s", "eval_s"),
    *("ssd_read_bytes", "ssd_write_bytes", "device_peak_bytes", "host_peak_bytes"),
)
_FALLING = ("mae", "rmse")
_MEDIANS = ("time_s", "io_busy_s", "ssd_read_bytes", "ssd_write_bytes")


def figures(path: Path) -> dict[str, Any]:
    """Of the run at ``path``. RunError where there is none, or no epoch of it yet, or its files are damaged."""
    run = RunFolder.open(path)
    records = run.records()
    if not records:
        raise RunError(f"{path} has finished no epoch yet; there is nothing to report")
    forecast, starts = run.read(FORECAST), run.starts()
    start = starts[-1] if starts else None
    metric = (start or {}).get("metric") or _metric(run.config)
    measured, planned = _timeline(run, TIMELINE), _timeline(run, PLANNED)
    best = best_record(records, rising=bool(metric["higher_is_better"]))
    found: dict[str, Any] = {
        "run": str(path),
        "model": _model(run.config),
        "graph": _graph(run.config),
        "metric": metric,
        "epochs": records[-1].epoch,
        "curves": _curves(records, best),
        "last": _plain(records[-1]),
        "best": None if best is None else _plain(best),
        "medians": _medians(records),
        "peaks": {name: max(getattr(r, name) for r in records) for name in ("device_peak_bytes", "host_peak_bytes")},
        "on_gpu": any(record.to_device_bytes for record in records),
        "forecast": forecast,
        "measured": measured,
        "planned": planned,
        "matrices": _matrices(measured, forecast),
        "comparison": _comparison(path, forecast),
        "start": start,
        "starts": len(starts),
        "config": {name: value for name, value in run.config.items() if name != "store_facts"},
    }
    found["missing"] = _missing(found)
    try:
        found["time"] = rank(found, records)
        found["helps"] = helps(found)
        found["verdict"] = verdict(found)
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}/plan.json is damaged: {error}") from error
    return found


def _timeline(run: RunFolder, name: str) -> dict[str, Any] | None:
    found = run.read(name)
    if found is not None:
        try:
            expand(found)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{run.path}/{name} is damaged: {error}") from error
    return found


def _metric(config: dict[str, Any]) -> dict[str, Any]:
    """As far as a run of an earlier version tells."""
    name = config.get("metric") or "score"
    return {"name": name, "higher_is_better": name not in _FALLING}


def _model(config: dict[str, Any]) -> str | None:
    if "model" not in config:
        return None
    heads = f", {config['heads']} heads" if config.get("heads", 1) > 1 else ""
    return f"{config['model']}, {config.get('layers')} layers of {config.get('hidden')}{heads}"


def _graph(config: dict[str, Any]) -> dict[str, Any] | None:
    facts = config.get("store_facts")
    if not isinstance(facts, dict):
        return None
    names = ("num_nodes", "num_edges", "num_features", "num_classes")
    return {"store": Path(str(config.get("store", ""))).name, **{name: facts.get(name) for name in names}}


def _plain(record: EpochRecord) -> dict[str, Any]:
    values = {name: value for name, value in record.as_dict().items() if name != "passes"}
    return values | {"loss": _finite(record.loss)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _curves(records: Sequence[EpochRecord], best: EpochRecord | None) -> dict[str, list[Any]]:
    every = -(-len(records) // MOST_EPOCHS)
    kept = [r for k, r in enumerate(records) if k % every == 0 or k == len(records) - 1 or r is best]
    curves = {name: [_finite(getattr(record, name)) for record in kept] for name in _CURVES}
    seconds = dict(zip([r.epoch for r in records], accumulate(r.time_s + r.eval_s for r in records), strict=True))
    moved = dict(zip(seconds, accumulate(r.ssd_read_bytes + r.ssd_write_bytes for r in records), strict=True))
    curves |= {"elapsed_s": [seconds[r.epoch] for r in kept], "moved_bytes": [moved[r.epoch] for r in kept]}
    return curves | {"wait_s": [_waited_s(record) for record in kept]}


def _waited_s(record: EpochRecord) -> float:
    """How long training waited for the SSD; evaluations have waits of their own."""
    return sum(item.wait_s for item in record.passes) if record.passes else min(record.io_wait_s, record.time_s)


def _medians(records: Sequence[EpochRecord]) -> dict[str, float]:
    """Of all epochs but the first, which fills the memory. Evaluations: of those epochs that have one."""
    steady = records[1:] or records
    found = {name: float(statistics.median(getattr(record, name) for record in steady)) for name in _MEDIANS}
    evaluated = [record.eval_s for record in steady if record.eval_s]
    every = len(steady) / len(evaluated) if evaluated else 0.0
    found["wait_s"] = statistics.median(map(_waited_s, steady))
    return found | {"eval_s": statistics.median(evaluated) / every if evaluated else 0.0}


def _matrices(measured: dict[str, Any] | None, forecast: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """Bytes that the recorded epoch moved, by matrix, with what each is; the busiest first."""
    if measured is None:
        return None
    sizes = {fate["matrix"]: fate["bytes"] for fate in (forecast or {}).get("fates", ())}
    found = [
        {**one, "what": describe_matrix(one["matrix"]), "bytes": sizes.get(one["matrix"])}
        for one in measured.get("matrices", ())
    ]
    return sorted(found, key=lambda one: -(one["used_bytes"] + one["ssd_write_bytes"]))


def _comparison(path: Path, forecast: dict[str, Any] | None) -> dict[str, Any] | None:
    if forecast is None:
        return None
    try:
        return compare(path)
    except RunError:  # gone on with, and no epoch finished since
        return None


def _missing(found: dict[str, Any]) -> list[str]:
    """What cannot be shown, and why."""
    lines = []
    if found["forecast"] is None:
        lines.append("no forecast (plan.json): the run was trained by a version that kept none, or from Python")
    elif found["comparison"] is None:
        lines.append("no comparison with the forecast: no epoch has finished since it was made")
    if found["measured"] is None:
        lines.append("no measured epoch (timeline.json): the run was trained by a version that recorded none")
    elif found["on_gpu"]:
        lines.append("kernels and copies on the GPU: only the SSD, memory and passes are timed there")
    if found["planned"] is None:
        lines.append("no planned epoch (planned.json), beside which the measured one would be drawn")
    if found["start"] is None:
        lines.append("no command, machine and versions (starts.jsonl)")
    return lines
