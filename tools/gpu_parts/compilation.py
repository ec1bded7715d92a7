# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for a GPU that is not there, and tells as JSON what the assembler made of it.

Run as a script with compute capabilities ("80,90"), in a process without the interpreter: the kernels are launched as
ever, but on a driver that only knows what it would drive, and nothing is run. With "sums" behind it, only those; with
"all", everything in either type and in other widths too, not only in one each. With "names", nothing is compiled
either: what tells all these programs from other ones.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ooc.kernels.cuda import dropout, edge_function, gat, maximum, sums
from ooc.kernels.cuda.segments import cut
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edge_function import EdgeFunction, EdgeMessages, Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import Gatv2, GatWithFeatures, Rectified, TransformerAttention
from ooc.kernels.gat import GatHeads

NODES = 64
EDGES = 4096
TYPES = (torch.float32, torch.bfloat16)
WIDE = (64, 5, 256)
"""Columns of a head, and of rows of maxima: the first alone unless all are asked for."""


class NamedDriver:
    """What a launch asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """Triton keeps what it has compiled by it."""
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(capability: int, which: str = "") -> list[dict[str, Any]]:
    """Every program that the calls below launch: name, what it was compiled as, warps, registers, bytes spilled and of
    shared memory, widest load, whether it has atomics."""
    found: list[dict[str, Any]] = []
    known: dict[str, dict[str, Any]] = {}
    label, run = "", JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool = False, **options: Any) -> Any:
        log = StringIO()
        with redirect_stdout(log):
            kernel = run(self, *arguments, warmup=True, **options)
        if kernel.hash not in known:
            known[kernel.hash] = {"kernel": self.fn.__name__, **_described(kernel, log.getvalue())}
        found.append({"label": label, **known[kernel.hash]})
        return kernel

    driver.set_active(NamedDriver(capability))
    triton.knobs.nvidia.dump_ptxas_log = True
    JITFunction.run = compile_only
    try:
        for label, call in calls(which):  # noqa: B007  (compile_only looks at it)
            call()
    finally:
        JITFunction.run = run
    return found


def names(capability: int) -> list[str]:
    """What tells each program that "all" compiles from other ones: what it does and what those do that it calls, the
    kinds of its arguments and what is constant, and how many warps and stages it has."""
    found = set[str]()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], *compile["configs"])
        found.add(f"{source.hash()} {compile['num_warps']} {compile['num_stages']}")
        return True  # then it is not compiled

    for name in [name for name in sys.modules if name.startswith("ooc.kernels.cuda.programs.")]:
        for function in vars(sys.modules[name]).values():
            if isinstance(function, JITFunction):
                _forget_what_is_said_of(function)
    driver.set_active(NamedDriver(capability))
    triton.knobs.runtime.jit_cache_hook = note
    for _, call in calls("all"):
        call()
    return sorted(found)


def _forget_what_is_said_of(function: Any) -> None:
    """And where it stands, which Triton tells programs by, too."""
    tree = function.parse()
    if ast.get_docstring(tree.body[0]) is not None:
        del tree.body[0].body[0]
    function._unsafe_update_src(ast.unparse(tree))
    function.starting_line_number = 0


def calls(which: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What launches programs, with what it is called."""
    tile = TileEdges(
        torch.arange(EDGES, dtype=torch.int32) % NODES,
        torch.tensor([0, *[EDGES] * NODES], dtype=torch.int32),
        0,
        NODES,
        SelfLoops.EXACTLY_ONE,
    )
    tile = replace(tile, parts_P2=cut(tile)[0])
    stored = replace(tile, self_loops=SelfLoops.AS_STORED)
    widths = [(128, torch.float32), (100, torch.float32), (128, torch.bfloat16), (8, torch.float32)]
    if which == "all":
        widths += [(width, dtype) for width in (1, 256, 1000) for dtype in TYPES]
    for width, dtype in widths:
        weight = torch.zeros(EDGES, dtype=dtype) if width == 100 else None
        summed, source = replace(stored, weight_E=weight), torch.zeros(NODES, width, dtype=dtype)
        yield f"sum {width} {dtype}", partial(sums.pull_tile, summed, source)
    source = torch.zeros(NODES, 128, dtype=torch.bfloat16)
    yield "sum with self-loops", partial(sums.pull_tile, tile, source)
    if which == "sums":
        return
    yield "masks", partial(dropout.keep_mask, torch.zeros(NODES, 100), key=1 << 100, threshold=1 << 31, row_start=4)
    ends = torch.zeros(3, 100, dtype=torch.int64)
    yield "masks of edges", partial(dropout.keep_edges, EdgeDropout(0.5, 1, 2, 3), *ends, 4)
    for width, dtype in [(64, torch.float32), *((width, dtype) for width in WIDE for dtype in TYPES if which == "all")]:
        source, target = torch.zeros(NODES, width, dtype=dtype), torch.zeros(NODES, 2 * width)
        yield f"maximum {width} {dtype}", partial(maximum.pull_maxima, tile, source, keep=True)
        named: dict[str, Any] = {"target_NK": target, "source_RW": source}
        yield f"maximum {width} {dtype}", partial(maximum.pull_sources, tile, **named)
    heads = 2
    for channels in WIDE if which == "all" else WIDE[:1]:
        yield from attentions(tile, heads, channels, which)
        for dtype in TYPES:
            functions = edge_functions(heads, channels, dtype)
            if which != "all":
                functions = functions[dtype is torch.bfloat16 :: 2]
            for function, columns, features, dropped in functions:
                extras = f"{', features' if features else ''}{', dropout' if dropped else ''}"
                label = f"{type(function).__name__}{extras} {channels} {dtype}"
                given = function, columns, features, dropped, tile, heads, channels, dtype
                yield label, partial(pull_edges, *given)
        yield f"GINE, features {channels}", partial(rectify, stored, channels)


def attentions(tile: TileEdges, heads: int, channels: int, which: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """GAT's."""
    for dtype in TYPES:
        source = torch.zeros(NODES, heads * (channels + 1), dtype=dtype)
        target = torch.zeros(NODES, heads * (channels + 3), dtype=dtype)
        a_dst = torch.zeros(NODES, heads)
        masks = (None, EdgeDropout(0.5, 1, 2, 3))
        for dropped in masks if which == "all" else masks[dtype is torch.bfloat16 :][:1]:
            label = f"attention{'' if dropped is None else ' with dropout'} {channels} {dtype}"
            layer = GatHeads(range(heads), 0.2, dropped)
            named: dict[str, Any] = {"source_NS": source, "a_dst_RG": a_dst, "keep": True}
            yield label, partial(gat.attend, layer, tile, **named)
            named = {"target_NS": target, "source_RS": source}
            yield label, partial(gat.pull_sources, layer, tile, **named)
    gradient, kept = torch.zeros(NODES, heads * channels), torch.zeros(NODES, heads * (2 * channels + 2))
    yield f"attention's upstream {channels}", partial(gat.upstream, gradient, kept, a_dst)


def rectify(tile: TileEdges, width: int) -> None:
    """GINE's sum, and its gradients."""
    source = torch.zeros(NODES, width)
    tile = replace(tile, features_EK=torch.zeros(EDGES, 5))
    terms = EdgeTerms(range(width), torch.float32, torch.zeros(5, width), torch.zeros(width))
    messages = EdgeMessages(Rectified(), tile, terms)
    nothing, layout = source[:, :0], TargetLayout(width, 0, 1, 0)
    named: dict[str, Any] = {"source_NW": source, "target_RV": nothing}
    edge_function.pull_messages(messages, columns=width, **named)
    edge_function.pull_source_gradients(messages, source_RW=source, target_NP=source, layout=layout)
    edge_function.pull_target_gradients(messages, upstream_R=Upstream(source, None), with_map=True, **named)


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
    dtype: torch.dtype,
) -> None:
    """Forward, and backward in either direction."""
    source, target = (torch.zeros(NODES, heads * width, dtype=dtype) for width in columns[:2])
    terms = None
    if features:
        tile = replace(tile, features_EK=torch.zeros(EDGES, features))
        weight = torch.zeros(features, heads * columns[2])
        terms = EdgeTerms(range(heads), torch.float32, weight, loop_RK=torch.zeros(NODES, features))
    messages = EdgeMessages(function, tile, terms, Heads(range(heads), dropped))
    above = torch.zeros(NODES, heads * channels, dtype=dtype)
    edge_function.pull_messages(messages, source_NW=source, target_RV=target, columns=above.shape[1])
    layout = TargetLayout(heads, columns[1], channels, 2, features)
    packed = torch.zeros(NODES, layout.columns, dtype=dtype)
    edge_function.pull_source_gradients(messages, source_RW=source, target_NP=packed, layout=layout)
    edge_function.pull_target_gradients(
        messages,
        source_NW=source,
        target_RV=torch.cat((target, target), dim=1) if isinstance(function, Gatv2) else target,
        upstream_R=Upstream(above, torch.zeros(NODES, 2 * heads)),
        with_map=features > 0,
    )


def _described(kernel: Any, log: str) -> dict[str, Any]:
    """``log``: what the assembler said of it."""
    ptx = kernel.asm["ptx"]
    loads = re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return {
        "compiled_as": kernel.hash,
        "warps": kernel.metadata.num_warps,
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "shared_bytes": kernel.metadata.shared,
        "widest_load_bytes": max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0),
        "has_atomics": bool(re.search(r"\b(atom|red)\.", ptx)),
    }


if __name__ == "__main__":
    tell = names if sys.argv[2] == "names" else partial(compiled, which=sys.argv[2])
    print(json.dumps([tell(int(capability)) for capability in sys.argv[1].split(",")]))
