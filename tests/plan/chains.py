# SPDX-License-Identifier: Apache-2.0
"""Small chains with numbers of every sort, and all that can be done with one, by playing an epoch through."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from ooc.plan.chain import Budgets, Chain, Choice, Intermediate, Load, Phase, Rates, Recomputation


@st.composite
def chains(draw: st.DrawFn, most_plans: int = 1500) -> Chain:
    """1 to 4 intermediates of a few blocks, such that there are not too many plans to try them all."""
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
        recomputed, read_next = next(numbers) < 4, next(numbers) < 4 and i + 1 < depth
        blocks = 1 + next(numbers) % most_blocks
        size = 2 + 3 * next(numbers)
        items.append(Intermediate(f"z{i}", blocks, size, read_next, again if recomputed else None))
    phases = [
        Phase(f"phase {p}", load(3, writes=True), 4 * max(0, next(numbers) - 2), 3 * max(0, next(numbers) - 3))
        for p in range(2 * depth)
    ]
    bytes_per_s = [float(1 + next(numbers)) for _ in range(5)]
    if next(numbers) == 0:
        bytes_per_s[:2] = [math.inf, math.inf]
    overlap = (1.0, 0.9, 0.5, 0.0, 1.0, 0.8, 0.3)[next(numbers)]
    rates = Rates(*bytes_per_s, overlap=overlap, written_byte_s=(0.0, 0.1)[next(numbers) == 1])
    return Chain(tuple(items), tuple(phases), load(2), rates)


class Outcome(NamedTuple):
    """Of one plan: cost, peaks and written bytes in units."""

    cost: float
    device: int
    host: int
    written: int


def all_choices(item: Intermediate) -> list[Choice]:
    """Everything that can become of one intermediate."""
    split = [(d, h, item.blocks - d - h) for d in range(item.blocks + 1) for h in range(item.blocks + 1 - d)]
    choices = [Choice(*s) for s in split]
    if item.recomputation is not None:
        choices += [Choice(*s, recompute=True) for s in (split if item.read_next else [(0, 0, 0)])]
    return choices


def all_plans(chain: Chain) -> list[tuple[Choice, ...]]:
    return list(product(*map(all_choices, chain.intermediates)))


def play(chain: Chain, choices: Sequence[Choice], unit_bytes: int) -> Outcome:
    """One epoch, phase by phase, with what is alive in a dictionary. From the definition alone."""
    items, depth = chain.intermediates, len(chain.intermediates)
    alive: dict[int, Choice] = {}
    cost, peaks, written = 0.0, [0, 0], 0

    def units(nbytes: int) -> int:
        return math.ceil(nbytes / unit_bytes)

    for number, phase in enumerate(chain.phases):
        compute, up, down = phase.load.compute_s, phase.load.up_bytes, phase.load.down_bytes
        read, write = phase.load.ssd_read_bytes, phase.load.ssd_write_bytes
        extra = [0, 0]
        wanted: list[int] = []
        written += units(write)
        if number < depth:
            alive[number] = choices[number]
            down += (choices[number].host + choices[number].ssd) * items[number].block_bytes
            write += choices[number].ssd * items[number].block_bytes
            written += units(choices[number].ssd * items[number].block_bytes)
            if number and items[number - 1].read_next:
                wanted = [number - 1]
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
            wanted = [at]
        for i in wanted:
            if i < 0:
                compute, up, down = (
                    compute + chain.source.compute_s, up + chain.source.up_bytes, down + chain.source.down_bytes,
                )  # fmt: skip
                read, write = read + chain.source.ssd_read_bytes, write + chain.source.ssd_write_bytes
            else:
                up += (alive[i].host + alive[i].ssd) * items[i].block_bytes
                read += alive[i].ssd * items[i].block_bytes
        device = (
            units(phase.device_bytes) + extra[0] + sum(units(c.device * items[i].block_bytes) for i, c in alive.items())
        )
        host = units(phase.host_bytes) + extra[1] + sum(units(c.host * items[i].block_bytes) for i, c in alive.items())
        peaks = [max(peaks[0], device), max(peaks[1], host)]
        rates = chain.rates
        ssd = max(
            read / rates.ssd_read_bytes_per_s,
            write / rates.ssd_write_bytes_per_s,
            (read + write) / rates.ssd_both_bytes_per_s,
        )
        times = [compute, up / rates.up_bytes_per_s, down / rates.down_bytes_per_s, ssd]
        cost += max(times) + (1 - rates.overlap) * (sum(times) - max(times)) + rates.written_byte_s * write
        over = [number - 1, number] if number < depth else [2 * depth - 1 - number]
        for i in over:
            kept = i in alive and not choices[i].recompute and number < depth
            if i in alive and not kept and (i < number or not items[i].read_next):
                del alive[i]
    assert not alive, "something is left over"
    return Outcome(cost, peaks[0], peaks[1], written)


def keeps(outcome: Outcome, budgets: Budgets) -> bool:
    """Whether a plan passes no budget."""
    unit = budgets.unit_bytes
    return (
        outcome.device <= budgets.device_bytes // unit
        and outcome.host <= budgets.host_bytes // unit
        and (budgets.ssd_write_bytes is None or outcome.written <= budgets.ssd_write_bytes // unit)
    )
