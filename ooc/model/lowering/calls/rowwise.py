# SPDX-License-Identifier: Apache-2.0
"""The functions, methods and modules that are known to work row by row and to have no effect but their result.

Whether they do so with the arguments given (``dim=0`` would not) is tried as well: see ``assembly.probe``.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MODULE_NAMES = (
    "ReLU ELU LeakyReLU GELU GLU SiLU Tanh Sigmoid Softplus Softsign Softshrink Hardshrink Tanhshrink Hardswish "
    "Hardsigmoid LogSigmoid SELU CELU ReLU6 Hardtanh Mish PReLU Softmax LogSoftmax LayerNorm RMSNorm Flatten Unflatten "
    "GroupNorm Conv1d Conv2d Softmin Threshold"
)
_TORCH_NAMES = (
    "add sub mul div true_divide neg abs square sqrt rsqrt exp expm1 log log1p sigmoid tanh sin cos atan erf pow "
    "clamp clip maximum minimum where cat concat stack softmax log_softmax sum mean amax amin max min norm matmul mm "
    "relu celu selu prelu rms_norm layer_norm hstack unsqueeze squeeze flatten reshape lerp reciprocal sign "
    "logaddexp logsumexp chunk split unbind transpose permute einsum bmm "
    "gt lt ge le eq ne logical_and logical_or logical_not isnan isfinite masked_fill zeros_like ones_like full_like "
    "cumsum cumprod flip topk sort var std prod nan_to_num sinh cosh tan log2 log10 floor ceil round "
    "acos asin atan2 hypot erfc fmod remainder addcmul addcdiv clamp_min clamp_max roll diff narrow select tile "
    "repeat_interleave movedim swapaxes gather scatter scatter_add index_select take_along_dim "
    "tensordot dot mv addmm clone detach concatenate column_stack tensor_split hsplit median kthvalue sinc trunc frac "
    "inner any all"
)
_FUNCTIONAL_NAMES = (
    "relu elu leaky_relu gelu glu silu tanh sigmoid softplus softsign softshrink hardshrink tanhshrink hardswish "
    "hardsigmoid logsigmoid selu celu relu6 hardtanh mish prelu softmax log_softmax layer_norm rms_norm "
    "normalize linear group_norm conv1d softmin one_hot threshold cosine_similarity pairwise_distance pad"
)
_OPERATOR_NAMES = "add sub mul truediv mod neg abs pow matmul getitem gt lt ge le eq ne and_ or_ xor invert"
ROWWISE_MODULES: tuple[type[nn.Module], ...] = tuple(getattr(nn, name) for name in _MODULE_NAMES.split())
OF_SEVERAL: tuple[type[nn.Module], ...] = (
    *(nn.Bilinear, nn.GRUCell, nn.LSTMCell, nn.RNNCell),
    *(nn.GRU, nn.LSTM, nn.MultiheadAttention, nn.RNN, nn.TransformerEncoderLayer),
    *(nn.CosineSimilarity, nn.PairwiseDistance),
)
"""Modules that take several matrices or return several results; in a batch, rows come first."""


def assigned(x: Tensor, key: Any, value: Any) -> Tensor:
    """Return ``x`` after ``x[key] = value``, as a new tensor."""
    x = x.clone()
    x[key] = value
    return x


ROWWISE_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    [
        getattr,
        *(getattr(operator, name) for name in _OPERATOR_NAMES.split()),
        *(getattr(torch, name) for name in _TORCH_NAMES.split() if hasattr(torch, name)),
        torch._C._VariableFunctions.index_select,  # for which PyG has put another function in torch
        *(torch.zeros, torch.ones, torch.full),  # with that many rows
        *(torch.linalg.norm, torch.linalg.vector_norm),
        assigned,
        *(getattr(F, name) for name in _FUNCTIONAL_NAMES.split()),
    ]
)
ROWWISE_METHODS = frozenset(
    f"{_TORCH_NAMES} contiguous view type_as size dim t unflatten new_zeros new_ones new_full expand "
    "expand_as repeat __and__ __or__ __xor__".split()
)
_TRUTH_NAMES = (
    "gt lt ge le eq ne logical_and logical_or logical_not isnan isfinite any all and_ or_ xor invert __and__ __or__ "
    "__xor__"
)
OF_OTHER_SHAPES = frozenset(
    f"{_TRUTH_NAMES} chunk split tensor_split hsplit unbind max min median kthvalue topk sort one_hot t transpose "
    "permute movedim swapaxes getattr einsum".split()
)
"""Functions, by name, that may return several results, truth values, or rows in another dimension."""
MAY_BE_SUMS = frozenset(
    [
        *("sum", "mean", "norm", "linalg_norm", "linalg_vector_norm", "var", "std"),
        *("matmul", "mm", "bmm", "einsum", "tensordot", "dot", "mv"),
    ]
)
"""Functions, by name, that may add up over all rows."""
ARITHMETIC = frozenset(["add", "sub", "mul", "truediv", "div", "true_divide", "pow"])
"""Functions, by name, that may be given the number of all rows."""
HEAVY_FUNCTIONS: frozenset[object] = frozenset(
    [F.linear, torch.addmm, torch.matmul, torch.mm, torch.bmm, torch.einsum, operator.matmul, "matmul", "mm", "bmm"]
)
"""Functions and methods, by name, that are dense products."""
MAKE_ROWS: frozenset[object] = frozenset([torch.zeros, torch.ones, torch.full, "expand", "repeat"])
"""Functions that make as many equal rows as they are told."""
WHOLE: frozenset[object] = frozenset(["long", "argmax", torch.argmax])
"""Functions that make whole numbers of rows, by which something may be looked up."""
IN_PLACE: dict[object, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    **{f"{name}_": name for name in _TORCH_NAMES.split()},
    **{
        getattr(owner, f"{name}_"): getattr(owner, name)
        for owner, names in ((torch, _TORCH_NAMES), (F, _FUNCTIONAL_NAMES))
        for name in names.split()
        if hasattr(owner, f"{name}_")
    },
}
"""Functions that write into their first operand, with those that return the same without."""
_VIEW_NAMES = (
    "view reshape flatten unflatten unsqueeze squeeze chunk split tensor_split hsplit unbind transpose permute t "
    "detach contiguous type_as einsum narrow select movedim swapaxes expand expand_as"
)
VIEWS: frozenset[object] = frozenset(
    [
        operator.getitem,
        getattr,
        *_VIEW_NAMES.split(),
        *(getattr(torch, name) for name in _VIEW_NAMES.split() if hasattr(torch, name)),
    ]
)
"""Functions that may return a view of their input: writing into one would write into the other."""
