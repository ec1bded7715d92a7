# SPDX-License-Identifier: Apache-2.0
"""PyG full-batch training on the whole graph: what the trainer is compared with."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.dropout.rows import Draw
from tests.kernels.test_edge_dropout import scale_of_edges

FIRST_EPOCH = 0
"""What keys the dropout masks of the first epoch."""

OptimizerFactory = Callable[[torch.nn.Module], torch.optim.Optimizer]

_MODELS: dict[str, type[BasicGNN]] = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN, "gat": GAT}


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A PyG model and what is dropped from its input; ``options`` are its constructor's."""

    kind: str
    layers: int = 2
    hidden: int = 8
    dropout: float = 0.0
    input_dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def build(
        self, features: int, classes: int, *, dtype: torch.dtype = torch.float64, seed: int = 3
    ) -> torch.nn.Module:
        """A new model with random weights, biases included, the same for the same ``seed``."""
        torch.manual_seed(seed)
        return shaken(self._new(features, classes)).to(dtype)

    def _new(self, features: int, classes: int) -> torch.nn.Module:
        return _MODELS[self.kind](features, self.hidden, self.layers, classes, dropout=self.dropout, **self.options)


@dataclass(frozen=True, kw_only=True)
class CustomCase(ModelCase):
    """A model of the user's own: ``make(features, classes)``."""

    kind: str = "custom"
    make: Callable[[int, int], torch.nn.Module]

    def _new(self, features: int, classes: int) -> torch.nn.Module:
        return self.make(features, classes)


@torch.no_grad()
def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with random biases and scales: they start at 0 or 1, which would hide mistakes."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@dataclass(frozen=True)
class Epoch:
    """One epoch's training loss and the gradient of every parameter."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)


class SharedDropout:
    """Dropout with the trainer's own masks: the k-th that drops anything in an epoch has site k, the input's is 0.

    What is dropped while a convolution of ``watch``'s passes its edges on are coefficients of edges. A layer with
    ``drops_inside`` drops from nodes or edges, which are told apart by their numbers.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch, self.site = 0, 0
        self._edge_index: Tensor | None = None
        self._inside: list[Tensor] = []

    def watch(self, model: torch.nn.Module) -> None:
        """Know which edges the attentions of ``model`` are at work on."""

        def enter(module: MessagePassing, inputs: tuple[Any, ...]) -> None:
            self._edge_index = inputs[0]

        def leave(module: MessagePassing, inputs: tuple[Any, ...], output: Any) -> None:
            self._edge_index = None

        def enter_layer(module: MessagePassing, inputs: tuple[Any, ...]) -> None:
            x, edge_index = inputs[0], next(one for one in inputs if one.dtype == torch.long)
            loops = torch.arange(len(x)).expand(2, -1)
            others = edge_index[:, edge_index[0] != edge_index[1]]
            self._inside = [loops, edge_index, others]
            self._inside += [torch.cat((edges, loops), dim=1) for edges in (edge_index, others)]

        def leave_layer(module: MessagePassing, inputs: tuple[Any, ...], output: Any) -> None:
            self._inside = []

        for module in model.modules():
            if getattr(module, "drops_inside", False):
                module.register_forward_pre_hook(enter_layer)
                module.register_forward_hook(leave_layer)
            elif isinstance(module, (GATConv, GATv2Conv)):
                module.register_edge_update_forward_pre_hook(enter)
                module.register_edge_update_forward_hook(leave)
            elif isinstance(module, TransformerConv):
                module.register_propagate_forward_pre_hook(enter)
                module.register_propagate_forward_hook(leave)

    @contextmanager
    def shared(self, epoch: int) -> Iterator[None]:
        """All dropout in here is that of ``epoch``."""
        self.epoch, self.site = epoch, 0
        torch_dropout = F.dropout
        F.dropout = self._dropout
        try:
            yield
        finally:
            F.dropout = torch_dropout

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        self.site += 1
        if self._inside:
            ends, *same = (ends for ends in self._inside if ends.shape[1] == len(x))
            assert all(torch.equal(ends, other) for other in same), "rows of two kinds cannot be told apart"
            scale = scale_of_edges(EdgeDropout(p, self.seed, self.epoch, self.site), ends, range(x[0].numel()))
            return x * scale.to(x.dtype).view_as(x)
        if self._edge_index is None and x.dim() == 3 and len(x) == 1:  # a matrix of nodes, as ARMAConv drops it
            return self.drop(x[0], self.site, p)[None]
        if self._edge_index is None:
            return self.drop(x, self.site, p)
        dropout = EdgeDropout(p, self.seed, self.epoch, self.site)
        return x * scale_of_edges(dropout, self._edge_index, range(x.shape[1])).to(x.dtype)

    def drop(self, x: Tensor, site: int, p: float) -> Tensor:
        """x [N, …] with dropped entries zero and the others scaled by 1 / (1 - p)."""
        if p == 0.0:
            return x
        keep = Draw(self.seed, self.epoch, site, 0, p).mask(x.size(0), x[0].numel()).view_as(x)
        return x * keep / (1 - p)


class Reference:
    """Trains a deep copy of ``model`` on ``data`` as a whole, dropout masks shared with the trainer."""

    def __init__(
        self, case: ModelCase, model: torch.nn.Module, data: Data, make_optimizer: OptimizerFactory, seed: int = 0
    ) -> None:
        self.model = copy.deepcopy(model)
        self.data, self.input_dropout = data, case.input_dropout
        self.dropout = SharedDropout(seed)
        self.dropout.watch(self.model)
        self.optimizer = make_optimizer(self.model)
        self.epoch = FIRST_EPOCH

    def train(self, before_step: Callable[[], object] = lambda: None) -> Epoch:
        """One optimizer step on the whole graph; ``before_step``: once there are gradients."""
        self.model.train()
        self.optimizer.zero_grad()
        with self.dropout.shared(self.epoch):
            x = self.dropout.drop(self.data.x, 0, self.input_dropout)
            out = self.model(x, self.data.edge_index, **carried_by_edges(self.data))
        loss = F.cross_entropy(out[self.data.train_mask], self.data.y[self.data.train_mask])
        loss.backward()
        before_step()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        self.epoch += 1
        return Epoch(loss.item(), gradients, buffers_of(self.model))

    @torch.no_grad()
    def accuracies(self) -> dict[str, float | None]:
        """Eval-mode accuracy of each split, None where a split is empty."""
        return accuracies(self.model, self.data)


@torch.no_grad()
def accuracies(model: torch.nn.Module, data: Data) -> dict[str, float | None]:
    """Eval-mode accuracy of ``model`` on each split of ``data``, by PyG alone; None for an empty split."""
    model.eval()
    predicted = model(data.x, data.edge_index, **carried_by_edges(data)).argmax(dim=1)
    model.train()
    masks = {"train_score": data.train_mask, "valid_score": data.val_mask, "test_score": data.test_mask}
    return {
        name: (predicted[mask] == data.y[mask]).double().mean().item() if bool(mask.any()) else None
        for name, mask in masks.items()
    }


def carried_by_edges(data: Data) -> dict[str, Tensor]:
    """What the edges of ``data`` carry, by the names of PyG's arguments."""
    return {name: data[name] for name in ("edge_weight", "edge_attr") if name in data}


def buffers_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Running statistics and the like, as they are."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam as most people call it."""
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def smooth_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam with a large eps, for float32.

    With eps = 1e-8 an entry whose gradient is nothing but rounding moves by about the learning rate in
    a random direction, in PyG as well as here, and the runs part for a reason that is no error.
    """
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW with a decay large enough to matter."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def disagreement(ours: Epoch, reference: Epoch, *, floor: float) -> tuple[float, str]:
    """The largest relative difference between two epochs, and whose it is.

    Gradients are compared relative to the largest entry of the reference's gradient of that parameter,
    but at least ``floor`` times the largest entry of all: a gradient that is zero but for cancelling
    rounding errors has no digits to compare.
    """
    assert ours.gradients.keys() == reference.gradients.keys()
    worst = (abs(ours.loss - reference.loss) / max(abs(reference.loss), 1e-30), "loss")
    largest = max(float(g.abs().max()) for g in reference.gradients.values())
    for name, expected in reference.gradients.items():
        actual = ours.gradients[name]
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
        scale = max(float(expected.abs().max()), floor * largest, 1e-30)
        difference = float((actual - expected).abs().max()) / scale
        if not difference <= worst[0]:  # a NaN is the worst of all
            worst = (difference, name)
    for name, expected in reference.buffers.items():
        actual = ours.buffers[name]
        assert actual.dtype == expected.dtype, name
        difference = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
        if not difference <= worst[0]:
            worst = (difference, name)
    return worst
