# SPDX-License-Identifier: Apache-2.0
"""Averages of the weights along the way, as in stochastic weight averaging (Izmailov et al., UAI 2018) or an
exponential moving average: torch's ``AveragedModel``, updated after every step, and scored in the model's place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ooc.errors import ModelError


class Averaging:
    """The average of ``model``'s weights from epoch ``start`` on; without an ``average`` it does nothing."""

    def __init__(self, model: nn.Module, average: AveragedModel | None, start: int) -> None:
        if average is not None:
            own = {name: tensor.shape for name, tensor in model.state_dict().items()}
            if {name: tensor.shape for name, tensor in average.module.state_dict().items()} != own:
                raise ModelError("the AveragedModel averages another model; make it as AveragedModel(model)")
            # It starts from the model as it is, whose parameters it must not share.
            shared = {id(p) for p in model.parameters()} & {id(p) for p in average.module.parameters()}
            if shared:
                raise ModelError("the AveragedModel shares parameters with the model; make it as AveragedModel(model)")
        self._model = model
        self._average = average
        self._start = start

    @property
    def nbytes(self) -> int:
        """Bytes of the average, and of the model's own weights put aside while it is scored."""
        if self._average is None:
            return 0
        state: dict[str, torch.Tensor] = self._average.module.state_dict()
        return 2 * sum(tensor.nbytes for tensor in state.values())

    @property
    def active(self) -> bool:
        """Whether there is an average that is not the model itself."""
        return self._average is not None

    def update(self, epoch: int) -> None:
        """Take the weights after ``epoch`` (from 1) in."""
        if self._average is not None and epoch >= self._start:
            self._average.update_parameters(self._model)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights meanwhile, once there are any."""
        if self._average is None or not int(self._average.n_averaged):
            yield
            return
        own = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        try:
            _copy(self._model, self._average.module.state_dict())
            yield
        finally:
            _copy(self._model, own)

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of it."""
        return None if self._average is None else self._average.state_dict()

    def load(self, state: dict[str, Any] | None) -> None:
        """The inverse of ``state``."""
        if self._average is not None and state is not None:
            self._average.load_state_dict(state)


@torch.no_grad()
def _copy(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """In place: everything that shares the model's parameters goes on sharing them."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(state[name])
