# SPDX-License-Identifier: Apache-2.0
"""Products in a narrower type: what is rounded once for many is what each would have rounded for itself."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ooc.model.lowering.products import IN_FULL, Products, SharedFactor
from ooc.model.lowering.projection import Linear, Projection
from ooc.model.lowering.values import Features, Gradients, Rows, Value
from ooc.train.trainer import Trainer
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.examples import examples
from tests.graphs import GraphCase, random_data

BF16 = torch.bfloat16
CASES = {
    "sage": ModelCase(kind="sage", layers=2, hidden=24),
    "gat": ModelCase(kind="gat", layers=2, hidden=24, options={"heads": 2}),
}
GRAPH = GraphCase(nodes=300, edges=1500, features=20)


def rounded(tensor: Tensor) -> Tensor:
    return tensor.to(BF16)


class Source(Features):
    """Features whose gradient is wanted."""

    def __init__(self, columns: int) -> None:
        super().__init__(0, columns)
        self.parameters = (nn.Parameter(torch.zeros(1)),)


def maps(multiply: Products, source: Value, count: int, outputs: int, *, projected: bool) -> list[Projection]:
    """Linear maps of one source, without bias."""
    weights = [nn.Parameter(torch.randn(outputs, source.columns)) for _ in range(count)]
    if not projected:
        return [Linear(i + 2, source, weight, multiply) for i, weight in enumerate(weights)]
    return [
        Projection(i + 2, source, lambda w=w: (w, None), [w], product=multiply)  # type: ignore[misc]
        for i, w in enumerate(weights)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 6),
    inputs=st.integers(1, 20),
    outputs=st.integers(1, 20),
    projected=st.booleans(),
    seed=st.integers(0, 99),
)
def test_maps_of_one_source_and_one_gradient_round_as_each_alone(
    rows: int, inputs: int, outputs: int, projected: bool, seed: int
) -> None:
    """Tiles follow one another with the same weights."""
    torch.manual_seed(seed)
    source = Source(inputs)
    values = maps(Products(BF16), source, 2, outputs, projected=projected)
    for _ in range(2):
        tile = Rows(0, rows, seed=0, epoch=0)
        x, gradient = torch.randn(rows, inputs), torch.randn(rows, outputs)
        for value in values:
            weight = value.parameters[0].detach()
            assert torch.equal(
                value.compute([x], tile, record=False), (rounded(x) @ rounded(weight).T.contiguous()).float()
            )
        for value in values:
            weight = value.parameters[0].detach()
            found = value.backward(gradient, [x], tile)
            assert_gradients(found, value.parameters[0], rounded(gradient), rounded(weight), rounded(x))


def assert_gradients(found: Gradients, weight: nn.Parameter, gradient: Tensor, weight_OI: Tensor, x: Tensor) -> None:
    ((parameter, of_weight),) = found.parameters
    assert parameter is weight
    of_source = found.inputs[0]
    assert of_source is not None and torch.equal(of_source, (gradient @ weight_OI).float())
    assert torch.equal(of_weight, (gradient.T @ x).float())


def test_a_weight_is_rounded_once_until_it_may_have_changed() -> None:
    multiply = Products(BF16)
    made = []

    def make() -> Tensor:
        made.append(torch.randn(3, 4).T)
        return made[-1]

    first = multiply.weight("a", make)
    assert multiply.weight("a", make) is first and len(made) == 1
    assert torch.equal(first, rounded(made[0])) and first.is_contiguous()
    multiply.weight("b", make)
    multiply.forget_weights()
    assert torch.equal(multiply.weight("a", make), rounded(made[2]))


def test_nothing_is_rounded_or_kept_in_full() -> None:
    factor = torch.randn(3, 4)
    assert IN_FULL.weight("a", lambda: factor) is factor
    assert IN_FULL.rounded(factor, SharedFactor()) is factor
    assert IN_FULL.weights_nbytes(5, 7) == 0


def trainer_of(case: ModelCase, folder: Path) -> Trainer:
    store = store_of(random_data(GRAPH, dtype=torch.float32), folder)
    return make_trainer(case, store, folder, dtype=torch.float32, tile_rows=64, compute_dtype="bfloat16")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_weights_count_however_they_are_changed_between_epochs(case: ModelCase, tmp_path: Path) -> None:
    """Behind autograd's back as well, where no version number tells of it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with trainer_of(case, tmp_path / "a") as trainer:
        trainer.fit(epochs=1, eval_every=0)
        for parameter in trainer.model.parameters():
            parameter.data.mul_(0.5)
        state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        changed = trainer.fit(epochs=1, eval_every=0)[-1].loss
    with trainer_of(case, tmp_path / "b") as trainer:
        trainer.model.load_state_dict(state)
        assert trainer.fit(epochs=1, eval_every=0)[-1].loss == changed


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rounded_weights_are_admitted(case: ModelCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program leaves rounded fits in what is counted for it, and is most of it."""
    sizes: list[int] = []
    forget = Products.forget_weights

    def watched(self: Products) -> None:
        sizes.append(sum(tensor.nbytes for tensor in self._weights.values()))
        forget(self)

    monkeypatch.setattr(Products, "forget_weights", watched)
    with trainer_of(case, tmp_path) as trainer:
        trainer.fit(epochs=2, eval_every=0)
        admitted = trainer._prepared.network.rounded_nbytes
    assert 0.5 * admitted <= max(sizes) <= admitted
