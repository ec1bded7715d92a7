# SPDX-License-Identifier: Apache-2.0
"""What accompanies an optimizer's steps: learning rates that change from epoch to epoch, by torch's schedulers, and
averages of weights, as in stochastic weight averaging (Izmailov et al., UAI 2018) or an exponential moving average:
torch's ``AveragedModel``, updated after every step and scored in place of the model."""

import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from ooc.errors import ModelError, OptionError

Scheduler = LRScheduler | ReduceLROnPlateau


class Schedules:
    """Any number of torch schedulers on one optimizer, each stepped once an epoch, in order.

    A ``ReduceLROnPlateau`` is stepped with the validation score, in the epochs that are scored; the others after every
    epoch's step.
    """

    def __init__(self, given: Scheduler | Sequence[Scheduler] | None, optimizer: Optimizer, *, rising: bool) -> None:
        several: Any = given if isinstance(given, list | tuple) else () if given is None else (given,)
        self.all: list[Scheduler] = [*several]
        for scheduler in self.all:
            if not isinstance(scheduler, LRScheduler):
                raise ModelError(f"scheduler {scheduler!r} is none of torch.optim.lr_scheduler; make one")
            name = type(scheduler).__name__
            if scheduler.optimizer is not optimizer:
                raise ModelError(f"scheduler {name} is of another optimizer than the trainer's; give both")
            if isinstance(scheduler, ReduceLROnPlateau) and (scheduler.mode == "max") != rising:
                wanted = "max" if rising else "min"
                raise ModelError(f"scheduler {name} has mode {scheduler.mode!r}, this metric needs mode={wanted!r}")
            _check_plain(name, scheduler.state_dict())
        self.needs_scores = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self.all)
        """Whether one of them depends on the validation score."""

    def step(self) -> None:
        """Step them after an epoch's optimizer step."""
        for scheduler in self.all:
            if not isinstance(scheduler, ReduceLROnPlateau):
                try:
                    scheduler.step()
                except ValueError as error:  # OneCycleLR after its last epoch
                    raise OptionError(f"scheduler {type(scheduler).__name__} says: {error}") from error

    def step_scored(self, score: float) -> None:
        """Step those that depend on an epoch's validation score, now that it is known."""
        for scheduler in self.all:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(score)

    def state(self) -> list[dict[str, Any]]:
        """Return their state for a checkpoint."""
        return [scheduler.state_dict() for scheduler in self.all]

    def load(self, states: list[dict[str, Any]]) -> None:
        """The inverse of ``state``."""
        for scheduler, state in zip(self.all, states, strict=True):
            scheduler.load_state_dict(state)


def _check_plain(name: str, state: dict[str, Any]) -> None:
    """Refuse a scheduler whose state holds code: a checkpoint is plain data, and reading one runs nothing."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ModelError(f"scheduler {name} cannot be kept in a checkpoint: its state is no plain data") from error


# ---- the usual ones, as functions of the epoch ----------------------------------------------------------------------


def by_factor(optimizer: Optimizer, factor: Callable[[int], float], *, warmup: int) -> LambdaLR:
    """Return a scheduler with base rate × ``factor(epochs since the warm-up)``, after a linear rise over ``warmup``
    epochs."""

    def rate(epoch: int) -> float:
        return (epoch + 1) / warmup if epoch < warmup else factor(epoch - warmup)

    return LambdaLR(optimizer, rate)


def cosine(epochs: int) -> Callable[[int], float]:
    """Return a factor that falls from 1 to almost 0 along half a cosine (Loshchilov and Hutter, ICLR 2017), then 0."""
    return lambda epoch: 0.5 * (1 + math.cos(math.pi * min(epoch, epochs) / epochs))


def steps(every: int, gamma: float) -> Callable[[int], float]:
    """Return a factor multiplied by ``gamma`` after every ``every`` epochs."""
    return lambda epoch: gamma ** (epoch // every)


def constant(epoch: int) -> float:
    """Return the factor 1."""
    return 1.0


# ---- averaged weights -----------------------------------------------------------------------------------------------


class Averaging:
    """The average of ``model``'s weights from epoch ``start`` on; without an ``average`` it does nothing."""

    def __init__(self, model: nn.Module, average: AveragedModel | None, start: int) -> None:
        if average is not None:
            if not isinstance(average, AveragedModel):
                raise OptionError(f"average {average!r} is no AveragedModel; make it as AveragedModel(model)")
            own = {name: (one.shape, one.dtype) for name, one in model.state_dict().items()}
            if {name: (one.shape, one.dtype) for name, one in average.module.state_dict().items()} != own:
                raise ModelError("the AveragedModel averages another model; make it as AveragedModel(model)")
            # It starts from the model as it is, whose parameters it must not share.
            shared = {id(p) for p in model.parameters()} & {id(p) for p in average.module.parameters()}
            if shared:
                raise ModelError("the AveragedModel shares parameters with the model; make it as AveragedModel(model)")
        self._model = model
        self._average, self._start = average, start
        self.active = average is not None
        """Whether there is an average other than the model itself."""
        state: dict[str, torch.Tensor] = {} if average is None else average.module.state_dict()
        self.nbytes = 2 * sum(tensor.nbytes for tensor in state.values())
        """Bytes of the average, and of the model's own weights kept while it is scored."""

    def update(self, epoch: int) -> None:
        """Include the weights after ``epoch``, counted from 1."""
        if self._average is not None and epoch >= self._start:
            self._average.update_parameters(self._model)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the averaged weights, once there are any."""
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
        """Return its state for a checkpoint."""
        return None if self._average is None else self._average.state_dict()

    def load(self, state: dict[str, Any] | None) -> None:
        """The inverse of ``state``."""
        if self._average is not None and state is not None:
            self._average.load_state_dict(state)


@torch.no_grad()
def _copy(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy in place, so that everything that shares the model's parameters still does."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(state[name])
