# SPDX-License-Identifier: Apache-2.0
"""The optimizer and the learning rate's schedule that options of ``ooc train`` describe: torch's, by their names."""

import ast
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau

from ooc.cli.arguments.settings import TrainSettings, refuse
from ooc.errors import OptionError
from ooc.suggestions import did_you_mean
from ooc.train.embedding import Embedding
from ooc.train.schedule import Scheduler, by_factor, constant, cosine, steps

_SGD_MOMENTUM = 0.9
_OF_EMBEDDING = ("embedding_optimizer", "embedding_lr", "embedding_option")
_OF_OPTIMIZERS = {
    "lr": "give --lr",
    "weight_decay": "give --weight-decay",
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), "it changes how steps are taken, not which"),
}
_OF_SCHEDULES = {
    "optimizer": "it is --optimizer",
    "last_epoch": "the run knows it",
    "verbose": "torch has given it up",
}
_OF_TORCH = (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError, LookupError)
"""What torch raises for options that it does not take."""
_WORDS = {"true": True, "false": False, "none": None}


def build_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters. OptionError for what torch does not take; it is tried on a few numbers."""
    kind = _of_name(torch.optim, settings.optimizer)
    values = optimizer_options(settings)
    small = _small_model()
    _stepped(_made(kind, "--optimizer-option", small.parameters(), values), "--optimizer-option", [])
    optimizer = _made(kind, "--optimizer-option", model.parameters(), values)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def optimizer_options(settings: TrainSettings) -> dict[str, Any]:
    """What torch's optimizer is given but for the parameters."""
    kind = _of_name(torch.optim, settings.optimizer)
    values: dict[str, Any] = {"lr": settings.lr}
    if "weight_decay" in inspect.signature(kind).parameters:
        values["weight_decay"] = settings.weight_decay
    elif settings.weight_decay:
        raise OptionError(f"{kind.__name__} has no weight decay; leave out --weight-decay")
    if kind is torch.optim.SGD:
        values["momentum"] = _SGD_MOMENTUM
    given = _read(settings.optimizer_option, "--optimizer-option", kind, _OF_OPTIMIZERS | {"params": "it is the model"})
    return values | given


def build_embedding(settings: TrainSettings) -> Embedding | None:
    """What is trained of every node; None: nothing. OptionError for options of it without one."""
    if not settings.embedding:
        refuse(settings, _OF_EMBEDDING, "is of an embedding; give --embedding COLUMNS, too")
        return None
    kind, option = _of_name(torch.optim, settings.embedding_optimizer), "--embedding-option"
    spread = [text for text in settings.embedding_option if text.partition("=")[0] == "std"]
    others = [text for text in settings.embedding_option if text not in spread]
    values = _read(others, option, kind, {"lr": "give --embedding-lr", "params": "it is the embedding"})
    std = _value(spread[-1].partition("=")[2], f"{option} {spread[-1]}") if spread else 1.0
    if not isinstance(std, int | float):
        raise OptionError(f"{option} {spread[-1]}: it must be a number")
    optimizer, rate, columns = settings.embedding_optimizer, settings.embedding_lr, settings.embedding
    widths: int | dict[str, int] = columns if isinstance(columns, int) else {}
    if not isinstance(columns, int):
        widths = {name: int(count) for name, _, count in (part.rpartition("=") for part in columns.split(","))}
    return Embedding(widths, optimizer=optimizer, lr=rate, std=std, **values)


def build_schedule(settings: TrainSettings, optimizer: torch.optim.Optimizer, *, rising: bool) -> list[Scheduler]:
    """The learning rate's schedule; ``rising``: whether a higher validation score is better."""
    warmup, epochs = settings.warmup, settings.schedule_epochs or settings.epochs
    own = settings.schedule in ("none", "cosine", "step", "plateau")
    if own and settings.schedule_option:
        which = f"torch's schedules, such as ExponentialLR; not of {settings.schedule}"
        raise OptionError(f"--schedule-option is of {which}")
    match settings.schedule:
        case "none":
            return [by_factor(optimizer, constant, warmup=warmup)] if warmup else []
        case "cosine":
            if warmup >= epochs:
                raise OptionError(f"--warmup {warmup} leaves nothing of the schedule's {epochs} epochs")
            return [by_factor(optimizer, cosine(epochs - warmup), warmup=warmup)]
        case "step":
            return [by_factor(optimizer, steps(settings.step_every, settings.lr_factor), warmup=warmup)]
        case "plateau":
            mode: Any = "max" if rising else "min"
            options: dict[str, Any] = {"factor": settings.lr_factor, "patience": settings.plateau_patience}
            plateau = ReduceLROnPlateau(optimizer, mode, **options)
            # Both change the rate as it is, so that each can have its part in it.
            rise = LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1) if warmup > 1 else None
            return [plateau] if rise is None else [rise, plateau]
        case name:
            if warmup:
                raise OptionError(f"--warmup goes with none, cosine, step and plateau, not with {name}")
            return [_of_torch(settings, optimizer, epochs, rising=rising)]


def _of_torch(settings: TrainSettings, optimizer: torch.optim.Optimizer, epochs: int, *, rising: bool) -> Scheduler:
    """One of torch's schedulers, after it was tried for an epoch. What the run knows need not be said again."""
    option, kind = "--schedule-option", _of_name(lr_scheduler, settings.schedule)
    values: dict[str, Any] = {}
    settled = _OF_SCHEDULES
    if kind is lr_scheduler.CosineAnnealingLR:
        values = {"T_max": epochs}
    elif kind is lr_scheduler.OneCycleLR:
        values = {"max_lr": settings.lr, "total_steps": epochs}
    elif kind is ReduceLROnPlateau:
        values = {"mode": "max" if rising else "min"}
        settled = {**settled, "mode": "the metric decides it"}
    values |= _read(settings.schedule_option, option, kind, settled)
    if {"epochs", "steps_per_epoch"} & values.keys():
        del values["total_steps"]
    small = build_optimizer(settings, _small_model())
    _stepped(small, option, [_made(kind, option, small, values)])
    made = _made(kind, option, optimizer, values)
    assert isinstance(made, lr_scheduler.LRScheduler)
    return made


def _of_name(module: Any, name: str) -> Any:
    """The class called so in whatever case."""
    found = next((one for one in vars(module) if one.casefold() == name.casefold() and one[0].isupper()), None)
    if found is None:
        raise OptionError(f"torch {torch.__version__} has no {name}; a later version may")
    return getattr(module, found)


def _read(texts: Sequence[str], option: str, kind: Any, settled: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of ``kind`` from ``KEY=VALUE``; ``settled``: those that it gets otherwise, and why."""
    known = [name for name in inspect.signature(kind).parameters if name not in settled]
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in settled:
            raise OptionError(f"{option} {name}: {settled[name]}")
        if name not in known:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise OptionError(f"{option} {text}: {kind.__name__} has no {name}{hint}")
        if name in found:
            raise OptionError(f"{option} {name} is given twice")
        found[name] = _value(value, f"{option} {text}")
    return found


def _value(text: str, where: str) -> Any:
    """A number, several of them as ``0.9,0.99``, true, false, none, or a word."""
    if text.casefold() in _WORDS:
        return _WORDS[text.casefold()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    several = value if isinstance(value, tuple) else [value]
    if any(isinstance(one, float) and not math.isfinite(one) for one in several):
        raise OptionError(f"{where}: it must be finite")
    return value


def _made(kind: Any, option: str, what: Any, values: Mapping[str, Any]) -> Any:
    _, *parameters = inspect.signature(kind).parameters.items()
    if needed := [name for name, one in parameters if one.default is one.empty and name not in values]:
        raise OptionError(f"{kind.__name__} wants {' and '.join(needed)}; give {option} {needed[0]}=…")
    try:
        return kind(what, **values)
    except _OF_TORCH as error:
        raise OptionError(f"{option}: {kind.__name__} says: {error}") from error


def _stepped(optimizer: torch.optim.Optimizer, option: str, schedulers: Sequence[Any]) -> None:
    """OptionError where a step fails, which is better told before the first epoch."""
    try:
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*([0.5] if isinstance(scheduler, ReduceLROnPlateau) else []))
    except _OF_TORCH as error:
        name = type((schedulers or [optimizer])[0]).__name__
        raise OptionError(f"{option}: {name} says: {error}") from error


def _small_model() -> nn.Module:
    """A few numbers with gradients, to try an optimizer on; draws none at random."""
    model = nn.Linear(2, 2, device="meta").to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    return model
