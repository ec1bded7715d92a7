# SPDX-License-Identifier: Apache-2.0
"""Measure the processor: rates of aggregation, dense products and element-wise work, by the kernels that training
uses."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from ooc.kernels.cuda.segments import long_parts
from ooc.kernels.edges import TileEdges
from ooc.kernels.gat import GatHeads
from ooc.kernels.pulls import pulls_for
from ooc.model.layers.per_edge import attention_work
from ooc.plan.hardware import Curve
from ooc.profile.bench import Bench

POOL_BYTES = 128 << 20
"""Bytes of the slab that is pulled from: several times a processor's cache."""
_POOL_PER_CACHE = 16
"""The size of a GPU's slab, relative to its cache. A cache that kept the most popular rows would serve 16^-0.4 = 33 %
of the accesses; one of 50 MiB, as large GPUs have, 69 % of those to 128 MiB."""
_POOL_SHARE = 0.25
"""The largest share of a GPU's free memory for the slab: element-wise work takes one and a half times as much beside
it."""
ROW_BYTES = (32, 64, 128, 256, 512, 1024)
DEGREES = (4, 64)
DTYPES = ("float32", "bfloat16", "float64")
_TILE_ROWS = 1024
_EDGES = 1 << 20
_EDGES_OF_DEVICE = 1 << 23
"""Edges at once, so many that a GPU takes longer to pull the narrowest rows than the host to launch it."""
_CACHE_ROW_BYTES = (128, 512)
_FEW_DEGREE, _MANY_DEGREE = DEGREES
_PRODUCT_COLUMNS = 128
_HEADS, _CHANNELS, _ATTENDED_DEGREE = 4, 16, 16
_OTHER_TILES = 1.24
"""How much longer a tile takes among other tiles than repeatedly, in trainings, as ``per_edge`` says."""
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_SKEW = 2.5
"""The ends of edges are drawn as u^2.5 · N: popularity falls as rank^-0.6, and degrees follow a power law with exponent
2.7."""


@dataclass(frozen=True, slots=True)
class PullTimes:
    """Seconds of a pull: ``per_edge`` by bytes of a row, and ``per_row``."""

    per_edge: Curve
    per_row: float


def pull_times(bench: Bench, memory: Tensor) -> PullTimes:
    """Return the times of pulls from a slab that fills ``memory`` (float32).

    Two degrees with the same number of edges tell what a row costs besides its edges.
    """
    few, many = ({b: _pull_seconds(bench, memory, b, degree) for b in ROW_BYTES} for degree in DEGREES)
    edges = _edges(memory.device)
    more_rows = edges // _FEW_DEGREE - edges // _MANY_DEGREE
    per_row = max(0.0, median(few[b] - many[b] for b in ROW_BYTES) / more_rows)
    rows = edges // _MANY_DEGREE
    points = tuple((float(b), max(many[b] - rows * per_row, 0.2 * many[b]) / edges) for b in ROW_BYTES)
    return PullTimes(Curve(points, proportional=True), per_row)


def pool_bytes(device: torch.device) -> int:
    """Return the bytes of the slab that is pulled from on ``device``, in whole MiB."""
    if device.type == "cpu":
        return POOL_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    wanted = max(POOL_BYTES, _POOL_PER_CACHE * cache_bytes(device))
    return max(1, min(wanted, int(_POOL_SHARE * free)) >> 20) << 20


def _edges(device: torch.device) -> int:
    return _EDGES if device.type == "cpu" else _EDGES_OF_DEVICE


def _pull_seconds(bench: Bench, memory: Tensor, row_bytes: int, degree: int) -> float:
    """Return the seconds of ``_edges`` edges, ``degree`` a row."""
    columns, edges = row_bytes // memory.itemsize, _edges(memory.device)
    source = memory[: len(memory) // columns * columns].view(-1, columns)
    generator = torch.Generator(memory.device).manual_seed(row_bytes)
    ranks = (len(source) * torch.rand(edges, generator=generator, device=memory.device) ** _SKEW).long()
    indices = (ranks * 7919 % len(source)).int()
    rows = _TILE_ROWS if memory.device.type == "cpu" else edges // degree
    offsets_R1 = torch.arange(rows + 1, dtype=torch.int32) * degree
    parts_P2 = torch.from_numpy(long_parts(offsets_R1.numpy())).to(memory.device)  # as in training
    tile = TileEdges(indices, offsets_R1.to(memory.device), 0, len(source), parts_P2=parts_P2)
    sums = pulls_for(source).sums

    def task(number: int) -> None:
        first = number * rows * degree
        sums(replace(tile, indices_E=indices[first : first + rows * degree]), source)

    return bench.seconds(task, edges // (rows * degree))


def kept_in_cache_bytes(bench: Bench, slab: Tensor, near: PullTimes, far: PullTimes) -> int:
    """Return how much of ``slab`` pulls find in the cache: their time lies between those of a slab in the cache and of
    one far larger. Caches are shared with the topology, results and other programs, on virtual machines with strangers;
    the system tells their size, not how much one gets."""
    shares = []
    for row_bytes in _CACHE_ROW_BYTES:
        seconds = _pull_seconds(bench, slab, row_bytes, _MANY_DEGREE) / _edges(slab.device) - far.per_row / _MANY_DEGREE
        fast, slow = near.per_edge.at(row_bytes), far.per_edge.at(row_bytes)
        shares.append((slow - seconds) / (slow - fast) if slow > fast else 0.0)
    return int(slab.nbytes * min(1.0, max(0.0, sum(shares) / len(shares))))


def multiplies_per_s(bench: Bench) -> Iterator[tuple[str, float]]:
    """Yield multiply-adds per second by dtype, half of them forward and half for a weight's gradient."""
    rows = _TILE_ROWS if bench.device.type == "cpu" else 64 * _TILE_ROWS
    for name in DTYPES:
        dtype = getattr(torch, name)
        left = torch.ones(rows, _PRODUCT_COLUMNS, dtype=dtype, device=bench.device)
        weight = torch.ones(_PRODUCT_COLUMNS, _PRODUCT_COLUMNS, dtype=dtype, device=bench.device)

        def task(number: int, left: Tensor = left, weight: Tensor = weight) -> Tensor:
            return left @ weight.T if number % 2 else left.T @ left

        tasks = 64
        yield name, tasks * rows * _PRODUCT_COLUMNS**2 / bench.seconds(task, tasks)


def stream_bytes_per_s(bench: Bench, memory: Tensor) -> float:
    """Return the bytes per second that element-wise work reads and writes: rows scaled, a function, a sum, and
    stored."""
    source, target = (half.view(-1, _PRODUCT_COLUMNS) for half in memory.chunk(2))
    rows = _TILE_ROWS if bench.device.type == "cpu" else len(source)
    scale = torch.ones(rows, 1, device=bench.device)

    def task(number: int) -> None:
        tile = slice(number * rows, (number + 1) * rows)
        scaled = source[tile] * scale
        target[tile].copy_(torch.relu(scaled) + scaled)

    moves = 2 + 2 + 3 + 2
    return moves * source.nbytes / bench.seconds(task, len(source) // rows)


def computed_bytes_per_s(bench: Bench, memory: Tensor, pulls: PullTimes, operator_s: float) -> float:
    """Return the bytes per second of what the CPU computes for edges, as layers count it, by GAT's attention over rows
    in the cache. It is no streaming: with memory half as fast, this is not slower."""
    columns = _HEADS * _CHANNELS
    source = memory[: len(memory) // (columns + _HEADS) * (columns + _HEADS)].view(-1, columns + _HEADS)
    generator, edges = torch.Generator().manual_seed(0), _TILE_ROWS * _ATTENDED_DEGREE
    indices = torch.randint(len(source), (edges,), generator=generator, dtype=torch.int32)
    own = torch.randn(_TILE_ROWS, _HEADS, generator=generator).mul_(2)  # scores of either sign
    tile = TileEdges(indices, torch.arange(_TILE_ROWS + 1, dtype=torch.int32) * _ATTENDED_DEGREE, 0, len(source))
    heads, work = GatHeads(range(_HEADS), 0.2), attention_work(columns * source.itemsize, _HEADS)
    attend, tiles = pulls_for(source).attend, 4 * bench.threads
    seconds = bench.seconds(lambda _: attend(heads, tile, source_NS=source, a_dst_RG=own, keep=True), tiles) / tiles
    nbytes = edges * (work.bytes_per_edge + _HEADS * work.bytes_per_edge_and_head) + _TILE_ROWS * work.bytes_per_row
    beside_s = (
        edges * pulls.per_edge.at(source.shape[1] * source.itemsize) + work.operators * operator_s / bench.threads
    )
    return nbytes / (_OTHER_TILES * max(0.2 * seconds, seconds - beside_s))


def operator_seconds(bench: Bench) -> float:
    """Return the seconds of an operator on almost nothing, while all threads do only this and take turns. On a GPU one
    thread launches all of them."""
    tiny = torch.ones(16, 16, device=bench.device)
    threads = 1 if bench.device.type == "cuda" else bench.threads
    count = 1000

    def task(_: int) -> None:
        for _ in range(count):
            tiny[:8] * 2.0

    return bench.seconds(task, threads) / (count * threads)


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last cache before memory, by the system; 0 if it does not tell."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    sizes = [0]
    for path in _CACHE.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * scale)
    return max(sizes)
