# SPDX-License-Identifier: Apache-2.0
"""Training on many graphs: PyG's steps of the same batches, whatever the memory; resumed, an undisturbed run's."""

import copy
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, GPSConv, LayerNorm, Set2Set, global_add_pool, global_mean_pool
from torch_geometric.nn.models import GAT, GCN, GIN, JumpingKnowledge, SchNet
from torch_geometric.transforms import TwoHop
from torch_geometric.utils import coalesce, remove_self_loops

import ooc
from ooc.cli import main
from ooc.errors import TrainingError
from ooc.events import Event, TaskAdvanced
from ooc.models import Pooled
from ooc.plan.hardware import UNMEASURED
from ooc.sampling.graphs import GraphLoader, Size
from ooc.sizes import parse_size
from ooc.storage.store import Store, Task
from ooc.train.batched.graphs import GraphTrainer, LargestNumbers, fitting_batches
from tests.examples import ordinary, thorough
from tests.graphs import many_graphs
from tests.processes import together

_GRAPHS = {labels: many_graphs(80, labels=labels) for labels in ("values", "classes", "answers")}
_OUTPUTS = {"values": 2, "classes": 3, "answers": 2}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    folder = tmp_path_factory.mktemp("graphs")
    return {
        labels: ooc.convert(graphs, folder / f"{labels}.ooc", dtype="float64") for labels, graphs in _GRAPHS.items()
    }


def _model(
    labels: str = "values", *, paths: int = 0, hops: int = 0, pool: str = "mean", kind: Any = GIN, **options: Any
) -> Pooled:
    torch.manual_seed(1)
    return Pooled(kind(3, 8, 2, **options), 8, _OUTPUTS[labels], pool=pool, paths=paths, hops=hops).double()


def _batch(labels: str, graphs: Any, paths: int = 0, hops: int = 0) -> Data:
    """PyG's batch; its paths by a loader of that graph list alone, which has its own test."""
    batch = Batch.from_data_list([_GRAPHS[labels][graph] for graph in graphs])
    if paths:
        found = batch.edge_index.T.tolist()
        walks = [(a, b) for a, b in found if a != b]
        for _ in range(paths - 1):
            walks = [(*walk, b) for walk in walks for a, b in found if a == walk[-1] and b not in walk[-2:]]
        batch.path_index = torch.tensor(walks, dtype=torch.int64).reshape(-1, paths + 1).T
    if hops:
        # Once: of edges that are there twice PyG's product takes memory that is not its own.
        bare = Data(edge_index=coalesce(batch.edge_index), num_nodes=batch.num_nodes)
        batch.hop_index, _ = remove_self_loops(TwoHop()(bare).edge_index)
    return batch


def _known(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, y: loss(out[~y.isnan()], y[~y.isnan()])


_WEIGHTED = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))
_CASES = [
    ("values", {"batch_size": 7}, None, F := nn.functional.mse_loss, {"pool": "add"}),
    ("values", {"batch_nodes": 60, "accumulate": 3}, nn.L1Loss(), nn.functional.l1_loss, {"norm": "layer_norm"}),
    ("values", {"batch_paths": 900, "paths": 3, "hops": 2}, None, F, {"pool": "max"}),
    ("classes", {"batch_edges": 90, "paths": 2}, None, nn.functional.cross_entropy, {"norm": "batch_norm"}),
    ("classes", {"batch_size": 9, "accumulate": 2}, _WEIGHTED, _WEIGHTED, {}),
    ("answers", {"batch_size": 9, "accumulate": 2}, None, _known(nn.functional.binary_cross_entropy_with_logits), {}),
    ("values", {"batch_size": 7}, None, F, {"kind": GAT, "edge_dim": 2}),
    ("values", {"batch_size": 7}, nn.MSELoss(reduction="sum"), lambda out, y: F(out, y, reduction="sum"), {}),
]  # fmt: skip


def test_compiled_models_are_taken_as_they_were(stores: dict[str, Store]) -> None:
    """Also where memory is counted."""
    losses = []
    for made in (_model("values"), torch.compile(_model("values"), backend="eager")):
        given = {"batch_size": 7, "ignore_edge_data": "features", "memory": "60M"}
        with GraphTrainer(made, stores["values"], **given) as trainer:
            losses.append([record.loss for record in trainer.fit(1, eval_every=0, progress=False)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("labels", "bounds", "loss", "pygs", "options"), _CASES)
def test_steps_are_pygs_of_the_same_batches(
    stores: dict[str, Store], labels: str, bounds: dict[str, int], loss: Any, pygs: Any, options: dict[str, Any]
) -> None:
    store, made = stores[labels], {name: bounds.get(name, 0) for name in ("paths", "hops")}
    model, reference = (_model(labels, **made, **options) for _ in range(2))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    taken = ["edge_attr"] if "edge_dim" in options else []
    ignored = "none" if taken else "features"
    given = {"loss": loss, "optimizer": sgd, "ignore_edge_data": ignored, "seed": 5, **bounds}
    with GraphTrainer(model, store, memory="60M", **given) as trainer:
        order = [trainer.loader.batches_of(epoch) for epoch in range(2)]
        losses = [record.loss for record in trainer.fit(2, eval_every=0, progress=False)]
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3, momentum=0.9)
    a_step, norms = bounds.get("accumulate", 1), "batch_norm" in options.values()
    for batches, found in zip(order, losses, strict=True):
        sums, weights = 0.0, 0.0
        for first in range(0, len(batches), a_step):
            parts = [_batch(labels, graphs, **made) for graphs in batches[first : first + a_step]]
            assert not norms or a_step == 1
            outputs = torch.cat([_outputs(reference, part, *taken) for part in parts])
            y = torch.cat([part.y for part in parts])
            value = pygs(outputs, y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            weight = _weight(loss, labels, y)
            sums, weights = sums + value.item() * weight, weights + weight
        assert found == pytest.approx(
            sums if getattr(loss, "reduction", "mean") == "sum" else sums / weights, rel=1e-11
        )
    for one, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def _outputs(model: nn.Module, batch: Data, *taken: str) -> Tensor:
    given = {name: batch[name] for name in ("path_index", "hop_index", *taken) if name in batch}
    out: Tensor = model(batch.x, batch.edge_index, batch.batch, **given)
    return out


def _weight(loss: Any, labels: str, y: Tensor) -> float:
    if getattr(loss, "reduction", "mean") == "sum":
        return 1.0
    if getattr(loss, "weight", None) is not None:
        return float(loss.weight[y].sum())
    return float((~y.isnan()).sum()) if labels == "answers" else float(len(y))


@pytest.mark.parametrize("bounds", [{"batch_size": 5}, {"batch_nodes": 30}, {"batch_paths": 500}])
def test_over_a_whole_epoch_gradients_are_those_of_all_graphs(stores: dict[str, Store], bounds: dict[str, int]) -> None:
    store, model, reference = stores["values"], _model(paths=3), _model(paths=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"optimizer": optimizer, "ignore_edge_data": "features", "paths": 3, "accumulate": 10**9}
    before = [parameter.clone() for parameter in model.parameters()]
    with GraphTrainer(model, store, memory="60M", **bounds, **given) as trainer:
        (record,) = trainer.fit(1, eval_every=0, progress=False)
    train = np.flatnonzero(store.array("split/train").read())
    batch = _batch("values", train, 3)
    value = nn.functional.mse_loss(_outputs(reference, batch), batch.y)
    value.backward()
    assert record.loss == pytest.approx(value.item(), rel=1e-12)
    for was, now, wanted in zip(before, model.parameters(), reference.parameters(), strict=True):
        assert wanted.grad is not None
        torch.testing.assert_close(was - now, wanted.grad, rtol=1e-9, atol=1e-12)


def _fit(model: nn.Module, store: Store, epochs: int = 2, **options: Any) -> list[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    given = {"memory": "100M", "batch_size": 10, "ignore_edge_data": "features", "optimizer": optimizer} | options
    with GraphTrainer(model, store, **given) as trainer:
        return trainer.fit(epochs, progress=False)


@pytest.mark.parametrize("kind", thorough([GCN, GAT], GAT))
def test_a_step_that_does_not_fit_is_taken_apart_and_changes_no_bit(
    stores: dict[str, Store], tmp_path: Path, kind: Any
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        gnn = kind(3, 128, 4, dropout=0.5, norm="batch_norm")
        return Pooled(gnn, 128, 2, paths=3).double()

    options = {"batch_size": 60, "paths": 3, "spill_dir": tmp_path}
    with pytest.raises(ooc.BudgetError, match=r"for the model, and need .*; give memory='\w+'") as caught:
        _fit(model(), stores["values"], memory="2M", **options)
    least = parse_size(str(caught.value).split("memory='")[1].split("'")[0])
    ample, scarce = model(), model()
    optimizer = torch.optim.Adam(ample.parameters(), lr=0.02)
    given = {"memory": "100M", "ignore_edge_data": "features", "optimizer": optimizer}
    with GraphTrainer(ample, stores["values"], **given, **options) as trainer:
        records = trainer.fit(2, progress=False)
        assert trainer._saving is None and least < trainer.loader.plan.least_bytes
    notes: list[str] = []
    others = _fit(scarce, stores["values"], memory=least, listener=lambda event: notes.append(str(event)), **options)
    assert [one.loss for one in records] == [one.loss for one in others]
    assert [one.valid_score for one in records] == [one.valid_score for one in others]
    assert all(map(torch.equal, ample.state_dict().values(), scarce.state_dict().values()))
    assert any("does not fit" in note for note in notes) and list(tmp_path.iterdir()) == []


class Recurrent(nn.Module):
    """A cell that is called several times, or sequences."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made: dict[str, Callable[[], nn.Module]] = {
            "GRUCell": lambda: nn.GRUCell(32, 32),
            "Set2Set": lambda: Set2Set(32, 3),
            "JumpingKnowledge": lambda: JumpingKnowledge("lstm", 32, 2),
        }
        self.kind, self.into, self.part, self.out = kind, nn.Linear(3, 32), made[kind](), nn.Linear(64, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        h = self.into(x)
        if self.kind == "JumpingKnowledge":
            h = self.part([h, h.relu(), h.tanh()])
        elif self.kind == "GRUCell":
            for _ in range(3):
                h = self.part(h, h)
        pooled = self.part(h, batch) if self.kind == "Set2Set" else global_mean_pool(torch.cat([h, h], dim=1), batch)
        out: Tensor = self.out(pooled)
        return out


class OfData(nn.Module):
    """Has norms that count the graphs themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norms, self.out = (
            nn.Linear(3, 32),
            nn.ModuleList(LayerNorm(32) for _ in range(4)),
            nn.Linear(32, 2),
        )

    def forward(self, data: Data) -> Tensor:
        h = self.into(data.x)
        for norm in self.norms:
            h = norm(h, data.batch).relu()
        out: Tensor = self.out(global_mean_pool(h, data.batch))
        return out


def _is_alike_in_the_least_memory(model: nn.Module, store: Store, **options: Any) -> None:
    with pytest.raises(ooc.BudgetError) as caught:
        _fit(copy.deepcopy(model), store, memory="100K", epochs=1, **options)
    least = parse_size(str(caught.value).split("memory='")[1].split("'")[0])
    ample, scarce = copy.deepcopy(model), copy.deepcopy(model)
    records, others = (
        _fit(one, store, 1, memory=memory, **options) for one, memory in ((ample, "60M"), (scarce, least))
    )
    assert [one.loss for one in records] == [one.loss for one in others]
    assert all(map(torch.equal, ample.state_dict().values(), scarce.state_dict().values()))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    ordinary(
        product(("GRUCell", "Set2Set", "JumpingKnowledge"), ("float32", "float64")),
        *(("GRUCell", "float32"), ("Set2Set", "float64"), ("JumpingKnowledge", "float32")),
    ),
)
def test_recurrence_is_trained_alike_in_the_least_memory(
    kind: str, dtype: str, stores: dict[str, Store], tmp_path: Path
) -> None:
    """torch writes gates in place, each with a version of its own. What sequences save is not counted beforehand."""
    torch.manual_seed(1)
    model = Recurrent(kind).to(getattr(torch, dtype))
    _is_alike_in_the_least_memory(model, stores["values"], batch_size=60, spill_dir=tmp_path)


def test_what_lies_in_pygs_data_is_given(tmp_path: Path) -> None:
    """It does not wait on the SSD, and a layer that is run again counts the same graphs in it."""
    store = ooc.convert(many_graphs(240, labels="values"), tmp_path / "g.ooc")
    _is_alike_in_the_least_memory(OfData(), store, batch_size=200, spill_dir=tmp_path)


def test_a_run_that_is_gone_on_with_is_an_undisturbed_one(stores: dict[str, Store], tmp_path: Path) -> None:
    whole = _model(dropout=0.5)
    records = _fit(whole, stores["values"], 4, out=tmp_path / "whole")
    _fit(_model(dropout=0.5), stores["values"], 2, out=tmp_path / "parts")
    model = _model(dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    given = {"memory": "80M", "batch_size": 10, "ignore_edge_data": "features", "optimizer": optimizer}
    with GraphTrainer(model, stores["values"], out=tmp_path / "parts", **given) as trainer:
        later = trainer.fit(4, resume=True, progress=False)
    assert [one.loss for one in records[2:]] == [one.loss for one in later]
    assert all(map(torch.equal, whole.state_dict().values(), model.state_dict().values()))


class Keeping(nn.Module):
    """Leaves in itself what it has computed in training, as SuperGATConv does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.kept = model, list[Tensor]()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        out: Tensor = self.model(x, edge_index, batch)
        self.kept = [out] if self.training else self.kept
        return out


@pytest.mark.parametrize(("labels", "metric"), [("values", "rmse"), ("classes", "accuracy"), ("answers", "roc-auc")])
def test_scores_and_predictions_are_the_models(
    stores: dict[str, Store], tmp_path: Path, labels: str, metric: str
) -> None:
    store, model = stores[labels], Keeping(_model(labels, norm="batch_norm"))
    whole = _batch(labels, range(80))
    given = {"memory": "60M", "batch_nodes": 50, "metric": metric, "ignore_edge_data": "features"}
    with GraphTrainer(model, store, **given) as trainer:
        trainer.fit(1, progress=False, eval_every=0)
        logits, some, scores = trainer.predict(), trainer.predict(graphs=[7, 3, 40]), trainer.evaluate()
        assert model.training and isinstance(logits, Tensor) and isinstance(some, Tensor)
        if labels == "classes":
            trainer.predict("labels", out=tmp_path / "labels.csv")
            lines = (tmp_path / "labels.csv").read_text().splitlines()
            assert lines[0] == "graph,label" and lines[5] == f"4,{int(logits[4].argmax())}"
    outputs = _outputs(model.eval(), whole).detach()
    torch.testing.assert_close(logits, outputs, rtol=1e-11, atol=1e-12)
    assert torch.equal(some, logits[[7, 3, 40]]) or torch.allclose(some, logits[[7, 3, 40]], rtol=1e-12)
    rows = torch.from_numpy(np.flatnonzero(store.array("split/test").read()))
    out, y = outputs[rows], whole.y[rows]
    wanted = {
        "values": lambda: float((out - y).square().mean().sqrt()),
        "classes": lambda: float((out.argmax(1) == y).double().mean()),
        "answers": lambda: float(np.mean([_auc(out[:, k], y[:, k]) for k in range(2)])),
    }[labels]()
    assert scores["test_score"] == pytest.approx(wanted, rel=1e-9)


def _auc(scores: Tensor, y: Tensor) -> float:
    apart = scores[y == 1][:, None] - scores[y == 0]
    return float(((apart > 0) + 0.5 * (apart == 0)).double().mean())


class Twofold(nn.Module):
    """Gives two results, one by one or side by side."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.one, self.other, self.together = _model("classes"), _model("classes"), together

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Any:
        found = self.one(x, edge_index, batch), self.other(x.tanh(), edge_index, batch)
        return torch.cat(found, dim=1) if self.together else found


def test_of_several_results_ones_own_loss_gets_all(stores: dict[str, Store]) -> None:
    def of_both(results: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(results[0], labels, reduction="none") + results[1].square().mean(dim=1)

    def of_columns(outputs: Tensor, labels: Tensor) -> Tensor:
        one, other = outputs.chunk(2, dim=1)
        return of_both((one, other), labels)

    apart = _fit(Twofold(together=False), stores["classes"], loss=of_both)
    together = _fit(Twofold(together=True), stores["classes"], loss=of_columns)
    assert [record.loss for record in apart] == [record.loss for record in together]


@pytest.mark.parametrize("expanded", [False, True])
def test_a_penalty_of_all_graphs_is_given_as_one_of_each(stores: dict[str, Store], expanded: bool) -> None:
    class Penalised(Pooled):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x, edge_index, batch)
            penalty = out.square().mean()
            return out, penalty.expand(len(out), 1) if expanded else penalty

    def penalised(results: Any, labels: Tensor) -> Tensor:
        out, penalty = results if isinstance(results, tuple) else (results, results.square())
        return nn.functional.cross_entropy(out, labels) + penalty.mean()

    torch.manual_seed(1)
    model = Penalised(GIN(3, 8, 2), 8, 3).double()
    options: dict[str, Any] = {"loss": penalised, "batch_size": 80}
    if not expanded:
        with pytest.raises(ooc.ModelError, match=r"give a penalty as one.expand\(len\(out\), 1\)"):
            _fit(model, stores["classes"], **options)
    else:
        plain = Pooled(GIN(3, 8, 2), 8, 3).double()
        plain.load_state_dict(model.state_dict())
        losses = [[one.loss for one in _fit(each, stores["classes"], **options)] for each in (model, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_edges_features_come_to_models_that_take_them(stores: dict[str, Store]) -> None:
    seen: list[torch.Size] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, x: Tensor, edges: Tensor, graph: Tensor, edge_attr: Tensor) -> Tensor:
            seen.append(edge_attr.shape)
            mean = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * edge_attr[:, :1])
            out: Tensor = self.lin(global_mean_pool(mean, graph))
            return out

    class InAnotherOrder(Model):
        def forward(self, x: Tensor, edges: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
            return super().forward(x, edges, batch, edge_attr)

    class InOne(Model):
        def forward(self, data: Data) -> Tensor:  # type: ignore[override]
            assert data.num_graphs == len(data.ptr) - 1 and data.num_nodes == len(data.x)
            return super().forward(data.x, data.edge_index, data.batch, data.edge_attr)

    def trained(kind: type[nn.Module]) -> list[float]:
        torch.manual_seed(0)
        options = {"ignore_edge_data": "none", "compute_dtype": "bfloat16"}
        return [record.loss for record in _fit(kind().double(), stores["values"], **options)]

    assert trained(Model) == trained(InAnotherOrder) == trained(InOne) and seen[-1][1] == 2


class Counted(nn.Module):
    """Means over nodes and edges by the counts of torch's, of which there is none on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        nodes, edges = batch.bincount(), batch[edge_index[0]].bincount(minlength=int(batch[-1]) + 1)
        out: Tensor = self.lin(global_add_pool(x, batch) / nodes[:, None] + edges[:, None])
        return out


class Shortened(Counted):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return super().forward(x, edge_index, batch)[:2]


def test_counts_are_as_large_as_batches(stores: dict[str, Store]) -> None:
    torch.manual_seed(0)
    model = Counted().double()
    with GraphTrainer(model, stores["values"], memory="60M", ignore_edge_data="features") as trainer:
        first, batches = copy.deepcopy(model), trainer.loader.batches_of(0)
        (record,) = trainer.fit(1, eval_every=0, progress=False)
    optimizer, total = torch.optim.Adam(first.parameters(), lr=0.01), 0.0
    for graphs in batches:
        batch = _batch("values", graphs)
        loss = nn.functional.mse_loss(first(batch.x, batch.edge_index, batch.batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch.y)
    assert record.loss == pytest.approx(total / sum(map(len, batches)), rel=1e-12)


def test_numbers_of_graphs_and_of_nodes_are_told_apart_where_one_lies_in_the_others_place() -> None:
    """A tensor made where a number of graphs has been freed counts nodes, as in ``to_dense_adj`` behind a pooling."""
    of_graphs = torch.zeros(9, dtype=torch.int64, device="meta")
    with LargestNumbers(Data(batch=of_graphs), Size(4, 9, 0, 0, 5)):
        for _ in range(9):
            assert int(of_graphs.max()) == int(of_graphs[-1]) == 3
            assert int(of_graphs.new_zeros(4).max()) == int(of_graphs.sort().indices.max()) == 5


class Categories(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return global_mean_pool(self.table(x[:, 0]), batch)


class OfPaths(Categories):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, path_index: Tensor) -> Tensor:  # type: ignore[override]
        raise NotImplementedError


class OfWeights(Categories):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, edge_weight: Tensor) -> Tensor:  # type: ignore[override]
        raise NotImplementedError


class Positions(Categories):
    def forward(self, x: Tensor, pe: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + pe, edge_index, batch)


class Ordered(nn.Module):
    """Takes what a batch has in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pooled(GIN(3, 8, 2), 8, 2)

    def forward(self, batch: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.inner(x, edge_index, batch)
        return out


def test_arguments_may_be_in_any_order(stores: dict[str, Store]) -> None:
    found = []
    for ordered in (False, True):
        torch.manual_seed(1)
        model = Ordered().double()
        with GraphTrainer(
            model if ordered else model.inner, stores["values"], memory="60M", ignore_edge_data="features"
        ) as trainer:
            found.append([record.loss for record in trainer.fit(2, progress=False)])
            with pytest.raises(ooc.OptionError, match="numbers of graphs"):
                trainer.predict(graphs=_GRAPHS["values"])
    assert found[0] == found[1]


def test_outputs_for_fewer_classes_are_refused(stores: dict[str, Store]) -> None:
    with pytest.raises(ooc.ModelError, match="the model has 2 outputs, the store has 3 classes"):
        GraphTrainer(Pooled(GIN(3, 8, 2), 8, 2).double(), stores["classes"], ignore_edge_data="features")


def test_what_cannot_be_is_said(stores: dict[str, Store], tmp_path: Path) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, path_index: Tensor | None = None) -> Tensor:
            out: Tensor = self.lin(x)
            return out

    store = stores["values"]
    for model, options, said in [
        (Rows(), {}, "not a row of outputs each"),
        (Shortened(), {}, "Shortened gives 2 rows for 10 graphs"),
        (_model(), {"ignore_edge_data": "none"}, "GIN takes no edge_attr; leave it out with ignore_edge_data="),
        (_model(), {"paths": 3}, "paths or hops are given to a model"),
        (GIN(3, 4, 2), {"paths": 3}, "GIN takes no path_index"),
        (GIN(3, 4, 2), {"hops": 2}, "GIN takes no hop_index, .* give hops=0"),
        (Pooled(GIN(3, 8, 2), 8, 3), {}, "the model has 3 outputs, loss MSELoss needs 2"),
        (OfPaths(), {}, "OfPaths wants path_index; give paths=2 or paths=3"),
        (OfWeights(), {}, r"OfWeights wants edge_weight; edges of .*values\.ooc have none"),
        (Categories(), {}, r"x and edge_attr are floating-point numbers here; look categories up by x.long\(\)"),
        (SchNet(8, 8, 1, 4), {}, r"its forward takes \(z: .*, and is given \(x, edge_index, batch\) in this order$"),
        (Positions(), {}, r"forward must take \(x, edge_index, batch\), .* It takes \(x: .*, pe"),
    ]:
        with pytest.raises(ooc.ModelError, match=said):
            _fit(model.double(), store, **options)
    with pytest.raises(ooc.OptionError, match="device='cuda' is of full-graph training"):
        _fit(_model(), store, device="cuda")
    with (
        GraphTrainer(_model(), store, memory="60M", ignore_edge_data="features") as trainer,
        pytest.raises(ooc.OptionError, match="of graphs logits and labels"),
    ):
        trainer.predict("embeddings")
    one = ooc.convert("synthetic:nodes=100,edges=200,features=3,classes=2", tmp_path / "one.ooc")
    with pytest.raises(ooc.OptionError, match="is one graph"):
        GraphTrainer(_model(), one)


class Asking(nn.Module):
    """Goes another way by what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        z: Tensor = global_mean_pool(self.linear(x), batch)
        return z if z.sum() > 0 else -z


def test_what_cannot_be_counted_beforehand_is_not_promised(stores: dict[str, Store]) -> None:
    notes = list[str]()
    options = {"batch_size": 4, "ignore_edge_data": "features", "listener": lambda event: notes.append(str(event))}
    given: dict[str, Any] = {"paths": 0, "hops": 0, "ignore_edge_data": "features", "hardware": UNMEASURED}
    with pytest.raises(ooc.ModelError, match="Asking does not run on the meta device: "):
        fitting_batches(Asking().double(), stores["values"], [1 << 30], **given)
    with pytest.raises(ooc.ModelError, match=r"Asking makes of a batch cannot be counted .*: leave memory= out"):
        GraphTrainer(Asking().double(), stores["values"], memory="60M", **options)
    with GraphTrainer(Asking().double(), stores["values"], **options) as trainer:
        trainer.fit(1)
    assert any("cannot be counted" in note and "memory is not bounded" in note for note in notes)


class Attending(nn.Module):
    """GraphGPS: rows become dense graphs, which a mask turns back into rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 8)
        self.conv = GPSConv(8, None, heads=2, attn_type="multihead")
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        out: Tensor = self.out(global_mean_pool(self.conv(self.linear(x), edge_index, batch), batch))
        return out


def test_rows_that_a_mask_of_a_dense_batch_picks_are_counted(stores: dict[str, Store]) -> None:
    options: dict[str, Any] = {"batch_size": 4, "ignore_edge_data": "features", "seed": 1, "accumulate": 20}
    losses = []
    for memory in ("60M", None):
        torch.manual_seed(1)
        with GraphTrainer(Attending().double(), stores["values"], memory=memory, **options) as trainer:
            losses.append([record.loss for record in trainer.fit(2, progress=False)])
    assert losses[0] == losses[1]


def test_a_list_of_graphs_is_trained_on_as_it_is() -> None:
    graphs = many_graphs(20, dtype=torch.float32, edge_features=0)
    model = Pooled(GIN(3, 8, 2), 8, 2)
    with GraphTrainer(model, graphs, batch_size=4, memory="60M") as trainer:
        assert len(trainer.fit(2, progress=False)) == 2
        path = trainer.store.path
    assert not path.exists()
    with pytest.raises(ooc.StoreError):
        next(iter(GraphLoader(path)))


def test_lists_and_datasets_by_split_keep_their_precision_and_what_labels_mean(tmp_path: Path) -> None:
    graphs = many_graphs(20, dtype=torch.float64, edge_features=0)
    for number, graph in enumerate(graphs):
        graph.y = torch.tensor([number % 2.0])
    splits = graphs[:12], torch.utils.data.Subset(graphs, range(12, 16)), graphs[16:]  # type: ignore[arg-type]
    model, loss = Pooled(GIN(3, 8, 2), 8, 1).double(), nn.BCEWithLogitsLoss()
    with GraphTrainer(model, splits, loss=loss, memory="60M", spill_dir=tmp_path) as trainer:
        x = torch.cat([graph.x for graph in graphs]).numpy()
        np.testing.assert_array_equal(next(iter(GraphLoader(trainer.store, batch_size=20))).x, x)
        assert trainer.store.task is Task.MULTILABEL


class Squeezed(nn.Module):
    """A number a graph, [g]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = Pooled(GIN(3, 8, 2), 8, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.inner(x, edge_index, batch).squeeze(-1)


def test_a_model_may_give_a_number_a_graph(tmp_path: Path) -> None:
    """With labels [g], as PyG has them; in another order of dimensions they would be of all pairs."""
    graphs = many_graphs(20, dtype=torch.float32, edge_features=0)
    for number, graph in enumerate(graphs):
        graph.y = torch.tensor([number / 7])
    options: dict[str, Any] = {"batch_size": 4, "memory": "60M", "spill_dir": tmp_path}
    with GraphTrainer(Squeezed(), graphs, loss=nn.functional.mse_loss, **options) as trainer:
        losses = [record.loss for record in trainer.fit(2, progress=False)]
        assert trainer.predict().shape == (20, 1)
    for graph in graphs:
        graph.y = graph.y[0]  # [], of which PyG makes the same batches
    with GraphTrainer(Squeezed().inner, graphs, **options) as trainer:
        assert [record.loss for record in trainer.fit(2, progress=False)] == pytest.approx(losses, rel=1e-6)
    with pytest.raises(ooc.ModelError, match=r"would be of all pairs"):
        GraphTrainer(Squeezed().inner, graphs, loss=nn.functional.mse_loss, **options)


class Placed(nn.Module):
    """Goes by whether there are places of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pooled(GIN(3, 8, 2), 8, 2)

    def forward(self, data: Data) -> Tensor:
        return self.inner(data.x, data.edge_index, data.batch) * (1 if data.pos is None else 2)


class Looked(nn.Module):
    """Atoms and bonds are looked up, and taken with their places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.atoms, self.bonds = nn.Embedding(4, 5), nn.Embedding(3, 8)
        self.conv, self.last = GINEConv(nn.Linear(8, 8)), nn.Linear(8, 2)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        rows = torch.cat([self.atoms(x.squeeze(-1)), pos], dim=1)
        return self.last(global_mean_pool(self.conv(rows, edge_index, self.bonds(edge_attr)), batch))


class LookedAsData(Looked):
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data["pos"], data.edge_index, data.edge_attr, data.batch)


class Weighed(Looked):
    """Takes whole numbers of edges as any others."""

    def __init__(self) -> None:
        super().__init__()
        self.bonds = nn.Linear(1, 8)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        return super().forward(x.long(), pos, edge_index, edge_attr, batch)


@pytest.mark.parametrize("kind", [Looked, LookedAsData, Weighed])
def test_places_and_whole_numbers_are_given_as_pygs_batches_have_them(kind: type[Looked], tmp_path: Path) -> None:
    graphs = many_graphs(12, edge_features=0, labels="classes")
    for graph in graphs:
        graph.x, graph.edge_attr = graph.x[:, :1].abs().long() % 4, torch.arange(graph.num_edges) % 3
        graph.pos, graph.y = torch.randn(graph.num_nodes, 3, dtype=torch.float64), graph.y.reshape(-1)[:1] % 2
    model, batch = kind().double(), Batch.from_data_list(graphs)
    reference = copy.deepcopy(model)
    edge_attr = batch.edge_attr.double()[:, None] if kind is Weighed else batch.edge_attr
    parts = (batch.x, batch.pos, batch.edge_index, edge_attr, batch.batch)
    optimizer, losses = torch.optim.Adam(reference.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(reference(*((batch,) if kind is LookedAsData else parts)), batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    options: dict[str, Any] = {"memory": "60M", "spill_dir": tmp_path, "batch_size": 12}
    with GraphTrainer(model, (graphs, graphs[:2], graphs[2:4]), **options, accumulate=2) as trainer:
        assert [one.loss for one in trainer.fit(2, progress=False)] == pytest.approx(losses, rel=1e-10)
    with pytest.raises(ooc.OptionError, match="drops from x, which is looked up"):
        GraphTrainer(Looked().double(), graphs, input_dropout=0.5, **options)


def test_what_graphs_have_besides_is_not_asked_for(tmp_path: Path) -> None:
    graphs = many_graphs(8, dtype=torch.float32, edge_features=0)
    options: dict[str, Any] = {"memory": "60M", "spill_dir": tmp_path}
    GraphTrainer(Placed(), graphs, **options).close()
    graphs[3].pos = torch.zeros(graphs[3].num_nodes, 3)
    with pytest.raises(
        ooc.ModelError, match=r"asks data for pos, which it is not given.*torch.cat\(\[data.x, data.pos\]"
    ):
        GraphTrainer(Placed(), graphs, **options)


# ---- from the command line -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = "synthetic:graphs=400,nodes=8,edges=10,features=4,classes=3"
    return ooc.convert(source, tmp_path_factory.mktemp("graphs") / "made.ooc").path


def _ooc(*words: object) -> int:
    return main([str(word) for word in words])


_OPTIONS = [
    *("--model", "gin", "--layers", "2", "--hidden", "8", "--memory", "80M", "--threads", "1"),
    *("--paths", "3", "--hops", "2", "--pool", "add", "--batch-paths", "2000"),
]


def test_runs_of_the_command_line(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert _ooc("train", made, *_OPTIONS, "--epochs", 3, "--out", whole) == 0
    assert "of at most 2,000 paths" in capsys.readouterr().out
    assert _ooc("train", made, *_OPTIONS, "--epochs", 2, "--json", "--out", parts) == 0
    start, *_ = map(json.loads, capsys.readouterr().out.splitlines())
    assert start["batches"]["most"]["paths"] == 2000
    assert _ooc("train", "--resume", "--epochs", 3, "--out", parts) == 0
    losses = [[json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()] for run in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert _ooc("report", parts, "--out", tmp_path / "page.html") == 0 and _ooc("runs", tmp_path) == 0
    (tmp_path / "which.txt").write_text("7\n3\n")
    for name, more in [("all.npy", []), ("some.npy", ["--nodes", tmp_path / "which.txt"])]:
        assert _ooc("predict", parts, "--out", tmp_path / name, *more) == 0
    everything, some = (np.load(tmp_path / name) for name in ("all.npy", "some.npy"))
    assert everything.shape == (400,) and some.tolist() == everything[[7, 3]].tolist()
    assert _ooc("export", parts, tmp_path / "weights.pt") == 0
    one = ooc.convert("synthetic:nodes=50,edges=90,features=4,classes=3", tmp_path / "one.ooc")
    assert _ooc("predict", parts, one.path, "--out", tmp_path / "one.npy") == 2
    assert "parts was trained on many graphs" in capsys.readouterr().err


def test_the_table_of_batches(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said to fit does, and a hundredth more does not."""
    options = ["--model", "gin", "--layers", "1", "--hidden", "64", "--paths", "3", "--pool", "add"]
    assert _ooc("plan", made, "--batches", "4G", *options) == 0
    lines = capsys.readouterr().out
    assert "--batch-paths" in lines and "4.00 GB" in lines
    assert _ooc("plan", made, "--batches", "500K,4M,4G", "--json", *options) == 0
    fits = json.loads(capsys.readouterr().out)["batches"]
    by = {(fit["memory_bytes"], fit["counted"]): fit for fit in fits}
    assert by[500_000, "graphs"]["bound"] == 0 and by[4_000_000_000, "graphs"]["bound"] == 400
    one = by[4_000_000, "paths"]
    assert 3_400_000 < one["nbytes"] <= 4_000_000 and one["most"]["paths"] == one["bound"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sampler", "neighbor"], "--sampler is of neighbours in one graph"),
        (["--fanouts", "3,3"], "--fanouts is of neighbours in one graph"),
        (["--spill-dtype", "bfloat16"], "--spill-dtype is of full-graph training, not of batches"),
        (["--paths", "4"], "4 is none of 2, 3"),
        (["--memory", "1M"], "give --memory"),
        (["--norm", "graph", "--residual"], "statistics over several graphs"),
        (["--batch-paths", "3"], "alone has"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert _ooc("train", made, *_OPTIONS, *options, "--epochs", 1, "--out", tmp_path / "run") == 2
    line = capsys.readouterr().err
    assert said in line and not (tmp_path / "run").exists() and "Traceback" not in line


def test_options_of_many_graphs_are_not_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ooc.convert("synthetic:nodes=100,edges=200,features=3,classes=2", tmp_path / "one.ooc").path
    for options in (["--pool", "add"], ["--batch-nodes", "9"]):
        assert _ooc("train", one, *options, "--epochs", 1, "--out", tmp_path / "run") == 2
        assert f"{options[0]} is for a store of many graphs" in capsys.readouterr().err
    assert _ooc("plan", one, "--batches", "1G") == 2
    assert "for stores of many graphs" in capsys.readouterr().err


def test_results_do_not_depend_on_the_number_of_processes(stores: dict[str, Store], tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        model = _model("answers", norm="batch_norm", dropout=0.5)
        records = _fit(model, stores["answers"], 2, batch_size=None, batch_nodes=25, accumulate=3)
        return {
            "loss": [one.loss for one in records],
            "valid": [one.valid_score for one in records],
            **model.state_dict(),
        }

    (alone,) = together(1, tmp_path, work)
    for found in together(2, tmp_path, work):
        assert found.keys() == alone.keys()
        assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(alone[name])) for name in alone)


@pytest.mark.parametrize("asked", thorough(["evaluate", "predict", "close"], "predict"))
def test_another_thread_does_not_disturb_an_epoch(stores: dict[str, Store], asked: str) -> None:
    """What it asks for is refused; the epoch ended with an error, as its loader had been closed."""
    met: list[BaseException] = []

    def ask() -> None:
        try:
            getattr(trainer, asked)()
        except TrainingError as error:
            met.append(error)

    def listen(event: Event) -> None:
        if isinstance(event, TaskAdvanced) and event.task.startswith("epoch") and not met:
            other = Thread(target=ask)
            other.start()
            other.join()

    options: dict[str, Any] = {"batch_size": 9, "ignore_edge_data": "all", "listener": listen}
    with GraphTrainer(_model(), stores["values"], **options) as trainer:
        assert len(trainer.fit(2)) == 2
    assert "at work in another thread" in str(met[0])
