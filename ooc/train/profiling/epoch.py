# SPDX-License-Identifier: Apache-2.0
"""What the executor itself costs, and how much of the disk's time it hides: tiny epochs of its own.

The program writes a matrix, reads it to write another, and reads that backwards. With one column and memory for all
of it, nothing is left but steps and tiles; of two block heights, one has eight times the steps. With more columns and
little memory, every block goes to the disk and back, with and without something to compute meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import torch

from ooc.plan import Kind, Limits, Matrix, Plan, Stage, Workload, make_plan
from ooc.train.executor import Executor
from ooc.train.graph import GraphRows
from ooc.train.stages import Step, Tile

_TILE_ROWS = 1024
_TILES = 128
_ROWS = _TILES * _TILE_ROWS
_COLUMNS = 64
_SHORT, _TALL = _TILE_ROWS, 8 * _TILE_ROWS
_OPERATORS = 24
"""Of a tile, so that computing takes about as long as its disk."""
_PASSES = 3
_ROUNDS = 3
_AMPLE, _SCARCE = 256_000_000, 12_000_000


@dataclass(frozen=True, slots=True)
class EpochTimes:
    """``per_tile`` and ``per_step``: processor seconds of any one thread; ``per_block``: shared by all of them.
    ``overlap``: see ``Hardware``."""

    per_tile: float
    per_step: float
    per_block: float
    overlap: float


@dataclass(frozen=True, slots=True)
class _Run:
    clock_s: float
    cpu_s: float
    steps: int
    blocks: int


def measure_epoch(folder: Path, *, threads: int, cores: int) -> EpochTimes:
    """About two seconds, with spill files of 67 MB in ``folder``."""
    small = _matrix(1)

    def nothing(tile: Tile) -> None:
        pass

    short = _run(small, _SHORT, _AMPLE, folder, threads, nothing)
    tall = _run(small, _TALL, _AMPLE, folder, threads, nothing)
    per_step = max(0.0, (short.cpu_s - tall.cpu_s) / (short.steps - tall.steps))
    per_tile = max(0.0, (tall.cpu_s - tall.steps * per_step) / (_PASSES * _TILES))

    large = _matrix(_COLUMNS)
    wide = torch.ones(_TILE_ROWS, _COLUMNS)

    def stream(tile: Tile) -> None:
        for _ in range(_OPERATORS):
            torch.relu(wide)

    memory = _run(large, _SHORT, _AMPLE, folder, threads, nothing)
    disk = _run(large, _SHORT, _SCARCE, folder, threads, nothing)
    compute = _run(large, _SHORT, _AMPLE, folder, threads, stream)
    both = _run(large, _SHORT, _SCARCE, folder, threads, stream)
    per_block = max(0.0, (disk.cpu_s - memory.cpu_s) / max(1, disk.blocks))
    computing = compute.clock_s + both.blocks * per_block / cores
    return EpochTimes(
        per_tile=per_tile,
        per_step=per_step,
        per_block=per_block / cores,
        overlap=hidden_share(computing, disk.clock_s, both.clock_s),
    )


def hidden_share(first_s: float, second_s: float, together_s: float) -> float:
    """How much of the shorter of two times is hidden behind the longer when both take ``together_s``: from 0 to 1."""
    longest, shortest = max(first_s, second_s), min(first_s, second_s)
    if shortest <= 0:
        return 1.0
    return min(1.0, max(0.0, 1 - (together_s - longest) / shortest))


def _matrix(columns: int) -> dict[str, Matrix]:
    return {name: Matrix(name, _ROWS, columns, 4, Kind.SCRATCH) for name in ("first", "second")}


def _run(
    matrices: dict[str, Matrix],
    block_rows: int,
    budget_bytes: int,
    folder: Path,
    threads: int,
    work: Callable[[Tile], None],
) -> _Run:
    """One such epoch: the least clock and processor time of a few, after one that fills the memory."""
    columns = matrices["first"].columns
    rows = torch.ones(_TILE_ROWS, columns)
    scratch = 8 * columns

    def compute(stores: tuple[str, ...]) -> Callable[[Tile], dict[str, torch.Tensor]]:
        def tile_of(tile: Tile) -> dict[str, torch.Tensor]:
            work(tile)
            return dict.fromkeys(stores, rows)

        return tile_of

    stages = (
        Stage("write", _ROWS, (), None, ("first",), scratch),
        Stage("read and write", _ROWS, ("first",), None, ("second",), scratch),
        Stage("read back", _ROWS, ("second",), None, (), scratch, reverse=True),
    )
    plan = make_plan(_workload(matrices, stages, threads), Limits(budget_bytes, budget_bytes, block_rows=block_rows))
    steps = [Step(stage, compute(stage.stores)) for stage in stages]
    executor = _executor(plan, folder, threads)
    try:
        clocks, processor = [], []
        for _ in range(1 + _ROUNDS):
            clock, cpu = perf_counter(), process_time()
            executor.run("train", steps, lambda _: None, lambda _: None)
            clocks.append(perf_counter() - clock)
            processor.append(process_time() - cpu)
    finally:
        executor.close()
    blocks = (plan.ssd_read_bytes + plan.ssd_write_bytes) // plan.frame_bytes
    return _Run(min(clocks[1:]), min(processor[1:]), len(plan.unrolled["train"].steps), blocks)


def _workload(matrices: dict[str, Matrix], stages: tuple[Stage, ...], threads: int) -> Workload:
    return Workload(
        rows=_ROWS,
        tile_rows=_TILE_ROWS,
        matrices=matrices,
        programs={"train": stages},
        topologies={},
        fixed_host_bytes=0,
        fixed_device_bytes=0,
        pulled_itemsize=4,
        threads=threads,
    )


def _executor(plan: Plan, folder: Path, threads: int) -> Executor:
    """Of a program without edges and without matrices of a store: the store is asked for nothing but its folder."""
    no_store: Any = SimpleNamespace(path=folder)
    no_rows = GraphRows(offsets={}, scale_N1=None, before=False, self_term=False, self_N1=None)
    return Executor(plan, no_store, {}, no_rows, torch.float32, folder, threads=threads)
