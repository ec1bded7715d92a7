# SPDX-License-Identifier: Apache-2.0
"""What a tile of a row pass allocates stays within the bound that admission is given, and is not far below it; and so
do the gradients of parameters that tiles leave."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

import ooc
from ooc.engine.executor import RowPassRun
from ooc.plan.layout.temporaries import scratch_nbytes
from ooc.stages import Tile
from tests.exactness.comparison import tuned_trainer
from tests.examples import thorough

WIDTH, CLASSES, TILE = 64, 32, 1024

NETWORKS: dict[str, Callable[..., nn.Module]] = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN, "gat": GAT}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gcn": ("gcn", {}),
    "sage": ("sage", {}),
    "sage, dropout and skips": ("sage", {"dropout": 0.5, "jk": "cat"}),
    "sage, layer norms": ("sage", {"norm": "LayerNorm", "norm_kwargs": {"mode": "node"}}),
    "sage, maxima": ("sage", {"aggr": "max"}),
    "sage, batch norms": ("sage", {"norm": "BatchNorm"}),
    "gin, batch norms": ("gin", {"norm": "BatchNorm"}),
    "gat": ("gat", {"heads": 4, "dropout": 0.3}),
}


class Watch(TorchDispatchMode):
    """The most bytes of storages made within that are alive at once; views and what is written in place make none.

    ``conformance.Watch`` has to be told what is there before, and frames are another storage in every view of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._alive.values()))
        return result


@dataclass
class Taken:
    """By stage and bound, as stages of several programs may be called alike: the most bytes that a tile took; and the
    most that gradients of a tile's took."""

    stages: dict[tuple[str, int], int] = field(default_factory=dict)
    gradient_bytes: int = 0


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, trainer: ooc.Trainer) -> Iterator[Taken]:
    """What whole tiles take, until the end of the block."""
    taken, compute = Taken(), RowPassRun.compute
    workload = trainer._prepared.workload

    def watching(self: RowPassRun, tile: Tile) -> Tile:
        with Watch() as watch:
            done = compute(self, tile)
        if tile.stop - tile.start == TILE:
            gradient_bytes = sum(gradient.nbytes for _, gradient in done.gradients)
            taken.gradient_bytes = max(taken.gradient_bytes, gradient_bytes)
            bound = scratch_nbytes(self.item, trainer.plan.matrices, workload, trainer.plan.frame_bytes)
            stage = self.item.title, bound
            taken.stages[stage] = max(taken.stages.get(stage, 0), watch.peak_bytes - gradient_bytes)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(RowPassRun, "compute", watching)
        yield taken


@pytest.mark.parametrize(
    ("name", "dtype"),
    thorough(
        [*((name, torch.float32) for name in OPTIONS), ("sage, batch norms", torch.float64)],
        *(("sage", torch.float32), ("sage, batch norms", torch.float32), ("gin, batch norms", torch.float32)),
    ),
)
def test_tiles_stay_within_their_bounds(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = OPTIONS[name]
    source = f"synthetic:nodes={2 * TILE},edges={10 * TILE},features={WIDTH},classes={CLASSES},directed=1"
    store = ooc.convert(source, tmp_path / "g.ooc", order="none")
    torch.manual_seed(0)
    model = NETWORKS[kind](WIDTH, WIDTH, 3, CLASSES, **options).to(dtype)
    with tuned_trainer(model, store, "100M", "100M", threads=1, tile_rows=TILE, spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        with watched(monkeypatch, trainer) as taken:
            trainer.fit(1, eval_every=0)
            trainer.evaluate()
        beyond = {stage: nbytes for stage, nbytes in taken.stages.items() if nbytes > stage[1]}
        assert not beyond
        needed, bound = max(taken.stages.values()), max(bound for _, bound in taken.stages)
        assert bound < 6 * needed
        if name == "gcn":  # what is scaled, pulled or loaded goes when it has been used
            assert needed <= 3.25 * TILE * WIDTH * dtype.itemsize
        parameters = sum(p.numel() for p in trainer.model.parameters())
        most = trainer._prepared.builder.most_gradients
        assert taken.gradient_bytes <= most * dtype.itemsize <= parameters * dtype.itemsize
