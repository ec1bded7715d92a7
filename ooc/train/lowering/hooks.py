# SPDX-License-Identifier: Apache-2.0
"""Hooks: what somebody has asked to be called with what a module or a parameter is given, and may change it.

Modules are not called here, and autograd never adds up a parameter's gradient, so that hooks would not be either.
"""

from torch import nn

_NAMES = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
"""How torch's and PyG's names end of what a module keeps hooks in that may change a result."""


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that ``module`` has."""
    return [kept.strip("_") for kept, value in vars(module).items() if kept.endswith(_NAMES) and value]


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether it has any."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
