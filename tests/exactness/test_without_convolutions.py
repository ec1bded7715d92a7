# SPDX-License-Identifier: Apache-2.0
"""Models that look at no edges, as the baselines beside a graph's: on features and budgets like others."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ooc
from ooc.stages import panels
from ooc.train.batched.batches import SampledTrainer, Sampling
from tests.exactness import test_types as typed
from tests.exactness.comparison import assert_agrees, least, store_of
from tests.exactness.reference import CustomCase
from tests.exactness.test_savings import in_hop_order
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=150, edges=400, features=6, classes=3, unlabelled=20, isolated=9)


class Mlp(nn.Module):
    """Two linear maps with a norm and dropout between."""

    def __init__(self, features: int, classes: int, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(features, 16, bias=False), norm(16), nn.Linear(16, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training))
        return out


class Linear(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.map = nn.Linear(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.map(x)
        return out


CASES = {
    "one map": CustomCase(make=Linear),
    "a norm of all rows": CustomCase(make=Mlp),
    "norms of rows": CustomCase(make=lambda f, c: Mlp(f, c, nn.LayerNorm), input_dropout=0.2),
}


def test_a_map_of_torch_is_a_model_by_itself(tmp_path: Path) -> None:
    data = random_data(GRAPH)
    model = nn.Linear(6, 3).double()
    expected = F.cross_entropy(model(data.x[data.train_mask]), data.y[data.train_mask])
    with ooc.Trainer(model, data, memory="100M", spill_dir=tmp_path) as trainer:
        assert trainer.fit(progress=False)[0].loss == pytest.approx(expected.item(), rel=1e-9)


def test_predictions_of_sparse_features_alone(tmp_path: Path) -> None:
    """No matrix is read or written."""
    data = random_data(GRAPH)
    data.x = data.x * (data.x > 1.5)
    store = ooc.convert(data, tmp_path / "sparse.ooc", dtype="float64", feature_form="sparse")
    model = nn.Linear(6, 3).double()
    with ooc.Trainer(model, store, memory="100M", spill_dir=tmp_path) as trainer:
        found = trainer.predict()
    assert found is not None
    assert torch.allclose(found, model(data.x))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_they_are_exact(case: CustomCase, tmp_path: Path) -> None:
    """With ample memory and the least, and in hop order, where rows without labels need not be computed."""
    data = random_data(GRAPH)
    store = store_of(data, tmp_path)
    assert_agrees(case, data, tmp_path, store=store)
    assert_agrees(case, data, tmp_path, store=store, **least(case, store, tmp_path))
    ordered, data = in_hop_order(random_data(GRAPH), tmp_path)
    assert_agrees(case, data, tmp_path, store=ordered)


def test_sums_of_several_tiles_are_added_up_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of panels of rows: moments, and their gradients."""
    monkeypatch.setattr(panels, "PANELS", 2)
    assert_agrees(CASES["a norm of all rows"], random_data(GRAPH), tmp_path)


def test_of_types_of_links_and_in_batches(tmp_path: Path) -> None:
    class OfTypes(Linear):
        def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(x_dict["paper"], edge_index_dict)  # type: ignore[arg-type]

    data = typed.graph()
    typed.assert_as_pyg(lambda data: OfTypes(data["paper"].x.shape[1], typed.CLASSES), data, tmp_path)
    (tmp_path / "plain").mkdir()
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path / "plain")
    with ooc.LinkTrainer(ooc.LinkPredictor(Linear(6, 4)), store, ooc.Links(), memory="64M") as links:
        links.fit(1, progress=False)
    with SampledTrainer(Linear(6, 3), store, Sampling(fanouts=[2], batch_size=16), memory="64M") as trainer:
        trainer.fit(1, progress=False)
