# SPDX-License-Identifier: Apache-2.0
"""Listeners that log epochs for other programs (CSV, TensorBoard, JSON), for ``Trainer(listener=…)``.

Also the notes that a run's folder gets when training starts: reports (``ooc report``) are made from them later, on any
machine.
"""

import csv
import importlib
import io
import json
import os
import platform
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ooc.engine.record import EpochRecord
from ooc.errors import OptionError
from ooc.events import EpochFinished, Event, Listener, Note
from ooc.memory import filesystem_of, processor_name
from ooc.plan import Hardware
from ooc.plan.simulate.condensed import condense
from ooc.progress.figures import format_duration
from ooc.progress.plan_report import PlanReport
from ooc.report.machine import versions_of
from ooc.storage.array import replace_file
from ooc.train.metrics import Metric
from ooc.train.runs.run import FORECAST, PLANNED, RunFolder

_LEAST_REMAINING_S, _LEAST_CHANGE = 10.0, 0.1


def epoch_as_json(event: Event) -> None:
    """Print each epoch's record, without its passes, as one line of JSON; a listener."""
    if isinstance(event, EpochFinished):
        record = json.loads(event.record.to_line())
        del record["passes"]
        print(json.dumps({"event": "epoch", **record}), flush=True)


Earlier = Callable[[], Sequence[EpochRecord]]
"""A function that returns the epochs before the current start of a run, called once the run has been resumed."""


class EpochLog(ABC):
    """A listener that logs every epoch.

    A run killed right after an epoch may have a record of the epoch that is in no log. Therefore epochs of ``earlier``
    that the log lacks are written before the first new one.
    """

    def __init__(self, earlier: Earlier = tuple) -> None:
        self._earlier = earlier
        self._has_begun = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochFinished):
            self._begin_once(event.record.epoch)
            self.write(event.record)

    def complete(self) -> None:
        """Write the earlier epochs that the log lacks, if no new epoch has been logged."""
        last = max((record.epoch for record in self._earlier()), default=0)
        if last:
            self._begin_once(last + 1)

    def _begin_once(self, epoch: int) -> None:
        if not self._has_begun:
            self.begin(epoch, [record for record in self._earlier() if record.epoch < epoch])
            self._has_begun = True

    @abstractmethod
    def begin(self, epoch: int, earlier: Sequence[EpochRecord]) -> None:
        """Continue the existing log at ``epoch``, adding those of ``earlier`` that it lacks."""

    @abstractmethod
    def write(self, record: EpochRecord) -> None:
        """Write one epoch to the log."""


class CsvLog(EpochLog):
    """A log of one line an epoch in the CSV file ``path``. Its columns are the fields of `EpochRecord` without the
    passes; cells are empty where nothing was evaluated.

    An existing file is continued: its lines from the first new epoch on are dropped, since a resumed run computes those
    epochs again.
    """

    def __init__(self, path: str | Path, earlier: Earlier = tuple) -> None:
        super().__init__(earlier)
        self._path = Path(path)
        self._names = [field.name for field in fields(EpochRecord) if field.name != "passes"]

    def write(self, record: EpochRecord) -> None:
        """Append the epoch's line."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._names, extrasaction="ignore").writerow(record.as_dict())

    def begin(self, epoch: int, earlier: Sequence[EpochRecord]) -> None:
        """Keep the file's lines before ``epoch``, up to a torn or foreign one, then add missing ``earlier`` epochs."""
        kept = list(self._lines_before(epoch))
        kept += [record.as_dict() for record in earlier if record.epoch > len(kept)]
        lines = io.StringIO(newline="")
        writer = csv.DictWriter(lines, self._names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept)
        replace_file(self._path, lines.getvalue().encode())

    def _lines_before(self, epoch: int) -> Iterator[Mapping[str, object]]:
        if not self._path.exists():
            return
        with self._path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames != self._names:
                return
            for number, row in enumerate(rows, start=1):
                if row.get("epoch") != str(number) or number == epoch or None in row.values():
                    return
                yield row


_GROUPS = {"score": "score", "bytes": "bytes", "s": "seconds"}
"""The TensorBoard group of related scalars, by the suffix of their names."""


class TensorBoardLog(EpochLog):
    """A log of every epoch's loss, scores, times and bytes as TensorBoard scalars in ``folder``.

    Scalars of epochs that a resumed run computes again are purged. Raise OptionError where TensorBoard is not
    installed.
    """

    def __init__(self, folder: str | Path, earlier: Earlier = tuple) -> None:
        super().__init__(earlier)
        try:
            self._writers: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise OptionError("logging to TensorBoard needs it; pip install tensorboard") from None
        self._folder = Path(folder)
        self._writer: Any = None

    def begin(self, epoch: int, earlier: Sequence[EpochRecord]) -> None:
        """Open the log, which cannot be read back: purge and rewrite the last of ``earlier``, written or not."""
        last = max(earlier, key=lambda record: record.epoch, default=None)
        step = epoch if last is None else last.epoch
        self._writer = self._writers.SummaryWriter(str(self._folder), purge_step=step)
        if last is not None:
            self.write(last)

    def write(self, record: EpochRecord) -> None:
        """Add the epoch's scalars."""
        for name, value in record.as_dict().items():
            if name not in ("epoch", "passes") and value is not None:
                stem, _, kind = name.rpartition("_")
                tag = f"{_GROUPS[kind]}/{stem}" if kind in _GROUPS else name
                self._writer.add_scalar(tag, value, record.epoch)
        self._writer.flush()


# ---- what a run is told when training starts ------------------------------------------------------------------------


_PACKAGES = ("ooc", "torch", "torch-geometric", "numpy", "zarr")


def note_start(run: RunFolder, report: PlanReport | None, spill_dir: Path, metric: Metric) -> None:
    """Write the forecast, the planned epoch, the command, the machine and the versions into the folder of ``run``. They
    hold for the epochs from here on; without a ``report`` there is no forecast."""
    last = run.last()
    first_epoch = 1 if last is None else last["epoch"] + 1
    if report is not None:
        run.write(FORECAST, {"first_epoch": first_epoch, **report.as_dict()})
        run.write(PLANNED, condense(report.timeline))
    run.add_start(
        {
            "first_epoch": first_epoch,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["ooc", *sys.argv[1:]]),
            "metric": {"name": metric.value, "higher_is_better": metric.higher_is_better},
            "machine": _machine_facts(spill_dir, None if report is None else report.hardware),
            "versions": {name: version for name, version in versions_of(_PACKAGES).items() if version is not None},
        }
    )


def _machine_facts(spill_dir: Path, hardware: Hardware | None) -> dict[str, Any]:
    folder = next(path for path in (spill_dir, *spill_dir.absolute().parents) if path.exists())
    gpu = {}
    if hardware is not None and hardware.has_device_memory:
        import torch

        gpu["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else hardware.name
    return gpu | {
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "scratch": f"{folder} ({filesystem_of(folder)})",
        "system": f"{platform.system()} {platform.release()}",
    }


class Correction:
    """A listener that reports how far off the forecast was, and the time the remaining epochs up to ``last`` will take.

    It reports after the second epoch, the first with filled memory, and again after the fourth, by the median of three,
    where the times differ noticeably. It says nothing when the rest takes only a moment.
    """

    def __init__(self, report: PlanReport, last: int, listener: Listener) -> None:
        self._report, self._last, self._listener, self._reported_s = report, last, listener, 0.0
        self._epoch_times_s: list[float] = []

    def __call__(self, event: Event) -> None:
        if not isinstance(event, EpochFinished):
            return
        one, record = self._report, event.record
        self._epoch_times_s.append(record.time_s + record.eval_s)
        taken_s = median(self._epoch_times_s[1:] or self._epoch_times_s)
        forecast_s, left = one.epoch_s + (one.score_s or 0.0) * (record.eval_s > 0), self._last - record.epoch
        is_news = abs(taken_s - self._reported_s) > _LEAST_CHANGE * taken_s
        if len(self._epoch_times_s) in (2, 4) and is_news and left * taken_s >= _LEAST_REMAINING_S and forecast_s:
            self._reported_s = taken_s
            rest = f"the {left} others take about {format_duration(left * taken_s)}"
            told = f"an epoch takes {format_duration(taken_s)}, {taken_s / forecast_s:.2f} times the forecast"
            self._listener(Note(f"{told}; {rest}"))
