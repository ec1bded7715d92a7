# SPDX-License-Identifier: Apache-2.0
"""Learning rates that change from epoch to epoch: torch's schedulers, stepped once an epoch."""

import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ooc.errors import ModelError, OptionError

Scheduler = LRScheduler | ReduceLROnPlateau


class Schedules:
    """Any number of torch schedulers on one optimizer, each stepped once an epoch, in order.

    A ``ReduceLROnPlateau`` is stepped with the validation score, in the epochs that are scored, the others after
    every epoch's step.
    """

    def __init__(self, given: Scheduler | Sequence[Scheduler] | None, optimizer: Optimizer, *, rising: bool) -> None:
        self._all = [given] if isinstance(given, LRScheduler) else list(given or ())  # plateau is an LRScheduler too
        for scheduler in self._all:
            if not isinstance(scheduler, LRScheduler):
                raise ModelError(f"scheduler {scheduler!r} is none of torch.optim.lr_scheduler")
            name = type(scheduler).__name__
            if scheduler.optimizer is not optimizer:
                raise ModelError(f"scheduler {name} is of another optimizer than the trainer's; give both")
            if isinstance(scheduler, ReduceLROnPlateau) and (scheduler.mode == "max") != rising:
                wanted = "max" if rising else "min"
                raise ModelError(f"scheduler {name} has mode {scheduler.mode!r}, this metric needs mode={wanted!r}")
            _check_plain(name, scheduler.state_dict())

    @property
    def needs_scores(self) -> bool:
        """Whether one of them goes by the validation score."""
        return any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._all)

    def step(self) -> None:
        """An epoch's optimizer step is done."""
        for scheduler in self._all:
            if not isinstance(scheduler, ReduceLROnPlateau):
                try:
                    scheduler.step()
                except ValueError as error:  # OneCycleLR after its last epoch
                    raise OptionError(f"scheduler {type(scheduler).__name__} says: {error}") from error

    def step_scored(self, score: float) -> None:
        """An epoch's validation score is known."""
        for scheduler in self._all:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(score)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps of them."""
        return [scheduler.state_dict() for scheduler in self._all]

    def load(self, states: list[dict[str, Any]]) -> None:
        """The inverse of ``state``."""
        if len(states) != len(self._all):
            raise OptionError(f"the run was begun with {len(states)} schedulers, not {len(self._all)}")
        for scheduler, state in zip(self._all, states, strict=True):
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


# ---- the usual ones, as functions of the epoch ---------------------------------------------------------------


def by_factor(optimizer: Optimizer, factor: Callable[[int], float], *, warmup: int) -> LambdaLR:
    """Base rate × ``factor(epochs done since the warm-up)``, after a linear rise over ``warmup`` epochs."""

    def rate(epoch: int) -> float:
        return (epoch + 1) / warmup if epoch < warmup else factor(epoch - warmup)

    return LambdaLR(optimizer, rate)


def cosine(epochs: int) -> Callable[[int], float]:
    """From 1 to nearly 0 along half a cosine in so many epochs (Loshchilov and Hutter, ICLR 2017), then 0."""
    return lambda epoch: 0.5 * (1 + math.cos(math.pi * min(epoch, epochs) / epochs))


def steps(every: int, gamma: float) -> Callable[[int], float]:
    """× ``gamma`` after every so many epochs."""
    return lambda epoch: gamma ** (epoch // every)


def constant(epoch: int) -> float:
    """No change."""
    return 1.0
