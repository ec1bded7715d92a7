# SPDX-License-Identifier: Apache-2.0
"""What a user has put in the place of a module's own parts.

A formula for a module holds for its class as it is written: for what it has inside by its constructor, and for its own
functions. So whoever computes by a formula asks here first.
"""

from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear as GraphLinear

LINEAR: tuple[type[nn.Module], ...] = (nn.Linear, GraphLinear)


def is_linear(module: nn.Module) -> bool:
    """Whether it computes x Wᵀ + b with parameters of its own: a subclass may do anything else."""
    parts: Any = module
    return (
        type(module) in LINEAR
        and not replaced_functions(module)
        and isinstance(parts.weight, nn.Parameter)
        and (parts.bias is None or isinstance(parts.bias, nn.Parameter))
    )


def replaced_functions(module: nn.Module) -> list[str]:
    """The functions of its class, ``forward`` and those that ``forward`` may call, of which the instance has others."""
    return [name for name in vars(module) if _is_computing(type(module), name) and not _is_set_by_pyg(module, name)]


def strangers(module: nn.Module) -> list[str]:
    """Those of ``replaced_functions`` that are not bound to the module: they stay with it when it is copied."""
    return [name for name in replaced_functions(module) if getattr(vars(module)[name], "__self__", None) is not module]


def _is_computing(kind: type[nn.Module], name: str) -> bool:
    if not callable(getattr(kind, name, None)):
        return False
    return name == "forward" or not (hasattr(nn.Module, name) or name == "reset_parameters")


def _is_set_by_pyg(module: nn.Module, name: str) -> bool:
    """PyG sets ``propagate`` on the instance where ``decomposed_layers`` is set; it gives the same."""
    if name != "propagate" or not isinstance(module, MessagePassing):
        return False
    own = [getattr(type(module), propagate, None) for propagate in ("_orig_propagate", "_jinja_propagate")]
    return getattr(vars(module)[name], "__func__", name) in own
