# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy as a compiled loop: torch's losses and gradients, no further from those of float64 than torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("numba")

from ooc.kernels.compiled.cross_entropy import cross_entropy  # needs numba

ROWS, DIVISOR = 100, 7.0


def by_torch(outputs_RC: Tensor, labels_R: Tensor, counts_R: Tensor, **how: Tensor | int) -> tuple[Tensor, Tensor]:
    leaf = outputs_RC.detach().clone().requires_grad_()
    total = F.cross_entropy(leaf[counts_R], labels_R[counts_R].long(), reduction="sum", **how)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(total / DIVISOR, leaf)
    return total.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [1, 2, 16, 47])
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("spread", [1, 300])
def test_it_is_torchs(dtype: torch.dtype, classes: int, weighs: bool, spread: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    outputs = torch.randn(ROWS, classes, generator=generator, dtype=dtype) * spread
    labels = torch.randint(0, classes, (ROWS,), generator=generator, dtype=torch.int16)
    counts = torch.rand(ROWS, generator=generator) < 0.6
    weight = torch.rand(classes, generator=generator, dtype=dtype) if weighs else None
    ignored = 1 if weighs and classes > 2 else -100
    labels[~counts] = -1  # of these nobody knows the class
    found = cross_entropy(outputs, labels, counts, weight_C=weight, ignored=ignored, divisor=DIVISOR)
    assert found is not None and found[0].dtype is torch.float64 and found[1].dtype is dtype
    of_double = {"ignore_index": ignored} | ({} if weight is None else {"weight": weight.double()})
    of_torch = of_double | ({} if weight is None else {"weight": weight})
    exact, own = by_torch(outputs.double(), labels, counts, **of_double), by_torch(outputs, labels, counts, **of_torch)
    eps = torch.finfo(dtype).eps
    for one, torchs, expected in zip(found, own, exact, strict=True):
        most = 2 * float((torchs - expected).abs().max()) + 4 * eps * float(expected.abs().max())
        torch.testing.assert_close(one.double(), expected, rtol=0, atol=most)


def test_what_is_no_number_is_none_here() -> None:
    outputs, counts = torch.randn(4, 3), torch.tensor([True, True, False, True])
    for bad in (torch.nan, torch.inf):
        outputs[0, 1] = bad
        found = cross_entropy(outputs, torch.zeros(4), counts, weight_C=None, ignored=-100, divisor=1.0)
        assert found is not None and found[0].isnan() and found[1][0].isnan().all()
        assert not found[1][1:].isnan().any() and not found[1][2].any()


@pytest.mark.parametrize("label", [-100, -1, 3])
def test_a_class_that_is_none_is_left_to_torch(label: int) -> None:
    """Which says so."""
    labels = torch.tensor([0, label])
    given = {"weight_C": None, "ignored": -100, "divisor": 1.0}
    assert cross_entropy(torch.randn(2, 3), labels, torch.tensor([True, True]), **given) is None  # type: ignore[arg-type]
    assert cross_entropy(torch.randn(2, 3), labels, torch.tensor([True, False]), **given) is not None  # type: ignore[arg-type]
