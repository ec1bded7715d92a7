# SPDX-License-Identifier: Apache-2.0
"""Where a model is: on the device while programs run there, on the CPU before and after.

Parameters, buffers and gradients keep their identity: whoever holds one, an optimizer or a function taken from the
model, finds it moved. So does a parameter's optimizer state; what torch keeps on the CPU of it (Adam counts its steps
there) stays there.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from ooc.errors import BudgetError


class Placement:
    """Of ``models``, with ``optimizer``; ``place`` is the device's. On the CPU nothing ever moves."""

    def __init__(
        self, place: torch.device, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._place = place
        self._models = models
        self._optimizer = optimizer

    def enter(self) -> None:
        """To the device; BudgetError where there is no room left for it."""
        try:
            self._move(self._place)
        except torch.OutOfMemoryError:
            raise BudgetError("the device has no room left for the model; give a larger gpu_budget=") from None

    def leave(self) -> None:
        """Back to the CPU."""
        self._move(torch.device("cpu"))

    def _move(self, place: torch.device) -> None:
        if self._place.type == "cpu":
            return
        for tensor in self._tensors():
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(place)
            tensor.grad = None if gradient is None else gradient.to(place)
        if self._optimizer is not None:
            _move_state(self._optimizer, place)

    def _tensors(self) -> Iterator[Tensor]:
        seen: set[int] = set()
        for model in self._models:
            for tensor in chain(model.parameters(), model.buffers()):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _move_state(optimizer: torch.optim.Optimizer, place: torch.device) -> None:
    """What is kept of a parameter goes where it is, but for single numbers that torch keeps on the CPU."""
    for group in optimizer.param_groups:
        with_parameter = bool(group.get("capturable")) or bool(group.get("fused"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, kept in state.items():
                if isinstance(kept, Tensor) and (kept.dim() or with_parameter):
                    state[name] = kept.to(place)
