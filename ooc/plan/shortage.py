# SPDX-License-Identifier: Apache-2.0
"""Whether a chain can be run at all within its budgets, and the least that would do where it cannot.

Memory alone is short only where a phase's own need passes it: everything that waits could wait on the SSD. Where
written bytes are limited too, the fewest that the memory allows are found by the same search as the cheapest plan.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from ooc.errors import BudgetError
from ooc.plan.chain import Budgets, Chain, Choice
from ooc.plan.ledger import account
from ooc.plan.levels import Levels, Objective
from ooc.plan.search import cheapest
from ooc.sizes import format_size


@lru_cache(maxsize=64)
def fewest_writes(chain: Chain, budgets: Budgets) -> tuple[Choice, ...]:
    """The choices that write least to the SSD, whatever the limit, where every phase fits the memory."""
    everything = tuple(Choice(0, 0, item.blocks) for item in chain.intermediates)
    units = sum(budgets.units(item.nbytes) for item in chain.intermediates)
    found = cheapest(Levels(chain, budgets, Objective.SSD_WRITES), cost=float(units))
    return found.choices or everything


@lru_cache(maxsize=64)
def feasible(chain: Chain, budgets: Budgets) -> tuple[Choice, ...] | None:
    """Some choices within the budgets; None if there are none."""
    if _floors(chain, budgets) != budgets:
        return None
    everything = tuple(Choice(0, 0, item.blocks) for item in chain.intermediates)
    if account(chain, everything, budgets).keeps(budgets):
        return everything
    assert budgets.ssd_write_units is not None, "nothing else can be short"
    room = budgets.ssd_write_units - sum(budgets.units(phase.load.ssd_write_bytes) for phase in chain.phases)
    if room < 0:
        return None
    return cheapest(Levels(chain, budgets, Objective.SSD_WRITES), cost=float(room + 1), enough=room).choices


def remedies(chain: Chain, budgets: Budgets) -> tuple[Budgets, ...]:
    """Budgets that do where ``budgets`` do not, each raised no further than it must be.

    What a phase needs itself is raised in all of them. If written bytes are short then, each remedy raises one budget
    more: any of the three for which that is enough.
    """
    least = _floors(chain, budgets)
    if feasible(chain, least) is not None:
        return (least,)
    return tuple(_one_more(chain, least))


def shortage(chain: Chain, budgets: Budgets) -> BudgetError:
    """The error for budgets that do not do: who needs what, what there is, and what would do."""
    least = _floors(chain, budgets)
    needs = [
        f"phase {_neediest(chain, tier)} needs {format_size(need)} on the {tier}, its budget is {format_size(have)}"
        for tier, need, have in (
            ("device", least.device_bytes, budgets.device_bytes),
            ("host", least.host_bytes, budgets.host_bytes),
        )
        if need > have
    ]
    if feasible(chain, least) is None:
        needs.append(_writes_line(chain, least))
    ways = " or ".join(_options(budgets, remedy) for remedy in remedies(chain, budgets))
    return BudgetError(f"{'; '.join(needs)}; give {ways}")


def _floors(chain: Chain, budgets: Budgets) -> Budgets:
    """``budgets``, raised to what every phase needs whatever becomes of the intermediates."""
    device = max(budgets.units(phase.device_bytes) for phase in chain.phases)
    host = max(budgets.units(phase.host_bytes) for phase in chain.phases)
    if device > budgets.device_units:
        budgets = replace(budgets, device_bytes=device * budgets.unit_bytes)
    if host > budgets.host_units:
        budgets = replace(budgets, host_bytes=host * budgets.unit_bytes)
    return budgets


def _one_more(chain: Chain, least: Budgets) -> Iterator[Budgets]:
    everything = sum(least.units(item.nbytes) + item.blocks for item in chain.intermediates)
    for raised, units in (
        (lambda n: replace(least, device_bytes=n * least.unit_bytes), least.device_units),
        (lambda n: replace(least, host_bytes=n * least.unit_bytes), least.host_units),
    ):
        enough = _least_that_does(chain, raised, short=units, plenty=units + everything)
        if enough is not None:
            yield enough
    choices = fewest_writes(chain, least)
    yield replace(least, ssd_write_bytes=account(chain, choices, least).ssd_write_units * least.unit_bytes)


def _least_that_does(chain: Chain, raised: Callable[[int], Budgets], *, short: int, plenty: int) -> Budgets | None:
    """By bisection: more units never make a chain infeasible. None if not even ``plenty`` do."""
    if feasible(chain, raised(plenty)) is None:
        return None
    while plenty - short > 1:
        middle = (short + plenty) // 2
        if feasible(chain, raised(middle)) is None:
            short = middle
        else:
            plenty = middle
    return raised(plenty)


def _neediest(chain: Chain, tier: str) -> str:
    return max(chain.phases, key=lambda p: p.device_bytes if tier == "device" else p.host_bytes).name


def _writes_line(chain: Chain, budgets: Budgets) -> str:
    """Which matrix, or which phase, writes most where as little as possible is written."""
    choices = fewest_writes(chain, budgets)
    assert budgets.ssd_write_bytes is not None, "nothing else can be short"
    written = account(chain, choices, budgets).ssd_write_units * budgets.unit_bytes
    by_name = {f"phase {phase.name}": phase.load.ssd_write_bytes for phase in chain.phases}
    by_name |= {i.name: c.ssd * i.block_bytes for i, c in zip(chain.intermediates, choices, strict=True)}
    most = max(by_name, key=by_name.__getitem__)
    return (
        f"at least {format_size(written)} an epoch have to be written to the SSD, {format_size(by_name[most])} of them "
        f"{most}, its budget is {format_size(budgets.ssd_write_bytes)}"
    )


def _options(given: Budgets, remedy: Budgets) -> str:
    """The options that raise ``given`` to ``remedy``, in bytes, for a rounded size might round a plan away."""
    options = [("--gpu-budget", given.device_bytes, remedy.device_bytes)]
    options.append(("--host-budget", given.host_bytes, remedy.host_bytes))
    options.append(("--max-ssd-writes", given.ssd_write_bytes or 0, remedy.ssd_write_bytes or 0))
    return " and ".join(f"{option} {need}" for option, have, need in options if need > have)
