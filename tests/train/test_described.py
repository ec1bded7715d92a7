# SPDX-License-Identifier: Apache-2.0
"""Processes that train together compare what each was given: what differs is refused by name, before it would train
something that nobody has asked for, or wait for ever."""

import io
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.models import GraphSAGE

import ooc
from ooc.cli import main
from ooc.storage.store import Store
from ooc.train import model_snapshot
from ooc.train.batched.batches import SampledTrainer, Sampling
from ooc.train.setup import Tuning
from tests.graphs import GraphCase, random_data
from tests.processes import together

_CASE = GraphCase(nodes=300, edges=1800, features=9, self_loops=15, duplicates=20, isolated=5)
_LINKS = np.arange(20).reshape(2, 10)


class Net(nn.Module):
    """A model of one's own."""

    def __init__(self, hidden: int = 8, *, squared: bool = False) -> None:
        super().__init__()
        self.convs = GraphSAGE(9, hidden, 2, 4)
        self.act = torch.square if squared else torch.sigmoid
        self.names = frozenset(("a", "b", "c"))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.act(self.convs(x, edge_index))


def _weighted(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    weights = torch.tensor([weight, 1.0, 1.0, 1.0])
    return lambda outputs, labels: F.cross_entropy(outputs, labels, weight=weights, reduction="none")


def _trainer(
    store: Store,
    *,
    hidden: int = 8,
    squared: bool = False,
    lr: float = 0.1,
    decay: float = 0.9,
    weight: float = 1.0,
    **options: Any,
) -> ooc.Trainer:
    torch.manual_seed(options.pop("drawn", 0))
    model = Net(hidden, squared=squared)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: decay**epoch)
    options |= {"optimizer": optimizer, "scheduler": scheduler, "loss": _weighted(weight), "memory": "100M"}
    return ooc.Trainer(model, store, _tuning=Tuning(tile_rows=16), **options)


def _on_links(store: Store, *, held: int = 0, **options: Any) -> ooc.Trainer:
    torch.manual_seed(0)
    model = ooc.LinkPredictor(GraphSAGE(9, 8, 2, 4), "dot")
    return ooc.LinkTrainer(model, store, ooc.Links(valid=_LINKS + held), memory="100M", **options)


def _by_batches(store: Store, *, fanout: int = 4) -> ooc.Trainer:
    return SampledTrainer(
        GraphSAGE(9, 8, 2, 4), store, Sampling(fanouts=[fanout, 3], batch_size=12, accumulate=2), memory="100M"
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ooc.convert(random_data(_CASE), tmp_path_factory.mktemp("described") / "g.ooc")


_OTHERS: list[tuple[Callable[..., ooc.Trainer], dict[str, Any], str]] = [
    (_trainer, {"hidden": 9}, "model.convs.hidden_channels"),
    (_trainer, {"squared": True}, "model.act"),
    (_trainer, {"lr": 0.2}, "optimizer"),
    (_trainer, {"decay": 0.8}, "scheduler"),
    (_trainer, {"weight": 2.0}, "loss"),
    (_trainer, {"seed": 1}, "seed"),
    (_trainer, {"clip_norm": 1.0}, "clip_norm"),
    (_trainer, {"embedding": 3}, "embedding"),
    (_on_links, {"held": 1}, "links.valid"),
    (_on_links, {"negatives": 2}, "negatives"),
    (_by_batches, {"fanout": 5}, "sampling"),
]


def test_what_differs_is_named_by_all(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights do not count, of which all take the first's."""

    def work(rank: int) -> list[str]:
        said = []
        for make, options, _ in _OTHERS:
            with pytest.raises(ooc.OocError) as raised:
                make(store, **(options if rank else {}))
            said.append(str(raised.value))
        with _trainer(store, drawn=rank) as trainer:
            trainer.fit(1, progress=False)
            with pytest.raises(ooc.OocError) as raised:
                trainer.fit(1 + rank, progress=False)
            said.append(str(raised.value))
        monkeypatch.setattr(model_snapshot, "__version__", f"0.1.{rank}")
        with pytest.raises(ooc.OocError) as raised:
            _trainer(store)
        return [*said, str(raised.value)]

    first, second = together(2, tmp_path, work)
    assert first == [f"rank 1 has failed: {one}" for one in second]
    for (_, _, name), one in zip(_OTHERS, second, strict=False):
        assert one.startswith("what is trained is not that of rank 0: it differs in ") and name in one
    assert second[-2] == "what fit is to do is not that of rank 0: it differs in epochs"
    assert second[-1].startswith("the software (ooc 0.1.1, torch ") and second[-1].endswith(" it differs in ooc")


def test_a_file_that_one_cannot_read_is_told_to_all(store: Store, tmp_path: Path) -> None:
    """They are amid finding out what to send each other, or wait for links to be written."""
    copies = [tmp_path / f"{rank}.ooc" for rank in range(2)]
    for copy in copies:
        shutil.copytree(store.path, copy)
    next((copies[1] / "in" / "indices" / "c").rglob("*")).unlink()
    (tmp_path / "file").write_text("")

    def work(rank: int) -> list[str]:
        said = []
        with pytest.raises(ooc.OocError) as raised:
            _trainer(ooc.open(copies[rank]))
        said.append(str(raised.value))
        with pytest.raises((ooc.OocError, OSError)) as failed:
            _on_links(store, spill_dir=tmp_path / ("links", "file")[rank])
        return [*said, str(failed.value)]

    first, second = together(2, tmp_path, work)
    assert first == [f"rank 1 has failed: {one}" for one in second] and "in/indices" in second[0]


_OWN = """
from torch_geometric.nn.models import GCN

def make(in_channels, out_channels):
    return GCN(in_channels, 8, 2, out_channels, act="{act}")
"""


def test_commands_and_their_files_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's file, which may be elsewhere on another machine, and options; but for what a machine has itself."""
    met = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(met.port), "WORLD_SIZE": "2"}
    for name, value in (about | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    ooc.convert("synthetic:nodes=5000,edges=20000,features=9,classes=4", tmp_path / "g.ooc")
    for rank, folder in enumerate(("first", "second")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(_OWN.format(act="relu"))
        (tmp_path / folder / "other.py").write_text(_OWN.format(act=("relu", "elu")[rank]))

    def work(rank: int) -> list[Any]:
        os.environ["RANK"] = str(rank)
        os.chdir(tmp_path / ("first", "second")[rank])
        found = []
        for model, more in (("same.py", []), ("other.py", ["--layers", str(2 + rank)])):
            memory = ("100M", "90M")[rank]
            given = ["--model", f"{model}:make", "--epochs", "1", "--memory", memory, "--quiet", *more]
            with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
                found += [main(["train", str(tmp_path / "g.ooc"), *given, "--out", model[:-3]])]
            found += [said.getvalue()]
        return found

    first, second = together(2, tmp_path, work, meet=False)
    line = "the command is not that of rank 0: it differs in --model, --layers"
    assert first[:3] == second[:3] == [0, "", 2]
    assert second[3] == f"ooc: error: rank 1: {line}\n"


def test_globals_that_a_loss_goes_by_are_compared() -> None:
    """As a script's constants: two of them that differ trained silently."""

    def with_globals(**given: Any) -> str:
        loss = FunctionType(_smoothed.__code__, globals() | given)
        return model_snapshot.described(nn.Linear(2, 2), None, {"loss": loss})["loss"]

    assert with_globals() == with_globals() == with_globals(_CASE=None)
    assert with_globals(_SMOOTHING=0.2) != with_globals()
    weights = [torch.tensor([weight, 1.0]) for weight in (1.0, 2.0)]
    assert with_globals(_SMOOTHING=weights[0]) != with_globals(_SMOOTHING=weights[1])


_SMOOTHING = 0.1


def _smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, label_smoothing=_SMOOTHING, reduction="none")


def _scaled(scale: float, outputs: Tensor, labels: Tensor) -> Tensor:
    return scale * F.cross_entropy(outputs, labels, reduction="none")


class Scaled:
    """A loss as a method, with what it goes by."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _scaled(self.scale, outputs, labels)


@pytest.mark.parametrize("make", [lambda scale: partial(_scaled, scale), lambda scale: Scaled(scale).loss])
def test_what_a_loss_is_bound_to_is_compared(make: Callable[[float], Any]) -> None:
    """Of a method two objects that differ trained silently."""
    one, same, other = (model_snapshot.described(nn.Linear(2, 2), None, {"loss": make(s)}) for s in (1.0, 1.0, 2.0))
    assert one == same and one["loss"] != other["loss"]
