# SPDX-License-Identifier: Apache-2.0
"""What is wrong with lists of neighbours is noted tile by tile, in few launches, and told once."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ooc.kernels.deferred_checks import DeferredChecks, Fault

NODES = 10


def checks_of(*tiles: list[int], dtype: torch.dtype = torch.int32) -> DeferredChecks:
    checks = DeferredChecks(NODES)
    for indices in tiles:
        checks.check_range(torch.tensor(indices, dtype=dtype))
    return checks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("stray", [-1, NODES, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", range(3))
def test_a_neighbour_that_is_no_row_is_found_in_any_tile(stray: int, dtype: torch.dtype, place: int) -> None:
    tiles = [[0, NODES - 1], [3], [4, 4]]
    assert checks_of(*tiles, dtype=dtype).found() == []
    tiles[place].append(stray)
    assert checks_of(*tiles, dtype=dtype).found() == [Fault.OUT_OF_RANGE]


def test_tiles_without_edges_tell_nothing() -> None:
    assert checks_of([], []).found() == []
    assert checks_of([], [NODES], []).found() == [Fault.OUT_OF_RANGE]


def test_what_has_been_told_is_forgotten() -> None:
    checks = checks_of([-1], [2])
    checks.check_order(torch.tensor([1, 2, 1, 0]), torch.tensor([0, 2, 4]))
    assert checks.found() == [Fault.OUT_OF_RANGE, Fault.UNSORTED]
    assert checks.found() == []
    checks.check_range(torch.tensor([5]))
    checks.check_order(torch.tensor([1, 2, 0, 1]), torch.tensor([0, 2, 4]))
    assert checks.found() == []


class Launches(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_three_launches_a_pull() -> None:
    checks, indices = checks_of([1]), torch.arange(NODES)
    with Launches() as launches:
        checks.check_range(indices)
    assert launches.count <= 3
