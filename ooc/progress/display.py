# SPDX-License-Identifier: Apache-2.0
"""A training that was started from Python, shown where Python's user looks: on the terminal, in the notebook, or as a
line an epoch on standard error.
"""

import io
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ooc.events import EpochFinished, Event, Relay
from ooc.progress.live import TrainingView
from ooc.progress.reporter import Reporter, is_terminal

_NOTEBOOK = "ZMQInteractiveShell"
_NOTEBOOK_WIDTH = 100
_NOTEBOOK_EVERY_S = 0.5


@contextmanager
def displayed(relay: Relay, view: Callable[[], TrainingView], epochs: int) -> Iterator[None]:
    """Show what ``relay`` tells, as a training of so many ``epochs``; ``view`` makes the view where it can be drawn."""
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
    """Whether this runs in a notebook's kernel."""
    shell = sys.modules.get("IPython")
    kinds = () if shell is None else type(shell.get_ipython()).__mro__  # Colab's is a kind of Jupyter's
    return any(kind.__name__ == _NOTEBOOK for kind in kinds)


class NotebookCell:
    """A listener that draws a view into the output of the cell that runs, over and over in one place."""

    def __init__(self, view: TrainingView, clock: Callable[[], float] = time.monotonic) -> None:
        self._view, self._clock = view, clock
        self._display: Any = import_module("IPython.display")
        self._id = uuid.uuid4().hex
        self._drawn_s: float | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochFinished):
            self._view.epoch_finished(event.record)
            if self._drawn_s is None or self._clock() - self._drawn_s >= _NOTEBOOK_EVERY_S:
                self.draw()

    def draw(self) -> None:
        """Put the view as it is where it was before."""
        self._display.display(drawn(self._view), raw=True, display_id=self._id, update=self._drawn_s is not None)
        self._drawn_s = self._clock()


def drawn(view: TrainingView) -> dict[str, str]:
    """The view for a notebook, by the type of what it is: in colours, and in plain text."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_NOTEBOOK_WIDTH, record=True, force_jupyter=False, force_terminal=True)
    console.print(view)
    pre = "<pre style='line-height: 1.2'>{code}</pre>"
    html = console.export_html(inline_styles=True, code_format=pre, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}
