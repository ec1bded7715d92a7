# SPDX-License-Identifier: Apache-2.0
"""The planner's descent against every way to hold the matrices of a small workload."""

from itertools import product

import pytest

from ooc.plan import UNMEASURED, Limits
from ooc.plan.layout.layout import Choice, SlabChoice
from ooc.plan.moves import FEW_STEPS, Moves
from ooc.plan.planner import plan_layout
from ooc.plan.problem import WHOLE, Problem
from tests.examples import ordinary
from tests.plan.workloads import workload

WORK = workload(layers=2)
HELD = (WHOLE, *(SlabChoice(columns, 1, direct=True) for columns in (8, 16, 32, 64)))


@pytest.mark.parametrize(
    ("device_mb", "host_mb"), ordinary([(8, 8), (12, 12), (16, 8), (8, 24), (24, 24)], (8, 8), (12, 12))
)
def test_no_way_to_hold_the_matrices_is_faster(device_mb: int, host_mb: int) -> None:
    """Sources of one shape are moved together at first; at 12 MB the best plan holds two of them in slabs of all their
    columns and one whole."""
    limits = Limits(device_mb << 20, host_mb << 20)
    problem = Problem(WORK, limits, UNMEASURED)
    heights = Moves(problem).heights(FEW_STEPS)
    choices = (
        Choice(height, dict(zip(problem.sources, held, strict=True)))
        for height in heights
        for held in product(HELD, repeat=len(problem.sources))
    )
    fitting = [found.seconds for choice in choices if (found := problem.state(choice)) is not None]
    assert plan_layout(WORK, limits, UNMEASURED).seconds <= min(fitting)
