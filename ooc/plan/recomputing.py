# SPDX-License-Identifier: Apache-2.0
"""Which forward stages the backward pass had better run again than find kept, and the plan for what is left to do.

Two levels of choice meet here. Which matrices are kept, and which computed again, is decided by dynamic programming on
the epoch as a chain (``ooc.plan.fates``). How matrices are cut and held, and which blocks then wait where, is decided
for a workload (``ooc.plan.planner``); each set of stages that are run again is a workload of its own. The chain is the
coarser of the two, so its answer is a proposal from which to go on: to whatever set with one stage more or one less has
an arrangement with a shorter forecast, until none has. Where forecasts are as good as equal, the fewest are run again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ooc.errors import BudgetError
from ooc.plan.budgets import Limits
from ooc.plan.contenders import fastest_plan
from ooc.plan.epoch_chain import chain_of
from ooc.plan.fates import choose_fates
from ooc.plan.forecast import TIE, seconds_of_computing
from ooc.plan.hardware import Hardware
from ooc.plan.layout import Choice, Cut, Layout, lay_out, pulled_sources
from ooc.plan.plan import Plan
from ooc.plan.planner import Arrangement, arrange, fewest_writes, seconds_like
from ooc.plan.workload import Workload

Forgotten = frozenset[int]
"""Forward stages, by number, that are run again in the backward pass."""
Variants = Callable[[Forgotten], Workload]
"""The workload in which these stages are run again."""

_NOTHING: Forgotten = frozenset()
_MARGIN = 0.1
"""What a workload may gain by an arrangement of its own."""
_TOLERANCE = 0.001
_MOST_STATES = 20_000
"""The chain's answer is only a proposal: it is not worth more than a second."""
_FEW_STAGES = 3
"""Of so many stages every set is tried where nothing else keeps a limit on what is written."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The stages that are run again, and the plan for that workload."""

    forgotten: Forgotten
    plan: Plan


def choose_workload(variants: Variants, limits: Limits, hardware: Hardware) -> Chosen:
    """The fastest of ``variants`` within ``limits``, planned; BudgetError, with the least budgets, where none is."""
    workload = variants(_NOTHING)
    stages = [kept.stage for kept in workload.kept if kept.repeatable]
    try:
        kept = arrange(workload, limits, hardware)
    except BudgetError:
        if limits.ssd_write_bytes is None or not stages:
            raise
        return _writing_less(variants, stages, limits, hardware)
    best, forgotten = kept, _NOTHING
    tried = {_NOTHING}
    centre = proposed = _proposed(kept, stages, variants)
    while centre is not None:
        around = _worth_trying(kept, {centre, *(centre ^ {stage} for stage in stages)} - tried, variants)
        tried.update(around)
        centre = None
        for candidate in around:
            if candidate != proposed and not _promises(variants(candidate), kept, best):
                continue
            other = _arranged(variants(candidate), limits, hardware)
            if other is not None and other.seconds < (1 - TIE) * best.seconds:
                best, forgotten = other, candidate
                centre = candidate
    return Chosen(forgotten, fastest_plan(best))


def _promises(workload: Workload, kept: Arrangement, best: Arrangement) -> bool:
    """Whether ``workload``, arranged as the one that keeps everything, fits and is not much slower than the best so
    far: the search for its own arrangement takes a hundred times as long, and hardly brings more than that."""
    seconds = seconds_like(workload, kept)
    return seconds is not None and seconds < (1 + _MARGIN) * best.seconds


def _arranged(workload: Workload, limits: Limits, hardware: Hardware) -> Arrangement | None:
    """None where that takes more memory than there is, or writes more than it may."""
    try:
        return arrange(workload, limits, hardware)
    except BudgetError:
        return None


def _writing_less(variants: Variants, stages: Sequence[int], limits: Limits, hardware: Hardware) -> Chosen:
    """The fastest workload that keeps a limit on written bytes which keeping everything does not."""
    free = arrange(variants(_NOTHING), replace(limits, ssd_write_bytes=None), hardware)
    proposed = _by_chain(replace(free, limits=limits))
    sets = sorted(_sets(stages, proposed), key=lambda forgotten: (len(forgotten), sorted(forgotten)))
    found = [(forgotten, _arranged(variants(forgotten), limits, hardware)) for forgotten in sets]
    keeping = [(arranged.seconds, forgotten, arranged) for forgotten, arranged in found if arranged is not None]
    if keeping:
        _, forgotten, arranged = min(keeping, key=lambda one: one[0])
        return Chosen(forgotten, arranged.plan)
    least = min([_NOTHING, *sets], key=lambda forgotten: _fewest_writes(variants(forgotten), limits, hardware))
    arrange(variants(least), limits, hardware)
    raise AssertionError("a limit that could not be kept is kept")


def _fewest_writes(workload: Workload, limits: Limits, hardware: Hardware) -> float:
    try:
        return fewest_writes(workload, limits, hardware)
    except BudgetError:
        return float("inf")


def _sets(stages: Sequence[int], proposed: Forgotten) -> set[Forgotten]:
    """Every set of them where they are few; else what the chain proposes, its neighbours, and all of them."""
    if len(stages) > _FEW_STAGES:
        return {frozenset(stages), proposed, *(proposed ^ {stage} for stage in stages)} - {_NOTHING}
    counts = range(1, len(stages) + 1)
    return {frozenset(chosen) for count in counts for chosen in combinations(stages, count)}


# ---- what is worth trying --------------------------------------------------------------------------------------


def _proposed(kept: Arrangement, stages: Sequence[int], variants: Variants) -> Forgotten | None:
    """What is computed again at the least cost of the chain; None if nothing is worth trying."""
    if not _worth_trying(kept, [frozenset((stage,)) for stage in stages], variants):
        return None
    return _by_chain(kept)


def _by_chain(kept: Arrangement) -> Forgotten:
    """What is computed again at the least cost of the chain; nothing where it says nothing."""
    epoch = chain_of(kept.workload, kept.limits, kept.hardware, layout=kept.layout, leanest=kept.leanest)
    if epoch is None:
        return _NOTHING
    try:
        fates = choose_fates(epoch.chain, epoch.budgets, tolerance=_TOLERANCE, most_states=_MOST_STATES)
    except BudgetError:
        return _NOTHING
    return frozenset(stage for stage, choice in zip(epoch.stages, fates.choices, strict=True) if choice.recompute)


def _worth_trying(kept: Arrangement, sets: Iterable[Forgotten], variants: Variants) -> list[Forgotten]:
    """The smallest first; without those that compute for longer than all that an epoch waits if everything is kept."""
    layout, hardware = kept.layout, kept.hardware
    waiting = kept.seconds - _computing(kept.workload, layout, hardware)
    least = _computing(kept.workload, _whole(kept.workload, layout), hardware)

    def pays(forgotten: Forgotten) -> bool:
        workload = variants(forgotten)
        return _computing(workload, _whole(workload, layout), hardware) - least < waiting

    return sorted(filter(pays, sets), key=lambda forgotten: (len(forgotten), sorted(forgotten)))


def _computing(workload: Workload, layout: Layout, hardware: Hardware) -> float:
    """Seconds an epoch computes."""
    return sum(seconds_of_computing(item, layout, workload, hardware) for item in layout.programs["train"])


def _whole(workload: Workload, like: Layout) -> Layout:
    """Steps as of ``like``, with everything that is pulled held whole: nothing computes sooner."""
    return lay_out(workload, Choice(like.step_rows, dict.fromkeys(pulled_sources(workload), Cut(0, 0))))
