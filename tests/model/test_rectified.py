# SPDX-License-Identifier: Apache-2.0
"""The gradient of a rectifier from bits is autograd's from numbers, and that of tanh from its result."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn.models import GraphSAGE

import ooc
from ooc.kernels import tensors
from ooc.model.lowering.rectified import ExponentialLinear, Rectified, Sigmoidal, Signs
from ooc.model.lowering.values import Features, Rows, Value
from tests.examples import examples
from tests.graphs import GraphCase, random_data


@given(rows=st.integers(0, 4), columns=st.integers(1, 40), seed=st.integers(0, 999))
def test_bits_are_numpys_on_any_device(rows: int, columns: int, seed: int) -> None:
    bools = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = tensors.pack(bools)
    assert packed.numpy().tobytes() == np.packbits(bools.numpy(), axis=1).tobytes()
    assert torch.equal(tensors.pack_by_torch(bools), packed)
    assert torch.equal(tensors.unpack(packed, columns).bool(), bools)
    assert torch.equal(tensors.unpack_by_torch(packed, columns), tensors.unpack(packed, columns))


SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40]


@settings(max_examples=examples(200), deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(1, 40),
    slope=st.sampled_from([None, 0.0, 0.2, -0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_bits_or_numbers_give_the_gradient_of_autograd(
    rows: int, columns: int, slope: float | None, dtype: torch.dtype, seed: int
) -> None:
    """Bit for bit, for zeros of either sign, infinities and NaN too."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(rows, columns, generator=generator, dtype=dtype)
    special = torch.tensor(SPECIAL, dtype=dtype)[torch.randint(0, len(SPECIAL), source.shape, generator=generator)]
    source = torch.where(torch.rand(source.shape, generator=generator) < 0.3, special, source)
    gradient = torch.randn(rows, columns, generator=generator, dtype=dtype)
    value, cut = _rectifier(columns, slope), Rows(0, rows, 0, 0)

    result = value.compute([source], cut, record=True)
    signs = value.signs.compute([source], cut, record=False)
    assert (signs.dtype, signs.shape) == (torch.uint8, (rows, -(-columns // 8)))
    assert value.needs() == (value.signs,)

    leaf = source.clone().requires_grad_()
    expected = F.relu(leaf) if slope is None else F.leaky_relu(leaf, slope)
    (d_expected,) = torch.autograd.grad(expected, leaf, gradient)
    assert _bytes(result) == _bytes(expected)
    told = [None, None, result] if slope is None else [signs, None, result]
    for operands in ([signs, None, None], [None, source, None], [signs, source, result], told):
        (d_source,) = value.backward(gradient, operands, cut).inputs
        assert d_source is not None
        assert _bytes(d_source) == _bytes(d_expected)
        (d_over,) = value.backward(gradient.clone(), operands, cut, over=True).inputs
        assert d_over is not None
        assert _bytes(d_over) == _bytes(d_source)
    over = source.clone()
    assert value.compute_at([over], cut, over).data_ptr() == over.data_ptr()
    assert _bytes(over) == _bytes(expected)


@settings(max_examples=examples(50), deadline=None)
@given(
    rows=st.integers(1, 5),
    alpha=st.sampled_from([1.0, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_the_gradient_of_elu_is_that_of_autograd(rows: int, alpha: float, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(rows, 7, generator=generator, dtype=dtype)
    gradient = torch.randn(rows, 7, generator=generator, dtype=dtype)
    value, cut = ExponentialLinear(2, Features(1, 7), alpha), Rows(0, rows, 0, 0)
    leaf = source.clone().requires_grad_()
    expected = F.elu(leaf, alpha)
    (d_expected,) = torch.autograd.grad(expected, leaf, gradient)
    assert _bytes(value.compute([source], cut, record=True)) == _bytes(expected)
    assert value.needs() == value.inputs
    (d_source,) = value.backward(gradient, [source], cut).inputs
    assert d_source is not None
    assert _bytes(d_source) == _bytes(d_expected)


@settings(max_examples=examples(50), deadline=None)
@given(
    rows=st.integers(1, 5),
    logistic=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_the_gradient_of_tanh_and_the_logistic_function_is_that_of_autograd(
    rows: int, logistic: bool, dtype: torch.dtype, seed: int
) -> None:
    """From the result alone, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(rows, 7, generator=generator, dtype=dtype)
    gradient = torch.randn(rows, 7, generator=generator, dtype=dtype)
    value, cut = Sigmoidal(2, Features(1, 7), logistic=logistic), Rows(0, rows, 0, 0)
    leaf = source.clone().requires_grad_()
    expected = leaf.sigmoid() if logistic else leaf.tanh()
    (d_expected,) = torch.autograd.grad(expected, leaf, gradient)
    result = value.compute([source], cut, record=True)
    assert _bytes(result) == _bytes(expected)
    assert value.needs() == (value,)
    (d_source,) = value.backward(gradient, [result], cut).inputs
    assert d_source is not None
    assert _bytes(d_source) == _bytes(d_expected)
    (d_over,) = value.backward(gradient, [result], cut, over=True).inputs
    assert d_over is not None
    assert _bytes(d_over) == _bytes(d_source)
    assert _bytes(value.compute_at([source], cut, source)) == _bytes(expected)


@pytest.mark.parametrize(("act", "kind"), [("relu", Rectified), ("tanh", Sigmoidal), ("sigmoid", Sigmoidal)])
def test_an_activation_is_computed_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, kind: type[Value]
) -> None:
    """What it gives is kept, not what it is given: the next layer and both backward passes have it."""
    data = random_data(GraphCase(nodes=60, edges=300, features=6))
    model = GraphSAGE(6, 8, 3, int(data.y.max()) + 1, act=act).double()
    calls = list[Value]()
    compute, compute_at = kind.compute, kind.compute_at

    def counted(value: Value, *of_tile: Any, **options: Any) -> Tensor:
        calls.append(value)
        return compute(value, *of_tile, **options)

    def counted_at(value: Value, *of_tile: Any) -> Tensor:
        calls.append(value)
        return compute_at(value, *of_tile)

    monkeypatch.setattr(kind, "compute", counted)
    monkeypatch.setattr(kind, "compute_at", counted_at)
    with ooc.Trainer(model, data, memory="200M", device="cpu", spill_dir=tmp_path, threads=1) as trainer:
        trainer.fit(1, eval_every=0)
        calls.clear()
        trainer.fit(1, eval_every=0)
        assert {"z1", "z2"} <= trainer.plan.matrices.keys()
    assert len(calls) == 2


def _rectifier(columns: int, slope: float | None) -> Rectified:
    source = Features(1, columns)
    return Rectified(3, source, Signs(2, source, not_a_number=slope is None), slope)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()
