# SPDX-License-Identifier: Apache-2.0
"""Which batches of many graphs fit into which memory, measured for the graphs and the model at hand: a step's forward
and backward pass is run on torch's meta device, which has sizes and no content, for the largest batch that there can
be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np
from torch import nn

from ooc.errors import ModelError
from ooc.offloading.measure import DryRuns
from ooc.plan import Hardware
from ooc.sampling.graphs import Bounds, GraphSizes, Size, batch_nbytes
from ooc.storage.store import Store
from ooc.train.batched.graphs import GraphModel, LargestNumbers

_COPIES = 4
"""Of every parameter: it, its gradient, and two numbers that an optimizer like Adam keeps."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Batches that take ``memory_bytes`` at most: of ``bound`` things, that is ``counted`` (graphs, nodes, edges or
    paths), two digits of it; 0: not even the largest graph by itself. They have ``graphs`` on average, ``most`` at
    most, and a step takes ``nbytes`` then, with parameters, gradients and what Adam keeps."""

    memory_bytes: int
    counted: str
    bound: int
    graphs: float
    most: Size | None
    nbytes: int


def fitting_batches(
    model: nn.Module,
    store: Store,
    memories: Sequence[int],
    *,
    paths: int,
    hops: int,
    ignore_edge_data: str,
    hardware: Hardware,
) -> list[Fit]:
    """By memory, the largest batches by graphs, nodes and, where there are any, paths, with all that the layers save
    kept. ModelError for a model that does not run on the meta device."""
    sizes = GraphSizes(store, paths, hops)
    runs = GraphModel(model, store, paths=paths, hops=hops, ignore_edge_data=ignore_edge_data)
    every = np.arange(store.num_graphs)
    fixed = _COPIES * sum(parameter.nbytes for parameter in model.parameters())
    counts = {name: found for name, found in sizes.of(every).items() if name not in ("edges", "near") and found.any()}

    @cache
    def taken(counted: str, bound: int) -> tuple[Size, int]:
        most = Bounds(sizes, every, {counted: bound}).largest(every)
        batch, given = runs.measured(most)

        try:
            step = DryRuns(
                model,
                lambda copy: runs(copy, batch),
                hardware,
                known=given,
                within=lambda module: LargestNumbers(batch, most),
            )
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{type(model).__name__} does not run on the meta device: {reason}") from error
        return most, fixed + batch_nbytes(store, most, paths) + runs.cast_bytes(most) + step.kept_bytes

    found = []
    for memory in memories:
        for counted, each in counts.items():
            least, total = int(each.max()), int(each.sum())
            low, high = least, total
            if taken(counted, low)[1] > memory:
                found.append(Fit(memory, counted, 0, 0.0, None, taken(counted, low)[1]))
                continue
            if taken(counted, total)[1] <= memory:
                low = total
            while low < (middle := _rounded(int(sqrt(low * high)), low)) < high:
                low, high = (middle, high) if taken(counted, middle)[1] <= memory else (low, middle)
            most, nbytes = taken(counted, low)
            found.append(Fit(memory, counted, low, min(store.num_graphs, low / float(each.mean())), most, nbytes))
    return found


def _rounded(number: int, least: int) -> int:
    """Down to two digits, but not to less than the ``least``."""
    unit = 10 ** max(0, len(str(number)) - 2)
    down: int = number // unit * unit
    return max(least, down)
