# SPDX-License-Identifier: Apache-2.0
"""From a workload and budgets to a plan: which stages are recomputed, and the best of what the solver finds.

Each set of recomputed stages is a problem of its own (``ooc.plan.problem``), so the sets are descended, too: from
keeping everything, and from a greedy set, on to whatever set with one stage more or one less has a plan with a shorter
forecast, until none has. Each set's plan begins like the one without recomputing, and the best set is planned anew.
Where forecasts are as good as equal, the fewest are recomputed.

Where the device has memory of its own, its budget decides how matrices are cut: slabs and the blocks of a pass must lie
there. What the host then holds follows from what the device asks for, so both budgets are in every forecast. And a
forecast takes each pass for itself, its resources side by side: what it leaves out are the beginnings and ends of
passes and sweeps, where one resource waits for another. That is a quarter of an epoch where a pass has a few dozen
steps, so there a few candidates are simulated.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

from ooc.errors import BudgetError
from ooc.plan.cost import pcie_seconds, ssd_seconds
from ooc.plan.forecast import TIE
from ooc.plan.hardware import UNMEASURED, Hardware
from ooc.plan.layout.passes import shuffles_in
from ooc.plan.problem import Problem, Recomputed, Variants
from ooc.plan.program.capacity import Limits, budget_of
from ooc.plan.program.plan import Plan
from ooc.plan.solver import PlannedLayout, simulated_best, solve, solve_from
from ooc.plan.workload import Workload
from ooc.sizes import format_size

NOTHING: Recomputed = frozenset()
_MARGIN = 0.1
"""What a set may gain by a choice of its own over the one that was best without recomputing."""
_FEW_STAGES = 3
"""Of so many stages every set is tried where nothing else keeps a limit on what is written."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The recomputed stages, and the plan for that workload."""

    recomputed: Recomputed
    plan: Plan


def make_plan(workload: Workload, limits: Limits, hardware: Hardware = UNMEASURED) -> Plan:
    """The plan for ``workload`` as it is; raises BudgetError naming the least budgets that would do."""
    return plan_layout(workload, limits, hardware).plan


def choose_workload(variants: Variants, limits: Limits, hardware: Hardware) -> Chosen:
    """The fastest of ``variants`` within ``limits``, planned; BudgetError, with the least budgets, where none is."""
    ends = _ends(variants(NOTHING), limits, hardware)
    kept = _keeping(ends, limits)
    if kept is None:
        return _writing_less(ends, variants)
    recomputed, best = _descend(kept, variants)
    fastest = simulated_best(best, *([] if best is kept else [kept]))
    return Chosen(recomputed if fastest.problem.workload is best.problem.workload else NOTHING, fastest.plan)


# ---- one workload ----------------------------------------------------------------------------------------------


def plan_layout(workload: Workload, limits: Limits, hardware: Hardware, began: int = 0) -> PlannedLayout:
    """The fastest way to run ``workload`` that keeps ``limits``; raises BudgetError as ``make_plan`` does. ``began``:
    as of ``solve``."""
    ends = _ends(workload, limits, hardware, began)
    keeping = _keeping(ends, limits)
    if keeping is None:
        raise BudgetError(_excess(min((one.plan for one in ends), key=_written), limits))
    return keeping


def _ends(workload: Workload, limits: Limits, hardware: Hardware, began: int = 0) -> list[PlannedLayout]:
    """The fastest way to run ``workload``; where it writes more than it may, the one that writes least; and where that
    does not, the fastest one of what is looked for within the limit."""
    fastest = solve(Problem(workload, limits, hardware), began)
    if _keeping([fastest], limits) is not None:
        return [fastest]
    fewest = solve(Problem(workload, limits, hardware, most_written=0), began)
    if _keeping([fewest], limits) is None:
        return [fastest, fewest]
    return [fastest, fewest, solve(Problem(workload, limits, hardware, most_written=limits.ssd_write_bytes), began)]


def _keeping(ends: Sequence[PlannedLayout], limits: Limits) -> PlannedLayout | None:
    """The last of ``ends`` that writes no more than it may."""
    limit = limits.ssd_write_bytes
    return next((one for one in reversed(ends) if limit is None or _written(one.plan) <= limit), None)


def _written(plan: Plan) -> int:
    return plan.ssd_write_bytes


def _excess(plan: Plan, limits: Limits) -> str:
    """Who writes how much, what may be written, and what would do."""
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
    return (
        f"the plan that writes least writes {format_size(plan.ssd_write_bytes)} an epoch to the SSD, of which "
        f"{format_size(written[most])} are {most}, and the limit is {format_size(limits.ssd_write_bytes or 0)}; "
        f"give max_ssd_writes='{budget_of(plan.ssd_write_bytes)}', or a larger {larger}"
    )


# ---- what is recomputed ----------------------------------------------------------------------------------------


def _descend(kept: PlannedLayout, variants: Variants) -> tuple[Recomputed, PlannedLayout]:
    """The best set of recomputed stages that is found, and how to run it. ``kept``: where nothing is recomputed."""
    limits, hardware = kept.problem.limits, kept.problem.hardware
    best, recomputed, tried = kept, NOTHING, {NOTHING}
    promising, sparing = _promising(kept, variants)
    for start in (_greedy(kept, promising, variants), NOTHING) if promising else ():
        centre: Recomputed | None = start
        while centre is not None:
            around = _worth_trying(kept, {centre, *_neighbours(centre, sparing, kept.problem)} - tried, variants)
            tried.update(around)
            centre = None
            for candidate in around:
                problem = Problem(variants(candidate), limits, hardware)
                like = problem.like(kept.choice)
                if candidate != start and (like is None or like.seconds >= (1 + _MARGIN) * best.seconds):
                    continue
                if like is None or limits.ssd_write_bytes is not None:
                    other = _within(problem, kept.began)
                else:  # the whole search takes several times as long, and is for the best of them alone
                    other = solve_from(problem, like)
                if other is not None and other.seconds < (1 - TIE) * best.seconds:
                    best, recomputed, centre = other, candidate, candidate
    if best is kept or limits.ssd_write_bytes is not None:  # which has been planned from the ground
        return recomputed, best
    anew = _within(best.problem, kept.began)
    return recomputed, best if anew is None or anew.seconds >= best.seconds else anew


def _neighbours(centre: Recomputed, stages: Sequence[int], problem: Problem) -> Iterator[Recomputed]:
    """The sets with one stage more or one less. Of stages that are alike, as those beside them are, one: the first one
    more, as what it keeps waits longest, or the last one less."""
    alike: dict[Hashable, int] = {}
    for before, stage, after in zip([None, *stages], stages, [*stages[1:], None], strict=False):
        key = problem.shape_of(stage), *(one in centre for one in (before, stage, after))
        if stage in centre or key not in alike:
            alike[key] = stage
    return (centre ^ {stage} for stage in alike.values())


def _within(problem: Problem, began: int = 0) -> PlannedLayout | None:
    """None where that takes more memory than there is, or writes more than it may. ``began``: where the search for what
    fits begins, as it takes as long for every set of recomputed stages."""
    try:
        return plan_layout(problem.workload, problem.limits, problem.hardware, began)
    except BudgetError:
        return None


def _greedy(kept: PlannedLayout, stages: Sequence[int], variants: Variants) -> Recomputed:
    """Of 1, 2, 4, … of ``stages`` and all of them, those that take fewest seconds for the bytes that are spared first,
    the set with the shortest forecast, its matrices held as where nothing is recomputed; of those that do not fit so,
    the smallest."""

    def forecast_s(recomputed: Recomputed) -> float:
        like = Problem(variants(recomputed), kept.problem.limits, kept.problem.hardware).like(kept.choice)
        return float("inf") if like is None else like.seconds

    order = _by_seconds_a_byte(kept, stages, variants)
    sizes = {min(1 << power, len(order)) for power in range(len(order).bit_length() + 1)}
    sets = _worth_trying(kept, (frozenset(order[:size]) for size in sizes), variants)
    return min(sets, key=forecast_s, default=NOTHING)


def _by_seconds_a_byte(kept: PlannedLayout, stages: Iterable[int], variants: Variants) -> list[int]:
    """Those of ``stages`` first that take fewest seconds for each byte that is then not kept."""
    nbytes, added_s = kept.problem.kept_bytes, _added_s(kept, variants)
    return sorted(stages, key=lambda stage: (added_s[stage] / nbytes[stage], stage))


def _added_s(kept: PlannedLayout, variants: Variants) -> dict[int, float]:
    """By stage: how much longer an epoch computes where it alone is recomputed, and matrices are held as they are. Of
    those that are alike one is described."""
    problem, by_shape = kept.problem, dict[Hashable, float]()
    for stage in problem.kept_bytes:
        if (shape := problem.shape_of(stage)) not in by_shape:
            alone = Problem(variants(frozenset((stage,))), problem.limits, problem.hardware)
            layout = alone.layout(alone.held_like(kept.choice))
            by_shape[shape] = alone.computing_s(layout) - problem.computing_s(kept.layout)
    return {stage: by_shape[problem.shape_of(stage)] for stage in problem.kept_bytes}


def _promising(kept: PlannedLayout, variants: Variants) -> tuple[list[int], list[int]]:
    """The stages that may be worth recomputing: those that take less than an epoch waits if everything is kept. And of
    these the ones that take less than to move what they keep: others pay only if what then has their memory is moved
    no longer, which greedy sets tell."""
    problem, hardware = kept.problem, kept.problem.hardware
    waiting = kept.waiting_s
    if waiting <= 0:  # known before any of them is described
        return [], []
    request_bytes = kept.layout.frame_bytes

    def moving_s(nbytes: int) -> float:
        """To write what a stage keeps and to read it, one after the other."""
        written = ssd_seconds(hardware, read_bytes=0, write_bytes=nbytes, request_bytes=request_bytes)
        read = ssd_seconds(hardware, read_bytes=nbytes, write_bytes=0, request_bytes=request_bytes)
        over_pcie = pcie_seconds(hardware, to_device_bytes=nbytes, to_host_bytes=0)
        return written + read + over_pcie + pcie_seconds(hardware, to_device_bytes=0, to_host_bytes=nbytes)

    nbytes, added_s = problem.kept_bytes, _added_s(kept, variants)
    promising = [stage for stage in nbytes if added_s[stage] < waiting]
    return promising, [stage for stage in promising if added_s[stage] < moving_s(nbytes[stage])]


def _worth_trying(kept: PlannedLayout, sets: Iterable[Recomputed], variants: Variants) -> list[Recomputed]:
    """The smallest first; without those that compute for longer than all that an epoch waits if everything is kept."""
    problem, height = kept.problem, kept.layout.step_rows
    waiting, least = kept.waiting_s, problem.bound_s(height)

    def pays(recomputed: Recomputed) -> bool:
        bound = Problem(variants(recomputed), problem.limits, problem.hardware).bound_s(height)
        return bound - least < waiting

    return sorted(filter(pays, sets), key=lambda recomputed: (len(recomputed), sorted(recomputed)))


def _writing_less(kept: list[PlannedLayout], variants: Variants) -> Chosen:
    """The fastest workload that keeps a limit on written bytes which ``kept``, the ends of keeping everything, do
    not."""
    free, *_ = kept
    limits, hardware = free.problem.limits, free.problem.hardware
    stages = list(free.problem.kept_bytes)
    if len(stages) > _FEW_STAGES:  # those that greed leads to, else every set
        order = _by_seconds_a_byte(free, stages, variants)
        tried = {frozenset(order[: n + 1]) for n in range(len(order))}
    else:
        tried = {frozenset(some) for n in range(len(stages)) for some in combinations(stages, n + 1)}
    found = [(NOTHING, kept)]
    for recomputed in sorted(tried, key=lambda recomputed: (len(recomputed), sorted(recomputed))):
        with suppress(BudgetError):  # its memory is short
            found.append((recomputed, _ends(variants(recomputed), limits, hardware)))
    keeping = [(one.seconds, recomputed, one) for recomputed, ends in found if (one := _keeping(ends, limits))]
    if keeping:
        _, recomputed, planned = min(keeping, key=lambda one: one[0])
        return Chosen(recomputed, planned.plan)
    raise BudgetError(_excess(min((one.plan for _, ends in found for one in ends), key=_written), limits))
