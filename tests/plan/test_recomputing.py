# SPDX-License-Identifier: Apache-2.0
"""Forward stages are run again where that makes epochs shorter, or nothing else keeps a limit on what is written."""

from dataclasses import replace
from functools import cache

import pytest

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Direction, Hardware, Kind, Limits, Matrix, Pull, Stage, Topology, Workload
from ooc.plan.epoch_chain import chain_of
from ooc.plan.fates import choose_fates
from ooc.plan.hardware import Curve, Disk
from ooc.plan.planner import arrange
from ooc.plan.recomputing import Forgotten, choose_workload
from ooc.plan.verifier import verify_plan
from ooc.plan.workload import Kept
from tests.plan.workloads import WITH_DEVICE_MEMORY

ROWS, WIDTH, LAYERS, DEGREE = 40_000, 64, 5, 4
MATRIX = ROWS * WIDTH * 4
NOTHING: Forgotten = frozenset()


def with_disk(machine: Hardware, bytes_per_s: float) -> Hardware:
    rate = Curve(((1.0, bytes_per_s),))
    return replace(machine, disk=Disk(rate, rate, bytes_per_s, machine.disk.latency_s))


SLOW_DISK = with_disk(UNMEASURED, 1e8)
FAST_DISK = with_disk(UNMEASURED, 1e11)


@cache
def gcn(forgotten: Forgotten = NOTHING, *, repeatable: bool = True) -> Workload:
    """A GCN's epoch: z1 … kept for the backward pass, those of the stages ``forgotten`` computed again for it."""
    matrices = {"x": Matrix("x", ROWS, WIDTH, 4, Kind.STORE)}
    stages: list[Stage] = []

    def stage(name: str, loads: tuple[str, ...], pulled: str, stores: tuple[str, ...], *, back: bool = False) -> None:
        direction = Direction.OUT if back and name != "loss" else Direction.IN
        pull = Pull(pulled, f"{pulled} pulled", direction) if pulled else None
        for one in stores:
            matrices[one] = Matrix(one, ROWS, WIDTH, 4, Kind.SCRATCH)
        stages.append(Stage(name, ROWS, loads, pull, stores, 2000, back, 2 * WIDTH * WIDTH, 40 * WIDTH, 10))

    def z(k: int) -> tuple[str, ...]:
        """What the values of layer k are drawn from, where they are kept; layer 1 may be drawn from x."""
        return () if k - 1 in forgotten and k > 1 else (f"z{k}",) if k - 1 not in forgotten else ("x",)

    def kept(k: int) -> tuple[str, ...]:
        return () if k - 1 in forgotten else (f"z{k}",)

    for k in range(1, LAYERS):
        stage(f"forward {k}", ("x",) if k == 1 else (), f"m{k}" if k > 1 else "", (*kept(k), f"m{k + 1}"))
    stage("loss", (), f"m{LAYERS}", (f"dp{LAYERS}",), back=True)
    for k in range(LAYERS - 1, 0, -1):
        waiting = z(k)
        if not waiting:
            start = k - 1
            while not z(start):
                start -= 1
            for j in range(start, k + 1):
                loads, pulled = (z(j), "") if j == start else ((), f"m{j}.{k}")
                stage(f"forward {j} for backward {k}", loads, pulled, (f"z{k}.{k}" if j == k else f"m{j + 1}.{k}",))
            waiting = (f"z{k}.{k}",)
        stage(f"backward {k}", waiting, f"dp{k + 1}", (f"dp{k}",) if k > 1 else (), back=True)
    tile = 1024
    edges = [min(ROWS, row) * DEGREE for row in range(0, ROWS + tile, tile)]
    return Workload(
        rows=ROWS,
        tile_rows=tile,
        matrices=matrices,
        programs={"prepare": (), "train": tuple(stages)},
        topologies={d: Topology(d, 4, edges) for d in Direction},
        fixed_host_bytes=100_000,
        fixed_device_bytes=10_000,
        pulled_itemsize=4,
        threads=2,
        recomputed=tuple(Matrix(f"z{k + 1}", ROWS, WIDTH, 4, Kind.SCRATCH) for k in sorted(forgotten)),
        kept=tuple(
            Kept(k - 1, f"forward {k}", (f"z{k}",), repeatable) for k in range(1, LAYERS) if k - 1 not in forgotten
        ),
    )


def limits(matrices: float, *, writes: int | None = None) -> Limits:
    """Memory for so many of the matrices that are kept, and for what passes work in."""
    return Limits(4_000_000 + int(matrices * MATRIX), 4_000_000, ssd_write_bytes=writes)


def seconds(forgotten: Forgotten, memory: Limits, machine: Hardware) -> float:
    return arrange(gcn(forgotten), memory, machine).seconds


@pytest.mark.parametrize("matrices", [2.0, 3.0, 4.0, 5.0])
def test_where_the_disk_is_slow_stages_are_run_again(matrices: float) -> None:
    """It makes epochs shorter than keeping everything, and the plan is proven as any other."""
    chosen = choose_workload(gcn, limits(matrices), SLOW_DISK)
    verify_plan(chosen.plan)
    if chosen.forgotten:
        assert seconds(chosen.forgotten, limits(matrices), SLOW_DISK) < seconds(NOTHING, limits(matrices), SLOW_DISK)
        again = {row["matrix"] for row in chosen.plan.summary() if row["fate"] == "recompute"}
        assert again == {f"z{stage + 1}" for stage in chosen.forgotten}
    else:
        assert matrices == 2.0


@pytest.mark.parametrize("machine", [FAST_DISK, with_disk(WITH_DEVICE_MEMORY, 1e12)], ids=lambda m: m.name)
def test_where_the_disk_is_fast_no_pull_is_run_again(machine: Hardware) -> None:
    """What is drawn from the features may be: that takes no pull, and spares memory."""
    memory = Limits(4_000_000 + 2 * MATRIX, 4_000_000 + 2 * MATRIX)
    assert choose_workload(gcn, memory, machine).forgotten <= {0}


def test_with_plenty_of_memory_everything_is_kept() -> None:
    """Nothing is gained, and ties go to keeping."""
    assert choose_workload(gcn, limits(40), SLOW_DISK).forgotten == NOTHING


def test_what_cannot_be_run_again_is_kept() -> None:
    def variants(forgotten: Forgotten) -> Workload:
        assert not forgotten
        return gcn(repeatable=False)

    assert choose_workload(variants, limits(3), SLOW_DISK).forgotten == NOTHING


@pytest.mark.parametrize("matrices", [3.0, 4.0])
def test_what_may_not_be_written_is_computed_again(matrices: float) -> None:
    """Where the least that keeping everything writes is more than the limit; and no less will do than is named."""
    with pytest.raises(BudgetError) as error:
        arrange(gcn(), limits(matrices, writes=0), UNMEASURED)
    assert "give --max-ssd-writes" in str(error.value)
    chosen = choose_workload(gcn, limits(matrices, writes=0), UNMEASURED)
    assert chosen.forgotten
    assert chosen.plan.ssd_write_bytes == 0
    verify_plan(chosen.plan)


def test_a_limit_that_nothing_keeps_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(BudgetError, match="give --max-ssd-writes") as error:
        choose_workload(gcn, limits(0.5, writes=0), UNMEASURED)
    named = str(error.value).split("--max-ssd-writes ")[1].split(",")[0]
    least = int(float(named[:-1]) * {"K": 1e3, "M": 1e6, "G": 1e9}[named[-1]])
    chosen = choose_workload(gcn, limits(0.5, writes=least), UNMEASURED)
    assert 0 < chosen.plan.ssd_write_bytes <= least
    with pytest.raises(BudgetError):
        choose_workload(gcn, limits(0.5, writes=least * 98 // 100), UNMEASURED)


def test_too_little_memory_is_refused_as_ever() -> None:
    for writes in (None, 0):
        with pytest.raises(BudgetError, match="give --gpu-budget"):
            choose_workload(gcn, Limits(1000, 200_000, ssd_write_bytes=writes), UNMEASURED)


@pytest.mark.parametrize(("matrices", "rate"), [(2.5, 1e8), (4.5, 1e8), (3.5, 3e8)])
def test_what_is_found_is_not_far_from_the_best_of_all_sets(matrices: float, rate: float) -> None:
    """Against every set of stages, each arranged and forecast."""
    machine = with_disk(UNMEASURED, rate)
    found = choose_workload(gcn, limits(matrices), machine)
    by_set = {forgotten: seconds(forgotten, limits(matrices), machine) for forgotten in _all_sets()}
    assert by_set[found.forgotten] <= 1.02 * min(by_set.values())


def _all_sets() -> list[Forgotten]:
    return [frozenset(k for k in range(LAYERS - 1) if number >> k & 1) for number in range(1 << (LAYERS - 1))]


@pytest.mark.parametrize("machine", [UNMEASURED, WITH_DEVICE_MEMORY], ids=lambda m: m.name)
def test_the_chain_has_the_workload_s_matrices_phases_and_budgets(machine: Hardware) -> None:
    memory = Limits(40_000_000, 60_000_000)
    found = arrange(gcn(), memory, machine)
    epoch = chain_of(gcn(), memory, machine, layout=found.layout, leanest=found.leanest)
    assert epoch is not None
    assert [item.name for item in epoch.chain.intermediates] == ["z1", "z2", "z3", "z4"]
    assert all(MATRIX <= item.nbytes < MATRIX + item.blocks for item in epoch.chain.intermediates)
    assert [phase.name for phase in epoch.chain.phases] == [
        *(f"forward {k}" for k in (1, 2, 3, 4)),
        *(f"backward {k}" for k in (4, 3, 2, 1)),
    ]
    assert epoch.budgets.device_bytes <= memory.device_bytes
    assert epoch.budgets.device_bytes + epoch.budgets.host_bytes < memory.device_bytes + memory.host_bytes
    assert choose_fates(epoch.chain, epoch.budgets, most_states=20_000).ledger.keeps(epoch.budgets)


def test_lifetimes_that_are_not_nested_have_no_chain() -> None:
    """What is kept first must be read last."""
    work = gcn()
    other = {"backward 4": ("z3",), "backward 3": ("z4",)}
    swapped = tuple(replace(stage, loads=other.get(stage.name, stage.loads)) for stage in work.programs["train"])
    work = replace(work, programs={**work.programs, "train": swapped})
    memory = Limits(40_000_000, 60_000_000)
    found = arrange(work, memory, UNMEASURED)
    assert chain_of(work, memory, UNMEASURED, layout=found.layout, leanest=found.leanest) is None
