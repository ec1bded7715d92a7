# SPDX-License-Identifier: Apache-2.0
"""Several processes train on the full graph what one does, bit for bit: losses, scores, gradients, weights."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.nn import PNAConv, ResGatedGraphConv
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

import ooc
from ooc.engine import exchange, runtime
from ooc.engine.executor import RowPassRun, ShardedPassRun
from ooc.engine.pull_run import SlabBuffers
from ooc.plan.layout.passes import ColumnPass
from ooc.plan.program import received
from ooc.stages import panels
from ooc.storage.store import Store
from ooc.train import sharing
from tests.exactness import layers, models, test_global_attention
from tests.exactness.comparison import make_trainer, tuned_trainer
from tests.exactness.reference import ModelCase
from tests.exactness.test_random_cases import models as any_model
from tests.examples import cases, examples
from tests.graphs import GraphCase, graph_cases, random_data
from tests.prefetch.faults import Faults, faulty_engine
from tests.processes import together

_CASE = GraphCase(nodes=100, edges=600, features=9, self_loops=10, duplicates=14, isolated=4, unlabelled=26)
_EPOCHS = 2
_OF_EVERY_KIND: dict[str, Callable[[int, int], nn.Module]] = {
    "GAT": lambda f, c: GAT(f, 8, 2, c, heads=2, dropout=0.3, jk="cat"),
    "moments": test_global_attention.Attending,
    "products over all rows": test_global_attention.ByHand,
    "aggregated once": models.MODELS["SGC twice"],
    "opaque layers": layers.MODELS["nothing between"],
}
_SHARDED: dict[str, Callable[[int, int], nn.Module]] = {
    "heads": lambda f, c: GAT(f, 9, 3, c, heads=3, v2=True, dropout=0.3, norm="batch_norm"),
    "sums and maxima": models.MODELS["sums and maxima"],
}
_LAYERS: dict[str, layers.Make] = {
    "gated": ResGatedGraphConv,
    "several sums": lambda i, o: PNAConv(i, o, ["mean", "max", "std"], ["identity", "linear"], layers.DEGREES),
    "median": layers.LAYERS["SAGEConv, median"],
}
_BY_EDGES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in cases(("several sums",), _LAYERS)),
    *((name, {"spill_dtype": "bfloat16"}) for name in cases(("gated",), ("gated", "several sums"))),
]
"""Layers that compute something of every edge, by formulas, by autograd or by order."""


@pytest.fixture(autouse=True)
def _as_shared_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long tiles take on a busy machine is to have no part in what is sent."""
    monkeypatch.setattr(sharing, "_WORTH_PLANNING_S", inf)


def _outcome(model: nn.Module, store: Store, *, nearby: bool = False, **options: Any) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with tuned_trainer(model, store, optimizer=optimizer, **options) as trainer:
        return _trained(trainer, nearby=nearby, sharded=options.get("exchange") == "columns" or "link" in options)


def _trained(trainer: ooc.Trainer, *, nearby: bool = False, sharded: bool = False) -> dict[str, Any]:
    records = trainer.fit(_EPOCHS, progress=False)
    plan, last = trainer.plan, records[-1]
    program = "train_and_score" if "train_and_score" in plan.programs else "train"
    titles = [item.title for item in plan.programs[program]]
    assert not sharded or trainer.ranks.count == 1 or any("columns sharded" in title for title in titles)
    assert last.ssd_write_bytes == plan.bytes_written(program)
    if trainer.ranks.count > 1:
        sent = plan.received_bytes(program)
        assert last.received_bytes == sent
        topologies = {side: replace(one, halo=None) for side, one in plan.topologies.items()}
        everything = replace(plan, topologies=topologies).received_bytes(program)
        assert not nearby or sent < everything / 2
    found = {"losses": [one.loss for one in records], "scores": trainer.evaluate()}
    gradients = {f"gradient of {name}": p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return found | gradients | trainer.model.state_dict()


def _assert_same(found: dict[str, Any] | None, alone: dict[str, Any], about: Any) -> None:
    assert found is not None and found.keys() == alone.keys(), about
    for name, value in alone.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, (about, name)


def test_every_kind_of_aggregation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums, attention, maxima, opaque layers whose gradients are scattered; with what each stores. Edges lead to
    rows nearby: processes send each other some rows alone, a few at a time; or some columns or heads of all, with what
    rows bring to them, in several parts."""
    monkeypatch.setattr(exchange, "_AT_ONCE_BYTES", 1000)
    monkeypatch.setattr(received, "_PART_BYTES", 1000)
    data = random_data(_CASE)
    sources, targets = data.edge_index
    data.edge_index = torch.stack([(targets + sources % 9 - 4).clamp(0, _CASE.nodes - 1), targets])
    store = ooc.convert(data, tmp_path / "g.ooc", dtype="float64")

    def made(name: str, rank: int) -> nn.Module:
        torch.manual_seed(rank if name == "GAT" else 0)  # what is not the first's begins as the first's
        return (_OF_EVERY_KIND | _SHARDED)[name](store.num_features, store.num_classes).double()

    def work(rank: int) -> dict[str, dict[str, Any]]:
        found = {}
        for name in _OF_EVERY_KIND | _SHARDED:
            form, nearby = "columns" if name in _SHARDED else "halo", name in _OF_EVERY_KIND and name != "opaque layers"
            options = {"memory": "300M", "threads": 2, "tile_rows": 16, "exchange": form}
            found[name] = _outcome(made(name, rank), store, nearby=nearby, **options)
        return found

    alone = work(0)  # here, so that what is traced and loaded is not by each
    for found in together(2, tmp_path, work):
        for name in alone:
            _assert_same(found[name], alone[name], name)


def test_layers_of_edges_in_float32(tmp_path: Path) -> None:
    """Each of which drops of its input; some pull, and send, what is kept in bfloat16 as it is."""
    store = ooc.convert(random_data(_CASE, dtype=torch.float32), tmp_path / "g.ooc")

    def trainer(name: str, given: dict[str, Any]) -> ooc.Trainer:
        torch.manual_seed(0)
        model = layers.Two(store.num_features, store.num_classes, _LAYERS[name])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        options: dict[str, Any] = {"memory": "300M", "threads": 1, "tile_rows": 16, "input_dropout": 0.2, **given}
        return tuned_trainer(model, store, optimizer=optimizer, **options)

    def work(rank: int) -> list[dict[str, Any]]:
        found = []
        for way in _BY_EDGES:
            with trainer(*way) as one:
                found.append(_trained(one))
        return found

    alone = work(0)
    for found in together(2, tmp_path, work):
        for way, here, there in zip(_BY_EDGES, found, alone, strict=True):
            _assert_same(here, there, way)


@settings(max_examples=examples(2), deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    graph=graph_cases(nodes=st.integers(40, 90), edges=st.integers(0, 300), weighted=st.booleans()),
    model=any_model(),
    count=st.sampled_from([2, 3, 4, 8]),
    slab_columns=st.sampled_from([None, 1, 5]),
    block_rows=st.sampled_from([None, 4, 16]),
    narrow=st.booleans(),
    order=st.sampled_from(["none", "hop"]),
    tiles=st.sampled_from([1, 1, 3]),
    form=st.sampled_from(["columns", "halo", "auto"]),
)
def test_any_case(
    graph: GraphCase,
    model: ModelCase,
    count: int,
    slab_columns: int | None,
    block_rows: int | None,
    narrow: bool,
    order: Any,
    tiles: int,
    form: str,
) -> None:
    """In hop order some processes have no rows of a stage. Panels have several ``tiles``, where these are many."""
    dtype = torch.float32 if narrow else torch.float64
    graph = GraphCase(**{**graph.__dict__, "weighted": graph.weighted and model.kind == "gcn"})
    options: dict[str, Any] = {"tile_rows": 4 // tiles, "slab_columns": slab_columns, "block_rows": block_rows}
    options["exchange"] = form
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = "float32" if narrow else "float64"
        store = ooc.convert(random_data(graph, dtype=dtype), folder / "g.ooc", dtype=kept, order=order)

        def work(rank: int) -> dict[str, Any]:
            budgets = {"gpu_budget": "20M", "host_budget": "160M"}
            with make_trainer(model, store, folder, dtype=dtype, threads=1, **budgets, **options) as trainer:
                return _trained(trainer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panels, "PANELS", 32 // tiles)
            alone = work(0)
            for rank, found in enumerate(together(count, folder, work)):
                _assert_same(found, alone, rank)


def test_scores_of_ranks_and_a_limit_on_memory(tmp_path: Path) -> None:
    """What ranks all rows gathers them. Memory is that of all processes, and too little is refused by all of them. By
    links that are slow columns are sharded, which is less than all rows."""
    data = random_data(GraphCase(nodes=150, edges=3000, features=9))
    data.y = data.y.clamp(max=1)
    store = ooc.convert(data, tmp_path / "g.ooc")

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = GCN(store.num_features, 8, 3, 2)
        with pytest.raises(ooc.BudgetError, match="memory="):
            tuned_trainer(model, store, memory="20K", threads=1, tile_rows=8)
        return _outcome(model, store, memory="100M", metric="roc-auc", threads=1, tile_rows=8, link="10K")

    alone = work(0)
    for found in together(3, tmp_path, work):
        _assert_same(found, alone, "roc-auc")


def test_more_processes_than_panels_of_rows_are_refused(tmp_path: Path) -> None:
    store = ooc.convert(random_data(replace(_CASE, nodes=150)), tmp_path / "g.ooc")

    def work(rank: int) -> str:
        with pytest.raises(ooc.OptionError) as raised:
            tuned_trainer(GCN(store.num_features, 8, 2, store.num_classes), store, memory="100M", tile_rows=128)
        return str(raised.value)

    for found in together(3, tmp_path, work):
        assert "3 processes are too many" in found and "at most 2, as each takes whole panels of 128 rows" in found


def test_what_is_slow_is_planned_anew(tmp_path: Path) -> None:
    """Who is slower than others gets fewer rows; where all compute longer than forecast, no columns are sharded for
    links that are fast beside that."""
    store = ooc.convert(random_data(GraphCase(nodes=150, edges=3000, features=9)), tmp_path / "g.ooc")

    def slowed(patch: pytest.MonkeyPatch, seconds: float) -> None:
        for kind in (RowPassRun, ShardedPassRun):

            def slowly(run: Any, task: Any, compute: Callable[[Any, Any], Any] = kind.compute) -> Any:
                sleep(seconds)
                return compute(run, task)

            patch.setattr(kind, "compute", slowly)
        patch.setattr(sharing, "_WORTH_PLANNING_S", 0.1)
        patch.setattr(panels, "_MESSAGE_BYTES", 2000)  # then some panels are told together, not all

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = GCN(store.num_features, 8, 3, store.num_classes, dropout=0.2)
        options: dict[str, Any] = {"memory": "100M", "threads": 1, "tile_rows": 5, "link": "20M"}
        with pytest.MonkeyPatch.context() as patch, tuned_trainer(model, store, **options) as trainer:
            slowed(patch, 0.01 if rank == 1 else 0.002)
            first = trainer.plan
            losses = [one.loss for one in trainer.fit(2, progress=False)]
            sharded = [bool(sharing._sharded(plan)) for plan in (first, trainer.plan)]
            return {"losses": losses, "rows": len(trainer.plan.share or ()), "sharded": sharded}

    alone = work(0)
    first, slow, other = together(3, tmp_path, work)
    for one in (first, slow, other):
        assert (one["losses"], one["sharded"]) == (alone["losses"], [True, False])
    assert slow["rows"] < min(first["rows"], other["rows"])


def test_slabs_by_way_of_disks_and_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs are sent while the one before them is pulled, or sharded, those of a turn amid the one before it. What
    two keep of the first aggregation is what one finds. The process whose disk is full says so itself; the other one
    knows who it was, whatever it waits for."""
    store = ooc.convert(random_data(GraphCase(nodes=600, edges=2400, features=30)), tmp_path / "g.ooc")
    sent_ahead, send = [], SlabBuffers.send_ahead

    def noted(buffers: SlabBuffers, slab: int) -> None:
        sent_before = len(buffers._sent)
        send(buffers, slab)
        sent_ahead.append(len(buffers._sent) > sent_before)

    def train(**options: Any) -> list[float]:
        torch.manual_seed(0)
        model = GraphSAGE(store.num_features, 24, 3, store.num_classes)
        with tuned_trainer(model, store, spill_dir=tmp_path, threads=1, tile_rows=16, **options) as trainer:
            plan, records = trainer.plan, trainer.fit(2, eval_every=0, progress=False)
            if options.get("exchange") == "columns":
                columns = [one for one in plan.programs["train"] if isinstance(one, ColumnPass)]
                assert plan.unrolled["train"].fill and max(one.turns_at_once for one in columns) == 2
            assert trainer.ranks.count == 1 or records[-1].received_bytes == plan.received_bytes("train")
            return [one.loss for one in records]

    def work(rank: int, full: bool) -> tuple[Any, ...]:
        tight: dict[str, Any] = {"gpu_budget": "470K", "host_budget": "2267K", "slab_columns": 5, "exchange": "halo"}
        turns: dict[str, Any] = {"gpu_budget": "550K", "host_budget": "2267K", "slab_columns": 3, "exchange": "columns"}
        monkeypatch.setattr(SlabBuffers, "send_ahead", noted)
        if full and rank == 1:
            disk = faulty_engine(Faults(full=1.0), depth=4, bulk_depth=2, piece_bytes=64 << 10)
            monkeypatch.setattr(runtime, "choose_engine", lambda *folders: (disk, ""))
        try:
            return train(**tight), any(sent_ahead), None if full else train(**turns)
        except ooc.OocError as error:
            return type(error).__name__, str(error)

    found = together(2, tmp_path, lambda rank: work(rank, False))
    assert [*(store.path / "agg").glob("*/c")]
    (alone,) = together(1, tmp_path, lambda rank: train(memory="100M"))
    assert found == [(alone, True, alone)] * 2
    first, second = together(2, tmp_path, lambda rank: work(rank, True))
    assert first == ("RankError", "rank 1 has failed") and second[0] == "SpillError"
