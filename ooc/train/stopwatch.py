# SPDX-License-Identifier: Apache-2.0
"""What each pass of a running program takes: the clock, its tiles, its waiting and its bytes."""

from time import perf_counter, process_time

from ooc.prefetch.engine import Counters
from ooc.train.record import PassRecord
from ooc.train.team import Team


class Stopwatch:
    """Started when made; every ``lap`` tells what has passed since the one before."""

    def __init__(self, counters: Counters, team: Team) -> None:
        self._counters = counters
        self._team = team
        self._mark = self._now()

    def lap(self, program: str, name: str) -> PassRecord:
        """The pass ``name`` is over."""
        before, self._mark = self._mark, self._now()
        clock_s, busy_s, cpu_s, wait_s, read, written = (
            now - then for now, then in zip(self._mark, before, strict=True)
        )
        return PassRecord(program, name, clock_s, busy_s, cpu_s, wait_s, int(read), int(written))

    def _now(self) -> tuple[float, float, float, float, int, int]:
        io = self._counters
        return perf_counter(), self._team.busy_s, process_time(), io.wait_s, io.read_bytes, io.write_bytes
