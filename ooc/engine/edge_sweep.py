# SPDX-License-Identifier: Apache-2.0
"""The edges of a pull, in the order of the rows."""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.engine.operands import Edges
from ooc.engine.runtime import Runtime
from ooc.kernels.edges import TileEdges
from ooc.plan.layout.matrices import edges_name
from ooc.plan.workload import EdgeData, Pull

CPU = torch.device("cpu")
_NUMPY_TYPES = {torch.int32: np.int32, torch.int64: np.int64}


def relative_offsets(
    offsets: npt.NDArray[np.signedinteger],
    start: int,
    stop: int,
    dtype: torch.dtype,
    place: torch.device = CPU,
) -> Tensor:
    """Where the edges of rows ``start:stop`` begin, counted from the first of them; one more than rows."""
    part = offsets[start : stop + 1]
    if place.type == "cpu":  # by NumPy, in a third of the time that torch's operators take
        return torch.from_numpy((part - part[0]).astype(_NUMPY_TYPES[dtype], copy=False))
    # Brought as they lie in memory that the device knows: for a new tensor the host would wait.
    absolute = torch.from_numpy(part).to(place, non_blocking=True)
    if absolute.dtype == dtype:
        return absolute.sub_(int(part[0]))
    return torch.sub(absolute, int(part[0]), out=absolute.new_empty(len(part), dtype=dtype))


class EdgeSweep:
    """The edges of a pull's direction with what they carry for it, for one sweep over the rows."""

    def __init__(self, runtime: Runtime, pull: Pull) -> None:
        self._offsets = runtime.rows.offsets[pull.direction]
        self._parts_P2 = runtime.rows.parts.get(pull.direction)
        self._nodes = runtime.plan.rows
        self._checks = runtime.checks.get(pull.direction)
        self._arrays: dict[EdgeData | None, Edges] = {
            data: Edges(runtime.matrices[edges_name(pull.direction, data)], runtime.workspace)
            for data in (None, *pull.edge_data)
        }

    def open(self, start: int, stop: int) -> None:
        """The edges of rows ``start:stop`` are about to be taken."""
        for array in self._arrays.values():
            array.open(int(self._offsets[start]), int(self._offsets[stop]))

    def take(self, start: int, stop: int) -> TileEdges:
        """The edges of rows ``start:stop``, on any thread."""
        first, last = int(self._offsets[start]), int(self._offsets[stop])
        taken = {data: array.take(first, last) for data, array in self._arrays.items()}
        indices, weight = taken[None][:, 0], taken.get(EdgeData.WEIGHT)
        return TileEdges(
            indices,
            relative_offsets(self._offsets, start, stop, indices.dtype, indices.device),
            start,
            self._nodes,
            weight_E=None if weight is None else weight[:, 0],
            features_EK=taken.get(EdgeData.FEATURES),
            checks=self._checks,
            parts_P2=self._parts(start, stop, indices.device),
        )

    def _parts(self, start: int, stop: int, place: torch.device) -> Tensor | None:
        """Those of the long rows among ``start:stop``, where there are kernels that want them."""
        if self._parts_P2 is None:
            return None
        first, last = (bisect_left(self._parts_P2[:, 0], row) for row in (start, stop))
        parts_P2 = torch.from_numpy(self._parts_P2[first:last])
        return parts_P2.to(place, non_blocking=True) if first < last else torch.empty_like(parts_P2, device=place)
