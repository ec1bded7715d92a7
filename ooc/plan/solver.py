# SPDX-License-Identifier: Apache-2.0
"""The solver of the planner's problem: descent by single steps, for one set of recomputed stages begun several times.

A descent goes to whatever makes the cost smaller, sources of one shape together, until no change helps; at the end of
the best one, single sources are tried whole. It begins with the least memory (narrow slabs, one buffer each), with the
tallest blocks that leave room for other things; on the CPU once more with taller steps, as long as steps have too few
tiles for all threads; and on a device, where it is asked for, with slabs of one width. There, epochs of the ends are
simulated, and so is what steps of single sources lead to from the best one on, until none makes the epoch shorter.

How long a plan takes to make goes by the number of blocks, so blocks are as tall as memory allows: where it does not,
the first slabs of what is gathered go by way of blocks like the others (``SlabChoice.direct``) before blocks
become lower.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from math import inf

from ooc.errors import BudgetError
from ooc.plan.cost import tasks_are_few
from ooc.plan.forecast import TIE
from ooc.plan.layout.layout import Choice, Layout, layout_key
from ooc.plan.layout.passes import ColumnPass, column_step_rows, row_step_rows
from ooc.plan.moves import FEW_STEPS, Beginning, Moves
from ooc.plan.problem import WHOLE, Problem, State
from ooc.plan.program.capacity import blocks_in, frames_needed
from ooc.plan.program.program import EPOCH
from ooc.plan.workload import Workload

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


def solve(problem: Problem) -> State:
    """The best of descents from the least memory; BudgetError, with the least budgets that would do, if none fits."""
    moves = Moves(problem)
    least = _least_memory(moves)
    best = min(map(descend, (least, *_taller(moves, least), *_finer(least))), key=lambda one: one.score)
    if problem.limits.slab_columns is None:
        for name in problem.sources:  # of those of one shape there may be memory to hold one whole
            best = _better(best, [replace(best.choice, cuts={**best.choice.cuts, name: WHOLE})])
    return best


def descend(best: State) -> State:
    """The best that single steps from ``best`` lead to."""
    problem, moves = best.problem, Moves(best.problem)
    if problem.on_device:
        best = next(filter(None, map(problem.state, moves.tall_pulls(best.choice))), best)
    if best.score > (0, 0):
        best = _better(best, moves.whole(best.choice))
    best = _better(best, moves.in_memory(best.choice))
    for _ in range(_ROUNDS):
        before = best.score
        for steps, gain in moves.in_order():
            best = _better(best, steps(best.choice), gain)
        if best.score >= before:
            break
    return best


def _better(best: State, choices: Iterable[Choice], gain: float = 0.0) -> State:
    """What costs least of ``choices``, where an epoch is shorter by that part, or ``best``."""
    found, remembered = best, _BEHIND if best.problem.on_device else 1.0
    for choice in choices:
        other = None if choice == found.choice else best.problem.state(choice, remembered * found.seconds)
        if other is not None and other.score < found.score:
            found = other
    return found if found.score < (best.score[0], (1 - gain) * best.seconds) else best


# ---- the least memory ------------------------------------------------------------------------------------------


def minimum_memory(problem: Problem) -> Layout:
    """The layout that takes the least memory, whatever the limits."""
    return _smallest(Moves(problem), problem.capacity.least, 0)


def _smallest(moves: Moves, lacking: Callable[[Layout], tuple[float, float]], there_are: int) -> Layout:
    """Of what takes the least memory, wherever it begins, what is ``lacking`` least, which is no less than what it
    takes beyond the bytes that ``there_are``."""
    found: list[Layout] = []
    for beginning in moves.beginnings:
        most = there_are + lacking(found[0])[0] if found else inf
        tried = (layout for _, layout in _leanest(moves, beginning, most))
        found = [min(chain(found, tried), key=lacking)]
    return found[0]


def _leanest(moves: Moves, beginning: Beginning, most: float) -> Iterator[tuple[Choice, Layout]]:
    """What takes the least memory, for steps of every height, the tallest first, where that is no more than ``most``
    bytes."""
    for height in moves.heights(beginning.most_steps):
        found = moves.minimum_memory(height, beginning, most)
        if found is not None and (beginning.parts == 1 or _may_be_finer(found[1], moves.workload)):
            yield found


def _may_be_finer(layout: Layout, workload: Workload) -> bool:
    """Whether blocks may be as small as those of ``layout``: of many more a plan takes too long."""
    return layout.frame_bytes >= _LEAST_FRAME_BYTES or blocks_in(layout, workload) <= _MOST_BLOCKS


# ---- where descents begin --------------------------------------------------------------------------------------


def _least_memory(moves: Moves) -> State:
    """What takes the least memory, with the tallest blocks that leave three quarters of it for other things. Laying out
    takes most of a plan's time, so no lower blocks are laid out than are asked for."""
    problem, capacity = moves.problem, moves.problem.capacity
    for number, beginning in enumerate(moves.beginnings[problem.began :], problem.began):
        fitting: Choice | None = None
        for choice, layout in _leanest(moves, beginning, capacity.most_bytes):
            if capacity.fits(layout):
                fitting = choice
                needed_bytes = frames_needed(layout, problem.workload) * layout.frame_bytes
                if beginning.most_steps > FEW_STEPS or 4 * needed_bytes <= capacity.arena_bytes(layout):
                    break
        if fitting is not None:
            found, problem.began = problem.state(fitting), number
            assert found is not None, "it fits"
            return found
    if problem.limits.one_memory:
        raise BudgetError(capacity.shortage(minimum_memory(problem)))
    raise BudgetError(capacity.shortage(_smallest(moves, capacity.lacking, capacity.most_bytes)))


def _taller(moves: Moves, least: State) -> Iterator[State]:
    """The least memory with taller steps, as long as steps have too few tiles for the threads of the CPU. Where these
    only fit with narrower slabs, no change of one thing at a time leads to them."""
    problem, workload, height = moves.problem, moves.workload, least.choice.step_rows
    if problem.on_device or problem.limits.block_rows:
        return
    beginning = Beginning(FEW_STEPS, bucketed=frozenset(least.choice.bucketed))
    while tasks_are_few(height // workload.tile_rows, workload.threads) and height < workload.rows:
        height *= 2
        leanest = moves.minimum_memory(height, beginning, problem.capacity.most_bytes)
        found = None if leanest is None else problem.state(leanest[0])
        if found is None:
            return
        yield found


def _finer(least: State) -> Iterator[State]:
    """The least memory in smaller frames, where the host has room for few: those on their way leave none to keep
    anything in, and no change of one thing at a time leads to smaller ones."""
    problem = least.problem
    host_frames = problem.capacity.host_frames(least.layout)
    if host_frames is None or host_frames >= _FEW_FRAMES:
        return
    choice = replace(least.choice, parts=_FINER * least.choice.parts)
    if _may_be_finer(problem.layout(choice), problem.workload):
        yield from filter(None, [problem.state(choice)])


def from_one_width(first: State) -> State | None:
    """Where descent leads from slabs of one width, on a device; None if none fits. On the CPU it brought nothing."""
    if first.problem.limits.slab_columns is not None:
        return None
    problem = replace(first.problem)  # of which nothing has been tried
    tried = filter(None, map(problem.state, Moves(problem).of_one_width(first.choice)))
    best = min(tried, key=lambda one: one.score, default=None)
    return None if best is None else descend(best)


# ---- by the simulator ------------------------------------------------------------------------------------------


def simulated_best(*found: State) -> State:
    """Of ``found``, the first of which has the shortest forecast, and other ends and candidates of their descents,
    those of fewest steps first, the one whose simulated epoch is shortest; from there on, what single steps of one
    source lead to, as long as epochs become shorter.

    On a device with memory of its own alone, and of few steps: on the CPU, where forecasts were compared with epochs,
    the order of the forecasts stands, and so it does with a limit on what is written, which the faster one may pass.
    """
    best = found[0]
    if not best.problem.on_device or best.problem.limits.ssd_write_bytes is not None:
        return best
    ends = [*found, *filter(None, map(from_one_width, found))]
    for one in ends:
        if one.seconds < (1 - TIE) * best.seconds:  # else the first descent's end stands
            best = one
    steps = _steps(best)
    if 2 * steps > _SIMULATED_STEPS:
        return best
    tried = {_key(best)}
    simulated = [best]
    for one in sorted(chain(ends, *map(others, ends)), key=_steps):
        if steps + _steps(one) <= _SIMULATED_STEPS and _key(one) not in tried:
            tried.add(_key(one))
            simulated.append(one)
            steps += _steps(one)
    best = min(simulated, key=lambda one: one.simulated_s)
    moves, at, since, steps = Moves(best.problem), 0, 0, 0
    while since < len(steps_on := moves.of_one_source(best.choice)):  # none of these is shorter, else the next one's
        other = best.problem.state(steps_on[at % len(steps_on)])
        at, since = at + 1, since + 1
        if other is not None and steps < _SIMULATED_STEPS and _key(other) not in tried:
            tried.add(_key(other))
            steps += _steps(other)
            if other.simulated_s < best.simulated_s:
                best, since = other, 0
    return best


def others(best: State) -> Iterator[State]:
    """The next best that descents have come by, and the best with steps of each other height: these, forecasts tell
    apart least of all."""
    before, found, heights = best.seconds, 0, {best.layout.step_rows}
    for one in sorted(best.problem.states(), key=lambda one: one.score):
        is_near = found < _OTHERS and (1 + _ALIKE) * before < one.seconds <= _BEHIND * best.seconds
        if is_near or one.layout.step_rows not in heights:
            before, found = one.seconds, found + is_near
            heights.add(one.layout.step_rows)
            yield one


def _key(state: State) -> Hashable:
    """The same for two that come to the same layout."""
    workload, choice = state.problem.workload, state.choice
    return id(workload), layout_key(choice, workload), choice.lean


def _steps(state: State) -> int:
    """Of an epoch, but for those that processes share: so long does it take to simulate."""
    layout, count = state.layout, 0
    for item in layout.programs[EPOCH]:
        if isinstance(item, ColumnPass):
            edges = state.problem.workload.topologies[item.pull.direction].edges
            rows = column_step_rows(item, layout.matrices, layout.step_rows)
            count += item.slabs * (-(-item.rows // rows) + edges // (item.edges_at_once or edges + 1))
        else:
            count += -(-item.rows // row_step_rows(item, layout.step_rows))
    return count
