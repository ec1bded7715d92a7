# SPDX-License-Identifier: Apache-2.0
"""Plans keep their budgets, use what they are given, and say what would do when it is too little."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError
from ooc.plan import Direction, Fate, Kind, Limits, Matrix, Plan, Pull, Stage, Topology, Workload, make_plan
from ooc.plan.verifier import verify_plan
from ooc.sizes import parse_size


def workload(rows: int = 40_000, width: int = 64, layers: int = 3, degree: int = 10) -> Workload:
    """A forward and backward chain like a GraphSAGE's: z kept, m and dp pulled."""
    tile = 1024
    edges = [min(rows, r) * degree for r in range(0, rows + tile, tile)]
    matrices = {"x": Matrix("x", rows, width, 4, Kind.STORE)}
    forward, backward = [], []
    for k in range(1, layers + 1):
        for name in (f"z{k}", f"m{k}", f"dp{k}"):
            matrices[name] = Matrix(name, rows, width, 4, Kind.SCRATCH)
    forward.append(Stage("first", rows, ("x",), None, ("z1", "m1"), 1000))
    for k in range(1, layers):
        pull = Pull(f"m{k}", f"p{k}", Direction.IN)
        forward.append(Stage(f"forward {k}", rows, (f"z{k}",), pull, (f"z{k + 1}", f"m{k + 1}"), 1000))
    loss = Stage(
        "loss", rows, (f"z{layers}",), Pull(f"m{layers}", f"p{layers}", Direction.IN), (f"dp{layers}",), 1000, True
    )
    for k in range(layers - 1, 0, -1):
        pull = Pull(f"dp{k + 1}", f"dm{k + 1}", Direction.OUT)
        backward.append(Stage(f"backward {k}", rows, (f"z{k}",), pull, (f"dp{k}",), 1000, True))
    return Workload(
        rows=rows,
        tile_rows=tile,
        matrices=matrices,
        programs={"prepare": (), "train": (*forward, loss, *backward), "evaluate": (*forward,)},
        topologies={d: Topology(d, 4, edges) for d in Direction},
        fixed_host_bytes=100_000,
        fixed_device_bytes=10_000,
        pulled_itemsize=4,
        threads=2,
    )


WORK = workload()
EVERYTHING = 1 << 32


def plan(device: int, host: int, work: Workload = WORK) -> Plan:
    return make_plan(work, Limits(device, host))


def least() -> tuple[int, int]:
    """The least budgets, as the error states them."""
    with pytest.raises(BudgetError) as error:
        plan(1, 1)
    device, host = re.findall(r"give --(?:gpu|host)-budget (\w+)", str(error.value))
    return parse_size(device), parse_size(host)


def test_with_plenty_nothing_touches_the_disk() -> None:
    made = plan(EVERYTHING, EVERYTHING)
    assert made.ssd_read_bytes == made.ssd_write_bytes == made.spill_bytes == 0
    assert all(m.resident for m in made.matrices.values())


def test_the_least_budgets_that_the_error_states_do_plan() -> None:
    device, host = least()
    verify_plan(plan(device, host))


def test_one_byte_less_than_the_least_does_not_plan() -> None:
    device, host = least()
    exact = plan(device, host)
    with pytest.raises(BudgetError):
        plan(exact.device_peak_bytes - 4096, EVERYTHING)
    with pytest.raises(BudgetError):
        plan(device, WORK.fixed_host_bytes - 1)


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 4))
def test_every_plan_keeps_its_budgets_and_passes_the_verifier(
    device_part: float, host_part: float, layers: int
) -> None:
    work = workload(layers=layers)
    device = int(2_000_000 + device_part**3 * 60_000_000)
    host = int(100_000 + host_part**3 * 60_000_000)
    try:
        made = plan(device, host, work)
    except BudgetError:
        return
    verify_plan(made)
    assert made.device_peak_bytes <= device
    assert made.host_peak_bytes <= host
    for b in made.buffers.values():
        assert b.end <= (made.device_arena_bytes if b.tier is Fate.DEVICE else made.host_arena_bytes)


def test_more_memory_never_means_much_more_traffic_and_far_more_means_less() -> None:
    device, host = least()
    lean, rich = plan(device, host), plan(4 * device, host + 30_000_000)
    assert rich.ssd_read_bytes + rich.ssd_write_bytes < (lean.ssd_read_bytes + lean.ssd_write_bytes) / 2


def test_fixed_slabs_and_blocks_are_used() -> None:
    made = make_plan(WORK, Limits(EVERYTHING, EVERYTHING, block_rows=2048, slab_columns=24))
    assert made.block_rows == 2048
    assert made.matrices["m1"].grid.slab_columns == 24
    assert made.matrices["m1"].grid.slabs == 3


def test_the_verifier_sees_overlap_excess_and_missing_matrices() -> None:
    made = plan(20_000_000, 20_000_000)
    name, buffer = next((n, b) for n, b in made.buffers.items() if n.startswith("resident/"))
    other = next(b for b in made.buffers.values() if b.tier is buffer.tier and b is not buffer)
    moved = replace(other, offset=buffer.offset, first=buffer.first, last=buffer.last)
    with pytest.raises(AssertionError, match="overlap"):
        verify_plan(replace(made, buffers={**made.buffers, other.name: moved}))
    with pytest.raises(AssertionError, match="allowed"):
        verify_plan(replace(made, device_limit_bytes=made.device_peak_bytes - 1))
    with pytest.raises(AssertionError, match="before it is written"):
        verify_plan(replace(made, programs={"train": made.programs["train"][1:]}))
    gone = {n: b for n, b in made.buffers.items() if n != name}
    with pytest.raises((AssertionError, KeyError)):
        verify_plan(replace(made, buffers={**gone, name: replace(buffer, first=99, last=99)}))
