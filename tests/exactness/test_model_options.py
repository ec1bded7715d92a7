# SPDX-License-Identifier: Apache-2.0
"""GIN, GraphSAGE and GCN of PyG with all their options: norms over all nodes, jumping knowledge, order of layers."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import DiffGroupNorm, GraphSizeNorm, MeanSubtractionNorm, PairNorm

from tests.exactness.comparison import DIRECTIONS, assert_agrees, in_turn
from tests.exactness.reference import ModelCase, smooth_adam
from tests.examples import cases
from tests.graphs import GraphCase, random_data

ROUGH = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8)
EPOCHS = 2

NORMS: dict[str, dict[str, Any]] = {
    "batch": {"norm": "batch_norm"},
    "batch without affine": {"norm": "batch_norm", "norm_kwargs": {"affine": False}},
    "batch, cumulative": {"norm": "batch_norm", "norm_kwargs": {"momentum": None}},
    "batch, not tracked": {"norm": "batch_norm", "norm_kwargs": {"track_running_stats": False}},
    "batch, single": {"norm": "batch_norm", "norm_kwargs": {"allow_single_element": True}},
    "torch's batch": {"norm": torch.nn.BatchNorm1d(8)},
    "layer": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    "layer of the graph": {"norm": "layer_norm"},
    "layer of the graph without affine": {"norm": "layer_norm", "norm_kwargs": {"affine": False}},
    "graph": {"norm": "graph_norm"},
    "instance": {"norm": "instance_norm"},
    "instance, tracked": {"norm": "instance_norm", "norm_kwargs": {"affine": True, "track_running_stats": True}},
    "pair": {"norm": "pair_norm"},
    "pair, individually": {"norm": PairNorm(scale=2.0, scale_individually=True)},
    "mean subtraction": {"norm": MeanSubtractionNorm()},
    "graph size": {"norm": GraphSizeNorm()},
    "diff group": {"norm": DiffGroupNorm(8, groups=3)},
}


@pytest.mark.thorough(
    "batch without affine-gin",
    "layer-gin",
    "pair, individually-gin",
    "layer of the graph without affine-gcn, act first",
    "batch-gcn, act first",
)
@pytest.mark.parametrize(
    ("norm", "way"),
    in_turn(NORMS, {"gcn, act first": ("gcn", True), "gin": ("gin", False)}, all_ways=cases(("batch", "layer"), NORMS)),
)
def test_norms(norm: str, way: tuple[str, bool], tmp_path: Path) -> None:
    """Gradients and running statistics are PyG's, with dropout before and after, whichever comes first; in a thorough
    run each norm either way."""
    kind, act_first = way
    options = {**NORMS[norm], "act_first": act_first, "act": "elu"}
    case = ModelCase(kind=kind, layers=2, dropout=0.3, options=options)
    assert_agrees(case, random_data(ROUGH), tmp_path, epochs=EPOCHS)


@pytest.mark.parametrize("kind", ["gcn", "gin"])
def test_norms_in_single_precision(kind: str, tmp_path: Path) -> None:
    """To 1e-4."""
    case = ModelCase(kind=kind, layers=2, dropout=0.3, options={"norm": "batch_norm"})
    data = random_data(ROUGH, dtype=torch.float32)
    assert_agrees(case, data, tmp_path, dtype=torch.float32, make_optimizer=smooth_adam, epochs=EPOCHS)


@pytest.mark.thorough("gcn-cat-3", "gcn-lstm-3", "sage-last-3", "sage-max-3", "gin-cat-3", "gin-max-3")
@pytest.mark.parametrize(
    ("kind", "jk", "layers"),
    [*product(["gcn", "sage", "gin"], ["last", "cat", "max", "lstm"], [3]), ("gcn", "cat", 1), ("gin", "lstm", 1)],
)
def test_jumping_knowledge(kind: str, jk: str, layers: int, tmp_path: Path) -> None:
    """What every layer gives reaches the output, with norms and dropout on the way."""
    norm = {"norm": "batch_norm"} if layers == 3 else {}
    case = ModelCase(kind=kind, layers=layers, dropout=0.2, options={"jk": jk, **norm})
    assert_agrees(case, random_data(ROUGH), tmp_path, epochs=EPOCHS)


OPTIONS = {
    "gin": ModelCase(kind="gin", layers=3),
    "gin of one layer": ModelCase(kind="gin", layers=1),
    "gin trains eps": ModelCase(kind="gin", layers=3, dropout=0.2, options={"train_eps": True}),
    "gin starts with eps": ModelCase(kind="gin", layers=2, options={"eps": 0.4}),
    "gin, input dropout": ModelCase(kind="gin", layers=2, input_dropout=0.4),
    "gin act": ModelCase(kind="gin", layers=2, options={"act": "LeakyReLU", "act_kwargs": {"negative_slope": 0.2}}),
    "gin narrow": ModelCase(kind="gin", layers=3, hidden=3),
    "gcn improved": ModelCase(kind="gcn", layers=3, options={"improved": True}),
    "gcn cached": ModelCase(kind="gcn", layers=3, options={"cached": True}),
    "gcn with a function to activate": ModelCase(kind="gcn", layers=3, options={"act": torch.sin}),
    "sage project": ModelCase(kind="sage", layers=3, dropout=0.2, options={"project": True}),
    "sage project without root": ModelCase(kind="sage", layers=3, options={"project": True, "root_weight": False}),
    "sage normalize": ModelCase(kind="sage", layers=3, options={"normalize": True}),
    "sage sum with norm": ModelCase(kind="sage", layers=3, options={"aggr": "sum", "norm": "batch_norm"}),
    "sage prelu twice": ModelCase(kind="sage", layers=3, options={"act": "PReLU", "norm": "graph_norm"}),
}


@pytest.mark.thorough("sage prelu twice-directed", "gin narrow-directed", "gin starts with eps-undirected")
@pytest.mark.parametrize(("name", "undirected"), in_turn(OPTIONS, DIRECTIONS))
def test_options(name: str, undirected: bool, tmp_path: Path) -> None:
    """What PyG's constructors can be told, on both kinds of graph."""
    graph = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8, undirected=undirected)
    assert_agrees(OPTIONS[name], random_data(graph), tmp_path, epochs=EPOCHS)
