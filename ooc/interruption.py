# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM as KeyboardInterrupt, raised only where nothing is half done.

Python's own handler raises between any two bytecodes. In ``with condition:`` that can be after the lock was taken and
before ``with`` knows of it. The lock then stays taken, and a thread that needs it hangs, at the latest when the process
waits for it at exit. Or it is between a request to the kernel and the counting of it. So the work itself checks at
every step whether it should stop.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from ooc.events import Event, Listener, TaskAdvanced, TaskStarted

GRACE_S = 1.0
"""Seconds that the work has to reach such a place; then it is interrupted wherever it is."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Request:
    """Whether the process, which receives signals, has been asked to stop."""

    def __init__(self) -> None:
        self._made = False
        self._timer_before = (0.0, 0.0)
        self._alarm_before: Any = signal.SIG_DFL

    def make(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A second one interrupts at once."""
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
        """Restore the timer and its handler, which may be somebody else's."""
        if self._made:
            self._made = False
            signal.setitimer(signal.ITIMER_REAL, *self._timer_before)
            signal.signal(signal.SIGALRM, self._alarm_before)


_request = _Request()


def interruptible() -> AbstractContextManager[None]:
    """A context in which both signals raise KeyboardInterrupt: in ``stop_if_asked``, anywhere after GRACE_S, or at once
    if sent twice.

    Ignored signals stay ignored, as Ctrl-C is for a shell's background jobs. For the main thread.
    """
    return _noting([number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN])


@contextmanager
def interruptible_by_ctrl_c() -> Iterator[None]:
    """The same for Ctrl-C alone, if it has Python's own handler: for work called from somebody's program.

    If asked when the work has almost ended, it raises KeyboardInterrupt then: what would come next is not wanted,
    either.
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
    """Return a listener that calls ``listener`` and then stops the work if asked to."""

    def tell(event: Event) -> None:
        listener(event)
        if isinstance(event, TaskStarted | TaskAdvanced):
            stop_if_asked()

    return tell


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt if a signal has come and this is the main thread, which ends the other threads."""
    if threading.current_thread() is threading.main_thread():
        _request.stop_if_made()
