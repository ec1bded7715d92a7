# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for a GPU that is not there, and tells as JSON what the assembler made of it.

Run as a script with a compute capability ("90"), in a process without the interpreter: the kernels are launched as
ever, but on a driver that only knows what it would drive, and nothing is run. With "sums" behind it, only those.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ooc.train.dropout import Draw
from ooc.train.kernels.cuda import dropout, gat, maximum, sums
from ooc.train.kernels.cuda.segments import cut
from ooc.train.kernels.edge_dropout import EdgeDropout
from ooc.train.kernels.edges import SelfLoops, TileEdges
from ooc.train.kernels.gat import GatHeads

NODES = 64
EDGES = 4096


class NamedDriver:
    """What a launch asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(capability: int, *, only_sums: bool) -> list[dict[str, Any]]:
    """Every program that the calls below launch: name, registers, bytes spilled, widest load, its instructions."""
    found: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(self, *arguments, warmup=True, **options)
        found.append({"label": label, "kernel": self.fn.__name__, **_described(kernel)})
        return kernel

    driver.set_active(NamedDriver(capability))
    JITFunction.run = compile_only
    tile = TileEdges(
        torch.arange(EDGES, dtype=torch.int32) % NODES,
        torch.tensor([0, *[EDGES] * NODES], dtype=torch.int32),
        0,
        NODES,
        SelfLoops.EXACTLY_ONE,
    )
    segments = cut(tile.offsets_R1, EDGES)
    for width, dtype in ((128, torch.float32), (100, torch.float32), (128, torch.bfloat16), (8, torch.float32)):
        label = f"sum {width} {dtype}"
        weight = torch.zeros(EDGES, dtype=dtype) if width == 100 else None
        sums.pull_segments(torch.zeros(NODES, width, dtype=dtype), tile.indices_E, segments, weight)
    if not only_sums:
        label = "masks"
        dropout.keep_mask(Draw(1, 2, 3, 4, 0.5), torch.zeros(NODES, 100))
        label = "maximum"
        source, target = torch.zeros(NODES, 64), torch.zeros(NODES, 128)
        maximum.pull_maxima(tile, source, keep=True, segments=segments)
        maximum.pull_sources(tile, target_NK=target, source_RW=source, segments=segments)
        heads, channels = 2, 64
        source, a_dst = torch.zeros(NODES, heads * (channels + 1)), torch.zeros(NODES, heads)
        target = torch.zeros(NODES, heads * (channels + 3))
        for dropped in (None, EdgeDropout(0.5, 1, 2, 3)):
            label = "attention" if dropped is None else "attention with dropout"
            layer = GatHeads(range(heads), 0.2, dropped)
            gat.attend(layer, tile, source_NS=source, a_dst_RH=a_dst, keep=True, segments=segments)
            gat.pull_sources(layer, tile, target_NS=target, source_RS=source, segments=segments)
    JITFunction.run = run
    return found


def _described(kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    loads = re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "spilled_bytes": int(re.findall(r"STACK:(\d+)", usage)[-1]) + int(re.findall(r"LOCAL:(\d+)", usage)[-1]),
        "widest_load_bytes": max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0),
        "has_atomics": bool(re.search(r"\b(atom|red)\.", ptx)),
    }


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]), only_sums=sys.argv[2:] == ["sums"])))
