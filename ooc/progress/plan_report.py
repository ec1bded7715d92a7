# SPDX-License-Identifier: Apache-2.0
"""What a plan promises, as one value: for tables, for ``--json``, and for comparison with the run that followed.

``as_dict`` is the documented form (docs/planning.md): keys are added, never renamed.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from ooc.plan import Hardware, Limits, Plan, Stage, Workload
from ooc.plan.program.program import found_in_memory
from ooc.plan.program.received import exposed_s
from ooc.plan.program.replacement import Kept, belady, lru_hits
from ooc.plan.program.sequence import Use
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource, Timeline
from ooc.plan.workload import Direction, EdgeData
from ooc.progress.live import Tier
from ooc.sizes import format_size

_MOST_SPANS = 200_000
"""The most uses of blocks for which other replacement policies are simulated: half a second."""


@dataclass(frozen=True)
class PlanReport:
    """A plan with its workload, and the machine and budgets it was made for.

    ``program``: the program whose time counts; ``evaluated``: whether every epoch is followed by a separate evaluation,
    which runs in the same memory.
    """

    workload: Workload
    plan: Plan
    hardware: Hardware
    limits: Limits
    program: str = "train"
    evaluated: bool = False

    @classmethod
    def of_run(cls, workload: Workload, plan: Plan, hardware: Hardware, limits: Limits, *, eval_every: int) -> Self:
        """Return the report on the program that most epochs of a run are.

        Where every epoch is scored, that is a forward pass that also serves the evaluation.
        """
        program = "train_and_score" if eval_every == 1 and "train_and_score" in plan.programs else "train"
        return cls(workload, plan, hardware, limits, program, evaluated=eval_every == 1 and program == "train")

    @cached_property
    def timeline(self) -> Timeline:
        """The forecast of one epoch, instruction by instruction."""
        return simulate(self.plan, self.workload, self.hardware, self.program)

    @property
    def compute_s(self) -> float:
        return self.timeline.busy_s.get(Resource.COMPUTE, 0.0)

    @cached_property
    def score_s(self) -> float | None:
        """Seconds of scoring an epoch, where that is a separate forward pass; otherwise None."""
        if not self.evaluated or "evaluate" not in self.plan.programs:
            return None
        return simulate(self.plan, self.workload, self.hardware, "evaluate").epoch_s

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """The memories that an epoch takes; one of them where the CPU computes."""
        plan, limits = self.plan, self.limits
        if not self.hardware.has_device_memory:
            promised = plan.device_peak_bytes + plan.host_peak_bytes
            return (Tier("memory", limits.memory_bytes, promised, ("device_peak_bytes", "host_peak_bytes")),)
        return (
            Tier("GPU memory", limits.device_bytes, plan.device_peak_bytes, ("device_peak_bytes",)),
            Tier("host memory", limits.host_bytes, plan.host_peak_bytes, ("host_peak_bytes",)),
        )

    @cached_property
    def link_exposed_s(self) -> float:
        """Seconds of an epoch spent waiting for rows of other processes."""
        passes = zip(self.plan.received(self.program), self.timeline.passes, strict=True)
        rate = self.limits.received_bytes_per_s(self.hardware)
        return sum(exposed_s(received, item.end_s - item.start_s, rate) for received, item in passes)

    @property
    def links(self) -> str:
        """A text that says how fast rows go to another process, and with GPUs which way."""
        limits, ways = self.limits, {True: ", from GPU to GPU", False: ", by way of the host"}
        way = ways[limits.is_direct] if self.hardware.has_device_memory else ""
        return f"{format_size(limits.link_bytes_per_s)} a second{way}"

    @property
    def epoch_s(self) -> float:
        return self.timeline.epoch_s + self.link_exposed_s

    @cached_property
    def ssd_read_bytes(self) -> int:
        """Bytes read from the SSD in an epoch after the first, including rereads of what an evaluation evicted."""
        before = "evaluate" if self.evaluated else self.program
        return self.plan.bytes_read(self.program) + self.plan.filling_bytes(self.program, after=before)

    @property
    def first_epoch_read_bytes(self) -> int:
        """Bytes read from the SSD in the first epoch, which fills the memory."""
        return self.plan.bytes_read(self.program) + self.plan.filling_bytes(self.program, after=None)

    @cached_property
    def ssd_write_bytes(self) -> int:
        """Bytes written to the SSD in one run of the program."""
        return self.plan.bytes_written(self.program)

    @cached_property
    def cache(self) -> dict[str, int] | None:
        """How many of an epoch's reads of blocks (``uses``) hit the memory above the SSD.

        ``found``: as planned; ``belady``: with the fewest reads possible, whatever writes cost; ``lru``: with a cache
        that evicts the least recently used block. None for programs so long that simulating them takes seconds.
        """
        program = self.plan.lowest(self.program)
        uses = program.uses
        if len(uses.spans) > _MOST_SPANS:
            return None
        reads = [span.use is not Use.WRITE for span in uses.spans]

        def found(kept: Kept) -> int:
            return sum(hit and read for hit, read in zip(found_in_memory(uses, kept), reads, strict=True))

        best = belady(replace(uses, spare_writes=False)) if uses.spare_writes else program.kept
        return {"uses": sum(reads), "found": found(program.kept), "belady": found(best), "lru": lru_hits(uses)}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, without the whole timeline."""
        timeline, plan = self.timeline, self.plan
        moved = timeline.moved_bytes
        return {
            "program": self.program,
            "hardware": {"name": self.hardware.name, "source": self.hardware.source},
            "gpu_budget_bytes": self.limits.device_bytes,
            "host_budget_bytes": self.limits.host_bytes,
            "memory_bytes": None if self.hardware.has_device_memory else self.limits.memory_bytes,
            "epoch_s": self.epoch_s,
            "ssd_read_bytes": self.ssd_read_bytes,
            "ssd_write_bytes": self.ssd_write_bytes,
            "first_epoch_read_bytes": self.first_epoch_read_bytes,
            "ssd_busy_s": timeline.ssd_busy_s,
            "wait_s": timeline.wait_s,
            "gpu_peak_bytes": plan.device_peak_bytes,
            "host_peak_bytes": plan.host_peak_bytes,
            "spill_bytes": plan.spill_bytes,
            "optimizer_state_bytes": plan.state_bytes,
            "spills_rounded": self.workload.may_round,
            "bottleneck": timeline.bottleneck.value,
            "resources": [
                {"resource": resource.value, "busy_s": busy_s, "bytes": moved.get(resource, 0)}
                for resource, busy_s in timeline.busy_s.items()
            ],
            "fates": plan.fates(),
            "cache": self.cache,
            "passes": [
                {"name": item.title, "time_s": item.end_s - item.start_s, "wait_s": item.waited_s}
                | {"bound": item.bound.value}
                for item in timeline.passes
            ],
            "stages": stage_statistics(self.workload, self.program),
            "lifetimes": lifetimes(self.workload, self.program),
        }


def stage_statistics(workload: Workload, program: str = "train") -> list[dict[str, Any]]:
    """Return what each stage computes and moves, in order, wherever its matrices are stored.

    ``multiplies``: multiply-adds of its dense products; ``edges``: edges summed over; ``edge_bytes``: their bytes.
    """
    return [_statistics(stage, workload) for stage in workload.programs[program]]


def _statistics(stage: Stage, workload: Workload) -> dict[str, Any]:
    rows = workload.own(stage.space, stage.rows)

    def nbytes(name: str) -> int:
        matrix = workload.matrices[name]
        return len(workload.own(stage.space, min(stage.rows, matrix.rows))) * matrix.columns * matrix.itemsize

    edges = edge_bytes = pulled_bytes = 0
    if stage.pull is not None:
        topology = workload.topologies[stage.pull.direction]
        edges = topology.edges_of(rows, workload.tile_rows)
        edge_bytes = edges * topology.edge_bytes(stage.pull.edge_data)
        pulled_bytes = workload.matrices[stage.pull.source].nbytes
    loaded = sum(map(nbytes, stage.loads))
    if stage.entry_bytes:
        entries = workload.topologies[Direction.FEATURES]
        loaded += entries.edges_of(rows, workload.tile_rows) * entries.edge_bytes((EdgeData.WEIGHT,))
    return {
        "stage": stage.name,
        "rows": len(rows),
        "edges": edges,
        "edge_bytes": edge_bytes,
        "loaded_bytes": loaded,
        "pulled_bytes": pulled_bytes,
        "stored_bytes": sum(map(nbytes, stage.stores)),
        "multiplies": len(rows) * stage.multiplies_per_row,
    }


def lifetimes(workload: Workload, program: str = "train") -> list[dict[str, Any]]:
    """Return the stages between which each matrix is alive, in order of its first stage.

    Stages up to and including the loss are the forward pass, later ones the backward pass. ``produced`` is None for a
    matrix that exists before the epoch. ``last_forward`` and ``backward`` are the stages of the two passes that read
    it, None or empty where none does.
    """
    stages = workload.programs[program]
    loss = next((i for i, stage in enumerate(stages) if stage.reverse), len(stages))
    reads = [(*stage.loads, stage.pull.source) if stage.pull else stage.loads for stage in stages]
    names = dict.fromkeys(name for read, stage in zip(reads, stages, strict=True) for name in (*read, *stage.writes))
    found = []
    for name in names:
        readers = [i for i, read in enumerate(reads) if name in read]
        forward = [stages[i].name for i in readers if i <= loss]
        found.append(
            {
                "matrix": name,
                "nbytes": workload.matrices[name].nbytes,
                "produced": next((stage.name for stage in stages if name in stage.writes), None),
                "last_forward": forward[-1] if forward else None,
                "backward": [stages[i].name for i in readers if i > loss],
            }
        )
    return found
