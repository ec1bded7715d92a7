# SPDX-License-Identifier: Apache-2.0
"""The live view of a training on a terminal: progress, curves of loss and scores, and what an epoch takes of the
machine, each beside what the plan promised."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ooc.events import EpochFinished, Event, TaskAdvanced, TaskStarted
from ooc.progress.figures import best_record, format_duration, sparkline
from ooc.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from ooc.engine.record import EpochRecord
    from ooc.progress.plan_report import PlanReport

_TIMED_EPOCHS = 10
"""The number of latest epochs over whose durations the median is taken."""
_LABEL_WIDTH, _VALUE_WIDTH, _FORECAST_WIDTH = 14, 8, 18
_LEAST_CURVE, _MOST_CURVE = 8, 60
_SPLIT_SCORES = (("valid", "valid_score"), ("train", "train_score"), ("test", "test_score"))
_BAR_TEXT_WIDTH = 54
"""Columns of the text beside the progress bar."""
_TIME_LABELS = ("epoch", "computing", "SSD busy", "waiting", "scoring")
_METRIC_ABBREVIATIONS = {"average-precision": "AP"}

Row = tuple[str, str, str, str]
"""A row of the view: a name, a value, its bar, and what the plan promised."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory named ``where``, of which ``limit_bytes`` may be taken and ``planned_bytes`` are planned.

    Its peak in a record is the sum of ``fields``.
    """

    where: str
    limit_bytes: int
    planned_bytes: int
    fields: tuple[str, ...]

    def peak_bytes(self, record: "EpochRecord") -> int:
        return sum(getattr(record, name) for name in self.fields)


@dataclass(slots=True)
class TrainingView:
    """A renderable for ``rich``: the training ``title`` of the epochs ``first`` to ``last``.

    A training by batches has no ``forecast`` of an epoch, only of its ``tiers``. The view is a listener; events tell
    what runs. ``records`` are those of the epochs before a resumed run, then those that events bring. ``rising``:
    whether a higher score is better.
    """

    title: str
    first: int
    last: int
    metric: str
    rising: bool
    forecast: "PlanReport | None" = None
    tiers: tuple[Tier, ...] = ()
    clock: Callable[[], float] = time.monotonic
    records: list["EpochRecord"] = field(default_factory=list)
    _task: str = ""
    _done: int = 0
    _total: int = 0
    _unit: str = "pass"
    _epoch_start_s: float = 0.0
    _epoch_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED_EPOCHS))

    def __post_init__(self) -> None:
        self._epoch_start_s = self.clock()

    def __call__(self, event: Event) -> None:
        match event:
            case TaskStarted(task, total, unit):
                self._task, self._done, self._total = task, 0, total
                self._unit = "batch" if unit == "batches" else "pass"
            case TaskAdvanced(_, done):
                self._done = done
            case EpochFinished(record):
                now_s = self.clock()
                self._epoch_times_s.append(now_s - self._epoch_start_s)
                self._epoch_start_s = now_s
                self.records.append(record)

    # ---- what follows from it ------------------------------------------------------------------------------

    @property
    def left_s(self) -> float | None:
        """Seconds until the last epoch ends, from the epochs so far or the plan; None while neither tells."""
        if self._epoch_times_s:
            epoch_s = statistics.median(self._epoch_times_s)
        elif self.forecast is not None and self.forecast.epoch_s:
            epoch_s = self.forecast.epoch_s + (self.forecast.score_s or 0.0)
        else:
            return None
        epochs = self.last - self._epochs_done
        return max(0.0, epochs * epoch_s - min(epoch_s, self.clock() - self._epoch_start_s))

    @property
    def _epochs_done(self) -> int:
        return self.records[-1].epoch if self.records else self.first - 1

    # ---- how it looks --------------------------------------------------------------------------------------

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        width = options.max_width
        curve = max(_LEAST_CURVE, min(_MOST_CURVE, width - _LABEL_WIDTH - _VALUE_WIDTH - _FORECAST_WIDTH - 3))
        yield Text(self.title, style="bold", no_wrap=True, overflow="ellipsis")
        yield self._status_line(width)
        for what, value, picture, promised in self._table_rows(curve):
            # A table of rich's would take ten times as long to draw, several times a second.
            parts = (f"{what:<{_LABEL_WIDTH}} ", "cyan"), f"{value:>{_VALUE_WIDTH}} ", (f"{picture:<{curve}} ", "blue")
            yield Text.assemble(*parts, (promised, "dim"), no_wrap=True, overflow="ellipsis")

    def _status_line(self, width: int) -> "Text":
        """Return the line of the current epoch, the overall progress, the time left, and the current task."""
        from rich.text import Text

        begun = self._done / self._total if self._total and self._epoch_progress else 0.0
        done = self._epochs_done
        share = (done + begun) / max(1, self.last)
        number = min(self.last, done + 1)
        doing = [self._task] if self._task and not self._epoch_progress else []
        doing += [f"{self._unit} {self._done + 1} of {self._total}"] if self._done < self._total else []
        columns = max(10, min(40, width - _BAR_TEXT_WIDTH))
        full = round(columns * min(1.0, share))
        left = self.left_s
        return Text.assemble(
            (f"epoch {number}/{self.last} ", "bold"),
            ("━" * full, "green"),
            ("─" * (columns - full), "dim"),
            "" if left is None else " done" if share >= 1 else f" {format_duration(left)} left",
            (f"  {', '.join(doing)}", "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )

    @property
    def _epoch_progress(self) -> bool:
        return self._task.startswith("epoch ")

    def _table_rows(self, width: int) -> Iterator[Row]:
        if self.records:
            losses = [record.loss for record in self.records]
            lowest = min((loss for loss in losses if math.isfinite(loss)), default=math.nan)
            yield "loss", f"{losses[-1]:.5f}", sparkline(losses, width), f"lowest {lowest:.5f}"
            yield from self._score_rows(width)
        if self.forecast is not None:
            yield "", "", "", "forecast"
        last = self.records[-1] if self.records else None
        yield from self._time_rows(last, width)
        for tier in self.forecast.tiers if self.forecast else self.tiers:
            peak = max((tier.peak_bytes(record) for record in self.records), default=0)
            of = f"of {format_size(tier.limit_bytes)}"
            filled = bar(peak / tier.limit_bytes if tier.limit_bytes else 0.0, max(4, width - len(of) - 1))
            is_known = self.records and not self.forecast  # batches take what they are forecast to
            forecast = "" if is_known else format_size(tier.planned_bytes)
            yield tier.where, format_size(peak), f"{filled} {of}".strip(), forecast
        yield from self._traffic_rows(last)

    def _score_rows(self, width: int) -> Iterator[Row]:
        best = best_record(self.records, rising=self.rising)
        for split, name in _SPLIT_SCORES:
            values = [value for record in self.records if (value := getattr(record, name)) is not None]
            if values:
                said = "" if split != "valid" or best is None else f"best {best.valid_score:.4f} ({best.epoch})"
                metric = _METRIC_ABBREVIATIONS.get(self.metric, self.metric)
                yield f"{split} {metric}", f"{values[-1]:.4f}", sparkline(values, width), said

    def _time_rows(self, last: "EpochRecord | None", width: int) -> Iterator[Row]:
        """Return the rows of what an epoch's time was spent on, as bars of the epoch's length."""
        taken: tuple[float | None, ...] = (None,) * 5
        promised = taken
        if last is not None:
            waited = sum(item.wait_s for item in last.passes) if last.passes else last.io_wait_s
            busy = last.io_busy_s if last.passes or self.forecast is not None else None  # batches do not measure it
            taken = (last.time_s, max(0.0, last.time_s - waited), busy, waited, last.eval_s or None)
        if self.forecast is not None:
            one, epoch = self.forecast, self.forecast.timeline
            promised = (one.epoch_s, one.compute_s, epoch.ssd_busy_s, epoch.wait_s, one.score_s)
        longest = max((seconds for seconds in taken if seconds is not None), default=0.0) or 1.0
        for what, seconds, forecast in zip(_TIME_LABELS, taken, promised, strict=True):
            if seconds is not None or forecast is not None:
                filled = "" if seconds is None else bar(seconds / longest, width)
                yield what, _known(format_duration, seconds), filled, _known(format_duration, forecast)

    def _traffic_rows(self, last: "EpochRecord | None") -> Iterator[Row]:
        one = self.forecast
        read, written = (None, None) if one is None else (one.ssd_read_bytes, one.ssd_write_bytes)
        moved = (None, None) if last is None else (last.ssd_read_bytes, last.ssd_write_bytes)
        for what, nbytes, forecast in zip(("SSD read", "SSD written"), moved, (read, written), strict=True):
            yield what, _known(format_size, nbytes), "" if nbytes is None else "an epoch", _known(format_size, forecast)
        if last is not None and (last.to_device_bytes or last.to_host_bytes):
            yield "to the GPU", format_size(last.to_device_bytes), f"and {format_size(last.to_host_bytes)} back", ""


def _known(form: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else form(value)


def bar(share: float, width: int) -> str:
    """Return a bar that fills ``share`` of ``width`` columns, to half a column."""
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    return "━" * (halves // 2) + "╸" * (halves % 2)
