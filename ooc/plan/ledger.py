# SPDX-License-Identifier: Apache-2.0
"""What given fates mean, phase by phase: bytes by tier and direction, memory, seconds. It decides nothing.

The ledger follows the definition of the problem and knows nothing of how fates are chosen, so that it can check it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ooc.plan.chain import Budgets, Chain, Choice, Load, Recomputation


class Resource(Enum):
    """What a phase can be waiting for."""

    COMPUTE = "compute"
    UP = "host to device"
    DOWN = "device to host"
    SSD = "ssd"


@dataclass(frozen=True, slots=True)
class Entry:
    """One phase: what it does, the memory it takes in units (its own and all that waits), and its seconds."""

    phase: str
    load: Load
    device_units: int
    host_units: int
    seconds: float
    busiest: Resource


@dataclass(frozen=True)
class Ledger:
    """All phases of an epoch."""

    entries: tuple[Entry, ...]
    ssd_write_units: int
    cost: float

    @property
    def seconds(self) -> float:
        return sum(entry.seconds for entry in self.entries)

    @property
    def device_units(self) -> int:
        """The peak."""
        return max(entry.device_units for entry in self.entries)

    @property
    def host_units(self) -> int:
        """The peak."""
        return max(entry.host_units for entry in self.entries)

    @property
    def ssd_read_bytes(self) -> int:
        return sum(entry.load.ssd_read_bytes for entry in self.entries)

    @property
    def ssd_write_bytes(self) -> int:
        return sum(entry.load.ssd_write_bytes for entry in self.entries)

    def keeps(self, budgets: Budgets) -> bool:
        """Whether no budget is passed."""
        limit = budgets.ssd_write_units
        return (
            self.device_units <= budgets.device_units
            and self.host_units <= budgets.host_units
            and (limit is None or self.ssd_write_units <= limit)
        )


def kept_ancestor(choices: Sequence[Choice], depth: int) -> int:
    """The nearest intermediate before ``depth`` that is not recomputed; -1: the input."""
    at = depth - 1
    while at >= 0 and choices[at].recompute:
        at -= 1
    return at


def account(chain: Chain, choices: Sequence[Choice], budgets: Budgets) -> Ledger:
    """The ledger of ``choices``, one an intermediate; of ``budgets`` only the unit matters."""
    entries = tuple(_entry(chain, choices, budgets, phase) for phase in range(len(chain.phases)))
    written = sum(budgets.units(phase.load.ssd_write_bytes) for phase in chain.phases) + sum(
        budgets.units(choice.ssd * item.block_bytes) for choice, item in zip(choices, chain.intermediates, strict=True)
    )
    return Ledger(entries, written, sum(chain.rates.cost(entry.load) for entry in entries))


def _entry(chain: Chain, choices: Sequence[Choice], budgets: Budgets, phase: int) -> Entry:
    backward = phase >= chain.depth
    depth = chain.mirror(phase) if backward else phase
    load = chain.phases[phase].load
    load += _backward(chain, choices, depth) if backward else _forward(chain, choices, depth)
    device = budgets.units(chain.phases[phase].device_bytes)
    host = budgets.units(chain.phases[phase].host_bytes)
    for i in range(depth + 1):
        handed_over = not backward and i in (depth, depth - 1)  # from its writer to the phase after
        if handed_over or not choices[i].recompute:
            device += budgets.units(choices[i].device * chain.intermediates[i].block_bytes)
            host += budgets.units(choices[i].host * chain.intermediates[i].block_bytes)
    if backward and choices[depth].recompute:
        work = [_recomputation(chain, i) for i in range(kept_ancestor(choices, depth) + 1, depth + 1)]
        device += max(budgets.units(item.device_bytes) for item in work)
        host += max(budgets.units(item.host_bytes) for item in work)
    busy = chain.rates.busy_s(load)
    busiest = tuple(Resource)[busy.index(max(busy))]
    return Entry(chain.phases[phase].name, load, device, host, chain.rates.seconds(load), busiest)


def _forward(chain: Chain, choices: Sequence[Choice], depth: int) -> Load:
    """Writing intermediate ``depth``, and reading the one before if the phase needs it."""
    load = choices[depth].written(chain.intermediates[depth].block_bytes)
    if depth and chain.intermediates[depth - 1].read_next:
        load += choices[depth - 1].read(chain.intermediates[depth - 1].block_bytes)
    return load


def _backward(chain: Chain, choices: Sequence[Choice], depth: int) -> Load:
    """Reading intermediate ``depth``, or recomputing it from its nearest kept ancestor, one after the other."""
    if not choices[depth].recompute:
        return choices[depth].read(chain.intermediates[depth].block_bytes)
    ancestor = kept_ancestor(choices, depth)
    load = chain.source if ancestor < 0 else choices[ancestor].read(chain.intermediates[ancestor].block_bytes)
    return sum((_recomputation(chain, i).load for i in range(ancestor + 1, depth + 1)), load)


def _recomputation(chain: Chain, depth: int) -> Recomputation:
    item = chain.intermediates[depth].recomputation
    assert item is not None, f"{chain.intermediates[depth].name} cannot be recomputed"
    return item
