# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM as KeyboardInterrupt, raised where nothing is half done.

Python's own handler raises between any two bytecodes. In ``with condition:`` that can be after the lock was taken and
before ``with`` knows of it; the lock then stays taken, and a thread that needs it hangs, at the latest when the process
waits for it to exit. So the work itself asks, at every step that it tells of, whether it is to stop.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
            self.heed()
        self._made = True
        self._alarm_before = signal.signal(signal.SIGALRM, self.heed)
        self._timer_before = signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def heed(self, number: int = 0, frame: FrameType | None = None) -> None:
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Both signals raise KeyboardInterrupt within: in ``stop_if_asked``, after GRACE_S anywhere, asked twice at once.

    What is ignored stays ignored, as Ctrl-C is by what a shell runs in the background. For the main thread.
    """
    handlers = {number: _request.make for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        _request.forget()
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt if a signal has come and this is the main thread; others end when it ends them."""
    if threading.current_thread() is threading.main_thread():
        _request.heed()
