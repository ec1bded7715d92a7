# SPDX-License-Identifier: Apache-2.0
"""The planner's one problem: how to run a training epoch, so that it takes the least time within the budgets.

*State.* What an intermediate's fate follows from: a set of forward stages that the backward pass recomputes, and a
``Choice``: rows of a step, the slabs and buffers of every gathered matrix, which sums are spilled, which sources are
gathered by buckets. Of the other three fates (retained on the GPU, offloaded to the host, offloaded to the SSD) nothing
is chosen: for given frames, Belady's rule (``ooc.plan.program.replacement``) says best which block stays where.

*Choices.* Single steps lead from a state to others: of choices those of ``ooc.plan.moves``, of sets of recomputed
stages one stage more or one less. ``ooc.plan.solver`` goes by them.

*Cost.* Forecast seconds of the epoch (``ooc.plan.forecast``), what it waits for other processes included, behind bytes
written to the SSD beyond a limit, if there is one. On a device with memory of its own, among the best of these:
simulated seconds (``ooc.plan.simulate``), of states that lead to others by steps of single sources.

*Constraint.* Every pass fits the arenas that the budgets leave (``ooc.plan.program.capacity``).

*Bound.* An epoch takes no less than it computes with all that is gathered whole in memory. So recomputing a set of
stages pays at most if that adds less to the bound than the epoch waits for data of its own without.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from ooc.plan.forecast import Traffic, epoch_seconds, forecast_traffic, pass_seconds, seconds_of_computing
from ooc.plan.hardware import Hardware
from ooc.plan.layout.layout import Choice, Layout, SlabChoice, lay_out, layout_key, pulled_sources
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import Capacity, ExchangeForm, Limits
from ooc.plan.program.plan import Plan
from ooc.plan.program.program import EPOCH
from ooc.plan.program.received import Receiver, exposed_s
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import together
from ooc.plan.workload import Stage, Workload

Recomputed = frozenset[int]
"""Forward stages, by number, that the backward pass runs again."""
NOTHING: Recomputed = frozenset()
Variants = Callable[[Recomputed], Workload]
"""The workload in which these stages are recomputed."""
Score = tuple[float, float]
"""Bytes written that should not be, and seconds: smaller is better."""
WHOLE = SlabChoice(0, 0)


@dataclass(eq=False)
class Problem:
    """``workload``, in which the stages ``recomputed`` are, within ``limits`` on ``hardware``. What is made small is
    time, behind bytes beyond ``most_written`` (None: any number) that an epoch writes to the SSD. ``variants``: how
    other stages are recomputed. ``began``: ways to begin the search before that one are known not to fit, whatever is
    recomputed or written. What choices lead to is remembered."""

    workload: Workload
    limits: Limits
    hardware: Hardware
    most_written: int | None = None
    variants: Variants | None = None
    recomputed: Recomputed = NOTHING
    began: int = 0

    def __post_init__(self) -> None:
        self.on_device = self.hardware.has_device_memory
        self.capacity = Capacity(self.workload, self.limits, self.hardware)
        self.sources = pulled_sources(self.workload)
        self.received_bytes_per_s = self.limits.received_bytes_per_s(self.hardware)
        self._known: dict[int, tuple[Choice, Layout, Score, float] | None] = {}
        """What states are made of, by ``id`` of the layout, of which there is one for all choices that come to it."""
        self._layouts: dict[Hashable, Layout] = {}
        self._least_s: dict[int, float] = {}
        """By ``id`` of the layout: seconds that an epoch takes if nothing is moved but slabs."""

    # ---- state ---------------------------------------------------------------------------------------------

    def recomputing(self, stages: Recomputed) -> "Problem":
        """The same, where these stages are recomputed."""
        assert self.variants is not None, "it is known how stages are recomputed"
        return replace(self, workload=self.variants(stages), recomputed=stages, most_written=None)

    def state(self, choice: Choice, below_s: float = inf) -> "State | None":
        """What ``choice`` leads to; None where that does not fit, or an epoch takes ``below_s`` or longer if time is
        what is made small and nothing is moved: that is known before anything is unrolled."""
        choice = self._as_asked(choice)
        layout = self.layout(choice)
        if id(layout) not in self._known:
            if self.most_written is None and below_s < inf and self._moving_nothing_s(layout) >= below_s:
                return None
            fits = self.capacity.fits(layout)  # the constraint
            self._known[id(layout)] = (choice, layout, *self.cost(layout)) if fits else None
        known = self._known[id(layout)]
        return None if known is None else State(self, choice, *known[1:])

    def held_like(self, choice: Choice) -> Choice:
        """A choice for another set of recomputed stages as one of this: what that does not gather is held as what has
        as many columns."""
        by_columns = {self.sources.get(name): cut for name, cut in choice.cuts.items()}
        cuts = {name: choice.cuts.get(name, by_columns.get(columns, WHOLE)) for name, columns in self.sources.items()}
        return replace(choice, cuts=cuts)

    # ---- choices, beside those of ooc.plan.moves -----------------------------------------------------------

    def neighbours(self, centre: Recomputed, stages: Sequence[int]) -> Iterator[Recomputed]:
        """The sets of recomputed stages with one of ``stages`` more or less. Of those that are alike, as those beside
        them are, one: the first one more, as what it keeps waits longest, or the last one less."""
        alike: dict[Hashable, int] = {}
        for before, stage, after in zip([None, *stages], stages, [*stages[1:], None], strict=False):
            key = self.shapes[stage], *(one in centre for one in (before, stage, after))
            if stage in centre or key not in alike:
                alike[key] = stage
        return (centre ^ {stage} for stage in alike.values())

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

    @cached_property
    def shapes(self) -> dict[int, Hashable]:
        """The same for stages of ``kept_bytes`` that keep as much, and that take as much to be recomputed alone."""
        matrices, stages = self.workload.matrices, self.workload.programs[EPOCH]

        def shape(stage: Stage) -> Hashable:
            loads, stores = (tuple(matrices[name].columns for name in names) for names in (stage.loads, stage.stores))
            pull = stage.pull and (matrices[stage.pull.source].columns, stage.pull.direction)
            return loads, stores, pull, stage.rows, stage.space, stage.multiplies_per_row, stage.streamed_bytes_per_row

        shapes, found = [None, *map(shape, stages)], dict[int, Hashable]()
        for kept in self.workload.kept:
            at = next((at for at, one in enumerate(stages) if kept.matrices[0] in one.writes), -1)
            found[kept.stage] = shapes[at], shapes[at + 1]  # what is gathered comes of the stage before
        return found

    # ---- cost ----------------------------------------------------------------------------------------------

    def cost(self, layout: Layout) -> tuple[Score, float]:
        """The cost; and seconds of an epoch, but for what is waited for other processes."""
        workload, passes = self.workload, layout.programs[EPOCH]
        frames = self.capacity.frames(layout)
        host_frames = self.capacity.host_frames(layout)
        traffic = forecast_traffic(workload, layout, frames=frames, host_frames=host_frames)
        taken_s = [
            pass_seconds(item, layout, workload, self.hardware, moved)
            for item, moved in zip(passes, traffic, strict=True)
        ]
        here_s = seconds = epoch_seconds(taken_s, traffic, layout, self.hardware, host_frames=host_frames)
        if workload.share is not None:
            received = Receiver(passes, layout.matrices, workload.topologies, workload.share).received()
            seconds += sum(
                exposed_s(one, s, self.received_bytes_per_s) for one, s in zip(received, taken_s, strict=True)
            )
        written = sum(moved.ssd_write_bytes for moved in traffic) + workload.state_bytes
        return (0 if self.most_written is None else max(0, written - self.most_written), seconds), here_s

    def computing_s(self, layout: Layout, program: str = EPOCH) -> float:
        """Seconds that an epoch computes."""
        passes = layout.programs[program]
        return sum(seconds_of_computing(item, layout, self.workload, self.hardware) for item in passes)

    # ---- bound ---------------------------------------------------------------------------------------------

    def bound_s(self, step_rows: int) -> float:
        """No epoch with such steps takes less."""
        return self.computing_s(lay_out(self.workload, Choice(step_rows, dict.fromkeys(self.sources, WHOLE))))

    def _moving_nothing_s(self, layout: Layout) -> float:
        """The least that an epoch can be forecast to take."""
        if id(layout) not in self._least_s:
            passes, nothing = layout.programs[EPOCH], Traffic(0, 0, 0, 0)
            self._least_s[id(layout)] = sum(
                pass_seconds(item, layout, self.workload, self.hardware, nothing) for item in passes
            )
        return self._least_s[id(layout)]

    # ---- what is remembered --------------------------------------------------------------------------------

    def layout(self, choice: Choice) -> Layout:
        """What ``choice`` leads to, whether it fits or not. Of widths in whole heads, and of small graphs' frames, many
        come to the same."""
        choice = self._as_asked(choice)
        same = layout_key(choice, self.workload)
        if (same, choice.lean) not in self._layouts:
            found = lay_out(self.workload, choice)
            like = self._layouts.get((same, not choice.lean))
            self._layouts[same, choice.lean] = like if like == found else found
        return self._layouts[same, choice.lean]

    def states(self) -> "list[State]":
        """All that fitted so far."""
        return [State(self, *known) for known in self._known.values() if known is not None]

    def _as_asked(self, choice: Choice) -> Choice:
        """The same with columns sharded wherever they can be, if the user wants that."""
        if self.limits.exchange is not ExchangeForm.COLUMNS:
            return choice
        sharded = {
            name: replace(cut, sharded=True) for name, cut in choice.cuts.items() if name in self.workload.shardable
        }
        return replace(choice, cuts=choice.cuts | sharded)


@dataclass(frozen=True)
class State:
    """A state of ``problem`` that fits: what ``choice`` leads to, and what that costs. ``here_s``: seconds of an epoch,
    but for what is waited for other processes. ``plan`` is unrolled when it is first asked for."""

    problem: Problem
    choice: Choice
    layout: Layout
    score: Score
    here_s: float

    @property
    def seconds(self) -> float:
        """Forecast, of an epoch."""
        return self.score[1]

    @cached_property
    def waiting_s(self) -> float:
        """Seconds that an epoch waits for data of its own; for other processes it waits as long whatever is kept."""
        return self.here_s - self.problem.computing_s(self.layout)

    @cached_property
    def plan(self) -> Plan:
        return build_plan(self.layout, self.problem.capacity)

    @cached_property
    def simulated_s(self) -> float:
        """Seconds of an epoch by the simulator, with what is waited for the rows of other processes."""
        epoch, problem = build_plan(self.layout, self.problem.capacity, epoch_only=True), self.problem
        alone = simulate(epoch, problem.workload, problem.hardware)
        return together([alone], [epoch.received(EPOCH)], problem.received_bytes_per_s)[0].epoch_s
