# SPDX-License-Identifier: Apache-2.0
"""Rows that are shuffled through a file are those of memory; and how many every bucket gets is counted right."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.engine.executor import rows_by_bucket
from ooc.engine.shuffle import RowsReader, RowsWriter, ShuffleFile
from ooc.errors import SpillError, StoreError
from ooc.kernels.edges import TileEdges
from ooc.kernels.neighbourhood import BucketRows
from ooc.model.layers.per_edge import Pulling
from ooc.plan.layout.bucketing import shuffle_scratch
from ooc.plan.layout.shuffle import BucketedRows, plan_bucketed_rows
from ooc.plan.workload import Direction
from ooc.prefetch.arena import Arena
from ooc.prefetch.engine import Engine
from ooc.prefetch.engines.direct import DirectEngine
from ooc.prefetch.spill import create_spill
from ooc.stages.edge_counts import EdgeCounts, count_gathers
from ooc.storage.store import Store
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data
from tests.kernels.test_kernel_memory import peak_bytes
from tests.model.test_opaque_memory import LAYERS as GENERAL_LAYERS
from tests.model.test_opaque_memory import ROWS, WIDTH, Key, general
from tests.prefetch.faults import Faults, faulty_engine

TILE_ROWS = 8
NODES = 83
ROUGH = {"nodes": NODES, "edges": 400, "self_loops": 9, "isolated": 7, "duplicates": 15}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = DirectEngine(depth=8, bulk_depth=4)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[False, True], ids=["directed", "undirected"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    case = GraphCase(**ROUGH, undirected=request.param)
    return store_of(random_data(case), tmp_path_factory.mktemp("store"))


def neighbours_of(store: Store) -> list[set[int]]:
    """The in-neighbours of every node."""
    indptr, indices = (array.read() for array in store.topology("in"))
    return [set(map(int, indices[indptr[i] : indptr[i + 1]])) for i in range(store.num_nodes)]


def gathered_by(neighbours: Sequence[set[int]], targets: range, rows: int) -> list[int]:
    """What some targets gather of the first ``rows`` rows, one by one."""
    return sorted(row for row in set(targets).union(*(neighbours[i] for i in targets)) if row < rows)


def tile_of(store: Store, start: int, stop: int) -> TileEdges:
    """The edges out of some rows."""
    indptr, indices = (torch.from_numpy(array.read()).long() for array in store.topology("out"))
    offsets = indptr[start : stop + 1]
    return TileEdges(indices[offsets[0] : offsets[-1]], offsets - offsets[0], start, store.num_nodes)


def planned(
    store: Store, *, rows: int, targets: int, columns: int, itemsize: int, steps: int, memory: int
) -> BucketedRows:
    return plan_bucketed_rows(
        rows=rows,
        targets=targets,
        columns=columns,
        itemsize=itemsize,
        step_rows=steps * TILE_ROWS,
        tile_rows=TILE_ROWS,
        memory_bytes=memory,
        gathered=partial(count_gathers, store, Direction.IN),
    )


def lowest(store: Store, *, columns: int) -> BucketedRows:
    """Buckets of one tile each, in chunks of a page."""
    entries = count_gathers(store, Direction.IN, NODES, NODES, TILE_ROWS)[0]
    return BucketedRows(NODES, columns, 4, TILE_ROWS, 1 << 12, tuple(entries), NODES)


def shuffle_rows(file: ShuffleFile[BucketedRows], store: Store, values_RC: Tensor, memory: Tensor) -> None:
    """The rows of a source, tile by tile."""
    writer = RowsWriter(file, memory)
    for start in range(0, len(values_RC), TILE_ROWS):
        stop = min(len(values_RC), start + TILE_ROWS)
        writer.add(start, values_RC[start:stop], rows_by_bucket(file.plan, tile_of(store, start, stop)))
    writer.finish()


def memory_for(shuffle: BucketedRows) -> Tensor:
    arena = Arena(shuffle.memory_nbytes)
    return torch.from_numpy(arena.view(0, arena.nbytes))


# ---- how many there are -----------------------------------------------------------------------------------


@pytest.mark.parametrize("height", [TILE_ROWS, 3 * TILE_ROWS, 1, 200])
def test_counts_are_those_of_the_graph(store: Store, height: int) -> None:
    """Of buckets of every height, of all targets and of the first few, of all rows and of some."""
    neighbours = neighbours_of(store)
    for targets, rows in ((NODES, NODES), (40, NODES), (40, 56), (1, 8)):
        counts = count_gathers(store, Direction.IN, targets, rows, height)
        assert len(counts[-1]) == 1 and all(len(one) > 1 for one in counts[:-1])
        most = EdgeCounts(store).most_gathered(Direction.IN, targets, rows, height)
        for k, found in enumerate(counts):
            starts = range(0, targets, height << k)
            buckets = [range(start, min(targets, start + (height << k))) for start in starts]
            assert found == [len(gathered_by(neighbours, bucket, rows)) for bucket in buckets]
            assert all(a <= b for a, b in zip(found, most[k], strict=True))


def test_neighbours_that_are_no_rows_are_found(tmp_path: Path) -> None:
    """An error of the store's."""
    store = store_of(random_data(GraphCase(nodes=40, edges=100)), tmp_path)
    _, indices = store.topology("in")
    path = indices.extents(0, 1)[0].path
    content = bytearray(path.read_bytes())
    content[:4] = (1 << 20).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(StoreError, match="indices are damaged"):
        count_gathers(store, Direction.IN, 40, 40, TILE_ROWS)


# ---- through the file -------------------------------------------------------------------------------------


@given(
    targets=st.sampled_from([1, 40, NODES]),
    columns=st.integers(1, 70),
    steps=st.sampled_from([1, 2, 3, 16]),
    memory=st.sampled_from([0, 20_000, 1 << 30]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    reverse=st.booleans(),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_those_of_memory(
    engine: Engine,
    store: Store,
    targets: int,
    columns: int,
    steps: int,
    memory: int,
    dtype: torch.dtype,
    reverse: bool,
    tmp_path: Path,
) -> None:
    """All that a step's targets gather, in either direction, while the step before it is still computed; once more
    after other values have been shuffled; bytes moved are the plan's."""
    neighbours = neighbours_of(store)
    shuffle = planned(
        store, rows=NODES, targets=targets, columns=columns, itemsize=dtype.itemsize, steps=steps, memory=memory
    )
    file = ShuffleFile("m", shuffle, dtype, create_spill(tmp_path, "m", shuffle.nbytes), engine)
    step_rows = steps * TILE_ROWS
    for seed in (1, 2):
        whole = torch.randn(NODES, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        before = engine.counters.read_bytes, engine.counters.write_bytes
        shuffle_rows(file, store, whole, memory_for(shuffle))
        reader = RowsReader(file, memory_for(shuffle), targets=targets, reverse=reverse)
        starts = range(0, targets, step_rows)
        still_computed: list[int] = []
        for start in reversed(starts) if reverse else starts:
            reader.open(start, min(targets, start + step_rows))
            for first in [*still_computed, start]:
                found = reader.tile(first)
                own = slice(first, min(targets, first + step_rows))
                wanted = torch.tensor(gathered_by(neighbours, range(own.start, own.stop), NODES))
                assert len(found) == NODES
                assert torch.equal(found[own], whole[own])
                assert torch.equal(found.index_select(0, wanted), whole[wanted])
            still_computed = [start]
        after = engine.counters.read_bytes, engine.counters.write_bytes
        assert [b - a for a, b in zip(before, after, strict=True)] == [shuffle.nbytes, shuffle.nbytes]
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_many_chunks_a_bucket(engine: Engine, store: Store, tmp_path: Path) -> None:
    """More than there is memory for at a time; rows do not end where chunks do."""
    shuffle = lowest(store, columns=999)
    assert shuffle.buckets > 2 and max(map(shuffle.bucket_nbytes, range(shuffle.buckets))) > 3 * shuffle.chunk_bytes
    file = ShuffleFile("m", shuffle, torch.float32, create_spill(tmp_path, "m", shuffle.nbytes), engine)
    whole = torch.randn(NODES, 999)
    shuffle_rows(file, store, whole, memory_for(shuffle))
    reader = RowsReader(file, memory_for(shuffle), targets=NODES, reverse=False)
    for bucket in range(shuffle.buckets):
        start = bucket * shuffle.bucket_rows
        reader.open(start, min(NODES, start + shuffle.bucket_rows))
        wanted = torch.tensor(gathered_by(neighbours_of(store), range(start, min(NODES, start + TILE_ROWS)), NODES))
        assert torch.equal(reader.tile(start).index_select(0, wanted), whole[wanted])
    file.close()


def test_a_step_still_computed_has_its_rows_while_the_next_opens(engine: Engine, store: Store, tmp_path: Path) -> None:
    """Before every line of it: a thread that computes may run between any two."""
    shuffle = lowest(store, columns=5)
    file = ShuffleFile("m", shuffle, torch.float32, create_spill(tmp_path, "m", shuffle.nbytes), engine)
    whole = torch.randn(NODES, 5)
    shuffle_rows(file, store, whole, memory_for(shuffle))
    reader = RowsReader(file, memory_for(shuffle), targets=NODES, reverse=False)
    reader.open(0, TILE_ROWS)
    looked = start = 0

    def look(frame: FrameType, event: str, argument: object) -> Any:
        """The interpreter calls it before every line."""
        nonlocal looked
        looked += event == "line"
        own = slice(start - TILE_ROWS, start)
        assert torch.equal(reader.tile(own.start)[own], whole[own])
        return look

    for start in range(TILE_ROWS, NODES, TILE_ROWS):
        sys.settrace(look)
        try:
            reader.open(start, min(NODES, start + TILE_ROWS))
        finally:
            sys.settrace(None)
    assert looked > 10 * shuffle.buckets
    file.close()


def test_edges_that_are_not_alike_in_both_directions_are_found(engine: Engine, store: Store, tmp_path: Path) -> None:
    """Whether a bucket gets more rows than it gathers, fewer, or others: an error of the store's."""
    shuffle = lowest(store, columns=999)
    file = ShuffleFile("m", shuffle, torch.float32, create_spill(tmp_path, "m", shuffle.nbytes), engine)
    values = torch.randn(TILE_ROWS, 999)
    everyone = torch.arange(NODES).repeat(TILE_ROWS)
    offsets = torch.arange(TILE_ROWS + 1) * NODES
    writer = RowsWriter(file, memory_for(shuffle))
    with pytest.raises(StoreError, match="not alike"):
        for start in range(0, NODES - TILE_ROWS, TILE_ROWS):
            writer.add(start, values, rows_by_bucket(shuffle, TileEdges(everyone, offsets, start, NODES)))
    writer = RowsWriter(file, memory_for(shuffle))
    with pytest.raises(StoreError, match="not alike"):
        writer.finish()
    file.close()
    rows = BucketRows(9, torch.tensor([1, 2, 5]), torch.randn(3, 2))
    for missing in ([0], [2, 3], [1, 8]):
        with pytest.raises(StoreError, match="not alike"):
            rows.index_select(0, torch.tensor(missing))
    with pytest.raises(StoreError, match="not alike"):
        rows[2:4]


@pytest.mark.parametrize("faults", [Faults(full=1.0), Faults(broken=1.0)], ids=["full", "broken"])
def test_a_disk_that_fails_is_one_line(faults: Faults, store: Store, tmp_path: Path) -> None:
    """It names the matrix, and nothing is left under way."""
    shuffle = lowest(store, columns=99)
    engine = faulty_engine(faults)
    file = ShuffleFile("m shuffled", shuffle, torch.float32, create_spill(tmp_path, "m", shuffle.nbytes), engine)
    with pytest.raises(SpillError, match=r"m shuffled: writing .* at byte \d+ failed: "):
        shuffle_rows(file, store, torch.randn(NODES, 99), memory_for(shuffle))
    file.close()
    engine.close()


# ---- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 40])
@pytest.mark.parametrize("columns", [2, 200])
def test_what_shuffling_allocates_is_bounded(degree: int, columns: int, engine: Engine, tmp_path: Path) -> None:
    """And near it: a tile's rows sorted by bucket, and one bucket's at a time as they are in the file."""
    rows, nodes = 256, 4096
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, nodes, (rows, degree), generator=generator).sort().values.view(-1).int()
    tile = TileEdges(indices, torch.arange(rows + 1, dtype=torch.int32) * degree, 0, nodes)
    shuffle = BucketedRows(nodes, columns, 4, nodes // 4, 1 << 12, (nodes,) * 4, nodes)
    file = ShuffleFile("m", shuffle, torch.float32, create_spill(tmp_path, "m", shuffle.nbytes), engine)
    writer = RowsWriter(file, memory_for(shuffle))
    values = torch.randn(rows, columns)
    per_edge, per_row = shuffle_scratch(shuffle)
    shuffling = peak_bytes(lambda: rows_by_bucket(shuffle, tile))
    assert shuffling <= (len(indices) + rows) * per_edge <= 5 * shuffling
    shuffled = rows_by_bucket(shuffle, tile)
    adding = peak_bytes(lambda: writer.add(0, values, shuffled))
    assert adding <= rows * per_row
    file.close()


@pytest.mark.parametrize("degree", [2, 40])
def test_gathering_from_shuffled_rows_is_within_the_layers_bound(degree: int) -> None:
    """As gathering from memory is."""
    aggregate = general(GENERAL_LAYERS["ResGatedGraphConv"]())
    generator = torch.Generator().manual_seed(0)
    nodes = 4096
    indices = torch.randint(0, nodes, (ROWS, degree), generator=generator).sort().values.view(-1).int()
    tile = TileEdges(indices, torch.arange(ROWS + 1, dtype=torch.int32) * degree, 0, nodes)
    source = BucketRows(nodes, torch.arange(nodes), torch.randn(nodes, WIDTH + 1, generator=generator)[:, 1:])
    gradient = torch.randn(ROWS, aggregate.columns, generator=generator)
    pull = aggregate.per_edge(Pulling.TARGETS, WIDTH, "dp", 4)
    bound = min(len(indices), pull.edges_at_once) * pull.bytes_per_edge + ROWS * pull.bytes_per_row
    bound += (len(indices) + ROWS) * pull.waiting_bytes_per_edge
    for compute in (
        lambda: aggregate.forward(Key(), tile, source, source[:ROWS], range(1)),
        lambda: aggregate.backward_targets(Key(), tile, source, gradient, range(1)),
    ):
        assert peak_bytes(compute) <= bound
