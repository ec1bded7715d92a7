# SPDX-License-Identifier: Apache-2.0
"""What torch adds up by an index, taken in pieces: values and gradients are those of the whole."""

import pytest
import torch

from ooc.kernels.pieces.caught_sums import Kind, Total
from ooc.kernels.pieces.selections import Quantiles, selected_of_rows

REDUCED = [kind for kind in Kind if kind is not Kind.SELECTION]
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
        assert torch.equal(total.reduced_into(into_1X), expected)
        total.begin_backward()
        assert total.leaf is not None and torch.equal(total.reduced_into(into_1X), expected)
        total.gradient = torch.full_like(total.leaf, 3.0)
        found_EX = torch.cat([total.spread(part) for part in entries_EX.detach().split(at_once)])
        assert torch.equal(found_EX, gradient_EX), (at_once, found_EX, gradient_EX)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interpolation", ["linear", "midpoint", "lower", "higher", "nearest"])
def test_quantiles_of_pieces_are_those_of_the_whole(dtype: torch.dtype, interpolation: str) -> None:
    """Of equal ones, of both zeros, of the largest, and of those that are no numbers, which are last; and their
    gradients go to the same entries."""
    nan, inf = float("nan"), float("inf")
    numbers = [[2, 0.0, nan, -1, -0.0, 2, inf, nan, 2, -inf, 0.0, -1], [1e-30, 3, -1e30, 3, 3, -7, 8, 9, 1e30, 2, 1, 0]]
    entries_EC = torch.tensor(numbers, dtype=dtype).t().contiguous().requires_grad_()
    gradient = torch.arange(1, 7, dtype=dtype)[None]
    quantiles = Quantiles(torch.tensor([[0.0], [0.34], [1.0]]), interpolation)
    expected = selected_of_rows(entries_EC, torch.zeros(12, dtype=torch.int64), 1, quantiles, 0.0)
    (d_expected,) = torch.autograd.grad(expected, entries_EC, gradient)
    for at_once in (1, 5, 12):
        parts = entries_EC.detach().split(at_once)
        total = Total(Kind.SELECTION)
        total.selecting = quantiles
        goes_on = True
        while goes_on:
            for part in parts:
                total.add(part)
            goes_on = total.end_run()
        total.begin_backward()
        found = total.reduced_into(torch.zeros_like(expected))
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
        total.gradient = gradient[0]
        for _ in range(2):  # as often as they are gone through
            d_found = torch.cat([total.spread(part) for part in parts])
            torch.testing.assert_close(d_found, d_expected, equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
def test_quantiles_of_many_entries(seed: int) -> None:
    """More than are counted at once, many of them equal."""
    generator = torch.Generator().manual_seed(seed)
    entries_EC = torch.randn(9000, 5, generator=generator).mul(1 + 40 * seed).round(decimals=seed)
    quantiles = Quantiles(torch.rand(4, 1, generator=generator), "linear")
    total = Total(Kind.SELECTION)
    total.selecting = quantiles
    total.add(entries_EC)
    while total.end_run():
        total.add(entries_EC)
    expected = selected_of_rows(entries_EC, torch.zeros(9000, dtype=torch.int64), 1, quantiles, 0.0)
    assert torch.equal(total.reduced_into(expected), expected)
