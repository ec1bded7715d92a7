# SPDX-License-Identifier: Apache-2.0
"""Shares of rows are as even as whole panels allow."""

import random
from itertools import combinations, pairwise

import pytest

from ooc.engine.exchange import divide_rows


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("computed", [(9,), (9, 5, 2)])
def test_no_other_shares_of_whole_panels_are_more_even(seed: int, computed: tuple[int, ...]) -> None:
    """``computed``: how many panels there are rows of in passes that all processes begin together."""
    drawn = random.Random(seed)
    weights = [[drawn.random() if panel < some else 0.0 for panel in range(9)] for some in computed]
    parts = [drawn.choice([1.0, 0.3]) for _ in range(4)]
    shares = divide_rows(weights, 10, 85, parts)
    assert (shares[0].start, shares[-1].stop) == (0, 85)
    assert all(one.stop == other.start and len(one) for one, other in pairwise(shares))

    def taken(bounds: tuple[int, ...]) -> float:
        shared = [*zip(pairwise(bounds), parts, strict=True)]
        return sum(max(sum(some[a:b]) / part for (a, b), part in shared) for some in weights)

    possible = [taken((0, *bounds, 9)) for bounds in combinations(range(1, 9), 3)]
    assert taken((0, *(one.stop // 10 for one in shares[:-1]), 9)) == pytest.approx(min(possible))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("slow", [0.7, 0.5, 0.25])
def test_with_one_that_is_slow_an_epoch_comes_within_a_tenth_of_the_ideal(count: int, slow: float) -> None:
    for at in range(count):
        speeds = [slow if rank == at else 1.0 for rank in range(count)]
        shares = divide_rows([[1.0] * 32], 10, 320, speeds)
        epoch_s = max(len(share) / 10 / speed for share, speed in zip(shares, speeds, strict=True))
        assert epoch_s <= 1.1 * 32 / sum(speeds)
