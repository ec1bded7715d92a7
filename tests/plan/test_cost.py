# SPDX-License-Identifier: Apache-2.0
"""What computing takes: more for more of anything, and no less the slower the machine."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, UNMEASURED_DEVICE, Hardware, Limits, make_plan
from ooc.plan.cost import Portion, computing_of, transforming_constants_pays
from ooc.plan.layout.passes import ColumnPass, Pass, RowPass
from ooc.plan.workload import EdgeWork, PerEdge
from tests.plan.workloads import workload

WORK = workload()
PLAN = make_plan(WORK, Limits(12_000_000, 12_000_000), UNMEASURED)
PASSES = PLAN.programs["train"]
ROW_PASS = next(item for item in PASSES if isinstance(item, RowPass))
PULLING = next(item for item in PASSES if isinstance(item, ColumnPass))
SIZES = {"rows": 4096, "edges": 40_000, "columns": 64, "slab_columns": 32, "steps": 1}


def seconds(item: Pass, hardware: Hardware = UNMEASURED, **changed: int) -> float:
    return computing_of(item, Portion(**{**SIZES, **changed}), WORK, PLAN.matrices, hardware).together_s(WORK, hardware)


@pytest.mark.parametrize("more", [{"rows": 8192}, {"edges": 80_000}, {"slab_columns": 8}, {"steps": 2}])
def test_more_of_anything_takes_longer(more: dict[str, int]) -> None:
    assert seconds(PULLING, **more) > seconds(PULLING)


def test_threads_take_turns_where_there_is_nothing_but_python() -> None:
    """As much computing of half the threads takes twice as long; Python that all of them have hides behind computing,
    as far as that goes."""
    nothing = replace(UNMEASURED.processor, seconds_per_tile=0.0, seconds_per_operator=0.0, seconds_per_step=0.0)
    machine = replace(UNMEASURED, threads=WORK.threads, processor=nothing)
    computed = seconds(ROW_PASS, machine)
    assert seconds(ROW_PASS, replace(machine, threads=2 * WORK.threads)) == pytest.approx(2 * computed)
    for share, expected in ((0.1, 1 + 0.1 / WORK.threads), (10.0, 10.0)):
        busy = replace(machine, processor=replace(nothing, seconds_per_step=share * computed))
        assert seconds(ROW_PASS, busy) == pytest.approx(expected * computed)


def test_what_is_retained_of_an_opaque_layer_is_not_run_again() -> None:
    again = {"retainable_bytes_per_edge": 400, "retainable_operators": 20, "retainable_multiplies_per_edge": 64}
    work = EdgeWork(1100, 70, operators=50, multiplies_per_edge=192, **again)
    kind = PerEdge(1, 64, None, 4096, bytes_per_edge=100, bytes_per_row=0, opaque=True, work=work)
    item = replace(ROW_PASS, pull=replace(PULLING.pull, per_edge=kind))
    spared = replace(kind, work=EdgeWork(700, 70, operators=30, multiplies_per_edge=128))
    expected = replace(item, pull=replace(PULLING.pull, per_edge=spared))
    nothing, half, all_of_it = (Portion(**{**SIZES, "slab_columns": 64}, retained=share) for share in (0.0, 0.5, 1.0))
    where = WORK, PLAN.matrices, UNMEASURED
    assert computing_of(item, all_of_it, *where) == pytest.approx(computing_of(expected, nothing, *where))
    assert computing_of(item, half, *where).shared_s < computing_of(item, nothing, *where).shared_s


def test_operators_of_an_opaque_layer_stream_what_they_make_of_edges() -> None:
    """As fast as the memory is, however fast the loops are that compute what others make of edges."""
    times = []
    for opaque in (True, False):
        kind = PerEdge(1, 64, None, 4096, bytes_per_edge=100, bytes_per_row=0, opaque=opaque, work=EdgeWork(1100))
        item = replace(PULLING, pull=replace(PULLING.pull, per_edge=kind))
        for rate in (1e10, 2e11):
            processor = replace(UNMEASURED.processor, computed_bytes_per_s=rate)
            times.append(seconds(item, replace(UNMEASURED, processor=processor), slab_columns=64))
    assert times[0] == times[1]
    assert times[2] > times[3]


def test_a_device_computes_while_the_host_launches() -> None:
    """The longer of the two counts: Python alone, rows alone, and both are no longer than the longer one."""
    nothing = replace(UNMEASURED_DEVICE.processor, seconds_per_tile=0.0, seconds_per_operator=0.0, seconds_per_step=0.0)
    rows = seconds(ROW_PASS, replace(UNMEASURED_DEVICE, processor=nothing))
    for share in (0.5, 2.0):
        busy = replace(nothing, seconds_per_step=share * rows)
        found = seconds(ROW_PASS, replace(UNMEASURED_DEVICE, processor=busy))
        assert found == pytest.approx(max(1.0, share) * rows)


def test_a_stage_that_has_not_been_counted_streams_by_what_it_loads_and_stores() -> None:
    stage = replace(ROW_PASS.stage, streamed_bytes_per_row=0)
    counted = replace(ROW_PASS.stage, streamed_bytes_per_row=1)
    assert seconds(replace(ROW_PASS, stage=stage)) > seconds(replace(ROW_PASS, stage=counted))


@pytest.mark.parametrize(
    ("item", "more"),
    [
        (PULLING, 18 * 2 * SIZES["rows"] // PULLING.rows_at_once),
        (replace(ROW_PASS, pull=PULLING.pull, sweeps=PULLING), 18 * 2 * SIZES["rows"] // WORK.tile_rows),
        (replace(ROW_PASS, pull=PULLING.pull), 0),
    ],
    ids=["column pass", "last slab", "whole"],
)
def test_attention_slab_by_slab_takes_the_host_of_a_device_longer(item: Pass, more: int) -> None:
    """Than a sum: 18 operators a tile and slab."""
    counted = replace(UNMEASURED_DEVICE.processor, seconds_per_tile=0.0, seconds_per_operator=1.0, seconds_per_step=0.0)
    machine = replace(UNMEASURED_DEVICE, processor=counted)
    assert item.pull is not None
    kind = PerEdge(4, 64, None, 4096, bytes_per_edge=0, bytes_per_row=0)
    attention = replace(item, pull=replace(item.pull, per_edge=kind))
    assert seconds(attention, machine) - seconds(item, machine) == pytest.approx(more)


def test_what_is_computed_for_every_edge_comes_on_top() -> None:
    kind = PerEdge(64, 64, None, 4096, bytes_per_edge=1000, bytes_per_row=0)
    attention = replace(PULLING, pull=replace(PULLING.pull, per_edge=kind))
    assert seconds(attention) > seconds(PULLING)


def test_a_step_of_one_tile_does_not_keep_two_threads_busy() -> None:
    """As many tiles in half the steps take less than as many in all; a thread alone has always enough."""
    nothing = replace(UNMEASURED.processor, seconds_per_tile=0.0, seconds_per_operator=0.0, seconds_per_step=0.0)
    for threads, times in ((1, 1.0), (2, 1.2)):
        work, machine = replace(WORK, threads=threads), replace(UNMEASURED, threads=threads, processor=nothing)
        taken = [computing_of(ROW_PASS, Portion(**{**SIZES, "steps": n}), work, PLAN.matrices, machine) for n in (4, 2)]
        few, enough = (computing.together_s(work, machine) for computing in taken)
        assert few == pytest.approx(times * enough)


def test_steps_have_tiles_for_all_threads() -> None:
    """Though these only fit beside narrower slabs than the widest that do with a tile a step."""
    plan = make_plan(WORK, Limits(13_000_000, 13_000_000), UNMEASURED)
    assert plan.matrices["x"].grid.block_rows >= 2 * WORK.tile_rows


@pytest.mark.parametrize(
    ("in_columns", "out_columns", "alone", "beside"),
    [(2048, 256, False, True), (2048, 257, False, False), (340, 16, False, False), (3000, 64, True, True)],
)
def test_constants_are_multiplied_first_where_their_sums_are_wide(
    in_columns: int, out_columns: int, alone: bool, beside: bool
) -> None:
    """Of 16 edges a node: by eight times fewer columns, and in pulls that are short beside products; where rows are
    multiplied beside the sum, too, in pulls that are as long."""
    for read_beside, pays in ((False, alone), (True, beside)):
        columns = {"in_columns": in_columns, "out_columns": out_columns}
        assert transforming_constants_pays(edges_per_row=16, **columns, read_beside=read_beside) == pays
