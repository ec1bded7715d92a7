# SPDX-License-Identifier: Apache-2.0
"""How ``ooc train`` trains: loss, optimizer, schedule and averaging as its options describe them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ooc.cli.settings import TrainSettings
from ooc.errors import OptionError
from ooc.storage.store import Task
from ooc.train.loss import training_classes
from ooc.train.schedule import Scheduler, by_factor, constant, cosine, steps

if TYPE_CHECKING:
    from ooc.storage.store import Store

LOSSES: dict[str, type[nn.Module]] = {
    "bce": nn.BCEWithLogitsLoss,
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "smooth-l1": nn.SmoothL1Loss,
}
_SGD_MOMENTUM = 0.9
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {"momentum": _SGD_MOMENTUM}),
}


def build_loss(settings: TrainSettings, store: "Store") -> nn.Module | None:
    """The loss the options describe; None: the usual one for the store's labels."""
    refined = settings.label_smoothing > 0 or settings.class_weights != "none"
    classes = store.task is Task.CLASSES
    if settings.loss == "cross-entropy" or (settings.loss == "auto" and refined and classes):
        weight = _balanced(store) if settings.class_weights == "balanced" else None
        return nn.CrossEntropyLoss(weight=weight, label_smoothing=settings.label_smoothing)
    if refined:
        raise OptionError("--label-smoothing and --class-weights are of cross-entropy, for one class a node")
    return None if settings.loss == "auto" else LOSSES[settings.loss]()


def _balanced(store: "Store") -> torch.Tensor:
    """Weights by which every class that has training rows counts alike, their mean over training rows being 1."""
    if store.task is not Task.CLASSES:
        raise OptionError("--class-weights balanced is for one class a node")
    counts = training_classes(store)
    present = int((counts > 0).sum())
    weights = store.split_sizes["train"] / (present * counts.clamp(min=1).double())
    return torch.where(counts > 0, weights, 0.0).float()


def build_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters."""
    kind: Any
    kind, options = _OPTIMIZERS[settings.optimizer]
    optimizer = kind(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **options)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def build_schedule(settings: TrainSettings, optimizer: torch.optim.Optimizer, *, rising: bool) -> list[Scheduler]:
    """The learning rate's schedule; ``rising``: whether a higher validation score is better."""
    warmup = settings.warmup
    match settings.schedule:
        case "cosine":
            epochs = settings.schedule_epochs or settings.epochs
            if warmup >= epochs:
                raise OptionError(f"--warmup {warmup} leaves nothing of the schedule's {epochs} epochs")
            return [by_factor(optimizer, cosine(epochs - warmup), warmup=warmup)]
        case "step":
            return [by_factor(optimizer, steps(settings.step_every, settings.lr_factor), warmup=warmup)]
        case "plateau":
            plateau = ReduceLROnPlateau(
                optimizer,
                mode="max" if rising else "min",
                factor=settings.lr_factor,
                patience=settings.plateau_patience,
            )
            # Both change the rate as it is, so that each can have its part in it.
            rise = LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1) if warmup > 1 else None
            return [plateau] if rise is None else [rise, plateau]
        case _:
            return [by_factor(optimizer, constant, warmup=warmup)] if warmup else []


def build_average(settings: TrainSettings, model: nn.Module) -> AveragedModel | None:
    """The average of the weights that is scored in the model's place."""
    match settings.average:
        case "ema":
            moving_average: Any = get_ema_multi_avg_fn
            return AveragedModel(model, multi_avg_fn=moving_average(settings.average_decay))
        case "swa":
            return AveragedModel(model)
        case _:
            return None
