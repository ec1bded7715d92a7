# SPDX-License-Identifier: Apache-2.0
"""What torch adds up by an index, taken in pieces: values and gradients are those of the whole."""

import pytest
import torch

from ooc.kernels.pieces.caught_sums import Kind, Total

REDUCED = [kind for kind in Kind if kind is not Kind.QUANTILES]
"""What torch does by an index."""


@pytest.mark.parametrize("kind", REDUCED)
@pytest.mark.parametrize("numbers", [[3.0, 1, 3, 2, 5], [0.0, 1, -1, 0], [0.0, 0, 0], [2.0, 2, 2, 2], [0.0, -1, 4]])
def test_totals_are_torchs(kind: Kind, numbers: list[float]) -> None:
    """Extremes that several share, one of them the 0 that was there, and products with none, one or more zeros."""
    entries_EX = torch.tensor(numbers, dtype=torch.float64)[:, None].requires_grad_()
    into_1X = torch.ones(1, 1, dtype=torch.float64) if kind is Kind.PRODUCT else torch.zeros(1, 1, dtype=torch.float64)
    index_EX = torch.zeros(len(numbers), 1, dtype=torch.int64)
    has_self = kind in (Kind.SUM, Kind.PRODUCT)
    expected = into_1X.scatter_reduce(0, index_EX, entries_EX, kind.value, include_self=has_self)
    (gradient_EX,) = torch.autograd.grad(expected, entries_EX, torch.full_like(expected, 3.0))
    for at_once in (1, 2, 9):
        total = Total(kind)
        for part in entries_EX.detach().split(at_once):
            total.add(part)
        assert torch.equal(total.onto(into_1X), expected)
        total.begin_backward()
        assert total.leaf is not None and torch.equal(total.onto(into_1X), expected)
        total.gradient = torch.full_like(total.leaf, 3.0)
        found_EX = torch.cat([total.spread(part) for part in entries_EX.detach().split(at_once)])
        assert torch.equal(found_EX, gradient_EX), (at_once, found_EX, gradient_EX)
