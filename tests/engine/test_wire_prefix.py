# SPDX-License-Identifier: Apache-2.0
"""Where few rows of a matrix are active, only these go over the wire: in hop order they are its first ones.

So there is nothing for rows gathered one by one to spare.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

import ooc
from ooc.plan import ColumnPass, Limits, Plan
from ooc.plan.graphs import GraphStatistics
from ooc.plan.hardware import UNMEASURED_DEVICE
from ooc.plan.program.sequence import Use
from ooc.plan.program.staging import CopyTo
from ooc.train.metrics import Metric
from ooc.train.resources import Resources
from ooc.train.setup import prepare
from tests.examples import thorough
from tests.graphs import GraphCase, random_data

GRAPH = GraphStatistics(
    name="few labels", nodes=1_000_000, edges=2_000_000, features=64, classes=10, labelled=14_000, source="made up"
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCN(64, 128, 3, 10),
    "maxima": lambda: GraphSAGE(64, 128, 2, 10, aggr="max"),
    "gat": lambda: GAT(64, 128, 2, 10, heads=2),
}


def beyond_active(plan: Plan) -> tuple[Counter[tuple[int, str, int]], int]:
    """Bytes of rows sent to the device that no step works with, by the pass that they are for, matrix and slab; and all
    bytes of matrices sent there."""
    program, passes = plan.unrolled["train"], plan.programs["train"]
    uses: dict[int, list[tuple[int, Use]]] = {}
    for span in program.uses.spans:
        uses.setdefault(span.block, []).append((span.first, span.use))
    idle: Counter[tuple[int, str, int]] = Counter()
    sent = 0
    for step, block, direction in plan.staged["train"].transfers:
        name, slab, number = plan.blocks.where(block)
        if direction is CopyTo.HOST or name not in plan.matrices:
            continue
        first, use = min((use for use in uses[block] if use[0] >= step), key=lambda one: one[0])
        item, grid = passes[program.steps[first].at], plan.matrices[name].grid
        active = item.rows
        if use is Use.COPY:
            assert isinstance(item, ColumnPass)
            active = next(before.rows for before in passes if name in before.stores)
        rows = min(grid.block_rows, grid.rows - number * grid.block_rows)
        nbytes = plan.blocks.nbytes(block)
        sent += nbytes
        idle[item.index, name, slab] += nbytes * max(0, rows - max(0, active - number * grid.block_rows)) // rows
    return idle, sent


@pytest.mark.parametrize("name", thorough(MODELS, "maxima"))
def test_what_is_sent_beyond_the_active_rows_is_less_than_a_block(name: str) -> None:
    """Of every slab of every matrix in a pass; rows that nothing of the loss depends on are never sent."""
    prospect = prepare(MODELS[name](), GRAPH, Resources.parse("1G", "1G", device="cpu"), metric=Metric.ACCURACY)
    _, plan = prospect.plan(Limits(200_000_000, 1_500_000_000), UNMEASURED_DEVICE)
    assert min(item.rows for item in plan.programs["train"]) < GRAPH.nodes // 10
    idle, sent = beyond_active(plan)
    assert sent > 2 * plan.frame_bytes
    assert all(nbytes < plan.frame_bytes for nbytes in idle.values())


@pytest.mark.parametrize("seed", range(3))
def test_the_active_rows_of_a_store_in_hop_order_have_no_gaps(seed: int, tmp_path: Path) -> None:
    """Each row within d steps of a scored one is a neighbour of one within d - 1, or is that near itself: what is sent
    is used. Of the rows that are counted for training some lie near other scored rows only."""
    case = GraphCase(nodes=400, edges=900, features=4, train=0.9, unlabelled=370, seed=seed)
    store = ooc.convert(random_data(case, dtype=torch.float32), tmp_path / "hop.ooc", order="hop")
    offsets, indices = (array.read() for array in store.topology("in"))
    counts = store.attributes["hops"]
    assert counts[0] < store.num_nodes // 4
    for rows, more in pairwise(counts):
        reached = np.union1d(np.arange(rows), indices[: offsets[rows]])
        assert np.array_equal(reached, np.arange(more))
    assert all(few <= scored for few, scored in zip(store.attributes["train_hops"], counts, strict=True))
