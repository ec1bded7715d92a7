# SPDX-License-Identifier: Apache-2.0
"""The planner's optimisation problem: run a training epoch in the least time that the budgets allow.

*State.* The set of forward stages that the backward pass recomputes, and a ``Choice``: rows of a step, slabs and
buffers of every gathered matrix, which sums are spilled, which sources are gathered by buckets. The other three fates
of an intermediate (retained on the GPU, offloaded to the host, offloaded to the SSD) are not chosen: for a given number
of frames, Belady's rule (``ooc.plan.program.replacement``) decides best which block stays where.

*Choices.* Moves lead from a state to its neighbours: those of ``ooc.plan.moves`` change the ``Choice``; others
recompute one stage more or one less. ``ooc.plan.solver`` follows them.

*Cost.* The forecast seconds of an epoch (``ooc.plan.forecast``), including the time it waits for other processes. If
there is a limit on bytes written to the SSD, the bytes beyond it count first. On a device with memory of its own, the
best candidates are also compared by simulated seconds (``ooc.plan.simulate``).

*Constraint.* Every pass fits the arenas that the budgets leave (``ooc.plan.program.capacity``).

*Bound.* No epoch takes less time than it computes with every gathered matrix whole in memory. So recomputing some
stages can only pay if it adds less to this bound than the epoch would otherwise wait for data.
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
from ooc.plan.simulate.timeline import merge_timelines
from ooc.plan.workload import Stage, Workload

Recomputed = frozenset[int]
"""Forward stages, by number, that the backward pass runs again."""
NOTHING: Recomputed = frozenset()
Variants = Callable[[Recomputed], Workload]
"""A function that gives the workload in which the backward pass recomputes these stages."""
Score = tuple[float, float]
"""Bytes written beyond the limit, then seconds; smaller is better."""
WHOLE = SlabChoice(0, 0)


@dataclass(eq=False)
class Problem:
    """The search for the fastest way to run ``workload`` on ``hardware`` within ``limits``; in it, the backward pass
    recomputes the stages ``recomputed``. It minimises time, but bytes that an epoch writes to the SSD beyond
    ``most_written`` (None: no limit) count first. ``variants`` gives the workloads in which other stages are
    recomputed. ``began``: the starting points before this number are known not to fit, whatever is recomputed or
    written. Layouts and costs are remembered."""

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
        """What states consist of, by ``id`` of their layout; choices that come to the same layout share one object."""
        self._layouts: dict[Hashable, Layout] = {}
        self._least_s: dict[int, float] = {}
        """Seconds of an epoch in which nothing but slabs is moved, by ``id`` of the layout."""

    # ---- state ---------------------------------------------------------------------------------------------

    def recomputing(self, stages: Recomputed) -> "Problem":
        """Return the same problem with the forward stages ``stages`` recomputed."""
        assert self.variants is not None, "it is known how stages are recomputed"
        return replace(self, workload=self.variants(stages), recomputed=stages, most_written=None)

    def state(self, choice: Choice, below_s: float = inf) -> "State | None":
        """Return the state that ``choice`` leads to, or None if it does not fit. Also None if time is minimised and an
        epoch would take at least ``below_s`` seconds even if nothing were moved, which is known without unrolling the
        program."""
        choice = self._apply_sharding_option(choice)
        layout = self.layout(choice)
        if id(layout) not in self._known:
            if self.most_written is None and below_s < inf and self._compute_only_seconds(layout) >= below_s:
                return None
            fits = self.capacity.fits(layout)  # the constraint
            self._known[id(layout)] = (choice, layout, *self.cost(layout)) if fits else None
        known = self._known[id(layout)]
        return None if known is None else State(self, choice, *known[1:])

    def adapt_choice(self, choice: Choice) -> Choice:
        """Return a choice for another set of recomputed stages that resembles ``choice``, one of this problem: a source
        that is not gathered here is held like one with as many columns."""
        by_columns = {self.sources.get(name): cut for name, cut in choice.cuts.items()}
        cuts = {name: choice.cuts.get(name, by_columns.get(columns, WHOLE)) for name, columns in self.sources.items()}
        return replace(choice, cuts=cuts)

    # ---- choices, beside those of ooc.plan.moves -----------------------------------------------------------

    def neighbours(self, centre: Recomputed, stages: Sequence[int]) -> Iterator[Recomputed]:
        """Yield the sets of recomputed stages that have one of ``stages`` more than ``centre``, or one less. Among
        stages that are alike, with neighbours that are alike, only one is tried: the first is added, since what it
        keeps waits longest, or the last is removed."""
        alike: dict[Hashable, int] = {}
        for before, stage, after in zip([None, *stages], stages, [*stages[1:], None], strict=False):
            key = self.shapes[stage], *(one in centre for one in (before, stage, after))
            if stage in centre or key not in alike:
                alike[key] = stage
        return (centre ^ {stage} for stage in alike.values())

    @cached_property
    def kept_bytes(self) -> dict[int, int]:
        """The bytes that each recomputable stage keeps for the backward pass, by stage. Empty for prediction, which has
        no backward pass."""
        matrices = self.workload.matrices
        return {
            kept.stage: sum(matrices[name].nbytes for name in kept.matrices)
            for kept in self.workload.kept
            if kept.recomputable and matrices.keys() >= {*kept.matrices}
        }

    @cached_property
    def shapes(self) -> dict[int, Hashable]:
        """A key for each stage in ``kept_bytes``: equal for stages that keep as many bytes and take as long to
        recompute by themselves."""
        matrices, stages = self.workload.matrices, self.workload.programs[EPOCH]

        def shape(stage: Stage) -> Hashable:
            loads, stores = (tuple(matrices[name].columns for name in names) for names in (stage.loads, stage.stores))
            pull = stage.pull and (matrices[stage.pull.source].columns, stage.pull.direction)
            return loads, stores, pull, stage.rows, stage.space, stage.multiplies_per_row, stage.streamed_bytes_per_row

        shapes, found = [None, *map(shape, stages)], dict[int, Hashable]()
        for kept in self.workload.kept:
            at = next((at for at, one in enumerate(stages) if kept.matrices[0] in one.writes), -1)
            found[kept.stage] = shapes[at], shapes[at + 1]  # gathered rows come from the stage before
        return found

    # ---- cost ----------------------------------------------------------------------------------------------

    def cost(self, layout: Layout) -> tuple[Score, float]:
        """Return the cost of ``layout``, and the seconds of an epoch without the time it waits for other processes."""
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
        """Return the seconds an epoch spends computing, without any data movement."""
        passes = layout.programs[program]
        return sum(seconds_of_computing(item, layout, self.workload, self.hardware) for item in passes)

    # ---- bound ---------------------------------------------------------------------------------------------

    def bound_s(self, step_rows: int) -> float:
        """Return a lower bound for the seconds of an epoch with steps of ``step_rows`` rows."""
        return self.computing_s(lay_out(self.workload, Choice(step_rows, dict.fromkeys(self.sources, WHOLE))))

    def _compute_only_seconds(self, layout: Layout) -> float:
        """Return the least seconds that an epoch can be forecast to take with ``layout``."""
        if id(layout) not in self._least_s:
            passes, nothing = layout.programs[EPOCH], Traffic(0, 0, 0, 0)
            self._least_s[id(layout)] = sum(
                pass_seconds(item, layout, self.workload, self.hardware, nothing) for item in passes
            )
        return self._least_s[id(layout)]

    # ---- what is remembered --------------------------------------------------------------------------------

    def layout(self, choice: Choice) -> Layout:
        """Return the layout of ``choice``, whether it fits or not. Many choices come to the same layout: widths are
        rounded to whole attention heads, and small graphs fill few frames."""
        choice = self._apply_sharding_option(choice)
        same = layout_key(choice, self.workload)
        if (same, choice.lean) not in self._layouts:
            found = lay_out(self.workload, choice)
            like = self._layouts.get((same, not choice.lean))
            self._layouts[same, choice.lean] = like if like == found else found
        return self._layouts[same, choice.lean]

    def states(self) -> "list[State]":
        """Return all states found so far that fit."""
        return [State(self, *known) for known in self._known.values() if known is not None]

    def _apply_sharding_option(self, choice: Choice) -> Choice:
        """Return ``choice`` with columns sharded wherever they can be, if the user has asked for that."""
        if self.limits.exchange is not ExchangeForm.COLUMNS:
            return choice
        sharded = {
            name: replace(cut, sharded=True) for name, cut in choice.cuts.items() if name in self.workload.shardable
        }
        return replace(choice, cuts=choice.cuts | sharded)


@dataclass(frozen=True)
class State:
    """A choice that fits, with its layout and cost. ``here_s``: seconds of an epoch without the time it waits for other
    processes. The ``plan`` is unrolled when it is first needed."""

    problem: Problem
    choice: Choice
    layout: Layout
    score: Score
    here_s: float

    @property
    def seconds(self) -> float:
        """The forecast seconds of an epoch."""
        return self.score[1]

    @cached_property
    def waiting_s(self) -> float:
        """The seconds that an epoch waits for its own data. The time it waits for other processes is left out, since it
        does not depend on what is kept."""
        return self.here_s - self.problem.computing_s(self.layout)

    @cached_property
    def plan(self) -> Plan:
        return build_plan(self.layout, self.problem.capacity)

    @cached_property
    def simulated_s(self) -> float:
        """The simulated seconds of an epoch, including the time it waits for rows of other processes."""
        epoch, problem = build_plan(self.layout, self.problem.capacity, epoch_only=True), self.problem
        alone = simulate(epoch, problem.workload, problem.hardware)
        return merge_timelines([alone], [epoch.received(EPOCH)], problem.received_bytes_per_s)[0].epoch_s
