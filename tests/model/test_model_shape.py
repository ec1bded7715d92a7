# SPDX-License-Identifier: Apache-2.0
"""A model planned by its shape, against the PyG model itself."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from torch import nn
from torch_geometric.nn.models import GCN, GIN, GraphSAGE

from ooc.cli.arguments.recipe import planned_model
from ooc.cli.arguments.settings import TrainSettings
from ooc.cli.train import command
from ooc.model.lowering import model_shape
from ooc.model.lowering.model_shape import ModelShape, Shape
from ooc.model.lowering.network import dtype_of, values_of
from ooc.model.lowering.values import Aggregate, Dropout, Sum, Value
from ooc.plan import UNMEASURED, Limits
from ooc.plan.graphs import GraphStatistics
from ooc.train.job import store_of_statistics
from ooc.train.metrics import Metric
from ooc.train.resources import Resources
from ooc.train.setup import Saving, lower_model, prepare, setting_of
from tests.examples import thorough

KINDS: dict[str, tuple[Shape, Any]] = {
    "gcn": (model_shape.GCN, GCN),
    "sage": (model_shape.SAGE, GraphSAGE),
    "gin": (model_shape.GIN, GIN),
}
GRAPH = GraphStatistics(
    name="graph", nodes=9000, edges=90_000, features=24, classes=5, labelled=300, source="of these tests"
)


def pair(kind: str, *, layers: int, hidden: int, dropout: float) -> tuple[ModelShape, nn.Module]:
    """The shape and the model."""
    mine, of_pyg = KINDS[kind]
    model = of_pyg(GRAPH.features, hidden, layers, GRAPH.classes, dropout=dropout)
    return ModelShape(mine, GRAPH.features, hidden, GRAPH.classes, layers=layers, dropout=dropout), model


def described(output: Value, parameters: Sequence[nn.Parameter]) -> list[tuple[object, ...]]:
    """Every value that ``output`` comes of: its kind, its number, what it comes of, and its own options."""
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    own = {Aggregate: ("scaling", "once"), Dropout: ("p", "site"), Sum: ("factors",)}
    return [
        (
            type(value),
            value.index,
            value.tail,
            [source.index for source in value.inputs],
            [place[id(parameter)] for parameter in value.parameters],
            [getattr(value, name) for name in own.get(type(value), ())],
        )
        for value in values_of(output)
    ]


@pytest.mark.parametrize("savings", [tuple(Saving), ()])
@pytest.mark.parametrize(
    ("input_dropout", "dropout"), thorough(product([0.0, 0.1], [0.0, 0.5]), (0.0, 0.5), (0.1, 0.0))
)
@pytest.mark.parametrize(("layers", "hidden"), [(1, 8), (2, 4), (3, 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_is_what_the_trace_of_the_model_comes_to(
    kind: str, layers: int, hidden: int, dropout: float, input_dropout: float, savings: tuple[Saving, ...]
) -> None:
    """In both modes, with products before sums and after them."""
    shape, model = pair(kind, layers=layers, hidden=hidden, dropout=dropout)
    shapes = [[tuple(p.shape) for p in one.parameters()] for one in (shape, model)]
    assert shapes[0] == shapes[1]
    store, resources = store_of_statistics(GRAPH), Resources.parse("1G", "1G", tile_rows=1024)
    networks = []
    for one in (shape, model):
        setting = setting_of(store, dtype_of(model), input_dropout=input_dropout)
        networks.append(lower_model(one, store, resources, setting, savings=savings)[1])
    mine, traced = networks
    for mode in ("training", "evaluation"):
        found = [
            described(getattr(network, mode), list(one.parameters()))
            for network, one in zip(networks, (shape, model), strict=True)
        ]
        assert found[0] == found[1]
    assert [v.index for v in mine.embeddings] == [v.index for v in traced.embeddings]
    assert mine.hops == traced.hops
    assert mine.scalings == traced.scalings
    assert mine.same_in_evaluation == traced.same_in_evaluation
    assert not mine.idle
    assert not traced.idle


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_is_planned_like_the_model(kind: str) -> None:
    """Instruction by instruction, where memory is short and dropout makes stages worth computing again."""
    limits = Limits(1_400_000, 1_500_000)
    found = []
    for model in pair(kind, layers=3, hidden=32, dropout=0.5):
        resources = Resources.parse("1G", "1G", threads=2, tile_rows=64, hardware=UNMEASURED)
        found.append(prepare(model, GRAPH, resources, metric=Metric.ACCURACY).plan(limits, UNMEASURED))
    (workload, plan), (expected_workload, expected_plan) = found
    assert plan.ssd_bytes
    assert replace(workload, topologies={}) == replace(expected_workload, topologies={})
    assert replace(plan, topologies={}) == replace(expected_plan, topologies={})


@pytest.mark.parametrize(
    "options",
    [{"model": "gat"}, {"norm": "layer"}, {"jk": "cat"}, {"residual": True}, {"aggr": "max"}],
    ids=["model", "norm", "jumping knowledge", "residual", "aggregation"],
)
def test_what_no_shape_says_is_built(options: dict[str, Any]) -> None:
    """By PyG, options and all."""
    given = command.make_context("train", ["--model", "sage"]).params
    values = {name: given.get(name) for name in TrainSettings.__dataclass_fields__} | {"log": []}
    store = store_of_statistics(GRAPH)
    assert isinstance(planned_model(TrainSettings(**values), store), ModelShape)
    assert not isinstance(planned_model(TrainSettings(**(values | options)), store), ModelShape)


def test_planning_a_shape_takes_no_pyg() -> None:
    """Whose import, with torch's compiler, would take 1.5 s and 100 MB."""
    code = (
        "import sys; from ooc.cli import main\n"
        "try: main(['plan', '--graph', 'nodes=9000,edges=90000,features=24,classes=5', '--layers', '2'])\n"
        "finally: print({'torch_geometric', 'torch._dynamo'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
