# SPDX-License-Identifier: Apache-2.0
"""Epochs as others read them: a CSV table, TensorBoard. Listeners of events, for ``Trainer(listener=…)``. And what a
run's folder is told when training starts, from which reports (``ooc report``) are made afterwards, on any machine."""

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

_WORTH_TELLING_S, _WORTH_TELLING_AGAIN = 10.0, 0.1


def epoch_as_json(event: Event) -> None:
    """A listener that prints every epoch as a JSON object in a line: its record, but for its passes."""
    if isinstance(event, EpochFinished):
        record = json.loads(event.record.to_line())
        del record["passes"]
        print(json.dumps({"event": "epoch", **record}), flush=True)


Earlier = Callable[[], Sequence[EpochRecord]]
"""The epochs that a resumed run has behind it, asked for when it has been resumed."""


class EpochLog(ABC):
    """Writes down every epoch that it hears of.

    ``earlier``: of epochs before the first one heard of, those are written that are not there yet: a run that was
    killed right after an epoch has its record, and nothing else of it.
    """

    def __init__(self, earlier: Earlier = tuple) -> None:
        self._earlier = earlier
        self._begun = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochFinished):
            self._begin_once(event.record.epoch)
            self.write(event.record)

    def complete(self) -> None:
        """Write what there is of earlier epochs, if no other was heard of."""
        last = max((record.epoch for record in self._earlier()), default=0)
        if last:
            self._begin_once(last + 1)

    def _begin_once(self, epoch: int) -> None:
        if not self._begun:
            self.begin(epoch, [record for record in self._earlier() if record.epoch < epoch])
            self._begun = True

    @abstractmethod
    def begin(self, epoch: int, earlier: Sequence[EpochRecord]) -> None:
        """Go on from ``epoch`` with what is there already, and with ``earlier`` where that is missing."""

    @abstractmethod
    def write(self, record: EpochRecord) -> None:
        """Write an epoch down."""


class CsvLog(EpochLog):
    """One line an epoch in the file ``path``, whose columns are an `EpochRecord`'s fields but its passes; empty where
    not evaluated.

    A file that is there already is gone on with: its lines from the first epoch heard of are dropped, which is
    what a resumed run computes again.
    """

    def __init__(self, path: str | Path, earlier: Earlier = tuple) -> None:
        super().__init__(earlier)
        self._path = Path(path)
        self._names = [field.name for field in fields(EpochRecord) if field.name != "passes"]

    def write(self, record: EpochRecord) -> None:
        """Add its line."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._names, extrasaction="ignore").writerow(record.as_dict())

    def begin(self, epoch: int, earlier: Sequence[EpochRecord]) -> None:
        """Keep the lines before ``epoch``; a torn or foreign one ends them, and ``earlier`` ones take its place."""
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
"""Of related scalars, by the ends of their names."""


class TensorBoardLog(EpochLog):
    """Loss, scores, times and bytes of every epoch as scalars for TensorBoard, in ``folder``.

    What a resumed run computes again is purged. OptionError where TensorBoard is not installed.
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
        """What was written last is not asked for: the last of ``earlier`` is purged and written again."""
        last = max(earlier, key=lambda record: record.epoch, default=None)
        step = epoch if last is None else last.epoch
        self._writer = self._writers.SummaryWriter(str(self._folder), purge_step=step)
        if last is not None:
            self.write(last)

    def write(self, record: EpochRecord) -> None:
        """Add its scalars."""
        for name, value in record.as_dict().items():
            if name not in ("epoch", "passes") and value is not None:
                stem, _, kind = name.rpartition("_")
                tag = f"{_GROUPS[kind]}/{stem}" if kind in _GROUPS else name
                self._writer.add_scalar(tag, value, record.epoch)
        self._writer.flush()


# ---- what a run is told when training starts ------------------------------------------------------------------------


_PACKAGES = ("ooc", "torch", "torch-geometric", "numpy", "zarr")


def note_start(run: RunFolder, report: PlanReport | None, spill_dir: Path, metric: Metric) -> None:
    """Put the forecast, the planned epoch, the command, the machine and the versions into the folder of ``run``, for
    the epochs from here on. Without a ``report`` nothing is forecast."""
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
            "machine": _machine(spill_dir, None if report is None else report.hardware),
            "versions": {name: version for name, version in versions_of(_PACKAGES).items() if version is not None},
        }
    )


def _machine(spill_dir: Path, hardware: Hardware | None) -> dict[str, Any]:
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
    """A listener. When an epoch is over that has found the memory filled, the second, it tells how far off the forecast
    was, and how long the others up to epoch ``last`` take if they are like it, unless that is a moment; after two more
    again, by the median of the three, where that says something else."""

    def __init__(self, report: PlanReport, last: int, tell: Listener) -> None:
        self._report, self._last, self._tell, self._told_s = report, last, tell, 0.0
        self._taken_s: list[float] = []

    def __call__(self, event: Event) -> None:
        if not isinstance(event, EpochFinished):
            return
        one, record = self._report, event.record
        self._taken_s.append(record.time_s + record.eval_s)
        taken_s = median(self._taken_s[1:] or self._taken_s)
        promised_s, left = one.epoch_s + (one.score_s or 0.0) * (record.eval_s > 0), self._last - record.epoch
        is_news = abs(taken_s - self._told_s) > _WORTH_TELLING_AGAIN * taken_s
        if len(self._taken_s) in (2, 4) and is_news and left * taken_s >= _WORTH_TELLING_S and promised_s:
            self._told_s = taken_s
            rest = f"the {left} others take about {format_duration(left * taken_s)}"
            told = f"an epoch takes {format_duration(taken_s)}, {taken_s / promised_s:.2f} times the forecast"
            self._tell(Note(f"{told}; {rest}"))
