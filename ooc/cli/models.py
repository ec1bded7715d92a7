# SPDX-License-Identifier: Apache-2.0
"""The PyG model that the options of ``ooc train`` describe."""

from typing import TYPE_CHECKING, Any

import torch
from torch_geometric.nn.models import GCN, GIN, GraphSAGE

from ooc.cli.settings import TrainSettings
from ooc.errors import BudgetError, RunError
from ooc.memory import available_memory_bytes
from ooc.sizes import format_size

if TYPE_CHECKING:
    from ooc.storage.store import Store
    from ooc.train.run import RunFolder

_MODELS = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN}
_NORMS: dict[str, dict[str, Any]] = {
    "none": {},
    # PyG's default mode takes its statistics over the whole graph.
    "layer": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    "batch": {"norm": "batch_norm"},
    "graph": {"norm": "graph_norm"},
}


def build_model(settings: TrainSettings, store: "Store") -> torch.nn.Module:
    """A freshly initialised PyG model for the store's features and classes, the same for the same seed."""
    torch.manual_seed(settings.seed)
    return _model(settings, store.num_features, store.num_classes)


def rebuild_model(settings: TrainSettings, weights: dict[str, torch.Tensor], run: "RunFolder") -> torch.nn.Module:
    """The model of a run with these weights. RunError where they are of another model."""
    facts = run.config.get("store_facts", {})
    if not isinstance(facts, dict) or not {"num_features", "num_classes"} <= facts.keys():
        raise RunError(f"{run.path} does not say how many features and classes its store had")
    model = _model(settings, int(facts["num_features"]), int(facts["num_classes"]))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"the weights in {run.path} are not of the model that its configuration describes") from error
    return model.eval()


def admit_parameters(settings: TrainSettings, store: "Store") -> None:
    """Raise BudgetError when memory cannot hold the weights, without which no budget can be planned for."""
    with torch.device("meta"):
        model = _model(settings, store.num_features, store.num_classes)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
    free = available_memory_bytes()
    if nbytes > free:
        raise BudgetError(
            f"the weights of {settings.layers} layers, {settings.hidden} wide, need {format_size(nbytes)}, "
            f"{format_size(free)} are free; give a smaller --hidden or fewer --layers"
        )


def _model(settings: TrainSettings, features: int, outputs: int) -> torch.nn.Module:
    model = _MODELS[settings.model](
        in_channels=features,
        hidden_channels=settings.hidden,
        num_layers=settings.layers,
        out_channels=outputs,
        dropout=settings.dropout,
        jk=None if settings.jk == "none" else settings.jk,
        **_NORMS[settings.norm],
    )
    assert isinstance(model, torch.nn.Module)
    return model
