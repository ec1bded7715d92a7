# SPDX-License-Identifier: Apache-2.0
"""Rows that are scattered whole are added by their numbers, with the same sums and gradients; everything else as is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.utils import scatter

from ooc.kernels.fixed_order import RowsByIndex, in_fixed_order
from tests.examples import examples


class Calls(TorchFunctionMode):
    """Notes the names of what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def sums(values: Tensor, numbers: Tensor, dim: int, size: int, reduce: str) -> tuple[Tensor, Tensor]:
    """PyG's, and the gradient of their squares."""
    values = values.clone().requires_grad_()
    found = scatter(values, numbers, dim=dim, dim_size=size, reduce=reduce)
    (gradient,) = torch.autograd.grad(found.square().sum(), values)
    return found.detach(), gradient


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dim=st.integers(-3, 2),
    size=st.integers(1, 5),
    reduce=st.sampled_from(["sum", "mean", "max"]),
)
@settings(max_examples=examples(80), deadline=None)
def test_pygs_sums(shape: list[int], dim: int, size: int, reduce: str) -> None:
    dim = max(-len(shape), min(dim, len(shape) - 1))
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    numbers = torch.randint(0, size, (shape[dim],), generator=generator)
    expected = sums(values, numbers, dim, size, reduce)
    with Calls() as calls, RowsByIndex():
        found = sums(values, numbers, dim, size, reduce)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)
    assert "scatter_add_" not in calls.names
    assert ("index_add_" in calls.names) == (reduce != "max")


def test_entries_with_numbers_of_their_own_are_scattered() -> None:
    """And rows that only some of are given."""
    into, values = torch.zeros(3, 2), torch.arange(8.0).view(4, 2)
    numbers = torch.tensor([[0, 1], [2, 2], [0, 0], [1, 2]])
    for index, given_ in ((numbers, values), (numbers[:, :1].expand(4, 2)[:2], values)):
        with RowsByIndex():
            found = into.scatter_add(0, index, given_)
        assert torch.equal(found, into.scatter_add(0, index, given_))


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_what_is_no_gpu_is_left_alone(place: str) -> None:
    with in_fixed_order(torch.device(place), "Layer"):
        assert not torch.are_deterministic_algorithms_enabled()
