# SPDX-License-Identifier: Apache-2.0
"""Forward stages are run again where that makes epochs shorter, or nothing else keeps a limit on what is written."""

from dataclasses import replace
from functools import cache, partial

import pytest

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Direction, Hardware, Kind, Limits, Matrix, Pull, Stage, Topology, Workload, planner
from ooc.plan.hardware import Curve, Disk
from ooc.plan.planner import choose_workload, plan_layout
from ooc.plan.problem import NOTHING, Problem, Recomputed, State
from ooc.plan.program.verifier import verify_plan
from ooc.plan.workload import Kept, Share
from tests.examples import cases, examples, thorough
from tests.plan.workloads import WITH_DEVICE_MEMORY

ROWS, WIDTH, LAYERS, DEGREE = 10_000, 64, 4, 4
MATRIX = ROWS * WIDTH * 4


def with_disk(machine: Hardware, bytes_per_s: float) -> Hardware:
    rate = Curve(((1.0, bytes_per_s),))
    return replace(machine, disk=Disk(rate, rate, bytes_per_s, machine.disk.latency_s))


SLOW_DISK = with_disk(UNMEASURED, 1e8)
FAST_DISK = with_disk(UNMEASURED, 1e11)


@cache
def gcn(recomputed: Recomputed = NOTHING, *, repeatable: bool = True, layers: int = LAYERS) -> Workload:
    """A GCN's epoch: z1 … kept for the backward pass, those of the stages ``recomputed`` computed again for it."""
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
        return () if k - 1 in recomputed and k > 1 else (f"z{k}",) if k - 1 not in recomputed else ("x",)

    def kept(k: int) -> tuple[str, ...]:
        return () if k - 1 in recomputed else (f"z{k}",)

    for k in range(1, layers):
        stage(f"forward {k}", ("x",) if k == 1 else (), f"m{k}" if k > 1 else "", (*kept(k), f"m{k + 1}"))
    stage("loss", (), f"m{layers}", (f"dp{layers}",), back=True)
    for k in range(layers - 1, 0, -1):
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
        recomputed=tuple(Matrix(f"z{k + 1}", ROWS, WIDTH, 4, Kind.SCRATCH) for k in sorted(recomputed)),
        kept=tuple(Kept(k - 1, (f"z{k}",), repeatable) for k in range(1, layers) if k - 1 not in recomputed),
    )


def limits(matrices: float, *, writes: int | None = None) -> Limits:
    """Memory for so many of the matrices that are kept, and for what passes work in."""
    return Limits(4_000_000 + int(matrices * MATRIX), 4_000_000, ssd_write_bytes=writes)


def seconds(recomputed: Recomputed, memory: Limits, machine: Hardware) -> float:
    return plan_layout(gcn(recomputed), memory, machine).seconds


@pytest.mark.parametrize("matrices", thorough([2.0, 3.0, 5.0], 2.0, 5.0))
def test_where_the_disk_is_slow_stages_are_run_again(matrices: float) -> None:
    """It makes epochs shorter than keeping everything, and the plan is proven as any other."""
    chosen = choose_workload(gcn, limits(matrices), SLOW_DISK)
    verify_plan(chosen.plan)
    if chosen.recomputed:
        assert seconds(chosen.recomputed, limits(matrices), SLOW_DISK) < seconds(NOTHING, limits(matrices), SLOW_DISK)
        again = {row["matrix"] for row in chosen.plan.summary() if row["fate"] == "recompute"}
        assert again == {f"z{stage + 1}" for stage in chosen.recomputed}
    else:
        assert matrices == 2.0


@pytest.mark.parametrize("machine", [FAST_DISK, with_disk(WITH_DEVICE_MEMORY, 1e12)], ids=lambda m: m.name)
def test_where_the_disk_is_fast_no_pull_is_run_again(machine: Hardware) -> None:
    """What is drawn from the features may be: that takes no pull, and spares memory."""
    memory = Limits(4_000_000 + 2 * MATRIX, 4_000_000 + 2 * MATRIX)
    assert choose_workload(gcn, memory, machine).recomputed <= {0}


def test_stages_that_take_longer_to_run_again_than_to_move_are_tried_in_greedy_sets_alone() -> None:
    """Each set of a deep model takes long to describe, to lay out and to forecast."""
    asked: set[Recomputed] = set()

    def variants(recomputed: Recomputed) -> Workload:
        asked.add(recomputed)
        return gcn(recomputed, layers=16)

    assert choose_workload(variants, limits(3.0), UNMEASURED).recomputed == NOTHING
    assert len(asked) <= 9


def test_of_stages_that_are_alike_one_is_tried() -> None:
    """Beside those that are recomputed others are tried than far from them."""
    problem = Problem(gcn(layers=16), limits(3.0), SLOW_DISK)
    neighbours = partial(problem.neighbours, stages=range(15))
    assert set(map(frozenset, ([0], [1], [2]))) == {*neighbours(NOTHING)}
    assert {frozenset({7, other}) for other in (0, 1, 2, 6, 8)} | {NOTHING} == {*neighbours(frozenset({7}))}


def test_with_plenty_of_memory_everything_is_kept() -> None:
    """Nothing is gained, and ties go to keeping."""
    assert choose_workload(gcn, limits(40), SLOW_DISK).recomputed == NOTHING


def test_what_others_send_is_no_reason_to_describe_what_could_be_recomputed() -> None:
    """It is waited for as long whatever is kept."""

    def variant(recomputed: Recomputed) -> Workload:
        assert not recomputed
        return replace(gcn(), share=Share(0, {"": (range(5120), range(5120, ROWS))}))

    chosen = choose_workload(variant, Limits(10**9, 10**9, link_bytes_per_s=10**6), UNMEASURED)
    assert chosen.recomputed == NOTHING and chosen.plan.received_bytes("train") > 0


def test_what_cannot_be_run_again_is_kept() -> None:
    def variants(recomputed: Recomputed) -> Workload:
        assert not recomputed
        return gcn(repeatable=False)

    assert choose_workload(variants, limits(3), SLOW_DISK).recomputed == NOTHING


def test_what_a_prediction_does_not_keep_is_not_recomputed() -> None:
    """Its workload names the stages that training would keep something of, but has no such matrices."""
    work = gcn()
    forward = tuple(replace(stage, stores=stage.stores[-1:]) for stage in work.programs["train"] if not stage.reverse)
    matrices = {name: matrix for name, matrix in work.matrices.items() if name[0] in "xm"}
    work = replace(work, matrices=matrices, programs={"prepare": (), "train": forward})

    def variants(recomputed: Recomputed) -> Workload:
        assert not recomputed
        return work

    assert choose_workload(variants, limits(1.0), SLOW_DISK).recomputed == NOTHING


@pytest.mark.thorough  # tests/train/test_recomputing.py trains by such a plan
def test_what_may_not_be_written_is_computed_again() -> None:
    """Where the least that keeping everything writes is more than the limit; and no less will do than is named."""
    with pytest.raises(BudgetError) as error:
        plan_layout(gcn(), limits(3.0, writes=0), UNMEASURED)
    assert "give max_ssd_writes=" in str(error.value)
    chosen = choose_workload(gcn, limits(3.0, writes=0), UNMEASURED)
    assert chosen.recomputed
    assert chosen.plan.ssd_write_bytes == 0
    verify_plan(chosen.plan)


def test_a_limit_that_nothing_keeps_is_refused_with_the_least_that_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """For which no set of stages is planned twice."""
    solve, solved = planner.solve, list[tuple[int, int | None]]()

    def watched(problem: Problem) -> State:
        solved.append((id(problem.workload), problem.most_written))
        return solve(problem)

    monkeypatch.setattr(planner, "solve", watched)
    with pytest.raises(BudgetError, match="give max_ssd_writes=") as error:
        choose_workload(gcn, limits(0.5, writes=0), UNMEASURED)
    assert len(solved) == len(set(solved)) > 2
    named = str(error.value).split("max_ssd_writes='")[1].split("'")[0]
    least = int(float(named[:-1]) * {"K": 1e3, "M": 1e6, "G": 1e9}[named[-1]])
    chosen = choose_workload(gcn, limits(0.5, writes=least), UNMEASURED)
    assert 0 < chosen.plan.ssd_write_bytes <= least
    with pytest.raises(BudgetError):
        choose_workload(gcn, limits(0.5, writes=least * 98 // 100), UNMEASURED)


def test_too_little_memory_is_refused_as_ever() -> None:
    for writes in (None, 0):
        with pytest.raises(BudgetError, match="give gpu_budget="):
            choose_workload(gcn, Limits(1000, 200_000, ssd_write_bytes=writes), UNMEASURED)


@pytest.mark.parametrize(("matrices", "rate"), [(2.5, 1e8), (3.5, 3e8)][: examples(1)])
def test_what_is_found_is_not_far_from_the_best_of_all_sets(matrices: float, rate: float) -> None:
    """Against every set of stages, in an ordinary run every other one, each planned and forecast."""
    machine = with_disk(UNMEASURED, rate)
    found = choose_workload(gcn, limits(matrices), machine)
    tried = cases({*_all_sets()[::2], found.recomputed}, _all_sets())
    by_set = {recomputed: seconds(recomputed, limits(matrices), machine) for recomputed in tried}
    assert by_set[found.recomputed] <= 1.02 * min(by_set.values())


def _all_sets() -> list[Recomputed]:
    return [frozenset(k for k in range(LAYERS - 1) if number >> k & 1) for number in range(1 << (LAYERS - 1))]
