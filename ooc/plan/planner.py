# SPDX-License-Identifier: Apache-2.0
"""The planner: decides which forward stages are recomputed, and takes the best plan that the solver finds for them.

Every set of recomputed stages is a problem of its own (``ooc.plan.problem``). So the planner also descends over sets:
it starts with recomputing nothing, and with a greedy set, and moves to any set with one stage more or one less that has
a plan with a shorter forecast, until none has. The plan of each set starts from the plan without recomputing; the best
set is planned once more from the beginning. If two forecasts are almost equal, the set that recomputes less wins.

On a device with memory of its own, the GPU budget limits slabs and the blocks of a pass. The host holds what the device
asks for again, so every forecast depends on both budgets. A forecast treats each pass by itself, with its resources
running side by side. It leaves out the starts and ends of passes, where one resource waits for another. In passes of a
few dozen steps that is a quarter of the epoch, so there the planner simulates some candidates.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations

from ooc.errors import BudgetError
from ooc.plan.cost import pcie_seconds, ssd_seconds
from ooc.plan.forecast import TIE
from ooc.plan.hardware import UNMEASURED, Hardware
from ooc.plan.layout.passes import shuffles_in
from ooc.plan.problem import NOTHING, Problem, Recomputed, State, Variants
from ooc.plan.program.capacity import Limits, budget_of
from ooc.plan.program.plan import Plan
from ooc.plan.solver import descend, simulated_best, solve
from ooc.plan.workload import Workload
from ooc.sizes import format_size

_MARGIN = 0.1
"""The largest relative gain we expect from a choice of its own for another set, over the choice that is best without
recomputing."""
_FEW_STAGES = 3
"""With this many stages or fewer, every set is tried if recomputing nothing exceeds the limit on bytes written."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The recomputed stages, and the plan of the workload that recomputes them."""

    recomputed: Recomputed
    plan: Plan


def make_plan(workload: Workload, limits: Limits, hardware: Hardware = UNMEASURED) -> Plan:
    """Return the fastest plan for ``workload`` as it is. Raises BudgetError, which names the least budgets that would
    do."""
    return plan_layout(workload, limits, hardware).plan


def choose_workload(variants: Variants, limits: Limits, hardware: Hardware) -> Chosen:
    """Choose the stages to recompute, and return them with the fastest plan within ``limits``. Raises BudgetError,
    which names the least budgets that would do, if nothing fits."""
    kept = _fastest(Problem(variants(NOTHING), limits, hardware, variants=variants))
    if not _keeps_limit(kept):
        best = _reduce_writes(kept)
    else:
        best = _descend(kept)
        best = simulated_best(best, *([] if best is kept else [kept]))
    return Chosen(best.problem.recomputed, best.plan)


# ---- one set of recomputed stages ------------------------------------------------------------------------------


def plan_layout(workload: Workload, limits: Limits, hardware: Hardware) -> State:
    """Return the fastest state of ``workload`` that keeps ``limits``. Raises BudgetError as ``make_plan`` does."""
    fastest = _fastest(Problem(workload, limits, hardware))
    if not _keeps_limit(fastest):
        raise _excess_error(fastest.plan, limits)
    return fastest


def _fastest(problem: Problem) -> State:
    """Return the fastest state of ``problem``. If it writes more to the SSD than allowed, return the fastest one found
    within the limit, and if there is none, the one that writes least."""
    fastest = solve(problem)
    if _keeps_limit(fastest):
        return fastest
    fewest = solve(replace(problem, most_written=0))
    if not _keeps_limit(fewest):
        return min(fastest, fewest, key=_written_bytes)
    within = solve(replace(problem, most_written=problem.limits.ssd_write_bytes))
    return within if _keeps_limit(within) else fewest


def _keeps_limit(state: State) -> bool:
    limit = state.problem.limits.ssd_write_bytes
    return limit is None or _written_bytes(state) <= limit


def _written_bytes(state: State) -> int:
    return state.plan.ssd_write_bytes


def _excess_error(plan: Plan, limits: Limits) -> BudgetError:
    """Return the error for a plan that writes too much: which matrix is written most, what the limit is, and what would
    do."""
    larger = "memory=" if limits.one_memory else "host_budget="
    lowest = plan.lowest("train")
    written = {"optimizer state": plan.state_bytes}
    for blocks in lowest.store:
        for block in blocks:
            name, _, _ = plan.blocks.where(block)
            written[name] = written.get(name, 0) + plan.blocks.nbytes(block)
    for item in plan.programs["train"]:
        written |= {name: one.nbytes for name, one in shuffles_in(item.stores, plan.matrices).items()}
    most = max(written, key=lambda name: written[name])
    return BudgetError(
        f"the plan that writes least writes {format_size(plan.ssd_write_bytes)} an epoch to the SSD, of which "
        f"{format_size(written[most])} are {most}, and the limit is {format_size(limits.ssd_write_bytes or 0)}; "
        f"give max_ssd_writes='{budget_of(plan.ssd_write_bytes)}', or a larger {larger}"
    )


# ---- what is recomputed ----------------------------------------------------------------------------------------


def _descend(kept: State) -> State:
    """Return the best state of the best set of recomputed stages. ``kept``: the state that recomputes nothing."""
    if kept.waiting_s <= 0:  # known before any stage is described
        return kept
    added_s, nbytes = _added_seconds(kept), kept.problem.kept_bytes
    promising = [stage for stage in _order_by_seconds_per_byte(kept, added_s) if added_s[stage] < kept.waiting_s]
    # Other sets pay only if the freed memory avoids moves, as greedy sets show.
    sparing = [stage for stage in nbytes if added_s[stage] < min(kept.waiting_s, _moving_s(kept, nbytes[stage]))]
    best, tried, is_limited = kept, {NOTHING}, kept.problem.limits.ssd_write_bytes is not None
    for start in (_grow_greedily(kept, promising), NOTHING) if promising else ():
        centre: Recomputed | None = start
        while centre is not None:
            around = {centre, *kept.problem.neighbours(centre, sparing)} - tried
            tried |= around
            centre = None
            for problem in _promising_problems(kept, around):
                like = problem.state(problem.adapt_choice(kept.choice))
                if problem.recomputed != start and (like is None or like.seconds >= (1 + _MARGIN) * best.seconds):
                    continue
                # The full search takes several times as long and is run for the best set only.
                other = _solve_within_limit(problem) if like is None or is_limited else descend(like)
                if other is not None and other.seconds < (1 - TIE) * best.seconds:
                    best, centre = other, problem.recomputed
    if best is kept or is_limited:  # already planned in full
        return best
    anew = _solve_within_limit(replace(best.problem))
    return best if anew is None or anew.seconds >= best.seconds else anew


def _solve_within_limit(problem: Problem) -> State | None:
    """Return the fastest state of ``problem``, or None if it does not fit or writes more than allowed."""
    try:
        found = _fastest(problem)
    except BudgetError:
        return None
    return found if _keeps_limit(found) else None


def _grow_greedily(kept: State, order: Sequence[int]) -> Recomputed:
    """Return the set with the shortest forecast among the first 1, 2, 4, … and all stages of ``order``, with matrices
    held as in ``kept``; if none of them fits so, the smallest."""

    def forecast_s(problem: Problem) -> float:
        like = problem.state(problem.adapt_choice(kept.choice))
        return float("inf") if like is None else like.seconds

    sizes = {min(1 << power, len(order)) for power in range(len(order).bit_length() + 1)}
    best = min(_promising_problems(kept, {frozenset(order[:size]) for size in sizes}), key=forecast_s, default=None)
    return NOTHING if best is None else best.recomputed


def _order_by_seconds_per_byte(kept: State, added_s: Mapping[int, float]) -> list[int]:
    """Return the recomputable stages, those first that take the fewest seconds for each byte that is then not kept."""
    return sorted(added_s, key=lambda stage: (added_s[stage] / kept.problem.kept_bytes[stage], stage))


def _added_seconds(kept: State) -> dict[int, float]:
    """Return, by stage, how much longer an epoch computes if that stage alone is recomputed and matrices are held as in
    ``kept``. Stages that are alike are measured once."""
    problem, by_shape = kept.problem, dict[Hashable, float]()
    for stage in problem.kept_bytes:
        if (shape := problem.shapes[stage]) not in by_shape:
            alone = problem.recomputing(frozenset((stage,)))
            layout = alone.layout(alone.adapt_choice(kept.choice))
            by_shape[shape] = alone.computing_s(layout) - problem.computing_s(kept.layout)
    return {stage: by_shape[problem.shapes[stage]] for stage in problem.kept_bytes}


def _moving_s(kept: State, nbytes: int) -> float:
    """Return the seconds to write ``nbytes`` that a stage keeps and to read them again, one after the other."""
    hardware, request_bytes = kept.problem.hardware, kept.layout.frame_bytes
    written = ssd_seconds(hardware, read_bytes=0, write_bytes=nbytes, request_bytes=request_bytes)
    read = ssd_seconds(hardware, read_bytes=nbytes, write_bytes=0, request_bytes=request_bytes)
    over_pcie = pcie_seconds(hardware, to_device_bytes=nbytes, to_host_bytes=0)
    return written + read + over_pcie + pcie_seconds(hardware, to_device_bytes=0, to_host_bytes=nbytes)


def _promising_problems(kept: State, sets: Iterable[Recomputed]) -> Iterator[Problem]:
    """Yield the problems of recomputing each of ``sets``, the smallest first. Left out are sets whose recomputing takes
    longer than the epoch waits for data if everything is kept."""
    height = kept.layout.step_rows
    least_s = kept.problem.bound_s(height)
    for recomputed in sorted(sets, key=_size_key):
        problem = kept.problem.recomputing(recomputed)
        if problem.bound_s(height) - least_s < kept.waiting_s:
            yield problem


def _size_key(recomputed: Recomputed) -> tuple[int, list[int]]:
    return len(recomputed), sorted(recomputed)


def _reduce_writes(kept: State) -> State:
    """Return the fastest state that keeps the limit on bytes written, for use where ``kept``, which recomputes nothing,
    exceeds it."""
    stages = list(kept.problem.kept_bytes)
    if len(stages) > _FEW_STAGES:  # the greedy sets, or every set
        order = _order_by_seconds_per_byte(kept, _added_seconds(kept))
        tried = [frozenset(order[: n + 1]) for n in range(len(order))]
    else:
        tried = [frozenset(some) for n in range(len(stages)) for some in combinations(stages, n + 1)]
    found = [kept]
    for recomputed in sorted(tried, key=_size_key):
        with suppress(BudgetError):  # its memory is short
            found.append(_fastest(kept.problem.recomputing(recomputed)))
    keeping = filter(_keeps_limit, found)
    best = min(keeping, key=lambda one: one.seconds, default=None)
    if best is None:
        raise _excess_error(min(found, key=_written_bytes).plan, kept.problem.limits)
    return best
