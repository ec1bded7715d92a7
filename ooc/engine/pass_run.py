# SPDX-License-Identifier: Apache-2.0
"""The loop over a pass's steps, the same for every kind of pass: blocks come and go around each step, its tasks are
computed on any thread, and what they give is reduced on this one, in their order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from ooc.engine.program_run import ProgramRun
from ooc.engine.workers import OrderedPipeline
from ooc.model.stages import Tile
from ooc.plan.layout.passes import Pass
from ooc.plan.program.sequence import Step


class PassRun(ABC):
    """One execution of a pass. A *sweep* over the rows is all of it, or that of one slab."""

    def __init__(self, run: ProgramRun, item: Pass) -> None:
        self.program = run
        self.runtime = run.runtime
        self.workspace = run.workspace
        self._first, self._stop = run.program.bounds[item.index]

    @abstractmethod
    def begin_sweep(self, step: Step) -> None:
        """Nothing of the sweep before is computed any more, and ``step`` is the first of the next one."""

    @abstractmethod
    def open(self, number: int, step: Step) -> Iterable[Any]:
        """The tasks of a step, in order; the blocks it needs are there."""

    @abstractmethod
    def compute(self, task: Any) -> Any:
        """One task, on any thread."""

    @abstractmethod
    def reduce(self, result: Any) -> None:
        """What ``compute`` gave, in the order of the tasks."""

    @abstractmethod
    def finish(self) -> None:
        """Everything has been reduced."""

    def run(self) -> None:
        """All steps. While a step is computed, the next one's tasks are put out; the last but one has ended by then."""
        program, steps, first, stop = self.program, self.program.program.steps, self._first, self._stop
        with OrderedPipeline(self.runtime.workers, self.compute, self.reduce) as pipeline:
            for number in range(first, stop):
                step = steps[number]
                if number == first or step.slab != steps[number - 1].slab:
                    pipeline.drain()
                    self.begin_sweep(step)
                if number - 2 >= first:
                    pipeline.finish(number - 2)
                    program.end(number - 2)
                program.begin(number)
                for task in self.open(number, step):
                    pipeline.put(number, task)
                self.workspace.launched(number)
            pipeline.drain()
        self.finish()
        for number in range(max(first, stop - 2), stop):
            program.end(number)


class TilePassRun(PassRun):
    """One whose tasks give tiles: what they scatter is added to its matrix, then ``commit`` gets them."""

    def __init__(self, run: ProgramRun, item: Pass, commit: Callable[[Tile], None]) -> None:
        super().__init__(run, item)
        self._sums = run.sums(item.pull, item.index)
        self._commit = commit

    def reduce(self, result: Tile | None) -> None:
        if result is None:
            return
        found = result.scattered
        if self._sums is not None and found is not None:
            for rows_S, values_SC in found.others:
                self._sums.add(rows_S, values_SC)
        result.scattered = None
        self._commit(result)

    def finish(self) -> None:
        if self._sums is not None:
            self._sums.finish()
