# SPDX-License-Identifier: Apache-2.0
"""Hypothesis draws graph, model, blocks and budgets; the result is PyG's every time."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stages import panels
from tests.exactness.comparison import assert_agrees, least_budgets, make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.examples import examples
from tests.graphs import GraphCase, graph_cases, random_data

EXAMPLES, EPOCHS = 8, 3

graphs = graph_cases(
    nodes=st.integers(2, 70),
    edges=st.integers(0, 250),
    features=st.integers(1, 20),
    classes=st.integers(2, 6),
    isolated=st.integers(0, 20),
    train=st.floats(0, 1),
)


NORMS: list[dict[str, Any]] = [
    {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    {"norm": "layer_norm"},
    {"norm": "batch_norm"},
    {"norm": "graph_norm"},
    {"norm": "pair_norm"},
]


@st.composite
def models(draw: st.DrawFn) -> ModelCase:
    """Any supported model of up to four layers."""
    kind = draw(st.sampled_from(["gcn", "sage", "gin"]))
    options: dict[str, Any] = {
        "bias": draw(st.booleans()),
        "act": draw(st.sampled_from(["relu", "elu", "tanh", None])),
    }
    if kind == "gin":
        options = {"act": options["act"], "train_eps": draw(st.booleans())}
    elif kind == "sage":
        options |= {"project": draw(st.booleans()), "normalize": draw(st.booleans())}
        options |= {"root_weight": draw(st.booleans()), "aggr": draw(st.sampled_from(["mean", "sum"]))}
    else:
        options |= draw(st.sampled_from([{}, {"add_self_loops": False}, {"normalize": False}]))
    normalised = draw(st.booleans())
    if normalised:
        options |= draw(st.sampled_from(NORMS)) | {"act_first": draw(st.booleans())}
    options |= draw(st.sampled_from([{}, {}, {"jk": "cat"}, {"jk": "max"}, {"jk": "last"}]))
    rates = st.sampled_from([0.0, 0.0, 0.2, 0.6])
    return ModelCase(
        kind=kind,
        layers=draw(st.integers(1, 4)),
        # A LayerNorm of one or two columns has gradients that are zero but for rounding errors.
        hidden=draw(st.integers(4 if normalised else 1, 20)),
        dropout=draw(rates),
        input_dropout=draw(rates),
        options=options,
    )


@st.composite
def cuts(draw: st.DrawFn) -> dict[str, Any]:
    """How the matrices are cut: tiles, blocks of whole tiles, slabs."""
    tile_rows = draw(st.sampled_from([4, 8, 16, 64]))
    return {
        "tile_rows": tile_rows,
        "block_rows": draw(st.sampled_from([None, tile_rows, 2 * tile_rows, 4 * tile_rows])),
        "slab_columns": draw(st.sampled_from([None, 1, 3, 8])),
    }


shares = st.sampled_from([1.0, 1.0, 1.1, 1.5, 3.0, 100.0])


@settings(max_examples=examples(EXAMPLES), deadline=None, derandomize=True)
@given(
    graph=graphs,
    model=models(),
    cut=cuts(),
    gpu_share=shares,
    host_share=shares,
    panel_count=st.sampled_from([2, 3, 32]),
)
def test_any_case_is_exact(
    graph: GraphCase,
    model: ModelCase,
    cut: dict[str, Any],
    gpu_share: float,
    host_share: float,
    panel_count: int,
) -> None:
    """Budgets are the least that the trainer itself says would do, or a multiple of it. Sums are of so many panels."""
    data = random_data(graph)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "PANELS", panel_count)
        folder = Path(name)
        store = store_of(data, folder)
        gpu, host = least_budgets(
            lambda gpu, host: make_trainer(model, store, folder, gpu_budget=gpu, host_budget=host, **cut)
        )
        budgets = {"gpu_budget": int(gpu * gpu_share), "host_budget": int(host * host_share)}
        assert_agrees(model, data, folder, epochs=EPOCHS, store=store, **budgets, **cut)
