# SPDX-License-Identifier: Apache-2.0
"""Sums of rows times numbers of edges, and their gradients, are torch's, in any order of the edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ooc.kernels.pieces.caught_sums import _Catching
from ooc.kernels.weighted_sum import weighted_sum

pytest.importorskip("numba")


class Catching(_Catching):
    """Has torch's operators do it, and gives nothing else instead."""

    def _reduced(self, given: object) -> None:
        return None


@given(
    rows=st.integers(1, 12),
    others=st.integers(0, 9),
    edges=st.integers(0, 80),
    columns=st.sampled_from([1, 3, 8, 16, 33, 64, 129]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    at_targets=st.integers(0, 1),
    reduce=st.sampled_from(["sum", "mean"]),
    ordered=st.booleans(),
    of_rows=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sums_and_gradients_are_torchs(
    rows: int,
    others: int,
    edges: int,
    columns: int,
    dtype: torch.dtype,
    at_targets: int,
    reduce: str,
    ordered: bool,
    of_rows: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(count, (edges,), generator=generator) for count in (rows + others, rows)]
    edge_index = torch.stack(ends if at_targets else ends[::-1])
    if ordered:
        edge_index = edge_index[:, edge_index[at_targets].argsort()]
    x = torch.randn(rows + others, columns, generator=generator, dtype=dtype).requires_grad_(of_rows)
    weight = torch.randn(edges, 1, generator=generator, dtype=dtype).requires_grad_()
    above = torch.randn(rows, columns, generator=generator, dtype=dtype)

    def run() -> list[torch.Tensor]:
        found = weighted_sum(edge_index, x, weight, rows, at_targets, reduce)
        wanted = [x, weight] if of_rows else [weight]
        return [found, *torch.autograd.grad(found, wanted, above)]

    found = run()
    with Catching():
        expected = run()
    assert "Index" not in str(found[0].grad_fn)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 1e-12)


def test_a_number_is_one_edges_and_edges_are_of_the_rows() -> None:
    edge_index, x = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4)
    with pytest.raises(ValueError, match="1 numbers of 3 edges"):
        weighted_sum(edge_index, x, torch.ones(1), 2, 1, "sum")
    for at_targets, error in ((0, "a neighbour is none"), (1, "leads to none of 2 rows")):
        with pytest.raises((IndexError, RuntimeError), match=error):
            weighted_sum(edge_index + torch.tensor([[0], [2]]), x.repeat(1, 32), torch.ones(3), 2, at_targets, "sum")
