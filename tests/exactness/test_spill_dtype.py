# SPDX-License-Identifier: Apache-2.0
"""Intermediates in bfloat16: results close to those in full precision, and the same bits whatever the budgets."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch_geometric.nn import ResGatedGraphConv

import ooc
from ooc.errors import OptionError
from ooc.kernels import pulls
from ooc.kernels.pulls import are_compiled
from ooc.model.layers.per_edge import EdgeAggregate
from ooc.plan import Plan
from ooc.storage.store import Store
from tests.exactness.comparison import in_turn, least, make_trainer, store_of
from tests.exactness.reference import CustomCase, ModelCase
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=500, edges=3100, features=24, self_loops=20, isolated=25, duplicates=60, unlabelled=125)
MODELS = {
    "gcn": ModelCase(kind="gcn", layers=3, hidden=40, dropout=0.3),
    "sage": ModelCase(kind="sage", layers=3, hidden=40, dropout=0.3, input_dropout=0.2),
}
HALF = {"spill_dtype": "bfloat16", "tile_rows": 64, "dtype": torch.float32}


class _Gates(torch.nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = ResGatedGraphConv(features, 24), ResGatedGraphConv(24, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.second(self.first(x, edge_index).relu(), edge_index))


OF_EDGES = {
    "max": ModelCase(kind="sage", layers=2, hidden=40, dropout=0.3, options={"aggr": "max"}),
    "gates": CustomCase(make=_Gates),
}


def outcome(
    case: ModelCase,
    folder: Path,
    *,
    epochs: int = 3,
    store: Store | None = None,
    plans: list[Plan] | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of some epochs, the gradients of the last, and the bytes that it wrote. ``store``: of ``GRAPH``, where
    there is one already; ``plans``: to which the trainer's is put."""
    store = store_of(random_data(GRAPH, dtype=torch.float32), folder) if store is None else store
    with make_trainer(case, store, folder, **options) as trainer:
        if plans is not None:
            plans.append(trainer.plan)
        records = trainer.fit(epochs=epochs, eval_every=0)
        gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
        return [record.loss for record in records], gradients, records[-1].ssd_write_bytes


@pytest.mark.parametrize(("name", "dtype"), in_turn(MODELS, {"float32": torch.float32, "float64": torch.float64}))
def test_budgets_slabs_and_blocks_change_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rounding happens wherever a matrix waits: in a region, in a frame, on the SSD, or nowhere between two steps.

    In float32 what is pulled waits as bfloat16 in regions too; in float64 it is widened there.
    """
    case, half = MODELS[name], HALF | {"dtype": dtype}
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    scarce = least(case, store, tmp_path, **half)
    gpu, host = scarce["gpu_budget"], scarce["host_budget"]
    losses, gradients, written = outcome(case, tmp_path, epochs=2, store=store, **half)
    assert written == 0
    wrote = []
    plans: list[dict[str, Any]] = [
        scarce,
        {"slab_columns": 7, "gpu_budget": int(1.3 * gpu), "host_budget": host},
        {"slab_columns": 16, "block_rows": 64},
    ]
    for options in plans:
        other = outcome(case, tmp_path, epochs=2, store=store, **half, **options)
        assert other[0] == losses, options
        assert all(torch.equal(other[1][name], gradients[name]) for name in gradients), options
        wrote.append(other[2])
    assert wrote[0] > 0


@pytest.mark.parametrize("case", OF_EDGES.values(), ids=OF_EDGES.keys())
def test_loops_over_edges_pull_what_is_kept_as_it_is(
    case: ModelCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits that they compute where it is widened first; torch's operators get it widened."""
    tight = {"slab_columns": 8, "block_rows": 64, "gpu_budget": "3M", "host_budget": "1M"}

    def trained(**options: Any) -> tuple[set[int], tuple[list[float], dict[str, torch.Tensor], int]]:
        plans = list[Plan]()
        found = outcome(case, tmp_path, epochs=2, plans=plans, **HALF, **options)
        pulled = {item.pull.source for passes in plans[0].programs.values() for item in passes if item.pull}
        matrices = [plans[0].matrices[name] for name in pulled]
        return {one.region_itemsize for one in matrices if one.matrix.itemsize == 2}, found

    def same(one: tuple[Any, dict[str, torch.Tensor], int], other: tuple[Any, dict[str, torch.Tensor], int]) -> bool:
        return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])

    narrow = trained()
    assert same(trained(**tight)[1], narrow[1])
    with monkeypatch.context() as patched:
        patched.setattr(EdgeAggregate, "takes_narrow", False)
        wide = trained(**tight)
    assert same(wide[1], narrow[1])
    assert wide[0] == {4} and narrow[0] == ({2} if are_compiled() else {4})
    monkeypatch.setitem(pulls.BY_DEVICE, "cpu", pulls.of_torch)
    plain = trained()
    assert plain[0] == {4} and plain[1][0] == pytest.approx(narrow[1][0], rel=1e-3)


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_losses_and_gradients_are_near_those_in_full_precision(case: ModelCase, tmp_path: Path) -> None:
    """bfloat16 has 8 bits of precision: each rounding errs by up to 0.4 %, and errors of many rows cancel."""
    full = outcome(case, tmp_path, epochs=1, **{**HALF, "spill_dtype": None})
    half = outcome(case, tmp_path, epochs=1, **HALF)
    assert half[0] == pytest.approx(full[0], rel=5e-3)
    for name, gradient in full[1].items():
        assert (half[1][name] - gradient).norm() <= 0.03 * gradient.norm(), name


def test_weights_of_edges_are_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pulled is then widened first: sums of bfloat16 take weights of bfloat16."""
    monkeypatch.setitem(globals(), "GRAPH", replace(GRAPH, weighted=True))
    case = MODELS["gcn"]
    losses, gradients, _ = outcome(case, tmp_path, **HALF)
    tight = {"slab_columns": 7, "block_rows": 64, "gpu_budget": "2M", "host_budget": "1M"}
    other = outcome(case, tmp_path, **HALF, **tight)
    assert other[0] == losses and all(torch.equal(other[1][name], gradients[name]) for name in gradients)
    with make_trainer(case, ooc.open(tmp_path / "graph.ooc"), tmp_path, **HALF) as trainer:
        matrices = trainer.plan.matrices
        assert {matrices[name].region_itemsize for name in matrices if name.startswith("m")} == {4}
    full = outcome(case, tmp_path, epochs=1, **{**HALF, "spill_dtype": None})
    assert losses[:1] == pytest.approx(full[0], rel=5e-3)


def test_what_is_kept_for_other_runs_is_not_rounded(tmp_path: Path) -> None:
    """A run in full precision takes the first aggregation that one in bfloat16 has left in the store."""
    case = ModelCase(kind="sage", layers=2, hidden=16)
    full = {**HALF, "spill_dtype": None}
    fresh, used = tmp_path / "fresh", tmp_path / "used"
    fresh.mkdir()
    used.mkdir()
    outcome(case, used, epochs=1, **HALF, slab_columns=8, gpu_budget="1M", host_budget="1M")
    assert (used / "graph.ooc" / "agg").is_dir()
    again = ooc.open(used / "graph.ooc")
    with make_trainer(case, again, used, **full) as trainer:
        assert not trainer.plan.programs["prepare"]
        losses = [record.loss for record in trainer.fit(epochs=2, eval_every=0)]
    assert losses == outcome(case, fresh, epochs=2, **full)[0]


def test_half_the_bytes_are_written(tmp_path: Path) -> None:
    """Everything a GCN keeps between passes is an intermediate."""
    case = MODELS["gcn"]
    cut = {"gpu_budget": "1200K", "host_budget": "40K", "block_rows": 64, "slab_columns": 8}
    full = outcome(case, tmp_path, **{**HALF, "spill_dtype": None}, **cut)[2]
    half = outcome(case, tmp_path, **HALF, **cut)[2]
    assert half <= 0.55 * full


@pytest.mark.parametrize(
    ("name", "reason"), [("float16", "small gradients"), ("int8", "not one of"), ("float64", "wider")]
)
def test_what_would_not_be_right_is_refused_by_name(name: str, reason: str, tmp_path: Path) -> None:
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    with pytest.raises(OptionError, match=f"{name}.*{reason}"):
        make_trainer(MODELS["gcn"], store, tmp_path, dtype=torch.float32, spill_dtype=name)


COMPUTED = MODELS | {"gat": ModelCase(kind="gat", layers=2, hidden=40, options={"heads": 2})}


@pytest.mark.parametrize("case", COMPUTED.values(), ids=COMPUTED.keys())
def test_products_in_bfloat16_are_near_those_in_full(case: ModelCase, tmp_path: Path) -> None:
    """Their factors are rounded, their sums are not; and again budgets change no bit."""
    full = {**HALF, "spill_dtype": None}
    half = {**full, "compute_dtype": "bfloat16"}
    losses, gradients, _ = outcome(case, tmp_path, epochs=1, **full)
    found, near, _ = outcome(case, tmp_path, epochs=1, **half)
    assert found != losses and found == pytest.approx(losses, rel=5e-3)
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():  # those that all but cancel out cannot be compared with themselves
        bound = 0.05 * max(float(gradient.norm()), 0.1 * largest)
        assert 0 < (near[name] - gradient).norm() <= bound, name
    tight = {"slab_columns": 8, "block_rows": 64, "gpu_budget": "3M", "host_budget": "1M"}
    again = outcome(case, tmp_path, epochs=1, **half, **tight)
    assert again[0] == found and all(torch.equal(again[1][name], near[name]) for name in near)


def test_the_type_of_products_is_refused_by_name(tmp_path: Path) -> None:
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    with pytest.raises(OptionError, match="compute dtype 'float16' is not one of float32, bfloat16; float16 would"):
        make_trainer(MODELS["gcn"], store, tmp_path, dtype=torch.float32, compute_dtype="float16")
