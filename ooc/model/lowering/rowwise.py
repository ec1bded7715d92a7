# SPDX-License-Identifier: Apache-2.0
"""The functions, methods and modules that are known to work row by row, and have no effect but their result.

That they do with the arguments they are given (``dim=0`` would not) is tried out besides: see ``assembly.probe``.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_MODULE_NAMES = (
    "ReLU ELU LeakyReLU GELU GLU SiLU Tanh Sigmoid Softplus Softsign Softshrink Hardshrink Tanhshrink Hardswish "
    "Hardsigmoid LogSigmoid SELU CELU ReLU6 Hardtanh Mish PReLU Softmax LogSoftmax LayerNorm RMSNorm Flatten Unflatten"
)
_TORCH_NAMES = (
    "add sub mul div true_divide neg abs square sqrt rsqrt exp expm1 log log1p sigmoid tanh sin cos atan erf pow "
    "clamp clip maximum minimum where cat concat stack softmax log_softmax sum mean amax amin max min norm matmul mm "
    "relu celu selu prelu rms_norm layer_norm hstack unsqueeze squeeze flatten reshape lerp reciprocal sign "
    "logaddexp logsumexp chunk split unbind transpose permute einsum bmm"
)
_FUNCTIONAL_NAMES = (
    "relu elu leaky_relu gelu glu silu tanh sigmoid softplus softsign softshrink hardshrink tanhshrink hardswish "
    "hardsigmoid logsigmoid selu celu relu6 hardtanh mish prelu softmax log_softmax layer_norm rms_norm "
    "normalize linear"
)
_OPERATOR_NAMES = "add sub mul truediv neg pow matmul getitem"
ROWWISE_MODULES: tuple[type[nn.Module], ...] = tuple(getattr(nn, name) for name in _MODULE_NAMES.split())
ROWWISE_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    [
        getattr,
        *(getattr(operator, name) for name in _OPERATOR_NAMES.split()),
        *(getattr(torch, name) for name in _TORCH_NAMES.split() if hasattr(torch, name)),
        *(getattr(F, name) for name in _FUNCTIONAL_NAMES.split()),
    ]
)
ROWWISE_METHODS = frozenset(f"{_TORCH_NAMES} contiguous clone detach view type_as size dim t unflatten".split())
HEAVY_FUNCTIONS: frozenset[object] = frozenset(
    [F.linear, torch.matmul, torch.mm, torch.bmm, torch.einsum, operator.matmul, "matmul", "mm", "bmm"]
)
"""Those that are dense products, by function or method name."""
WHOLE: frozenset[object] = frozenset(["long", "argmax", torch.argmax])
"""What makes whole numbers of rows, by which something may be looked up."""
IN_PLACE: dict[object, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
"""Operators that write into their first operand, and those that give the same without."""
_VIEW_NAMES = (
    "view reshape flatten unflatten unsqueeze squeeze chunk split unbind transpose permute t detach contiguous type_as "
    "einsum"
)
VIEWS: frozenset[object] = frozenset(
    [
        operator.getitem,
        getattr,
        *_VIEW_NAMES.split(),
        *(getattr(torch, name) for name in _VIEW_NAMES.split() if hasattr(torch, name)),
    ]
)
"""What may give a view of its input: writing into the one would write into the other."""
