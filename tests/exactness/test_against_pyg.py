# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients and accuracies are those of PyG training on the whole graph."""

from pathlib import Path

import pytest
import torch

from tests.exactness.comparison import DIRECTIONS, assert_agrees
from tests.exactness.reference import ModelCase, OptimizerFactory, adam, adamw, smooth_adam
from tests.examples import every_other
from tests.graphs import GraphCase, random_data

ROUGH = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8)
"""Everything that a graph may contain at once."""
NODE_NORM = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}


@pytest.mark.thorough(*every_other(["plain", "rich"], ["gcn", "sage"], "1234", DIRECTIONS))
@pytest.mark.thorough("plain-gcn-3-directed", "plain-sage-3-undirected")
@pytest.mark.parametrize("undirected", [False, True], ids=["directed", "undirected"])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
def test_depth_and_direction(kind: str, layers: int, undirected: bool, rich: bool, tmp_path: Path) -> None:
    """1 to 4 layers on a rough graph, bare and with dropout everywhere and row-wise LayerNorm."""
    graph = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8, undirected=undirected)
    model = (
        ModelCase(kind=kind, layers=layers, dropout=0.4, input_dropout=0.3, options=NODE_NORM)
        if rich
        else ModelCase(kind=kind, layers=layers)
    )
    assert_agrees(model, random_data(graph), tmp_path)


@pytest.mark.thorough(*every_other(["gcn", "sage"], ["1-True", "2-False", "3-True", "4-True"]))
@pytest.mark.parametrize(("layers", "rich"), [(1, True), (2, False), (3, True), (4, True)])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_float32(kind: str, layers: int, rich: bool, tmp_path: Path) -> None:
    """The same in single precision, to 1e-4."""
    model = (
        ModelCase(kind=kind, layers=layers, dropout=0.4, input_dropout=0.3, options=NODE_NORM)
        if rich
        else ModelCase(kind=kind, layers=layers)
    )
    data = random_data(ROUGH, dtype=torch.float32)
    assert_agrees(model, data, tmp_path, dtype=torch.float32, make_optimizer=smooth_adam)


GRAPHS = {
    "one node": GraphCase(nodes=1, edges=0),
    "one node, self-loops": GraphCase(nodes=1, edges=0, self_loops=3),
    "no edges": GraphCase(nodes=20, edges=0),
    "only self-loops": GraphCase(nodes=20, edges=0, self_loops=25),
    "no self-loops": GraphCase(),
    "many duplicates": GraphCase(nodes=10, edges=30, duplicates=100),
    "most nodes isolated": GraphCase(isolated=40),
    "complete and undirected": GraphCase(nodes=12, edges=150, undirected=True, self_loops=12),
    "one training node": GraphCase(train=0.0),
    "all nodes train": GraphCase(train=1.0),
    "mostly unlabelled": GraphCase(unlabelled=46),
    "rows of exactly one tile": GraphCase(nodes=8),
    "one row past a tile": GraphCase(nodes=9),
    "one feature, two classes": GraphCase(features=1, classes=2),
    "wide features": GraphCase(features=70),
    "more rows than a chunk": GraphCase(nodes=1100, edges=3000, isolated=30, self_loops=10),
}


@pytest.mark.thorough(*every_other(["gcn", "sage"], GRAPHS))
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_odd_graphs(kind: str, graph: GraphCase, tmp_path: Path) -> None:
    """Graphs with something missing or too much of it."""
    case = ModelCase(kind=kind, layers=3, dropout=0.2)
    assert_agrees(case, random_data(graph), tmp_path, tile_rows=8 if graph.nodes < 1000 else 64)


MODELS = {
    "gcn without bias": ModelCase(kind="gcn", options={"bias": False}),
    "gcn without added loops": ModelCase(kind="gcn", layers=3, options={"add_self_loops": False}),
    "gcn not normalised": ModelCase(kind="gcn", layers=3, options={"normalize": False}),
    "gcn cached": ModelCase(kind="gcn", options={"cached": True}),
    "gcn act_first": ModelCase(kind="gcn", options={**NODE_NORM, "act_first": True}),
    "gcn wider than its input": ModelCase(kind="gcn", layers=3, hidden=21),
    "sage without root": ModelCase(kind="sage", layers=3, options={"root_weight": False}),
    "sage without bias": ModelCase(kind="sage", layers=3, options={"bias": False}),
    "sage bare": ModelCase(kind="sage", options={"bias": False, "root_weight": False}),
    "sage sum": ModelCase(kind="sage", layers=3, options={"aggr": "sum"}),
    "sage add": ModelCase(kind="sage", input_dropout=0.2, options={"aggr": "add"}),
    "sage act_first": ModelCase(kind="sage", layers=3, dropout=0.3, options={**NODE_NORM, "act_first": True}),
    "sage plain LayerNorm": ModelCase(
        kind="sage", options={"norm": "layer_norm", "norm_kwargs": {"mode": "node", "affine": False}}
    ),
    "sage narrow": ModelCase(kind="sage", layers=4, hidden=1),
    "sage input dropout": ModelCase(kind="sage", layers=3, input_dropout=0.5),
    "gcn input dropout": ModelCase(kind="gcn", layers=3, input_dropout=0.5),
    "sage dropout": ModelCase(kind="sage", layers=3, dropout=0.5),
    "gcn elu": ModelCase(kind="gcn", layers=3, options={"act": "elu"}),
    "sage elu": ModelCase(kind="sage", layers=3, dropout=0.2, options={"act": "elu"}),
    "sage leaky": ModelCase(kind="sage", options={"act": "LeakyReLU", "act_kwargs": {"negative_slope": 0.3}}),
    "sage prelu": ModelCase(kind="sage", layers=3, options={"act": "PReLU"}),
    "gcn tanh": ModelCase(kind="gcn", options={"act": "tanh"}),
    "gcn without act": ModelCase(kind="gcn", layers=3, options={"act": None}),
}


@pytest.mark.thorough(
    "gcn elu", "sage act_first", "sage input dropout", "sage without bias", "sage dropout", "sage add"
)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_model_options(model: ModelCase, tmp_path: Path) -> None:
    """What PyG's constructors can be told, aggregate-first as well as transform-first."""
    assert_agrees(model, random_data(ROUGH), tmp_path)


@pytest.mark.thorough(*every_other(["gcn", "sage"], ["3", "30"], ["0.0", "0.4"]))
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("features", [3, 30])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_either_order_of_product_and_sum(kind: str, features: int, dropout: float, tmp_path: Path) -> None:
    """Layers that widen and layers that narrow, so that each order occurs first, between and last."""
    graph = GraphCase(features=features, classes=13, self_loops=5, isolated=5, duplicates=10)
    case = ModelCase(kind=kind, layers=3, hidden=7, input_dropout=dropout)
    assert_agrees(case, random_data(graph), tmp_path)


@pytest.mark.parametrize("make_optimizer", [adam, adamw], ids=["Adam", "AdamW"])
def test_optimizers(make_optimizer: OptimizerFactory, tmp_path: Path) -> None:
    """The user's optimizer takes the steps."""
    case = ModelCase(kind="sage", layers=3, dropout=0.3)
    assert_agrees(case, random_data(ROUGH), tmp_path, make_optimizer=make_optimizer)


def test_weight_decay_by_group(tmp_path: Path) -> None:
    """Parameter groups keep their own settings, as in the usual recipe for Cora."""

    def grouped(model: torch.nn.Module) -> torch.optim.Optimizer:
        first, *others = model.convs
        return torch.optim.Adam(
            [
                {"params": first.parameters(), "weight_decay": 0.1},
                {"params": [p for conv in others for p in conv.parameters()]},
            ],
            lr=1e-2,
        )

    assert_agrees(ModelCase(kind="gcn"), random_data(ROUGH), tmp_path, make_optimizer=grouped)


@pytest.mark.parametrize("seed", [1, 2**31, 2**63 - 1])
def test_seed_keys_the_masks(seed: int, tmp_path: Path) -> None:
    """Any seed, large ones too, gives the masks that keep_mask gives for it."""
    assert_agrees(ModelCase(kind="sage", dropout=0.5, input_dropout=0.5), random_data(ROUGH), tmp_path, seed=seed)
