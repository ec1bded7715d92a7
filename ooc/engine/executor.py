# SPDX-License-Identifier: Apache-2.0
"""Running one of a plan's programs: its passes one after the other, as a ``Runtime`` has what they need."""

from collections.abc import Callable
from time import perf_counter, process_time

import torch

from ooc.engine.passes import ColumnPassRun, RowPassRun, ShufflePassRun
from ooc.engine.program_run import PassRun, ProgramRun
from ooc.engine.pull_run import SlabBuffers
from ooc.engine.record import PassRecord
from ooc.engine.runtime import Runtime
from ooc.errors import BudgetError
from ooc.model.stages import Step, Tile
from ooc.plan.layout.passes import ColumnPass, RowPass, ShufflePass
from ooc.sizes import format_size

Progress = Callable[[int], None]
"""Told how many passes are done."""


def run_program(
    runtime: Runtime, program: str, steps: list[Step], reduce: Callable[[Tile], None], progress: Progress
) -> tuple[PassRecord, ...]:
    """Run ``program`` with the functions of ``steps``; ``reduce`` gets every tile, in order. What each pass has
    taken."""
    run = ProgramRun(runtime, program, steps, reduce)
    passes: list[PassRecord] = []
    slabs: SlabBuffers | None = None
    for checks in runtime.checks.values():
        checks.begin(program)
    try:
        run.warm_up()
        watch = _Stopwatch(runtime)
        for done, item in enumerate(runtime.plan.programs[program], start=1):
            run.enter(item.index)
            running: PassRun
            match item:
                case ShufflePass():
                    running = ShufflePassRun(run, item)
                case RowPass():
                    running = RowPassRun(run, item, slabs)
                case ColumnPass():
                    slabs = SlabBuffers(run, item)
                    running = ColumnPassRun(run, item, slabs)
            running.run()
            passes.append(watch.lap(program, item.title))
            progress(done)
        run.finish()
        runtime.refuse_faults()
    except torch.OutOfMemoryError as error:
        _settle(runtime, slabs)
        raise BudgetError(
            f"the device's memory is used up, within its budget of {format_size(runtime.plan.device_limit_bytes)}: "
            f"{' '.join(str(error).split())[:200]}; give a larger gpu_budget="
        ) from None
    except BaseException:
        _settle(runtime, slabs)
        raise
    return tuple(passes)


def _settle(runtime: Runtime, slabs: SlabBuffers | None) -> None:
    """Let everything under way end, whatever its result."""
    if slabs is not None:
        slabs.settle()
    runtime.settle()


class _Stopwatch:
    """Started when made; every ``lap`` tells what has passed since the one before."""

    def __init__(self, runtime: Runtime) -> None:
        self._counters = runtime.counters
        self._workers = runtime.workers
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
        return perf_counter(), self._workers.busy_s, process_time(), io.wait_s, io.read_bytes, io.write_bytes
