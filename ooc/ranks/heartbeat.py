# SPDX-License-Identifier: Apache-2.0
"""Whether the processes of one training are alive, as they tell each other by the store that they have met in
(``torch.distributed``): each counts up a number of its own there, on a thread, whatever it computes or waits for.

One that is slow goes on counting and is waited for. One whose number stands still has been killed or stopped, or cannot
be reached; whoever finds that out first says so in the store, and all stop.
"""

import threading
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from ooc.errors import RankError
from ooc.interruption import stop_if_asked

Store = Any
"""torch.distributed's, whose stubs lack methods."""

BEAT_S = 1.0
SILENT_BEATS = 30
"""For so many beats of one's own a process may be silent: a machine that swaps, or an interpreter that is held, lets
threads wait for seconds."""
_BROKEN_BEATS = 3
"""The same where a connection has broken: somebody has gone, and it is only asked who."""
_VERDICT = "verdict"


def meet(store: Store, rank: int, count: int, within: timedelta) -> None:
    """Return when all processes are there; RankError with those that are not in time, which the first that is tells."""
    store.set(_beat(rank), "0")
    names, deadline = [_beat(other) for other in range(count)], monotonic() + within.total_seconds()
    while not store.check(names):
        stop_if_asked()
        if monotonic() > deadline:
            missing = [other for other, name in enumerate(names) if not store.check([name])]
            text = f"rank {', '.join(map(str, missing))} has not started within {within.total_seconds():g} s"
            raise RankError(text, is_told=any(other not in missing for other in range(rank)))
        sleep(BEAT_S / 20)


class Heartbeat:
    """That of process ``rank``, and what is known of the ``count`` of them, who have met in ``store``."""

    def __init__(self, store: Store, rank: int, count: int) -> None:
        self._store, self._rank = store, rank
        self._silent = {other: 0 for other in range(count) if other != rank}
        self._rounds = self._rounds_seen = self._unheard = 0
        self._is_lost = False
        self._verdict: tuple[int, int, str] | None = None
        """By whom, of whom, what."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """RankError where one has failed, or it is known to be no more."""
        if self._verdict is None:
            return
        by, of, what = self._verdict
        raise RankError(f"rank {of} {what}", is_told=by != self._rank)

    def check_waiting(self) -> None:
        """The same, once a beat, of who waits; RankError, too, where the store is not to be reached."""
        self.check()
        self._unheard = 0 if self._rounds != self._rounds_seen else self._unheard + 1
        self._rounds_seen = self._rounds
        if self._is_lost or self._unheard > SILENT_BEATS:
            raise RankError("the process that keeps the store of all others, torchrun's or rank 0, does not answer")

    def find_gone(self) -> None:
        """A connection has broken: RankError with who has gone, if that is found out within a few beats."""
        until = self._rounds + _BROKEN_BEATS + 1
        while self._rounds <= until and not self._is_lost:
            self.check_waiting()
            for other, beats in self._silent.items():
                if beats >= _BROKEN_BEATS:
                    self._judge(self._store, other, "has gone or does not answer")
                    self.check()
            self._ended.wait(BEAT_S / 4)

    def fail(self) -> None:
        """Have all others know that this process does not go on."""
        if self._verdict is None and not self._is_lost:
            self._judge(self._store, self._rank, "has failed")

    def end(self) -> None:
        """Stop the thread, unless it hangs in the store."""
        self._ended.set()
        self._thread.join(2 * BEAT_S)

    def _beat(self) -> None:
        own, seen = 0, dict.fromkeys(self._silent, b"")
        try:
            store = self._store.clone()  # one that is waited on is locked
            while not self._ended.wait(BEAT_S):
                own += 1
                store.set(_beat(self._rank), str(own))
                for other in self._silent:
                    beat = store.get(_beat(other))
                    self._silent[other] = 0 if beat != seen[other] else self._silent[other] + 1
                    seen[other] = beat
                    if self._silent[other] >= SILENT_BEATS:
                        self._judge(store, other, f"has not answered for {SILENT_BEATS * BEAT_S:.0f} s")
                if self._verdict is None and store.check([_VERDICT]):
                    self._judge(store, self._rank, "")
                self._rounds += 1
        except RuntimeError:
            self._is_lost = True

    def _judge(self, store: Store, of: int, what: str) -> None:
        """Have this known to all, unless something else is."""
        if self._verdict is None:
            by, known, why = store.compare_set(_VERDICT, "", f"{self._rank} {of} {what}").decode().split(" ", 2)
            self._verdict = int(by), int(known), why


def _beat(rank: int) -> str:
    return f"beat/{rank}"
