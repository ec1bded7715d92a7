# SPDX-License-Identifier: Apache-2.0
"""Several processes train on graphs with types what one does, bit for bit, embeddings and links of types among it."""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import CGConv

import ooc
from ooc.models import Relational, RelationalAttention
from ooc.train import sharing
from ooc.train.setup import Tuning
from tests.exactness import test_types as with_features
from tests.exactness.test_embeddings_of_types import WIDTHS, graph, made
from tests.processes import together

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")
_WRITES = ("author", "writes", "paper")


@pytest.fixture(autouse=True)
def _as_shared_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_WORTH_PLANNING_S", inf)


def _attention(data: HeteroData, **options: Any) -> nn.Module:
    columns = {name: data[name].num_features for name in data.node_types}
    return RelationalAttention(columns, data.edge_types, 8, 1, with_features.CLASSES, target="paper", **options)


def _encoder(data: HeteroData) -> ooc.LinkPredictor:
    columns = {name: data[name].num_features + WIDTHS.get(name, 0) for name in data.node_types if name != "venue"}
    edges = [kind for kind in data.edge_types if "venue" not in kind]
    encoder = Relational(columns, edges, 6, 2, 6, target=("author", "paper"))
    return ooc.LinkPredictor(encoder, "distmult", channels=6).double()


def _outcome(trainer: ooc.Trainer) -> dict[str, Any]:
    records = trainer.fit(2, progress=False)
    plan, program = trainer.plan, "train_and_score" if "train_and_score" in trainer.plan.programs else "train"
    if trainer.ranks.count > 1 and not isinstance(trainer, ooc.LinkTrainer):
        assert records[-1].ssd_write_bytes == plan.bytes_written(program)
        assert records[-1].received_bytes == plan.received_bytes(program)
    if trainer.ranks.count > 1 and type(trainer) is ooc.Trainer and trainer._learnt is not None:
        forecast = trainer._planned.plans_by_rank(trainer.limits, trainer.hardware)[trainer.ranks.rank][1]
        assert (forecast.share, forecast.received_bytes(program)) == (plan.share, records[-1].received_bytes)
    found: dict[str, Any] = {"losses": [(one.loss, one.valid_score) for one in records]}
    found |= {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    for name, array in {} if trainer._learnt is None else trainer._learnt.arrays.items():
        found[name] = torch.from_numpy(array.read())
    return found


def test_types_their_embeddings_and_links(tmp_path: Path) -> None:
    """Of topics there is one panel alone, which one process has."""
    featured, bare = with_features.graph(), graph()
    first = ooc.convert(featured, tmp_path / "f.ooc", dtype="float64", order="hop")
    second = ooc.convert(bare, tmp_path / "b.ooc", dtype="float64")
    pairs = bare[_WRITES].edge_index
    links = ooc.Links(valid=pairs[:, :20], train=pairs[:, 20:], edge_type=_WRITES)
    options: dict[str, Any] = {"threads": 1, "spill_dir": tmp_path / "spill", "memory": "60M"}
    options["_tuning"] = Tuning(tile_rows=24)

    def trainers() -> Iterator[tuple[str, ooc.Trainer]]:
        torch.manual_seed(0)
        model = _attention(featured, heads=2, dropout=0.3).double()
        yield "HGT", ooc.Trainer(model, first, slab_columns=4, **options)
        model = _attention(featured, heads=2, by_type=True).double()
        yield "HAN, whose weights are moments", ooc.Trainer(model, first, **options)
        torch.manual_seed(0)
        model = with_features.Relations(featured, lambda: CGConv((with_features.HIDDEN, with_features.HIDDEN))).double()
        yield "layers as they are", ooc.Trainer(model, first, **options)
        embedding = ooc.Embedding(WIDTHS, lr=0.05, weight_decay=0.01)
        model = made("attention", bare, WIDTHS)
        more: dict[str, Any] = {"clip_norm": 0.01, "block_rows": 48}
        yield "embeddings", ooc.Trainer(model, second, embedding=embedding, **more, **options)
        torch.manual_seed(0)
        more = {"embedding": embedding, "steps": 2, "exchange": "columns"}
        yield "links", ooc.LinkTrainer(_encoder(bare), second, links, **more, **options)

    def work(rank: int) -> dict[str, dict[str, Any]]:
        found = {}
        for name, trainer in trainers():
            with trainer:
                found[name] = _outcome(trainer)
        return found

    alone = work(0)  # here, so that what is traced and loaded is not by each
    for found in together(2, tmp_path, work):
        assert found is not None and found.keys() == alone.keys()
        for name, one in alone.items():
            assert found[name].keys() == one.keys()
            for what, value in one.items():
                same = torch.equal(found[name][what], value) if isinstance(value, torch.Tensor) else None
                assert same if same is not None else found[name][what] == value, (name, what)
