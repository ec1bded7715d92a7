# SPDX-License-Identifier: Apache-2.0
"""What cannot be run exactly is refused by name, never approximated."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.nn import HeteroConv, SAGEConv, to_hetero
from torch_geometric.nn.models import GCN, PNA, GraphSAGE

import ooc
from ooc.errors import ModelError, OocError
from ooc.storage.store import Store
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase()
F, C = GRAPH.features, GRAPH.classes


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sage lstm": (lambda: GraphSAGE(F, 8, 2, C, aggr="lstm"), "order of edges"),
    "unknown scaler": (
        lambda: PNA(F, 8, 2, C, aggregators=["mean"], scalers=["amplify"], deg=torch.tensor([1, 2])),
        "Unknown scaler 'amplify'",
    ),
    "softmax over rows": (lambda: GCN(F, 8, 2, C, act=nn.Softmax(dim=0)), "Softmax"),
    "another number of features": (lambda: GCN(F + 1, 8, 2, C), f"{F + 1} features"),
    "too few outputs": (lambda: GCN(F, 8, 2, C - 1), "classes"),
    "types, of a graph without": (
        lambda: HeteroConv({("a", "to", "a"): SAGEConv(F, C)}),
        "HeteroConv takes rows and edges by type, as (x_dict, edge_index_dict)",
    ),
    "types by to_hetero": (
        lambda: to_hetero(GCN(F, 8, 2, C, add_self_loops=False), (["a"], [("a", "to", "a")])),
        "GraphModule takes rows and edges by type",
    ),
    "one for several GPUs": (lambda: nn.DataParallel(GCN(F, 8, 2, C)), "give the model in it, its module"),
    "no outputs": (lambda: GCN(F, 8, 2, 0), "the model has no outputs"),
    "half precision": (lambda: GCN(F, 8, 2, C).half(), "float16"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One small store for all."""
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize(("build", "said"), MODELS.values(), ids=MODELS.keys())
def test_models_are_refused_by_name(build: Callable[[], nn.Module], said: str, store: Store, tmp_path: Path) -> None:
    """One line that says which part it is; nothing is written."""
    with pytest.raises(ModelError) as caught:
        ooc.Trainer(build(), store, gpu_budget="64M", host_budget="64M", spill_dir=tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_types_of_edges_that_a_model_does_not_take_are_named(tmp_path: Path) -> None:
    """Such as ``VirtualNode`` adds."""
    data = random_data(GRAPH, dtype=torch.float32)
    data.edge_type = torch.zeros(data.num_edges, dtype=torch.long)
    with pytest.raises(ModelError, match=r"let its forward take .* or leave types that are numbers out"):
        ooc.Trainer(GCN(F, 8, 2, C), data, memory="64M", spill_dir=tmp_path)


def test_torchs_autocast_is_refused(store: Store, tmp_path: Path) -> None:
    """Some threads would compute with it, and others not."""
    options = {"memory": "64M", "spill_dir": tmp_path}
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(OocError, match="autocast is on"):
        ooc.Trainer(GCN(F, 8, 2, C), store, **options)
    with ooc.Trainer(GCN(F, 8, 2, C), store, **options) as trainer:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(OocError, match="autocast is on"):
            trainer.fit(1)
        trainer.fit(1)


@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), "cross"], ids=str)
def test_losses_are_refused_by_name(loss: object, store: Store, tmp_path: Path) -> None:
    """A loss that is not a mean over rows of a row-wise function is no loss here."""
    with pytest.raises(ModelError) as caught:
        ooc.Trainer(GCN(F, 8, 2, C), store, gpu_budget="64M", host_budget="64M", loss=loss, spill_dir=tmp_path)
    assert "loss" in str(caught.value).lower()


def test_an_optimizer_of_other_parameters_is_refused(store: Store, tmp_path: Path) -> None:
    """It would step weights that nobody trains."""
    optimizer = torch.optim.Adam(GCN(F, 8, 2, C).parameters())
    with pytest.raises(ModelError, match="optimizer"):
        ooc.Trainer(
            GCN(F, 8, 2, C),
            store,
            gpu_budget="64M",
            host_budget="64M",
            optimizer=optimizer,
            spill_dir=tmp_path,
        )


@pytest.mark.parametrize("budget", ["none", "-3", "0", "12X", -5])
def test_nonsense_budgets_are_refused(budget: str | int, store: Store, tmp_path: Path) -> None:
    """Before anything else happens."""
    for budgets in ({"gpu_budget": budget, "host_budget": "1G"}, {"gpu_budget": "1G", "host_budget": budget}):
        with pytest.raises(OocError) as caught:
            ooc.Trainer(GCN(F, 8, 2, C), store, spill_dir=tmp_path, **budgets)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [1.0, -0.1, float("nan")])
def test_shares_to_drop_that_are_none_are_refused(share: float, store: Store, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="input_dropout must be at least 0 and below 1"):
        ooc.Trainer(GCN(F, 8, 2, C), store, memory="64M", input_dropout=share, spill_dir=tmp_path)


def test_an_unknown_device_is_refused(store: Store, tmp_path: Path) -> None:
    """One line, naming it."""
    with pytest.raises(OocError, match="abacus"):
        ooc.Trainer(GCN(F, 8, 2, C), store, gpu_budget="64M", host_budget="64M", device="abacus", spill_dir=tmp_path)
