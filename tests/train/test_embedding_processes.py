# SPDX-License-Identifier: Apache-2.0
"""Several processes train an embedding as one does, bit for bit; each has the rows of its share, in the same files."""

import os
import signal
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn.models import GraphSAGE

import ooc
from ooc.engine.exchange import Exchange
from ooc.ranks import group
from ooc.storage.store import Store
from ooc.train import optimizer_state, sharing
from ooc.train.embedding import LearntRows
from ooc.train.runs.run import RunFolder
from tests.exactness.comparison import tuned_trainer
from tests.processes import together

_CASES: dict[str, dict[str, Any]] = {
    "adam, blocks of several processes": {"embedding": ooc.Embedding(5, lr=0.05), "block_rows": 128},
    "momentum, clipped, low blocks": {
        "embedding": ooc.Embedding(8, optimizer="sgd", momentum=0.9),
        "clip_norm": 0.01,
        "dropout": 0.4,
        "block_rows": 16,
    },
}
"""Rows of five numbers end amid pages, and blocks of 128 rows amid panels."""


@pytest.fixture(autouse=True)
def _as_shared_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_WORTH_PLANNING_S", inf)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports what all processes want
    return ooc.convert("synthetic:nodes=300,edges=900,features=0,classes=4", folder / "g.ooc", order="hop")


def _outcome(store: Store, embedding: ooc.Embedding, *, resume: bool = False, epochs: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    columns = embedding.columns
    assert isinstance(columns, int)
    model = GraphSAGE(columns, 8, 2, store.num_classes, dropout=options.pop("dropout", 0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    options = {"memory": "60M", "threads": 1, "tile_rows": 16, "optimizer": optimizer} | options
    with tuned_trainer(model, store, embedding=embedding, **options) as trainer:
        records = trainer.fit(epochs, resume=resume, progress=False)
        plan = trainer.plan
        program = "train_and_score" if "train_and_score" in plan.programs else "train"
        assert records[-1].ssd_write_bytes == plan.bytes_written(program)
        assert (plan.state_bytes > 0) == (options.get("optimizer_state") == "ssd")
        losses = [(one.epoch, one.loss, one.valid_score) for one in records]
        scores, rows = trainer.evaluate(), len(trainer.plan.share or ())
        return losses, trainer.predict("embeddings", layer=0), [*model.state_dict().values()], scores, rows


def _assert_same(found: Any, alone: Any, about: str) -> None:
    assert found is not None, about
    assert found[0] == alone[0] and found[3] == alone[3], about
    for mine, expected in zip([found[1], *found[2]], [alone[1], *alone[2]], strict=True):
        assert torch.equal(mine, expected), about


def test_rows_are_those_of_one_process(store: Store, tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        return {name: _outcome(store, spill_dir=tmp_path, **options) for name, options in _CASES.items()}

    (alone,) = together(1, tmp_path, work)
    for found in together(3, tmp_path, work):
        for name in _CASES:
            _assert_same(found[name], alone[name], name)
    assert not [*tmp_path.glob("ooc-*")]


def test_a_killed_process_and_a_run_that_others_go_on_with(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that two have left is whole, and tells what its rows were, and what the optimizer keeps of weights
    on the SSD. Three go on, of whom one gets fewer rows after an epoch, then one."""
    monkeypatch.setattr(group, "BEAT_S", 0.1)
    monkeypatch.setattr(optimizer_state, "PIECE", 32)
    options = {**_CASES["adam, blocks of several processes"], "optimizer_state": "ssd"}
    commit = LearntRows.commit

    def killed(rank: int) -> None:
        left = [2]

        def committed(rows: LearntRows) -> None:
            left[0] -= 1
            if rank == 1 and not left[0]:  # with all its rows written, and those of the other one
                os.kill(os.getpid(), signal.SIGKILL)
            commit(rows)

        monkeypatch.setattr(LearntRows, "commit", committed)
        with pytest.raises(ooc.RankError):
            _outcome(store, out=tmp_path / "run", epochs=4, **options)

    def gone_on(rank: int, epochs: int) -> Any:
        return _outcome(store, out=tmp_path / "run", resume=True, epochs=epochs, **options)

    def slowly(rank: int) -> Any:
        monkeypatch.setattr(Exchange, "of_all", lambda *_: [1.0, 3.0, 1.0])  # seconds that each has computed
        monkeypatch.setattr(sharing, "_WORTH_PLANNING_S", 0.1)
        return gone_on(rank, 3)

    in_memory = options | {"optimizer_state": "memory"}
    (alone,) = together(1, tmp_path, lambda rank: _outcome(store, epochs=4, **in_memory))
    together(2, tmp_path, killed)
    state = RunFolder.open(tmp_path / "run").last()
    assert state is not None and state["epoch"] == 1
    several = together(3, tmp_path, slowly)
    assert [one[0] for one in several] == [alone[0][1:3]] * 3
    assert several[1][-1] < min(several[0][-1], several[2][-1])
    (found,) = together(1, tmp_path, lambda rank: gone_on(rank, 4))
    assert found[0] == alone[0][3:]
    _assert_same((alone[0], *found[1:]), alone, "gone on with")

    current = [*(tmp_path / "run" / "embedding").glob("emb.exp_avg.?.npy")]
    for path in current:
        np.lib.format.open_memmap(path, mode="r+")[-1, -1] += 1
    told = together(2, tmp_path, lambda rank: str(_refused(lambda: gone_on(rank, 5))))
    assert all("emb.exp_avg: the SSD returns other bytes" in one for one in told)


def _refused(act: Any) -> ooc.OocError:
    with pytest.raises(ooc.OocError) as raised:
        act()
    return raised.value
