# SPDX-License-Identifier: Apache-2.0
"""``ooc plan --compare RUN``: what was promised before training, and what came of it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ooc.engine.record import EpochRecord
from ooc.errors import RunError
from ooc.report.console import print_table, say
from ooc.report.progress import format_duration
from ooc.sizes import format_size
from ooc.train.run import RunFolder


@dataclass(frozen=True, slots=True)
class Quantity:
    """One promise: ``unit`` is ``"s"`` or ``"bytes"``. ``ratio`` is forecast by measured, None where that is 0."""

    name: str
    unit: str
    forecast: float
    measured: float

    @property
    def ratio(self) -> float | None:
        return self.forecast / self.measured if self.measured else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True, slots=True)
class Comparison:
    """``epochs`` are those that were measured: of the run's last start, the first one left out where there are more,
    since it fills the memory. ``passes`` are seconds by pass, empty where the run has not recorded them."""

    run: str
    epochs: int
    quantities: list[Quantity]
    passes: list[Quantity]

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "epochs": self.epochs,
            "quantities": [quantity.as_dict() for quantity in self.quantities],
            "passes": [item.as_dict() for item in self.passes],
        }


def compare(path: Path) -> Comparison:
    """The run at ``path`` against its forecast. RunError where it has none, or no epoch yet."""
    run = RunFolder.open(path)
    forecast = run.forecast()
    if forecast is None:
        raise RunError(f"{path} holds no plan.json: it was trained by a version that kept no forecast")
    try:
        records = [record for record in run.records() if record.epoch >= forecast["first_epoch"]]
        if not records:
            raise RunError(f"{path} has finished no epoch since its forecast was made")
        steady = records[1:] or records
        return Comparison(str(path), len(steady), _quantities(forecast, steady), _passes(forecast, steady))
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}/plan.json is damaged: {error}") from error


def print_comparison(found: Comparison, console: Console) -> None:
    """A table of promises, and one of passes where there are any."""
    epochs = "1 epoch" if found.epochs == 1 else f"the median of {found.epochs} epochs"
    say(console, f"{found.run}: forecast against {epochs}")
    _print("quantity", found.quantities, console)
    if found.passes:
        _print("pass", found.passes, console)


def _quantities(forecast: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[Quantity]:
    def median(name: str) -> float:
        return float(statistics.median(getattr(record, name) for record in records))

    def peak(name: str) -> float:
        return float(max(getattr(record, name) for record in records))

    return [
        Quantity("time an epoch", "s", forecast["epoch_s"], median("time_s")),
        Quantity("computing has to wait", "s", forecast["wait_s"], median("io_wait_s")),
        Quantity("SSD busy", "s", forecast["ssd_busy_s"], median("io_busy_s")),
        Quantity("SSD read", "bytes", forecast["ssd_read_bytes"], median("ssd_read_bytes")),
        Quantity("SSD written", "bytes", forecast["ssd_write_bytes"], median("ssd_write_bytes")),
        Quantity("peak device memory", "bytes", forecast["gpu_peak_bytes"], peak("device_peak_bytes")),
        Quantity("peak host memory", "bytes", forecast["host_peak_bytes"], peak("host_peak_bytes")),
    ]


def _passes(forecast: Mapping[str, Any], records: Sequence[EpochRecord]) -> list[Quantity]:
    """Seconds by pass, where every record has those of the program that was forecast."""
    promised = forecast["passes"]
    measured = [record.as_dict().get("passes", ()) for record in records]
    if any(len(passes) != len(promised) for passes in measured):
        return []
    return [
        Quantity(item["name"], "s", item["time_s"], statistics.median(passes[i]["time_s"] for passes in measured))
        for i, item in enumerate(promised)
    ]


def _print(what: str, quantities: Sequence[Quantity], console: Console) -> None:
    rows = []
    for quantity in quantities:
        show = format_duration if quantity.unit == "s" else format_size
        ratio = "" if quantity.ratio is None else f"{quantity.ratio:.2f}"
        rows.append((quantity.name, show(quantity.forecast), show(quantity.measured), ratio))
    print_table((what, "forecast", "measured", "forecast / measured"), rows, console)
