# SPDX-License-Identifier: Apache-2.0
"""Budgets, slab widths, block sizes and where things wait never change results: equal to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ooc.storage.store import Store
from tests.exactness.comparison import least, make_trainer, store_of
from tests.exactness.models import Branches, Residual
from tests.exactness.reference import CustomCase, ModelCase
from tests.examples import cases
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=300, edges=1600, features=24, self_loops=14, isolated=17, duplicates=40, unlabelled=70)
TILE_ROWS = 64
EPOCHS = 2
NODE_NORM = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
MODELS = {
    "gcn": ModelCase(kind="gcn", layers=3, hidden=40, dropout=0.3, input_dropout=0.2, options=NODE_NORM),
    "gcn constant input": ModelCase(kind="gcn", layers=3, hidden=31, dropout=0.3),
    "sage": ModelCase(kind="sage", layers=3, hidden=40, dropout=0.3, input_dropout=0.2, options=NODE_NORM),
    "sage constant input": ModelCase(kind="sage", layers=3, hidden=31, dropout=0.3),
    "gin": ModelCase(kind="gin", layers=2, hidden=20, dropout=0.3, options={"norm": "batch_norm", "jk": "cat"}),
    "residual": CustomCase(make=Residual),
    "branches": CustomCase(make=Branches),
}
SHARES = [(1.0, 1.5), (1.0, 4.0), (1.2, 1.0), (1.5, 2.0), (2.0, 1.0), (4.0, 4.0), (30.0, 1.0)]
"""Budgets as multiples of the least that would do: (device, host)."""
CUTS: list[dict[str, Any]] = [
    {"block_rows": TILE_ROWS},
    {"block_rows": 4 * TILE_ROWS},
    {"block_rows": 16 * TILE_ROWS},
    {"slab_columns": 1},
    {"slab_columns": 7},
    {"slab_columns": 16},
    {"slab_columns": 1000},
    {"block_rows": 2 * TILE_ROWS, "slab_columns": 5},
]
FORMS = [(torch.float32, False), (torch.float64, True), (torch.float32, True), (torch.float64, False)]
"""Type and whether the graph is undirected. A model has one of them; in a thorough run two that differ in both, its
neighbours the other two, so that any two of model, type and direction come together. Every plan is made for one of the
models, the leanest for all."""
CASES = {
    f"{name}-{dtype}-{'undirected' if undirected else 'directed'}": (model, dtype, undirected, number)
    for number, (name, model) in enumerate(MODELS.items())
    for dtype, undirected in cases([FORMS[(2 * number + number // 2) % 4]], FORMS[2 * (number % 2) :][:2])
}


def outcome(
    model: ModelCase, store: Store, folder: Path, dtype: torch.dtype, **options: Any
) -> tuple[list[float], dict[str, float | None], dict[str, Tensor], int]:
    """Losses, final scores and final parameters of a short run, and the bytes it writes an epoch, which are the
    plan's."""
    with make_trainer(model, store, folder, dtype=dtype, tile_rows=TILE_ROWS, **options) as trainer:
        records = trainer.fit(epochs=EPOCHS, eval_every=0)
        scores, plan, last = trainer.evaluate(), trainer.plan, records[-1]
        assert (last.ssd_write_bytes, last.ssd_read_bytes) == (plan.ssd_write_bytes, plan.ssd_read_bytes)
        parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        return [record.loss for record in records], scores, parameters, last.ssd_write_bytes


@pytest.mark.thorough("gcn constant input-torch.float32-undirected", "residual-torch.float32-directed")
@pytest.mark.parametrize(("model", "dtype", "undirected", "number"), CASES.values(), ids=CASES.keys())
def test_results_do_not_depend_on_the_plan(
    model: ModelCase, dtype: torch.dtype, undirected: bool, number: int, tmp_path: Path
) -> None:
    """Every plan gives the losses, accuracies and weights of the roomiest one, compared by ``==``. That spills nothing,
    the leanest most."""
    graph = GraphCase(**{**GRAPH.__dict__, "undirected": undirected})
    store = store_of(random_data(graph, dtype=dtype), tmp_path)
    expected = outcome(model, store, tmp_path, dtype)
    leanest = least(model, store, tmp_path, dtype=dtype, tile_rows=TILE_ROWS)
    gpu, host = leanest["gpu_budget"], leanest["host_budget"]
    plans: list[dict[str, Any]] = [
        {"gpu_budget": int(gpu * device_share), "host_budget": int(host * host_share)}
        for device_share, host_share in SHARES
    ]
    written = []
    for options in [leanest, *(plans + CUTS)[number :: len(MODELS)]]:
        losses, scores, parameters, bytes_written = outcome(model, store, tmp_path, dtype, **options)
        written.append(bytes_written)
        assert losses == expected[0], options
        assert scores == expected[1], options
        for name, parameter in parameters.items():
            assert torch.equal(parameter, expected[2][name]), (options, name)
    assert expected[-1] == 0 < written[0] == max(written)


def test_fit_in_pieces_is_fit_in_one_go(tmp_path: Path) -> None:
    """Calling fit again continues: epoch numbers, masks and optimizer state go on."""
    store = store_of(random_data(GRAPH), tmp_path)
    model = MODELS["gcn"]
    with make_trainer(model, store, tmp_path, tile_rows=TILE_ROWS) as trainer:
        whole = trainer.fit(epochs=4, eval_every=0)
    with make_trainer(model, store, tmp_path, tile_rows=TILE_ROWS) as trainer:
        pieces = trainer.fit(epochs=1, eval_every=0) + trainer.fit(epochs=2, eval_every=0)
        trainer.evaluate()  # must leave no trace in what follows
        pieces += trainer.fit(epochs=1, eval_every=0)
    assert [(r.epoch, r.loss) for r in pieces] == [(r.epoch, r.loss) for r in whole]
