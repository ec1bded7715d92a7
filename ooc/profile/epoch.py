# SPDX-License-Identifier: Apache-2.0
"""Measure what the executor itself costs, by tiny epochs.

The program writes a matrix, reads it to write another, and reads that backwards. With one column and memory for all of
it, only the costs of steps and tiles are left; of two block heights, one has eight times the steps. With more columns
and little memory, every block goes to the disk and back.
"""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import torch

from ooc.engine.executor import run_program
from ooc.engine.runtime import Planned, Runtime
from ooc.model.graph import GraphRows
from ooc.plan import Kind, Limits, Matrix, Stage, Workload, make_plan
from ooc.profile.bench import Round, settled
from ooc.stages import PanelSums, Step, Tile
from ooc.stages.workload import TASKS_AHEAD

_TILE_ROWS = 1024
_TILES = 128
_ROWS = _TILES * _TILE_ROWS
_COLUMNS = 64
_SHORT, _TALL = _TILE_ROWS, 8 * _TILE_ROWS
_PASSES = 3
_MOST_ROUNDS = 10
_AMPLE, _SCARCE = 256_000_000, 12_000_000


@dataclass(frozen=True, slots=True)
class EpochTimes:
    """The costs of an epoch. ``per_tile`` and ``per_step``: processor seconds of one thread; ``per_block`` and
    ``per_byte``: processor seconds shared by all threads."""

    per_tile: float
    per_step: float
    per_block: float
    per_byte: float


def measure_epoch(folder: Path, *, threads: int, cores: int) -> EpochTimes:
    """Measure for two to four seconds, with spill files of 67 MB in ``folder``."""
    with ExitStack() as stack:
        epochs: list[_Epoch] = []
        for one in (
            (1, _SHORT, _AMPLE),
            (1, _TALL, _AMPLE),
            (_COLUMNS, _SHORT, _AMPLE),
            (_COLUMNS, _SHORT, _SCARCE),
            (_COLUMNS, _TALL, _SCARCE),
        ):
            epochs.append(_Epoch(*one, folder, threads))
            stack.callback(epochs[-1].close)
            epochs[-1].run()  # fills the memory
        while not all(settled(epoch.rounds, most=_MOST_ROUNDS) for epoch in epochs):
            for epoch in epochs:  # alternating, so that other load affects both alike
                epoch.rounds.append(epoch.run())
    short, tall, memory, disk, larger = epochs
    per_step = max(0.0, (short.least.cpu_s - tall.least.cpu_s) / (short.steps - tall.steps))
    per_tile = max(0.0, (tall.least.cpu_s - tall.steps * per_step) / (_PASSES * _TILES))
    moving_s, moving_larger_s = (  # of a block
        max(0.0, one.least.cpu_s - memory.least.cpu_s + (memory.steps - one.steps) * per_step) / one.blocks / cores
        for one in (disk, larger)
    )
    per_byte = max(0.0, (moving_larger_s - moving_s) / (larger.block_bytes - disk.block_bytes))
    per_block = max(0.0, moving_s - disk.block_bytes * per_byte)
    return EpochTimes(per_tile, per_step, per_block, per_byte)


class _Epoch:
    """One such epoch, which can be run repeatedly.

    ``rounds``: the time of each run, in processor seconds of all threads together.
    """

    def __init__(self, columns: int, block_rows: int, budget_bytes: int, folder: Path, threads: int) -> None:
        matrices = {name: Matrix(name, _ROWS, columns, 4, Kind.SCRATCH) for name in ("first", "second")}
        rows = torch.ones(_TILE_ROWS, columns)
        scratch = 8 * columns

        def compute(stage: Stage, tile: Tile) -> dict[str, torch.Tensor]:
            return dict.fromkeys(stage.stores, rows)

        stages = (
            Stage("write", _ROWS, (), None, ("first",), scratch),
            Stage("read and write", _ROWS, ("first",), None, ("second",), scratch),
            Stage("read back", _ROWS, ("second",), None, (), scratch, reverse=True),
        )
        limits = Limits(budget_bytes, budget_bytes, block_rows=block_rows)
        workload = Workload(
            rows=_ROWS,
            tile_rows=_TILE_ROWS,
            matrices=matrices,
            programs={"train": stages},
            topologies={},
            fixed_host_bytes=0,
            fixed_device_bytes=0,
            pulled_itemsize=4,
            threads=threads,
            tasks_ahead=TASKS_AHEAD * threads,
        )
        plan = make_plan(workload, limits)
        self.steps = len(plan.unrolled["train"].steps)
        self.block_bytes = plan.frame_bytes
        self.blocks = max(1, (plan.ssd_read_bytes + plan.ssd_write_bytes) // plan.frame_bytes)
        self.rounds: list[Round] = []
        self._steps = [Step(stage, partial(compute, stage)) for stage in stages]
        # Without edges and matrices, only the store's folder is used.
        store: Any = SimpleNamespace(path=folder, held=nullcontext)
        found: dict[str, Any] = {"store": store, "arrays": {}, "rows": GraphRows(), "spill_dir": folder}
        found |= {"dtype": rows.dtype, "spill_dtype": rows.dtype, "threads": threads}
        self._runtime = Runtime(Planned(plan=plan, workload=workload, **found))

    @property
    def least(self) -> Round:
        """Return the run that was disturbed least."""
        return min(self.rounds)

    def run(self) -> Round:
        """Run and time it once more."""
        clock, cpu = perf_counter(), process_time()
        sums = PanelSums(lambda _: None, {"": self._runtime.plan.tile_rows})
        run_program(self._runtime, "train", self._steps, sums, lambda _: None)
        return Round(perf_counter() - clock, process_time() - cpu)

    def close(self) -> None:
        self._runtime.close()
