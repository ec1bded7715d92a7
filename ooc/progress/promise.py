# SPDX-License-Identifier: Apache-2.0
"""What a plan promises of most epochs of a training, for the live view."""

from ooc.plan import Hardware, Limits, Plan, Workload
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource, Timeline
from ooc.progress.live import Promise, Tier

_HOST, _DEVICE = "host_peak_bytes", "device_peak_bytes"


def usual_program(plan: Plan, eval_every: int) -> str:
    """The program that most epochs are: where every one is scored, a forward pass that does both, if there is such."""
    return "train_and_score" if eval_every == 1 and "train_and_score" in plan.programs else "train"


def is_evaluated(program: str, eval_every: int) -> bool:
    """Whether every epoch is followed by an evaluation of its own."""
    return eval_every == 1 and program == "train"


def promise_of(
    plan: Plan,
    workload: Workload,
    hardware: Hardware,
    limits: Limits,
    *,
    program: str,
    evaluated: bool,
    timeline: Timeline | None = None,
) -> Promise:
    """``timeline`` is that of ``program``, simulated here where it is not given. ``evaluated``: every epoch is followed
    by an evaluation of its own."""
    if timeline is None:
        timeline = simulate(plan, workload, hardware, program)
    # Evaluations between epochs put out of memory what the next one reads again.
    refilled = plan.filling_bytes(program) if evaluated else 0
    scored = simulate(plan, workload, hardware, "evaluate") if evaluated and "evaluate" in plan.programs else None
    return Promise(
        epoch_s=timeline.epoch_s,
        compute_s=timeline.busy_s.get(Resource.COMPUTE, 0.0),
        ssd_busy_s=timeline.ssd_busy_s,
        wait_s=timeline.wait_s,
        score_s=None if scored is None else scored.epoch_s,
        ssd_read_bytes=plan.bytes_read(program) + refilled,
        ssd_write_bytes=plan.bytes_written(program),
        tiers=tiers_of(plan, hardware, limits),
    )


def tiers_of(plan: Plan, hardware: Hardware, limits: Limits) -> tuple[Tier, ...]:
    """The memory that an epoch takes; one where the CPU computes."""
    if not hardware.has_device_memory:
        promised = plan.device_peak_bytes + plan.host_peak_bytes
        return (Tier("memory", limits.memory_bytes, promised, (_DEVICE, _HOST)),)
    return (
        Tier("GPU memory", limits.device_bytes, plan.device_peak_bytes, (_DEVICE,)),
        Tier("host memory", limits.host_bytes, plan.host_peak_bytes, (_HOST,)),
    )
