# SPDX-License-Identifier: Apache-2.0
"""Layers that take the rows of all nodes and those of targets apart are tried as they are going to be run, and with
gradients where there will be some."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, ResGatedGraphConv

from ooc.errors import ModelError
from ooc.model.layers.conformance import ProbeResult, _Probe, probe_layer
from ooc.model.layers.layer import Graph, layer_of, sharing
from ooc.model.lowering.values import Features

WIDTH = 6


class Apart(MessagePassing):
    """Takes twice as much of a node's own row where it is given rows in pairs, which shows when its weight is not 0."""

    def __init__(self, own: float, targets_only: bool = False) -> None:
        super().__init__(aggr="max")
        self.own = nn.Parameter(torch.full((WIDTH,), own))
        self.targets_only = targets_only

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        rows, factor = (x[1], 2) if isinstance(x, tuple) else (x, 1)
        out = self.propagate(edge_index, x=x)
        if self.targets_only and factor == 1:
            out = out + rows.mean()
        return out + factor * self.own * rows

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()


class GradientOfAll(MessagePassing):
    """Adds nothing, the gradient of which goes to all rows."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        mean = x.mean(0)
        return self.propagate(edge_index, x=x) + (mean - mean.detach())


def tried(
    conv: MessagePassing, monkeypatch: pytest.MonkeyPatch, *, record: bool = True
) -> tuple[ProbeResult, list[int]]:
    """What was found, and how many rows at a time the tiles had that it was not given in pairs to begin with."""
    tiles, check = list[int](), _Probe.check_tiles

    def check_tiles(probe: _Probe, *height: int) -> set[int]:
        tiles.extend(height or (0,))
        return check(probe, *height)

    monkeypatch.setattr(_Probe, "check_tiles", check_tiles)
    layer, _ = layer_of(conv, "Layer", [Features(0, WIDTH), Graph()], {})
    options: dict[str, Any] = {"edge_features": 0, "dtype": torch.float32, "record": record}
    return probe_layer(layer, sharing(conv, "Layer"), **options), tiles


def test_what_takes_pairs_is_tried_in_pairs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after its parameters change; on the larger graph it is what it was found to be."""
    conv = ResGatedGraphConv(WIDTH, WIDTH)
    found, tiles = tried(conv, monkeypatch)
    assert found.pairs and len(tiles) == 1 and len(found.parameters) == len([*conv.parameters()])


@pytest.mark.parametrize("own", [1.0, 0.0])
def test_what_gives_something_else_in_pairs_runs_without(own: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it that only other parameters show it: then all is tried again without."""
    found, tiles = tried(Apart(own), monkeypatch)
    assert not found.pairs and len(tiles) == 3 and len(found.parameters) == 1


def test_what_is_wrong_without_pairs_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="depends on more than the node"):
        tried(Apart(0.0, targets_only=True), monkeypatch)


def test_gradients_are_compared_where_there_will_be_some(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="depends on more than the node"):
        tried(GradientOfAll(), monkeypatch)
    monkeypatch.undo()
    _, tiles = tried(GradientOfAll(), monkeypatch, record=False)
    assert len(tiles) == 3
