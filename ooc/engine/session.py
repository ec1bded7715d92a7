# SPDX-License-Identifier: Apache-2.0
"""The lifetime of prepared programs: arenas, spill files and threads, the model on its device, and runs of the
programs."""

import shutil
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from ooc.engine.exchange import joined_checksum
from ooc.engine.executor import run_program
from ooc.engine.first_aggregation import find_aggregation, keep_aggregation
from ooc.engine.record import EpochRecord, PassRecord, Taken
from ooc.engine.recording import EpochRecorder
from ooc.engine.runtime import Planned, Runtime
from ooc.engine.workers import one_thread
from ooc.errors import BudgetError, OptionError
from ooc.events import Listener, Note, reported
from ooc.kernels.pulls import rehearse
from ooc.memory import return_freed_memory
from ooc.model.graph import AnyScaling
from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.network import Network, values_of
from ooc.plan import Fate
from ooc.ranks import ALONE
from ooc.sizes import format_size
from ooc.stages import PanelSums, StageBuilder, Step, panel_rows
from ooc.storage.versioned_array import VersionedArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Planned):
    """A lowered model with its programs and the plan that runs them within the budgets."""

    network: Network
    builder: StageBuilder
    steps: dict[str, list[Step]]
    listener: Listener


class Session:
    """A runner of prepared programs. Nothing is allocated before ``start``; ``close`` releases everything.

    With a device, ``models`` and the ``optimizer`` are on it between ``start`` and ``close``, and on the CPU before and
    after. Parameters, buffers and gradients keep their identity: any object that refers to one, an optimizer or a
    function taken from the model, sees it moved. A parameter's optimizer state moves, too. State that torch keeps on
    the CPU (Adam's step counters) stays there.
    """

    def __init__(
        self, prepared: Prepared, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._prepared = prepared
        self._models = nn.ModuleList(models)
        self._optimizer = optimizer
        self._store, self._spill_dir, self._listener = prepared.store, prepared.spill_dir, prepared.listener
        self._runtime: Runtime | None = None
        self._passes: tuple[PassRecord, ...] = ()

    @property
    def started(self) -> bool:
        """Whether ``start`` has been called since the last ``close``."""
        return self._runtime is not None

    @property
    def runtime(self) -> Runtime:
        """The arenas, files and threads between ``start`` and ``close``."""
        assert self._runtime is not None, "start comes first"
        return self._runtime

    def start(self) -> None:
        """Allocate arenas and files and compute the first aggregation."""
        prepared = self._prepared
        # Let glibc keep what tiles' temporaries free: to hand it back and fault it in again for every tile costs more
        # than the arithmetic (first touch of 4 KiB pages runs at 0.4 GB/s). What is larger than 16 MiB goes back at
        # once: of edges with features, in pieces of many sizes, the heap kept 150 MB more than was in use, and than
        # the budgets allow for.
        return_freed_memory(16 << 20, trim_bytes=32 << 20)
        if prepared.device is None:
            self._rehearse()
        self._runtime = Runtime(prepared)
        try:
            if prepared.device is not None:
                self._move(prepared.device.place)
            self._prepare(self._runtime)
        except BaseException as error:
            self.close()
            if isinstance(error, torch.OutOfMemoryError):
                raise BudgetError("the device has no room left for the model; give a larger gpu_budget=") from None
            raise

    def _rehearse(self) -> None:
        """Compile loops over edges, or load them from the compiler's cache, before epochs are timed."""
        network, builder, plan = self._prepared.network, self._prepared.builder, self._prepared.plan
        pulls = [value for value in values_of(network.training) if isinstance(value, EdgeAggregate)]
        passes = (item for program in plan.programs.values() for item in program)
        sources = [plan.matrices[item.pull.source] for item in passes if item.pull and item.pull.per_edge is None]
        with reported(self._listener, "compiled kernels", len(pulls) + 1, "layers") as done:
            # Where slabs are narrow no loop sums them, and none is compiled for that. Not every wider one has
            # a loop, either: so each width is tried, that of a last slab, too.
            summed = set()
            for source in sources:
                is_narrow = source.region_itemsize < network.dtype.itemsize
                kept_as = self._prepared.spill_dtype if is_narrow else network.dtype
                for slab in (0, source.grid.slabs - 1):
                    summed.add((source.grid.width(slab) + source.spare_columns, kept_as))
            for columns, kept_as in summed:
                rehearse(columns, kept_as)
            builder.objective.rehearse(network.dtype)
            done(1)
            for number, pull in enumerate(pulls, 2):
                pull.rehearse(builder, network.dtype, self._prepared.spill_dtype)
                done(number)

    def _move(self, place: torch.device) -> None:
        for tensor in chain(self._models.parameters(), self._models.buffers()):
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(place)
            tensor.grad = None if gradient is None else gradient.to(place)
        if self._optimizer is not None:
            _move_state(self._optimizer, place)

    def adopt(self, prepared: Prepared) -> None:
        """Close, and use another preparation of the same model from the next ``start`` on."""
        self.close()
        self._prepared = prepared

    def check_disk(self, beside: int = 0) -> None:
        """Raise BudgetError when scratch data does not fit on its disk, together with ``beside`` bytes of an embedding.

        A missing spill folder is made. With several processes, each checks the total of its machine, whose processes
        are assumed to share one folder.
        """
        ranks = ALONE if self._prepared.exchange is None else self._prepared.exchange.ranks
        needed = ranks.gathered(torch.tensor([self._prepared.plan.spill_bytes]))
        ranks.in_all(lambda: self._check_disk(sum(int(needed[rank]) for rank in ranks.here), beside))

    def _check_disk(self, needed: int, beside: int) -> None:
        there = next(folder for folder in (self._spill_dir, *self._spill_dir.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free
        if needed + beside > free:
            learnt = f" and keeps an embedding of {format_size(beside)} on its disk" if beside else ""
            raise BudgetError(
                f"the plan spills {format_size(needed)} to {self._spill_dir}{learnt}, where {format_size(free)} are "
                "free; give another spill_dir= or more memory"
            )
        try:
            self._spill_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"spill folder {self._spill_dir}: {error.strerror or error}") from error

    def _prepare(self, runtime: Runtime) -> None:
        """Compute the first aggregation, and keep it in the store for later runs.

        Of several processes the first one writes it. On other machines, the first process whose store lacks it by then
        writes it, and the others send it their rows.
        """
        if not self._prepared.steps["prepare"]:
            return
        self.run("prepare", "first aggregation")
        network = self._prepared.network
        names = {scaling: network.first_aggregation(scaling) for scaling in network.aggregated_once}
        made = {scaling: name for scaling, name in names.items() if name not in self._prepared.arrays}
        if any([self._kept(scaling, runtime, name) for scaling, name in made.items()]):
            self._listener(Note(f"the first aggregation is kept in {self._store.path} for later runs"))

    def _kept(self, scaling: AnyScaling, runtime: Runtime, name: str) -> bool:
        """Keep matrix ``name`` in the store; return whether this process did so."""
        grid, exchange = runtime.matrices[name].grid, runtime.exchange
        shape = grid.rows, grid.columns
        if exchange is None:
            return keep_aggregation(self._store, scaling, runtime.dtype, shape, runtime.read_rows(name))
        is_kept = False
        for writer in exchange.ranks.first_of_machines:
            is_lacking = find_aggregation(self._store, scaling, runtime.dtype) is None
            if not exchange.of_all(is_lacking)[writer]:  # it was kept before, or the machines share a store
                continue
            blocks = runtime.read_rows(name, to=writer)
            try:
                if exchange.ranks.rank == writer:
                    is_kept = keep_aggregation(self._store, scaling, runtime.dtype, shape, blocks)
            finally:
                deque(blocks, maxlen=0)  # the others must send their rows in any case
        return is_kept

    @torch.no_grad()
    def run(self, program: str, task: str, recorder: EpochRecorder | None = None) -> None:
        """Run one of the programs, watched by ``recorder``; ``task`` is its name for people.

        StoreError where the store was replaced before or during the run: files are opened by name whenever they are
        read, and results from two stores belong to neither.
        """
        runtime, prepared = self.runtime, self._prepared
        network, exchange = prepared.network, prepared.exchange
        network.forget_weights()
        heights = {space: panel_rows(rows, prepared.plan.tile_rows) for space, rows in self._store.node_counts.items()}
        sums = PanelSums(prepared.builder.reduce, heights, network, None if exchange is None else exchange.panels)
        passes = len(prepared.plan.programs[program])
        during = nullcontext() if exchange is None else exchange.during(program)
        with (
            one_thread(),
            self._store.unreplaced(),
            reported(self._listener, task, passes, "passes") as advance,
            during,
        ):
            self._passes = run_program(runtime, program, prepared.steps[program], sums, advance, recorder)

    def forget(self) -> None:
        """Discard what the last program has left in memory, since its training step is not to be kept."""
        if self._runtime is not None:
            self._runtime.settle()

    def await_learnt(self) -> None:
        """Wait until trained rows of the last program are on the SSD; their checksums are then recorded."""
        runtime = self.runtime
        for matrix in runtime.matrices.values():
            if isinstance(matrix.array, VersionedArray):
                for block in range(matrix.grid.blocks):
                    runtime.workspace.await_written(matrix.number(0, block))
                rows = range(matrix.grid.rows) if matrix.own is None else matrix.own
                crc = matrix.sums(written=True).written(rows)
                if runtime.exchange is not None:
                    crc = joined_checksum(runtime.exchange.ranks, crc, len(rows) * matrix.grid.row_bytes(0))
                matrix.array.note(crc)

    def record(self, started: Taken, *, epoch: int, loss: float) -> EpochRecord:
        """Return what the epoch that began at ``started`` and has ended took; not scored yet."""
        runtime, taken = self.runtime, self.runtime.taken().since(started)._asdict()
        return EpochRecord(
            epoch=epoch,
            loss=loss,
            host_peak_bytes=runtime.peak_bytes(Fate.HOST),
            device_peak_bytes=runtime.peak_bytes(Fate.DEVICE),
            hit_rate=self._prepared.plan.hit_rate,
            passes=self._passes,
            ssd_way=runtime.ssd_way,
            **{name: value for name, value in taken.items() if name not in ("compute_s", "cpu_s")},
        )

    def close(self) -> None:
        """Free arenas, threads and spill files. May be called twice, and ``start`` may follow."""
        self._prepared.network.forget_weights()
        if self._prepared.exchange is not None:
            self._prepared.exchange.close()
        if self._runtime is not None:
            try:
                if self._prepared.device is not None:
                    self._move(torch.device("cpu"))
            finally:
                self._runtime.close()
                self._runtime = None


def _move_state(optimizer: torch.optim.Optimizer, place: torch.device) -> None:
    """Move optimizer state with its parameter, except single numbers that torch keeps on the CPU."""
    for group in optimizer.param_groups:
        with_parameter = bool(group.get("capturable")) or bool(group.get("fused"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, kept in state.items():
                if isinstance(kept, Tensor) and (kept.dim() or with_parameter):
                    state[name] = kept.to(place)
