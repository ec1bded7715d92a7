# SPDX-License-Identifier: Apache-2.0
"""One run of a program, and the loop over the steps of a pass.

A program's run moves blocks between steps, whatever memory the passes work in. The loop is the same for every kind of
pass: a step's tasks are computed on any thread, and their results are reduced on this one, in order.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from ooc.engine.operands import Sums, as_matrix
from ooc.engine.recording import EpochRecorder
from ooc.engine.runtime import Runtime
from ooc.engine.shuffle import RowsReader, SummedRows, SumsWriter
from ooc.engine.workers import OrderedPipeline
from ooc.interruption import stop_if_asked
from ooc.plan.layout.layout import Region
from ooc.plan.layout.passes import Pass, RowPass
from ooc.plan.program.program import Program
from ooc.plan.program.sequence import Step
from ooc.plan.workload import Pull
from ooc.stages import PanelSums
from ooc.stages import Step as StageStep


class ProgramRun:
    """One run of program ``name``, whose stages are computed by ``steps``; ``sums`` gets every tile's results, in
    order."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        steps: Sequence[StageStep],
        sums: PanelSums,
        recorder: EpochRecorder | None = None,
    ) -> None:
        self.functions = {step.spec.name: step.compute for step in steps}
        self.kernels = {step.spec.pull: step.kernel for step in steps if step.spec.pull is not None}
        self.sums_over_rows = sums
        self.recorder = recorder
        self.runtime = runtime
        self.workspace = runtime.workspace
        self.plan = runtime.plan
        self.name = name
        self.program: Program = self.plan.unrolled[name]
        self.passes = self.plan.programs[name]
        self._index = 0
        self._regions: dict[str, list[Region]] = {}
        self._entered: dict[int, list[Region]] = {}
        """Regions by matrix; and by the pass that first uses them."""
        for region in self.plan.regions[name]:
            self._regions.setdefault(region.matrix, []).append(region)
            self._entered.setdefault(region.first, []).append(region)
        self._arrivals: list[list[int]] = [[] for _ in self.program.steps]
        self._filled: list[list[int]] = [[] for _ in self.program.steps]
        for span in self.program.uses.spans:
            if span.use.reads:
                self._arrivals[span.first].append(span.block)
            if span.use.writes:
                self._filled[span.first].append(span.block)

    def warm_up(self) -> None:
        """Find the blocks that the previous program has left in their frames; others are read."""
        self.workspace.begin(self.program, self.plan.staged.get(self.name))

    def enter(self, index: int) -> None:
        """Begin pass ``index``: move blocks out of the way of its regions."""
        self._index = index
        self._move(index)
        for region in self._entered.get(index, ()):
            self.workspace.clear(region.frame, region.count)
        self.workspace.entered()

    def finish(self) -> None:
        """After the last pass, move carried blocks to where the next program expects them."""
        self._move(len(self.passes))
        self.workspace.finish(self.program)

    def begin(self, step: int) -> None:
        """Start the reads due before ``step``, then wait for those it needs and for the frames it fills.

        Nothing is incomplete at this point, so Ctrl-C takes effect first.
        """
        stop_if_asked()
        if self.runtime.exchange is not None:
            self.runtime.exchange.ranks.check()
        workspace = self.workspace
        workspace.vacate(step - self.passes[self._index].steps_at_once)
        for block, frame, load in self.program.acquire[step]:
            workspace.acquire(block, frame, load=load)
        if self.recorder is not None:
            self.recorder.begin(step, self._index)
        for block in self._arrivals[step]:
            workspace.await_read(block)
        for block in self._filled[step]:
            workspace.await_frame(block)

    def end(self, step: int) -> None:
        """Start the writes due after ``step``."""
        for block in self.program.store[step]:
            self.workspace.write(block, step)
        if self.recorder is not None:
            self.recorder.end(step)

    def region(self, name: str, index: int) -> Region:
        """Return the region of matrix ``name`` during pass ``index``."""
        return next(region for region in self._regions[name] if region.first <= index <= region.last)

    def whole(self, name: str, index: int) -> Tensor | None:
        """Return a matrix that is in memory as a whole; None if it is not."""
        if name not in self.plan.matrices or not self.plan.matrices[name].whole:
            return None
        return self.whole_rows(name, index)[:, : self.plan.matrices[name].grid.columns]

    def whole_rows(self, name: str, index: int) -> Tensor:
        """Return such a matrix with its spare columns."""
        matrix, planned = self.runtime.matrices[name], self.plan.matrices[name]
        memory = self.workspace.region(self.region(name, index).frame, planned.region_nbytes)
        return as_matrix(memory, matrix.region_dtype, planned.grid.rows, planned.grid.columns + planned.spare_columns)

    def sums(self, pull: Pull | None, index: int) -> Sums | SumsWriter | None:
        """Return the matrix that pass ``index`` scatters to, if its pull scatters."""
        if pull is None or pull.scattered is None:
            return None
        file = self.runtime.partial_sums.get(pull.scattered)
        if file is not None:
            return SumsWriter(file, self.streaming_memory(pull.scattered, index, file.plan.writing_nbytes))
        whole = self.whole(pull.scattered, index)
        assert whole is not None, "what is scattered to is in memory whole, or spilled"
        return Sums(whole, self.runtime.exchange)

    def summed_rows(self, name: str, item: RowPass) -> SummedRows | None:
        """Return the rows of matrix ``name``, which a pass loads, if it is the spilled sums of a scatter."""
        file = self.runtime.partial_sums.get(name)
        if file is None:
            return None
        memory = self.streaming_memory(name, item.index, file.plan.reading_nbytes)
        return SummedRows(file, memory, reverse=item.stage.reverse)

    def bucketed_rows(self, item: RowPass) -> RowsReader | None:
        """Return the rows that a pass gathers, if they have been shuffled to the buckets of its rows."""
        if item.bucketed is None:
            return None
        file = self.runtime.bucketed_rows[item.bucketed]
        memory = self.streaming_memory(item.bucketed, item.index, file.plan.reading_nbytes)
        return RowsReader(file, memory, targets=item.rows, reverse=item.stage.reverse)

    def streaming_memory(self, name: str, index: int, nbytes: int) -> Tensor:
        """Return the memory of pass ``index`` for a matrix without blocks."""
        return self.workspace.region(self.region(name, index).frame, nbytes)

    def written_rows(self, name: str, index: int) -> int:
        """Return how many rows of matrix ``name``, which pass ``index`` pulls, this program has written.

        A program that computes fewer rows than another one leaves the last ones undefined; nothing may be pulled from
        them.
        """
        return max(item.rows for item in self.passes[:index] if name in item.stores)

    def _move(self, index: int) -> None:
        for block, _, target in self.program.moves.get(index, ()):
            self.workspace.move(block, target)


class PassRun(ABC):
    """One execution of a pass. A *sweep* over the rows is the whole pass, or the part for one slab.

    Its tasks give tiles' results: what they scatter is added to its matrix, then the program's run reduces them.
    """

    def __init__(self, run: ProgramRun, item: Pass) -> None:
        self.program = run
        self.runtime = run.runtime
        self.workspace = run.workspace
        self._first, self._stop = run.program.bounds[item.index]
        self._at_once, self._reverse = item.steps_at_once, item.reverse
        run.sums_over_rows.begin_pass(item.space)
        self._sums = run.sums(item.pull, item.index)

    def begins_sweep(self, number: int) -> bool:
        """Return whether step ``number``, which is not the first, is the first of a sweep."""
        steps = self.program.program.steps
        return steps[number].slab != steps[number - 1].slab

    @abstractmethod
    def begin_sweep(self, step: Step) -> None:
        """Begin a sweep with ``step``, after all tasks of the sweep before have been computed."""

    @abstractmethod
    def open(self, number: int, step: Step) -> Iterable[Any]:
        """Return the tasks of a step, in order; the blocks it needs are in memory."""

    @abstractmethod
    def compute(self, task: Any) -> Any:
        """Compute one task, on any thread."""

    def reduce(self, result: Any) -> None:
        """Reduce what ``compute`` returned, in the order of the tasks; None: nothing to add."""
        if result is None:
            return
        found = result.scattered
        if self._sums is not None and found is not None:
            for rows_S, values_SC in found.others:
                self._sums.add(rows_S, values_SC)
        result.scattered = None
        self.program.sums_over_rows.reduce(result)

    def finish(self) -> None:
        """Finish the pass after all results have been reduced."""
        if self._sums is not None:
            self._sums.finish()
        self.program.sums_over_rows.end_pass(reverse=self._reverse)

    def run(self) -> None:
        """Run all steps. While a step is computed, the next one's tasks are queued, unless the pass has one step at a
        time; by then the step before has ended."""
        program, steps, first, stop = self.program, self.program.program.steps, self._first, self._stop
        (handed_out, took_s), begun_s = self.runtime.workers.way((program.name, first)), perf_counter()
        handed_out |= program.plan.has_tiers  # on a device a tile ends when it is launched
        with OrderedPipeline(self.runtime.workers, self.compute, self.reduce, handed_out=handed_out) as pipeline:
            for number in range(first, stop):
                step = steps[number]
                if number == first or self.begins_sweep(number):
                    pipeline.drain()
                    self.begin_sweep(step)
                if (ended := number - self._at_once) >= first:
                    pipeline.finish(ended)
                    program.end(ended)
                program.begin(number)
                for task in self.open(number, step):
                    pipeline.put(number, task)
                self.workspace.launched(number)
            pipeline.drain()
        self.finish()
        took_s.append(perf_counter() - begun_s)
        for number in range(max(first, stop - self._at_once), stop):
            program.end(number)
