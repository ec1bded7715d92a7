# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for a GPU that is not there, and tells as JSON what the assembler made of it.

Run as a script with a compute capability ("90"), in a process without the interpreter: the kernels are launched as
ever, but on a driver that only knows what it would drive, and nothing is run. With "sums" behind it, only those; with
"all", attentions and functions of edges in every type, not only in one each.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ooc.kernels.cuda import dropout, edge_function, gat, maximum, sums
from ooc.kernels.cuda.segments import Segments, cut
from ooc.kernels.dropout.edges import EdgeDraw, EdgeDropout
from ooc.kernels.edge_function import EdgeFunction, Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import Gatv2, GatWithFeatures, Gine, TransformerAttention
from ooc.kernels.gat import GatHeads

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


def compiled(capability: int, which: str = "") -> list[dict[str, Any]]:
    """Every program that the calls below launch: name, what it was compiled as, registers, bytes spilled, widest load,
    whether it has atomics."""
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
    segments = cut(tile)
    for width, dtype in ((128, torch.float32), (100, torch.float32), (128, torch.bfloat16), (8, torch.float32)):
        label = f"sum {width} {dtype}"
        weight = torch.zeros(EDGES, dtype=dtype) if width == 100 else None
        summed = replace(tile, self_loops=SelfLoops.AS_STORED, weight_E=weight)
        sums.pull_tile(summed, torch.zeros(NODES, width, dtype=dtype), segments=segments)
    label = "sum with self-loops"
    sums.pull_tile(tile, torch.zeros(NODES, 128, dtype=torch.bfloat16), segments=segments)
    if which != "sums":
        label = "masks"
        dropout.keep_mask(torch.zeros(NODES, 100), key=1 << 100, threshold=1 << 31, row_start=4)
        ends = torch.zeros(3, 100, dtype=torch.int64)
        dropout.keep_edges(EdgeDraw(EdgeDropout(0.5, 1, 2, 3), *ends, 4))
        label = "maximum"
        source, target = torch.zeros(NODES, 64), torch.zeros(NODES, 128)
        maximum.pull_maxima(tile, source, keep=True, segments=segments)
        maximum.pull_sources(tile, target_NK=target, source_RW=source, segments=segments)
        heads, channels = 2, 64
        for dtype in (torch.float32, torch.bfloat16):
            source = torch.zeros(NODES, heads * (channels + 1), dtype=dtype)
            target = torch.zeros(NODES, heads * (channels + 3), dtype=dtype)
            a_dst = torch.zeros(NODES, heads)
            masks = (None, EdgeDropout(0.5, 1, 2, 3))
            for dropped in masks if which == "all" else masks[dtype is torch.bfloat16 :][:1]:
                label = f"attention{'' if dropped is None else ' with dropout'} {dtype}"
                layer = GatHeads(range(heads), 0.2, dropped)
                gat.attend(layer, tile, source_NS=source, a_dst_RG=a_dst, keep=True, segments=segments)
                gat.pull_sources(layer, tile, target_NS=target, source_RS=source, segments=segments)
        label = "attention's upstream"
        gat.upstream(torch.zeros(NODES, heads * channels), torch.zeros(NODES, heads * (2 * channels + 2)), a_dst)
        for dtype in (torch.float32, torch.bfloat16):
            functions = edge_functions(heads, channels, dtype)
            if which != "all":
                functions = functions[dtype is torch.bfloat16 :: 2]
            for function, columns, features, dropped in functions:
                extras = f"{', features' if features else ''}{', dropout' if dropped else ''}"
                label = f"{type(function).__name__}{extras} {dtype}"
                pull_edges(function, columns, features, dropped, tile, heads, channels, segments, dtype)
        label = "Gine, features"
        summed, source = replace(tile, self_loops=SelfLoops.AS_STORED), torch.zeros(NODES, 64)
        summed = replace(summed, features_EK=torch.zeros(EDGES, 5))
        terms = EdgeTerms(range(64), torch.float32, torch.zeros(5, 64), torch.zeros(64))
        named: dict[str, Any] = {"terms": terms, "segments": segments}
        edge_function.pull_messages(
            Gine(), summed, source_NW=source, target_RV=source[:, :0], columns=64, terms=terms, segments=segments
        )
        layout = TargetLayout(64, 0, 1, 0)
        edge_function.pull_source_gradients(Gine(), summed, source_RW=source, target_NP=source, layout=layout, **named)
        edge_function.pull_target_gradients(
            Gine(),
            summed,
            source_NW=source,
            target_RV=source[:, :0],
            upstream_R=Upstream(source, None),
            with_map=True,
            **named,
        )
    JITFunction.run = run
    return found


def edge_functions(
    heads: int, channels: int, dtype: torch.dtype
) -> list[tuple[EdgeFunction, tuple[int, int, int], int, EdgeDropout | None]]:
    """Attentions with the columns of a head that sources, targets and terms have, features of edges, and dropout."""
    dropout = EdgeDropout(0.5, 1, 2, 3)
    gatv2, dot, scalar = (
        Gatv2(torch.zeros(heads, channels, dtype=dtype), 0.2),
        TransformerAttention(heads),
        GatWithFeatures(heads, 0.2),
    )
    wide = (channels, channels, channels)
    return [
        (gatv2, wide, 0, None),
        (gatv2, wide, 5, dropout),
        (dot, (2 * channels, channels, channels), 5, None),
        (scalar, (channels + 1, 1, 1), 5, None),
    ]


def pull_edges(
    function: EdgeFunction,
    columns: tuple[int, int, int],
    features: int,
    dropped: EdgeDropout | None,
    tile: TileEdges,
    heads: int,
    channels: int,
    segments: Segments,
    dtype: torch.dtype,
) -> None:
    """Forward, and backward in either direction."""
    source, target = (torch.zeros(NODES, heads * width, dtype=dtype) for width in columns[:2])
    terms = None
    if features:
        tile = replace(tile, features_EK=torch.zeros(EDGES, features))
        weight = torch.zeros(features, heads * columns[2])
        terms = EdgeTerms(range(heads), torch.float32, weight, loop_RK=torch.zeros(NODES, features))
    named: dict[str, Any] = {"terms": terms, "heads": Heads(range(heads), dropped), "segments": segments}
    above = torch.zeros(NODES, heads * channels, dtype=dtype)
    edge_function.pull_messages(function, tile, source_NW=source, target_RV=target, columns=above.shape[1], **named)
    layout = TargetLayout(heads, columns[1], channels, 2, features)
    packed = torch.zeros(NODES, layout.columns, dtype=dtype)
    edge_function.pull_source_gradients(function, tile, source_RW=source, target_NP=packed, layout=layout, **named)
    edge_function.pull_target_gradients(
        function,
        tile,
        source_NW=source,
        target_RV=torch.cat((target, target), dim=1) if isinstance(function, Gatv2) else target,
        upstream_R=Upstream(above, torch.zeros(NODES, 2 * heads)),
        with_map=features > 0,
        **named,
    )


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
        "compiled_as": kernel.hash,
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "spilled_bytes": int(re.findall(r"STACK:(\d+)", usage)[-1]) + int(re.findall(r"LOCAL:(\d+)", usage)[-1]),
        "widest_load_bytes": max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0),
        "has_atomics": bool(re.search(r"\b(atom|red)\.", ptx)),
    }


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]), *sys.argv[2:])))
