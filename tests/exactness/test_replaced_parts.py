# SPDX-License-Identifier: Apache-2.0
"""Convolutions with something else in the place of their own parts compute what PyG computes with it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINEConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
)
from torch_geometric.nn.aggr import SoftmaxAggregation
from torch_geometric.nn.dense.linear import Linear as GraphLinear

import ooc
from ooc.errors import ModelError
from tests.exactness.comparison import assert_agrees, make_trainer
from tests.exactness.conftest import Converted
from tests.exactness.layers import behind, twice
from tests.exactness.reference import CustomCase
from tests.graphs import GraphCase, random_data

ROUGH = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8)
F_IN, C = ROUGH.features, ROUGH.classes
K = 3
Put = Callable[[int, int], nn.Module]


class LowRank(nn.Linear):
    """A linear map with one of low rank added, as fine-tuning has it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


class GraphLowRank(GraphLinear):
    """The same of PyG's linear map."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


class Head(nn.Module):
    """A convolution and a map of low rank outside of any."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv, self.head = GCNConv(features, 8), GraphLowRank(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.conv(x, edge_index).relu())


def biased(inputs: int, outputs: int) -> nn.Module:
    """A map with a bias, also where PyG has none."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.bias)
    return layer


def normalised(inputs: int, outputs: int) -> nn.Module:
    """A map whose weight is computed from its length and direction."""
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(inputs, outputs, bias=False))


def spectral(inputs: int, outputs: int) -> nn.Module:
    """A map whose weight is divided by its largest singular value, of which vectors are kept that change."""
    return torch.nn.utils.parametrizations.spectral_norm(nn.Linear(inputs, outputs, bias=False))


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """More than a linear map, and a norm over nodes in it; a bias before that would have no gradient but rounding."""
    return nn.Sequential(
        nn.Linear(inputs, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, outputs)
    )


def replaced(make: Callable[[int, int], nn.Module], name: str, put: Put) -> Callable[[int, int], nn.Module]:
    """What ``make`` makes, with what ``put`` makes of the same sizes in the place of its linear map ``name``."""

    def made(inputs: int, outputs: int) -> nn.Module:
        conv = make(inputs, outputs)
        outputs, inputs = conv.get_submodule(name).weight.shape
        conv.set_submodule(name, put(inputs, outputs))
        return conv

    return made


class DoubledMessages(GATConv):
    """A subclass has a formula of its own."""

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return 2 * super().message(x_j, alpha)


class DoubledUpdate(SAGEConv):
    """Another function of the base class."""

    def update(self, inputs: Tensor) -> Tensor:
        return 2 * inputs


class DoubledForward(GraphConv):
    """What a model calls."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return 2 * super().forward(x, edge_index)


def doubled(conv: MessagePassing, x_j: Tensor) -> Tensor:
    """Another message."""
    return 2 * x_j


def bound(inputs: int, outputs: int) -> nn.Module:
    """A convolution with a method set on the instance."""
    conv = SAGEConv(inputs, outputs)
    conv.message = MethodType(doubled, conv)
    return conv


def scaled_messages(inputs: int, outputs: int) -> nn.Module:
    """Messages of a convolution that needs degrees of sources."""
    conv = GCNConv(inputs, outputs)
    conv.message = MethodType(lambda self, x_j, edge_weight: 2 * edge_weight[:, None] * x_j, conv)
    return conv


def aggregating_otherwise(inputs: int, outputs: int) -> nn.Module:
    """A convolution whose ``aggr`` tells nothing any more."""
    conv = SAGEConv(inputs, outputs)
    conv.aggr_module = SoftmaxAggregation(learn=True)
    return conv


SAGE_MAX = {"aggr": "max", "project": True}
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCNConv.lin, low rank": replaced(GCNConv, "lin", LowRank),
    "GCNConv.lin, PyG's, low rank": replaced(GCNConv, "lin", GraphLowRank),
    "GCNConv.lin, a bias": replaced(GCNConv, "lin", biased),
    "GCNConv.lin, a perceptron": replaced(GCNConv, "lin", perceptron),
    "SAGEConv.lin_l, low rank": replaced(SAGEConv, "lin_l", LowRank),
    "SAGEConv.lin_r, a bias": replaced(SAGEConv, "lin_r", biased),
    "SAGEConv.lin, low rank": replaced(lambda i, o: SAGEConv(i, o, **SAGE_MAX), "lin", LowRank),
    "SAGEConv.lin_l, maximum": replaced(lambda i, o: SAGEConv(i, o, **SAGE_MAX), "lin_l", LowRank),
    "GraphConv.lin_rel, low rank": replaced(GraphConv, "lin_rel", LowRank),
    "GraphConv.lin_rel, mean": replaced(lambda i, o: GraphConv(i, o, aggr="mean"), "lin_rel", LowRank),
    "GraphConv.lin_root, a bias": replaced(GraphConv, "lin_root", biased),
    "SGConv.lin, low rank": replaced(lambda i, o: SGConv(i, o, K=2), "lin", LowRank),
    "TAGConv.lins, low rank": replaced(lambda i, o: TAGConv(i, o, K=2), "lins.1", LowRank),
    "TAGConv.lins, a bias": replaced(lambda i, o: TAGConv(i, o, K=2), "lins.0", biased),
}
OTHERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GATConv.lin, low rank": replaced(GATConv, "lin", LowRank),
    "GATConv.lin, a bias": replaced(GATConv, "lin", biased),
    "GATConv.lin, normalised": replaced(GATConv, "lin", normalised),
    "GCNConv.lin, normalised": replaced(GCNConv, "lin", normalised),
    "GATConv.res, a bias": replaced(lambda i, o: GATConv(i, o, residual=True), "res", biased),
    "GATv2Conv.lin_l, low rank": replaced(GATv2Conv, "lin_l", LowRank),
    "GATv2Conv.res, a bias": replaced(lambda i, o: GATv2Conv(i, o, residual=True), "res", biased),
    "TransformerConv.lin_query, low rank": replaced(TransformerConv, "lin_query", LowRank),
    "TransformerConv.lin_skip, low rank": replaced(TransformerConv, "lin_skip", LowRank),
    "TransformerConv.lin_beta, low rank": replaced(lambda i, o: TransformerConv(i, o, beta=True), "lin_beta", LowRank),
    "a subclass's message": DoubledMessages,
    "a subclass's update": DoubledUpdate,
    "a subclass's forward": DoubledForward,
    "a bound message": bound,
    "a bound message, by degrees": scaled_messages,
    "another aggregation": aggregating_otherwise,
    "TransformerConv.lin_key, no bias": replaced(TransformerConv, "lin_key", partial(nn.Linear, bias=False)),
}
"""Of which none sums features once for all epochs: behind a linear map."""
CASES = {name: CustomCase(make=twice(make)) for name, make in LAYERS.items()} | {"outside": CustomCase(make=Head)}
CASES |= {name: CustomCase(make=behind(make)) for name, make in OTHERS.items()}


@pytest.mark.thorough(
    "GATConv.res, a bias",
    "GATConv.lin, normalised",
    "GATConv.lin, low rank",
    "TransformerConv.lin_query, low rank",
    "GraphConv.lin_rel, low rank",
    "SAGEConv.lin_r, a bias",
    "TAGConv.lins, a bias",
    "SAGEConv.lin, low rank",
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_replaced_parts(case: CustomCase, converted: Converted, tmp_path: Path) -> None:
    """Losses, gradients of all parameters and scores are PyG's."""
    data, store = converted(ROUGH)
    assert_agrees(case, data, tmp_path, store=store)


EDGE_LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GATConv.lin_edge": replaced(lambda i, o: GATConv(i, o, edge_dim=K), "lin_edge", biased),
    "GATv2Conv.lin_edge": replaced(lambda i, o: GATv2Conv(i, o, edge_dim=K), "lin_edge", biased),
    "TransformerConv.lin_edge": replaced(lambda i, o: TransformerConv(i, o, edge_dim=K), "lin_edge", LowRank),
    "GINEConv.lin": replaced(lambda i, o: GINEConv(nn.Linear(i, o), edge_dim=K), "lin", LowRank),
}


@pytest.mark.parametrize("make", EDGE_LAYERS.values(), ids=EDGE_LAYERS.keys())
def test_maps_of_what_edges_carry(make: Callable[[int, int], nn.Module], tmp_path: Path) -> None:
    """The same of what a convolution does with features of edges."""
    data = random_data(GraphCase(duplicates=15, edge_features=K))
    assert_agrees(CustomCase(make=behind(make)), data, tmp_path)


def test_settings_of_pyg_change_no_formula(converted: Converted, tmp_path: Path) -> None:
    """``decomposed_layers`` sets a function of PyG's own on the instance."""
    data, store = converted(ROUGH)
    case = CustomCase(make=twice(lambda i, o: GCNConv(i, o, decomposed_layers=2)))
    assert_agrees(case, data, tmp_path, store=store)
    with make_trainer(case, store, tmp_path) as trainer:
        assert not any("general path" in item.title for item in trainer.plan.programs["train"])


def linear_set() -> nn.Module:
    """A forward of its own on a linear map."""
    model = Head(F_IN, C)
    model.head = nn.Linear(8, C)
    model.head.forward = lambda x: 2 * x
    return model


def norm_set() -> nn.Module:
    """The same on a norm."""
    norm = nn.BatchNorm1d(C)
    norm.forward = lambda x: 2 * x
    return Between(norm)


class Between(nn.Module):
    """A convolution and something after it."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.conv, self.after = GCNConv(F_IN, C), after

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.after(self.conv(x, edge_index))


def inside_set() -> nn.Module:
    """The same on a linear map in a convolution."""
    conv = GCNConv(F_IN, C)
    conv.lin.forward = lambda x: 2 * x
    return conv


def function_set(name: str) -> nn.Module:
    """A convolution of which a function is replaced by one that is not bound to it."""
    conv = SAGEConv(F_IN, C)
    old = getattr(conv, name)
    setattr(conv, name, lambda *args, **kwargs: old(*args, **kwargs))
    return conv


def activation_set() -> nn.Module:
    """The same on an activation."""
    act = nn.ReLU()
    act.forward = lambda x: 2 * x
    return Between(act)


class OtherNorm(nn.BatchNorm1d):
    """A norm with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def norm_in_a_norm() -> nn.Module:
    """Such a norm in PyG's."""
    from torch_geometric.nn import BatchNorm

    norm = BatchNorm(C)
    norm.module = OtherNorm(C)
    return Between(norm)


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a linear map's forward": (linear_set, ("Linear (head)", "forward", "set on the instance")),
    "a norm's forward": (norm_set, ("BatchNorm1d (after)", "forward", "set on the instance")),
    "an activation's forward": (activation_set, ("ReLU (after)", "forward", "set on the instance")),
    "a forward inside": (inside_set, ("GCNConv", "Linear", "forward", "set on the instance")),
    "a norm in a norm": (norm_in_a_norm, ("BatchNorm (after)", "OtherNorm")),
    "a weight of weights": (lambda: replaced(GCNConv, "lin", spectral)(F_IN, C), ("GCNConv", "ParametrizedLinear")),
    **{
        name: (lambda name=name: function_set(name), ("SAGEConv", f"{name} of SAGEConv, set on the instance"))
        for name in ("forward", "propagate", "message", "aggregate", "update", "message_and_aggregate", "edge_update")
    },
}


@pytest.mark.parametrize(("build", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_by_name(
    build: Callable[[], nn.Module], said: tuple[str, ...], converted: Converted, tmp_path: Path
) -> None:
    """One line that says which module it is and what was replaced."""
    _, store = converted(ROUGH)
    with pytest.raises(ModelError) as caught:
        ooc.Trainer(build().double(), store, gpu_budget="64M", host_budget="64M", spill_dir=tmp_path)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert "\n" not in str(caught.value)
