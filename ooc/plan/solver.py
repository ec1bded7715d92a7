# SPDX-License-Identifier: Apache-2.0
"""The solver of the planner's problem for one set of recomputed stages: descent by single steps, begun several times.

A descent goes to whatever makes the cost smaller, sources of one shape together, until no change helps; at the end of
the best one, single sources are tried whole. It begins with the least memory (narrow slabs, one buffer each), with the
tallest blocks that leave room for other things; on the CPU once more with taller steps, as long as steps have too few
tiles for all threads; and on a device, where it is asked for, with slabs of one width. There, epochs of the ends are
simulated, and so is what steps of single sources lead to from the best one on, until none makes the epoch shorter.

How long a plan takes to make goes by the number of blocks, so blocks are as tall as memory allows: where it does not,
the first slabs of what is gathered go by way of blocks like the others (``SlabChoice.direct``) before blocks
become lower.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from math import inf

from ooc.errors import BudgetError
from ooc.plan.cost import tasks_are_few
from ooc.plan.forecast import TIE
from ooc.plan.layout.layout import Choice, Layout, layout_key
from ooc.plan.layout.passes import ColumnPass, RowPass, column_step_rows, row_step_rows
from ooc.plan.moves import FEW_STEPS, Moves
from ooc.plan.problem import WHOLE, Candidate, Problem
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import blocks_in, frames_needed
from ooc.plan.program.plan import Plan
from ooc.plan.program.program import EPOCH
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.together import together
from ooc.plan.workload import Workload

MOST_STEPS = 4 * FEW_STEPS
"""Steps of a row pass beyond which lower blocks are tried only where nothing fits without them: most of the memory is
then the narrowest slab's."""
_LAST_STEPS = 4 * MOST_STEPS
"""Steps of a row pass beyond which no lower blocks are tried: a plan takes a minute to make. Where rows are wide and
slabs narrow, one block of every slab is a part of the memory that lower blocks make small."""
_Beginning = tuple[int, bool, int, bool]
_Way = tuple[_Beginning, frozenset[str]]
_BEGINNINGS: tuple[_Beginning, ...] = (
    (FEW_STEPS, True, 1, False),
    *((most, direct, 1, False) for most in (MOST_STEPS, _LAST_STEPS) for direct in (True, False)),
)
"""The most steps, whether the first slabs are computed right into their buffers, how many blocks a step's rows of the
widest matrix are, and whether some passes have one step at a time: the first that fits is taken."""
_SMALLER_BEGINNINGS = tuple(
    (_LAST_STEPS, direct, 1 << power, False) for power in range(1, 9) for direct in (True, False)
)
"""The same where nothing fits so."""
_LAST_BEGINNINGS = tuple((_LAST_STEPS, direct, 1 << power, True) for power in range(9) for direct in (True, False))
"""The same on the CPU where not even that fits."""
_MOST_BLOCKS = 1 << 20
"""That a layout of smaller frames may have: a plan of 700,000 blocks took two and a half minutes."""
_LEAST_FRAME_BYTES = 3 << 20
"""Where frames are no smaller, it may have any number: then it is of several terabytes."""
_FEW_FRAMES, _FINER = 8, 4
"""Where the host has fewer frames than this, the search begins with frames smaller by that, too."""
_ROUNDS = 3
_SIMULATED_STEPS = 12_000
"""Of all epochs that are simulated for one plan to find where to go on from, and then on the way."""
_OTHERS, _BEHIND, _ALIKE = 12, 1.25, 1e-3
"""How many candidates beside the best are remembered, how much longer their forecasts may be, and by how much they
differ: those with equal ones mostly differ in what makes no difference."""


@dataclass(frozen=True)
class PlannedLayout:
    """How a problem's workload is to be run: ``layout``, of ``choice``, an epoch of which is forecast to take
    ``seconds``. ``others`` were forecast to be hardly slower, the fastest first. ``plan`` is unrolled when it is first
    asked for."""

    problem: Problem
    choice: Choice
    layout: Layout
    seconds: float
    others: tuple[Candidate, ...] = ()
    began: int = 0
    """The number of the first way to begin that fits."""

    @cached_property
    def plan(self) -> Plan:
        return build_plan(self.layout, self.problem.capacity)

    @cached_property
    def waiting_s(self) -> float:
        """Seconds that an epoch waits for data of its own; for other processes it waits as long whatever is kept."""
        return self.problem.waiting_s(self.layout)

    @cached_property
    def simulated_s(self) -> float:
        """Seconds of an epoch by the simulator, with what is waited for the rows of other processes."""
        epoch, problem = build_plan(self.layout, self.problem.capacity, epoch_only=True), self.problem
        alone = simulate(epoch, problem.workload, problem.hardware)
        return together([alone], [epoch.received(EPOCH)], problem.received_bytes_per_s)[0].epoch_s

    @property
    def steps(self) -> int:
        """Of an epoch, but for those that processes share: so long does it take to simulate."""
        passes, matrices, height = self.layout.programs[EPOCH], self.layout.matrices, self.layout.step_rows
        sweeps = 0
        for item in passes:
            if isinstance(item, ColumnPass):
                edges = self.problem.workload.topologies[item.pull.direction].edges
                pieces = edges // (item.edges_at_once or edges + 1)
                sweeps += item.slabs * (-(-item.rows // column_step_rows(item, matrices, height)) + pieces)
        rows = [item for item in passes if isinstance(item, RowPass)]
        return sweeps + sum(-(-item.rows // row_step_rows(item, height)) for item in rows)


def solve(problem: Problem, began: int = 0) -> PlannedLayout:
    """The best of descents from the least memory; BudgetError, with the least budgets that would do, if none fits.
    ``began``: ways to begin before that one are known not to fit."""
    return _Solver(problem, began).run()


def solve_from(problem: Problem, beginning: Candidate) -> PlannedLayout:
    """The best that descent from ``beginning`` leads to."""
    solver = _Solver(problem)
    return solver.planned(solver.descend(beginning))


def minimum_memory(problem: Problem) -> Layout:
    """The layout that takes the least memory, whatever the limits."""
    moves = Moves(problem)
    beginnings = _BEGINNINGS + _SMALLER_BEGINNINGS + _LAST_BEGINNINGS
    buckets = dict.fromkeys((frozenset[str](), moves.bucketable))
    return _smallest(moves, product(beginnings, buckets), problem.capacity.least, 0)


def _smallest(
    moves: Moves, ways: Iterable[_Way], lacking: Callable[[Layout], tuple[float, float]], there_are: int
) -> Layout:
    """Of what takes the least memory, whichever of ``ways`` it begins, what is ``lacking`` least, which is no less than
    what it takes beyond the bytes that ``there_are``."""
    found: list[Layout] = []
    for way in ways:
        most = there_are + lacking(found[0])[0] if found else inf
        tried = (layout for _, layout in _leanest(moves, *way, most))
        found = [min(chain(found, tried), key=lacking)]
    return found[0]


def _leanest(
    moves: Moves, beginning: _Beginning, bucketed: frozenset[str], most: float
) -> Iterator[tuple[Choice, Layout]]:
    """What takes the least memory, for steps of every height, the tallest first, where that is no more than ``most``
    bytes."""
    most_steps, direct, parts, alone = beginning
    if moves.on_device and (alone or parts.bit_length() % 2 == 0):  # no power of four
        return
    for height in moves.heights(most_steps):
        found = moves.minimum_memory(height, bucketed, most, direct=direct, parts=parts, alone=alone)
        if found is not None and (parts == 1 or _may_be_finer(found[1], moves.workload)):
            yield found


def _may_be_finer(layout: Layout, workload: Workload) -> bool:
    """Whether blocks may be as small as those of ``layout``: of many more a plan takes too long."""
    return layout.frame_bytes >= _LEAST_FRAME_BYTES or blocks_in(layout, workload) <= _MOST_BLOCKS


def solve_from_one_width(first: PlannedLayout) -> PlannedLayout | None:
    """Where descent leads from slabs of one width, on a device; None if none fits. On the CPU it brought nothing."""
    problem = first.problem
    if problem.limits.slab_columns is not None:
        return None
    solver = _Solver(Problem(problem.workload, problem.limits, problem.hardware, most_written=problem.most_written))
    tried = [solver.problem.candidate(choice) for choice in solver.moves.of_one_width(first.choice)]
    best = min((one for one in tried if one is not None), key=lambda one: one.score, default=None)
    return None if best is None else solver.planned(solver.descend(best))


def simulated_best(*found: PlannedLayout) -> PlannedLayout:
    """Of ``found``, the first of which has the shortest forecast, and other ends and candidates of their descents,
    those of fewest steps first, the one whose simulated epoch is shortest; from there on, what single steps of one
    source lead to, as long as epochs become shorter.

    On a device with memory of its own alone, and of few steps: on the CPU, where forecasts were compared with epochs,
    the order of the forecasts stands, and so it does with a limit on what is written, which the faster one may pass.
    """
    best = found[0]
    if not best.problem.hardware.has_device_memory or best.problem.limits.ssd_write_bytes is not None:
        return best
    ends = [*found, *filter(None, map(solve_from_one_width, found))]
    for one in ends:
        if one.seconds < (1 - TIE) * best.seconds:  # else the first descent's end stands
            best = one
    if 2 * best.steps > _SIMULATED_STEPS:
        return best
    tried = {_key(best): best}
    steps = best.steps
    others = (replace(end, choice=one.choice, layout=one.layout) for end in ends for one in end.others)
    for one in sorted(chain(ends, others), key=lambda one: one.steps):
        if steps + one.steps <= _SIMULATED_STEPS and _key(one) not in tried:
            tried[_key(one)] = one
            steps += one.steps
    best, moves, steps = min(tried.values(), key=lambda one: one.simulated_s), Moves(best.problem), 0
    at = since = 0
    while since < len(steps_on := moves.of_one_source(best.choice)):  # none of these is shorter, else the next one's
        step = best.problem.candidate(steps_on[at % len(steps_on)])
        at, since = at + 1, since + 1
        other = best if step is None else replace(best, choice=step.choice, layout=step.layout)
        if steps < _SIMULATED_STEPS and _key(other) not in tried:
            tried[_key(other)] = other
            steps += other.steps
            if other.simulated_s < best.simulated_s:
                best, since = other, 0
    return best


def _key(planned: PlannedLayout) -> Hashable:
    """The same for two that come to the same layout."""
    workload = planned.problem.workload
    return id(workload), layout_key(planned.choice, workload)


class _Solver:
    """The descents of one problem."""

    def __init__(self, problem: Problem, began: int = 0) -> None:
        self.problem = problem
        self.began = began
        self.moves = Moves(problem)
        self.on_device = problem.hardware.has_device_memory

    def run(self) -> PlannedLayout:
        least = self._least_memory()
        ends = [self.descend(beginning) for beginning in (least, *self._taller(least), *self._finer(least))]
        best = min(ends, key=lambda one: one.score)
        if self.problem.limits.slab_columns is None:
            for name in self.problem.sources:  # of those of one shape there may be memory to hold one whole
                best = self._better(best, [replace(best.choice, cuts={**best.choice.cuts, name: WHOLE})])
        return self.planned(best)

    def planned(self, best: Candidate) -> PlannedLayout:
        # Elsewhere forecasts decide alone.
        others = tuple(self._others(best)) if self.on_device else ()
        return PlannedLayout(self.problem, best.choice, best.layout, best.seconds, others, self.began)

    def _others(self, best: Candidate) -> Iterator[Candidate]:
        """The next best, and the best with steps of each other height: these, forecasts tell apart least of all."""
        before, found, heights = best.seconds, 0, {best.layout.step_rows}
        for one in sorted(self.problem.candidates(), key=lambda one: one.score):
            is_near = found < _OTHERS and (1 + _ALIKE) * before < one.seconds <= _BEHIND * best.seconds
            if is_near or one.layout.step_rows not in heights:
                before, found = one.seconds, found + is_near
                heights.add(one.layout.step_rows)
                yield one

    # ---- descent -------------------------------------------------------------------------------------------

    def descend(self, best: Candidate) -> Candidate:
        """The best that single steps from ``best`` lead to."""
        moves = self.moves
        if self.on_device:
            best = next(filter(None, map(self.problem.candidate, moves.tall_pulls(best.choice))), best)
        in_memory = moves.in_memory(best.choice)
        if best.score > (0, 0):
            best = self._better(best, moves.whole(best.choice))
        best = self._better(best, [*in_memory, replace(best.choice, spilled_sums=frozenset())])
        for _ in range(_ROUNDS):
            before = best.score
            for group in moves.groups():
                best = self._better(best, moves.cuts(best.choice, group))
                best = self._better(best, moves.direct(best.choice, group))
                other = self._better(best, moves.shard(best.choice, group))
                best = other if other.score < (best.score[0], (1 - TIE) * best.seconds) else best
                if self.on_device:
                    # Not on the CPU, which computes longer than it moves blocks: there epochs became no shorter.
                    other = self._better(best, moves.overlap_last(best.choice, group))
                    best = other if other.score < (best.score[0], (1 - TIE) * best.seconds) else best
            best = self._better(best, moves.spills(best.choice))
            best = self._better(best, moves.buckets(best.choice))
            best = self._better(best, moves.parts(best.choice))
            best = self._better(best, moves.tall_pulls(best.choice))
            heights = moves.heights(FEW_STEPS, best.choice.parts * best.layout.frame_bytes // best.layout.step_rows)
            best = self._better(best, [replace(best.choice, step_rows=height) for height in heights])
            if self.on_device:
                best = self._better(best, [replace(best.choice, spare_writes=True)])
            if best.score >= before:
                break
        return best

    def _better(self, best: Candidate, choices: Sequence[Choice]) -> Candidate:
        remembered = _BEHIND if self.on_device else 1.0
        for choice in choices:
            found = None if choice == best.choice else self.problem.candidate(choice, remembered * best.seconds)
            if found is not None and found.score < best.score:
                best = found
        return best

    # ---- beginnings ----------------------------------------------------------------------------------------

    def _least_memory(self) -> Candidate:
        """What takes the least memory, with the tallest blocks that leave three quarters of it for other things."""
        buckets = dict.fromkeys((frozenset[str](), self.moves.bucketable))  # which have to be counted first
        kinds = product((_BEGINNINGS, _SMALLER_BEGINNINGS, _LAST_BEGINNINGS), buckets)
        ways = [(beginning, bucketed) for beginnings, bucketed in kinds for beginning in beginnings]
        for number, way in enumerate(ways[self.began :], self.began):
            fitting = self._fitting(*way)
            if fitting is not None:
                found, self.began = self.problem.candidate(fitting), number
                assert found is not None, "it fits"
                return found
        capacity = self.problem.capacity
        if self.problem.limits.one_memory:
            raise BudgetError(capacity.shortage(minimum_memory(self.problem)))
        raise BudgetError(capacity.shortage(_smallest(self.moves, ways, capacity.lacking, capacity.most_bytes)))

    def _fitting(self, beginning: _Beginning, bucketed: frozenset[str]) -> Choice | None:
        """The choice of least memory to begin with. Laying out takes most of a plan's time, so no lower blocks are laid
        out than are asked for."""
        capacity, fitting = self.problem.capacity, None
        for choice, layout in _leanest(self.moves, beginning, bucketed, capacity.most_bytes):
            if capacity.fits(layout):
                fitting = choice
                needed_bytes = frames_needed(layout, self.problem.workload) * layout.frame_bytes
                if beginning[0] > FEW_STEPS or 4 * needed_bytes <= capacity.arena_bytes(layout):
                    return fitting
        return fitting

    def _taller(self, least: Candidate) -> Iterator[Candidate]:
        """The least memory with taller steps, as long as steps have too few tiles for the threads of the CPU. Where
        these only fit with narrower slabs, no change of one thing at a time leads to them."""
        workload, height = self.problem.workload, least.choice.step_rows
        if self.on_device or self.problem.limits.block_rows:
            return
        while tasks_are_few(height // workload.tile_rows, workload.threads) and height < workload.rows:
            height *= 2
            most, bucketed = self.problem.capacity.most_bytes, frozenset(least.choice.bucketed)
            leanest = self.moves.minimum_memory(height, bucketed, most, direct=True)
            found = None if leanest is None else self.problem.candidate(leanest[0])
            if found is None:
                return
            yield found

    def _finer(self, least: Candidate) -> Iterator[Candidate]:
        """The least memory in smaller frames, where the host has room for few: those on their way leave none to keep
        anything in, and no change of one thing at a time leads to smaller ones."""
        host_frames = self.problem.capacity.host_frames(least.layout)
        if host_frames is None or host_frames >= _FEW_FRAMES:
            return
        choice = replace(least.choice, parts=_FINER * least.choice.parts)
        if _may_be_finer(self.problem.layout(choice), self.problem.workload):
            yield from filter(None, [self.problem.candidate(choice)])
