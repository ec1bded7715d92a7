# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM as KeyboardInterrupt, raised where nothing is half done.

Python's own handler raises between any two bytecodes. In ``with condition:`` that can be after the lock was taken and
before ``with`` knows of it; the lock then stays taken, and a thread that needs it hangs, at the latest when the process
waits for it to exit. Or it is between what the kernel was asked for and the count of that. So the work itself asks, at
every step, whether it is to stop.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from ooc.events import Event, Listener, TaskAdvanced, TaskStarted

GRACE_S = 1.0
"""How long the work has to come to such a place. Then it is interrupted wherever it is."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Request:
    """Whether the process, to which signals belong, has been asked to stop."""

    def __init__(self) -> None:
        self._made = False
        self._timer_before = (0.0, 0.0)
        self._alarm_before: Any = signal.SIG_DFL

    def make(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals; who asks again does not want to wait."""
        if self._made:
            self.stop_if_made()
        self._made = True
        self._alarm_before = signal.signal(signal.SIGALRM, self.stop_if_made)
        self._timer_before = signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def stop_if_made(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Raise KeyboardInterrupt if asked to stop."""
        if self._made:
            self.forget()
            raise KeyboardInterrupt

    def forget(self) -> None:
        """Leave the timer and its handler, which may be somebody else's, as they were."""
        if self._made:
            self._made = False
            signal.setitimer(signal.ITIMER_REAL, *self._timer_before)
            signal.signal(signal.SIGALRM, self._alarm_before)


_request = _Request()


def interruptible() -> AbstractContextManager[None]:
    """Both signals raise KeyboardInterrupt within: in ``stop_if_asked``, after GRACE_S anywhere, asked twice at once.

    What is ignored stays ignored, as Ctrl-C is by what a shell runs in the background. For the main thread.
    """
    return _noting([number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN])


@contextmanager
def interruptible_by_ctrl_c() -> Iterator[None]:
    """The same for Ctrl-C alone, where it has Python's own handler: for work that is called from somebody's program.

    Who asks when it has nearly ended meets KeyboardInterrupt then: what would come next is not wanted either.
    """
    is_main = threading.current_thread() is threading.main_thread()
    own = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with _noting([signal.SIGINT] if own else []):
        yield
        if own:
            _request.stop_if_made()


@contextmanager
def _noting(signals: list[signal.Signals]) -> Iterator[None]:
    before = {number: signal.signal(number, _request.make) for number in signals}
    try:
        yield
    finally:
        if before:
            _request.forget()
        for number, handler in before.items():
            signal.signal(number, handler)


def stopping_if_asked(listener: Listener) -> Listener:
    """``listener``, after which the work stops if it has been asked to."""

    def tell(event: Event) -> None:
        listener(event)
        if isinstance(event, TaskStarted | TaskAdvanced):
            stop_if_asked()

    return tell


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt if a signal has come and this is the main thread; others end when it ends them."""
    if threading.current_thread() is threading.main_thread():
        _request.stop_if_made()
