# SPDX-License-Identifier: Apache-2.0
"""Slabs of slices of heads: some of one head, or whole heads; what is computed for an edge, once for each head."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED
from ooc.plan.cost import Portion, computing_of
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out, pulled_sources
from ooc.plan.layout.passes import ColumnPass
from ooc.plan.layout.temporaries import most_edges, scratch_nbytes
from ooc.plan.workload import EdgeWork, Stage, Workload
from tests.plan.workloads import in_groups, workload

HEADS, SLICES, CHANNELS = 3, 4, 16
WIDTH = HEADS * SLICES * CHANNELS


def sliced(**changed: object) -> Workload:
    """Everything is pulled in three heads of four slices; nothing but what edges take is a temporary of the kernel."""
    work = in_groups(workload(20_000, WIDTH, layers=2), HEADS * SLICES)

    def cut(stage: Stage) -> Stage:
        if stage.pull is None or stage.pull.per_edge is None:
            return stage
        kind = replace(stage.pull.per_edge, slices=SLICES, bytes_per_edge=HEADS * 100, bytes_per_row=0, **changed)
        return replace(stage, pull=replace(stage.pull, per_edge=kind))

    return replace(work, programs={name: tuple(map(cut, stages)) for name, stages in work.programs.items()})


def pulling(work: Workload, columns: int) -> tuple[ColumnPass, dict[str, object], int]:
    """A column pass whose slabs are to be so wide, the matrices it is laid out with, and the bytes of a frame."""
    layout = lay_out(work, Choice(1024, dict.fromkeys(pulled_sources(work), SlabChoice(columns, 1))))
    item = next(item for item in layout.programs["train"] if isinstance(item, ColumnPass))
    return item, layout.matrices, layout.frame_bytes


@pytest.mark.parametrize(("wished", "groups"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 12)])
def test_a_slab_is_slices_of_one_head_or_whole_heads(wished: int, groups: int) -> None:
    """And then every one: no slab has slices of two heads of which it has not all."""
    item, matrices, _ = pulling(sliced(), wished * CHANNELS)
    assert matrices[item.pull.source].grid.slab_columns == groups * CHANNELS


@pytest.mark.parametrize(("groups", "heads"), [(1, 1), (2, 1), (4, 1), (8, 2), (12, 3)])
def test_temporaries_of_edges_are_those_of_the_heads_of_a_slab(groups: int, heads: int) -> None:
    work = sliced()
    item, matrices, frame_bytes = pulling(work, groups * CHANNELS)
    nothing = replace(item, pull=replace(item.pull, per_edge=replace(item.pull.per_edge, bytes_per_edge=0)))
    found, less = (scratch_nbytes(one, matrices, work, frame_bytes) for one in (item, nothing))
    tile = item.rows_at_once
    edges = most_edges(work.topologies[item.pull.direction], work.tile_rows, item.rows, tile)
    at_once = min(edges + tile, item.pull.per_edge.edges_at_once + 1)
    assert found - less == work.threads * at_once * heads * 100


@pytest.mark.parametrize(("groups", "slabs", "heads"), [(1, 12, 12), (2, 6, 6), (4, 3, 3), (8, 2, 3), (12, 1, 3)])
def test_edges_take_their_time_in_every_slab_and_for_every_head_in_it(groups: int, slabs: int, heads: int) -> None:
    rows, edges = 4096, 50_000
    seconds = []
    for edge_work in (EdgeWork(0), EdgeWork(1000, 100, bytes_per_row=10, operators=7)):
        work = sliced(work=edge_work)
        item, matrices, _ = pulling(work, groups * CHANNELS)
        portion = Portion(rows, edges, WIDTH, groups * CHANNELS, steps=1)
        seconds.append(computing_of(item, portion, work, matrices, UNMEASURED))
    processor = UNMEASURED.processor
    shared = (edges * (slabs * 1000 + heads * 100) + rows * 10) / processor.stream_bytes_per_s
    alone = 7 * slabs * -(-rows // item.rows_at_once) * processor.seconds_per_operator
    assert seconds[1].shared_s - seconds[0].shared_s == pytest.approx(shared)
    assert seconds[1].alone_s - seconds[0].alone_s == pytest.approx(alone)
