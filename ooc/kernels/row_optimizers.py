# SPDX-License-Identifier: Apache-2.0
"""Steps of torch's optimizers for some rows of a trained matrix: the step of a row does not depend on other rows.

They give the same bits as torch.optim for the whole matrix, in the order of its own operators (``foreach=False``).
SparseAdam is given the rows that were looked up, which are all rows when the whole graph is trained. R rows, D columns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.errors import OptionError

_KINDS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sparseadam": torch.optim.SparseAdam,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
NAMES = tuple(_KINDS)
_OPTIONS = {
    "adam": {"betas", "eps", "weight_decay"},
    "adamw": {"betas", "eps", "weight_decay"},
    "sparseadam": {"betas", "eps"},
    "adagrad": {"lr_decay", "weight_decay", "initial_accumulator_value", "eps"},
    "sgd": {"momentum", "dampening", "weight_decay", "nesterov"},
}


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """torch's optimizer ``name``, one of ``NAMES``, with its ``options`` except the learning rate."""

    name: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> "RowOptimizer":
        """Return the optimizer with torch's defaults for missing ``options``. Raises OptionError for options it does
        not have."""
        if name not in _KINDS:
            raise OptionError(f"an embedding's optimizer {name!r} is not one of {', '.join(NAMES)}")
        for option in options:
            if option not in _OPTIONS[name]:
                known = ", ".join(sorted(_OPTIONS[name]))
                raise OptionError(f"an embedding's {name} has no option {option!r}; it has {known}")
        try:
            tried: Any = _KINDS[name]([torch.zeros(1, requires_grad=True)], lr=0.01, **options)
        except (TypeError, ValueError) as error:
            raise OptionError(f"an embedding's optimizer: {_KINDS[name].__name__} says: {error}") from error
        return cls(name, {option: tried.defaults[option] for option in sorted(_OPTIONS[name])})

    @property
    def states(self) -> dict[str, float]:
        """The states it keeps for every number, by torch's names, with their initial values."""
        match self.name:
            case "adam" | "adamw" | "sparseadam":
                return {"exp_avg": 0.0, "exp_avg_sq": 0.0}
            case "adagrad":
                return {"sum": float(self.options["initial_accumulator_value"])}
            case _:
                return {"momentum_buffer": 0.0} if self.options["momentum"] else {}

    def step(
        self, rows_RD: Tensor, gradient_RD: Tensor, states: Sequence[Tensor], *, lr: float, number: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the rows and their states after step ``number``, counted from 1, as new tensors."""
        options, rows, kept = self.options, rows_RD.clone(), [state.clone() for state in states]
        decay = options.get("weight_decay", 0)
        if self.name == "adamw":
            rows.mul_(1 - lr * decay)
        elif decay:
            gradient_RD = gradient_RD.add(rows, alpha=decay)
        match self.name:
            case "adam" | "adamw":
                (mean, square), (beta1, beta2) = kept, options["betas"]
                mean.lerp_(gradient_RD, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient_RD, gradient_RD, value=1 - beta2)
                size = lr / (1 - beta1**number)
                root = (square.sqrt() / math.sqrt(1 - beta2**number)).add_(options["eps"])
                rows.addcdiv_(mean, root, value=-size)
            case "sparseadam":
                (mean, square), (beta1, beta2) = kept, options["betas"]
                mean.add_(gradient_RD.sub(mean).mul_(1 - beta1))
                square.add_(gradient_RD.pow(2).sub_(square).mul_(1 - beta2))
                size = lr * math.sqrt(1 - beta2**number) / (1 - beta1**number)
                rows.add_(-size * mean.div(square.sqrt().add_(options["eps"])))
            case "adagrad":
                kept[0].addcmul_(gradient_RD, gradient_RD, value=1)
                size = lr / (1 + (number - 1) * options["lr_decay"])
                rows.addcdiv_(gradient_RD, kept[0].sqrt().add_(options["eps"]), value=-size)
            case _:
                momentum = options["momentum"]
                if momentum:
                    if number == 1:
                        kept[0].copy_(gradient_RD)
                    else:
                        kept[0].mul_(momentum).add_(gradient_RD, alpha=1 - options["dampening"])
                    nesterov = options["nesterov"]
                    gradient_RD = gradient_RD.add(kept[0], alpha=momentum) if nesterov else kept[0]
                rows.add_(gradient_RD, alpha=-lr)
        return rows, kept
