# SPDX-License-Identifier: Apache-2.0
"""The solver of the planner's problem for one set of recomputed stages: descent by single moves, from several starts.

A descent takes any move that lowers the cost, for all sources of one shape together, until none does. After the best
descent, single sources are tried whole in memory. Descents start from the least memory (narrow slabs, one buffer each)
with the tallest blocks that leave room for other things. On the CPU they also start with taller steps, as long as a
step has too few tiles for all threads. On a device they start from slabs of one width as well, where asked for; there
the ends of descents are simulated, and then whatever moves of single sources lead to, until none shortens the epoch.

Planning time grows with the number of blocks, so blocks are as tall as memory allows. Before they are made lower, the
first slabs of gathered matrices are written as blocks like the others (``SlabChoice.direct``), which saves memory, too.
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
"""The most blocks of a layout whose frames are smaller than ``_LEAST_FRAME_BYTES``: a plan of 700,000 blocks took two
and a half minutes."""
_LEAST_FRAME_BYTES = 3 << 20
"""Layouts whose frames are at least this large may have any number of blocks, since only terabytes make many of
them."""
_FEW_FRAMES, _FINER_FACTOR = 8, 4
"""If the host has fewer frames than the first number, the search also starts with frames smaller by the second."""
_ROUNDS = 3
_SIMULATED_STEPS = 12_000
"""The most steps, over all epochs simulated for one plan: once to find where to go on from, and once more on the
way."""
_CANDIDATES, _CANDIDATE_SLACK, _EQUAL_FORECAST = 12, 1.25, 1e-3
"""How many candidates beside the best are simulated, how much longer their forecasts may be, and by how much these must
differ: equal forecasts mostly come from differences that do not matter."""


def solve(problem: Problem) -> State:
    """Return the best state over all descents. Raises BudgetError, which names the least budgets that would do, if none
    fits."""
    moves = Moves(problem)
    least = _least_memory(moves)
    best = min(map(descend, (least, *_taller_states(moves, least), *_finer_states(least))), key=lambda one: one.score)
    if problem.limits.slab_columns is None:
        for name in problem.sources:  # there may be memory to hold one of equal shape as a whole
            best = _best_improvement(best, [replace(best.choice, cuts={**best.choice.cuts, name: WHOLE})])
    return best


def descend(best: State) -> State:
    """Return the best state that moves lead to from ``best``."""
    problem, moves = best.problem, Moves(best.problem)
    if problem.on_device:
        best = next(filter(None, map(problem.state, moves.tall_pulls(best.choice))), best)
    if best.score > (0, 0):
        best = _best_improvement(best, moves.whole(best.choice))
    best = _best_improvement(best, moves.in_memory(best.choice))
    for _ in range(_ROUNDS):
        before = best.score
        for steps, gain in moves.in_order():
            best = _best_improvement(best, steps(best.choice), gain)
        if best.score >= before:
            break
    return best


def _best_improvement(best: State, choices: Iterable[Choice], gain: float = 0.0) -> State:
    """Return the cheapest state among ``choices``, if its epoch is shorter by the fraction ``gain``; otherwise
    ``best``."""
    found, remembered = best, _CANDIDATE_SLACK if best.problem.on_device else 1.0
    for choice in choices:
        other = None if choice == found.choice else best.problem.state(choice, remembered * found.seconds)
        if other is not None and other.score < found.score:
            found = other
    return found if found.score < (best.score[0], (1 - gain) * best.seconds) else best


# ---- the least memory ------------------------------------------------------------------------------------------


def minimum_memory(problem: Problem) -> Layout:
    """Return the layout with the least memory, whatever the limits."""
    return _least_lacking(Moves(problem), problem.capacity.least, 0)


def _least_lacking(moves: Moves, lacking: Callable[[Layout], tuple[float, float]], there_are: int) -> Layout:
    """Return the layout that lacks least, over all starting points. ``lacking`` gives how many bytes a layout lacks;
    this is at least what the layout takes beyond ``there_are`` bytes, which ends the search early."""
    found: list[Layout] = []
    for beginning in moves.beginnings:
        most = there_are + lacking(found[0])[0] if found else inf
        tried = (layout for _, layout in _leanest(moves, beginning, most))
        found = [min(chain(found, tried), key=lacking)]
    return found[0]


def _leanest(moves: Moves, beginning: Beginning, most: float) -> Iterator[tuple[Choice, Layout]]:
    """Yield the choice with the least memory for each height of a step, the tallest first, with its layout, if it takes
    at most ``most`` bytes."""
    for height in moves.heights(beginning.most_steps):
        found = moves.minimum_memory(height, beginning, most)
        if found is not None and (beginning.parts == 1 or _may_be_finer(found[1], moves.workload)):
            yield found


def _may_be_finer(layout: Layout, workload: Workload) -> bool:
    """Whether blocks may be as small as those of ``layout``; with many more blocks, planning takes too long."""
    return layout.frame_bytes >= _LEAST_FRAME_BYTES or blocks_in(layout, workload) <= _MOST_BLOCKS


# ---- where descents begin --------------------------------------------------------------------------------------


def _least_memory(moves: Moves) -> State:
    """Return the state with the least memory and the tallest blocks that leave three quarters of the memory for other
    things. Lower blocks are laid out only when needed, since layouts take most of the planning time."""
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
    raise BudgetError(capacity.shortage(_least_lacking(moves, capacity.lacking, capacity.most_bytes)))


def _taller_states(moves: Moves, least: State) -> Iterator[State]:
    """Yield the least-memory states with taller steps, as long as a step has too few tiles for the CPU's threads. No
    single move leads to them if they only fit with narrower slabs."""
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


def _finer_states(least: State) -> Iterator[State]:
    """Yield the least-memory state with smaller frames, if the host has room for few. Otherwise the frames in transit
    leave nothing to keep blocks in, and no single move leads to smaller frames."""
    problem = least.problem
    host_frames = problem.capacity.host_frames(least.layout)
    if host_frames is None or host_frames >= _FEW_FRAMES:
        return
    choice = replace(least.choice, parts=_FINER_FACTOR * least.choice.parts)
    if _may_be_finer(problem.layout(choice), problem.workload):
        yield from filter(None, [problem.state(choice)])


def from_one_width(first: State) -> State | None:
    """Return the end of the descent from slabs of one width, on a device; None if none fits. On the CPU this did not
    help."""
    if first.problem.limits.slab_columns is not None:
        return None
    problem = replace(first.problem)  # nothing of it has been tried
    tried = filter(None, map(problem.state, Moves(problem).of_one_width(first.choice)))
    best = min(tried, key=lambda one: one.score, default=None)
    return None if best is None else descend(best)


# ---- by the simulator ------------------------------------------------------------------------------------------


def simulated_best(*found: State) -> State:
    """Return the state with the shortest simulated epoch among ``found``, other ends of descents, and candidates near
    them; then follow moves of single sources as long as simulated epochs become shorter. The first of ``found`` has the
    shortest forecast.

    Forecasts are compared as they are on the CPU, where they agreed with measured epochs, and with a limit on bytes
    written, which a faster state might exceed. Only epochs of few steps are simulated.
    """
    best = found[0]
    if not best.problem.on_device or best.problem.limits.ssd_write_bytes is not None:
        return best
    ends = [*found, *filter(None, map(from_one_width, found))]
    for one in ends:
        if one.seconds < (1 - TIE) * best.seconds:  # otherwise keep the first descent's result
            best = one
    steps = _count_steps(best)
    if 2 * steps > _SIMULATED_STEPS:
        return best
    tried = {_layout_identity(best)}
    simulated = [best]
    for one in sorted(chain(ends, *map(others, ends)), key=_count_steps):
        if steps + _count_steps(one) <= _SIMULATED_STEPS and _layout_identity(one) not in tried:
            tried.add(_layout_identity(one))
            simulated.append(one)
            steps += _count_steps(one)
    best = min(simulated, key=lambda one: one.simulated_s)
    moves, at, since, steps = Moves(best.problem), 0, 0, 0
    # Only if none of these is shorter, try the next ones.
    while since < len(steps_on := moves.of_one_source(best.choice)):
        other = best.problem.state(steps_on[at % len(steps_on)])
        at, since = at + 1, since + 1
        if other is not None and steps < _SIMULATED_STEPS and _layout_identity(other) not in tried:
            tried.add(_layout_identity(other))
            steps += _count_steps(other)
            if other.simulated_s < best.simulated_s:
                best, since = other, 0
    return best


def others(best: State) -> Iterator[State]:
    """Yield the next best states that descents have passed, and the best state of every other step height, which
    forecasts tell apart worst."""
    before, found, heights = best.seconds, 0, {best.layout.step_rows}
    for one in sorted(best.problem.states(), key=lambda one: one.score):
        is_near = (
            found < _CANDIDATES and (1 + _EQUAL_FORECAST) * before < one.seconds <= _CANDIDATE_SLACK * best.seconds
        )
        if is_near or one.layout.step_rows not in heights:
            before, found = one.seconds, found + is_near
            heights.add(one.layout.step_rows)
            yield one


def _layout_identity(state: State) -> Hashable:
    """Return a key that is equal for two states with the same layout."""
    workload, choice = state.problem.workload, state.choice
    return id(workload), layout_key(choice, workload), choice.lean


def _count_steps(state: State) -> int:
    """Return the number of steps of an epoch, which its simulation takes time for; steps shared among processes are
    left out."""
    layout, count = state.layout, 0
    for item in layout.programs[EPOCH]:
        if isinstance(item, ColumnPass):
            edges = state.problem.workload.topologies[item.pull.direction].edges
            rows = column_step_rows(item, layout.matrices, layout.step_rows)
            count += item.slabs * (-(-item.rows // rows) + edges // (item.edges_at_once or edges + 1))
        else:
            count += -(-item.rows // row_step_rows(item, layout.step_rows))
    return count
