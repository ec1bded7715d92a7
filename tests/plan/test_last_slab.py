# SPDX-License-Identifier: Apache-2.0
"""The last slab may be pulled by the pass that reads the sums, which then need not be stored."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, Hardware, Plan
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out
from ooc.plan.layout.passes import ColumnPass, RowPass
from ooc.plan.program.verifier import verify_plan
from ooc.plan.simulate.simulator import simulate
from tests.plan.workloads import WITH_DEVICE_MEMORY, held, workload

ROWS, WIDTH = 40_000, 64
WORK = workload(rows=ROWS, width=WIDTH)
MACHINES = pytest.mark.parametrize("machine", [UNMEASURED, WITH_DEVICE_MEMORY], ids=lambda machine: machine.name)


def made(machine: Hardware, *, overlap_last: bool, columns: int = 32, of: str = "m2", buffers: int = 1) -> Plan:
    """A plan in which one matrix is pulled in slabs, in memory for nothing else."""
    return held(WORK, machine, 40_000_000, {of: SlabChoice(columns, buffers, overlap_last=overlap_last)})


@MACHINES
def test_its_sums_are_neither_written_nor_read(machine: Hardware) -> None:
    """One slab of two, 32 columns of 40,000 rows each way."""
    beside, apart = made(machine, overlap_last=True), made(machine, overlap_last=False)
    assert beside.matrices["p2"].matrix.columns == WIDTH // 2 == apart.matrices["p2"].matrix.columns // 2
    assert bytes_of("p2", beside) == bytes_of("p2", apart) / 2 == ROWS * 4 * WIDTH


def bytes_of(name: str, plan: Plan) -> int:
    """What an epoch uses of a matrix, wherever it finds it."""
    spans = plan.unrolled["train"].uses.spans
    return sum(plan.blocks.nbytes(span.block) for span in spans if plan.blocks.where(span.block)[0] == name)


@MACHINES
@pytest.mark.parametrize("buffers", [1, 2])
def test_every_slab_is_pulled_once_and_lies_in_its_buffer(machine: Hardware, buffers: int) -> None:
    plan = made(machine, overlap_last=True, columns=24, buffers=buffers)
    sweeps, beside = plan.programs["train"][2:4]
    assert isinstance(sweeps, ColumnPass)
    assert isinstance(beside, RowPass)
    assert beside.sweeps is sweeps
    steps = plan.unrolled["train"].steps
    assert {step.slab for step in steps if step.at == sweeps.index} == {0, 1}
    assert {step.slab for step in steps if step.at == beside.index} == {2}
    (buffer,) = [region for region in plan.regions["train"] if region.matrix == "m2"]
    assert buffer.last == beside.index
    computed = [e for e in simulate(plan, WORK, machine).passes if e.at == beside.index]
    assert computed[0].end_s > computed[0].start_s


@MACHINES
def test_a_source_that_is_read_as_it_arrives_is_pulled_as_ever(machine: Hardware) -> None:
    """With one buffer its blocks would be read and copied to it in one step: then nothing is left to that pass."""
    stages = tuple(
        replace(s, loads=(*s.loads, "m2")) if s.pull and s.pull.source == "m2" else s for s in WORK.programs["train"]
    )
    work = replace(WORK, programs=WORK.programs | {"train": stages})
    for buffers, left in ((1, False), (2, True)):
        layout = lay_out(work, Choice(1024, dict.fromkeys(WORK.matrices, SlabChoice(24, buffers, overlap_last=True))))
        (item,) = [item for item in layout.programs["train"] if isinstance(item, RowPass) and "m2" in item.loads]
        assert (item.sweeps is not None) == left


@MACHINES
def test_a_slab_that_is_pulled_twice_or_never_is_found(machine: Hardware) -> None:
    plan = made(machine, overlap_last=True)
    passes = plan.programs["train"]
    alone = [replace(item, sweeps=None, pull=None) if isinstance(item, RowPass) else item for item in passes]
    twice = [replace(item, slabs=2) if isinstance(item, ColumnPass) else item for item in passes]
    for wrong in (alone, twice):
        with pytest.raises(AssertionError, match="train: pass"):
            verify_plan(replace(plan, programs=plan.programs | {"train": tuple(wrong)}))


@MACHINES
@pytest.mark.parametrize("overlap_last", [True, False])
def test_a_slab_that_is_not_in_its_buffer_is_found(machine: Hardware, overlap_last: bool) -> None:
    """A block that is left out, one that comes a step too late, and one that comes while the slab before is pulled."""
    plan = made(machine, overlap_last=overlap_last, columns=24)
    unrolled = plan.unrolled["train"]
    (begins, *_), blocks = sorted(unrolled.fill), unrolled.fill[min(unrolled.fill)]
    wrong = [{begins: blocks[1:]}, {begins: blocks[1:], begins + 1: blocks[:1]}]
    wrong.append({begins: blocks[1:], begins - 1: blocks[:1]})
    for fill in wrong:
        otherwise = replace(unrolled, fill=unrolled.fill | fill)
        with pytest.raises(AssertionError, match="slab 1 of m2 is not in its buffer when it is pulled"):
            verify_plan(replace(plan, unrolled=plan.unrolled | {"train": otherwise}))
