# SPDX-License-Identifier: Apache-2.0
"""The display of the work: a listener that turns the core's events into a live view, bars or lines.

On a terminal a training is shown live, and any other task longer than two seconds gets a bar with rate and time left.
Elsewhere there is a line per epoch, and for long tasks one every few seconds. Progress goes to stderr, results and
epochs to stdout. Events may come from any thread. A training started from Python is shown on the terminal, in the
notebook, or as a line per epoch on standard error.
"""

import io
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, TextIO

from ooc.events import EpochFinished, Event, Note, Relay, TaskAdvanced, TaskFinished, TaskStarted
from ooc.interruption import stop_if_asked
from ooc.progress.figures import LINE_WIDTH, format_duration, format_epoch, format_progress, pace
from ooc.progress.live import TrainingView

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress, TaskID

SILENT_S = 2.0
LINE_EVERY_S = 5.0
_REFRESHES_PER_S = 2
"""Refreshes of the live view per second: drawing it takes some milliseconds of a processor that has other work."""
_DUMB_TERMINALS = ("dumb", "unknown")


class Verbosity(IntEnum):
    """How much is shown; each level includes those before it."""

    ERROR = 0
    """Only errors and results."""
    WARNING = 1
    """Also notes: what was done otherwise than asked for."""
    INFO = 2
    """Also the progress of the work."""
    DEBUG = 3
    """Also what is done when, and for how long."""


@dataclass
class _Task:
    name: str
    total: int
    unit: str
    started_s: float
    done: int = 0
    bar: "TaskID | None" = field(default=None)


class Reporter:
    """A display of events; a context manager, so that no bar remains afterwards.

    ``tasks``: whether tasks are shown where there is no terminal; epochs always are. Ctrl-C takes effect where a task
    begins or advances: as KeyboardInterrupt.
    """

    def __init__(
        self,
        *,
        verbosity: Verbosity = Verbosity.INFO,
        errors: TextIO | None = None,
        results: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        epochs: int = 0,
        tasks: bool = True,
    ) -> None:
        self._verbosity = verbosity
        self._errors = errors if errors is not None else sys.stderr
        self._results = results if results is not None else sys.stdout
        self._clock = clock
        self._terminal = is_terminal(self._errors)
        self._tasks: dict[str, _Task] = {}
        self._shows_tasks = tasks or self._terminal
        self._progress: Progress | None = None
        self._view: TrainingView | None = None
        self._live: Live | None = None
        self._last_line_s = clock() - LINE_EVERY_S
        self._lock = threading.Lock()
        self.epochs = epochs

    def __call__(self, event: Event) -> None:
        if self._verbosity > Verbosity.ERROR:
            self._handle(event)
        if isinstance(event, TaskStarted | TaskAdvanced):
            stop_if_asked()

    @property
    def is_live(self) -> bool:
        """Whether a training could be shown live: on a terminal that all output goes to."""
        return self._terminal and is_terminal(self._results) and self._verbosity >= Verbosity.INFO

    def show(self, view: TrainingView, *, stays: bool = False) -> None:
        """Show a training by ``view`` until the end, on a terminal; elsewhere epochs are lines.

        ``stays``: the view remains at the end instead of being removed.
        """
        if not self.is_live:
            return
        with self._lock:
            self._stop()
            self._view, self._live = view, _live(view, self._errors, stays=stays)
            self._live.start()

    def _handle(self, event: Event) -> None:
        informing, debugging = self._verbosity >= Verbosity.INFO, self._verbosity >= Verbosity.DEBUG
        with self._lock:
            if self._view is not None:
                self._view(event)
            match event:
                case TaskStarted(task, total, unit) if informing:
                    self._tasks[task] = _Task(task, total, unit, self._clock())
                case TaskAdvanced(task, done) if task in self._tasks:
                    self._advance(self._tasks[task], done)
                case TaskFinished(task) if task in self._tasks:
                    self._finish(self._tasks.pop(task), told=debugging)
                case Note(text) if self._shows_tasks:
                    self._print(text, self._errors)
                case EpochFinished(record) if informing and (self._view is None or debugging):
                    there = shutil.get_terminal_size().columns if self._results.isatty() else LINE_WIDTH
                    line = format_epoch(record, self.epochs, width=max(LINE_WIDTH, there))
                    self._print(line, self._results)

    def close(self) -> None:
        """Remove the view and the bars."""
        with self._lock:
            self._tasks.clear()
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _advance(self, task: _Task, done: int) -> None:
        task.done = done
        now_s = self._clock()
        elapsed_s = now_s - task.started_s
        if self._view is not None or elapsed_s < SILENT_S or not self._shows_tasks:
            return
        if self._terminal:
            self._show_bar(task)
        elif now_s - self._last_line_s >= LINE_EVERY_S and done != task.total:
            self._last_line_s = now_s
            self._print(format_progress(task.name, done, task.total, task.unit, elapsed_s), self._errors)

    def _finish(self, task: _Task, *, told: bool) -> None:
        if task.bar is not None and self._progress is not None:
            self._progress.remove_task(task.bar)
            if not self._progress.tasks:
                self._stop()
        if told:
            self._print(f"{task.name}: {format_duration(self._clock() - task.started_s)}", self._errors)

    def _show_bar(self, task: _Task) -> None:
        if self._progress is None:
            self._progress = _bars(self._errors)
            self._progress.start()
        rate, left = pace(task.done, task.total, task.unit, self._clock() - task.started_s)
        if task.bar is None:
            total = float(task.total) if task.total else None
            task.bar = self._progress.add_task(task.name, total=total, completed=task.done, rate=rate, left=left)
        else:
            self._progress.update(task.bar, completed=task.done, rate=rate, left=left)

    def _stop(self) -> None:
        for shown in (self._progress, self._live):
            if shown is not None:
                shown.stop()
        self._progress = self._view = self._live = None

    def _print(self, text: str, stream: TextIO) -> None:
        shown = self._live or self._progress
        if shown is not None and stream.isatty():
            shown.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=stream, flush=True)


def is_terminal(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal whose lines can be overwritten."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB_TERMINALS


def _live(view: TrainingView, stream: TextIO, *, stays: bool) -> "Live":
    from rich.console import Console
    from rich.live import Live

    return Live(
        view,
        console=Console(file=stream),
        refresh_per_second=_REFRESHES_PER_S,
        transient=not stays,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )


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


# ---- from Python ----------------------------------------------------------------------------------------------------


_NOTEBOOK_SHELL = "ZMQInteractiveShell"
_NOTEBOOK_WIDTH = 100
_NOTEBOOK_EVERY_S = 0.5


@contextmanager
def displayed(relay: Relay, view: Callable[[], TrainingView], epochs: int) -> Iterator[None]:
    """Show the events of ``relay`` as a training of ``epochs`` epochs; ``view`` makes the view where it can be
    drawn."""
    if in_notebook():
        cell = NotebookCell(view())
        with relay.joined(cell):
            yield
        cell.draw()
        return
    stream = sys.stderr
    with Reporter(errors=stream, results=stream, epochs=epochs, tasks=False) as reporter, relay.joined(reporter):
        if is_terminal(stream):
            reporter.show(view(), stays=True)
        yield


def in_notebook() -> bool:
    """Return whether this runs in a notebook's kernel."""
    shell = sys.modules.get("IPython")
    kinds = () if shell is None else type(shell.get_ipython()).__mro__  # Colab's is a kind of Jupyter's
    return any(kind.__name__ == _NOTEBOOK_SHELL for kind in kinds)


class NotebookCell:
    """A listener that draws a view into the output of the running notebook cell, always in the same place."""

    def __init__(self, view: TrainingView) -> None:
        self._view = view
        self._display: Any = import_module("IPython.display")
        self._id = uuid.uuid4().hex
        self._drawn_s: float | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochFinished):
            self._view(event)
            if self._drawn_s is None or time.monotonic() - self._drawn_s >= _NOTEBOOK_EVERY_S:
                self.draw()

    def draw(self) -> None:
        """Draw the view in place of the previous drawing, in colours and in plain text."""
        from rich.console import Console

        form: dict[str, Any] = {"width": _NOTEBOOK_WIDTH, "force_jupyter": False, "force_terminal": True}
        console = Console(file=io.StringIO(), record=True, **form)
        console.print(self._view)
        pre = "<pre style='line-height: 1.2'>{code}</pre>"
        html = console.export_html(inline_styles=True, code_format=pre, clear=False)
        shown = {"text/html": html, "text/plain": console.export_text()}
        self._display.display(shown, raw=True, display_id=self._id, update=self._drawn_s is not None)
        self._drawn_s = time.monotonic()
