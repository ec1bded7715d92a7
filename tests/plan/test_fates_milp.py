# SPDX-License-Identifier: Apache-2.0
"""Fates of chains too large to try every plan cost what an integer program for the same problem costs.

Both count whole blocks, sizes rounded up to units and budgets down to them, so that their optima are equal, but for
what the solver takes for optimal (a relative gap of 1e-9 and its tolerances).
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ooc.errors import BudgetError
from tests.plan.chains import keeps, play, random_chain
from tests.plan.fates import Budgets, Chain, Load, Phase, choose_fates

Terms = dict[int, float]
"""A linear expression: coefficients by variable; variable -1 is the constant."""


@dataclass
class IntegerProgram:
    """Variables from 0 up to a bound, linear constraints ``low ≤ terms ≤ high``, a linear objective to minimise."""

    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[tuple[Terms, float, float]] = field(default_factory=list)
    objective: Terms = field(default_factory=lambda: defaultdict(float))

    def variable(self, upper: float = math.inf, *, whole: bool = True) -> int:
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.upper) - 1

    def at_most(self, terms: Terms, high: float = 0.0) -> None:
        self.rows.append((terms, -math.inf, high))

    def equal(self, terms: Terms, value: float = 0.0) -> None:
        self.rows.append((terms, value, value))

    def solve(self) -> float | None:
        """The least objective; None if there is no solution."""
        entries, places, starts, low, high = [], [], [0], [], []
        for terms, least, most in self.rows:
            constant = terms.get(-1, 0.0)
            for at, value in terms.items():
                if at >= 0:
                    entries.append(value)
                    places.append(at)
            starts.append(len(entries))
            low.append(least - constant)
            high.append(most - constant)
        matrix = csr_array((entries, places, starts), shape=(len(self.rows), len(self.upper)))
        goal = np.zeros(len(self.upper))
        for at, value in self.objective.items():
            if at >= 0:
                goal[at] = value
        result = milp(
            goal,
            integrality=np.array(self.whole),
            bounds=Bounds(0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": 1e-9},
        )
        if result.status == 2:
            return None
        assert result.status == 0, result.message
        return float(result.fun) + self.objective.get(-1, 0.0)


def plus(*parts: tuple[float, Terms]) -> Terms:
    total: Terms = defaultdict(float)
    for factor, terms in parts:
        for at, value in terms.items():
            total[at] += factor * value
    return total


class Formulation:
    """The problem as an integer program.

    By item i: ``kept``, three numbers of blocks kept, units they take, and for every ancestor a whether i is recomputed
    from a. Traffic read from an ancestor is a product of a binary and a number of blocks, made linear by a bound; a
    phase's longest work and the SSD's busy time are variables no less than each of their candidates.
    """

    def __init__(self, chain: Chain, budgets: Budgets) -> None:
        self.chain, self.budgets, self.program = chain, budgets, IntegerProgram()
        items, program = chain.items, self.program
        self.kept = [program.variable(1) for _ in items]
        self.keep = [[program.variable(i.blocks) for _ in range(3)] for i in items]
        self.from_: list[dict[int, int]] = [{a: program.variable(1) for a in range(-1, i)} for i in range(len(items))]
        for i, item in enumerate(items):
            program.equal({**dict.fromkeys(self.keep[i], 1.0), self.kept[i]: -item.blocks})
            if item.recomputation is None:
                program.equal({self.kept[i]: 1.0}, 1.0)
            program.equal({**dict.fromkeys(self.from_[i].values(), 1.0), self.kept[i]: 1.0}, 1.0)
            for a, chosen in self.from_[i].items():  # a is kept, and all between are not
                if a >= 0:
                    program.at_most({chosen: 1.0, self.kept[a]: -1.0})
                for between in range(a + 1, i):
                    program.at_most({chosen: 1.0, self.kept[between]: 1.0}, 1.0)
        self.keep_units = [[self._units(v, i.block_bytes) for v in self.keep[k]] for k, i in enumerate(items)]
        for number in range(len(chain.phases)):
            self._phase(number)

    def _units(self, blocks: int, block_bytes: int) -> int:
        """A variable for the units that so many blocks take."""
        units = self.program.variable()
        self.program.at_most({blocks: block_bytes / self.budgets.unit_bytes, units: -1.0})
        return units

    def _phase(self, number: int) -> None:
        chain, depth = self.chain, len(self.chain.items)
        phase = chain.phases[number]
        loads = _terms_of(phase.load)
        at = min(number, 2 * depth - 1 - number)
        alive = [self.keep_units[i] for i in range(at + 1)]
        size, extra = chain.items[at].block_bytes, list[int]()
        if number < depth:
            self._move(loads, self.keep[at], size, way="down_bytes", ssd="ssd_write_bytes")
        else:
            self._move(loads, self.keep[at], size, way="up_bytes", ssd="ssd_read_bytes")
            extra = self._recomputing(at, loads)
        self._fit(phase, alive, extra)
        self._time(loads)

    def _move(self, loads: dict[str, Terms], blocks: list[int], block_bytes: int, *, way: str, ssd: str) -> None:
        loads[way] = plus((1, loads[way]), (block_bytes, {blocks[1]: 1.0, blocks[2]: 1.0}))
        loads[ssd] = plus((1, loads[ssd]), (block_bytes, {blocks[2]: 1.0}))

    def _recomputing(self, at: int, loads: dict[str, Terms]) -> list[int]:
        """Add what recomputing ``at`` does, from whichever ancestor; the two variables of the memory it takes."""
        items, program = self.chain.items, self.program
        memory = [program.variable(), program.variable()]
        for a, chosen in self.from_[at].items():
            work = [r for i in range(a + 1, at + 1) if (r := items[i].recomputation) is not None]
            for again in work:
                for name, terms in _terms_of(again.load).items():
                    loads[name] = plus((1, loads[name]), (terms[-1], {chosen: 1.0}))
                for tier, nbytes in zip(memory, (again.device_bytes, again.host_bytes), strict=True):
                    program.at_most({chosen: float(self.budgets.units(nbytes)), tier: -1.0})
            if a < 0:
                for name, terms in _terms_of(self.chain.source).items():
                    loads[name] = plus((1, loads[name]), (terms[-1], {chosen: 1.0}))
                continue
            for name, tiers in (("up_bytes", (1, 2)), ("ssd_read_bytes", (2,))):
                read, most = program.variable(whole=False), items[a].blocks
                blocks = {self.keep[a][tier]: 1.0 for tier in tiers}
                program.at_most({**blocks, read: -1.0, chosen: float(most)}, most)
                loads[name] = plus((1, loads[name]), (items[a].block_bytes, {read: 1.0}))
        return memory

    def _fit(self, phase: Phase, alive: list[list[int]], extra: list[int]) -> None:
        own = (phase.device_bytes, phase.host_bytes)
        budgets = [b // self.budgets.unit_bytes for b in (self.budgets.device_bytes, self.budgets.host_bytes)]
        for tier in range(2):
            terms: Terms = {units[tier]: 1.0 for units in alive}
            if extra:
                terms[extra[tier]] = 1.0
            self.program.at_most(terms, budgets[tier] - self.budgets.units(own[tier]))

    def _time(self, loads: dict[str, Terms]) -> None:
        program, rates = self.program, self.chain.rates
        read, written = loads["ssd_read_bytes"], loads["ssd_write_bytes"]
        ssd, longest = program.variable(whole=False), program.variable(whole=False)
        program.at_most(plus((1 / rates.ssd_read_bytes_per_s, read), (-1, {ssd: 1.0})))
        program.at_most(plus((1 / rates.ssd_write_bytes_per_s, written), (-1, {ssd: 1.0})))
        program.at_most(plus((1 / rates.ssd_both_bytes_per_s, plus((1, read), (1, written))), (-1, {ssd: 1.0})))
        busy: list[Terms] = [
            loads["compute_s"],
            plus((1 / rates.up_bytes_per_s, loads["up_bytes"])),
            plus((1 / rates.down_bytes_per_s, loads["down_bytes"])),
            {ssd: 1.0},
        ]
        for work in busy:
            program.at_most(plus((1, work), (-1, {longest: 1.0})))
        cost = plus((rates.overlap, {longest: 1.0}), *((1 - rates.overlap, work) for work in busy))
        program.objective = plus((1, program.objective), (1, cost))


def _terms_of(load: Load) -> dict[str, Terms]:
    names = ("compute_s", "up_bytes", "down_bytes", "ssd_read_bytes", "ssd_write_bytes")
    return {name: {-1: float(getattr(load, name))} for name in names}


@pytest.mark.parametrize("seed", range(25))
def test_fates_cost_what_the_integer_program_costs(seed: int) -> None:
    """Eight instances a seed: a chain of 3 to 6 items of up to 6 blocks under eight budgets."""
    random = Random(seed)
    chain = random_chain(random, random.randint(3, 6), random.randint(3, 6))
    most = sum(item.nbytes for item in chain.items)
    for _ in range(8):
        budgets = Budgets(random.randint(8, most), random.randint(8, most), random.choice([1, 2, 5]))
        least = Formulation(chain, budgets).program.solve()
        try:
            fates = choose_fates(chain, budgets)
        except BudgetError:
            assert least is None
            continue
        assert least is not None
        assert fates.seconds == pytest.approx(least, rel=1e-6)
        assert keeps(play(chain, fates.choices, budgets.unit_bytes), budgets)
