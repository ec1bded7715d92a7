# SPDX-License-Identifier: Apache-2.0
"""A workload's training epoch as a chain, for ``ooc.plan.fates``: what is kept, phase by phase, with loads and memory.

The chain is coarser than what runs. A phase of it is all stages from one that keeps something for the backward pass to
the next; what lives from one pass to the next is held in whatever memory the passes themselves leave, before anything
that waits for the backward pass (its next use is sooner, so Belady's rule would have it so), and what finds no room is
written and read once; data that is there in every epoch comes from the SSD. Computing takes as long as in forecasts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ooc.plan.budgets import Limits, Room
from ooc.plan.chain import NOTHING, Budgets, Chain, Intermediate, Load, Phase, Rates, Recomputation
from ooc.plan.forecast import seconds_of_computing
from ooc.plan.hardware import Hardware
from ooc.plan.layout import Layout
from ooc.plan.lifetimes import edges_of
from ooc.plan.occupancy import blocks_at_once
from ooc.plan.passes import DealPass, Pass, RowPass
from ooc.plan.slabs import pulled_slabs
from ooc.plan.staging import IN_TRANSFER
from ooc.plan.workload import Kept, Stage, Workload

_BLOCKS = 8
"""Parts of a matrix that may wait in different tiers."""
_UNITS = 128
"""Of the larger budget: what memory is counted in."""


@dataclass(frozen=True)
class EpochChain:
    """``chain`` and what there is for it. ``stages[i]``: the forward stage that keeps intermediate i, by number."""

    chain: Chain
    budgets: Budgets
    stages: tuple[int, ...]


def chain_of(
    workload: Workload, limits: Limits, hardware: Hardware, *, layout: Layout, leanest: Layout
) -> EpochChain | None:
    """The chain of the training epoch: seconds as with ``layout``, the passes' own memory as with ``leanest``.

    None where lifetimes are not nested, or the passes' own memory counted in units does not leave any; and where the
    program has no such stages: a prediction's, with norms that do not take moments.
    """
    if not {kept.name for kept in workload.kept} <= {stage.name for stage in workload.programs["train"]}:
        return None
    epoch = _Epoch(workload, limits, hardware, layout, leanest)
    return epoch.chain() if epoch.nested else None


class _Epoch:
    def __init__(self, workload: Workload, limits: Limits, hardware: Hardware, layout: Layout, leanest: Layout) -> None:
        self.workload, self.hardware, self.layout, self.leanest = workload, hardware, layout, leanest
        self.kept = workload.kept
        self.waiting = {name for kept in self.kept for name in kept.matrices}
        self.stages: Sequence[Stage] = workload.programs["train"]
        self.passes = _by_stage(layout.programs["train"])
        self.lean_passes = _by_stage(leanest.programs["train"])
        self.budgets = self._budgets(limits)
        names = [stage.name for stage in self.stages]
        self.loss = next((i for i, stage in enumerate(self.stages) if stage.reverse), len(names))
        self.written = [names.index(kept.name) for kept in self.kept]
        self.read = [max((i for i in self._readers(kept) if i > self.loss), default=-1) for kept in self.kept]

    @property
    def nested(self) -> bool:
        """Whether what is kept first is read last."""
        ends = [*self.read, self.loss]
        return bool(self.kept) and all(a > b for a, b in pairwise(ends))

    def chain(self) -> EpochChain | None:
        depth = len(self.kept)
        forward = list(zip([-1, *self.written], self.written, strict=False))
        ends = [self.written[-1], *self.read[::-1]]
        ends[-1] = len(self.stages) - 1
        backward = list(pairwise(ends))
        phases = [self._phase(range(first + 1, last + 1)) for first, last in (*forward, *backward)]
        if any(
            self.budgets.units(p.device_bytes) > self.budgets.device_units
            or self.budgets.units(p.host_bytes) > self.budgets.host_units
            for p in phases
        ):
            return None
        items = [self._intermediate(i, phases[i]) for i in range(depth)]
        source = self._moved(self._lasting(self.written[0]))
        chain = Chain(tuple(items), tuple(phases), source, self._rates())
        return EpochChain(chain, self.budgets, tuple(kept.stage for kept in self.kept))

    # ---- what is kept --------------------------------------------------------------------------------------

    def _readers(self, kept: Kept) -> list[int]:
        return [i for i, stage in enumerate(self.stages) if {*kept.matrices} & {*stage.loads}]

    def _nbytes(self, kept: Kept) -> int:
        return sum(self.workload.matrices[name].nbytes for name in kept.matrices)

    def _intermediate(self, depth: int, phase: Phase) -> Intermediate:
        kept, last = self.kept[depth], depth + 1 == len(self.kept)
        nbytes = self._nbytes(kept)
        return Intermediate(
            name=", ".join(kept.matrices),
            blocks=_BLOCKS,
            block_bytes=-(-nbytes // _BLOCKS),
            read_next=not last and any(i <= self.loss for i in self._readers(kept)),
            recomputation=self._recomputation(depth, phase, nbytes) if kept.repeatable else None,
        )

    def _recomputation(self, depth: int, phase: Phase, nbytes: int) -> Recomputation:
        """The forward phase again. What it computes, and what it pulls for that, has to lie somewhere until it is used:
        on the device as far as there is room beside the backward phase, and in the host's memory."""
        load = replace(phase.load, ssd_write_bytes=0, down_bytes=0)
        if self.kept[depth].stage == 0:  # drawn where it is needed from what the chain counts as its source
            return Recomputation(Load(compute_s=load.compute_s))
        pulled = [s.pull.source for s in (self.stages[self.written[depth]],) if s.pull]
        nbytes += sum(self.workload.matrices[name].nbytes for name in pulled)
        backward = self._own_bytes(range(self.read[depth], self.read[depth] + 1))
        device = min(nbytes, self._room(self.budgets.device_units, backward)) if self.hardware.wire else 0
        return Recomputation(load, device, nbytes - device)

    # ---- phases --------------------------------------------------------------------------------------------

    def _phase(self, stages: range) -> Phase:
        own = self._own_bytes(stages)
        passes = [item for at in stages for item in self.passes[at]]
        names = {name for item in passes for name in (*item.reads, *item.stores)}
        matrices = [self.layout.matrices[name].matrix for name in names - self.waiting]
        passing = sum(m.nbytes for m in matrices if not m.kind.lasts)
        on_device = self.hardware.wire is not None
        device = min(passing, self._room(self.budgets.device_units, own)) if on_device else 0
        host = min(passing - device, self._room(self.budgets.host_units, 0 if on_device else own))
        spilled = passing - device - host
        computing = sum(seconds_of_computing(item, self.layout, self.workload, self.hardware) for item in passes)
        lasting = sum(self._lasting(at) for at in stages)
        load = self._moved(lasting) + Load(computing, host + spilled, host + spilled, spilled, spilled)
        title = self.stages[stages[-1]].name if stages else "nothing"
        if on_device:
            return Phase(title, load, own + device, host)
        return Phase(title, replace(load, up_bytes=0, down_bytes=0), 0, own + host)

    def _own_bytes(self, stages: range) -> int:
        """Memory that the leanest passes of ``stages`` work in."""
        programs, regions = self.leanest.programs["train"], self.leanest.regions["train"]
        most = 0
        for item in (item for at in stages for item in self.lean_passes[at]):
            taken = max((r.stop for r in regions if r.first <= item.index <= r.last), default=0)
            most = max(most, taken + blocks_at_once(item, self.leanest, self.workload, programs))
        return most * self.leanest.frame_bytes

    def _lasting(self, at: int) -> int:
        """Bytes that stage ``at`` reads of what is there in every epoch."""
        nbytes = 0
        for item in self.passes[at]:
            for name in item.reads:
                matrix = self.layout.matrices[name].matrix
                if matrix.kind.lasts:
                    nbytes += min(item.rows, matrix.rows) * matrix.columns * matrix.itemsize
            if item.pull is not None:
                topology = self.workload.topologies[item.pull.direction]
                edges = edges_of(topology, item.rows, self.workload.tile_rows)
                slabs = pulled_slabs(item, self.layout.matrices[item.pull.source].grid)
                nbytes += len(slabs) * edges * topology.edge_bytes(item.pull.edge_data)
        return nbytes

    def _moved(self, nbytes: int) -> Load:
        """From the SSD to where it is computed."""
        return Load(up_bytes=nbytes if self.hardware.wire else 0, ssd_read_bytes=nbytes) if nbytes else NOTHING

    # ---- the machine ---------------------------------------------------------------------------------------

    def _budgets(self, limits: Limits) -> Budgets:
        """What arenas may take. On the CPU there is one, which counts as the host's."""
        arena = max(0, Room(self.workload, limits, self.hardware).arena_bytes(self.leanest))
        device, host = 0, arena
        if self.hardware.wire is not None:
            ring = IN_TRANSFER * self.leanest.frame_bytes
            device, host = arena, max(0, limits.host_bytes - self.workload.fixed_host_bytes - ring)
        return Budgets(device, host, limits.ssd_write_bytes, unit_bytes=max(1, max(device, host) // _UNITS))

    def _room(self, units: int, own_bytes: int) -> int:
        """Bytes in whole units that a budget leaves beside ``own_bytes``."""
        return max(0, units - self.budgets.units(own_bytes)) * self.budgets.unit_bytes

    def _rates(self) -> Rates:
        disk, wire = self.hardware.disk, self.hardware.wire
        return Rates(
            up_bytes_per_s=wire.to_device_bytes_per_s if wire else math.inf,
            down_bytes_per_s=wire.to_host_bytes_per_s if wire else math.inf,
            ssd_read_bytes_per_s=disk.read_bytes_per_s.at(self.layout.frame_bytes),
            ssd_write_bytes_per_s=disk.write_bytes_per_s.at(self.layout.frame_bytes),
            ssd_both_bytes_per_s=disk.both_ways_bytes_per_s,
            overlap=self.hardware.overlap,
        )


def _by_stage(passes: Sequence[Pass]) -> list[list[Pass]]:
    """The passes of each stage: a row pass, or the column pass or the dealing before it as well."""
    ends = [isinstance(item, RowPass) and not isinstance(item, DealPass) for item in passes]
    numbers = list(accumulate(ends, initial=0))
    stages: list[list[Pass]] = [[] for _ in range(numbers[-1])]
    for item, number in zip(passes, numbers, strict=False):
        stages[number].append(item)
    return stages
