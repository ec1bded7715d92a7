# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.gat``'s pulls as compiled loops.

Sources of GAT with features of edges, which are terms of scores, pull by the same loop. Shapes as in that module; E
edges at a time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.kernels.compiled.lanes import NBYTES, exp, fma, load, number, spread, store, total, where_positive
from ooc.kernels.compiled.loops import (
    EDGES,
    TAKEN,
    Walk,
    array,
    clear,
    compiled,
    computed,
    gather,
    matrices,
    part,
    pull,
    pull_number,
)
from ooc.kernels.compiled.softmax import add_weighted, begin, drop, finish, leaky, multiply, tanh, weigh
from ooc.kernels.compiled.terms import Terms, read
from ooc.kernels.edges import TileEdges
from ooc.kernels.gat import SOURCE_SCALARS, TARGET_SCALARS, GatHeads, result_columns
from ooc.kernels.tensors import typed
from ooc.plan.workload import Direction

Matrix = npt.NDArray[Any]


def attend(heads: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RG: Tensor, keep: bool) -> Tensor:
    """As ``gat.attend``."""
    groups, slices, dtype = len(heads.groups), heads.together, computed(source_NS)
    channels = source_NS.shape[1] // groups - SOURCE_SCALARS
    out = torch.empty(len(a_dst_RG), groups * result_columns(channels, keep=keep), dtype=dtype)
    walk, terms = _walk(heads, tile, source_NS, Direction.IN), Terms.of(None, tile, source_NS)
    numbers = groups, slices, channels, *_sign_and_slope(heads), keep
    _attend(walk, terms, array(source_NS), array(typed(a_dst_RG, dtype)), numbers, matrices(walk, 4), array(out))
    return out


def pull_sources(heads: GatHeads, tile: TileEdges, *, target_NS: Tensor, source_RS: Tensor) -> Tensor:
    """As ``gat.pull_sources``."""
    own = typed(source_RS, computed(target_NS))
    out = torch.empty_like(own, memory_format=torch.contiguous_format)
    walk, terms = _walk(heads, tile, target_NS, Direction.OUT), Terms.of(None, tile, target_NS)
    numbers = len(heads.groups), heads.together, *_sign_and_slope(heads), 0, 1
    pull_rows(walk, terms, array(target_NS), array(own), numbers, array(out))
    return out


def pull_rows(
    walk: Walk, terms: Terms, target_NS: Matrix, source_RS: Matrix, numbers: tuple[Any, ...], out_RS: Matrix
) -> None:
    """As ``pull_sources``, with ``terms`` of scores. ``numbers``: groups, how many of them share a head's scores,
    ``_sign_and_slope`` them, and which columns of a group hold a_dst and dZ (lse and D follow it)."""
    d_GE = np.empty((numbers[0], EDGES), out_RS.dtype)
    _pull_sources(walk, terms, target_NS, source_RS, numbers, (*matrices(walk, 3), d_GE), out_RS)


def upstream(dz_RW: Tensor, kept_RK: Tensor, a_dst_RG: Tensor) -> tuple[Tensor, Tensor]:
    """As ``gat.upstream``."""
    (rows, groups), dtype = a_dst_RG.shape, kept_RK.dtype
    channels = dz_RW.shape[1] // groups
    out_RP = torch.empty(rows, groups * (channels + TARGET_SCALARS), dtype=dtype)
    da_dst_RG = torch.empty(rows, groups, dtype=dtype)
    given = (array(typed(one, dtype)) for one in (dz_RW, kept_RK, a_dst_RG))
    _upstream(*given, channels, array(out_RP), array(da_dst_RG))
    return out_RP, da_dst_RG


def _sign_and_slope(heads: GatHeads) -> tuple[bool, float]:
    """Return whether coefficients are signed, and the slope for negative scores if they are not."""
    return heads.negative_slope is None, heads.negative_slope or 0.0


def _walk(heads: GatHeads, tile: TileEdges, pulled: Tensor, direction: Direction) -> Walk:
    first, count = heads.groups.start // heads.slices, len(heads.groups) // heads.together
    return Walk.over(tile, pulled, range(first, first + count), heads.dropout, direction)


@compiled
def _attend(walk, terms, source_NS, a_dst_RG, numbers, given, out_RW):
    groups, slices, channels, is_signed, given_slope, keep = numbers
    dtype, lanes, width = a_dst_RG.dtype, NBYTES // a_dst_RG.itemsize, out_RW.shape[1] // groups
    heads, brought, slope = groups // slices, channels + 1, dtype.type(given_slope)
    score_HE, weight_HE, sloped_HE, softmax_HE = given
    for row in range(len(a_dst_RG)):
        clear(out_RW, row)
        begin(softmax_HE)
        for head in range(heads):
            softmax_HE[head, 2] = 0
        while gather(walk, row):
            count = walk.at[TAKEN]
            add_scalars(walk, terms, source_NS, a_dst_RG, row, (slices * brought, channels, slices, 0), score_HE, count)
            for head in range(heads):
                shrink = dtype.type(1)
                if is_signed:
                    _sign(score_HE, weight_HE, sloped_HE, head, count)
                else:
                    leaky(score_HE, weight_HE, head, count, slope)
                    shrink = weigh(weight_HE, head, count, softmax_HE)
                if keep and not is_signed:
                    _slope(score_HE, weight_HE, sloped_HE, head, count, slope, shrink, softmax_HE)
                drop(walk, sloped_HE, head, count if keep else 0)
                drop(walk, weight_HE, head, count)
                for group in range(head * slices, (head + 1) * slices):
                    first, at = group * brought, group * width
                    if not keep:
                        add_weighted(walk, source_NS, first, channels, weight_HE, head, count, out_RW, row, at, shrink)
                        continue
                    for channel in range(0, channels, 2 * lanes):  # two registers, so that no sum waits for itself
                        here, end, z_at, z_end = at + channel, at + channels, first + channel, first + channels
                        sloped_at, sloped_end = here + channels + 1, end + channels + 1
                        has_other = channel + lanes < channels
                        sums = load(out_RW, row, here, end) * shrink
                        others = load(out_RW, row, here + lanes, end) * shrink
                        sloped_sums = load(out_RW, row, sloped_at, sloped_end) * shrink
                        sloped_others = load(out_RW, row, sloped_at + lanes, sloped_end) * shrink
                        for edge in range(count):
                            weight, sloped = spread(weight_HE[head, edge]), spread(sloped_HE[head, edge])
                            z = pull(walk, source_NS, edge, z_at, z_end)
                            sums, sloped_sums = fma(weight, z, sums), fma(sloped, z, sloped_sums)
                            if has_other:
                                z = pull(walk, source_NS, edge, z_at + lanes, z_end)
                                others, sloped_others = fma(weight, z, others), fma(sloped, z, sloped_others)
                        store(out_RW, row, here, end, sums)
                        store(out_RW, row, here + lanes, end, others)
                        store(out_RW, row, sloped_at, sloped_end, sloped_sums)
                        store(out_RW, row, sloped_at + lanes, sloped_end, sloped_others)
        for group in range(0 if is_signed else groups):
            head, at, weights = group // slices, group * width, softmax_HE[group // slices, 1]
            lse = finish(softmax_HE, head, out_RW, row, at, channels)
            if keep and weights != 0:
                multiply(out_RW, row, at + channels + 1, channels, 1 / weights)
                out_RW[row, at + channels], out_RW[row, at + width - 1] = lse, softmax_HE[head, 2] / weights


@part
def add_scalars(walk, terms, near_RW, own_RW, row, columns, score_HE, count):
    """Compute the arguments of the leaky rectifier, for all heads. ``columns``: columns of a head and which of them is
    added, for neighbours and for the row."""
    near_columns, near_column, own_columns, own_column = columns
    for head in range(len(score_HE)):
        place, own = head * near_columns + near_column, own_RW[row, head * own_columns + own_column]
        for edge in range(count):
            score = pull_number(walk, near_RW, edge, place) + own
            for feature in range(len(terms.weight_KT)):
                score += terms.feature_KE[feature, edge] * terms.weight_KT[feature, head]
            score_HE[head, edge] = score


@part
def _sign(score_HE, weight_HE, sloped_HE, head, count):
    """Compute signed coefficients of scores, and their derivatives."""
    one = spread(score_HE.dtype.type(1))
    for edge in range(0, count, NBYTES // score_HE.itemsize):
        weight = tanh(load(score_HE, head, edge, count), one)
        store(weight_HE, head, edge, count, weight)
        store(sloped_HE, head, edge, count, one - weight * weight)


@part
def _slope(score_HE, weight_HE, sloped_HE, head, count, slope, shrink, softmax_HE):
    """Multiply weights by the slope where scores are not positive, and add them to their sum so far."""
    sums = spread(score_HE.dtype.type(0))
    for edge in range(0, count, NBYTES // score_HE.itemsize):
        weight = load(weight_HE, head, edge, count)
        sloped = where_positive(load(score_HE, head, edge, count), weight, weight * slope)
        store(sloped_HE, head, edge, count, sloped)
        sums = sums + sloped
    softmax_HE[head, 2] = softmax_HE[head, 2] * shrink + total(sums)


@compiled
def _upstream(dz_RW, kept_RK, a_dst_RG, channels, out_RP, da_dst_RG):
    dtype, lanes = kept_RK.dtype, NBYTES // kept_RK.itemsize
    for row in range(len(kept_RK)):
        for group in range(a_dst_RG.shape[1]):
            at, kept, out = group * channels, group * 2 * (channels + 1), group * (channels + TARGET_SCALARS)
            slope_at = kept + channels + 1
            d = slope_d = spread(dtype.type(0))
            for begin_at in range(0, channels, lanes):
                dz = load(dz_RW, row, at + begin_at, at + channels)
                d = fma(dz, load(kept_RK, row, kept + begin_at, kept + channels), d)
                slope_d = fma(dz, load(kept_RK, row, slope_at + begin_at, slope_at + channels), slope_d)
                store(out_RP, row, out + 1 + begin_at, out + 1 + channels, dz)
            of_score = total(d)
            da_dst_RG[row, group] = total(slope_d) - of_score * kept_RK[row, slope_at + channels]
            out_RP[row, out] = a_dst_RG[row, group]
            out_RP[row, out + channels + 1] = kept_RK[row, kept + channels]
            out_RP[row, out + channels + 2] = of_score


@compiled
def _pull_sources(walk, terms, target_NS, source_RS, numbers, given, out_RS):
    groups, slices, is_signed, given_slope, place, above = numbers
    dtype, lanes, width = source_RS.dtype, NBYTES // source_RS.itemsize, source_RS.shape[1] // groups
    heads, channels, packed, slope = groups // slices, width - 1, target_NS.shape[1] // groups, dtype.type(given_slope)
    near_E, (score_HE, weight_HE, sloped_HE, d_GE) = walk.near_E, given
    for row in range(len(source_RS)):
        clear(out_RS, row)
        while gather(walk, row):
            count = walk.at[TAKEN]
            read(terms, walk, count)
            columns = slices * packed, place, slices * width, channels
            add_scalars(walk, terms, target_NS, source_RS, row, columns, score_HE, count)
            for head in range(heads):
                for edge in range(count):
                    weight_HE[head, edge] = number(target_NS, near_E[edge], head * slices * packed + above + channels)
            for group in range(groups):
                for edge in range(count):
                    d_GE[group, edge] = number(target_NS, near_E[edge], group * packed + above + channels + 1)
            for head in range(heads):
                if is_signed:
                    _sign(score_HE, weight_HE, sloped_HE, head, count)
                for edge in range(0, 0 if is_signed else count, lanes):
                    score = load(score_HE, head, edge, count)
                    share = exp(where_positive(score, score, score * slope) - load(weight_HE, head, edge, count))
                    sloped = where_positive(score, share, share * slope)
                    for group in range(head * slices, (head + 1) * slices):
                        out_RS[row, (group + 1) * width - 1] -= total(load(d_GE, group, edge, count) * sloped)
                    store(weight_HE, head, edge, count, share)
                    store(sloped_HE, head, edge, count, sloped)
                drop(walk, weight_HE, head, count)
                drop(walk, sloped_HE, head, count)
                for group in range(head * slices, (head + 1) * slices):
                    products, first = spread(dtype.type(0)), group * packed + above
                    for channel in range(0, channels, 2 * lanes):
                        at, end = group * width + channel, group * width + channels
                        dz_at, dz_end, has_other = first + channel, first + channels, channel + lanes < channels
                        sums, others = load(out_RS, row, at, end), load(out_RS, row, at + lanes, end)
                        sloped_sums = sloped_others = spread(dtype.type(0))
                        for edge in range(count):
                            weight, sloped = spread(weight_HE[head, edge]), spread(sloped_HE[head, edge])
                            dz = pull(walk, target_NS, edge, dz_at, dz_end)
                            sums, sloped_sums = fma(weight, dz, sums), fma(sloped, dz, sloped_sums)
                            if has_other:
                                dz = pull(walk, target_NS, edge, dz_at + lanes, dz_end)
                                others, sloped_others = fma(weight, dz, others), fma(sloped, dz, sloped_others)
                        store(out_RS, row, at, end, sums)
                        store(out_RS, row, at + lanes, end, others)
                        products = fma(sloped_sums, load(source_RS, row, at, end), products)
                        products = fma(sloped_others, load(source_RS, row, at + lanes, end), products)
                    out_RS[row, (group + 1) * width - 1] += total(products)
