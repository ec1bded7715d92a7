# SPDX-License-Identifier: Apache-2.0
"""Choose how pulled matrices are held, under the budgets; which blocks stay in memory follows from the sequence.

The search starts from the leanest arrangement (narrow slabs, one buffer each) and goes, source by source, to
whatever makes the forecast epoch shortest, until no change of one source helps; on a device with memory of its own, a
second time from slabs of one width. Every candidate is forecast from a coarse version of its program; the one chosen is
unrolled in full, so a plan that is returned fits. How long that takes goes by the number of blocks, so blocks are as
tall as memory allows: where it does not, the first slabs of what is pulled go by way of blocks like the others
(``Cut.direct``) before blocks become lower.

Where the device has memory of its own, its budget decides how matrices are cut: regions and the blocks of a pass must
lie there. What the host then holds follows from what the device asks for, so both budgets are in every forecast.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import product

from ooc.errors import BudgetError
from ooc.plan.budgets import Limits, Room, budget_of
from ooc.plan.computing import tasks_are_few
from ooc.plan.dealing import dealable, leaner_dealt
from ooc.plan.forecast import TIE, forecast_traffic, seconds_of
from ooc.plan.hardware import UNMEASURED, Hardware
from ooc.plan.layout import Choice, Cut, Layout, lay_out, lays_out_as, pulled_sources
from ooc.plan.matrices import streamed_in
from ooc.plan.occupancy import frames_needed
from ooc.plan.plan import Plan
from ooc.plan.schedule import build_plan
from ooc.plan.workload import Workload
from ooc.sizes import format_size

BLOCK_BYTES = 4 << 20
"""The largest block: large enough for the disk's full rate, small enough to keep several."""
BLOCK_BYTES_OF_TIERS = 64 << 20
"""The same where a device has memory of its own: a step there must be long beside what it costs to start one."""
FEW_STEPS = 4096
"""Steps of a row pass beyond which blocks grow with the matrix, whatever their size: planning takes time by the block,
and what it unrolls memory. Where nothing else fits, blocks are lower again."""
MOST_STEPS = 4 * FEW_STEPS
"""Steps of a row pass beyond which lower blocks are tried only where nothing fits without them: most of the memory is
then the narrowest slab's."""
LAST_STEPS = 4 * MOST_STEPS
"""Steps of a row pass beyond which no lower blocks are tried: a plan takes a minute to make. Where rows are wide and
slabs narrow, one block of every slab is a part of the memory that lower blocks make small."""
NARROW_COLUMNS = 8
"""Columns of the narrowest slab: 32 bytes of float32, half a cache line a gathered row."""
LINE_BYTES = 64
"""Rows of a slab that begin within a cache line fetch one more than they fill: 43 columns of float32 took a processor
a third longer to gather than 48. On a device with memory of its own that was not measured, and narrower slabs leave
more of its memory: there, widths are tried as they are, too."""
_LEANER_AND_LEANER = (
    (FEW_STEPS, True),
    (MOST_STEPS, True),
    (MOST_STEPS, False),
    (LAST_STEPS, True),
    (LAST_STEPS, False),
)
"""Where a search may begin: the most steps, and whether the first slabs are computed right into their buffers. The
first that fits is taken."""
_DEALT_SHARES = (16, 8, 4, 2)
"""What buckets that a source is dealt out to may take of memory: parts of the source. The more they take, the fewer
rows are dealt several times."""
_ROUNDS = 3
_CONTENDERS, _BEHIND, _ALIKE = 12, 1.25, 1e-3
"""How many arrangements beside the best are remembered, how much longer their forecasts may be, and by how much they
differ: those with equal ones mostly differ in what makes no difference."""
_WHOLE = Cut(0, 0)


class Goal(Enum):
    """What the search makes small."""

    SECONDS = "seconds"
    """The epoch's forecast time."""
    EXCESS_WRITES = "excess writes"
    """What is written to the SSD beyond its limit; then time."""
    WRITES = "writes"
    """What is written to the SSD; then time. Found without regard to the limit: the least limit that would do."""


Score = tuple[float, float]
"""Bytes written that should not be, and seconds: smaller is better."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    choice: Choice
    layout: Layout
    score: Score


@dataclass(frozen=True)
class Arrangement:
    """How a workload is to be run: ``layout``, of ``choice``; and the forecast seconds of an epoch. ``leanest``: what
    the search for it began with; ``contenders``: others that were forecast to be hardly slower, the fastest first;
    ``plan`` is unrolled when it is first asked for."""

    workload: Workload
    limits: Limits
    hardware: Hardware
    choice: Choice
    layout: Layout
    leanest: Layout
    seconds: float
    contenders: tuple[tuple[Choice, Layout], ...] = ()

    @cached_property
    def plan(self) -> Plan:
        room = Room(self.workload, self.limits, self.hardware)
        return build_plan(
            self.workload,
            self.layout,
            frames=room.frames(self.layout),
            host_frames=room.host_frames(self.layout),
            device_limit_bytes=self.limits.device_bytes,
            host_limit_bytes=self.limits.host_bytes,
        )


def make_plan(workload: Workload, limits: Limits, hardware: Hardware = UNMEASURED) -> Plan:
    """The plan for ``workload`` under ``limits``; raises BudgetError naming the least budgets that would do."""
    return arrange(workload, limits, hardware).plan


def arrange(workload: Workload, limits: Limits, hardware: Hardware) -> Arrangement:
    """The fastest arrangement of ``workload`` that keeps ``limits``; raises BudgetError as ``make_plan`` does."""

    def best(goal: Goal) -> Arrangement:
        return _Search(workload, limits, hardware, goal).run()

    fastest = best(Goal.SECONDS)
    limit = limits.ssd_write_bytes
    if limit is None or fastest.plan.ssd_write_bytes <= limit:
        return fastest
    leanest = best(Goal.WRITES)
    if leanest.plan.ssd_write_bytes > limit:
        least = min(leanest.plan, fastest.plan, key=lambda plan: plan.ssd_write_bytes)
        raise BudgetError(_excess(least, limit))
    within = best(Goal.EXCESS_WRITES)
    return within if within.plan.ssd_write_bytes <= limit else leanest


def arrange_from_one_width(first: Arrangement) -> Arrangement | None:
    """Another arrangement for what ``first`` is one of, on a device with memory of its own: where single steps lead
    from slabs of one width, the best of those that fit; None if none does. On the CPU it brought nothing."""
    if first.limits.slab_columns is not None:
        return None
    return _Search(first.workload, first.limits, first.hardware, Goal.SECONDS).run_from_one_width(first)


def seconds_like(workload: Workload, other: Arrangement) -> float | None:
    """The forecast seconds of ``workload`` arranged as another one is; None where that does not fit."""
    return _Search(workload, other.limits, other.hardware, Goal.SECONDS).seconds_like(other.choice)


def fewest_writes(workload: Workload, limits: Limits, hardware: Hardware) -> int:
    """The least limit on written bytes for which this planner finds a plan; BudgetError where memory is short."""
    free = replace(limits, ssd_write_bytes=None)
    goals = (Goal.WRITES, Goal.SECONDS)
    return min(_Search(workload, free, hardware, goal).run().plan.ssd_write_bytes for goal in goals)


def _excess(plan: Plan, limit: int) -> str:
    """Who writes how much, what may be written, and what would do."""
    lowest = plan.lowest("train")
    written: dict[str, int] = {}
    for blocks in lowest.store:
        for block in blocks:
            name, _, _ = plan.blocks.where(block)
            written[name] = written.get(name, 0) + plan.blocks.nbytes(block)
    for item in plan.programs["train"]:
        written |= {name: one.nbytes for name, one in streamed_in(item.stores, plan.matrices).items()}
    most = max(written, key=lambda name: written[name])
    return (
        f"the plan that writes least writes {format_size(plan.ssd_write_bytes)} an epoch to the SSD, of which "
        f"{format_size(written[most])} are {most}, and the limit is {format_size(limit)}; "
        f"give --max-ssd-writes {budget_of(plan.ssd_write_bytes)}, or a larger --host-budget"
    )


class _Search:
    """The arrangement so far and the steps that improve it."""

    def __init__(self, workload: Workload, limits: Limits, hardware: Hardware, goal: Goal) -> None:
        self.workload = workload
        self.limits = limits
        self.hardware = hardware
        self.goal = goal
        self.room = Room(workload, limits, hardware)
        self.sources = pulled_sources(workload)
        self.alike = self._groups()
        self.spillable = frozenset() if hardware.has_device_memory else frozenset(workload.handed)
        self.dealable = frozenset() if hardware.has_device_memory else dealable(workload)
        self.tried: list[_Candidate] = []
        self.known: dict[Hashable, _Candidate | None] = {}
        """What choices lead to, by what they come to: of widths in whole heads many come to the same."""

    def run(self) -> Arrangement:
        leanest = self._leanest()
        # Not on the CPU, which computes longer than it moves blocks: there epochs became no shorter.
        best = self._best(leanest, last_beside=self.hardware.has_device_memory)
        for taller in self._busier(leanest):
            best = min(best, self._best(taller), key=lambda one: one.score)
        return self._arrangement(best, leanest.layout)

    def run_from_one_width(self, first: Arrangement) -> Arrangement | None:
        """As ``arrange_from_one_width``."""
        widest = max(self.sources.values(), default=1)
        for parts, buffers, direct in product((2, 3, 4, 6, 8), (1, 2), (True, False)):
            cut = Cut(-(-widest // parts), buffers, direct, last_beside=True)
            cuts = {name: replace(cut, columns=min(columns, cut.columns)) for name, columns in self.sources.items()}
            self._try(replace(first.choice, cuts=cuts))
        if not self.tried:
            return None
        best = min(self.tried, key=lambda one: one.score)
        return self._arrangement(self._best(best, last_beside=True), first.leanest)

    def _arrangement(self, best: _Candidate, leanest: Layout) -> Arrangement:
        _, seconds = best.score
        given = self.workload, self.limits, self.hardware, best.choice, best.layout, leanest, seconds
        return Arrangement(*given, tuple(self._contenders(best)))

    def _contenders(self, best: _Candidate) -> Iterator[tuple[Choice, Layout]]:
        """Of those tried the next best."""
        before, found = best.score[1], 0
        for one in sorted(self.tried, key=lambda one: one.score):
            seconds = one.score[1]
            if seconds > _BEHIND * best.score[1] or found == _CONTENDERS:
                return
            if seconds > (1 + _ALIKE) * before:
                before, found = seconds, found + 1
                yield one.choice, one.layout

    def seconds_like(self, choice: Choice) -> float | None:
        """The forecast with ``choice``, of another workload; what that does not pull is held as what is like it."""
        by_columns = {self.sources.get(name): cut for name, cut in choice.cuts.items()}
        cuts = {name: choice.cuts.get(name, by_columns.get(columns, _WHOLE)) for name, columns in self.sources.items()}
        layout = lay_out(self.workload, replace(choice, cuts=cuts))
        return self._score(layout)[1] if self.room.fits(layout) else None

    # ---- sources -------------------------------------------------------------------------------------------

    def _groups(self) -> list[list[str]]:
        """Sources of one shape and role, which are held alike: the search is as long as there are shapes."""
        groups: dict[tuple[int, int, int, bool], list[str]] = {}
        for name in self.sources:
            matrix = self.workload.matrices[name]
            loaded = any(name in s.loads for stages in self.workload.programs.values() for s in stages)
            groups.setdefault((matrix.rows, matrix.columns, matrix.itemsize, loaded), []).append(name)
        return list(groups.values())

    def _best(self, best: _Candidate, *, last_beside: bool = False) -> _Candidate:
        """The best that single steps from ``best`` lead to; with ``last_beside``, in how last slabs are pulled, too."""
        in_memory = [replace(best.choice, in_runs=frozenset(), dealt={}), replace(best.choice, dealt={})]
        whole = [replace(choice, cuts=dict.fromkeys(self.sources, _WHOLE)) for choice in (*in_memory, best.choice)]
        if self.limits.slab_columns is None and best.score > (0, 0):
            best = self._better(best, whole)
        best = self._better(best, [*in_memory, replace(best.choice, in_runs=frozenset())])
        for _ in range(_ROUNDS):
            before = best.score
            for group in self.alike:
                best = self._better_held(best, group, last_beside=last_beside)
            best = self._better(best, [replace(best.choice, in_runs=names) for names in self._spills(best.choice)])
            best = self._better(best, list(self._deals(best.choice)))
            heights = self._heights(FEW_STEPS, best.layout.frame_bytes // best.layout.step_rows)
            best = self._better(best, [replace(best.choice, step_rows=height) for height in heights])
            if self.hardware.has_device_memory:
                best = self._better(best, [replace(best.choice, spare_writes=True)])
            if best.score >= before:
                break
        return best

    def _better_held(self, best: _Candidate, group: list[str], *, last_beside: bool) -> _Candidate:
        """The best that other ways to hold the sources of ``group`` lead to."""
        held, name = best.choice.cuts, group[0]
        ways = [replace(way, direct=held[name].direct, last_beside=held[name].last_beside) for way in self._cuts(name)]
        best = self._better(best, [self._held(best.choice, group, way) for way in ways])
        cut = best.choice.cuts[name]
        if cut.columns and (self.hardware.has_device_memory or not cut.direct):
            best = self._better(best, [self._held(best.choice, group, replace(cut, direct=not cut.direct))])
        cut = best.choice.cuts[name]
        if cut.columns and last_beside:
            beside = replace(cut, last_beside=not cut.last_beside)
            other = self._better(best, [self._held(best.choice, group, beside)])
            unwanted, seconds = best.score
            best = other if other.score < (unwanted, (1 - TIE) * seconds) else best
        return best

    @staticmethod
    def _held(choice: Choice, group: list[str], cut: Cut) -> Choice:
        """The same, but for how the sources of ``group`` are held."""
        return replace(choice, cuts={**choice.cuts, **dict.fromkeys(group, cut)})

    def _better(self, best: _Candidate, choices: list[Choice]) -> _Candidate:
        for choice in choices:
            candidate = None if choice == best.choice else self._try(choice)
            if candidate is not None and candidate.score < best.score:
                best = candidate
        return best

    def _try(self, choice: Choice) -> _Candidate | None:
        """What ``choice`` leads to; None where that does not fit."""
        same = lays_out_as(choice, self.workload)
        if same not in self.known:
            layout = lay_out(self.workload, choice)
            fits = self.room.fits(layout)
            found = self.known[same] = _Candidate(choice, layout, self._score(layout)) if fits else None
            if found is not None and self.hardware.has_device_memory:  # elsewhere forecasts decide alone
                self.tried.append(found)
        known = self.known[same]
        return None if known is None else replace(known, choice=choice)

    def _score(self, layout: Layout) -> Score:
        frames, host_frames = self.room.frames(layout), self.room.host_frames(layout)
        traffic = forecast_traffic(self.workload, layout, frames=frames, host_frames=host_frames)
        seconds = seconds_of(self.workload, layout, self.hardware, traffic)
        written = sum(moved.ssd_write_bytes for moved in traffic)
        match self.goal:
            case Goal.SECONDS:
                return 0, seconds
            case Goal.EXCESS_WRITES:
                return max(0, written - (self.limits.ssd_write_bytes or 0)), seconds
            case Goal.WRITES:
                return written, seconds

    def _cuts(self, name: str) -> Iterator[Cut]:
        """Ways to hold a source: whole, or in more and more slabs."""
        columns = self.sources[name]
        if self.limits.slab_columns is not None:
            for buffers in (1, 2):
                yield Cut(min(columns, self.limits.slab_columns), buffers)
            return
        yield _WHOLE
        for width in self._widths(name):
            for buffers in range(1, min(3, -(-columns // width)) + 1):
                yield Cut(width, buffers)

    def _widths(self, name: str) -> list[int]:
        """Of slabs, from the widest to the narrowest: columns in equal parts, rounded up to whole cache lines; on a
        device as they are, too."""
        columns = self.sources[name]
        line = max(1, LINE_BYTES // self.workload.matrices[name].itemsize)
        widths = [-(-columns // count) for count in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)]
        rounded = [min(columns, -(-width // line) * line) if width > line else width for width in widths]
        tried = {*rounded, *widths} if self.hardware.has_device_memory else {*rounded}
        return sorted((width for width in tried if width >= min(columns, NARROW_COLUMNS)), reverse=True)

    def _spills(self, choice: Choice) -> Iterator[frozenset[str]]:
        """Sums to spill: one matrix more, or one less."""
        for name in sorted(self.spillable):
            yield choice.in_runs ^ {name}

    def _deals(self, choice: Choice) -> Iterator[Choice]:
        """Sources to deal out: one more or one less, or one to higher buckets; none where all are in memory whole."""
        if not choice.dealt and all(cut == _WHOLE for cut in choice.cuts.values()):
            return
        for name in sorted(self.dealable):
            if name in choice.dealt:
                others = {other: nbytes for other, nbytes in choice.dealt.items() if other != name}
                yield replace(choice, dealt=others)
                yield replace(choice, dealt=others, cuts={**choice.cuts, name: _WHOLE})
            whole = self.workload.matrices[name].nbytes
            for part in (0, *(whole // share for share in _DEALT_SHARES)):
                yield replace(choice, dealt={**choice.dealt, name: part})

    def _leanest(self) -> _Candidate:
        """The leanest arrangement, with the tallest blocks that leave three quarters of the memory for other things."""
        leanest: list[Layout] = []
        fitting = self._lean_and_fitting(leanest, frozenset())
        if not fitting and self.dealable:  # what is dealt has to be counted first
            fitting = self._lean_and_fitting(leanest, self.dealable)
        if not fitting:
            raise BudgetError(self.room.shortage(leanest))
        roomy = [c for c in fitting if 4 * self._arena_needed(c[1]) <= self.room.arena_bytes(c[1])]
        choice, _ = (roomy or fitting[-1:])[0]
        found = self._try(choice)
        assert found is not None, "it fits"
        return found

    def _busier(self, leanest: _Candidate) -> Iterator[_Candidate]:
        """The leanest arrangements of taller steps, as long as steps have too few tiles for all threads of the CPU.
        Where they only fit with narrower slabs, no change of one thing at a time leads to them."""
        tile, height = self.workload.tile_rows, leanest.choice.step_rows
        if self.hardware.has_device_memory or self.limits.block_rows:
            return
        while tasks_are_few(height // tile, self.workload.threads) and height < self.workload.rows:
            height *= 2
            choice, layout = self._leanest_of(height, frozenset(leanest.choice.dealt), direct=True)
            found = self._try(choice) if self.room.fits(layout) else None
            if found is None:
                return
            yield found

    def _lean_and_fitting(self, leanest: list[Layout], dealt: frozenset[str]) -> list[tuple[Choice, Layout]]:
        """The leanest arrangements of some heights that fit; those that do not are added to ``leanest``. ``dealt``: the
        sources that are dealt out."""
        for most_steps, direct in _LEANER_AND_LEANER:
            tried = [self._leanest_of(height, dealt, direct=direct) for height in self._heights(most_steps)]
            fitting = [(choice, layout) for choice, layout in tried if self.room.fits(layout)]
            if fitting:
                return fitting if most_steps == FEW_STEPS else fitting[:1]
            leanest += [layout for _, layout in tried]
        return []

    def _arena_needed(self, layout: Layout) -> int:
        return frames_needed(layout, self.workload) * layout.frame_bytes

    def _leanest_of(self, height: int, dealt: frozenset[str], *, direct: bool) -> tuple[Choice, Layout]:
        """Slabs as narrow as they go take the least memory, but where blocks of many slabs take more."""
        widths = [
            NARROW_COLUMNS,
            2 * NARROW_COLUMNS,
            4 * NARROW_COLUMNS,
            8 * NARROW_COLUMNS,
            max(self.sources.values(), default=1),
        ]
        if self.limits.slab_columns is not None:
            widths = [self.limits.slab_columns]
        spare_writes = self.goal is not Goal.SECONDS
        choices = [
            Choice(
                height,
                {name: Cut(min(columns, width), 1, direct) for name, columns in self.sources.items()},
                spare_writes,
                dealt=dict.fromkeys(dealt, 0),
            )
            for width in widths
        ]
        if self.limits.slab_columns is None:
            choices.append(replace(choices[0], cuts=dict.fromkeys(self.sources, _WHOLE)))
        if self.spillable:
            choices += [replace(choice, in_runs=self.spillable) for choice in choices]
        layouts = [(choice, lay_out(self.workload, choice)) for choice in choices]
        for choice, layout in layouts[:] if dealt else ():
            passes = (item for program in layout.programs.values() for item in program)
            lean = replace(choice, dealt=dict.fromkeys(leaner_dealt(passes, layout.matrices), 0))
            layouts.append((lean, lay_out(self.workload, lean)))
        return min(layouts, key=lambda tried: self.room.needed_bytes(tried[1]))

    def _heights(self, most_steps: int, row_bytes: int = 0) -> Iterator[int]:
        """Heights of a step to try, tallest first: tiles times powers of two with which a row pass has so many steps at
        most; or the one that was asked for. ``row_bytes``: of the widest row that a block has (0: of any matrix)."""
        if self.limits.block_rows:
            yield self.limits.block_rows
            return
        tile, rows = self.workload.tile_rows, self.workload.rows
        widest = row_bytes or max(m.columns * m.itemsize for m in self.workload.matrices.values())
        largest = BLOCK_BYTES_OF_TIERS if self.hardware.has_device_memory else BLOCK_BYTES
        height = tile
        while height < rows and (height * widest * 2 <= largest or height * FEW_STEPS < rows):
            height *= 2
        while height >= tile and height * most_steps >= rows:
            yield height
            height //= 2
