# SPDX-License-Identifier: Apache-2.0
"""Copies within a tier and between host and device memory."""

from time import perf_counter

import torch
from torch import Tensor

from ooc.plan.hardware import Wire
from ooc.profile.bench import Bench

_PIECE_VALUES = 1 << 18
_PINNED_BYTES = 64 << 20
_ROUNDS = 5


def copy_bytes_per_s(bench: Bench, memory: Tensor) -> float:
    """Bytes a second copied from one half of ``memory`` to the other."""
    source, target = memory.chunk(2)
    piece = _PIECE_VALUES if bench.device.type == "cpu" else len(source)

    def task(number: int) -> None:
        part = slice(number * piece, (number + 1) * piece)
        target[part].copy_(source[part])

    return source.nbytes / bench.seconds(task, len(source) // piece)


def wire(device: torch.device) -> Wire:
    """Both ways between pinned host memory and ``device``."""
    pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device)
    return Wire(
        to_device_bytes_per_s=_PINNED_BYTES / _copy_seconds(there, pinned, device),
        to_host_bytes_per_s=_PINNED_BYTES / _copy_seconds(pinned, there, device),
    )


def _copy_seconds(target: Tensor, source: Tensor, device: torch.device) -> float:
    """The least of a few rounds."""
    found = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(device)
        begun = perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        found.append(perf_counter() - begun)
    return min(found)
