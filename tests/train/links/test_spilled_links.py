# SPDX-License-Identifier: Apache-2.0
"""Link prediction where embeddings and their gradient do not fit in memory: the same results, within budgets."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.nn.models import GraphSAGE

import ooc
from ooc.engine.block_sums import BlockSums
from ooc.errors import SpillError
from ooc.plan.layout.grid import Grid
from ooc.plan.layout.passes import ShufflePass
from ooc.plan.program.plan import Plan
from ooc.plan.workload import Direction
from ooc.sizes import parse_size
from ooc.storage.store import Store
from ooc.train.links.drawn import LinkArray, Permutation, ReversedLinks
from ooc.train.setup import Tuning
from tests.examples import examples
from tests.graphs import GraphCase, random_data

NODES, COLUMNS, EPOCHS = 1000, 64, 1
WHOLE_BYTES = NODES * COLUMNS * 8
STEPS = 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    data = random_data(GraphCase(nodes=NODES, edges=1000, features=5, self_loops=30, isolated=40, duplicates=50))
    graph = Data(x=data.x.double(), edge_index=data.edge_index)
    return ooc.convert(graph, tmp_path_factory.mktemp("links") / "g.ooc", dtype="float64")


@pytest.fixture(scope="module")
def links() -> ooc.Links:
    """With a head and a tail of many links."""
    generator = torch.Generator().manual_seed(4)
    train, valid, test = (torch.randint(0, NODES, (2, count), generator=generator) for count in (300, 40, 20))
    train[0, :40], train[1, 20:60] = 17, 900
    return ooc.Links(train, valid, test, None, torch.randint(0, NODES, (2, 30), generator=generator), negatives=3)


def _model() -> ooc.LinkPredictor:
    torch.manual_seed(1)
    return ooc.LinkPredictor(GraphSAGE(5, 8, 2, COLUMNS, dropout=0.4), "mlp").double()


def _trained(store: Store, links: ooc.Links, **options: Any) -> tuple[Any, Plan]:
    """What must not differ between plans, and the plan, more than whose bytes no step has written."""
    model = _model()
    given: dict[str, Any] = {"negatives": 2, "steps": STEPS, "seed": 3, "threads": 1, "_tuning": Tuning(tile_rows=32)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ooc.LinkTrainer(model, store, links, optimizer=optimizer, **given | options) as trainer:
        records, plan = trainer.fit(EPOCHS, progress=False), trainer.plan
    assert all(one.ssd_write_bytes <= STEPS * plan.ssd_write_bytes for one in records)
    weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return ([(one.loss, one.valid_score, one.test_score) for one in records], weights), plan


def _least(store: Store, links: ooc.Links, **options: Any) -> int:
    with pytest.raises(ooc.BudgetError, match="give memory=") as caught:
        _trained(store, links, **{"memory": "500K"} | options)
    return parse_size(str(caught.value).rsplit("memory='", 1)[1].rstrip("'"))


@pytest.fixture(scope="module")
def expected(store: Store, links: ooc.Links) -> Any:
    """With all in memory."""
    found, plan = _trained(store, links, memory="1G")
    assert not plan.shuffles and not plan.ssd_write_bytes
    return found


def _spills(plan: Plan) -> bool:
    """Embeddings go by way of files, trained and scored, and so does their gradient."""
    ways = {
        item.pull.direction
        for program in plan.programs.values()
        for item in program
        if isinstance(item, ShufflePass) and item.pull is not None
    }
    return ways == {Direction.LINKS_REVERSED, Direction.SCORED_LINKS_REVERSED} and bool(plan.partial_sums)


@given(
    block_rows=st.sampled_from([32, 64, None]),
    more=st.sampled_from([1.0, 1.1, 1.3]),
    threads=st.integers(1, 3),
    slab_columns=st.sampled_from([None, 1]),
)
@settings(max_examples=examples(1), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_memory_and_blocks_change_no_bit(
    store: Store, links: ooc.Links, expected: Any, more: float, **options: Any
) -> None:
    """Dropout, losses, scores and weights."""
    found, plan = _trained(store, links, memory=int(_least(store, links, **options) * more), **options)
    assert found == expected
    if more == 1.0:
        assert _spills(plan) and plan.arena_bytes < WHOLE_BYTES


@pytest.mark.thorough
def test_the_least_memory_is_a_part_of_the_embeddings(tmp_path: Path) -> None:
    """And so is their gradient, on a graph with more nodes than a tile's temporaries are worth."""
    graph = random_data(GraphCase(nodes=30_000, edges=30_000, features=5))
    store = ooc.convert(Data(x=graph.x.double(), edge_index=graph.edge_index), tmp_path / "g.ooc", dtype="float64")
    pairs = torch.randint(0, 30_000, (2, 5000), generator=torch.Generator().manual_seed(0))
    least = _least(store, ooc.Links(pairs, pairs[:, :100]), memory="2M")
    assert least < 2 * 30_000 * COLUMNS * 8 / 3


@given(size=st.integers(1, 5000), seed=st.integers(0, 5))
@settings(max_examples=examples(30), deadline=None, derandomize=True)
def test_a_permutation_has_every_number_once(size: int, seed: int) -> None:
    found = Permutation(size, seed).of(np.arange(size, dtype=np.uint64))
    assert (np.sort(found) == np.arange(size)).all()
    assert (Permutation(size, seed).inverse(found) == np.arange(size)).all()


@pytest.mark.parametrize("size", [24, 1000])
def test_permutations_put_numbers_anywhere(size: int) -> None:
    """Over many keys, where a number is put is uniform, and so is how far from the next one."""
    keys = 3000
    found = np.stack([Permutation(size, key).of(np.arange(5, dtype=np.uint64)) for key in range(keys)]).astype(int)
    apart = (found[:, 1:] - found[:, :-1]) % size - 1  # no two in one place
    for places, many in [(one, size) for one in found.T] + [(one, size - 1) for one in apart.T]:
        expected = np.bincount(np.arange(many) * 12 // many) * keys / many
        counts = np.bincount(places * 12 // many, minlength=12)
        assert ((counts - expected) ** 2 / expected).sum() < 40  # 11 degrees: 1 in 28,000 above


def test_negatives_are_spread_over_all_nodes(store: Store, links: ooc.Links) -> None:
    """None is drawn oftener than need be, and links by their tails are those by their heads."""
    model = _model()
    with ooc.LinkTrainer(model, store, links, negatives=11, memory="64M") as trainer:
        trainer._start()
        training, offsets = trainer._training, trainer._prepared.builder.rows.offsets
        for epoch in (0, 1):
            training.draw(epoch, 0, 1, both_ways=True)
            _, tails = trainer.negatives(epoch)
            assert np.bincount(tails.reshape(-1), minlength=NODES).max() <= -(-300 * 11 // NODES)
            heads, forward = np.repeat(np.arange(NODES), np.diff(offsets[Direction.LINKS])), training._indices.read()
            back = np.repeat(np.arange(NODES), np.diff(offsets[Direction.LINKS_REVERSED])), training._reversed.read()
            none = set(zip(range(NODES), range(NODES), strict=True))
            expected = sorted(pair for pair in zip(forward.tolist(), heads.tolist(), strict=True) if pair not in none)
            pairs = zip(*(part.tolist() for part in back), strict=True)
            assert sorted(pair for pair in pairs if pair not in none) == expected


@pytest.mark.parametrize("at_once", [7, 1 << 17])
def test_links_are_reversed_a_part_at_a_time(tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number is put in order together, with a tail that has more links than that."""
    monkeypatch.setattr("ooc.train.links.drawn._REVERSED_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    counts, nodes = rng.integers(0, 9, 50), 50
    offsets = np.concatenate(([0], np.cumsum(counts)))
    heads, tails = np.repeat(np.arange(nodes), counts), rng.integers(0, nodes, offsets[-1])
    tails[: len(tails) // 3] = 20
    given_tails = LinkArray(tmp_path, Direction.SCORED_LINKS, "indices", len(tails), np.int32)
    given_tails.put(0, tails)
    found = ReversedLinks(tmp_path, Direction.SCORED_LINKS_REVERSED, given_tails, nodes)
    found.fill(offsets)
    ends, by_tail = (found.arrays[f"scored links reversed/{part}"].read() for part in ("indptr", "indices"))
    for tail, (start, stop) in enumerate(pairwise(ends.tolist())):
        assert sorted(by_tail[start:stop]) == sorted(heads[tails == tail])


@pytest.mark.parametrize("rows", [1, 1000, 1024, 5000])
def test_links_are_compared_with_what_was_put_there(tmp_path: Path, rows: int) -> None:
    """Whoever reads them, by whatever blocks; what was put out of order has no checksum."""
    values, links = np.arange(rows, dtype=np.int32), LinkArray(tmp_path, Direction.LINKS, "indices", rows, np.int32)
    grid = Grid(-(-rows // 1024) * 1024, 1, 4, 512, 1)

    def read() -> None:
        sums = BlockSums("links", grid, links)
        with links.path.open("rb") as file:
            for block in reversed(range(grid.blocks)):
                file.seek(block * 2048)
                sums.read(0, block, np.frombuffer(file.read(2048), dtype=np.uint8))
        sums.finish()

    for first in range(0, rows, 300):
        links.put(first, values[first : first + 300])
    np.testing.assert_array_equal(links.read(), values)
    read()
    with links.path.open("r+b") as file:
        file.seek(4 * (rows - 1))
        file.write(b"\1\1\1\1")
    for reading in (links.read, read):
        with pytest.raises(SpillError, match=r"^links/indices: the SSD returns other bytes of links"):
            reading()
    links.put(0, values[: rows // 2 + 1])
    links.put(0, values)
    read()
    assert links.has_checksums
    links.put(rows // 2 + 1, values[:1])
    assert not links.has_checksums
