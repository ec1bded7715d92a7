# SPDX-License-Identifier: Apache-2.0
"""GAT's attention on a GPU, as ``ooc.kernels.gat``; dropout's masks are the same bit for bit.

Sources may have a narrower type than the scalars of targets. Z has the sources' type. What is kept for the backward
pass has the summing type, float32 unless the sources are float64, because a coefficient depends on the difference of a
score and lse.

Shapes: N rows of a pulled matrix, R rows of the tile, G groups of the slab (heads or slices of heads), C channels of a
group; the S columns of a slab are group after group, scalars beside channels.
"""

from torch import Tensor

from ooc.kernels.cuda.choice import Case, Kernel
from ooc.kernels.cuda.edge_function import Attention, attend_sources, attend_targets
from ooc.kernels.cuda.edge_terms import Terms
from ooc.kernels.cuda.launch import accumulator, ceil_div, on_device_of, sums_dtype
from ooc.kernels.cuda.programs.edge_gradients import pack_upstream
from ooc.kernels.edge_function import Heads
from ooc.kernels.edges import TileEdges, rows_in_line
from ooc.kernels.functions import GatWithFeatures
from ooc.kernels.gat import SOURCE_SCALARS, TARGET_SCALARS, GatHeads, result_columns


def attend(gat: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RG: Tensor, keep: bool) -> Tensor:
    """Forward: targets pull z and a_src over in-edges. Return Z [R, G·C]; with ``keep``, also what the backward pass
    needs, [R, G·(2C+2)]. lse is 0 for a row without edges."""
    assert len(a_dst_RG) == tile.rows, "a program reads the scalar of every row"
    source_NS, a_dst_RG = rows_in_line(source_NS), a_dst_RG.contiguous()
    channels = source_NS.shape[1] // len(gat.groups) - SOURCE_SCALARS
    dtype = sums_dtype(source_NS.dtype) if keep else source_NS.dtype
    out = source_NS.new_empty(tile.rows, len(gat.groups) * result_columns(channels, keep=keep), dtype=dtype)
    layer, made = _layer(gat, channels), Terms.of(None, tile, a_dst_RG)
    attend_targets(Kernel.ATTEND, layer, made, tile, source_NS, a_dst_RG, out, keep=keep)
    return out


def upstream(dz_RW: Tensor, kept_RK: Tensor, a_dst_RG: Tensor) -> tuple[Tensor, Tensor]:
    """Return what sources pull [R, G·(C+3)], and da_dst [R, G], from the gradient of Z and what the forward pass kept.
    It is one launch; torch's operators would need seven, beside views, and read and write a row's columns ten times."""
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
    """Backward: sources pull dZ with its scalars over out-edges. Return dz of the messages and da_src [R, G·(C+1)] in
    the sources' type. The scalars of ``target_NS`` are read as they are: in a type narrower than float32, lse is too
    coarse."""
    assert len(source_RS) == tile.rows, "a program reads every row's own"
    layer = _layer(gat, target_NS.shape[1] // len(gat.groups) - TARGET_SCALARS)
    return attend_sources(Kernel.ATTEND_SOURCES, layer, Terms.of(None, tile, source_RS), tile, target_NS, source_RS)


def _layer(gat: GatHeads, channels: int) -> Attention:
    """Return what programs take of a layer and of the slab's groups."""
    assert gat.negative_slope is not None, "signed coefficients are the processor's"
    function = GatWithFeatures(len(gat.groups), gat.negative_slope)
    return Attention.of(function, Heads(gat.groups, gat.dropout), channels, gat.slices)
