# SPDX-License-Identifier: Apache-2.0
"""GAT's attention on a GPU: as ``ooc.kernels.gat``; dropout's masks are the same bit for bit.

Sources may be narrower than the scalars of targets. Z is of the sources' type; what is kept for the backward pass is of
the summing type, float32 unless the sources are float64, because a coefficient depends on the difference of a score
and lse.

Shapes: N rows of a pulled matrix, R rows of the tile, G groups of the slab, heads or slices of heads, C channels of a
group; columns S of a slab are group after group, scalars beside channels.
"""

from typing import Any

from torch import Tensor

from ooc.kernels.cuda.choice import Case, Kernel
from ooc.kernels.cuda.launch import (
    Pulling,
    accumulator,
    ceil_div,
    of_dropout,
    on_device_of,
    sums_dtype,
)
from ooc.kernels.cuda.programs.gat import (
    attend_segments,
    attend_slots,
    pack_upstream,
    sources_segments,
    sources_slots,
)
from ooc.kernels.edges import TileEdges, rows_in_line
from ooc.kernels.gat import SOURCE_SCALARS, TARGET_SCALARS, GatHeads, result_columns


def attend(gat: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RG: Tensor, keep: bool) -> Tensor:
    """Forward: targets pull z and a_src over in-edges → Z [R, G·C]; with ``keep`` what the backward pass needs beside
    it, [R, G·(2C+2)]. lse is 0 where a row has no edges."""
    assert len(a_dst_RG) == tile.rows, "a program reads the scalar of every row"
    source_NS, a_dst_RG = rows_in_line(source_NS), a_dst_RG.contiguous()
    groups = len(gat.groups)
    channels = source_NS.shape[1] // groups - SOURCE_SCALARS
    dtype = sums_dtype(source_NS.dtype) if keep else source_NS.dtype
    out = source_NS.new_empty(tile.rows, groups * result_columns(channels, keep=keep), dtype=dtype)
    sizes = {"width": channels, "slot": groups * (2 * channels + 3), "across": groups}
    pulling = Pulling(Kernel.ATTEND, tile, source_NS, out, **sizes)
    columns: dict[str, Any] = {"CHANNELS": channels, "GROUPS": groups, "KEEP": keep}
    pulling.over_segments(attend_segments, a_dst_RG, **_of_layer(gat), **columns)
    pulling.over_long_rows(attend_slots, **columns)
    return out


def upstream(dz_RW: Tensor, kept_RK: Tensor, a_dst_RG: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient of Z and what the forward pass kept: what sources pull [R, G·(C+3)], and da_dst [R, G]. In one
    launch; of torch's operators it would be seven beside views, which read and write a row's columns ten times."""
    rows, groups = a_dst_RG.shape
    channels = dz_RW.shape[1] // groups
    dz_RW, kept_RK, a_dst_RG = dz_RW.contiguous(), kept_RK.contiguous(), a_dst_RG.contiguous()
    out, da_dst_RG = dz_RW.new_empty(rows, groups * (channels + TARGET_SCALARS)), dz_RW.new_empty(rows, groups)
    shape = Case(Kernel.ATTEND_SOURCES, channels, dz_RW.itemsize).usual
    if out.numel():
        with on_device_of(dz_RW):
            pack_upstream[(ceil_div(rows, shape.rows) * groups,)](
                *(dz_RW, kept_RK, a_dst_RG, out, da_dst_RG, rows),
                CHANNELS=channels,
                GROUPS=groups,
                ACCUMULATOR=accumulator(dz_RW.dtype),
                ROWS=shape.rows,
                COLUMNS=shape.columns,
                num_warps=shape.warps,
            )
    return out, da_dst_RG


def pull_sources(gat: GatHeads, tile: TileEdges, *, target_NS: Tensor, source_RS: Tensor) -> Tensor:
    """Backward: sources pull dZ with its scalars over out-edges → dz of the messages and da_src [R, G·(C+1)], of the
    sources' type. Scalars of ``target_NS`` are read as they are: in a type narrower than float32, lse is too coarse.
    """
    assert len(source_RS) == tile.rows, "a program reads every row's own"
    target_NS, source_RS = rows_in_line(target_NS), rows_in_line(source_RS)
    groups = len(gat.groups)
    channels = target_NS.shape[1] // groups - TARGET_SCALARS
    out = source_RS.new_empty(tile.rows, groups * (channels + SOURCE_SCALARS))
    sizes = {"width": channels, "slot": groups * (2 * channels + 1), "across": groups}
    pulling = Pulling(Kernel.ATTEND_SOURCES, tile, target_NS, out, **sizes)
    columns: dict[str, Any] = {"CHANNELS": channels, "GROUPS": groups, "SOURCE_STRIDE": source_RS.stride(0)}
    pulling.over_segments(sources_segments, source_RS, **_of_layer(gat), **columns)
    pulling.over_long_rows(sources_slots, source_RS, **columns)
    return out


def _of_layer(gat: GatHeads) -> dict[str, Any]:
    """What programs take of a layer, and of the slab's groups."""
    dropping = of_dropout(gat.groups.start, gat.dropout)
    return {"SLOPE": gat.negative_slope, "SLICES": gat.slices, **dropping}
