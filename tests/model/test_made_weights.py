# SPDX-License-Identifier: Apache-2.0
"""Weights made of several parameters are made once a program, and their gradients are those of torch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn.models import GAT

from ooc.model.lowering.projection import ComputedWeight, Projection
from tests.exactness.comparison import make_trainer, store_of, train_epoch
from tests.exactness.reference import CustomCase
from tests.graphs import GraphCase, random_data


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    return made


@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_gradients_are_those_of_torch(frozen: int | None) -> None:
    """Summed over tiles, whichever parameter is not trained; sums are gone afterwards."""
    weight, scale, bias = parameters((6, 4), (6, 1), (6,))
    if frozen is not None:
        (weight, scale, bias)[frozen].requires_grad_(False)
    made = ComputedWeight(lambda: (weight * scale, bias * 2), (weight, scale, bias))
    tiles = [(torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)) for _ in range(3)]
    made.begin()
    for x, gradient in tiles:
        for sums, part in made.gradients(gradient.T @ x, gradient.sum(0)):
            assert sums.grad is not None
            sums.grad.add_(part)
    made.finish()
    made.end()
    x, gradient = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    trained = [p for p in (weight, scale, bias) if p.requires_grad]
    expected = torch.autograd.grad(x @ (weight * scale).T + bias * 2, trained, gradient)
    for parameter, wanted in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
    assert all(sums.grad is None for sums in made.sums)


def test_what_is_a_parameter_is_summed_where_it_lies() -> None:
    """It takes nothing beside it; what is not trained gets nothing."""
    weight, bias = parameters((5, 3), (5,))
    bias.requires_grad_(False)
    made = ComputedWeight(lambda: (weight, bias), (weight, bias))
    assert made.nbytes == 0
    ((sums, part),) = made.gradients(torch.ones(5, 3), torch.ones(5))
    assert sums is weight and part.shape == weight.shape
    assert made.values()[0].data_ptr() == weight.data_ptr() and not made.values()[0].requires_grad


def test_they_are_made_once_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tiles there are, to multiply with and for gradients; and anew in the next epoch."""
    calls: list[Projection] = []
    init = Projection.__init__

    def counting(self: Projection, *arguments: object, **options: object) -> None:
        init(self, *arguments, **options)  # type: ignore[arg-type]
        weights = self.made._weights

        def counted() -> tuple[Tensor, Tensor | None]:
            calls.append(self)
            return weights()

        self.made._weights = counted

    monkeypatch.setattr(Projection, "__init__", counting)
    case = CustomCase(make=lambda features, classes: GAT(features, 8, 2, classes, heads=2))
    store = store_of(random_data(GraphCase(nodes=300, edges=900)), tmp_path)
    with make_trainer(case, store, tmp_path, tile_rows=16, threads=2) as trainer:
        projections = 4
        for _ in range(2):
            calls.clear()
            train_epoch(trainer)
            assert len(calls) == len(set(calls)) == projections
        trainer.evaluate()
        network = trainer._prepared.network
        assert network.made_nbytes > 0
    assert all(projection.made._values is projection.made._recorded is None for projection in calls)
