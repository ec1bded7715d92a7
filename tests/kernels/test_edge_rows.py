# SPDX-License-Identifier: Apache-2.0
"""What a layer makes of rows that it looks up is what torch makes of them, be they there or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.utils import scatter, softmax

pytest.importorskip("numba")

from ooc.kernels import edge_rows
from ooc.kernels.compiled import edge_rows as loops
from ooc.kernels.edge_rows import LazyGathers, materialized

Parts = dict[str, Tensor]


def by_number(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    return of["weight"][:, None] * x_j


def by_softmax(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    scores = F.linear(torch.cat([x_i, x_j, of["features"]], dim=-1), of["map"], of["bias"])
    return softmax(F.leaky_relu(scores, 0.2), of["index"], num_nodes=7) * x_j


def by_heads(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    x_i, x_j = x_i.view(-1, 3, 4), x_j.reshape(-1, 3, 4)
    scores = (x_i * x_j).sum(dim=-1, keepdim=True)
    return (of["weight"].view(-1, 1, 1) * (scores.tanh() * x_j)).flatten(1)


def by_rows(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    scores = (x_j.view(-1, 3, 4) * of["attention"]).sum(-1)
    mapped = F.relu(F.linear(x_j, of["square"], of["square"][0])) + 1
    return (mapped.view(-1, 3, 4) * scores.unsqueeze(-1)).reshape(-1, 12) * of["weight"].unsqueeze(1)


def in_place(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    x_j.mul_(2)
    x_j[:, :3].add_(1)
    return x_j * of["weight"][:, None]


def written_by_functions(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    into, before = torch.empty_like(x_i, requires_grad=False), x_j
    with torch.no_grad():
        torch.mul(x_i, of["weight"][:, None], out=into)
    F.relu(x_j, inplace=True)
    return (before + into) * of["weight"][:, None]


def by_name(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    scores = F.linear(torch.cat([x_i, x_j], dim=1), bias=of["bias"], weight=of["map"][:, :24])
    return torch.add(x_j, other=x_i, alpha=2) * scores


def of_the_last(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    return of["square"][of["index"] - 7] * of["weight"][:, None] * x_j


def of_both_ends(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    return (x_i - x_j).tanh() * x_j + x_i * x_j


def with_itself(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    return x_j * (x_j * x_j).sum(-1, keepdim=True) * of["weight"][:, None]


def unweighted(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    return x_j


def normed(x_i: Tensor, x_j: Tensor, of: Parts) -> Tensor:
    return x_j * (F.normalize(x_i) * F.normalize(x_j)).sum(1)[:, None]


MESSAGES: list[Callable[..., Tensor]] = [by_number, by_softmax, by_heads, by_rows, with_itself, unweighted]
"""For which no row of an edge is made."""
OTHERS: list[Callable[..., Tensor]] = [in_place, written_by_functions, by_name, of_the_last, of_both_ends, normed]


@given(
    message=st.sampled_from(MESSAGES + OTHERS),
    rows=st.integers(1, 9),
    edges=st.sampled_from([0, 1, 2, 17, 60]),
    reduce=st.sampled_from(["sum", "mean", "max"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    by=st.sampled_from(["index_select", "getitem", "flat"]),
    records=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_messages_and_gradients_are_torchs(
    message: Callable[..., Tensor],
    rows: int,
    edges: int,
    reduce: str,
    dtype: torch.dtype,
    by: str,
    records: bool,
    seed: int,
) -> None:
    numbers = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=dtype).requires_grad_(records)

    ends = torch.stack([torch.randint(count, (edges,), generator=numbers) for count in (rows, 7)])
    x, others = drawn(rows, 14), drawn(7, 12)
    parts = {"weight": drawn(edges), "features": drawn(edges, 2), "map": drawn(1, 26), "bias": drawn(1)}
    parts |= {"attention": drawn(1, 3, 4), "square": drawn(12, 12)}
    above = torch.randn(7, 12, generator=numbers, dtype=dtype)

    def run() -> list[Tensor]:
        sources = x[:, 1:13]
        if by == "getitem":
            x_j, x_i = sources[ends[0]], others[ends[1]]
        else:
            x_j, x_i = sources.index_select(-2, ends[0]), torch.index_select(others, 0, ends[1])
        messages = message(x_i, x_j, {**parts, "index": ends[1]})
        if by == "flat" and reduce == "sum":
            found = torch.zeros(7, 12, dtype=dtype).index_add(0, ends[1], messages)
        else:
            found = scatter(messages, ends[1], 0, 7, reduce)
        found = materialized(found)
        wanted = [one for one in (x, others, *parts.values()) if one.is_leaf]
        return [found, *(torch.autograd.grad(found, wanted, above, materialize_grads=True) if records else [])]

    expected = run()
    with LazyGathers():
        found = run()
    tolerance = 1e-3 if dtype == torch.float32 else 1e-11
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("message", MESSAGES)
def test_no_rows_of_edges_are_made(message: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> Any:
        raise AssertionError("rows are made")

    monkeypatch.setattr(edge_rows._StandIn, "materialized", fails)
    ends, x, weight = torch.tensor([[0, 2, 1, 1], [0, 1, 1, 6]]), torch.randn(7, 12), torch.randn(4)
    parts = {"weight": weight, "features": torch.randn(4, 2), "map": torch.randn(1, 26), "bias": torch.randn(1)}
    parts |= {"attention": torch.randn(1, 3, 4), "square": torch.randn(12, 12), "index": ends[1]}
    with LazyGathers():
        assert scatter(message(x[ends[1]], x[ends[0]], parts), ends[1], 0, 7).shape == (7, 12)


def test_few_numbers_are_looked_up_at_once() -> None:
    with LazyGathers():
        assert type(torch.randn(3, 2)[torch.tensor([0, 1])]) is Tensor


def test_rows_that_were_written_into_are_others() -> None:
    x, index = torch.randn(3, 8), torch.tensor([0, 1])
    with LazyGathers():
        rows = x[index]
        x.mul_(2)
        with pytest.raises(RuntimeError, match="written into between"):
            rows.tanh()


@pytest.mark.parametrize("bad", [-1, 3])
def test_edges_are_of_the_rows(bad: int) -> None:
    x, ends = torch.randn(3, 8), torch.tensor([0, bad])
    with LazyGathers(), pytest.raises(IndexError, match="none of 3 rows"):
        torch.zeros(3, 8).index_add(0, torch.tensor([0, 1]), x.index_select(0, ends) * torch.ones(2, 1))


def test_slices_and_whole_matrices_share_a_loop() -> None:
    """The last row ends where its matrix does."""
    x, near_E, into_E = torch.randn(7, 14), torch.tensor([0, 2, 6, 6]), torch.tensor([1, 0, 1, 6])
    for rows in (x, x[:, 2:]):
        expected = torch.zeros_like(rows).index_add(0, into_E, rows[near_E])
        found = loops.add_weighted(torch.zeros_like(rows), into_E, rows, near_E, torch.ones(4, 1))
        torch.testing.assert_close(found, expected)
        dots_EH = loops.products(rows, near_E, rows, into_E, 2)
        torch.testing.assert_close(dots_EH, (rows[near_E] * rows[into_E]).unflatten(1, (2, -1)).sum(-1))
    signatures = [*loops._add.signatures, *loops._multiply.signatures]
    assert all(getattr(one, "layout", "C") == "C" for signature in signatures for one in signature)
