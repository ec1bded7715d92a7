# SPDX-License-Identifier: Apache-2.0
"""The planner's one problem: how to run a training epoch, so that it takes the least time within the budgets.

*State.* What an intermediate's fate follows from: a set of forward stages that the backward pass recomputes, and a
``Choice``: rows of a step, the slabs and buffers of every gathered matrix, which sums are spilled, which sources are
gathered by buckets. Of the other three fates (retained on the GPU, offloaded to the host, offloaded to the SSD) nothing
is chosen: for given frames, Belady's rule (``ooc.plan.program.replacement``) says best which block stays where.

*Choices.* Single steps lead from a state to others (``ooc.plan.moves``); ``ooc.plan.planner`` goes by them.

*Cost.* Forecast seconds of the epoch (``ooc.plan.forecast``), what it waits for other processes included, behind bytes
written to the SSD beyond a limit, if there is one. On a device with memory of its own, among the best of these:
simulated seconds (``ooc.plan.simulate``), of states that lead to others by steps of single sources.

*Constraint.* Every pass fits the arenas that the budgets leave (``ooc.plan.program.capacity``).

*Bound.* An epoch takes no less than it computes with all that is gathered whole in memory. So recomputing a set of
stages pays at most if that adds less to the bound than the epoch waits for data of its own without.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from ooc.plan.forecast import Traffic, epoch_seconds, forecast_traffic, pass_seconds, seconds_of_computing
from ooc.plan.hardware import Hardware
from ooc.plan.layout.layout import Choice, Layout, LayoutKey, SlabChoice, lay_out, layout_key, pulled_sources
from ooc.plan.program.capacity import Capacity, ExchangeForm, Limits
from ooc.plan.program.received import exposed_s, received_of
from ooc.plan.workload import Stage, Workload

Recomputed = frozenset[int]
"""Forward stages, by number, that the backward pass runs again."""
Variants = Callable[[Recomputed], Workload]
"""The workload in which these stages are recomputed."""
Score = tuple[float, float]
"""Bytes written that should not be, and seconds: smaller is better."""
WHOLE = SlabChoice(0, 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state that fits, but for the recomputed stages, which are the problem's."""

    choice: Choice
    layout: Layout
    score: Score

    @property
    def seconds(self) -> float:
        return self.score[1]


class Problem:
    """``workload`` within ``limits`` on ``hardware``. What is made small is time, behind bytes beyond ``most_written``
    (None: any number) that an epoch writes to the SSD. What choices lead to is remembered."""

    def __init__(
        self, workload: Workload, limits: Limits, hardware: Hardware, *, most_written: int | None = None
    ) -> None:
        self.workload = workload
        self.limits = limits
        self.hardware = hardware
        self.most_written = most_written
        self.capacity = Capacity(workload, limits, hardware)
        self.sources = pulled_sources(workload)
        self.received_bytes_per_s = limits.received_bytes_per_s(hardware)
        self._known: dict[int, Candidate | None] = {}
        """By ``id`` of the layout, of which there is one for all choices that come to it."""
        self._layouts: dict[LayoutKey, Layout] = {}
        self._here_s: dict[int, float] = {}
        """By ``id`` of the layout: seconds of an epoch, but for what is waited for other processes."""
        self._least_s: dict[int, float] = {}
        """By ``id`` of the layout: seconds that an epoch takes if nothing is moved but slabs."""

    def layout(self, choice: Choice) -> Layout:
        """What ``choice`` leads to, whether it fits or not. Of widths in whole heads, and of small graphs' frames, many
        come to the same."""
        choice = self._as_asked(choice)
        same = layout_key(choice, self.workload)
        if same not in self._layouts:
            found = lay_out(self.workload, choice)
            like = self._layouts.get(same._replace(lean=not same.lean))
            self._layouts[same] = like if like == found else found
        return self._layouts[same]

    def candidate(self, choice: Choice, below_s: float = inf) -> Candidate | None:
        """What ``choice`` leads to; None where that does not fit, or an epoch takes ``below_s`` or longer if time is
        what is made small and nothing is moved: that is known before anything is unrolled."""
        choice = self._as_asked(choice)
        layout = self.layout(choice)
        if id(layout) not in self._known:
            if self.most_written is None and below_s < inf and self._moving_nothing_s(layout) >= below_s:
                return None
            fits = self.capacity.fits(layout)
            self._known[id(layout)] = Candidate(choice, layout, self.score(layout)) if fits else None
        known = self._known[id(layout)]
        return None if known is None else replace(known, choice=choice)

    def _moving_nothing_s(self, layout: Layout) -> float:
        """The least that an epoch can be forecast to take."""
        if id(layout) not in self._least_s:
            passes, nothing = layout.programs["train"], Traffic(0, 0, 0, 0)
            self._least_s[id(layout)] = sum(
                pass_seconds(item, layout, self.workload, self.hardware, nothing) for item in passes
            )
        return self._least_s[id(layout)]

    def _as_asked(self, choice: Choice) -> Choice:
        """The same with columns sharded wherever they can be, if the user wants that."""
        if self.limits.exchange is not ExchangeForm.COLUMNS:
            return choice
        sharded = {
            name: replace(cut, sharded=True) for name, cut in choice.cuts.items() if name in self.workload.shardable
        }
        return replace(choice, cuts=choice.cuts | sharded)

    def candidates(self) -> list[Candidate]:
        """All that fitted so far."""
        return [found for found in self._known.values() if found is not None]

    def score(self, layout: Layout) -> Score:
        """The cost."""
        workload, passes = self.workload, layout.programs["train"]
        frames = self.capacity.frames(layout)
        host_frames = self.capacity.host_frames(layout)
        traffic = forecast_traffic(workload, layout, frames=frames, host_frames=host_frames)
        taken_s = [
            pass_seconds(item, layout, workload, self.hardware, moved)
            for item, moved in zip(passes, traffic, strict=True)
        ]
        seconds = epoch_seconds(taken_s, traffic, layout, self.hardware, host_frames=host_frames)
        self._here_s[id(layout)] = seconds
        if workload.share is not None:  # what they wait for other processes
            received = received_of(passes, layout.matrices, workload.topologies, workload.share)
            seconds += sum(
                exposed_s(one, s, self.received_bytes_per_s) for one, s in zip(received, taken_s, strict=True)
            )
        written = sum(moved.ssd_write_bytes for moved in traffic) + workload.state_bytes
        return 0 if self.most_written is None else max(0, written - self.most_written), seconds

    def waiting_s(self, layout: Layout) -> float:
        """Seconds that an epoch waits for what is moved here, of a layout that has been forecast."""
        return self._here_s[id(layout)] - self.computing_s(layout)

    def like(self, choice: Choice) -> Candidate | None:
        """What a choice for another set of recomputed stages leads to; what that does not gather is held as what has as
        many columns."""
        return self.candidate(self.held_like(choice))

    def held_like(self, choice: Choice) -> Choice:
        """That choice."""
        by_columns = {self.sources.get(name): cut for name, cut in choice.cuts.items()}
        cuts = {name: choice.cuts.get(name, by_columns.get(columns, WHOLE)) for name, columns in self.sources.items()}
        return replace(choice, cuts=cuts)

    def shape_of(self, stage: int) -> Hashable:
        """The same for stages of ``kept_bytes`` that keep as much, and that take as much to be recomputed alone."""
        return self._shapes[stage]

    @cached_property
    def _shapes(self) -> dict[int, Hashable]:
        matrices, stages = self.workload.matrices, self.workload.programs["train"]

        def shape(stage: Stage) -> Hashable:
            loads, stores = (tuple(matrices[name].columns for name in names) for names in (stage.loads, stage.stores))
            pull = stage.pull and (matrices[stage.pull.source].columns, stage.pull.direction)
            return loads, stores, pull, stage.rows, stage.space, stage.multiplies_per_row, stage.streamed_bytes_per_row

        shapes, found = [None, *map(shape, stages)], dict[int, Hashable]()
        for kept in self.workload.kept:
            at = next((at for at, one in enumerate(stages) if kept.matrices[0] in one.writes), -1)
            found[kept.stage] = shapes[at], shapes[at + 1]  # what is gathered comes of the stage before
        return found

    def computing_s(self, layout: Layout, program: str = "train") -> float:
        """Seconds that an epoch computes."""
        passes = layout.programs[program]
        return sum(seconds_of_computing(item, layout, self.workload, self.hardware) for item in passes)

    def bound_s(self, step_rows: int) -> float:
        """No epoch with such steps takes less."""
        return self.computing_s(lay_out(self.workload, Choice(step_rows, dict.fromkeys(self.sources, WHOLE))))

    @cached_property
    def kept_bytes(self) -> dict[int, int]:
        """By stage that could be recomputed: bytes of what it keeps for the backward pass. None of a prediction's: it
        has no backward pass and keeps nothing."""
        matrices = self.workload.matrices
        return {
            kept.stage: sum(matrices[name].nbytes for name in kept.matrices)
            for kept in self.workload.kept
            if kept.recomputable and matrices.keys() >= {*kept.matrices}
        }
