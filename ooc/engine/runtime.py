# SPDX-License-Identifier: Apache-2.0
"""What one trainer holds while it runs: arenas, spill files, threads, and every matrix with its blocks.

Where a block goes from the SSD to the kernel: the ``Workspace`` reads it into the frame that the program gives it,
steps ahead, on a device with memory of its own by way of a frame of the host; its bytes are compared with what was
stored (``BlockSums``); ``Input.tile`` (ooc.engine.operands) views rows of that frame; the stage's function, or a pull,
takes that view as its operand. ``ProgramRun`` says what happens between steps, ``PassRun`` what in them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, cast

import torch
from torch import Tensor

from ooc.engine.exchange import Exchange
from ooc.engine.operands import BlockedMatrix, as_matrix
from ooc.engine.record import Taken
from ooc.engine.shuffle import P, ShuffleFile
from ooc.engine.workers import WorkerPool
from ooc.errors import StoreError
from ooc.kernels.deferred_checks import DeferredChecks, Fault
from ooc.kernels.dropout.edges import UNSORTED
from ooc.kernels.edges import Retained, SelfLoops, Spare, TileEdges
from ooc.kernels.pulls import pulls_for
from ooc.model.graph import AnyScaling, GraphRows, damaged
from ooc.plan.layout.passes import edges_name
from ooc.plan.program.plan import Plan
from ooc.plan.program.staging import CopyTo
from ooc.plan.workload import Direction, EdgeData, EdgesKey, Fate, Kind, Workload
from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.device import Device
from ooc.prefetch.device_frames import DeviceWorkspace
from ooc.prefetch.engine import Engine, Span
from ooc.prefetch.engines.choice import BY_GPUDIRECT, BY_WAY_OF_HOST, choose_engine, choose_gpudirect
from ooc.prefetch.frames import HostWorkspace, Workspace
from ooc.prefetch.spill import create_spill
from ooc.prefetch.transfers import Transfers
from ooc.stages.workload import edge_array
from ooc.storage.array import Array
from ooc.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan for a ``workload``, and what it runs on and in. ``arrays``: matrices of the store, ``rows``: what is known
    of every row, ``dtype``: what is computed in, ``spill_dtype``: what is kept between passes.

    ``device``: one with memory of its own, for which the plan has been made; None: the CPU computes. ``exchange``: with
    the other processes, where each computes a share of the rows.
    """

    plan: Plan
    workload: Workload
    store: Store
    arrays: Mapping[str, Array]
    rows: GraphRows
    dtype: torch.dtype
    spill_dtype: torch.dtype
    spill_dir: Path
    threads: int
    device: Device | None = None
    exchange: Exchange | None = None


class Runtime:
    """Owns the arenas, spill files and I/O threads of one trainer. ``close`` gives everything back."""

    def __init__(self, given: Planned) -> None:
        plan, store, arrays, device = given.plan, given.store, given.arrays, given.device
        assert plan.has_tiers == (device is not None), "the plan is made for another kind of machine"
        self.plan, self.store, self.rows, self.exchange = plan, store, given.rows, given.exchange
        self.dtype, self.spill_dtype, spill_dir = given.dtype, given.spill_dtype, given.spill_dir
        self.checks: dict[EdgesKey, DeferredChecks] = {}
        """On a device, about the neighbour lists of each direction."""
        if device is not None:
            keys = dict.fromkeys([*plan.topologies, *([Direction.FEATURES] if store.types is None else [])])
            self.checks = {key: DeferredChecks(store.neighbours(key.value)) for key in keys}
        self.retained: dict[EdgesKey, Retained] = {}
        """By topology: what is retained of its tiles."""
        if plan.retained_bytes:
            spare = Spare(plan.retained_bytes)
            self.retained = {key: Retained(spare) for key in plan.topologies if key.of_edges}
        self.operands: dict[Hashable, Any] = {}
        """Of row passes, by program, pass and matrix: the same in every run."""
        self._resources = ExitStack()
        with ExitStack() as opening:
            opening.enter_context(store.held())
            self.engine = choose_engine(spill_dir, store.path)[0]
            opening.callback(self.engine.close)
            self.workers = WorkerPool(given.threads, given.workload.tasks_ahead)
            opening.callback(self.workers.close)
            self._arena = Arena(plan.arena_bytes if device is None else plan.host_frames * plan.frame_bytes)
            opening.callback(self._arena.close)
            self._transfers: Transfers | None = None
            self._gpudirect: Engine | None = None
            self.workspace = self._open_workspace(device, spill_dir, opening)
            self.matrices: dict[str, BlockedMatrix] = {}
            table = plan.blocks
            for name, base, grid, own in zip(table.names, table.bases, table.grids, table.own, strict=True):
                array = self._array(name, arrays)
                dtype = self._dtype(name, array)
                planned = plan.matrices.get(name)  # None: edges
                as_it_is = planned is None or planned.region_itemsize == dtype.itemsize
                region_dtype = dtype if as_it_is else self.dtype
                self.matrices[name] = matrix = BlockedMatrix(name, grid, dtype, region_dtype, base, array, own=own)
                opening.callback(matrix.close)
                if name in plan.spilled:
                    matrix.file = create_spill(spill_dir, name, grid.file_nbytes, plan.spilled_parts(name))
            self.partial_sums = self._open_shuffles(plan.partial_sums, spill_dir, opening)
            self.bucketed_rows = self._open_shuffles(plan.bucketed_rows, spill_dir, opening)
            opening.callback(self.workspace.settle)
            self._resources = opening.pop_all()

    def _open_shuffles(self, plans: Mapping[str, P], spill_dir: Path, opening: ExitStack) -> dict[str, ShuffleFile[P]]:
        files = {}
        for name, plan in plans.items():
            spill = create_spill(spill_dir, name, plan.nbytes)
            files[name] = ShuffleFile(name, plan, self.matrices[name].region_dtype, spill, self.engine)
            opening.callback(files[name].close)
        return files

    def _open_workspace(self, device: Device | None, spill_dir: Path, opening: ExitStack) -> Workspace:
        """The memory that is computed in; on a device, with the host's arena below it."""
        plan, arena = self.plan, self._arena
        if device is None:
            places = self._locate, plan.blocks.memory_nbytes, partial(self._locate, writing=True), self
            part = None if plan.share is None else self._part
            return HostWorkspace(arena, plan.frame_bytes, self.engine, *places, part)
        host = arena.view(0, arena.nbytes)
        staged = 0 if self.exchange is None else self.exchange.staging.host_bytes
        staging = Arena(staged)
        buffers = [staging.view(0, staged)] if staged else []
        opening.callback(staging.close)
        opening.callback(device.close)
        sizes = {"arena_bytes": plan.arena_bytes, "limit_bytes": plan.device_limit_bytes}
        memory = device.open(**sizes, host=host, graph=[*self.rows.memory(), *buffers])
        if self.exchange is not None:
            self.exchange.compute_on(device, *map(torch.from_numpy, buffers))
        self._gpudirect = choose_gpudirect(spill_dir, device=device.place.type, counters=self.engine.counters)
        if self._gpudirect is not None:
            opening.callback(self._gpudirect.close)
        self._transfers = Transfers(
            *(device, host, plan.frame_bytes, self.engine, self._locate, self._gpudirect),
            slab_of=lambda block: plan.blocks.where(block)[1],
            checks=self,
        )
        opening.callback(self._transfers.close)
        return DeviceWorkspace(device, memory, plan.frame_bytes, self._transfers, plan.blocks.nbytes)

    def _locate(self, block: int, *, writing: bool = False) -> tuple[Sequence[Span], int]:
        """Where a block lies on the SSD, or is to be written, and its bytes."""
        name, slab, number = self.plan.blocks.where(block)
        matrix = self.matrices[name]
        return matrix.spans(slab, number, writing=writing), matrix.grid.block_nbytes(slab, number)

    def _part(self, block: int) -> slice:
        """Which of its bytes lie there."""
        name, slab, number = self.plan.blocks.where(block)
        return self.matrices[name].part(slab, number)

    def check_read(self, block: int, memory: Bytes) -> None:
        """A block has come from the SSD to ``memory``; SpillError or StoreError where it is another than was stored."""
        name, slab, number = self.plan.blocks.where(block)
        self.matrices[name].sums().read(slab, number, memory)

    def note_write(self, block: int, memory: Bytes | None) -> None:
        """A block is about to be written, out of ``memory`` if that can be seen."""
        name, slab, number = self.plan.blocks.where(block)
        sums = self.matrices[name].sums(written=True)
        sums.forget(slab, number) if memory is None else sums.write(slab, number, memory)

    def compare_rest(self) -> None:
        """Of what was read of the store compare what has not been, for want of the rest of its chunk."""
        for matrix in self.matrices.values():
            for sums in matrix.checksums.values():
                sums.finish()

    def _array(self, name: str, arrays: Mapping[str, Array]) -> Array | None:
        """The store's array behind a matrix or an index array; None for what is the run's own."""
        for direction, topology in self.plan.topologies.items():
            if name == edges_name(direction):
                return self.store.topology(direction.value)[1]
            for data in topology.data:
                if name == edges_name(direction, data):
                    return edge_array(self.store, direction, data)
        return arrays[name] if self.plan.matrices[name].matrix.kind in (Kind.STORE, Kind.LEARNT) else None

    def _dtype(self, name: str, array: Array | None) -> torch.dtype:
        if array is not None:
            return cast(torch.dtype, getattr(torch, array.dtype.name))
        matrix = self.plan.matrices[name].matrix
        if matrix.kind is Kind.BITS:
            return torch.uint8
        return self.dtype if matrix.itemsize == self.dtype.itemsize else self.spill_dtype

    def rounded(self, values: Tensor, source: str) -> Tensor:
        """What was pulled of ``source``, as it would be had it been kept in between: a pass that keeps nothing gives
        the same results."""
        kept_as = self.matrices[source].dtype
        return values if kept_as == self.dtype else values.to(kept_as).to(self.dtype)

    def forget(self, direction: Direction) -> None:
        """The edges of ``direction`` have been rewritten: what of them is in memory is read anew."""
        for name, matrix in self.matrices.items():
            if name in {edges_name(direction, data) for data in (None, *EdgeData)}:
                self.workspace.forget(range(matrix.base, matrix.base + matrix.grid.blocks))
                matrix.checksums.clear()

    def peak_bytes(self, tier: Fate) -> int:
        """What has been used of a budget so far: the arena's high-water mark, and what is admitted beside it. Of a
        device with memory of its own both arenas are taken whole."""
        plan, used = self.plan, self._arena.used_bytes
        if plan.has_tiers:
            return plan.device_peak_bytes if tier is Fate.DEVICE else plan.host_peak_bytes
        if tier is Fate.DEVICE:
            return plan.device_peak_bytes - plan.device_arena_bytes + min(used, plan.device_arena_bytes)
        return plan.host_peak_bytes - plan.host_arena_bytes + max(0, used - plan.device_arena_bytes)

    @property
    def ssd_way(self) -> str:
        """What reads and writes the SSD, and how that gets to a device with memory of its own."""
        if self._transfers is None:
            return self.engine.name
        if self._gpudirect is None:
            return f"{self.engine.name}, {BY_WAY_OF_HOST}"
        return f"{self.engine.name}, and {self._gpudirect.name} {BY_GPUDIRECT}"

    def taken(self) -> Taken:
        """What has been taken so far, bytes over PCIe included."""
        io, moved = self.engine.counters, {} if self._transfers is None else self._transfers.bytes_moved
        return Taken(
            perf_counter(),
            self.workers.busy_s,
            process_time(),
            io.wait_s,
            io.read_bytes,
            io.write_bytes,
            io.busy_seconds(),
            moved.get(CopyTo.DEVICE, 0),
            moved.get(CopyTo.HOST, 0),
            *((0, 0.0) if self.exchange is None else (self.exchange.received_bytes, self.exchange.waited_s)),
        )

    def close(self) -> None:
        """End the threads, free the arena and the spill files. May be called twice."""
        self.operands.clear()
        self._resources.close()

    def settle(self) -> None:
        """Let everything under way end, whatever its result."""
        self.workspace.settle()
        files: list[ShuffleFile[Any]] = [*self.partial_sums.values(), *self.bucketed_rows.values()]
        for file in files:
            file.settle()

    def pull_rows(
        self, source: Tensor, edges: TileEdges, direction: EdgesKey, scaling: AnyScaling, out: Tensor | None = None
    ) -> Tensor:
        """The tile's rows of the sum over neighbours, with the self term that ``scaling`` has; in ``out``, of the
        source's type, where kernels can sum right into it.

        ``source`` may have fewer rows than the graph: the others are zero. Where it is narrower than what is computed
        in, so is the result: a sum in float32, rounded once, which is why the self term is one of the summands.
        """
        of_rows = self.rows.scaled(scaling)
        is_narrow = source.dtype != self.dtype
        if edges.weight_E is not None:
            assert not is_narrow, "weights would be rounded to the source's type"
            edges = replace(edges, weight_E=edges.weight_E.to(source.dtype))
        if is_narrow and of_rows.self_term:
            edges = replace(edges, self_loops=SelfLoops.EXACTLY_ONE)
        try:
            own = None if is_narrow else of_rows.own(slice(edges.start, edges.start + edges.rows), source)
            return pulls_for(source).sums(edges, source, has_loops=of_rows.self_N1 is not None, own=own, out=out)
        except RuntimeError:
            indices = edges.indices_E
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < edges.nodes:
                raise damaged(self.store, f"{direction.value}/indices") from None
            raise

    def refuse_faults(self) -> None:
        """StoreError where a program has met neighbour lists that cannot be what was written."""
        found = {direction: checks.found() for direction, checks in self.checks.items()}
        for direction, faults in found.items():
            if Fault.OUT_OF_RANGE in faults:
                raise damaged(self.store, f"{direction.value}/indices")
            if Fault.UNSORTED in faults:
                raise StoreError(UNSORTED)

    def read_rows(self, name: str, to: int = 0) -> Iterator[Tensor]:
        """A constant matrix, row block by row block, for those who want a copy of it: of several processes the one with
        the number ``to`` gets what all have, and all have to ask. No program may be running."""
        grid, exchange = self.matrices[name].grid, self.exchange
        blocks = self._read_own_rows(name, self.plan.own(name, grid.rows))
        if exchange is None:
            return blocks
        return exchange.gathered_rows(
            blocks, grid, self.matrices[name].dtype, self.plan.matrices[name].matrix.space, to
        )

    def _read_own_rows(self, name: str, own: range) -> Iterator[Tensor]:
        matrix = self.matrices[name]
        grid = matrix.grid
        for block in grid.blocks_with(own):
            self.workspace.await_written(matrix.number(0, block))
            memory = torch.empty(grid.block_nbytes(0, block), dtype=torch.uint8)
            self.engine.read(matrix.spans(0, block), memory.numpy()).wait()
            matrix.sums().read(0, block, memory.numpy())
            part = grid.part(block, own)
            yield as_matrix(memory, matrix.dtype, grid.height(block), grid.width(0))[part.start : part.stop]
