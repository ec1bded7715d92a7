# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at best: copies within the device's memory, over PCIe, dense products, and the disk."""

from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from gpu_parts.clock import median_of
from gpu_parts.report import LeftOut, is_out_of_memory

ROUNDS = 10


def device_copy(device: torch.device, size_bytes: int) -> dict[str, Any]:
    """From one buffer to another; every byte counts twice, as read and as written."""
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = median_of(device, lambda: target.copy_(source), ROUNDS)
    return {"bytes": 2 * size_bytes, "seconds": seconds, "bytes_per_s": 2 * size_bytes / seconds}


def wire(device: torch.device, size_bytes: int) -> dict[str, Any]:
    """From pinned memory to the device, back, and both at once on two streams; bytes a second each way."""
    pinned = device.type == "cuda"
    up, down = (torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    received, sent = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    rates = {
        "up": size_bytes / median_of(device, lambda: received.copy_(up, non_blocking=True), ROUNDS),
        "down": size_bytes / median_of(device, lambda: down.copy_(sent, non_blocking=True), ROUNDS),
    }
    if pinned:
        streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

        def both() -> None:
            current = torch.cuda.current_stream(device)
            for stream, (to, of) in zip(streams, ((received, up), (down, sent)), strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    to.copy_(of, non_blocking=True)
            for stream in streams:
                current.wait_stream(stream)

        rates["each_way_of_both"] = size_bytes / median_of(device, both, ROUNDS)
    return {"bytes": size_bytes, "bytes_per_s": rates}


def dense_products(device: torch.device, size: int) -> dict[str, Any]:
    """Floating-point operations a second of size × size × size, by type; float32 with and without TF32."""
    rates: dict[str, float] = {}
    kinds = [("float32", torch.float32, False), ("tf32", torch.float32, True)]
    kinds += [("bfloat16", torch.bfloat16, False), ("float16", torch.float16, False)]
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for name, dtype, tf32 in kinds:
            if tf32 and device.type != "cuda":
                continue
            torch.backends.cuda.matmul.allow_tf32 = tf32
            # Of one number alone a GPU multiplies faster than it would in training: it draws less power.
            left, right, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
            seconds = median_of(device, lambda: torch.mm(left, right, out=out), ROUNDS)  # noqa: B023  (called here)
            rates[name] = 2 * size**3 / seconds
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return {"size": size, "flops_per_s": rates}


def disk(folder: Path) -> dict[str, Any]:
    """The disk of ``folder`` through the engine that training on the CPU uses there: bytes a second in moments, as the
    profile has them."""
    from ooc.errors import OocError
    from ooc.prefetch.engines.choice import choose_engine
    from ooc.profile.disk import measure_disk

    try:
        measured = measure_disk(folder)
        with closing(choose_engine(folder)[0]) as engine:
            name = engine.name
    except OocError as error:
        raise LeftOut(str(error)) from None
    return {
        "engine": name,
        "burst": {
            "read_bytes_per_s": max(rate for _, rate in measured.read_bytes_per_s.points),
            "write_bytes_per_s": max(rate for _, rate in measured.write_bytes_per_s.points),
            "both_ways_bytes_per_s": measured.both_ways_bytes_per_s,
        },
    }


def copy_bytes(device: torch.device, *, rehearsal: bool) -> int:
    """A gigabyte, or an eighth of what is free."""
    if rehearsal:
        return 1 << 16
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise LeftOut("out of memory" if is_out_of_memory(error) else str(error).splitlines()[0]) from None
    return min(1 << 30, free // 8)
