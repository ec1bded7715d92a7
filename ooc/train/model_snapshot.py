# SPDX-License-Identifier: Apache-2.0
"""What a trainer has taken from its model when it was made, and whether it still holds.

Weights, and buffers that are written into, are looked up whenever they are used. Which modules there are, which
parameters are trained, rates of dropout, slopes and the like, of a module, of its class, or in a list or dictionary of
these, decided what is planned; changed later, they would count for nothing. Nor would hooks, or another ``forward``,
that are set on a module later.
"""

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ooc.errors import ModelError
from ooc.model.lowering.network import has_hooks, hooks_of

_PLAIN = (bool, int, float, str, type(None))
_OF_ALL = vars(nn.Module()).keys()
"""What every module has: its mode, which programs decide, and what is looked at by itself."""


class ModelSnapshot:
    """Of ``model``, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._constants = dict(_constants(model))
        self._numbers = [(name, buffer, buffer._version, float(buffer)) for name, buffer in _taken_as_numbers(model)]

    def check(self) -> None:
        """Raise ModelError naming what is no longer as it was."""
        constants = dict(_constants(self._model))
        for name in [*self._constants, *constants]:
            before, now = self._constants.get(name), constants.get(name)
            is_equal = isinstance(before, (*_PLAIN, list)) and isinstance(now, (*_PLAIN, list)) and before == now
            if before is not now and not is_equal:
                raise _changed(name)
        for name, buffer, version, value in self._numbers:
            if buffer._version != version and float(buffer) != value:  # on a device, to read it is to wait
                raise _changed(f"the value of {name}")


def _changed(name: str) -> ModelError:
    return ModelError(
        f"{name} of the model has changed since the trainer was made, which it does not see: make another Trainer with "
        "the model and its optimizer"
    )


def _constants(model: nn.Module) -> Iterator[tuple[str, object]]:
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        yield path or type(model).__name__, module
        own_kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith(("torch", "builtins"))]
        for name, value in [*chain(*(vars(kind).items() for kind in own_kinds[::-1])), *vars(module).items()]:
            if name in _OF_ALL:
                continue
            if isinstance(value, (list, tuple, dict)):
                yield prefix + name, [one for one in tree_leaves(value) if isinstance(one, _PLAIN)]
            elif isinstance(value, _PLAIN) or callable(value):
                yield prefix + name, value
        for kind in hooks_of(module):
            yield prefix + kind, True
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
                yield f"{prefix}{name}.requires_grad", parameter.requires_grad
                yield f"{prefix}{name}.hooks", has_hooks(parameter)
        for name, buffer in module._buffers.items():
            yield prefix + name, buffer


def _taken_as_numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    from torch_geometric.nn import GINConv, GINEConv  # stores are converted where PyG is missing, too

    for path, module in model.named_modules():
        if isinstance(module, (GINConv, GINEConv)) and not isinstance(module.eps, nn.Parameter):
            yield f"{path}.eps".lstrip("."), module.eps
