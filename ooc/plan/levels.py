# SPDX-License-Identifier: Apache-2.0
"""A chain made ready for search: by depth, the choices there are, the room they take and what they cost.

A level is one depth of the nest: the forward phase that writes its intermediate and the backward phase that mirrors
it. Its choices are numbered; one number more, the last, stands for nothing waiting anywhere.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import assert_never

from ooc.plan.chain import Budgets, Chain, Choice, Intermediate, Load, Recomputation

_EXACTNESS = 1e-12
"""A plan better by less than this part is the same: sums of floating point numbers differ by their order."""


class Objective(Enum):
    """What a search minimises."""

    COST = "seconds, and what sparing the SSD is worth"
    SSD_WRITES = "units written to the SSD"


@dataclass(frozen=True)
class Level:
    """One depth. Lists go by the number of a choice; ``room`` is what a phase's own memory leaves of a budget.

    ``forward[x][y]``: cost of the forward phase if the intermediate before waits as its choice ``x`` and this one as
    ``y``. ``backward[y]``: cost of the backward phase if it is kept as ``y``.
    """

    item: Intermediate
    choices: tuple[Choice, ...]
    device: list[int]
    host: list[int]
    written: list[int]
    forward: list[list[float]]
    backward: list[float]
    forward_device_room: int
    forward_host_room: int
    backward_device_room: int
    backward_host_room: int

    @property
    def nothing(self) -> int:
        return len(self.choices)

    @property
    def device_room(self) -> int:
        """For what is kept, which both phases must have room for."""
        return min(self.forward_device_room, self.backward_device_room)

    @property
    def host_room(self) -> int:
        return min(self.forward_host_room, self.backward_host_room)


class Levels:
    """All depths of ``chain`` under ``budgets``. What is cheaper by less than the part ``tolerance`` is not sought."""

    def __init__(self, chain: Chain, budgets: Budgets, objective: Objective, *, tolerance: float = 0.0) -> None:
        self.chain = chain
        self.budgets = budgets
        self.objective = objective
        self.tolerance = max(tolerance, _EXACTNESS)
        self.levels: list[Level] = []
        before: Level | None = None
        for depth in range(chain.depth):
            before = self._level(depth, before)
            self.levels.append(before)
        self.again = lru_cache(maxsize=None)(self._again)
        self.again_room = lru_cache(maxsize=None)(self._again_room)

    @cached_property
    def write_room(self) -> int | None:
        """Units that intermediates may write to the SSD; None: any number."""
        limit = self.budgets.ssd_write_units
        if limit is None or self.objective is Objective.SSD_WRITES:
            return None
        return limit - sum(self.budgets.units(phase.load.ssd_write_bytes) for phase in self.chain.phases)

    def _level(self, depth: int, before: Level | None) -> Level:
        chain, units = self.chain, self.budgets.units
        item = chain.intermediates[depth]
        forward, backward = chain.phases[depth], chain.phases[chain.mirror(depth)]
        device_room = self.budgets.device_units - units(forward.device_bytes)
        host_room = self.budgets.host_units - units(forward.host_bytes)
        choices = tuple(
            Choice(d, h, item.blocks - d - h)
            for d in range(item.blocks + 1)
            if units(d * item.block_bytes) <= device_room
            for h in range(item.blocks + 1 - d)
            if units(h * item.block_bytes) <= host_room
        )
        limited = self.budgets.ssd_write_bytes is not None and self.objective is Objective.COST
        return Level(
            item=item,
            choices=choices,
            device=[*(units(c.device * item.block_bytes) for c in choices), 0],
            host=[*(units(c.host * item.block_bytes) for c in choices), 0],
            written=[*(units(c.ssd * item.block_bytes) if limited else 0 for c in choices), 0],
            forward=self._forward_costs(forward.load, item, choices, before),
            backward=[self._cost(backward.load + c.read(item.block_bytes)) for c in choices],
            forward_device_room=device_room,
            forward_host_room=host_room,
            backward_device_room=self.budgets.device_units - units(backward.device_bytes),
            backward_host_room=self.budgets.host_units - units(backward.host_bytes),
        )

    def _forward_costs(
        self, load: Load, item: Intermediate, choices: tuple[Choice, ...], before: Level | None
    ) -> list[list[float]]:
        """By choice of the intermediate before, nothing included, and by choice of this one, nothing included."""
        written = [*(load + c.written(item.block_bytes) for c in choices), load]
        if self.objective is Objective.SSD_WRITES:
            row = [float(self.budgets.units(w.ssd_write_bytes - load.ssd_write_bytes)) for w in written]
            return [row] * (before.nothing + 1 if before else 1)
        row = [self._cost(w) for w in written]
        if before is None:
            return [row]
        if not before.item.read_next:
            return [row] * (before.nothing + 1)
        rates = self.chain.rates
        up_s, read_s, both_s = (
            1 / rates.up_bytes_per_s,
            1 / rates.ssd_read_bytes_per_s,
            1 / rates.ssd_both_bytes_per_s,
        )
        hidden = rates.overlap
        fixed = [
            (
                w.compute_s,
                w.down_bytes / rates.down_bytes_per_s,
                w.ssd_write_bytes / rates.ssd_write_bytes_per_s,
                w.ssd_write_bytes * both_s,
                rates.written_byte_s * w.ssd_write_bytes,
            )
            for w in written
        ]
        rows = []
        for choice in before.choices:
            read = load + choice.read(before.item.block_bytes)
            up = read.up_bytes * up_s
            reading, sharing = read.ssd_read_bytes * read_s, read.ssd_read_bytes * both_s
            rows.append(
                [
                    hidden * max(compute, up, down, ssd := max(reading, write, sharing + both))
                    + (1 - hidden) * (compute + up + down + ssd)
                    + wear
                    for compute, down, write, both, wear in fixed
                ]
            )
        return [*rows, row]

    def _cost(self, load: Load) -> float:
        match self.objective:
            case Objective.COST:
                return self.chain.rates.cost(load)
            case Objective.SSD_WRITES:
                return 0.0
            case _:
                assert_never(self.objective)

    def better(self, cost: float) -> float:
        """Only what costs less than this is better than ``cost``."""
        match self.objective:
            case Objective.COST:
                return cost * (1 - self.tolerance)
            case Objective.SSD_WRITES:  # whole units
                return cost - 1 + 1e-6
            case _:
                assert_never(self.objective)

    def recomputation(self, depth: int) -> Recomputation | None:
        return self.chain.intermediates[depth].recomputation if depth < self.chain.depth else None

    def _again(self, ancestor: int, choice: int, depth: int) -> float:
        """Cost of the backward phase at ``depth`` that recomputes all after ``ancestor``, kept as ``choice``."""
        chain = self.chain
        load = chain.phases[chain.mirror(depth)].load
        if ancestor < 0:
            load += chain.source
        else:
            level = self.levels[ancestor]
            load += level.choices[choice].read(level.item.block_bytes)
        for at in range(ancestor + 1, depth + 1):
            work = self.recomputation(at)
            assert work is not None
            load += work.load
        return self._cost(load)

    def _again_room(self, ancestor: int, depth: int) -> tuple[int, int]:
        """Units of device and host that are left for what is kept while that phase recomputes."""
        work = [r for at in range(ancestor + 1, depth + 1) if (r := self.recomputation(at)) is not None]
        level = self.levels[depth]
        device = max(self.budgets.units(r.device_bytes) for r in work)
        host = max(self.budgets.units(r.host_bytes) for r in work)
        return level.backward_device_room - device, level.backward_host_room - host
