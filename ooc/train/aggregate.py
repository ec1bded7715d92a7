# SPDX-License-Identifier: Apache-2.0
"""The one thing that looks across rows: target rows pull the rows of their neighbours and sum them.

On the CPU the fastest sum over a CSR is torch's ``embedding_bag``; a bag is a row's list of neighbours. Sums
run in the order of the list and each column for itself, so the result of a row is the same to the bit whatever
rows and columns are computed with it.

Rows of bfloat16 are half the bytes to fetch, and fetching is what a pull's time goes into: 128 columns of them take
about half as long as of float32. They are summed in float32 and rounded once, at the end; where a sum lies halfway
between two bfloat16, away from zero (that is FBGEMM's rounding; processors without AVX2 take the even one).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def sums_rows_of(kept: torch.dtype, computed: torch.dtype) -> bool:
    """Whether ``pull`` sums rows of type ``kept`` no worse than if they were ``computed`` first and the sum rounded."""
    return kept == computed or (kept == torch.bfloat16 and computed == torch.float32)


def pull(source_NW: Tensor, indices_E: Tensor, offsets_R1: Tensor, weight_E: Tensor | None = None) -> Tensor:
    """Sum of ``source_NW[indices_E[offsets[i]:offsets[i+1]]]`` for each of R rows, each times its weight → [R, W].

    N nodes, W width of the slab, E edges of these rows, R rows; indices and offsets of one integer type, weights of
    the source's (None: all 1). The result is of the source's type. On the CPU a neighbour that is none of the N raises
    RuntimeError; on a GPU, where nobody waits for an answer, it adds nothing (``follows_all``).
    """
    if source_NW.device.type == "cuda":
        from ooc.train.kernels.cuda import sums  # needs triton

        return sums.pull(source_NW, indices_E, offsets_R1, weight_E)
    if indices_E.numel() == 0:
        return source_NW.new_zeros(offsets_R1.numel() - 1, source_NW.shape[1])
    return F.embedding_bag(
        indices_E, source_NW, offsets_R1, mode="sum", include_last_offset=True, per_sample_weights=weight_E
    )


def follows_all(source_NW: Tensor) -> bool:
    """Whether ``pull`` follows every neighbour that it is given: those beyond a shorter source must be left out."""
    return source_NW.device.type != "cuda"


def within(
    indices_E: Tensor, offsets_R1: Tensor, rows: int, weight_E: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Indices, offsets and weights without the neighbours at or beyond ``rows``."""
    if indices_E.device.type == "cpu" and (not len(indices_E) or indices_E.numpy().max() < rows):
        return indices_E, offsets_R1, weight_E  # as always forward, in an order by hops: a tenth of the time of looking
    return _only(indices_E < rows, indices_E, offsets_R1, weight_E)


def with_self(indices_E: Tensor, offsets_R1: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Indices and offsets of rows ``start…``, those before ``stop`` last among their own neighbours."""
    count = stop - start
    if count <= 0:
        return indices_E, offsets_R1
    if indices_E.device.type != "cpu":
        return with_self_by_torch(indices_E, offsets_R1, start, stop)
    offsets = offsets_R1.numpy()
    added = np.minimum(np.arange(len(offsets), dtype=offsets.dtype), count)
    places = offsets[1 : count + 1] + added[:count]
    is_given = np.ones(len(indices_E) + count, dtype=np.bool_)
    is_given[places] = False
    indices = np.empty(len(is_given), dtype=indices_E.numpy().dtype)
    indices[is_given] = indices_E.numpy()  # twice as fast as torch's masked_scatter_
    indices[places] = np.arange(start, stop, dtype=indices.dtype)
    return torch.from_numpy(indices), torch.from_numpy(offsets + added)


def with_self_by_torch(indices_E: Tensor, offsets_R1: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """``with_self`` without NumPy, on any device; some row is before ``stop``."""
    count = stop - start
    added = torch.arange(len(offsets_R1), dtype=offsets_R1.dtype, device=offsets_R1.device).clamp_(max=count)
    offsets = offsets_R1 + added
    indices = indices_E.new_empty(len(indices_E) + count)
    is_given = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
    own = offsets[1 : count + 1].long() - 1
    is_given[own] = False
    indices[is_given] = indices_E
    indices[own] = torch.arange(start, stop, dtype=indices.dtype, device=indices.device)
    return indices, offsets


def without_self(indices_E: Tensor, offsets_R1: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Indices and offsets of rows ``start…`` without edges from a row to itself."""
    rows = torch.arange(start, start + len(offsets_R1) - 1, dtype=indices_E.dtype, device=indices_E.device)
    is_other = indices_E != torch.repeat_interleave(rows, offsets_R1.diff(), output_size=len(indices_E))
    return _only(is_other, indices_E, offsets_R1, None)[:2]


def _only(
    is_kept_E: Tensor, indices_E: Tensor, offsets_R1: Tensor, weight_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The edges that are kept."""
    if indices_E.device.type == "cpu":
        return _only_by_numpy(is_kept_E, indices_E, offsets_R1, weight_E)
    before = torch.zeros(len(indices_E) + 1, dtype=offsets_R1.dtype, device=offsets_R1.device)
    torch.cumsum(is_kept_E, 0, out=before[1:])
    return indices_E[is_kept_E], before[offsets_R1.long()], None if weight_E is None else weight_E[is_kept_E]


def _only_by_numpy(
    is_kept_E: Tensor, indices_E: Tensor, offsets_R1: Tensor, weight_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``_only`` on the CPU, two to four times as fast: where the kept ones are is found once, and looked up by rows."""
    kept = np.flatnonzero(is_kept_E.numpy())
    offsets = offsets_R1.numpy()
    before = np.searchsorted(kept, offsets).astype(offsets.dtype)
    weight = None if weight_E is None else weight_E[torch.from_numpy(kept)]
    return torch.from_numpy(indices_E.numpy()[kept]), torch.from_numpy(before), weight
