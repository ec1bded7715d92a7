# SPDX-License-Identifier: Apache-2.0
"""Small chains with numbers of every sort, and all that can be done with one, by playing an epoch through."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from tests.plan.fates import RECOMPUTED, Budgets, Chain, Choice, Load, Phase, Rates, Recomputation, Saved


@st.composite
def chains(draw: st.DrawFn, most_plans: int = 1500) -> Chain:
    """1 to 4 items of a few blocks, such that there are not too many plans to try them all."""
    depth = draw(st.integers(1, 4))
    most_blocks = next(b for b in (4, 3, 2, 1) if ((b + 1) * (b + 2)) ** depth <= most_plans or b == 1)
    numbers = iter(draw(st.lists(st.integers(0, 6), min_size=28 * depth + 12, max_size=28 * depth + 12)))
    return chain_of_numbers(numbers, depth, most_blocks)


def random_chain(random: Random, depth: int, blocks: int) -> Chain:
    """The same of any size."""
    return chain_of_numbers(iter(lambda: random.randint(0, 6), None), depth, blocks)


def chain_of_numbers(numbers: Iterator[int], depth: int, most_blocks: int) -> Chain:
    """A chain made of numbers from 0 to 6: loads and memory often 0, rates sometimes infinite."""

    def load(scale: int, *, writes: bool = False) -> Load:
        compute, up, down, read, written = (max(0, next(numbers) - 2) for _ in range(5))
        return Load(compute * scale / 4, up * scale, down * scale, read * scale, written * scale * writes)

    items = []
    for i in range(depth):
        again = Recomputation(load(1), 5 * max(0, next(numbers) - 3), 3 * max(0, next(numbers) - 4))
        recomputed, blocks = next(numbers) < 4, 1 + next(numbers) % most_blocks
        items.append(Saved(f"z{i}", blocks, 2 + 3 * next(numbers), again if recomputed else None))
    phases = [
        Phase(f"phase {p}", load(3, writes=True), 4 * max(0, next(numbers) - 2), 3 * max(0, next(numbers) - 3))
        for p in range(2 * depth)
    ]
    bytes_per_s = [float(1 + next(numbers)) for _ in range(5)]
    if next(numbers) == 0:
        bytes_per_s[:2] = [math.inf, math.inf]
    overlap = (1.0, 0.9, 0.5, 0.0, 1.0, 0.8, 0.3)[next(numbers)]
    return Chain(tuple(items), tuple(phases), Rates(*bytes_per_s, overlap=overlap), load(2))


class Outcome(NamedTuple):
    """Of one plan: seconds, and peaks in units."""

    seconds: float
    device: int
    host: int


def all_choices(item: Saved) -> list[Choice]:
    """Everything that can become of one item."""
    split = [(d, h, item.blocks - d - h) for d in range(item.blocks + 1) for h in range(item.blocks + 1 - d)]
    return [Choice(*s) for s in split] + [RECOMPUTED] * (item.recomputation is not None)


def all_plans(chain: Chain) -> list[tuple[Choice, ...]]:
    return list(product(*map(all_choices, chain.items)))


def play(chain: Chain, choices: Sequence[Choice], unit_bytes: int) -> Outcome:
    """One epoch, phase by phase, with what is alive in a dictionary. From the definition alone."""
    items, depth = chain.items, len(chain.items)
    alive: dict[int, Choice] = {}
    seconds, peaks = 0.0, [0, 0]

    def units(nbytes: int) -> int:
        return math.ceil(nbytes / unit_bytes)

    for number, phase in enumerate(chain.phases):
        compute, up, down = phase.load.compute_s, phase.load.up_bytes, phase.load.down_bytes
        read, write = phase.load.ssd_read_bytes, phase.load.ssd_write_bytes
        extra = [0, 0]
        if number < depth:
            if choices[number] != RECOMPUTED:
                alive[number] = choices[number]
            down += (choices[number].host + choices[number].ssd) * items[number].block_bytes
            write += choices[number].ssd * items[number].block_bytes
        else:
            at = 2 * depth - 1 - number
            while at >= 0 and at not in alive:
                again = items[at].recomputation
                assert again is not None
                compute, up = compute + again.load.compute_s, up + again.load.up_bytes
                down, read = down + again.load.down_bytes, read + again.load.ssd_read_bytes
                write += again.load.ssd_write_bytes
                extra = [max(extra[0], units(again.device_bytes)), max(extra[1], units(again.host_bytes))]
                at -= 1
            if at < 0:
                source = chain.source
                compute, up, down = compute + source.compute_s, up + source.up_bytes, down + source.down_bytes
                read, write = read + source.ssd_read_bytes, write + source.ssd_write_bytes
            else:
                up += (alive[at].host + alive[at].ssd) * items[at].block_bytes
                read += alive[at].ssd * items[at].block_bytes
        own = (phase.device_bytes, phase.host_bytes)
        for tier in range(2):
            kept = sum(units(choice[tier] * items[i].block_bytes) for i, choice in alive.items())
            peaks[tier] = max(peaks[tier], units(own[tier]) + extra[tier] + kept)
        rates = chain.rates
        ssd = max(
            read / rates.ssd_read_bytes_per_s,
            write / rates.ssd_write_bytes_per_s,
            (read + write) / rates.ssd_both_bytes_per_s,
        )
        times = [compute, up / rates.up_bytes_per_s, down / rates.down_bytes_per_s, ssd]
        seconds += max(times) + (1 - rates.overlap) * (sum(times) - max(times))
        if number >= depth:
            alive.pop(2 * depth - 1 - number, None)
    assert not alive, "something is left over"
    return Outcome(seconds, peaks[0], peaks[1])


def keeps(outcome: Outcome, budgets: Budgets) -> bool:
    """Whether a plan passes no budget."""
    unit = budgets.unit_bytes
    return outcome.device <= budgets.device_bytes // unit and outcome.host <= budgets.host_bytes // unit
