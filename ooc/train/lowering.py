# SPDX-License-Identifier: Apache-2.0
"""Taking a PyG model apart into layers that can be run by row passes and column passes.

    h_0 = dropout(x)          m_k = s · W h_{k-1}          p_k = A m_k
    z_k = t · p_k + W_r h_{k-1} + b                         h_k = dropout(act(norm(z_k)))

Parameters are shared with the user's model, not copied. What cannot be run exactly is refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.nn.models import GCN, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.nn.norm import LayerNorm as GraphLayerNorm

from ooc.errors import ModelError
from ooc.plan.cost import aggregating_first_pays
from ooc.train.dropout import keep_scale
from ooc.train.graph import ActiveRows, Scaling

ROWWISE_ACTIVATIONS = (
    nn.ReLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.SELU,
    nn.CELU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Mish,
    nn.PReLU,
)


class Order(Enum):
    """Which comes first in a layer, the dense product or the sum over neighbours: A(HW) = (AH)W."""

    TRANSFORM_FIRST = "transform first"
    AGGREGATE_FIRST = "aggregate first"
    AGGREGATED_ONCE = "aggregated once"
    """Aggregate first on constant features: A(X) is the same in every epoch."""


@dataclass(slots=True)
class Activation:
    """The row-wise modules after convolution ``layer``: norm, activation, dropout, each optional."""

    layer: int
    modules: tuple[nn.Module, ...]
    dropout: float

    def __call__(self, z: Tensor, *, start: int, seed: int, epoch: int | None) -> Tensor:
        """Rows ``start``… of h from those of z. ``epoch`` keys the dropout; ``None`` means evaluation."""
        h = z
        for module in self.modules:
            h = module(h)
        if self.dropout and epoch is not None:
            h = h * keep_scale(seed, epoch, self.layer, start, h, self.dropout)
        return h

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules for p in module.parameters() if p.requires_grad]


@dataclass(slots=True)
class Layer:
    """Convolution ``index`` (1-based): ``weight`` [out, in] on messages, ``root`` [out, in] on the row itself."""

    index: int
    order: Order
    weight: nn.Parameter
    root: nn.Parameter | None
    bias: nn.Parameter | None
    activation: Activation

    @property
    def in_columns(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_columns(self) -> int:
        return int(self.weight.shape[0])

    @property
    def message_columns(self) -> int:
        """Width of what is pulled."""
        return self.out_columns if self.order is Order.TRANSFORM_FIRST else self.in_columns


@dataclass(slots=True)
class Network:
    """A model as layers. ``input`` is the dropout on the features, layer 0."""

    layers: list[Layer]
    input: Activation
    scaling: Scaling
    dtype: torch.dtype
    parameters: list[nn.Parameter]

    @property
    def aggregates_once(self) -> bool:
        """Whether the first layer works on A(X), the same in every epoch."""
        return self.layers[0].order is Order.AGGREGATED_ONCE

    @property
    def depth(self) -> int:
        return len(self.layers)

    def layer(self, index: int) -> Layer:
        return self.layers[index - 1]

    def activation(self, index: int) -> Activation:
        """The row-wise modules that make h_index; index 0 is the input's."""
        return self.input if index == 0 else self.layers[index - 1].activation


def lower(
    model: nn.Module,
    *,
    num_features: int,
    num_classes: int,
    input_dropout: float,
    aggregate_once: bool,
    active: Callable[[int], ActiveRows],
    edges_per_row: float,
) -> Network:
    """The layers of ``model``, a PyG ``GCN`` or ``GraphSAGE``; ModelError names what cannot be run exactly.

    ``aggregate_once``: whether A(X) may be computed once where the first layer aggregates constant features.
    ``active`` gives the rows to be computed for a network of so many layers; with ``edges_per_row`` they decide
    the order of product and sum in each layer.
    """
    if type(model) not in (GCN, GraphSAGE):
        raise ModelError(
            f"model {type(model).__name__} is not supported; use torch_geometric.nn.models.GCN or GraphSAGE"
        )
    assert isinstance(model, BasicGNN)
    if model.jk_mode is not None:
        raise ModelError(f"{type(model).__name__}: jk={model.jk_mode!r} is not supported")
    parameters = list(model.parameters())
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
        raise ModelError(
            f"{type(model).__name__}: lazily sized parameters are not supported; give in_channels={num_features}"
        )
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ModelError(
            f"{type(model).__name__}: parameters must all be float32 or all float64, not {sorted(map(str, dtypes))}"
        )
    if any(not p.requires_grad for p in parameters):
        raise ModelError(f"{type(model).__name__}: frozen parameters (requires_grad=False) are not supported")
    devices = {str(p.device) for p in parameters}
    if devices != {"cpu"}:
        raise ModelError(f"{type(model).__name__}: parameters must be on the CPU, not on {', '.join(sorted(devices))}")
    if not 0 <= input_dropout < 1:
        raise ModelError(f"input_dropout must be at least 0 and below 1, not {input_dropout}")
    scalings = [_scaling(conv, index + 1) for index, conv in enumerate(model.convs)]
    if len(set(scalings)) != 1:
        raise ModelError("convolutions of one model must all aggregate in the same way")
    rows = active(len(model.convs)).training[::-1]
    layers = [
        _layer(
            model,
            i,
            once=i == 0 and aggregate_once and input_dropout == 0,
            rows_before=rows[i],
            rows_after=rows[i + 1],
            edges_per_row=edges_per_row,
        )
        for i in range(len(model.convs))
    ]
    if layers[0].in_columns != num_features:
        raise ModelError(f"the model takes {layers[0].in_columns} features, the store has {num_features}")
    if layers[-1].out_columns < num_classes:
        raise ModelError(f"the model has {layers[-1].out_columns} outputs, the store has {num_classes} classes")
    return Network(
        layers=layers,
        input=Activation(layer=0, modules=(), dropout=input_dropout),
        scaling=scalings[0],
        dtype=parameters[0].dtype,
        parameters=parameters,
    )


def _layer(model: BasicGNN, i: int, *, once: bool, rows_before: int, rows_after: int, edges_per_row: float) -> Layer:
    conv = model.convs[i]
    last = i == len(model.convs) - 1
    if isinstance(conv, GCNConv):
        weight, root, bias = conv.lin.weight, None, conv.bias
    else:
        weight, bias = conv.lin_l.weight, conv.lin_l.bias
        root = conv.lin_r.weight if conv.root_weight else None
    if once:
        order = Order.AGGREGATED_ONCE
    elif aggregating_first_pays(
        rows_before=rows_before,
        rows_after=rows_after,
        edges_per_row=edges_per_row,
        in_columns=int(weight.shape[1]),
        out_columns=int(weight.shape[0]),
    ):
        order = Order.AGGREGATE_FIRST
    else:
        order = Order.TRANSFORM_FIRST
    activation = Activation(i + 1, (), 0.0) if last else _activation(model, i)
    return Layer(i + 1, order, weight, root, bias, activation)


def _scaling(conv: nn.Module, index: int) -> Scaling:
    name = f"{type(conv).__name__} of layer {index}"
    if isinstance(conv, GCNConv):
        if conv.improved:
            raise ModelError(f"{name}: improved=True is not supported")
        if str(conv.aggr) not in ("add", "sum"):
            raise ModelError(f"{name}: aggr={conv.aggr!r} is not supported; GCN sums")
        if conv.flow != "source_to_target":
            raise ModelError(f"{name}: flow={conv.flow!r} is not supported")
        if not conv.normalize:
            return Scaling.SUM
        return Scaling.GCN if conv.add_self_loops else Scaling.GCN_NO_LOOPS
    assert isinstance(conv, SAGEConv)
    for option in ("normalize", "project"):
        if getattr(conv, option):
            raise ModelError(f"{name}: {option}=True is not supported")
    if conv.flow != "source_to_target":
        raise ModelError(f"{name}: flow={conv.flow!r} is not supported")
    match conv.aggr:
        case "mean":
            return Scaling.MEAN
        case "sum" | "add":
            return Scaling.SUM
        case other:
            raise ModelError(f"{name}: aggr={other!r} is not supported; use 'mean' or 'sum'")


def _activation(model: BasicGNN, i: int) -> Activation:
    norm = _norm(model.norms[i], i + 1)
    act: list[nn.Module] = [] if model.act is None else [_act(model.act)]
    modules = [*act, *norm] if model.act_first else [*norm, *act]
    p = float(model.dropout.p)
    if p >= 1:
        raise ModelError(f"{type(model).__name__}: dropout={p} leaves nothing to train on")
    return Activation(i + 1, tuple(modules), p)


def _act(act: object) -> nn.Module:
    if isinstance(act, ROWWISE_ACTIVATIONS):
        return act
    raise ModelError(f"activation {type(act).__name__} is not known to work row by row")


def _norm(norm: nn.Module, layer: int) -> list[nn.Module]:
    if isinstance(norm, nn.Identity):
        return []
    if type(norm) is nn.LayerNorm:
        return [norm]
    if isinstance(norm, GraphLayerNorm):
        if norm.mode == "node":
            return [norm]
        raise ModelError(
            f"norm LayerNorm(mode={norm.mode!r}) after layer {layer} takes statistics over all nodes, which is "
            "not supported; use norm_kwargs={'mode': 'node'} for the row-wise one"
        )
    raise ModelError(f"norm {type(norm).__name__} after layer {layer} is not supported; use LayerNorm(mode='node')")
