# SPDX-License-Identifier: Apache-2.0
"""``ooc.NeighborLoader`` in a PyG script: its batches, what they cost, and what is left when they end.

PyG's own loader needs pyg-lib or torch-sparse, of which neither has wheels for the versions here; so batches are
compared with the definition (``test_sampler``), and with all neighbours drawn, with the full graph.
"""

import gc
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.sampler.base import SubgraphType

import ooc
from ooc.sampling.loader import NeighborLoader
from ooc.sizes import parse_size
from ooc.storage.store import Store
from tests.conversion.arrays import open_descriptors
from tests.damage import seal
from tests.examples import thorough
from tests.graphs import GraphCase, random_data

_CASE = GraphCase(nodes=3000, edges=20_000, features=33, weighted=True, edge_features=2, self_loops=20, duplicates=30)
_DATA = random_data(_CASE)
_FANOUTS = [7, 4]


@pytest.fixture(scope="module", params=thorough(["none", "hop"], "none"))
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    out = tmp_path_factory.mktemp("loader") / "g.ooc"
    return ooc.convert(_DATA, out, order=request.param, dtype="float64")


def _loader(store: Store, **more: object) -> NeighborLoader:
    options: dict[str, object] = {"input_nodes": "train", "shuffle": True, "seed": 3, "memory": "200M"}
    return NeighborLoader(store, _FANOUTS, 128, **(options | more))  # type: ignore[arg-type]


def _least(store: Store) -> int:
    with pytest.raises(ooc.BudgetError, match="give memory=") as caught:
        _loader(store, memory="1M")
    return parse_size(re.findall(r"memory='(\w+)'", str(caught.value))[0], name="memory")


def _same(left: list[Data], right: list[Data]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        for one, two in zip(left, right, strict=True)
        for name, value in one.to_dict().items()
    )


def test_batches_carry_what_the_source_has(store: Store) -> None:
    seeds = []
    with _loader(store) as loader:
        batches = list(loader)
    assert len(batches) == len(loader)
    for batch in batches:
        assert isinstance(batch, Data) and batch.num_nodes == len(batch.n_id) == sum(batch.num_sampled_nodes)
        assert batch.num_edges == len(batch.e_id) == sum(batch.num_sampled_edges)
        seeds += batch.n_id[: batch.batch_size].tolist()
        assert torch.equal(batch.x, _DATA.x[batch.n_id]) and torch.equal(batch.y, _DATA.y[batch.n_id])
        # Each edge is one of the source's, with what that carries.
        carried = torch.cat([batch.n_id[batch.edge_index].T, batch.edge_weight[:, None], batch.edge_attr], dim=1)
        source = torch.cat([_DATA.edge_index.T, _DATA.edge_weight[:, None], _DATA.edge_attr], dim=1)
        assert {tuple(edge) for edge in carried.tolist()} <= {tuple(edge) for edge in source.tolist()}
    assert sorted(seeds) == torch.nonzero(_DATA.train_mask).squeeze(1).tolist()


def test_memory_changes_no_batch_and_is_kept_to(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.sampling.budget._WORK_BYTES", 1 << 14)  # or so few features are best kept in memory
    with _loader(store) as ample:
        expected = [*ample, *ample]
        assert not _same(expected[: len(ample)], expected[len(ample) :])  # epochs differ
    least = _least(store)
    with pytest.raises(ooc.BudgetError, match="3,000 nodes"):
        _loader(store, memory=least - 100_000)
    for memory in (least, least + 500_000):
        with _loader(store, memory=memory) as scarce:
            assert scarce.plan.nbytes <= memory and "x" not in scarce.plan.resident
            scarce.plan = replace(scarce.plan, lookahead=1 if memory == least else 5)
            assert _same([*scarce, *scarce], expected)
            scarce.epoch = 1
            assert _same(list(scarce), expected[len(ample) :])


def test_with_all_neighbours_the_gradients_are_those_of_the_full_graph(store: Store) -> None:
    torch.manual_seed(0)
    model = GraphSAGE(33, 16, 2, 4).double()

    def gradients(data: Data, rows: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(data.x, data.edge_index)[rows], data.y[rows]).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with NeighborLoader(store, [-1, -1], 300, input_nodes="train", shuffle=True, memory="200M") as loader:
        for batch in loader:
            seeds = torch.arange(batch.batch_size)
            for sampled, full in zip(gradients(batch, seeds), gradients(_DATA, batch.n_id[seeds]), strict=True):
                torch.testing.assert_close(sampled, full, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["mask", "numbers", "tensor"])
def test_seeds_are_asked_for_in_every_way(store: Store, kind: str) -> None:
    numbers = np.array([17, 3, 2999, 4])
    asked = {"mask": np.isin(np.arange(3000), numbers), "numbers": numbers, "tensor": torch.from_numpy(numbers)}[kind]
    (batch,) = _loader(store, input_nodes=asked, shuffle=False)
    assert batch.n_id[:4].tolist() == (sorted(numbers.tolist()) if kind == "mask" else numbers.tolist())
    assert batch.input_id.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("asked", [None, "train"])
def test_seeds_are_counted_as_nodes_were_before_conversion(store: Store, asked: str | None) -> None:
    """As by PyG, whatever the order of the store's rows."""
    with _loader(store, input_nodes=asked, shuffle=False) as loader:
        batches = list(loader)
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
    assert torch.equal(seeds, torch.arange(3000) if asked is None else torch.nonzero(_DATA.train_mask)[:, 0])
    assert torch.equal(torch.cat([batch.input_id for batch in batches]), torch.arange(len(seeds)))


def test_nothing_is_left_when_a_loop_ends_early(store: Store) -> None:
    gc.collect()
    threads, descriptors = threading.active_count(), open_descriptors()
    for ending in ("break", "dropped", "error"):
        loader = _loader(store)
        batches = iter(loader)
        next(batches)
        if ending == "error":
            with pytest.raises(RuntimeError), loader:
                for _ in loader:  # the iteration before ends here
                    raise RuntimeError
        del batches, loader
        gc.collect()
        assert threading.active_count() == threads and open_descriptors() == descriptors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input_nodes": "training"}, "not one of train, valid, test"),
        ({"input_nodes": [3000]}, "among 0 … 2999"),
        ({"input_nodes": [5, 5]}, "a node twice"),
        ({"input_nodes": np.ones(7, dtype=bool)}, "mask of shape"),
        ({"memory": "much"}, "memory"),
    ],
)
def test_what_makes_no_sense_is_refused(store: Store, options: dict[str, object], said: str) -> None:
    with pytest.raises(ooc.OptionError, match=said):
        _loader(store, **options)
    with pytest.raises(ooc.OptionError, match="batch_size must be a positive whole number"):
        NeighborLoader(store, [5], batch_size=1.5)  # type: ignore[arg-type]
    for fanouts in ([5, 0], [1.5], 5):
        with pytest.raises(ooc.OptionError, match="-1 for all"):
            NeighborLoader(store, fanouts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_workers": 4}, "NeighborLoader takes no num_workers: the loader has threads of its own"),
        ({"replace": True}, "no replace: neighbours are drawn evenly, without replacement"),
        ({"transform": len}, "change each batch in the loop"),
        ({"num_workers": 0, "pin_memory": False, "subgraph_type": SubgraphType.directional, "replace": False}, ""),
    ],
)
def test_what_pygs_loader_takes_is_answered(store: Store, given: dict[str, Any], said: str) -> None:
    """What changes nothing is taken, what else does is said; it was a TypeError."""
    if not said:
        assert len(NeighborLoader(store, [5], **given)) == store.num_nodes
        return
    with pytest.raises(ooc.OptionError, match=said):
        NeighborLoader(store, [5], **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'workers'"):
        NeighborLoader(store, [5], workers=4)


def test_loops_at_once_need_loaders_of_their_own(store: Store) -> None:
    """The first of two ended silently after the batches that it had had."""
    with _loader(store) as loader, _loader(store) as other:
        first = iter(loader)
        next(first)
        iter(loader)
        with pytest.raises(ooc.OptionError, match="another one over the same loader has begun"):
            next(first)
        assert len(list(zip(loader, other, strict=True))) == len(loader)


def test_an_epoch_may_have_no_batch(store: Store) -> None:
    with NeighborLoader(store, [2], batch_size=5000, drop_last=True) as loader:
        assert len(loader) == 0 and list(loader) == []


@pytest.mark.parametrize("name", ["in/indices, as it was written", "in/indices", "x"])
def test_damage_is_said(tmp_path: Path, name: str) -> None:
    """Of pages that are read once, and of those that are read again and again."""
    store = ooc.convert(_DATA, tmp_path / "g.ooc")
    array, least = store.array(name.partition(",")[0]), f"{_least(store)}"
    chunk = array.chunk_path(0)
    chunk.write_bytes(b"\xff" * chunk.stat().st_size)
    if "written" in name:
        seal(array)
    for memory in (least, "200M"):
        with pytest.raises(ooc.StoreError, match=array.name):
            list(_loader(store, memory=memory))
