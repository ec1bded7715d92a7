# SPDX-License-Identifier: Apache-2.0
"""Sums that go through a file are those of memory, to the last bit; and how many terms they have is counted right."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.engine.operands import Sums
from ooc.engine.shuffle import ShuffleFile, SummedRows, SumsWriter
from ooc.errors import SpillError, StoreError
from ooc.kernels import neighbourhood as module
from ooc.kernels.edges import TileEdges
from ooc.kernels.neighbourhood import neighbourhood, runs
from ooc.plan.layout.shuffle import PartialSums, plan_partial_sums
from ooc.plan.workload import Direction
from ooc.prefetch.arena import Arena
from ooc.prefetch.engine import Engine
from ooc.prefetch.engines.direct import BufferedEngine, DirectEngine
from ooc.prefetch.spill import create_spill
from ooc.stages.edge_counts import count_sums
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data
from tests.prefetch.faults import Faults, FaultyCalls, faulty_engine

TILE_ROWS = 8
Run = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = DirectEngine(depth=8, bulk_depth=4)
    yield engine
    engine.close()


def random_runs(rows: int, columns: int, count: int, dtype: torch.dtype, seed: int) -> list[Run]:
    """Ascending rows, some beyond the matrix's end, with values of very different sizes: their order matters."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        most = int(torch.randint(0, rows + 4, (1,), generator=generator))
        numbers = torch.randperm(rows + 3, generator=generator)[:most].sort().values
        exponents = torch.randint(-6, 6, (most, columns), generator=generator).to(dtype)
        found.append((numbers, torch.randn(most, columns, generator=generator, dtype=dtype) * 10**exponents))
    return found


def planned(rows: int, columns: int, step_rows: int, given: list[Run], itemsize: int) -> PartialSums:
    """The plan of ``given``."""
    handed = np.zeros(-(-rows // TILE_ROWS) + 1, dtype=np.int64)
    for numbers, _ in given:
        np.add.at(handed, numbers[numbers < rows].numpy() // TILE_ROWS + 1, 1)
    counted = np.cumsum(handed).tolist()
    return plan_partial_sums(
        rows=rows, columns=columns, itemsize=itemsize, step_rows=step_rows, tile_rows=TILE_ROWS, scatter_counts=counted
    )


def summed(spilled: ShuffleFile[PartialSums], given: list[Run], step_rows: int, *, reverse: bool) -> Tensor:
    """What comes back, step by step, each tile taken while the next step is open."""
    plan = spilled.plan
    arena = Arena(max(plan.writing_nbytes, plan.reading_nbytes))
    memory = torch.from_numpy(arena.view(0, arena.nbytes))
    writer = SumsWriter(spilled, memory)
    for numbers, values in given:
        writer.add(numbers, values)
    writer.finish()
    memory.fill_(255)
    reader = SummedRows(spilled, memory, reverse=reverse)
    out = torch.full((plan.rows, plan.columns), torch.nan, dtype=spilled.dtype)
    starts = range(0, plan.rows + step_rows, step_rows)
    before: list[int] = []
    for start in reversed(starts) if reverse else starts:
        reader.open(start, start + step_rows)
        for first in [*before, start]:
            tile = reader.tile(first, first + step_rows)
            out[first : first + step_rows] = tile
        before = [start]
    return out


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 20),
    count=st.integers(0, 40),
    steps=st.sampled_from([1, 2, 8]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    reverse=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sums_are_those_of_memory(
    engine: Engine,
    rows: int,
    columns: int,
    count: int,
    steps: int,
    dtype: torch.dtype,
    reverse: bool,
    seed: int,
    tmp_path: Path,
) -> None:
    """To the last bit, in every dtype and direction, twice through the same file; bytes moved are the plan's."""
    step_rows = steps * TILE_ROWS
    given = random_runs(rows, columns, count, dtype, seed)
    plan = planned(rows, columns, step_rows, given, dtype.itemsize)
    spilled = ShuffleFile("dm", plan, dtype, create_spill(tmp_path, "dm", plan.nbytes), engine)
    for part in (given, given[::-1]):
        whole = torch.full((rows, columns), torch.nan, dtype=dtype)
        sums = Sums(whole)
        for numbers, values in part:
            sums.add(numbers, values)
        before = engine.counters.read_bytes, engine.counters.write_bytes
        assert torch.equal(summed(spilled, part, step_rows, reverse=reverse), whole)
        after = engine.counters.read_bytes, engine.counters.write_bytes
        assert [b - a for a, b in zip(before, after, strict=True)] == [plan.nbytes, plan.nbytes]
    spilled.close()
    assert list(tmp_path.iterdir()) == []


def test_many_chunks_a_bucket(engine: Engine, tmp_path: Path) -> None:
    """More than there is memory for at a time, both ways."""
    rows, columns = 64, 30
    given = random_runs(rows, columns, 300, torch.float32, seed=1)
    plan = planned(rows, columns, TILE_ROWS, given, 4)
    assert plan.buckets > 2 and max(plan.entries) > 20 * (plan.filled_bytes // plan.entry_bytes)
    spilled = ShuffleFile("dm", plan, torch.float32, create_spill(tmp_path, "dm", plan.nbytes), engine)
    whole = torch.empty(rows, columns)
    sums = Sums(whole)
    for numbers, values in given:
        sums.add(numbers, values)
    assert torch.equal(summed(spilled, given, TILE_ROWS, reverse=True), whole)
    spilled.close()


@pytest.mark.parametrize("faults", [Faults(full=1.0), Faults(broken=1.0)], ids=["full", "broken"])
def test_a_disk_that_fails_is_one_line(faults: Faults, tmp_path: Path) -> None:
    """It names the matrix, and nothing is left under way."""
    given = random_runs(64, 30, 300, torch.float32, seed=1)
    plan = planned(64, 30, TILE_ROWS, given, 4)
    engine = faulty_engine(faults)
    spilled = ShuffleFile("dm", plan, torch.float32, create_spill(tmp_path, "dm", plan.nbytes), engine)
    with pytest.raises(SpillError, match=r"dm: writing .* at byte \d+ failed: "):
        summed(spilled, given, TILE_ROWS, reverse=True)
    spilled.close()
    engine.close()


# ---- how much is handed out -------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [7, 1 << 14])
@pytest.mark.parametrize("undirected", [False, True])
def test_counts_are_those_of_the_graph(
    at_once: int, undirected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tile by tile, of all rows and of the first few, whatever runs tiles are cut into."""
    monkeypatch.setattr(module, "EDGES_AT_ONCE", at_once)
    graph = GraphCase(nodes=83, edges=400, self_loops=9, isolated=7, duplicates=15, undirected=undirected)
    data = random_data(graph)
    store = store_of(data, tmp_path)
    indptr, indices = (torch.from_numpy(array.read()).long() for array in store.topology("in"))
    for rows, others in ((83, 83), (40, 83), (40, 56), (8, 16)):
        expected = torch.zeros(-(-others // TILE_ROWS) + 1, dtype=torch.int64)
        for start in range(0, rows, TILE_ROWS):
            stop = min(rows, start + TILE_ROWS)
            offsets = indptr[start : stop + 1]
            tile = TileEdges(indices[offsets[0] : offsets[-1]], offsets - offsets[0], start, 83)
            for run in runs(tile):
                near = neighbourhood(run, others)
                if not near.stands_in:
                    expected[1:] += torch.bincount(near.others_S // TILE_ROWS, minlength=len(expected) - 1)
        assert (
            count_sums(store, Direction.IN, rows, others, TILE_ROWS, 1 << 14, False, False)
            == expected.cumsum(0).tolist()
        )
        assert expected.sum() > 0


def test_damaged_offsets_are_found(tmp_path: Path) -> None:
    """An error of the store's."""
    store = store_of(random_data(GraphCase(nodes=40, edges=100)), tmp_path)
    indptr, _ = store.topology("in")
    path = indptr.extents(0, 1)[0].path
    content = np.fromfile(path, dtype=indptr.dtype)
    content[3] = 1 << 40
    content.tofile(path)
    with pytest.raises(StoreError, match="in/indptr"):
        count_sums(store, Direction.IN, 40, 40, TILE_ROWS, 1 << 14, False, False)


def test_other_bytes_than_were_written_are_told(tmp_path: Path) -> None:
    faults = Faults(seed=1, wrong=1.0)
    engine = BufferedEngine(calls=FaultyCalls(faults))
    given = random_runs(200, 4, 10, torch.float32, 0)
    plan = planned(200, 4, TILE_ROWS, given, 4)
    spilled = ShuffleFile("m", plan, torch.float32, create_spill(tmp_path, "m", plan.nbytes), engine)
    with pytest.raises(SpillError, match=r"^m: the SSD returns other bytes of bucket \d+ than were written$"):
        summed(spilled, given, TILE_ROWS, reverse=False)
    spilled.close()
    engine.close()
