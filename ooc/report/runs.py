# SPDX-License-Identifier: Apache-2.0
"""Results of runs: those below a folder side by side (``ooc runs``), those of several seeds as mean and deviation, and
measurements against the forecast (``ooc plan --compare``)."""

import math
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console

from ooc.engine.record import EpochRecord
from ooc.errors import RunError
from ooc.progress.figures import best_record, format_duration
from ooc.report.console import print_table, say
from ooc.sizes import format_size
from ooc.train.metrics import FALLING, Metric
from ooc.train.runs.run import FORECAST, RunFolder, holds_run, is_locked

_SEARCH_DEPTH = 3
"""The levels of folders below the given one whose entries are searched."""
_STORE_SUFFIX = ".ooc"


class State(Enum):
    """How far a run has got."""

    FINISHED = "finished"
    STOPPED = "stopped"
    GOING_ON = "going on"
    DAMAGED = "damaged"


def find_runs(folder: Path) -> list[dict[str, Any]]:
    """Return a description, by `describe_run`, of each run at ``folder`` or below it, in the order of their paths."""
    return [describe_run(path) for path in sorted(_find_folders(folder, _SEARCH_DEPTH), key=_natural_key)]


def _find_folders(folder: Path, depth: int) -> Iterator[Path]:
    if holds_run(folder):
        yield folder
    elif depth >= 0 and folder.suffix != _STORE_SUFFIX:
        try:
            entries = [Path(entry) for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
        except PermissionError:
            return
        for entry in entries:
            yield from _find_folders(entry, depth - 1)


def describe_run(path: Path, *, held: bool = False) -> dict[str, Any]:
    """Return the run at ``path`` as plain data; ``problem`` says what is wrong with a damaged one, with most else None.

    Scores are None where nothing was evaluated, and options None where the run was begun from Python. ``held``: this
    process itself holds the run's lock, and has finished.
    """
    empty = dict.fromkeys(_KEYS) | {"run": str(path)}
    try:
        run = RunFolder.open(path)
        records = run.records()
        config = run.config
        done, asked = records[-1].epoch if records else 0, _count_or_none(config.get("epochs"))
        found = {
            "graph": _text_or_none(config.get("store") or config.get("graph")),
            "model": _text_or_none(config.get("model") or config.get("model_class")),
            "epochs": done,
            "epochs_asked": None if asked is not None and asked < done else asked,  # continued from Python
            "metric": _text_or_none(config.get("scored_by")),
            "date": datetime.fromtimestamp(run.changed_s, UTC).isoformat(timespec="seconds"),
        }
        found |= _measurements(records) | _scores(records, lower=found["metric"] in FALLING)
        state = (
            State.GOING_ON
            if not held and is_locked(path)
            else _state(records, found, _count_or_none(config.get("patience")) or 0)
        )
    except (RunError, OSError) as error:
        return empty | {"state": State.DAMAGED.value, "problem": str(error)}
    return empty | found | {"state": state.value}


_KEYS = (
    *("run", "state", "graph", "model", "epochs", "epochs_asked", "metric", "best_epoch", "best_valid", "best_test"),
    *("last_valid", "last_test", "evaluations_since", "loss", "epoch_s", "host_peak_bytes", "device_peak_bytes"),
    *("date", "problem"),
)


def _measurements(records: Sequence[EpochRecord]) -> dict[str, Any]:
    if not records:
        return {}
    loss = records[-1].loss
    return {
        "loss": loss if abs(loss) < float("inf") else None,
        "epoch_s": statistics.median(record.time_s for record in records),
        "host_peak_bytes": max(record.host_peak_bytes for record in records),
        "device_peak_bytes": max(record.device_peak_bytes for record in records),
    }


def _scores(records: Sequence[EpochRecord], *, lower: bool) -> dict[str, Any]:
    best = best_record(records, rising=not lower)
    if best is None:
        return {}
    scored = [record for record in records if record.valid_score is not None]
    last = scored[-1]
    return {
        "best_epoch": best.epoch,
        "best_valid": best.valid_score,
        "best_test": best.test_score,
        "last_valid": last.valid_score,
        "last_test": last.test_score,
        "evaluations_since": len(scored) - 1 - scored.index(best),
    }


def _state(records: Sequence[EpochRecord], found: dict[str, Any], patience: int) -> State:
    if not records:
        return State.STOPPED
    if found["epochs_asked"] is None:  # begun from Python, where more epochs may follow at any time
        return State.FINISHED
    patient = not patience or found.get("evaluations_since", 0) < patience
    return State.STOPPED if found["epochs"] < found["epochs_asked"] and patient else State.FINISHED


def ordered(runs: Sequence[dict[str, Any]], order: str) -> list[dict[str, Any]]:
    """Return the runs in one of ``ORDERS``: highest score, least time or memory, or newest first; others last."""
    value = ORDERS[order]
    return sorted(runs, key=lambda run: (value(run) is None, value(run) or 0.0))


def _peak_bytes(run: dict[str, Any]) -> int | None:
    if run["host_peak_bytes"] is None:
        return None
    return int(run["host_peak_bytes"] + run["device_peak_bytes"])


ORDERS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "name": lambda run: 0,
    "score": lambda run: run["best_valid"] and run["best_valid"] * (1 if run["metric"] in FALLING else -1),
    "time": lambda run: run["epoch_s"],
    "memory": _peak_bytes,
    "date": lambda run: None if run["date"] is None else -datetime.fromisoformat(run["date"]).timestamp(),
}
"""The sort key of each order: the run with the least value comes first."""


def print_runs(runs: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table with one line for each run; a graph or metric that all share is printed once, below it."""
    rows = [_run_cells(run) for run in runs]
    shared = []
    for name in ("graph", "metric"):
        values = {row[name] for row in rows if row[name]}
        if len(values) == 1:
            shared.append(f"{name} {values.pop()}")
            rows = [row | {name: ""} for row in rows]
    print_table(list(rows[0]), [tuple(row.values()) for row in rows], console)
    if shared:
        say(console, f"all: {', '.join(shared)}")
    for run in runs:
        if run["problem"]:
            say(console, f"{run['run']}: {run['problem']}")


def _run_cells(run: dict[str, Any]) -> dict[str, str]:
    """Return the run's cells by heading; a cell is empty where nothing is known."""
    damaged = run["state"] == State.DAMAGED.value
    asked = "" if run["epochs_asked"] is None else f"/{run['epochs_asked']}"
    best, last = ("" if run[name] is None else f"{run[name]:.4f}" for name in ("best_valid", "last_valid"))
    peak = _peak_bytes(run)
    return {
        "run": run["run"],
        "model": (run["model"] or "").rpartition(":")[2],  # without the file of a model of the user's own
        "state": run["state"],
        "epochs": "" if damaged else f"{run['epochs']}{asked}",
        "best": best,
        "at": str(run["best_epoch"] or ""),
        "last": last,
        "an epoch": "" if run["epoch_s"] is None else format_duration(run["epoch_s"]),
        "memory": "" if peak is None else format_size(peak),
        "graph": Path(run["graph"] or "").stem,
        "metric": run["metric"] or "",
    }


def _natural_key(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts ``run-10`` after ``run-9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count_or_none(value: object) -> int | None:
    return value if isinstance(value, int) else None


# ---- several seeds --------------------------------------------------------------------------------------------------


_SCORES = ("best_valid", "best_test", "last_valid", "last_test")
_PERCENT_METRICS = (Metric.ACCURACY, Metric.MICRO_F1, Metric.MACRO_F1, Metric.ROC_AUC, Metric.AVERAGE_PRECISION)


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None] | None]:
    """Return ``mean`` and ``std`` of each score over ``runs``, as `describe_run` returns them. ``std`` is the sample
    standard deviation, None for one run; a score that some run lacks is None."""
    found: dict[str, dict[str, float | None] | None] = {}
    for name in _SCORES:
        values = [run[name] for run in runs if run[name] is not None]
        std = statistics.stdev(values) if len(values) > 1 else None
        is_known = values and len(values) == len(runs)
        found[name] = {"mean": statistics.fmean(values), "std": std} if is_known else None
    return found


def describe_seed(seed: int, run: dict[str, Any], seconds: float) -> str:
    """Return one line with the results of the run of one seed."""
    epochs = f"{run['epochs']} epoch{'s' * (run['epochs'] != 1)}"
    if run["best_epoch"] is None:
        return f"seed {seed}: loss {run['loss']:.5f} after {epochs}; {format_duration(seconds)}"
    split = "valid" if run["best_test"] is None else "test"
    best, last = (f"{run[f'{when}_{split}']:.4f}" for when in ("best", "last"))
    beside = "" if split == "valid" else f" (valid {run['best_valid']:.4f})"
    scores = f"{split} {best} at epoch {run['best_epoch']}{beside}, {last} after {epochs}"
    return f"seed {seed}: {scores}; {format_duration(seconds)}"


def describe_summary(runs: Sequence[dict[str, Any]], metric: Metric) -> list[str]:
    """Return lines with the mean scores of the runs of several seeds."""
    found = summarize(runs)
    count = f"{len(runs)} seed{'s' * (len(runs) != 1)}"
    split = "test" if found["best_test"] is not None else "valid"
    best, last = found[f"best_{split}"], found[f"last_{split}"]
    if best is None or last is None:
        return [f"{count}: nothing was scored"]
    of = "test" if split == "test" else "validation"
    return [
        f"{count}, {metric.value} on {of} nodes{', mean ± standard deviation' * (len(runs) > 1)}:",
        f"  {_mean_text(best, metric)} at the best validation epoch",
        f"  {_mean_text(last, metric)} after the last epoch",
    ]


def _mean_text(found: dict[str, float | None], metric: Metric) -> str:
    """Return ``81.50 ± 0.62 %``, or, for a metric that is no rate, two digits of its deviation: ``0.1234 ± 0.0056``."""
    mean, std = found["mean"], found["std"]
    assert mean is not None
    percent = metric in _PERCENT_METRICS
    scale = 100 if percent else 1
    digits = 2 if percent else 4 if not std else max(0, 1 - math.floor(math.log10(std)))
    deviation = "" if std is None else f" ± {scale * std:.{digits}f}"
    return f"{scale * mean:.{digits}f}{deviation}" + " %" * percent


# ---- forecast and measured ------------------------------------------------------------------------------------------


def compare(path: Path) -> dict[str, Any]:
    """Return the comparison of the run at ``path`` with its forecast; RunError where there is none, or no epoch yet.

    ``epochs`` counts the epochs measured: those of the run's last start but the first, which fills the memory, unless
    it is the only one. ``quantities`` are those forecast; ``passes`` has seconds by pass, empty where the run has not
    recorded them.
    """
    run = RunFolder.open(path)
    forecast = run.read(FORECAST)
    if forecast is None:
        raise RunError(f"{path} holds no plan.json: runs in batches, from Python or of earlier versions have none")
    try:
        records = [record for record in run.records() if record.epoch >= forecast["first_epoch"]]
        if not records:
            raise RunError(f"{path} has finished no epoch since its forecast was made")
        steady = records[1:] or records
        return {
            "run": str(path),
            "epochs": len(steady),
            "quantities": _compare_quantities(forecast, steady),
            "passes": _compare_passes(forecast, steady),
        }
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}/plan.json is damaged: {error}") from error


def print_comparison(found: dict[str, Any], console: Console) -> None:
    """Print the table of quantities, and the table of passes where there are any."""
    epochs = "1 epoch" if found["epochs"] == 1 else f"the median of {found['epochs']} epochs"
    say(console, f"{found['run']}: forecast against {epochs}")
    for what, quantities in (("quantity", found["quantities"]), ("pass", found["passes"])):
        if quantities:
            print_table((what, "forecast", "measured", "forecast / measured"), [*map(as_texts, quantities)], console)


def _comparison(name: str, unit: str, forecast: float, measured: float) -> dict[str, Any]:
    """Return one comparison; ``unit`` is ``"s"`` or ``"bytes"``. ``ratio`` is None where ``measured`` is 0."""
    ratio = forecast / measured if measured else None
    return {"name": name, "unit": unit, "forecast": forecast, "measured": measured, "ratio": ratio}


def _compare_quantities(forecast: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    def median(name: str) -> float:
        return float(statistics.median(getattr(record, name) for record in records))

    return [
        _comparison("time an epoch", "s", forecast["epoch_s"], median("time_s")),
        _comparison("computing has to wait", "s", forecast["wait_s"], median("io_wait_s")),
        _comparison("SSD busy", "s", forecast["ssd_busy_s"], median("io_busy_s")),
        _comparison("SSD read", "bytes", forecast["ssd_read_bytes"], median("ssd_read_bytes")),
        _comparison("SSD written", "bytes", forecast["ssd_write_bytes"], median("ssd_write_bytes")),
        *_compare_peaks(forecast, records),
    ]


def _compare_peaks(forecast: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    """Return the comparisons of peak memory: device and host, or both together where they share one memory."""
    if forecast.get("memory_bytes") is not None:
        used = max(record.device_peak_bytes + record.host_peak_bytes for record in records)
        return [_comparison("peak memory", "bytes", forecast["gpu_peak_bytes"] + forecast["host_peak_bytes"], used)]
    device = max(record.device_peak_bytes for record in records)
    host = max(record.host_peak_bytes for record in records)
    return [
        _comparison("peak device memory", "bytes", forecast["gpu_peak_bytes"], device),
        _comparison("peak host memory", "bytes", forecast["host_peak_bytes"], host),
    ]


def _compare_passes(forecast: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    """Return the comparisons of seconds by pass; empty unless every record has as many passes as the forecast."""
    promised = forecast["passes"]
    measured = [record.as_dict().get("passes", ()) for record in records]
    if any(len(passes) != len(promised) for passes in measured):
        return []
    return [
        _comparison(item["name"], "s", item["time_s"], statistics.median(passes[i]["time_s"] for passes in measured))
        for i, item in enumerate(promised)
    ]


def as_texts(quantity: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return a quantity's name, forecast, measurement and ratio as the cells of a table."""
    show = format_duration if quantity["unit"] == "s" else format_size
    ratio = "" if quantity["ratio"] is None else f"{quantity['ratio']:.2f}"
    return quantity["name"], show(quantity["forecast"]), show(quantity["measured"]), ratio
