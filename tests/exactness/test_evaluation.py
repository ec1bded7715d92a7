# SPDX-License-Identifier: Apache-2.0
"""Evaluation is PyG's in eval mode, whatever was trained before and with which dropout."""

from pathlib import Path

import pytest
import torch

from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase, accuracies
from tests.examples import every_other
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=120, edges=450, self_loops=6, isolated=9, duplicates=15, unlabelled=15)
MODEL = ModelCase(kind="sage", layers=3, dropout=0.6, input_dropout=0.4)


@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize("epochs", [0, 3])
def test_evaluate_is_eval_mode(kind: str, epochs: int, tmp_path: Path) -> None:
    """No dropout, the weights after the last step, all three splits."""
    data = random_data(GRAPH)
    case = ModelCase(kind=kind, layers=3, dropout=0.6, input_dropout=0.4)
    with make_trainer(case, store_of(data, tmp_path), tmp_path) as trainer:
        if epochs:
            trainer.fit(epochs=epochs, eval_every=0)
        scores = trainer.evaluate()
        expected = accuracies(trainer.model, data)
    assert {name: scores[name] for name in expected} == expected


def test_an_empty_split_has_no_accuracy(tmp_path: Path) -> None:
    """None, not zero and not NaN."""
    data = random_data(GraphCase(train=1.0))
    with make_trainer(MODEL, store_of(data, tmp_path), tmp_path) as trainer:
        scores = trainer.evaluate()
    assert scores["valid_score"] is None and scores["test_score"] is None
    assert scores["train_score"] is not None


def test_records_hold_accuracies_where_evaluated(tmp_path: Path) -> None:
    """Every ``eval_every`` epochs, None in between; evaluation does not disturb the training."""
    data = random_data(GRAPH)
    store = store_of(data, tmp_path)
    with make_trainer(MODEL, store, tmp_path) as trainer:
        undisturbed = [record.loss for record in trainer.fit(epochs=4, eval_every=0)]
    with make_trainer(MODEL, store, tmp_path) as trainer:
        records = trainer.fit(epochs=4, eval_every=2)
        expected = accuracies(trainer.model, data)
    assert [record.loss for record in records] == undisturbed
    assert [record.valid_score is not None for record in records] == [False, True, False, True]
    last = records[-1]
    assert {"train_score": last.train_score, "valid_score": last.valid_score, "test_score": last.test_score} == expected


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_left_alone(training: bool, tmp_path: Path) -> None:
    """train() or eval(), as the user had it."""
    data = random_data(GRAPH)
    with make_trainer(MODEL, store_of(data, tmp_path), tmp_path) as trainer:
        trainer.model.train(training)
        trainer.evaluate()
        assert trainer.model.training is training


@pytest.mark.thorough(*every_other(["gcn", "sage"], ["torch.float32", "torch.float64"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_weights_after_training_are_ordinary_pyg_weights(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The state_dict keeps its keys and loads into a fresh PyG model, which gives the same logits."""
    data = random_data(GRAPH, dtype=dtype)
    case = ModelCase(kind=kind, layers=3, dropout=0.2)
    fresh = case.build(GRAPH.features, GRAPH.classes, dtype=dtype, seed=99)
    with make_trainer(case, store_of(data, tmp_path), tmp_path, dtype=dtype) as trainer:
        parameters = dict(trainer.model.named_parameters())
        trainer.fit(epochs=2, eval_every=0)
        assert all(p is parameters[name] for name, p in trainer.model.named_parameters())
        trained = trainer.model
    assert list(trained.state_dict()) == list(fresh.state_dict())
    fresh.load_state_dict(trained.state_dict())
    with torch.no_grad():
        logits = fresh.eval()(data.x, data.edge_index)
        assert torch.equal(logits, trained.eval()(data.x, data.edge_index))
