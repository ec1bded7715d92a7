# SPDX-License-Identifier: Apache-2.0
"""Embeddings of the types of nodes that have no features are torch's, one for each type."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import FiLMConv, GATConv, HeteroConv, SAGEConv

import ooc
from ooc.errors import BudgetError, ModelError, OptionError, RunError
from ooc.models import Relational
from ooc.train.setup import Tuning

CLASSES, HIDDEN, EPOCHS, TOLERANCE = 3, 5, 2, 1e-10
WIDTHS = {"author": 4, "topic": 3}
pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


def graph(*, all_bare: bool = False) -> HeteroData:
    """Papers with features, authors and topics without; edges both ways between papers and authors, from topics to
    papers, and from papers to venues, of which nothing comes back."""
    random, data = torch.Generator().manual_seed(2), HeteroData()
    counts = {"paper": 70, "author": 50, "topic": 23, "venue": 9}
    for kind, count in counts.items():
        data[kind].num_nodes = count
    if not all_bare:
        data["paper"].x = torch.randn(70, 6, generator=random, dtype=torch.float64)
    data["paper"].y = torch.randint(CLASSES, (70,), generator=random)
    part = torch.rand(70, generator=random)
    data["paper"].train_mask, data["paper"].val_mask, data["paper"].test_mask = part < 0.5, part > 0.8, part < 0
    for (source, name, target), edges in {
        ("author", "writes", "paper"): 130,
        ("paper", "written by", "author"): 110,
        ("paper", "cites", "paper"): 160,
        ("topic", "covers", "paper"): 50,
        ("paper", "in", "venue"): 70,
    }.items():
        ends = [torch.randint(counts[end] * 5 // 6, (edges,), generator=random) for end in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
    return data


class Net(nn.Module):
    """Attention or means over rows as they are, then once more over what they gave, beside these rows. With
    ``as_it_is`` by a layer without a formula."""

    def __init__(
        self, data: HeteroData, widths: Mapping[str, int], attends: bool = False, as_it_is: bool = False
    ) -> None:
        super().__init__()
        edges = [kind for kind in data.edge_types if kind[2] != "venue"]

        def convolution(source: int, target: int) -> nn.Module:
            if as_it_is:
                film: nn.Module = FiLMConv((source, target), HIDDEN)
                return film
            made: nn.Module = GATConv((source, target), HIDDEN, add_self_loops=False)
            return made if attends else SAGEConv((source, target), HIDDEN)

        self.first = HeteroConv({kind: convolution(widths[kind[0]], widths[kind[2]]) for kind in edges})
        inner = {kind: widths[kind] + HIDDEN * (kind != "topic") for kind in ("paper", "author", "topic")}
        self.second = HeteroConv({kind: convolution(inner[kind[0]], inner[kind[2]]) for kind in edges})
        self.lin = nn.Linear(HIDDEN + widths["paper"], CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Tensor:
        edges = {kind: ends for kind, ends in edge_index_dict.items() if kind[2] != "venue"}
        found = self.first(x_dict, edges)
        inner = {kind: torch.cat([rows.tanh(), x_dict[kind]], dim=1) for kind, rows in found.items()}
        out = self.second({"topic": x_dict["topic"], **inner}, edges)
        result: Tensor = self.lin(torch.cat([out["paper"].relu(), x_dict["paper"]], dim=1))
        return result


def relational(data: HeteroData, widths: Mapping[str, int]) -> nn.Module:
    made: nn.Module = Relational(dict(widths), data.edge_types, HIDDEN, 2, CLASSES, target="paper")
    return made


MODELS: dict[str, Any] = {
    "means": lambda data, widths: Net(data, widths, attends=False),
    "attention": lambda data, widths: Net(data, widths, attends=True),
    "as it is": lambda data, widths: Net(data, widths, as_it_is=True),
    "rgcn": relational,
}


def made(name: str, data: HeteroData, learnt: Mapping[str, int], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    widths = {kind: data[kind].get("x", torch.empty(0, 0)).shape[1] + learnt.get(kind, 0) for kind in data.node_types}
    model: nn.Module = MODELS[name](data, widths)
    return model.to(dtype)


def trainer_of(model: nn.Module, store: ooc.Store, folder: Path, learnt: Mapping[str, int], **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    embedding = ooc.Embedding(learnt, lr=0.05, std=0.7, weight_decay=0.01)
    given: dict[str, Any] = {"spill_dir": folder / "spill", "_tuning": Tuning(tile_rows=16)} | options
    return ooc.Trainer(model, store, optimizer=optimizer, embedding=embedding, **given)


def rows_of(trainer: ooc.Trainer, spaces: Sequence[str] = ()) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    assert trainer._learnt is not None
    for space in spaces or trainer._learnt.spaces:
        rows = trainer.predict("embeddings", layer=0, node_type=space)
        assert rows is not None
        found[space] = rows
    return found


@pytest.mark.parametrize(
    ("name", "beside", "clip", "order"),
    [
        ("means", False, None, "none"),
        ("rgcn", False, 0.1, "hop"),
        ("attention", True, None, "hop"),
        ("as it is", True, None, "hop"),
    ],
)
def test_rows_losses_and_gradients_are_pygs(
    name: str, beside: bool, clip: float | None, order: str, tmp_path: Path
) -> None:
    """Of the type from which no edge leads on there is none: it would not move. ``beside``: papers have one as well."""
    data, learnt = graph(), {**WIDTHS, "venue": 2} | ({"paper": 2} if beside else {})
    store, model = ooc.convert(data, tmp_path / "graph.ooc", dtype="float64", order=order), made(name, data, learnt)
    expected = made(name, data, learnt)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    with trainer_of(model, store, tmp_path, learnt, clip_norm=clip) as trainer:
        rows = {space: nn.Parameter(first) for space, first in rows_of(trainer).items()}
        assert rows.keys() == learnt.keys() - {"venue"}
        losses = [record.loss for record in trainer.fit(epochs=EPOCHS, progress=False)]
        found = rows_of(trainer)
    steps = torch.optim.Adam(list(rows.values()), lr=0.05, weight_decay=0.01, foreach=False)
    given = {"paper": data["paper"].x, "venue": torch.zeros(9, 2, dtype=torch.float64)}
    for loss in losses:
        optimizer.zero_grad()
        steps.zero_grad()
        x_dict = {
            kind: torch.cat([given[kind], rows[kind]], 1)
            if kind in given and kind in rows
            else rows.get(kind, given.get(kind))
            for kind in data.node_types
        }
        mask = data["paper"].train_mask
        wanted = F.cross_entropy(expected(x_dict, data.edge_index_dict)[mask], data["paper"].y[mask])
        wanted.backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_([*expected.parameters(), *rows.values()], clip) > clip
        optimizer.step()
        steps.step()
        assert abs(loss - wanted.item()) < TOLERANCE
    for space, embedding in rows.items():
        torch.testing.assert_close(found[space], embedding.detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=space)
    for (whose, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=TOLERANCE, atol=TOLERANCE, msg=whose)


def outcome(trainer: Any) -> tuple[list[float], dict[str, Tensor]]:
    with trainer:
        losses = [record.loss for record in trainer.fit(epochs=2, eval_every=0, progress=False)]
        return losses, rows_of(trainer, ["author"])


def test_the_same_bits_whatever_the_budgets(tmp_path: Path) -> None:
    data, learnt = graph(all_bare=True), {"paper": 6, **WIDTHS}
    store = ooc.convert(data, tmp_path / "graph.ooc")

    def found(**way: Any) -> Any:
        model = made("attention", data, learnt, torch.float32)
        return trainer_of(model, store, tmp_path, learnt, clip_norm=0.1, **way)

    expected = outcome(found())
    with pytest.raises(BudgetError) as too_small:
        found(memory=1, block_rows=16)
    told = re.search(r"memory='?(\w+)", str(too_small.value))
    assert told is not None
    ways: list[dict[str, Any]] = [
        {"memory": told.group(1), "block_rows": 16},
        {"block_rows": 32, "slab_columns": 2, "memory": "40M"},
    ]
    for way in ways:
        losses, rows = outcome(found(**way))
        assert losses == expected[0], way
        assert all(torch.equal(rows[space], expected[1][space]) for space in rows), way


def test_a_run_goes_on_to_the_same_rows(tmp_path: Path) -> None:
    data, learnt = graph(), WIDTHS
    store = ooc.convert(data, tmp_path / "graph.ooc")

    def run(folder: str) -> Any:
        model = made("rgcn", data, {**learnt, "venue": 1}, torch.float32)
        return trainer_of(model, store, tmp_path, {**learnt, "venue": 1}, out=tmp_path / folder)

    with run("whole") as trainer:
        trainer.fit(epochs=2, eval_every=0, progress=False)
        expected = rows_of(trainer, ["author"])
    with run("parts") as trainer:
        trainer.fit(epochs=1, eval_every=0, progress=False)
    with run("parts") as trainer:
        trainer.fit(epochs=2, resume=True, eval_every=0, progress=False)
        found = rows_of(trainer, ["author"])
        assert trainer._learnt is not None
        one, other = (trainer._learnt.first_rows(space, 0, (20, 3)) for space in ("author", "topic"))
    assert torch.equal(found["author"], expected["author"])
    assert (one != other).any()
    with (
        trainer_of(
            made("rgcn", data, {**learnt, "venue": 1, "author": 2}),
            store,
            tmp_path,
            {"author": 2, "topic": 3, "venue": 1},
            out=tmp_path / "parts",
        ) as other,
        pytest.raises(RunError, match="is of another model"),
    ):
        other.fit(epochs=4, resume=True, progress=False)


def test_what_is_asked_wrongly_is_refused(tmp_path: Path) -> None:
    data = graph()
    store, model = (
        ooc.convert(data, tmp_path / "graph.ooc", dtype="float64"),
        made("rgcn", data, {**WIDTHS, "venue": 1}),
    )
    with pytest.raises(OptionError, match="the types of nodes are paper, author, topic, venue"):
        trainer_of(model, store, tmp_path, {"reader": 4})
    with pytest.raises(ModelError, match=r"nodes 'author' have no features: embedding={'author': 64} trains some"):
        ooc.Trainer(model, store, spill_dir=tmp_path)

    class Holding(Net):
        """Has the rows of a type itself, as where all of the graph is in memory."""

        def forward(self, x_dict: Any, edge_index_dict: Any) -> Tensor:
            return super().forward({**x_dict, "author": self.rows}, edge_index_dict)

    holding = Holding(data, {"paper": 6, **WIDTHS}, attends=False)
    holding.rows = nn.Parameter(torch.ones(data["author"].num_nodes, WIDTHS["author"]))
    with pytest.raises(ModelError, match=r"; rows has a row for each node: embedding={'author': 4} trains such"):
        ooc.Trainer(holding.double(), store, spill_dir=tmp_path)

    class Detached(Net):
        def forward(self, x_dict: Any, edge_index_dict: Any) -> Tensor:
            return super().forward({**x_dict, "topic": x_dict["topic"].detach()}, edge_index_dict)

    detached = Detached(data, {"paper": 6, **WIDTHS}, attends=False).double()
    with pytest.raises(ModelError, match="its input of nodes 'topic' no gradient"):
        trainer_of(detached, store, tmp_path, WIDTHS)
