# SPDX-License-Identifier: Apache-2.0
"""``ooc plan --compare RUN``: what was promised before training, and what came of it."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ooc.engine.record import EpochRecord
from ooc.errors import RunError
from ooc.progress.figures import format_duration
from ooc.report.console import print_table, say
from ooc.sizes import format_size
from ooc.train.runs.run import FORECAST, RunFolder


def compare(path: Path) -> dict[str, Any]:
    """The ``run`` at ``path`` against its forecast. RunError where it has none, or no epoch yet.

    ``epochs`` is how many were measured: of the run's last start, the first one left out where there are more, since it
    fills the memory. ``quantities`` are what was promised, ``passes`` seconds by pass, empty where the run has not
    recorded them.
    """
    run = RunFolder.open(path)
    forecast = run.read(FORECAST)
    if forecast is None:
        raise RunError(f"{path} holds no plan.json: it was trained by a version that kept no forecast")
    try:
        records = [record for record in run.records() if record.epoch >= forecast["first_epoch"]]
        if not records:
            raise RunError(f"{path} has finished no epoch since its forecast was made")
        steady = records[1:] or records
        return {
            "run": str(path),
            "epochs": len(steady),
            "quantities": _quantities(forecast, steady),
            "passes": _passes(forecast, steady),
        }
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}/plan.json is damaged: {error}") from error


def print_comparison(found: dict[str, Any], console: Console) -> None:
    """A table of promises, and one of passes where there are any."""
    epochs = "1 epoch" if found["epochs"] == 1 else f"the median of {found['epochs']} epochs"
    say(console, f"{found['run']}: forecast against {epochs}")
    _print("quantity", found["quantities"], console)
    if found["passes"]:
        _print("pass", found["passes"], console)


def _quantity(name: str, unit: str, forecast: float, measured: float) -> dict[str, Any]:
    """One promise: ``unit`` is ``"s"`` or ``"bytes"``. ``ratio`` is forecast by measured, None where that is 0."""
    ratio = forecast / measured if measured else None
    return {"name": name, "unit": unit, "forecast": forecast, "measured": measured, "ratio": ratio}


def _quantities(forecast: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    def median(name: str) -> float:
        return float(statistics.median(getattr(record, name) for record in records))

    return [
        _quantity("time an epoch", "s", forecast["epoch_s"], median("time_s")),
        _quantity("computing has to wait", "s", forecast["wait_s"], median("io_wait_s")),
        _quantity("SSD busy", "s", forecast["ssd_busy_s"], median("io_busy_s")),
        _quantity("SSD read", "bytes", forecast["ssd_read_bytes"], median("ssd_read_bytes")),
        _quantity("SSD written", "bytes", forecast["ssd_write_bytes"], median("ssd_write_bytes")),
        *_peaks(forecast, records),
    ]


def _peaks(forecast: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    """The most memory in use; of both tiers together where they are of one memory."""
    if forecast.get("memory_bytes") is not None:
        used = max(record.device_peak_bytes + record.host_peak_bytes for record in records)
        return [_quantity("peak memory", "bytes", forecast["gpu_peak_bytes"] + forecast["host_peak_bytes"], used)]
    device = max(record.device_peak_bytes for record in records)
    host = max(record.host_peak_bytes for record in records)
    return [
        _quantity("peak device memory", "bytes", forecast["gpu_peak_bytes"], device),
        _quantity("peak host memory", "bytes", forecast["host_peak_bytes"], host),
    ]


def _passes(forecast: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    """Seconds by pass, where every record has those of the program that was forecast."""
    promised = forecast["passes"]
    measured = [record.as_dict().get("passes", ()) for record in records]
    if any(len(passes) != len(promised) for passes in measured):
        return []
    return [
        _quantity(item["name"], "s", item["time_s"], statistics.median(passes[i]["time_s"] for passes in measured))
        for i, item in enumerate(promised)
    ]


def _print(what: str, quantities: Sequence[dict[str, Any]], console: Console) -> None:
    print_table((what, "forecast", "measured", "forecast / measured"), [*map(as_texts, quantities)], console)


def as_texts(quantity: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Name, forecast, measured and ratio of a quantity, for a table."""
    show = format_duration if quantity["unit"] == "s" else format_size
    ratio = "" if quantity["ratio"] is None else f"{quantity['ratio']:.2f}"
    return quantity["name"], show(quantity["forecast"]), show(quantity["measured"]), ratio
