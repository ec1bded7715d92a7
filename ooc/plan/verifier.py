# SPDX-License-Identifier: Apache-2.0
"""The proof that a plan can run, made from the plan alone and independent of how it was found.

No two buffers alive in the same pass overlap, no arena exceeds its budget, no matrix is read before it is
written, and none that is read is smaller than what was written. The trainer runs nothing that fails this.
"""

from ooc.plan.placement import Buffer
from ooc.plan.plan import ColumnPass, Plan
from ooc.plan.workload import Fate, Kind


def verify_plan(plan: Plan) -> None:
    """Raise AssertionError, saying what is wrong, if the plan cannot be trusted: a bug in the planner."""
    _verify_placement(list(plan.buffers.values()))
    _verify_budgets(plan)
    _verify_order(plan)


def _verify_placement(buffers: list[Buffer]) -> None:
    for tier in (Fate.DEVICE, Fate.HOST):
        ordered = sorted((b for b in buffers if b.tier is tier), key=lambda b: b.offset)
        for i, low in enumerate(ordered):
            for high in ordered[i + 1 :]:
                if high.offset >= low.end:
                    break
                if low.first <= high.last and high.first <= low.last:
                    raise AssertionError(f"buffers {low.name} and {high.name} overlap")


def _verify_budgets(plan: Plan) -> None:
    ends = {tier: max((b.end for b in plan.buffers.values() if b.tier is tier), default=0) for tier in Fate}
    if ends[Fate.SSD]:
        raise AssertionError("a buffer lies on the SSD")
    if ends[Fate.DEVICE] > plan.device_arena_bytes or ends[Fate.HOST] > plan.host_arena_bytes:
        raise AssertionError("a buffer lies outside its arena")
    if (
        plan.device_arena_bytes + plan.scratch_bytes > plan.device_peak_bytes
        or plan.device_peak_bytes > plan.device_limit_bytes
    ):
        raise AssertionError(f"device: {plan.device_peak_bytes} bytes planned, {plan.device_limit_bytes} allowed")
    if plan.host_arena_bytes > plan.host_peak_bytes or plan.host_peak_bytes > plan.host_limit_bytes:
        raise AssertionError(f"host: {plan.host_peak_bytes} bytes planned, {plan.host_limit_bytes} allowed")


def _verify_order(plan: Plan) -> None:
    lasting = {name for name, m in plan.matrices.items() if m.matrix.kind is Kind.STORE}
    for program, passes in plan.programs.items():
        written = set(lasting)
        for item in passes:
            if isinstance(item, ColumnPass):
                reads, writes = {item.pull.source}, {item.pull.output}
            else:
                reads = {*item.loads, *((item.pull.source,) if item.pull else ())}
                writes = set(item.stage.stores)
            for name in sorted(reads - written):
                raise AssertionError(f"{program}: pass {item.index} reads {name} before it is written")
            if reads & writes:
                raise AssertionError(f"{program}: pass {item.index} reads and writes {reads & writes}")
            _verify_alive(plan, program, item.index, reads | writes)
            written |= writes
        lasting |= {name for name in written if plan.matrices[name].matrix.kind is Kind.CONSTANT}


def _verify_alive(plan: Plan, program: str, index: int, names: set[str]) -> None:
    for name in names:
        planned = plan.matrices[name]
        if not planned.resident_rows:
            continue
        scratch = planned.matrix.kind is Kind.SCRATCH
        buffer = plan.buffers[f"resident/{name}/{program}" if scratch else f"resident/{name}"]
        if not buffer.first <= index <= buffer.last:
            raise AssertionError(f"{program}: {name} is not in memory during pass {index}")
        needed = planned.resident_rows * planned.matrix.columns * planned.matrix.itemsize
        if buffer.nbytes < needed:
            raise AssertionError(f"{program}: the buffer of {name} is too small")
