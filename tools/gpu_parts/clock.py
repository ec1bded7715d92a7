# SPDX-License-Identifier: Apache-2.0
"""Seconds of calls on a device, several ways taking turns so that what disturbs one disturbs all.

The device waits for the host to launch the first of them. So what is short is called several times between two events:
meanwhile the host launches the next call, and only the first one's launch is in the way.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpu_parts.report import is_out_of_memory

LEAST_S = 0.01
"""Between two events, beside which one launch is next to nothing."""


def rounds_on(device: torch.device, rounds: int) -> int:
    """How many are worth their time: on the processor, where times mean nothing, one."""
    return rounds if device.type == "cuda" else 1


def seconds_of(device: torch.device, call: Callable[[], Any]) -> float:
    """A call's, from start to end on the device, between two events; on the processor by its clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    once = _between_events(call, 1)
    times = math.ceil(LEAST_S / max(once, 1e-6))
    return once if times <= 1 else _between_events(call, times) / times


def _between_events(call: Callable[[], Any], times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def median_of(device: torch.device, call: Callable[[], Any], rounds: int) -> float:
    """The median after a round that is not counted."""
    return interleaved(device, {"": call}, rounds)[0][""]


def interleaved(
    device: torch.device, ways: Mapping[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Medians of the ways' seconds, each round one of every way; and what could not be done, with the reason.

    The first round warms up and finds out what does not run: out of memory, or an operator that is not there.
    """
    taken: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for way, call in ways.items():
        try:
            seconds_of(device, call)
        except RuntimeError as error:
            refused[way] = "out of memory" if is_out_of_memory(error) else (str(error).splitlines() or ["refused"])[0]
            if device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            taken[way] = []
    for _ in range(rounds_on(device, rounds)):
        for way, seconds in taken.items():
            seconds.append(seconds_of(device, ways[way]))
    return {way: statistics.median(seconds) for way, seconds in taken.items()}, refused
