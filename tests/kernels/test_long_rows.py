# SPDX-License-Identifier: Apache-2.0
"""The parts of rows with many edges, which the kernels of a GPU want listed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from ooc.kernels.cuda.segments import EDGES_PER_SEGMENT, long_parts
from ooc.model.graph import load_rows, rows_nbytes
from ooc.plan.workload import Direction
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data

HUBS = {3: EDGES_PER_SEGMENT + 1, 20: 3 * EDGES_PER_SEGMENT, 21: EDGES_PER_SEGMENT}


@pytest.fixture(scope="module")
def data() -> Data:
    """Edges lead to some rows more often than a program sums them."""
    data = random_data(GraphCase(nodes=40, edges=100, isolated=40), dtype=torch.float32)
    targets = torch.cat([torch.full((count,), row) for row, count in HUBS.items()])
    data.edge_index = torch.stack((torch.arange(len(targets)) % 40, targets))
    return data


@pytest.mark.parametrize("chunk", [1, 7, 40, 1 << 16])
def test_of_every_row_of_the_graph(chunk: int, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each direction, wherever chunks of rows end; and within what is admitted for them."""
    monkeypatch.setattr("ooc.model.graph._CHUNK_ROWS", chunk)
    store = store_of(data, tmp_path)
    rows = load_rows(store, (), torch.float32, on_device=True)
    assert rows.parts[Direction.IN].tolist() == [[3, 0], [3, 1], [20, 0], [20, 1], [20, 2]]
    for direction, parts_P2 in rows.parts.items():
        assert np.array_equal(parts_P2, long_parts(rows.offsets[direction]))
        assert parts_P2.dtype == rows.offsets[direction].dtype
    admitted = (rows_nbytes(store, (), 4, on_device=on_device) for on_device in (True, False))
    assert 0 < sum(parts_P2.nbytes for parts_P2 in rows.parts.values()) <= next(admitted) - next(admitted)
    whole = [memory for memory in rows.memory() if memory.nbytes == rows.parts[Direction.IN].nbytes]
    assert any(np.shares_memory(memory, rows.parts[Direction.IN]) for memory in whole), "which a device locks"


def test_a_processor_needs_none(data: Data, tmp_path: Path) -> None:
    assert load_rows(store_of(data, tmp_path), (), torch.float32, on_device=False).parts == {}
