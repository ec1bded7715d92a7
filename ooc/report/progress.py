# SPDX-License-Identifier: Apache-2.0
"""What the user sees of the work: a listener that turns the core's events into bars or lines.

On a terminal a task longer than two seconds gets a bar with rate and time left; elsewhere it gets a
plain line every few seconds. Progress goes to stderr, results and epochs to stdout. Events may come
from any thread.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from ooc.events import EpochFinished, Event, Note, TaskAdvanced, TaskFinished, TaskStarted
from ooc.interruption import stop_if_asked
from ooc.sizes import format_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ooc.engine.record import EpochRecord

SILENT_S = 2.0
LINE_EVERY_S = 5.0
EPOCH_WIDTH = 80
"""Columns of an epoch's line, but on a terminal that has more."""


@dataclass
class _Task:
    name: str
    total: int
    unit: str
    started_s: float
    done: int = 0
    bar: "TaskID | None" = field(default=None)


class Reporter:
    """Shows events; with ``quiet`` none of them. Use as a context manager, so that no bar stays behind.

    Where work begins or goes on is also where Ctrl-C ends it: KeyboardInterrupt.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        errors: TextIO | None = None,
        results: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        epochs: int = 0,
    ) -> None:
        self._quiet = quiet
        self._errors = errors if errors is not None else sys.stderr
        self._results = results if results is not None else sys.stdout
        self._clock = clock
        self._terminal = self._errors.isatty()
        self._tasks: dict[str, _Task] = {}
        self._progress: Progress | None = None
        self._last_line_s = clock() - LINE_EVERY_S
        self._lock = threading.Lock()
        self.epochs = epochs

    def __call__(self, event: Event) -> None:
        if not self._quiet:
            self._tell(event)
        if isinstance(event, TaskStarted | TaskAdvanced):
            stop_if_asked()

    def _tell(self, event: Event) -> None:
        with self._lock:
            match event:
                case TaskStarted(task, total, unit):
                    self._tasks[task] = _Task(task, total, unit, self._clock())
                case TaskAdvanced(task, done) if task in self._tasks:
                    self._advance(self._tasks[task], done)
                case TaskFinished(task) if task in self._tasks:
                    self._finish(self._tasks.pop(task))
                case Note(text):
                    self._print(text, self._errors)
                case EpochFinished(record):
                    self._print(format_epoch(record, self.epochs, width=self._width()), self._results)

    def close(self) -> None:
        """Remove the bars."""
        with self._lock:
            self._tasks.clear()
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, task: _Task, done: int) -> None:
        task.done = done
        now_s = self._clock()
        elapsed_s = now_s - task.started_s
        if elapsed_s < SILENT_S:
            return
        if self._terminal:
            self._show(task)
        elif now_s - self._last_line_s >= LINE_EVERY_S and done != task.total:
            self._last_line_s = now_s
            self._print(format_progress(task.name, done, task.total, task.unit, elapsed_s), self._errors)

    def _finish(self, task: _Task) -> None:
        if task.bar is not None and self._progress is not None:
            self._progress.remove_task(task.bar)
            if not self._progress.tasks:
                self._stop()

    def _show(self, task: _Task) -> None:
        if self._progress is None:
            self._progress = _bars(self._errors)
            self._progress.start()
        rate, left = _pace(task.done, task.total, task.unit, self._clock() - task.started_s)
        if task.bar is None:
            total = float(task.total) if task.total else None
            task.bar = self._progress.add_task(task.name, total=total, completed=task.done, rate=rate, left=left)
        else:
            self._progress.update(task.bar, completed=task.done, rate=rate, left=left)

    def _width(self) -> int:
        return max(EPOCH_WIDTH, shutil.get_terminal_size().columns) if self._results.isatty() else EPOCH_WIDTH

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, text: str, stream: TextIO) -> None:
        if self._progress is not None and stream.isatty():
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=stream, flush=True)


def _bars(stream: TextIO) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
        console=Console(file=stream),
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def format_count(count: float, unit: str) -> str:
    """``format_count(1_250_000, "edges")`` → ``"1.25M edges"``; bytes as sizes."""
    if unit == "bytes":
        return format_size(count)
    for letter, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            value = count / scale
            return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f}{letter} {unit}"
    return f"{count:.0f} {unit}"


def format_rate(per_s: float, unit: str) -> str:
    """A rate a second, or a minute where it is slow."""
    if per_s < 1 and unit != "bytes":
        return f"{per_s * 60:.1f} {unit}/min"
    if per_s < 10 and unit != "bytes":
        return f"{per_s:.1f} {unit}/s"
    return f"{format_count(per_s, unit)}/s"


def format_duration(seconds: float) -> str:
    """``0.42`` → ``"0.42 s"``, ``90`` → ``"1 min 30 s"``, ``4000`` → ``"1 h 6 min"``."""
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_progress(name: str, done: int, total: int, unit: str, elapsed_s: float) -> str:
    """A plain line: how far, how fast, how long still."""
    how_far = f"{100 * done // total} % of {format_count(total, unit)}" if total else format_count(done, unit)
    return ", ".join([f"{name}: {how_far}", *filter(None, _pace(done, total, unit, elapsed_s))])


def _pace(done: int, total: int, unit: str, elapsed_s: float) -> tuple[str, str]:
    """The rate and the time left; empty where nobody can tell."""
    if not done or elapsed_s <= 0:
        return "", ""
    left = f"{format_duration(max(0.0, elapsed_s * (total - done) / done))} left" if total else ""
    return format_rate(done / elapsed_s, unit), left


def format_scores(record: "EpochRecord") -> list[str]:
    """The scores of an epoch by split, where it was evaluated."""
    scores = {"train": record.train_acc, "valid": record.valid_acc, "test": record.test_acc}
    return [f"{name} {value:.4f}" for name, value in scores.items() if value is not None]


def format_epoch(record: "EpochRecord", epochs: int, *, width: int = EPOCH_WIDTH) -> str:
    """An epoch in one line, or several that are indented where ``width`` columns are too few."""
    number = f"{record.epoch:>{len(str(epochs))}}/{epochs}" if epochs else str(record.epoch)
    parts = [f"epoch {number}", f"loss {record.loss:.5f}"]
    scores = format_scores(record)
    parts += [" ".join(scores)] * bool(scores)
    parts.append(format_duration(record.time_s))
    if record.eval_s:
        parts[-1] = f"{parts[-1].removesuffix(' s')}+{format_duration(record.eval_s)}"
    if record.ssd_read_bytes or record.ssd_write_bytes:
        parts.append(f"read {format_size(record.ssd_read_bytes)}")
        parts.append(f"written {format_size(record.ssd_write_bytes)}")
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"      {part}")
    return "\n".join(lines)
