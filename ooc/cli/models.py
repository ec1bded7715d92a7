# SPDX-License-Identifier: Apache-2.0
"""The PyG model and the optimizer that the options of ``ooc train`` describe."""

from typing import TYPE_CHECKING, Any

import torch
from torch_geometric.nn.models import GCN, GraphSAGE

from ooc.cli.memory import available_memory_bytes
from ooc.cli.settings import TrainSettings
from ooc.errors import BudgetError
from ooc.sizes import format_size

if TYPE_CHECKING:
    from ooc.storage.store import Store

_MODELS = {"gcn": GCN, "sage": GraphSAGE}
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_NORMS: dict[str, dict[str, Any]] = {
    "none": {},
    # PyG's default mode takes its statistics over the whole graph.
    "layer": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    "batch": {"norm": "batch_norm"},
}


def build_model(settings: TrainSettings, store: "Store") -> torch.nn.Module:
    """A freshly initialised PyG model for the store's features and classes, the same for the same seed."""
    torch.manual_seed(settings.seed)
    return _model(settings, store)


def admit_parameters(settings: TrainSettings, store: "Store") -> None:
    """Raise BudgetError when memory cannot hold the weights, without which no budget can be planned for."""
    with torch.device("meta"):
        nbytes = sum(parameter.nbytes for parameter in _model(settings, store).parameters())
    free = available_memory_bytes()
    if nbytes > free:
        raise BudgetError(
            f"the weights of {settings.layers} layers, {settings.hidden} wide, need {format_size(nbytes)}, "
            f"{format_size(free)} are free; give a smaller --hidden or fewer --layers"
        )


def _model(settings: TrainSettings, store: "Store") -> torch.nn.Module:
    model = _MODELS[settings.model](
        in_channels=store.num_features,
        hidden_channels=settings.hidden,
        num_layers=settings.layers,
        out_channels=store.num_classes,
        dropout=settings.dropout,
        **_NORMS[settings.norm],
    )
    assert isinstance(model, torch.nn.Module)
    return model


def build_optimizer(settings: TrainSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam or AdamW over all parameters."""
    kind: Any = _OPTIMIZERS[settings.optimizer]
    optimizer = kind(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer
