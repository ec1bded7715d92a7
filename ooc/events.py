# SPDX-License-Identifier: Apache-2.0
"""Events that the core emits while it works. Progress bars, logs and reports are listeners."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """The base of events."""


@dataclass(frozen=True, slots=True)
class TaskStarted(Event):
    """A long piece of work begins; ``total`` counts ``unit`` (0: unknown)."""

    task: str
    total: int
    unit: str


@dataclass(frozen=True, slots=True)
class TaskAdvanced(Event):
    """``done`` of the task's total are done so far."""

    task: str
    done: int


@dataclass(frozen=True, slots=True)
class TaskFinished(Event):
    """The task is over."""

    task: str


@dataclass(frozen=True, slots=True)
class Note(Event):
    """One line worth telling the user."""

    text: str


@dataclass(frozen=True, slots=True)
class EpochFinished(Event):
    """An epoch is over; ``record`` is its EpochRecord."""

    record: Any


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener that does nothing."""


def caution(listener: Listener, text: str) -> None:
    """Tell the listener of something that may be unintended; without a listener, issue a warning."""
    if listener is ignore:
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    listener(Note(text))


class Relay:
    """A listener that passes every event on to the present listeners."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    @contextmanager
    def joined(self, listener: Listener) -> Iterator[None]:
        """A context in which ``listener`` gets events, too."""
        before = self._listeners
        self._listeners = (*before, listener)
        try:
            yield
        finally:
            self._listeners = before


@contextmanager
def reported(listener: Listener, task: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A context for a long piece of work: tell ``listener`` of its beginning, of each call of the function given with
    how much of ``total`` is done, and of its end."""
    listener(TaskStarted(task, total, unit))
    try:
        yield lambda done: listener(TaskAdvanced(task, done))
    finally:
        listener(TaskFinished(task))
