# SPDX-License-Identifier: Apache-2.0
"""Running the trainer and the reference side by side."""

import copy
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import ooc
from ooc.errors import BudgetError
from ooc.plan.program.plan import Plan
from ooc.sizes import parse_size
from ooc.storage.store import Store
from ooc.train.job import Job
from ooc.train.trainer import Saving, Trainer, Tuning
from tests.exactness.reference import (
    Epoch,
    ModelCase,
    OptimizerFactory,
    Reference,
    adam,
    buffers_of,
    disagreement,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
ILL_CONDITIONED = 10
"""Times what PyG's result differs by itself if the last bits of its parameters change, may ours differ from it: a
batch norm over few rows of nearly the same values makes a difference of 1e-16 one of 1e-9."""
MOST_EVER = 100
"""Times the tolerance, and no more than that."""
FLOOR = {torch.float64: 1e-3, torch.float32: 1e-2}
EPOCHS = 2
TILE_ROWS = 8


_converted: dict[str, Path] = {}
"""By what was converted: stores that nobody changes."""
_folder = tempfile.TemporaryDirectory(prefix="ooc-converted-")


def store_of(data: Data | HeteroData, folder: Path, *, linked: bool = False) -> Store:
    """``data`` converted in its own precision, edges exactly as they are; once, and copied from then on, or its arrays
    ``linked`` to, for who changes none of them: copying its 68 files and folders takes as long as planning."""
    digest, dtype = sha256(), "float64"
    for part in data.stores:
        digest.update(repr(part._key).encode())
        for name, one in part.items():
            if name == "x":
                dtype = str(one.dtype).removeprefix("torch.")
            is_tensor = isinstance(one, Tensor)
            digest.update(repr((name, one.dtype, one.shape) if is_tensor else (name, one)).encode())
            digest.update(one.contiguous().numpy() if is_tensor else b"")
    key, path = digest.hexdigest(), folder / "graph.ooc"
    if key not in _converted:
        _converted[key] = ooc.convert(data, Path(_folder.name) / f"{key}.ooc", dtype=dtype).path
    if path.exists():
        shutil.rmtree(path)
    if not linked:
        shutil.copytree(_converted[key], path)
        return ooc.open(path)
    path.mkdir()
    for entry in _converted[key].iterdir():
        if entry.is_dir():
            (path / entry.name).symlink_to(entry)
        else:
            shutil.copy(entry, path)
    return ooc.open(path)


def tuned_trainer(
    *arguments: Any, tile_rows: int | None = None, savings: Collection[Saving] = tuple(Saving), **options: Any
) -> Trainer:
    """A trainer with tiles and savings as tests vary them."""
    return Trainer(*arguments, _tuning=Tuning(tile_rows=tile_rows, savings=savings), **options)


def in_turn(names: Iterable[str], ways: dict[str, Any], *, all_ways: Collection[str] = ()) -> list[Any]:
    """Parameters (name, way): every name with one of the ``ways``, in turn, and those of ``all_ways`` with each."""
    return [
        pytest.param(name, way, id=f"{name}-{what}")
        for number, name in enumerate(names)
        for which, (what, way) in enumerate(ways.items())
        if name in all_ways or which == number % len(ways)
    ]


DIRECTIONS = {"directed": False, "undirected": True}


def make_trainer(
    case: ModelCase,
    store: Store,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float64,
    make_optimizer: OptimizerFactory = adam,
    **options: Any,
) -> Trainer:
    """A trainer of a new model; with small tiles (unless told otherwise), so that tiny graphs have many."""
    model = case.build(store.num_features, store.num_classes, dtype=dtype)
    options = {"gpu_budget": "64M", "host_budget": "64M", "tile_rows": TILE_ROWS} | options
    spill = folder / "spill"
    spill.mkdir(exist_ok=True)
    return tuned_trainer(
        model,
        store,
        optimizer=make_optimizer(model),
        input_dropout=case.input_dropout,
        spill_dir=spill,
        **options,
    )


def train_epoch(trainer: Trainer, records: list[Any] | None = None) -> Epoch:
    """One more epoch, and the gradients it leaves in the parameters; its record is put to those of others."""
    (record,) = trainer.fit(epochs=1, eval_every=0)
    if records is not None:
        records.append(record)
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return Epoch(record.loss, gradients, buffers_of(trainer.model))


def two_epochs(case: ModelCase, store: Store, folder: Path, **options: Any) -> tuple[Any, ...]:
    """Two epochs, their records, the plan, and what is left in the folder for what spills."""
    records = list[Any]()
    with make_trainer(case, store, folder, **options) as trainer:
        epochs = [train_epoch(trainer, records) for _ in range(2)]
    return epochs, records, trainer.plan, list((folder / "spill").iterdir())


def assert_agrees(
    case: ModelCase,
    data: Data,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float64,
    make_optimizer: OptimizerFactory = adam,
    seed: int = 0,
    epochs: int = EPOCHS,
    store: Store | None = None,
    **options: Any,
) -> Plan:
    """Losses, all gradients and buffers of ``epochs`` epochs are PyG's, and so is evaluation after them → the plan.

    ``store``: ``data`` converted, where that has been done already.
    """
    store = store_of(data, folder, linked=True) if store is None else store
    with make_trainer(case, store, folder, dtype=dtype, make_optimizer=make_optimizer, seed=seed, **options) as trainer:
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        reference = Reference(case, trainer.model, data, make_optimizer, seed)
        for epoch in range(1, epochs + 1):
            expected = reference.train()
            difference, whose = disagreement(train_epoch(trainer), expected, floor=FLOOR[dtype])
            allowed = TOLERANCE[dtype]
            if difference > allowed:
                changed = with_last_bits_changed(trainer.model, start)
                shaken = Reference(case, changed, data, make_optimizer, seed)
                itself, _ = disagreement([shaken.train() for _ in range(epoch)][-1], expected, floor=FLOOR[dtype])
                allowed = min(max(allowed, ILL_CONDITIONED * itself), MOST_EVER * allowed)
            assert difference <= allowed, f"epoch {epoch}: {whose} differs by {difference:.1e}, {allowed:.1e} allowed"
        scores = trainer.evaluate()
    expected_scores = reference.accuracies()
    assert {name: scores[name] for name in expected_scores} == expected_scores
    return trainer.plan


@torch.no_grad()
def with_last_bits_changed(model: torch.nn.Module, start: dict[str, Tensor]) -> torch.nn.Module:
    """A copy of ``model`` as it was at the ``start``, with parameters a few units in the last place larger."""
    model = copy.deepcopy(model)
    model.load_state_dict(start)
    for parameter in model.parameters():
        parameter.mul_(1 + 4 * torch.finfo(parameter.dtype).eps)
    return model


def least_budgets(build: Callable[[str, str], Trainer]) -> tuple[int, int]:
    """The gpu and host budget that the errors of too small ones name as the least that would do; bytes. The model is
    lowered once, and planned for one budget after the other."""

    def ask(job: Job) -> NoReturn:
        host, resources = 1, job.resources
        for _ in range(3):
            with pytest.raises(BudgetError) as raised:
                job.plan(replace(resources.limits, device_bytes=1, host_bytes=host), resources.hardware)
            named = dict(re.findall(r"(gpu|host)_budget='(\d+[KMG]?)", str(raised.value)))
            assert named, f"no remedy in: {raised.value}"
            host = parse_size(named.get("host", str(host)))
            if "gpu" in named:
                raise _Named(parse_size(named["gpu"]), host)
        raise AssertionError(f"a host budget of {host} was named as enough and is not")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "ready", ask)
        try:
            build("1", "1")
        except _Named as named:
            return named.args
    raise AssertionError("a trainer was made without a plan")


def least(case: ModelCase, store: Store, folder: Path, **options: Any) -> dict[str, Any]:
    """The least budgets that would do, and blocks as low as tiles where ``options`` say nothing of their height: of
    other heights the search for the least memory would only take longer."""
    block_rows = options.pop("block_rows", options.get("tile_rows", TILE_ROWS))

    def build(gpu: str, host: str) -> Trainer:
        return make_trainer(case, store, folder, gpu_budget=gpu, host_budget=host, block_rows=block_rows, **options)

    gpu, host = least_budgets(build)
    return {"gpu_budget": gpu, "host_budget": host, "block_rows": block_rows}


class _Named(Exception):
    """The least budgets, as an error has named them."""

    args: tuple[int, int]
