# SPDX-License-Identifier: Apache-2.0
"""One run of a program: what happens between the steps of its passes, whatever memory they work in."""

from torch import Tensor

from ooc.engine.operands import Sums
from ooc.engine.residency import as_matrix
from ooc.engine.runtime import Runtime
from ooc.engine.shuffle import RowsReader, SummedRows, SumsWriter
from ooc.interruption import stop_if_asked
from ooc.plan.layout.layout import Region
from ooc.plan.layout.passes import ColumnPass, RowPass
from ooc.plan.program.program import Program
from ooc.plan.program.sequence import Use
from ooc.plan.workload import Kind, Pull


class ProgramRun:
    """One run of a program: what happens between the steps of its passes."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime = runtime
        self.workspace = runtime.workspace
        self.plan = runtime.plan
        self.name = name
        self.program: Program = self.plan.unrolled[name]
        self.passes = self.plan.programs[name]
        self._arrivals: list[list[int]] = [[] for _ in self.program.steps]
        self._filled: list[list[int]] = [[] for _ in self.program.steps]
        for span in self.program.uses.spans:
            if span.use is Use.READ:
                self._arrivals[span.first].append(span.block)
            elif span.use is Use.WRITE:
                self._filled[span.first].append(span.block)

    def warm_up(self) -> None:
        """Have in their frames the blocks that the epoch before has left there; the first epoch reads them."""
        self.workspace.begin(self.program, self.plan.staged.get(self.name))

    def enter(self, index: int) -> None:
        """Before pass ``index``: blocks move out of the way of regions."""
        self._move(index)
        for region in self.plan.regions[self.name]:
            if region.first == index:
                self.workspace.clear(region.frame, region.count)
        self.workspace.entered()

    def finish(self) -> None:
        """After the last pass: carried blocks lie where the next epoch looks for them."""
        self._move(len(self.passes))
        self.workspace.finish()

    def begin(self, step: int) -> None:
        """Send off the reads due before ``step``, then wait for those it needs and for the frames it fills. Nothing is
        half done here: Ctrl-C ends it first."""
        stop_if_asked()
        workspace = self.workspace
        workspace.vacate(step - 2)
        for block, frame, load in self.program.acquire[step]:
            workspace.acquire(block, frame, load=load)
        for block in self._arrivals[step]:
            workspace.await_read(block)
        for block in self._filled[step]:
            workspace.await_frame(block)

    def end(self, step: int) -> None:
        """Send off the writes due after ``step``."""
        for block in self.program.store[step]:
            self.workspace.write(block, step)

    def region(self, name: str, index: int) -> Region:
        """The region of matrix ``name`` during pass ``index``."""
        return next(r for r in self.plan.regions[self.name] if r.matrix == name and r.first <= index <= r.last)

    def is_scratch(self, name: str) -> bool:
        """Whether matrix ``name`` is written and read again within the program, in the spill's type."""
        return self.plan.matrices[name].matrix.kind is Kind.SCRATCH

    def whole(self, name: str, index: int) -> Tensor | None:
        """A matrix that is in memory whole; None if it is not."""
        if name not in self.plan.matrices or not self.plan.matrices[name].whole:
            return None
        matrix = self.runtime.matrices[name]
        memory = self.workspace.region(self.region(name, index).frame, self.plan.matrices[name].region_nbytes)
        return as_matrix(memory, matrix.region_dtype, matrix.grid.rows, matrix.grid.columns)

    def sums(self, pull: Pull | None, index: int) -> Sums | SumsWriter | None:
        """The matrix that pass ``index`` scatters to, if its pull does."""
        if pull is None or pull.scattered is None:
            return None
        file = self.runtime.partial_sums.get(pull.scattered)
        if file is not None:
            return SumsWriter(file, self.streaming_memory(pull.scattered, index, file.plan.writing_nbytes))
        whole = self.whole(pull.scattered, index)
        assert whole is not None, "what is scattered to is in memory whole, or spilled"
        return Sums(whole)

    def summed_rows(self, name: str, item: RowPass) -> SummedRows | None:
        """The rows of matrix ``name``, which a pass loads, if these are sums that have been spilled."""
        file = self.runtime.partial_sums.get(name)
        if file is None:
            return None
        memory = self.streaming_memory(name, item.index, file.plan.reading_nbytes)
        return SummedRows(file, memory, reverse=item.stage.reverse)

    def bucketed_rows(self, item: RowPass) -> RowsReader | None:
        """What a pass gathers from, if that has been shuffled to the buckets of its rows."""
        if item.bucketed is None:
            return None
        file = self.runtime.bucketed_rows[item.bucketed]
        memory = self.streaming_memory(item.bucketed, item.index, file.plan.reading_nbytes)
        return RowsReader(file, memory, targets=item.rows, reverse=item.stage.reverse)

    def streaming_memory(self, name: str, index: int, nbytes: int) -> Tensor:
        """What pass ``index`` has for a matrix without blocks."""
        return self.workspace.region(self.region(name, index).frame, nbytes)

    def written_rows(self, name: str, index: int) -> int:
        """How many rows of matrix ``name``, which pass ``index`` pulls, this program has written.

        A program that computes fewer rows than another one leaves the last ones as they are, and what lies in memory
        there is no number: of neighbours among them nothing is pulled.
        """
        return max(item.rows for item in self.passes[:index] if name in item.stores)

    def slab_buffers(self, item: ColumnPass) -> list[Tensor]:
        """The slab buffers of a column pass, each of the width of its first slab."""
        planned = self.plan.matrices[item.pull.source]
        grid = planned.grid
        region = self.region(item.pull.source, item.index)
        stride = planned.slab_stride()
        dtype = self.runtime.matrices[item.pull.source].region_dtype
        memory = self.workspace.region(region.frame, item.slab_buffers * stride)
        return [as_matrix(memory[k * stride :], dtype, grid.rows, grid.width(k)) for k in range(item.slab_buffers)]

    def _move(self, index: int) -> None:
        for block, _, target in self.program.moves.get(index, ()):
            self.workspace.move(block, target)
