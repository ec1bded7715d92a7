# SPDX-License-Identifier: Apache-2.0
"""Sums over neighbours times numbers that a model computes of every edge, with gradients of both rows and numbers.

torch makes a row for every edge and goes through it a dozen times; on the CPU compiled loops make none. S rows, R sums
of C columns, E edges.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ooc.kernels import pulls
from ooc.kernels.edges import TileEdges
from ooc.kernels.pieces.caught_sums import is_catching


def weighted_sum(
    edge_index_2E: Tensor, rows_SC: Tensor, weight_E: Tensor, count: int, at_targets: int, reduce: str
) -> Tensor:
    """Of every one of ``count`` rows the sum, or the mean, of its neighbours' rows, each times the ``weight_E`` of the
    edge, [E] or [E, 1] → [R, C]. ``at_targets``: in which row of ``edge_index_2E`` those are that have the sums."""
    if weight_E.numel() != edge_index_2E.shape[1]:
        raise ValueError(f"{weight_E.numel()} numbers of {edge_index_2E.shape[1]} edges")
    sources_E, targets_E = edge_index_2E[1 - at_targets], edge_index_2E[at_targets]
    backward = None if is_catching() or rows_SC.device.type != "cpu" else pulls.weighted_gradients(rows_SC)
    if backward is None or weight_E.dtype != rows_SC.dtype:
        rows_EC = weight_E.reshape(-1, 1) * rows_SC.index_select(0, sources_E)
        sums_RC: Tensor = rows_SC.new_zeros(count, rows_SC.shape[1]).index_add(0, targets_E, rows_EC)
        if reduce != "mean":
            return sums_RC
        ones_E1 = rows_EC.new_ones(len(rows_EC), 1)
        return sums_RC / ones_E1.new_zeros(count, 1).index_add(0, targets_E, ones_E1).clamp(min=1)
    weight_E = weight_E.reshape(-1)
    if not bool((targets_E[1:] >= targets_E[:-1]).all()):
        targets_E, order_E = targets_E.sort(stable=True)
        sources_E, weight_E = sources_E[order_E], weight_E[order_E]
    offsets_R1 = torch.searchsorted(targets_E, torch.arange(count + 1))
    if int(offsets_R1[-1] - offsets_R1[0]) < sources_E.shape[0]:
        raise IndexError(f"an edge leads to none of {count} rows")
    sums_RC = _WeightedSum.apply(rows_SC, weight_E, sources_E, offsets_R1, backward)  # type: ignore[no-untyped-call]
    return sums_RC if reduce != "mean" else sums_RC / offsets_R1.diff().clamp(min=1).to(sums_RC.dtype)[:, None]


class _WeightedSum(torch.autograd.Function):
    """By compiled loops."""

    @staticmethod
    def forward(
        ctx: Any, rows_SC: Tensor, weight_E: Tensor, sources_E: Tensor, offsets_R1: Tensor, backward: Any
    ) -> Tensor:
        rows_SC = rows_SC.contiguous()
        ctx.save_for_backward(rows_SC, weight_E, sources_E, offsets_R1)
        ctx.by = backward
        tile = TileEdges(sources_E, offsets_R1, 0, len(rows_SC), weight_E=weight_E)
        return pulls.pulls_for(rows_SC).sums(tile, rows_SC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RC: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.by(*ctx.saved_tensors, gradient_RC.contiguous(), ctx.needs_input_grad[0]), None, None, None
