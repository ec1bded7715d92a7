# SPDX-License-Identifier: Apache-2.0
"""Fates: for every intermediate of a chain, how much waits on the device, on the host and on the SSD, or that it is
computed again, so that an epoch costs least within the budgets.

The idea of choosing among the four by dynamic programming over nested lifetimes is FlexGNN's (KDD 2025), there layer
by layer. Here a choice is of blocks, recomputation starts from wherever the nearest kept ancestor waits, and the
result is the optimum: see ``docs/planner.md``.
"""

from dataclasses import dataclass

from ooc.plan.chain import Budgets, Chain, Choice
from ooc.plan.ledger import Ledger, account
from ooc.plan.levels import Levels, Objective
from ooc.plan.search import cheapest
from ooc.plan.shortage import feasible, shortage
from ooc.plan.workload import Fate


@dataclass(frozen=True, slots=True)
class Waiting:
    """What becomes of one intermediate. ``shares``: the part of its blocks that meets each fate; they add up to 1.

    A recomputed one waits as ``handed_over`` from its writer to the phase after; empty where that does not read it.
    """

    name: str
    nbytes: int
    shares: dict[Fate, float]
    handed_over: dict[Fate, float]


@dataclass(frozen=True)
class Fates:
    """The cheapest choices, and what they mean phase by phase. ``states``: how many the search looked at.

    ``bound``: no choices cost less.
    """

    chain: Chain
    budgets: Budgets
    choices: tuple[Choice, ...]
    ledger: Ledger
    states: int
    bound: float

    def waiting(self) -> tuple[Waiting, ...]:
        """One an intermediate."""
        return tuple(
            Waiting(
                item.name,
                item.nbytes,
                {Fate.RECOMPUTE: 1.0} if choice.recompute else _shares(choice, item.blocks),
                _shares(choice, item.blocks) if choice.recompute else {},
            )
            for item, choice in zip(self.chain.intermediates, self.choices, strict=True)
        )


def _shares(choice: Choice, blocks: int) -> dict[Fate, float]:
    by_fate = {Fate.DEVICE: choice.device, Fate.HOST: choice.host, Fate.SSD: choice.ssd}
    return {fate: count / blocks for fate, count in by_fate.items() if count}


def choose_fates(chain: Chain, budgets: Budgets, *, tolerance: float = 0.0, most_states: int | None = None) -> Fates:
    """The fates of least cost; with ``tolerance`` some that none undercut by more than that part, at times far sooner.

    With ``most_states`` the search gives up after so many: the fates are the best found by then, and ``bound`` says how
    far from the optimum they can be. The result depends on the arguments alone, never on the time it takes.
    Raises BudgetError, naming what lacks how much and what would do, if no fates keep the budgets.
    """
    known = feasible(chain, budgets)
    if known is None:
        raise shortage(chain, budgets)
    found = cheapest(
        Levels(chain, budgets, Objective.COST, tolerance=tolerance),
        cost=account(chain, known, budgets).cost,
        most_states=most_states,
    )
    choices = found.choices or known
    ledger = account(chain, choices, budgets)
    assert ledger.keeps(budgets), "fates over a budget"
    return Fates(chain, budgets, choices, ledger, found.states, found.bound)
