# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at best, by plain calls of torch's, all threads at once.

Gathering is measured with the graph's own neighbours: how often a row comes again, and how far from the last one the
next lies, decides what caches and prefetching make of it. Of two ways, copying rows into a buffer that stays in the
cache and summing them in long bags, the faster one counts. Neither knows of rows, self-loops or weights.
"""

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ooc.plan.hardware import Disk
from ooc.prefetch.arena import Arena
from ooc.profile.bench import Bench
from ooc.profile.disk import measure_disk
from ooc.storage.store import Store

STRETCHES, STRETCH_EDGES = 64, 1 << 14
"""Of the graph's edges, from all over it, that are gathered at a time."""
BAG_EDGES = 64
CACHED_BYTES = 1 << 20
"""A slab that lies in the caches next to the processors."""
COPIED_ROWS = 256
COLUMNS = 128
STREAM_BYTES = 256 << 20


class Product(NamedTuple):
    """A dense product of a linear map of so many columns, ``way``: one of ``PRODUCTS``."""

    way: str
    dtype: torch.dtype
    columns: int


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "forward": lambda rows, weight, above: rows @ weight.T,
    "input gradient": lambda rows, weight, above: above @ weight,
    "weight gradient": lambda rows, weight, above: above.T @ rows,
}
"""Of rows, weight and the gradient of the result."""


class Rates:
    """Measured as they are asked for; what has been measured is remembered until ``forget``. A context manager."""

    def __init__(self, store: Store, folder: Path, threads: int, tile_rows: int) -> None:
        self.bench = Bench(torch.device("cpu"), threads)
        self.tile_rows = tile_rows
        self._folder = folder
        self._arena: Arena | None = None
        self._indices = _neighbours(store)
        self._nodes = store.num_nodes
        self._gathered: dict[tuple[int, int], float] = {}
        self._multiplied: dict[Product, float] = {}
        self._streamed: dict[bool, float] = {}
        self._disk: Disk | None = None

    def forget(self) -> None:
        """Have everything measured anew."""
        self._gathered.clear()
        self._multiplied.clear()
        self._streamed.clear()
        self._disk = None

    def row_seconds(self, row_bytes: int, rows: int) -> float:
        """To fetch one row of a slab of so many."""
        key = row_bytes, rows
        if key not in self._gathered:
            self._gathered[key] = self._timed_gather(row_bytes, rows)
        return self._gathered[key]

    def multiplies_per_s(self, dtype: torch.dtype, columns: int = COLUMNS, way: str | None = None) -> float:
        """Multiply-adds a second of tiles that lie in the cache, ``way``: of all three products of a training."""
        if way is None:
            return len(PRODUCTS) / sum(1 / self.multiplies_per_s(dtype, columns, one) for one in PRODUCTS)
        product = Product(way, dtype, columns)
        if product not in self._multiplied:
            self._multiplied[product] = self._timed_product(product)
        return self._multiplied[product]

    def stream_bytes_per_s(self, *, copying: bool) -> float:
        """Bytes a second read of memory, or read and written, one after the other."""
        if copying not in self._streamed:
            self._streamed[copying] = self._timed_stream(copying=copying)
        return self._streamed[copying]

    def disk(self) -> Disk:
        """Of the folder, through the engine of training."""
        if self._disk is None:
            self._disk = measure_disk(self._folder)
        return self._disk

    def _memory(self, nbytes: int) -> Tensor:
        """On huge pages, as the executor has it; the same whenever it is asked for."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._arena is None or self._arena.nbytes < nbytes:
            self._arena = Arena(nbytes)
            torch.from_numpy(self._arena.view(0, nbytes)).fill_(1)
        return torch.from_numpy(self._arena.view(0, nbytes))

    def _timed_gather(self, row_bytes: int, rows: int) -> float:
        columns = row_bytes // 4
        slab = self._memory(rows * row_bytes)[: rows * row_bytes].view(torch.float32).view(rows, columns)
        indices = self._indices if rows == self._nodes else self._indices % rows
        stretches = indices.view(STRETCHES, -1)
        edges = stretches.shape[1]
        offsets = torch.arange(0, edges + 1, min(edges, BAG_EDGES), dtype=torch.int32)
        if int(offsets[-1]) != edges:
            offsets = torch.cat((offsets, offsets.new_tensor([edges])))

        def summed(number: int) -> Tensor:
            return torch.embedding_bag(slab, stretches[number], offsets, False, 0, False, None, True)[0]

        def copied(number: int) -> None:
            buffer = torch.empty(COPIED_ROWS, columns)
            for part in stretches[number].split(COPIED_ROWS):
                torch.index_select(slab, 0, part, out=buffer[: len(part)])

        return min(self.bench.seconds(way, STRETCHES) for way in (summed, copied)) / indices.numel()

    def _timed_product(self, product: Product) -> float:
        shape, dtype = (self.tile_rows, product.columns), product.dtype
        rows, above = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        weight, tasks = torch.randn(product.columns, product.columns).to(dtype), 8 * self.bench.threads
        multiply = partial(PRODUCTS[product.way], rows, weight, above)

        def task(_: int) -> None:
            for _ in range(8):
                multiply()

        return 8 * tasks * rows.numel() * product.columns / self.bench.seconds(task, tasks)

    def _timed_stream(self, *, copying: bool) -> float:
        memory = self._memory(STREAM_BYTES)[:STREAM_BYTES].view(torch.float32)
        source, target = memory.chunk(2) if copying else (memory, memory)
        pieces = [one.chunk(64) for one in (source, target)]

        def task(number: int) -> None:
            if copying:
                pieces[1][number].copy_(pieces[0][number])
            else:
                pieces[0][number].sum()

        return STREAM_BYTES / self.bench.seconds(task, len(pieces[0]))

    def __enter__(self) -> "Rates":
        self.bench.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bench.__exit__(*raised)
        if self._arena is not None:
            self._arena.close()


def _neighbours(store: Store) -> Tensor:
    """Stretches of the graph's in-edges, from all over it; all of a graph that has fewer, again and again."""
    indices = store.topology("in")[1].read()
    begins = np.linspace(0, max(0, len(indices) - STRETCH_EDGES), STRETCHES).astype(np.int64)
    return torch.from_numpy(np.concatenate([np.resize(indices[b : b + STRETCH_EDGES], STRETCH_EDGES) for b in begins]))
